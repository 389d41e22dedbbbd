"""A backtest: what would have been forecast, had the daemon lived through a panel, and nothing it could not know.

Experts are fitted on rows before a cut and speak from the rows between that cut and the next;
`Online` combines them in order of time, as in the daemon, and learns from an outcome once its row has come. Every
run audits itself for a look ahead. Pure: time is measured with the clock that is passed in. May import
models.* and the core's errors and number types; NumPy only.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
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
SAMPLE_EVERY_ROWS = 16  # as in the daemon
CHUNK_CELLS = (
    200_000  # horizons x origins x series that experts speak of at once. source: estimate; bounds memory
)
CHUNK_ROWS = 4096  # source: estimate; as above
DENSE_STRIDE = 4  # horizons issued at least so often are asked for together. source: estimate
AUDITED = (0.03, 0.5, 0.97)  # where in the scored part the look ahead is checked


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
    """Of experts: points [n_expert, n_horizon, n_origin, n]; low, high [n_horizon, n_origin, n] or None."""

    points: F64
    low: F64 | None
    high: F64 | None


def cuts(n_time: int, refits: int = REFITS) -> tuple[int, ...]:
    """Rows before which fits end, growing by a constant factor: 20 % of the rows (at least 30) comes first."""
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


class Experts:
    """Some experts on one grid, fitted alike and asked alike."""

    def __init__(self, grid: Grid, kinds: Mapping[str, type[Forecaster]], seed: int) -> None:
        self.grid, self.seed, self.names = grid, seed, tuple(kinds)
        self.each = {name: kind(grid) for name, kind in kinds.items()}

    def fit_before(self, panel: Panel, cut: int) -> dict[str, Parameters]:
        """Parameters of those that are fitted, from the rows before `cut`."""
        past = panel.upto(cut - 1)
        return {name: one.fit(past, self.seed) for name, one in self.each.items() if one.fitted}

    def load(self, parameters: Mapping[str, Parameters]) -> None:
        for name, held in parameters.items():
            self.each[name].load(held)

    def say(self, panel: Panel, origins: I64) -> Words:
        """What all say from these rows; they see the rows up to the last of them, as far back as they reach."""
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
    """One horizon on its way through time: its `Online`, the next row to learn from, the sample of the past."""

    horizon: int
    stride: int
    online: Combines
    next_row: int
    sampled_row: int = -(2**62)
    lattice_row: int = -(2**62)
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
            recent = None
            if row - self.sampled_row >= SAMPLE_EVERY_ROWS:
                recent, self.sampled_row = recent_sample(values[: row + 1], row), row
            if row - self.lattice_row >= LATTICE_EVERY_ROWS:
                self.lattice = quantum(values[max(0, row + 1 - LATTICE_ROWS) : row + 1])
                self.lattice_row = row
            issue = Issue(
                points=words.points[:, i],
                last=last[i],
                scale=scale[i],
                low=None if words.low is None else words.low[i],
                high=None if words.high is None else words.high[i],
                recent=recent,
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

    `horizons`: rows, ascending. `clock`: seconds, for what fits and forecasts cost. `progress` hears the share
    done. Raises LookAhead if a forecast depends on a later row; ContractError for a horizon that no scored
    origin has an outcome for.
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
        run.through(lambda share, i=i: progress((i + share) / len(runs)) if progress else None)  # type: ignore[misc]
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
        rows = panel.n_time - start_row
        self.audited = [start_row + int(share * (rows - 1)) for share in AUDITED]
        self.fit_s = self.say_s = 0.0
        self.said = self.checked = 0
        self.fit_checked = False

    def through(self, progress: Callable[[float], None]) -> None:
        """From the first row to the last. The time that fits take grows with their rows."""
        edges = sorted({0, *self.cuts, self.start_row, self.panel.n_time})
        for begin, end in itertools.pairwise(edges):
            if begin in self.cuts:
                self._fit(begin)
            size = CHUNK_CELLS // (self.panel.n * len(self.lines)) * min(line.stride for line in self.lines)
            size = min(max(size, 64), CHUNK_ROWS * min(line.stride for line in self.lines))
            for first in range(begin, end, size):
                self._live(first, min(first + size, end))
                progress(min(first + size, end) / self.panel.n_time)

    def _fit(self, cut: int) -> None:
        begun = self.clock()
        parameters = self.experts.fit_before(self.panel, cut)
        self.fit_s = self.clock() - begun
        if not self.fit_checked:
            # The first fit is the cheapest to repeat, and a fit that looks ahead does so at every cut.
            again = self.experts.fit_before(audit.spoiled(self.panel, cut - 1, "wild values"), cut)
            for name, held in parameters.items():
                audit.check_fit(name, cut, held, again[name])
            self.fit_checked = True
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
        held = copy.deepcopy(self.lines) if self._due(first, end) else None
        quantiles = self._advance(self.lines, self.panel, words, origins, True)
        if held is not None:
            self._audit(held, words, origins, quantiles)

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

    def _due(self, first: int, end: int) -> bool:
        return any(first <= row < end for row in self.audited)

    def _audit(self, lines: list[Line], words: Words, origins: I64, quantiles: list[tuple[I64, F64]]) -> None:
        """Live through these origins again, up to the middle one, with other rows after it."""
        upto = (len(origins) - 1) // 2 + 1
        row = int(origins[upto - 1])
        for how in audit.SPOILS:
            other = audit.spoiled(self.panel, row, how)
            again = self.experts.say(other, origins)
            audit.check_points(
                self.experts.names,
                origins[:upto],
                words.points[:, :, :upto],
                again.points[:, :, :upto],
                how,
            )
            issued = self._advance(copy.deepcopy(lines), other, words, origins[:upto], False)
            for line, (own, before), (_, after) in zip(lines, quantiles, issued, strict=True):
                who = f"the combination {line.horizon} rows ahead"
                audit.check_issued(who, own[: len(after)], before[: len(after)], after, how)
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
