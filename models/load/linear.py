"""A linear forecast of each horizon's change, robust and shrunk towards no change.

The weights minimise the absolute error over standardised `features` with a ridge, so that no outlier moves
them far. The later part of the past says how strong the ridge is and how far to believe the result. One set
of weights for all series of a panel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from models.load.features import known_names, names, reach_rows
from models.load.forecaster import ForecastGrid, Parameters, QuantileForecast
from models.load.panel import SeriesPanel
from models.load.training_set import (
    LEAST_JUDGES,
    TrainingSet,
    believed_change,
    error,
    fit_belief,
    forecasts,
    known_bytes,
    known_signals,
    training_sets,
)
from twin.catalogue import F64, I64, ContractError

# source: estimate for all of these
MOST_CASES = 6000
RIDGES = (0.3, 3.0, 30.0)  # cases that do not overlap, for each column
SWEEPS = 8
LEAST_CHANGE = 0.05  # of the mean change: smaller errors count as squares
BEND = 4.0  # columns are linear up to so many scales, then logarithmic
_LEFT_OUT = (
    "hour",
    "weekday",
    "minute",
    "since_change",
    "since_gap",
    "stale",
    "place",
    "far_rank",
    "farther_rank",
)
_LEFT_OUT_KINDS = ("deviation_", "move_", "still_", "lowest_", "highest_")


class LinearForecaster:
    """Direct linear forecasts of each horizon; see `Forecaster`."""

    name: ClassVar[str] = "linear"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid = grid
        self._known: tuple[str, ...] = ()
        self._rules: dict[int, _LinearRule] = {}

    @property
    def reach_rows(self) -> int:
        return reach_rows(self.grid)

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        used = used_columns(self.grid, known_names(past))
        out: Parameters = {}
        for lesson in training_sets(past, self.grid, MOST_CASES):
            if min(np.count_nonzero(lesson.later), np.count_nonzero(lesson.early)) >= LEAST_JUDGES:
                out |= _learn(lesson, used)
        return out | {"known": known_bytes(past)} if out else {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._rules, self._known = {}, ()
        if not parameters:
            return
        known = known_signals(parameters)
        used = used_columns(self.grid, known)
        shapes: dict[str, tuple[int, ...]] = {}
        for horizon in self.grid.horizons:
            if f"{horizon}.weights" in parameters or f"{horizon}.belief" in parameters:
                shapes |= {f"{horizon}.weights": (2, int(np.count_nonzero(used))), f"{horizon}.belief": (3,)}
        for key in sorted({*shapes, *parameters} - {"known"}):
            found = parameters.get(key)
            if key not in shapes:
                raise ContractError(f"{key}: expected horizons {self.grid.horizons}")
            if found is None:
                raise ContractError(f"{key} is missing")
            if found.dtype != np.float64 or found.shape != shapes[key] or not np.isfinite(found).all():
                raise ContractError(
                    f"{key}: expected finite float64 {list(shapes[key])}, got {list(found.shape)}"
                )
        self._rules = {
            horizon: _LinearRule(used, parameters[f"{horizon}.weights"], parameters[f"{horizon}.belief"])
            for horizon in self.grid.horizons
            if f"{horizon}.weights" in shapes
        }
        self._known = known

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        rules = self._rules if known_names(panel) == self._known else {}
        return QuantileForecast(forecasts(panel, origins, self.grid, rules, 1)[0])


@dataclass(frozen=True)
class _LinearRule:
    """One horizon's weights [2, n_used]: the middle of each column and its weight; and the belief in them.

    `fit_belief`: the change where every column is in its middle, and then as `lessons.tempered`.
    """

    used: NDArray[np.bool_]
    weights: F64
    belief: F64

    def __call__(self, columns: F64) -> F64:
        return believed_change(self.change(columns), self.belief[1:])[None, :]

    def change(self, columns: F64) -> F64:
        """Before it is tempered. [n_column, n_case] -> [n_case]"""
        away = np.nan_to_num(compress(columns[self.used]) - self.weights[0][:, None], nan=0.0)
        change: F64 = self.belief[0] + self.weights[1] @ away
        return change


def compress(columns: F64) -> F64:
    """Columns with large sizes made logarithmic, so that a spike is no lever."""
    bent: F64 = BEND * np.arcsinh(columns / BEND)
    return bent


def used_columns(grid: ForecastGrid, known: tuple[str, ...]) -> NDArray[np.bool_]:
    """Mask of the columns with weights: values and waves, no counts and sizes. bool [n_column]"""
    return np.array(
        [name not in _LEFT_OUT and not name.startswith(_LEFT_OUT_KINDS) for name in names(grid, known)]
    )


def _learn(lesson: TrainingSet, used: NDArray[np.bool_]) -> Parameters:
    """The ridge that helps the later cases most, then weights from all cases."""
    columns = lesson.x.T
    best, chosen, change = np.inf, RIDGES[-1], np.zeros(np.count_nonzero(lesson.later))
    for ridge in RIDGES:
        rule = _rule(lesson, lesson.early, used, ridge)
        tried = rule.change(columns[:, lesson.later])
        found = error(tried, lesson, lesson.later)
        if found < best:
            best, chosen, change = found, ridge, tried
    rule = _rule(lesson, np.ones(len(lesson.y), bool), used, chosen)
    believed = np.concatenate([rule.belief[:1], fit_belief(change, lesson)])
    return {f"{lesson.horizon}.weights": rule.weights, f"{lesson.horizon}.belief": believed}


def _rule(
    lesson: TrainingSet, cases: NDArray[np.bool_], used: NDArray[np.bool_], ridge: float
) -> _LinearRule:
    """Weights by iteratively reweighted least squares: an error counts by its size, not by its square.

    source: Schlossmacher 1973, doi 10.1080/01621459.1973.10481336
    """
    columns, y, weight = compress(lesson.x.T[np.ix_(used, cases)]), lesson.y[cases], lesson.weight[cases]
    known = ~np.isnan(columns)
    n = np.maximum(known.sum(axis=1), 1)
    middle = np.where(known, columns, 0.0).sum(axis=1) / n
    away = np.where(known, columns - middle[:, None], 0.0)
    size = np.sqrt((away**2).sum(axis=1) / n)
    away /= np.where(size > 1e-9, size, np.inf)[:, None]
    least = LEAST_CHANGE * float(np.mean(np.abs(y))) + 1e-12
    penalty = ridge * len(away) * len(lesson.y) / lesson.n_apart
    base = 0.0
    slope = np.zeros(len(away))
    for _ in range(SWEEPS):
        count = weight / np.maximum(np.abs(y - base - slope @ away), least)
        count *= len(y) / count.sum()
        base = float(np.mean(count * (y - slope @ away)))
        gram = (away * count) @ away.T
        gram[np.diag_indices_from(gram)] += penalty
        slope = np.linalg.solve(gram, away @ (count * (y - base))).astype(np.float64)
    weights = np.stack([middle, slope / np.where(size > 1e-9, size, np.inf)])
    return _LinearRule(used, weights, np.array([base, 1.0, 0.0]))
