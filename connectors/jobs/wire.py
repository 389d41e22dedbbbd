"""Messages between jobs and the twin about checkpoints: reports in, advice out. Pure functions of bytes.

A job says what its saves cost and how often it saves, as JSON on `IT/v1/PUB/Job/{job}`, by HTTP or as a line
of a file; the twin advises an interval, and how new a checkpoint it should hold, on
`IT/v1/{integration}/Job/{job}` and the same ways. `{job}` is the job's name with each byte that is no letter
or digit of ASCII and none of `_-~.` as %XX, as well as a first dot: one topic level, one safe file name.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Literal
from urllib.parse import quote, unquote

import msgspec

from connectors.allowance import Allowance
from twin.catalogue import NS, BadMessage
from twin.telemetry import CheckpointTold, Ignored, Message

REPORT = "IT/v1/PUB/Job/"
MAX_REPORT, MAX_ADVICE = 4096, 4096  # bytes
MAX_LEVEL = 200  # characters of a job's name as a topic level: with an ending it fits a file system's 255
MAX_ID, MAX_REASON = 100, 500  # characters
MAX_COST_S, MAX_INTERVAL_S = 1e6, 1e7  # as the catalogue bounds them
MAX_OFF_S = 7 * 86_400.0  # a report may have waited this long, or a clock be so wrong; source: estimate
# Bytes of one job: a hundred reports at once, then one a second; of those that nobody knows; of all together.
JOB_BURST, JOB_PER_S = 2**15, 2**8
STRANGER_BURST, STRANGER_PER_S = 2**18, 2**12
MAX_EARLY, MAX_EARLY_EACH = 256, 4  # reports that came before their job was known; of one job
TOTAL_BURST, TOTAL_PER_S = 2**24, 2**17

_Instant = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Cost = Annotated[float, msgspec.Meta(ge=0, le=MAX_COST_S)]
_Interval = Annotated[float, msgspec.Meta(ge=0, le=MAX_INTERVAL_S)]


class JobReport(msgspec.Struct, kw_only=True):
    """A report of a job. Instants are of its own clock, ns since 1970 UTC; 0 = not reported."""

    v: Literal[1]
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
    t_ns: Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
    tier: Literal["durable", "memory"] = "durable"
    began_ns: _Instant = 0
    save_s: _Cost = 0.0
    block_s: _Cost = 0.0
    flush_s: _Cost = 0.0
    restart_s: _Cost = 0.0
    interval_s: _Interval = 0.0
    progress_per_s: _Cost = 0.0  # as the catalogue bounds it
    remaining_s: _Interval = 0.0  # likewise
    job: str | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice to a job until `expires_ns`, UTC ns; null is no advice.

    `interval_s` is between durable saves, `local_interval_s` between those in memory. `save_since_ns`: it
    should hold a checkpoint that began then or later. Of two, the greater (epoch, issued_ns) counts.
    """

    v: Literal[1] = 1
    job: str
    interval_s: float | None
    save_since_ns: int | None
    issued_ns: _Instant
    expires_ns: _Instant
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    local_interval_s: float | None = None
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


_REPORT, _ADVICE = msgspec.json.Decoder(JobReport), msgspec.json.Decoder(Advice)


def level_of(job: str) -> str:
    """Return a job's name as a topic level and file name. Raises BadMessage for an impossible one."""
    try:
        level = quote(job, safe="")
    except UnicodeEncodeError:
        raise BadMessage("a job's name that is not text; expected Unicode") from None
    if level.startswith("."):
        level = "%2E" + level[1:]
    if not 0 < len(level) <= MAX_LEVEL:
        raise BadMessage(f"a job's name of {len(level)} characters after escaping; expected 1 to {MAX_LEVEL}")
    return level


def job_of(level: str) -> str:
    """Return the job's name of a topic level. Raises BadMessage for one that `level_of` does not make."""
    job = ""
    if len(level) <= MAX_LEVEL:
        try:
            job = unquote(level, errors="strict")
        except UnicodeDecodeError:
            job = ""
    if not job or level_of(job) != level:
        raise BadMessage(
            f"{level[:80]!r} is not a job's name as a topic level; expected 1 to {MAX_LEVEL} of "
            "A-Z a-z 0-9 . _ "
            "- ~ and %XX for every other byte, and for a first dot"
        )
    return job


