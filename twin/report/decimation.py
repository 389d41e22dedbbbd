"""Decimation: a series of any length kept as at most `capacity` points of least, mean and greatest.

All tracks share one time axis. When it is full, neighbours merge in pairs and every later point takes twice
as many observations, so that a peak of one tick is still there after a month.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twin.catalogue import F32, F64, I32, I64

CAPACITY = 600  # points per series; about what a plot on a screen can show


class Track:
    """Minimum, sum, maximum and count per point, for `k` series side by side [k, capacity]."""

    def __init__(self, labels: Sequence[str], capacity: int) -> None:
        self.labels = list(labels)
        shape = (len(self.labels), capacity)
        self.low = np.full(shape, np.nan, np.float32)
        self.high = np.full(shape, np.nan, np.float32)
        self.total = np.zeros(shape, np.float64)
        self.count = np.zeros(shape, np.int32)

    def add(self, at: int, values: F32 | F64, high: F32 | F64 | None = None) -> None:
        """Take one observation [k] into point `at`; NaN is none. `high` is the peak within the tick."""
        known = np.isfinite(values)
        top = values if high is None else np.where(known, np.fmax(values, high), np.nan)
        self.low[:, at] = np.fmin(self.low[:, at], values)
        self.high[:, at] = np.fmax(self.high[:, at], top)
        self.total[:, at] += np.where(known, values, 0.0)
        self.count[:, at] += known

    def halve(self, points: int) -> None:
        """Merge points 0+1, 2+3, ...; the rest becomes empty."""
        left, right, half = slice(0, points, 2), slice(1, points, 2), points // 2
        self.low[:, :half] = np.fmin(self.low[:, left], self.low[:, right])
        self.high[:, :half] = np.fmax(self.high[:, left], self.high[:, right])
        self.total[:, :half] = self.total[:, left] + self.total[:, right]
        self.count[:, :half] = self.count[:, left] + self.count[:, right]
        self.low[:, half:], self.high[:, half:] = np.nan, np.nan
        self.total[:, half:], self.count[:, half:] = 0.0, 0

    def mean(self) -> F64:
        """Return the means [k, capacity]; NaN without an observation."""
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)

    def overall(self) -> tuple[F64, F64, F64]:
        """Return (minimum, mean, maximum) of the whole run per series [k]; NaN for one without an
        observation."""
        count = self.count.sum(axis=1)
        mean = np.where(count > 0, self.total.sum(axis=1) / np.maximum(count, 1), np.nan)
        least, greatest = np.fmin.reduce(self.low, axis=1), np.fmax.reduce(self.high, axis=1)
        return least.astype(np.float64), mean, greatest.astype(np.float64)


class Timeline:
    """A shared time axis, and the tracks on it by name."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity + capacity % 2
        self.start_ns: I64 = np.zeros(self.capacity, np.int64)
        self.points, self.stride, self.filled = 0, 1, 0
        self.tracks: dict[str, Track] = {}

    def advance(self, now_ns: int) -> None:
        """Begin an observation: it falls into the open point, or opens the next."""
        if self.points == 0 or self.filled == self.stride:
            if self.points == self.capacity:
                self._halve()
            self.start_ns[self.points] = now_ns
            self.points += 1
            self.filled = 0
        self.filled += 1

    def _halve(self) -> None:
        # every point is full when this runs, so a merged one holds exactly the new stride
        for track in self.tracks.values():
            track.halve(self.points)
        self.start_ns[: self.points // 2] = self.start_ns[: self.points : 2]
        self.points //= 2
        self.stride *= 2

    def track(self, name: str, labels: Sequence[str]) -> Track:
        """Return the track of this name; creates an empty one at first use."""
        found = self.tracks.get(name)
        if found is None:
            found = self.tracks[name] = Track(labels, self.capacity)
        return found

    def add(self, name: str, labels: Sequence[str], values: F32 | F64, high: F32 | F64 | None = None) -> None:
        """Take values [k] into the open point of a track."""
        self.track(name, labels).add(self.points - 1, values, high)

    def times_ns(self) -> I64:
        """Return the begin of each point [points]."""
        return self.start_ns[: self.points]


def spread(values: F32 | F64) -> F64:
    """Return (minimum, 10th percentile, median, 90th percentile, maximum) of the known values [5]."""
    known = np.sort(values[np.isfinite(values)])
    if not len(known):
        return np.full(5, np.nan)
    at: I32 = np.rint(np.array([0.0, 0.1, 0.5, 0.9, 1.0]) * (len(known) - 1)).astype(np.int32)
    return known[at].astype(np.float64)


def extremes(values: F32 | F64) -> F64:
    """Return the result of `spread` without the inner three, which need a sort."""
    return np.array([np.fmin.reduce(values), np.nan, np.nan, np.nan, np.fmax.reduce(values)], np.float64)
