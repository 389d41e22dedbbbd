"""Input of the LSTM at an origin of a series: a sequence of its recent past, and values known beside it.

Everything is a difference from the last known value in units of the series' local scale, so that one network
serves all series. Looks at rows up to the origin, but for the calendar and columns that are known ahead. May
import the contract of forecasters; NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.load import LAST_ROWS, ForecastGrid, SeriesPanel, fill_gaps, hours_of_week, known_names
from tests.evaluation.forecasts.lstm_training import Sample
from twin.catalogue import F32, F64, I64

# Stretches of past whose mean and spread are looked at: rows, and one of so many. source: estimate
STRETCHES = ((48, 1), (480, 4), (1536, 48))
LIMIT = 10.0  # inputs are cut to this many scales. source: estimate
CHANNELS = 3  # of a step: its mean less the last value, the share of its rows that were heard, its width
SINES = 2  # harmonics of the day, and of the week
GOLDEN = 0.6180339887498949  # steps by this share of a line fill it evenly and meet no season


def beside_columns(grid: ForecastGrid, n_known: int) -> int:
    """Number of columns of `Windows.beside`."""
    season = 4 * SINES + 2 * len(grid.seasons) if grid.seasons else 0
    return len(STRETCHES) + len(grid.horizons) * (season + 4 * n_known)


@dataclass(frozen=True)
class Windows:
    """Places in a panel to forecast from, one per (row, series), and what the network sees there.

    `rows`, `series` int64 [m]; `last` and `scale` [m]: the last known value, and the mean distance of the
    past from its `means` [m, n_stretch]; the scale is 0 where nothing moved and NaN where nothing was heard.
    """

    grid: ForecastGrid
    panel: SeriesPanel
    rows: I64
    series: I64
    last: F64
    scale: F64
    means: F64

    @classmethod
    def at(cls, grid: ForecastGrid, panel: SeriesPanel, rows: I64, series: I64, last: F64) -> Windows:
        moments = [_moments(_back(panel.values, rows, series, span, step)) for span, step in STRETCHES]
        scale = np.mean([spread for _, spread in moments], axis=0)
        return cls(grid, panel, rows, series, last, scale, np.stack([mean for mean, _ in moments], axis=1))

    @classmethod
    def drawn(cls, grid: ForecastGrid, panel: SeriesPanel, first: int, most: int) -> Windows:
        """At most so many from `first` on, evenly spread, at which there is something to learn."""
        total = max(0, panel.n_time - grid.horizons[0] - first) * panel.n
        if total <= most:
            index = np.arange(total)
        else:
            index = np.unique((np.arange(most) * GOLDEN % 1.0 * total).astype(np.int64))
        rows, series = first + index // max(1, panel.n), index % max(1, panel.n)
        last = fill_gaps(panel.values, LAST_ROWS)[rows, series]
        windows = cls.at(grid, panel, rows, series, last)
        keep = np.isfinite(last) & (windows.scale > 0) & np.isfinite(windows.actual()).any(axis=1)
        return cls.at(grid, panel, rows[keep], series[keep], last[keep])

    def actual(self) -> F64:
        """Return the actual values at each horizon [m, n_horizon]; NaN for a gap and past the end."""
        at = self.rows[:, None] + np.array(self.grid.horizons)
        out: F64 = self.panel.values[np.minimum(at, self.panel.n_time - 1), self.series[:, None]]
        out[at >= self.panel.n_time] = np.nan
        return out

    def sequence(self, widths: Sequence[int]) -> F32:
        """[m, steps, CHANNELS], the oldest step first; a step is the mean of so many rows."""
        size = np.array(widths, np.int64)
        change = self._scaled(_back(self.panel.values, self.rows, self.series, int(size.sum()), 1))
        heard = np.isfinite(change)
        begin = np.cumsum(size) - size
        count = np.add.reduceat(heard, begin, axis=1, dtype=np.float64)
        total = np.add.reduceat(np.where(heard, change, 0.0), begin, axis=1)
        out = np.empty((len(self.rows), len(size), CHANNELS), np.float32)
        out[..., 0] = total / np.maximum(count, 1.0)
        out[..., 1] = count / size
        out[..., 2] = size / size.max()
        return out

    def beside(self, units: F64) -> F32:
        """Return the columns beside the sequence [m, k]: the means, and all known of each horizon's target.

        That is its calendar, its seasons before, and its columns known ahead in `units` [n_known, 2], their
        mean and size.
        """
        columns = list(np.nan_to_num(self._scaled(self.means)).T)
        for horizon in self.grid.horizons:
            columns += self._calendar(horizon) if self.grid.seasons else []
            for season in self.grid.seasons:
                at = self.rows + horizon - season * -(-horizon // season)
                before = np.where(at >= 0, self.panel.values[np.maximum(at, 0), self.series], np.nan)
                columns += _marked(self._scaled(before[:, None])[:, 0])
            for name, (mean, size) in zip(known_names(self.panel), units, strict=True):
                column = self.panel.known[name]
                at = self.rows + horizon
                then = np.where(at < len(column), column[np.minimum(at, len(column) - 1)], np.nan)
                columns += _marked(np.clip((then - mean) / size, -LIMIT, LIMIT))
                columns += _marked(np.clip((then - column[self.rows]) / size, -LIMIT, LIMIT))
        return np.stack(columns, axis=1).astype(np.float32)

    def _calendar(self, horizon: int) -> list[F64]:
        hours = hours_of_week(self.panel.t_ns(self.rows + horizon), self.panel.zone)
        angles = [
            2.0 * np.pi * harmonic / period * hours
            for period in (24.0, 168.0)
            for harmonic in range(1, SINES + 1)
        ]
        return [wave(angle) for angle in angles for wave in (np.sin, np.cos)]

    def _scaled(self, values: F64) -> F64:
        """[m, k] as differences from the last value in scales, cut to LIMIT."""
        scale = np.where(self.scale > 0, self.scale, np.nan)
        out: F64 = np.clip((values - self.last[:, None]) / scale[:, None], -LIMIT, LIMIT)
        return out

    def weights(self) -> F64:
        """[m, n_horizon]: scale over the series' usual one, so that errors count in its unit; 0 in gaps."""
        count = np.bincount(self.series, minlength=self.panel.n)
        usual = np.bincount(self.series, self.scale, self.panel.n) / np.maximum(count, 1)
        return np.isfinite(self.actual()) * (self.scale / usual[self.series])[:, None]

    def spread(self) -> F64:
        """Mean size of the scaled change at each horizon [n_horizon]; 1 where nothing changes."""
        weight = self.weights()
        size = np.nansum(weight * np.abs(self._change()), axis=0) / np.maximum(weight.sum(axis=0), 1e-12)
        out: F64 = np.where(size > 0, size, 1.0)
        return out

    def _change(self) -> F64:
        change: F64 = (self.actual() - self.last[:, None]) / self.scale[:, None]
        return change

    def sample(self, widths: Sequence[int], spread: F64, units: F64) -> Sample:
        """Return a sample that a network learns from or is judged by."""
        target = np.nan_to_num(self._change() / spread).astype(np.float32)
        return Sample(self.sequence(widths), self.beside(units), target, self.weights().astype(np.float32))


