"""Site statistics: counts of a fleet's failures that a site may share, each a sum over its nodes.

A node adds to each group of counts by its own failures alone, and at most `SENSITIVITY` in all: one node
more or less, with all its failures, moves a group by no more. Failures with a cause in common are therefore
not set apart: whether one is shared depends on the other nodes. Noise is for who publishes the counts.
source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy (2014), definition 3.1
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.failure.fault_log import FaultLog
from models.failure.priors import AGES_D, N_AGE
from twin.catalogue import F64, I64, ContractError

# Least failures of a node in each cell of `counts`; the last is open. source: estimate
COUNT_EDGES = (0, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50, 100, 200)
# Least days of a repair in each cell of `repairs`; the last is open. source: estimate
REPAIR_EDGES_D = (0.0, 1 / 96, 1 / 24, 1 / 6, 0.5, 1.0, 3.0, 7.0, 30.0)
# A node is followed up to this failure: the more, the more noise hides it. source: estimate; nodes of most
# recorded fleets have fewer in a year
FOLLOWED = 4
GROUPS: Mapping[str, int] = {
    "counts": len(COUNT_EDGES),  # nodes by their number of failures
    "again": N_AGE + 1,  # failures by the age of the node's last one; the last cell: older, or none
    "censored": N_AGE + 1,  # nodes by the age of the last failure when watching ended; the first: at once
    "repairs": len(REPAIR_EDGES_D),  # nodes by the length of their first repair
}
# Most that one node adds to a group. `counts`: it is in one cell. `again`: FOLLOWED failures, each in one
# cell. `censored`: its last failure alone. `repairs`: its first alone.
SENSITIVITY: Mapping[str, int] = {"counts": 1, "again": FOLLOWED, "censored": 1, "repairs": 1}


def node_statistics(log: FaultLog, since_d: float, until_d: float) -> dict[str, I64]:
    """Return the share of each node in each group, from the data known on day `until_d` [n, n_cell]."""
    if not since_d < until_d:
        raise ContractError(f"expected a first day before the last, got {since_d:g} and {until_d:g}")
    keep = (log.start_d >= since_d) & (log.start_d < until_d)
    order = np.lexsort((log.start_d[keep], log.node[keep]))
    node = log.node[keep][order]
    start_d, end_d = log.start_d[keep][order], log.end_d[keep][order]
    out = {name: np.zeros((log.n, cells), np.int64) for name, cells in GROUPS.items()}
    count = np.bincount(node, minlength=log.n)
    out["counts"][np.arange(log.n), np.searchsorted(COUNT_EDGES, count, side="right") - 1] = 1
    if not len(node):
        return out
    first = np.flatnonzero(np.diff(node, prepend=-1))
    rank = np.arange(len(node)) - np.repeat(first, np.diff(np.append(first, len(node))))
    back = end_d <= until_d
    age_d = np.full(len(node), np.inf)  # of the node's failure before
    age_d[1:] = np.maximum(start_d[1:] - np.where(back[:-1], end_d[:-1], start_d[1:]), 0.0)
    age_d[first] = np.inf
    followed = rank < FOLLOWED
    cell = np.minimum(np.searchsorted(AGES_D, age_d, side="right") - 1, N_AGE)
    np.add.at(out["again"], (node[followed], cell[followed]), 1)
    last = np.append(first[1:], len(node)) - 1
    open_d = np.where(back[last], until_d - end_d[last], 0.0)
    # A node that failed FOLLOWED times is not followed further, nor is a repair that goes on
    at_once = (rank[last] >= FOLLOWED - 1) | ~back[last]
    place = np.where(at_once, 0, np.searchsorted(AGES_D, open_d, side="right"))
    ends = place <= N_AGE
    out["censored"][node[last[ends]], place[ends]] = 1
    mended = first[back[first]]
    length = np.searchsorted(REPAIR_EDGES_D, end_d[mended] - start_d[mended], side="right") - 1
    out["repairs"][node[mended], np.maximum(length, 0)] = 1
    return out


def site_statistics(log: FaultLog, since_d: float, until_d: float) -> dict[str, I64]:
    """The groups of a whole fleet, without noise [n_cell]."""
    return {name: part.sum(axis=0) for name, part in node_statistics(log, since_d, until_d).items()}


def watched_d(counts: F64, days: float) -> float:
    """Node-days for which nodes were followed: to the end of the span, or to the failure FOLLOWED.

    That one comes at its place among the failures of its node, which are spread evenly.
    """
    middle = (np.array(COUNT_EDGES) + np.append(COUNT_EDGES[1:], 2 * COUNT_EDGES[-1]) - 1) / 2.0
    return float(days * (counts @ np.minimum(1.0, FOLLOWED / (middle + 1.0))))


def exposure_d(again: F64, censored: F64) -> F64:
    """Node-days at each age of a last failure [N_AGE], by the actuarial method.

    Who leaves within an age, by a failure or as watching ends, was there for half of it.
    """
    widths = np.diff(AGES_D)
    entering = again.sum() - censored[0]
    out = np.zeros(N_AGE)
    for i in range(N_AGE):
        leaving = again[i] + censored[i + 1]
        out[i] = widths[i] * (entering - leaving / 2.0)
        entering -= leaving
    return out
