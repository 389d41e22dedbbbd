"""Freshness: the rule for how long a reading is current.

A signal has a reporting period: the site's `periods_s`, else the one learned from the gaps between its
messages (`cadence`), before that the one at which its source is polled or that of its peers, else the
catalogue's. A reading is current until it is older than three periods. Its worst case begins to drift after
one and a half, or, where messages come slower than the catalogue says, when it is no longer current: within
such gaps a device may heat up unseen anyway, and a lost message says nothing of it. Every other module asks
`TableState` (`current`, `timely`, `quality_of`) or reads the ages here; none compares them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Bool, Signal
from twin.telemetry.cadence import IRREGULAR, LEARNED, Cadence

# A reading is stale after this many of its periods (domain rule: safe caps after three), where gaps vary, as
# with losses, after more. source: simulated losses of 0 to 30 %, one false alarm in about 600,000 readings
STALE_PERIODS, STALE_PERIODS_IRREGULAR = 3.0, 5.0
# Losses do not show in a few gaps: the stale age is so many periods longer, falling to none.
FEW_GAPS, GAPS_PER_PERIOD = 32, 6.0
# A signal that is sent when it changes is trusted for so many periods while its device reports others.
CHANGE_PERIODS = 30.0
# Its worst case begins to drift after this many (a late message is not yet a silent sensor).
DRIFT_PERIODS = 1.5
# Of a source faster than declared a shorter silence than this is none: a broker that restarts takes as long.
# source: estimate
LEAST_STALE_S = 30.0
# A single sensor, whose device may report others meanwhile, is silent no sooner. source: estimate
LEAST_SILENT_S = 6.0
LEAST_LATE_S = 3.0  # ticks of a second and their jitter are no delay. source: estimate
LEARNING_S = 900.0  # nor before its cadence is known: three times a report every 5 min
# The period of a signal with a single reading is unknown: its worst case waits for a usual scrape.
# source: estimate, Prometheus scrapes every 15 to 60 s
FIRST_GAP_S = 60.0
# A job reports when it saves, which is no cadence.
NOT_LEARNED = ("job",)


class AgeLimits(NamedTuple):
    """Ages per entity [n]: a reading is stale after `stale_ns`, and its worst case drifts after `drift_s`.

    `silent_ns`: its own sensor is silent, whatever was declared. `late_s`: its next message is late.
    `change_s`: all of these, for what is sent when it changes, while its device reports others.
    """

    stale_ns: I64
    drift_s: F64
    silent_ns: I64
    late_s: F64
    change_s: F64


class Freshness:
    """The reporting periods of a table, one row per signal: gauges and states first, then counters.

    `period_s` is the declared one; `stale_s` (`stale_ns`) and `drift_s` [rows] are the least that a limit may
    be.
    """

    def __init__(self, table: str, periods_s: Mapping[str, float] | None = None) -> None:
        spec, given = TABLES[table], periods_s or {}
        signals = (*spec.gauges, *spec.counters)
        self.n_gauges = len(spec.gauges)
        self.period_s: F64 = np.array([given.get(s.key, given.get(table, s.period_s)) for s in signals])
        # Rows whose period is set by the site, or is not learned
        self.fixed: Bool = np.array(
            [table in NOT_LEARNED or s.key in given or table in given for s in signals], np.bool_
        )
        declared_s = STALE_PERIODS * self.period_s
        self.stale_s: F64 = np.where(self.fixed, declared_s, np.minimum(declared_s, LEAST_STALE_S))
        self.drift_s: F64 = DRIFT_PERIODS * self.period_s
        self.stale_ns = tuple(round(stale_s * NS) for stale_s in self.stale_s.tolist())
        for array in (self.period_s, self.fixed, self.stale_s, self.drift_s):
            array.flags.writeable = False

    def row_of(self, signal: Signal) -> int:
        """Return the row of a signal of this table."""
        return signal.row + self.n_gauges if signal.kind == "counter" else signal.row

    def limits(self, row: int, group: int, cadence: Cadence) -> AgeLimits:
        """Return the limits of the readings of a row, which arrives with this group."""
        declared_s = float(self.period_s[row])
        if self.fixed[row]:
            stale_s, drift_s = (
                np.full(cadence.n, periods * declared_s) for periods in (STALE_PERIODS, DRIFT_PERIODS)
            )
            silent_ns = _in_ns(np.maximum(stale_s, LEAST_SILENT_S))
            return AgeLimits(_in_ns(stale_s), drift_s, silent_ns, np.maximum(drift_s, LEAST_LATE_S), stale_s)
        period_s, gaps = cadence.period_s(group), cadence.gaps[group]
        learned: Bool = gaps >= LEARNED
        expected = learned
        if not learned.all():
            expected_s = cadence.expected_s(group)
            period_s = np.where(learned, period_s, np.maximum(period_s, expected_s))
            expected = learned | (expected_s > 0.0)
        lag_s = cadence.lag_s[group].astype(np.float64)
        longer_s = np.maximum(period_s, declared_s)
        periods = np.where(cadence.irregular(group), STALE_PERIODS_IRREGULAR, STALE_PERIODS)
        periods += np.maximum(FEW_GAPS - gaps, 0) / GAPS_PER_PERIOD
        own_s = np.where(expected, periods * period_s, STALE_PERIODS * longer_s)
        stale_s = np.maximum(own_s, self.stale_s[row]) + lag_s
        silent_s = np.maximum(own_s, np.where(expected, LEAST_SILENT_S, LEARNING_S)) + lag_s
        late_s = np.where(gaps >= LEARNED, DRIFT_PERIODS / STALE_PERIODS * own_s, FIRST_GAP_S)
        late_s = np.maximum(late_s, LEAST_LATE_S) + lag_s
        # Silence is never more dangerous than declared
        slower = period_s > IRREGULAR * declared_s
        drift_s = np.where(slower, periods * period_s, self.drift_s[row])
        drift_s = np.where((gaps == 0) & ~expected, np.maximum(drift_s, FIRST_GAP_S), drift_s) + lag_s
        return AgeLimits(
            _in_ns(stale_s), drift_s, _in_ns(silent_s), late_s, CHANGE_PERIODS * longer_s + lag_s
        )


def _in_ns(seconds: F64) -> I64:
    return np.minimum(np.rint(seconds * NS), 2.0**62).astype(np.int64)
