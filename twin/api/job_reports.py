"""Checkpoints over the interface: a job reports what its saves cost, and asks what it is advised.

A token of the role `job` speaks for its own alone: `job.NAME` for the job of that name, `tenant.NAME` for the
jobs of that tenant. A report waits for no tick; its answer brings the advice.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from connectors.jobs import MAX_REPORT, Advice, JobDecoder
from twin.api.access import REFUSALS, WHO, sender
from twin.api.answers import Refused, answer, live_of, read_of
from twin.api.runtime import Runtime
from twin.catalogue import BadMessage, clean
from twin.wiring import Roster, advice_in_force

DECODER: web.AppKey[JobDecoder] = web.AppKey("job_decoder", JobDecoder)
SETTLED_S, LOOK_S = 5.0, 0.01  # a tick that was made is in the journal within this long; between looks


def decoder_of(live: Runtime) -> JobDecoder:
    """The decoder of the reports that come over HTTP to a daemon."""
    return JobDecoder(Roster(lambda: live.engine).slot_of)


async def advised(request: web.Request) -> web.Response:
    """Return the advice in force on a job's checkpoints, and the job's last report of them.

    Without advice both fields are null and it has expired; then the job's own interval holds.
    """
    live = live_of(request)
    _slot(request, acting=False)
    advice = await _advice(request)
    slot = _slot(request, acting=False)
    return answer({**msgspec.structs.asdict(advice), "told": _told(live, slot)})


async def report(request: web.Request) -> web.Response:
    """Report the cost and age of a job's checkpoints; the answer holds the advice in force."""
    live, decoder = live_of(request), request.app[DECODER]
    _slot(request, acting=True)
    raw = await read_of(request)
    job = request.match_info["job"]
    try:
        if len(raw) > MAX_REPORT:
            raise Refused(413, f"{len(raw)} bytes of report; expected at most {MAX_REPORT}")
        now_ns = live.engine.state.now_ns
        try:
            decoder.spend(job, len(raw), now_ns)
        except BadMessage as error:
            raise Refused(429, str(error), {"Retry-After": "60"}) from None
        try:
            event = decoder.read(job, raw, now_ns)
        except BadMessage as error:
            raise Refused(400, str(error)) from None
        if (why := live.veto(event)) is not None:
            raise Refused(503, why, {"Retry-After": "10"})  # of this daemon, not of the report
        if not live.put_event(event):
            raise Refused(503, "the queue of events is full; try again", {"Retry-After": "10"})
    except Refused:
        live.counts["checkpoint_reports_refused"] = live.counts.get("checkpoint_reports_refused", 0) + 1
        raise
    live.counts["checkpoint_reports"] = live.counts.get("checkpoint_reports", 0) + 1
    advice: dict[str, Any] | None = None
    with contextlib.suppress(Refused):  # the report is taken all the same
        advice = msgspec.structs.asdict(await _advice(request))
    return answer({"id": event.id, "taken": True, "advice": advice})


def _slot(request: web.Request, acting: bool) -> int:
    """The slot of the job in question. Raises Refused for what the token may not, and for strangers."""
    live, job, token = live_of(request), request.match_info["job"], request[WHO]
    slot = live.engine.jobs.slot_of.get(job)
    if token.role == "job":
        kind, _, own = token.name.partition(".")
        mine = kind == "job" and own == job
        if kind == "tenant" and slot is not None and own:
            mine = own == live.engine.jobs.tenants[slot]
        if not mine:
            request.app[REFUSALS].tell(sender(request), "not its own job", name=token.name, role=token.role)
            raise Refused(403, f"the token {token.name} speaks for one job (job.NAME) or those of one tenant "
                               "(tenant.NAME), and this is another")  # fmt: skip
    elif acting and not token.may("operator"):
        request.app[REFUSALS].tell(sender(request), "role too small", name=token.name, role=token.role)
        raise Refused(
            403, f"needs the role job or operator; the token {token.name} has the role {token.role}"
        )
    if slot is None:
        raise Refused(
            404, f"no job {clean(job, 80)} is known to run; expected one that Slurm or an event told of"
        )
    return slot


async def _advice(request: web.Request) -> Advice:
    """Return the advice that is in force and in the journal; an expired one if there is none."""
    live, job = live_of(request), request.match_info["job"]
    if live.role != "leader":
        raise Refused(503, "this daemon stands by; ask the one that leads", {"Retry-After": "10"})
    try:
        async with asyncio.timeout(SETTLED_S):
            while live.decision is not None and live.decision.now_ns < live.engine.state.now_ns:
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise Refused(503, "the journal is slow; ask again", {"Retry-After": "10"}) from None
    slot = live.engine.jobs.slot_of.get(job)
    advice = None if slot is None else advice_in_force(live.engine, job, slot)
    now_ns = live.engine.state.now_ns
    return advice or Advice(
        job=job, interval_s=None, save_since_ns=None, issued_ns=now_ns, expires_ns=now_ns,
        epoch=live.engine.arbiter.epoch,
    )  # fmt: skip


def _told(live: Runtime, slot: int) -> dict[str, Any]:
    """Return a job's report of its checkpoints; null where it reported nothing."""
    jobs = live.engine.jobs
    names = ("checkpoint_interval_s", "checkpoint_save_s", "checkpoint_block_s", "checkpoint_flush_s",
             "checkpoint_restart_s", "checkpoint_local_block_s", "checkpoint_local_interval_s", "saved_ns",
             "saved_local_ns", "checkpoint_told_ns")  # fmt: skip
    columns: dict[str, np.ndarray] = {name: getattr(jobs, name) for name in names}
    return {name.removeprefix("checkpoint_"): column[slot].item() or None for name, column in columns.items()}
