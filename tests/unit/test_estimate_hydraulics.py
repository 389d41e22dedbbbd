"""Flows and pressures: each relation in closed form, and what makes it stand out."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import two_racks
from tests.support.estimator_rig import Desk
from twin.estimation.hydraulics import BRANCH, FILTER
from twin.site import PUMP_SPEED_NOMINAL_PU, RACK_DROP_PA

K = np.array([1.1, 0.9])  # of the branches, over the design's


class Circuit:
    """Two racks on a CDU with known resistances; drop and speed are given, flows follow."""

    def __init__(self) -> None:
        self.desk = Desk(two_racks())
        self.nominal = self.desk.site.design.rack_flow_lpm
        self.branch = K * RACK_DROP_PA / self.nominal**2
        self.rng = np.random.default_rng(5)

    def noisy(self, value: Any, share: float = 0.003) -> Any:
        value = np.asarray(value, np.float64)
        return value * (1 + share * self.rng.normal(size=value.shape))

    def tick(self, drop_pa: float = RACK_DROP_PA, speed: float = PUMP_SPEED_NOMINAL_PU, *, block: float = 1.0,
             filter_: float = 1.0, **more: Any) -> None:  # fmt: skip
        flow = np.sqrt(drop_pa / (self.branch * np.array([block, 1.0])))
        whole = flow.sum()
        self.desk.tick({"rack.flow_lpm": self.noisy(flow), "rack.diff_pressure_pa": self.noisy([drop_pa] * 2),
                        "cdu.flow_lpm": self.noisy(whole), "cdu.diff_pressure_pa": self.noisy(drop_pa),
                        "cdu.filter_diff_pressure_pa": self.noisy(filter_ * 0.05 * whole**2),
                        "cdu.pump1_speed_pu": speed, "cdu.pump2_speed_pu": speed} | more)  # fmt: skip

    def z(self, name: str) -> np.ndarray:
        r = self.desk.estimator.residuals[name]
        return np.asarray(r.difference / r.sigma)


@functools.cache
def _run() -> Circuit:
    circuit = Circuit()
    for _ in range(250):
        circuit.tick()
    return circuit


def settled() -> Circuit:
    """A circuit of its own that has learned; the learning is shared by all tests."""
    return copy.deepcopy(_run())


RELATIONS = ("rack.flow_lpm/pressure", "rack.diff_pressure_pa", "cdu.flow_lpm/racks", "cdu.flow_lpm/pump",
             "cdu.filter_diff_pressure_pa")  # fmt: skip


def test_resistances_are_found() -> None:
    c = settled()
    found = c.desk.estimator.parameters
    assert found["rack.branch"].value == pytest.approx(c.branch, rel=0.01)
    assert found["rack.drop_ratio"].value == pytest.approx([1.0, 1.0], abs=0.01)
    assert found["cdu.filter"].value == pytest.approx([0.05], rel=0.02)
    assert found["cdu.flow_ratio"].value == pytest.approx([1.0], abs=0.01)
    assert found["cdu.pump_head"].value == pytest.approx([1.0], abs=0.05)


def test_a_branch_is_compared_with_what_it_was_and_not_with_a_design() -> None:
    """A valve may throttle a healthy rack to twelve times the resistance that its data sheet implies."""
    c = Circuit()
    c.branch = c.branch * np.array([12.0, 1.0])
    for _ in range(250):
        c.tick()
        z = c.z("rack.flow_lpm/pressure")
        assert not (np.abs(z) > 5.0).any()
    assert c.desk.estimator.parameters["rack.branch"].value == pytest.approx(c.branch, rel=0.01)
    c.tick(block=9.0)
    assert c.z("rack.flow_lpm/pressure")[0] < -20


def test_a_healthy_circuit_has_no_deviation_and_its_sigma_is_its_noise() -> None:
    c = settled()
    seen: dict[str, list[np.ndarray]] = {name: [] for name in RELATIONS}
    for _ in range(300):
        c.tick()
        for name in RELATIONS:
            seen[name].append(c.z(name))
    for name, z in seen.items():
        assert 0.7 < np.std(z) < 1.2, name
        assert (np.abs(z) < 4.2).all(), name


def test_flow_is_the_root_of_the_pressure_at_any_load() -> None:
    """The resistance was learned at one pressure; at half of it the expectation still holds."""
    c = settled()
    for _ in range(30):
        c.tick(RACK_DROP_PA / 2)
    r = c.desk.estimator.residuals["rack.flow_lpm/pressure"]
    assert r.expected == pytest.approx(np.sqrt(0.5 / K) * c.nominal, rel=0.01)
    assert np.abs(c.z("rack.flow_lpm/pressure")).max() < 4.0


def test_a_blocked_branch_stands_out_at_once_and_alone() -> None:
    c = settled()
    c.tick(block=9.0)
    assert c.z("rack.flow_lpm/pressure")[0] < -20
    assert abs(c.z("rack.flow_lpm/pressure")[1]) < 4
    assert abs(c.z("cdu.flow_lpm/racks")[0]) < 4
    for _ in range(300):
        c.tick(block=9.0)
    assert c.z("rack.flow_lpm/pressure")[0] < -20, "what lasts does not become normal"


def test_a_blocked_filter_and_a_meter_that_lies() -> None:
    c = settled()
    c.tick(filter_=3.0)
    assert c.z("cdu.filter_diff_pressure_pa")[0] > 10
    assert abs(c.z("cdu.flow_lpm/racks")[0]) < 4
    c = settled()
    c.tick(**{"cdu.flow_lpm": 1.2 * 2 * c.nominal[0]})
    assert c.z("cdu.flow_lpm/racks")[0] > 10


def test_a_pump_that_gives_less_than_its_speed_promises() -> None:
    c = settled()
    for _ in range(30):  # a speed that moves is doubted for some seconds
        c.tick(speed=PUMP_SPEED_NOMINAL_PU * 1.15)
    assert c.z("cdu.flow_lpm/pump")[0] < -8


def test_one_pump_alone_has_to_give_the_whole_flow() -> None:
    """Four times the loss of each of two: the expectation at one speed falls, and not by half."""
    c = settled()
    two = float(c.desk.estimator.residuals["cdu.flow_lpm/pump"].expected[0])
    c.tick(**{"cdu.pump2_speed_pu": 0.0})
    one = float(c.desk.estimator.residuals["cdu.flow_lpm/pump"].expected[0])
    assert 0.55 * two < one < 0.9 * two
    c.tick(**{"cdu.pump2_speed_pu": np.nan})
    assert np.isnan(c.desk.estimator.residuals["cdu.flow_lpm/pump"].expected[0])


@pytest.mark.long
def test_a_speed_read_in_steps_does_not_tell_of_a_worn_pump() -> None:
    """Speed in whole hundredths: within a step the head goes by three percent unseen."""

    def tick(speed: float) -> None:
        drop_pa = RACK_DROP_PA * (speed / PUMP_SPEED_NOMINAL_PU) ** 2
        c.tick(drop_pa, **{f"cdu.pump{i}_speed_pu": round(speed, 2) for i in (1, 2)})

    c, far = Circuit(), []
    for second in range(300):
        tick(0.7 + 0.02 * np.sin(second / 30.0))
    for _ in range(900):
        tick(0.7)
    for second in range(200):
        tick(0.7 + 0.0048 * np.sin(second / 10.0))
        far.append(abs(c.z("cdu.flow_lpm/pump")[0]))
    assert max(far) < 4.0


def test_a_site_without_profiles_learns_from_nothing() -> None:
    """No design says what is nominal: the first readings tell, and come into use a minute later."""
    racks = [{"name": "r[1-2]"}]
    tree = {
        "site": "lab",
        "halls": [{"name": "h", "racks": racks, "cdus": [{"name": "c", "serves": ["r[1-2]"]}]}],
    }
    desk = Desk(tree)
    readings = {"rack.flow_lpm": [50.0, 60.0], "rack.diff_pressure_pa": 80e3, "cdu.flow_lpm": 110.0,
                "cdu.diff_pressure_pa": 80e3, "cdu.filter_diff_pressure_pa": 9e3}  # fmt: skip
    desk.tick(readings)
    assert np.isnan(desk.estimator.residuals["rack.flow_lpm/pressure"].expected).all()
    desk.run(200, readings)
    r = desk.estimator.residuals["rack.flow_lpm/pressure"]
    assert r.expected == pytest.approx([50.0, 60.0], rel=1e-3)
    assert desk.estimator.residuals["cdu.flow_lpm/racks"].expected == pytest.approx([110.0], rel=1e-3)


FAR = 5.0  # sigmas, beyond any noise
SHUT_OR_OPEN = st.sampled_from([0.3, 0.5, 0.6, 0.63, 0.65, 0.7, 0.9, 1.0])


@pytest.mark.long
@settings(max_examples=10)
@given(to=SHUT_OR_OPEN, characteristic=st.sampled_from(["linear", "equal-percentage", "elsewhere"]))
def test_a_valve_that_moves_is_no_blockage(to: float, characteristic: str) -> None:
    """Whatever its characteristic, and however much of the drop is elsewhere in the branch."""
    c = settled()
    for _ in range(10):
        c.tick(**{"rack.valve_pu": 0.64})
    ratio = {"linear": to / 0.64, "equal-percentage": 50.0 ** (to - 0.64), "elsewhere": 1.0}[characteristic]
    for second in range(200):
        c.tick(block=1.0 / ratio**2, **{"rack.valve_pu": [to, 0.64]})
        z = c.z(BRANCH)
        assert np.isnan(z[0]) or abs(z[0]) < FAR, f"{z[0]} after {second} s"
        assert abs(z[1]) < FAR, "the rack beside it"
    assert c.desk.estimator.parameters["rack.branch"].value[0] == pytest.approx(
        c.branch[0] / ratio**2, rel=0.02
    )
    for _ in range(3):
        c.tick(block=9.0 / ratio**2, **{"rack.valve_pu": [to, 0.64]})
    assert c.z(BRANCH)[0] < -2 * FAR, "a blockage behind the valve that stands still is one as before"


def test_a_valve_that_opens_against_a_blockage_does_not_explain_it() -> None:
    c = settled()
    for _ in range(10):
        c.tick(**{"rack.valve_pu": 0.64})
    for _ in range(30):
        c.tick(block=9.0, **{"rack.valve_pu": 0.64})
    for _ in range(200):
        c.tick(block=9.0, **{"rack.valve_pu": [0.9, 0.64]})
        assert c.z(BRANCH)[0] < -20.0


@pytest.mark.parametrize(
    "shut", [{"rack.supply_valve_state": [0, 1]}, {"rack.liquid_isolation_state": [1, 0]}]
)
def test_a_branch_that_is_shut_is_not_blocked(shut: dict[str, Any]) -> None:
    c = settled()
    (key,) = shut
    for _ in range(10):
        c.tick(**{key: 1.0 - np.array(shut[key][:1] * 2)})
    for _ in range(150):
        c.tick(block=1e6, **shut)
        assert not abs(c.z(BRANCH)[0]) > FAR
    for _ in range(150):
        c.tick(**{key: 1.0 - np.array(shut[key][:1] * 2)})
        assert not abs(c.z(BRANCH)[0]) > FAR
    assert abs(c.z(BRANCH)[0]) < FAR, "it is compared again"


def test_the_head_that_a_clogged_filter_takes_is_known() -> None:
    circuit = settled()
    estimator = circuit.desk.estimator
    assert abs(float(estimator.clogged_pu[0])) < 1e-3
    board = estimator.board
    board.in_use[board.cells[FILTER]] *= 1.5  # as learned in months
    circuit.tick(filter_=1.5)
    whole = float(np.sqrt(RACK_DROP_PA / circuit.branch).sum())
    full_pa = float(estimator.hydraulics.shutoff_pa) * PUMP_SPEED_NOMINAL_PU**2
    assert float(estimator.clogged_pu[0]) == pytest.approx(0.5 * 0.05 * whole**2 / full_pa, rel=0.05)
