"""Ledger statement: energy, GPU-hours, cost and carbon of a month, as its reader may see them.

A token of the role `job` sees the rows of its own tenant (`tenant.NAME`) or job (`job.NAME`), and no sum that
holds another's.
"""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from twin.api.access import REFUSALS, WHO, sender
from twin.api.answers import Refused, answer, live_of
from twin.api.runtime import Runtime
from twin.api.tokens import Token
from twin.catalogue import NS, StorageError, clean
from twin.ledger import BY, HourRecord, LedgerRow, RowFilter, Statement, StatementRow, statement

MAX_LINES = 20_000
_MONTH = re.compile(r"(20[0-9]{2})-(0[1-9]|1[0-2])")


async def ledger(request: web.Request) -> web.Response:
    """Return the statement of a month: energy with its 90 % interval, GPU-hours by class, cost, carbon, PUE.

    Each joule and GPU-hour is in one row. The hour that runs is in it as far as it has come.
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
    running = _running(live)
    found = await asyncio.to_thread(_made, live, running, (by, begin_ns, end_ns, holds))
    return answer(tree_of(found, live.engine.state.now_ns))


def _made(
    live: Runtime, running: HourRecord | None, asked: tuple[str, int, int, RowFilter | None]
) -> Statement:
    by, begin_ns, end_ns, holds = asked
    hours: list[HourRecord] = []
    try:
        if live.energy_ledger is not None:
            hours = list(live.energy_ledger.read(begin_ns, end_ns))
    except (OSError, StorageError) as error:
        raise Refused(503, f"the ledger cannot be read: {error}") from None
    if running is not None:
        hours.append(running)
    return statement(hours, by, begin_ns, end_ns, holds)


def _running(live: Runtime) -> HourRecord | None:
    """The hour that runs; None before the first."""
    return live.engine.ledger.running()


def _holds(request: web.Request, token: Token) -> RowFilter | None:
    """The rows that a token may see; None: all. Raises Refused."""
    if token.may("viewer"):
        return None
    kind, _, own = token.name.partition(".")
    if kind not in ("tenant", "job") or not own:
        request.app[REFUSALS].tell(sender(request), "not its own job", name=token.name, role=token.role)
        raise Refused(403, f"the token {token.name} speaks for no tenant and no job; expected tenant.NAME or "
                           "job.NAME")  # fmt: skip

    def holds(row: LedgerRow) -> bool:
        return row.part == "job" and own == (row.tenant if kind == "tenant" else row.job)

    return holds


def span_of(month: str, now_ns: int) -> tuple[int, int]:
    """[begin, end) of a month in UTC; the present one for "". Raises Refused."""
    found = _MONTH.fullmatch(month or datetime.fromtimestamp(now_ns // NS, UTC).strftime("%Y-%m"))
    if found is None:
        raise Refused(400, f"month: {clean(month, 40)!r}; expected one such as 2026-11")
    year, number = int(found[1]), int(found[2])
    ends = [datetime(year + (m - 1) // 12, (m - 1) % 12 + 1, 1, tzinfo=UTC) for m in (number, number + 1)]
    return round(ends[0].timestamp()) * NS, round(ends[1].timestamp()) * NS


def tree_of(found: Statement, now_ns: int) -> dict[str, Any]:
    """The statement as JSON: names of outside made safe, GPU time in hours beside the exact nanoseconds."""
    tree: dict[str, Any] = msgspec.to_builtins(found)
    tree |= {"total": _line(found.total), "rows": [_line(row) for row in found.rows[:MAX_LINES]]}
    return tree | {"now_ns": now_ns, "left_out": max(0, len(found.rows) - MAX_LINES)}


def _line(row: StatementRow) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(row)
    for name in ("name", "tenant", "queue", "account"):
        tree[name] = clean(tree[name])
    hours = {name: ns / (3600 * NS) for name, ns in row.gpu_ns.items()}
    return tree | {"gpu_h": hours, "granted_h": row.granted_ns / (3600 * NS)}