def report_of(payload: bytes, job: str, arrived_ns: int) -> CheckpointTold:
    """Return a report of checkpoints, its instants by its own clock. Raises BadMessage."""
    if len(payload) > MAX_REPORT:
        raise BadMessage(f"{len(payload)} bytes of report; expected at most {MAX_REPORT}")
    try:
        report = _REPORT.decode(payload)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not a report on checkpoints: {str(error)[:200]}") from error
    if report.job is not None and report.job != job:
        raise BadMessage(f"claims to be job {report.job[:80]!r} in the place of {job[:80]!r}")
    costs = (report.save_s, report.block_s, report.flush_s, report.restart_s, report.interval_s)
    pace = (report.progress_per_s, report.remaining_s)
    if not all(map(math.isfinite, (*costs, *pace))):
        names = "save_s, block_s, flush_s, restart_s, interval_s, progress_per_s, remaining_s"
        raise BadMessage(f"{names}: expected finite")
    off_s = (report.t_ns - arrived_ns) / NS
    if abs(off_s) > MAX_OFF_S:
        raise BadMessage(
            f"t_ns is {off_s:.0f} s from now; expected UTC nanoseconds, at most {MAX_OFF_S:.0f} s off: check "
            "the clock of the job's host"
        )
    if report.began_ns > report.t_ns:
        raise BadMessage(f"began_ns {report.began_ns} is later than t_ns {report.t_ns}; expected it before")
    if not (report.began_ns or any(costs) or any(pace)):
        raise BadMessage("an empty report; expected began_ns, a duration, interval_s or a progress above 0")
    return CheckpointTold(
        id=f"job/{job}#{report.id}",
        job=job,
        at_ns=report.t_ns,
        tier=report.tier,
        save_s=report.save_s,
        block_s=report.block_s,
        flush_s=report.flush_s,
        restart_s=report.restart_s,
        interval_s=report.interval_s,
        began_ns=report.began_ns,
        progress_per_s=report.progress_per_s,
        remaining_s=report.remaining_s,
    )


def encode_report(event: CheckpointTold) -> bytes:
    """Return a report as a job sends it, `event.id` being the report's own. For simulated jobs;
    `report_of` reads it."""
    return msgspec.json.encode(
        JobReport(
            v=1,
            id=event.id,
            t_ns=event.at_ns,
            tier=event.tier,
            began_ns=event.began_ns,
            save_s=event.save_s,
            block_s=event.block_s,
            flush_s=event.flush_s,
            restart_s=event.restart_s,
            interval_s=event.interval_s,
            progress_per_s=event.progress_per_s,
            remaining_s=event.remaining_s,
            job=event.job,
        )
    )


class JobDecoder:
    """Decodes reports of any wire; each job has an allowance of its own.

    `slot_of` says in which slot a job runs, None for one that nobody knows; without it all jobs share one
    allowance, as in a replay.
    """

    def __init__(self, slot_of: Callable[[str], int | None] | None = None) -> None:
        self._slot_of = slot_of
        self._jobs = Allowance("reports", JOB_BURST, JOB_PER_S)
        self._strangers = Allowance("reports", STRANGER_BURST, STRANGER_PER_S)
        self._total = Allowance("reports", TOTAL_BURST, TOTAL_PER_S)
        self._early: OrderedDict[str, list[CheckpointTold]] = OrderedDict()
        self.counts = {"reports": 0, "refused": 0, "early": 0}

    def decode(self, message: Message) -> list[CheckpointTold] | Ignored:
        """Return the report of a message on `IT/v1/PUB/Job/{job}`. Raises BadMessage.

        A job may report before the scheduler lists it: the first reports wait for the next one.
        """
        try:
            job = job_of(message.topic[len(REPORT) :])
            self.spend(job, len(message.payload), message.t_ns)
        except BadMessage:
            self.counts["refused"] += 1
            raise
        event = self.read(job, message.payload, message.t_ns)
        if self._slot_of is None or self._slot_of(job) is not None:
            return [*self._early.pop(job, ()), event]
        self.counts["early"] += 1
        held = self._early.setdefault(job, [])
        held.append(event)
        del held[:-MAX_EARLY_EACH]
        while len(self._early) > MAX_EARLY // MAX_EARLY_EACH:
            self._early.popitem(last=False)
        return Ignored("Job", "no such job runs; the report waits for the job")

    def read(self, job: str, payload: bytes, arrived_ns: int) -> CheckpointTold:
        """Return a report within the job's allowance, from any wire. Raises BadMessage for nonsense."""
        try:
            event = report_of(payload, job, arrived_ns)
        except BadMessage:
            self.counts["refused"] += 1
            raise
        self.counts["reports"] += 1
        return event

    def spend(self, job: str, size: int, t_ns: int) -> None:
        """Take a report's bytes from the allowances. Raises BadMessage where there are not as many left."""
        if self._slot_of is not None:
            slot = self._slot_of(job)
            if slot is None:
                self._strangers.spend("jobs that do not run", size, t_ns)
            else:
                self._jobs.spend(f"job{slot}", size, t_ns, f"job {job}")
        self._total.spend("all jobs", size, t_ns)


def advice_topic(integration: str, job: str) -> str:
    """Return the topic of the advice to a job. Raises BadMessage for a name that can be no topic level."""
    return f"IT/v1/{integration}/Job/{level_of(job)}"


def encode_advice(advice: Advice) -> bytes:
    """Return the advice as sent, one line of JSON without a line end."""
    return msgspec.json.encode(advice)


def decode_advice(payload: bytes) -> Advice:
    """Return the advice as a job reads it. Raises BadMessage."""
    if len(payload) > MAX_ADVICE:
        raise BadMessage(f"{len(payload)} bytes of advice; expected at most {MAX_ADVICE}")
    try:
        advice = _ADVICE.decode(payload)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not an advice on checkpoints: {str(error)[:200]}") from error
    for name in ("interval_s", "local_interval_s"):
        interval_s = getattr(advice, name)
        if interval_s is not None and not (math.isfinite(interval_s) and interval_s > 0):
            raise BadMessage(f"{name}: expected seconds above 0 or null")
    return advice
