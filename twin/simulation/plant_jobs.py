"""Jobs of a simulated site on the wire: their reports, and the advice that they follow.

They behave as the client in real jobs does: advice holds until it expires, and of two the one of the greater
(epoch, issued) counts; then the job saves at its own interval again.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from connectors.jobs import Advice, decode_advice, job_of
from twin.catalogue import NS, BadMessage
from twin.plant import Work
from twin.telemetry import CheckpointTold, Event, JobEnded, JobStarted, Message

JobEvent = TypeVar("JobEvent", JobStarted, CheckpointTold)
PLANT_TERMS = ("checkpoint_interval_s", "checkpoint_save_s", "checkpoint_restart_s", "time_limit_s")
WIRE_TERMS = ("save_s", "block_s", "flush_s", "restart_s", "interval_s")


class PlantJobs:
    """Jobs by name. Holds no more than run. `speed`: seconds of the plant in one of the wire."""

    def __init__(self, integration: str, speed: float = 1.0) -> None:
        self.prefix, self.speed = f"IT/v1/{integration}/Job/", speed
        self.running: dict[str, JobStarted] = {}  # as the wire has them
        self._held: dict[str, Advice] = {}
        self._new: set[str] = set()  # jobs whose advice is not carried out yet

    def receive(self, message: Message) -> bool:
        """Take an advice; False where it is not followed. Raises BadMessage."""
        advice = decode_advice(message.payload)
        job = job_of(message.topic[len(self.prefix) :])
        if advice.job != job:
            raise BadMessage(f"advises job {advice.job[:80]!r} in the place of {job[:80]!r}")
        if job not in self.running or advice.expires_ns <= message.t_ns:
            return False
        before = self._held.get(job)
        if before is not None and (advice.epoch, advice.issued_ns) < (before.epoch, before.issued_ns):
            return False
        self._held[job] = advice
        self._new.add(job)
        return True

    def follow(self, work: Work | None, time_s: float, now_ns: int) -> None:
        """Let the jobs of a plant at `time_s` follow the present advice, at `now_ns` of the wire."""
        if work is None:
            return
        for job, advice in list(self._held.items()):
            over = advice.expires_ns <= now_ns
            if over:
                del self._held[job]
            elif job not in self._new:
                continue
            own_s = self.running[job].checkpoint_interval_s
            wanted_s = own_s if over or advice.interval_s is None else advice.interval_s
            if wanted_s > 0.0:
                work.checkpoint_interval(job, wanted_s * self.speed)
            if not over and advice.save_since_ns is not None:
                work.checkpoint(job, time_s - (now_ns - advice.save_since_ns) / NS * self.speed)
        self._new.clear()

    def note(self, event: Event, now_ns: int) -> Event:
        """An event of the plant as the wire has it at `now_ns`, with seconds of its own; who runs is kept."""
        if isinstance(event, JobStarted):
            self.running[event.job] = event = _slower(event, self.speed, PLANT_TERMS)
        elif isinstance(event, JobEnded):
            self.running.pop(event.job, None)
            self._held.pop(event.job, None)
        elif isinstance(event, CheckpointTold):
            event = _slower(event, self.speed, WIRE_TERMS)
            at_ns, began_ns = (
                instant and now_ns - round((now_ns - instant) / self.speed)
                for instant in (event.at_ns, event.began_ns)
            )
            speed = event.progress_per_s * self.speed
            event = msgspec.structs.replace(event, at_ns=at_ns, began_ns=began_ns, progress_per_s=speed)
        return event


def _slower(event: JobEvent, speed: float, terms: tuple[str, ...]) -> JobEvent:
    """Return the job with durations of the wire, which is slower than the plant by `speed`."""
    if speed == 1.0:
        return event
    return msgspec.structs.replace(event, **{term: getattr(event, term) / speed for term in terms})
