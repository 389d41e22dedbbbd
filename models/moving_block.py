"""Moving-block bootstrap: the interval of a mean of daily differences.

Days that lie near each other share faults, so that whole blocks are drawn, at least as long as the horizon.
source: Kuensch, Annals of Statistics 17 (1989).
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64

RESAMPLES = 500
LEAST_BLOCKS = 2  # fewer blocks give no interval. source: estimate


def resampled(n: int, length: int, seed: int) -> I64:
    """Return places of days drawn in blocks of `length` [n_resample, n]; none if that is fewer than
    LEAST_BLOCKS."""
    length = max(length, 1)
    if n < LEAST_BLOCKS * length:
        return np.zeros((0, n), np.int64)
    rng = np.random.default_rng(seed)  # tidy: allow np.random because a bootstrap draws, from the seed given
    begin = rng.integers(0, n - length + 1, (RESAMPLES, -(-n // length)))
    drawn = begin[:, :, None] + np.arange(length)
    return drawn.reshape(RESAMPLES, -1)[:, :n]


def interval(daily: F64, length: int, seed: int) -> tuple[float, float]:
    """Return the 90 % interval of the mean of `daily` [n]; NaN for too few blocks."""
    drawn = resampled(len(daily), length, seed)
    if not len(drawn):
        return np.nan, np.nan
    low, high = np.quantile(daily[drawn].mean(axis=1), [0.05, 0.95])
    return float(low), float(high)
