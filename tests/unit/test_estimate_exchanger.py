"""Temperatures around a CDU and its loop, against exchanger and mixing in closed form."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.estimator_rig import Desk
from twin.estimation.loops import APPROACH, FLOW, RETURN
from twin.physics import COOLANTS, film_factor, heat_rate_w_per_k, transfer

SUPPLY, COOL = 32.0, 26.0
EIGHT = ("rack.supply_temp_c", "cdu.return_temp_c", "cdu.supply_temp_c", "cdu.supply_temp_c/setpoint",
         "cdu.facility_return_temp_c", "cdu.facility_flow_lpm", "cdu.facility_supply_temp_c", APPROACH,
         RETURN, FLOW)  # fmt: skip


def tree() -> dict[str, Any]:
    """Two racks, a CDU, a loop."""
    out = two_racks()
    out["loops"] = [{"name": "l1"}]
    out["halls"][0]["cdus"][0]["loop"] = "l1"
    return out


class Cooled:
    """A steady CDU whose conductance is `factor` times the design's; its return temperature is given."""

    def __init__(self, factor: float = 1.2, bypass: float = 0.0) -> None:
        """`bypass`: what passes the CDU by, over the loop's nominal flow."""
        self.bypass = bypass
        self.desk, self.factor, self.rng = Desk(tree()), factor, np.random.default_rng(2)
        design = self.desk.site.design
        self.flow, self.clean = float(design.cdu_flow_lpm[0]), float(design.cdu_ua_w_per_k[0])

    def state(self, back: float = 45.0, valve: float = 0.5, fouled: float = 1.0) -> dict[str, Any]:
        water = 1.3 * 1.1 * self.flow * valve
        one = np.ones(1)
        warm = heat_rate_w_per_k(COOLANTS["pg25"], self.flow * one, back * one)
        cold = heat_rate_w_per_k(COOLANTS["water"], water * one, COOL * one)
        films = film_factor(water / (1.1 * self.flow) * one, one)
        across = transfer(self.factor * fouled * self.clean / films, warm, cold, back * one, COOL * one)
        supply, heated = float(across.warm_out_c[0]), float(across.cold_out_c[0])
        by = self.bypass * float(self.desk.site.design.loop_flow_lpm[0])
        return {
            "rack.flow_lpm": self.flow / 2, "rack.return_temp_c": [back + 1, back - 1],
            "rack.supply_temp_c": supply, "cdu.flow_lpm": self.flow, "cdu.return_temp_c": back,
            "cdu.supply_temp_c": supply, "cdu.facility_flow_lpm": water, "cdu.facility_valve1_pu": valve,
            "cdu.facility_supply_temp_c": COOL, "cdu.facility_return_temp_c": heated,
            "cdu.supply_temp_setpoint_c": supply, "loop.supply_temp_c": COOL, "loop.flow_lpm": water,
            "loop.return_temp_c": (water * heated + by * COOL) / (water + by), "site.outdoor_temp_c": 15.0,
        }  # fmt: skip

    def tick(
        self,
        off: dict[str, float] | None = None,
        step_k: float = 0.0,
        supply: float | None = None,
        **how: float,
    ) -> None:
        """`step_k`: in which temperatures are read; `supply`: of the loop, as its coolers make it."""
        values = self.state(**how)
        for key, value in values.items():
            more = (off or {}).get(key, 0.0)
            size = 0.03 if "temp_c" in key and "site" not in key else 0.003 * float(np.mean(value))
            values[key] = np.asarray(value) + more + size * self.rng.normal(size=np.shape(value))
        values["site.outdoor_temp_c"] = 15.0
        if supply is not None:
            values["loop.supply_temp_c"] = values["cdu.facility_supply_temp_c"] = supply
        for key in values:
            if step_k and "temp_c" in key:
                values[key] = step_k * np.rint(np.asarray(values[key]) / step_k)
        self.desk.tick(values)

    def z(self, name: str) -> np.ndarray:
        r = self.desk.estimator.residuals[name]
        return np.asarray(r.difference / r.sigma)


@functools.cache
def _run(factor: float) -> Cooled:
    rig = Cooled(factor)
    for _ in range(260):
        rig.tick()
    return rig


def settled(factor: float = 1.2) -> Cooled:
    """A rig of its own that has learned; the learning is shared by all tests."""
    return copy.deepcopy(_run(factor))


@pytest.mark.long
def test_all_relations_hold_on_a_healthy_cdu() -> None:
    c = settled()
    worst = dict.fromkeys(EIGHT, 0.0)
    for _ in range(200):
        c.tick()
        for name in EIGHT:
            worst[name] = max(worst[name], float(np.abs(c.z(name)).max()))
    for name, z in worst.items():
        assert 0.6 < z < 4.3, name


def test_coolers_that_follow_a_step_of_the_heat_late_are_no_surprise() -> None:
    """The range jumps by 40 %, and the supply is up to 0.8 K too warm until the coolers have followed it."""
    c, far = settled(), []
    for second in range(240):
        c.tick(back=52.0, supply=COOL + 0.8 * np.exp(-second / 60.0))
        far.append(float(np.abs(c.z(APPROACH)[0])))
    assert max(far) < 4.0
    steady = settled()
    for _ in range(20):
        steady.tick(supply=COOL + 0.8)
    assert steady.z(APPROACH)[0] > max(far) + 1.0, "without a move of the heat it is a cooler's fault"


