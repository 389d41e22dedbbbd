"""Ledger statement: energy, GPU-hours, cost and carbon of a month, as its reader may see them.

A token of the role `job` sees the rows of its own tenant (`tenant.NAME`) or job (`job.NAME`), and no sum that
holds another's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import msgspec
from aiohttp import web

from twin.api.access import REFUSALS, WHO, sender
from twin.api.answers import Refused, answer, live_of
from twin.api.runtime import Runtime
from twin.api.tokens import Token
from twin.catalogue import NS, StorageError, clean
from twin.ledger import (
    BY,
    HOUR_NS,
    HourRecord,
    LedgerRow,
    RowFilter,
    Statement,
    StatementRow,
    decode_hour,
    statement,
)

log = logging.getLogger(__name__)
MAX_LINES = 20_000
_ONE_AT_A_TIME = asyncio.Semaphore(1)  # a day of a large site is some 100 MB
_MONTH = re.compile(r"(20[0-9]{2})-(0[1-9]|1[0-2])")


async def ledger(request: web.Request) -> web.Response:
    """Return the statement of a month: energy with its 90 % interval, GPU-hours by class, cost, carbon, PUE.

    Each joule and GPU-hour is in one row; what is not known is null. The hour that runs is in it as far as it
    has come.
    """
    live, token = live_of(request), request[WHO]
    by = request.query.get("by", "tenant")
    if by not in BY:
        raise Refused(400, f"by: {clean(by, 40)!r} is unknown; expected one of {', '.join(BY)}")
    begin_ns, end_ns = span_of(request.query.get("month", ""), live.engine.state.now_ns)
    holds = _holds(request, token)
    if holds is not None and by == "rack":
        raise Refused(403, f"racks are not shown by tenant; the token {token.name} sees site, hall, queue, "
                           "tenant and job of its own")  # fmt: skip
    kept = [*map(decode_hour, live.engine.ledger.closed)]
    running = live.engine.ledger.running()
    kept += [] if running is None else [running]
    async with _ONE_AT_A_TIME:
        found = await asyncio.to_thread(_made, live, kept, (by, begin_ns, end_ns, holds))
    return answer(tree_of(found, live.engine.state.now_ns))


def _made(live: Runtime, kept: list[HourRecord], asked: tuple[str, int, int, RowFilter | None]) -> Statement:
    """Return the statement of the hours on disk and in the engine; one day in memory at a time."""
    by, begin_ns, end_ns, holds = asked
    try:
        return statement(each_hour_once(live, kept, begin_ns, end_ns), by, begin_ns, end_ns, holds)
    except (OSError, StorageError) as error:
        log.error("the ledger cannot be read: %s", error)
        raise Refused(503, "the ledger cannot be read; the log of the daemon says why") from None


def each_hour_once(
    live: Runtime, kept: list[HourRecord], begin_ns: int, end_ns: int, known: Collection[int] = ()
) -> Iterator[HourRecord]:
    """Yield each hour of a span once, even one that is written meanwhile, but those `known` by their begin.

    The disk is read only for hours that are not `kept`. Raises OSError and StorageError.
    """
    found = set(known)
    missing = set(range(begin_ns, end_ns, HOUR_NS)) - found - {hour.begin_ns for hour in kept}
    ledger = live.energy_ledger if missing else None
    for hour in chain(() if ledger is None else ledger.read(begin_ns, end_ns), kept):
        if hour.begin_ns not in found:
            found.add(hour.begin_ns)
            yield hour


def _holds(request: web.Request, token: Token) -> RowFilter | None:
    """Return the rows that a token may see; None: all. Raises Refused."""
    if token.may("viewer"):
        return None
    kind, _, own = token.name.partition(".")
    if kind not in ("tenant", "job") or not own:
        request.app[REFUSALS].log(sender(request), "not its own job", name=token.name, role=token.role)
        raise Refused(403, f"the token {token.name} speaks for no tenant and no job; expected tenant.NAME or "
                           "job.NAME")  # fmt: skip

    def holds(row: LedgerRow) -> bool:
        return row.part == "job" and own == (row.tenant if kind == "tenant" else row.job)

    return holds


def span_of(month: str, now_ns: int) -> tuple[int, int]:
    """Return [begin, end) of a month in UTC; the present month for "". Raises Refused."""
    found = _MONTH.fullmatch(month or datetime.fromtimestamp(now_ns // NS, UTC).strftime("%Y-%m"))
    if found is None:
        raise Refused(400, f"month: {clean(month, 40)!r}; expected a month such as 2026-11")
    year, number = int(found[1]), int(found[2])
    ends = [datetime(year + (m - 1) // 12, (m - 1) % 12 + 1, 1, tzinfo=UTC) for m in (number, number + 1)]
    begin_ns, end_ns = (round(end.timestamp()) * NS for end in ends)
    if 0 < now_ns < begin_ns:
        raise Refused(400, f"month: {clean(month, 40)} has not begun; expected this month or one before it")
    return begin_ns, end_ns


def tree_of(found: Statement, now_ns: int) -> dict[str, Any]:
    """Return the statement as JSON: foreign names made safe, GPU time in hours beside the exact
    nanoseconds."""
    tree: dict[str, Any] = msgspec.to_builtins(found)
    tree |= {"total": _line(found.total), "rows": [_line(row) for row in found.rows[:MAX_LINES]]}
    return tree | {"now_ns": now_ns, "left_out": max(0, len(found.rows) - MAX_LINES)}


def _line(row: StatementRow) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(row)
    for name in ("name", "tenant", "queue", "account"):
        tree[name] = clean(tree[name])
    if row.gpu_ns is None or row.granted_ns is None:
        return tree | {"gpu_h": None, "granted_h": None}
    hours = {name: ns / (3600 * NS) for name, ns in row.gpu_ns.items()}
    return tree | {"gpu_h": hours, "granted_h": row.granted_ns / (3600 * NS)}
