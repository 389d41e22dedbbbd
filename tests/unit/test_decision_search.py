"""Search of decisions over a real journal of several segments, against a plain reading of its files."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.golden_story import START_NS, spec
from tests.support.in_process_daemon import Pod, serve, serving_aside
from tests.support.rotated_run import run
from twin.api import JournalLine
from twin.api.page import DecisionQuestion, decision_search
from twin.api.page.decision_search import lines_in_memory
from twin.api.runtime import QUIET_KINDS, is_routine
from twin.catalogue import NS, TABLES
from twin.contracts import column, read_record
from twin.engine import Engine
from twin.run import OPEN, Keeping, journal_walk, verify_journal
from twin.site import build_site

SECONDS = 200
SMALL = Keeping(trace_s=15.0, journal_bytes=40_000, reserve_bytes=0)
NODE = "golden/h1/r1/node0"
Recorded = tuple[Path, Engine]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run of which a rack is added before the other, so that all numbers of GPUs move."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run(folder, SECONDS, SMALL)


def plain(folder: Path) -> list[dict[str, Any]]:
    """All lines, oldest first, read as anybody would, each with the site that it was written under."""
    numbered = sorted(folder.glob("journal-*.jsonl"), key=lambda p: int(p.stem[8:]))
    lines = [
        json.loads(text) for p in [*numbered, folder / "journal.jsonl"] for text in p.read_text().splitlines()
    ]
    site = build_site(spec(["r1"]))
    for line in lines:
        if line["kind"] == "site":
            site = build_site(spec(["r0", "r1"]))
        line["site"] = site
    return lines


def said(value: Any) -> Iterator[str]:
    """Each text in a body."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from said(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from said(inner)
    elif isinstance(value, str):
        yield value


def places(line: dict[str, Any]) -> set[str]:
    """The entities of a line: those of its columns on the site of then, and those that it names."""
    body, site = line["body"], line["site"]
    event = body.get("event", {})
    texts = [body.get(k, "") for k in ("from", "to", "name")] + [event.get("name", "")]
    texts += [n for k in ("names", "entities", "nodes") for n in (*body.get(k, ()), *event.get(k, ()))]
    texts += [body["id"].partition("/")[2]] if line["kind"] in ("cleared", "alarm") else []
    texts += [v for v in body.get("account", {}).values() if isinstance(v, str) and "/" in v]
    out = {site.name(t, i) if (i := site.entity(t, n)) is not None else n
           for n in texts for t in ("node", "gpu", "rack")}  # fmt: skip
    for text in texts:
        for mark in (":", "/"):
            head, _, tail = text.partition(mark)
            out |= {tail.partition("#")[0]} if head in TABLES else set()
    for part in body.get("proposals", [body]):
        table = part.get("control", "").partition(".")[0]
        for name in ("index", "gone"):
            if table in ("gpu", "node", "rack", "cdu") and name in part:
                out |= {site.name(table, int(i)) for i in column(part[name])}
    return out


def expected(lines: list[dict[str, Any]], asked: dict[str, Any]) -> list[int]:
    """Numbers of the lines that answer a question, newest first."""
    out = []
    for line in lines:
        body, kinds = line["body"], asked.get("kind", "").split(",")
        if line["kind"] not in kinds if asked.get("kind") else line["kind"] in QUIET_KINDS:
            continue
        if not asked.get("since", 0) <= line["now_ns"] <= asked.get("until", 2**63):
            continue
        source = body.get("event", body)
        controls = (
            [p["control"] for p in body["proposals"]] if "proposals" in body else [source.get("control")]
        )
        if "control" in asked and asked["control"] not in controls:
            continue
        if "policy" in asked and source.get("policy") != asked["policy"]:
            continue
        if place := asked.get("entity"):
            found = places(line)
            inside = asked.get("below") and any(p.startswith(place + "/") for p in found)
            if place not in found and not inside:
                continue
        out.append(line["seq"])
    return out[::-1]


def on_journal(
    tmp_path: Path, recorded: Recorded, check: Callable[[Pod], Awaitable[None]], kept: int = 0
) -> None:
    """A daemon that serves this run, with the last lines of it in memory."""
    folder, engine = recorded

    async def served(pod: Pod) -> None:
        pod.live.run_dir, pod.live.engine = str(folder), engine
        pod.live.lines.clear()
        for line in plain(folder)[-kept:] if kept else ():
            record = read_record(line["kind"], line["body"])
            pod.live.lines.append(JournalLine(record, line["tick"], line["now_ns"], line["seq"]))
        await check(pod)

    serve(tmp_path, served)


