"""Baseline rate: how often a kind of trouble comes to each device while nothing is wrong with it; and cycles.

The baseline is a Gamma-Poisson rate: its mean and spread come from the counts of all devices of the fleet,
and each device's own count moves its rate away from that mean.

A cycle is a run of trouble on one device. Against its baseline rate, Gamma(a, b) (mean a / b per day), stands
one of r = `per_day`; after m times in t days the log of the ratio of likelihoods is

    m ln r - r t - ln[ G(a + m) / G(a) b^a / (b + t)^(a + m) ].

The score leaves out what the first time alone adds: once is no recurrence.
"""

from __future__ import annotations

from math import lgamma

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, Bool
from twin.telemetry import OWN, EntityState, SparseState, cell, column, scalar

RECURS_PER_DAY = 6.0  # trouble that has come to stay: every four hours. source: estimate
DAY_NS = 86_400 * NS


class Cycles(SparseState):
    """Open cycles of one kind of trouble [k].

    a, b: the usual rate before it began, as known now; `logs` is ln[ G(a + m) / G(a + 1) ].
    """

    first_ns: I64 = cell("i8")
    count: I32 = cell("i4", 1)
    a: F64 = cell("f8")
    b: F64 = cell("f8")
    logs: F64 = cell("f8")

    def __init__(self, per_day: float = RECURS_PER_DAY, table: str = OWN) -> None:
        super().__init__({table: 0}, table)
        self.per_day = per_day  # of trouble that has come to stay

    def add(self, index: I32, now_ns: int, a: F64, b: F64) -> I32:
        """Trouble came to these devices (ascending), whose usual rates are Gamma(a, b) [k].

        Returns those to which it comes so often anyhow that once more begins nothing.
        """
        at, there = self.find(index)
        more = at[there]
        self.logs[more] += np.log(self.a[more] + self.count[more])
        self.count[more] += 1
        usual = ~there & (b * self.per_day <= a)
        fresh = ~there & ~usual
        if fresh.any():
            self.insert(index[fresh], first_ns=now_ns, a=a[fresh], b=b[fresh])
        return index[usual]

    def scores(self, now_ns: int) -> tuple[F64, F64]:
        """(how much speaks for recurrence, the same with the first time counted), in nats [k]."""
        t = np.maximum(now_ns - self.first_ns, 0) / DAY_NS
        more = self.count - 1.0
        usual = self.logs + (self.a + 1.0) * np.log(self.b) - (self.a + 1.0 + more) * np.log(self.b + t)
        score = more * np.log(self.per_day) - self.per_day * t - usual
        return score, score + np.log(self.per_day * self.b / self.a)

    def again(self, a: F64, b: F64) -> None:
        """More is known of what is usual: the rates before these cycles began are Gamma(a, b) [k]."""
        self.a, self.b = a, b
        told = zip(a.tolist(), self.count.tolist(), strict=True)
        self.logs = np.array([lgamma(x + m) - lgamma(x + 1.0) for x, m in told], np.float64)


HOUR_NS = 3600 * NS
# Before anything is known: once in 50 days, weighed as one time of trouble, since sites differ by far more
# than that; a third of all trouble on a few devices, weighed as 20 times of trouble. source: estimate
PRIOR_PER_DAY, PRIOR_DAYS = 0.02, 50.0
PRIOR_SHAPE, PRIOR_TIMES = 0.3, 20.0
LEAST_SHAPE, MOST_SHAPE = 0.02, 5.0
MEMORY_NS = 60 * DAY_NS  # a device that has been watched for longer counts half of it. source: estimate
# So many beginnings, or that share of all trouble, are learned from before an hour is over: on a site where
# all devices have it the first of them would need people otherwise. source: estimate
MUCH, MUCH_PU = 16, 0.25


