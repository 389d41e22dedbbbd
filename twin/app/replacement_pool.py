"""Spares and the circuit breaker as they stand now, for the interface: by the policy's own sums.

May import the core and policies; changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.replacement_breaker import WINDOW_S, breaker
from policies.replacement_look import ALARMS_PER_FAILURE
from policies.replacement_phases import CORDONED, SAVING, SUSPECT
from policies.replacement_placement import KEPT, shown
from policies.replacement_pool import pool_of
from policies.replacement_spares import roles
from twin.app.api_health import CHANCE, DAY_S, forecast_of
from twin.app.live import Live
from twin.app.replacement_journal import SERVICE
from twin.app.report_text import clean
from twin.contracts import Memory
from twin.frame import NS
from twin.view import EngineView

SHOWN_HELD = 8
BEFORE = (SUSPECT, CORDONED, SAVING)  # phases in which a node may still be held back


def pool_told(view: EngineView) -> dict[str, Any]:
    """How many spares there are, are free, are kept so by the scheduler, and are wanted: None where nothing
    is forecast to fail."""
    spare, have = roles(view.site, view.jobs, view.readback(SERVICE)), int(view.site.spare_node.sum())
    free, kept = int(np.count_nonzero(spare)), int(np.count_nonzero(spare & (shown(view) == KEPT)))
    held = f", {kept} of them kept so by the scheduler" if kept else ""
    found = pool_of(view)
    if found is None:
        said = f"{have}, {free} of them free{held}; nobody knows how many are needed: nothing is forecast"
        return {"have": have, "free": free, "kept": kept, "wanted": None, "short": False,
                "chance_short_pu": None, "sentence": said}  # fmt: skip
    return {"have": found.have, "free": free, "kept": kept, "wanted": found.wanted,
            "short": bool(found.short), "chance_short_pu": float(found.chance_short_pu),
            "sentence": clean(f"{free} free now{held}; {found.sentence}", 400)}  # fmt: skip


def breaker_of(live: Live, view: EngineView, memory: Memory) -> dict[str, Any]:
    """Whether too many look bad at once, which are held back, and why."""
    suspect = np.isin(memory["phase"], BEFORE)
    closed = {"open": False, "nodes": 0, "why": "", "first": []}
    if not suspect.any():
        return closed
    newly = suspect & (view.now_ns - memory["begun_ns"] < round(WINDOW_S * NS))
    day = forecast_of(live, CHANCE, DAY_S)
    known = np.zeros(0) if day is None else day.mean[np.isfinite(day.mean)]
    usual = ALARMS_PER_FAILURE * float(np.median(known)) * len(suspect) / 24.0 if len(known) else 0.0
    found = breaker(view, newly, usual, suspect, memory["shared_ns"])
    held = np.flatnonzero(found.nodes & suspect)
    if not len(held):
        return closed
    return {"open": True, "nodes": len(held), "why": clean(found.why, 400),
            "first": [view.site.name("node", i) for i in held[:SHOWN_HELD].tolist()]}  # fmt: skip
