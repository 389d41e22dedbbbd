"""thermal_guard beyond caps: the seconds that GPUs have, and the orders on nodes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from policies.thermal_guard import OFF_LEAD_S, STOP_LEAD_S, Endurance, ThermalGuard
from tests.support.builders import Twin, explained, two_racks
from twin.catalogue import NS
from twin.telemetry import Held, JobStarted, OperatorRequest

CAP, POWER, SERVICE, SAVE = (
    "gpu.power_cap_w",
    "node.power_state",
    "node.service_level",
    "job.checkpoint_since_s",
)
# GB200 NVL72: 250 J/K (7 s behind 34 K at 1200 W), shutdown at 95, guard at 82
CAPACITY, SHUTDOWN_C, GUARD_C, LOW_W = 7.0 / (34.0 / 1200.0), 95.0, 82.0, 200.0
COOL = {"gpu.temp_c": 60.0, "gpu.power_w": 1000.0, "gpu.power_limit_w": 1200.0, "rack.flow_lpm": 96.0,
        "rack.supply_temp_c": 32.0, "rack.return_temp_c": 44.0, "node.power_readback_state": 0.0}  # fmt: skip
# The lowest caps have arrived
CAPPED = COOL | {"gpu.power_w": 230.0, "gpu.power_limit_w": LOW_W}


def warming(rate_k_per_s: float, first_c: float, *gpus: int, other_c: float = 60.0) -> Callable[[int], Any]:
    """Temperatures [144] at each second: these GPUs warm up from `first_c`."""

    def at(second: int) -> np.ndarray:
        out = np.full(144, other_c)
        out[list(gpus)] = first_c + rate_k_per_s * second
        return out

    return at


def guarded() -> Twin:
    twin = Twin(two_racks(), [ThermalGuard()], act=True)
    twin.run(3, COOL)
    return twin


def ordered(twin: Twin) -> dict[int, float]:
    lease = twin.lease(POWER)
    return {int(i): float(lease[i]) for i in np.flatnonzero(lease > 0)}


def one(**values: Any) -> Endurance:
    given = {"temp_c": 80.0, "power_w": 1000.0, "leaves_w": 500.0, "capacity_j_per_k": 250.0,
             "shutdown_c": 95.0} | values  # fmt: skip
    columns = {k: np.array([v], np.float64) for k, v in given.items()}
    return Endurance(gpu=np.array([0], np.int32), measured=np.array([True]), **columns)


@pytest.mark.parametrize(
    "power_w, left_s",
    [(1000.0, 13.0 / 2.0), (600.0, 13.0 / 0.4), (500.0, math.inf), (200.0, math.inf), (math.nan, math.inf)],
)
def test_the_seconds_left_follow_from_the_heat_balance(power_w: float, left_s: float) -> None:
    """13 K to the shutdown less the margin, at (P - q)/C; what cools has for ever."""
    assert one().left_s(np.array([power_w]))[0] == pytest.approx(left_s)


def test_beyond_the_shutdown_nothing_is_left() -> None:
    assert one(temp_c=96.0, leaves_w=100.0).left_s(np.array([200.0]))[0] == 0.0


def test_heat_that_leaves_is_found_and_a_cut_of_power_does_not_move_it() -> None:
    """150 W leave the plate: what is predicted for the lowest cap before the cut comes true after it."""
    twin, temp_c, power_w, left = guarded(), 60.0, 1000.0, []
    for second in range(12):
        if second == 6:
            power_w = 230.0
        temp_c += (power_w - 150.0) / CAPACITY
        read = COOL | {"gpu.temp_c": temp_c, "gpu.power_w": power_w, "rack.flow_lpm": 0.0}
        twin.tick(read | {"gpu.power_limit_w": LOW_W if second >= 6 else 1200.0})
        memory = twin.engine.memory["thermal_guard"]
        left.append(float(memory["leaves_w"][0]))
    assert left[4:] == pytest.approx([150.0] * 8, abs=60.0)
    assert abs(left[6] - left[5]) < 40.0, "the cut itself is no news of the plate"


def test_a_node_that_warms_at_its_lowest_caps_is_stopped_and_then_switched_off() -> None:
    """0.4 K/s to 95 degC: each order comes at its lead, for the node alone whose GPUs warm up."""
    twin, temps = guarded(), warming(0.4, 76.0, 0, 1)
    twin.tick(COOL, JobStarted(job="j", nodes=("r2/node0",), kind="training"))  # so that jobs are known
    first: dict[float, float] = {}
    for second in range(60):
        twin.tick(CAPPED | {"gpu.temp_c": temps(second)})
        assert set(ordered(twin)) <= {0}
        if 0 in ordered(twin):
            left_s = (SHUTDOWN_C - 2.0 - float(temps(second)[0])) / 0.4
            first.setdefault(ordered(twin)[0], left_s)
            assert twin.lease(SERVICE)[0] == 3.0, "nothing new shall start there"
    assert list(first) == [1.0, 2.0]
    # No order comes below the guard, whatever lies ahead
    assert first[1.0] == pytest.approx(min(STOP_LEAD_S, (SHUTDOWN_C - 2.0 - GUARD_C) / 0.4), abs=4.0)
    assert first[2.0] == pytest.approx(OFF_LEAD_S, abs=3.0)


@pytest.mark.parametrize(
    "name, read",
    [
        ("one GPU alone", lambda s: CAPPED | {"gpu.temp_c": warming(0.5, 78.0, 5)(s)}),
        ("a flow meter alone", lambda s: CAPPED | {"rack.flow_lpm": [0.0, 96.0]}),
        ("hot, but cooling", lambda s: CAPPED | {"gpu.temp_c": warming(-0.1, 90.0, 0, 1, 2)(s)}),
        ("hot and steady", lambda s: CAPPED | {"gpu.temp_c": warming(0.0, 88.0, 0, 1, 2)(s)}),
        ("silent", lambda s: {k: v for k, v in CAPPED.items() if k != "gpu.temp_c"}),
        ("a step of the load", lambda s: COOL | {"gpu.temp_c": warming(3.5, 40.0, *range(72))(min(s, 10))}),
    ],
)
def test_what_moves_no_switch(name: str, read: Callable[[int], Any]) -> None:
    twin = guarded()
    for second in range(40):
        twin.tick(read(second))
        assert not ordered(twin), (name, second)


def hot(twin: Twin, seconds: int = 45) -> Twin:
    """Node 0 warms up until it is switched off."""
    temps = warming(0.4, 76.0, 0, 1)
    for second in range(seconds):
        twin.tick(CAPPED | {"gpu.temp_c": temps(second)})
    assert ordered(twin) == {0: 2.0}
    return twin


OFF = CAPPED | {"node.power_readback_state": [2.0] + [0.0] * 35, "gpu.power_w": [0.0] * 4 + [230.0] * 140}


def test_it_stays_off_until_people_switch_it_on_and_is_then_left_to_them() -> None:
    twin = hot(guarded())
    twin.run(400, OFF | {"gpu.temp_c": 50.0})
    assert ordered(twin) == {0: 2.0}, "cool again is no reason to switch it on"
    twin.run(2, COOL)  # people did
    again = 0
    for _ in range(400):
        twin.tick(COOL)
        again += sum(not c.final for c in twin.commands(POWER))
    assert again == 0, "no second order without new evidence"
    hot(twin)


def test_a_request_of_people_brings_a_cool_node_back() -> None:
    twin = Twin(two_racks(), [ThermalGuard(), *_operator()], act=True)
    twin.run(3, COOL)
    hot(twin)
    twin.run(30, OFF | {"gpu.temp_c": 50.0})
    ask = OperatorRequest(
        id="on", author="ann", reason="the pump is mended", control=POWER, names=("r1/node0",),
        lo=0.0, hi=0.0, want=0.0, expires_ns=twin.now_ns + 600 * NS,
    )  # fmt: skip
    twin.tick(OFF | {"gpu.temp_c": 50.0}, ask)
    twin.run(2, OFF | {"gpu.temp_c": 50.0})
    assert twin.lease(POWER)[0] == 0.0


def _operator() -> list[Any]:
    from policies.operator import Operator

    return [Operator()]


def test_a_hold_lets_the_orders_pass() -> None:
    twin = guarded()
    twin.tick(COOL, Held(author="ann"))
    hot(twin)


def test_a_site_that_does_not_allow_it_is_not_switched_off() -> None:
    twin = Twin(two_racks(controls={POWER: {"max": 0}}), [ThermalGuard()], act=True)
    twin.run(3, COOL)
    temps = warming(0.4, 76.0, 0, 1)
    for second in range(45):
        twin.tick(CAPPED | {"gpu.temp_c": temps(second)})
    assert ordered(twin) == {}
    assert twin.lease(CAP)[0] == LOW_W


@pytest.mark.parametrize("save_s, saves", [(0.0, True), (10.0, True), (300.0, False)])
def test_jobs_save_if_they_can_in_the_time_that_is_left(save_s: float, saves: bool) -> None:
    twin = guarded()
    twin.tick(COOL, JobStarted(job="j", nodes=("r1/node0", "r1/node1"), kind="training",
                               checkpoint_save_s=save_s))  # fmt: skip
    temps = warming(0.2, 83.0, 0, 1)
    asked = False
    for second in range(12):
        twin.tick(CAPPED | {"gpu.temp_c": temps(second)})
        asked |= bool(np.isfinite(twin.lease(SAVE)).any())
    assert asked is saves


def test_the_explanation_says_how_long_and_what_next() -> None:
    twin, temps = guarded(), warming(0.4, 76.0, 0, 1)
    for second in range(30):
        twin.tick(CAPPED | {"gpu.temp_c": temps(second)})
    found = explained(twin, "thermal_guard")
    (row,) = found.table("dangers")
    assert row["node"] == "lab/h/r1/node0"
    assert row["low_s"] == pytest.approx((SHUTDOWN_C - 2.0 - float(temps(29)[0])) / 0.4, rel=0.25)
    assert row["action"] == "stop its system"
    assert found.figure("endangered_nodes") == 1
