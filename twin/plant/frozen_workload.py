"""Frozen workload: every GPU keeps its last activity, and the running jobs continue.

A mirrored plant runs it, since the jobs to come are unknown. Jobs save at their stated interval. A
synchronous job loses its work since the last save when a member dies, and restarts on the remaining nodes. It
has the same interface as `twin.plant.workload.Workload`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import cast

import numpy as np

from twin.catalogue import F64, I32, NS, Bool
from twin.physics import performance_pu
from twin.plant.truth import Truth, alive_in
from twin.plant.work import (
    COMPUTE_SHARE_PU,
    SLOWEST_PU,
    SPEAK_S,
    Progress,
    Save,
    progress_report,
    save_report,
)
from twin.site import Site
from twin.telemetry import KINDS, Event, JobEnded, JobKind, JobSlots, JobStarted

COUNT_S = 10.0  # between looks at how fast the jobs go
SAVING_PU = 0.05  # activity while a checkpoint is written; source: estimate
SAVE_S, RESTART_S = 30.0, 300.0  # where a job does not say; source: estimate


@dataclass(slots=True)
class HeldJob:
    """A job of the twin's table; `nodes` and `gpus` are its rows, those of dead nodes too."""

    name: str
    kind: str
    synchronous: bool
    priority: int
    tenant: str
    nodes: I32
    gpus: I32
    interval_s: float  # between saves; inf = it never saves
    save_s: float  # until it is durable
    block_s: float  # of it the job stands still
    restart_s: float
    saved_s: float  # when the last whole save began
    save_begun_s: float
    next_s: float = inf  # when the next save begins or ends, or it starts again
    report_s: float = inf  # when it speaks of its saves at the latest
    knows: bool = True  # it knows when the save that it holds began
    own_interval_s: float = inf  # before any advice
    saving: bool = False
    still: bool = False
    asked: bool = False  # for another save after the one that runs
    running: bool = True
    unsaved_gpu_s: float = 0.0
    at_save_gpu_s: float = 0.0  # of it, done when the running save began: it is in that save
    alive: I32 = field(default_factory=lambda: np.zeros(0, np.int32))  # its GPUs that work


