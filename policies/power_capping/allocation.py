"""Allocation: distributes watts to devices under overlapping budgets, by priority. Exact and vectorised.

A device gets min(weight x level, room) above its floor. The *level* rises for all devices together until a
budget is full; the devices under this budget stop there, and the others go on. Under nested budgets (a tree)
the result is weighted max-min fair. So it is under overlapping trees (feed A, feed B, coolant): no device can
get more without taking from another one at the same level or below. Priority classes are served in turn: the
lower ones keep their floors and share the rest. domain.md E; the method is progressive filling (Bertsekas and
Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin import kernels
from twin.catalogue import F64, I32, I64, Bool

ROUNDING = 1e-12  # relative; sums of 100,000 watts are no more exact
LEAST_W = 1e-9
MOST_STEPS = 200  # a concave sum of k pieces needs k at most, and a dozen in practice
MOST_ROUNDS = 10_000  # each freezes a group at least
MOST_COUNTED = 1000  # classes from the first to the last, to be counted and not sorted


class Budgets(NamedTuple):
    """Rows over groups of devices: the sum of share x watts of the groups of a row is at most `limit_w`.

    `start` [n_row + 1] cuts `group` and `share` [n_pair] into rows. A group that no row names has no limit.
    """

    start: I32
    group: I32
    share: F64
    limit_w: F64

    @property
    def row(self) -> I64:
        """The row of each pair [n_pair]."""
        return np.repeat(np.arange(len(self.limit_w)), np.diff(self.start))


class Devices(NamedTuple):
    """[n] each: its group, its class (a larger number comes first), floor (W), room above it (W), weight."""

    group: I32
    priority: I32
    floor_w: F64
    room_w: F64
    weight: F64


class Allocated(NamedTuple):
    """Watts of each device [n], and what each row then carries and has left [n_row]; below 0 = floors alone
    are too much."""

    power_w: F64
    carried_w: F64
    left_w: F64


class _Pairs(NamedTuple):
    """[n_pair] each, ascending by group: what is next to each other in them is so in the curves as well."""

    row: I64
    group: I64
    share: F64


def allocate(devices: Devices, budgets: Budgets, n_group: int) -> Allocated:
    """Allocate the power of all budgets, the highest class first."""
    order = np.argsort(budgets.group, kind="stable")
    pairs = _Pairs(budgets.row[order], budgets.group[order].astype(np.int64), budgets.share[order])
    n_row, group_of = len(budgets.limit_w), devices.group.astype(np.int64)

    def carried(group: I64, of_device: F64) -> F64:
        by_group = np.bincount(group, weights=of_device, minlength=n_group)
        return np.bincount(pairs.row, pairs.share * by_group[pairs.group], n_row).astype(np.float64)

    power_w = np.array(devices.floor_w, np.float64)
    carried_w = carried(group_of, power_w)
    hungry = (devices.room_w > 0) & (devices.weight > 0)
    for priority in _classes(devices.priority, hungry):
        mine = _rows_of(hungry & (devices.priority == priority))
        group, room_w, weight = group_of[mine], devices.room_w[mine], devices.weight[mine]
        left_w = np.maximum(budgets.limit_w - carried_w, 0.0)
        level = _levels(group, room_w, weight, pairs, left_w, n_group)
        extra_w = np.minimum(weight * level[group], room_w)
        power_w[mine] += extra_w
        carried_w += carried(group, extra_w)
    return Allocated(power_w, carried_w, budgets.limit_w - carried_w)


def _classes(priority: I32, hungry: Bool) -> list[int]:
    """Return the classes of devices with demand, the highest first."""
    if not hungry.any():
        return []
    low, high = int(priority.min()), int(priority.max())
    if high - low > MOST_COUNTED:
        found: list[int] = np.unique(priority[hungry]).tolist()
        return found[::-1]
    if low == high:
        return [low]
    counts = np.bincount(priority.astype(np.int64) - low, hungry)  # quicker than to sort them
    found = (np.flatnonzero(counts) + low).tolist()
    return found[::-1]


def _rows_of(mask: Bool) -> I64 | slice:
    """Rows of a mask [n] as an index; all rows, which need no copies, where it has all."""
    return slice(None) if mask.all() else np.flatnonzero(mask)


class _Curves:
    """Power of groups by level: the sum over their devices of min(weight x level, room), sorted once."""

    def __init__(self, group: I64, room_w: F64, weight: F64, n_group: int) -> None:
        full = room_w / weight  # the level at which a device has all that it has room for
        self.top = float(full.max())
        self._scale = 1.0 / (self.top * (1.0 + 1e-9))
        key = group + full * self._scale
        # Sorting is quickest where devices come group by group, as they do; in many groups all are alike
        order = slice(None) if (key[1:] >= key[:-1]).all() else np.argsort(key, kind="stable")
        self._key = key[order]
        self._room_w, self._weight = _summed(room_w[order]), _summed(weight[order])
        self._first = _summed(np.bincount(group, minlength=n_group))

    def full_w(self) -> F64:
        """Return the power of each group at full room [n_group]."""
        return np.asarray(np.diff(self._room_w[self._first]))

    def at(self, group: I64, level: F64) -> tuple[F64, F64]:
        """(W, W per level) of these groups [k] at these levels [k]; quickest if groups ascend."""
        power_w, slope = np.empty(len(group)), np.empty(len(group))
        kernels.power_at_level(
            group,
            level,
            power_w,
            slope,
            self._key,
            self._room_w,
            self._weight,
            self._first,
            self.top,
            self._scale,
        )
        return power_w, slope


def _summed(values: np.ndarray) -> np.ndarray:
    """Sums up to each of the values, and of all [n + 1]."""
    out = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=out[1:])
    return out


def _levels(group: I64, room_w: F64, weight: F64, pairs: _Pairs, left_w: F64, n_group: int) -> F64:
    """The level that each group reaches [n_group]; inf where no budget holds it.

    In each round all rows that would overflow are solved alone; those that are reached before any other row
    over the same groups are right, and freeze their groups.
    """
    row, of, share = pairs
    n_row = len(left_w)
    level = np.full(n_group, np.inf)
    power_w = np.bincount(group, room_w, n_group).astype(np.float64)  # as frozen, or else full
    free = power_w > 0.0
    curves: _Curves | None = None
    least = np.zeros(n_row)  # a row that did not ripen is reached no earlier in the next round
    for _round in range(MOST_ROUNDS):
        free_pair = free[of]
        of_pair_w = share * power_w[of]
        full_w = np.bincount(row, of_pair_w * free_pair, n_row).astype(np.float64)
        carried_w = np.bincount(row, of_pair_w, n_row)
        tight = (carried_w > left_w * (1.0 + ROUNDING) + LEAST_W) & (full_w > 0.0)
        kept = tight[row]  # what a row carries only falls: one that is not tight will not be
        row, of, share, free_pair = row[kept], of[kept], share[kept], free_pair[kept]
        if not len(row):
            break
        if curves is None:
            curves = _Curves(group, room_w, weight, n_group)
        at, free_of = row[free_pair], of[free_pair]
        goal_w = np.where(tight, np.maximum(left_w - (carried_w - full_w), 0.0), 0.0)
        reached = _solve(curves, _Links(at, free_of, share[free_pair]), goal_w, full_w, least)
        ripe = tight & (reached <= _least_beside(reached, at, free_of, n_row, n_group))
        mine = ripe[at]
        np.minimum.at(level, free_of[mine], reached[at[mine]])
        new = np.flatnonzero(np.bincount(free_of[mine], minlength=n_group))
        free[new] = False
        power_w[new] = curves.at(new, level[new])[0]
        least = np.where(tight, reached, 0.0)
    return level


class _Links(NamedTuple):
    """Pairs [k] of a row and a group with a share in it."""

    row: I64
    group: I64
    share: F64


def _solve(curves: _Curves, links: _Links, goal_w: F64, full_w: F64, least: F64) -> F64:
    """The level at which each row of these pairs alone is full [n_row], and at least `least`.

    Newton from below on a concave sum of lines, which never oversteps. `full_w` [n_row] is their sum at the
    top, and above the goal.
    """
    n_row, (at, of, share) = len(goal_w), links

    def sums(level: F64) -> tuple[F64, F64]:
        power_w, slope = curves.at(of, level[at])
        sum_w, rise = (np.bincount(at, share * x, n_row).astype(np.float64) for x in (power_w, slope))
        return sum_w, rise

    # Where the chord reaches the goal the sum has passed it; the tangent there leads back to below
    level = curves.top * np.divide(goal_w, full_w, out=np.zeros(n_row), where=full_w > 0.0)
    sum_w, rise = sums(level)
    level += np.divide(goal_w - sum_w, rise, out=np.full(n_row, -np.inf), where=rise > 0.0)
    level = np.maximum(level, least)
    for _step in range(MOST_STEPS):
        sum_w, rise = sums(level)
        step = np.divide(goal_w - sum_w, rise, out=np.zeros(n_row), where=rise > 0.0)
        moved = step > ROUNDING * level
        if not moved.any():
            break
        level += np.where(moved, step, 0.0)
        going = moved[at]
        if 2 * np.count_nonzero(going) < len(at):  # most have arrived: ask only for the others
            at, of, share = at[going], of[going], share[going]
    return level


def _least_beside(reached: F64, at: I64, of: I64, n_row: int, n_group: int) -> F64:
    """The lowest level of any tight row over one of the groups of each row [n_row]."""
    of_group = np.full(n_group, np.inf)
    np.minimum.at(of_group, of, reached[at])
    out = np.full(n_row, np.inf)
    np.minimum.at(out, at, of_group[of])
    return out
