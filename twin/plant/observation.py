"""What sensors say of a moment: whole columns per table with an instant per entity, and blocks cut from them.

A report is what devices of one kind sent within one round; a block is one device's part of it, as a connector
would decode it. May import readings, events and NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twin.events import Event
from twin.frame import F32, I64, Bool
from twin.reading import Block


@dataclass(slots=True)
class Report:
    """Columns of all of a table. Shapes: values [len(signals), n], counts [len(counters), n], t_ns [n].

    NaN and negative counts are "no reading", as in a Block. `present` [n]: entities of which nothing came at
    all are False; None = all spoke. It has arrived as a whole at `arrival_ns`, never before its last instant.
    """

    table: str
    signals: tuple[str, ...]
    values: F32
    counters: tuple[str, ...]
    counts: I64
    t_ns: I64
    arrival_ns: int
    present: Bool | None = None

    def runs(self) -> list[tuple[int, int]]:
        """(first, end) of neighbours that spoke; those that kept silent lie between."""
        if self.present is None:
            return [(0, len(self.t_ns))] if len(self.t_ns) else []
        edge = np.flatnonzero(np.diff(self.present, prepend=False, append=False))
        return list(zip(edge[::2].tolist(), edge[1::2].tolist(), strict=True))

    def blocks(self) -> list[Block]:
        """Runs of neighbours that spoke at one instant. Their arrays are views of this report's."""
        out: list[Block] = []
        step = np.flatnonzero(np.diff(self.t_ns)) + 1
        for first, end in self.runs():
            cuts = [first, *step[(step > first) & (step < end)].tolist(), end]
            for a, b in pairwise(cuts):
                out.append(
                    Block(self.table, a, self.signals, self.values[:, a:b], self.counters,
                          self.counts[:, a:b], int(self.t_ns[a]))
                )  # fmt: skip
        return out

    def column(self, signal: str) -> F32:
        """The values [n] of one signal. Raises ValueError for one that is not in it."""
        row: F32 = self.values[self.signals.index(signal)]
        return row

    def copy(self) -> Report:
        """The same with arrays of its own."""
        present = None if self.present is None else self.present.copy()
        return Report(self.table, self.signals, self.values.copy(), self.counters, self.counts.copy(),
                      self.t_ns.copy(), self.arrival_ns, present)  # fmt: skip


@dataclass(slots=True)
class Observation:
    """All that came in up to `now_ns`, in order of arrival.

    The arrays belong to the sensors, which write over them at the next observation: `copy` what is kept.
    """

    reports: list[Report]
    events: Sequence[Event]
    now_ns: int

    @property
    def blocks(self) -> list[Block]:
        """Blocks of all reports, in order of arrival."""
        return [block for report in self.reports for block in report.blocks()]

    def find(self, table: str, signal: str) -> Report | None:
        """The report that has this signal, or None where it was not due."""
        return next((r for r in self.reports if r.table == table and signal in r.signals), None)

    def copy(self) -> Observation:
        """The same with arrays of its own."""
        return Observation([r.copy() for r in self.reports], tuple(self.events), self.now_ns)
