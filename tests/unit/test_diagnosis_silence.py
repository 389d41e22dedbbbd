"""Devices that fall silent are reported at their common part; many of a kind are reported once.
May import `twin`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, site_of, two_racks
from twin.catalogue import NS
from twin.diagnosis import Topology, finding_of
from twin.diagnosis.cause import MAX_REPORTED, MOST_ALIKE, Cause, CauseBook
from twin.diagnosis.silence import RESET_S, _far_apart
from twin.diagnosis.xids import OFF_BUS_XID
from twin.telemetry import FaultReported

RNG = np.random.default_rng(3)


def speaking(quiet_gpus: Any = (), quiet_nodes: Any = (), nodes: bool = True, **more: Any) -> dict[str, Any]:
    """Readings of two racks of 18 nodes with four GPUs each, but of these."""
    gpu, node = RNG.normal(60.0, 0.5, 144), RNG.normal(4000.0, 20.0, 36)
    gpu[list(quiet_gpus)] = np.nan
    node[list(quiet_nodes)] = np.nan
    return {"gpu.temp_c": gpu} | ({"node.power_w": node} if nodes else {}) | more


def told(pod: Twin) -> list[tuple[str, str, int]]:
    return [(f.kind, f.table, f.entity) for f in pod.engine.diagnosis.faults]


@functools.cache
def _speaking(nodes: bool) -> Twin:
    pod = Twin(two_racks())
    for _ in range(40):
        pod.tick(speaking(nodes=nodes))
    return pod


def after(seconds: int = 30, nodes: bool = True, **quiet: Any) -> list[tuple[str, str, int]]:
    pod = copy.deepcopy(_speaking(nodes))
    for _ in range(seconds):
        pod.tick(speaking(nodes=nodes, **quiet))
    return told(pod)


def test_one_gpu_beside_others_that_speak_fell_off_the_bus() -> None:
    assert after(quiet_gpus=[6]) == [("gpu_off_bus", "gpu", 6)]
    assert after(quiet_gpus=[6], nodes=False) == [("gpu_off_bus", "gpu", 6)]


def test_the_silence_of_a_gpu_is_information_as_long_as_a_reset_takes_and_never_critical_by_itself() -> None:
    pod = copy.deepcopy(_speaking(True))
    for _ in range(30):
        pod.tick(speaking([6]))
    assert [(f.kind, f.severity) for f in pod.engine.diagnosis.faults] == [("gpu_off_bus", "info")]
    assert [f.severity for f in pod.engine.findings.active.values() if "gpu_off_bus" in f.id] == ["info"]
    pod.tick(speaking([6]), dt_s=RESET_S)
    pod.tick(speaking([6]))
    assert [(f.kind, f.severity) for f in pod.engine.diagnosis.faults] == [("gpu_off_bus", "warning")]
    assert not [f for f in pod.engine.findings.active.values() if f.severity == "critical"]


def test_a_gpu_that_says_that_it_falls_off_the_bus_is_critical_at_once() -> None:
    pod = copy.deepcopy(_speaking(True))
    name = pod.engine.site.name("gpu", 6)
    pod.tick(speaking(), FaultReported(id="x", table="gpu", name=name, code=OFF_BUS_XID))
    for dt_s in (*30 * [1.0], 700.0, 1.0, 1.0):  # and stays so, though its last words fade
        pod.tick(speaking([6]), dt_s=dt_s)
    assert [(f.kind, f.severity) for f in pod.engine.diagnosis.faults] == [("gpu_off_bus", "critical")]


@pytest.mark.parametrize(
    ("silent", "kind"), [([1], "node_silent"), (range(18), "outage")], ids=["its node", "its rack"]
)
@pytest.mark.parametrize("said", [True, False], ids=["critical", "warning"])
def test_a_gpu_off_the_bus_stays_an_alarm_while_its_telemetry_is_lost(
    silent: Any, kind: str, said: bool
) -> None:
    pod = copy.deepcopy(_speaking(True))
    xid = [FaultReported(id="x", table="gpu", name=pod.engine.site.name("gpu", 6), code=OFF_BUS_XID)]
    pod.tick(speaking(), *(xid if said else []))
    for dt_s in (*30 * [1.0], RESET_S, 1.0):
        pod.tick(speaking([6]), dt_s=dt_s)
    (known,) = [(f.kind, f.severity, f.since_ns) for f in pod.engine.diagnosis.faults]
    assert known[:2] == ("gpu_off_bus", "critical" if said else "warning")
    gpus = [gpu for node in silent for gpu in range(4 * node, 4 * node + 4)]
    for dt_s in (*60 * [1.0], 700.0, 1.0):
        pod.tick(speaking(gpus, silent), dt_s=dt_s)
        assert known in [(f.kind, f.severity, f.since_ns) for f in pod.engine.diagnosis.faults]
    assert kind == "outage" or (kind, "node", 1) in told(pod)
    for _ in range(30):
        pod.tick(speaking([6]))
        assert known in [(f.kind, f.severity, f.since_ns) for f in pod.engine.diagnosis.faults]
    for _ in range(30):
        pod.tick(speaking())
    assert told(pod) == [], "it reports again"


def test_nodes_of_many_racks_have_a_source_in_common_if_they_fall_silent_together() -> None:
    """Five nodes of as many racks, two of another: within seconds, or minutes apart as nodes restart."""
    rack_of, silent = np.arange(40) // 4, np.isin(np.arange(40), [0, 5, 9, 13, 17, 20, 21])
    for apart_s, alike in ((2.0, True), (200.0, False)):
        since_ns = START_NS + np.arange(40) * round(apart_s * NS) * silent
        assert (_far_apart(since_ns, silent, rack_of) == (silent & alike)).all()
    since_ns = np.where(rack_of < 2, START_NS, START_NS + 600 * NS)
    assert not _far_apart(since_ns, silent & (rack_of < 4), rack_of).any()


@pytest.mark.parametrize("nodes", [True, False])
def test_all_gpus_of_a_node_are_its_agent(nodes: bool) -> None:
    assert after(quiet_gpus=range(8, 12), nodes=nodes) == [("node_silent", "node", 2)]


def test_gpus_of_a_node_that_heat_shut_down_are_no_silence_of_it() -> None:
    pod = Twin(two_racks())
    hot = np.where(np.arange(144) // 4 == 2, 88.0, 60.0)
    for second in range(150):
        values = speaking(range(8, 12) if second >= 60 else ())
        if second in range(50, 60):
            values["gpu.temp_c"] = hot + RNG.normal(0, 0.3, 144)
        pod.tick(values)
        if second >= 60:
            assert not {"node_silent", "gpu_off_bus"} & {k for k, *_ in told(pod)}


def test_a_node_with_its_gpus_is_one_silence() -> None:
    assert after(quiet_gpus=range(8, 12), quiet_nodes=[2]) == [("node_silent", "node", 2)]


@pytest.mark.parametrize("gpus", [range(72), range(8), range(144), range(0, 144, 4), range(0, 40, 4)])
def test_what_falls_silent_together_has_lost_its_source_and_is_no_fault(gpus: Any) -> None:
    assert after(quiet_gpus=gpus) == []
    assert after(quiet_gpus=gpus, nodes=False) == []


def test_a_node_that_is_off_is_not_silent_as_well_and_a_rack_that_is_off_is_no_fault() -> None:
    pod, on = copy.deepcopy(_speaking(True)), np.ones(36)
    pod.tick(speaking() | {"node.power_on_state": on})
    on[2] = 0.0
    for _ in range(30):
        pod.tick(speaking(range(8, 12), [2]) | {"node.power_on_state": on})
    assert told(pod) == [("node_down", "node", 2)]
    on[:18] = 0.0
    for _ in range(60):
        pod.tick(speaking(range(72), range(18)) | {"node.power_on_state": on})
    assert told(pod) == []


@pytest.mark.long
def test_a_feed_without_voltage_reports_no_frequency_and_that_is_no_silence() -> None:
    """Of one lost feed and of all; what its meter no longer reports is missed when it is back."""
    alive = {"feeder.voltage_v": 415.0, "feeder.power_w": 90e3, "feeder.frequency_hz": 50.0}
    for lost in ([True, False], [True, True]):
        pod = Twin(two_racks())
        for _ in range(40):
            pod.tick(speaking(**{k: v + RNG.normal(0.0, 0.01, 2) for k, v in alive.items()}))
        dark = {k: np.where(lost, 0.0 if k != "feeder.frequency_hz" else np.nan, v) for k, v in alive.items()}
        for _ in range(60):
            pod.tick(speaking(**{k: v + RNG.uniform(0.0, 0.05, 2) for k, v in dark.items()}))
        assert {kind for kind, *_ in told(pod)} == {"grid_event" if all(lost) else "feed_lost"}
        assert not [f.id for f in pod.decision.findings if f.id.startswith("silence/")]
        for _ in range(60):
            now = alive | {"feeder.frequency_hz": dark["feeder.frequency_hz"]}
            pod.tick(speaking(**{k: v + RNG.normal(0.0, 0.01, 2) for k, v in now.items()}))
        missed = [f.title for f in pod.decision.findings if "frequency" in f.title]
        assert len(missed) == 1


def silences(pod: Twin) -> list[str]:
    return [f.id for f in pod.decision.findings if f.id.startswith(("silence/", "fault/node_silent"))]


@pytest.mark.long
@pytest.mark.parametrize("feeds", [1, 2])
def test_what_has_no_power_is_silent_for_that_until_its_nodes_can_have_started(feeds: int) -> None:
    """With both feeds lost, nodes and GPUs are part of that; with one, nothing explains their silence."""
    pod = copy.deepcopy(_speaking(True))
    volts = np.where(np.arange(2) < feeds, 0.0, 415.0)
    for second in range(330):
        lost = 30 <= second < 130
        quiet = {"quiet_gpus": range(144), "quiet_nodes": range(36)} if 30 <= second < 300 else {}
        now = volts if lost else np.full(2, 415.0)
        pod.tick(speaking(**quiet, **{"feeder.voltage_v": now + RNG.uniform(0.0, 0.05, 2)}))
        if feeds == 2:
            assert silences(pod) == []
        elif second == 100:
            assert silences(pod) != []


@pytest.mark.long
def test_what_heat_shuts_down_behind_a_stopped_pump_is_part_of_that_and_known_when_it_runs_again() -> None:
    """GPUs that said that they fell off the bus; one that said nothing is missed when the pumps run."""
    pod = Twin(two_racks())
    fallen = [i for i in range(72) if i != 9]
    hot = np.where(np.arange(144) < 72, 88.0, 60.0)
    for second in range(420):
        runs = not 60 <= second < 120
        pumps = dict.fromkeys(("cdu.pump1_speed_pu", "cdu.pump2_speed_pu"), 0.7 * runs)
        pumps |= {"cdu.flow_lpm": 200.0 * runs, "rack.flow_lpm": RNG.normal(90.0, 0.5, 2) * runs}
        values = speaking(range(72) if second >= 70 else (), **pumps)
        if second in range(62, 70):
            values["gpu.temp_c"] = hot + RNG.normal(0, 0.3, 144)
        codes = fallen if second == 70 else []
        pod.tick(
            values,
            *(
                FaultReported(
                    id=f"x{i}", table="gpu", name=pod.site.name("gpu", i).partition("/h/")[2], code=79
                )
                for i in codes
            ),
        )
        if second < 120:
            assert silences(pod) == []
    assert silences(pod) == ["silence/lab/h/r1/node2/gpu1"]


def test_more_than_a_few_of_a_kind_are_one_of_what_is_above() -> None:
    places = Topology(site_of(two_racks()))
    book = CauseBook(places)
    some = [Cause("gpu_off_bus", "gpu", i, evidence=("quiet",), hold_s=0.0) for i in range(MOST_ALIKE)]
    book.update(some, 10 * NS)
    assert len(book.alarms(book.faults())) == MOST_ALIKE
    more = [*some, Cause("gpu_off_bus", "gpu", 71, hold_s=0.0)]
    book.update(more, 11 * NS)
    (fault,) = book.alarms(book.faults())
    assert (fault.kind, fault.table, fault.entity, fault.count) == ("gpu_off_bus", "rack", 0, MOST_ALIKE + 1)
    assert "lab/h/r1/node0/gpu0" in fault.evidence[0]
    title = finding_of(fault, places.site).title
    first = "lab/h/r1/node0/gpu0 has fallen off the bus"
    assert title == f"{first}; likewise 20 more GPUs of lab/h/r1", "the rack itself has not"
    book.update([*more, Cause("gpu_off_bus", "gpu", 143, hold_s=0.0)], 12 * NS)
    (fault,) = book.alarms(book.faults())
    assert (fault.table, fault.entity) == ("cdu", 0)


@pytest.mark.parametrize(("kind", "table"), [("leak", "rack"), ("xid_burst", "gpu")])
def test_a_full_book_of_many_alike_has_room_for_another_kind_as_grave(kind: str, table: str) -> None:
    book = CauseBook(Topology(site_of(two_racks(racks="r[1-60]"))))
    many = "node_down" if kind == "leak" else "node_silent"
    alike = [Cause(many, "node", i, hold_s=0.0) for i in range(MAX_REPORTED + 5)]
    for second in range(3):
        book.update(alike, (10 + second) * NS)
        assert (len(book.reported), len(book.alarms(book.faults()))) == (MAX_REPORTED, 1)
    for second in range(3):
        book.update([*alike, Cause(kind, table, 3, hold_s=0.0)], (20 + second) * NS)
        assert len(book.reported) == MAX_REPORTED
        assert {f.kind for f in book.alarms(book.faults())} == {many, kind}


def test_a_crowd_counts_those_that_are_not_named() -> None:
    places = Topology(site_of(two_racks()))
    book = CauseBook(places)
    named = [Cause("link_down", "node", i, evidence=("dark",), hold_s=0.0) for i in range(10)]
    named[0].more = 90
    book.update(named, 10 * NS)
    (fault,) = book.alarms(book.faults())
    assert (fault.table, fault.entity, fault.count) == ("rack", 0, 100)
    found = finding_of(fault, places.site)
    assert found.title == "lab/h/r1/node0 is down; likewise 99 more nodes of lab/h/r1"
    assert found.evidence == ("lab/h/r1/node0: dark",), "the title says the rest"


def test_a_queue_in_which_nothing_waits_has_no_next_start_and_no_silent_sensor() -> None:
    pod = Twin(two_racks())
    for tick in range(30):
        waits = {"site.next_start_s": 600.0} if tick < 15 else {}
        pod.tick({"site.outdoor_temp_c": 20.0 + 0.1 * (tick % 3)} | waits, dt_s=60.0)
    assert [f.kind for f in pod.engine.diagnosis.faults] == []
