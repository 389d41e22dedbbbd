"""View: read-only access of policies and models to the engine's state. Derived values are computed once.

A view lives for one tick, or for one response of an interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from twin import kernels
from twin.catalogue import (
    F32,
    F64,
    I32,
    I64,
    U8,
    Bool,
    ContractError,
    Signal,
    find_control,
    find_quantity,
    find_signal,
)
from twin.contracts import (
    FailureLog,
    Fault,
    Forecast,
    Health,
    LoadTarget,
    NodeFeatures,
    Residual,
    Service,
    ServiceBook,
    Windows,
    read_only,
)
from twin.control import Arbiter
from twin.diagnosis import Diagnosis, danger_sign
from twin.engine.event_handlers import Intake
from twin.estimation import Estimator, worst_case
from twin.health import HealthState
from twin.site import Envelope, Limit, Site
from twin.telemetry import GOOD, JobSlots, OperatorRequest, SignalHistory, State

WORST_SIGMAS = 2.0  # of a value that others imply, to the dangerous side


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineView:
    """Implementation of `twin.contracts.contracts.View`. `Engine.view` creates it."""

    now_ns: int
    dt_s: float
    site: Site
    jobs: JobSlots
    requests: tuple[OperatorRequest, ...]
    forecasts: Mapping[tuple[str, float], Forecast]
    state: State
    arbiter: Arbiter
    estimator: Estimator
    history: SignalHistory
    intake: Intake
    windows: Windows
    diagnosis: Diagnosis
    health_state: HealthState
    service_book: ServiceBook
    _cache: dict[tuple[str, str], Any] = field(default_factory=dict, init=False, repr=False)

    def _signal(self, key: str) -> Signal:
        signal = find_signal(key)
        if signal is None:
            raise ContractError(f"{key} is not a signal of the catalogue")
        return signal

    def value(self, key: str) -> F32:
        """Return the last good value per entity."""
        signal = self._signal(key)
        return cast(F32, read_only(self.state.tables[signal.table].value[signal.row]))

    def believed(self, key: str) -> F32:
        """Return the last good value per entity, or the implied value if other readings contradict it."""
        found = self._cache.get(("believed", key))
        if found is None:
            found, doubted = self.value(key), self.diagnosis.reconciliation.of(key, self.now_ns)
            if doubted is not None:
                found = found.copy()
                found[doubted[0]] = doubted[1]
                found = read_only(found)
            self._cache["believed", key] = found
        return cast(F32, found)

    def worst(self, key: str) -> F32:
        """Return the worst value that is possible by now."""
        found = self._cache.get(("worst", key))
        if found is None:
            parts = self.site, self.state, self.estimator, self.windows
            found = worst_case(*parts, self._signal(key))
            doubted = self.diagnosis.reconciliation.of(key, self.now_ns)
            if doubted is not None:
                index, value, sigma = doubted
                fresh, found = self.quality(key)[index] == GOOD, found.copy()
                found[index[fresh]] = (value + danger_sign(key) * WORST_SIGMAS * sigma)[fresh]
            found = self._cache["worst", key] = read_only(found)
        return cast(F32, found)

    def quality(self, key: str) -> U8:
        """Quality per entity."""
        found = self._cache.get(("quality", key))
        if found is None:
            signal = self._signal(key)
            found = read_only(self.state.tables[signal.table].quality_of(signal, self.now_ns))
            self._cache["quality", key] = found
        return cast(U8, found)

    def lately_good(self, key: str) -> Bool:
        """Return True where the last good reading is not stale by its own cadence."""
        signal, good = self._signal(key), np.asarray(self.quality(key) == GOOD, np.bool_)
        if signal.kind == "counter":
            raise ContractError(f"{key} is a counter, which keeps no instant of a good reading")
        if good.all():
            return good
        return np.asarray(good | self.state.tables[signal.table].lately_good(signal, self.now_ns))

    def age_s(self, key: str) -> F64:
        """Return the seconds since the last good reading."""
        found = self._cache.get(("age", key))
        if found is None:
            signal = self._signal(key)
            found = read_only(self.state.tables[signal.table].age_s(signal, self.now_ns))
            self._cache["age", key] = found
        return cast(F64, found)

    def total(self, key: str) -> I64:
        """Growth of a counter since it first reported."""
        signal = self._signal(key)
        if signal.kind != "counter":
            raise ContractError(f"{key} is not a counter")
        return cast(I64, read_only(self.state.tables[signal.table].total[signal.row]))

    def series(self, key: str) -> tuple[I64, F32] | None:
        """(instants, values [n_kept, n]) of a signal with declared history, oldest first; None without."""
        ring = self.history.rings.get(key)
        return None if ring is None else ring.ordered()

    def envelope(self, control: str) -> Envelope:
        """Allowed range of a control."""
        return self.site.envelopes[control]

    def limit(self, key: str) -> Limit | None:
        """Guard and limit of a signal; None without."""
        return self.site.limits.get(key)

    def beyond(self, key: str) -> I32:
        """Entities whose worst case is beyond the guard of a signal."""
        found = self._cache.get(("beyond", key))
        if found is None:
            limit, worst = self.site.limits.get(key), self.worst(key)
            if limit is None:
                found = np.zeros(0, np.int32)
            else:
                found = np.empty(len(worst), np.int32)
                low = self._signal(key).danger == "low"
                found = found[: kernels.beyond(worst, limit.guard, low, found)].copy()
            self._cache["beyond", key] = found
        return cast(I32, found)

    def commanded(self, control: str) -> F64:
        """Return the value of the running lease per entity; NaN without one."""
        return cast(F64, read_only(self.arbiter.leases[control].value))

    def targets(self, request: OperatorRequest) -> I32:
        """The entities that a standing request names."""
        return self.intake.targets(request, self.site)

    def readback(self, control: str) -> F64:
        """Value of a control as the device reports it [n] float64; NaN where it does not."""
        found = self._cache.get(("readback", control))
        if found is None:
            spec = find_control(control)
            if spec is None:
                raise ContractError(f"{control} is not a control of the catalogue")
            if spec.readback is None:
                found = np.full(self.site.sizes[spec.table], np.nan)
            else:
                found = self.value(f"{spec.table}.{spec.readback}").astype(np.float64)
            found = self._cache["readback", control] = read_only(found)
        return cast(F64, found)

    def readback_ns(self, control: str) -> I64:
        """Instant of the last read-back of a control [n]; long ago where it has none."""
        found = self._cache.get(("readback_ns", control))
        if found is None:
            spec = find_control(control)
            if spec is None or spec.readback is None:
                return np.zeros(0 if spec is None else self.site.sizes[spec.table], np.int64)
            signal = self._signal(f"{spec.table}.{spec.readback}")
            found = read_only(self.state.tables[spec.table].last_good_ns(signal))
            self._cache["readback_ns", control] = found
        return cast(I64, found)

    def budget_w(self) -> F64:
        """Budget per feeder, in force now."""
        found = self._cache.get(("budget", "feeder"))
        if found is None:
            found = self._cache["budget", "feeder"] = read_only(self.intake.budget_w(self.site, self.now_ns))
        return cast(F64, found)

    def load_targets(self) -> tuple[LoadTarget, ...]:
        """Load targets that run or are to come."""
        return self.intake.load_targets.current(self.site)

    def outlook(self, quantity: str, at_ns: int) -> F64:
        """Values of a quantity at a coming instant, as an external source announced them."""
        if find_quantity(quantity) is None:
            raise ContractError(f"{quantity} is not a quantity that can be forecast")
        return self.intake.outlooks.at(quantity, at_ns, self.site)

    def maintenance(self, table: str, asleep: bool = True) -> Bool | None:
        """Entities in maintenance now, or off on purpose [n]; None where there are none."""
        mask = self.windows.mask(table, asleep)
        return None if mask is None else cast(Bool, read_only(mask))

    def vacant(self, table: str) -> Bool | None:
        """Return the slots whose device moved to another slot [n]; None if there are none."""
        return self.intake.identities.vacant(table, self.site)

    def protected_nodes(self) -> Bool:
        """Return the nodes that may not be disturbed unless an operator requests it [n_node]."""
        found = self._cache.get(("protected", "node"))
        if found is None:
            found = read_only(self.jobs.protected_nodes())
            self._cache["protected", "node"] = found
        return cast(Bool, found)

    def residual(self, name: str) -> Residual | None:
        """A comparison of the estimator."""
        return self.estimator.residuals.get(name)

    def faults(self) -> tuple[Fault, ...]:
        """Faults that the diagnosis has isolated."""
        return self.diagnosis.faults

    def missing_coolant_ns(self) -> I64:
        """Since when coolant is missing from the circuit of each CDU [n]."""
        return cast(I64, read_only(self.diagnosis.inventory.missing_since_ns))

    def health(self, part: str) -> Health:
        """Verdicts on all parts of a kind, as last judged."""
        return self.health_state.health(part)

    def node_features(self) -> NodeFeatures:
        """Features of nodes that may precede failures."""
        return self.health_state.features()

    def failures(self) -> FailureLog:
        """Nodes that failed, and the times without observation."""
        log, gaps = self.health_state.log(), self.state.unwatched_ns
        return replace(log, unwatched_ns=gaps) if len(gaps) else log

    def service(self) -> Service:
        """Instants at which nodes were last tested, repaired and replaced."""
        return self.service_book.service()
