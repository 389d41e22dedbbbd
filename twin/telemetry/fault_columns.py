"""Fault columns: reported faults in order of arrival as arrays, read once for all parts that take them in.

In a storm ten thousand arrive in a tick. An attribute of an event takes far longer to read than a number of
an array, and a name to look up: each is read and looked up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from twin import kernels
from twin.catalogue import I32, I64, TABLES, U8
from twin.site import Site
from twin.telemetry.events import FaultReported

_TABLES = tuple(TABLES)
NO_TABLE = 255


@dataclass(slots=True, eq=False)
class FaultColumns(Sequence[FaultReported]):
    """Faults with their columns [k]. Numbers of more than 63 bits are -1."""

    events: list[FaultReported]
    names: list[str]
    table: U8  # place in the catalogue; NO_TABLE
    numbers: I64  # the columns below [5, k]
    code: I64 = field(init=False)
    times: I64 = field(init=False)
    at_ns: I64 = field(init=False)
    key: I64 = field(init=False)  # of the id, by hash; 0 without one
    mark: I64 = field(init=False)  # of all but the instant, by hash; -1 without an id
    _of_table: dict[str, tuple[Site, FaultColumns, I32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.code, self.times, self.at_ns, self.key, self.mark = self.numbers

    @classmethod
    def of(cls, events: Sequence[FaultReported]) -> FaultColumns:
        """Return the columns of events; columns stay as they are."""
        if isinstance(events, FaultColumns):
            return events
        known, table, numbers = (
            list(events),
            np.empty(len(events), np.uint8),
            np.empty((5, len(events)), np.int64),
        )
        names = kernels.read_faults(known, _TABLES, table, numbers[:3], numbers[3], numbers[4])
        return cls(known, names, table, numbers)

    @classmethod
    def joined(cls, parts: Sequence[FaultColumns]) -> FaultColumns:
        """Return several one after the other."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of([])
        table = np.concatenate([p.table for p in parts])
        events, names = [e for p in parts for e in p.events], [name for p in parts for name in p.names]
        return cls(events, names, table, np.concatenate([p.numbers for p in parts], axis=1))

    def some(self, at: slice | I64) -> FaultColumns:
        """Return a selection, by a slice or by ascending places."""
        rows = range(len(self))[at] if isinstance(at, slice) else at.tolist()
        if len(rows) == len(self):
            return self
        events, names = [self.events[i] for i in rows], [self.names[i] for i in rows]
        return FaultColumns(events, names, self.table[at], np.ascontiguousarray(self.numbers[:, at]))

    def of_table(self, table: str, site: Site) -> tuple[FaultColumns, I32]:
        """Return the faults of a table, and the entity of each [k], -1 for none. Read only."""
        known = self._of_table.get(table)
        if known is None or known[0] is not site:
            mine = self.some(np.flatnonzero(self.table == _TABLES.index(table)))
            known = self._of_table[table] = site, mine, site.entities(table, mine.names)
        return known[1:]

    def tables(self) -> set[str]:
        """Return the tables that have any."""
        return {_TABLES[i] for i in np.flatnonzero(np.bincount(self.table)).tolist() if i != NO_TABLE}

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, at: int) -> FaultReported: ...
    @overload
    def __getitem__(self, at: slice) -> list[FaultReported]: ...
    def __getitem__(self, at: Any) -> Any:
        return self.events[at]
