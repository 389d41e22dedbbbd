"""Forecast of the number of faults of the whole fleet in the next days, with an interval.

A Gamma-Poisson rate that forgets: the faults of each past day count half as much after a while. How fast it
forgets is chosen by how well it would have done so far. Faults come in clusters, so that counts vary more
than Poisson's: the forecast is negative binomial, with the spread that past errors had, which holds the
uncertainty of the rate too. The interval's tails are moved by as much as intervals that were really issued
held too little or too much: adaptive conformal inference, with outcomes that come a span late. Counts are
whole numbers, so that no interval has just the share it should: each end is where its tail comes nearest.
A pure function of the daily counts so far.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64

HALF_LIVES_D = (7.0, 15.0, 30.0, 60.0, 120.0)  # source: estimate
LEVEL = 0.90
PRIOR_DAYS = 3.0  # of days at the mean rate so far that a recent rate is drawn to. source: estimate
LEAST_DAYS = 7  # of past before a rate is stated. source: estimate
# The spread before errors were seen, as a multiple of Poisson's, and how many spans of errors it counts for.
# source: estimate
SPREAD, SPREAD_SPANS = 1.5, 1.0
SPREAD_HALF_LIFE_D = 180.0  # of what an error says about the spread. source: estimate
FIRST_CHOICE = HALF_LIVES_D.index(60.0)  # before errors were seen. source: estimate
LEAST_MEAN = 0.1  # faults; so that errors of a fleet without any say something. source: estimate
MOST_SQUARE = 9.0  # times the spread so far that one error counts for: a shock is no rule. source: estimate
# Step of the tails' logit per span of misses, and its bounds: tails of 0.5 % and 21 %.
# source: tuned on synthetic counts (tests/support/fault_logs.py)
STEP, NARROWEST, WIDEST = 2.0, -1.6, 2.4
# An interval says something if it is no wider than so many faults, so many times its mean, or so many times
# Poisson's. source: estimate
SMALL, MOST_OF_MEAN, MOST_OF_POISSON = 5.0, 1.5, 2.0
TOO_WIDE = "no interval: the numbers so far varied so much that it would say nothing"
LARGE = 10_000.0  # mean from which on a normal is near enough to a negative binomial. source: estimate


class FleetForecast(NamedTuple):
    """Number of faults in the next span: its mean, and the ends of its interval, both within."""

    mean: float
    low: float
    high: float


def fleet_forecast(counts: F64, span_d: int) -> FleetForecast:
    """Return the forecast of the next `span_d` days after daily counts [n_day]; NaN before LEAST_DAYS."""
    path = fleet_forecasts(counts, span_d)
    return (
        FleetForecast(*(float(value) for value in path[-1]))
        if len(path)
        else FleetForecast(np.nan, np.nan, np.nan)
    )


def fleet_forecasts(counts: F64, span_d: int) -> F64:
    """Return forecasts after each of these days [n_day, 3], from the data known then."""
    n = len(counts)
    out = np.full((n, 3), np.nan)
    mean = _means(counts, span_d)
    total = np.concatenate([[0.0], np.cumsum(counts)])
    # Of forecasts whose span is over: absolute errors by half-life, squares over Poisson's variance, misses.
    error = np.zeros(mean.shape[1])
    seen, spans, moved = SPREAD * SPREAD_SPANS, SPREAD_SPANS, 0.0
    keep = 0.5 ** (1.0 / SPREAD_HALF_LIFE_D)
    best = FIRST_CHOICE
    for i in range(LEAST_DAYS - 1, n):
        j = i - span_d
        if j >= LEAST_DAYS - 1:
            came = total[i + 1] - total[j + 1]
            error += np.abs(came - mean[j])
            if j - LEAST_DAYS + 1 >= span_d:  # errors over less than a span have shown nothing
                best = int(np.argmin(error))
            square = (came - mean[j, best]) ** 2 / max(mean[j, best], LEAST_MEAN)
            seen = keep * seen + min(square, MOST_SQUARE * seen / spans) / span_d
            spans = keep * spans + 1.0 / span_d
            missed = not out[j, 1] <= came <= out[j, 2]
            moved += STEP / span_d * (missed - (1.0 - LEVEL))
            moved = min(max(moved, NARROWEST), WIDEST)
        said = float(mean[i, best])
        odds = (1.0 - LEVEL) / (1.0 + LEVEL) * float(np.exp(-moved))
        out[i] = said, *interval(said, max(said * seen / spans, said), 1.0 - 2.0 * odds / (1.0 + odds))
    return out


def useful_ends(mean: float, low: float, high: float) -> tuple[float, float]:
    """Return the ends of an interval, or NaN for one too wide to be useful."""
    poisson = interval(mean, mean)
    narrow = high - low <= max(SMALL, MOST_OF_MEAN * mean, MOST_OF_POISSON * (poisson[1] - poisson[0]))
    return (low, high) if narrow else (np.nan, np.nan)


def _means(counts: F64, span_d: int) -> F64:
    """Return the next span's mean after each day, by each memory [n_day, n_half_life]."""
    keep = 0.5 ** (1.0 / np.array(HALF_LIVES_D))
    faults, days = np.zeros(len(keep)), np.zeros(len(keep))
    whole = np.cumsum(counts) / np.arange(1, len(counts) + 1)
    mean = np.empty((len(counts), len(keep)))
    for i, count in enumerate(counts):
        faults, days = faults * keep + count, days * keep + 1.0
        shape, rate = faults + PRIOR_DAYS * whole[i], days + PRIOR_DAYS
        mean[i] = span_d * shape / rate
    return mean


@lru_cache(maxsize=16_384)  # the past is said again every day
def interval(mean: float, variance: float, level: float = LEVEL) -> tuple[float, float]:
    """Return the middle `level` of a negative binomial, ends included; of Poisson if `variance` is no
    greater.

    Of the ends that hold at least so much and those one count further in, each is the one whose tail is
    nearer to half of 1 - level.
    """
    tail = (1.0 - level) / 2.0
    if not mean > 0.0:
        return 0.0, 0.0
    if mean > LARGE:
        half = NormalDist().inv_cdf(1.0 - tail) * float(np.sqrt(variance))
        return float(np.floor(max(mean - half, 0.0))), float(np.ceil(mean + half))
    below = np.concatenate([[0.0], np.cumsum(np.exp(log_pmf(mean, variance)))])  # of fewer than 0, 1, 2, ..
    low, high = (int(place) for place in np.searchsorted(below[1:], [tail, 1.0 - tail]))
    if low < high and abs(below[low + 1] - tail) < abs(below[low] - tail):
        low += 1
    if low < high and abs(1.0 - below[high] - tail) < abs(1.0 - below[high + 1] - tail):
        high -= 1
    return float(low), float(high)


def log_pmf(mean: float, variance: float) -> F64:
    """Return logarithms of a negative binomial's probabilities of 0, 1, 2, .. until they vanish."""
    most = int(mean + 12.0 * np.sqrt(max(variance, mean)) + 30.0)
    k: I64 = np.arange(most)
    over = variance / mean
    if over <= 1.0 + 1e-9:
        step, first = np.log(mean) - np.log(k + 1.0), -mean
    else:
        shape = mean / (over - 1.0)
        step, first = np.log((k + shape) / (k + 1.0)) + np.log1p(-1.0 / over), -shape * np.log(over)
    return np.concatenate([[first], first + np.cumsum(step)])
