"""Bands around a combined median: candidate quantile curves, mixed for each level by pinball loss.

A candidate is a centre, a spread known at issue, and the distribution of past errors in units of that
spread; one more is the distribution of the recent past. They are weighed for each level by itself, as
Berrisch and Ziel do (Journal of Econometrics 237 (2), 2023).
"""

from __future__ import annotations

import numpy as np

from models.load.combination import Combination, middle_half
from models.load.forecaster import LEVELS
from twin.catalogue import F32, F64, I64

KINDS = ("fixed", "last", "local", "boosting", "marginal")
N_KIND, N_ERROR, N_LEVEL = len(KINDS), 4, len(LEVELS)
# Bins of errors, in spreads: their centres are UNIT * sinh(k * STEP) for k in -SIDE .. SIDE. So they reach
# 2,000 spreads, a bin ends 7 % of its size off its centre, and no change has its own bin. source: estimate
SIDE, UNIT, STEP = 80, 0.05, 0.141
BINS = 2 * SIDE + 1
HALVES = (80, 40, 20, 10, 5, 3, 1, 1)  # each half of the bins that are left, and no more than all
MANY = 256  # series from which sums are taken row by row. source: measured
REACH = UNIT * float(np.sinh(SIDE * STEP))
EDGE = UNIT * np.sinh((np.arange(-SIDE, SIDE + 2) - 0.5) * STEP)
PRIOR = 4.0  # independent outcomes that the first guess of a distribution is worth. source: estimate
REFRESH = 8  # outcomes between two looks at the histograms, which are most of the cost. source: estimate
# Share of a past outcome that remains after one more. The second never forgets: it is the plain empirical
# band, so that no series ends up worse than with that. source: estimate; 2,000 and 1,000 outcomes
KEEP = np.array([0.9995, 1.0, 0.999, 0.999], np.float32)[:, None, None]
LEAST = 0.1  # least spread of boosting, in local spreads. source: estimate
LEVEL = np.array(LEVELS)[:, None]


def first_guess() -> F32:
    """A double exponential of mean size 1 over the bins, `PRIOR` in all: a wide and honest start. [BINS]"""
    tail = 0.5 * np.exp(-np.abs(EDGE))
    below = np.where(EDGE < 0.0, tail, 1.0 - tail)
    below[0], below[-1] = 0.0, 1.0
    guess: F32 = (PRIOR * np.diff(below)).astype(np.float32)
    return guess


def quantiles(counts: F32) -> F64:
    """Quantiles at LEVELS of histograms `counts` [kinds, BINS, n], in spreads. [kinds, n_level, n]

    Within a bin outcomes are taken to lie evenly, but all at 0 in the bin of no change.
    """
    if counts.shape[2] < MANY:
        return _read(counts, np.cumsum(counts, axis=1, dtype=np.float64))
    # Kind by kind and row by row: what is summed stays in the cache.
    out = np.empty((len(counts), N_LEVEL, counts.shape[2]))
    below = np.empty((1, *counts.shape[1:]))
    for place, kind in enumerate(counts):
        below[0, 0] = kind[0]
        for row in range(1, BINS):
            np.add(below[0, row - 1], kind[row], out=below[0, row])
        out[place] = _read(kind[None], below)[0]
    return out


def _read(counts: F32, below: F64) -> F64:
    """As `quantiles`, with the sums of `counts` up to and with each bin, `below`."""
    kinds, _, n = counts.shape
    wanted = LEVEL * below[:, -1:]
    flat = below.ravel()
    start = (np.arange(kinds) * (BINS * n))[:, None, None] + np.arange(n)
    # Bins that end below what is wanted, found by halving.
    there = np.repeat(start, N_LEVEL, axis=1)
    for step in HALVES:
        there += (flat[there + (step - 1) * n] < wanted) * (step * n)
    place: F64 = (there - start) // n - (flat[there] - wanted) / counts.ravel()[there]
    place -= SIDE - 0.5
    place[np.abs(place) <= 0.5] = 0.0
    place *= STEP
    np.sinh(place, out=place)
    place *= UNIT
    return place


def marginal_quantiles(recent: F64) -> F64:
    """Quantiles at LEVELS of each column of `recent` [n_recent, n], NaN skipped. [n_level, n]"""
    if not len(recent):
        return np.full((N_LEVEL, recent.shape[1]), np.nan)
    ranked = np.sort(recent, axis=0)
    final = np.maximum(np.isfinite(recent).sum(axis=0) - 1, 0)
    place = LEVEL * final
    low: I64 = place.astype(np.int64)
    series = np.arange(recent.shape[1])
    below, above = ranked[low, series], ranked[np.minimum(low + 1, final), series]
    out: F64 = below + (place - low) * (above - below)
    return out


