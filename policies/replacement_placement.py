"""In which order the scheduler shall use the nodes: who comes last, and which spares are kept for nobody.

A suspect that is only watched, and a node on probation, fail more often than others: where a job can begin
elsewhere, it does. So many spares are kept as failures and repairs ask for; each node that is out opens one,
and who takes over is opened first. What is marked and no longer wanted is opened again, whoever marked it:
the mark in the scheduler is all that is remembered. Says nothing where nobody reads the order back. May
import contracts and the other files of this policy; changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.replacement_evidence import DAY_S, chance, one_of
from policies.replacement_look import COMMON, levels
from policies.replacement_phases import CONFIRM_S, IN_SERVICE, PROBATION, SUSPECT, WITHDRAWN
from policies.replacement_pool import pool_of
from policies.replacement_spares import unwell
from twin.contracts import Memory, Proposal, View
from twin.frame import F64, I32, NS, Bool
from twin.health.failure_words import is_failure
from twin.state import GOOD

PLACEMENT = "node.placement"
USUAL, LAST, KEPT = range(3)
WHY_LAST = "suspected or on probation: jobs begin elsewhere while they can"
WHY_OPEN = "as any other node again"


class Order(NamedTuple):
    """Whether suspects and nodes on probation come last, and whether spares are kept."""

    last: bool = True
    keep: bool = False


def placements(view: View, kept: Memory, order: Order) -> list[Proposal]:
    """What the scheduler shall do with each node for which that is not as usual, or shall be again."""
    shown = view.readback(PLACEMENT)
    known: Bool = (view.quality(f"{PLACEMENT}_state") == GOOD) & ~np.isnan(shown)
    if not known.any():
        return []
    phase, marked = kept["phase"], np.nan_to_num(shown)
    last: Bool = np.zeros(len(phase), np.bool_)
    if order.last:
        # Most suspects leave or are cleared within the minute in which they are confirmed
        stands = view.now_ns - kept["entered_ns"] >= round(CONFIRM_S * NS)
        last = known & ((phase == PROBATION) | (phase == SUSPECT) & stands) & (kept["held"] != COMMON)
    out: list[Proposal] = []
    spare: Bool = np.zeros(len(phase), np.bool_)
    # Where nobody knows what runs, or what will fail, what is kept stays so, and nothing more is
    undecided = np.zeros(len(phase), np.bool_)
    if order.keep and not view.jobs.known:
        undecided = marked == KEPT
    elif order.keep:
        pool = pool_of(view)
        if pool is None:
            undecided = marked == KEPT
        else:
            spare = kept_spares(view, kept, known, marked, pool.wanted)
            out += _shall(spare, KEPT, "kept as a spare, for nodes that fail or leave")
    last &= ~spare
    out += _shall(last, LAST, WHY_LAST)
    opens = known & (marked > USUAL) & ~last & ~spare & ~undecided & ~one_of(phase, WITHDRAWN)
    return out + _shall(opens, USUAL, WHY_OPEN)


def _shall(nodes: Bool, state: int, why: str) -> list[Proposal]:
    at = np.flatnonzero(nodes).astype(np.int32)
    value = np.full(len(at), float(state))
    return [Proposal(PLACEMENT, at, value, value.copy(), value.copy(), why)] if len(at) else []


def kept_spares(view: View, kept: Memory, known: Bool, marked: F64, wanted: int) -> Bool:
    """Which spares are kept [n_node]: so many as are `wanted`, less one for each other node that is out, as
    a spare does its work.

    Free ones that are well, those that are kept already first, then who is least likely to fail.
    """
    site = view.site
    every: I32 = np.arange(site.sizes["node"], dtype=np.int32)
    level, _ = levels(view, every)
    log = view.failures()
    out: Bool = level >= 1
    out[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    least = min(wanted, int(np.count_nonzero(site.spare_node)))
    least = max(least - int(np.count_nonzero(out & ~site.spare_node)), 0)
    work = view.maintenance("node")
    free = site.spare_node & known & ~out & (view.jobs.job_of_node < 0) & ~unwell(view)
    free &= (kept["phase"] == IN_SERVICE) & (kept["pair"] == 0)  # who is promised takes over
    if work is not None:
        free &= ~work
    at = np.flatnonzero(free)
    risk = np.nan_to_num(chance(view, DAY_S)[at], nan=1.0)
    first = at[np.lexsort((risk, marked[at] != KEPT))][:least]
    shall: Bool = np.zeros(len(every), np.bool_)
    shall[first] = True
    return shall
