"""Outlooks over the interface: what is held of them, and telling one, as an event in the teller's name.

Where weather, prices and plans come from is a matter of scripts outside.
"""

from __future__ import annotations

import msgspec
import numpy as np
from aiohttp import web

from twin.api.access import author
from twin.api.actions import new_id, submit
from twin.api.answers import MAX_ROWS, Refused, answer, body_of, live_of, number_of
from twin.catalogue import NS, clean, find_quantity
from twin.engine import MAX_STEP_S, MAX_VALUES, Outlook
from twin.telemetry import events as ev

MAX_NAME = 512
MAX_AHEAD_S = 366 * 86_400.0


class NewOutlook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Values of a quantity at coming times: from `start_ns` on, each for `step_s`; null = unknown.

    `name` is the entity; without one it is the site. It takes the place of what was told of this quantity and
    entity before; with null values only, that is taken back.
    """

    quantity: str
    start_ns: int
    step_s: float
    values: list[float | None]
    name: str = ""


async def tell(request: web.Request) -> web.Response:
    """Send future values: weather, day-ahead prices, a plan. Forecasts learn how far to trust them."""
    body, live = await body_of(request, NewOutlook), live_of(request)
    what = find_quantity(body.quantity)
    if what is None:
        raise Refused(404, f"{clean(body.quantity, 60)} is no quantity that can be forecast; expected a "
                           "signal such as site.outdoor_temp_c, or cdu.heat_w, site.power_w or "
                           "site.gpu_demand_count")  # fmt: skip
    if len(body.name) > MAX_NAME:
        raise Refused(400, f"name: expected at most {MAX_NAME} characters")
    if not 1 <= body.step_s <= MAX_STEP_S:
        raise Refused(400, f"step_s: expected seconds from 1 to {MAX_STEP_S:g}, got {body.step_s:g}")
    if not 0 < len(body.values) <= MAX_VALUES:
        raise Refused(400, f"values: expected 1 to {MAX_VALUES}, got {len(body.values)}")
    now_ns = live.engine.state.now_ns
    end_ns = body.start_ns + round(body.step_s * NS) * len(body.values)
    if not now_ns < end_ns:
        ago = (now_ns - end_ns) // NS
        raise Refused(400, f"start_ns: the last value was over {ago} s ago; expected ns since 1970 (UTC)")
    if body.start_ns - now_ns > MAX_AHEAD_S * NS:
        raise Refused(400, "start_ns: begins in more than a year; expected ns since 1970 (UTC)")
    event = ev.OutlookTold(
        id=new_id(request), author=author(request), quantity=body.quantity, name=body.name,
        start_ns=body.start_ns, step_s=body.step_s, values=tuple(body.values),
    )  # fmt: skip
    return await submit(request, event, quantity=body.quantity, values=len(body.values), end_ns=end_ns)


async def outlooks(request: web.Request) -> web.Response:
    """List the outlooks in force, the latest first, each with its present value."""
    live = live_of(request)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 200, 1, MAX_ROWS)
    wanted = request.query.get("quantity", "")
    rows = [o for o in live.engine.intake.outlooks.entries() if wanted in ("", o.quantity)][::-1]
    more = offset + limit < len(rows)
    now_ns = live.engine.state.now_ns
    return answer({"now_ns": now_ns, "total": len(rows), "offset": offset,
                   "next_offset": offset + limit if more else None,
                   "outlooks": [_brief(o, now_ns) for o in rows[offset : offset + limit]]})  # fmt: skip


def _brief(held: Outlook, now_ns: int) -> dict[str, object]:
    what = find_quantity(held.quantity)
    step = (now_ns - held.start_ns) // held.step_ns
    return {
        "quantity": held.quantity, "unit": what.unit if what else "", "name": held.name,
        "author": held.author, "id": held.id, "start_ns": held.start_ns, "end_ns": held.end_ns,
        "step_s": held.step_s, "values": len(held.values),
        "unknown": int(np.isnan(held.values).sum()),
        "now": float(held.values[step]) if 0 <= step < len(held.values) else None,
        "low": float(np.nanmin(held.values)), "high": float(np.nanmax(held.values)),
    }  # fmt: skip
