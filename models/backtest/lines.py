"""Parts of a load backtest: the experts, fitted and asked alike, and each horizon's line through time.

They see rows up to the last one that they are asked from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from models.load import (
    CALM_ROWS,
    LEVELS,
    Forecaster,
    ForecastGrid,
    Issue,
    Parameters,
    SeriesPanel,
    forward_fill,
    quantum,
    recent_sample,
    restlessness,
)
from twin.catalogue import F64, I64, ContractError

LATTICE_EVERY_ROWS = 60  # as in the daemon
LATTICE_ROWS = 2000  # of past in which the step of the lattice is looked for. source: estimate
SAMPLE_EVERY = 8  # issues between two samples of the recent past. source: estimate


class Combines(Protocol):
    """The part of `ExpertAggregation` that a backtest needs."""

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


class Experts:
    """Some experts on one grid, fitted alike and asked alike."""

    def __init__(self, grid: ForecastGrid, kinds: Mapping[str, type[Forecaster]], seed: int) -> None:
        self.grid, self.seed, self.names = grid, seed, tuple(kinds)
        self.each = {name: kind(grid) for name, kind in kinds.items()}

    def fit_before(self, panel: SeriesPanel, cut: int, names: Sequence[str]) -> dict[str, Parameters]:
        """Parameters of these experts, from the rows before `cut`."""
        past = panel.upto(cut - 1)
        return {name: self.each[name].fit(past, self.seed) for name in names}

    def load(self, parameters: Mapping[str, Parameters]) -> None:
        for name, held in parameters.items():
            self.each[name].load(held)

    def say(self, panel: SeriesPanel, origins: I64) -> ExpertForecasts:
        """Forecasts of all experts from these rows; they see no row after the last of them."""
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
        return ExpertForecasts(points, low, high)


@dataclass
class HorizonLine:
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

    def advance(self, panel: SeriesPanel, words: ExpertForecasts, origins: I64) -> tuple[F64, F64]:
        """Issue from these origins in turn, learning before each what is known by then.

        words: of this horizon, points [n_expert, n_origin, n]. Returns quantiles [n_origin, n, n_level] and
        weights [n, n_expert] summed over the origins.
        """
        values = panel.values
        begin = max(0, int(origins[0]) - CALM_ROWS)
        near = values[begin : int(origins[-1]) + 1]
        last, scale = forward_fill(near)[origins - begin], restlessness(near, origins - begin)
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
