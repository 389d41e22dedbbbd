"""The record of a node for a ticket: complete, honest about what it does not know, and safe as markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from policies.node_replacement.phases import RMA
from tests.support.builders import START_NS
from tests.support.in_process_daemon import Pod
from tests.support.leaving_nodes import Leaving, outed
from tests.support.scripted_health import Ailing, ailing
from twin.api.node_service import MOST_ROWS, MOST_TESTS, record
from twin.api.replacement import explained
from twin.catalogue import NS
from twin.contracts import DEGRADED
from twin.report import markdown, rows_of
from twin.report.rma_markdown import fenced, quoted
from twin.run import Entry

NODE = "lab/h/r1/node3"
DAY_NS = 86_400 * NS
NASTY = "](http://x) `code` | <b>evil</b> \x1b[31m\u202e\n# heading"


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    policy = Leaving()
    made = Pod(tmp_path, more=[policy])
    outed(policy, 3, made.twin.now_ns, RMA)
    made.tick({"gpu.temp_c": 60.0})
    return made


def ill(pod: Pod) -> Ailing:
    told = ailing(pod.twin.engine)
    gpu = int(pod.twin.site.gpu_start_of_node[3]) + 2
    told.say(
        "node", 3, DEGRADED, "row remaps fail", action_name="drain", sure_pu=0.9, since_ns=START_NS - DAY_NS
    )
    told.say("gpu", gpu, DEGRADED, "row 7 waits to be remapped", action_name="reset_gpu")
    told.reports("gpu", gpu, 64, START_NS - 5 * DAY_NS, times=3)
    told.reports("gpu", gpu, 64, START_NS - DAY_NS, detail=NASTY)
    told.failures.begin_ns = START_NS - 31 * DAY_NS
    told.failed(3, START_NS - 6 * DAY_NS, START_NS - 5 * DAY_NS, "memory")
    told.forecast(86_400.0, [0.3 if i == 3 else 0.01 for i in range(36)])
    return told


def event(at_ns: int, kind: str, **more: Any) -> Entry:
    return Entry(0, "", "event", 1, at_ns, {"event": {"type": kind, "name": NODE, **more}})


def burnt(at_ns: int, passed: bool | None, detail: str = "") -> Entry:
    return event(at_ns, "NodeTested", began_ns=at_ns - 600 * NS, ended_ns=at_ns, passed=passed,
                 test="burn-in",                 detail=detail)  # fmt: skip


def made(pod: Pod, entries: list[Entry]) -> dict[str, Any]:
    live = pod.live
    rows = rows_of(entries, lambda i: live.engine.site.name("node", i), NODE, True)
    mine = explained(live, "plan")["nodes"]
    return record(live, 3, rows, ["the journal has gaps"], START_NS - 90 * DAY_NS, mine[0])


def test_all_that_a_ticket_needs_is_on_the_page(pod: Pod) -> None:
    ill(pod)
    serials = pod.twin.engine.intake.serials
    serials[f"node:{NODE}"], serials[f"gpu:{NODE}/gpu2"] = "SN-77", "GPU-2"
    command = Entry(0, "", "command", 1, START_NS - 3 * DAY_NS, {
        "control": "node.service_level", "policy": "replacement", "index": [3], "value": [3.0], "from": NODE,
        "to": NODE, "reason": "row remaps fail", "epoch": 1, "first_command": 1, "expires_ns": 1,
        "deadline_ns": 1})  # fmt: skip
    page = markdown(made(pod, [
        command, burnt(START_NS - 2 * DAY_NS, False, "step 1\nGPU 2: **hangs**"),
        event(START_NS - DAY_NS, "NodeRepaired", author="ada", note="reseated GPU 2"), burnt(START_NS, True),
        Entry(0, "", "event", 1, START_NS, {"event": {"type": "EntityReplaced", "table": "gpu",
                                                      "name": f"{NODE}/gpu1", "serial": "GPU-9"}}),
    ]))  # fmt: skip
    for expected in (
        "# lab/h/r1/node3: record for repair or return",
        "| serial of the node | SN-77 |",
        "| serials of its GPUs | gpu2 GPU-2; of 3 unknown |",
        "- It is withdrawn: out of service for good: return it since 2023-11-14 21:13:20 UTC.",
        "- degraded: row remaps fail (since 2023-11-13 22:13:20 UTC)",
        "- gpu2 degraded: row 7 waits to be remapped",
        "- It failed 1 of 2 tests.",
        "- Expected to fail within 24 h: 30 %, 17 x the average",
        "| gpu2 | XID 64 |",
        "| 4 | 2023-11-09 22:13:20 | 2023-11-13 22:13:20 |",
        "## Failures: 1 in 31 d of watching",
        "- 2023-11-08 22:13:20 UTC: memory, lasted 1 d",
        "### 2023-11-12 22:13:20 UTC: burn-in: **failed**, took 10 min",
        "```text\nstep 1\nGPU 2: **hangs**\n```",
        "UTC: repaired, says ada: reseated GPU 2",
        "was replaced: serial GPU-9",
        "UTC: command: drained: row remaps fail",
        "## What this record does not know",
        "- the journal has gaps",
    ):
        assert expected in page, (expected, page)
    order = [
        page.index(w) for w in ("## Why", "## Faults", "## Failures", "## Tests", "## Repairs", "## How it")
    ]
    assert order == sorted(order)


def test_a_node_of_which_nothing_is_known_says_so(pod: Pod) -> None:
    page = markdown(made(pod, []))
    for expected in ("unknown: never reported", "None was reported.", "None is in the journal.",
                     "It was never withdrawn.", "not reported: agent, never reported"):  # fmt: skip
        assert expected in page


def test_a_simulated_record_says_so_at_once(pod: Pod) -> None:
    told = made(pod, [])
    assert "Simulated" not in markdown(told)
    assert markdown({**told, "simulated": True}).splitlines()[2].startswith("**Simulated: no hardware")


def test_what_devices_say_cannot_become_markup(pod: Pod) -> None:
    ill(pod)
    told = made(pod, [burnt(START_NS, False, NASTY + "\n```\n# not a heading\n````"),
                      event(START_NS, "NodeRepaired", author=NASTY, note=NASTY)])  # fmt: skip
    page = markdown(told)
    assert "\x1b" not in page
    assert "\u202e" not in page
    block = page.split("`````text\n")[1].split("\n`````")[0]
    assert "# not a heading" in block
    outside = page.replace(block, "")
    assert "<b>" not in outside
    assert "](http" not in outside.replace("\\]", "")
    assert not any(line.startswith("# heading") for line in outside.splitlines())
    rows = [line for line in outside.splitlines() if line.startswith("| gpu2")]
    assert all(line.replace("\\|", "").count("|") == 8 for line in rows)


@given(st.text(max_size=200))
def test_a_block_ends_where_it_ends(text: str) -> None:
    lines = fenced(text)
    fence = lines[-1]
    assert lines[0] == f"{fence}text"
    assert all(fence not in line for line in lines[1:-1])
    assert "\n" not in quoted(text)


def test_everything_has_a_bound(pod: Pod) -> None:
    entries = [burnt(START_NS + i * NS, False, "x" * 9000) for i in range(60)]
    entries += [event(START_NS, "NodeRepaired", author="ada", note="n" * 2000)] * 600
    told = made(pod, entries)
    assert (len(told["tests"]), told["tests_total"]) == (MOST_TESTS, 60)
    assert (len(told["repairs"]), len(told["history"])) == (MOST_ROWS, MOST_ROWS)
    assert len(markdown(told)) < 400_000
