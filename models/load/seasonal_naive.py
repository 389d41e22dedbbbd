"""seasonal: what comes is what was there at the same time of the day before, or of the week before."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from models.load.forecaster import DAY_S, WEEK_S, ForecastGrid, QuantileForecast
from models.load.last_value import Unfitted
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64

# Seasons to look back through, past gaps. source: estimate
SEASONS = 2


def season_rows(grid: ForecastGrid, span_s: float) -> int:
    """Rows in a season of this length; 0 where the grid has no such season."""
    rows = round(span_s / grid.step_s)
    return rows if rows in grid.seasons else 0


class _Seasonal(Unfitted):
    """The latest value that lies a whole number of seasons before the target and not after the origin.

    Where that is a gap, the value one season before it.
    """

    span_s: ClassVar[float]

    def __init__(self, grid: ForecastGrid) -> None:
        super().__init__(grid)
        self._season = season_rows(grid, self.span_s)

    @property
    def reach_rows(self) -> int:
        return max(1, SEASONS * self._season)

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        point = np.full((len(self.grid.horizons), len(origins), panel.n), np.nan)
        if self._season:
            for said, horizon in zip(point, self.grid.horizons, strict=True):
                back = self._season * -(-horizon // self._season)
                self._look(panel.values, origins + horizon - back, said)
        return QuantileForecast(point)

    def _look(self, values: F64, rows: I64, said: F64) -> None:
        for back in range(0, SEASONS * self._season, self._season):
            at = rows - back
            seen = np.flatnonzero(at >= 0)
            found = values[at[seen]]
            said[seen] = np.where(np.isfinite(said[seen]) | ~np.isfinite(found), said[seen], found)


class SeasonalDay(_Seasonal):
    """As a day before."""

    name: ClassVar[str] = "seasonal_day"
    span_s: ClassVar[float] = DAY_S


class SeasonalWeek(_Seasonal):
    """As a week before."""

    name: ClassVar[str] = "seasonal_week"
    span_s: ClassVar[float] = WEEK_S
