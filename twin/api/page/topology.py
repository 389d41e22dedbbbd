"""Topology: how power and coolant reach the racks: feeders with their budgets, loops, CDUs, racks served."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import answer, live_of

SIDES = ("", "A", "B")
SHOWN_SERVED = 2000


async def topology(request: web.Request) -> web.Response:
    """Describe the trees of power and cooling: parents, sides, budgets now, and racks served."""
    engine = live_of(request).engine
    site = engine.site
    budget_w = engine.intake.budget_w(site, engine.state.now_ns)
    racks, feeders = site.names.get("rack", []), site.names.get("feeder", [])
    direct: list[list[int]] = [[] for _ in feeders]
    for rack in range(len(racks)):
        for feeder in site.feeders_of_rack.of_row(rack).tolist():
            direct[feeder].append(rack)
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(feeders):
        parent = int(site.parent_of_feeder[i])
        rows.append({"name": name, "parent": feeders[parent] if parent >= 0 else None,
                     "side": SIDES[int(site.side_of_feeder[i])], "budget_w": float(budget_w[i]),
                     "external": bool(site.external_budget[i]), "metered": bool(site.metered_feeder[i]),
                     "inferred": bool(site.inferred_feeder[i]),
                     "racks": [racks[r] for r in direct[i][:SHOWN_SERVED]]})  # fmt: skip
    loops, cdus = site.names.get("loop", []), site.names.get("cdu", [])
    cooled = [{"name": name, "loop": loops[loop] if (loop := int(site.loop_of_cdu[i])) >= 0 else None,
               "racks": [racks[r] for r in np.flatnonzero(site.cdu_of_rack == i)[:SHOWN_SERVED]]}
              for i, name in enumerate(cdus)]  # fmt: skip
    return answer({"now_ns": engine.state.now_ns, "site_hash": site.spec_hash, "feeders": rows,
                   "loops": loops, "cdus": cooled})  # fmt: skip
