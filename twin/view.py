"""The view: the engine's state as policies and models may see it, read only, derived values computed once.

Lives for one tick. May import the core's data types; changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from twin.arbiter import Arbiter
from twin.confidence import Residual
from twin.contracts import Fault, Forecast, mask_index, read_only
from twin.errors import ContractError
from twin.estimator import Estimator
from twin.events import OperatorRequest
from twin.frame import F32, F64, I32, I64, U8, Bool
from twin.health.health import HealthState
from twin.health.records import FailureLog, Health, NodeFeatures
from twin.history import History
from twin.jobs import Jobs
from twin.load_targets import LoadTarget
from twin.maintenance import Windows
from twin.quantities import find_quantity
from twin.service_book import Service, ServiceBook
from twin.signals import Signal, find_control, find_signal
from twin.site import Envelope, Limit, Site
from twin.state import State


class EngineView:
    """Implements `twin.contracts.View`."""

    def __init__(
        self,
        site: Site,
        state: State,
        jobs: Jobs,
        arbiter: Arbiter,
        estimator: Estimator,
        history: History,
        requests: tuple[OperatorRequest, ...],
        forecasts: Mapping[tuple[str, float], Forecast],
        budget_w: F64,
        dt_s: float,
        targets: Callable[[OperatorRequest], I32],
        windows: Windows,
        faults: tuple[Fault, ...] = (),
        outlook: Callable[[str, int], F64] | None = None,
        health: HealthState | None = None,
        book: ServiceBook | None = None,
        load_targets: tuple[LoadTarget, ...] = (),
    ) -> None:
        self.site, self.jobs, self.requests, self.forecasts = site, jobs, requests, forecasts
        self.now_ns, self.dt_s = state.now_ns, dt_s
        self._state, self._arbiter, self._estimator, self._history = state, arbiter, estimator, history
        self._budget_w = budget_w
        self._targets, self._windows = targets, windows
        self._faults = faults
        self._outlook = outlook
        self._load_targets = load_targets
        self._health = HealthState(site) if health is None else health
        self._book = book
        self._cache: dict[tuple[str, str], Any] = {}

    def _signal(self, key: str) -> Signal:
        signal = find_signal(key)
        if signal is None:
            raise ContractError(f"{key} is not a signal of the catalogue")
        return signal

    def value(self, key: str) -> F32:
        """Last good value per entity."""
        signal = self._signal(key)
        return cast(F32, read_only(self._state.tables[signal.table].value[signal.row]))

    def worst(self, key: str) -> F32:
        """The value as bad as it may be by now."""
        found = self._cache.get(("worst", key))
        if found is None:
            signal, limit = self._signal(key), self.site.limits.get(key)
            slew = None
            if limit is not None and np.isfinite(limit.slew_per_s).any():
                slew = np.where(np.isfinite(limit.slew_per_s), limit.slew_per_s, signal.slew_per_s)
            table = self._state.tables[signal.table]
            slew = self._windows.gentler(table, signal, self.now_ns, slew)
            found = read_only(table.worst(signal, self.now_ns, slew))
            self._cache["worst", key] = found
        return cast(F32, found)

    def quality(self, key: str) -> U8:
        """Quality per entity."""
        found = self._cache.get(("quality", key))
        if found is None:
            signal = self._signal(key)
            found = read_only(self._state.tables[signal.table].quality_of(signal, self.now_ns))
            self._cache["quality", key] = found
        return cast(U8, found)

    def age_s(self, key: str) -> F64:
        """Seconds since the last good reading."""
        signal = self._signal(key)
        return self._state.tables[signal.table].age_s(signal, self.now_ns)

    def total(self, key: str) -> I64:
        """Growth of a counter since it was first heard."""
        signal = self._signal(key)
        if signal.kind != "counter":
            raise ContractError(f"{key} is not a counter")
        return cast(I64, read_only(self._state.tables[signal.table].total[signal.row]))

    def past(self, key: str) -> tuple[I64, F32] | None:
        """(instants, values [n_kept, n]) of a signal with declared history, oldest first; None without."""
        ring = self._history.rings.get(key)
        return None if ring is None else ring.ordered()

    def envelope(self, control: str) -> Envelope:
        """What a control may be."""
        return self.site.envelopes[control]

    def limit(self, key: str) -> Limit | None:
        """Where a signal becomes dangerous."""
        return self.site.limits.get(key)

    def beyond(self, key: str) -> I32:
        """Entities whose worst case is beyond the guard of a signal."""
        found = self._cache.get(("beyond", key))
        if found is None:
            limit, worst = self.site.limits.get(key), self.worst(key)
            if limit is None:
                found = np.zeros(0, np.int32)
            elif self._signal(key).danger == "low":
                found = mask_index(worst < limit.guard)
            else:
                found = mask_index(worst > limit.guard)
            self._cache["beyond", key] = found
        return cast(I32, found)

    def commanded(self, control: str) -> F64:
        """The value of the running lease per entity; NaN where there is none."""
        return cast(F64, read_only(self._arbiter.leases[control].value))

    def targets(self, request: OperatorRequest) -> I32:
        """The entities that a standing request names."""
        return self._targets(request)

    def readback(self, control: str) -> F64:
        """What the device itself reports of a control [n] float64; NaN where it does not."""
        spec = find_control(control)
        if spec is None:
            raise ContractError(f"{control} is not a control of the catalogue")
        n = self.site.sizes[spec.table]
        if spec.readback is None:
            return np.full(n, np.nan)
        return self.value(f"{spec.table}.{spec.readback}").astype(np.float64)

    def budget_w(self) -> F64:
        """Budget per feeder, in force now."""
        return cast(F64, read_only(self._budget_w))

    def load_targets(self) -> tuple[LoadTarget, ...]:
        """Load targets that run or are to come."""
        return self._load_targets

    def outlook(self, quantity: str, at_ns: int) -> F64:
        """What someone outside told of a quantity at a coming instant."""
        what = find_quantity(quantity)
        if what is None:
            raise ContractError(f"{quantity} is no quantity that can be forecast")
        if self._outlook is None:
            return np.full(self.site.sizes[what.table], np.nan)
        return self._outlook(quantity, at_ns)

    def maintenance(self, table: str) -> Bool | None:
        """Where people work now."""
        mask = self._windows.mask(table)
        return None if mask is None else cast(Bool, read_only(mask))

    def protected_nodes(self) -> Bool:
        """Nodes whose work may not be disturbed unasked [n_node]."""
        found = self._cache.get(("protected", "node"))
        if found is None:
            found = read_only(self.jobs.protected_nodes())
            self._cache["protected", "node"] = found
        return cast(Bool, found)

    def residual(self, name: str) -> Residual | None:
        """A comparison of the estimator."""
        return self._estimator.residuals.get(name)

    def faults(self) -> tuple[Fault, ...]:
        """What the diagnosis holds to be wrong now."""
        return self._faults

    def health(self, part: str) -> Health:
        """Verdicts on all parts of a kind, as last judged."""
        return self._health.health(part)

    def node_features(self) -> NodeFeatures:
        """What may tell of failures to come."""
        return self._health.features()

    def failures(self) -> FailureLog:
        """Nodes that failed, and when nobody watched."""
        log, gaps = self._health.log(), self._state.unwatched_ns
        return replace(log, unwatched_ns=gaps) if len(gaps) else log

    def service(self) -> Service:
        """When nodes were last tested, repaired and replaced."""
        return (self._book or ServiceBook(self.site)).service()
