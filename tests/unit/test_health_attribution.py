"""Causes of a lowered clock; no GPU is blamed for its facility. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.health_site import Ward, fault, on
from twin.contracts import (
    BY_FACILITY,
    BY_ITSELF,
    BY_POWER,
    BY_WHOM_IS_UNKNOWN,
    DEGRADED,
    HEALTHY,
    NOT_LOWERED,
    WATCH,
    Fault,
    action,
)

N = 144
BITS, HEAT_NS, POWER_NS = "gpu.clock_event_bits", "gpu.throttle_thermal_ns", "gpu.throttle_power_ns"
RACK = list(range(72))


def lowered(ward: Ward, gpu: int = 5) -> int:
    return int(ward.verdicts.health("gpu").lowered[gpu])


@pytest.mark.parametrize(("bits", "gpus", "whose"), [
    (0x0, [5], NOT_LOWERED),
    (0x1, [5], NOT_LOWERED),  # idle
    (0x2, [5], NOT_LOWERED),  # the clocks that an application asked for
    (0x4, [5], BY_POWER),
    (0x80, [5], BY_POWER),
    (0x88, [5], BY_POWER),  # a brake slows the hardware
    (0x8, [5], BY_ITSELF),
    (0x20, [5], BY_ITSELF),
    (0x40, [5], BY_ITSELF),
    (0x48, [5], BY_ITSELF),
    (0xC8, [5], BY_ITSELF),  # heat as well
    (0x48, [5, 6], BY_ITSELF),
    (0x48, list(range(18)), BY_FACILITY),  # a quarter of its rack
    (0x48, RACK, BY_FACILITY),
    (0x4, RACK, BY_POWER),
])  # fmt: skip
def test_by_bits_and_neighbours(bits: int, gpus: list[int], whose: int) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look({BITS: on(N, gpus, bits)})
    assert lowered(ward) == whose
    assert lowered(ward, 100) == NOT_LOWERED


CAUSES = [
    fault("pump_trip", "cdu", 0),
    fault("branch_blocked", "rack", 0),
    fault("heat_wave", "site", 0),
    fault("tray_blocked", "node", 1),
    fault("feed_lost", "feeder", 0),
    fault("grid_event", "site", 0),
]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda f: f.kind)
def test_below_a_fault_of_the_facility(cause: Fault) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look({BITS: on(N, 5, 0x48)}, faults=[cause])
    assert lowered(ward) == BY_FACILITY
    assert ward.level("gpu", 5) == HEALTHY
    assert ward.action("gpu", 5) == action("check_facility")


def test_a_feed_that_stays_lost_is_no_excuse_for_long() -> None:
    """With two feeds a rack runs for weeks on one, and its GPUs may fail meanwhile."""
    ward = Ward(two_racks())
    ward.look()
    lost = fault("feed_lost", "feeder", 0)
    ward.look({BITS: on(N, 5, 0x48)}, dt_s=1700.0, faults=[lost])
    assert lowered(ward) == BY_FACILITY
    ward.look({BITS: on(N, 5, 0x48)}, dt_s=200.0, faults=[lost])
    assert lowered(ward) == BY_ITSELF


@pytest.mark.parametrize("other", [
    fault("branch_blocked", "rack", 1), fault("tray_blocked", "node", 2), fault("plate_degraded", "gpu", 5),
    fault("sensor_biased", "cdu", 0, "supply_temp_c"),
], ids=lambda f: f"{f.kind}")  # fmt: skip
def test_a_fault_elsewhere_or_of_a_sensor_is_no_excuse(other: Fault) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look({BITS: on(N, 5, 0x48)}, faults=[other])
    assert lowered(ward) == BY_ITSELF


@pytest.mark.parametrize(("key", "value", "whose"), [
    ("rack.supply_temp_c", 44.0, BY_FACILITY), ("rack.supply_temp_c", 40.0, BY_ITSELF),
])  # fmt: skip
def test_a_supply_beyond_its_guard_is_the_facility(key: str, value: float, whose: int) -> None:
    ward = Ward(two_racks())
    ward.look({key: 32.0})
    ward.look({key: on(2, 0, value, 32.0), BITS: on(N, [5, 100], 0x48)})
    assert [lowered(ward), lowered(ward, 100)] == [whose, BY_ITSELF]


def test_by_counters_where_bits_are_not_heard() -> None:
    ward = Ward(two_racks())

    def look(heat: Any, power: Any) -> None:
        ward.take({"gpu.temp_c": 60.0}, {HEAT_NS: heat, POWER_NS: power}, 10.0)
        ward.judge()

    look(0, 0)
    look(on(N, 5, 10**9), on(N, 7, 10**9))
    assert [lowered(ward, i) for i in (5, 6, 7)] == [BY_ITSELF, NOT_LOWERED, BY_POWER]


def test_without_neighbours_nobody_can_tell() -> None:
    ward = Ward(two_racks())
    ward.look({BITS: np.nan})
    ward.look({BITS: on(N, 5, 0x48, np.nan)})
    assert lowered(ward) == BY_WHOM_IS_UNKNOWN
    ward.run(5, {BITS: on(N, 5, 0x48, np.nan)})
    assert ward.evidence("gpu", 5)["lowered_unknown"].level == WATCH
    assert "thermal_slowdown" not in ward.evidence("gpu", 5)


def test_an_answer_stands_for_a_minute() -> None:
    ward = Ward(two_racks())
    ward.look({BITS: on(N, 5, 0x4)})
    ward.run(6)
    assert lowered(ward) == BY_POWER
    ward.look()
    assert lowered(ward) == NOT_LOWERED


@pytest.mark.parametrize(("on_looks", "found"), [(50, False), (60, True)])
def test_hardware_that_slows_it_for_ten_minutes(on_looks: int, found: bool) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.run(on_looks, {BITS: on(N, 5, 0x48)})
    assert ("thermal_slowdown" in ward.evidence("gpu", 5)) is found
    assert ward.level("gpu", 5) == (DEGRADED if found else WATCH)


@pytest.mark.parametrize(("dt_s", "looks"), [(5.0, 116), (60.0, 11), (300.0, 3)])
def test_ten_minutes_are_ten_minutes_whatever_the_ticks(dt_s: float, looks: int) -> None:
    ward = Ward(two_racks())
    ward.look(dt_s=dt_s)
    ward.run(looks, {BITS: on(N, 5, 0x48)}, dt_s=dt_s)
    assert "thermal_slowdown" in ward.evidence("gpu", 5)


def test_now_and_then_is_not_most_of_the_time() -> None:
    ward = Ward(two_racks())
    ward.look()
    for k in range(120):
        ward.look({BITS: on(N, 5, 0x48 if k % 2 else 0x0)})
    assert "thermal_slowdown" not in ward.evidence("gpu", 5)


def test_one_slow_moment_after_a_pause_is_not_the_whole_pause() -> None:
    ward = Ward(two_racks())
    ward.run(2)
    ward.look({BITS: on(N, 5, 0x48)}, dt_s=7200.0)
    assert "thermal_slowdown" not in ward.evidence("gpu", 5)


def test_what_the_facility_slowed_is_not_counted_against_a_gpu_later() -> None:
    ward = Ward(two_racks())
    ward.look()
    for _ in range(90):
        ward.look({BITS: on(N, 5, 0x48)}, faults=[fault("pump_trip", "cdu", 0)])
    ward.run(3, {BITS: on(N, 5, 0x48)})
    assert lowered(ward) == BY_ITSELF
    assert "thermal_slowdown" not in ward.evidence("gpu", 5)


def test_slow_by_the_facility_for_long_is_still_no_fault() -> None:
    ward = Ward(two_racks())
    ward.look()
    for _ in range(90):
        ward.look({BITS: on(N, RACK, 0x48)}, faults=[fault("pump_trip", "cdu", 0)])
    assert not ward.verdicts.health("gpu").level.any()
    assert ward.action("gpu", 5) == action("check_facility")
    assert ward.action("node", 1) == action("check_facility")
    assert ward.action("gpu", 100) == 0
