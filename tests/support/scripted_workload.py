"""A workload with a truth that nothing else moves, for tests of what jobs do to GPUs.

run = Run(TRAINING)
run.go(60.0)
"""

from __future__ import annotations

import numpy as np

from tests.support.builders import site_of, two_racks
from twin.catalogue import F64
from twin.plant.jobs import PlantJob
from twin.plant.truth import Truth, blank
from twin.plant.workload import Mix, Workload
from twin.site import Site
from twin.telemetry import Event

SITE = site_of(two_racks())
TRAINING = Mix(1.0, 0.0, 0.0, job_hours=(40.0, 48.0))


def truth_of(site: Site = SITE) -> Truth:
    """All on, at the highest clock."""
    truth = blank(site)
    truth.gpu_alive[:] = truth.node_on[:] = True
    truth.gpu_clock_pu[:] = 1.0
    return truth


class Run:
    """A workload with a truth that nothing else moves."""

    def __init__(self, mix: Mix | None = None, seed: int = 1, site: Site = SITE) -> None:
        self.site, self.truth, self.work = site, truth_of(site), Workload(site, seed, mix)
        self.time_s = 0.0
        self.events: list[Event] = []

    def go(self, seconds: float, dt_s: float = 1.0) -> list[Event]:
        """So long in steps; what happened."""
        new: list[Event] = []
        for _ in range(round(seconds / dt_s)):
            new += self.work.step(self.truth, self.time_s, dt_s)
            self.time_s += dt_s
        self.events += new
        return new

    def record(self, seconds: float, dt_s: float = 1.0) -> F64:
        """SM activities [steps, n_gpu]."""
        out = []
        for _ in range(round(seconds / dt_s)):
            self.go(dt_s, dt_s)
            out.append(self.truth.gpu_sm_pu.copy())
        return np.array(out)

    def rows(self, job: PlantJob) -> slice:
        """GPUs of a job."""
        start = self.site.gpu_start_of_node
        return slice(int(start[job.first]), int(start[job.last]))
