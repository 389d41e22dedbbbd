"""Segments: runs of rows that belong together, such as the GPUs of one job, and statistics of each run."""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, F64, I32

_INF_BITS = 0x7F800000


def counts(of: I32, n: int, finite: np.ndarray) -> np.ndarray:
    """Rows of each of `n` segments that are finite [n]; `of` [k] is the segment of each row."""
    return np.bincount(of[finite], minlength=n)


def medians(values: F32, of: I32, n: int) -> F64:
    """Median of the finite values of each segment [n], none of them negative; NaN where there are none."""
    values = np.asarray(values, np.float32)
    finite = np.isfinite(values)
    # Bits of floats from 0 on are in the order of the floats, so one sort of integers sorts all segments
    bits = np.where(finite, values.view(np.uint32) & 0x7FFFFFFF, _INF_BITS).astype(np.int64)
    key = np.sort((of.astype(np.int64) << 32) | bits)
    size, known = np.bincount(of, minlength=n), counts(of, n, finite)
    start = np.cumsum(size) - size
    low, high = start + np.maximum(known - 1, 0) // 2, start + known // 2
    last = max(len(key) - 1, 0)
    out = np.full(n, np.nan)
    some = known > 0
    for at in (low, high):
        half = (key[np.minimum(at[some], last)] & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        out[some] = np.where(np.isnan(out[some]), 0.0, out[some]) + 0.5 * half.astype(np.float64)
    return out
