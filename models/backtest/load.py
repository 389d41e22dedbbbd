"""Backtest of load forecasts: the forecasts of a daemon that lives through a panel, without look-ahead.

It lives as the daemon: on its grids, with the rows that it keeps, fitted when it fits (`models.load.fits`).
Experts are fitted on rows before a cut and speak from the rows between that cut and the next; `Online`
combines them in order of time, as in the daemon, and learns from an outcome once its row has come. Every run
audits itself for a look ahead. Pure: time is measured with the clocks that are passed in.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from models.backtest import audit
from models.backtest.lines import Combines, ExpertForecasts, Experts, HorizonLine
from models.load import (
    LEVELS,
    MEDIAN,
    SIDES,
    ExpertAggregation,
    Forecaster,
    ForecastGrid,
    KeptSpan,
    Parameters,
    SeriesPanel,
    fit_rows,
    lives,
    stride,
)
from twin.catalogue import F64, I64, ContractError

FIRST_CUT, LEAST_FIT_ROWS = 0.2, 30  # the first fit: this share of the rows, at least so many
CHUNK_CELLS = 200_000  # horizons x origins x series asked of experts at once. source: estimate; bounds memory
CHUNK_ROWS = 4096  # source: estimate; as above
AUDITED = (0.03, 0.5, 0.97)  # where in the scored part the look ahead is checked
AUDIT_ORIGINS = 64  # so many before each of them, and after. source: estimate
FIT_ISSUES = 5000  # forecasts of one horizon take as long as fitting all experts once. source: measured

ProgressCall = Callable[[float, str], None]  # called with the share that is done, and the present step


@dataclass(frozen=True)
class HorizonForecasts:
    """Forecasts issued for one horizon from the scored origins.

    origins [k] ascending rows; quantiles [k, n, n_level]; weights [n, n_expert], their mean over the origins;
    half [k, n, 2] half-widths of the 90 % band that the history of this horizon supports.
    """

    horizon: int
    stride: int
    origins: I64
    quantiles: F64
    weights: F64
    predict_ms: float
    half: F64 = field(default_factory=lambda: np.zeros((0, 0, 2)))


@dataclass(frozen=True)
class BacktestResult:
    """A whole backtest. `fit_s`: of the last fit, on the most rows, of all experts for all horizons.

    `fits_cpu_s`: processor time of all fits, searches among them, without their audit. `silent`: experts that
    had too little to learn from, even in the last fit.
    """

    panel: SeriesPanel
    start_row: int
    experts: tuple[str, ...]
    courses: tuple[HorizonForecasts, ...]
    fit_s: float
    cuts: tuple[int, ...]
    origins_checked: int
    fits_cpu_s: float = 0.0
    silent: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupResult:
    """Outcome of one group of horizons: fields as in `BacktestResult`."""

    courses: tuple[HorizonForecasts, ...]
    fit_s: float
    cuts: tuple[int, ...]
    origins_checked: int
    fits_cpu_s: float
    silent: tuple[str, ...]


@dataclass(frozen=True)
class BacktestTerms:
    """Settings of a backtest.

    start: share of the rows before the scored part. refits: how often experts are fitted, at growing
    intervals; None: when the daemon would fit. `checks_fits`: whether an expert's first fit is repeated, to
    see that it looks at no later row. clock, cpu: seconds, and seconds of the processor, for what fits and
    forecasts cost. `as_one`: all horizons are asked of one fit, which knows all rows before it.
    """

    start: float = 0.5
    refits: int | None = None
    seed: int = 0
    checks_fits: bool = True
    as_one: bool = False
    online: Callable[[int, int, tuple[str, ...], int], Combines] = ExpertAggregation
    clock: Callable[[], float] = lambda: 0.0
    cpu: Callable[[], float] = lambda: 0.0


def cuts(n_time: int, refits: int) -> tuple[int, ...]:
    """Rows before which fits end, by a constant factor apart; 20 % of the rows, at least 30, come first."""
    first = max(LEAST_FIT_ROWS, round(FIRST_CUT * n_time))
    if first >= n_time:
        return ()
    growth = (n_time / first) ** (1.0 / max(refits, 1))
    return tuple(dict.fromkeys(int(first * growth**k) for k in range(max(refits, 1))))


def _to_audit(values: F64, start_row: int) -> list[int]:
    """Rows of the scored part whose look ahead is checked: some spread over it, and one in a gap."""
    rows = len(values) - start_row
    gaps = start_row + np.flatnonzero(~np.isfinite(values[start_row:]).all(axis=1))
    found = [start_row + int(share * (rows - 1)) for share in AUDITED] + gaps[len(gaps) // 2 :][:1].tolist()
    return sorted(set(found))


def backtest(
    panel: SeriesPanel,
    horizons: Sequence[int],
    experts: Mapping[str, type[Forecaster]],
    terms: BacktestTerms | None = None,
    progress: Callable[[float], None] | None = None,
) -> BacktestResult:
    """Run through `panel` and keep the forecasts from origins in its last `1 - terms.start`.

    `horizons`: rows, ascending. `progress` is called with the share that is done. A single expert that says
    nothing is stood in for by the last value. Raises LookAhead if a forecast depends on a later row;
    ContractError for a horizon without a scored outcome.
    """
    terms = terms or BacktestTerms()
    groups = groups_of(panel, horizons, terms)
    parts = []
    for i, group in enumerate(groups):

        def note(share: float, _: str, i: int = i) -> None:
            if progress is not None:
                progress((i + share) / len(groups))

        parts.append(run_group(BacktestGroup(panel, horizons, group), experts, terms, note))
    return join(panel, horizons, tuple(experts), terms, parts)


def groups_of(panel: SeriesPanel, horizons: Sequence[int], terms: BacktestTerms) -> list[tuple[int, ...]]:
    """The groups of horizons that `run_group` runs, one by one. ContractError for one without an outcome."""
    if max(horizons) > (most := panel.n_time - 1 - first_scored(panel, terms)):
        raise ContractError(f"horizon of {max(horizons)} rows: expected at most {most}, to have an outcome")
    return [tuple(horizons)] if terms.as_one else [group for group, _ in lives(horizons, panel.step_s)]


def first_scored(panel: SeriesPanel, terms: BacktestTerms) -> int:
    """The first row whose forecasts are kept."""
    return int(np.ceil(terms.start * panel.n_time))


def published_band(result: BacktestResult, place: int) -> F64:
    """Return low edge, median and high edge [k, n, 3] of a horizon, as the daemon reports its 90 % band.

    As wide as its history supports, and no narrower than that of a shorter horizon on the same grid, of
    which the newest counts where that one is not issued from the same rows.
    """
    course, panel = result.courses[place], result.panel
    horizons = [c.horizon for c in result.courses]
    grid = next(g for g, _ in lives(horizons, panel.step_s) if course.horizon in g)
    half = course.half
    for shorter in result.courses[:place]:
        if shorter.horizon in grid:
            at = np.searchsorted(shorter.origins, course.origins, side="right") - 1
            known = np.where((at >= 0)[:, None, None], shorter.half[np.maximum(at, 0)], np.nan)
            half = np.where(np.isnan(half), np.nan, np.fmax(half, known))
    median = course.quantiles[..., MEDIAN]
    low, high = np.moveaxis(median[..., None] + SIDES * half, -1, 0)
    never_below_zero = np.fmin.accumulate(panel.values)[course.origins] == 0.0
    return np.stack([np.where(never_below_zero, np.maximum(low, 0.0), low), median, high], axis=-1)


def published_coverage(result: BacktestResult, place: int, columns: Sequence[int]) -> tuple[float, int]:
    """(share, number) of outcomes of these series in the band that a daemon reports, its edges included; the
    share is NaN of none. Outcomes without a reported band count in neither.
    """
    course = result.courses[place]
    targets = course.origins + course.horizon
    due = targets < result.panel.n_time
    low, _, high = np.moveaxis(published_band(result, place)[due][:, list(columns)], -1, 0)
    actual = result.panel.values[targets[due]][:, list(columns)]
    known = np.isfinite(low) & np.isfinite(high) & np.isfinite(actual)
    inside = (low[known] <= actual[known]) & (actual[known] <= high[known])
    return float(inside.mean()) if len(inside) else np.nan, len(inside)


@dataclass(frozen=True)
class BacktestGroup:
    """Horizons of a panel that are lived through together, `group`, among all that are asked for."""

    panel: SeriesPanel
    horizons: Sequence[int]
    group: tuple[int, ...]

    def span(self, terms: BacktestTerms) -> KeptSpan | None:
        """The rows that are known at an origin; None: all."""
        return None if terms.as_one else dict(lives(self.horizons, self.panel.step_s))[self.group]

    def cuts(self, terms: BacktestTerms) -> tuple[int, ...]:
        """Rows before which fits end."""
        if terms.refits is not None:
            return cuts(self.panel.n_time, terms.refits)
        return fit_rows(self.horizons, self.panel.step_s, self.panel.n_time)


def run_group(
    group: BacktestGroup,
    experts: Mapping[str, type[Forecaster]],
    terms: BacktestTerms,
    progress: ProgressCall | None = None,
) -> GroupResult:
    """Live through a panel with one group of horizons: the same whatever is run beside it."""
    run = _GroupRun(group, experts, terms)
    for share, what in run.through():
        if progress is not None:
            progress(share, what)
    return GroupResult(run.courses(), run.fit_s, run.cuts, run.checked, run.fits_cpu_s, run.silent)


def join(
    panel: SeriesPanel,
    horizons: Sequence[int],
    experts: tuple[str, ...],
    terms: BacktestTerms,
    parts: Sequence[GroupResult],
) -> BacktestResult:
    by_horizon = {course.horizon: course for part in parts for course in part.courses}
    return BacktestResult(
        panel,
        first_scored(panel, terms),
        experts,
        tuple(by_horizon[h] for h in horizons),
        sum(part.fit_s for part in parts),
        parts[0].cuts,
        sum(part.origins_checked for part in parts),
        sum(part.fits_cpu_s for part in parts),
        tuple(name for name in experts if all(name in part.silent for part in parts)),
    )


class _GroupRun:
    """One group of horizons through the whole panel."""

    def __init__(
        self, group: BacktestGroup, kinds: Mapping[str, type[Forecaster]], terms: BacktestTerms
    ) -> None:
        panel = group.panel
        # In single precision, as the daemon keeps its rows
        with np.errstate(over="ignore"):
            single = panel.values.astype(np.float32).astype(np.float64)
        self.panel = panel = replace(panel, values=np.where(np.isinf(single), panel.values, single))
        grid = ForecastGrid(panel.step_s, group.group)
        self.experts = experts = Experts(grid, kinds, terms.seed, group.span(terms))
        self.terms = terms
        self.start_row, self.clock = first_scored(panel, terms), terms.clock
        self.fitted = [name for name, one in experts.each.items() if one.fitted]
        self.cuts = group.cuts(terms) if self.fitted else ()
        self.lines = [
            HorizonLine(h, stride(h), terms.online(h, panel.n, experts.names, stride(h)), h, experts.span)
            for h in experts.grid.horizons
        ]
        self.issued: dict[int, list[tuple[I64, F64, F64]]] = {line.horizon: [] for line in self.lines}
        self.weights = {line.horizon: np.zeros((panel.n, len(experts.names))) for line in self.lines}
        self.audited = _to_audit(panel.values, self.start_row)
        self.fit_s = self.fits_cpu_s = self.say_s = 0.0
        self.said = self.checked = 0
        self.fits_checked: list[str] = []
        self.silent = tuple(self.fitted)

    def through(self) -> Iterator[tuple[float, str]]:
        """From the first row to the last; yields the share that is done, and what comes next."""
        least = min(line.stride for line in self.lines)
        around = {row + side * AUDIT_ORIGINS * least for row in self.audited for side in (-1, 1)}
        inner = {edge for edge in (*self.cuts, self.start_row, *around) if 0 < edge < self.panel.n_time}
        edges = [0, *sorted(inner), self.panel.n_time]
        each_row, each_fit = (
            sum(1.0 / line.stride for line in self.lines),
            FIT_ISSUES / (len(self.fitted) or 1),
        )
        fits = 0
        total = each_row * self.panel.n_time + each_fit * len(self.fitted) * len(self.cuts)

        def done(row: int) -> float:
            return min((each_row * row + each_fit * fits) / total, 1.0)

        for begin, end in itertools.pairwise(edges):
            if begin in self.cuts:
                for name in self._fit(begin):
                    yield done(begin), f"fitting {name}"
                    fits += 1
            size = least * min(max(CHUNK_CELLS // (self.panel.n * len(self.lines)), 64), CHUNK_ROWS)
            for first in range(begin, end, size):
                yield done(first), "forecasting"
                self._live(first, min(first + size, end))
        yield 1.0, "done"

    def _fit(self, cut: int) -> Iterator[str]:
        """Fit all that need it on the rows before `cut`; says whose turn it is."""
        parameters: dict[str, Parameters] = {}
        took_s = 0.0
        for name in self.fitted:
            yield name
            begun, begun_cpu = self.clock(), self.terms.cpu()
            parameters |= self.experts.fit_before(self.panel, cut, [name])
            took_s += self.clock() - begun
            self.fits_cpu_s += self.terms.cpu() - begun_cpu
        self.fit_s = took_s
        self.silent = tuple(name for name in self.fitted if not parameters[name])
        # An expert's first fit is the cheapest one to repeat; one that looks ahead does so at every cut.
        new = [name for name in self.fitted if parameters[name] and name not in self.fits_checked]
        if new and self.terms.checks_fits:
            other = audit.spoil(self.panel, cut - 1, "wild values")
            for name, again in self.experts.fit_before(other, cut, new).items():
                audit.check_fit(name, cut, parameters[name], again)
            self.fits_checked += new
        self.experts.load(parameters)

    def _live(self, first: int, end: int) -> None:
        """All origins of these rows: ask the experts at once, then go through them in turn."""
        rows = np.arange(first, end)
        origins = rows[np.any([rows % line.stride == 0 for line in self.lines], axis=0)]
        if not len(origins):
            return
        begun = self.clock()
        words = self.experts.say(self.panel, origins)
        self.say_s += self.clock() - begun
        self.said += len(origins)
        # An origin with others behind it, so that experts were given rows that it must not know.
        rows = np.array([row for row in self.audited if first <= row < end], np.int64)
        last = np.searchsorted(origins, rows, side="right") - 1
        due = last[(last >= 0) & (last < len(origins) - 1)].tolist()
        held = copy.deepcopy(self.lines) if due else []
        quantiles = self._advance(self.lines, self.panel, words, origins, True)
        for i in due:
            self._audit(held, words, origins, i + 1, quantiles)

    def _advance(
        self, lines: list[HorizonLine], panel: SeriesPanel, words: ExpertForecasts, origins: I64, kept: bool
    ) -> list[tuple[I64, F64]]:
        """Each horizon through its own origins of these: (origins [k], quantiles [k, n, n_level])."""
        out = []
        for i, line in enumerate(lines):
            own = np.flatnonzero(origins % line.stride == 0)
            if not len(own):
                out.append((origins[own], np.empty((0, panel.n, len(LEVELS)))))
                continue
            mine = ExpertForecasts(
                words.points[:, i, own],
                None if words.low is None else words.low[i, own],
                None if words.high is None else words.high[i, own],
            )
            begun = self.clock()
            quantiles, weights = line.advance(panel, mine, origins[own])
            line.seconds += self.clock() - begun
            out.append((origins[own], quantiles))
            if kept and origins[0] >= self.start_row:
                self.issued[line.horizon].append((origins[own], quantiles, line.half))
                self.weights[line.horizon] += weights
        return out

    def _audit(
        self,
        lines: list[HorizonLine],
        words: ExpertForecasts,
        origins: I64,
        upto: int,
        quantiles: list[tuple[I64, F64]],
    ) -> None:
        """Live through the first `upto` of these origins again, with other rows after them."""
        row = int(origins[upto - 1])
        for how in audit.SPOILS:
            other = audit.spoil(self.panel, row, how)
            with np.errstate(all="ignore"):  # wild values may overflow where nobody looks
                again = self.experts.say(other, origins)
            before = words.points[:, :, :upto]
            audit.check_points(self.experts.names, origins[:upto], before, again.points[:, :, :upto], how)
            issued = self._advance(copy.deepcopy(lines), other, words, origins[:upto], False)
            for line, (own, said), (_, anew) in zip(lines, quantiles, issued, strict=True):
                who = f"the combination {line.horizon} rows ahead"
                audit.check_issued(who, own[: len(anew)], said[: len(anew)], anew, how)
        self.checked += upto

    def courses(self) -> tuple[HorizonForecasts, ...]:
        """Forecasts issued, per horizon."""
        out = []
        for line in self.lines:
            held = self.issued[line.horizon]
            origins, quantiles, half = (np.concatenate(part) for part in zip(*held, strict=True))
            steps = -(-self.panel.n_time // line.stride)
            each_s = self.say_s / max(self.said, 1) / len(self.lines) + line.seconds / steps
            out.append(
                HorizonForecasts(
                    line.horizon,
                    line.stride,
                    origins,
                    quantiles,
                    self.weights[line.horizon] / len(origins),
                    1e3 * each_s,
                    half,
                )
            )
        return tuple(out)