@pytest.mark.long
def test_temperatures_in_whole_kelvin_that_stood_still_may_take_a_step() -> None:
    """Noise of 0.03 K is unseen within a step: what is learned there is not how sure readings are."""
    c = Cooled()
    for second in range(300):  # all of them pass some edges, so that their step is seen
        c.tick(step_k=1.0, back=45.0 + 1.5 * np.sin(second / 40.0))
    for _ in range(1500):
        c.tick(step_k=1.0, back=45.1)
    far = dict.fromkeys(EIGHT, 0.0)
    for second in range(240):
        c.tick(step_k=1.0, back=45.1 + 0.8 * np.sin(second / 40.0))
        for name in EIGHT:
            far[name] = max(far[name], float(np.abs(c.z(name)).max()))
    assert max(far.values()) < 4.3, far


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_the_conductance_is_found(factor: float) -> None:
    c = settled(factor)
    found = c.desk.estimator.parameters["cdu.ua"]
    assert found.value == pytest.approx([factor * c.clean], rel=0.05)


def test_the_expectation_follows_flow_and_return_without_new_learning() -> None:
    """Learned at one point of work, right at another: the physics carries it over."""
    c = settled()
    for _ in range(120):
        c.tick(back=41.0, valve=0.8)
    r = c.desk.estimator.residuals["cdu.supply_temp_c"]
    assert r.expected == pytest.approx([c.state(back=41.0, valve=0.8)["cdu.supply_temp_c"]], abs=0.15)
    assert abs(c.z("cdu.supply_temp_c")[0]) < 4.0


@pytest.mark.long
def test_what_passes_the_cdus_by_is_found_and_cools_their_return_more_at_part_load() -> None:
    c = Cooled(bypass=0.1)
    for _ in range(600):
        c.tick()
    assert c.desk.estimator.parameters["loop.bypass"].value == pytest.approx([0.1], abs=0.02)
    far = 0.0
    for second in range(400):  # it takes the longer to arrive the less flows
        c.tick(back=38.0, valve=0.12)
        far = max(far, float(abs(c.z(RETURN)[0]))) if second > 300 else far
    assert far < 4.0


@pytest.mark.long
def test_fouling_warms_the_supply_and_drifts_the_conductance() -> None:
    c = settled()
    for _ in range(240):
        c.tick()
    before = c.desk.estimator.parameters["cdu.ua"]
    for second in range(900):
        c.tick(fouled=1.0 - 0.25 * second / 900)
    found = c.desk.estimator.parameters["cdu.ua"]
    assert found.reference == pytest.approx(before.reference, rel=1e-9)
    assert found.drift[0] < -0.1
    assert found.confidence_pu[0] > 0.99
    c = settled()
    c.tick(fouled=0.6)
    for _ in range(40):
        c.tick(fouled=0.6)
    assert c.z("cdu.supply_temp_c")[0] > 5, "at once, it is a deviation"


@pytest.mark.parametrize(
    "sensor, off, relation",
    [
        ("cdu.supply_temp_c", 1.0, "cdu.supply_temp_c"),
        ("cdu.return_temp_c", 1.0, "cdu.return_temp_c"),
        ("cdu.facility_return_temp_c", 1.5, "cdu.facility_return_temp_c"),
        ("cdu.facility_supply_temp_c", 1.0, "cdu.facility_supply_temp_c"),
        ("cdu.facility_flow_lpm", 100.0, "cdu.facility_flow_lpm"),
        ("rack.supply_temp_c", 1.0, "rack.supply_temp_c"),
        ("loop.return_temp_c", 1.0, RETURN),
        ("loop.supply_temp_c", 1.0, APPROACH),
        ("loop.flow_lpm", 100.0, FLOW),
    ],
)
def test_a_sensor_that_lies_stands_out(sensor: str, off: float, relation: str) -> None:
    c = settled()
    for _ in range(3):
        c.tick({sensor: off})
    assert (c.z(relation) > 5).all()


def test_missing_inputs_give_no_expectation() -> None:
    c = settled()
    c.desk.tick({"cdu.facility_supply_temp_c": np.nan, "cdu.return_temp_c": np.nan})
    found = c.desk.estimator.residuals
    for name in ("cdu.supply_temp_c", "cdu.facility_return_temp_c"):
        assert np.isnan(found[name].expected).all()
        assert np.isnan(found[name].confidence_pu).all()
    assert np.isfinite(found["cdu.supply_temp_c/setpoint"].expected).all()


def test_what_was_learned_moves_with_the_devices_and_a_new_one_begins_anew() -> None:
    c = settled()
    e = c.desk.estimator
    one = {t: np.arange(n, dtype=np.int32) for t, n in c.desk.site.sizes.items()}
    moved = e.remapped(c.desk.site, one | {"rack": np.array([1, -1], np.int32)})
    assert np.array_equal(moved.parameters["cdu.ua"].value, e.parameters["cdu.ua"].value)
    assert np.isnan(moved.parameters["rack.branch"].value[1]), "no design knows it"
    e.forget("cdu", 0)
    assert e.parameters["cdu.ua"].value == pytest.approx([c.clean])
    assert np.isnan(e.parameters["cdu.ua"].reference).all()
