"""A blend: a grid's recent rows, the experts that forecast from them, and how they were combined so far.

What the daemon keeps per grid. Rows are numbered from the epoch, so that they are the same after a restart;
a row without a reading is a gap.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.half_widths import half_widths_of, never_shrinking
from models.load.bands import marginal_quantiles
from models.load.context import (
    CALM_ROWS,
    LATTICE_EVERY_ROWS,
    LATTICE_ROWS,
    RECENT_ROWS,
    recent_sample,
    restlessness_now,
)
from models.load.expert_aggregation import ExpertAggregation, Issue, stride
from models.load.fits import kept_span
from models.load.forecaster import BANDS, MEDIAN, Forecaster, ForecastGrid
from models.load.last_value import last_within
from models.load.panel import SeriesPanel
from models.load.quantisation import quantum
from models.load.schedule import SCHEDULE
from twin.catalogue import F32, F64, I32, NS, ContractError

SPARE = 0.125  # of the rows kept: the buffer moves them together only so often
BLOCK_ROWS = 64  # rows kept together for snapshots
EDGES = list(BANDS["90"])  # places of the band's edges in LEVELS
SIDES = np.array([-1.0, 1.0])  # where they lie from the median


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows that a blend keeps: how many, the time zone of the people there, and the columns beside the
    series that may be known ahead.
    """

    count: int
    zone: str = "UTC"
    known: tuple[str, ...] = ()


