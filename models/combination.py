"""Experts combined by their recent losses: second-order online aggregation for each series by itself.

Bernstein Online Aggregation (Wintenberger, Machine Learning 106, 2017) with a rate for each expert, experts
that sleep, forgetting, and outcomes that overlap. May import the core's number types; NumPy only.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F64

TINY = 1e-300


class Combination:
    """Weights of `k` experts for each of `n` series (and each of `lanes`, such as quantile levels).

    State: `regret`, `square`, `peak`, all [k, *lanes, n]. `prior` [k] sums to 1.
    """

    def __init__(self, n: int, prior: F64, overlap: int = 1, keep: float = 1.0, lanes: tuple[int, ...] = ()):
        self.prior, self.overlap, self.keep = prior, overlap, keep
        shape = (len(prior), *lanes, n)
        self.regret, self.square, self.peak = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._log_prior = np.log(prior).reshape(-1, *(1,) * (len(shape) - 1))

    def weights(self, awake: np.ndarray) -> F64:
        """Weights that sum to 1 over the experts that are `awake` [k, ..., n]; all 0 where none is."""
        peak = np.maximum(self.peak, TINY)
        rate = np.minimum(0.5 / peak, np.sqrt(-self._log_prior / np.maximum(self.square, peak**2)))
        log = self._log_prior + np.log(rate * peak) + rate * (self.regret - rate * self.square)
        log = np.where(awake, log, -np.inf)
        top = log.max(axis=0)
        weight = np.exp(log - np.where(top > -np.inf, top, 0.0))
        out: F64 = weight / np.maximum(weight.sum(axis=0), TINY)
        return out

    def judge(self, regret: F64) -> None:
        """Count how much less each expert would have lost than was lost; 0 where it slept or a gap was."""
        share = 1.0 / self.overlap
        np.maximum(self.peak, np.abs(regret), out=self.peak)
        self.regret *= self.keep
        self.regret += regret * share
        self.square *= self.keep
        self.square += regret**2 * share
