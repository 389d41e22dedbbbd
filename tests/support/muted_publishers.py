"""A simulated site of which some publishers can be stopped: what they carry no longer arrives."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from tests.support.builders import site_of, two_racks
from twin.catalogue import Bool
from twin.contracts import Decision, Finding
from twin.engine import Engine
from twin.plant import Observation, Plant, Sensors, scenario_of
from twin.simulation import Simulation
from twin.site import Site

BUILDING = ("rack", "cdu", "loop", "feeder", "hall")
OUTSIDE = ("site",)


class MutableSensors(Sensors):
    """Sensors whose reports pass publishers; `stopped` [n per table] are carried by one that stands."""

    stopped: dict[str, Bool]

    def observe(self, *parts: Any, **named: Any) -> Observation:
        seen = super().observe(*parts, **named)
        reports = []
        for report in seen.reports:
            stopped = self.stopped.get(report.table)
            if stopped is not None:
                present = ~stopped if report.present is None else report.present & ~stopped
                if not present.any():
                    continue
                report = dataclasses.replace(report, present=present)
            reports.append(report)
        seen.reports = reports
        return seen


class MutedSite:
    """A site of two racks beside its plant, and every finding that was ever raised."""

    def __init__(self, policies: Any = (), seed: int = 1, leak_s: float | None = None) -> None:
        self.site = site_of(two_racks())
        leaks = [{"kind": "leak", "entity": "lab/h/r2/node3", "begin_s": leak_s, "severity": 0.8}]
        tree = {"name": "x", "hours": 1, "seed": seed, "faults": leaks if leak_s is not None else []}
        engine = Engine(self.site, policies, [], {p.name: "act" for p in policies})
        sensors = MutableSensors(self.site, seed)
        sensors.stopped = {}
        self.sim = Simulation(engine, Plant(self.site, seed, scenario_of(tree, self.site)), sensors)
        self.raised: dict[str, Finding] = {}

    @property
    def decision(self) -> Decision:
        return self.sim.decision

    @property
    def ids(self) -> list[str]:
        return [f.id for f in self.decision.findings]

    def fork(self) -> MutedSite:
        """The same site and moment, going on by itself."""
        out = copy.copy(self)
        out.sim, out.raised = self.sim.fork(), dict(self.raised)
        return out

    def run(self, seconds: int) -> MutedSite:
        for _ in range(seconds):
            for finding in self.sim.step().findings:
                self.raised[finding.id] = finding
        return self

    def stop(self, **tables: Bool) -> MutedSite:
        """The publisher of these entities stops; of none: all that were stopped go on."""
        assert isinstance(self.sim.sensors, MutableSensors)
        self.sim.sensors.stopped = tables
        return self


def of_rack(site: Site, rack: int = 0) -> dict[str, Bool]:
    """All of one rack."""
    own = np.arange(site.sizes["rack"]) == rack
    return {"rack": own, "node": site.rack_of_node == rack, "gpu": site.rack_of_gpu == rack}


def of_tables(site: Site, *tables: str) -> dict[str, Bool]:
    """All of some tables."""
    return {table: np.ones(site.sizes[table], np.bool_) for table in tables}


def of_node(site: Site, node: int) -> dict[str, Bool]:
    """One agent: its node and GPUs."""
    return {"node": np.arange(site.sizes["node"]) == node, "gpu": site.node_of_gpu == node}
