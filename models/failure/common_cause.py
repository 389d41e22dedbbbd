"""Faults with a common cause: more nodes within ten minutes than chance explains.

They describe what the nodes share, not the nodes: what fits or foresees each node's own faults leaves
them out, and the whole fleet bears their rate. By time alone, as a log names no racks. Whether a fault
counts as shared depends on the faults up to ten minutes after it, and never changes later.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from models.failure.fault_log import FaultLog
from twin.catalogue import Bool
from twin.health import LEAST_NODES, PRIOR_PER_S, PRIOR_S, WINDOW_S, log_tail

DAY_S = 86_400.0
WINDOW_D = WINDOW_S / DAY_S
PRIOR_PER_D, PRIOR_NODE_D = PRIOR_PER_S * DAY_S, PRIOR_S / DAY_S
RECENT_D = 7.0  # source: estimate
# Of windows that chance alone fills so in the whole log so far, this many at most. Each fault ends a window,
# so that the bound on one window falls with their number. source: estimate
MOST_BY_CHANCE = 0.01


class CommonCause(NamedTuple):
    """One common cause: the day of its first fault, and the number of its faults and nodes."""

    day: float
    faults: int
    nodes: int


def shared_faults(log: FaultLog, before: tuple[FaultLog, Bool] | None = None) -> Bool:
    """Return a mask of the faults with a common cause [k].

    The rate to expect is that of earlier faults that had none, over all nodes, with the live site's prior; or
    that of the last week if it is higher, as rates drift. `before`: a log that this one goes on from, with
    its mask, so that only what came since is looked at.
    """
    out, done = np.zeros(log.k, np.bool_), 0
    if before is not None and _goes_on(log, before[0]):
        done = before[0].k
        out[:done] = before[1]
    first = np.searchsorted(log.start_d, log.start_d - WINDOW_D, side="left")
    for j in done + np.flatnonzero((np.arange(log.k) - first + 1 >= LEAST_NODES)[done:]):
        i = int(first[j])
        nodes = len(np.unique(log.node[i : j + 1]))
        if nodes < LEAST_NODES:
            continue
        rate = max(_rate(log, out, i, log.begin_d), _rate(log, out, i, log.start_d[i] - RECENT_D))
        # One fault of the window is given: the chance is that of the others.
        if log_tail(nodes - 1, rate * log.n * WINDOW_D) <= math.log(MOST_BY_CHANCE / (j + 1.0)):
            out[i : j + 1] = True
    return out


def _goes_on(log: FaultLog, before: FaultLog) -> bool:
    """Return True if the log begins with the same faults of the same nodes."""
    k = before.k
    return (
        (log.n, log.begin_d) == (before.n, before.begin_d)
        and k <= log.k
        and np.array_equal(log.start_d[:k], before.start_d)
        and np.array_equal(log.node[:k], before.node)
    )


def _rate(log: FaultLog, shared: Bool, i: int, since_d: float) -> float:
    """Return the faults of single nodes per node and day since a day, up to the fault in place i."""
    a = int(np.searchsorted(log.start_d[:i], since_d))
    single = i - a - int(np.count_nonzero(shared[a:i]))
    node_d = log.n * (log.start_d[i] - max(since_d, log.begin_d))
    return float((single + PRIOR_PER_D * PRIOR_NODE_D) / (node_d + PRIOR_NODE_D))


def individual_faults(log: FaultLog) -> FaultLog:
    """Return the log without the faults that have a common cause."""
    shared = shared_faults(log)
    return log.only(~shared) if shared.any() else log


def common_causes(log: FaultLog) -> tuple[CommonCause, ...]:
    """Return common causes in order of time; faults less than a window apart belong to one."""
    at = np.flatnonzero(shared_faults(log))
    if not len(at):
        return ()
    new = np.flatnonzero(np.diff(log.start_d[at], prepend=-np.inf) > WINDOW_D)
    return tuple(
        CommonCause(float(log.start_d[part[0]]), len(part), len(np.unique(log.node[part])))
        for part in np.split(at, new[1:])
    )
