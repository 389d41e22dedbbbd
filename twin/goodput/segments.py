"""Segments: runs of rows that belong together, such as the GPUs of one job, and statistics of each run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F32, F64, I32, I64

_INF_BITS = 0x7F800000
LARGE = 1024  # rows from which on a segment is cheaper by itself than in the sort of all others


class Segments(NamedTuple):
    """The segment `of` each row [k], ascending, and how many rows each has, `size` [n]."""

    of: I32
    size: I64

    @classmethod
    def made(cls, of: I32, n: int) -> Segments:
        """Segments of rows in order."""
        return cls(of, np.bincount(of, minlength=n).astype(np.int64))

    def counts(self, finite: np.ndarray) -> np.ndarray:
        """Rows of each that are finite [n]."""
        return np.bincount(self.of[finite], minlength=len(self.size))

    def medians(self, values: F32) -> F64:
        """Median of the finite values of each [n], none of them negative; NaN where there are none."""
        values = np.asarray(values, np.float32)
        out = np.full(len(self.size), np.nan)
        ends = np.cumsum(self.size)
        large = np.flatnonzero(self.size >= LARGE)
        for i in large.tolist():
            out[i] = _median(values[ends[i] - self.size[i] : ends[i]])
        if len(large) < len(self.size):
            keep = np.ones(len(values), np.bool_)
            for i in large.tolist():
                keep[ends[i] - self.size[i] : ends[i]] = False
            small = self.size < LARGE
            of = self.of if not len(large) else self.of[keep]
            found = _sorted_medians(values if not len(large) else values[keep], of, len(self.size))
            out[small] = found[small]
        return out


def _median(values: F32) -> float:
    """Median of the finite values, by selection; NaN of none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.nan
    low, high = (len(known) - 1) // 2, len(known) // 2
    part = np.partition(known, high)
    lower = part[high] if low == high else part[:high].max()
    return 0.5 * (float(lower) + float(part[high]))


def _sorted_medians(values: F32, of: I32, n: int) -> F64:
    """The same of many segments at once: bits of floats from 0 on are in the order of the floats, so one sort
    of integers sorts all.
    """
    finite = np.isfinite(values)
    bits = np.where(finite, values.view(np.uint32) & 0x7FFFFFFF, _INF_BITS).astype(np.int64)
    key = np.sort((of.astype(np.int64) << 32) | bits)
    size, known = np.bincount(of, minlength=n), np.bincount(of[finite], minlength=n)
    start = np.cumsum(size) - size
    low, high = start + np.maximum(known - 1, 0) // 2, start + known // 2
    last = max(len(key) - 1, 0)
    out = np.full(n, np.nan)
    some = known > 0
    for at in (low, high):
        half = (key[np.minimum(at[some], last)] & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        out[some] = np.where(np.isnan(out[some]), 0.0, out[some]) + 0.5 * half.astype(np.float64)
    return out
