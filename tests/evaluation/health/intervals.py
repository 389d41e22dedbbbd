"""Intervals of what was counted: shares, rates, medians; 90 % unless a caller asks for more. NumPy only."""

from __future__ import annotations

import numpy as np

from models.backtest import binomial
from twin.catalogue import F64

RESAMPLES = 1000
Z = 1.6448536  # 90 %, both sides; source: normal distribution
Interval = tuple[float, float]


def rate_interval(count: int, exposure: float) -> Interval:
    """Of a rate at which `count` events came. source: Byar's approximation of Poisson limits, Breslow & Day,
    Statistical Methods in Cancer Research II (1987), page 69"""
    if not exposure > 0:
        return np.nan, np.nan
    up = count + 1.0
    high = up * (1.0 - 1.0 / (9.0 * up) + Z / (3.0 * np.sqrt(up))) ** 3
    low = count * (1.0 - 1.0 / (9.0 * count) - Z / (3.0 * np.sqrt(count))) ** 3 if count else 0.0
    return float(max(low, 0.0) / exposure), float(high / exposure)


def share_interval(hits: F64, trials: F64, seed: int = 0) -> Interval:
    """Of sum(hits) / sum(trials), both counts per node [n]: the wider of Wilson's and of whole nodes drawn.

    A node that fails often brings several trials, which are not independent; where all or none hit, drawing
    tells nothing and Wilson's stands.
    """
    total = float(trials.sum())
    if total < 1:
        return np.nan, np.nan
    low, high = binomial(float(hits.sum()) / total, round(total))
    some = trials > 0
    drawn = _drawn(hits[some], trials[some], seed)
    if len(drawn) < RESAMPLES / 2:
        return low, high
    return (min(low, float(np.quantile(drawn, 0.05))), max(high, float(np.quantile(drawn, 0.95))))


def _drawn(hits: F64, trials: F64, seed: int) -> F64:
    rng = np.random.default_rng(seed)
    n = len(hits)
    if n < 2:
        return np.zeros(0)
    at = rng.integers(0, n, (RESAMPLES, n))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = hits[at].sum(axis=1) / trials[at].sum(axis=1)
    known: F64 = share[np.isfinite(share)]
    return known


def median_interval(values: F64) -> Interval:
    """Of the median, from the order of the values. source: Conover, Practical Nonparametric Statistics,
    section 3.2"""
    n = len(values)
    if n < 2:
        return np.nan, np.nan
    ordered, half = np.sort(values), Z * np.sqrt(n) / 2.0
    low = max(int(np.floor(n / 2.0 - half)) - 1, 0)
    high = min(int(np.ceil(n / 2.0 + half)), n - 1)
    return float(ordered[low]), float(ordered[high])