def _back(values: F64, rows: I64, series: I64, span: int, step: int) -> F64:
    """Every `step`th of the last `span` rows up to each place [m, span / step]; NaN before the beginning."""
    at = rows[:, None] - np.arange(0, span, step)[::-1]
    out: F64 = values[np.maximum(at, 0), series[:, None]]
    out[at < 0] = np.nan
    return out


def _moments(values: F64) -> tuple[F64, F64]:
    """(mean, mean distance from it) [m] of what is known of each line [m, k]; NaN where nothing is."""
    heard = np.isfinite(values)
    count = heard.sum(axis=1)
    safe = np.where(count > 0, count, np.nan)
    mean = np.where(heard, values, 0.0).sum(axis=1) / safe
    return mean, np.where(heard, np.abs(values - mean[:, None]), 0.0).sum(axis=1) / safe


def _marked(column: F64) -> list[F64]:
    """A column with gaps as 0, and where it has none."""
    heard = np.isfinite(column)
    return [np.where(heard, column, 0.0), heard.astype(np.float64)]


def units_of(past: SeriesPanel) -> F64:
    """Mean and size of each column known ahead, over the past [n_known, 2]; 0 and 1 where it says nothing."""
    out = np.zeros((len(past.known), 2))
    for line, name in zip(out, known_names(past), strict=True):
        column = past.known[name][: past.n_time]
        column = column[np.isfinite(column)]
        size = float(np.std(column)) if len(column) else 0.0
        line[:] = (float(np.mean(column)), size) if size > 0 else (0.0, 1.0)
    return out