class Bands:
    """Candidate curves of n series and how they are mixed. All values are differences from the last one.

    State: `counts` [4, BINS, n]; `table` [4, n_level, n], their quantiles when last looked at; `unit` [n],
    the spread of the first two kinds, NaN before any change was seen; `mix`, the losses, and `weights`
    [kinds, n_level, n], what came of them when last looked at; `age` [2], outcomes since then and in all.
    """

    def __init__(self, n: int, share: float, keep: float) -> None:
        guess = np.broadcast_to(first_guess()[None, :, None], (N_ERROR, BINS, 1))
        self.counts: F32 = np.repeat(guess, n, axis=2)
        self.table = np.repeat(quantiles(np.ascontiguousarray(guess)), n, axis=2)
        self.unit = np.full(n, np.nan)
        self.mix = Combination(n, np.full(N_KIND, 1.0 / N_KIND), share, keep, (N_LEVEL,))
        self.weights = np.full((N_KIND, N_LEVEL, n), 1.0 / N_KIND)
        self.age = np.zeros(2, np.int64)
        self._lent = False

    def spreads(self, said: F64, local: F64, low: F64 | None, high: F64 | None) -> F64:
        """Local spread and boosting's downward and upward, [3, n]; NaN where not known."""
        out = np.full((3, len(said)), np.nan)
        out[0] = local
        if low is not None and high is not None:
            least = LEAST * local
            np.maximum(said - low, least, out=out[1])
            np.maximum(high - said, least, out=out[2])
        return out

    def curves(self, said: F64, unit: F64, spreads: F64, marginal: F64) -> F64:
        """Quantiles of each candidate, [kinds, n_level, n]; NaN where it has none. `unit`: of the first 2."""
        out = np.empty((N_KIND, N_LEVEL, len(said)))
        np.multiply(self.table[:2], unit, out=out[:2])
        np.multiply(self.table[2], spreads[0], out=out[2])
        table = self.table[3]
        np.multiply(table, np.where(table < 0.0, spreads[1], spreads[2]), out=out[3])
        out[0] += said
        out[2:4] += said
        out[4] = marginal + 0.0 * unit
        return out

    def mixed(self, curves: F64) -> F64:
        """The middle half of the candidates at each level, in order of level. [n_level, n]"""
        weights = self.weights * np.isfinite(curves)
        out = middle_half(curves.reshape(N_KIND, -1), weights.reshape(N_KIND, -1)).reshape(N_LEVEL, -1)
        out.sort(axis=0)
        return out

    def learn(self, actual: F64, said: F64, spreads: F64, curves: F64, mixed: F64) -> None:
        """Learn the outcome `actual` [n], NaN for none, of the forecasts at issue."""
        known = np.isfinite(actual)
        # Where the outcome is the quantile, whatever lies elsewhere would have lost.
        over = np.where(actual == mixed, curves > mixed, actual < mixed)
        regret = (over - LEVEL) * (mixed - curves)
        regret[~(np.isfinite(regret) & known)] = 0.0
        self.mix.judge(regret, known)
        error = np.empty((N_ERROR, len(actual)))
        np.subtract(actual, said, out=error)
        error[1] = actual
        widest = np.fmax(np.abs(error[0]), np.abs(actual)) / REACH
        if (widest > self.unit).any():
            for i in np.flatnonzero(widest > self.unit):
                self._widen(int(i), 4.0 * widest[i])
        error[:2] /= self.unit
        error[2] /= spreads[0]
        error[3] /= np.where(error[3] < 0.0, spreads[1], spreads[2])
        place = np.rint(np.arcsinh(error / UNIT) / STEP)
        np.minimum(np.maximum(place, -SIDE, out=place), SIDE, out=place)
        self._own()
        kind, series = np.nonzero(np.isfinite(place))
        # Outcomes that overlap count as few, so that the first guess is not forgotten too soon.
        self.counts[kind, place[kind, series].astype(np.int64) + SIDE, series] += self.mix.share
        self.age += 1
        # Often at first, when each outcome is news.
        if self.age[0] >= min(REFRESH, 1 + self.age[1] // REFRESH):
            self.refresh()

    def refresh(self) -> None:
        """Read quantiles and weights from the counts."""
        self._own()
        if self.age[0]:
            self.counts *= KEEP ** np.float32(self.age[0])
        self.table = quantiles(self.counts)
        # A little is left to each, for when all others sleep.
        self.weights = np.maximum(self.mix.weights(np.ones((N_KIND, 1, 1), np.bool_)), 1e-9)
        self.age[0] = 0

    def lend(self) -> F32:
        """`counts` for others to keep: they are copied before they are next written to."""
        self._lent = True
        return self.counts

    def _own(self) -> None:
        if self._lent:
            self.counts, self._lent = self.counts.copy(), False

    def _widen(self, i: int, unit: float) -> None:
        """Enlarge the unit of one series, so that an error finds its bin; counts move along."""
        centre = np.arcsinh(np.sinh(np.arange(-SIDE, SIDE + 1) * STEP) * (self.unit[i] / unit)) / STEP
        moved = np.rint(centre).astype(np.int64) + SIDE
        self._own()
        self.table, self.unit = self.table.copy(), self.unit.copy()
        for counts in self.counts[:2, :, i]:
            counts[:] = np.bincount(moved, counts, BINS)
        self.table[:2, :, i] *= self.unit[i] / unit
        self.unit[i] = unit
