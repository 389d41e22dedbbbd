"""Silent devices: nodes that are off or not reporting, GPUs that fell off the bus, agents that took many
along.

Silence is reported at the lowest device that accounts for all of it: a node with its GPUs is one node.
Devices that fall silent together, as the nodes of a rack, have lost their source or their network and are not
at fault: that is an outage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Windows
from twin.diagnosis.cause import Cause
from twin.diagnosis.device_reports import DeviceReports, good, reported
from twin.diagnosis.growth import Growth
from twin.diagnosis.outages import Outages
from twin.diagnosis.sensor_checks import SensorChecks
from twin.diagnosis.silent_signals import Silent, silent_signals
from twin.diagnosis.topology import Topology
from twin.diagnosis.verdict import amount
from twin.diagnosis.xids import OFF_BUS_XID
from twin.telemetry import EntityState, State, column, part

TOGETHER_S = (
    60.0  # what falls silent within this of another beside it has a source in common; source: estimate
)
MOST_RACKS = 2  # of which a node may fall silent at once by chance
MOST_GPUS = 3  # of a rack that may fall off the bus at once by chance
MOST_SENSORS = 50  # that are silent alone and are reported each; the others are counted
BOOT_S = 600.0  # for which nodes may be silent once their rack has power again; source: estimate
# For which a GPU may be silent whose node talks: a reset of it, or of its driver; source: estimate
RESET_S = 120.0
BURNT_K = 6.0  # below slowdown, in its last reading: it shut down by heat


class Silence(EntityState):
    """Instants since which nodes and GPUs are silent."""

    node_ns: I64 = column("node", "i8")
    gpu_ns: I64 = column("gpu", "i8")
    unpowered_ns: I64 = column("rack", "i8")  # when it was last without power
    burnt: Bool = column("gpu", "?")  # silent since heat shut them down
    fell: Bool = column("gpu", "?")  # of these: a fault of the cooling was why, and they said that they fall

    outages: Outages = part()

    def __init__(self, topology: Topology, reports: DeviceReports) -> None:
        super().__init__(topology.sizes)
        self.topology, self.reports, self.outages = topology, reports, Outages(topology)
        self.hidden: dict[str, Bool] = {}  # devices that report nothing, or need not [n per table]

    def causes(
        self,
        state: State,
        watch: SensorChecks,
        growth: Growth,
        windows: Windows,
        heated: Bool | None = None,
        behind: Bool | None = None,
    ) -> list[Cause]:
        """Nodes that are off or silent, GPUs off the bus, sensors that are silent alone; the rest becomes
        outages. A feeder without voltage has no frequency: what it does not report follows from that.
        `heated` [n_gpu]: short of cooling; `behind` [n_gpu]: a known fault of the cooling is why, so that
        what heat shuts down is part of that; health judges those that reported it when it has ended.
        """
        site = self.topology.site
        off = self._off(state, windows)
        silent = silent_signals(state, windows)
        out = [
            Cause("node_down", "node", i, "", 0.99, ("its controller reports that it is off",), 1, 2.0, 30.0)
            for i in np.flatnonzero(off).tolist()
        ]
        gone = off | self._unpowered(state)[site.rack_of_node]
        self.hidden = {"node": gone, "gpu": gone[site.node_of_gpu]} if gone.any() else {}
        if "node" in silent or "gpu" in silent:
            out += self._devices(state, watch, growth, silent, heated)
            woken_ns = windows.standby.woken_ns
            for cause in (c for c in out if c.kind == "node_silent" and woken_ns[c.entity]):
                minutes = (state.now_ns - int(woken_ns[cause.entity])) / NS / 60.0
                cause.evidence += (f"its scheduler woke it {minutes:.0f} min ago, and it did not come back",)
        else:
            self.node_ns[:], self.gpu_ns[:], self.burnt[:], self.fell[:] = 0, 0, False, False
        if behind is not None and self.burnt.any():
            fallen = np.zeros(len(behind), np.bool_)
            fallen[growth.xids.fallen()] = True
            self.fell = self.burnt & (self.fell | (behind & fallen))
            self.hidden["gpu"] = self.hidden.get("gpu", np.False_) | self.fell | (self.burnt & behind)
        # Reported as devices, or expected to be silent
        for table, mask in {**self.hidden, "feeder": self.reports.lost}.items():
            if table in silent:
                rest = silent[table].where(~mask[silent[table].entity])
                silent = {**silent, table: rest} if len(rest.entity) else _without(silent, table)
        alone = self.outages.update(state, silent)
        sensors = [self._sensor(state, cell[:3], cell[3]) for cell in alone[:MOST_SENSORS]]
        first = {cause.alike: cause for cause in reversed(sensors)}
        for table, _, row, _ in alone[MOST_SENSORS:]:
            key = "sensor_silent", table, state.tables[table].signals[row].name
            if key in first:
                first[key].more += 1
        out += sensors
        for table, mask in self.outages.masks.items():
            self.hidden[table] = self.hidden[table] | mask if table in self.hidden else mask.copy()
        if (mute := self.outages.masks.get("gpu")) is not None:
            mute &= ~self.burnt  # what heated them is to be found
        return _not_of_source(out, off, site.rack_of_node)

    def _devices(
        self,
        state: State,
        watch: SensorChecks,
        growth: Growth,
        silent: dict[str, Silent],
        heated: Bool | None,
    ) -> list[Cause]:
        """Find nodes and GPUs that fell silent by themselves. Their masks go to `hidden`."""
        site, n, out = self.topology.site, self.topology.sizes, list[Cause]()
        off = self.hidden.get("node", np.zeros(n["node"], np.bool_))
        node, node_known = _quiet(watch, silent, "node", n["node"])
        gpu, gpu_known = _quiet(watch, silent, "gpu", n["gpu"])
        at = site.node_of_gpu
        known, quiet = (np.bincount(at[m], minlength=n["node"]) for m in (gpu_known, gpu))
        all_gpus = (known > 0) & (quiet == known)
        # One GPU that is silent while its node talks is the GPU; several at once are their agent
        self.burnt = gpu & (self.burnt | self._shut_down(watch, growth, heated))
        # Most of its GPUs shut down by heat, while the node talks or never did: no agent's fault
        hot = np.bincount(at[self.burnt], minlength=n["node"]) * 2 > known
        dumb = (node & (all_gpus | (known == 0))) | (all_gpus & ~hot & ((known > 1) | ~node_known))
        mute = dumb & ~off
        _since(self.node_ns, mute, state.now_ns)
        single = gpu & ~(dumb | off)[at] & ~self.burnt
        _since(self.gpu_ns, single, state.now_ns)
        alone = mute & ~_together(self.node_ns, mute, site.rack_of_node, 1)
        alone &= ~_far_apart(self.node_ns, mute, site.rack_of_node)
        hold_s = self._hold_s(silent)
        for i in np.flatnonzero(alone).tolist():
            text = "neither the node nor its GPUs report" if node[i] else "none of its GPUs reports"
            if node_known[i] and not node[i]:
                text += ", although the node does"
            out.append(Cause("node_silent", "node", i, "", 0.95, (text,), 1, float(hold_s[i]), 15.0))
        lost = single & ~_together(self.gpu_ns, single, site.rack_of_gpu, MOST_GPUS)
        lost &= ~_far_apart(self.gpu_ns, single, site.rack_of_gpu)
        for i in np.flatnonzero(lost).tolist():
            talks = "its node" if node_known[at[i]] else "other GPUs beside it"
            evidence = [f"it no longer reports; {talks} still {'does' if node_known[at[i]] else 'do'}"]
            # Silence alone is never critical, and no alarm as long as a reset takes
            severity = "info" if state.now_ns - self.gpu_ns[i] < RESET_S * NS else "warning"
            if OFF_BUS_XID in growth.xid_of(i):
                evidence.append(f"XID {OFF_BUS_XID} before")
                severity = ""
            cause = Cause("gpu_off_bus", "gpu", i, "", 0.97, tuple(evidence), 1, float(hold_s[at[i]]), 15.0)
            cause.severity = severity
            out.append(cause)
        self.hidden = {"node": alone | off, "gpu": lost | (alone | off)[at]}
        return out

    def _hold_s(self, silent: dict[str, Silent]) -> F64:
        """Return the seconds for which the simultaneous stop of others may be unnoticed, for each node
        [n_node]."""
        out = np.zeros(self.topology.sizes["node"])
        for table in ("node", "gpu"):
            if table not in silent:
                continue
            s = silent[table]
            at = s.entity if table == "node" else self.topology.site.node_of_gpu[s.entity]
            np.maximum.at(out, at, s.hold_s())
        return out

    def _sensor(self, state: State, cell: tuple[str, int, int], hold_s: float) -> Cause:
        """Return the cause for a silent sensor of a reporting device; `cell`: its table, entity and row."""
        table, entity, row = cell
        signal, column = state.tables[table].signals[row], state.tables[table]
        last = amount(signal.key, float(column.value[row, entity]))
        age_s = (state.now_ns - int(column.last_good_ns(signal, np.array([entity]))[0])) / NS
        text = f"no reading for {age_s:.0f} s, last {last}"
        return Cause("sensor_silent", table, entity, signal.name, 0.97, (text,), 1, hold_s, 30.0)

    def _shut_down(self, watch: SensorChecks, growth: Growth, heated: Bool | None) -> Bool:
        """GPUs about to shut down by heat in their last reading [n_gpu]: what heated them is the fault. That
        several of a node say that they fell off the bus is no silence of its agent either."""
        meters, site = watch.meters["gpu"], self.topology.site
        limit = site.design.gpu_slowdown_c[site.rack_of_gpu]
        with np.errstate(invalid="ignore"):
            hot: Bool = meters.last[meters.index("temp_c")] > limit - BURNT_K
        if heated is not None:
            hot |= heated
        return hot | self._off_bus_together(growth)

    def _off_bus_together(self, growth: Growth) -> Bool:
        """Return the GPUs [n_gpu] that reported leaving the bus together with another GPU of their node."""
        fallen: Bool = np.zeros(self.topology.sizes["gpu"], np.bool_)
        off = growth.xids.fallen()
        if not len(off):
            return fallen
        fallen[off] = True
        at = self.topology.site.node_of_gpu
        return fallen & (np.bincount(at[fallen], minlength=self.topology.sizes["node"]) > 1)[at]

    def _unpowered(self, state: State) -> Bool:
        """Return the racks [n] known to be without power, now or until their nodes can have started."""
        fed, lost = self.topology.site.feeders_of_rack, self.reports.lost
        rack, n = fed.row_of_member, self.topology.sizes["rack"]
        out: Bool = np.zeros(n, np.bool_)
        if lost.any():
            dark = np.bincount(rack, lost[fed.member], n)
            out = (dark > 0) & (dark == np.bincount(rack, minlength=n))
        if reported(state, "rack.electrical_isolation_state"):
            out = out | (good(state, "rack.electrical_isolation_state") == 1.0)
        self.unpowered_ns[out] = state.now_ns
        recent: Bool = (self.unpowered_ns > 0) & (state.now_ns - self.unpowered_ns < BOOT_S * NS)
        return recent

    def _off(self, state: State, windows: Windows) -> Bool:
        """Return the nodes that their controller reports as off [n_node]."""
        off: Bool = np.zeros(self.topology.sizes["node"], np.bool_)
        if reported(state, "node.power_on_state"):
            off = good(state, "node.power_on_state") == 0.0
            if (mask := windows.mask("node")) is not None:
                off &= ~mask
        return off


def _quiet(watch: SensorChecks, silent: dict[str, Silent], table: str, n: int) -> tuple[Bool, Bool]:
    """Return (entities that no longer report, entities that ever reported) [n]."""
    meters, quiet = watch.meters.get(table), np.zeros(n, np.bool_)
    if meters is None:
        return quiet, quiet
    known: Bool = np.asarray((meters.count > 0).any(axis=0))
    if table in silent:
        quiet[silent[table].entity[silent[table].whole]] = True
    return quiet & known, known


def _without(silent: dict[str, Silent], table: str) -> dict[str, Silent]:
    return {t: s for t, s in silent.items() if t != table}


def _since(since_ns: I64, mask: Bool, now_ns: int) -> None:
    since_ns[mask & (since_ns == 0)] = now_ns
    since_ns[~mask] = 0


def _together(since_ns: I64, mask: Bool, rack_of: Any, most: int) -> Bool:
    """Return those [n] that fell silent within a minute of at least `most` others of their rack."""
    out: Bool = np.zeros(len(mask), np.bool_)
    for rack in np.unique(rack_of[mask]).tolist():
        mine = np.flatnonzero(mask & (rack_of == rack))
        if len(mine) <= most:
            continue
        order = mine[np.argsort(since_ns[mine], kind="stable")]
        t_ns = since_ns[order]
        near = np.searchsorted(t_ns, t_ns + round(TOGETHER_S * NS), "right") - np.searchsorted(
            t_ns, t_ns - round(TOGETHER_S * NS), "left"
        )
        out[order[near > most]] = True
    return out


def _far_apart(since_ns: I64, mask: Bool, rack_of: Any) -> Bool:
    """Return those [n] that fell silent within a minute or two of others in more than MOST_RACKS racks."""
    out: Bool = np.zeros(len(mask), np.bool_)
    at = np.flatnonzero(mask)
    minute = since_ns[at] // round(TOGETHER_S * NS)
    minutes = np.unique(np.stack([minute, rack_of[at]]), axis=1)[0]  # one of each rack
    near = np.searchsorted(minutes, minute + 1, "right") - np.searchsorted(minutes, minute - 1, "left")
    out[at] = near > MOST_RACKS
    return out


def _not_of_source(causes: list[Cause], off: Bool, rack_of: Any) -> list[Cause]:
    """Return the nodes outside racks that were switched off as a whole, which their rack's supply
    explains."""
    if not off.any():
        return causes
    racks = int(rack_of.max(initial=0)) + 1
    dark = np.bincount(rack_of[off], minlength=racks)
    dark_racks = (dark > 1) & (dark == np.bincount(rack_of, minlength=racks))
    return [c for c in causes if not (c.kind == "node_down" and dark_racks[rack_of[c.entity]])]
