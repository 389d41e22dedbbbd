"""Workload of a simulated site: jobs start, vary, save, fail and end, and set the activity of every GPU.

Jobs hold whole nodes. Rare changes wait in a queue of instants. In each step all members of a synchronous job
dip together and services follow their users; activities are means over the step, exact for any step, and only
those that changed are written.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from math import cos, exp, pi, sqrt
from typing import Literal

import numpy as np

from twin.catalogue import F64, Bool
from twin.plant.jobs import ACTIVITY_MAX, IMBALANCE_PU, Mix, PlantJob, berths_of, job_of, longest_run
from twin.plant.truth import Truth, alive_in
from twin.plant.work import SPEAK_S, Progress, Save, Tally, progress_report, save_report, waits_pu, with_rest
from twin.site import Site
from twin.telemetry import Event, JobEnded

Columns = tuple[F64, F64, F64]  # sm, tensor and dram activity of the truth, [rows] each
BLOCKS = 3  # of the rows of a service; those of all services have a new load in turn
BLOCK_S = 1.0  # from one block to the next
# Load of a service's members about its mean, on a logarithmic scale, and how much of it stays from one turn
# to the next; bursts are shared by all members; source: estimate
LOAD_SIGMA, LOAD_KEPT, BURST_SIGMA, BURST_KEPT = 0.25, 0.7, 0.20, 0.9
LOAD_MEAN_PU, LOAD_MIN_PU = 0.55, 0.03
WAIT_MOVED_PU = 2e-3  # smaller changes of how long members wait are left out
PEAK_HOUR = 15.0  # of users; source: estimate
DAY_S = 86_400.0


def whole_of(columns: Columns) -> F64 | None:
    """Return the array [3, rows] behind the columns; None if each has its own, as in a copy."""
    whole = columns[0].base
    same = whole is not None and whole is columns[1].base and whole is columns[2].base
    return whole if same and whole.shape == (3, len(columns[0])) else None  # type: ignore[union-attr]


class Swing:
    """Slots [n], each with the rows of a job or none."""

    def __init__(self, n: int) -> None:
        self._base = np.zeros((3, 0))  # [3, rows] activity of compute phases
        self._rows = [(0, 0)] * n
        self._period_s, self._phase_s, self._dip_s = np.ones(n), np.zeros(n), np.zeros(n)
        self._depth = np.zeros((3, n))  # how much of the activity a dip takes
        self._gate = np.zeros(n)  # scales all of it
        self._dipped_s, self._share = np.zeros(n), np.zeros(n)
        self._dirty = np.zeros(n, np.bool_)
        self._until_s = np.nan  # end of the last step
        self._synchronous = np.zeros(n, np.bool_)
        self._wait: dict[int, F64] = {}  # by slot: of its members that wait for slower ones, see `waits_pu`

    def shape(self, rows: int) -> None:
        """Set the number of rows, all at rest."""
        self._base = np.zeros((3, rows))

    def seat(self, slot: int, job: PlantJob, rows: tuple[int, int], spread: F64) -> None:
        """Assign these rows to a job; `spread` [rows] scales its activity on each."""
        self._rows[slot] = rows
        for k in range(3):
            self._base[k, rows[0] : rows[1]] = np.minimum(job.activity[k] * spread, ACTIVITY_MAX)
            self._depth[k, slot] = 1.0 - job.dip[k]
        self._period_s[slot], self._phase_s[slot], self._dip_s[slot] = job.period_s, job.phase_s, job.dip_s
        self.gate(slot, 1.0)
        self._until_s = np.nan
        self._synchronous[slot] = job.kind == "training"
        self._wait.pop(slot, None)

    def wait(self, clock_pu: F64) -> None:
        """Let the members of synchronous jobs wait for those with lower clocks [rows]."""
        if not self._wait and not (len(clock_pu) and clock_pu.min() < 1.0):
            return
        for slot in np.flatnonzero(self._synchronous & (self._gate > 0.0)).tolist():
            first, last = self._rows[slot]
            waits, was = waits_pu(clock_pu[first:last]), self._wait.get(slot)
            if waits is None:
                moved = self._wait.pop(slot, None) is not None
            elif moved := was is None or bool(np.abs(waits - was).max() > WAIT_MOVED_PU):
                self._wait[slot] = waits
            self._dirty[slot] |= moved

    def gate(self, slot: int, level: float) -> None:
        """Scale the activity of a job; 0 = at rest."""
        self._gate[slot], self._dirty[slot] = level, True

    def step(self, columns: Columns, time_s: float, dt_s: float) -> None:
        """Write the mean activities from `time_s` to `time_s + dt_s`."""
        if time_s != self._until_s:
            self._dipped_s = self._dips_s(time_s)
        self._until_s = time_s + dt_s
        dipped_s = self._dips_s(self._until_s)
        share = (dipped_s - self._dipped_s) / dt_s
        self._dipped_s = dipped_s
        self._dirty |= share != self._share
        self._share = share
        moved = np.flatnonzero(self._dirty)
        if not len(moved):
            return
        level = (1.0 - self._depth[:, moved] * share[moved]) * self._gate[moved]
        base, whole = self._base, whole_of(columns)
        if whole is not None:
            for k, slot in enumerate(moved.tolist()):
                a, b = self._rows[slot]
                np.multiply(base[:, a:b], level[:, k : k + 1], out=whole[:, a:b])
                if slot in self._wait:
                    whole[1:, a:b] *= self._wait[slot]
        else:
            for slot, levels in zip(moved.tolist(), level.T.tolist(), strict=True):
                a, b = self._rows[slot]
                for k in range(3):
                    np.multiply(base[k, a:b], levels[k], out=columns[k][a:b])
                    if k and slot in self._wait:
                        columns[k][a:b] *= self._wait[slot]
        self._dirty[:] = False

    def _dips_s(self, time_s: float) -> F64:
        """Return the time spent in dips [n]; a dip is the end of each period."""
        at = time_s + self._phase_s
        cycles = np.floor(at / self._period_s)
        into = at - cycles * self._period_s
        return cycles * self._dip_s + np.maximum(into - (self._period_s - self._dip_s), 0.0)


class InferenceLoad:
    """Inference: each member of a service has its own load around one that follows the day and bursts."""

    def __init__(self, mix: Mix, rng: np.random.Generator) -> None:
        self._mix, self._rng = mix, rng
        self._blocks: list[tuple[int, int, int]] = []  # first row, last row, rows per member; of all services
        self._activity: list[tuple[float, float, float]] = []
        self._weight: list[F64] = []
        self._z: list[F64] = []  # [members] of each block
        self._burst = 0.0
        self._next, self._next_s = 0, -np.inf

    def seat(self, job: PlantJob, rows: tuple[int, int], members: int, spread: F64) -> None:
        """Assign these rows to a service; `spread` [rows] scales the activity of each."""
        width = (rows[1] - rows[0]) // members
        even = width * members == rows[1] - rows[0]
        width, members = (width, members) if even else (1, rows[1] - rows[0])
        cuts = np.unique(np.linspace(0, members, min(BLOCKS, members) + 1).astype(int)).tolist()
        for first, last in pairwise(cuts):
            a, b = rows[0] + first * width, rows[0] + last * width
            self._blocks.append((a, b, width))
            self._activity.append(job.activity)
            self._weight.append(spread[a - rows[0] : b - rows[0]].copy())
            self._z.append(self._rng.standard_normal(last - first))
        self._next_s = -np.inf

    def step(self, columns: Columns, time_s: float, dt_s: float) -> None:
        """Write new loads where their turn has come; all of them at once at the beginning."""
        n = len(self._blocks)
        if not n or time_s + dt_s <= self._next_s:
            return
        first = self._next_s == -np.inf
        due = n if first else int((time_s + dt_s - self._next_s) / BLOCK_S + 1.0)
        turns = min(n, due)
        self._next_s = time_s + dt_s if first else self._next_s + due * BLOCK_S
        self._burst = BURST_KEPT * self._burst + sqrt(1.0 - BURST_KEPT**2) * self._rng.standard_normal()
        hour = self._mix.hour_at_start + time_s / 3600.0
        day = 1.0 + self._mix.diurnal_pu * cos(2.0 * pi * (hour - PEAK_HOUR) / 24.0)
        mean = LOAD_MEAN_PU * day * exp(BURST_SIGMA * self._burst)
        for _ in range(turns):
            self._load(columns, self._next % n, mean)
            self._next = (self._next + 1) % n

    def _load(self, columns: Columns, block: int, mean: float) -> None:
        a, b, width = self._blocks[block]
        z = self._z[block]
        z *= LOAD_KEPT
        z += self._rng.normal(0.0, sqrt(1.0 - LOAD_KEPT**2), len(z))
        load = np.exp(LOAD_SIGMA * z)
        load *= mean
        np.minimum(np.maximum(load, LOAD_MIN_PU, out=load), 1.0, out=load)
        each = np.repeat(load, width) if width > 1 else load
        each = np.minimum(each * self._weight[block], ACTIVITY_MAX)
        for column, part in zip(columns, self._activity[block], strict=True):
            np.multiply(each, part, out=column[a:b])


__all__ = ["Mix", "Progress", "Workload"]

COUNT_S = 20.0  # between looks at how fast the jobs go
SAVING_PU = 0.05  # activity while a checkpoint is written; source: estimate
GAP_S = (60.0, 900.0)  # a berth stays empty between two jobs; source: estimate
BATCH_HOLD_S, BATCH_LEVEL_PU = (30.0, 300.0), (0.3, 1.0)  # a batch job keeps one level; source: estimate
CONSTANT_SHARES = (1.0, 0.65, 0.5)  # sm, tensor and dram of a constant activity

Action = Literal["start", "end", "save", "saved", "level", "tell"]


class Workload:
    """Jobs drawn from `mix` with `seed`. Give `step` the same truth, or a copy of it, each time."""

    def __init__(self, site: Site, seed: int = 0, mix: Mix | None = None) -> None:
        self._site, self._mix = site, mix or Mix()
        self._rng = np.random.default_rng([seed, 3])
        self._gpus_of_node = np.diff(site.gpu_start_of_node)
        self._berths = berths_of(np.flatnonzero(self._gpus_of_node), self._mix, self._rng)
        n = len(self._berths)
        self._jobs: list[PlantJob | None] = [None] * n
        self._waiting: dict[int, PlantJob] = {}  # failed jobs that start again in their slot
        self._start = np.zeros(0, np.intp)  # [n_node + 1] first row of each node; empty before the first step
        self._swing, self._service = Swing(n), InferenceLoad(self._mix, self._rng)
        self._tally = Tally(np.array([b.kind == "training" for b in self._berths], np.bool_))
        self._save_begun_s, self._saved_s = np.full(n, -np.inf), np.full(n, -np.inf)
        self._ever_saved = np.zeros(n, np.bool_)  # since this job began in its slot
        self._queue: list[tuple[float, int, Action, int]] = []
        self._due: dict[tuple[Action, int], int] = {}  # the entry of the queue that counts
        self._tickets = self._drawn = 0
        self._now_s = 0.0
        self._count_next_s = -np.inf
        self._dead = np.zeros(site.sizes["node"], np.bool_)
        self._alive_seen = (-1, -1, -1)

    @property
    def jobs(self) -> tuple[PlantJob, ...]:
        """Return the running jobs."""
        return tuple(j for j in self._jobs if j is not None)

    @property
    def progress(self) -> Progress:
        """Return the work done, lost and slowed, up to COUNT_S ago."""
        return self._tally.progress

    def lost_work(self) -> float:
        """Return the GPU-seconds of work lost since the begin by deaths of members of synchronous jobs."""
        return self._tally.progress.lost_gpu_s

    def checkpoint_age_s(self, job: str, time_s: float) -> float | None:
        """Return the seconds since the begin of this job's last complete save; None if unknown or without
        saves."""
        slot = self._slot(job)
        return None if slot is None else time_s - float(self._saved_s[slot])

    def checkpoint(self, job: str, since_s: float) -> float | None:
        """Request a save that began no earlier than `since_s`; returns the seconds until it is complete, 0
        if it exists.

        A save that is needed begins at once, or when the one that runs is whole. None: no such job saves.
        """
        slot = self._slot(job)
        drawn = None if slot is None else self._jobs[slot]
        if slot is None or drawn is None:
            return None
        begun_s = float(self._save_begun_s[slot])
        left_s = max(0.0, begun_s + drawn.save_s - self._now_s) if self._tally.saving[slot] else 0.0
        if begun_s >= since_s:
            return left_s
        self._put("save", slot, self._now_s + left_s)
        return left_s + drawn.save_s

    def checkpoint_interval(self, job: str, interval_s: float) -> bool:
        """Save a job each `interval_s` from its last save on; returns False if there is no such job with
        saves."""
        slot = self._slot(job)
        drawn = None if slot is None else self._jobs[slot]
        if slot is None or drawn is None:
            return False
        old_s, drawn.interval_s = drawn.interval_s, max(interval_s, drawn.save_s)
        if drawn.interval_s == old_s:
            return True
        next_s = self._next_save_s(slot)
        if next_s is not None and next_s > self._now_s and not self._tally.saving[slot]:
            self._put("save", slot, max(self._now_s, next_s - old_s + drawn.interval_s))
        self._put("tell", slot, self._now_s)
        return True

    def step(self, truth: Truth, time_s: float, dt_s: float) -> list[Event]:
        """Write the activities (means over the step) from `time_s` on; returns the jobs that began or ended.

        What does not change is not written again.
        """
        events: list[Event] = []
        columns = (truth.gpu_sm_pu, truth.gpu_tensor_pu, truth.gpu_dram_pu)
        if not len(self._start):
            self._begin(truth, columns, time_s)
        if not self._berths:
            return events
        alive = alive_in(truth)
        if alive != self._alive_seen:
            self._alive_seen = alive
            self._deaths(truth, time_s, events)
        while self._queue and self._queue[0][0] < time_s + dt_s:
            at_s, ticket, action, slot = heapq.heappop(self._queue)
            if self._due.get((action, slot)) == ticket:
                self._act(action, slot, max(at_s, time_s), truth, events)
        if time_s >= self._count_next_s:
            self._tally.count(truth.gpu_clock_pu, time_s)
            self._count_next_s = time_s + COUNT_S
        self._swing.wait(truth.gpu_clock_pu)
        self._swing.step(columns, time_s, dt_s)
        self._service.step(columns, time_s, dt_s)
        self._now_s = time_s + dt_s
        return events

    def _slot(self, job: str) -> int | None:
        for slot, drawn in enumerate(self._jobs):
            if drawn is not None and drawn.kind == "training" and drawn.name == job:
                return slot
        return None

    def _begin(self, truth: Truth, columns: Columns, time_s: float) -> None:
        """Find out how the truth holds GPUs (each, or one per node), and begin with jobs in mid-life."""
        rows, n_node = len(truth.gpu_sm_pu), len(self._gpus_of_node)
        each = self._site.gpu_start_of_node.astype(np.intp)
        self._start = np.arange(n_node + 1) if rows == n_node else each
        self._swing.shape(rows)
        self._tally.count(truth.gpu_clock_pu, time_s)
        for column, part in zip(columns, CONSTANT_SHARES, strict=True):
            column[:] = (self._mix.constant_pu or 0.0) * part
        for slot in range(len(self._berths)):
            self._put("start", slot, time_s)

    def _healthy(self, truth: Truth) -> Bool:
        """Return the nodes [n_node] that are on, with all their GPUs on the bus."""
        dead = np.concatenate(([0], np.cumsum(~truth.gpu_alive)))
        fit = truth.node_on & ~truth.node_unfit
        healthy: Bool = fit & (np.diff(dead[self._start]) == 0)
        return healthy

    def _put(self, action: Action, slot: int, at_s: float) -> None:
        self._tickets += 1
        self._due[action, slot] = self._tickets
        heapq.heappush(self._queue, (at_s, self._tickets, action, slot))

    def _act(self, action: Action, slot: int, at_s: float, truth: Truth, events: list[Event]) -> None:
        """Carry out the due action of a slot."""
        if action == "start":
            self._next_job(slot, at_s, truth, events)
            return
        job = self._jobs[slot]
        if job is None:
            return
        if action == "level":
            self._swing.gate(slot, float(self._rng.uniform(*BATCH_LEVEL_PU)))
            self._put("level", slot, at_s + self._rng.uniform(*BATCH_HOLD_S))
            return
        if action == "tell":
            began_s = float(self._saved_s[slot]) if self._ever_saved[slot] else None
            speed = self._tally.progress_per_s(slot)
            report = progress_report(job.name, at_s, job.interval_s, began_s, progress_per_s=speed)
            events.append(with_rest(report, job.goal_gpu_s - float(self._tally.done[slot])))
            self._put("tell", slot, at_s + SPEAK_S)
            return
        tally = self._tally
        tally.count(truth.gpu_clock_pu, at_s)
        if action == "end":
            left_s = (job.goal_gpu_s - tally.done[slot]) / job.gpus
            if left_s > COUNT_S:
                self._put("end", slot, at_s + left_s)
                return
            self._leave(slot)
            events.append(JobEnded(job=job.name, reason="completed"))
            self._put("start", slot, at_s + self._rng.uniform(*GAP_S))
        elif action == "save":
            tally.saving[slot], self._save_begun_s[slot] = True, at_s
            self._swing.gate(slot, SAVING_PU)
            self._put("saved", slot, at_s + job.save_s)
        else:
            tally.saving[slot], tally.saved[slot] = False, tally.done[slot]
            self._saved_s[slot], self._ever_saved[slot] = self._save_begun_s[slot], True
            self._swing.gate(slot, 1.0)
            save = Save(float(self._saved_s[slot]), job.save_s, job.save_s)
            speed = tally.progress_per_s(slot)
            report = save_report(job.name, at_s, save, job.interval_s, speed)
            events.append(with_rest(report, job.goal_gpu_s - float(tally.done[slot])))
            self._put("tell", slot, at_s + SPEAK_S)
            if self._next_save_s(slot) is None:
                self._put("save", slot, at_s + job.interval_s)

    def _next_save_s(self, slot: int) -> float | None:
        """Return the instant at which the next save is due; None if none is queued."""
        ticket = self._due.get(("save", slot))
        return next((at_s for at_s, t, _, _ in self._queue if t == ticket), None)

    def _next_job(self, slot: int, at_s: float, truth: Truth, events: list[Event]) -> None:
        """Start the job that waits for this berth, or a new one, on its longest run of healthy nodes."""
        berth, rng, early = self._berths[slot], self._rng, self._drawn < len(self._berths)
        low, high = longest_run(self._healthy(truth)[berth.first : berth.last])
        if low == high:
            self._put("start", slot, at_s + rng.uniform(*GAP_S))
            return
        waiting = self._waiting.pop(slot, None)
        whole = berth.kind == "inference" or waiting is not None
        size = high - low if whole else max(1, round((high - low) * rng.uniform(0.7, 1.0)))
        first = berth.first + low
        gpus = int(self._gpus_of_node[first : first + size].sum())
        if waiting is None:
            self._drawn += 1
            job, done = job_of(berth, self._drawn, (first, first + size), gpus, self._mix, rng), 0.0
        else:
            job, done = waiting.again(first, first + size, gpus), float(self._tally.saved[slot])
        early &= waiting is None and job.kind != "inference"
        if early:
            done = job.goal_gpu_s * rng.uniform(0.0, 0.9)
        self._jobs[slot] = job
        rows = (int(self._start[first]), int(self._start[first + size]))
        spread = 1.0 + IMBALANCE_PU[job.kind] * rng.standard_normal(rows[1] - rows[0])
        self._tally.count(truth.gpu_clock_pu, at_s)
        self._tally.seat(slot, rows, gpus, done)
        self._saved_s[slot] = self._save_begun_s[slot] = at_s
        self._ever_saved[slot] = False
        if job.kind == "inference":
            self._service.seat(job, rows, size, spread)
        else:
            self._swing.seat(slot, job, rows, spread)
            self._put("end", slot, at_s + (job.goal_gpu_s - done) / gpus)
        if job.kind == "training":
            self._put("save", slot, at_s + job.interval_s * (rng.uniform() if early else 1.0))
        elif job.kind == "batch":
            self._put("level", slot, at_s)
        events.append(job.started(self._site))
        if job.kind == "training":
            if waiting is not None:
                events.append(progress_report(job.name, at_s, job.interval_s, restart_s=job.restart_s))
            self._put("tell", slot, at_s + SPEAK_S)

    def _leave(self, slot: int) -> None:
        self._jobs[slot] = None
        self._swing.gate(slot, 0.0)
        self._tally.clear(slot)

    def _deaths(self, truth: Truth, time_s: float, events: list[Event]) -> None:
        """Process dead nodes: a synchronous job fails with one and restarts, another loses that part.

        A batch job that has lost its last node fails too.
        """
        dead = ~self._healthy(truth)
        died = dead & ~self._dead
        self._dead = dead
        if not died.any():
            return
        self._tally.count(truth.gpu_clock_pu, time_s)
        for slot, job in enumerate(self._jobs):
            lost = 0 if job is None else int(np.count_nonzero(died[job.first : job.last]))
            if job is None or not lost:
                continue
            if job.kind == "batch" and not dead[job.first : job.last].all():
                self._tally.lose(slot, lost / (job.last - job.first))
                continue
            if job.kind == "inference":
                continue
            self._tally.lose(slot, 1.0)
            self._tally.progress.interruptions += 1
            self._leave(slot)
            events.append(JobEnded(job=job.name, reason="node_fail"))
            self._waiting[slot] = job
            self._put("start", slot, time_s + job.restart_s)
