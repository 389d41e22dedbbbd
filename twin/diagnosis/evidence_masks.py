"""Evidence masks: comparisons that carry no further evidence.

The downstream mask covers what a reported fault disturbs: a pump that stops disturbs every flow and
temperature behind it for a while; a sensor that stands still falsifies each comparison that it takes part in,
as long as it does. The idle mask covers loops without flow, GPUs that heat has shut down, and the equipment
that feeds only these: a meter of an idle device repeats its reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from twin.catalogue import I64, NS, TABLES, Bool
from twin.diagnosis.cause import Cause, Key, Support
from twin.diagnosis.device_reports import good, reported
from twin.diagnosis.signature import (
    APPROACH,
    FILTER,
    HEAT,
    HEAT_FLOW,
    HYPOTHESES,
    LOOP_BACK,
    LOOP_USUAL,
    MIX,
    PUMP,
    RACK_SUPPLY,
    SETPOINT,
    SPLIT,
    SUM,
    SUPPLY,
    VALVE,
    WATER,
    WATER_BACK,
)
from twin.diagnosis.topology import LADDER, Topology
from twin.telemetry import EntityState, State, column, records

# For which water and plates take to settle after a fault that stirs them has begun, and after it has ended;
# source: estimate
STIR_S = 150.0
LINGER_S = 50.0  # after a sensor's fault has ended
# Each feed's share of the load was learned while it was disturbed, and is learned anew in as long, for no
# longer than this; source: estimate
LEARNED_S = 600.0
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
    "grid_event": ("feeder", "rack", "node", "gpu", "cdu", "loop"),  # pumps and fans stumble, or stop
    "node_down": ("node", "rack", SPLIT),
    "node_silent": ("node", "rack.power_w"),
    "psu_lost": ("node", SPLIT),  # what one supply no longer draws from its feed, the other does
}
# Comparisons that show a kind, which it stirs where it needs none of them to be named
STIRRED_OUTRIGHT: dict[str, tuple[str, ...]] = {"filter_blocked": (FILTER, PUMP)}
# Comparisons of the loop above, after these have ended: the excess heat behind them moves there
WARMED = (APPROACH, LOOP_USUAL, WATER)
WARMED_BY = ("pump_trip", "filter_blocked", "branch_blocked", "valve_stuck")
PASSING = ("pump_trip",)  # its beginning and its end stir for a while; others stir as long as they last
NO_FLOW_PU = 0.1  # of the nominal flow: nothing to speak of flows; source: estimate
OFF_PU = 0.02  # of a GPU's rated power: no GPU on the bus draws so little
RESTING_PU, MOST_OFF = 0.2, 0.5  # of a rack's most power; share of its GPUs; source: estimate
RACK_OF_LOAD = ("rack.power_w", HEAT)  # comparisons of racks that rest on the load of their GPUs
_POWER_ROW = TABLES["gpu"].by_name["power_w"].row


class DownstreamMask(EntityState):
    """Rows of comparisons that lie downstream of a directly reported fault."""

    # Deviations that a fault caused settle no sooner because its device was replaced
    causes: dict[Key, Support] = records(Support, of_place=True)
    dry_ns: I64 = column("rack", "i8", of_place=True)  # when nothing flowed there last, for whatever reason

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.sizes)
        self.topology = topology
        self._now_ns = 0
        self._outright = frozenset[Key]()  # of this tick

    def update(
        self, outright: list[Cause], reported: Iterable[Cause], now_ns: int, dry: Bool | None = None
    ) -> None:
        """Take in the causes that need no comparison, those that are reported already, and racks [n] without
        flow.
        """
        self._now_ns = now_ns
        self._outright = frozenset(cause.key for cause in outright if cause.kind in STIRRED_OUTRIGHT)
        if dry is not None:
            self.dry_ns[dry] = now_ns
        for causes, at in ((outright, now_ns), (reported, 0)):
            for cause in causes:  # in a storm of XIDs thousands, which stir nothing
                if cause.kind not in STIRRED and not cause.kind.startswith("sensor_"):
                    continue
                if cause.kind == "sensor_biased" and cause.table != "site":
                    continue  # it rests on the very rows that it spoils
                at_ns = at or cause.supported_ns
                support = self.causes.setdefault(cause.key, Support(*cause.key, now_ns, at_ns))
                support.last_ns = max(support.last_ns, at_ns)
        for key, support in list(self.causes.items()):
            linger_ns = round((STIR_S if support.kind in STIRRED else LINGER_S) * NS)
            if SPLIT in STIRRED.get(support.kind, ()):
                lasted_ns = support.last_ns - support.first_ns
                linger_ns = max(linger_ns, min(lasted_ns, round(LEARNED_S * NS)))
            if now_ns - support.last_ns > linger_ns:
                del self.causes[key]

    def stirred(self, relation: str, n: int) -> Bool | None:
        """Return the rows [n] of a comparison that a fault of a device disturbs; None for none."""
        return self._downstream(relation, n, lambda _: False)

    def disturbed(self, relation: str, n: int, table: str, entity: int) -> Bool | None:
        """Return the rows [n] of a comparison that a fault of a device disturbs, or a sensor of another
        device that stands still; None for none. `table`, `entity`: the device of a suspected sensor."""
        return self._downstream(
            relation, n, lambda c: c.kind == "sensor_frozen" and (c.table, c.entity) != (table, entity)
        )

    def _downstream(self, relation: str, n: int, counts: Callable[[Support], bool]) -> Bool | None:
        """Return the rows [n] behind faults of devices, and behind the sensors that count."""
        out: Bool | None = None
        for cause in self.causes.values():
            sensor = cause.kind.startswith("sensor_")
            if sensor and not counts(cause):
                continue
            rows = self._of_sensor(cause, relation) if sensor else self._stirred(cause, relation, n)
            if rows is not None:
                out = np.zeros(n, np.bool_) if out is None else out
                out[rows] = True
        return out

    def covered(self, relation: str, n: int) -> Bool | None:
        """Return the rows [n] of a comparison downstream of a fault; None for none."""
        out = self._downstream(relation, n, lambda _: True)
        table = relation.partition(".")[0]
        if table in ("gpu", "rack") and self.dry_ns.any() and n == self.topology.sizes[table]:
            settles = (self.dry_ns > 0) & (self.dry_ns < self._now_ns)
            settles &= self._now_ns - self.dry_ns < STIR_S * NS
            rows = settles[self.topology.above(table, "rack")] if table == "gpu" else settles
            out = rows if out is None else out | rows
        return out

    def _stirred(self, cause: Support, relation: str, n: int) -> Any:
        """Return the rows of a comparison that a fault disturbs."""
        table, stirred = relation.partition(".")[0], STIRRED[cause.kind]
        ended = cause.last_ns < self._now_ns
        if self._now_ns - cause.last_ns > STIR_S * NS and relation != SPLIT:
            return None
        if ended and cause.kind in WARMED_BY:
            stirred = stirred + WARMED
        if cause.key in self._outright:
            stirred = stirred + STIRRED_OUTRIGHT[cause.kind]
        if table not in stirred and relation not in stirred:
            return None
        if cause.kind == "leak" and cause.table == "loop":
            return None
        if cause.kind in PASSING and not ended and self._now_ns - cause.first_ns > STIR_S * NS:
            return None
        if cause.table in ("feeder", "site") or table == "feeder":
            return slice(None)
        return self._related(cause, table) if n == self.topology.sizes.get(table) else None

    def _of_sensor(self, cause: Support, relation: str) -> Any:
        """Return the rows of a comparison that uses this sensor."""
        table, at, signal = relation.partition(".")[0], cause.table, cause.signal
        if relation == "feeder.balance":
            return slice(None) if (at, signal) in (("rack", "power_w"), ("feeder", "power_w")) else None
        if not any(h.table == at and h.signal == signal and relation in h.relations for h in HYPOTHESES):
            return None
        if relation == SPLIT and table == at:
            return slice(None)
        return self._related(cause, table) if table == at or {table, at} <= set(LADDER) else None

    def _related(self, cause: Support, table: str) -> Any:
        """Return the entities of `table` at, below or above the cause."""
        at, entity = cause.table, cause.entity
        if table == at:
            return [entity]
        if LADDER.index(table) < LADDER.index(at):
            return self.topology.below(at, entity, table)
        above = self.topology.above(at, table)[[entity]]
        return above[above >= 0]  # a rack that no CDU serves


class IdleMask:
    """Idle equipment in one tick: `dry` racks and CDUs, and `off` GPUs, as masks [n]."""

    def __init__(self, state: State, topology: Topology) -> None:
        self.state, self.topology = state, topology
        self.dry_rack, self.dry_cdu = _dry(state, topology)
        self.any_dry = bool(self.dry_cdu.any())
        self.off: Bool = np.zeros(topology.sizes["gpu"], np.bool_)
        self.any_off = False

    def dry_gpus(self) -> Bool | None:
        """Return the GPUs behind a CDU or a branch without flow [n_gpu]; None for none."""
        if not self.dry_rack.any():
            return None
        dry: Bool = self.dry_rack[self.topology.site.rack_of_gpu]
        return dry

    def switch_off(self, burnt: Bool) -> None:
        """Take in which GPUs heat has shut down [n_gpu]; those that report no power are off as well."""
        power = self.state.tables["gpu"].value[_POWER_ROW]
        self.off = burnt
        rated_w = self.topology.site.design.gpu_max_w
        bound = OFF_PU * float(np.fmax.reduce(rated_w, initial=0.0))
        if np.fmin.reduce(power, initial=np.inf) < bound:
            self.off = burnt | (
                good(self.state, "gpu.power_w") < OFF_PU * rated_w[self.topology.site.rack_of_gpu]
            )
        self.any_off = bool(self.off.any())

    def covered(self, relation: str, n: int) -> Bool | None:
        """Return the rows [n] of a comparison of idle equipment; None for none."""
        table = relation.partition(".")[0]
        if n != self.topology.sizes.get(table):
            return None
        out: Bool | None = None
        if self.any_dry and table in ("gpu", "rack", "cdu"):
            out = self.dry_cdu
            if table != "cdu":
                at = self.topology.above(table, "cdu")
                out = (at >= 0) & self.dry_cdu[np.maximum(at, 0)]
        if self.any_off and (table == "node" or relation in RACK_OF_LOAD):
            gone = self.topology.count("gpu", table, self.off) > 0
            out = gone if out is None else out | gone
        return out

    def masks(self) -> dict[str, Bool]:
        """Return the entities whose meters may stand still [n per table]."""
        out: dict[str, Bool] = {}
        if self.dry_rack.any() or self.any_dry:
            out |= {"rack": self.dry_rack, "cdu": self.dry_cdu}
        resting = self._resting()
        if not resting.any():
            return out
        site = self.topology.site
        out["rack"] = out.get("rack", resting) | resting
        out["node"] = resting[site.rack_of_node]
        out["gpu"] = resting[site.rack_of_gpu]
        served = site.feeders_of_rack
        if len(served.start) - 1 == len(resting):
            out["feeder"] = _idle_feeders(self.topology, resting)
        return out

    def _resting(self) -> Bool:
        """Return the racks whose GPUs are mostly off, or that draw next to nothing [n_rack]."""
        topology = self.topology
        resting: Bool = np.zeros(topology.sizes["rack"], np.bool_)
        if self.any_off:
            every = np.bincount(topology.site.rack_of_gpu, minlength=len(resting))
            gone = topology.count("gpu", "rack", self.off)
            resting = (every > 0) & (gone >= MOST_OFF * every)
        if reported(self.state, "rack.power_w"):
            resting = resting | (
                good(self.state, "rack.power_w") < RESTING_PU * topology.site.design.rack_max_w
            )
        return resting


def _dry(state: State, topology: Topology) -> tuple[Bool, Bool]:
    """Return (racks, CDUs) without flow; a CDU only if its racks' meters confirm it."""
    design = topology.site.design
    rack: Bool = np.zeros(topology.sizes["rack"], np.bool_)
    cdu: Bool = np.zeros(topology.sizes["cdu"], np.bool_)
    flows = rack
    if reported(state, "rack.flow_lpm"):
        flow = good(state, "rack.flow_lpm")
        rack, flows = flow < NO_FLOW_PU * design.rack_flow_lpm, flow >= NO_FLOW_PU * design.rack_flow_lpm
    if len(cdu) and reported(state, "cdu.flow_lpm"):
        at = topology.site.cdu_of_rack
        fed = np.bincount(at[flows & (at >= 0)], minlength=len(cdu)) > 0
        cdu = (good(state, "cdu.flow_lpm") < NO_FLOW_PU * design.cdu_flow_lpm) & ~fed
        if cdu.any():
            rack = rack | ((at >= 0) & cdu[np.maximum(at, 0)])
    return rack, cdu


def _idle_feeders(topology: Topology, resting: Bool) -> Bool:
    """Return the feeders that carry only idle racks [n_feeder], directly or through feeders below."""
    site, n = topology.site, topology.sizes["feeder"]
    served = site.feeders_of_rack
    live = ~resting[served.row_of_member]
    at = served.member
    loaded = np.bincount(at, minlength=n) > 0
    busy = np.bincount(at[live], minlength=n) > 0
    parent = site.parent_of_feeder
    below = np.flatnonzero(parent >= 0)
    for _ in range(n):
        more_loaded, more_busy = loaded.copy(), busy.copy()
        more_loaded[parent[below[loaded[below]]]] = True
        more_busy[parent[below[busy[below]]]] = True
        if (more_loaded == loaded).all() and (more_busy == busy).all():
            break
        loaded, busy = more_loaded, more_busy
    idle: Bool = loaded & ~busy
    return idle