async def every(pod: Pod, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all pages."""
    rows, before = [], {}
    for _ in range(2000):
        status, page = await pod.ask("GET", f"/api/v1/decisions?{urlencode({**asked, **before})}")
        assert status == 200, page
        rows += page["decisions"]
        assert page["searched_ns"][0] <= page["searched_ns"][1]
        if page["next"] is None:
            return rows
        before = {"before": page["next"]}
    raise AssertionError("the pages do not end")


@pytest.mark.long
def test_a_note_that_came_while_a_tick_was_written_breaks_no_line_of_memory(
    tmp_path: Path, recorded: Recorded
) -> None:
    """It is kept at once, and its number is known behind the lines of that tick."""

    async def check(pod: Pod) -> None:
        lines = pod.live.lines
        whole = [line.seq for line in lines_in_memory(pod.live)[0]]
        lines[-20], lines[-16] = lines[-16], lines[-20]
        lines.append(JournalLine(lines[-1].record, 0, 0))
        assert [line.seq for line in lines_in_memory(pod.live)[0]] == [-1, *whole]

    on_journal(tmp_path, recorded, check, kept=150)


def test_events_crowd_out_no_decision_unless_they_are_asked_for(recorded: Recorded) -> None:
    folder, engine = recorded
    lines = [JournalLine(read_record(x["kind"], x["body"]), x["tick"], x["now_ns"], x["seq"])
             for x in plain(folder)[::-1]]  # fmt: skip
    commands = [line for line in lines if line.kind == "command"][:20]
    events = [line for line in lines if line.kind == "event" and not is_routine(line.record)][:20]
    page = decision_search._Page(DecisionQuestion(limit=8, most_events=2), engine.site)
    page.fill([*events, *commands])
    assert [row["kind"] for row in page.rows] == ["event"] * 2 + ["command"] * 6
    assert page.events_left_out == len(events) - 2 > 0
    asked = decision_search._Page(DecisionQuestion(kinds=frozenset({"event"}), limit=8), engine.site)
    asked.fill([*events, *commands])
    assert asked.events_left_out == 0
    assert len(asked.rows) == min(8, len(events))


def test_few_events_are_a_choice_of_the_query(tmp_path: Path, recorded: Recorded) -> None:
    async def check(pod: Pod) -> None:
        lines, shares = pod.live.lines, []
        event = next(x for x in lines if x.kind == "event" and not is_routine(x.record))
        last = lines[-1]
        lines.extend(JournalLine(event.record, last.tick, last.now_ns, last.seq + k) for k in range(1, 9))
        for more in ("", "&events=few", "&events=few&kind=event"):
            _, page = await pod.ask("GET", f"/api/v1/decisions?limit=8{more}")
            shares.append([row["kind"] for row in page["decisions"]].count("event"))
        assert shares == [8, 2, 8]
        _, page = await pod.ask("GET", "/api/v1/decisions?limit=8&events=few")
        assert page["events_left_out"] >= 6
        assert (await pod.ask("GET", "/api/v1/decisions?events=none"))[0] == 400

    on_journal(tmp_path, recorded, check, kept=150)


@pytest.mark.long
@pytest.mark.parametrize("kept", [0, 150])
def test_all_pages_give_what_a_plain_reading_of_the_files_finds(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Whatever the filters; with blocks and budgets so small that each page ends within the files."""
    lines, rng = plain(recorded[0]), random.Random(7)
    kinds = sorted({line["kind"] for line in lines})
    instants = sorted({line["now_ns"] for line in lines})
    monkeypatch.setattr(journal_walk, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(journal_walk.JournalWalk.__init__, "__defaults__", ("", 20_000, 5.0))

    async def check(pod: Pod) -> None:
        found = 0
        for _ in range(60):
            asked: dict[str, Any] = {"limit": rng.choice([7, 100, 1000])}
            if rng.random() < 0.6:
                asked["kind"] = ",".join(rng.sample(kinds, rng.choice([1, 1, 3])))
            if rng.random() < 0.5:
                asked["since"], asked["until"] = sorted(rng.sample(instants, 2))
            if rng.random() < 0.2:
                asked["control"] = rng.choice(["gpu.power_cap_w", "node.service_level"])
            if rng.random() < 0.2:
                asked["policy"] = rng.choice(["replacement", "thermal_guard", "power_cap"])
            rows = await every(pod, asked)
            assert [int(r["at"].partition(".")[2]) for r in rows] == expected(lines, asked), asked
            assert [r["now_ns"] for r in rows] == [int(r["at"].partition(".")[0]) for r in rows]
            found += len(rows)
        assert found > 300

    on_journal(tmp_path, recorded, check, kept)


PLACES = [NODE, f"{NODE}/gpu1", "golden/h1/r1", "golden/h1/r1/node1", "golden/h1/r1/node1/gpu3"]


@pytest.mark.slow
@pytest.mark.parametrize(("below", "kept"), [(True, 0), (False, 0), (True, 250)])
def test_an_entity_is_found_with_all_below_it_across_a_change_of_the_site(
    tmp_path: Path, recorded: Recorded, below: bool, kept: int
) -> None:
    """Numbers of GPUs moved at the change: commands are found by what they name, before it and after."""
    lines = plain(recorded[0])
    kinds = "command,advice,event,finding,cleared,account"

    async def check(pod: Pod) -> None:
        for place in PLACES:
            asked = {"entity": place, "kind": kinds, "limit": 30} | ({"below": "true"} if below else {})
            rows = await every(pod, asked)
            got = [int(r["at"].partition(".")[2]) for r in rows]
            assert got == expected(lines, asked), place
        changed_ns = START_NS + 131 * NS
        assert any(r["kind"] == "command" and r["now_ns"] < changed_ns for r in rows)

        new = {"entity": "golden/h1/r0", "below": "true", "kind": "proposals,failed,lapsed", "limit": 3}
        rows = await every(pod, new)
        assert len(rows) > 6
        assert all(r["now_ns"] >= changed_ns for r in rows), "its numbers were others' before"
        if kept:
            assert any(line["kind"] == "site" for line in lines[-kept:])

    on_journal(tmp_path, recorded, check, kept)


@pytest.mark.slow
def test_the_latest_come_from_memory_and_older_ones_from_the_files(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A screen that asks every few seconds reads no file; a line that is missing in memory ends it there."""

    async def check(pod: Pod) -> None:
        lines = plain(recorded[0])
        kept = [line for line in lines[-150:] if line["kind"] not in QUIET_KINDS]
        with monkeypatch.context() as patch:
            patch.setattr(journal_walk.JournalWalk, "__iter__", None)
            _, page = await pod.ask("GET", "/api/v1/decisions?limit=1000")
        assert len(page["decisions"]) == len(kept)
        assert page["next"] == f"{lines[-150]['now_ns']}.{lines[-150]['seq']}"
        assert page["begin_ns"] == START_NS + NS
        assert page["searched_ns"][0] == lines[-150]["now_ns"]
        del pod.live.lines[100]
        _, page = await pod.ask("GET", "/api/v1/decisions?limit=1000")
        assert page["next"] == f"{lines[-49]['now_ns']}.{lines[-49]['seq']}"

    on_journal(tmp_path, recorded, check, 150)


@pytest.mark.slow
def test_a_job_counts_with_the_nodes_that_it_ran_on_while_it_did(tmp_path: Path, recorded: Recorded) -> None:
    """Caps of its GPUs, its start and its end; what is on its node after its end is another's."""
    lines = plain(recorded[0])
    began, ended = (next(line for line in lines if line["body"].get("event", {}).get("type") == kind)
                    for kind in ("JobStarted", "JobEnded"))  # fmt: skip

    async def check(pod: Pod) -> None:
        rows = await every(pod, {"entity": "job:train", "below": "true", "limit": 1000})
        seqs = {int(r["at"].partition(".")[2]) for r in rows}
        assert {began["seq"], ended["seq"]} <= seqs
        on_node = set(expected(lines, {"entity": NODE, "below": True}))
        during = {line["seq"] for line in lines if began["now_ns"] <= line["now_ns"] <= ended["now_ns"]}
        assert {s for s in on_node & during if lines[s]["kind"] in ("command", "finding")} <= seqs
        assert not (on_node - during) & seqs
        status, told = await pod.ask("GET", "/api/v1/decisions?entity=nosuch")
        assert (status, "job:nosuch" in told["error"]) == (404, True)

    on_journal(tmp_path, recorded, check)


@pytest.mark.slow
def test_a_decision_is_found_again_by_its_place_with_what_the_journal_says_of_it(
    tmp_path: Path, recorded: Recorded
) -> None:
    lines = plain(recorded[0])

    async def check(pod: Pod) -> None:
        command = next(r for r in lines if r["kind"] == "command" and r["body"]["policy"] == "thermal_guard")
        at = f"{command['now_ns']}.{command['seq']}"
        status, told = await pod.ask("GET", f"/api/v1/decisions/{at}")
        assert status == 200, told
        assert told["decision"]["at"] == at
        assert told["verdict"]["authority"] == "act"
        assert "manifest" in told["verdict"]["basis"]
        assert told["confirmation"]["state"] in (
            "answered",
            "superseded",
            "not recorded",
            "mismatch",
            "failed",
        )
        if (proof := told["confirmation"]["at"]) is not None:
            assert int(proof.partition(".")[2]) > command["seq"]
        case = told["case"]
        assert f"node:{NODE}" in case["entities"]
        assert "job:train" in case["entities"]
        assert case["since_ns"] <= command["now_ns"] <= case["until_ns"]
        for wrong, why in (
            (f"{START_NS - NS}.0", "no longer in the journal (kept since"),
            (f"{command['now_ns'] + 1}.{command['seq']}", "another daemon or run"),
        ):
            status, told = await pod.ask("GET", f"/api/v1/decisions/{wrong}")
            assert (status, why in told["error"]) == (404, True), told

    on_journal(tmp_path, recorded, check)


@pytest.mark.slow
def test_the_journal_tells_its_last_hash_and_whether_its_end_holds(
    tmp_path: Path, recorded: Recorded
) -> None:
    lines = plain(recorded[0])

    async def check(pod: Pod) -> None:
        status, told = await pod.ask("GET", "/api/v1/journal")
        assert status == 200, told
        assert told["head"] == verify_journal(recorded[0] / OPEN).head
        assert (told["lines"], told["first_line"]) == (len(lines), 1)
        assert told["chain"] == {"holds": True, "lines": len(lines), "since_ns": 0, "fault": None}
        assert told["verify"] == f"racktwin journal verify {recorded[0]}"
        copy = tmp_path / "copy"
        shutil.copytree(recorded[0], copy)
        text = (copy / OPEN).read_bytes()
        (copy / OPEN).write_bytes(re.sub(rb'"kind":"\w+"', b'"kind":"other"', text, count=1))
        pod.live.run_dir = str(copy)
        _, told = await pod.ask("GET", "/api/v1/journal")
        assert (told["chain"]["holds"], "the chain breaks" in told["chain"]["fault"]) == (False, True)

    on_journal(tmp_path, recorded, check)


@pytest.mark.slow
def test_the_terminal_reaches_back_by_the_same_options(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time of the past, page by page; and where the list ends, from where it goes on."""
    lines = plain(recorded[0])
    with serving_aside(tmp_path, monkeypatch) as desk:
        live = desk.pod.live
        desk.do(lambda: (live.lines.clear(), setattr(live, "run_dir", str(recorded[0]))))
        desk.do(lambda: setattr(live, "engine", recorded[1]))
        monkeypatch.setattr(journal_walk.JournalWalk.__init__, "__defaults__", ("", 20_000, 5.0))
        words = ["control", "decisions", "--limit", "300", "--policy", "replacement"]
        span = ["--since", "2023-11-14T22:14:20", "--until", "2023-11-14T22:16:00"]
        assert desk.run(*words, *span, "--format", "json") == 0
        rows = json.loads(capsys.readouterr().out)["decisions"]
        asked = {"policy": "replacement", "since": START_NS + 60 * NS, "until": START_NS + 160 * NS}
        assert [int(r["at"].partition(".")[2]) for r in rows] == expected(lines, asked)
        assert len(rows) > 3
        words[3] = "2"
        assert desk.run(*words, *span) == 0
        shown = capsys.readouterr().out
        assert f"--before {rows[1]['at']}" in shown
        assert "searched from 2023-11-14" in shown
        assert "the journal is kept since 2023-11-14 22:13:21 UTC" in shown
        assert desk.run(*words, *span, "--before", rows[1]["at"], "--format", "json") == 0
        assert json.loads(capsys.readouterr().out)["decisions"] == rows[2:4]
