"""Common mode: what one gateway reads wrong of many devices at once is not believed; what is true is."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, two_racks
from twin.diagnosis.common_mode import CommonMode
from twin.diagnosis.signature import TickValues

KEPT: dict[str, Any] = {
    "gpu.power_w": 900.0, "gpu.temp_c": 55.0, "node.power_w": 5000.0, "rack.power_w": 92e3,
    "rack.supply_temp_c": 25.0, "rack.return_temp_c": 35.0, "rack.flow_lpm": 100.0,
    "cdu.supply_temp_c": 25.0, "cdu.flow_lpm": 200.0, "feeder.power_w": 92e3,
}  # fmt: skip
LEARNED_S, LIE_S = 130, 8
COOLANT = ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm", "cdu.supply_temp_c", "cdu.flow_lpm")
DRAWN = ("gpu.power_w", "node.power_w", "rack.power_w", "feeder.power_w")
BMS = (*COOLANT, "rack.power_w", "feeder.power_w")


@cache
def learned() -> Twin:
    pod = Twin(two_racks())
    pod.run(LEARNED_S, KEPT)
    return pod


def doubted(
    changes: dict[str, Any], seconds: int = LIE_S, last: dict[str, Any] | None = None
) -> set[tuple[str, int]]:
    """Readings that are not believed after so many seconds with these values, and one with the last."""
    pod = copy.deepcopy(learned())
    pod.run(seconds, KEPT | changes)
    pod.run(last is not None, KEPT | changes | (last or {}))
    reconciliation = pod.engine.diagnosis.reconciliation
    out = set[tuple[str, int]]()
    for key in ("rack.flow_lpm", "cdu.flow_lpm", "feeder.power_w"):
        found = reconciliation.of(key, pod.now_ns)
        out |= {(key, k) for k in (found[0].tolist() if found is not None else ())}
    return out


def times(factor: float, *keys: str) -> dict[str, Any]:
    return {key: factor * KEPT[key] for key in keys}


@pytest.mark.parametrize("factor", [0.0, 0.1])
def test_a_gateway_that_loses_its_scale_takes_no_flow_away(factor: float) -> None:
    flows = {("rack.flow_lpm", 0), ("rack.flow_lpm", 1), ("cdu.flow_lpm", 0)}
    assert doubted(times(factor, *BMS), 1) >= flows
    assert doubted(times(factor, *BMS)) >= flows


def test_the_heat_of_gpus_is_believed_before_a_gateway_is_doubted() -> None:
    hot = times(0.1, *BMS) | {"gpu.temp_c": 63.0}
    assert not any(key.endswith("flow_lpm") for key, _ in doubted(hot))


def test_flows_that_are_lost_at_their_temperatures_are_believed() -> None:
    assert doubted(times(0.0, "rack.flow_lpm", "cdu.flow_lpm")) == set()


@pytest.mark.parametrize(("factor", "who"), [(10.0, 2), (1.5, 0), (0.1, 2), (0.0, 2)])
def test_all_feeders_that_lie_are_doubted_where_no_sum_of_loads_bears_them_out(
    factor: float, who: int
) -> None:
    assert len(doubted(times(factor, "feeder.power_w"))) == who


def test_a_feed_that_is_lost_and_one_that_carries_all_are_believed() -> None:
    assert doubted({"feeder.power_w": np.array([0.0, 184e3])}) == set()


@pytest.mark.parametrize("factor", [0.1, 2.0])
def test_a_load_that_moves_is_believed(factor: float) -> None:
    assert doubted(times(factor, *DRAWN)) == set()
    late = dict.fromkeys(("feeder.power_w",), KEPT["feeder.power_w"])
    assert doubted(times(factor, *DRAWN) | late, 3) == set()


def test_meters_of_cdus_that_leave_their_racks_are_doubted_after_some_seconds() -> None:
    lie = times(0.1, "cdu.flow_lpm")
    assert doubted(lie, 9) == {("cdu.flow_lpm", 0)}
    assert doubted(lie, 9, {"rack.flow_lpm": np.array([np.nan, 100.0])}) == {("cdu.flow_lpm", 0)}
    assert doubted(times(0.1, "cdu.flow_lpm", "rack.flow_lpm"), 9) == set()


WARMER = {key: KEPT[key] + 12.0 for key in ("rack.supply_temp_c", "rack.return_temp_c", "cdu.supply_temp_c")}
NO_FLOW = times(0.0, "rack.flow_lpm", "cdu.flow_lpm")
SILENT = dict.fromkeys(BMS, np.nan)


@pytest.mark.parametrize(("racks", "by_k"), [(2, 6.0), (2, np.nan), (None, np.nan)])
def test_one_gpu_that_warms_up_or_falls_silent_has_a_loss_of_flow_believed(
    racks: int | None, by_k: float
) -> None:
    """The first GPU of each rack, or all GPUs."""
    gpu_c = np.full(learned().site.sizes["gpu"], KEPT["gpu.temp_c"])
    gpu_c[:: len(gpu_c) // racks if racks else 1] += by_k
    found = doubted(times(0.1, *BMS) | {"gpu.temp_c": gpu_c}, 2)
    assert not any(key.endswith("flow_lpm") for key, _ in found)


def test_racks_without_a_sensor_of_their_supply_warm_up_as_well() -> None:
    """Their CDU's supply leaps; what its flow was holds no longer than until their GPUs are warm."""
    bare = dict.fromkeys(("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm"), np.nan)
    tree = two_racks()
    tree["halls"][0]["cdus"] = [{"name": f"cdu{k}", "serves": [f"r{k}"]} for k in (1, 2)]
    pod = Twin(tree)
    common, state = CommonMode(pod.site), pod.engine.state
    found = []
    for second in range(30):
        lie = times(0.1, *BMS) if second >= 20 else {}
        pod.tick(KEPT | lie | bare | {"gpu.temp_c": KEPT["gpu.temp_c"] + max(0, second - 20)})
        found.append(common.find(TickValues(state, pod.engine.diagnosis.topology)))
    assert ("cdu", 0, "flow_lpm") in found[22]
    assert ("cdu", 0, "flow_lpm") not in found[26]


