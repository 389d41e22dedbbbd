"""Evidence against a GPU, one case per rule, and cases that are no evidence. May import `twin`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, eight_nodes, two_racks
from tests.support.health_site import Ward, fault, on
from twin.contracts import DEGRADED, FAILED, HEALTHY, UNKNOWN, WATCH, Residual, action
from twin.health.wear import Remaining
from twin.telemetry import JobStarted

N = 144
ACTED = ("none", "watch")


def told(ward: Ward, gpu: int = 5) -> dict[str, tuple[int, int]]:
    """Level and action by rule, of what speaks for the verdict on a GPU."""
    held = {e.rule: e.level for e in ward.verdicts.evidence("gpu", gpu)}
    return {rule: (level, ward.action("gpu", gpu)) for rule, level in held.items()
            if not rule.startswith("missing:") and rule != "history"}  # fmt: skip


def test_a_well_gpu_is_healthy_and_says_what_it_does_not_report() -> None:
    ward = Ward(two_racks())
    ward.run(3)
    assert ward.level("gpu", 5) == HEALTHY
    assert ward.verdicts.health("gpu").sure_pu[5] == pytest.approx(8 / 11)
    missing = {e.rule for e in ward.verdicts.evidence("gpu", 5) if e.rule.startswith("missing:")}
    assert missing == {"missing:memory errors", "missing:NVLink errors", "missing:PCIe replays"}
    ward.look({"gpu.power_w": on(N, 6, np.nan, 700.0)})
    assert ward.verdicts.health("gpu").sure_pu[5:7] == pytest.approx([8 / 11, 7 / 11])
    assert "missing:power" in {e.rule for e in ward.verdicts.evidence("gpu", 6)}
    ward.look(counts={"gpu.ecc_sbe_count": 0, "gpu.pcie_replay_count": 0, "gpu.nvlink_error_count": 0})
    assert ward.verdicts.health("gpu").sure_pu[5] == 1.0


STATES = [
    ("gpu.row_remap_failed_state", 1, "row_remap_failed", FAILED, "replace"),
    ("gpu.row_remap_pending_state", 1, "row_remap_pending", DEGRADED, "reset_gpu"),
    ("gpu.health_state", 1, "health_fault", FAILED, "run_diagnostics"),
    ("gpu.recovery_action_state", 1, "recovery_action", DEGRADED, "reset_gpu"),
    ("gpu.recovery_action_state", 2, "recovery_action", FAILED, "reboot_node"),
    ("gpu.recovery_action_state", 3, "recovery_action", DEGRADED, "drain"),
]


@pytest.mark.parametrize(("key", "code", "rule", "level", "act"), STATES)
def test_what_a_gpu_reports_of_itself(key: str, code: int, rule: str, level: int, act: str) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look({key: on(N, 5, code)})
    assert told(ward) == {rule: (level, action(act))}
    assert ward.level("gpu", 5) == level
    assert ward.level("gpu", 6) == HEALTHY
    ward.run(11)
    assert ward.level("gpu", 5) == level  # held for a while
    ward.run(9)
    assert ward.level("gpu", 5) == HEALTHY


COUNTS = [
    ("gpu.ecc_dbe_count", 1, "ecc_dbe", DEGRADED, "reset_gpu"),
    ("gpu.row_remap_count", 1, "row_remap_growth", WATCH, "watch"),
    ("gpu.ecc_sbe_count", 12, "ecc_sbe", WATCH, "watch"),
    ("gpu.nvlink_error_count", 70, "nvlink_errors", WATCH, "watch"),
    ("gpu.nvlink_error_count", 70_000, "nvlink_errors", DEGRADED, "run_diagnostics"),
    ("gpu.nvlink_replay_count", 70, "nvlink_replays", WATCH, "watch"),
    ("gpu.nvlink_recovery_count", 3, "nvlink_recoveries", DEGRADED, "run_diagnostics"),
    ("gpu.pcie_replay_count", 90, "pcie_replays", WATCH, "watch"),
]


@pytest.mark.parametrize(("key", "grown", "rule", "level", "act"), COUNTS)
def test_what_grows_at_one_gpu(key: str, grown: int, rule: str, level: int, act: str) -> None:
    ward = Ward(two_racks())
    ward.run(2, counts={key: 1000})
    assert told(ward) == {}
    ward.look(counts={key: on(N, 5, 1000 + grown, 1000)})
    assert told(ward) == {rule: (level, action(act))}
    assert ward.level("gpu", 6) == HEALTHY


@pytest.mark.parametrize(
    ("key", "grown"), [(k, g) for k, g, *_ in COUNTS if "dbe" not in k and "remap" not in k]
)
def test_what_grows_everywhere_is_no_fault_of_one(key: str, grown: int) -> None:
    ward = Ward(two_racks())
    ward.run(2, counts={key: 1000})
    ward.look(counts={key: 1000 + grown})
    assert told(ward) == {}


def test_less_growth_than_the_least_is_nothing() -> None:
    ward = Ward(two_racks())
    ward.run(2, counts={"gpu.ecc_sbe_count": 0, "gpu.pcie_replay_count": 0})
    ward.look(counts={"gpu.ecc_sbe_count": on(N, 5, 9), "gpu.pcie_replay_count": on(N, 5, 79)})
    assert told(ward) == {}


def test_what_a_gpu_always_counts_is_usual_but_many_a_day_are_told() -> None:
    ward = Ward(two_racks())
    for k in range(5 * 60):  # twenty single-bit errors in ten minutes, five hours long
        ward.look(counts={"gpu.ecc_sbe_count": on(N, 5, 2 * k)}, dt_s=60.0)
    assert set(told(ward)) == {"ecc_sbe_daily"}


def test_a_fault_code_asks_for_its_action_until_it_is_done() -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look(None, ward.xid(5, 79))
    assert told(ward)["xid"][0] == FAILED
    assert ward.action("gpu", 5) >= action("reset_gpu")
    assert ward.evidence("gpu", 5)["xid"].text.startswith("XID 79 (")
    ward.run(60)
    assert ward.level("gpu", 5) == FAILED
    ward.book.resolve("gpu", np.array([5], np.int32), action("replace"), ward.now_ns)
    ward.run(2)
    assert ward.level("gpu", 5) == HEALTHY


@pytest.mark.parametrize(
    ("code", "sure_pu"),
    [(79, 0.8), (31, 0.2), (13, 0.2), (999, 0.5)],
    ids=("its own", "of an application", "of an application", "in no catalogue"),
)
def test_how_sure_a_code_is_that_it_is_the_gpu(code: int, sure_pu: float) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look(None, ward.xid(5, code))
    assert ward.evidence("gpu", 5)["xid"].sure_pu == pytest.approx(sure_pu)
    assert ward.verdicts.health("gpu").sure_pu[5] == pytest.approx(sure_pu)


def test_the_same_code_five_times_a_day_is_for_the_support() -> None:
    ward = Ward(two_racks())
    for k in range(5):
        ward.run(6)
        assert "xid_repeated" not in told(ward), k
        ward.look(None, ward.xid(5, 94))
    assert told(ward)["xid_repeated"] == (DEGRADED, action("contact_support"))
    assert "5 times" in ward.evidence("gpu", 5)["xid_repeated"].text


def test_page_faults_on_several_nodes_of_a_job_are_its_software() -> None:
    ward = Ward(two_racks())
    ward.look()
    names = tuple(ward.site.name("node", i) for i in range(4))
    ward.jobs.start(JobStarted(job="j", nodes=names), [0, 1, 2, 3], 0, ward.now_ns)
    ward.look(None, *(ward.xid(gpu, 31) for gpu in (1, 5, 9, 13)))
    assert told(ward)["xid_of_job"][0] == HEALTHY
    assert ward.level("gpu", 5) == HEALTHY
    ward.look(None, ward.xid(5, 79))  # that one is its own
    assert ward.level("gpu", 5) == FAILED


def test_faults_that_two_restarts_do_not_cure_are_for_the_support() -> None:
    ward = Ward(two_racks())
    ward.look(counts={"node.reboot_count": 0})
    for k in range(1, 3):
        ward.look(None, ward.xid(5, 95), counts={"node.reboot_count": on(36, 1, k)})
        ward.run(60)
    ward.look(None, ward.xid(5, 95))
    assert told(ward)["not_cured"] == (DEGRADED, action("contact_support"))
    assert "not_cured" not in told(ward, 9)


DIAGNOSED = [
    ("plate_degraded", DEGRADED, "watch"),
    ("ecc_growth", DEGRADED, "reset_gpu"),
    ("xid_burst", DEGRADED, "run_diagnostics"),
    ("nvlink_flaps", DEGRADED, "run_diagnostics"),
    ("sensor_frozen", WATCH, "watch"),
]


@pytest.mark.parametrize(("kind", "level", "act"), DIAGNOSED)
def test_what_the_diagnosis_tells(kind: str, level: int, act: str) -> None:
    ward = Ward(two_racks())
    ward.look()
    ward.look(faults=[fault(kind, "gpu", 5, sure=0.93)])
    assert told(ward) == {kind: (level, action(act))}
    assert f"{kind} was seen" in ward.evidence("gpu", 5)[kind].text
    assert ward.verdicts.health("gpu").sure_pu[5] == pytest.approx(0.93)


def test_a_gpu_that_is_merely_silent_has_fallen_off_the_bus_after_a_while() -> None:
    ward = Ward(two_racks())
    ward.look()
    silent = [fault("gpu_off_bus", "gpu", 5)]
    ward.look(faults=silent)
    assert "gpu_off_bus" not in told(ward)
    for _ in range(179):
        ward.look(faults=silent)
    assert "gpu_off_bus" not in told(ward)
    for _ in range(2):
        ward.look(faults=silent)
    assert told(ward)["gpu_off_bus"] == (FAILED, action("reboot_node"))


def residual(key: str, expected: float, measured: np.ndarray, sigma: float) -> dict[str, Residual]:
    return {key: Residual(key, np.full(N, expected), measured.astype(np.float64), np.full(N, sigma))}


@pytest.mark.parametrize(("off_k", "gpus", "found"), [
    (6.0, [5], True),
    (3.5, [5], False),  # too little
    (-6.0, [5], False),  # colder is no harm
    (6.0, list(range(72)), False),  # all of a rack: its coolant, not its GPUs
])  # fmt: skip
def test_a_gpu_hotter_than_its_power_explains(off_k: float, gpus: list[int], found: bool) -> None:
    ward = Ward(two_racks())
    temp = on(N, gpus, 60.0 + off_k, 60.0)
    ward.residuals = residual("gpu.temp_c", 60.0, temp, 0.6)
    ward.run(12, {"gpu.temp_c": temp})
    assert "temp_residual" not in told(ward)  # it has to last
    ward.run(4, {"gpu.temp_c": temp})
    assert ("temp_residual" in told(ward)) is found


@pytest.mark.parametrize(("pu", "bits", "found"), [
    (0.8, 0, True), (0.97, 0, False), (0.8, 0x4, False), (0.8, 0x40, True),
])  # fmt: skip
def test_a_gpu_slower_than_its_cap_explains(pu: float, bits: int, found: bool) -> None:
    ward = Ward(two_racks())
    clock = on(N, 5, pu * 1.9e9, 1.9e9)
    ward.residuals = residual("gpu.sm_clock_hz", 1.9e9, clock, 1.9e7)
    ward.run(35, {"gpu.sm_clock_hz": clock, "gpu.clock_event_bits": on(N, 5, bits)})
    assert ("clock_residual" in told(ward)) is found


@pytest.mark.parametrize(
    ("temp_c", "looks", "level"),
    [(81.0, 8, HEALTHY), (84.0, 8, WATCH), (88.0, 60, WATCH), (90.0, 6, WATCH), (90.0, 8, DEGRADED)],
)
def test_heat_is_judged_by_the_limits_of_the_profile(temp_c: float, looks: int, level: int) -> None:
    """Beyond what operation allows (87) a GPU is watched; lasting beyond its slowdown (89) it is degraded."""
    ward = Ward(two_racks())
    ward.run(looks, {"gpu.temp_c": on(N, 5, temp_c, 60.0)})
    assert ward.level("gpu", 5) == level


def test_heat_that_comes_and_goes_at_the_slowdown_is_one_match_or_none() -> None:
    """A reading that flickers at the bound shows no heat that lasts; heat that lasted stands through gaps."""
    hot, cool = ({"gpu.temp_c": on(N, 5, t, 60.0)} for t in (90.0, 89.0))
    ward = Ward(two_racks())
    for _ in range(30):
        ward.look(hot)
        ward.look(cool)
        assert ward.level("gpu", 5) != DEGRADED
    ward.run(8, hot)
    since_ns = ward.evidence("gpu", 5)["thermal_limit"].since_ns
    for _ in range(10):
        ward.run(20, cool)
        ward.look(hot)
        assert ward.evidence("gpu", 5)["thermal_limit"].since_ns == since_ns
    ward.run(62, cool)
    assert ward.level("gpu", 5) == WATCH


def test_margin_goes_before_temperature_and_no_limit_is_not_evaluated() -> None:
    ward = Ward(two_racks())
    ward.run(4, {"gpu.temp_c": 90.0, "gpu.thermal_margin_k": on(N, 5, 4.0, 20.0)})
    assert [ward.level("gpu", i) for i in (5, 6)] == [WATCH, HEALTHY]
    assert "6.0 K below it" in ward.evidence("gpu", 5)["thermal_margin"].text
    bare = Ward({"site": "lab", "halls": [{"name": "h", "racks": [{"name": "r1", "nodes": 2,
                                                                   "gpus_per_node": 2}]}]})  # fmt: skip
    bare.run(4, {"gpu.temp_c": 99.0, "gpu.thermal_margin_k": -3.0})
    assert bare.level("gpu", 0) == HEALTHY


def test_a_whole_rack_at_its_limit_is_the_facility() -> None:
    ward = Ward(two_racks())
    ward.run(4, {"gpu.temp_c": on(N, range(72), 90.0, 60.0)})
    assert (ward.level("gpu", 5), ward.action("gpu", 5)) == (WATCH, action("check_facility"))
    assert ward.evidence("gpu", 5)["thermal_margin"].sure_pu <= 0.2


def test_gaps_of_telemetry_are_told_unless_the_node_has_them() -> None:
    ward = Ward(two_racks())
    keys = ("gpu.temp_c", "gpu.power_w", "gpu.sm_clock_hz", "gpu.util_pu", "gpu.health_state")
    ward.run(3)
    gone = {key: on(N, [5, 8, 9, 10, 11], np.nan, 0.0 if "state" in key else 60.0) for key in keys}
    ward.run(30, gone)
    assert ward.level("gpu", 5) == WATCH  # and not unknown: something speaks against it
    assert "telemetry_gap" in told(ward)
    assert "telemetry_gap" not in told(ward, 9)
    assert ward.level("gpu", 9) == UNKNOWN


def test_wear_is_told_when_little_is_left() -> None:
    ward = Ward(two_racks())
    days = np.full(N, np.nan)
    days[5], days[6] = 5 * 86_400.0, 50 * 86_400.0
    left = Remaining("gpu.resistance", "gpu", days, days * 0.5, days * 2)
    ward.wear = SimpleNamespace(remaining=lambda: (left,), evidence=lambda table, i: (f"{table} {i} wears",))
    ward.look()
    assert told(ward) == {"wear": (WATCH, action("watch"))}
    assert ward.evidence("gpu", 5)["wear"].text == "gpu 5 wears"
    assert told(ward, 6) == {}


def test_a_fault_that_nobody_hears_the_end_of_is_kept_for_a_day() -> None:
    ward = Ward(eight_nodes())
    ward.run(2, {"gpu.row_remap_failed_state": on(8, 3, 1)})
    for _ in range(20):  # it says nothing at all any more
        ward.take({"gpu.temp_c": on(8, 3, np.nan, 60.0)}, {}, 3600.0)
        ward.judge()
    assert ward.level("gpu", 3) == FAILED
    for _ in range(10):
        ward.take({"gpu.temp_c": on(8, 3, np.nan, 60.0)}, {}, 3600.0)
        ward.judge()
    assert ward.level("gpu", 3) == UNKNOWN


def test_the_past_is_told_for_information() -> None:
    ward = Ward(eight_nodes())
    ward.look()
    ward.look(dt_s=3 * 86_400.0)
    [past] = [e for e in ward.verdicts.evidence("gpu", 3) if e.rule == "history"]
    assert past.text == "reporting for 3 days; its age is not known"
    assert past.since_ns == START_NS + 10 * 10**9
    ward.verdicts.forget("gpu", 3)
    ward.look(dt_s=86_400.0)
    [past] = [e for e in ward.verdicts.evidence("gpu", 3) if e.rule == "history"]
    assert "replaced once, last 1 days ago" in past.text
    assert past.level == HEALTHY


def test_no_rule_has_an_unknown_action_or_words_that_do_not_fit() -> None:
    from twin.health import SPECS

    for part, spec in SPECS.items():
        assert len({rule.id for rule in spec.rules}) == len(spec.rules), part
        for rule in spec.rules:
            assert action(rule.action) >= 0
            assert rule.part == part
            assert rule.source
            texts: list[Any] = [rule.text(1.0, 2.0, "so"), rule.text(float("nan"), float("nan"), "")]
            assert all("{" not in text and text for text in texts), rule.id
