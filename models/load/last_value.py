"""last: predicts the present value; the reference for every other forecaster.

Also holds what forecasters without parameters share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from models.load.forecaster import ForecastGrid, Parameters, QuantileForecast
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64, NS, ContractError

# Rows back to look for a last value: a day of minutes, two months of hours. source: estimate
LAST_ROWS = 1440


class Unfitted:
    """A forecaster without parameters."""

    fitted: ClassVar[bool] = False

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid = grid

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        """Nothing to fit: always empty."""
        return {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Raises ContractError for any parameter."""
        if parameters:
            raise ContractError(f"expected no parameters, got {', '.join(sorted(parameters))}")


class LastValue(Unfitted):
    """The last known value, up to LAST_ROWS old, at every horizon."""

    name: ClassVar[str] = "last"

    @property
    def reach_rows(self) -> int:
        return LAST_ROWS

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        last = last_within(panel.values, origins, LAST_ROWS)
        return QuantileForecast(np.broadcast_to(last, (len(self.grid.horizons), *last.shape)))


def last_within(values: F64, origins: I64, rows: int) -> F64:
    """The last finite value among the last `rows` rows up to each origin [n_origin, n]; NaN where none."""
    last: F64 = values[origins]
    gappy = np.flatnonzero(~np.isfinite(last).all(axis=0))
    if not len(gappy):
        return last
    begin = max(0, int(origins[0]) - rows + 1)
    if len(origins) == 1:
        _look_back(values[begin : int(origins[0])], gappy, last[0])
        return last
    end = int(origins[-1]) + 1
    last[:, gappy] = fill_gaps(values[begin:end, gappy], rows)[origins - begin]
    return last


def _look_back(values: F64, series: I64, last: F64) -> None:
    """Fills `last` [n] of these series with their last finite value in `values`; NaN where none is."""
    last[series] = np.nan
    end, rows = len(values), 4
    while end and len(series):
        begin = max(0, end - rows)
        window = values[begin:end, series][::-1]
        known = np.isfinite(window)
        found = known.any(axis=0)
        last[series[found]] = window[known.argmax(axis=0)[found], found]
        series, end, rows = series[~found], begin, 4 * rows


def fill_gaps(values: F64, rows: int) -> F64:
    """Each gap filled with the last finite value less than `rows` rows before it; NaN where none.

    `values` [n_time, n]; so is the result, which is `values` itself if there are no gaps.
    """
    if np.isfinite(values).all():
        return values
    here = np.arange(len(values))[:, None]
    at = np.where(np.isfinite(values), here, -rows)
    np.maximum.accumulate(at, axis=0, out=at)
    out: F64 = np.take_along_axis(values, np.maximum(at, 0), axis=0)
    out[here - at >= rows] = np.nan
    return out


def rows_since_epoch(panel: SeriesPanel) -> int:
    """The place of the panel's first row on the grid of rows since 1970, rounded.

    Rows that are counted so keep their numbers when a panel is cut.
    """
    step_ns = round(panel.step_s * NS)
    return (panel.start_ns + step_ns // 2) // step_ns
