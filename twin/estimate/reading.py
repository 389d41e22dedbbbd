"""The good readings of a tick: values as float64 with their instants, each signal looked up once.

What is stale, distrusted or missing is NaN. May import the catalogue, frames and the state.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F64, I64, NS
from twin.signals import TABLES
from twin.state import GOOD, STALE_PERIODS, State


class Readings:
    """A state as the estimator looks at it in one tick; arrays that it gives are shared: do not write."""

    def __init__(self, state: State) -> None:
        self.state, self.now_ns = state, state.now_ns
        self._good: dict[tuple[str, str], tuple[F64, I64]] = {}
        self._oldest_ns: dict[tuple[str, int], int] = {}

    def good(self, table: str, name: str) -> tuple[F64, I64]:
        """(good values [n], NaN elsewhere; instants of the readings [n])."""
        key = (table, name)
        if key not in self._good:
            self._good[key] = self._look(table, name)
        return self._good[key]

    def known(self, table: str, name: str) -> bool:
        """Whether any entity has a reading that was not called bad, however old."""
        column = self.state.tables[table]
        row = TABLES[table].by_name[name].row
        return bool(column.bad_count[row] < column.n)

    def _look(self, table: str, name: str) -> tuple[F64, I64]:
        column, signal = self.state.tables[table], TABLES[table].by_name[name]
        row = signal.row
        group = int(column.partition.group_of_row[row])
        heard_ns: I64 = column.t_ns[group]
        bad = int(column.bad_count[row])
        if bad >= column.n:
            return np.full(column.n, np.nan), heard_ns
        value = column.value[row].astype(np.float64)
        if bad:
            np.copyto(value, np.nan, where=column.quality[row] != GOOD)
        oldest_ns = self._oldest_ns.get((table, group))
        if oldest_ns is None:
            oldest_ns = self._oldest_ns[table, group] = int(heard_ns.min(initial=self.now_ns))
        stale_ns = self.now_ns - round(STALE_PERIODS * signal.period_s * NS)
        if oldest_ns < stale_ns:
            np.copyto(value, np.nan, where=heard_ns < stale_ns)
        return value, heard_ns
