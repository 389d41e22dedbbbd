"""The frame: everything that arrived since the last tick, as integers, and the partition of rows by time.

Values travel as multiples of each signal's quantum, so that what the engine saw and what a trace holds are
the same integers. Three integers at the bottom of the range mean "no value" and say why. Imports only
`twin.telemetry.events`; makes no decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twin.catalogue import I32, I64
from twin.telemetry.events import Event

MISSING_Q = -(2**31)  # the source said: no reading
UNTRUSTED_Q = -(2**31) + 1  # the source gave a value and called it not good
ABSURD_Q = -(2**31) + 2  # outside the physical range of the catalogue
FIRST_VALID_Q = -(2**31) + 16

MAX_ROW_SETS = 1000  # remembered sets of rows; a source that keeps inventing new ones only costs time


class TableUpdate(NamedTuple):
    """New values of some rows of a table, all arrived together for the same entities.

    `entity` is unique and ascending, None for all of the table. Shapes: rows [k], entity [m], q [k, m] int32,
    t_ns [m] (device time, or arrival where that is clamped).
    """

    table: str
    rows: I32
    entity: I32 | None
    q: I32
    t_ns: I64


class Counts(NamedTuple):
    """New values of counters: the last raw reading and the growth since the one before, both [k, m].

    A raw of -1 is "no reading". Growth is what the counter gained although it may have been reset or wrapped.
    """

    table: str
    rows: I32
    entity: I32 | None
    raw: I64
    gain: I64
    t_ns: I64


@dataclass(frozen=True, slots=True)
class Frame:
    """All input of one tick. `now_ns` is the nominal instant, `dt_s` the time since the previous frame."""

    tick: int
    now_ns: int
    dt_s: float
    updates: tuple[TableUpdate, ...] = ()
    counts: tuple[Counts, ...] = ()
    events: tuple[Event, ...] = ()
    urgent: bool = False


class Partition:
    """Rows of a table grouped by common reports: one instant per group and entity is exact.

    All rows begin in one group. A report of some rows splits the groups that it covers in part; groups are
    never merged. Thus times are per cell in meaning, and per source in cost.
    """

    def __init__(self, n_rows: int) -> None:
        self.group_of_row = np.zeros(n_rows, np.int32)  # [n_rows]
        self.n_groups = 1
        self._known: dict[bytes, tuple[int, ...]] = {}

    def resolve(self, rows: I32) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return (groups that make up exactly these rows, splits as (parent, new group))."""
        key = rows.tobytes()
        known = self._known.get(key)
        if known is not None:
            return known, []
        splits: list[tuple[int, int]] = []
        member = np.zeros(len(self.group_of_row), np.bool_)
        member[rows] = True
        for group in np.unique(self.group_of_row[rows]).tolist():
            inside = (self.group_of_row == group) & member
            if inside.sum() < (self.group_of_row == group).sum():
                self.group_of_row[inside] = self.n_groups
                splits.append((group, self.n_groups))
                self.n_groups += 1
        if splits:
            self._known.clear()
        groups = tuple(np.unique(self.group_of_row[rows]).tolist())
        if len(self._known) >= MAX_ROW_SETS:
            self._known.clear()
        self._known[key] = groups
        return groups, splits

    def copy(self) -> Partition:
        """Return a copy of the groups with independent splits."""
        out = Partition(len(self.group_of_row))
        out.restore(self.group_of_row, self.n_groups)
        return out

    def restore(self, group_of_row: I32, n_groups: int) -> None:
        """Take over these groups."""
        self.group_of_row, self.n_groups = np.array(group_of_row), n_groups
        self._known.clear()

    def size_of(self, group: int) -> int:
        """Return the number of rows of a group."""
        return int(np.count_nonzero(self.group_of_row == group))

    def rows_of(self, group: int) -> I32:
        """Return the rows of a group, ascending."""
        return np.flatnonzero(self.group_of_row == group).astype(np.int32)
