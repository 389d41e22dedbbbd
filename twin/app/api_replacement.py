"""Replacement over HTTP: what is planned for which node and why, what became of it, a node's record.

Answers are pages or have a bound. The journal is read beside the loop, by one question at a time. May import
the core; changes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from policies.replacement_phases import PHASES
from twin.app import replacement_plan as planned
from twin.app.api_answer import MAX_ROWS, Refused, answer, listed, live_of, number_of, seconds_of
from twin.app.api_node_service import node_of
from twin.app.live import Live
from twin.app.replacement_history import rows_of, score_of, unmatched
from twin.app.replacement_journal import Found, JournalReader
from twin.app.report_text import clean
from twin.app.rma_report import record
from twin.errors import StorageError
from twin.frame import NS
from twin.journal import Entry

DAYS, MOST_DAYS, RECORD_DAYS = 7.0, 366.0, 90.0
DAY_NS = 86_400 * NS
READ_S = 30.0


class Reading:
    """The journal of this daemon's run, for questions that come one after the other."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.reader: JournalReader | None = None

    async def lines(self, live: Live, since_ns: int) -> Found:
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


READING: web.AppKey[Reading] = web.AppKey("replacement_reading", Reading)


def kept_lines(live: Live, since_ns: int) -> Found:
    """The latest lines that the daemon holds in memory, where it has no run folder."""
    entries = [Entry(i, "", line.kind, line.tick, line.now_ns, line.body)
               for i, line in enumerate(live.lines) if line.now_ns >= since_ns]  # fmt: skip
    begin_ns = live.lines[0].now_ns if live.lines else 0
    note = ["only the latest lines of the journal are at hand: this daemon has no run folder"]
    return Found(entries, max(begin_ns, since_ns), note)


async def plan(request: web.Request) -> web.Response:
    """Nodes that are suspected or on their way out and back: phase, cause, courses weighed, what is awaited.

    Beside them: how many nodes are in each phase, the pool of spares, the circuit breaker, and whether the
    policy may act. With `node`, that one, whatever its phase.
    """
    live, phases = live_of(request), listed(request, "phase")
    if strange := [p for p in phases if p not in PHASES]:
        known = ", ".join(PHASES)
        raise Refused(400, f"no phase {clean(strange[0], 40)}; expected one of {known}")
    offset = number_of(request, "offset", 0, 0, 10**9)
    limit = number_of(request, "limit", 100, 1, MAX_ROWS)
    asked = request.query.get("node")
    one = node_of(live, asked) if asked is not None else None
    memory = planned.memory_of(live)
    nodes = np.zeros(0, np.int32)
    if memory is not None:
        nodes = planned.on_their_way(memory) if one is None else np.array([one], np.int32)
        if phases:
            wanted = [PHASES.index(p) for p in phases]
            nodes = nodes[np.isin(memory["phase"][nodes], wanted)]
    more = offset + limit < len(nodes)
    return answer({**planned.overview(live), "total": len(nodes), "offset": offset, "limit": limit,
                   "next_offset": offset + limit if more else None,
                   "nodes": planned.rows(live, nodes[offset : offset + limit])})  # fmt: skip


async def history(request: web.Request) -> web.Response:
    """What became of withdrawn nodes, oldest first: accounts, commands, tests, repairs; and the gate's score.

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
    shown, missing = rows[-limit:], [] if planned.memory_of(live) else [planned.ADD_IT]
    return answer({"site": live.engine.site.file.site, "now_ns": live.engine.state.now_ns, "node": name,
                   "runs": planned.memory_of(live) is not None, "days": days, "since_ns": found.since_ns,
                   "total": len(rows), "rows": shown,
                   "next": shown[0]["seq"] if len(rows) > len(shown) else None, "score": score_of(every),
                   "notes": [*found.notes, *missing, *unmatched(every, kinds)]})  # fmt: skip


async def rma(request: web.Request) -> web.Response:
    """The record of a node for a ticket: serials, faults, evidence, drains, tests, repairs."""
    live = live_of(request)
    node = node_of(live, request.match_info["node"])
    days = seconds_of(request, "days", RECORD_DAYS, 0.001, MOST_DAYS)
    name = live.engine.site.name("node", node)
    found = await request.app[READING].lines(live, max(0, live.engine.state.now_ns - round(days * DAY_NS)))
    rows = await asyncio.to_thread(rows_of, found.entries, name_of(live), name, True)
    memory = planned.memory_of(live)
    mine: list[dict[str, Any]] = planned.rows(live, np.array([node], np.int32)) if memory is not None else []
    return answer(record(live, node, rows, found.notes, found.since_ns, mine[0] if mine else None))


def name_of(live: Live) -> Any:
    """Node -> its path on the site of now."""
    site = live.engine.site
    n = site.sizes["node"]
    return lambda i: site.name("node", i) if 0 <= i < n else None
