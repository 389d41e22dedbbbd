"""Replay of recorded failures: the effective training time of synthetic jobs under several rules of saving.

Jobs. A job of n nodes is placed on nodes drawn evenly from those that are up, by its own seed, and runs to
the end of the log. A fault of one of its nodes strikes it: another node that is up takes the place; where
too few are up, the job goes on with those there are. Jobs do not see each other, and strikes do not depend
on saves, so every rule is struck alike.

Time. From a strike on the job restarts for `restart_s`; then it works until its interval is over, stands
still for `save_s`, and works on. A save is durable `flush_s` after that; until then no other save begins. A
strike takes all work that no durable save holds. Exact: no steps in time.

Rules. `live` is the plan from the rate known at that time of exactly the nodes held, changed only where the
policy would change it. Beside it: fixed intervals; Young with one rate for all nodes, the one known at the
start and that of the whole log; an oracle that knows how often this job, or the fleet, is struck in the
four weeks around each instant; and the constant interval that turns out best. Rates are known as the live
model's baseline knows them: the Gamma-Poisson rate and failures that excite failures, fitted anew each
week, audited for look-ahead in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from models.backtest import LookAhead, differ
from models.failure import FaultLog, SelfExciting, common_causes, individual_faults, rates, scrambled
from policies.checkpointing import (
    CHANGE_S,
    LEAST_GAIN,
    LONG_GAIN,
    LONG_S,
    MOST_S,
    PRESSING_GAIN,
    SaveTerms,
    best_interval,
    best_plan,
    ettr_at,
    recent_factor,
    rounded_interval,
    young_s,
)
from twin.catalogue import F64, I64, Bool, ConfigError


class SaveCosts(NamedTuple):
    """True costs of saves and restarts, seconds."""

    save_s: float
    restart_s: float
    flush_s: float = 0.0


class SaveOutcome(NamedTuple):
    """Outcome of each rule in each piece [n_piece, n_rule]: work done less work lost; saves begun.

    length_s [n_piece]. Work that a strike takes is taken from the piece that it ends, if it was done before.
    """

    length_s: F64
    useful_s: F64
    saves: F64


class Predictions(NamedTuple):
    """A failure is predicted at the begin of a piece [n_piece], to rules that heed it [n_rule].

    They save at once where at least `least_s` of work is at risk and no other save is under way.
    """

    rings: Bool
    heeds: Bool
    least_s: float


def simulate_saves(
    edge_s: F64, strike: Bool, interval_s: F64, costs: SaveCosts, alarms: Predictions | None = None
) -> SaveOutcome:
    """Go through the pieces.

    edge_s [n_piece + 1]: their ends, ascending; strike [n_piece]: whether a failure ends a piece; interval_s
    [n_piece, n_rule], `inf`: no save.
    """
    useful, saves = np.zeros_like(interval_s), np.zeros_like(interval_s)
    length_s = np.diff(edge_s)
    ages = _Ages(interval_s.shape[1], costs)
    restart_s = 0.0
    for i, left_s in enumerate(length_s.tolist()):
        if restart_s > 0.0:
            spent_s = min(restart_s, left_s)
            restart_s, left_s = restart_s - spent_s, left_s - spent_s
        elif alarms is not None and alarms.rings[i]:
            saves[i] += ages.ahead(alarms)
        if left_s > 0.0:
            done_s, begun = ages.work(left_s, interval_s[i])
            useful[i] += done_s
            saves[i] += begun
        if strike[i]:
            useful[i] -= ages.lose()
            restart_s = costs.restart_s
    return SaveOutcome(length_s, useful, saves)


class _Ages:
    """Each rule's place between two saves [n_rule]: seconds since the last one began, and what it holds."""

    def __init__(self, n_rule: int, costs: SaveCosts) -> None:
        self.save_s, self.flush_s = costs.save_s, costs.flush_s
        self.since_s = np.full(n_rule, costs.save_s)  # as if a save had just ended
        self.holds_s = np.zeros(n_rule)  # of work at risk until that save is durable

    def ahead(self, alarms: Predictions) -> F64:
        """Save now where enough work is at risk and the last save is durable. Return the saves [n_rule]."""
        durable = (self.since_s >= self.save_s + self.flush_s) | (self.holds_s == 0.0)
        due = alarms.heeds & durable & (self.since_s - self.save_s >= max(alarms.least_s, 1e-9))
        self._begin(due)
        out: F64 = due.astype(np.float64)
        return out

    def _begin(self, due: Bool) -> None:
        self.holds_s = np.where(due, self.since_s - self.save_s, self.holds_s)
        self.since_s = np.where(due, 0.0, self.since_s)

    def work(self, span_s: float, interval_s: F64) -> tuple[F64, F64]:
        """(work done, saves begun) over a span under these intervals [n_rule]."""
        # Two saves never overlap: the next waits until the last is durable.
        interval_s = np.maximum(interval_s, self.flush_s)
        overdue = self.since_s - self.save_s >= interval_s
        self._begin(overdue)
        period_s = self.save_s + interval_s
        before_s = np.maximum(self.since_s - self.save_s, 0.0)
        with np.errstate(invalid="ignore"):
            turns = np.floor((self.since_s + span_s) / period_s)
            whole_s = np.where(turns > 0, turns * interval_s, 0.0)
            past_s = np.where(turns > 0, turns * period_s, 0.0)
        self.since_s = np.maximum(self.since_s + span_s - past_s, 0.0)
        self.holds_s = np.where(turns > 0, interval_s, self.holds_s)
        done_s = whole_s + np.maximum(self.since_s - self.save_s, 0.0) - before_s
        return done_s, turns + overdue

    def lose(self) -> F64:
        """A strike: work at risk [n_rule], which is gone; the job goes on from its last durable save."""
        lost_s = np.maximum(self.since_s - self.save_s, 0.0)
        lost_s += np.where(self.since_s < self.save_s + self.flush_s, self.holds_s, 0.0)
        self.since_s = np.full_like(self.since_s, self.save_s)
        self.holds_s = np.zeros_like(self.holds_s)
        return lost_s


