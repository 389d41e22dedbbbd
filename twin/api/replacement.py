"""Replacement over HTTP: the history of withdrawn nodes, the record of a node, and the summary's part.

The journal is read beside the loop, by one question at a time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from twin.api.answers import MAX_ROWS, Refused, answer, listed, live_of, number_of, seconds_of
from twin.api.explain import flat, policy_named
from twin.api.node_service import node_of, record
from twin.api.runtime import Runtime
from twin.catalogue import NS, StorageError, clean
from twin.contracts import Explanation, Value
from twin.engine import Inquiry, explain
from twin.report import POLICY, JournalReader, RecordedLines, rows_of, score_of, unmatched
from twin.run import RecordedLine

DAYS, MOST_DAYS, RECORD_DAYS = 7.0, 366.0, 90.0
DAY_NS = 86_400 * NS
READ_S = 30.0
ADD_IT = (
    "no policy named replacement runs here: add `policies: {replacement: {}}` to the site file, then "
    "`racktwin daemon reload`; it begins with authority `advise`, which shows and journals proposals and "
    "sends no commands"
)


class ReplacementReader:
    """The journal of this daemon's run, for questions that come one after the other."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.reader: JournalReader | None = None

    async def lines(self, live: Runtime, since_ns: int) -> RecordedLines:
        """All lines on replacement from an instant on. Raises Refused."""
        if not live.run_dir:
            return kept_lines(live, since_ns)
        try:
            async with asyncio.timeout(READ_S), self.lock:
                folder = Path(live.run_dir)
                if self.reader is None or self.reader.folder != folder:
                    self.reader = JournalReader(folder)
                return await asyncio.to_thread(self.reader.read, since_ns)
        except StorageError as error:
            raise Refused(503, str(error)) from None
        except TimeoutError:
            raise Refused(503, f"the journal was not read within {READ_S:g} s; ask for fewer days") from None


READING: web.AppKey[ReplacementReader] = web.AppKey("replacement_reading", ReplacementReader)


def kept_lines(live: Runtime, since_ns: int) -> RecordedLines:
    """The latest lines that the daemon holds in memory, where it has no run folder."""
    entries = [
        RecordedLine(i, line.tick, line.now_ns, line.record)
        for i, line in enumerate(live.lines)
        if line.now_ns >= since_ns
    ]
    begin_ns = live.lines[0].now_ns if live.lines else 0
    note = ["only the latest lines of the journal are available: this daemon has no run folder"]
    return RecordedLines(entries, max(begin_ns, since_ns), note)


async def history(request: web.Request) -> web.Response:
    """List the history of withdrawn nodes, oldest first, and the gate's score.

    The newest `limit` rows of the last `days`; `before` is the `next` of the page before and leads back.
    """
    live, asked = live_of(request), request.query.get("node")
    kinds = [clean(k, 40) for k in listed(request, "kind")]
    name = live.engine.site.name("node", node_of(live, asked)) if asked is not None else None
    days = seconds_of(request, "days", DAYS, 0.001, MOST_DAYS)
    limit = number_of(request, "limit", 200, 1, MAX_ROWS)
    before = number_of(request, "before", 2**62, 0, 2**62)
    since_ns = max(0, live.engine.state.now_ns - round(days * DAY_NS))
    found = await request.app[READING].lines(live, since_ns)
    every = await asyncio.to_thread(rows_of, found.entries, name_of(live), name, name is not None)
    rows = [r for r in every if r["seq"] < before and (not kinds or r["kind"] in kinds)]
    shown, missing = rows[-limit:], [] if runs(live) else [ADD_IT]
    return answer(
        {
            "site": live.engine.site.file.site,
            "now_ns": live.engine.state.now_ns,
            "node": name,
            "runs": runs(live),
            "days": days,
            "since_ns": found.since_ns,
            "total": len(rows),
            "rows": shown,
            "next": shown[0]["seq"] if len(rows) > len(shown) else None,
            "score": score_of(every),
            "notes": [*found.notes, *missing, *unmatched(every, kinds)],
        }
    )


async def rma(request: web.Request) -> web.Response:
    """The record of a node for a ticket: serials, faults, evidence, drains, tests, repairs."""
    live = live_of(request)
    node = node_of(live, request.match_info["node"])
    days = seconds_of(request, "days", RECORD_DAYS, 0.001, MOST_DAYS)
    name = live.engine.site.name("node", node)
    found = await request.app[READING].lines(live, max(0, live.engine.state.now_ns - round(days * DAY_NS)))
    rows = await asyncio.to_thread(rows_of, found.entries, name_of(live), name, True)
    planned = explained(live, "plan", node=name)["nodes"] if runs(live) else []
    return answer(record(live, node, rows, found.notes, found.since_ns, planned[0] if planned else None))


def runs(live: Runtime) -> bool:
    """A policy named replacement is configured."""
    return POLICY in live.engine.intake.authority


def explained(live: Runtime, topic: str, **options: Value) -> dict[str, Any]:
    """A topic of the policy's explanation as one flat object."""
    policy = policy_named(live, POLICY)
    found = explain(live.engine, policy, Inquiry(topic=topic, options=options, role=live.role))
    assert isinstance(found, Explanation)
    return flat(live, found)


def name_of(live: Runtime) -> Any:
    """Node -> its path on the site of now."""
    site = live.engine.site
    n = site.sizes["node"]
    return lambda i: site.name("node", i) if 0 <= i < n else None
