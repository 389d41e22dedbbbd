"""Context: what the bands of a forecast need to know of a series at its origin, beside the experts' words.

The last known value, how restless the series is just now, a thinned sample of its recent values, and the step
of its lattice. Everything is of rows up to the origin. NumPy only.
"""

from __future__ import annotations

import numpy as np

from models.forecaster import last_known
from twin.frame import F64, I64

# Rows over which restlessness is averaged: the first sees a burst, the second the usual. source: estimate
BRISK_ROWS, CALM_ROWS = 30, 480
RECENT_ROWS = 2000  # how far back the sample goes; two weeks of quarter hours are 1,344. source: estimate
RECENT_SAMPLE = 128  # values in it, enough for its 5 % quantiles. source: estimate


def restlessness(values: F64, origins: I64) -> F64:
    """Mean size of one-row changes [n_origin, n], recent and usual in equal parts; NaN before any change."""
    change = np.abs(np.diff(last_known(values), axis=0, prepend=np.nan))
    heard = np.isfinite(change)
    total = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(np.where(heard, change, 0.0), axis=0)])
    count = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(heard, axis=0)])
    out = np.zeros((len(origins), values.shape[1]))
    for rows in (BRISK_ROWS, CALM_ROWS):
        begin, end = np.maximum(origins + 1 - rows, 0), origins + 1
        known = count[end] - count[begin]
        # The difference of two sums may fall a hair below zero.
        mean = np.maximum(total[end] - total[begin], 0.0) / np.where(known > 0, known, np.nan)
        out += 0.5 * mean
    return out


def recent_sample(values: F64, row: int) -> F64:
    """At most RECENT_SAMPLE rows, evenly thinned over the last RECENT_ROWS up to `row` [n_recent, n]."""
    begin = max(0, row + 1 - RECENT_ROWS)
    at = np.unique(np.linspace(begin, row, min(RECENT_SAMPLE, row + 1 - begin)).astype(np.int64))
    return values[at]
