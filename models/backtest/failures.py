"""Backtest of failure forecasts: the forecast of each node on each day, as a live daemon would make it.

Each day the forecasters see the log as known that day and no more. Every two weeks they are fitted again,
counts are mapped to the shares that came true so far, and a champion is chosen: the self-exciting baseline,
unless the decayed count's loss on forecasts it really issued is lower beyond chance. Each day the baseline is
moved to the level of the faults that came of late. Every run audits itself for a look ahead: some days are
done again with nonsense in place of all that came later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.backtest.audit import LookAhead, differ
from models.failure import (
    FaultLog,
    Isotonic,
    SharedAndOwn,
    at_level,
    decayed_counts,
    fleet_forecast,
    fleet_forecasts,
    level,
    scrambled,
    useful_ends,
)
from models.moving_block import interval
from twin.catalogue import F64, I64, Bool

REFERENCE, BASELINE = METHODS = ("decayed_count", "self_exciting")
CHAMPION = "champion"
REFIT_D = 14  # days between fits. source: estimate
FIRST_D = 14  # days after the log's begin that the first forecast is made. source: estimate
LEVEL_DAYS = 120  # source: estimate; six half-lives
LEAST_SPANS = 10  # that do not overlap, before another champion is chosen. source: estimate
COUNT_SPAN_D = 14  # of the fleet's number of faults, beside the horizons
AUDITED = (0.1, 0.6, 0.97)  # where in the scored part the look ahead is checked
LEAST_LOSS_P = 1e-4  # a probability of 0 would lose without bound. source: estimate


@dataclass(frozen=True)
class DayForecast:
    """One day's words. raw [n_method, n_span, n]; p likewise, with the champion behind the methods.

    chosen [n_span]: the champion's place in METHODS; next_day [n]: of the baseline within a day, before it is
    moved to the level of late.
    """

    raw: F64
    p: F64
    chosen: tuple[int, ...]
    next_day: F64


@dataclass
class FailureRun:
    """Memory from day to day: forecasts issued, the last fits and maps."""

    n: int
    spans_d: tuple[float, ...]
    seed: int
    days: list[float] = field(default_factory=list)
    said: list[DayForecast] = field(default_factory=list)
    fitted: float = -np.inf

    def __post_init__(self) -> None:
        self.base = SharedAndOwn()
        self.maps: list[Isotonic | None] = [None] * len(self.spans_d)  # of the decayed count
        # By span: the decayed count's loss less the baseline's, on each day whose span is over.
        self.behind: list[list[float]] = [[] for _ in self.spans_d]
        self.chosen = (METHODS.index(BASELINE),) * len(self.spans_d)

    def speak(self, known: FaultLog, day: float) -> DayForecast:
        """Fit if that is due, and say. Reads forecasts of days before `day` only."""
        if day - self.fitted >= REFIT_D:
            self._learn(known, day)
        count = decayed_counts(known, day)
        next_day, *own = self.base.predict(known, day, (1.0, *self.spans_d))
        raw = np.stack([np.tile(count, (len(self.spans_d), 1)), own])
        rate, factor = known.k / (known.n * max(day - known.begin_d, 1.0)), self._level(known, day)
        p = np.empty((len(METHODS) + 1, *raw.shape[1:]))
        p[1] = at_level(raw[1], factor)
        for i, (span_d, counted) in enumerate(zip(self.spans_d, self.maps, strict=True)):
            p[0, i] = counted(count) if counted is not None else -np.expm1(-rate * span_d)
            p[-1, i] = p[self.chosen[i], i]
        return DayForecast(raw, p, self.chosen, next_day)

    def _level(self, known: FaultLog, day: float) -> float:
        """Faults that came for each that the baseline expected, on the last days that are over."""
        days = np.array(self.days)
        over = np.flatnonzero((days > day - LEVEL_DAYS) & (days <= day - 1.0))
        if not len(over):
            return 1.0
        up = known.up(days[over])
        came = up & (known.next_start(days[over]) <= days[over, None] + 1.0)
        expected = up * np.array([self.said[j].next_day for j in over])
        return level(expected.sum(axis=1), came.sum(axis=1).astype(np.float64), day - days[over])

    def keep(self, day: float, said: DayForecast) -> None:
        self.days.append(day)
        self.said.append(said)

    def _learn(self, known: FaultLog, day: float) -> None:
        self.fitted = day
        self.base.fit(known, day)
        days = np.array(self.days)
        days = days[days < day]
        if not len(days):
            return
        up, later = known.up(days), known.next_start(days)
        chosen = []
        for i, span_d in enumerate(self.spans_d):
            over = int(np.searchsorted(days, day - span_d, side="right"))
            case, y = up[:over], later[:over] <= days[:over, None] + span_d
            if over:
                raw = np.array([said.raw[0, i] for said in self.said[:over]])[case]
                self.maps[i] = Isotonic(raw, y[case].astype(np.float64))
            chosen.append(self._champion(i, case, y))
        self.chosen = tuple(chosen)

    def _champion(self, i: int, case: Bool, y: Bool) -> int:
        """The decayed count if it lost less so far than the baseline, beyond chance."""
        behind = self.behind[i]
        for j in range(len(behind), len(y)):
            other, base = (daily_loss(p[i][case[j]], y[j][case[j]]) for p in self.said[j].p[:2])
            behind.append(other - base)
        block = int(np.ceil(self.spans_d[i]))
        _, high = interval(np.array(behind[: len(y)]), block, self.seed)
        sure = high < 0.0 and len(y) >= LEAST_SPANS * block
        return METHODS.index(REFERENCE if sure else BASELINE)


def daily_loss(p: F64, y: Bool) -> float:
    """Logarithmic loss per node; 0 without any node."""
    p = np.clip(p, LEAST_LOSS_P, 1.0 - LEAST_LOSS_P)
    return float(-np.where(y, np.log(p), np.log1p(-p)).mean()) if len(p) else 0.0


@dataclass(frozen=True)
class IssuedForecasts:
    """One horizon's forecasts from the scored days, and what came.

    days [n_day]; up, y [n_day, n] bool; next_d [n_day, n]: days until the next fault; p, rank: by method
    [n_day, n], `rank` is what nodes are ordered by; chosen: the champion's name each day.
    """

    span_d: float
    days: F64
    up: Bool
    y: Bool
    next_d: F64
    p: dict[str, F64]
    rank: dict[str, F64]
    chosen: tuple[str, ...]


@dataclass(frozen=True)
class CountForecast:
    """Numbers of faults in the span after each scored day: forecast, interval, and what came [n_day].

    low, high: NaN where no interval is given.
    """

    span_d: int
    days: F64
    mean: F64
    low: F64
    high: F64
    actual: F64


@dataclass(frozen=True)
class FailureResult:
    """A whole backtest."""

    log: FaultLog
    horizons: tuple[IssuedForecasts, ...]
    counted: tuple[CountForecast, ...]
    days_checked: int


def backtest_failures(
    log: FaultLog,
    spans_d: Sequence[float],
    from_d: float,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
    known: Callable[[FaultLog, float], FaultLog] = FaultLog.known_at,
) -> FailureResult:
    """Return forecasts from each whole day from `from_d` on with an outcome in the log.

    `known` is how the past is looked up: replaced in tests that plant a look ahead. Raises LookAhead.
    """
    spans = tuple(float(span_d) for span_d in spans_d)
    count_spans = tuple(sorted({COUNT_SPAN_D, *(int(s) for s in spans if s >= 1.0)}))
    run = FailureRun(log.n, spans, seed)
    first = np.ceil(min(log.begin_d + FIRST_D, from_d))
    days = np.arange(first, np.floor(log.until_d) + 1.0)
    days = days[days + min(*spans, COUNT_SPAN_D) <= log.until_d]
    scored = np.flatnonzero(days >= from_d)
    checked = {int(scored[int(share * (len(scored) - 1))]) for share in AUDITED} if len(scored) else set()
    for i, day in enumerate(days):
        if i in checked:
            run.fitted = -np.inf  # so that the fit, the maps and the choice are audited too
        said = run.speak(known(log, day), day)
        if i in checked:
            run.fitted = -np.inf
            other = known(scrambled(log, day), day)
            check(day, said, run.speak(other, day))
            check_counts(day, known(log, day), other, count_spans)
        run.keep(day, said)
        progress((i + 1) / len(days))
    return _gathered(log, run, days, scored, count_spans, len(checked))


def check(day: float, said: DayForecast, again: DayForecast) -> None:
    """Raise LookAhead if two sayings from one day are not the same."""
    names = (*METHODS, CHAMPION)
    for m, name in enumerate(names):
        if differ(said.p[m], again.p[m]).any() or (
            m < len(METHODS) and differ(said.raw[m], again.raw[m]).any()
        ):
            raise LookAhead(name, int(day), "later events became others")
    if said.chosen != again.chosen:
        raise LookAhead("the choice", int(day), "later events became others")


def check_counts(day: float, known: FaultLog, other: FaultLog, spans_d: Sequence[int]) -> None:
    """Raise LookAhead if two logs known on one day give two forecasts of the fleet's numbers of faults."""
    daily = daily_faults(known, day), daily_faults(other, day)
    if any(differ(*(np.array(fleet_forecast(d, span_d)) for d in daily)).any() for span_d in spans_d):
        raise LookAhead("the fleet's rate", int(day), "later events became others")


