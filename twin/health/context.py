"""Health context: the read-only inputs of a verdict from the engine.

Columns are taken once and shared by all rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twin.catalogue import F32, F64, I64, Bool, signal_of
from twin.contracts import Fault, Residual, Windows
from twin.diagnosis import Diagnosis
from twin.estimation import Estimator
from twin.site import Site
from twin.telemetry import JobSlots, State


@dataclass(slots=True)
class HealthContext:
    """Engine state of one look."""

    site: Site
    state: State
    estimator: Estimator
    diagnosis: Diagnosis
    jobs: JobSlots
    windows: Windows
    dt_s: float  # since the last look
    _good: dict[str, F32] = field(default_factory=dict)
    _fresh: dict[str, Bool] = field(default_factory=dict)

    @property
    def now_ns(self) -> int:
        """Return the instant of the tick, ns."""
        return self.state.now_ns

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return the faults that the diagnosis reports now."""
        return self.diagnosis.faults

    def n(self, table: str) -> int:
        """Return the number of entities of a table."""
        return self.site.sizes[table]

    def good(self, key: str) -> F32:
        """Return the values [n] that are good and not stale; NaN elsewhere. Read only."""
        known = self._good.get(key)
        if known is None:
            signal = signal_of(key)
            value = self.state.tables[signal.table].value[signal.row]
            fresh = self.fresh(key)
            known = value.copy() if fresh.all() else np.where(fresh, value, np.float32(np.nan))
            self._good[key] = known
        return known

    def fresh(self, key: str) -> Bool:
        """Return the mask of entities whose signal or counter is good and not stale [n]. Read only."""
        known = self._fresh.get(key)
        if known is None:
            signal = signal_of(key)
            known = self._fresh[key] = self.state.tables[signal.table].current(signal, self.now_ns)
        return known

    def age_s(self, key: str) -> F64:
        """Return the seconds since the last good reading [n]; inf without one."""
        signal = signal_of(key)
        return self.state.tables[signal.table].age_s(signal, self.now_ns)

    def total(self, key: str) -> I64:
        """Return the growth of a counter since its first reading [n], without resets. Read only."""
        signal = signal_of(key)
        total: I64 = self.state.tables[signal.table].total[signal.row]
        return total

    def raw(self, key: str) -> I64:
        """Return the raw counter of the device [n]; -1 if it never reported. Read only."""
        signal = signal_of(key)
        raw: I64 = self.state.tables[signal.table].raw[signal.row]
        return raw

    def ever_reported(self, key: str) -> bool:
        """Return True if any entity ever reported this signal or counter."""
        signal = signal_of(key)
        column = self.state.tables[signal.table]
        if signal.kind == "counter":
            return bool((column.raw[signal.row] >= 0).any())
        # A good value was reported; only where there is none, it is looked for
        some = column.bad_count[signal.row] < column.n
        return bool(some or np.isfinite(column.value[signal.row]).any())

    def residual(self, name: str) -> Residual | None:
        """Return a comparison of the estimator, such as `gpu.temp`."""
        return self.estimator.residuals.get(name)

    def under_work(self, table: str, asleep: bool = True) -> Bool | None:
        """Return the mask of entities under maintenance or, with `asleep`, off on purpose [n]; None: none
        is."""
        return self.windows.mask(table, asleep)

    def without_data(self, table: str) -> Bool | None:
        """Return the mask of entities that an outage keeps silent [n]; None: none is."""
        return self.diagnosis.silence.outages.masks.get(table)
