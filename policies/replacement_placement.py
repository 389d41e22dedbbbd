"""Which nodes the scheduler shall use last, and which spares it shall keep for nobody.

A suspect that is only watched, and a node on probation, fail more often than others: where a job can begin
elsewhere, it does. So many spares are kept as failures and repairs ask for; each node that is out opens one,
and who takes over is opened as its node begins to leave. What is marked and no longer wanted is opened again,
whoever marked it: the mark in the scheduler says what is ours. Says nothing where nobody reads it back. May
import contracts and the other files of this policy; changes only the memory that it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.replacement_evidence import DAY_S, chance, one_of
from policies.replacement_look import COMMON, levels
from policies.replacement_phases import (
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
from policies.replacement_pool import wanted_band
from policies.replacement_spares import unwell
from twin.contracts import Memory, Proposal, View
from twin.frame import F64, I8, I32, NS, Bool
from twin.health.failure_words import is_failure
from twin.signals import find_control
from twin.state import GOOD

PLACEMENT = "node.placement"
_CONTROL = find_control(PLACEMENT)
assert _CONTROL is not None  # it is of the catalogue
USUAL, LAST, KEPT = map(_CONTROL.states.index, ("usual", "last", "kept"))
# A spare that was to be kept and is not after so long: the scheduler will not, and for a day it comes behind
# the others. source: estimate
UNKEPT_S = 600.0
WHY_LAST = "suspected or on probation: jobs begin elsewhere while they can"
WHY_KEPT = "kept as a spare, for nodes that fail or leave"
WHY_OPEN = "as any other node again"


class Wishes(NamedTuple):
    """Whether suspects and nodes on probation come last, and whether spares are kept."""

    last: bool = True
    spares: bool = False


def shown(view: View) -> F64:
    """The placement that the scheduler tells of each node now [n_node]; NaN = nobody does."""
    current = view.quality(f"{PLACEMENT}_state") == GOOD
    out: F64 = np.where(current, view.readback(PLACEMENT), np.nan)
    return out


def placements(view: View, memory: Memory, wishes: Wishes, looked_s: float = 0.0) -> list[Proposal]:
    """What the scheduler shall do with each node for which that is not as usual, or shall be again.

    `looked_s`: since the last look; 0 where nobody looked for a while.
    """
    marked = shown(view)
    known: Bool = ~np.isnan(marked)
    if not known.any():
        return []
    phase = memory["phase"]
    keep: Bool = np.zeros(len(phase), np.bool_)
    if wishes.spares:
        keep = _keep(view, memory, marked, looked_s)
    last: Bool = np.zeros(len(phase), np.bool_)
    if wishes.last:
        # Most suspects leave or are cleared within the minute in which they are confirmed
        stands = view.now_ns - memory["entered_ns"] >= round(CONFIRM_S * NS)
        last = known & ((phase == PROBATION) | (phase == SUSPECT) & stands)
        last &= (memory["held"] != COMMON) & ~keep
    opens = known & (marked > USUAL) & ~last & ~keep & ~one_of(phase, WITHDRAWN)
    return [*_shall(keep, KEPT, WHY_KEPT), *_shall(last, LAST, WHY_LAST), *_shall(opens, USUAL, WHY_OPEN)]


def _shall(nodes: Bool, state: int, why: str) -> list[Proposal]:
    at = np.flatnonzero(nodes).astype(np.int32)
    value = np.full(len(at), float(state))
    return [Proposal(PLACEMENT, at, value, value.copy(), value.copy(), why)] if len(at) else []


def _keep(view: View, memory: Memory, marked: F64, looked_s: float) -> Bool:
    """Which nodes are kept for nobody [n_node].

    Where nobody knows what runs, or what will fail, what is kept stays so, and nothing more is. A kept one
    that falls ill, or on which people work, stays closed as well, and another is kept in its place. Replaces
    the columns `spares` and `unkept_s` of the memory.
    """
    kept: Bool = (marked == KEPT) & view.site.spare_node
    band = wanted_band(view) if view.jobs.known else None
    if band is None:
        return kept
    every: I32 = np.arange(len(kept), dtype=np.int32)
    level, _ = levels(view, every)
    idle, free = _free(view, memory, level)
    free &= ~np.isnan(marked)
    # What was wanted before still is, as long as it is neither too little nor too much
    wanted = int(np.clip(memory["spares"].max(initial=0), *band))
    memory["spares"] = np.full(len(kept), wanted, np.int32)
    out = int(np.count_nonzero(_out(view, level) & ~view.site.spare_node))
    least = max(wanted - out, 0)
    at = np.flatnonzero(free)
    risk = np.nan_to_num(chance(view, DAY_S)[at], nan=1.0)
    shall: Bool = np.zeros(len(kept), np.bool_)
    refused = _refused(view, memory, marked, free, looked_s)
    shall[at[np.lexsort((risk, marked[at] != KEPT, refused[at]))][:least]] = True
    return shall | kept & idle & ~free


def _refused(view: View, memory: Memory, marked: F64, free: Bool, looked_s: float) -> Bool:
    """Nodes that the scheduler would not keep, though that was commanded, less than a day ago [n_node].

    Replaces the column `unkept_s` of the memory: for how long, in looks without a gap, a free node was
    commanded to be kept and was not; once that is long enough it counts on, for a day.
    """
    was_s = np.where(memory["unkept_s"] < UNKEPT_S + DAY_S, memory["unkept_s"], 0.0)
    asked: Bool = free & (view.commanded(PLACEMENT) == KEPT) & (marked != KEPT)
    refused: Bool = (was_s >= UNKEPT_S) & (marked != KEPT)
    memory["unkept_s"] = np.where(asked | refused, was_s + looked_s, 0.0)
    return refused


def _free(view: View, memory: Memory, level: I8) -> tuple[Bool, Bool]:
    """(spares that nobody uses or is promised now, those of them that could take over) [n_node]."""
    site, phase, busy = view.site, memory["phase"], view.jobs.job_of_node >= 0
    leaves = one_of(phase, (SAVING, DRAINING, OUT, TESTING, RMA)) | (phase == CORDONED) & ~busy
    promised = (memory["pair"] != 0) & np.isin(memory["pair"], memory["pair"][leaves])
    idle: Bool = site.spare_node & ~busy & (level < 1) & ~(promised & (phase == IN_SERVICE))
    free = idle & (phase == IN_SERVICE) & ~unwell(view)
    work = view.maintenance("node")
    return idle, free if work is None else free & ~work


def _out(view: View, level: I8) -> Bool:
    """Nodes that do no work: down, or out of service with nothing left that runs on them [n_node]."""
    log = view.failures()
    out: Bool = (level >= 1) & (view.jobs.job_of_node < 0)
    out[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    return out
