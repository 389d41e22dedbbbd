"""Experts combined by their recent losses: second-order online aggregation, each series by itself.

Bernstein Online Aggregation (Wintenberger, Machine Learning 106, 2017) with a rate for each expert, experts
that sleep, forgetting, and outcomes that overlap. The combined point is the middle half of what the experts
say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F64, Bool

MANY = 256  # columns from which comparing all pairs is quicker than sorting. source: measured
TINY = 1e-150  # its square is still a number


def independent_share(overlap: int) -> float:
    """Worth of one of `overlap` overlapping losses in independent ones, in (0, 1].

    Errors a share j/m apart in their window correlate by 1 - j/m where changes add up, and their sizes by the
    square of that; so a mean over many has the variance of 3 m / (2 m^2 + 1) times as many independent ones.
    """
    return 3.0 * overlap / (2.0 * overlap**2 + 1.0)


class Combination:
    """Weights of k experts for each of n series, in each of `lanes` (such as quantile levels).

    State, in arrays that are replaced when they change: `regret`, `square` and `peak` (the largest that was
    seen), all [k, *lanes, n]. `prior` [k] sums to 1; `share` is what one loss counts, and `keep` what
    remains of the past after it.
    """

    def __init__(self, n: int, prior: F64, share: float, keep: float, lanes: tuple[int, ...] = ()) -> None:
        self.share, self.keep = share, keep
        shape = (len(prior), *lanes, n)
        self.regret, self.square, self.peak = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        log = np.log(prior).reshape(-1, *(1,) * (len(shape) - 1))
        self._log_prior, self._odds = log, np.maximum(-log, 1.0)

    def weights(self, awake: Bool) -> F64:
        """Weights that sum to 1 over the experts that are `awake` [k, ..., n]; all 0 where none is."""
        peak = np.maximum(self.peak, TINY)
        rate = np.sqrt(self._odds / np.maximum(self.square, peak * peak))
        np.minimum(rate, 0.5 / peak, out=rate)
        weight = rate * (self.regret - rate * self.square)
        weight += np.log(rate * peak)
        weight += self._log_prior
        weight = np.where(awake, weight, -np.inf)
        top = weight.max(axis=0)
        weight -= np.where(top == -np.inf, 0.0, top)
        np.exp(weight, out=weight)
        weight /= np.maximum(weight.sum(axis=0), TINY)
        return weight

    def judge(self, regret: F64, known: Bool) -> None:
        """Count `regret` [k, *lanes, n]: how much less each expert would have lost than was lost.

        It is 0 where an expert slept. Where the outcome is not `known` [n], or no expert would have lost more
        or less, nothing is forgotten either.
        """
        self.peak = np.maximum(self.peak, np.abs(regret))
        # A move of zero forgets nothing: a series that mostly sits still is learned from its few moves.
        keep = np.where(known & (regret != 0.0).any(axis=0), self.keep, 1.0)
        self.regret = self.regret * keep
        self.square = self.square * keep
        self.regret += self.share * regret
        self.square += self.share * (regret * regret)


def middle_half(points: F64, weights: F64) -> F64:
    """Mean of the middle half of the experts' points [k, n] by `weights` >= 0; NaN where all are 0. [n]

    As steady as a median against a few that are far off, and as smooth as a mean; it is exactly the one point
    that three quarters of the weight agree on.
    """
    if points.shape[1] >= MANY:
        awake = weights.any(axis=1)
        if not awake.all():
            points, weights = points[awake], weights[awake]
        before = _before(points, weights)
        after, total = before + weights, weights.sum(axis=0)
    else:
        order: NDArray[np.intp] = np.argsort(points, axis=0)
        order *= points.shape[1]
        order += np.arange(points.shape[1])
        points, weights = points.ravel()[order], weights.ravel()[order]
        after = np.cumsum(weights, axis=0)
        before, total = after - weights, after[-1].copy()
    low, high = 0.25 * total, 0.75 * total
    np.maximum(before, low, out=before)
    np.minimum(after, high, out=after)
    after -= before
    np.maximum(after, 0.0, out=after)
    inner = np.where(after == 0.0, 0.0, points)
    inner *= after
    with np.errstate(invalid="ignore"):
        out: F64 = inner.sum(axis=0) / after.sum(axis=0)
    return out


def _before(points: F64, weights: F64) -> F64:
    """Weight of the points below each one, and of equal ones before it [k, n]: no sort, so quick for many."""
    out, room = np.zeros(points.shape), np.empty(points.shape)
    for i in range(1, len(points)):
        below, part = points[:i] <= points[i], room[:i]
        np.multiply(below, weights[:i], out=part)
        out[i] = part.sum(axis=0)
        np.subtract(1.0, below, out=part)
        part *= weights[i]
        out[:i] += part
    return out
