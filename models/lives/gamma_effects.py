"""Gamma effects: multiplicative effects of factors on a rate, drawn to 1 the more their levels agree.

A level's effect is Gamma(a, a); with O events where the other effects expect M, it becomes (a + O) / (a + M).
The shape a of a factor is the one under which its levels' counts are likeliest (negative binomial), so that a
factor that says nothing is left at 1 and a rare level stays near it. Effects are found in turn until they
stand. source: Clayton and Kaldor, Biometrics 43 (1987), empirical Bayes estimates of relative risks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64

SHAPES = tuple(float(a) for a in np.geomspace(0.25, 4096.0, 15))  # source: estimate
TRIAL_SWEEPS, SWEEPS = 3, 12  # source: measured on Titan's lives; effects move by less than 0.1 % after ten
LEAST_EXPECTED = (
    10.0  # a level of an ordered factor that expects fewer takes the one before. source: estimate
)


@dataclass(frozen=True)
class Factor:
    """A factor: each row's level [k], their number; `ordered`: an unknown level is like the one before it."""

    name: str
    level: I64
    size: int
    ordered: bool = False


@dataclass(frozen=True)
class Effects:
    """The rate per day where all effects are 1, and of each factor: effects by level, and their shape."""

    base: float
    effect: tuple[F64, ...]
    shape: tuple[float, ...]

    def rate(self, factors: Sequence[Factor], k: int) -> F64:
        """Events per day of k rows with these levels."""
        out = np.full(k, self.base)
        for factor, effect in zip(factors, self.effect, strict=True):
            out *= effect[factor.level]
        return out


def sums(group: I64, weight: F64, size: int) -> F64:
    """The sum of a weight per row [k] over each group of rows [size]."""
    return np.bincount(group, weight, size).astype(np.float64)


def likelihood(count: F64, expected: F64, shape: float) -> float:
    """Logarithm of the probability of whole counts of groups, up to what no shape changes.

    Each group's rate is a Gamma of mean 1 and this shape times the expected.
    """
    most = int(count.max(initial=0.0))
    steps = np.concatenate([[0.0], np.cumsum(np.log1p(np.arange(most) / shape))])
    gamma = steps[count.astype(np.int64)]
    return float((gamma - (shape + count) * np.log1p(expected / shape)).sum())


def likeliest_shape(count: F64, expected: F64) -> float:
    """Of SHAPES, the one under which the counts are likeliest."""
    likelihoods = [likelihood(count, expected, shape) for shape in SHAPES]
    return SHAPES[int(np.argmax(likelihoods))]


def fit_effects(count: F64, days: F64, factors: Sequence[Factor]) -> Effects:
    """Effects from events and watched days of rows [k]."""
    base = max(float(count.sum()), 0.5) / max(float(days.sum()), 1.0)
    expected = base * days
    seen = [sums(f.level, count, f.size) for f in factors]
    effect = [np.ones(f.size) for f in factors]
    shape = [SHAPES[-1]] * len(factors)
    for sweep in range(SWEEPS if factors else 0):
        for i, factor in enumerate(factors):
            if sweep >= TRIAL_SWEEPS and shape[i] == SHAPES[-1]:
                continue  # its levels agree
            others = sums(factor.level, expected, factor.size) / effect[i]
            o, m, joined = seen[i], others, np.arange(factor.size)
            if factor.ordered:
                joined = _joined(others)
                o, m = sums(joined, o, factor.size), sums(joined, m, factor.size)
            shape[i] = likeliest_shape(o, m)
            new = ((shape[i] + o) / (shape[i] + m))[joined]
            expected *= (new / effect[i])[factor.level]
            effect[i] = new
        drift = max(float(count.sum()), 0.5) / max(float(expected.sum()), 1e-300)
        base, expected = base * drift, expected * drift
    return Effects(base, tuple(effect), tuple(shape))


def _joined(expected: F64) -> I64:
    """Levels that expect too little, each joined to the nearest before it that does not."""
    enough = np.flatnonzero(expected >= LEAST_EXPECTED)
    if not len(enough):
        return np.zeros(len(expected), np.int64)
    place = np.searchsorted(enough, np.arange(len(expected)), side="right") - 1
    out: I64 = enough[np.maximum(place, 0)]
    return out
