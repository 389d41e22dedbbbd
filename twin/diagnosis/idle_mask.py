"""Idle mask: loops without flow, GPUs that heat has shut down, and the equipment that feeds only these.

A meter of an idle device repeats its reading, and its comparisons carry no evidence.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import TABLES, Bool
from twin.diagnosis.device_reports import good, heard
from twin.diagnosis.signature import HEAT
from twin.diagnosis.topology import Topology
from twin.telemetry import State

NO_FLOW_PU = 0.1  # of the nominal flow: nothing to speak of flows; source: estimate
OFF_PU = 0.02  # of a GPU's rated power: no GPU on the bus draws so little
RESTING_PU, MOST_OFF = 0.2, 0.5  # of a rack's most power; share of its GPUs; source: estimate
RACK_OF_LOAD = ("rack.power_w", HEAT)  # comparisons of racks that rest on the load of their GPUs
_POWER_ROW = TABLES["gpu"].by_name["power_w"].row


class IdleMask:
    """Idle equipment in one tick: `dry` racks and CDUs, and `off` GPUs, as masks [n]."""

    def __init__(self, state: State, topology: Topology) -> None:
        self.state, self.topology = state, topology
        self.dry_rack, self.dry_cdu = _dry(state, topology)
        self.any_dry = bool(self.dry_cdu.any())
        self.off: Bool = np.zeros(topology.sizes["gpu"], np.bool_)
        self.any_off = False

    def dry_gpus(self) -> Bool | None:
        """GPUs behind a CDU or a branch without flow [n_gpu]; None if there are none."""
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
        """Rows [n] of a comparison that rests on what stands still; None if there are none."""
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
        """Entities whose meters may stand still [n per table]."""
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
        """Racks whose GPUs are mostly off, or that draw next to nothing [n_rack]."""
        topology = self.topology
        resting: Bool = np.zeros(topology.sizes["rack"], np.bool_)
        if self.any_off:
            every = np.bincount(topology.site.rack_of_gpu, minlength=len(resting))
            gone = topology.count("gpu", "rack", self.off)
            resting = (every > 0) & (gone >= MOST_OFF * every)
        if heard(self.state, "rack.power_w"):
            resting = resting | (
                good(self.state, "rack.power_w") < RESTING_PU * topology.site.design.rack_max_w
            )
        return resting


def _dry(state: State, topology: Topology) -> tuple[Bool, Bool]:
    """(racks, CDUs) through which nothing flows; a CDU only where its racks' meters say so too."""
    design = topology.site.design
    rack: Bool = np.zeros(topology.sizes["rack"], np.bool_)
    cdu: Bool = np.zeros(topology.sizes["cdu"], np.bool_)
    flows = rack
    if heard(state, "rack.flow_lpm"):
        flow = good(state, "rack.flow_lpm")
        rack, flows = flow < NO_FLOW_PU * design.rack_flow_lpm, flow >= NO_FLOW_PU * design.rack_flow_lpm
    if len(cdu) and heard(state, "cdu.flow_lpm"):
        at = topology.site.cdu_of_rack
        fed = np.bincount(at[flows & (at >= 0)], minlength=len(cdu)) > 0
        cdu = (good(state, "cdu.flow_lpm") < NO_FLOW_PU * design.cdu_flow_lpm) & ~fed
        if cdu.any():
            rack = rack | ((at >= 0) & cdu[np.maximum(at, 0)])
    return rack, cdu


def _idle_feeders(topology: Topology, resting: Bool) -> Bool:
    """Feeders that carry only racks that rest [n_feeder], directly or through feeders below."""
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
