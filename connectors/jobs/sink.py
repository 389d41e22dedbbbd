"""Job sink: combines the leases on a job into one message of advice, and publishes it over MQTT.

Two save intervals, durable and in memory, and a checkpoint's least instant are leases of their own, begun and
renewed apart; a job receives them at once, under one expiry. Advice goes to the job for which the lease was
given, never to one that took its slot. A job acknowledges advice by its next report, so that nothing is
acknowledged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from connectors.agents import Publish, publish_all
from connectors.jobs.wire import MAX_REASON, Advice, advice_topic, encode_advice
from connectors.orders import summary_of
from twin.catalogue import NS, ActuationError, BadMessage
from twin.contracts import CommandBatch

INTERVAL, SINCE = "job.checkpoint_interval_s", "job.checkpoint_since_s"
LOCAL = "job.checkpoint_local_interval_s"
CONTROLS = (INTERVAL, SINCE, LOCAL)
JobOf = Callable[[int, int], str | None]  # (slot, generation) -> the job there; None: ended, or another one


class JobLease(NamedTuple):
    """A lease on a control of a job, with the fields for its advice. `value` in the control's seconds."""

    generation: int
    value: float
    issued_ns: int
    expires_ns: int
    epoch: int
    reason: str = ""


def compose(
    job: str, interval: JobLease | None, since: JobLease | None, issued_ns: int, local: JobLease | None = None
) -> Advice | None:
    """Return one advice from the leases on the interval, a save and the interval in memory; None without a
    lease.

    It ends with the lease on the interval. The others have the longer lease: where one ends sooner, nobody
    renews it, and it is left out, so that the interval is not cut short. Without an interval what ends first
    ends it all.
    """
    interval, since, local = (
        None if p is None or p.expires_ns <= issued_ns else p for p in (interval, since, local)
    )
    if interval is not None:
        until_ns = interval.expires_ns
        since, local = (None if p is None or p.expires_ns < until_ns else p for p in (since, local))
    living = [p for p in (since, interval, local) if p is not None]
    if not living:
        return None
    reasons = dict.fromkeys(p.reason for p in living if p.reason)
    return Advice(
        job=job,
        interval_s=None if interval is None else interval.value,
        local_interval_s=None if local is None else local.value,
        save_since_ns=None if since is None else round(since.value * NS),
        issued_ns=issued_ns,
        expires_ns=min(p.expires_ns for p in living),
        epoch=max(p.epoch for p in living),
        reason="; ".join(reasons)[:MAX_REASON],
    )


class JobBook:
    """Leases in force for each job, across commands. Holds at most as many jobs as there are slots."""

    def __init__(self, job_of: JobOf, leases: Iterable[tuple[str, int, JobLease]] = ()) -> None:
        """`leases` are those (control, slot, part) that ran before this book was opened."""
        self.job_of = job_of
        self._parts: dict[int, dict[str, JobLease]] = {}
        for control, slot, part in leases:
            self._parts.setdefault(slot, {})[control] = part

    def take(self, commands: tuple[CommandBatch, ...]) -> list[Advice]:
        """Note these commands; the advice of each job that they concern, as it is now."""
        touched: dict[int, int] = {}
        for batch in commands:
            if batch.control not in CONTROLS:
                continue
            columns = (batch.index, batch.generation, batch.value)
            for slot, generation, value in zip(*(c.tolist() for c in columns), strict=True):
                self._note(batch, slot, generation, value)
                touched[slot] = max(touched.get(slot, 0), batch.issued_ns)
        advices = []
        for slot, issued_ns in touched.items():
            parts = self._parts.get(slot, {})
            generation = next((p.generation for p in parts.values()), -1)
            job = self.job_of(slot, generation)
            if job is None:
                self._parts.pop(slot, None)
                continue
            advice = compose(job, parts.get(INTERVAL), parts.get(SINCE), issued_ns, parts.get(LOCAL))
            if advice is not None:
                advices.append(advice)
        return advices

    def _note(self, batch: CommandBatch, slot: int, generation: int, value: float) -> None:
        parts = self._parts.setdefault(slot, {})
        for control in [c for c, p in parts.items() if p.generation != generation]:
            del parts[control]  # of the job that was here before
        before = parts.get(batch.control)
        if batch.final:
            parts.pop(batch.control, None)
            return
        # A renewal gives no reason of its own.
        same = before is not None and batch.renewal and before.value == value
        reason = before.reason if same and before is not None else "" if batch.renewal else batch.reason
        parts[batch.control] = JobLease(
            generation, value, batch.issued_ns, batch.expires_ns, batch.epoch, reason[:MAX_REASON]
        )


class JobSink:
    """Publishes advice on the topic of each job, at QoS 1 and not retained: renewals repeat it."""

    name = "jobs"
    controls: tuple[str, ...] = CONTROLS
    enforces_safe = False  # a job keeps what it has, or falls back to its own interval

    def __init__(self, integration: str, publish: Publish, book: JobBook) -> None:
        self._integration, self._publish, self._book = integration, publish, book
        self.counts = {"advice": 0, "failed": 0, "unfit_names": 0}  # renewals included

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Publish the advice of each job concerned. Raises ActuationError, after all the others were sent."""
        messages: list[tuple[str, bytes]] = []
        for advice in self._book.take(commands):
            try:
                messages.append((advice_topic(self._integration, advice.job), encode_advice(advice)))
            except BadMessage:  # no client of such a job can listen here; the others must not wait for it
                self.counts["unfit_names"] += 1
        problems = await publish_all(self._publish, messages)
        self.counts["advice"] += len(messages) - len(problems)
        self.counts["failed"] += len(problems)
        if problems:
            raise ActuationError(f"{self.name}: {summary_of(problems)}")
