"""Alarms of silence, of unguarded devices, of findings that grow and move; and their text."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.builders import Twin, eight_nodes, two_racks
from twin.catalogue import NS, START_NS, control_value
from twin.contracts import (
    AdviceRecord,
    ContingencyNote,
    DaemonRecord,
    EventRecord,
    Finding,
    FindingRecord,
    NarrowedRecord,
    brief_event,
)
from twin.report import sentence
from twin.telemetry import events as ev

OK = {"gpu.temp_c": 50.0}
RACK = {"rack.supply_temp_c": 35.0, "rack.return_temp_c": 50.0, "rack.flow_lpm": 96.0}


def ids(twin: Twin) -> list[str]:
    return [f.id for f in twin.decision.findings]


def finding(twin: Twin, identity: str) -> Finding:
    return twin.engine.findings.active[identity]


def some(count: int, first: int = 0, severity: str = "warning") -> Finding:
    names = tuple(f"g{i}" for i in range(first, first + min(count, 8)))
    return Finding("x", severity, f"{count} of them", names, (), 1.0, "", count)


def test_a_signal_that_falls_silent_everywhere_is_one_outage_with_its_name() -> None:
    twin = Twin(two_racks())
    twin.run(30, {**OK, **RACK, "gpu.hbm_temp_c": 65.0})
    flowless = {k: v for k, v in RACK.items() if k != "rack.flow_lpm"}
    twin.run(30, {**OK, **flowless})
    (outage,) = [f for f in twin.decision.findings if f.id.startswith("silence/")]
    assert outage.title.startswith(
        "No data from coolant flow of 2 racks and memory temperature of 144 GPUs of hall lab/h"
    )
    assert outage.title.endswith(": 146 signals")
    assert outage.severity == "warning"


def test_what_no_device_can_read_is_not_usable_and_not_silent() -> None:
    twin = Twin(eight_nodes())
    twin.run(5, OK)
    temp = np.full(8, 50.0)
    temp[3] = 999.0
    twin.run(20, {"gpu.temp_c": temp})
    assert ids(twin) == ["unusable/gpu.temp_c"]
    told = finding(twin, "unusable/gpu.temp_c")
    assert told.count == 1
    assert told.evidence[0] == "1 out of range"
    assert told.entities == (twin.site.name("gpu", 3),)


def test_a_gpu_that_reports_but_never_its_temperature_is_not_guarded() -> None:
    twin = Twin(eight_nodes())
    temp = np.full(8, 50.0)
    temp[0] = np.nan
    twin.run(30, {"gpu.temp_c": temp, "gpu.power_w": 300.0})
    told = finding(twin, "unguarded/gpu")
    assert told.title == "lab/h/r1/node0/gpu0 is not guarded: no reading with a limit"
    assert told.entities == (twin.site.name("gpu", 0),)
    assert told.evidence == ("1 have never reported temperature or thermal margin",)
    twin.run(11, {**OK, "gpu.power_w": 300.0})
    assert twin.decision.findings == ()


def test_a_replaced_gpu_that_stays_mute_is_not_guarded() -> None:
    twin = Twin(eight_nodes())
    twin.run(5, OK)
    gpu = twin.site.name("gpu", 0)
    temp = np.full(8, 50.0)
    temp[0] = np.nan
    twin.tick({"gpu.temp_c": temp}, ev.EntityReplaced(table="gpu", name=gpu, serial="s2"))
    twin.run(30, {"gpu.temp_c": temp})
    assert ids(twin) == ["unguarded/gpu"]
    assert finding(twin, "unguarded/gpu").entities == (gpu,)


def test_racks_and_gpus_without_a_profile_are_not_guarded() -> None:
    tree: dict[str, Any] = two_racks()
    tree["halls"][0]["racks"] = [
        {"name": "r1", "profile": "gb200-nvl72"},
        {"name": "r2", "nodes": 2, "gpus_per_node": 2},
    ]
    twin = Twin(tree)
    for _ in range(70):
        twin.tick({**OK, **RACK}, dt_s=6.0)
    told = finding(twin, "unguarded/gpu")
    assert (told.count, told.evidence) == (4, ("4 have no limit in a profile",))
    assert finding(twin, "unguarded/rack").entities == ("lab/h/r2",)


def test_what_is_active_is_as_last_seen() -> None:
    twin = Twin(eight_nodes())
    twin.run(5, OK)
    temp = np.full(8, 50.0)
    temp[0] = 999.0
    twin.run(20, {"gpu.temp_c": temp})
    assert finding(twin, "unusable/gpu.temp_c").count == 1
    temp[:] = 999.0
    twin.run(60, {"gpu.temp_c": temp})
    assert finding(twin, "unusable/gpu.temp_c").count == 8
    first = finding(twin, "unusable/gpu.temp_c").evidence
    twin.run(30, {"gpu.temp_c": temp})
    assert finding(twin, "unusable/gpu.temp_c").evidence != first


def test_the_journal_hears_of_growth_at_once_and_of_less_when_it_stands() -> None:
    findings = Twin(eight_nodes()).engine.findings

    def told(*said: Finding) -> list[int]:
        return [len(findings.raise_(f)) for f in said]

    assert told(some(4), some(5), some(7), some(8)) == [1, 0, 0, 1]
    assert findings.active["x"].count == 8
    assert told(some(4), some(8), some(4), some(4), some(4)) == [0, 0, 0, 1, 0], "it must stand"
    assert told(some(4, 100), some(4), some(4, 100), some(4, 100)) == [0, 0, 0, 1], "others"
    assert told(some(4, 100, "critical")) == [1]
    assert told(*[some(1), some(2)] * 10).count(1) <= 2, "no record for every change"


def test_a_read_back_is_shown_with_what_was_commanded() -> None:
    twin = Twin(eight_nodes())
    index = np.array([2], np.int32)
    (record,) = twin.engine.findings.mismatches(
        ("lab/h/r1/node0/gpu2",), "gpu.power_cap_w", index, "commanded 200, read 700"
    )
    assert isinstance(record, FindingRecord)
    assert record.evidence == ("commanded 200, read 700",)


def test_order_and_what_was_told_survive_a_restart() -> None:
    twin = Twin(eight_nodes())
    for name in ("z", "a"):
        twin.engine.findings.raise_(Finding(name, "info", "", (), (), 1.0, "", 3))
    twin.engine.findings.raise_(Finding("z", "info", "", (), (), 1.0, "", 4))
    back = twin.restarted(eight_nodes(), [])
    assert list(back.engine.findings.active) == ["z", "a"]
    assert back.engine.findings.journaled["z"].count == 3
    assert back.engine.checksum() == twin.engine.checksum()


@pytest.mark.parametrize(
    "event, words",
    [
        (ev.Held(author="ann", reason="smoke"), "ann holds the site: only protective commands (smoke)"),
        (
            ev.AuthorityChanged(author="bob", policy="operator", authority="off"),
            "bob sets the authority of operator to off",
        ),
        (
            ev.OperatorRequest(
                id="q", author="ann", control="gpu.power_cap_w", names=("g0",), lo=300, hi=4e2
            ),
            "ann requests power cap 300 W to 400 W for g0",
        ),
        (
            ev.JobStarted(job="j", nodes=tuple(f"n{i}" for i in range(100)), time_limit_s=7200.0),
            "job j runs on n0, n1, n2 and 97 more, at most 2 h",
        ),
        (
            ev.NodeTested(
                name="r1/n0",
                began_ns=START_NS,
                ended_ns=START_NS + 90 * NS,
                passed=False,
                test="dcgm",
                detail="ok\nGPU 2: memory",
            ),
            "the test dcgm of r1/n0 failed after 1 min 30 s: GPU 2: memory",
        ),
        (
            ev.OutlookTold(
                author="slurm",
                quantity="rack.power_w",
                name="r1",
                start_ns=START_NS,
                step_s=60.0,
                values=(306532.91728684155, 344800.0),
            ),
            "slurm expects rack power of r1 at 307 kW to 345 kW: 2 values every 1 min from 00:00:00 UTC",
        ),
        (
            ev.OutlookTold(
                author="slurm",
                quantity="rack.power_w",
                start_ns=START_NS,
                step_s=60.0,
                values=tuple(1e3 + n for n in range(100)),
            ),
            "slurm expects rack power at 1,000 W to 1,063 W at first: 100 values every 1 min "
            "from 00:00:00 UTC",
        ),
    ],
)
def test_an_event_of_the_journal_in_words(event: ev.Event, words: str) -> None:
    assert sentence(EventRecord(event=brief_event(event))) == words
    refused = EventRecord(event=brief_event(event), refused="no")
    assert sentence(refused) == f"{words}; refused: no"


def test_findings_and_verdicts_of_the_journal_in_words() -> None:
    finding = FindingRecord(
        id="x", severity="warning", title="9 gpu are hot", evidence=("why",), count=9,
        entities=("a", "b"), action="Look.", confidence_pu=1.0,
    )  # fmt: skip
    assert sentence(finding) == "warning: 9 gpu are hot; why; a, b and 7 more; Look."
    verdict = NarrowedRecord(control="gpu.power_cap_w", count=3, why="no room", policy="operator")
    assert sentence(verdict) == "operator: narrowed power cap of 3 GPUs: no room"


def test_every_event_has_a_sentence_of_its_own() -> None:
    """No class name, no field name and no raw container stands in it."""
    example = {"author": "ann", "name": "a", "table": "gpu", "names": ("a",), "control": "gpu.power_cap_w"}
    for kind in (k for k in vars(ev).values() if isinstance(k, type) and issubclass(k, ev.Held.__base__)):
        fields = msgspec.structs.fields(kind)
        if not kind.__struct_config__.tag or kind.__name__.startswith("_"):
            continue
        given = {f.name: example.get(f.name, _plain(f.type)) for f in fields if f.required}
        words = sentence(EventRecord(event=kind(**given)))
        assert kind.__name__ not in words, words
        assert not re.search(r"[{}\[\]]|\b\w+_(ns|s|id)\b", words), words


def _plain(kind: Any) -> Any:
    plain = {int: 3, float: 2.5, str: "x", bytes: b"x", tuple[str, ...]: ("a",)}
    if "None" in str(kind):
        return (1.0, None) if "..." in str(kind) else None
    return plain.get(kind, "done")


def test_an_instant_is_asked_for_and_no_duration() -> None:
    """A test of a node since 1.8e9 s is one that is asked for now; caps have four digits."""
    more = {"first_name": "a", "last_name": "a", "index": np.array([0], np.int32), "reason": "why",
            "names": ("a",), "policy": "p"}  # fmt: skip
    burn_in = AdviceRecord(control="node.burn_in_since_s", value=np.array([1795837872.0]), **more)
    assert sentence(burn_in) == "p would ask for a burn-in test of a: why"
    job = more | {
        "first_name": "job:j",
        "last_name": "job:j",
        "names": ("job:j",),
        "reason": "job j: save now",
    }
    save = AdviceRecord(control="job.checkpoint_since_s", value=np.array([1795837872.0]), **job)
    assert sentence(save) == "p would ask for a save of job:j: save now"
    pump = FindingRecord(
        id="f",
        severity="critical",
        title="t",
        entities=("a",),
        evidence=(),
        count=146,
        action="",
        confidence_pu=0.9,
    )
    assert sentence(pump) == "critical: t; a", "146 are what follows from it"
    cap = AdviceRecord(control="gpu.power_cap_w", value=np.array([691.225, 1065.46]), **more)
    assert sentence(cap) == "p would command power cap 691.2 W to 1,065 W for a: why"
    assert control_value(1795837872.0, "node.burn_in_since_s") == "2026-11-28 03:51:12 UTC"


def test_a_contingency_plan_in_words() -> None:
    note = ContingencyNote(delivered=72, gpus=288, epoch=1795837761, low_w=691.225, high_w=1065.46)
    words = "gave agents the caps for a lost side, for 288 GPUs: 691 W to 1,065 W"
    assert sentence(DaemonRecord(contingency=note)) == words
