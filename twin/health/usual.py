"""What is usual: how often a kind of trouble comes to each device while nothing is wrong with it.

A Gamma-Poisson rate: the mean and the spread over the fleet come from the counts of all its devices, and each
device's own count moves its rate away from that mean. May import cycles and array types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import F32, F64, I32, I64, NS, Bool
from twin.health.cycles import Cycles

DAY_NS, HOUR_NS = 86_400 * NS, 3600 * NS
# Before anything is known: once in 50 days, weighed as one time of trouble, since sites differ by far more
# than that; a third of all trouble on a few devices, weighed as 20 times of trouble. source: estimate
PRIOR_PER_DAY, PRIOR_DAYS = 0.02, 50.0
PRIOR_SHAPE, PRIOR_TIMES = 0.3, 20.0
LEAST_SHAPE, MOST_SHAPE = 0.02, 5.0
MEMORY_NS = 60 * DAY_NS  # a device that has been watched for longer counts half of it. source: estimate
# So many beginnings, or that share of all trouble, are learned from before an hour is over: on a site where
# all devices have it the first of them would need people otherwise. source: estimate
MUCH, MUCH_PU = 16, 0.25


class Usual:
    """Counts of trouble of n devices, since when each is watched, and what the fleet has."""

    def __init__(self, n: int) -> None:
        self.times: F32 = np.zeros(n, np.float32)
        self.since_ns: I64 = np.zeros(n, np.int64)  # 0: not heard yet
        self.last_ns: I64 = np.zeros(n, np.int64)  # when trouble last counted
        self.n_heard = 0
        self.mean_per_day, self.shape = PRIOR_PER_DAY, PRIOR_SHAPE
        self.learned_ns = 0
        self.begun, self.all_times = 0, 0.0  # what began since; all trouble, as last learned
        self.all_days = 0.0  # of all devices, as last learned

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

    def forget(self, entity: int) -> None:
        """Another device sits in this slot: it is watched from the next look on."""
        self.times[entity], self.since_ns[entity], self.last_ns[entity] = 0.0, 0, 0
        self.n_heard = int(np.count_nonzero(self.since_ns))

    def remapped(self, old_of_new: I32) -> Usual:
        """The same on another site."""
        out = Usual(len(old_of_new))
        kept = np.flatnonzero(old_of_new >= 0)
        out.times[kept] = self.times[old_of_new[kept]]
        out.since_ns[kept] = self.since_ns[old_of_new[kept]]
        out.last_ns[kept] = self.last_ns[old_of_new[kept]]
        out.n_heard = int(np.count_nonzero(out.since_ns))
        out.mean_per_day, out.shape, out.learned_ns = self.mean_per_day, self.shape, self.learned_ns
        out.begun, out.all_times, out.all_days = self.begun, self.all_times, self.all_days
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {"times": self.times, "since_ns": self.since_ns, "last_ns": self.last_ns,
                "fleet": [self.mean_per_day, self.shape, self.learned_ns, self.begun,
                          self.all_times, self.all_days]}  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.times, self.since_ns = np.array(data["times"], np.float32), np.array(data["since_ns"], np.int64)
        self.last_ns = np.array(data["last_ns"], np.int64)
        self.n_heard = int(np.count_nonzero(self.since_ns))
        mean, shape, learned_ns, begun, all_times, *days = data["fleet"]  # older ones have no days
        self.mean_per_day, self.shape, self.learned_ns = float(mean), float(shape), int(learned_ns)
        self.begun, self.all_times = int(begun), float(all_times)
        self.all_days = float(days[0]) if days else 0.0
