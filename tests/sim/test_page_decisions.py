"""The page of decisions in a browser, for who asks months later why a node was drained."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.support.browser import Browser, Screen, browser, shared_browser
from tests.support.in_process_daemon import Desk, serving_aside
from twin.catalogue import NS
from twin.contracts import (
    AccountRecord,
    AuthorityRecord,
    CommandRecord,
    Decision,
    EventRecord,
    FindingRecord,
    JournalRecord,
    ManifestRecord,
)
from twin.run import OPEN, JournalWriter, verify_journal
from twin.telemetry import Event, events as ev

__all__ = ["browser", "shared_browser"]
pytestmark = pytest.mark.slow
MARCH_NS = 1_678_183_200 * NS  # 2023-03-07T10:00:00Z
NODE, SPARE = "lab/h/r1/node3", "lab/h/r2/node1"
EVIDENCE = "row remaps fail on GPU 2; " + "seen again and again, " * 60 + "until the end"


def phase(before: str, after: str, why: str, **more: str) -> AccountRecord:
    account = {"what": "phase", "node": NODE, "from": before, "to": after, "why": why, **more}
    return AccountRecord(policy="replacement", account=account)


def story(node: int) -> list[tuple[int, JournalRecord]]:
    """(seconds after ten, line) of a drain, and of a job that ran there."""
    job = ev.JobStarted(id="j", job="train-7", nodes=(NODE, "lab/h/r1/node4"))
    drain = CommandRecord(
        control="node.service_level", policy="replacement", first_name=NODE, last_name=NODE, names=(NODE,),
        index=np.array([node], np.int32), value=np.array([3.0]), reason="row remaps fail", epoch=1,
        first_command=7, expires_ns=MARCH_NS + 7200 * NS, deadline_ns=MARCH_NS + 900 * NS,
    )  # fmt: skip
    granted = {"author": "ada", "policy": "replacement", "authority": "act"}
    worn = FindingRecord(
        id=f"health/node/{NODE}", severity="warning", title="the node wears out", entities=(f"node:{NODE}",),
        evidence=(EVIDENCE,), confidence_pu=0.9, action="drain it",
    )  # fmt: skip
    return [
        (-7200, EventRecord(event=ev.AuthorityChanged(id="a1", author="ada", policy="replacement",
                                                      authority="act"))),
        (-7199, AuthorityRecord(reason="a week of good advice", event="a1", **granted)),
        (-3600, EventRecord(event=job)),
        (0, worn),
        (60, phase("in_service", "draining", "a drain costs least", spare=SPARE)),
        (61, drain),
        (800, EventRecord(event=ev.JobEnded(id="e", job="train-7", reason="saved and moved"))),
        (805, phase("draining", "out", "it reads drained")),
        (90_000, phase("probation", "in_service", "it passed its burn-in")),
    ]  # fmt: skip


class RecordedDesk(Desk):
    """A desk whose run began in March, and that writes its ticks into the same journal."""

    def start(self) -> None:
        """On the daemon's loop: the journal of then, in segments, and today's ticks."""
        live, folder = self.pod.live, self.folder / "run"
        self.writer = JournalWriter(folder, durable=False, segment_bytes=4000)
        node = live.engine.site.entity("node", NODE)
        assert node is not None
        self.put(0, MARCH_NS - 86_400 * NS, ManifestRecord(format=1, authority={"replacement": "advise"}))
        for tick, (at_s, record) in enumerate(story(node)):
            self.put(tick, MARCH_NS + at_s * NS, record)
        settle = live.settle

        def record_too(decision: Decision, events: tuple[Event, ...]) -> None:
            first_seq = self.writer.chain.seq
            self.writer.write(decision)
            if self.writer.full:
                self.writer.rotate()
            settle(decision, events, first_seq)

        live.run_dir, live.settle = str(folder), record_too  # type: ignore[method-assign]
        live.lines.clear()
        for second in range(8):
            self.pod.tick({"gpu.temp_c": 95.0 if second % 2 else 60.0})

    def put(self, tick: int, now_ns: int, record: JournalRecord) -> None:
        """One line; small segments, so that the story is in several."""
        self.writer.append([self.writer.chain.line(record, tick, now_ns)])
        if self.writer.full:
            self.writer.rotate()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedDesk]:
    """A daemon with a journal from March on."""
    with serving_aside(tmp_path, monkeypatch, RecordedDesk) as made:
        made.do(made.start)
        yield made


def export(screen: Screen, kind: str) -> str:
    with screen.page.expect_download() as download:
        screen.page.get_by_role("button", name=kind, exact=True).click()
    return Path(download.value.path()).read_text()


def test_why_a_node_was_drained_in_march_is_answered_by_the_page_alone(
    browser: Browser, desk: RecordedDesk
) -> None:
    """Found by its time, with who let it act and what came of it; its whole case, exported with a proof."""
    screen = browser.open(desk.pod.url)
    screen.log_in(desk.pod.secrets["viewer"])
    screen.go("decisions")
    page = screen.page
    screen.shows("the journal begins at 2023-03-06 10:00:00")
    page.locator("[name=from]").fill("March 2023")
    page.get_by_role("button", name="Search", exact=True).click()
    screen.shows("expected a time in UTC, such as")
    page.locator("[name=from]").fill("2023-03-07")
    page.locator("[name=to]").fill("2023-03-07 12:00")
    page.get_by_role("button", name="Search", exact=True).click()
    screen.shows("searched from 2023-03-07 00:00:00 UTC to 2023-03-07 12:00:00 UTC")
    line = page.locator(".timeline .k-command .line")
    line.click()
    assert "2023-03-07" in line.inner_text()
    screen.shows("authority act, given by ada (2023-03-07 08:00", "a week of good advice")
    assert "the node wears out" in page.locator(".chain").inner_text()
    screen.shows("Next phase", "it reads drained", "2023-03-07 10:13:25")
    link = page.get_by_role("link", name="Link to this decision").get_attribute("href")
    page.get_by_role("button", name="Whole case", exact=True).click()
    screen.shows("saved and moved", "it reads drained", "passed its burn-in", "the node wears out", "train-7")
    told = json.loads(export(screen, "JSON"))
    head = told["export"]
    assert (head["site"], head["exporter"]) == ("lab", "viewer-1")
    assert f"node:{NODE}" in head["entity"]
    assert f"node:{SPARE}" in head["entity"]
    assert "job:train-7" in head["entity"]
    run = desk.folder / "run"
    assert head["journal_last_hash"] == verify_journal(run / OPEN).head
    assert head["verify"] == f"racktwin journal verify {run}"
    kinds = [x["kind"] for x in told["lines"]]
    assert kinds.count("account") == 3
    assert {"finding", "command", "event"} <= {*kinds}
    rows = [*csv.reader(io.StringIO(export(screen, "CSV")))]
    assert ["journal_last_hash", head["journal_last_hash"]] in rows
    assert any(EVIDENCE in cell for row in rows for cell in row)
    assert link is not None
    again = browser.open(desk.pod.url)
    again.log_in(desk.pod.secrets["viewer"])
    again.go(link.removeprefix("#/"))
    again.shows("given by ada", "it reads drained")
    at = next(x["at"] for x in told["lines"] if x["kind"] == "command")
    assert at in link
    again.go(f"decisions/{quote(f'at={at}', safe='')}")
    again.shows("The decision of this link", "given by ada", "Lines around it")
    assert screen.complaints == again.complaints == []


@pytest.mark.long
def test_the_record_names_its_proof_and_a_pruned_link_says_so(browser: Browser, desk: RecordedDesk) -> None:
    screen = browser.open(desk.pod.url)
    screen.log_in(desk.pod.secrets["viewer"])
    screen.go("decisions")
    run = desk.folder / "run"
    screen.shows("Hash of the last line", verify_journal(run / OPEN).head, f"racktwin journal verify {run}")
    screen.shows("holds over the last")
    shown: Any = screen.page.locator(".timeline .line").count()
    screen.page.get_by_role("button", name="Older", exact=True).click()
    screen.shows("it passed its burn-in")
    assert screen.page.locator(".timeline .line").count() > shown
    screen.go(f"decisions/{quote('at=1600000000000000000.3', safe='')}")
    screen.shows("no longer in the journal (kept since 2023-03-06 10:00")
    assert all("404" in c for c in screen.complaints)
