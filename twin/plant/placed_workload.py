"""Placed workload: jobs that a scheduler places on chosen nodes, and removes.

Jobs save, lose work and report as those of a frozen workload do. Their activity swings: members of a
synchronous job dip together, a service follows its users. A synchronous job ends when a member dies; the
scheduler decides where it starts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, floor, sqrt

import numpy as np

from twin.catalogue import F64
from twin.plant.frozen_workload import SAVING_PU, FrozenWorkload, HeldJob, columns_of
from twin.plant.jobs import ACTIVITY, ACTIVITY_MAX, DIP_PU, IMBALANCE_PU, Kind
from twin.plant.truth import Truth
from twin.plant.work import SPEAK_S, progress_report, waits_pu
from twin.site import Site
from twin.telemetry import Event, JobEnded, JobSlots

LOAD_SIGMA, LOAD_KEPT_PER_S = 0.06, 0.97  # of a service, about its mean; source: estimate


@dataclass(slots=True)
class Rhythm:
    """Rhythm of a job: a dip of `dip_s` at the end of each period, or the load of a service."""

    kind: Kind
    period_s: float
    dip_s: float
    dip_pu: tuple[float, float, float]
    load_sigmas: float = 0.0  # of a service
    share: float = -1.0  # of the last step that was spent in dips; -1: none was written yet
    waits: F64 | None = None  # of its members, where some wait for slower ones

    def dipped_pu(self, time_s: float, dt_s: float) -> float:
        """Return the share of a step that falls into dips."""
        return (self._dips_s(time_s + dt_s) - self._dips_s(time_s)) / dt_s

    def _dips_s(self, time_s: float) -> float:
        cycles = floor(time_s / self.period_s)
        into_s = time_s - cycles * self.period_s
        return cycles * self.dip_s + max(into_s - (self.period_s - self.dip_s), 0.0)


class PlacedWorkload(FrozenWorkload):
    """Jobs that are placed and removed between steps. Equal seeds and placements give equal activity."""

    def __init__(self, site: Site, seed: int = 0) -> None:
        nothing = JobSlots(0, site.sizes["node"])
        super().__init__(site, nothing, np.zeros((3, site.sizes["gpu"])), np.zeros(0), 0)
        self._rng = np.random.default_rng([seed, 5])
        self._rhythms: dict[str, Rhythm] = {}
        self._vacated: list[HeldJob] = []
        self._news: list[Event] = []

    def place(self, job: HeldJob, kind: Kind, period_s: float, restarted: bool = False) -> None:
        """Place a job on its named nodes. `restarted`: it reports the duration of its recovery."""
        rng, rows = self._rng, self._gpus_of(job.nodes)
        job.gpus = job.alive = rows
        spread = 1.0 + IMBALANCE_PU[kind] * rng.standard_normal(len(rows))
        for column, bounds in zip(self.activity, ACTIVITY[kind], strict=True):
            column[rows] = np.minimum(float(np.mean(bounds)) * spread, ACTIVITY_MAX)
        low, middle, high = (float(np.mean(x)) for x in DIP_PU)
        dip_s = 2.0 if kind == "training" else 0.0
        self._rhythms[job.name] = Rhythm(kind, period_s, dip_s, (low, middle, high))
        now_s = self._now_s
        job.saved_s = job.save_begun_s = now_s
        job.next_s, job.knows = now_s + job.interval_s, False
        self._jobs.append(job)
        if job.interval_s < np.inf:
            restart_s = job.restart_s if restarted else 0.0
            self._news.append(progress_report(job.name, now_s, job.interval_s, restart_s=restart_s))
            job.report_s = now_s + SPEAK_S
        self._next_s = self._first_s()

    def remove(self, name: str, lost: bool = False) -> None:
        """Remove a job from its nodes; `lost`: its work since the last save is done again elsewhere."""
        for job in [job for job in self._jobs if job.name == name]:
            self._jobs.remove(job)
            self._vacated.append(job)
            del self._rhythms[name]
            if lost:
                self.progress.lost_gpu_s += job.unsaved_gpu_s
        self._next_s = self._first_s()

    def step(self, truth: Truth, time_s: float, dt_s: float) -> list[Event]:
        """See FrozenWorkload; the activity of every job follows its rhythm."""
        for job in self._vacated:
            self._write(truth, job, 0.0)
        self._vacated.clear()
        news, self._news = self._news, []
        events = [*news, *super().step(truth, time_s, dt_s)]
        for job in self._jobs:
            self._move(truth, job, time_s, dt_s)
        self._now_s = time_s + dt_s
        return events

    def _move(self, truth: Truth, job: HeldJob, time_s: float, dt_s: float) -> None:
        rhythm = self._rhythms[job.name]
        if rhythm.kind != "inference":
            share = rhythm.dipped_pu(time_s, dt_s) if not job.still else -2.0
            waits = waits_pu(truth.gpu_clock_pu[job.gpus]) if job.synchronous else None
            if share == rhythm.share and waits is None and rhythm.waits is None:
                return
            rhythm.share, rhythm.waits = share, waits
            levels = [1.0 - (1.0 - dip) * share for dip in rhythm.dip_pu] if share >= 0 else [SAVING_PU] * 3
            self._scale(truth, job, np.array(levels))
            if waits is not None:
                truth.gpu_tensor_pu[job.gpus] *= waits
                truth.gpu_dram_pu[job.gpus] *= waits
            return
        kept = LOAD_KEPT_PER_S**dt_s
        step = sqrt(1.0 - kept * kept) * float(self._rng.standard_normal())
        rhythm.load_sigmas = kept * rhythm.load_sigmas + step
        self._scale(truth, job, np.full(3, exp(LOAD_SIGMA * rhythm.load_sigmas)))

    def _scale(self, truth: Truth, job: HeldJob, levels: F64) -> None:
        for column, held, level in zip(columns_of(truth), self.activity, levels, strict=True):
            column[job.gpus] = np.minimum(held[job.gpus] * level, ACTIVITY_MAX)

    def _write(self, truth: Truth, job: HeldJob, gate: float) -> None:
        """Write the activity of a running job by its rhythm."""
        if gate == 0.0:
            super()._write(truth, job, gate)
        elif job.name in self._rhythms:
            self._rhythms[job.name].share = -1.0

    def _deaths(self, truth: Truth, time_s: float, events: list[Event]) -> None:
        """Process dead nodes: a synchronous job ends with one, another continues without it."""
        begun = len(events)
        super()._deaths(truth, time_s, events)
        for event in events[begun:]:
            if isinstance(event, JobEnded):
                self.remove(event.job)
