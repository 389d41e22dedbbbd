"""Shared storage: an exact simulation of transfers that share one storage equally."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from twin.catalogue import F64


def finish_s(begin_s: ArrayLike, work_s: ArrayLike) -> F64:
    """The ends [n] of transfers that take `work_s` alone, on one storage that they share equally.

    Exact: between two begins or ends each of k gets 1 / k. What all of them get since the beginning is one
    line, so each ends when the line has risen by its work.
    """
    begin, work = np.asarray(begin_s, np.float64), np.asarray(work_s, np.float64)
    end = np.full(len(begin), np.nan)
    order, level, now, waiting = np.argsort(begin, kind="stable"), 0.0, 0.0, 0
    goal: dict[int, float] = {}
    while waiting < len(order) or goal:
        if not goal:
            now = float(begin[order[waiting]])
        first = min(goal, key=lambda i: goal[i]) if goal else -1
        done = now + (goal[first] - level) * len(goal) if goal else np.inf
        comes = float(begin[order[waiting]]) if waiting < len(order) else np.inf
        if done <= comes:
            level, now = goal.pop(first), done
            end[first] = now
        else:
            level, now = level + ((comes - now) / len(goal) if goal else 0.0), comes
            goal[int(order[waiting])] = level + float(work[order[waiting]])
            waiting += 1
    return end


def busy_pu(begin_s: ArrayLike, end_s: ArrayLike, edges_s: ArrayLike) -> F64:
    """The share of each window between `edges_s` in which any transfer runs, as counters of bytes show it."""
    order = np.argsort(np.asarray(begin_s, np.float64), kind="stable")
    begin = np.asarray(begin_s, np.float64)[order]
    end = np.maximum.accumulate(np.asarray(end_s, np.float64)[order])
    # Busy until t: whole transfers that began before, less what is to come of the last of them
    gained = np.maximum(end - np.maximum(begin, np.concatenate([[-np.inf], end[:-1]])), 0.0)
    total = np.concatenate([[0.0], np.cumsum(gained)])
    edges = np.asarray(edges_s, np.float64)
    at = np.searchsorted(begin, edges, side="right")
    last = np.where(at > 0, end[np.maximum(at, 1) - 1], -np.inf)
    until = total[at] - np.maximum(last - edges, 0.0)
    out: F64 = np.diff(until) / np.diff(edges)
    return out
