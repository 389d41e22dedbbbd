"""Site power over time: the recorded power of all racks as one series, with the budget of the supply.

A rack without a value at some instant counts with its last one; where many have none, the sum is unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.api.answers import Refused
from twin.api.runtime import Runtime
from twin.catalogue import F64

SITE_POWER = "site.power_w"
MOST_RACKS = 2000  # of one question to the history
LEAST_KNOWN = 0.9  # of the racks that were ever read in the span


async def recorded(live: Runtime, since_ns: int, until_ns: int, step_s: float, points: int) -> dict[str, Any]:
    """The power of the site over time, as `HistoryService.query` answers for one entity."""
    names = live.engine.site.names.get("rack", [])
    site = live.engine.site.file.site
    if not 0 < len(names) <= MOST_RACKS:
        raise Refused(400, f"{len(names)} racks; the power of the site is summed over 1 to {MOST_RACKS}")
    found = await live.history.query("rack.power_w", names, since_ns, until_ns, step_s, points)
    values = np.array([found["values"][name] for name in names], np.float64)
    return {"t_ns": found["t_ns"], "values": {site: _summed(values)}, "damaged": found["damaged"]}


def _summed(values: F64) -> F64:
    """Sums over the racks [n, instants]; NaN where too few are known."""
    read = np.isfinite(values)
    ever = int(read.any(axis=1).sum())
    if not ever:
        return np.full(values.shape[1], np.nan)
    last = np.where(read, np.arange(values.shape[1]), 0)
    np.maximum.accumulate(last, axis=1, out=last)
    filled = np.take_along_axis(values, last, axis=1)
    total: F64 = np.nansum(filled, axis=0)
    total[read.sum(axis=0) < LEAST_KNOWN * ever] = np.nan
    return total


def supply(live: Runtime) -> list[dict[str, Any]]:
    """Return each side of the supply with the present budget of its topmost feeders: A, B, and feeders
    without a side."""
    engine, site = live.engine, live.engine.site
    budget_w = engine.intake.budget_w(site, engine.state.now_ns)
    out = []
    for number, side in enumerate(("", "A", "B")):
        top = np.flatnonzero((site.parent_of_feeder < 0) & (site.side_of_feeder == number))
        known = budget_w[top][np.isfinite(budget_w[top])]
        if len(top):
            out.append({"side": side, "feeders": len(top),
                        "budget_w": float(known.sum()) if len(known) == len(top) else None})  # fmt: skip
    return out
