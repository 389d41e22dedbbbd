"""Context: data about a series at its origin that the bands need, besides the experts' forecasts.

The last known value, how restless the series is just now, a thinned sample of its recent values, and the step
of its lattice. Everything is of rows up to the origin. NumPy only.
"""

from __future__ import annotations

import numpy as np

from models.load.forecaster import forward_fill
from twin.catalogue import F64, I64

# Rows over which restlessness is averaged: the first sees a burst, the second the usual. source: estimate
BRISK_ROWS, CALM_ROWS = 30, 480
RECENT_ROWS = 2000  # how far back the sample goes; two weeks of quarter hours are 1,344. source: estimate
RECENT_SAMPLE = 128  # values in it, enough for its 5 % quantiles. source: estimate
LATTICE_EVERY_ROWS = 60  # how often the step of the series' lattice is looked for
LATTICE_ROWS = 256  # of past in which it is looked for. source: estimate
BLOCK_ROWS = 16  # source: estimate; changes of so many rows of 2,000 series stay in a second-level cache


def restlessness(values: F64, origins: I64) -> F64:
    """Mean size of one-row changes [n_origin, n], recent and usual in equal parts; NaN before any change.

    After a long silence it is the usual alone.
    """
    change = np.abs(np.diff(forward_fill(values), axis=0, prepend=np.nan))
    finite = np.isfinite(change) & np.isfinite(values)  # a row without a reading is no calm one
    total = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(np.where(finite, change, 0.0), axis=0)])
    count = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(finite, axis=0)])
    means = []
    for rows in (BRISK_ROWS, CALM_ROWS):
        begin, end = np.maximum(origins + 1 - rows, 0), origins + 1
        known = count[end] - count[begin]
        # The difference of two sums may fall a hair below zero.
        means.append(np.maximum(total[end] - total[begin], 0.0) / np.where(known > 0, known, np.nan))
    brisk, calm = means
    out: F64 = np.where(np.isnan(brisk), calm, 0.5 * (brisk + calm))
    return out


def restlessness_now(values: F64) -> F64:
    """`restlessness` at the last row alone, in a tenth of the time. [n]

    Rows without a reading cost nothing; only series with gaps of their own take the long way.
    """
    values = values[-CALM_ROWS - 1 :]
    out = np.full(values.shape[1], np.nan)
    rows_known = _known_rows(values)
    if len(rows_known) < 2:
        return out
    rows = values if len(rows_known) == len(values) else values[rows_known]
    brisk = int(np.searchsorted(rows_known[1:], len(values) - BRISK_ROWS))
    changes = len(rows) - 1
    out = _total_change(rows) / changes
    if brisk < changes:
        out = 0.5 * (_total_change(rows[brisk:]) / (changes - brisk) + out)
    gappy = np.flatnonzero(~np.isfinite(out))
    if len(gappy):
        own = values[:, gappy]
        known = np.isfinite(own).any(axis=0)
        out[gappy] = np.nan
        out[gappy[known]] = restlessness(own[:, known], np.array([len(values) - 1]))[0]
    return out


def _known_rows(values: F64) -> I64:
    """Places of the rows in which any value is finite."""
    maybe_silent = np.flatnonzero(~np.isfinite(values[:, :1]).all(axis=1))
    silent = maybe_silent[~np.isfinite(values[maybe_silent]).any(axis=1)]
    return np.delete(np.arange(len(values)), silent)


def _total_change(rows: F64) -> F64:
    """Sum of the sizes of changes from row to row, in order of time. [n]"""
    # The sum so far is the first row of what is summed next.
    room = np.zeros((BLOCK_ROWS + 1, rows.shape[1]))
    total: F64 = room[0]
    for begin in range(0, len(rows) - 1, BLOCK_ROWS):
        block = rows[begin : begin + BLOCK_ROWS + 1]
        room[0] = total
        change = room[1 : len(block)]
        np.subtract(block[1:], block[:-1], out=change)
        np.abs(change, out=change)
        total = room[: len(block)].sum(axis=0)
    return total


def recent_sample(values: F64, row: int) -> F64:
    """At most RECENT_SAMPLE rows, evenly thinned over the last RECENT_ROWS up to `row` [n_recent, n]."""
    begin = max(0, row + 1 - RECENT_ROWS)
    at = np.unique(np.linspace(begin, row, min(RECENT_SAMPLE, row + 1 - begin)).astype(np.int64))
    return values[at]
