"""Open actions: the actions that fault codes of each device require, until they are done or lapse.

What is grave is kept apart, so that nothing milder hides it. `Remediation` closes actions on restarts, resets
and returns to service. A restart is learnt of late, by a counter, when the node speaks again: what was
reported shortly before that is of the new start and stays open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.catalogue import I32, I64, NS, U8, Bool
from twin.contracts import action
from twin.health.context import HealthContext
from twin.health.fault_counts import Batch
from twin.site import Site
from twin.telemetry import OWN, EntityState, RareState, column, keyed, scalar

STARTED_S = 120.0  # a server takes longer to start, and reports within this. source: estimate
UNKNOWN = -1
OFF, ON = 0, 1  # of node.power_on_state
IN_SERVICE, DRAINED = 0, 3  # of node.service_level_state
DBE = "gpu.ecc_dbe_count"
# `dbe`: what the counter of double-bit errors had come to when the GPU was last reset
_KEPT = {"reboots": "node", "power": "node", "service": "node", "recovery": "gpu", "dbe": "gpu"}


class Remediation(EntityState):
    """Last reports of nodes and GPUs on restarts and service [n]; UNKNOWN without a report."""

    last: dict[str, I64] = keyed("i8", UNKNOWN, keys=_KEPT)
    returned_ns: I64 = column("node", "i8")  # when it came back into service last; 0 = not seen

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site

    def update(self, now: HealthContext, opened: Mapping[str, OpenActions]) -> None:
        """Close the actions done since the last look."""
        restarted = self._restarted(now)
        self._close(now, opened, restarted, "reboot_node", now.now_ns - round(STARTED_S * NS))
        service, before = self._take("service", now.good("node.service_level_state"))
        back = np.flatnonzero((before >= DRAINED) & (service == IN_SERVICE)).astype(np.int32)
        # The furthest that it was out of service, until it is back
        self.last["service"] = np.where(service == IN_SERVICE, service, np.maximum(service, before))
        self._close(now, opened, back, "replace", now.now_ns)
        self.returned_ns[back] = now.now_ns
        recovery, before = self._take("recovery", now.good("gpu.recovery_action_state"))
        reset = np.flatnonzero((before > 0) & (recovery == 0)).astype(np.int32)
        if len(reset):
            self._reset(now, reset)
            if "gpu" in opened:
                opened["gpu"].resolve(reset, action("reboot_node"), now.now_ns)

    def _restarted(self, now: HealthContext) -> I32:
        power, before = self._take("power", now.good("node.power_on_state"))
        on = (before == OFF) & (power == ON)
        total = np.where(now.fresh("node.reboot_count"), now.total("node.reboot_count"), np.nan)
        reboots, before = self._take("reboots", total)
        return np.flatnonzero(on | ((before >= 0) & (reboots > before))).astype(np.int32)

    def _take(self, name: str, values: Any) -> tuple[I64, I64]:
        """Return (present state, previous state); entities without a report keep their state."""
        before = self.last[name]
        reported = np.isfinite(values)
        known = before.copy()
        known[reported] = values[reported].astype(np.int64)
        self.last[name] = known
        return known, before

    def _close(
        self, now: HealthContext, opened: Mapping[str, OpenActions], nodes: I32, upto: str, until_ns: int
    ) -> None:
        """Close the actions of these nodes and their GPUs."""
        if not len(nodes):
            return
        mine = np.zeros(now.n("node"), np.bool_)
        mine[nodes] = True
        gpus = np.flatnonzero(mine[self.site.node_of_gpu]).astype(np.int32)
        self._reset(now, gpus)
        for table, index in (("node", nodes), ("gpu", gpus)):
            if table in opened:
                opened[table].resolve(index, action(upto), until_ns)

    def _reset(self, now: HealthContext, gpus: I32) -> None:
        """Take the counts of these GPUs up to now as cleared by their reset."""
        self.last["dbe"][gpus] = now.total(DBE)[gpus]


SOFT = action("check_facility")  # up to here nothing is to be undone: the application is restarted, heat goes
SOFT_S = 3600.0  # source: estimate; a job is long restarted, or its code came again
MILD_S = 2_419_200.0  # what is not grave and never came again. source: estimate, the span of lemon nodes
LOOK_S = 60.0  # between looks for what lapses
_COLUMNS = ("action", "code", "since_ns", "last_ns", "late_action", "late_code", "late_ns")


class OpenActions(RareState):
    """The actions open for n devices of a table [2, n]: mild, grave."""

    action: U8 = column(OWN, "u1", lead=(2,))
    code: I32 = column(OWN, "i4", lead=(2,))
    since_ns: I64 = column(OWN, "i8", lead=(2,))
    last_ns: I64 = column(OWN, "i8", lead=(2,))
    # Action requested last, be it less: it stays when the stronger one is done
    late_action: U8 = column(OWN, "u1", lead=(2,))
    late_code: I32 = column(OWN, "i4", lead=(2,))
    late_ns: I64 = column(OWN, "i8", lead=(2,))
    done_upto: U8 = column(OWN, "u1")  # by the last resolution, and when
    done_ns: I64 = column(OWN, "i8")
    _lapsed_ns: int = scalar(0)  # when it was last looked for what lapses

    def __init__(self, n: int, table: str = OWN) -> None:
        super().__init__({table: n}, table)
        self.n = n

    def ask(self, batch: Batch, asked: U8, grave: Bool, now_ns: int) -> None:
        """Add faults in order of arrival [k]. The last resolution covers earlier faults."""
        entity, code = batch.entity, batch.code
        stale = batch.dated & (batch.at_ns <= self.done_ns[entity]) & (asked <= self.done_upto[entity])
        for layer in (0, 1):
            some = np.flatnonzero((asked > 0) & ~stale & (grave == bool(layer)))
            if not len(some):
                continue
            # The strongest of each device, of equals the first: the order is stable
            order = some[np.lexsort((-asked[some].astype(np.int16), entity[some]))]
            best = order[np.concatenate([[True], np.diff(entity[order]) != 0])]
            of = entity[best]
            self.late_action[layer, of], self.late_code[layer, of] = asked[best], code[best]
            self.late_ns[layer, of] = now_ns
            higher = asked[best] > self.action[layer, of]
            again = of[asked[best] == self.action[layer, of]]
            of, best = of[higher], best[higher]
            self.action[layer, of], self.code[layer, of] = asked[best], code[best]
            self.since_ns[layer, of] = now_ns
            self.last_ns[layer, of] = now_ns
            self.last_ns[layer, again] = now_ns

    def resolve(self, index: I32, upto: int, now_ns: int) -> None:
        """Resolve the faults until now that require no more than this action."""
        for layer in (0, 1):
            of = index[self.action[layer, index] <= upto]
            self._close(layer, of, self.late_ns[layer, of] > now_ns)
        newer = index[self.done_ns[index] <= now_ns]
        self.done_upto[newer], self.done_ns[newer] = upto, now_ns

    def drop(self, index: I32) -> None:
        """Close everything that is open for these; only later reports count."""
        for layer in (0, 1):
            self._close(layer, index, np.zeros(len(index), np.bool_))

    def lapse(self, now_ns: int) -> None:
        """Drop mild actions whose code has not recurred."""
        if now_ns - self._lapsed_ns < LOOK_S * NS:
            return
        self._lapsed_ns = now_ns
        open_now = np.flatnonzero(self.action[0]).astype(np.int32)
        if len(open_now):
            span_s = np.where(self.action[0, open_now] <= SOFT, SOFT_S, MILD_S)
            of = open_now[now_ns - self.last_ns[0, open_now] > span_s * NS]
            self._close(0, of, now_ns - self.late_ns[0, of] <= SOFT_S * NS)

    def _close(self, layer: int, index: I32, later: Bool) -> None:
        """Close these; where a fault arrived `later` [k], its action becomes the open one."""
        at_ns = self.late_ns[layer, index[later]]
        asked = (self.late_action[layer, index[later]], self.late_code[layer, index[later]], at_ns, at_ns)
        for name in _COLUMNS[:4]:
            getattr(self, name)[layer, index] = 0
        for name in _COLUMNS[4:]:
            getattr(self, name)[layer, index[~later]] = 0
        for name, values in zip(_COLUMNS[:4], asked, strict=True):
            getattr(self, name)[layer, index[later]] = values

    def in_force(self, name: str) -> Any:
        """Return a column in force [n]: of the severe action if there is one, otherwise of the mild one."""
        column = getattr(self, name)
        return np.where(self.action[1] > 0, column[1], column[0])
