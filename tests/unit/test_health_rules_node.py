"""Evidence against a node, by itself and by its GPUs and supplies. May import `twin`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.health_site import Ward, fault, on
from twin.contracts import DEGRADED, FAILED, HEALTHY, UNKNOWN, WATCH, action
from twin.telemetry import FaultReported

NODES, GPUS = 36, 144


def told(ward: Ward, node: int = 2) -> dict[str, int]:
    return {rule: e.level for rule, e in ward.evidence("node", node).items()}


STATES = [
    ("node.power_on_state", 0, 1, "node_off", UNKNOWN, "none"),
    ("node.leak_state", 1, 0, "leak", FAILED, "drain"),
    ("node.agent_state", 1, 0, "agent_offline", WATCH, "watch"),
]


@pytest.mark.parametrize(("key", "code", "rest", "rule", "level", "act"), STATES)
def test_what_a_node_reports(key: str, code: int, rest: int, rule: str, level: int, act: str) -> None:
    ward = Ward(two_racks())
    ward.look({key: rest})
    ward.look({key: on(NODES, 2, code, rest)})
    assert told(ward) == {rule: level}
    assert (ward.level("node", 2), ward.action("node", 2)) == (level, action(act))
    assert ward.level("node", 3) == HEALTHY


BOTH = {"node.dpu{}_temp_c": 70.0, "node.dpu{}_health_state": 0, "node.dpu{}_offload_state": 0}
DPUS = {key.format(side): value for key, value in BOTH.items() for side in (1, 2)}


@pytest.mark.parametrize(
    ("key", "value", "rule", "level", "act"),
    [
        ("node.dpu2_temp_c", 106.0, "dpu_temp", DEGRADED, "check_facility"),
        ("node.dpu1_temp_c", 106.0, "dpu_temp", DEGRADED, "check_facility"),
        ("node.dpu2_health_state", 1, "dpu_degraded", WATCH, "run_diagnostics"),
        ("node.dpu2_health_state", 2, "dpu_failed", FAILED, "contact_support"),
        ("node.dpu2_offload_state", 1, "dpu_offload_lost", DEGRADED, "run_diagnostics"),
    ],
)
def test_trouble_of_a_dpu_is_its_own_and_its_nodes_once_it_lasts(
    key: str, value: float, rule: str, level: int, act: str
) -> None:
    ward, mine = Ward(two_racks()), 4 + ("dpu2" in key)
    ward.look(DPUS)
    ill = DPUS | {key: on(NODES, 2, value, DPUS[key])}
    ward.look(ill)
    assert level == FAILED or ward.level("node", 2) == HEALTHY  # once is nothing, but of its own word
    ward.run(7, ill)
    assert told(ward) == {f"dpu:{rule}": level}
    assert f"DPU {1 + mine % 2} is" in ward.evidence("node", 2)[f"dpu:{rule}"].text
    assert (ward.level("node", 2), ward.action("node", 2)) == (level, action(act))
    assert [ward.level("dpu", i) for i in (mine, 9 - mine, 6)] == [level, HEALTHY, HEALTHY]
    assert ward.level("node", 3) == HEALTHY
    # While it is silent its trouble stands, whatever the other one says
    ward.run(30, DPUS | {key: on(NODES, 2, np.nan, float(DPUS[key]))})
    assert set(told(ward)) >= {f"dpu:{rule}"}
    ward.run(30, DPUS)
    assert told(ward) == {}


def test_a_dpu_below_its_warning_is_not_hot_and_the_words_say_what_is_left() -> None:
    ward = Ward(two_racks())
    ward.run(8, DPUS | {"node.dpu2_temp_c": 104.5})
    assert told(ward) == {}
    ward.run(8, DPUS | {"node.dpu2_temp_c": 111.0})
    assert "111 °C, 4 K below" in ward.evidence("dpu", 5)["dpu_temp"].text


def test_errors_on_ports_of_a_dpu_that_others_do_not_have() -> None:
    ward, keys = Ward(two_racks()), [f"node.dpu{side}_port_error_count" for side in (1, 2)]
    ward.run(2, DPUS, counts=dict.fromkeys(keys, 1000))
    ward.look(DPUS, counts=dict.fromkeys(keys, on(NODES, 2, 1050, 1000)))
    assert told(ward) == {}
    ward.look(DPUS, counts={keys[0]: on(NODES, 2, 1050, 1000), keys[1]: on(NODES, 2, 1300, 1000)})
    assert told(ward) == {"dpu:dpu_port_errors": WATCH}
    assert [ward.level("dpu", i) for i in (4, 5)] == [HEALTHY, WATCH]
    assert told(ward, 3) == {}


def test_a_node_of_which_a_dpu_falls_silent_is_unknown_and_one_without_is_not() -> None:
    ward = Ward(two_racks())

    def heard(many: dict[str, int]) -> dict[str, np.ndarray]:
        """DPUs of this side report on the first so many nodes."""
        at = np.arange(NODES)
        return {k: np.where(at < many[k[len("node.dpu")]], value, np.nan) for k, value in DPUS.items()}

    ward.run(8, heard({"1": 3, "2": 2}))  # node 2 has one, those from 3 on none
    assert [ward.level("node", i) for i in (1, 2, 3)] == [HEALTHY] * 3
    assert [ward.level("dpu", i) for i in (2, 3, 4, 5)] == [HEALTHY, HEALTHY, HEALTHY, UNKNOWN]
    ward.run(60, heard({"1": 2, "2": 1}))
    assert told(ward) == {"dpu_silent": UNKNOWN}
    assert ward.evidence("node", 2)["dpu_silent"].text.endswith("no longer reports: DPU 1")
    assert ward.evidence("node", 1)["dpu_silent"].text.endswith("no longer reports: DPU 2")
    assert [ward.level("node", i) for i in (0, 1, 2, 3)] == [HEALTHY, UNKNOWN, UNKNOWN, HEALTHY]
    ward.run(30, heard({"1": 2, "2": 1}) | {"node.dpu1_temp_c": np.where(np.arange(NODES) < 3, 70.0, np.nan)})
    assert told(ward) == {}  # one of its signals is enough


@pytest.mark.parametrize(("state", "word"), [(1, "cordoned"), (3, "drained"), (4, "replaced")])
def test_what_others_took_out_of_service_is_no_fault(state: int, word: str) -> None:
    ward = Ward(two_racks())
    ward.look({"node.service_level_state": on(NODES, 2, state)})
    assert ward.level("node", 2) == HEALTHY
    assert word in ward.evidence("node", 2)["service_level"].text


DIAGNOSED = [
    ("node_down", FAILED, "reboot_node"),
    ("node_silent", DEGRADED, "run_diagnostics"),
    ("tray_blocked", DEGRADED, "check_facility"),
    ("leak", FAILED, "drain"),
    ("sensor_biased", WATCH, "watch"),
]


@pytest.mark.parametrize(("kind", "level", "act"), DIAGNOSED)
def test_what_the_diagnosis_tells(kind: str, level: int, act: str) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look(faults=[fault(kind, "node", 2)])
    assert (ward.level("node", 2), ward.action("node", 2)) == (level, action(act))
    assert [ward.level("node", 3), ward.level("gpu", 2)] == [HEALTHY, HEALTHY]


def test_two_restarts_in_a_day_ask_for_a_look() -> None:
    ward = Ward(two_racks())
    ward.run(2, counts={"node.reboot_count": 7})
    ward.run(60, counts={"node.reboot_count": on(NODES, 2, 8, 7)})
    assert told(ward) == {}
    ward.look(counts={"node.reboot_count": on(NODES, 2, 9, 7)})
    assert told(ward) == {"reboots": WATCH}
    assert "2 times" in ward.evidence("node", 2)["reboots"].text


def test_codes_of_agents_are_a_nodes() -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look(None, FaultReported(table="node", name=ward.site.name("node", 2), code=1_000_001))
    assert told(ward) == {"code": WATCH}
    assert ward.action("node", 2) == action("check_facility")


def test_a_lemon_is_watched() -> None:
    ward = Ward(two_racks())
    ward.lemons = SimpleNamespace(
        is_lemon=lambda: np.arange(NODES) == 2, evidence=lambda node: ("5 tickets",)
    )
    ward.look()
    assert told(ward) == {"lemon": WATCH}
    assert ward.evidence("node", 2)["lemon"].text == "it fails more often than others: 5 tickets"


def test_a_node_is_no_better_than_its_gpus_and_says_which() -> None:
    ward = Ward(two_racks())
    ward.look({"gpu.row_remap_failed_state": on(GPUS, 9, 1), "gpu.row_remap_pending_state": on(GPUS, 10, 1)})
    assert (ward.level("node", 2), ward.action("node", 2)) == (FAILED, action("replace"))
    assert ward.verdicts.health("node").sure_pu[2] == pytest.approx(0.97)
    assert told(ward) == {"gpu:row_remap_failed": FAILED, "gpu:row_remap_pending": DEGRADED}
    assert ward.evidence("node", 2)["gpu:row_remap_failed"].text.startswith("gpu1 is failed: ")
    assert np.flatnonzero(ward.verdicts.health("node").level).tolist() == [2]


def test_a_node_with_a_silent_gpu_is_unknown() -> None:
    ward = Ward(two_racks())
    keys = ("gpu.temp_c", "gpu.power_w", "gpu.sm_clock_hz", "gpu.util_pu", "gpu.health_state")
    ward.look({key: on(GPUS, 9, np.nan, 0.0) for key in keys})
    assert (ward.level("gpu", 9), ward.level("node", 2)) == (UNKNOWN, UNKNOWN)
    assert ward.level("node", 1) == HEALTHY


def test_a_lost_supply_degrades_its_node() -> None:
    ward = Ward(two_racks())
    ward.look()
    watts = {
        "node.psu1_power_w": on(NODES, 2, 0.0, 2000.0),
        "node.psu2_power_w": on(NODES, 2, 4000.0, 2000.0),
    }
    ward.look(watts, faults=[fault("psu_lost", "node", 2)])
    assert [ward.level("psu", i) for i in (4, 5)] == [FAILED, HEALTHY]
    assert (ward.level("node", 2), ward.action("node", 2)) == (DEGRADED, action("replace"))
    assert told(ward) == {"psu:psu_lost": DEGRADED}
    assert ward.evidence("node", 2)["psu:psu_lost"].text.startswith("supply 1 is failed: it gives 0 W")


def test_a_node_of_which_its_gpus_alone_are_heard_is_unknown_and_says_what_is_not_heard() -> None:
    ward = Ward(two_racks())
    ward.take({"gpu.temp_c": 60.0}, {}, 10.0)
    ward.judge()
    assert (ward.level("gpu", 9), ward.level("node", 2)) == (HEALTHY, UNKNOWN)
    assert np.isnan(ward.verdicts.health("node").sure_pu[2])
    (missing,) = (e.text for e in ward.verdicts.evidence("node", 2) if e.rule.startswith("missing:"))
    assert missing.endswith("not reported: power, state of its supply, air or water, temperature of its CPUs")
    ward.look({"gpu.row_remap_failed_state": on(GPUS, 9, 1)})
    assert ward.level("node", 2) == FAILED, "what speaks against it counts all the same"


def test_a_node_whose_bmc_falls_silent_is_unknown_though_its_agent_and_its_gpus_are_heard() -> None:
    ward = Ward(two_racks())
    ward.take({"gpu.temp_c": 60.0, "node.power_w": 4000.0, "node.agent_state": 0.0}, {}, 10.0)
    ward.judge()
    assert ward.level("node", 2) == HEALTHY
    for _ in range(6):
        ward.take({"gpu.temp_c": 60.0, "node.agent_state": 0.0,
                   "node.power_w": on(NODES, 2, np.nan, 4000.0)}, {}, 10.0)  # fmt: skip
        ward.judge()
    assert [ward.level("node", i) for i in (1, 2)] == [HEALTHY, UNKNOWN]
    told = ward.evidence("node", 2)["life"].text
    assert told.startswith(
        "nothing shows that it is well; not reported: power, state of its supply, air or water"
    )


def test_of_a_node_alone_the_gpus_are_unknown() -> None:
    bare = Ward(two_racks())
    bare.take({"node.power_w": 4000.0}, {}, 10.0)
    bare.judge()
    assert bare.level("node", 2) == UNKNOWN  # of its GPUs nothing is heard
