"""Freshness: the one rule that says for how long a reading is current.

A signal has a reporting period: the site's `periods_s`, else the catalogue's. A reading is current until it
is older than three periods; its worst case begins to drift after one and a half. Every other module asks
`TableState` (`current`, `timely`, `quality_of`) or reads the ages here; none compares them itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Signal

# A reading is stale after this many of its periods (domain rule: safe caps after three).
STALE_PERIODS = 3.0
# Its worst case begins to drift after this many (a late message is not yet a silent sensor).
DRIFT_PERIODS = 1.5


class Freshness:
    """The reporting periods of a table, one row per signal: gauges and states first, then counters."""

    def __init__(self, table: str, periods_s: Mapping[str, float] | None = None) -> None:
        spec, given = TABLES[table], periods_s or {}
        self.n_gauges = len(spec.gauges)
        self.period_s: F64 = np.array(
            [given.get(s.key, given.get(table, s.period_s)) for s in (*spec.gauges, *spec.counters)]
        )
        self.stale_s: F64 = STALE_PERIODS * self.period_s
        self.stale_ns: I64 = np.minimum(np.rint(self.stale_s * NS), 2.0**62).astype(np.int64)
        self.drift_s: F64 = DRIFT_PERIODS * self.period_s
        for array in (self.period_s, self.stale_s, self.stale_ns, self.drift_s):
            array.flags.writeable = False

    def row_of(self, signal: Signal) -> int:
        """The row of a signal of this table."""
        return signal.row + self.n_gauges if signal.kind == "counter" else signal.row

    def oldest_ns(self, row: int, now_ns: int) -> int:
        """The instant of the oldest reading of a row that is still current; an instant of 0 never is."""
        return max(now_ns - int(self.stale_ns[row]), 1)