SIZES = (8, 16, 32, 64, 128, 256, 400)  # servers of a job
PLACED = 16  # jobs of each size. source: estimate
MOST_JOBS = 256
SEED = 9


class JobLife(NamedTuple):
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


def place_jobs(
    log: FaultLog, begin_d: float, sizes: tuple[int, ...] = SIZES, per_size: int = PLACED, seed: int = SEED
) -> tuple[JobLife, ...]:
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
        job_life(log, size, begin_d, (seed, size, which)) for size, count in counts for which in range(count)
    )


def job_life(log: FaultLog, size: int, begin_d: float, seed: tuple[int, ...]) -> JobLife:
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
    return JobLife(size, begin_d, log.until_d, np.array(strikes), np.array(holds))


def _down(log: FaultLog, day: float) -> Bool:
    """Nodes under repair on this day [n], including those that fail at that very time."""
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


SPAN_D = 1.0  # rates are means over the coming day, as far as a plan looks. source: estimate
REFIT_D = 7.0  # source: estimate; as in the backtest of failures
AUDITED = (0.1, 0.5, 0.97)  # where among the instants the look ahead is checked
MOST_INSTANTS = 20_000
DAY_S = 86_400.0


@dataclass(frozen=True)
class KnownRates:
    """At each instant: failures per day of each node [n_instant, n], the shape of the Gamma around each.

    days [n_instant], ascending; fleet_shape [n_instant]: of what all share; shock_per_d, shock_nodes
    [n_instant]: causes in common per day, and how many nodes each strikes; of_late [n_instant]: how many
    times as often as `per_d` says nodes fail of late.
    """

    days: F64
    per_d: F64
    own_shape: F64
    fleet_shape: F64
    shock_per_d: F64
    shock_nodes: F64
    of_late: F64

    def of(self, held: Bool) -> tuple[F64, F64]:
        """(failures per second, shape) of a job that holds these nodes at these instants [n_instant, n]."""
        own = np.where(held, self.per_d, 0.0)
        sum_d = own.sum(axis=1)
        spread = (own**2 / self.own_shape).sum(axis=1)
        # A cause in common strikes a job once, however many of its nodes it takes.
        share = np.clip(self.shock_nodes / max(held.shape[1], 1), 0.0, 1.0)
        struck = self.shock_per_d * -np.expm1(held.sum(axis=1) * np.log1p(-np.minimum(share, 1.0 - 1e-12)))
        with np.errstate(divide="ignore", invalid="ignore"):
            shape = 1.0 / (np.where(sum_d > 0, spread / sum_d**2, 0.0) + 1.0 / self.fleet_shape)
        return (self.of_late * sum_d + struck) / DAY_S, shape


