"""Readings: the current values of signals in one tick as float64, each signal looked up once."""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, TABLES
from twin.telemetry import State


class Readings:
    """A state as the estimator reads it in one tick; arrays that it gives are shared: do not write."""

    def __init__(self, state: State) -> None:
        self.state, self.now_ns = state, state.now_ns
        self._good: dict[tuple[str, str], tuple[F64, I64]] = {}

    def good(self, table: str, name: str) -> tuple[F64, I64]:
        """(current values [n], NaN elsewhere; instants of the readings [n])."""
        key = (table, name)
        if key not in self._good:
            column, signal = self.state.tables[table], TABLES[table].by_name[name]
            value = column.value[signal.row].astype(np.float64)
            if not column.all_current(signal, self.now_ns):
                np.copyto(value, np.nan, where=~column.current(signal, self.now_ns))
            self._good[key] = value, column.heard_ns(signal)
        return self._good[key]

    def known(self, table: str, name: str) -> bool:
        """Return True if any entity has a reading that was not called bad, however old."""
        column = self.state.tables[table]
        return bool(column.bad_count[TABLES[table].by_name[name].row] < column.n)
