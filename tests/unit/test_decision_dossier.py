"""The dossier of a past decision, over journals written line by line: authority, approval, outcome, case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, two_racks
from twin.api import Runtime
from twin.api.page import dossier_reader
from twin.catalogue import NS
from twin.config import Config, Loaded
from twin.contracts import (
    AccountRecord,
    AcksRecord,
    ApprovalDroppedRecord,
    AuthorityRecord,
    CommandRecord,
    EventRecord,
    FailedRecord,
    FindingRecord,
    JournalRecord,
    LapsedRecord,
    ManifestRecord,
)
from twin.run import OPEN
from twin.run.journal import Chain
from twin.telemetry import events as ev

THEN_NS = START_NS - 100_000 * NS
CAP, LEVEL = "gpu.power_cap_w", "node.service_level"
GPU, NODE, SPARE = "lab/h/r1/node3/gpu1", "lab/h/r1/node3", "lab/h/r2/node0"
Line = tuple[int, JournalRecord]


class Told:
    """A daemon that holds a journal of these lines, and what it tells of one of them."""

    def __init__(self, folder: Path) -> None:
        self.twin = Twin(two_racks())
        self.live = Runtime(
            Loaded(Config(site="s", broker="embedded"), folder), self.twin.engine, 0, str(folder)
        )
        self.folder = folder

    def gpu(self, name: str = GPU) -> int:
        row = self.twin.site.entity("gpu", name)
        assert row is not None
        return row

    def of(self, at: int, *lines: Line) -> dict[str, Any]:
        """Of the line with this number; instants are seconds before the daemon's start."""
        chain = Chain()
        data = [
            chain.line(record, i, START_NS + (at_s - 100_000) * NS) for i, (at_s, record) in enumerate(lines)
        ]
        (self.folder / OPEN).write_bytes(b"".join(line + b"\n" for line in data))
        self.twin.engine.state.now_ns = START_NS
        return dossier_reader(self.live).read((THEN_NS + lines[at][0] * NS, at), None)

    def cap(self, at_s: int = 10, *names: str, **more: Any) -> Line:
        index = np.array([self.gpu(n) for n in names or (GPU,)], np.int32)
        ends = {"first_name": (names or (GPU,))[0], "last_name": (names or (GPU,))[-1]}
        body = {"control": CAP, "policy": "power_cap", "index": index, "value": np.full(len(index), 500.0),
                "reason": "the feeder is full", "epoch": 1, "first_command": 1,
                "expires_ns": THEN_NS + (at_s + 40) * NS,
                "deadline_ns": THEN_NS + (at_s + 20) * NS}  # fmt: skip
        return at_s, CommandRecord(**(body | ends | more))


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def event(at_s: int, of: Any, refused: str | None = None) -> Line:
    return at_s, EventRecord(event=of, refused=refused)


def manifest(at_s: int = 0, **authority: str) -> Line:
    return at_s, ManifestRecord(format=1, authority=authority)


# -- what came of a command


def test_what_came_of_a_command_is_the_weightiest_line_of_that_very_one(told: Told) -> None:
    """Lines on another GPU, another control, from before or from long after say nothing of it."""
    index, other = (np.array([told.gpu(n)], np.int32) for n in (GPU, "lab/h/r1/node3/gpu2"))
    failed = FailedRecord(control=CAP, index=index, why="no answer")
    acked = AcksRecord(control=CAP, state="done", count=1)
    silent = FindingRecord(
        id=f"readback/{CAP}",
        severity="warning",
        title="reads differ",
        entities=(f"gpu:{GPU}",),
        evidence=(),
        confidence_pu=1.0,
        action="",
        count=1,
    )
    cases: list[tuple[str, list[Line]]] = [
        ("failed", [(12, acked), (15, failed)]),
        ("mismatch", [(12, acked), (14, silent)]),
        ("lapsed", [(13, LapsedRecord(control=CAP, index=index, becomes="safe"))]),
        ("superseded", [(12, acked), told.cap(16)]),
        ("answered", [(12, acked)]),
        ("not recorded", [(12, AcksRecord(control=CAP, state="accepted", count=1))]),
        ("not recorded", [(12, FailedRecord(control=CAP, index=other, why="no answer"))]),
        ("not recorded", [(12, FailedRecord(control=LEVEL, index=index, why="no answer"))]),
        ("not recorded", [(500, failed)]),
        ("not recorded", [(12, AcksRecord(control=CAP, state="done", count=1, refused="superseded"))]),
    ]
    for state, after in cases:
        found = told.of(2, manifest(power_cap="act"), (9, failed), told.cap(), *after)["confirmation"]
        assert found["state"] == state, after
        assert ("none of this one did by its deadline" in found["text"]) == (state == "not recorded")
        if state != "not recorded":
            assert THEN_NS + 10 * NS < found["at_ns"] <= THEN_NS + 16 * NS