class BaselineRate(EntityState):
    """Counts of trouble of n devices, since when each is watched, and what the fleet has."""

    times: F32 = column(OWN, "f4")
    since_ns: I64 = column(OWN, "i8")  # 0: not heard yet
    last_ns: I64 = column(OWN, "i8")  # when trouble last counted
    mean_per_day: float = scalar(PRIOR_PER_DAY)
    shape: float = scalar(PRIOR_SHAPE)
    learned_ns: int = scalar(0)
    begun: int = scalar(0)  # what began since
    all_times: float = scalar(0.0)  # all trouble, as last learned
    all_days: float = scalar(0.0)  # of all devices, as last learned

    def __init__(self, n: int, table: str = OWN) -> None:
        super().__init__({table: n}, table)
        self.n_heard = 0

    def hear(self, heard: Bool, now_ns: int) -> None:
        """These are watched from now on, if they were not before [n]."""
        if self.n_heard < len(heard):
            new = heard & (self.since_ns == 0)
            if new.any():
                self.since_ns[new] = now_ns
                self.n_heard = int(np.count_nonzero(self.since_ns))

    def apart(self, index: I32, now_ns: int, apart_ns: int) -> I32:
        """Of these devices, to which trouble came now, those to which it did not come just before."""
        since_ns = now_ns - self.last_ns[index]
        index = index[(self.last_ns[index] == 0) | (since_ns >= apart_ns) | (since_ns < 0)]
        self.last_ns[index] = now_ns
        return index

    def count(self, index: I32, times: I32) -> None:
        """So many times of trouble turned out to be usual."""
        np.add.at(self.times, index, times.astype(np.float32))

    def learn(self, now_ns: int, cycles: Cycles) -> None:
        """The fleet's mean and spread, once an hour and after much trouble; open cycles follow.

        What is still open counts once for each device.
        """
        much = self.begun >= max(MUCH, MUCH_PU * self.all_times)
        if self.learned_ns and abs(now_ns - self.learned_ns) < HOUR_NS and not much:
            return
        self.learned_ns, self.begun = now_ns, 0
        self._spread(now_ns, cycles)
        if len(cycles.index):
            cycles.again(*self._rates(cycles.index, cycles.first_ns))

    def _spread(self, now_ns: int, cycles: Cycles) -> None:
        watched = self.since_ns > 0
        old = watched & (now_ns - self.since_ns > MEMORY_NS)
        if old.any():
            self.times[old] *= 0.5
            self.since_ns[old] = now_ns - (now_ns - self.since_ns[old]) // 2
        days = np.maximum(now_ns - self.since_ns[watched], 0) / DAY_NS
        times = self.times.astype(np.float64)
        times[cycles.index] += 1.0
        times = times[watched]
        self.all_times = all_times = float(times.sum())
        self.all_days = all_days = float(days.sum())
        self.mean_per_day = (all_times + PRIOR_PER_DAY * PRIOR_DAYS) / (all_days + PRIOR_DAYS)
        if all_times <= 0.0:
            return
        # Moments: the mean square beyond chance is (mean days)^2 / shape more than that of equal rates
        own = all_times / max(all_days, 1e-9) * days
        beyond = float(((times - own) ** 2 - own).sum())
        square = float((own**2).sum())
        shape = square / beyond if beyond > 0.0 else MOST_SHAPE
        log = np.log(min(max(shape, LEAST_SHAPE), MOST_SHAPE))
        weighed = (all_times * log + PRIOR_TIMES * np.log(PRIOR_SHAPE)) / (all_times + PRIOR_TIMES)
        self.shape = float(np.exp(weighed))

    def rates(self, index: I32, now_ns: int) -> tuple[F64, F64]:
        """(a, b) of the Gamma rates of these devices, a / b per day [k]."""
        return self._rates(index, np.full(len(index), now_ns))

    def _rates(self, index: I32, at_ns: I64) -> tuple[F64, F64]:
        days = np.where(self.since_ns[index] > 0, np.maximum(at_ns - self.since_ns[index], 0), 0) / DAY_NS
        return self.shape + self.times[index].astype(np.float64), self.shape / self.mean_per_day + days

    def derive(self) -> None:
        """Recompute the number of watched devices."""
        self.n_heard = int(np.count_nonzero(self.since_ns))
