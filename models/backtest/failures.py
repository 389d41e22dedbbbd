"""A backtest of failure forecasts: from each day, what would have been said of every node, had it been live.

Each day the forecasters see the log as known that day and no more. Once a week they are fitted again, their
probabilities are mapped to the shares that came true so far, and a champion is chosen: the self-exciting
baseline, unless a challenger's loss on forecasts it really issued is lower beyond chance. Every run audits
itself for a look ahead: some days are done again with nonsense in place of all that came later. Faults with a
cause in common teach the baseline and the hazard nothing of a node; their rate is added to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.backtest.audit import LookAhead, differ
from models.failure import (
    PRIOR,
    FaultLog,
    FleetForecast,
    Hazard,
    Isotonic,
    Logistic,
    SelfExciting,
    decayed_counts,
    either_probability,
    fleet_forecast,
    individual_faults,
    scrambled,
    shared_rate,
)
from models.moving_block import interval
from twin.catalogue import F64, Bool

REFERENCE, BASELINE, CHALLENGERS = "decayed_count", "self_exciting", ("hazard", "blend")
METHODS = (REFERENCE, BASELINE, *CHALLENGERS)
CHAMPION = "champion"
REFIT_D, REGROW_D = 7, 14  # days between fits of the baseline, and of the trees. source: estimate
FIRST_D = 14  # days after the log's begin that the first forecast is made. source: estimate
COUNT_SPAN_D = 14  # of the fleet's number of faults, beside the horizons
AUDITED = (0.1, 0.6, 0.97)  # where in the scored part the look ahead is checked
LEAST_LOSS_P = 1e-4  # a probability of 0 would lose without bound. source: estimate


@dataclass(frozen=True)
class DayForecast:
    """One day's words. raw [n_method, n_span, n]; p likewise, with the champion behind the methods.

    chosen [n_span]: the champion's place in METHODS; counts: by span of the fleet's numbers.
    """

    raw: F64
    p: F64
    chosen: tuple[int, ...]
    counts: tuple[FleetForecast, ...]


@dataclass
class FailureRun:
    """Memory from day to day: forecasts issued, the last fits and maps."""

    n: int
    spans_d: tuple[float, ...]
    count_spans_d: tuple[int, ...]
    seed: int
    days: list[float] = field(default_factory=list)
    said: list[DayForecast] = field(default_factory=list)
    fitted: float = -np.inf
    grown: float = -np.inf

    def __post_init__(self) -> None:
        self.base, self.hazard = SelfExciting(), Hazard(self.spans_d)
        self.maps: list[list[Callable[[F64], F64] | None]] = [[None] * len(self.spans_d) for _ in METHODS]
        self.chosen = (METHODS.index(BASELINE),) * len(self.spans_d)

    def speak(self, known: FaultLog, day: float) -> DayForecast:
        """Fit if that is due, and say. Reads forecasts of days before `day` only."""
        if day - self.fitted >= REFIT_D:
            self._learn(known, day)
        raw = np.zeros((len(METHODS), len(self.spans_d), self.n))
        raw[0] = decayed_counts(known, day)
        own, shared = individual_faults(known), shared_rate(known)
        both = (self.base.predict(own, day, self.spans_d), self.hazard.predict(own, day, self.spans_d))
        for m, p_own in enumerate(both, 1):
            raw[m] = [either_probability(p_own[i], shared, span_d) for i, span_d in enumerate(self.spans_d)]
        rate = known.k / (known.n * max(day - known.begin_d, 1.0))
        p = np.empty((len(METHODS) + 1, *raw.shape[1:]))
        for i, span_d in enumerate(self.spans_d):
            for m in range(len(METHODS) - 1):
                found = self.maps[m][i]
                if found is not None:
                    p[m, i] = found(raw[m, i])
                else:
                    p[m, i] = -np.expm1(-rate * span_d) if m == 0 else raw[m, i]
            raw[3, i] = p[3, i] = 0.5 * (p[1, i] + p[2, i])
            p[-1, i] = p[self.chosen[i], i]
        first = int(np.ceil(known.begin_d))
        daily = known.counts(np.arange(first, day), 1.0)
        counts = tuple(fleet_forecast(daily, span_d) for span_d in self.count_spans_d)
        return DayForecast(raw, p, self.chosen, counts)

    def keep(self, day: float, said: DayForecast) -> None:
        self.days.append(day)
        self.said.append(said)

    def _learn(self, known: FaultLog, day: float) -> None:
        self.fitted = day
        own = individual_faults(known)
        self.base.load(self.base.fit(own, day, self.seed))
        if day - self.grown >= REGROW_D:
            self.grown = day
            self.hazard.load(self.hazard.fit(own, day, self.seed))
        days = np.array(self.days)
        days = days[days < day]
        if not len(days):
            return
        up, later = known.up(days), known.next_start(days)
        chosen = []
        for i, span_d in enumerate(self.spans_d):
            over = int(np.searchsorted(days, day - span_d, side="right"))
            case, y = up[:over], later[:over] <= days[:over, None] + span_d
            for m in range(len(METHODS) - 1):
                raw = np.array([said.raw[m, i] for said in self.said[:over]]).reshape(over, self.n)[case]
                age_d = np.repeat(day - days[:over], case.sum(axis=1))
                if over:
                    self.maps[m][i] = (
                        Isotonic(raw, y[case].astype(np.float64))
                        if m == 0
                        # Spans that overlap are no independent outcomes.
                        else Logistic(raw, y[case], age_d, PRIOR * max(span_d, 1.0))
                    )
            chosen.append(self._champion(i, case, y))
        self.chosen = tuple(chosen)

    def _champion(self, i: int, case: Bool, y: Bool) -> int:
        """The challenger that lost least so far, if that is less than the baseline beyond chance."""
        base = METHODS.index(BASELINE)
        over = len(y)
        loss = {
            m: np.array([daily_loss(self.said[j].p[m, i][case[j]], y[j][case[j]]) for j in range(over)])
            for m in (base, *map(METHODS.index, CHALLENGERS))
        }
        best, least = base, 0.0
        for m in map(METHODS.index, CHALLENGERS):
            rest = loss[m] - loss[base]
            _, high = interval(rest, int(np.ceil(self.spans_d[i])), self.seed)
            if high < 0.0 and rest.mean() < least:
                best, least = m, float(rest.mean())
        return best


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
    """Numbers of faults in the span after each scored day: forecast, interval, and what came [n_day]."""

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
    """Forecasts from each whole day from `from_d` on whose outcome the log still tells.

    `known` is how the past is looked up: replaced in tests that plant a look ahead. Raises LookAhead.
    """
    spans = tuple(float(span_d) for span_d in spans_d)
    count_spans = tuple(sorted({COUNT_SPAN_D, *(int(s) for s in spans if s >= 1.0)}))
    run = FailureRun(log.n, spans, count_spans, seed)
    first = np.ceil(min(log.begin_d + FIRST_D, from_d))
    days = np.arange(first, np.floor(log.until_d) + 1.0)
    days = days[days + min(*spans, COUNT_SPAN_D) <= log.until_d]
    scored = np.flatnonzero(days >= from_d)
    checked = {int(scored[int(share * (len(scored) - 1))]) for share in AUDITED} if len(scored) else set()
    for i, day in enumerate(days):
        if i in checked:
            run.fitted = run.grown = -np.inf  # so that the fit, the maps and the choice are audited too
        said = run.speak(known(log, day), day)
        if i in checked:
            run.fitted = run.grown = -np.inf
            again = run.speak(known(scrambled(log, day), day), day)
            check(day, said, again)
        run.keep(day, said)
        progress((i + 1) / len(days))
    return _gathered(log, run, days, scored, len(checked))


def check(day: float, said: DayForecast, again: DayForecast) -> None:
    """Raise LookAhead if two sayings from one day are not the same."""
    names = (*METHODS, CHAMPION)
    for m, name in enumerate(names):
        if differ(said.p[m], again.p[m]).any() or (
            m < len(METHODS) and differ(said.raw[m], again.raw[m]).any()
        ):
            raise LookAhead(name, int(day), "later events became others")
    if differ(np.array(said.counts), np.array(again.counts)).any() or said.chosen != again.chosen:
        raise LookAhead("the fleet's rate or the choice", int(day), "later events became others")


def _gathered(log: FaultLog, run: FailureRun, days: F64, scored: np.ndarray, checked: int) -> FailureResult:
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
    for i, span in enumerate(run.count_spans_d):
        at = scored[days[scored] + span <= log.until_d]
        said = np.array([run.said[j].counts[i] for j in at]).reshape(len(at), 3)
        counted.append(
            CountForecast(span, days[at], said[:, 0], said[:, 1], said[:, 2], log.counts(days[at], span))
        )
    return FailureResult(log, tuple(horizons), tuple(counted), checked)
