"""A replay of recorded failures: what each rule of saving would have left a job of its time, side by side.

Rules under test: `live`, the plan from the rate known then of exactly the nodes held, with hysteresis.
Beside: fixed 30, 60 and 120 min; Young with one rate for all nodes, the one known at the start and, favoured,
that of the whole log; an oracle that knows how often this very job, or the fleet, is struck in the four weeks
around each instant; and the constant interval that turns out best. All see the same strikes and the same
costs. Part of the shell; NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from models.faultlog import FaultLog
from policies.checkpoint_time import best, young_s
from twin.app.checkpoint_account import Costs, run
from twin.app.checkpoint_jobs import Life
from twin.app.checkpoint_known import DAY_S, Known, known
from twin.app.checkpoint_live import live
from twin.frame import F64, I64

LIVE, EVERY, BEST = "live", "live_no_hysteresis", "best_constant"
ORACLES = ("oracle_job", "oracle_fleet")
YOUNGS = ("young_start", "young_whole")
FIXED = {"fixed_30_min": 1800.0, "fixed_60_min": 3600.0, "fixed_120_min": 7200.0}
RULES = (LIVE, EVERY, *ORACLES, *YOUNGS, *FIXED)
WINDOW_D = 28.0  # around an instant, in which an oracle counts strikes. source: estimate
GRID_S = np.geomspace(60.0, 7.0 * DAY_S, 73)  # constants to choose the best of in hindsight


class Replayed(NamedTuple):
    """Of one size of job: days [n_day]; wall_s [n_day]; useful_s, saves [n_day, n_rule] with BEST at the end.

    strikes: of all its jobs; changes: of the interval in force, by LIVE and EVERY; best_s: the best constant.
    interval_s [n_rule]: medians over time.
    """

    size: int
    jobs: int
    days: F64
    wall_s: F64
    useful_s: F64
    saves: F64
    strikes: int
    changes: tuple[int, int]
    best_s: float
    interval_s: F64

    def ettr(self) -> F64:
        """Share of time that counts, by rule [n_rule]."""
        out: F64 = self.useful_s.sum(axis=0) / self.wall_s.sum()
        return out


class Young(NamedTuple):
    """Failures per node and second that Young's rule takes for granted: of the log so far; of all of it."""

    start_per_s: float
    whole_per_s: float


def constant_rates(log: FaultLog, from_d: float) -> Young:
    """Faults over node days that were up. A log without a fault before `from_d` is taken to have had one."""
    seen = log.known_at(from_d)
    return Young(_rate(seen, from_d), _rate(log, log.until_d))


def _rate(log: FaultLog, day: float) -> float:
    up_d = log.n * (day - log.begin_d) - float(log.down_d(day).sum())
    return max(log.k, 1) / (max(up_d, 1.0) * DAY_S)