class FrozenWorkload:
    """The jobs of `jobs` on GPUs that keep their `activity` [3, n_gpu]: sm, tensor, dram, 0..1.

    `checkpoint_age_s` [n_job] is since the last save of each slot, NaN where nobody says; then a job is taken
    to save at its interval from its start.
    """

    def __init__(self, site: Site, jobs: JobSlots, activity: F64, checkpoint_age_s: F64, now_ns: int) -> None:
        self.site, self.activity = site, activity.copy()
        self.progress = Progress()
        self._jobs = [
            self._job(jobs, slot, checkpoint_age_s, now_ns) for slot in np.flatnonzero(jobs.alive).tolist()
        ]
        self._next_s = self._first_s()
        self._counted_s, self._count_next_s = 0.0, COUNT_S
        self._dead = np.zeros(site.sizes["node"], np.bool_)
        self._alive_seen = (-1, -1, -1)
        self._begun, self._now_s = False, 0.0

    def _job(self, jobs: JobSlots, slot: int, checkpoint_age_s: F64, now_ns: int) -> HeldJob:
        nodes = jobs.nodes[slot]
        gpus = self._gpus_of(nodes)
        kind, stated_s = KINDS[int(jobs.kind[slot])], float(jobs.checkpoint_interval_s[slot])
        saves = stated_s > 0.0 and kind in ("training", "unknown")
        save_s, restart_s = (float(x[slot]) for x in (jobs.checkpoint_save_s, jobs.checkpoint_restart_s))
        save_s, restart_s = save_s or SAVE_S, restart_s or RESTART_S
        block_s = float(jobs.checkpoint_block_s[slot]) or save_s
        save_s = max(float(jobs.checkpoint_flush_s[slot]) or save_s, block_s)
        interval_s = max(stated_s, save_s) if saves else inf
        age_s, saved_ns = float(checkpoint_age_s[slot]), int(jobs.saved_ns[slot])
        if saved_ns:
            age_s = max(0.0, (now_ns - saved_ns) / NS)
        knows = bool(np.isfinite(age_s))
        if not knows:
            ran_s = max(0.0, (now_ns - int(jobs.running_since_ns(slot))) / NS)
            age_s = ran_s % interval_s if saves else ran_s
        return HeldJob(
            jobs.names[slot], kind, bool(jobs.synchronous[slot]), int(jobs.priority[slot]),
            jobs.tenants[slot],
            nodes.copy(), gpus, interval_s, save_s, block_s, restart_s, -age_s, -age_s,
            next_s=max(0.0, interval_s - age_s) if saves else inf, report_s=SPEAK_S if saves else inf,
            knows=knows, own_interval_s=interval_s, unsaved_gpu_s=age_s * len(gpus), alive=gpus,
        )  # fmt: skip

    def _gpus_of(self, nodes: I32) -> I32:
        start = self.site.gpu_start_of_node
        return np.concatenate(
            [np.zeros(0, np.int32), *(np.arange(start[i], start[i + 1]) for i in nodes)]
        ).astype(np.int32)

    @property
    def jobs(self) -> tuple[HeldJob, ...]:
        """Return the running jobs."""
        return tuple(job for job in self._jobs if job.running)

    def lost_work(self) -> float:
        """Return the GPU-seconds of work lost since the begin by deaths of members of synchronous jobs."""
        return self.progress.lost_gpu_s

    def checkpoint_age_s(self, job: str, time_s: float) -> float | None:
        """Return the seconds since the begin of this job's last complete save; None if unknown or without
        saves."""
        found = self._find(job)
        return None if found is None else time_s - found.saved_s

    def checkpoint(self, job: str, since_s: float) -> float | None:
        """Request a save that began no earlier than `since_s`; returns the seconds until it is complete, 0
        if it exists.

        A save that is needed begins at once, or when the one that runs is whole. None: no such job saves.
        """
        found = self._find(job)
        if found is None:
            return None
        left_s = max(0.0, found.save_begun_s + found.save_s - self._now_s) if found.saving else 0.0
        if found.save_begun_s >= since_s:
            return left_s
        found.asked = found.saving
        if not found.saving:
            found.next_s = self._now_s
            self._next_s = min(self._next_s, self._now_s)
        return left_s + found.save_s

    def checkpoint_interval(self, job: str, interval_s: float) -> bool:
        """Save a job each `interval_s` from its last save on; returns False if there is no such job with
        saves."""
        found = self._find(job)
        if found is None:
            return False
        old_s, found.interval_s = found.interval_s, max(interval_s, found.save_s)
        if found.interval_s == old_s:
            return True
        if not found.saving and found.next_s > self._now_s:
            found.next_s = max(self._now_s, found.next_s - old_s + found.interval_s)
        found.report_s = self._now_s
        self._next_s = min(self._next_s, self._now_s)
        return True

    def step(self, truth: Truth, time_s: float, dt_s: float) -> list[Event]:
        """Write what changes in the step from `time_s` on; returns the jobs that fail or start."""
        events: list[Event] = []
        self._now_s = time_s
        if not self._begun:
            self._begun, self._counted_s, self._count_next_s = True, time_s, time_s + COUNT_S
            for column, held in zip(columns_of(truth), self.activity, strict=True):
                column[:] = held
        alive = alive_in(truth)
        if alive != self._alive_seen:
            self._alive_seen = alive
            self._deaths(truth, time_s, events)
        if self._next_s < time_s + dt_s:
            for job in self._jobs:
                while job.next_s < time_s + dt_s:
                    self._act(job, truth, max(job.next_s, time_s), events)
                if job.running and job.report_s < time_s + dt_s:
                    self._report(job, max(job.report_s, time_s), events)
            self._next_s = self._first_s()
        if time_s >= self._count_next_s:
            self._count(truth, time_s)
            self._count_next_s = time_s + COUNT_S
        return events

    def _find(self, name: str) -> HeldJob | None:
        return next((j for j in self._jobs if j.running and j.name == name and j.interval_s < inf), None)

    def _first_s(self) -> float:
        """Return the instant of the next save or report of any job."""
        return min((min(j.next_s, j.report_s if j.running else inf) for j in self._jobs), default=inf)

    def _report(self, job: HeldJob, at_s: float, events: list[Event]) -> None:
        """Emit a report of a job without a new save."""
        events.append(progress_report(job.name, at_s, job.interval_s, job.saved_s if job.knows else None))
        job.report_s = at_s + SPEAK_S

    def _act(self, job: HeldJob, truth: Truth, at_s: float, events: list[Event]) -> None:
        """Begin or complete a save, or restart a failed job."""
        self._count(truth, at_s)
        if not job.running:
            self._restart(job, truth, at_s, events)
        elif job.still and job.block_s < job.save_s:
            job.still, job.next_s = False, job.save_begun_s + job.save_s
            self._write(truth, job, 1.0)
        elif job.saving:
            job.saving = job.still = False
            job.saved_s, job.knows = job.save_begun_s, True
            job.unsaved_gpu_s -= job.at_save_gpu_s
            wait_s = 0.0 if job.asked else job.interval_s
            job.next_s = max(at_s, job.saved_s + job.block_s + wait_s)
            job.report_s, job.asked = at_s + SPEAK_S, False
            self._write(truth, job, 1.0)
            save = Save(job.saved_s, job.save_s, job.block_s)
            events.append(save_report(job.name, at_s, save, job.interval_s))
        else:
            job.saving = job.still = True
            job.save_begun_s, job.at_save_gpu_s = at_s, job.unsaved_gpu_s
            job.next_s = at_s + job.block_s
            self._write(truth, job, SAVING_PU)

    def _restart(self, job: HeldJob, truth: Truth, at_s: float, events: list[Event]) -> None:
        job.nodes = job.nodes[self._healthy(truth)[job.nodes]]
        job.gpus = job.alive = self._gpus_of(job.nodes)
        if not len(job.gpus):
            job.next_s = at_s + job.restart_s
            return
        job.running, job.saved_s, job.save_begun_s = True, at_s, at_s
        job.interval_s = job.own_interval_s
        job.next_s = at_s + job.interval_s
        self._write(truth, job, 1.0)
        saves = job.interval_s < inf
        events.append(
            JobStarted(
                job=job.name, nodes=tuple(self.site.name("node", int(i)) for i in job.nodes),
                kind=cast("JobKind", job.kind), coupling="synchronous", priority=job.priority,
                tenant=job.tenant,
                checkpoint_interval_s=job.interval_s if saves else 0.0,
                checkpoint_save_s=job.save_s if saves else 0.0, checkpoint_restart_s=job.restart_s,
            )
        )  # fmt: skip
        if saves:
            events.append(progress_report(job.name, at_s, job.interval_s, restart_s=job.restart_s))
            job.report_s, job.knows = at_s + SPEAK_S, False

    def _deaths(self, truth: Truth, time_s: float, events: list[Event]) -> None:
        """Process dead nodes: a synchronous job fails with one; another continues without it."""
        dead = ~self._healthy(truth)
        died, self._dead = dead & ~self._dead, dead
        if not died.any():
            return
        self._count(truth, time_s)
        for job in self._jobs:
            if not died[job.nodes].any():
                continue
            job.alive = job.gpus[truth.gpu_alive[job.gpus] & truth.node_on[self.site.node_of_gpu[job.gpus]]]
            if not (job.synchronous and job.running):
                continue
            self.progress.lost_gpu_s += job.unsaved_gpu_s
            self.progress.interruptions += 1
            job.unsaved_gpu_s = job.at_save_gpu_s = 0.0
            job.running = job.saving = job.still = job.asked = False
            job.next_s = time_s + job.restart_s
            self._next_s = min(self._next_s, job.next_s)
            self._write(truth, job, 0.0)
            events.append(JobEnded(job=job.name, reason="node_fail"))

    def _healthy(self, truth: Truth) -> Bool:
        """Return the nodes [n_node] that are on, with all their GPUs on the bus."""
        dead = np.concatenate(([0], np.cumsum(~truth.gpu_alive)))
        fit = truth.node_on & ~truth.node_unfit
        healthy: Bool = fit & (np.diff(dead[self.site.gpu_start_of_node]) == 0)
        return healthy

    def _write(self, truth: Truth, job: HeldJob, gate: float) -> None:
        """Set all of a job's GPUs to this share of their observed activity."""
        for column, held in zip(columns_of(truth), self.activity, strict=True):
            column[job.gpus] = held[job.gpus] * gate

    def _count(self, truth: Truth, time_s: float) -> None:
        """Credit the time since the last count; a synchronous job runs at the pace of its slowest member."""
        elapsed_s, self._counted_s = time_s - self._counted_s, time_s
        if elapsed_s <= 0.0:
            return
        for job in self._jobs:
            if not job.running or not len(job.alive):
                continue
            clock = truth.gpu_clock_pu[job.alive]
            slowest = np.array([clock.min() if job.synchronous else clock.mean()])
            pace = float(performance_pu(np.maximum(slowest, SLOWEST_PU), COMPUTE_SHARE_PU)[0])
            whole = len(job.alive) * elapsed_s
            if job.still:
                self.progress.saving_gpu_s += whole
                continue
            self.progress.done_gpu_s += whole * pace
            self.progress.slowed_gpu_s += whole * (1.0 - pace)
            job.unsaved_gpu_s += whole * pace


def columns_of(truth: Truth) -> tuple[F64, F64, F64]:
    return truth.gpu_sm_pu, truth.gpu_tensor_pu, truth.gpu_dram_pu
