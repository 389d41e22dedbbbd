"""climatology: what comes is what is usual, of late or at that time of day.

Good far ahead, where the present is forgotten. Medians, since a forecast is judged by its absolute error. May
import the contract of forecasters; NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from models.forecaster import DAY_S, Grid, Said
from models.last_value import Unfitted, rows_since_epoch
from models.panel import Panel
from models.seasonal_naive import season_rows
from twin.frame import F64, I64

# Two weeks hold every hour of the week twice. source: estimate
RECENT_S = 14 * DAY_S
RECENT_ROWS = 1000  # where a day is no whole number of rows. source: estimate
# A window counts a third of so many rows up to all of them; more would hardly move a median. source: estimate
SAMPLE_ROWS = 600
DAYS = 28  # of each time of day: four weeks hold four of each day of the week. source: estimate
LEAST_DAYS = 5
DAYS_HALF_LIFE = 7.0  # source: estimate
HOUR_S = 3600.0
CELLS = 4_000_000  # numbers that are held at once


class Climatology(Unfitted):
    """Running median of the recent past, the same at every horizon.

    The window is two weeks, or twice the largest horizon where that is longer. It takes every k-th row since
    1970, where k, a power of three, grows with the rows there are; it ends at the latest such row.
    """

    name: ClassVar[str] = "climatology"

    @property
    def reach_rows(self) -> int:
        recent = round(RECENT_S / self.grid.step_s) if self.grid.seasons else RECENT_ROWS
        return max(recent, 2 * self.grid.horizons[-1])

    def predict(self, panel: Panel, origins: I64) -> Said:
        point = np.full((len(origins), panel.n), np.nan)
        ages = np.minimum(origins + 1, self.reach_rows)
        first = rows_since_epoch(panel)
        thin, longest = 1, SAMPLE_ROWS
        while True:
            places = np.flatnonzero((ages <= longest) & (ages > longest // 3 if thin > 1 else ages > 0))
            ends = (first + origins[places]) // thin * thin - first
            unique, inverse = np.unique(ends, return_inverse=True)
            # One step less than the reach, since an origin may lie so far after the window's end.
            taken = min(longest, self.reach_rows - thin + 1)
            medians = np.empty((len(unique), panel.n))
            for part in _parts(len(unique), SAMPLE_ROWS * panel.n):
                medians[part] = _thinned_median(panel.values, unique[part], thin, taken)
            point[places] = medians[inverse]
            if longest >= self.reach_rows:
                return Said(np.broadcast_to(point, (len(self.grid.horizons), *point.shape)))
            thin, longest = thin * 3, longest * 3


class _TimeOfDay(Unfitted):
    """Over the hours of the last DAYS days that lie whole days before the target's hour; at least LEAST_DAYS.

    An hour is a whole number of rows that divides a day, at most 3,600 s, and is known when its last row is.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        day = season_rows(grid, DAY_S)
        most = max(1, int(HOUR_S / grid.step_s + 1e-9))
        self._hour = next((rows for rows in range(min(most, day), 0, -1) if day % rows == 0), 1)
        self._hours = day // self._hour  # in a day; 0 where the grid has no days

    @property
    def reach_rows(self) -> int:
        return DAYS * self._hours * self._hour + self._hour

    def predict(self, panel: Panel, origins: I64) -> Said:
        point = np.full((len(self.grid.horizons), len(origins), panel.n), np.nan)
        if not self._hours or not len(origins):
            return Said(point)
        first = rows_since_epoch(panel)
        at = first + origins
        last_known = (at + 1) // self._hour - 1
        target = (at + np.asarray(self.grid.horizons)[:, None]) // self._hour
        ahead = np.maximum(0, target - last_known)
        heads, inverse = np.unique(target - self._hours * -(-ahead // self._hours), return_inverse=True)
        days = heads[:, None] - self._hours * np.arange(DAYS)
        hours, where = np.unique(days, return_inverse=True)
        where = where.reshape(days.shape)
        typical = self._typical(panel, hours * self._hour - first)
        usual = np.empty((len(heads), panel.n))
        for part in _parts(len(heads), DAYS * panel.n):
            usual[part] = self._usual(np.moveaxis(typical[where[part]], 1, -1))
        return Said(usual[inverse.reshape(target.shape)])

    def _typical(self, panel: Panel, starts: I64) -> F64:
        """One value for each hour that begins at these rows [n_hour, n]; NaN where nothing is known."""
        out = np.full((len(starts), panel.n), np.nan)
        # An hour that begins before the panel is not there, lest it depend on where a panel was cut.
        inside = np.flatnonzero(starts >= 0)
        for part in _parts(len(inside), self._hour * panel.n):
            rows = starts[inside[part], None] + np.arange(self._hour)
            out[inside[part]] = self._within(np.moveaxis(panel.values[rows], 1, -1))
        return out

    def _within(self, values: F64) -> F64:
        """One value for an hour [m, n] from its rows [m, n, hour]."""
        raise NotImplementedError

    def _usual(self, values: F64) -> F64:
        """What is usual [m, n] from the hours of days, the latest first [m, n, DAYS]; NaN if too few."""
        raise NotImplementedError


class HourlyMedian(_TimeOfDay):
    """Median over the days of the median within the hour."""

    name: ClassVar[str] = "hourly_median"

    def _within(self, values: F64) -> F64:
        return known_median(values)

    def _usual(self, values: F64) -> F64:
        known = np.isfinite(values).sum(axis=-1)
        return np.where(known >= LEAST_DAYS, known_median(values), np.nan)


class SeasonalMean(_TimeOfDay):
    """Mean over the days of the mean within the hour; a day weighs half after DAYS_HALF_LIFE days."""

    name: ClassVar[str] = "seasonal_ewma"

    def _within(self, values: F64) -> F64:
        return _known_mean(values, np.ones(values.shape[-1]), 1)

    def _usual(self, values: F64) -> F64:
        return _known_mean(values, 0.5 ** (np.arange(DAYS) / DAYS_HALF_LIFE), LEAST_DAYS)


def known_median(values: F64) -> F64:
    """Median along the last axis of what is finite; NaN where nothing is."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=-1)  # NaN comes last
    count = np.isfinite(ordered).sum(axis=-1)[..., None]
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ordered, count // 2, axis=-1)
    middle: F64 = (0.5 * low + 0.5 * high)[..., 0]
    return middle


def _known_mean(values: F64, weights: F64, least: int) -> F64:
    """Weighted mean along the last axis of what is finite; NaN where fewer than `least` are."""
    known = np.isfinite(values)
    total = known @ weights
    enough = known.sum(axis=-1) >= least
    said = np.where(known, values, 0.0) @ weights
    mean: F64 = np.where(enough, said / np.where(enough, total, 1.0), np.nan)
    return mean


def _thinned_median(values: F64, ends: I64, thin: int, rows: int) -> F64:
    """Median of every `thin`-th row back from each end, among its last `rows` rows [n_end, n]."""
    at = ends[:, None] - np.arange(0, rows, thin)
    window = values[np.maximum(at, 0)]
    window[at < 0] = np.nan
    return known_median(np.moveaxis(window, 1, -1))


def _parts(count: int, cells: int) -> Iterator[slice]:
    """Slices of `count` things of so many cells each, of at most CELLS cells."""
    step = max(1, CELLS // max(1, cells))
    for begin in range(0, count, step):
        yield slice(begin, min(count, begin + step))
