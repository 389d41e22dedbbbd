"""One horizon's forecast, online: experts' points become one median with bands that hold, series by series.

The daemon and the backtest both use exactly this. It learns from an outcome only once its row has come.
May import models.combination, models.bands, models.lattice and the core's number types; NumPy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.combination import Combination
from models.forecaster import LEVELS, MEDIAN
from models.lattice import snap
from twin.errors import ContractError
from twin.frame import F64, I32

MEMORY = 256  # errors kept for each series


def stride(horizon: int) -> int:
    """Rows between two forecasts that are issued and judged: at most 31 wait for their outcome at a time."""
    return max(1, horizon // 16)


@dataclass(frozen=True)
class Issue:
    """What is known at the row of issue, for n series.

    points [n_expert, n]: what the experts say, NaN sleeps. last [n]: the last known value. scale [n]: local
    size of changes over this horizon, > 0 or NaN. low, high [n]: 5 and 95 % quantiles of boosting. recent
    [n_recent, n]: a sample of the recent past. quantum [n]: step of the series' lattice, 0 if continuous.
    """

    points: F64
    last: F64
    scale: F64
    quantum: F64
    low: F64 | None = None
    high: F64 | None = None
    recent: F64 | None = None


class Online:
    """Combines, bands and calibrates the forecasts `horizon` rows ahead of `n` series."""

    def __init__(self, horizon: int, n: int, experts: tuple[str, ...], stride: int = 1) -> None:
        if horizon < 1 or stride < 1 or not experts:
            raise ContractError(f"expected a horizon and a stride >= 1 and experts, got {horizon}, {stride}")
        self.horizon, self.n, self.experts, self.stride = horizon, n, experts, stride
        overlap = -(-horizon // stride)
        prior = np.array([3.0 if name == "last" else 1.0 for name in experts])
        self._combination = Combination(n, prior / prior.sum(), overlap, 0.9995)
        self._slots = overlap + 1
        k = len(experts)
        self._row = np.full(self._slots, -1, np.int64)
        self._points = np.full((self._slots, k, n), np.nan)
        self._said = np.full((self._slots, n), np.nan)
        self._errors = np.full((MEMORY, n), np.nan)
        self._count = np.zeros(n, np.int64)
        self._offsets: F64 | None = None
        self._weights = np.zeros((k, n))

    def learn(self, row: int, actual: F64) -> None:
        """The value at `row` is known: judge what was issued `horizon` rows before. actual [n]; NaN = a gap."""
        at = np.flatnonzero(self._row == row - self.horizon)
        if not len(at):
            return
        slot = at[0]
        self._row[slot] = -1
        points, said = self._points[slot], self._said[slot]
        known = np.isfinite(actual) & np.isfinite(said)
        slope = np.where(known, np.sign(said - actual), 0.0)
        self._combination.judge(np.where(np.isfinite(points), slope * (said - points), 0.0))
        j = np.flatnonzero(known)
        self._errors[self._count[j] % MEMORY, j] = (actual - said)[j]
        self._count[j] += 1
        self._offsets = None

    def issue(self, row: int, issue: Issue) -> F64:
        """Quantiles [n, n_level] at LEVELS of the value `horizon` rows after `row`.

        NaN where no expert spoke; bands NaN where fewer than 8 outcomes are known.
        """
        awake = np.isfinite(issue.points)
        weights = self._combination.weights(awake)
        self._weights = weights
        said = np.where(awake, weights * issue.points, 0.0).sum(axis=0)
        said = np.where(awake.any(axis=0), said, np.nan)
        said = snap(said, issue.last, issue.quantum)
        if self._offsets is None:
            self._offsets = np.full((len(LEVELS), self.n), np.nan)
            ready = np.flatnonzero(self._count >= 8)
            if len(ready):
                self._offsets[:, ready] = np.nanquantile(self._errors[:, ready], LEVELS, axis=0)
        offsets = self._offsets.copy()
        offsets[MEDIAN] = 0.0
        offsets[:MEDIAN] = np.minimum(offsets[:MEDIAN], 0.0)
        offsets[MEDIAN + 1 :] = np.maximum(offsets[MEDIAN + 1 :], 0.0)
        if row % self.stride == 0:
            slot = (row // self.stride) % self._slots
            self._row[slot], self._points[slot], self._said[slot] = row, issue.points, said
        return (said + offsets).T

    def weights(self) -> F64:
        """Weights [n, n_expert] of the last issue."""
        return self._weights.T

    def memory(self) -> dict[str, np.ndarray]:
        """All that is remembered, as arrays of fixed size; exact."""
        c = self._combination
        return {
            "row": self._row.copy(), "points": self._points.copy(), "said": self._said.copy(),
            "errors": self._errors.copy(), "count": self._count.copy(), "weights": self._weights.copy(),
            "regret": c.regret.copy(), "square": c.square.copy(), "peak": c.peak.copy(),
        }  # fmt: skip

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave. Raises ContractError if it is of another shape."""
        c = self._combination
        mine = self.memory()
        for name, array in mine.items():
            if name not in memory or memory[name].shape != array.shape:
                raise ContractError(f"{name}: expected {array.shape}")
        self._row, self._points, self._said, self._errors, self._count, self._weights = (
            np.array(memory[name]) for name in ("row", "points", "said", "errors", "count", "weights")
        )
        c.regret, c.square, c.peak = (np.array(memory[name]) for name in ("regret", "square", "peak"))
        self._offsets = None

    def remap(self, old_of_new: I32) -> None:
        """Move what was learned to new places; -1 starts afresh."""
        kept = np.flatnonzero(old_of_new >= 0)
        fresh = Online(self.horizon, len(old_of_new), self.experts, self.stride)
        target, mine = fresh.memory(), self.memory()
        for name, array in target.items():
            if name == "row":
                target[name] = mine[name]
            else:
                array[..., kept] = mine[name][..., old_of_new[kept]]
        self.__init__(self.horizon, len(old_of_new), self.experts, self.stride)  # type: ignore[misc]
        self.restore(target)
