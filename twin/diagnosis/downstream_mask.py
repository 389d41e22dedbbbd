"""Downstream mask: comparisons that are off because of a reported fault and carry no further evidence.

A pump that stops disturbs every flow and temperature behind it for a while; a sensor that stands still
falsifies each comparison that it takes part in, as long as it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from twin.catalogue import NS, Bool
from twin.diagnosis.cause import Cause, Key, Support
from twin.diagnosis.signature import (
    HEAT,
    HEAT_FLOW,
    HYPOTHESES,
    LOOP_BACK,
    LOOP_USUAL,
    MIX,
    RACK_SUPPLY,
    SETPOINT,
    SPLIT,
    SUM,
    SUPPLY,
    VALVE,
    WATER_BACK,
)
from twin.diagnosis.topology import LADDER, Topology
from twin.telemetry import EntityState, records

STIR_S = 150.0  # for which water and plates take to settle after a fault that stirs them; source: estimate
LINGER_S = 20.0  # after a cause has gone
# Tables whose comparisons a kind stirs, below its entity and at it; the rest stays as it is.
STIRRED: dict[str, tuple[str, ...]] = {
    "pump_trip": ("cdu", "rack", "gpu"),
    "leak": ("cdu", "rack", "gpu"),  # what runs out no longer flows, and the pumps follow
    "filter_blocked": ("rack", "gpu", SUM, MIX, SUPPLY, SETPOINT, WATER_BACK, VALVE),
    "branch_blocked": ("gpu", "node", HEAT, HEAT_FLOW, RACK_SUPPLY, MIX, SUPPLY, SETPOINT, WATER_BACK),
    "cooler_failed": ("cdu", LOOP_BACK),
    "valve_stuck": (WATER_BACK, SUPPLY, MIX, LOOP_BACK, LOOP_USUAL),
    "exchanger_fouled": (SETPOINT, WATER_BACK),
    "tray_blocked": ("gpu.power_w", "gpu.sm_clock_hz"),
    "plate_degraded": ("gpu.power_w", "gpu.sm_clock_hz"),
    "breaker_tripped": ("feeder", "rack", "node", "gpu"),
    "feed_lost": ("feeder", "rack", "node", "gpu"),
    "heat_wave": ("loop", "cdu"),
    "grid_event": ("feeder", "rack", "node"),
    "node_down": ("node", "rack"),
    "node_silent": ("node", "rack.power_w"),
    "psu_lost": ("node", SPLIT),  # what one supply no longer draws from its feed, the other does
}
PASSING = ("pump_trip",)  # stirs for a while; others as long as they last


class DownstreamMask(EntityState):
    """Rows of comparisons that lie downstream of a directly reported fault."""

    # What a fault has stirred settles no sooner because its device was replaced
    causes: dict[Key, Support] = records(Support, of_place=True)

    def __init__(self, topology: Topology) -> None:
        super().__init__({})
        self.topology = topology
        self._now_ns = 0

    def update(self, outright: list[Cause], reported: Iterable[Cause], now_ns: int) -> None:
        """Take in the causes that need no comparison, and those that are reported already."""
        self._now_ns = now_ns
        for cause in (*outright, *reported):
            if cause.kind == "sensor_biased" and cause.table != "site":
                continue  # it rests on the very rows that it spoils
            if cause.kind in STIRRED or cause.kind.startswith("sensor_"):
                support = self.causes.setdefault(cause.key, Support(*cause.key, now_ns, now_ns))
                support.last_ns = now_ns
        for key, support in list(self.causes.items()):
            if now_ns - support.last_ns > LINGER_S * NS:
                del self.causes[key]

    def covered(self, relation: str, n: int) -> Bool | None:
        """Rows [n] of a comparison that lie downstream; None if none does."""
        out: Bool | None = None
        for cause in self.causes.values():
            sensor = cause.kind.startswith("sensor_")
            rows = self._of_sensor(cause, relation) if sensor else self._stirred(cause, relation, n)
            if rows is not None:
                out = np.zeros(n, np.bool_) if out is None else out
                out[rows] = True
        return out

    def _stirred(self, cause: Support, relation: str, n: int) -> Any:
        """Rows of a comparison that a fault stirs."""
        table, stirred = relation.partition(".")[0], STIRRED[cause.kind]
        if table not in stirred and relation not in stirred:
            return None
        if cause.kind == "leak" and cause.table == "loop":
            return None
        if cause.kind in PASSING and self._now_ns - cause.first_ns > STIR_S * NS:
            return None
        if cause.table in ("feeder", "site") or table == "feeder":
            return slice(None)
        return self._related(cause, table) if n == self.topology.sizes.get(table) else None

    def _of_sensor(self, cause: Support, relation: str) -> Any:
        """Rows of a comparison in which this sensor takes part."""
        table, at, signal = relation.partition(".")[0], cause.table, cause.signal
        if relation == "feeder.balance":
            return slice(None) if (at, signal) in (("rack", "power_w"), ("feeder", "power_w")) else None
        if not any(h.table == at and h.signal == signal and relation in h.relations for h in HYPOTHESES):
            return None
        if relation == SPLIT and table == at:
            return slice(None)
        return self._related(cause, table) if table == at or {table, at} <= set(LADDER) else None

    def _related(self, cause: Support, table: str) -> Any:
        """Entities of `table` that are the cause's own, below or above it."""
        at, entity = cause.table, cause.entity
        if table == at:
            return [entity]
        if LADDER.index(table) < LADDER.index(at):
            return self.topology.below(at, entity, table)
        above = self.topology.above(at, table)[[entity]]
        return above[above >= 0]  # a rack that no CDU serves
