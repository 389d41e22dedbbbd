"""Gradient boosting: small trees say the median change and its 5 and 95 % quantiles, each horizon for itself.

One set of forests for all series of a panel, learned from `features` in units of each series' own movement.
scikit-learn grows them in `fit`; `trees` sums them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from models import trees
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

# source: estimate for all of these; a fit of six horizons stays within seconds on one core
MOST_CASES = 8000
ROUNDS = 60
EDGE_ROUNDS = 40
LEARNING_RATE = 0.1
EDGE_RATE = 0.05
MOST_LEAVES = 8
MOST_BINS = 64
MOST_COLUMNS = 24
LEAST_LEAF = 20
APART_LEAF = 3  # cases in a leaf that do not overlap in time
FORESTS = {"point": 0.5, "low": 0.05, "high": 0.95}


class GradientBoosting:
    """Direct forecasts of each horizon by boosted trees; see `Forecaster`."""

    name: ClassVar[str] = "gradient_boosting"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid = grid
        self._known: tuple[str, ...] = ()
        self._rules: dict[int, _ForestRule] = {}

    @property
    def reach_rows(self) -> int:
        return reach_rows(self.grid)

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        out: Parameters = {}
        for lesson in training_sets(past, self.grid, MOST_CASES):
            out |= _grow(lesson, seed)
        return out | {"known": known_bytes(past)} if out else {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._rules, self._known = {}, ()
        if not parameters:
            return
        known = known_signals(parameters)
        n_column = len(names(self.grid, known))
        left = {key: value for key, value in parameters.items() if key != "known"}
        rules: dict[int, _ForestRule] = {}
        for horizon in self.grid.horizons:
            believed = left.pop(f"{horizon}.belief", None)
            if believed is None:
                continue
            if believed.dtype != np.float64 or believed.shape != (2,) or not np.isfinite(believed).all():
                raise ContractError(f"{horizon}.belief: expected finite float64 [2], got {believed.shape}")
            packed = [
                {key: left.pop(name) for key in trees.KEYS if (name := f"{horizon}.{forest}.{key}") in left}
                for forest in FORESTS
            ]
            grove = trees.unpack_grove(packed)
            if grove.n_feature != n_column:
                raise ContractError(
                    f"{horizon}: expected trees over {n_column} columns, got {grove.n_feature}"
                )
            rules[horizon] = _ForestRule(grove, believed)
        if left:
            raise ContractError(f"{min(left)}: expected horizons {self.grid.horizons} and whole forests")
        self._rules, self._known = rules, known

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        rules = self._rules if known_names(panel) == self._known else {}
        out = forecasts(panel, origins, self.grid, rules, len(FORESTS))
        return QuantileForecast(out[0], out[1], out[2])


@dataclass(frozen=True)
class _ForestRule:
    """One horizon's forests, in the order of FORESTS."""

    grove: trees.Grove
    belief: F64

    def __call__(self, columns: F64) -> F64:
        point, low, high = self.grove.predict(columns.T)
        point = believed_change(point, self.belief)
        return np.stack([point, np.minimum(point, low), np.maximum(point, high)])


def _grow(lesson: TrainingSet, seed: int) -> Parameters:
    """One horizon's forests. The later cases say how many trees help, and how far to believe them."""
    early, later = lesson.early, lesson.later
    if np.count_nonzero(early) < LEAST_LEAF * 3 or np.count_nonzero(later) < LEAST_JUDGES:
        return {}
    n = len(lesson.y)
    leaf = int(min(max(LEAST_LEAF, APART_LEAF * n / lesson.n_apart), n // 10))
    columns = _informative(lesson.x[early])
    trial = _fit(lesson.x[np.ix_(early, columns)], lesson.y[early], 0.5, ROUNDS, leaf, seed)
    changes = list(trial.staged_predict(lesson.x[np.ix_(later, columns)]))
    rounds = 1 + int(np.argmin([error(change, lesson, later) for change in changes]))
    out: Parameters = {f"{lesson.horizon}.belief": fit_belief(changes[rounds - 1], lesson)}
    columns = _used(trial, columns)
    for forest, quantile in FORESTS.items():
        n_round = rounds if forest == "point" else EDGE_ROUNDS
        model = _fit(lesson.x[:, columns], lesson.y, quantile, n_round, leaf, seed)
        packed = trees.pack_trees(model)
        feature = packed["feature"]
        packed["feature"] = np.where(feature < 0, -1, columns[feature]).astype(np.int32)
        packed["n_feature"] = np.array([lesson.x.shape[1]], np.int32)
        out |= {f"{lesson.horizon}.{forest}.{key}": value for key, value in packed.items()}
    return out


def _informative(x: F64) -> I64:
    """Columns that hold more than one value."""
    with np.errstate(invalid="ignore"):
        low, high = np.fmin.reduce(x, axis=0), np.fmax.reduce(x, axis=0)
    return np.flatnonzero(low < high)


def _used(trial: Any, columns: I64) -> I64:
    """The columns that the trial split most often: the forests that stay look at no others."""
    feature = trees.pack_trees(trial)["feature"]
    n_split = np.bincount(feature[feature >= 0], minlength=len(columns))
    most = np.argsort(-n_split, kind="stable")[:MOST_COLUMNS]
    return columns[np.sort(most)]


def _fit(x: F64, y: F64, quantile: float, rounds: int, leaf: int, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    loss: dict[str, Any] = dict(loss="absolute_error")
    if quantile != 0.5:
        loss = dict(loss="quantile", quantile=quantile)
    model = HistGradientBoostingRegressor(
        **loss,
        max_iter=rounds,
        learning_rate=LEARNING_RATE if quantile == 0.5 else EDGE_RATE,
        max_leaf_nodes=MOST_LEAVES,
        max_bins=MOST_BINS,
        min_samples_leaf=leaf,
        early_stopping=False,
        random_state=seed,
    )
    with threadpool_limits(1):  # a second thread that waits for a busy core costs more than it brings
        model.fit(x, y)
    return model