def known_rates(
    log: FaultLog,
    from_d: float,
    progress: Callable[[float], None] = lambda _: None,
    look: Callable[[FaultLog, float], FaultLog] = FaultLog.known_at,
) -> KnownRates:
    """Rates from `from_d` on: each whole day, each fault. Raises LookAhead, and ConfigError for too many.

    `look` is how the past is looked up: replaced in tests that plant a look ahead.
    """
    later = log.start_d[log.start_d > from_d]
    days = np.unique(np.concatenate([[from_d], np.arange(np.floor(from_d) + 1.0, log.until_d), later]))
    days = days[days < log.until_d]
    if len(days) > MOST_INSTANTS:
        raise ConfigError(
            f"{len(days):,} days and faults to go through, expected at most {MOST_INSTANTS:,}: give a later "
            "--from"
        )
    checked = {int(share * (len(days) - 1)) for share in AUDITED}
    teacher, rows = _Teacher(), []
    for i, day in enumerate(days.tolist()):
        if i in checked:
            teacher.fitted_d = -np.inf  # so that the fit is audited too
        row = teacher.rates_on(look(log, day), day)
        if i in checked:
            teacher.fitted_d = -np.inf
            again = teacher.rates_on(look(scrambled(log, day), day), day)
            if any(differ(np.asarray(a), np.asarray(b)).any() for a, b in zip(row, again, strict=True)):
                raise LookAhead("the rate of failures", int(day), "later events became others")
        rows.append(row)
        progress((i + 1) / len(days))
    columns = [np.array(part) for part in zip(*rows, strict=True)]
    return KnownRates(days, *columns)


Row = tuple[F64, F64, float, float, float, float]


class _Teacher:
    """Fits once a week, and says what is known of a day."""

    def __init__(self) -> None:
        self.fitted_d, self.theta, self.faults = -np.inf, np.zeros(0), 0.0

    def rates_on(self, seen: FaultLog, day: float) -> Row:
        own = individual_faults(seen)
        past = past_of(seen, own, day)
        if day - self.fitted_d >= REFIT_D:
            self.fitted_d, self.faults = day, float(own.k)
            self.theta = SelfExciting().fit(own, day)["theta"]
        fleet, fleet_shape = rates.fleet_posterior(past)
        hazard = rates.baseline(past, (SPAN_D,), self.theta, self.faults).hazard[0]
        count = own.per_node(np.ones(own.k))
        own_shape = np.maximum(fleet * rates.OWN_DAYS + count, rates.LEAST_SHAPE)
        causes = len(past.shock_d)
        watched_d = max(day - seen.begin_d, rates.PRIOR_NODE_DAYS / max(seen.n, 1))
        struck = float(past.shock_nodes.mean()) if causes else 0.0
        per_d = hazard / SPAN_D
        # A node under repair has no forecast, and the policy counts none for it.
        lately = recent_factor(day - own.start_d, per_d[~past.down], day - seen.begin_d)
        return per_d, own_shape, fleet_shape, causes / watched_d, struck, lately


def past_of(seen: FaultLog, own: FaultLog, day: float) -> rates.FailureHistory:
    """The log as the live model's rates take it; its clock begins with the watch."""
    shift = FaultLog(
        own.n,
        own.node,
        own.start_d - own.begin_d,
        own.end_d - own.begin_d,
        own.kind,
        own.classes,
        0.0,
        own.until_d - own.begin_d,
    )
    down = np.zeros(seen.n, bool)
    down[seen.node[seen.end_d > day]] = True
    found = common_causes(seen)
    return rates.FailureHistory(
        shift,
        down,
        np.array([s.day - seen.begin_d for s in found]),
        np.array([float(s.nodes) for s in found]),
        seen.start_d - seen.begin_d,
        day - seen.begin_d,
    )


