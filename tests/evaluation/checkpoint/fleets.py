"""Simulated fleets for backtests of checkpoints: a steady rate, one that drifts, bursts of nodes and of all.

Each is a log of faults and repairs like a recorded one, seeded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from models.failure import FaultLog
from twin.catalogue import F64, I64

NODES = 2048
# Failures per node and day: 2,048 servers then have an MTTF of 1.8 h, as 16,384 GPUs are told to have.
# source: Kokolis et al., arXiv 2410.21680 (2024), section III
PER_NODE_D = 6.5e-3
DAYS, FROM_D = 90.0, 45.0
REPAIR_D = 1.0  # mean time of a repair. source: estimate
DRIFT_D, DRIFT_TIMES = 30.0, 3.0  # a wave of this period between a third and three times the rate
BURST_EVERY_D, BURST_D, BURST_TIMES = 15.0, 1.5, 8.0  # days on which all fail so much more often
CHILDREN, CHILD_D = 0.5, 6.0  # further faults of a node by each one of its own, and how much later


def steady(seed: int) -> FaultLog:
    """The same rate at all times."""
    return _fleet(seed, np.ones_like, 1.0)


def drifting(seed: int) -> FaultLog:
    """The whole fleet's rate rises and falls ninefold within half a period."""
    return _fleet(seed, lambda day: DRIFT_TIMES ** np.sin(2.0 * np.pi * day / DRIFT_D), DRIFT_TIMES)


def bursts_of_all(seed: int) -> FaultLog:
    """Every so often all nodes fail much more often, for a day and a half."""
    return _fleet(seed, lambda day: np.where(day % BURST_EVERY_D < BURST_D, BURST_TIMES, 1.0), BURST_TIMES)


def bursts_of_nodes(seed: int) -> FaultLog:
    """Half of all faults follow from an earlier one of the same node, within days."""
    return _fleet(seed, lambda day: np.full_like(day, 1.0 - CHILDREN), 1.0, CHILDREN)


FLEETS: dict[str, tuple[Callable[[int], FaultLog], str]] = {
    "steady": (steady, "one rate for all nodes at all times"),
    "drift": (drifting, "the rate of all swings between a third and three times, in waves of 30 days"),
    "bursts_of_all": (bursts_of_all, "every 15 days all nodes fail 8 times as often, for 36 h"),
    "bursts_of_nodes": (bursts_of_nodes, "half of the faults follow from one of the same node"),
}


def _fleet(seed: int, times: Callable[[F64], F64], most: float, children: float = 0.0) -> FaultLog:
    """Faults at `times(day)`, at most `most`, the usual rate; none of a node under repair."""
    rng = np.random.default_rng([seed, 41])
    drawn = rng.poisson(NODES * PER_NODE_D * most * DAYS)
    day = np.sort(rng.uniform(0.0, DAYS, drawn))
    day = day[rng.uniform(0.0, most, drawn) < times(day)]
    node = rng.integers(0, NODES, len(day))
    days, nodes = [day], [node]
    while children and len(day):
        parent = np.repeat(np.arange(len(day)), rng.poisson(children, len(day)))
        later = day[parent] + rng.exponential(CHILD_D, len(parent))
        inside = later < DAYS
        day, node = later[inside], node[parent[inside]]
        days.append(day)
        nodes.append(node)
    return _log(np.concatenate(days), np.concatenate(nodes), rng)


def _log(day: F64, node: I64, rng: np.random.Generator) -> FaultLog:
    order = np.argsort(day, kind="stable")
    day, node = day[order], node[order]
    end_d = day + rng.exponential(REPAIR_D, len(day))
    back_d, keep = np.zeros(NODES), np.zeros(len(day), bool)
    for i, at in enumerate(node.tolist()):
        if day[i] >= back_d[at]:
            keep[i], back_d[at] = True, end_d[i]
    end_d = np.where(end_d <= DAYS, end_d, np.inf)
    return FaultLog(NODES, node[keep].astype(np.int32), day[keep], end_d[keep],
                    np.zeros(int(keep.sum()), np.int32), ("simulated",), 0.0, DAYS)  # fmt: skip
