"""seasonal naive: predicts the value of a season ago: a day, a week, or the series' own period.

Checkpoints, evaluations and control loops repeat after a time that no clock knows. The period of each series
is the lag at which its recent rows resemble themselves most (the peak of the autocorrelation behind its first
trough; Box, Jenkins, Reinsel and Ljung, Time Series Analysis, 2015, section 2.1). It is looked for once per
block of rows, so that neighbouring origins share it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import numpy as np

from models.load.forecaster import DAY_S, WEEK_S, ForecastGrid, QuantileForecast, forward_fill
from models.load.last_value import Unfitted, rows_since_epoch
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64

# Seasons to look back through, past gaps. source: estimate
SEASONS = 2
WINDOW_ROWS, BLOCK_ROWS = 512, 64  # that a period is looked for in, and between two searches
SHORTEST, CYCLES = 3, 3  # rows of a period, and periods that the window must hold. source: estimate
# Autocorrelation at a period, and its rise from the trough before it. source: chosen on synthetic cycles
LEAST_LIKENESS, LEAST_RISE = 0.5, 0.5
AS_GOOD = 0.95  # of the highest peak: the shortest lag that is as good is no multiple of the period
KNOWN_PU = 0.3  # of the window's rows. source: estimate


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


class OwnPeriod(Unfitted):
    """The value one period before the target, or as many as it takes; without a period it sleeps.

    It would be the last value once more. A constant has every period.
    """

    name: ClassVar[str] = "own_period"

    @property
    def reach_rows(self) -> int:
        return WINDOW_ROWS + BLOCK_ROWS

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        point = np.full((len(self.grid.horizons), len(origins), panel.n), np.nan)
        if not len(origins) or not panel.n:
            return QuantileForecast(point)
        first = rows_since_epoch(panel)
        ends, place = np.unique((first + origins + 1) // BLOCK_ROWS * BLOCK_ROWS, return_inverse=True)
        period = np.stack([_period(panel, int(end) - first, int(end)) for end in ends])[place]
        at, series = np.nonzero(period)
        length = period[at, series]
        for said, horizon in zip(point, self.grid.horizons, strict=True):
            rows = origins[at] + horizon - length * -(-horizon // length)
            said[at, series] = np.where(rows >= 0, panel.values[np.maximum(rows, 0), series], np.nan)
        return QuantileForecast(point)


def _period(panel: SeriesPanel, end: int, instant: int) -> I64:
    """Period of each series in the window before the row `end` [n], from the panel's memo if it was sought.

    `instant` is the same row, counted from 1970.
    """
    key: Hashable = OwnPeriod.name
    begin = end - WINDOW_ROWS
    held: tuple[int, int, I64] | None = panel.memo.get(key)
    if held is None or held[:2] != (instant, max(0, -begin)):
        window = panel.values[max(0, begin) : max(0, end)]
        held = instant, max(0, -begin), own_periods(window, WINDOW_ROWS)
        panel.memo[key] = held
    return held[2]


def own_periods(values: F64, window: int) -> I64:
    """Rows after which each column of `values` [n_time, n] repeats itself, 0 where it does not [n].

    n_time is at most `window`; what is missing at its begin is unknown.
    """
    out = np.zeros(values.shape[1], np.int64)
    known = np.isfinite(values).sum(axis=0)
    some = np.flatnonzero(known >= KNOWN_PU * window)
    if not len(some):
        return out
    held = forward_fill(values[:, some])
    varies = np.nanmax(held, axis=0) > np.nanmin(held, axis=0)
    off = np.nan_to_num(held - np.nanmean(held, axis=0))
    n = len(off)
    off /= np.where(varies, np.abs(off).max(axis=0), 1.0)  # squares of any unit fit into single precision
    # A lag of a third at most: so many zeros are enough that the end does not meet the begin
    spectrum = np.fft.rfft(np.ascontiguousarray(off.T, np.float32), window + window // 2)
    power = np.fft.irfft(spectrum.real**2 + spectrum.imag**2)[:, : n // CYCLES + 2].T
    lags = np.arange(len(power))
    with np.errstate(invalid="ignore", divide="ignore"):
        like = power / (n - lags)[:, None] / (power[0] / n)
    trough = np.minimum.accumulate(like, axis=0)
    peak = np.zeros(like.shape, np.bool_)
    peak[1:-1] = (like[1:-1] >= like[:-2]) & (like[1:-1] >= like[2:])
    peak[:SHORTEST] = False
    peak &= (like >= LEAST_LIKENESS) & (like - trough >= LEAST_RISE)
    best = np.where(peak, like, 0.0).max(axis=0)
    first = (peak & (like >= AS_GOOD * best)).argmax(axis=0)
    out[some] = np.where(best > 0.0, first, np.where(varies, 0, SHORTEST))
    return out
