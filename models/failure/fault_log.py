"""Fault log: start, class and end of each node's faults and repairs.

The clock counts days from the log's day 0. A fault lasts from its start to its end; while it lasts the node
is under repair and no candidate for the next one. `FaultLog.known_at` is the only way to look back: a fault
that was open that day has no known end, whatever was learned later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twin.catalogue import F64, I32, Bool, ContractError


@dataclass(frozen=True)
class FaultLog:
    """Faults in order of start. node, kind: int32 [k]; start_d, end_d: days [k], `inf` while it is open.

    Nodes are 0..n-1, those that never failed too; `kind` is a place in `classes`. The log watches from day
    `begin_d` to day `until_d`. Raises ContractError for what is no such log.
    """

    n: int
    node: I32
    start_d: F64
    end_d: F64
    kind: I32
    classes: tuple[str, ...]
    begin_d: float
    until_d: float

    def __post_init__(self) -> None:
        k = len(self.node)
        if any(part.shape != (k,) for part in (self.node, self.start_d, self.end_d, self.kind)):
            raise ContractError("expected node, start_d, end_d and kind of one length")
        if not self.begin_d <= self.until_d:
            raise ContractError(f"expected begin_d <= until_d, got {self.begin_d} and {self.until_d}")
        if not k:
            return
        if self.node.min() < 0 or self.node.max() >= self.n:
            raise ContractError(f"expected nodes 0..{self.n - 1}")
        if self.kind.min() < 0 or self.kind.max() >= len(self.classes):
            raise ContractError(f"expected classes 0..{len(self.classes) - 1}")
        if not np.isfinite(self.start_d).all() or np.any(np.diff(self.start_d) < 0):
            raise ContractError("expected finite starts in order")
        if not (self.end_d >= self.start_d).all():
            raise ContractError("expected every end at its start or later")
        if self.start_d[0] < self.begin_d or self.start_d[-1] > self.until_d:
            raise ContractError(f"expected starts from day {self.begin_d:g} to {self.until_d:g}")

    @property
    def k(self) -> int:
        """Return the number of faults."""
        return len(self.node)

    def known_at(self, day: float) -> FaultLog:
        """Return the log as known on this day: no later fault, and no later end."""
        k = int(np.searchsorted(self.start_d, day, side="right"))
        end_d = np.where(self.end_d[:k] <= day, self.end_d[:k], np.inf)
        until_d = max(min(self.until_d, float(day)), self.begin_d)
        return FaultLog(
            self.n, self.node[:k], self.start_d[:k], end_d, self.kind[:k], self.classes, self.begin_d, until_d
        )

    def only(self, keep: Bool) -> FaultLog:
        """Return the log of these faults only [k], with the same nodes, classes and days."""
        return FaultLog(
            self.n,
            self.node[keep],
            self.start_d[keep],
            self.end_d[keep],
            self.kind[keep],
            self.classes,
            self.begin_d,
            self.until_d,
        )

    def up(self, days: F64) -> Bool:
        """Return the candidates: nodes not under repair on each of these days, ascending [n_day, n]."""
        down = np.zeros((len(days) + 1, self.n), np.int32)
        np.add.at(down, (np.searchsorted(days, self.start_d, side="left"), self.node), 1)
        np.subtract.at(down, (np.searchsorted(days, self.end_d, side="left"), self.node), 1)
        out: Bool = np.cumsum(down, axis=0)[:-1] == 0
        return out

    def next_start(self, days: F64) -> F64:
        """Return the day of each node's next fault after each of these days, ascending [n_day, n]; inf:
        none."""
        out = np.full((len(days), self.n), np.inf)
        edge = np.searchsorted(self.start_d, days, side="right")
        upper = self.k
        for i in range(len(days) - 1, -1, -1):
            if i + 1 < len(days):
                out[i] = out[i + 1]
            # Of several faults of a node the assignment keeps the last one: go through them backwards.
            later = slice(edge[i], upper)
            out[i, self.node[later][::-1]] = self.start_d[later][::-1]
            upper = edge[i]
        return out

    def counts(self, days: F64, span_d: float) -> F64:
        """Return the number of faults of the whole fleet in (day, day + span] from each of these days
        [n_day]."""
        edge = np.searchsorted(self.start_d, np.stack([days, days + span_d]), side="right")
        out: F64 = (edge[1] - edge[0]).astype(np.float64)
        return out

    def down_d(self, day: float) -> F64:
        """Return the days that each node spent under repair from the log's begin to this day [n]."""
        length = np.clip(np.minimum(self.end_d, day) - self.start_d, 0.0, None)
        return self.per_node(length)

    def per_node(self, weight: F64) -> F64:
        """Return the sum of a weight per fault [k] over each node's faults [n]."""
        out: F64 = np.bincount(self.node, weight, self.n).astype(np.float64)
        return out

    @cached_property
    def returned(self) -> Bool:
        """Return the faults with a known end of repair [k]."""
        return np.isfinite(self.end_d)


def scrambled(log: FaultLog, day: float) -> FaultLog:
    """Return the same log up to `day`, and nonsense after it: other faults, other ends. For audits of a
    look ahead."""
    known = log.known_at(day)
    end_d = known.end_d.copy()
    # Repairs that were open end at once, in turn, and every node fails three times.
    still = np.flatnonzero(~np.isfinite(end_d))
    end_d[still] = day + 0.01 * (1.0 + np.arange(len(still)) % 3)
    left_d = max(log.until_d - day, 1.0)
    step = np.arange(3 * log.n)
    node = (step * 7 + step // log.n) % log.n
    start_d = day + left_d * ((1.0 + step) / (1.0 + len(step))) ** 2
    return FaultLog(
        log.n,
        np.concatenate([known.node, node]).astype(np.int32),
        np.concatenate([known.start_d, start_d]),
        np.concatenate([end_d, start_d]),
        np.concatenate([known.kind, step % max(len(log.classes), 1)]).astype(np.int32),
        log.classes,
        log.begin_d,
        max(log.until_d, float(start_d[-1])),
    )