def test_answers_to_several_batches_of_a_control_confirm_none_of_them(told: Told) -> None:
    acked = AcksRecord(control=CAP, state="done", count=2)
    both = told.cap(), told.cap(11, "lab/h/r2/node0/gpu0")
    found = told.of(1, manifest(power_cap="act"), *both, (12, acked))["confirmation"]
    assert found["state"] == "not recorded"
    batch = told.cap(10, "lab/h/r1/node3/gpu1", "lab/h/r1/node3/gpu2")
    for count, state in ((1, "not recorded"), (2, "answered")):
        answer = AcksRecord(control=CAP, state="done", count=count)
        assert told.of(1, manifest(power_cap="act"), batch, (12, answer))["confirmation"]["state"] == state


# -- authority


def test_the_authority_is_the_one_of_then_with_who_gave_it(told: Told) -> None:
    """The last change before the line counts; one of another policy, a refused and a later one do not."""
    ada = ev.AuthorityChanged(id="a", author="ada", policy="power_cap", authority="act")
    bob = ev.AuthorityChanged(id="b", author="bob", policy="power_cap", authority="off")
    eve = ev.AuthorityChanged(id="e", author="eve", policy="thermal_guard", authority="approve")
    why = AuthorityRecord(author="ada", policy="power_cap", authority="act", reason="good advice", event="a")
    start = manifest(0, power_cap="advise", thermal_guard="advise")
    told_then = told.of(
        5,
        start,
        event(1, ada),
        (2, why),
        event(3, bob, "no right"),
        event(4, eve),
        told.cap(),
        event(11, bob),
    )
    assert told_then["verdict"] | {"at_ns": 0} == {
        "policy": "power_cap", "authority": "act", "by": "ada", "reason": "good advice", "at_ns": 0,
        "basis": "given by a person", "approval": None}  # fmt: skip
    # In the tick of the change, whose reason follows it
    same = told.of(2, start, event(10, ada), told.cap(), (11, why))["verdict"]
    assert (same["authority"], same["by"], same["reason"]) == ("act", "ada", "good advice")
    # A segment begins: the manifest says the level, the line of before who gave it
    later = told.of(4, start, event(1, ada), (2, why), manifest(5, power_cap="act"), told.cap())["verdict"]
    assert (later["authority"], later["by"]) == ("act", "ada")
    # The configuration says another level since: nobody is recorded to have given that one
    configured = told.of(4, start, event(1, ada), (2, why), manifest(5, power_cap="approve"), told.cap())[
        "verdict"
    ]
    assert (configured["authority"], configured["by"]) == ("approve", "")
    assert "manifest" in configured["basis"]
    assert told.of(0, told.cap())["verdict"]["authority"] == "not recorded"


