"""Synthetic jobs on a recorded fleet: which nodes each holds, and when a failure of one of them strikes it.

A job of n nodes is placed on nodes drawn evenly from those that are up, by its own seed, and runs to the end
of the log. A fault of a node that it holds strikes it: the node leaves, another that is up and that the
job does not hold is drawn in its place; the rest stay. Where too few are up, the job goes on with those
there are, and fills up at its next strike. Faults of several of its nodes at one instant are one strike.
Jobs do not see each other: each has the fleet to itself, so that one log serves many. Which nodes fail when
does not depend on saves, so that every policy is struck alike. Part of the shell, for commands that run once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.faultlog import FaultLog
from twin.errors import ConfigError
from twin.frame import F64, I64, Bool

SIZES = (8, 16, 32, 64, 128, 256, 400)  # servers of a job
PLACED = 16  # jobs of each size. source: estimate
MOST_JOBS = 256
SEED = 9


class Life(NamedTuple):
    """One job from `begin_d` to `end_d`.

    instants [k]: days of strikes, ascending; hold [k + 1, n_node]: nodes held from the begin, and after each.
    """

    size: int
    begin_d: float
    end_d: float
    strike_d: F64
    hold: Bool

    def held_at(self, days: F64) -> I64:
        """Row of `hold` in force on each of these days, a strike's own instant included [n_day]."""
        return np.searchsorted(self.strike_d, days, side="right")


def placed(
    log: FaultLog, begin_d: float, sizes: tuple[int, ...] = SIZES, per_size: int = PLACED, seed: int = SEED
) -> tuple[Life, ...]:
    """`per_size` jobs of each size that the fleet has room for; one alone of a job of the whole fleet.

    Raises ConfigError where none fits.
    """
    fitting = [size for size in sizes if size <= log.n]
    if not fitting:
        raise ConfigError(f"--sizes: expected a job of at most {log.n} nodes, the fleet's size")
    counts = [(size, 1 if size == log.n else per_size) for size in fitting]
    if sum(count for _, count in counts) > MOST_JOBS:
        raise ConfigError(f"{sum(c for _, c in counts)} jobs: expected at most {MOST_JOBS}")
    return tuple(
        life(log, size, begin_d, (seed, size, which)) for size, count in counts for which in range(count)
    )


def life(log: FaultLog, size: int, begin_d: float, seed: tuple[int, ...]) -> Life:
    """One job that is placed on the day `begin_d` and runs to the end of the log."""
    rng = np.random.default_rng(seed)
    first = int(np.searchsorted(log.start_d, begin_d, side="right"))
    down = _down(log, begin_d)
    held = np.zeros(log.n, bool)
    _fill(held, ~down, size, rng)
    strikes, holds = [], [held.copy()]
    at = first
    while at < log.k:
        day = float(log.start_d[at])
        after = int(np.searchsorted(log.start_d, day, side="right"))
        struck = log.node[at:after]
        if held[struck].any():
            held[struck] = False
            _fill(held, ~_down(log, day), size, rng)
            strikes.append(day)
            holds.append(held.copy())
        at = after
    return Life(size, begin_d, log.until_d, np.array(strikes), np.array(holds))


def _down(log: FaultLog, day: float) -> Bool:
    """Nodes under repair on this day [n], those that fail at its very instant included."""
    open_ = (log.start_d <= day) & (log.end_d > day)
    # A repair that took no time at all still took the node away from its job.
    open_ |= log.start_d == day
    out = np.zeros(log.n, bool)
    out[log.node[open_]] = True
    return out


def _fill(held: Bool, up: Bool, size: int, rng: np.random.Generator) -> None:
    """Draw nodes that are up until the job holds as many as it wants, or there are no more."""
    free = np.flatnonzero(up & ~held)
    lacking = min(size - int(held.sum()), len(free))
    if lacking > 0:
        held[rng.choice(free, lacking, replace=False)] = True
