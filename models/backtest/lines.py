"""Parts of a load backtest: the experts, fitted and queried alike, and each horizon's forecasts over time.

They see rows up to the last one that they are asked from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from models.half_widths import half_widths_of
from models.load import (
    CALM_ROWS,
    EDGES,
    LATTICE_EVERY_ROWS,
    LATTICE_ROWS,
    LEVELS,
    MEDIAN,
    SIDES,
    Forecaster,
    ForecastGrid,
    Issue,
    KeptSpan,
    Parameters,
    SeriesPanel,
    last_within,
    quantum,
    recent_sample,
    restlessness,
    rows_since_epoch,
)
from twin.catalogue import F64, I64, ContractError


class Combines(Protocol):
    """The part of `ExpertAggregation` that a backtest needs."""

    @property
    def looks(self) -> bool: ...

    @property
    def spans(self) -> I64: ...

    @property
    def largest(self) -> F64: ...

    def learn(self, row: int, actual: F64) -> None: ...

    def issue(self, row: int, issue: Issue) -> F64: ...

    def weights(self) -> F64: ...


class ExpertForecasts(NamedTuple):
    """Of experts: points [n_expert, n_horizon, n_origin, n]; low, high [n_horizon, n_origin, n]."""

    points: F64
    low: F64 | None
    high: F64 | None


def _since(panel: SeriesPanel, row: int) -> SeriesPanel:
    """The panel from `row` on. A view."""
    known = {name: column[row:] for name, column in panel.known.items()}
    start_ns = int(panel.t_ns(np.array([row]))[0])
    return SeriesPanel(start_ns, panel.step_s, panel.values[row:], panel.names, panel.zone, known)


def first_known(span: KeptSpan | None, panel: SeriesPanel, row: int) -> int:
    """The oldest row of the panel that is known at `row`."""
    if span is None:
        return 0
    since_1970 = rows_since_epoch(panel)
    return max(0, span.first(since_1970 + row) - since_1970)


class Experts:
    """Some experts on one grid, fitted and queried together. `span`: the rows that they know; None: all."""

    def __init__(
        self,
        grid: ForecastGrid,
        kinds: Mapping[str, type[Forecaster]],
        seed: int,
        span: KeptSpan | None = None,
    ) -> None:
        self.grid, self.seed, self.names, self.span = grid, seed, tuple(kinds), span
        self.each = {name: kind(grid) for name, kind in kinds.items()}

    def fit_before(self, panel: SeriesPanel, cut: int, names: Sequence[str]) -> dict[str, Parameters]:
        """Parameters of these experts, from the rows before `cut`."""
        past = _since(panel.upto(cut - 1), first_known(self.span, panel, cut - 1))
        return {name: self.each[name].fit(past, self.seed) for name in names}

    def load(self, parameters: Mapping[str, Parameters]) -> None:
        for name, held in parameters.items():
            self.each[name].load(held)

    def say(self, panel: SeriesPanel, origins: I64) -> ExpertForecasts:
        """Forecasts of all experts from these rows; they see no row after the last of them."""
        shape = (len(self.grid.horizons), len(origins), panel.n)
        points = np.full((len(self.each), *shape), np.nan)
        low = high = None
        for i, one in enumerate(self.each.values()):
            for part, first in self._groups_of(panel, origins, one):
                own = origins[part]
                said = one.predict(_since(panel.upto(int(own[-1])), first), own - first)
                if said.point.shape != (shape[0], len(own), shape[2]):
                    raise ContractError(f"{self.names[i]}: expected {shape}, got {said.point.shape}")
                points[i, :, part] = said.point
                if said.low is not None and said.high is not None:
                    if low is None or high is None:
                        low, high = np.full(shape, np.nan), np.full(shape, np.nan)
                    low[:, part], high[:, part] = said.low, said.high
        return ExpertForecasts(points, low, high)

    def _groups_of(self, panel: SeriesPanel, origins: I64, one: Forecaster) -> Iterator[tuple[slice, int]]:
        """(origins that are asked for together, the first row that they know) of one expert."""
        if self.span is None or one.reach_rows <= self.span.rows:
            yield slice(0, len(origins)), max(0, int(origins[0]) + 1 - max(one.reach_rows, 1))
            return
        since_1970 = rows_since_epoch(panel)
        block = (since_1970 + origins - self.span.rows + 1) // self.span.block
        edges = np.flatnonzero(np.diff(block, prepend=block[0] - 1, append=block[-1] + 1))
        for begin, end in itertools.pairwise(edges.tolist()):
            yield slice(begin, end), max(0, int(block[begin]) * self.span.block - since_1970)


@dataclass
class HorizonLine:
    """The state of one horizon over time: its `Online`, the next row to learn from, its last draw.

    All that the daemon does at a row happens at the same row here, also where the backtest forecasts from
    every `stride` rows alone.
    """

    horizon: int
    stride: int
    online: Combines
    next_row: int
    span: KeptSpan | None = None
    lattice_row: int = -1
    seen_row: int = -1
    lattice: F64 = field(default_factory=lambda: np.zeros(0))
    seconds: float = 0.0
    half: F64 = field(default_factory=lambda: np.zeros((0, 0, 2)))
    """Half-widths of the 90 % band that its history supports, at the origins of the last advance."""

    def advance(self, panel: SeriesPanel, words: ExpertForecasts, origins: I64) -> tuple[F64, F64]:
        """Issue forecasts from these origins in turn; learns the outcomes known by then before each.

        words: of this horizon, points [n_expert, n_origin, n]. Returns quantiles [n_origin, n, n_level] and
        weights [n, n_expert] summed over the origins.
        """
        values = panel.values
        begin = max(0, int(origins[0]) - CALM_ROWS)
        near = values[begin : int(origins[-1]) + 1]
        last, scale = last_within(values, origins, CALM_ROWS + 1), restlessness(near, origins - begin)
        out = np.empty((len(origins), panel.n, len(LEVELS)))
        self.half = np.empty((len(origins), panel.n, 2))
        total = np.zeros((panel.n, len(words.points)))
        for i, row in enumerate(origins.tolist()):
            while self.next_row <= row:
                self.online.learn(self.next_row, values[self.next_row])
                self.next_row += self.stride
            recent = None
            if self.online.looks:
                first = first_known(self.span, panel, row)
                recent = recent_sample(values[first : row + 1], row - first)
            at = row // LATTICE_EVERY_ROWS * LATTICE_EVERY_ROWS
            if at > self.lattice_row:
                self.lattice, self.lattice_row = quantum(values[max(0, at + 1 - LATTICE_ROWS) : at + 1]), at
            since, self.seen_row = values[self.seen_row + 1 : row + 1], row
            points = words.points[:, i]
            issue = Issue(
                points=points if len(points) > 1 else np.where(np.isfinite(points), points, last[i]),
                last=last[i],
                scale=scale[i],
                low=None if words.low is None else words.low[i],
                high=None if words.high is None else words.high[i],
                recent=recent,
                quantum=self.lattice,
                move=values[row] - values[row - 1] if row else None,
                extremes=np.stack([np.fmin.reduce(since), np.fmax.reduce(since)]) if len(since) > 1 else None,
            )
            out[i] = self.online.issue(row, issue)
            way = (out[i][:, EDGES] - out[i][:, MEDIAN, None]) * SIDES
            self.half[i] = half_widths_of(way, self.online.spans, self.online.largest.T)
            total += self.online.weights()
        return out, total
