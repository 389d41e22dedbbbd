"""Cadence: learned message intervals, per group of rows that arrive together and per entity.

Kept of each: the two longest gaps of this block of readings and of the block before, the usual gap, how late
readings arrive, and the share of readings that repeat the value before. The second longest gap of one to two
blocks is the *period*: a quantile of about 98 % that a single outage does not move. Memory does not grow.

Before enough gaps were seen, the period at which the source is polled stands for it, or that of its peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from twin import kernels
from twin.catalogue import F32, F64, I32, I64, Bool

# Gaps before anything is concluded from them; below, a signal is learning.
LEARNED = 5
IRREGULAR = 1.3  # the longest gap over the usual one; jitter is less. source: estimate
MOST_REPEATS = 0.1  # share of equal readings from which a signal is not sent on change. source: estimate
REPEAT_ROWS = 4  # rows of a group that is looked at for repeats: a larger one is a poll, not a change
LEAST_PEERS = 3  # whose cadence is known, before theirs is expected of another entity. source: estimate
# By so much, or a usual gap, a gap between stamps may be longer than that between arrivals: more is a clock
# that was put forward. source: estimate
JUMP_S = 2.0

_ARRAYS = ("longest_s", "usual_s", "lag_s", "last_lag_s", "repeats", "poll_s", "gaps")


class Arrivals(NamedTuple):
    """Messages at `t_ns` [k] of these entities, all if None; `same`: with the values of the ones before."""

    t_ns: I64
    entity: I32 | None
    same: Bool | None = None


class Cadence:
    """The gaps between the messages of a table.

    Shapes: longest_s [4, groups, n], the two longest of this block and of the one before; usual_s, lag_s and
    last_lag_s (how late readings arrive on average, and the last did), repeats, poll_s (the period at which a
    source is polled, 0 where that is not known) and gaps (their number) [groups, n].
    """

    def __init__(self, n: int, n_groups: int = 1) -> None:
        self.n = n
        self.longest_s: F32 = np.zeros((4, n_groups, n), np.float32)
        self.usual_s: F32 = np.zeros((n_groups, n), np.float32)
        self.lag_s: F32 = np.zeros((n_groups, n), np.float32)
        self.last_lag_s: F32 = np.zeros((n_groups, n), np.float32)
        self.repeats: F32 = np.ones((n_groups, n), np.float32)
        self.poll_s: F32 = np.zeros((n_groups, n), np.float32)
        self.gaps: I32 = np.zeros((n_groups, n), np.int32)

    def arrays(self) -> dict[str, Any]:
        """Everything that a snapshot must hold, by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def restore(self, arrays: Mapping[str, Any], n_groups: int) -> None:
        """Restore the state from `arrays`; missing values of an earlier version are learned again."""
        known = Cadence(self.n, n_groups).arrays() | (dict(arrays) if "usual_s" in arrays else {})
        for name in _ARRAYS:
            setattr(self, name, np.array(known[name]))

    def remapped(self, n: int, old_of_new: I32) -> Cadence:
        """This for other slots: `old_of_new` [n] is where each comes from, -1 for a new one."""
        out = Cadence(n, len(self.gaps))
        kept = np.flatnonzero(old_of_new >= 0)
        for name in _ARRAYS:
            getattr(out, name)[..., kept] = getattr(self, name)[..., old_of_new[kept]]
        return out

    def split(self, parent: int) -> None:
        """Split a part of a group that now arrives separately: the last group begins with the known
        cadence."""
        for name in _ARRAYS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, array[..., parent : parent + 1, :]], axis=-2))

    def poll(self, group: int, entity: I32, period_s: float) -> None:
        """Note that the source of these entities [k] is polled at this period.

        Forgets the gaps that were learned at another one.
        """
        new = entity[self.poll_s[group, entity] != np.float32(period_s)]
        self.poll_s[group, new] = period_s
        unlike = np.maximum(self.usual_s[group, new], 1e-3) / np.float32(period_s)
        new = new[(unlike > IRREGULAR) | (unlike < 1.0 / IRREGULAR)]
        self.gaps[group, new], self.longest_s[:, group, new], self.usual_s[group, new] = 0, 0.0, 0.0

    def expected_s(self, group: int) -> F64:
        """Return the period to expect before one is learned [n]: of the poll, else the longest of its peers'
        (the entities of the group whose cadence is known); 0 where it is unknown.
        """
        known = self.known(group)
        poll_s: F64 = self.poll_s[group].astype(np.float64)
        if np.count_nonzero(known) >= LEAST_PEERS:
            poll_s[poll_s == 0.0] = self.period_s(group)[known].max()
        return poll_s

    def learn(self, group: int, received_ns: I64, arrived: Arrivals, now_ns: int, paused_ns: int) -> int:
        """Learn from messages after those at `received_ns` [n].

        Returns how many gaps were learned: none of a first message, nor across a pause.
        """
        return kernels.learn_cadence(
            received_ns,
            arrived.t_ns,
            arrived.entity,
            now_ns,
            paused_ns,
            self.longest_s[:, group],
            self.usual_s[group],
            self.lag_s[group],
            self.last_lag_s[group],
            self.repeats[group],
            self.gaps[group],
            arrived.same,
            JUMP_S,
        )

    def known(self, group: int) -> Bool:
        """Return the entities of which enough gaps were seen [n]."""
        return np.asarray(self.gaps[group] >= LEARNED, np.bool_)

    def period_s(self, group: int) -> F64:
        """Return the learned period [n]: the second longest gap, of a single one that; 0 without any."""
        a, b, c, d = self.longest_s[:, group]
        second = np.maximum(np.minimum(a, c), np.maximum(b, d))
        period_s: F64 = np.where(self.gaps[group] == 1, a, second).astype(np.float64)
        return period_s

    def irregular(self, group: int) -> Bool:
        """Return the entities whose gaps vary more than by jitter [n]."""
        longest = np.maximum(self.longest_s[0, group], self.longest_s[2, group])
        return np.asarray(longest > IRREGULAR * self.usual_s[group], np.bool_)

    def on_change(self, group: int) -> Bool:
        """Return the entities that send this group on change: irregularly, hardly ever with equal values
        [n]."""
        out = self.known(group) & (self.repeats[group] <= MOST_REPEATS)
        return np.asarray(out & self.irregular(group), np.bool_)
