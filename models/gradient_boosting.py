"""Gradient boosting: small trees say the median change and its 5 and 95 % quantiles, each horizon for itself.

One set of forests for all series of a panel, learned from `features` in units of each series' own movement.
scikit-learn grows them in `fit`; `trees` sums them. May import models and the core's errors and types; NumPy
only but for `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from models import trees
from models.features import all_cases, columns_at, known_names, names, present, reach_rows
from models.forecaster import Grid, Parameters, Said
from models.lessons import BLOCK_CASES, LEAST_JUDGES, Lesson, belief, error, lessons, tempered, within_seen
from models.panel import Panel
from twin.errors import ContractError
from twin.frame import F64, I64

# source: estimate for all of these; a fit of six horizons stays within seconds on one core
MOST_CASES = 8000
ROUNDS = 60
EDGE_ROUNDS = 40
LEARNING_RATE = 0.1
MOST_LEAVES = 8
MOST_BINS = 64
LEAST_LEAF = 20
APART_LEAF = 3  # cases in a leaf that do not overlap in time
FORESTS = {"point": 0.5, "low": 0.05, "high": 0.95}


@dataclass(frozen=True)
class _Horizon:
    grove: trees.Grove
    belief: F64


class GradientBoosting:
    """Direct forecasts of each horizon by boosted trees; see `Forecaster`."""

    name: ClassVar[str] = "gradient_boosting"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._known: tuple[str, ...] = ()
        self._horizons: dict[int, _Horizon] = {}

    @property
    def reach_rows(self) -> int:
        return reach_rows(self.grid)

    def fit(self, past: Panel, seed: int) -> Parameters:
        out: Parameters = {}
        for lesson in lessons(past, self.grid, MOST_CASES):
            out |= _grow(lesson, seed)
        if out:
            out["known"] = np.frombuffer("\n".join(known_names(past)).encode(), np.uint8)
        return out

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._horizons, self._known = {}, ()
        if not parameters:
            return
        found, known = dict(parameters), names_of(parameters)
        found.pop("known")
        n_column = len(names(self.grid, known))
        horizons: dict[int, _Horizon] = {}
        for horizon in self.grid.horizons:
            if f"{horizon}.belief" not in found:
                continue
            believed = found.pop(f"{horizon}.belief")
            if believed.shape != (2,) or believed.dtype != np.float64 or not np.isfinite(believed).all():
                raise ContractError(f"{horizon}.belief: expected float64 [2], got {believed.dtype} {believed.shape}")
            forests = [
                {key: found.pop(f"{horizon}.{forest}.{key}", None) for key in trees.KEYS} for forest in FORESTS
            ]
            grove = trees.unpack_grove(forests)
            if grove.n_feature != n_column:
                raise ContractError(f"{horizon}: expected trees over {n_column} columns, got {grove.n_feature}")
            horizons[horizon] = _Horizon(grove, believed)
        if found:
            raise ContractError(f"expected horizons {self.grid.horizons}, got {', '.join(sorted(found)[:3])}")
        self._horizons, self._known = horizons, known

    def predict(self, panel: Panel, origins: I64) -> Said:
        shape = (3, len(self.grid.horizons), len(origins), panel.n)
        out = np.full(shape, np.nan)
        if not self._horizons or known_names(panel) != self._known:
            return Said(out[0], out[1], out[2])
        at = {name: k for k, name in enumerate(names(self.grid, self._known))}
        each = max(1, BLOCK_CASES // max(1, panel.n))
        for first in range(0, len(origins), each):
            some = origins[first : first + each]
            cases = all_cases(some, panel.n)
            seen = present(panel, cases)
            for place, horizon in enumerate(self.grid.horizons):
                if horizon not in self._horizons:
                    continue
                learned = self._horizons[horizon]
                columns = columns_at(panel, cases, seen, self.grid, horizon)
                change = learned.grove.predict(columns.T)
                change[0] = tempered(change[0], learned.belief)
                change[1], change[2] = np.minimum(change[0], change[1]), np.maximum(change[0], change[2])
                for which in range(3):
                    value = seen.last + within_seen(change[which], columns, at) * seen.scale
                    still = np.where(seen.scale == 0, seen.last, value)
                    out[which, place, first : first + each] = still.reshape(len(some), panel.n)
        return Said(out[0], out[1], out[2])


def names_of(parameters: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """The columns known ahead that were there at the fit. Raises ContractError."""
    known = parameters.get("known")
    if known is None or known.dtype != np.uint8 or known.ndim != 1:
        raise ContractError("known: expected bytes")
    try:
        text = known.tobytes().decode()
    except UnicodeDecodeError as error:
        raise ContractError("known: expected text") from error
    return tuple(text.split("\n")) if text else ()


def _grow(lesson: Lesson, seed: int) -> Parameters:
    """One horizon's forests. The later cases say how many trees help, and how far to believe them."""
    early, later = lesson.early, lesson.later
    if np.count_nonzero(early) < LEAST_LEAF * 3 or np.count_nonzero(later) < LEAST_JUDGES:
        return {}
    n = len(lesson.y)
    leaf = int(min(max(LEAST_LEAF, APART_LEAF * n / lesson.n_apart), n // 10))
    trial = _fit(lesson, early, 0.5, ROUNDS, leaf, seed)
    changes = list(trial.staged_predict(lesson.x[later]))
    rounds = 1 + int(np.argmin([error(change, lesson, later) for change in changes]))
    everything = np.ones(n, bool)
    out: Parameters = {f"{lesson.horizon}.belief": belief(changes[rounds - 1], lesson)}
    for forest, quantile in FORESTS.items():
        n_round = rounds if forest == "point" else EDGE_ROUNDS
        model = _fit(lesson, everything, quantile, n_round, leaf, seed)
        out |= {f"{lesson.horizon}.{forest}.{key}": v for key, v in trees.pack_trees(model).items()}
    return out


def _fit(lesson: Lesson, use: Any, quantile: float, rounds: int, leaf: int, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    loss: dict[str, Any] = dict(loss="absolute_error")
    if quantile != 0.5:
        loss = dict(loss="quantile", quantile=quantile)
    model = HistGradientBoostingRegressor(
        **loss,
        max_iter=rounds,
        learning_rate=LEARNING_RATE,
        max_leaf_nodes=MOST_LEAVES,
        max_bins=MOST_BINS,
        min_samples_leaf=leaf,
        early_stopping=False,
        random_state=seed,
    )
    model.fit(lesson.x[use], lesson.y[use])
    return model
