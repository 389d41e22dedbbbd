"""A blend: a grid's recent rows, the experts that forecast from them, and how they were combined so far.

What the daemon keeps per grid. Rows are numbered from the epoch, so that they are the same after a restart;
a row that nobody heard is a gap. NumPy only; `fit` runs in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.context import CALM_ROWS, recent_sample, restlessness
from models.forecaster import Forecaster, Grid, Parameters, last_known
from models.forecasters import DEFAULT_EXPERTS, FORECASTERS
from models.lattice import quantum
from models.online import Issue, Online
from models.panel import Panel
from twin.errors import ContractError
from twin.frame import F64, I32, NS

SPARE = 0.25  # of the rows kept: the buffer moves them together only so often
LATTICE_EVERY_ROWS = 60  # how often the step of the series' lattice is looked for
SAMPLE_EVERY_ROWS = 16  # how often the sample of recent values is drawn anew


def stride_of(horizon: int) -> int:
    """Rows between forecasts that are remembered and judged: sixteen in flight per horizon at most."""
    return max(1, horizon // 16)


class Blend:
    """Forecasts of `n` series on one grid; `rows` of past are kept. `more` names experts given from outside."""

    def __init__(
        self,
        grid: Grid,
        n: int,
        rows: int,
        experts: tuple[str, ...] = DEFAULT_EXPERTS,
        more: tuple[str, ...] = (),
    ) -> None:
        self.grid, self.n, self.rows, self.more = grid, n, rows, more
        self.experts: list[Forecaster] = [FORECASTERS[name](grid) for name in experts]
        self._buffer = np.full((rows + max(1, int(rows * SPARE)), n), np.nan)
        self._filled = 0
        self.row = -1  # number of the newest row
        self._lattice, self._lattice_row = np.zeros(n), -(2**62)
        names = (*experts, *more)
        self.online = [Online(h, n, names, stride_of(h)) for h in grid.horizons]
        self.parameters: Parameters = {}

    @property
    def step_ns(self) -> int:
        return round(self.grid.step_s * NS)

    def panel(self) -> Panel:
        """The rows that are kept, the newest last. A view."""
        kept = min(self._filled, self.rows)
        values = self._buffer[self._filled - kept : self._filled]
        return Panel((self.row - kept + 1) * self.step_ns, self.grid.step_s, values)

    def append(self, row: int, values: F64) -> None:
        """A row is complete [n]. Rows that were left out are gaps; an older one is not taken back."""
        if row <= self.row:
            return
        missed = row - self.row - 1 if self.row >= 0 else 0
        if missed >= self.rows:
            self._filled = missed = 0
        for _ in range(missed):
            self._push(np.nan)
        self._push(values)
        self.row = row
        for online in self.online:
            online.learn(row, values)

    def _push(self, values: F64 | float) -> None:
        if self._filled == len(self._buffer):
            self._buffer[: self.rows - 1] = self._buffer[self._filled - self.rows + 1 :]
            self._filled = self.rows - 1
        self._buffer[self._filled] = values
        self._filled += 1

    def say(self, more: Mapping[str, F64]) -> F64:
        """Quantiles of every horizon from the newest row [n_horizon, n, n_level].

        `more` gives, per expert from outside, its points [n_horizon, n].
        """
        panel = self.panel()
        said = []
        low = high = None
        for expert in self.experts:
            cut = panel.tail(expert.reach_rows)
            words = expert.predict(cut, np.array([cut.n_time - 1]))
            said.append(words.point[:, 0])
            if words.low is not None and words.high is not None:
                low, high = words.low[:, 0], words.high[:, 0]
        said += [more[name] for name in self.more]
        near = panel.tail(CALM_ROWS + 1)
        scale = restlessness(near.values, np.array([near.n_time - 1]))[0]
        last = last_known(near.values)[-1]
        if self.row - self._lattice_row >= LATTICE_EVERY_ROWS:
            self._lattice, self._lattice_row = quantum(panel.values), self.row
        recent = None
        if self.row % SAMPLE_EVERY_ROWS == 0 or not self._sampled:
            recent, self._sampled = recent_sample(panel.values, panel.n_time - 1), True
        points = np.array(said)  # [n_expert, n_horizon, n]
        return np.array(
            [
                online.issue(
                    self.row,
                    Issue(
                        points[:, i],
                        last,
                        scale,
                        None if low is None else low[i],
                        None if high is None else high[i],
                        recent,
                        self._lattice,
                    ),
                )
                for i, online in enumerate(self.online)
            ]
        )
