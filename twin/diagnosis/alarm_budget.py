"""Alarm budget: divides the site's false-alarm rate among the tests of its detectors, and gives each test its
threshold.

`false_alarms_per_rack_hour` of the site file, times its racks, is what noise may raise in an hour. Each
family of tests gets a share of it, each test of a family a part of that in proportion to the time between its
readings, and each reading one chance to err; from that chance follows the threshold. So the delays of all
tests have the least sum: each is its period times the logarithm of 1 / chance. What is an effect size stays
where it is: how far a model may be off, or from which size on a fault is worth a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from twin.catalogue import F64
from twin.diagnosis.fault_kinds import FAULT_KINDS
from twin.diagnosis.signature import HYPOTHESES, measured_signal
from twin.site import Site

# Of the rate, by family of tests; source: estimate
SHARES = {"comparisons": 0.5, "frozen": 0.125, "spiking": 0.125, "counters": 0.125, "balances": 0.125}
CRITICAL_PU = 0.2  # of the rate that may be critical: false ones wake people; source: estimate
# Signals without a stated period are counted as read at each tick, the fastest that there is
TICK_S, WEATHER_S = 1.0, 60.0
MOST_CHANCE = 0.1  # of a reading: above, the formulas hold no longer
# Of the noise of a comparison from one reading to the next; source: estimate: with it the default rate has a
# threshold of 8, with which the simulated healthy plants were quiet
CORRELATION = 0.42
MOST_READINGS = 60  # that add up to a deviation: more are far less likely, as each takes an allowance
CRITICAL = frozenset(h.relations[0] for h in HYPOTHESES if FAULT_KINDS[h.kind].severity == "critical")
STEPS = 60  # of an iteration, after which a double changes no more
MOST_KEPT = 256  # thresholds: a site asks for few different ones, and for each of them many times
_NORMAL = NormalDist()


class AlarmBudget:
    """False alarms of a site per hour, and the chances of tests that keep to them."""

    def __init__(self, site: Site) -> None:
        self.per_h = site.file.false_alarms_per_rack_hour * max(1, site.sizes["rack"])
        self.periods_s = site.file.periods_s

    def period_s(self, table: str, signal: str = "") -> float:
        """Return the least time between two readings of a signal, s."""
        usual_s = WEATHER_S if table == "site" else TICK_S
        stated_s = self.periods_s.get(f"{table}.{signal}", self.periods_s.get(table, usual_s))
        return max(stated_s, TICK_S)

    def chance(self, family: str, periods_s: float, period_s: float = TICK_S, share: float = 1.0) -> float:
        """Chance of each reading to err, every `period_s`, in a family whose tests have periods of this sum;
        or of a share of its rate.
        """
        per_test_h = share * SHARES[family] * self.per_h * period_s / max(periods_s, period_s)
        return min(per_test_h * period_s / 3600.0, MOST_CHANCE)

    def certain(self, cells: Mapping[str, int], allowance: float, least: float) -> dict[str, float]:
        """Return the threshold of the cumulative sums of each comparison, by the rows of each; critical
        faults rest on some, whose false alarms are fewer.
        """
        periods_s = {name: self.period_s(name.partition(".")[0], measured_signal(name)) for name in cells}
        every = sum(n * periods_s[name] for name, n in cells.items())
        grave = sum(n * periods_s[name] for name, n in cells.items() if name in CRITICAL)
        out = {}
        for name, period_s in periods_s.items():
            chance = self.chance("comparisons", every, period_s)
            if name in CRITICAL:
                chance = min(chance, self.chance("comparisons", grave, period_s, CRITICAL_PU))
            out[name] = max(sum_threshold(chance, allowance), least)
        return out


def sum_chance(threshold: float, allowance: float, correlation: float) -> float:
    """Return a bound on the chance that, at a reading, a two-sided cumulative sum of noise is above a
    threshold.

    It is if for some m the last m readings add up to more than the threshold and m allowances: the chances of
    all m are added (Bonferroni). Readings are normal, with the correlation from one to the next.
    """
    chance, variance, with_last = 0.0, 0.0, 0.0
    for m in range(1, MOST_READINGS + 1):
        variance += 1.0 + 2.0 * with_last
        with_last = correlation * (1.0 + with_last)
        chance += math.erfc((threshold + m * allowance) / math.sqrt(2.0 * variance))
    return chance


@lru_cache(MOST_KEPT)
def sum_threshold(chance: float, allowance: float) -> float:
    """Return the threshold that a two-sided cumulative sum of noise exceeds with at most this chance at a
    reading."""
    return _bisected(lambda threshold: sum_chance(threshold, allowance, CORRELATION) > chance, 0.0, 1e3)


def run_log(chance: float) -> float:
    """Return -ln of a chance: a reading that repeats with chance q does so for run_log / -ln(q) readings."""
    return -math.log(chance)


def surprise(count: Any, mean: Any) -> Any:
    """Return -ln of a bound on the chance that a fading count of rare events with this mean reaches
    `count`.

    source: Chernoff's bound: events come as in a Poisson process, and each fades by exp(-t / T).
    """
    ratio = np.maximum(np.asarray(count, np.float64) / mean, 1.0)
    tilt = np.log(ratio) + 1.0
    for _ in range(STEPS):  # a contraction to (exp(tilt) - 1) / tilt = ratio
        tilt = np.log1p(ratio * tilt)
    term, total = np.ones_like(tilt), np.zeros_like(tilt)
    for k in range(1, STEPS):
        term = term * tilt / k
        total += term / k
    return np.maximum(tilt * count - mean * total, 0.0)


@lru_cache(MOST_KEPT)
def rare_count(log: float, mean: float) -> float:
    """Return the count whose `surprise` is `log` for this mean."""
    most = mean + 2.0 * log + 2.0 * math.sqrt(log * mean)
    return _bisected(lambda count: bool(surprise(count, mean) < log), mean, most)


def _bisected(too_low: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number in this range that is not too low."""
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high


def lasting_sigmas(chance: float) -> float:
    """Return the two-sided number of sigmas that noise exceeds for its correlation time with this chance.

    Its mean over that time is farther than this even more often. Noise that is alike by exp(-t / T) has over
    T a mean of variance 2 / e (Papoulis 1965).
    """
    return math.sqrt(2.0 / math.e) * _NORMAL.inv_cdf(1.0 - chance / 2.0)


def widening(readings: int, chance: float, freedom: float = 1.0) -> F64:
    """Factors [readings + 1] on a variance learned from 0, 1, 2.. readings, of which the last is 1: none is
    taken for less than it is with a greater chance. Infinite where too few are known. `freedom`: degrees of
    freedom of a reading, 1 for normal ones.

    source: quantiles of chi-square by Wilson and Hilferty (1931)
    """
    n = np.maximum(freedom * np.arange(readings + 1), 1e-3)
    part = 2.0 / (9.0 * n)
    quantile = 1.0 - part + _NORMAL.inv_cdf(chance) * np.sqrt(part)
    out: F64 = np.full(readings + 1, np.inf)
    known = quantile > 0.0
    out[known] = quantile[known] ** -3.0
    return np.asarray(np.maximum(out / out[-1], 1.0))
