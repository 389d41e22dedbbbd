"""How many faults the whole fleet will have in the next days, with an interval.

A Gamma-Poisson rate that forgets: the faults of each past day count half as much after a while. How fast it
forgets is chosen by how well it would have done so far. Faults come in clusters, so that counts vary more
than Poisson's: the forecast is negative binomial, with the spread that past errors had, and wider or narrower
by as much as past intervals held too little or too much. A pure function of the daily counts so far. May
import the core's number types; NumPy only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from twin.frame import F64, I64

HALF_LIVES_D = (7.0, 15.0, 30.0, 60.0, 120.0)  # source: estimate
LEVEL = 0.90
PRIOR_DAYS = 3.0  # of days at the mean rate so far that a recent rate is drawn to. source: estimate
LEAST_DAYS = 7  # of past before a rate is told of. source: estimate
# The spread before errors were seen, as a multiple of Poisson's, and how many spans of errors it counts for.
# source: estimate
SPREAD, SPREAD_SPANS = 1.5, 1.0
STEP = 2.0  # that the width's logarithm moves per span of misses. source: tuned on synthetic counts
WIDEST = 1.5  # bound of that logarithm. source: estimate
LARGE = 10_000.0  # mean from which on a normal is near enough to a negative binomial. source: estimate


class Outlook(NamedTuple):
    """Number of faults in the next span: its mean, and the ends of its interval, both within."""

    mean: float
    low: float
    high: float


def outlook(counts: F64, span_d: int) -> Outlook:
    """The next `span_d` days after daily counts [n_day]. Raises nothing; NaN before LEAST_DAYS."""
    n = len(counts)
    if n < LEAST_DAYS:
        return Outlook(np.nan, np.nan, np.nan)
    # Row i speaks after i + 1 days; the last one is today's.
    mean, own = _means(counts, span_d)
    total = np.concatenate([[0.0], np.cumsum(counts)])
    judged = np.arange(LEAST_DAYS - 1, n - span_d)  # rows whose span is over
    actual = total[judged + 1 + span_d] - total[judged + 1]
    spans = len(judged) / span_d
    # source: estimate; a rule that did well on fewer than a span of outcomes has shown nothing
    error = np.abs(actual[:, None] - mean[judged]).mean(axis=0) if spans >= 1.0 else np.ones(mean.shape[1])
    best = int(np.argmin(error)) if spans >= 1.0 else len(HALF_LIVES_D) - 2
    said, uncertain = mean[:, best], own[:, best]
    width, seen, held = 0.0, 0.0, 0.0
    past: list[tuple[float, float]] = []
    # Over the past in order of time: what each row would have said, judged once its span was over.
    for i in range(LEAST_DAYS - 1, n):
        j = i - span_d
        if j >= LEAST_DAYS - 1:
            hit = past[j - LEAST_DAYS + 1]
            actual_j = total[j + 1 + span_d] - total[j + 1]
            seen += (actual_j - said[j]) ** 2 / max(said[j], 1e-9) / span_d
            held += 1.0 / span_d
            missed = not hit[0] <= actual_j <= hit[1]
            width = float(np.clip(width + STEP / span_d * (missed - (1.0 - LEVEL)), -WIDEST, WIDEST))
        spread = (seen + SPREAD * SPREAD_SPANS) / (held + SPREAD_SPANS)
        variance = max(said[i] * spread, said[i] + uncertain[i]) * np.exp(2.0 * width)
        past.append(interval(float(said[i]), float(variance)))
    return Outlook(float(said[-1]), *past[-1])


def _means(counts: F64, span_d: int) -> tuple[F64, F64]:
    """Mean of the next span after each day, and the variance that comes from not knowing the rate.

    [n_day, n_half_life] each.
    """
    keep = 0.5 ** (1.0 / np.array(HALF_LIVES_D))
    faults, days = np.zeros(len(keep)), np.zeros(len(keep))
    whole = np.cumsum(counts) / np.arange(1, len(counts) + 1)
    mean, own = np.empty((len(counts), len(keep))), np.empty((len(counts), len(keep)))
    for i, count in enumerate(counts):
        faults, days = faults * keep + count, days * keep + 1.0
        shape, rate = faults + PRIOR_DAYS * whole[i], days + PRIOR_DAYS
        mean[i], own[i] = span_d * shape / rate, span_d**2 * shape / rate**2
    return mean, own


@lru_cache(maxsize=4096)  # the past is said again every day
def interval(mean: float, variance: float, level: float = LEVEL) -> tuple[float, float]:
    """The middle `level` of a negative binomial, ends within; of Poisson if `variance` is no greater."""
    tail = (1.0 - level) / 2.0
    if not mean > 0.0:
        return 0.0, 0.0
    if mean > LARGE:
        half = 1.6449 * np.sqrt(variance)  # source: normal quantile of 0.95
        return float(np.floor(max(mean - half, 0.0))), float(np.ceil(mean + half))
    cdf = np.cumsum(np.exp(log_pmf(mean, variance)))
    low, high = np.searchsorted(cdf, [tail, 1.0 - tail])
    return float(low), float(high)


def log_pmf(mean: float, variance: float) -> F64:
    """Logarithms of a negative binomial's probabilities of 0, 1, 2, .. up to where nothing is left."""
    most = int(mean + 12.0 * np.sqrt(max(variance, mean)) + 30.0)
    k: I64 = np.arange(most)
    over = variance / mean
    if over <= 1.0 + 1e-9:
        step, first = np.log(mean) - np.log(k + 1.0), -mean
    else:
        shape = mean / (over - 1.0)
        step, first = np.log((k + shape) / (k + 1.0)) + np.log1p(-1.0 / over), -shape * np.log(over)
    return np.concatenate([[first], first + np.cumsum(step)])
