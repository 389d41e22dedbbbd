"""Placement: nodes that the scheduler shall use last, and spares that it shall keep free.

A watched suspect and a node on probation fail more often than others: jobs start elsewhere where they can.
The number of reserved spares follows from failures and repairs; each node that is out opens one, and the
spare that takes over is opened as its node begins to leave. A mark that is no longer wanted is removed,
whoever set it: the mark in the scheduler says that it is ours. Nothing is proposed where placement is not
read back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.node_replacement.assessment import COMMON_CAUSE
from policies.node_replacement.evidence import DAY_S, failure_chance, one_of
from policies.node_replacement.ownership import service_levels
from policies.node_replacement.phases import (
    CONFIRM_S,
    CORDONED,
    DRAINING,
    IN_SERVICE,
    OUT,
    PROBATION,
    RMA,
    SAVING,
    SUSPECT,
    TESTING,
    WITHDRAWN,
)
from policies.node_replacement.spare_count import wanted_band
from policies.node_replacement.spares import unwell
from twin.catalogue import F64, I8, I32, NS, Bool, find_control
from twin.contracts import Memory, Proposal, View, is_failure
from twin.telemetry import GOOD

PLACEMENT = "node.placement"
_CONTROL = find_control(PLACEMENT)
assert _CONTROL is not None  # it is of the catalogue
PLACED_NORMALLY, PLACED_LAST, RESERVED = map(_CONTROL.states.index, ("usual", "last", "kept"))
# A spare that is not reserved so long after the command: the scheduler refuses, and for a day it comes
# after the others. source: estimate
REFUSED_S = 600.0
LAST_TEXT = "suspected or on probation: jobs start elsewhere if they can"
RESERVED_TEXT = "kept as a spare, for nodes that fail or leave"
NORMAL_TEXT = "no longer marked"


class PlacementSettings(NamedTuple):
    """Settings: suspects and nodes on probation come last; spares are reserved."""

    last: bool = True
    spares: bool = False


def current_placement(view: View) -> F64:
    """Return the placement of each node as the scheduler reports it now [n_node]; NaN = not reported."""
    current = view.quality(f"{PLACEMENT}_state") == GOOD
    out: F64 = np.where(current, view.readback(PLACEMENT), np.nan)
    return out


def placement_proposals(
    view: View, memory: Memory, wishes: PlacementSettings, elapsed_s: float = 0.0
) -> list[Proposal]:
    """Return proposals for nodes whose placement is not normal, or must become normal again.

    `elapsed_s`: time since the last run; 0 after a pause.
    """
    marked = current_placement(view)
    known: Bool = ~np.isnan(marked)
    if not known.any():
        return []
    phase = memory["phase"]
    keep: Bool = np.zeros(len(phase), np.bool_)
    if wishes.spares:
        keep = _reserved_spares(view, memory, marked, elapsed_s)
    last: Bool = np.zeros(len(phase), np.bool_)
    if wishes.last:
        # Most suspects leave or are cleared within the minute in which they are confirmed
        stands = view.now_ns - memory["entered_ns"] >= round(CONFIRM_S * NS)
        last = known & ((phase == PROBATION) | (phase == SUSPECT) & stands)
        last &= (memory["hold"] != COMMON_CAUSE) & ~keep
    opens = known & (marked > PLACED_NORMALLY) & ~last & ~keep & ~one_of(phase, WITHDRAWN)
    return [
        *_proposal(keep, RESERVED, RESERVED_TEXT),
        *_proposal(last, PLACED_LAST, LAST_TEXT),
        *_proposal(opens, PLACED_NORMALLY, NORMAL_TEXT),
    ]


def _proposal(nodes: Bool, state: int, why: str) -> list[Proposal]:
    at = np.flatnonzero(nodes).astype(np.int32)
    value = np.full(len(at), float(state))
    return [Proposal(PLACEMENT, at, value, value.copy(), value.copy(), why)] if len(at) else []


def _reserved_spares(view: View, memory: Memory, marked: F64, elapsed_s: float) -> Bool:
    """Return the spares to reserve [n_node].

    Where jobs or failures are unknown, reserved spares stay reserved, and no more are added. A reserved node
    that becomes unhealthy or enters maintenance stays closed, and another is reserved in its place. Replaces
    the columns `spares_wanted` and `not_reserved_s` of the memory.
    """
    kept: Bool = (marked == RESERVED) & view.site.spare_node
    band = wanted_band(view) if view.jobs.known else None
    if band is None:
        return kept
    every: I32 = np.arange(len(kept), dtype=np.int32)
    level, _ = service_levels(view, every)
    idle, free = _free_spares(view, memory, level)
    free &= ~np.isnan(marked)
    # The number wanted before stands while it is neither too small nor too large
    wanted = int(np.clip(int(memory["spares_wanted"]), *band))
    memory["spares_wanted"] = np.array(wanted, np.int32)
    out = int(np.count_nonzero(_idle_nodes(view, level) & ~view.site.spare_node))
    least = max(wanted - out, 0)
    at = np.flatnonzero(free)
    risk = np.nan_to_num(failure_chance(view, DAY_S)[at], nan=1.0)
    shall: Bool = np.zeros(len(kept), np.bool_)
    refused = _refused(view, memory, marked, free, elapsed_s)
    shall[at[np.lexsort((risk, marked[at] != RESERVED, refused[at]))][:least]] = True
    return shall | kept & idle & ~free


def _refused(view: View, memory: Memory, marked: F64, free: Bool, elapsed_s: float) -> Bool:
    """Return the nodes that the scheduler refused to reserve less than a day ago [n_node].

    Replaces the column `not_reserved_s` of the memory: for how long, in runs without a gap, a free node was
    commanded to be reserved and was not; once that is long enough it counts on, for a day.
    """
    was_s = np.where(memory["not_reserved_s"] < REFUSED_S + DAY_S, memory["not_reserved_s"], 0.0)
    asked: Bool = free & (view.commanded(PLACEMENT) == RESERVED) & (marked != RESERVED)
    refused: Bool = (was_s >= REFUSED_S) & (marked != RESERVED)
    memory["not_reserved_s"] = np.where(asked | refused, was_s + elapsed_s, 0.0)
    return refused


def _free_spares(view: View, memory: Memory, level: I8) -> tuple[Bool, Bool]:
    """Return (unused and unpromised spares, those of them that could take over) [n_node]."""
    site, phase, busy = view.site, memory["phase"], view.jobs.job_of_node >= 0
    leaves = one_of(phase, (SAVING, DRAINING, OUT, TESTING, RMA)) | (phase == CORDONED) & ~busy
    promised = (memory["spare_pair"] != 0) & np.isin(memory["spare_pair"], memory["spare_pair"][leaves])
    idle: Bool = site.spare_node & ~busy & (level < 1) & ~(promised & (phase == IN_SERVICE))
    free = idle & (phase == IN_SERVICE) & ~unwell(view)
    work = view.maintenance("node")
    return idle, free if work is None else free & ~work


def _idle_nodes(view: View, level: I8) -> Bool:
    """Return the nodes without work: down, or out of service with nothing left that runs on them [n_node]."""
    log = view.failures()
    out: Bool = (level >= 1) & (view.jobs.job_of_node < 0)
    out[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    return out
