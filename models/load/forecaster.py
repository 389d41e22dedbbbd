"""Forecaster: a rule that predicts rows of a panel some steps ahead from the rows known so far.

Forecasters look at arrays only, so that the daemon and a backtest run the same code: the daemon asks for
one origin, the last row; a backtest for thousands at once. Each looks at rows up to its origin and at
nothing later, but for columns that are known ahead; `models.backtest.audit` checks that. NumPy only;
libraries of statistics are imported inside `fit`, which runs in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64, ContractError

Parameters = dict[str, np.ndarray]

# Quantiles that a forecast states: the median and the edges of the 50, 90 and 99 % bands.
LEVELS = (0.005, 0.05, 0.25, 0.5, 0.75, 0.95, 0.995)
MEDIAN = LEVELS.index(0.5)
BANDS = {"50": (2, 4), "90": (1, 5), "99": (0, 6)}  # per cent -> places of its edges in LEVELS
DAY_S, WEEK_S = 86_400.0, 604_800.0


@dataclass(frozen=True)
class ForecastGrid:
    """The step of a panel and the horizons in rows, ascending. Raises ContractError for anything else."""

    step_s: float
    horizons: tuple[int, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.horizons)))
        if not self.step_s > 0 or not self.horizons or ordered != self.horizons or self.horizons[0] < 1:
            raise ContractError(f"expected a step > 0 and ascending horizons >= 1 row, got {self}")

    @cached_property
    def seasons(self) -> tuple[int, ...]:
        """Rows in a day and in a week, where the step divides them and a day has at least 4 rows."""
        return tuple(
            round(span_s / self.step_s)
            for span_s in (DAY_S, WEEK_S)
            if self.step_s <= DAY_S / 4 and abs(span_s / self.step_s - round(span_s / self.step_s)) < 1e-9
        )


@dataclass(frozen=True)
class QuantileForecast:
    """A forecast [n_horizon, n_origin, n]: the median, and perhaps its 5 and 95 % quantiles.

    NaN: nothing to say, for want of past or of a fit.
    """

    point: F64
    low: F64 | None = None
    high: F64 | None = None


class Forecaster(Protocol):
    """One rule. `reach_rows`: an origin's forecast depends on at most so many rows up to it."""

    name: ClassVar[str]
    fitted: ClassVar[bool]  # whether it says nothing before `load`
    grid: ForecastGrid

    def __init__(self, grid: ForecastGrid) -> None: ...

    @property
    def reach_rows(self) -> int: ...

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        """Return parameters from the whole of `past`, common to all its series. Empty if there is too
        little."""
        ...

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Use these from now on; empty ones mean none. Raises ContractError if they do not fit."""
        ...

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        """Forecasts from these rows (unique, ascending) of `panel`."""
        ...


def forward_fill(values: F64) -> F64:
    """Each gap filled with the last value before it [n_time, n]; NaN before the first."""
    at = np.where(np.isfinite(values), np.arange(len(values))[:, None], -1)
    np.maximum.accumulate(at, axis=0, out=at)
    filled: F64 = np.take_along_axis(values, np.maximum(at, 0), axis=0)
    filled[at < 0] = np.nan
    return filled
