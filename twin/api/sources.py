"""Sources of telemetry as interfaces show them: rate, age, clock, and what of them is not used and why."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from twin.api.answers import MAX_ROWS, answer, live_of, number_of
from twin.api.runtime import Runtime
from twin.catalogue import clean

SHOWN_LINES = 8  # on the first screen
MAX_TEXT = 320


async def sources(request: web.Request) -> web.Response:
    """List the sources of telemetry with their rates, ages, clocks, and what of them is not used and why."""
    ledger = live_of(request).ledger
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    wanted = request.query.get("name", "")
    now_ns = time.time_ns()
    every = [] if ledger is None else ledger.listing(now_ns)
    found = [s for s in every if wanted in s.name]
    page = found[offset : offset + limit]
    rows = [] if ledger is None else ledger.rows(page, now_ns)
    more = offset + limit if offset + limit < len(found) else None
    return answer({"now_ns": now_ns, "total": len(found), "offset": offset, "next_offset": more,
                   "sources": plain(rows)})  # fmt: skip


def unused(live: Runtime) -> list[dict[str, Any]]:
    """A line per reason why something of the last hour was not used, over all sources."""
    return [] if live.ledger is None else plain(live.ledger.overview(time.time_ns())[:SHOWN_LINES])


def plain(tree: Any) -> Any:
    """The same with all texts made safe: they hold topics and labels of whoever publishes."""
    if isinstance(tree, dict):
        return {clean(k, MAX_TEXT): plain(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [plain(v) for v in tree]
    return clean(tree, MAX_TEXT) if isinstance(tree, str) else tree