def replay(
    log: FaultLog,
    lives: Sequence[Life],
    costs: Costs,
    facts: Known | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[Replayed, ...]:
    """Every job through the log, from the day on which it was placed; one result per size.

    `facts`: what was known when, if it was worked out before. Raises LookAhead, ConfigError.
    """
    from_d = lives[0].begin_d
    if facts is None:
        facts = known(log, from_d, lambda share: progress(0.7 * share))
    counts = np.zeros((len(lives), len(facts.days)))
    rate_per_s, shape = np.zeros_like(counts), np.zeros_like(counts)
    for i, life in enumerate(lives):
        held = life.hold[life.held_at(facts.days)]
        counts[i] = held.sum(axis=1)
        rate_per_s[i], shape[i] = facts.of(held)
    ours = live(facts.days, rate_per_s, shape, costs)
    young = constant_rates(log, from_d)
    parts: dict[int, list[_Part]] = {}
    for i, life in enumerate(lives):
        columns = [
            ours.interval_s[i],
            ours.planned_s[i],
            *_rivals(log, life, facts.days, counts[i], costs, young),
        ]
        part = _one(life, facts.days, np.stack(columns, axis=1), costs)
        changes = int(ours.changes[i]), int(ours.planned_changes[i])
        parts.setdefault(life.size, []).append(part._replace(changes=changes))
        progress(0.7 + 0.3 * (i + 1) / len(lives))
    return tuple(_joined(size, found) for size, found in parts.items())


class _Part(NamedTuple):
    days: F64
    wall_s: F64
    useful_s: F64
    saves: F64
    strikes: int
    changes: tuple[int, int]
    interval_s: F64


def _rivals(log: FaultLog, life: Life, days: F64, count: F64, costs: Costs, young: Young) -> list[F64]:
    """The intervals of the rules beside ours, in their order in RULES, and of the grid [n_instant] each."""
    own = realised(life.strike_d, days, life.begin_d, life.end_d)
    whole = realised(log.start_d, days, life.begin_d, life.end_d) * count / log.n
    out = [_exact(costs, own), _exact(costs, whole)]
    out += [young_s(costs.save_s, 1.0 / np.maximum(rate * count, 1e-15)) for rate in young]
    return out + [np.full(len(days), interval_s) for interval_s in (*FIXED.values(), *GRID_S)]


def realised(strike_d: F64, days: F64, begin_d: float, end_d: float) -> F64:
    """Strikes per second within WINDOW_D around each instant, those to come included [n_instant].

    Half a strike is added, so that a quiet month is no promise of eternity; near the ends the window is what
    there is of it.
    """
    low, high = np.maximum(days - WINDOW_D / 2, begin_d), np.minimum(days + WINDOW_D / 2, end_d)
    count = np.searchsorted(strike_d, high, side="right") - np.searchsorted(strike_d, low, side="left")
    out: F64 = (count + 0.5) / (np.maximum(high - low, 1e-6) * DAY_S)
    return out


def _exact(costs: Costs, rate_per_s: F64) -> F64:
    return best(costs.save_s, costs.restart_s, 1.0 / rate_per_s, costs.flush_s)[0]


def _one(life: Life, days: F64, interval_s: F64, costs: Costs) -> _Part:
    interval_s = np.maximum(interval_s, costs.flush_s)
    edge_d = np.append(days, life.end_d)
    strike = np.isin(edge_d[1:], life.strike_d)
    strike[-1] = False  # the log ends there, and with it the job
    course = run(edge_d * DAY_S, strike, interval_s, costs)
    place = np.floor(days).astype(np.int64)
    place -= place[0]
    n_day = int(place[-1]) + 1
    return _Part(
        np.floor(days[0]) + np.arange(n_day), np.bincount(place, course.length_s, n_day).astype(np.float64),
        _by_day(place, n_day, course.useful_s), _by_day(place, n_day, course.saves), int(strike.sum()),
        (0, 0), np.median(interval_s, axis=0),
    )  # fmt: skip


def _by_day(place: I64, n_day: int, amount: F64) -> F64:
    out = np.zeros((n_day, amount.shape[1]))
    np.add.at(out, place, amount)
    return out


def _joined(size: int, parts: Sequence[_Part]) -> Replayed:
    """All jobs of a size; of the grid the interval that kept most of their time is all that stays."""
    useful_s = sum(part.useful_s for part in parts)
    saves = sum(part.saves for part in parts)
    assert not isinstance(useful_s, int)
    assert not isinstance(saves, int)
    n = len(RULES)
    best_at = int(np.argmax(useful_s[:, n:].sum(axis=0)))
    keep = [*range(n), n + best_at]
    return Replayed(
        size, len(parts), parts[0].days, np.sum([part.wall_s for part in parts], axis=0),
        useful_s[:, keep], saves[:, keep], sum(part.strikes for part in parts),
        (sum(part.changes[0] for part in parts), sum(part.changes[1] for part in parts)),
        float(GRID_S[best_at]), np.median([part.interval_s[keep] for part in parts], axis=0),
    )  # fmt: skip