@pytest.mark.parametrize(
    "before",
    [[(12, WARMER)], [(30, SILENT), (1, WARMER)]],
    ids=["flows stand", "a gap"],
)
def test_a_leap_that_took_no_flow_or_came_after_a_gap_hides_no_later_loss(before: list[Any]) -> None:
    assert not _flows_doubted([*before, (3, WARMER | NO_FLOW)])


def _flows_doubted(steps: list[tuple[int, dict[str, Any]]]) -> bool:
    """Return True if common mode doubts a flow at the end of these seconds."""
    pod = copy.deepcopy(learned())
    for seconds, values in steps:
        pod.run(seconds, KEPT | values)
    return any(signal == "flow_lpm" for _, _, signal in _of_common(pod))


def test_cdus_are_doubted_by_flows_that_were_read_since() -> None:
    """Racks that are read once a minute have yet to tell that their flow is lost."""
    pod = copy.deepcopy(learned())
    pod.run(12, {"gpu.temp_c": 55.0, "cdu.supply_temp_c": 25.0, "cdu.flow_lpm": 0.0})
    assert _of_common(pod) == set()
    pod.run(1, KEPT | {"cdu.flow_lpm": 0.0})
    assert _of_common(pod) == {("cdu", 0, "flow_lpm")}


@pytest.mark.parametrize("other_w", [0.98 * KEPT["feeder.power_w"], np.nan])
def test_a_lost_feed_is_believed_while_the_other_is_read_late_or_silent(other_w: float) -> None:
    pod = copy.deepcopy(learned())
    pod.run(3, KEPT | {"feeder.power_w": np.array([0.0, other_w])})
    assert _of_common(pod) == set()


def test_a_feeder_with_much_load_beside_its_racks_may_carry_more() -> None:
    pod = Twin(two_racks())
    pod.run(LEARNED_S, KEPT | {"feeder.power_w": 300e3})
    pod.run(1, KEPT | {"feeder.power_w": 600e3})
    assert _of_common(pod) == set()


def _of_common(pod: Twin) -> set[tuple[str, int, str]]:
    common = copy.deepcopy(pod.engine.diagnosis.reconciliation.common)
    return set(common.find(TickValues(pod.engine.state, pod.engine.diagnosis.topology)))


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_cdus_are_believed_where_it_is_their_racks_that_moved(factor: float) -> None:
    assert ("cdu.flow_lpm", 0) not in doubted(times(factor, "rack.flow_lpm"), 20)