AT_ONCE = 20_000  # plans worked out together


class LiveIntervals(NamedTuple):
    """Intervals in force and as planned each time [n_job, n_instant]; changes of each [n_job]."""

    interval_s: F64
    planned_s: F64
    changes: F64
    planned_changes: F64


def live_intervals(days: F64, rate_per_s: F64, shape: F64, costs: SaveCosts) -> LiveIntervals:
    """From beliefs [n_job, n_instant] at these days [n_instant]."""
    planned = np.concatenate(
        [
            best_plan(
                _terms(rate_per_s.ravel()[a : a + AT_ONCE], shape.ravel()[a : a + AT_ONCE], costs)
            ).interval_s
            for a in range(0, rate_per_s.size, AT_ONCE)
        ]
    )
    planned = np.minimum(planned, MOST_S).reshape(rate_per_s.shape)
    wanted = rounded_interval(planned, np.full(planned.shape, costs.flush_s))
    held, changed_d = wanted.copy(), np.full(len(wanted), days[0])
    for t in range(1, planned.shape[1]):
        terms = _terms(rate_per_s[:, t], shape[:, t], costs)
        gain = ettr_at(terms, wanted[:, t]) - ettr_at(terms, held[:, t - 1])
        rested_s = (days[t] - changed_d) * DAY_S
        enough = (gain >= LEAST_GAIN) & ((rested_s >= CHANGE_S) | (gain >= PRESSING_GAIN))
        enough |= (rested_s >= LONG_S) & (gain >= LONG_GAIN)
        held[:, t] = np.where(enough, wanted[:, t], held[:, t - 1])
        changed_d = np.where(held[:, t] != held[:, t - 1], days[t], changed_d)
    return LiveIntervals(held, planned, _changes(held), _changes(planned))


def _terms(rate_per_s: F64, shape: F64, costs: SaveCosts) -> SaveTerms:
    n = len(rate_per_s)
    none, zero = np.full(n, np.nan), np.zeros(n)
    return SaveTerms(
        np.full(n, costs.save_s),
        np.full(n, costs.flush_s),
        np.full(n, costs.restart_s),
        none,
        none,
        shape,
        rate_per_s,
        zero,
    )


def _changes(interval_s: F64) -> F64:
    """Number of changes of each job's interval [n_job]; a change of a hundredth is none."""
    ratio = interval_s[:, 1:] / interval_s[:, :-1]
    out: F64 = (np.abs(ratio - 1.0) > 0.01).sum(axis=1).astype(np.float64)
    return out


LIVE, EVERY, BEST = "live", "live_no_hysteresis", "best_constant"
ORACLES = ("oracle_job", "oracle_fleet")
YOUNGS = ("young_start", "young_whole")
FIXED = {"fixed_30_min": 1800.0, "fixed_60_min": 3600.0, "fixed_120_min": 7200.0}
RULES = (LIVE, EVERY, *ORACLES, *YOUNGS, *FIXED)
WINDOW_D = 28.0  # around an instant, in which an oracle counts strikes. source: estimate
GRID_S = np.geomspace(60.0, 7.0 * DAY_S, 73)  # constants to choose the best of in hindsight


@dataclass(frozen=True)
class ReplayResult:
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
    lives: Sequence[JobLife],
    costs: SaveCosts,
    facts: KnownRates | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[ReplayResult, ...]:
    """Every job through the log, from the day on which it was placed; one result per size.

    `facts`: what was known when, if it was worked out before. Raises LookAhead, ConfigError.
    """
    from_d = lives[0].begin_d
    if facts is None:
        facts = known_rates(log, from_d, lambda share: progress(0.7 * share))
    counts = np.zeros((len(lives), len(facts.days)))
    rate_per_s, shape = np.zeros_like(counts), np.zeros_like(counts)
    for i, life in enumerate(lives):
        held = life.hold[life.held_at(facts.days)]
        counts[i] = held.sum(axis=1)
        rate_per_s[i], shape[i] = facts.of(held)
    ours = live_intervals(facts.days, rate_per_s, shape, costs)
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
        parts.setdefault(life.size, []).append(replace(part, changes=changes))
        progress(0.7 + 0.3 * (i + 1) / len(lives))
    return tuple(_joined(size, found) for size, found in parts.items())