def test_the_approval_is_one_that_was_in_force_for_that_control_and_entity(told: Told) -> None:
    def approved(key: str, control: str = CAP, until_s: int = 0, *names: str) -> ev.Approved:
        expires_ns = THEN_NS + until_s * NS if until_s else 0
        return ev.Approved(id=key, author=key, policy="power_cap", control=control, names=names,
                           expires_ns=expires_ns, reason="hot")  # fmt: skip

    start, ada = manifest(power_cap="approve"), event(1, approved("ada"))
    elsewhere = event(2, approved("bob", CAP, 0, "lab/h/r2/node0/gpu0"))
    cases: list[tuple[list[Line], str | None]] = [
        ([ada], "ada"),
        ([ada, event(2, approved("bob", LEVEL)), event(3, approved("eve", CAP, 5))], "ada"),
        ([event(1, approved("ada", CAP, 0, GPU)), elsewhere], "ada"),
        ([event(1, approved("ada"), "no such control")], None),
        ([ada, event(2, ev.ApprovalWithdrawn(author="ada", approval="ada"))], None),
        ([ada, (2, ApprovalDroppedRecord(id="ada"))], None),
        ([event(1, approved("ada", CAP, 0, *[f"lab/h/r{i}" for i in range(64)], "and 9 more"))], "ada"),
    ]
    for lines, by in cases:
        verdict = told.of(len(lines) + 1, start, *lines, told.cap())["verdict"]
        assert (verdict["approval"] or {"by": None})["by"] == by, lines


# -- case


def phase(at_s: int, before: str, after: str, **more: Any) -> Line:
    account = {"what": "phase", "node": NODE, "from": before, "to": after, **more}
    return at_s, AccountRecord(policy="replacement", account=account)


def test_a_case_holds_the_spare_and_the_jobs_between_leaving_service_and_coming_back(told: Told) -> None:
    """Not a job that had ended before, nor the spare of the case before, nor one that began after."""
    node = told.twin.site.entity("node", NODE)
    drain = CommandRecord(
        control=LEVEL,
        policy="replacement",
        first_name=NODE,
        last_name=NODE,
        index=np.array([node], np.int32),
        value=np.array([3.0]),
        reason="worn",
        epoch=1,
        first_command=1,
        expires_ns=0,
        deadline_ns=0,
    )
    lines = [
        manifest(replacement="act"),
        event(10, ev.JobStarted(id="1", job="old", nodes=(NODE,))),
        phase(20, "in_service", "out", spare="lab/h/r2/node7"),
        phase(30, "out", "in_service"),
        event(40, ev.JobEnded(id="2", job="old")),
        event(50, ev.JobStarted(id="3", job="train", nodes=(NODE, "lab/h/r1/node4"))),
        event(51, ev.JobStarted(id="4", job="elsewhere", nodes=("lab/h/r1/node4",))),
        phase(20_000, "in_service", "draining", spare=SPARE),
        (20_001, drain),
        phase(20_700, "draining", "out"),
        phase(60_000, "probation", "in_service"),
        event(70_000, ev.JobStarted(id="5", job="later", nodes=(NODE,))),
    ]
    found = told.of(8, *lines)
    assert found["case"]["entities"] == [f"node:{NODE}", f"node:{SPARE}", "job:train"]
    assert found["case"]["since_ns"] == THEN_NS + (20_000 - 3600) * NS
    assert found["case"]["until_ns"] == THEN_NS + 60_060 * NS
    assert found["confirmation"]["state"] == "next phase"
    assert found["confirmation"]["at_ns"] == THEN_NS + 20_700 * NS
    assert found["notes"] == []


def test_the_case_of_a_job_is_the_time_that_it_ran(told: Told) -> None:
    """From its last start before the line to its first end after it; another job's are none of it."""
    job = event(100, ev.JobStarted(id="1", job="train", nodes=(NODE,)))
    lines = [
        event(10, ev.JobStarted(id="0", job="train", nodes=(SPARE,))),
        event(20, ev.JobEnded(id="9", job="train")),
        job,
        event(300, ev.JobEnded(id="2", job="trainer")),
        event(400, ev.JobEnded(id="3", job="train")),
        event(500, ev.JobEnded(id="4", job="train")),
    ]
    case = told.of(2, *lines)["case"]
    assert case["since_ns"] == THEN_NS + 40 * NS
    assert case["until_ns"] == THEN_NS + 460 * NS
    assert case["entities"] == ["job:train"]
