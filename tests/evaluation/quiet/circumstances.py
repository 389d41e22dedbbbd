"""Circumstances of a healthy plant: weather, sensors, planned work, ordinary life, a demand response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.evaluation.health.failure_timeline import ordinary_life
from tests.evaluation.quiet.healthy_sites import SEASONS, HealthyRun
from twin.catalogue import NS
from twin.plant import FailureTable, FailureTimeline, Observation, Sensors, TimelineEvent
from twin.plant.disturbance import Disturbance
from twin.plant.truth import Truth
from twin.plant.weather import Weather
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import Event, LoadTargetSet

# Steps of a board's sensors: temperatures in K, shares; source: `ipmitool sdr` of common servers
COARSE_STEP = {"c": 1.0, "k": 1.0, "pu": 0.02}
GAPS_PU = 0.05  # of the readings do not come
WORKED_ON = 8  # one node in so many is drained in a run
REBOOT_S = 240.0  # for which an agent is away
RESPONSE_PU = 0.7  # of the draw at the time


class CoarseSensors(Sensors):
    """Sensors whose temperatures come in steps of 1 K and whose shares come in steps of 2 %."""

    def observe(
        self, truth: Truth, disturbance: Disturbance, now_ns: int, events: Sequence[Event] = ()
    ) -> Observation:
        """The reports of the round, rounded."""
        exact, coarse = super().observe(truth, disturbance, now_ns, events), []
        for report in exact.reports:
            values = report.values.copy()
            for row, signal in zip(values, report.signals, strict=True):
                if step := COARSE_STEP.get(signal.rpartition("_")[2]):
                    row[:] = np.rint(row / np.float32(step)) * np.float32(step)
            coarse.append(replace(report, values=values))
        return Observation(coarse, exact.events, exact.now_ns)


def sensors_of(run: HealthyRun, site: Site) -> Sensors:
    """The sensors of a run, of its grade."""
    if run.sensors == "coarse":
        return CoarseSensors(site, run.seed)
    return Sensors(site, run.seed, drop_out_pu=GAPS_PU) if run.sensors == "gaps" else Sensors(site, run.seed)


def weather_of(run: HealthyRun) -> Weather:
    """The weather of a run, in its season."""
    return replace(SEASONS[run.season], seed=run.seed)


def maintenance(run: HealthyRun, site: Site) -> FailureTimeline:
    """Nodes are drained and returned. Every second one is announced and restarts meanwhile."""
    rng = np.random.default_rng((run.seed, 0x3A))
    nodes = rng.choice(site.sizes["node"], max(2, site.sizes["node"] // WORKED_ON), replace=False).tolist()
    out: list[TimelineEvent] = []
    away: list[tuple[int, float, float]] = []
    for k, node in enumerate(nodes):
        begin_s = float(rng.uniform(0.2, 0.6)) * run.seconds
        end_s = begin_s + 0.2 * run.seconds
        out.append(TimelineEvent(begin_s, "hold", "node_unfit", node, 1.0, k))
        out.append(TimelineEvent(end_s, "free", "node_unfit", node, 0.0, k))
        if k % 2 == 0:
            back_s = min(begin_s + REBOOT_S, 0.5 * (begin_s + end_s))
            out.append(TimelineEvent(begin_s, "work", "node", node, end_s - begin_s))
            out.append(TimelineEvent(begin_s, "hold", "node_silent", node, 1.0, k))
            out.append(TimelineEvent(back_s, "free", "node_silent", node, 0.0, k))
            out.append(TimelineEvent(back_s, "count", "node_reboots", node, 1.0))
            away.append((node, begin_s, back_s))
    none = FailureTable(
        *(np.zeros(0, kind) for kind in ("i4", "u1", "i4", "f8", "f8", "?", "f8", "?", "?", "?"))
    )
    days, lemons = run.seconds / 86_400.0, np.zeros(site.sizes["node"], np.bool_)
    out.sort(key=lambda event: event.time_s)
    return FailureTimeline(days, run.seed, 0.0, tuple(out), none, lemons, tuple(away))


def events_of(run: HealthyRun, site: Site) -> FailureTimeline | None:
    """What happens to devices in a run: planned work, or what happens without consequence; None: nothing."""
    if run.load == "ordinary":
        return ordinary_life(site, run.seed, run.seconds / 86_400.0)
    return maintenance(run, site) if run.load == "maintenance" else None


def load_target(run: HealthyRun, simulation: Simulation) -> LoadTargetSet:
    """From now on, for a third of the run, less than the site draws."""
    now_ns = simulation.now_ns
    return LoadTargetSet(
        author="grid", target="response", kind="demand_response", start_ns=now_ns + NS,
        limit_w=RESPONSE_PU * float(simulation.plant.truth.rack_power_w.sum()),
        end_ns=now_ns + run.seconds // 3 * NS,
    )  # fmt: skip
