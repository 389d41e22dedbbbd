"""A backtest: what would have been forecast, had the daemon lived through a panel, from what it could know.

Experts are fitted on rows before a cut and speak from the rows between that cut and the next; `Online`
combines them in order of time, as in the daemon, and learns from an outcome once its row has come. Every run
audits itself for a look ahead. Pure: time is measured with the clock that is passed in. May import models.*
and the core's errors and number types; NumPy only.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from models import audit
from models.context import CALM_ROWS, recent_sample, restlessness
from models.forecaster import LEVELS, Forecaster, Grid, Parameters, last_known
from models.lattice import quantum
from models.online import Issue, Online, stride
from models.panel import Panel
from twin.errors import ContractError
from twin.frame import F64, I64

FIRST_CUT, LEAST_FIT_ROWS = 0.2, 30  # the first fit: this share of the rows, at least so many
REFITS = 8
LATTICE_EVERY_ROWS = 60  # as in the daemon
LATTICE_ROWS = 2000  # of past in which the step of the lattice is looked for. source: estimate
SAMPLE_EVERY = 8  # issues between two samples of the recent past. source: estimate
CHUNK_CELLS = (
    200_000  # horizons x origins x series that experts speak of at once. source: estimate; bounds memory
)
CHUNK_ROWS = 4096  # source: estimate; as above
DENSE_STRIDE = 4  # horizons issued at least so often are asked for together. source: estimate
AUDITED = (0.03, 0.5, 0.97)  # where in the scored part the look ahead is checked
AUDIT_ORIGINS = 64  # so many before each of them, and after. source: estimate


class Combines(Protocol):
    """What a backtest needs of `Online`."""

    def learn(self, row: int, actual: F64) -> None: ...

    def issue(self, row: int, issue: Issue) -> F64: ...

    def weights(self) -> F64: ...


@dataclass(frozen=True)
class Course:
    """What was issued for one horizon from the scored origins.

    origins [k] ascending rows; quantiles [k, n, n_level]; weights [n, n_expert], their mean over the origins.
    """

    horizon: int
    stride: int
    origins: I64
    quantiles: F64
    weights: F64
    predict_ms: float


@dataclass(frozen=True)
class Result:
    """A whole backtest. `fit_s`: of the last fit, on the most rows, of all experts for all horizons."""

    panel: Panel
    start_row: int
    experts: tuple[str, ...]
    courses: tuple[Course, ...]
    fit_s: float
    cuts: tuple[int, ...]
    origins_checked: int


class Words(NamedTuple):
    """Of experts: points [n_expert, n_horizon, n_origin, n]; low, high [n_horizon, n_origin, n]."""

    points: F64
    low: F64 | None
    high: F64 | None


def cuts(n_time: int, refits: int = REFITS) -> tuple[int, ...]:
    """Rows before which fits end, by a constant factor apart; 20 % of the rows, at least 30, come first."""
    first = max(LEAST_FIT_ROWS, round(FIRST_CUT * n_time))
    if first >= n_time:
        return ()
    growth = (n_time / first) ** (1.0 / max(refits, 1))
    return tuple(dict.fromkeys(int(first * growth**k) for k in range(max(refits, 1))))


def together(horizons: Sequence[int]) -> list[tuple[int, ...]]:
    """Horizons in groups that are asked of experts at the same origins."""
    dense = tuple(h for h in horizons if stride(h) <= DENSE_STRIDE)
    return [group for group in (dense, tuple(h for h in horizons if h not in dense)) if group]


def _since(panel: Panel, row: int) -> Panel:
    """The panel from `row` on. A view."""
    known = {name: column[row:] for name, column in panel.known.items()}
    start_ns = int(panel.t_ns(np.array([row]))[0])
    return Panel(start_ns, panel.step_s, panel.values[row:], panel.names, panel.zone, known)


def _to_audit(values: F64, start_row: int) -> list[int]:
    """Rows of the scored part whose look ahead is checked: some spread over it, and one in a gap."""
    rows = len(values) - start_row
    gaps = start_row + np.flatnonzero(~np.isfinite(values[start_row:]).all(axis=1))
    found = [start_row + int(share * (rows - 1)) for share in AUDITED] + gaps[len(gaps) // 2 :][:1].tolist()
    return sorted(set(found))


class Experts:
    """Some experts on one grid, fitted alike and asked alike."""

    def __init__(self, grid: Grid, kinds: Mapping[str, type[Forecaster]], seed: int) -> None:
        self.grid, self.seed, self.names = grid, seed, tuple(kinds)
        self.each = {name: kind(grid) for name, kind in kinds.items()}

    def fit_before(self, panel: Panel, cut: int, names: Sequence[str]) -> dict[str, Parameters]:
        """Parameters of these experts, from the rows before `cut`."""
        past = panel.upto(cut - 1)
        return {name: self.each[name].fit(past, self.seed) for name in names}

    def load(self, parameters: Mapping[str, Parameters]) -> None:
        for name, held in parameters.items():
            self.each[name].load(held)

    def say(self, panel: Panel, origins: I64) -> Words:
        """What all say from these rows; they see rows up to the last of them, as far back as they reach."""
        shape = (len(self.grid.horizons), len(origins), panel.n)
        points = np.full((len(self.each), *shape), np.nan)
        low = high = None
        seen = panel.upto(int(origins[-1]))
        for i, one in enumerate(self.each.values()):
            first = max(0, int(origins[0]) + 1 - max(one.reach_rows, 1))
            said = one.predict(_since(seen, first), origins - first)
            if said.point.shape != shape:
                raise ContractError(f"{self.names[i]}: expected {shape}, got {said.point.shape}")
            points[i] = said.point
            if said.low is not None and said.high is not None:
                low, high = said.low, said.high
        return Words(points, low, high)


@dataclass
class Line:
    """One horizon on its way through time: its `Online`, the next row to learn from, what it last drew."""

    horizon: int
    stride: int
    online: Combines
    next_row: int
    sampled_row: int = -(2**62)
    lattice_row: int = -(2**62)
    recent: F64 = field(default_factory=lambda: np.zeros((0, 0)))
    lattice: F64 = field(default_factory=lambda: np.zeros(0))
    seconds: float = 0.0

    def advance(self, panel: Panel, words: Words, origins: I64) -> tuple[F64, F64]:
        """Issue from these origins in turn, learning before each what is known by then.

        words: of this horizon, points [n_expert, n_origin, n]. Returns quantiles [n_origin, n, n_level] and
        weights [n, n_expert] summed over the origins.
        """
        values = panel.values
        begin = max(0, int(origins[0]) - CALM_ROWS)
        near = values[begin : int(origins[-1]) + 1]
        last, scale = last_known(near)[origins - begin], restlessness(near, origins - begin)
        out = np.empty((len(origins), panel.n, len(LEVELS)))
        total = np.zeros((panel.n, len(words.points)))
        for i, row in enumerate(origins.tolist()):
            while self.next_row <= row:
                self.online.learn(self.next_row, values[self.next_row])
                self.next_row += self.stride
            if row - self.sampled_row >= SAMPLE_EVERY * self.stride:
                self.recent, self.sampled_row = recent_sample(values[: row + 1], row), row
            if row - self.lattice_row >= LATTICE_EVERY_ROWS:
                self.lattice = quantum(values[max(0, row + 1 - LATTICE_ROWS) : row + 1])
                self.lattice_row = row
            points = words.points[:, i]
            issue = Issue(
                points=points if len(points) > 1 else np.where(np.isfinite(points), points, last[i]),
                last=last[i],
                scale=scale[i],
                low=None if words.low is None else words.low[i],
                high=None if words.high is None else words.high[i],
                recent=self.recent,
                quantum=self.lattice,
            )
            out[i] = self.online.issue(row, issue)
            total += self.online.weights()
        return out, total


def backtest(
    panel: Panel,
    horizons: Sequence[int],
    experts: Mapping[str, type[Forecaster]],
    *,
    start: float = 0.5,
    refits: int = REFITS,
    seed: int = 0,
    online: Callable[[int, int, tuple[str, ...], int], Combines] = Online,
    clock: Callable[[], float] = lambda: 0.0,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """Live through `panel` and keep what is issued from origins in its last `1 - start`.

    `horizons`: rows, ascending. `clock`: seconds, for what fits and forecasts cost. `progress` hears what
    share is done. A single expert that says nothing is stood in for by the last value. Raises LookAhead if a
    forecast depends on a later row; ContractError for a horizon without a scored outcome.
    """
    start_row = int(np.ceil(start * panel.n_time))
    if max(horizons) > (most := panel.n_time - 1 - start_row):
        raise ContractError(f"horizon of {max(horizons)} rows: expected at most {most}, to have an outcome")
    groups = together(horizons)
    runs = [
        _Run(panel, Experts(Grid(panel.step_s, group), experts, seed), start_row, refits, online, clock)
        for group in groups
    ]
    for i, run in enumerate(runs):
        for share in run.through():
            if progress is not None:
                progress((i + share) / len(runs))
    by_horizon = {course.horizon: course for run in runs for course in run.courses()}
    return Result(
        panel,
        start_row,
        tuple(experts),
        tuple(by_horizon[h] for h in horizons),
        sum(run.fit_s for run in runs),
        runs[0].cuts,
        sum(run.checked for run in runs),
    )


class _Run:
    """One group of horizons through the whole panel."""

    def __init__(
        self,
        panel: Panel,
        experts: Experts,
        start_row: int,
        refits: int,
        online: Callable[[int, int, tuple[str, ...], int], Combines],
        clock: Callable[[], float],
    ) -> None:
        self.panel, self.experts, self.start_row, self.clock = panel, experts, start_row, clock
        self.cuts = cuts(panel.n_time, refits) if any(e.fitted for e in experts.each.values()) else ()
        self.lines = [
            Line(h, stride(h), online(h, panel.n, experts.names, stride(h)), h) for h in experts.grid.horizons
        ]
        self.issued: dict[int, list[tuple[I64, F64]]] = {line.horizon: [] for line in self.lines}
        self.weights = {line.horizon: np.zeros((panel.n, len(experts.names))) for line in self.lines}
        self.audited = _to_audit(panel.values, start_row)
        self.fit_s = self.say_s = 0.0
        self.said = self.checked = 0
        self.fits_checked: list[str] = []

    def through(self) -> Iterator[float]:
        """From the first row to the last; yields the share that is done."""
        least = min(line.stride for line in self.lines)
        around = {row + side * AUDIT_ORIGINS * least for row in self.audited for side in (-1, 1)}
        inner = {edge for edge in (*self.cuts, self.start_row, *around) if 0 < edge < self.panel.n_time}
        edges = [0, *sorted(inner), self.panel.n_time]
        for begin, end in itertools.pairwise(edges):
            if begin in self.cuts:
                self._fit(begin)
            size = least * min(max(CHUNK_CELLS // (self.panel.n * len(self.lines)), 64), CHUNK_ROWS)
            for first in range(begin, end, size):
                self._live(first, min(first + size, end))
                yield min(first + size, end) / self.panel.n_time

    def _fit(self, cut: int) -> None:
        names = [name for name, one in self.experts.each.items() if one.fitted]
        begun = self.clock()
        parameters = self.experts.fit_before(self.panel, cut, names)
        self.fit_s = self.clock() - begun
        # An expert's first fit is the cheapest one to repeat; one that looks ahead does so at every cut.
        if new := [name for name in names if parameters[name] and name not in self.fits_checked]:
            other = audit.spoiled(self.panel, cut - 1, "wild values")
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
        self, lines: list[Line], panel: Panel, words: Words, origins: I64, kept: bool
    ) -> list[tuple[I64, F64]]:
        """Each horizon through its own origins of these: (origins [k], quantiles [k, n, n_level])."""
        out = []
        for i, line in enumerate(lines):
            own = np.flatnonzero(origins % line.stride == 0)
            if not len(own):
                out.append((origins[own], np.empty((0, panel.n, len(LEVELS)))))
                continue
            mine = Words(
                words.points[:, i, own],
                None if words.low is None else words.low[i, own],
                None if words.high is None else words.high[i, own],
            )
            begun = self.clock()
            quantiles, weights = line.advance(panel, mine, origins[own])
            line.seconds += self.clock() - begun
            out.append((origins[own], quantiles))
            if kept and origins[0] >= self.start_row:
                self.issued[line.horizon].append((origins[own], quantiles))
                self.weights[line.horizon] += weights
        return out

    def _audit(
        self, lines: list[Line], words: Words, origins: I64, upto: int, quantiles: list[tuple[I64, F64]]
    ) -> None:
        """Live through the first `upto` of these origins again, with other rows after them."""
        row = int(origins[upto - 1])
        for how in audit.SPOILS:
            other = audit.spoiled(self.panel, row, how)
            with np.errstate(all="ignore"):  # wild values may overflow where nobody looks
                again = self.experts.say(other, origins)
            before = words.points[:, :, :upto]
            audit.check_points(self.experts.names, origins[:upto], before, again.points[:, :, :upto], how)
            issued = self._advance(copy.deepcopy(lines), other, words, origins[:upto], False)
            for line, (own, said), (_, anew) in zip(lines, quantiles, issued, strict=True):
                who = f"the combination {line.horizon} rows ahead"
                audit.check_issued(who, own[: len(anew)], said[: len(anew)], anew, how)
        self.checked += upto

    def courses(self) -> list[Course]:
        """What was issued, per horizon."""
        out = []
        for line in self.lines:
            held = self.issued[line.horizon]
            origins = np.concatenate([o for o, _ in held])
            steps = -(-self.panel.n_time // line.stride)
            each_s = self.say_s / max(self.said, 1) / len(self.lines) + line.seconds / steps
            out.append(
                Course(
                    line.horizon,
                    line.stride,
                    origins,
                    np.concatenate([q for _, q in held]),
                    self.weights[line.horizon] / len(origins),
                    1e3 * each_s,
                )
            )
        return out
