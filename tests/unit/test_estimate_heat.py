"""Racks' heat: a rival plant of plates and tank, the minute's rule, what a deviation is and is not."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, two_racks
from tests.support.estimator_rig import Desk
from twin.catalogue import NS
from twin.estimation.comparisons import MOVE_S
from twin.estimation.heat import CAPTURE_PRIOR, CLOSURE, PLATE_PU
from twin.estimation.readings import Lag, share_of
from twin.physics import COOLANTS, heat_rate_w_per_k
from twin.site import RACK_VOLUME_MIN

FLOW, SUPPLY = 80.0, 32.0


class Rack:
    """Two racks by small Euler steps: power -> plates -> a mixed tank that the flow passes."""

    def __init__(self, capture: float) -> None:
        desk = self.desk = Desk(two_racks())
        self.capture = capture
        self.plates_w = np.full(2, 100e3)
        self.rate = float(heat_rate_w_per_k(COOLANTS["pg25"], np.array([FLOW]), np.array([40.0]))[0])
        self.return_c = SUPPLY + capture * self.plates_w / self.rate
        self.tau_s = 60.0 * RACK_VOLUME_MIN * desk.site.design.rack_flow_lpm[0] / FLOW
        self.plate_tau_s = desk.site.design.gpu_tau_s[0]
        self.rng = np.random.default_rng(7)

    def move(self, power_w: float) -> None:
        """A second that nobody looks on."""
        for _ in range(20):
            self.plates_w += (power_w - self.plates_w) * (0.05 / self.plate_tau_s)
            aim = SUPPLY + self.capture * self.plates_w / self.rate
            self.return_c += (aim - self.return_c) * (0.05 / self.tau_s)

    def tick(self, power_w: float, off_k: float = 0.0, dt_s: float = 1.0, **more: Any) -> None:
        self.move(power_w)
        read = self.return_c + self.rng.normal(0, 0.03, 2) + np.array([off_k, 0.0])
        self.desk.tick({"rack.power_w": power_w, "rack.flow_lpm": FLOW, "rack.supply_temp_c": SUPPLY,
                        "rack.return_temp_c": read, **more}, dt_s)  # fmt: skip

    @property
    def z(self) -> np.ndarray:
        r = self.desk.estimator.residuals["rack.heat"]
        return np.asarray(r.difference / r.sigma)


@functools.cache
def _run(seconds: int) -> Rack:
    rack = settled(seconds - 50) if seconds else Rack(0.85)
    for _ in range(min(seconds, 50)):
        rack.tick(100e3)
    return rack


def settled(seconds: int) -> Rack:
    """Racks of their own after so many seconds (fifties) at 100 kW, which all tests share."""
    return copy.deepcopy(_run(seconds))


def test_a_step_of_power_is_followed_and_is_no_deviation() -> None:
    """Against another integrator: the lags are exact for steps, so the expectation moves as the rack does."""
    rack = settled(300)
    desk = rack.desk
    before = rack.return_c.copy()
    worst_k, worst_z = 0.0, 0.0
    for _ in range(60):
        rack.tick(60e3)
        r = desk.estimator.residuals["rack.heat"]
        worst_k = max(worst_k, float(np.abs(r.expected - rack.return_c).max()))
        worst_z = max(worst_z, float(np.abs(rack.z).max()))
    assert (before - rack.return_c > 5.0).all()
    assert worst_k < 0.8  # half a second of sampling, of a move of 6 K within 20 s
    assert worst_z < 4.0


def test_what_is_learned_comes_into_use_a_minute_later_and_not_before() -> None:
    rack, used = Rack(0.75), []
    for _ in range(200):
        rack.tick(100e3)
        used.append(float(rack.desk.estimator.board.parameter("rack.heat")[0]))
    first = int(np.flatnonzero(np.array(used) != CAPTURE_PRIOR)[0])
    assert MOVE_S <= first <= 3 * MOVE_S
    assert used[-1] == pytest.approx(0.75, abs=0.01)
    assert len(set(used)) <= 2 + 200 // int(MOVE_S)


def test_no_expectation_knows_a_younger_reading_of_its_own_signal() -> None:
    """A rack whose return temperature differs for a minute has the same expectations throughout."""
    ways = []
    for off_k in (0.0, 1.0):
        rack, seen = settled(150), []
        for _ in range(60):
            rack.tick(100e3, off_k)
            seen.append(float(rack.desk.estimator.residuals["rack.heat"].expected[0]))
        ways.append(seen)
    assert ways[0] == ways[1]


@pytest.mark.long
def test_a_sensor_that_lies_stays_a_deviation() -> None:
    rack = settled(400)
    assert np.abs(rack.z).max() < 4.0
    sure = np.zeros(2)
    for _ in range(600):  # as long as a noise remembers
        rack.tick(100e3, off_k=1.5)
        sure += np.abs(rack.z) > 4.0
    assert sure[0] > 590
    assert sure[1] == 0
    assert rack.desk.estimator.capture[0] == pytest.approx(0.85, abs=0.01)


def test_the_flow_that_the_heat_speaks_of() -> None:
    rack = settled(200)
    desk = rack.desk
    r = desk.estimator.residuals["rack.flow_lpm/heat"]
    assert r.expected == pytest.approx([FLOW] * 2, rel=0.02)
    rack.tick(100e3, **{"rack.flow_lpm": [40.0, FLOW]})
    r = desk.estimator.residuals["rack.flow_lpm/heat"]
    assert r.confidence_pu[0] > 0.9999
    assert r.confidence_pu[1] < 0.9999


def test_a_parameters_early_value_is_its_reference() -> None:
    found = settled(400).desk.estimator.parameters["rack.capture"]
    assert found.table == "rack"
    assert found.reference == pytest.approx([0.85, 0.85], abs=0.01)
    assert (found.confidence_pu < 0.99).all()


def test_racks_without_coolant_have_no_comparisons() -> None:
    desk = Desk(two_racks(profile="air-8gpu")).run(40, {"rack.power_w": 30e3})
    for name in ("rack.heat", "rack.flow_lpm/pressure", "rack.supply_temp_c", "cdu.supply_temp_c"):
        assert np.isnan(desk.estimator.residuals[name].confidence_pu).all()


@pytest.mark.long
def test_liquid_carries_less_of_a_rack_whose_gpus_idle() -> None:
    """Plates take nearly all that GPUs draw and a part of the rest: the share that is learned stays."""
    desk, rack_w = Desk(two_racks()), np.array([100e3, 100e3])
    design, site = desk.site.design, desk.site
    gpus = np.diff(site.gpu_start_of_node[site.node_start_of_rack])
    full_w = gpus * design.gpu_max_w
    rest = (design.capture_pu * design.rack_max_w - PLATE_PU * full_w) / (design.rack_max_w - full_w)
    rate = float(heat_rate_w_per_k(COOLANTS["pg25"], np.array([FLOW]), np.array([40.0]))[0])
    shares = []
    for gpu_pu in (0.65, 0.35):
        gpu_w = gpu_pu * rack_w
        carried_w = PLATE_PU * gpu_w + rest * (rack_w - gpu_w)
        for _ in range(900):
            desk.tick({"rack.power_w": rack_w, "rack.flow_lpm": FLOW, "rack.supply_temp_c": SUPPLY,
                       "rack.return_temp_c": SUPPLY + carried_w / rate,
                       "gpu.power_w": (gpu_w / gpus)[site.rack_of_gpu]})  # fmt: skip
            if len(shares) == 1:
                r = desk.estimator.residuals["rack.heat"]
                assert not (np.abs(r.difference) > 4.0 * r.sigma).any()
        shares.append((desk.estimator.capture.copy(), carried_w / rack_w))
    (before, one), (after, two) = shares
    assert (one - two > 0.05).all()
    assert after == pytest.approx(before, abs=0.01)


@pytest.mark.parametrize("away_s", [8, 20, 60])
def test_what_heated_a_rack_while_nobody_looked_is_unknown_for_a_while(away_s: int) -> None:
    """The load falls just before the twin is back: the water is still warm, and no sensor lies."""
    rack = settled(400)
    for second in range(away_s):
        rack.move(120e3 if second < away_s - 3 else 20e3)
    worst_z = 0.0
    for second in range(120):
        rack.tick(20e3, dt_s=away_s + 1.0 if second == 0 else 1.0)
        worst_z = max(worst_z, *(float(np.abs(rack.desk.z(k)).max()) for k in ("rack.heat", CLOSURE)))
    assert worst_z < 4.0
    for _ in range(20):  # and then all is known again
        rack.tick(20e3, off_k=1.5)
    assert np.abs(rack.z)[0] > 4.0


def test_a_lag_that_missed_some_ticks_is_as_sure_as_what_it_saw() -> None:
    """Aims of a random walk, some of them unseen: 1 sigma of the error over what the aims can be is no more
    than the unknown part; without gaps nothing is unknown."""
    rng, n, tau_s = np.random.default_rng(3), 400, np.full(400, 12.0)
    seen, whole = Lag(1, {"rack": n}, "rack"), Lag(1, {"rack": n}, "rack")
    for second in range(240):
        now = START_NS + second * NS, 1.0
        if second % 25 == 0:
            aim = rng.uniform(0.0, 1.0, (1, n))
        true = whole.toward(aim, share_of(1.0, tau_s), now)
        if second % 60 < 20 or second < 60:
            level = seen.toward(aim, share_of(1.0, tau_s), now)
            off = float(np.sqrt(np.mean((level - true) ** 2)))
            assert off <= 0.42 * float(seen.unknown.max()) + 1e-3  # two numbers in 0..1 differ by 6^-0.5
    assert (whole.unknown == 0.0).all()