def daily_faults(log: FaultLog, day: float) -> F64:
    """Faults of each whole day from the log's begin to this day [n_day]."""
    return log.counts(np.arange(np.ceil(log.begin_d), day), 1.0)


def _gathered(
    log: FaultLog, run: FailureRun, days: F64, scored: I64, count_spans_d: Sequence[int], checked: int
) -> FailureResult:
    up, later = log.up(days), log.next_start(days)
    horizons = []
    for i, span_d in enumerate(run.spans_d):
        at = scored[days[scored] + span_d <= log.until_d]
        p = {name: np.array([run.said[j].p[m, i] for j in at]) for m, name in enumerate((*METHODS, CHAMPION))}
        # Ranked by the count itself: its map has steps on which different counts are alike.
        rank = {**p, REFERENCE: np.array([run.said[j].raw[0, i] for j in at])}
        next_d = later[at] - days[at, None]
        chosen = tuple(METHODS[run.said[j].chosen[i]] for j in at)
        horizons.append(IssuedForecasts(span_d, days[at], up[at], next_d <= span_d, next_d, p, rank, chosen))
    counted = []
    daily = daily_faults(log, float(days[-1]) if len(days) else log.begin_d)
    for span in count_spans_d:
        at = scored[days[scored] + span <= log.until_d]
        # Of a day, what its past and nothing else gives: one pass for all days.
        said = fleet_forecasts(daily, span)[(days[at] - np.ceil(log.begin_d)).astype(np.int64) - 1]
        low, high = np.array([useful_ends(*row) for row in said.tolist()]).reshape(-1, 2).T
        counted.append(CountForecast(span, days[at], said[:, 0], low, high, log.counts(days[at], span)))
    return FailureResult(log, tuple(horizons), tuple(counted), checked)
