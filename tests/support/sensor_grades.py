"""Sensor grades: the same plant measured in coarse steps, or asked seldom, as real fleets measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twin.plant import Observation, Sensors
from twin.plant.disturbance import Disturbance
from twin.plant.truth import Truth
from twin.site import Site
from twin.telemetry import Event

# Steps of a board's sensors: temperatures in K, shares; source: `ipmitool sdr` of common servers
COARSE_STEP = {"c": 1.0, "k": 1.0, "pu": 0.02}
# Seconds between readings: dcgm-exporter collects every 30 s unless told otherwise, and a BMS is polled
AGENT_S, BUILDING_S = 30, 60


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


class SlowSensors(Sensors):
    """Sensors that are asked seldom: each node's every 30 s, the building's every 60 s."""

    def __init__(self, site: Site, seed: int) -> None:
        super().__init__(site, seed)
        node = np.random.default_rng((seed, 0x510)).integers(0, AGENT_S, site.sizes["node"])
        self._turn = {"node": node, "gpu": node[site.node_of_gpu], "link": node[site.node_of_link]}

    def observe(
        self, truth: Truth, disturbance: Disturbance, now_ns: int, events: Sequence[Event] = ()
    ) -> Observation:
        """The reports of the round, of those whose turn it is."""
        all_of_them = super().observe(truth, disturbance, now_ns, events)
        second, slow = now_ns // 1_000_000_000, []
        for report in all_of_them.reports:
            turn = self._turn.get(report.table)
            if turn is None:
                asked = np.full(len(report.t_ns), second % BUILDING_S < 2)  # its gateway reads every 2 s
            else:
                asked = turn == second % AGENT_S
            spoke = asked if report.present is None else asked & report.present
            if spoke.any():
                slow.append(replace(report, present=spoke))
        return Observation(slow, all_of_them.events, all_of_them.now_ns)
