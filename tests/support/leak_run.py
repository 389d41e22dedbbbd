"""Leaks lived through by a plant, with the leak guard at `act`. Equal runs give equal outcomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies import REGISTRY
from tests.support.flow_losses import RACKS
from tests.support.leaks import AFTER_S, LATER_S, TRAYS, WARM_S, Leak
from twin.contracts import Decision
from twin.engine import Engine
from twin.plant import Plant, Sensors
from twin.run import Report
from twin.simulation import Simulation
from twin.telemetry import Frame

LIQUID, POWER, SAVE = "rack.liquid_isolation", "node.power_state", "job.checkpoint_since_s"
NAME = "leak_guard"
WITNESSES = 2  # wet detectors of a rack that prove a leak
OFF = 2
QUIET_S = 90.0  # after all is isolated: nothing new is wet or commanded, longer than any grace; the run ends


@dataclass(frozen=True)
class LeakOutcome:
    """Racks that leak, of these isolated, and isolated wrongly; nodes switched off hard in leaking racks, of
    these dry ones above the water, and wet ones or below it that were left on; nodes of other racks that were
    ordered off or to stop; seconds from the second wet detector to the first command, from the second that
    the twin has read as wet, and from the second wet detector to the isolation; litres lost; whether missing
    coolant was reported."""

    kind: str
    profile: str
    seed: int
    leaking: int
    isolated: int
    wrong_racks: int
    switched_off: int
    dry_off: int
    wet_left: int
    wrong_nodes: int
    command_s: float
    evidence_s: float
    isolation_s: float
    lost_l: float
    told: bool


class LeakWatch:
    """Observer of a run: what was commanded, when, and when the plant's detectors were wet."""

    def __init__(self, plant: Plant) -> None:
        n = plant.site.sizes
        self.plant, self.now_s = plant, 0.0
        self.isolated_s = np.full(n["rack"], np.inf)
        self.power = np.zeros(n["node"])
        self.commanded_s, self.moved_s = np.inf, 0.0
        self.told = np.zeros(n["cdu"], np.bool_)
        self.trays, self.ropes = np.zeros(n["node"], np.bool_), np.zeros(n["rack"], np.bool_)
        self.evidence_s = np.inf  # when the second detector of a rack had been read as wet

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Called after each tick."""
        self.now_s = now_s = self.plant.truth.time_s
        self._read(engine)
        for batch in decision.commands:
            if batch.policy != NAME:
                continue
            self.commanded_s = min(self.commanded_s, now_s)
            self.moved_s = self.moved_s if batch.renewal else now_s
            if batch.control == LIQUID:
                at = batch.index[batch.value > 0]
                self.isolated_s[at] = np.minimum(self.isolated_s[at], now_s)
            elif batch.control == POWER:
                self.power[batch.index] = np.maximum(self.power[batch.index], batch.value)
        self.told[[f.entity for f in engine.diagnosis.faults if f.kind == "coolant_loss"]] = True

    def _read(self, engine: Engine) -> None:
        """Note which detectors the twin has read as wet."""
        view, site = engine.view(), engine.site
        self.trays |= view.value("node.leak_state") == 1.0
        self.ropes |= view.value("rack.leak_state") == 1.0
        of_rack = np.bincount(site.rack_of_node[self.trays], minlength=site.sizes["rack"]) + self.ropes
        if self.evidence_s == np.inf and (of_rack >= WITNESSES).any():
            self.evidence_s = self.now_s


def live_through_leak(leaks: tuple[Leak, ...], report: Report) -> list[LeakOutcome]:
    """The run to its end, of leaks that one plant has side by side."""
    first, site = leaks[0], leaks[0].site(len(leaks))
    plant = Plant(site, seed=first.seed)
    engine = Engine(site, [REGISTRY[NAME]()], [], {NAME: "act"})
    simulation = Simulation(engine, plant, Sensors(site, first.seed))
    watch = LeakWatch(plant)
    simulation.observers = (watch,)
    disturbance, t = plant.disturbance, plant.truth
    second_s, wet_n, seconds = np.inf, 0, WARM_S + AFTER_S + LATER_S * (len(leaks) - 1)
    for second in range(seconds):
        disturbance.sensors.clear()
        for k, leak in enumerate(leaks):
            leak.apply(disturbance, float(second - WARM_S - LATER_S * k), k)
        simulation.step()
        trays = np.bincount(site.rack_of_node[t.node_leak], minlength=site.sizes["rack"])
        if second_s == np.inf and (trays + t.rack_leak >= WITNESSES).any():
            second_s = t.time_s
        if (now_n := int(t.node_leak.sum() + t.rack_leak.sum())) > wet_n:
            wet_n, watch.moved_s = now_n, t.time_s
        done = len(leaks) == 1 and bool(first.leaking)
        done = done and bool(np.isfinite(watch.isolated_s[list(first.leaking)]).all())
        if done and t.time_s - watch.moved_s >= QUIET_S:
            break
        if second % 60 == 0:
            report(second / seconds, first.kind)
    return [_outcome(watch, leak, k, second_s) for k, leak in enumerate(leaks)]


def _outcome(watch: LeakWatch, leak: Leak, circuit: int, second_s: float) -> LeakOutcome:
    """The outcome of a circuit; `second_s`: when the second detector of a rack was wet."""
    t, site = watch.plant.truth, watch.plant.site
    racks = slice(RACKS * circuit, RACKS * (circuit + 1))
    nodes = slice(racks.start * TRAYS, racks.stop * TRAYS)
    isolated = set(np.flatnonzero(np.isfinite(watch.isolated_s[racks])).tolist())
    reached = np.zeros(site.sizes["node"], np.bool_)
    for tray in np.flatnonzero(t.node_leak).tolist():
        reached[[tray, *site.nodes_below(tray)]] = True
    reached, power = reached[nodes], watch.power[nodes]
    of_leaking = np.isin(np.arange(len(power)) // TRAYS, list(leak.leaking))
    off = power == OFF
    seen = np.isfinite(watch.commanded_s) and np.isfinite(second_s) and bool(leak.leaking)
    first_s = float(watch.isolated_s[racks].min())
    return LeakOutcome(
        kind=leak.kind,
        profile=leak.profile,
        seed=leak.seed,
        leaking=len(leak.leaking),
        isolated=len(isolated & leak.leaking),
        wrong_racks=len(isolated - leak.leaking),
        switched_off=int((off & of_leaking).sum()),
        dry_off=int((off & of_leaking & ~reached).sum()),
        wet_left=int((reached & of_leaking & ~off).sum()),
        wrong_nodes=int(((power > 0) & ~of_leaking).sum()),
        command_s=round(float(watch.commanded_s - second_s), 2) if seen else np.nan,
        evidence_s=round(float(watch.commanded_s - watch.evidence_s), 2) if seen else np.nan,
        isolation_s=round(first_s - second_s, 2) if seen and np.isfinite(first_s) else np.nan,
        lost_l=round(float(t.cdu_leaked_l[circuit]), 2),
        told=bool(watch.told[circuit]),
    )
