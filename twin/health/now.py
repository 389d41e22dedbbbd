"""The moment that health is judged in: everything of the engine that a verdict may rest on, read only.

Columns are taken once and shared by all rules. May import the state, the site, the estimator, the diagnosis,
jobs and maintenance windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twin.confidence import Residual
from twin.contracts import Fault
from twin.diagnosis.diagnosis import Diagnosis
from twin.estimator import Estimator
from twin.frame import F32, F64, I64, NS, Bool
from twin.jobs import Jobs
from twin.maintenance import Windows
from twin.signals import Signal, find_signal
from twin.site import Site
from twin.state import GOOD, STALE_PERIODS, State


@dataclass(slots=True)
class Now:
    """One look at the engine."""

    site: Site
    state: State
    estimator: Estimator
    diagnosis: Diagnosis
    jobs: Jobs
    windows: Windows
    dt_s: float  # since the last look
    _good: dict[str, F32] = field(default_factory=dict)
    _fresh: dict[str, Bool] = field(default_factory=dict)
    _in_time: dict[tuple[str, int, float], Bool] = field(default_factory=dict)

    @property
    def now_ns(self) -> int:
        """The instant of the tick."""
        return self.state.now_ns

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What the diagnosis tells now."""
        return self.diagnosis.faults

    def n(self, table: str) -> int:
        """Entities of a table."""
        return self.site.sizes[table]

    def good(self, key: str) -> F32:
        """Values [n] that are good and not stale; NaN elsewhere. Not to be written to."""
        known = self._good.get(key)
        if known is None:
            signal = _signal(key)
            value = self.state.tables[signal.table].value[signal.row]
            fresh = self.fresh(key)
            known = value.copy() if fresh.all() else np.where(fresh, value, np.float32(np.nan))
            self._good[key] = known
        return known

    def fresh(self, key: str) -> Bool:
        """Where a signal or counter is good and not stale [n]. Not to be written to."""
        known = self._fresh.get(key)
        if known is None:
            signal = _signal(key)
            column, counter = self.state.tables[signal.table], signal.kind == "counter"
            row = signal.row + len(column.signals) if counter else signal.row
            known = self._timely(
                signal.table, int(column.partition.group_of_row[row]), float(column.period_s[row])
            )
            if counter:
                known = known & (column.raw[signal.row] >= 0)
            elif column.bad_count[row]:
                known = known & (column.quality[row] == GOOD)
            self._fresh[key] = known
        return known

    def _timely(self, table: str, group: int, period_s: float) -> Bool:
        """Where signals that come together are not stale [n], by the rule of `Column.quality_of`."""
        known = self._in_time.get((table, group, period_s))
        if known is None:
            t_ns = self.state.tables[table].t_ns[group]
            late_s = STALE_PERIODS * period_s
            late_ns = round(late_s * NS)
            late_ns -= late_ns / NS > late_s  # as the quotient is rounded
            known = t_ns >= max(self.now_ns - late_ns, 1)
            self._in_time[table, group, period_s] = known
        return known

    def age_s(self, key: str) -> F64:
        """Seconds since the last good reading [n]; inf where there was none."""
        signal = _signal(key)
        return self.state.tables[signal.table].age_s(signal, self.now_ns)

    def total(self, key: str) -> I64:
        """Growth of a counter since it was first heard [n], resets left out. Not to be written to."""
        signal = _signal(key)
        total: I64 = self.state.tables[signal.table].total[signal.row]
        return total

    def heard(self, key: str) -> bool:
        """Whether any entity ever reported this signal or counter."""
        signal = _signal(key)
        column = self.state.tables[signal.table]
        if signal.kind == "counter":
            return bool((column.raw[signal.row] >= 0).any())
        return column.n > 0 and bool(np.isfinite(column.value[signal.row]).any())

    def residual(self, name: str) -> Residual | None:
        """A comparison of the estimator, such as `gpu.temp`."""
        return self.estimator.residuals.get(name)

    def under_work(self, table: str) -> Bool | None:
        """Where people work [n]; None: nowhere."""
        return self.windows.mask(table)


def _signal(key: str) -> Signal:
    signal = find_signal(key)
    assert signal is not None, key
    return signal
