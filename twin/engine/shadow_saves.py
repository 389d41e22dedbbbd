"""Shadow saves: durable saves that jobs would hold by now if they had been asked to save as advised.

A job that reports its saves takes one as soon as it is asked, and holds it after the time that saves take it.
"""

from __future__ import annotations

import copy

import numpy as np

from twin.catalogue import I32, I64, NS, Bool
from twin.control import Arbiter
from twin.telemetry import EntityState, JobSlots, column

SAVE = "job.checkpoint_since_s"
USUAL_SAVE_S = 60.0  # of a job that did not tell how long its saves take. source: domain.md D, 10-60 s


class ShadowSaves(EntityState):
    """When the last such save of each job began; 0 = none that its own saves have not overtaken."""

    began_ns: I64 = column("job", "i8")
    generation: I32 = column("job", "i4")  # of the job in its slot

    def __init__(self, n_job: int) -> None:
        super().__init__({"job": n_job})

    def update(self, jobs: JobSlots, arbiter: Arbiter, now_ns: int) -> JobSlots | None:
        """The jobs as they would be, for reading only; None where no save is advised or held."""
        shadow = arbiter.shadow.get(SAVE)
        if shadow is not None:
            asked: Bool = shadow.apart & shadow.running() & ~(shadow.value == arbiter.leases[SAVE].value)
            save_s = np.fmax(jobs.checkpoint_block_s + jobs.checkpoint_flush_s, jobs.checkpoint_save_s)
            save_s = np.where(save_s > 0, save_s, USUAL_SAVE_S)
            durable_ns = shadow.issued_ns + np.round(save_s * NS).astype(np.int64)
            at = asked & (durable_ns <= now_ns) & jobs.alive & (jobs.checkpoint_told_ns > 0)
            self.began_ns[at], self.generation[at] = shadow.issued_ns[at], jobs.generation[at]
        if not self.began_ns.any():
            return None
        gone = ~jobs.alive | (self.generation != jobs.generation) | (jobs.saved_ns >= self.began_ns)
        self.began_ns[gone] = 0
        out = copy.copy(jobs)
        out.saved_ns = np.maximum(jobs.saved_ns, self.began_ns)
        return out
