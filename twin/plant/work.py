"""Work of a plant: the interface of its workload, the account of work done and lost, and checkpoint reports.

Work is counted in GPU-seconds at the highest clock. A synchronous job goes at the pace of its slowest member,
others each at their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from twin.catalogue import F64, NS, Bool
from twin.physics import performance_pu
from twin.plant.truth import Truth
from twin.telemetry import CheckpointTold, Event

COMPUTE_SHARE_PU = 0.8  # of the time of a kernel that waits for the clock; source: estimate
SLOWEST_PU = 0.01  # keeps the pace of a GPU that is about to go off finite


@dataclass(slots=True)
class Progress:
    """Totals since the beginning."""

    done_gpu_s: float = 0.0  # lost work included
    lost_gpu_s: float = 0.0  # since the last checkpoint, when a member died
    slowed_gpu_s: float = 0.0  # not done, as a clock was low
    saving_gpu_s: float = 0.0  # spent on checkpoints
    interruptions: int = 0  # of synchronous jobs, by the death of a member


class Tally:
    """Slots [n] with a job each, or none."""

    def __init__(self, synchronous: Bool) -> None:
        n = len(synchronous)
        self.progress = Progress()
        self.done, self.saved = np.zeros(n), np.zeros(n)  # GPU-s of the job that runs
        self.saving, self._running = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self._synchronous = synchronous
        self._gpus = np.zeros(n)
        self._rows = np.zeros((n, 2), np.intp)
        self._since = np.zeros((2, n))  # since a job last spoke: GPU-s of work, seconds but those of saves
        self._counted_s = 0.0

    def seat(self, slot: int, rows: tuple[int, int], gpus: int, done_gpu_s: float) -> None:
        """Assign a job to a slot, with its work done and saved so far."""
        self._rows[slot], self._gpus[slot] = rows, gpus
        self.done[slot] = self.saved[slot] = done_gpu_s
        self.saving[slot], self._running[slot] = False, True
        self._since[:, slot] = 0.0

    def clear(self, slot: int) -> None:
        """Clear the slot of an ended job."""
        self._running[slot] = False

    def lose(self, slot: int, share: float) -> None:
        """Lose this share of a job's work since its last save."""
        lost = share * float(self.done[slot] - self.saved[slot])
        self.progress.lost_gpu_s += lost
        self.done[slot] -= lost

    def count(self, clock_pu: F64, time_s: float) -> None:
        """Credit the time since the last count at the present clocks [rows]."""
        elapsed_s, self._counted_s = time_s - self._counted_s, time_s
        at = np.flatnonzero(self._running)
        if elapsed_s <= 0.0 or not len(at):
            return
        pace = performance_pu(np.maximum(self._clocks(clock_pu, at), SLOWEST_PU), COMPUTE_SHARE_PU)
        whole = self._gpus[at] * elapsed_s
        saving = self.saving[at]
        work = np.where(saving, 0.0, whole * pace)
        self.done[at] += work
        self._since[:, at] += work, np.where(saving, 0.0, elapsed_s)
        self.progress.done_gpu_s += float(work.sum())
        self.progress.slowed_gpu_s += float(np.where(saving, 0.0, whole * (1.0 - pace)).sum())
        self.progress.saving_gpu_s += float(whole[saving].sum())

    def progress_per_s(self, slot: int) -> float:
        """Return the GPU-s of work per second since the last call, without the time of saves; 0 for none."""
        work, elapsed_s = self._since[:, slot].tolist()
        self._since[:, slot] = 0.0
        return work / elapsed_s if elapsed_s > 0.0 else 0.0

    def _clocks(self, clock_pu: F64, at: np.ndarray) -> F64:
        """Return the clock that sets the pace of each slot in `at`: the lowest, or the mean."""
        out = np.empty(len(at))
        for i, slot in enumerate(at.tolist()):
            a, b = self._rows[slot]
            part = clock_pu[a:b]
            out[i] = part.min() if self._synchronous[slot] else part.mean()
        return out


class Work(Protocol):
    """Jobs on GPUs."""

    @property
    def progress(self) -> Progress:
        """Return the work done, lost, slowed and spent on saves since the begin."""
        ...

    def step(self, truth: Truth, time_s: float, dt_s: float) -> list[Event]:
        """Write the activities of the step from `time_s` on; what began and ended, what jobs report.

        Instants of what they report are in ns since the plant began.
        """
        ...

    def lost_work(self) -> float:
        """Return the GPU-seconds lost since the begin."""
        ...

    def checkpoint(self, job: str, since_s: float) -> float | None:
        """Request a save that began no earlier than `since_s`."""
        ...

    def checkpoint_interval(self, job: str, interval_s: float) -> bool:
        """Save each `interval_s` from now on."""
        ...


def waits_pu(clock_pu: F64) -> F64 | None:
    """Share of a step in which each member of a synchronous job computes, at these clocks; None where all do.

    All go at the pace of the slowest. The others wait for it in a collective: its kernels keep their SMs
    active (DCGM counts resident warps), but no tensor core and hardly any memory. source: estimate
    """
    if not len(clock_pu) or clock_pu.min() == clock_pu.max():
        return None
    pace = performance_pu(np.maximum(clock_pu, SLOWEST_PU), COMPUTE_SHARE_PU)
    share: F64 = pace.min() / pace
    return share


MOST_REMAINING_S = 1e7  # as the catalogue bounds it
SPEAK_S = 300.0  # between reports at most, as the client that jobs may use has it


class Save(NamedTuple):
    """A durable save. It took `save_s`, of which the job stood still for `block_s`."""

    began_s: float
    save_s: float
    block_s: float


def save_report(
    job: str, at_s: float, save: Save, interval_s: float, progress_per_s: float = 0.0
) -> CheckpointTold:
    """Return the report that a save is durable at `at_s`; instants in ns since the plant began."""
    return CheckpointTold(job=job, at_ns=_ns(at_s), began_ns=_ns(save.began_s), save_s=save.save_s,
                          block_s=save.block_s, flush_s=save.save_s, interval_s=interval_s,
                          progress_per_s=progress_per_s)  # fmt: skip


def progress_report(
    job: str,
    at_s: float,
    interval_s: float,
    began_s: float | None = None,
    restart_s: float = 0.0,
    progress_per_s: float = 0.0,
) -> CheckpointTold:
    """Return the report that nothing new is saved; the last save began at `began_s`, None = unknown."""
    began_ns = 0 if began_s is None else _ns(began_s)
    return CheckpointTold(job=job, at_ns=_ns(at_s), began_ns=began_ns, restart_s=restart_s,
                          interval_s=interval_s, progress_per_s=progress_per_s)  # fmt: skip


def with_rest(report: CheckpointTold, left_gpu_s: float) -> CheckpointTold:
    """Return the report with the remaining training at its reported speed; unchanged without one."""
    if report.progress_per_s <= 0.0 or left_gpu_s <= 0.0:
        return report
    left_s = min(left_gpu_s / report.progress_per_s, MOST_REMAINING_S)
    return msgspec.structs.replace(report, remaining_s=left_s)


def dated(event: Event, start_ns: int) -> Event:
    """The same with instants of a plant that began at `start_ns`; only reports on saves have any."""
    if not isinstance(event, CheckpointTold):
        return event
    began_ns = event.began_ns and event.began_ns + start_ns
    return msgspec.structs.replace(event, at_ns=event.at_ns + start_ns, began_ns=began_ns)


def _ns(time_s: float) -> int:
    """Return an instant in ns, never 0, which means unknown."""
    return round(time_s * NS) or 1
