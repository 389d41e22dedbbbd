"""Cycles: runs of trouble on single devices, and how much likelier they are if trouble has come to stay.

A cycle begins with the first trouble of a device. Against its usual rate, Gamma(a, b) (mean a / b per day),
stands one of r = `per_day`; after m times in t days the log of the ratio of likelihoods is

    m ln r - r t - ln[ G(a + m) / G(a) b^a / (b + t)^(a + m) ].

What the first time alone adds is left out of what is told: once is no recurrence. Sparse columns by device,
ascending. May import array types.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lgamma
from typing import Any

import numpy as np

from twin.frame import F64, I32, I64, NS, Bool

RECURS_PER_DAY = 6.0  # trouble that has come to stay: every four hours. source: estimate
DAY_NS = 86_400 * NS
_COLUMNS: dict[str, Any] = {"index": np.int32, "first_ns": np.int64, "count": np.int32,
                            "a": np.float64, "b": np.float64, "logs": np.float64}  # fmt: skip


class Cycles:
    """Open cycles of one kind of trouble [k].

    a, b: the usual rate before it began, as known now; `logs` is ln[ G(a + m) / G(a + 1) ].
    """

    index: I32
    first_ns: I64
    count: I32
    a: F64
    b: F64
    logs: F64

    def __init__(self, per_day: float = RECURS_PER_DAY) -> None:
        self.per_day = per_day  # of trouble that has come to stay
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(0, kind))

    def add(self, index: I32, now_ns: int, a: F64, b: F64) -> I32:
        """Trouble came to these devices (ascending), whose usual rates are Gamma(a, b) [k].

        Returns those to which it comes so often anyhow that once more begins nothing.
        """
        at = np.searchsorted(self.index, index)
        there = np.zeros(len(index), np.bool_)
        if len(self.index):
            there = self.index[np.minimum(at, len(self.index) - 1)] == index
        more = at[there]
        self.logs[more] += np.log(self.a[more] + self.count[more])
        self.count[more] += 1
        usual = ~there & (b * self.per_day <= a)
        fresh = ~there & ~usual
        if fresh.any():
            k = int(fresh.sum())
            new = {"index": index[fresh], "first_ns": np.full(k, now_ns), "count": np.ones(k),
                   "a": a[fresh], "b": b[fresh], "logs": np.zeros(k)}  # fmt: skip
            for name, kind in _COLUMNS.items():
                setattr(self, name, np.insert(getattr(self, name), at[fresh], new[name].astype(kind)))
        return index[usual]

    def scores(self, now_ns: int) -> tuple[F64, F64]:
        """(how much speaks for recurrence, the same with the first time counted), in nats [k]."""
        t = np.maximum(now_ns - self.first_ns, 0) / DAY_NS
        more = self.count - 1.0
        usual = self.logs + (self.a + 1.0) * np.log(self.b) - (self.a + 1.0 + more) * np.log(self.b + t)
        score = more * np.log(self.per_day) - self.per_day * t - usual
        return score, score + np.log(self.per_day * self.b / self.a)

    def again(self, a: F64, b: F64) -> None:
        """More is known of what is usual: the rates before these cycles began are Gamma(a, b) [k]."""
        self.a, self.b = a, b
        told = zip(a.tolist(), self.count.tolist(), strict=True)
        self.logs = np.array([lgamma(x + m) - lgamma(x + 1.0) for x, m in told], np.float64)

    def keep(self, mask: Bool) -> None:
        """Only these."""
        if not mask.all():
            for name in _COLUMNS:
                setattr(self, name, getattr(self, name)[mask])

    def moved(self, new_of_old: I32) -> Cycles:
        """The same for other places; those that went to -1 are gone."""
        out, to = Cycles(self.per_day), new_of_old[self.index]
        kept = np.flatnonzero(to >= 0)
        order = kept[np.argsort(to[kept], kind="stable")]
        for name in _COLUMNS:
            setattr(out, name, getattr(self, name)[order])
        out.index = to[order].astype(np.int32)
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.array(data[name], kind))
