"""Downstream mask: comparisons that are off because of a reported fault and carry no further evidence.

A pump that stops disturbs every flow and temperature behind it for a while; a sensor that stands still
falsifies each comparison that it takes part in, as long as it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from twin.catalogue import NS, Bool
from twin.diagnosis.cause import Cause, Key
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
from twin.diagnosis.topology import Places

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


class Wake:
    """Rows of comparisons that lie downstream of a directly reported fault."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.since_ns: dict[Key, tuple[int, int]] = {}  # (first, last) support
        self._now_ns = 0

    def update(self, outright: list[Cause], told: Iterable[Cause], now_ns: int) -> None:
        """The causes that need no comparison, and those that are told already."""
        self._now_ns = now_ns
        for cause in (*outright, *told):
            if cause.kind == "sensor_biased" and cause.table != "site":
                continue  # it rests on the very rows that it spoils
            if cause.kind in STIRRED or cause.kind.startswith("sensor_"):
                first, _ = self.since_ns.get(cause.key, (now_ns, now_ns))
                self.since_ns[cause.key] = (first, now_ns)
        for key in [k for k, (_, last) in self.since_ns.items() if now_ns - last > LINGER_S * NS]:
            del self.since_ns[key]

    def covered(self, relation: str, n: int) -> Bool | None:
        """Rows [n] of a comparison that are in a wake; None if none is."""
        out: Bool | None = None
        table = relation.partition(".")[0]
        for (kind, at, entity, signal), (first, _) in self.since_ns.items():
            rows = self._rows(kind, at, entity, signal, relation, table, n, self._now_ns - first)
            if rows is not None:
                out = np.zeros(n, np.bool_) if out is None else out
                out[rows] = True
        return out

    def _rows(
        self, kind: str, at: str, entity: int, signal: str, relation: str, table: str, n: int, age_ns: int
    ) -> Any:
        if kind.startswith("sensor_"):
            return self._of_sensor(at, entity, signal, relation, table)
        stirred = STIRRED[kind]
        if table not in stirred and relation not in stirred:
            return None
        if kind == "leak" and at == "loop":
            return None
        if kind in PASSING and age_ns > STIR_S * NS:
            return None
        if at in ("feeder", "site") or table == "feeder":
            return slice(None)
        if n != self.places.sizes.get(table):
            return None
        if table == at:
            return [entity]
        ladder = ("gpu", "node", "rack", "cdu", "loop")
        if ladder.index(table) < ladder.index(at):
            return self.places.below(at, entity, table)
        above = self.places.above(at, table)[[entity]]
        return above[above >= 0]  # a rack that no CDU serves

    def _of_sensor(self, at: str, entity: int, signal: str, relation: str, table: str) -> Any:
        """Rows of a comparison in which this sensor takes part."""
        if relation == "feeder.balance":
            return slice(None) if (at, signal) in (("rack", "power_w"), ("feeder", "power_w")) else None
        for h in HYPOTHESES:
            if h.table == at and h.signal == signal and relation in h.relations:
                break
        else:
            return None
        if table == at:
            return [entity] if relation != "feeder.power_w/split" else slice(None)
        ladder = ("gpu", "node", "rack", "cdu", "loop", "site")
        if table not in ladder or at not in ladder:
            return None
        if ladder.index(table) < ladder.index(at):
            return self.places.below(at, entity, table)
        above = self.places.above(at, table)[[entity]]
        return above[above >= 0]

    def dump(self) -> list[Any]:
        return [[list(k), list(v)] for k, v in self.since_ns.items()]

    def restore(self, data: list[Any]) -> None:
        self.since_ns = {
            (str(k[0]), str(k[1]), int(k[2]), str(k[3])): (int(v[0]), int(v[1])) for k, v in data
        }