@dataclass(frozen=True)
class _Part:
    days: F64
    wall_s: F64
    useful_s: F64
    saves: F64
    strikes: int
    changes: tuple[int, int]
    interval_s: F64


def _rivals(log: FaultLog, life: JobLife, days: F64, count: F64, costs: SaveCosts, young: Young) -> list[F64]:
    """The intervals of the rules beside ours, in their order in RULES, and of the grid [n_instant] each."""
    own = realised_rate(life.strike_d, days, life.begin_d, life.end_d)
    whole = realised_rate(log.start_d, days, life.begin_d, life.end_d) * count / log.n
    out = [_exact(costs, own), _exact(costs, whole)]
    out += [young_s(costs.save_s, 1.0 / np.maximum(rate * count, 1e-15)) for rate in young]
    return out + [np.full(len(days), interval_s) for interval_s in (*FIXED.values(), *GRID_S)]


def realised_rate(strike_d: F64, days: F64, begin_d: float, end_d: float) -> F64:
    """Strikes per second within WINDOW_D around each instant, those to come included [n_instant].

    Half a strike is added, so that a quiet month is no promise of eternity; near the ends the window is what
    there is of it.
    """
    low, high = np.maximum(days - WINDOW_D / 2, begin_d), np.minimum(days + WINDOW_D / 2, end_d)
    count = np.searchsorted(strike_d, high, side="right") - np.searchsorted(strike_d, low, side="left")
    out: F64 = (count + 0.5) / (np.maximum(high - low, 1e-6) * DAY_S)
    return out


def _exact(costs: SaveCosts, rate_per_s: F64) -> F64:
    return best_interval(costs.save_s, costs.restart_s, 1.0 / rate_per_s, costs.flush_s)[0]


def _one(life: JobLife, days: F64, interval_s: F64, costs: SaveCosts) -> _Part:
    interval_s = np.maximum(interval_s, costs.flush_s)
    edge_d = np.append(days, life.end_d)
    strike = np.isin(edge_d[1:], life.strike_d)
    strike[-1] = False  # the log ends there, and with it the job
    course = simulate_saves(edge_d * DAY_S, strike, interval_s, costs)
    place = np.floor(days).astype(np.int64)
    place -= place[0]
    n_day = int(place[-1]) + 1
    return _Part(
        days=np.floor(days[0]) + np.arange(n_day),
        wall_s=np.bincount(place, course.length_s, n_day).astype(np.float64),
        useful_s=_by_day(place, n_day, course.useful_s),
        saves=_by_day(place, n_day, course.saves),
        strikes=int(strike.sum()),
        changes=(0, 0),
        interval_s=np.median(interval_s, axis=0),
    )


def _by_day(place: I64, n_day: int, amount: F64) -> F64:
    out = np.zeros((n_day, amount.shape[1]))
    np.add.at(out, place, amount)
    return out


def _joined(size: int, parts: Sequence[_Part]) -> ReplayResult:
    """All jobs of a size; of the grid the interval that kept most of their time is all that stays."""
    useful_s = sum(part.useful_s for part in parts)
    saves = sum(part.saves for part in parts)
    assert not isinstance(useful_s, int)
    assert not isinstance(saves, int)
    n = len(RULES)
    best_at = int(np.argmax(useful_s[:, n:].sum(axis=0)))
    keep = [*range(n), n + best_at]
    return ReplayResult(
        size=size,
        jobs=len(parts),
        days=parts[0].days,
        wall_s=np.sum([part.wall_s for part in parts], axis=0),
        useful_s=useful_s[:, keep],
        saves=saves[:, keep],
        strikes=sum(part.strikes for part in parts),
        changes=(sum(part.changes[0] for part in parts), sum(part.changes[1] for part in parts)),
        best_s=float(GRID_S[best_at]),
        interval_s=np.median([part.interval_s[keep] for part in parts], axis=0),
    )
