"""Findings of health: one per node, none twice, none for what is no part's fault, and an end to a storm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.support.builders import START_NS, Twin, two_racks
from tests.support.scripted_health import Ailing, ailing
from twin.catalogue import NS
from twin.contracts import BY_FACILITY, BY_POWER, DEGRADED, FAILED, SAME_S, UNKNOWN, WATCH, Fault, Finding
from twin.health import findings
from twin.health.alarms import LIKELY_PU, MOST, STILL_LIKELY_PU, TITLES
from twin.health.common_cause import Shock
from twin.health.rules import DIAGNOSIS
from twin.telemetry import MaintenanceBegun

DAY_S = 86_400.0
NODE3, GPU2 = "lab/h/r1/node3", 14  # gpu2 of node3


class Ward:
    """A site whose health is told, and what is found of it."""

    def __init__(self, **more: Any) -> None:
        self.twin = Twin(two_racks(**more))
        self.ill: Ailing = ailing(self.twin.engine)
        self.faults: list[Fault] = []

    def look(self, active: tuple[str, ...] = ()) -> list[Finding]:
        engine = self.twin.engine
        return findings(engine.health, engine.forecasts, engine.site, engine.windows, self.faults, active)

    def diagnose(self, kind: str, table: str, entity: int, severity: str, signal: str = "") -> None:
        self.faults.append(Fault(kind, table, entity, signal, severity, 0.99, START_NS, ("x",)))


@pytest.fixture
def ward() -> Ward:
    return Ward()


def test_a_quiet_site_has_none(ward: Ward) -> None:
    ward.ill.forecast(DAY_S, 0.004)
    ward.ill.say("gpu", 7, WATCH, "warm", action_name="watch")
    for part in ("node", "switch", "link", "pump", "psu"):
        ward.ill.verdicts.held[part].level[:] = UNKNOWN
    assert ward.look() == []


def test_one_finding_for_a_node_with_all_that_is_wrong(ward: Ward) -> None:
    ward.ill.say("node", 3, FAILED, "a GPU of it is gone", action_name="reboot_node", sure_pu=0.8)
    ward.ill.say("gpu", GPU2, FAILED, "XID 79: fell off the bus", action_name="replace", sure_pu=0.97)
    ward.ill.say("gpu", GPU2, WATCH, "warm")
    ward.ill.say("gpu", GPU2 + 1, DEGRADED, "row remap pending", action_name="reset_gpu", sure_pu=0.6)
    (only,) = ward.look()
    assert only.id == f"health/{NODE3}"
    assert only.severity == "critical"
    assert only.title == f"{NODE3}: a GPU of it is gone"
    assert only.entities == (NODE3, f"{NODE3}/gpu2", f"{NODE3}/gpu3")
    assert only.evidence == (
        "a GPU of it is gone",
        "gpu2: XID 79: fell off the bus",
        "gpu3: row remap pending",
    )
    assert only.action == "Drain the node and replace the part."  # the strongest of all
    assert only.confidence_pu == pytest.approx(0.97)
    assert only.count == 3


@pytest.mark.parametrize(
    ("level", "action_name", "lowered", "severity"),
    [
        (FAILED, "replace", 0, "critical"),
        (DEGRADED, "reset_gpu", 0, "warning"),
        (DEGRADED, "restart_app", 0, "info"),
        (FAILED, "restart_app", 0, "info"),
        (DEGRADED, "check_facility", 0, None),
        (DEGRADED, "watch", BY_FACILITY, None),
        (DEGRADED, "none", BY_POWER, None),
        (DEGRADED, "reset_gpu", BY_FACILITY, "warning"),  # hot by the facility, and ill all the same
        (WATCH, "watch", 0, None),
        (UNKNOWN, "none", 0, None),
    ],
)
def test_severity_follows_whose_fault_it_is(
    ward: Ward, level: int, action_name: str, lowered: int, severity: str | None
) -> None:
    ward.ill.say("gpu", GPU2, level, "something", action_name=action_name, lowered=lowered)
    found = ward.look()
    assert [f.severity for f in found] == ([severity] if severity else [])
    # A part that works and is not likely to fail soon costs no running job
    if severity == "warning":
        assert found[0].action.startswith("Between jobs, ")


@pytest.mark.parametrize(
    ("rule", "level", "kind", "table", "entity", "severity", "told"),
    [
        ("xid", FAILED, "gpu_off_bus", "gpu", GPU2, "critical", True),
        ("gpu_off_bus", FAILED, "gpu_off_bus", "gpu", GPU2, "critical", True),
        ("xid", FAILED, "xid_burst", "gpu", GPU2, "warning", False),  # we say more than it does
        ("xid", DEGRADED, "xid_burst", "gpu", GPU2, "warning", True),
        ("ecc_dbe", DEGRADED, "ecc_growth", "gpu", GPU2, "warning", True),
        ("ecc_dbe", DEGRADED, "plate_degraded", "gpu", GPU2, "warning", False),  # something else
        ("ecc_dbe", DEGRADED, "ecc_growth", "gpu", GPU2 + 1, "warning", False),  # somebody else
        ("telemetry_gap", FAILED, "node_down", "node", 3, "critical", True),  # of its whole node
        ("telemetry_gap", FAILED, "node_down", "node", 4, "critical", False),
        ("temp_residual", FAILED, "tray_blocked", "node", 3, "critical", True),
        ("thermal_slowdown", DEGRADED, "plate_degraded", "gpu", GPU2, "warning", True),
    ],
)
def test_what_the_diagnosis_tells_is_not_told_twice(
    ward: Ward, rule: str, level: int, kind: str, table: str, entity: int, severity: str, told: bool
) -> None:
    ward.ill.say("gpu", GPU2, level, "x", action_name="drain", rule=rule)
    ward.diagnose(kind, table, entity, severity)
    assert (ward.look() == []) is told


def test_what_a_node_says_of_its_members_these_say_themselves(ward: Ward) -> None:
    ward.ill.say("node", 3, FAILED, "gpu2 is failed: x", rule="gpu:xid", action_name="reboot_node")
    assert ward.look() == []
    ward.ill.say("gpu", GPU2, FAILED, "x", rule="xid", action_name="reboot_node")
    (only,) = ward.look()
    assert only.evidence == ("gpu2: x",)
    ward.diagnose("gpu_off_bus", "gpu", GPU2, "critical")
    assert ward.look() == []


def test_a_level_that_outlives_its_reasons_keeps_an_alarm_and_raises_none(ward: Ward) -> None:
    ward.ill.say("gpu", GPU2, DEGRADED, action_name="reset_gpu")
    ward.ill.say("psu", 7, DEGRADED, action_name="replace")
    assert ward.look() == []
    active = (f"health/{NODE3}", f"health/psu/{NODE3}#psu2")
    assert {f.id for f in ward.look(active)} == set(active)
    assert next(f.title for f in ward.look(active) if f.id == active[0]) == f"{NODE3}: gpu2 is degraded"


def test_a_sensor_at_fault_explains_no_device(ward: Ward) -> None:
    ward.ill.say("gpu", GPU2, DEGRADED, "x", action_name="drain", rule="ecc_dbe")
    ward.diagnose("ecc_growth", "gpu", GPU2, "warning", signal="temp_c")
    assert len(ward.look()) == 1


def test_what_a_fault_leaves_behind_is_of_its_incident_for_an_hour(ward: Ward) -> None:
    """The diagnosis ends a fault at once; rules that are signs of it hold their matches a while longer."""
    health, at = ward.twin.engine.health, ward.twin.now_ns
    ward.ill.say("gpu", GPU2, DEGRADED, "errors of it", action_name="reset_gpu", rule="ecc_dbe")
    ward.diagnose("ecc_growth", "gpu", GPU2, "warning")
    told, now = list(ward.faults), list[Fault]()
    for faults, after_s, found in ((told, 0.0, []), (now, 10.0, []), (now, SAME_S - 1.0, [])):
        health._note(faults, at + round(after_s * NS))
        ward.faults = health.reported(faults)
        assert ward.look() == found
    health._note((), at + round((SAME_S + 10.0) * NS))
    ward.faults = health.reported(())
    assert [f.id for f in ward.look()] == [f"health/{NODE3}"], "it was not cured"


def test_of_two_reasons_the_one_nobody_told_names_the_finding(ward: Ward) -> None:
    ward.ill.say("gpu", GPU2, FAILED, "off the bus", action_name="reboot_node", rule="gpu_off_bus")
    ward.ill.say("gpu", GPU2, DEGRADED, "errors of its memory", rule="ecc_dbe")
    ward.diagnose("gpu_off_bus", "gpu", GPU2, "critical")
    (only,) = ward.look()
    assert only.severity == "warning"
    assert only.title == f"{NODE3}: gpu2: double-bit errors of its memory"


@pytest.mark.parametrize(
    ("chance", "active", "raised"),
    [
        (LIKELY_PU + 0.001, (), True), (LIKELY_PU - 0.001, (), False),
        (LIKELY_PU - 0.001, (f"health/{NODE3}",), True),
        (STILL_LIKELY_PU - 0.001, (f"health/{NODE3}",), False),
        (STILL_LIKELY_PU + 0.001, ("health/lab/h/r1/node4",), False), (float("nan"), (), False),
    ],
)  # fmt: skip
def test_a_likely_failure_is_a_warning_and_does_not_flicker(
    ward: Ward, chance: float, active: tuple[str, ...], raised: bool
) -> None:
    chances = np.full(36, 0.004)
    chances[3] = chance
    ward.ill.forecast(DAY_S, chances, half=0.1)
    found = ward.look(active)
    assert [f.id for f in found] == ([f"health/{NODE3}"] if raised else [])
    if raised:
        (only,) = found
        assert only.severity == "warning"
        assert only.title == f"{NODE3} is likely to fail within a day"
        (said,) = only.evidence
        assert said.startswith(f"chance of failing within a day: {100 * chance:.0f} % (90 % interval ")
        assert "times the average" in said
        assert only.action == "Drain the node."
        assert only.confidence_pu == pytest.approx(chance, abs=1e-6)


@pytest.mark.parametrize(("ago_s", "stands"), [(None, False), (3600.0, False), (2 * DAY_S, True)])
def test_what_was_told_of_a_failure_does_not_stand_as_a_chance(
    ward: Ward, ago_s: float | None, stands: bool
) -> None:
    now_ns = ward.twin.engine.health.looked_ns
    end_ns = 0 if ago_s is None else now_ns - round(ago_s * NS)
    ward.ill.failed(3, now_ns - round(3 * DAY_S * NS), end_ns, kind="power")
    ward.ill.forecast(DAY_S, (LIKELY_PU + STILL_LIKELY_PU) / 2)
    assert [f.id for f in ward.look((f"health/{NODE3}",))] == ([f"health/{NODE3}"] if stands else [])


def test_a_node_that_failed_is_not_likely_to_fail(ward: Ward) -> None:
    ward.ill.forecast(DAY_S, 0.9)
    ward.ill.say("node", 3, FAILED, "it is off", action_name="reboot_node")
    of_node = next(f for f in ward.look() if f.id == f"health/{NODE3}")
    assert of_node.evidence == ("it is off",)
    assert len(ward.look()) == 36


@pytest.mark.parametrize(
    ("table", "names"), [("node", (NODE3,)), ("rack", ("lab/h/r1",)), ("gpu", (f"{NODE3}/gpu2",))]
)
def test_nothing_is_told_where_people_work(ward: Ward, table: str, names: tuple[str, ...]) -> None:
    ward.ill.unwell("gpu", GPU2)
    assert len(ward.look()) == 1
    end = START_NS + 3600 * NS
    ward.twin.tick(None, MaintenanceBegun(id="w", author="a", table=table, names=names, until_ns=end))
    assert ward.look() == []


def test_nodes_that_went_down_together_are_one_finding(ward: Ward) -> None:
    for node in range(18):
        ward.ill.say("node", node, FAILED, "it is off", action_name="reboot_node")
        ward.ill.failed(node, START_NS, kind="power", shared=True)
    ward.ill.failed(20, START_NS, START_NS + NS, kind="power", shared=True)
    ward.ill.failed(21, START_NS, kind="taken_out", shared=True)
    (only,) = ward.look()
    assert (only.id, only.severity, only.count) == ("health/shared", "critical", 18)
    assert only.title == "Nodes became unusable together"
    assert only.evidence == ("18 nodes in 1 rack: 18 x power",)
    ward.diagnose("feed_lost", "feeder", 0, "critical")
    assert [f.severity for f in ward.look()] == ["warning"]  # the cause has an alarm of its own


def test_wet_trays_that_a_leak_took_down_are_no_finding_of_their_own(ward: Ward) -> None:
    for node in (3, 4):
        ward.ill.say("node", node, FAILED, "it is wet", action_name="check_facility")
        ward.ill.failed(node, START_NS, kind="thermal", shared=True)
    assert [f.id for f in ward.look()] == ["health/shared"]
    ward.diagnose("leak", "rack", 0, "critical")
    assert ward.look() == []


def test_one_node_that_a_fault_took_down_is_not_several_and_the_fault_is_named(ward: Ward) -> None:
    ward.ill.say("node", 3, FAILED, "it is off", action_name="reboot_node")
    ward.ill.failed(3, START_NS, kind="power", shared=True)
    why = "feed lost of lab/h/a explains it"
    ward.ill.failures.causes = (Shock(START_NS, "feeder", 0, "lab/h/a", (3,), 1, why, "feed_lost"),)
    ward.twin.engine.health.looked_ns = START_NS + 1800 * NS
    (only,) = ward.look()
    assert only.title == "lab/h/r1/node3 became unusable by a cause outside it"
    assert only.evidence == ("1 node in 1 rack: 1 x power", why)
    ward.ill.failures.well_ns[3] = START_NS + 60 * NS
    ward.ill.verdicts.held["node"].level[3] = WATCH
    assert ward.look() == [], "it is back, though not yet for long"


def test_a_node_that_stays_down_after_the_common_cause_has_a_finding_of_its_own(ward: Ward) -> None:
    nodes = range(3, 7)
    for node in nodes:
        ward.ill.say("node", node, FAILED, "it does not boot", action_name="reboot_node")
        ward.ill.failed(node, START_NS + 5 * NS, kind="power", shared=True)
    ward.ill.failures.causes = (Shock(START_NS, "rack", 0, "lab/h/r1", tuple(nodes), 4, "4 of 18 nodes"),)
    for node in (4, 5):
        ward.ill.failures.well_ns[node] = START_NS + 600 * NS
        ward.ill.verdicts.held["node"].level[node] = WATCH
    assert [f.id for f in ward.look()] == ["health/shared"], "half of them are not back"
    ward.ill.failures.well_ns[6] = START_NS + 600 * NS
    ward.ill.verdicts.held["node"].level[6] = WATCH
    (own,) = ward.look()
    assert (own.id, own.severity) == (f"health/{NODE3}", "critical")
    ward.ill.verdicts.held["node"].level[3] = UNKNOWN
    ward.ill.verdicts.said.clear()
    assert [f.id for f in ward.look()] == ["health/shared"], "nothing else would name it"


def test_a_node_that_stays_down_long_after_the_fault_that_took_it_down_has_a_finding_of_its_own(
    ward: Ward,
) -> None:
    ward.ill.say("node", 3, FAILED, "it does not boot", action_name="reboot_node")
    ward.ill.failed(3, START_NS, kind="power", shared=True)
    ward.ill.failures.causes = (Shock(START_NS, "feeder", 0, "lab/h/a", (3,), 1, "why", "feed_lost"),)
    for after_s, lasts, own in ((1800, False, False), (3700, True, False), (3700, False, True)):
        ward.twin.engine.health.looked_ns = START_NS + after_s * NS
        ward.faults = []
        if lasts:
            ward.diagnose("feed_lost", "feeder", 0, "critical")
        assert [f.id for f in ward.look()] == [f"health/{NODE3}" if own else "health/shared"]


def test_lemons_and_wear(ward: Ward) -> None:
    ward.ill.lemons.why[3] = ("3 failures in 28 days, others 0.2",)
    ward.ill.lemons.why[5] = ("4 failures in 28 days, others 0.2",)
    ward.ill.say("node", 5, WATCH, "gaps")
    ward.ill.wears("cdu.ua", 0, (9.0, 6.0, np.nan))
    found = {f.id: f for f in ward.look()}
    assert list(found) == ["health/lemon/lab/h/r1/node5", "health/wear/cdu.ua/lab/h/cdu1",
                           f"health/lemon/{NODE3}"]  # fmt: skip
    assert [f.severity for f in found.values()] == ["warning", "warning", "info"]
    assert found[f"health/lemon/{NODE3}"].evidence == ("3 failures in 28 days, others 0.2",)
    wear = found["health/wear/cdu.ua/lab/h/cdu1"]
    assert wear.title == "ua of lab/h/cdu1 reaches its limit within two weeks"
    assert wear.evidence == ("in about 9 days (90 % interval 6 to ?)",)
    ward.ill.wear.left.clear()
    ward.ill.wears("cdu.ua", 0, (15.0, 6.0, 20.0))
    assert not [f for f in ward.look() if f.id.startswith("health/wear/")]


@pytest.mark.parametrize(
    ("part", "index", "fault", "identity", "severity"),
    [
        ("pump", 1, "pump_trip", "health/pump/lab/h/cdu1#pump2", "critical"),
        # the node runs on the other one
        ("psu", 6, "psu_lost", f"health/psu/{NODE3}#psu1", "warning"),
    ],
)
def test_parts_outside_nodes(
    ward: Ward, part: str, index: int, fault: str, identity: str, severity: str
) -> None:
    ward.ill.say(part, index, FAILED, "it stands", action_name="replace", rule=fault)
    (only,) = ward.look()
    assert (only.id, only.severity) == (identity, severity)
    assert only.title == f"{identity.rpartition('health/' + part + '/')[2]}: {TITLES[fault]}"
    table, entity = ("cdu", 0) if part == "pump" else ("node", 3)
    ward.diagnose(fault, table, entity, "critical")
    assert ward.look() == []


def test_a_storm_ends_in_a_count() -> None:
    ward = Ward(racks="r[1-16]")
    nodes = ward.twin.site.sizes["node"]
    assert nodes > MOST
    for node in range(nodes):
        ward.ill.unwell("node", node)
    ward.ill.say("node", nodes - 1, FAILED, "it is off", action_name="reboot_node")
    found = ward.look()
    assert len(found) == MOST + 1
    assert found[0].id == "health/lab/h/r16/node17"  # the gravest first
    last = found[-1]
    assert (last.id, last.severity, last.count) == ("health/more", "warning", nodes - MOST)
    assert [f.id for f in ward.look()] == [f.id for f in found]


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(("gpu", "node", "psu", "pump")), st.integers(0, 143),
                          st.integers(0, 4)), max_size=12))  # fmt: skip
def test_ids_are_unique_and_each_suspect_is_told_once(said: list[tuple[str, int, int]]) -> None:
    ward = Ward()
    bad: set[str] = set()
    for part, index, level in said:
        n = len(ward.ill.verdicts.held[part].level)
        ward.ill.say(part, index % n, level, "x", action_name="drain")
    for i in np.flatnonzero(ward.ill.verdicts.held["gpu"].level >= DEGRADED).tolist():
        bad.add(f"health/{ward.twin.site.name('node', i // 4)}")
    for i in np.flatnonzero(ward.ill.verdicts.held["node"].level >= DEGRADED).tolist():
        bad.add(f"health/{ward.twin.site.name('node', i)}")
    ids = [f.id for f in ward.look()]
    assert len(ids) == len(set(ids))
    assert {i for i in ids if "/psu/" not in i and "/pump/" not in i} == bad


def test_what_the_diagnosis_tells_no_more_raises_no_alarm_of_its_own(ward: Ward) -> None:
    ward.ill.say("gpu", GPU2, DEGRADED, "errors grow", action_name="reset_gpu", rule="ecc_growth",
                 source=DIAGNOSIS)  # fmt: skip
    ward.diagnose("ecc_growth", "gpu", GPU2, "warning")
    assert ward.look() == []
    ward.faults.clear()
    assert ward.look() == []  # the verdict is only kept for a while
    ward.ill.say("gpu", GPU2, DEGRADED, "a row waits", rule="row_remap_pending")
    (only,) = ward.look()
    assert only.evidence == ("gpu2: a row waits",)
    # A match that a rule holds while the GPU is silent is no echo
    ward.ill.say("gpu", GPU2 + 4, FAILED, "off the bus", rule="gpu_off_bus", source=DIAGNOSIS)
    assert len(ward.look()) == 2


def test_a_lost_supply_is_told_once(ward: Ward) -> None:
    ward.ill.say("psu", 6, FAILED, "it gives 0 W", action_name="replace", rule="psu_lost", source=DIAGNOSIS)
    assert [f.severity for f in ward.look()] == ["warning"]
    ward.diagnose("psu_lost", "node", 3, "warning")
    assert ward.look() == []


def test_all_that_is_wrong_with_a_dpu_is_one_finding_that_names_it() -> None:
    twin = Twin(two_racks())
    ill = {"node.dpu2_temp_c": 108.0, "node.dpu2_health_state": 2.0, "node.dpu2_offload_state": 1.0}
    well = dict.fromkeys(ill, 0.0)
    for _ in range(60):
        twin.tick({key: np.where(np.arange(36) == 3, ill[key], well[key]) for key in ill})
    engine = twin.engine
    (only,) = findings(engine.health, engine.forecasts, engine.site, engine.windows, [], ())
    assert (only.id, only.severity) == (f"health/dpu/{NODE3}#dpu2", "critical")
    assert only.entities == (NODE3,)
    assert len([e for e in only.evidence if "offload" in e or "failed" in e or "°C" in e]) == 3