class Blend:
    """Forecasts of `n` series on one grid.

    `experts` forecast from the rows; `more` names those whose points are given from outside.
    """

    def __init__(
        self,
        grid: ForecastGrid,
        n: int,
        rows: KeptRows,
        experts: Sequence[Forecaster],
        more: tuple[str, ...] = (),
    ) -> None:
        self.grid, self.n, self.rows, self.more, self.zone = grid, n, rows.count, more, rows.zone
        self.experts = tuple(experts)
        self.names = (*(expert.name for expert in experts), *more)
        # Nothing is read beyond what is filled, so rows that are to come take no memory yet
        self.span = kept_span(self.rows)
        self._buffer = np.empty((self.span.most + max(1, int(self.rows * SPARE)), n))
        self._known_names = rows.known
        self._known = np.full((len(self._buffer), len(rows.known)), np.nan)
        self._ahead = np.full((grid.horizons[-1], len(rows.known)), np.nan)
        self._filled = 0
        self._blocks: list[F32] = []  # the same rows once more, for snapshots: written once, row by row
        self._block_filled = BLOCK_ROWS  # rows in the last block
        self._memo: dict[Hashable, Any] = {}  # of experts, about the rows; empty when rows become others
        self.row = -1  # number of the newest row; -1: none yet
        self._lattice, self._lattice_row = np.zeros(n), -(2**62)
        self._columns: F64 | None = None  # known columns of all rows kept and those ahead, while it speaks
        self._bases: dict[tuple[int, int, int], str] = {}  # words on weights, until they change
        self.online = [ExpertAggregation(h, n, self.names, stride(h)) for h in grid.horizons]

    @property
    def step_ns(self) -> int:
        """Length of a row."""
        return round(self.grid.step_s * NS)

    @property
    def _kept(self) -> int:
        """Number of rows that are known now."""
        return min(self._filled, self.row - self.span.first(self.row) + 1)

    def panel(self, rows: int | None = None) -> SeriesPanel:
        """The newest rows, as many as are kept or at most `rows`. A view."""
        kept = self._kept if rows is None else min(rows, self._kept)
        values = self._buffer[self._filled - kept : self._filled]
        start_ns = (self.row - kept + 1) * self.step_ns
        columns = self._with_ahead(kept) if self._columns is None else self._columns
        known = dict(zip(self._known_names, columns[len(columns) - kept - len(self._ahead) :].T, strict=True))
        return SeriesPanel(start_ns, self.grid.step_s, values, zone=self.zone, known=known, memo=self._memo)

    def _with_ahead(self, kept: int) -> F64:
        """Known columns of the newest rows and of those ahead [kept + ahead, n_known]."""
        return np.vstack([self._known[self._filled - kept : self._filled], self._ahead])

    def append(self, row: int, values: F64, known: F64 | None = None) -> None:
        """A row is complete [n], [n_known]. Rows left out are gaps; an older one is not taken."""
        if row <= self.row:
            return
        missed = row - self.row - 1 if self.row >= 0 else 0
        if missed >= self.span.most:
            self._filled = missed = 0
            self._refill()
        for _ in range(missed):
            self._push(np.nan, None)
        self._push(values, known)
        self.row = row
        for online in self.online:
            online.learn(row, values)

    def _push(self, values: F64 | float, known: F64 | None) -> None:
        if self._filled == len(self._buffer):
            for rows in (self._buffer, self._known):
                rows[: self.span.most - 1] = rows[self._filled - self.span.most + 1 :]
            self._filled = self.span.most - 1
        # In single precision, so that a snapshot of half the size gives the same forecasts.
        self._buffer[self._filled] = single = np.float32(values)
        self._keep(single)
        self._known[self._filled] = np.nan if known is None else np.float32(known)
        self._filled += 1

    def _keep(self, single: F32 | np.float32) -> None:
        """A row for snapshots."""
        if self._block_filled == BLOCK_ROWS:
            spare = max(0, len(self._blocks) - -(-self.span.most // BLOCK_ROWS))
            self._blocks = [*self._blocks[spare:], np.empty((BLOCK_ROWS, self.n), np.float32)]
            self._block_filled = 0
        self._blocks[-1][self._block_filled] = single
        self._block_filled += 1

    def say(self, more: Mapping[str, F64], ahead: F64 | None = None) -> F64:
        """Low edge, median and high edge of every horizon's 90 % band from the newest row [n_horizon, n, 3].

        No band is narrower than one of a shorter horizon; edges are NaN before LEAST_SPANS were seen.

        `more` gives, for each expert from outside, its points [n_horizon, n]; `ahead` the known columns of
        the rows to come [largest horizon, n_known].
        """
        self._ahead = np.full_like(self._ahead, np.nan) if ahead is None else ahead
        self._bases = {}
        self._columns = self._with_ahead(self._kept)
        try:
            return self._say(more)
        finally:
            self._columns = None

    def _say(self, more: Mapping[str, F64]) -> F64:
        words, low, high = [], None, None
        panels: dict[int, SeriesPanel] = {}
        for expert in self.experts:
            reach = expert.reach_rows if expert.reach_rows <= self.rows else self.span.most
            if reach not in panels:
                panels[reach] = self.panel(reach)
            panel = panels[reach]
            word = expert.predict(panel, np.array([panel.n_time - 1]))
            words.append(word.point[:, 0])
            if word.low is not None and word.high is not None:
                low, high = word.low[:, 0], word.high[:, 0]
        points = np.array([*words, *(more[name] for name in self.more)])  # [n_expert, n_horizon, n]
        near = self.panel(CALM_ROWS + 1).values
        scale = restlessness_now(near)
        last = last_within(near, np.array([len(near) - 1]), len(near))[0]
        self._look_at_lattice()
        if (
            SCHEDULE in self.more
        ):  # where nobody else speaks yet, the schedule without an end is the last value
            planned = points[self.names.index(SCHEDULE)]
            np.copyto(planned, last, where=~np.isfinite(points).any(axis=0))
        usual = None
        if any(online.looks for online in self.online):
            past = self.panel(RECENT_ROWS).values
            usual = marginal_quantiles(recent_sample(past, len(past) - 1))
        said = np.array(
            [
                online.issue(
                    self.row,
                    Issue(
                        points[:, i],
                        last,
                        scale,
                        self._lattice,
                        None if low is None else low[i],
                        None if high is None else high[i],
                        marginal=usual,
                        move=near[-1] - near[-2] if len(near) > 1 else None,
                    ),
                )
                for i, online in enumerate(self.online)
            ]
        )
        return self._band(said[..., MEDIAN], said[..., EDGES])

    def _band(self, median: F64, edges: F64) -> F64:
        """Return median [n_horizon, n] and edges [n_horizon, n, 2], as far apart as the observations
        support."""
        spans = np.array([online.spans for online in self.online])
        largest = np.array([online.largest.T for online in self.online])
        half = half_widths_of((edges - median[..., None]) * SIDES, spans, largest)
        low, high = np.moveaxis(median[..., None] + SIDES * never_shrinking(half), -1, 0)
        never_below_zero = self.online[0].lowest == 0.0
        low = np.where(never_below_zero, np.maximum(low, 0.0), low)
        return np.stack([low, median, high], axis=-1)

    def awaits_row(self, horizon: int, series: int, open_row: int) -> int | None:
        """Return the row at whose end the band of a series begins if it reports until then; None if it has
        one.

        `horizon` is a place in those of the grid, `open_row` the row that is not complete yet.
        """
        return self.online[horizon].awaits_row(series, open_row if self.row < 0 else self.row)

    def _look_at_lattice(self) -> None:
        if self.row - self._lattice_row >= LATTICE_EVERY_ROWS:
            self._lattice, self._lattice_row = quantum(self.panel(LATTICE_ROWS).values), self.row

    def memory(self) -> dict[str, np.ndarray]:
        """All of it, exact. No array is written to later."""
        blocks = [*self._blocks[:-1], *(block[: self._block_filled] for block in self._blocks[-1:])]
        surplus = sum(map(len, blocks)) - self._kept
        while blocks and surplus >= len(blocks[0]):
            surplus -= len(blocks.pop(0))
        blocks[:1] = [block[surplus:] for block in blocks[:1]]
        out: dict[str, np.ndarray] = {
            **{f"rows/{place}": block for place, block in enumerate(blocks)},
            "known": self._known[self._filled - self._kept : self._filled].copy(),
            "at": np.array([self.row, self._lattice_row], np.int64),
            "lattice": self._lattice.copy(),
        }
        for online in self.online:
            out |= {f"{online.horizon}/{name}": array for name, array in online.memory().items()}
        return out

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave. Raises ContractError if it is of another shape."""
        n_block = sum(key.startswith("rows/") for key in memory)
        blocks = [memory[f"rows/{place}"] for place in range(n_block)]
        shapes = [block.shape for block in blocks]
        if any(len(shape) != 2 or shape[1] != self.n for shape in shapes):
            raise ContractError(f"rows: expected blocks of {self.n} series, got {shapes}")
        rows = np.concatenate([np.zeros((0, self.n), np.float32), *blocks])
        if len(rows) > self.span.most:
            raise ContractError(f"rows: expected at most {self.span.most}, got {len(rows)}")
        self._buffer[: len(rows)] = rows
        self._known[: len(rows)] = memory["known"]
        self._filled = len(rows)
        self.row, self._lattice_row = (int(x) for x in memory["at"])
        self._refill()
        self._lattice = np.array(memory["lattice"])
        for online in self.online:
            prefix = f"{online.horizon}/"
            online.restore({k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)})
        self._bases = {}

    def remap(self, old_of_new: I32) -> None:
        """Series i was `old_of_new[i]` before, -1 if it is new."""
        there = np.flatnonzero(old_of_new >= 0)
        was = old_of_new[there]
        n = len(old_of_new)
        buffer = np.empty((len(self._buffer), n))
        buffer[: self._filled] = np.nan
        buffer[: self._filled, there] = self._buffer[: self._filled, was]
        lattice = np.zeros(n)
        lattice[there] = self._lattice[was]
        self._buffer, self._lattice, self.n = buffer, lattice, n
        self._refill()
        for online in self.online:
            online.remap(old_of_new)

    def _refill(self) -> None:
        """The rows have become others."""
        self._bases = {}
        self._memo, self._blocks, self._block_filled = {}, [], BLOCK_ROWS
        for row in self.panel().values:
            self._keep(row.astype(np.float32))

    def basis(self, horizon: int, series: slice) -> str:
        """The experts that carry the forecast of these series, as a sentence."""
        key = (horizon, series.start, series.stop)
        if key not in self._bases:
            weights = np.nan_to_num(self.online[horizon].weights()[series])
            share = weights.sum(axis=0) / max(1, len(weights))
            order = np.argsort(-share, kind="stable")[:3]
            named = (f"{self.names[i]} {100 * share[i]:.0f} %" for i in order if share[i] >= 0.01)
            self._bases[key] = ", ".join(named)
        return self._bases[key]
