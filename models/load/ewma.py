"""ewma: predicts the mean of the recent past, weighted by a half-life.

The window ends after a few half-lives, so that an answer depends on a known number of rows. Holds that mean
as a function too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np

from models.load.forecaster import QuantileForecast
from models.load.last_value import Unfitted
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64

REACH_HALF_LIVES = 8  # older rows would weigh 2^-8 = 0.4 % together
PRODUCT_CELLS = 10_000  # source: estimate; what it takes to start one product, in cells summed


class _Ewma(Unfitted):
    """Mean with weights that halve every `half_life` rows; gaps are left out. The same at every horizon."""

    half_life: ClassVar[int]

    @property
    def reach_rows(self) -> int:
        return REACH_HALF_LIVES * self.half_life

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        mean = weighted_mean(panel.values, origins, 0.5 ** (1.0 / self.half_life), self.reach_rows)
        return QuantileForecast(np.broadcast_to(mean, (len(self.grid.horizons), *mean.shape)))


class Ewma1(_Ewma):
    name: ClassVar[str] = "ewma1"
    half_life: ClassVar[int] = 1


class Ewma2(_Ewma):
    name: ClassVar[str] = "ewma2"
    half_life: ClassVar[int] = 2


class Ewma5(_Ewma):
    name: ClassVar[str] = "ewma5"
    half_life: ClassVar[int] = 5


class Ewma15(_Ewma):
    name: ClassVar[str] = "ewma15"
    half_life: ClassVar[int] = 15


class Ewma60(_Ewma):
    name: ClassVar[str] = "ewma60"
    half_life: ClassVar[int] = 60


class Ewma240(_Ewma):
    name: ClassVar[str] = "ewma240"
    half_life: ClassVar[int] = 240


def weighted_mean(values: F64, origins: I64, decay: float, rows: int) -> F64:
    """Mean of the last `rows` rows up to each origin, weight decay**age, gaps left out [n_origin, n].

    NaN where all of them are gaps. `values` [n_time, n]; `origins` ascending; 0 < decay <= 1.
    """
    if not len(origins):
        return np.empty((0, values.shape[1]))
    begin = max(0, int(origins[0]) - rows + 1)
    span = int(origins[-1]) + 1 - begin
    # Cells that each way touches: both give the same, the faster one is taken.
    by_product = len(origins) * (rows * values.shape[1] + PRODUCT_CELLS)
    if by_product <= 3 * rows.bit_length() * span * values.shape[1]:
        return mean_by_product(values, origins, decay, rows)
    return mean_by_doubling(values[begin : begin + span], origins - begin, decay, rows)


def mean_by_product(values: F64, origins: I64, decay: float, rows: int) -> F64:
    """`weighted_mean`, window by window: for few origins. Columns without gaps cost one product."""
    weights = _weights(decay, rows)
    out = np.empty((len(origins), values.shape[1]))
    for place, origin in enumerate(origins):
        window = values[max(0, origin - rows + 1) : origin + 1]
        weight = weights[rows - len(window) :]
        with np.errstate(all="ignore"):
            out[place] = weight @ window / weight.sum()
        gappy = np.flatnonzero(~np.isfinite(out[place]))
        if len(gappy):
            window = window[:, gappy] if len(gappy) < window.shape[1] else window
            known = np.isfinite(window)
            total = weight @ known
            said = weight @ np.where(known, window, 0.0)
            out[place, gappy] = np.where(total > 0, said / np.where(total > 0, total, 1.0), np.nan)
    return out


@lru_cache(maxsize=16)  # a power per row, each time anew, would cost more than the product
def _weights(decay: float, rows: int) -> F64:
    """decay**age, the oldest of the rows first [rows]; not to be written to."""
    weights: F64 = decay ** np.arange(rows - 1, -1, -1.0)
    weights.setflags(write=False)
    return weights


def mean_by_doubling(values: F64, origins: I64, decay: float, rows: int) -> F64:
    """`weighted_mean` for many origins: sums over m rows give sums over 2 m rows, in log2(rows) passes."""
    known = np.isfinite(values)
    said = _windowed_sum(np.where(known, values, 0.0), decay, rows)[origins]
    gappy = ~known.all(axis=0)
    ages = np.minimum(origins + 1, rows)
    total = np.cumsum(decay ** np.arange(rows))[ages - 1][:, None] * np.ones(values.shape[1])
    total[:, gappy] = _windowed_sum(known[:, gappy].astype(np.float64), decay, rows)[origins]
    return np.where(total > 0, said / np.where(total > 0, total, 1.0), np.nan)


def _windowed_sum(values: F64, decay: float, rows: int) -> F64:
    """Sum of the last `rows` rows up to each, weight decay**age [n_time, n]; overwrites `values`."""
    # `rows` in binary: spans of 1, 2, 4 .. rows are laid end to end, the shortest first.
    out, taken = np.zeros_like(values), 0
    span, sums = 1, values
    while True:
        if rows & span:
            out[taken:] += decay**taken * sums[: len(sums) - taken] if taken < len(sums) else 0.0
            taken += span
        if span * 2 > rows:
            return out
        longer = sums.copy()
        longer[span:] += decay**span * sums[:-span]
        span, sums = span * 2, longer
