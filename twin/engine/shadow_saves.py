"""Shadow saves: the durable saves that jobs would hold if they saved as advised.

A job that has reported saves begins one when it is asked to, or when its advised interval ends. It holds the
save after the usual duration of its saves.
"""

from __future__ import annotations

import copy

import numpy as np

from twin.catalogue import I32, I64, NS, Bool
from twin.control import Arbiter, ShadowLeases
from twin.telemetry import EntityState, JobSlots, column

SAVE, INTERVAL = "job.checkpoint_since_s", "job.checkpoint_interval_s"
USUAL_SAVE_S = 60.0  # of a job that did not report how long its saves take. source: domain.md D, 10-60 s
NEVER_NS = np.int64(2**62)


class ShadowSaves(EntityState):
    """Begin of the last advised save of each job; 0 = none, or one older than a save of the job itself."""

    began_ns: I64 = column("job", "i8")
    generation: I32 = column("job", "i4")  # of the job in its slot

    def __init__(self, n_job: int) -> None:
        super().__init__({"job": n_job})

    def update(self, jobs: JobSlots, arbiter: Arbiter, now_ns: int) -> JobSlots | None:
        """Return the read-only job table of the preview; None if it equals the real one."""
        save, interval = (arbiter.shadow.get(key) for key in (SAVE, INTERVAL))
        if save is None and interval is None and not self.began_ns.any():
            return None
        gone = ~jobs.alive | (self.generation != jobs.generation) | (jobs.saved_ns >= self.began_ns)
        self.began_ns[gone] = 0
        reports = jobs.alive & ((jobs.checkpoint_told_ns > 0) | (jobs.checkpoint_interval_s > 0))
        last_ns = np.maximum(np.where(jobs.saved_ns > 0, jobs.saved_ns, jobs.started_ns), self.began_ns)
        begins_ns, interval_s = np.full(jobs.n, NEVER_NS), jobs.checkpoint_interval_s
        if interval is not None:
            at = reports & _advised(interval, arbiter)
            interval_s = np.where(at, interval.value, interval_s)
            next_ns = last_ns + np.round(np.nan_to_num(interval_s) * NS).astype(np.int64)
            begins_ns = np.where(at, np.maximum(next_ns, interval.issued_ns), begins_ns)
        if save is not None:
            at = reports & _advised(save, arbiter) & (last_ns < np.nan_to_num(save.value) * NS)
            begins_ns = np.where(at, np.minimum(save.issued_ns, begins_ns), begins_ns)
        save_s = np.fmax(jobs.checkpoint_block_s + jobs.checkpoint_flush_s, jobs.checkpoint_save_s)
        save_ns = np.round(np.where(save_s > 0, save_s, USUAL_SAVE_S) * NS).astype(np.int64)
        held = (begins_ns > last_ns) & (begins_ns + save_ns <= now_ns)
        self.began_ns[held], self.generation[held] = begins_ns[held], jobs.generation[held]
        out = copy.copy(jobs)
        out.saved_ns = np.maximum(jobs.saved_ns, self.began_ns)
        out.checkpoint_interval_s = interval_s
        return out


def _advised(shadow: ShadowLeases, arbiter: Arbiter) -> Bool:
    """Return the jobs whose advice differs from their commands [n]."""
    real = arbiter.leases[shadow.control.key]
    out: Bool = shadow.apart & shadow.running() & ~(shadow.value == real.value)
    return out
