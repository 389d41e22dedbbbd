"""Jobs over HTTP: a job registers itself, reports the cost of its saves, and reads its advice.

A token of the role `job` speaks for its own alone: `job.NAME` for the job of that name, `tenant.NAME` for the
jobs of that tenant. A report waits for no tick; its answer brings the advice. Whatever a job that registered
itself asks renews its registration.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from connectors.jobs import (
    MAX_OF_TENANT,
    MAX_REPORT,
    Advice,
    JobDecoder,
    JobLeases,
    JobRegistration,
    level_of,
    nodes_of,
    start_of,
)
from twin.api.access import REFUSALS, WHO, sender
from twin.api.answers import Refused, answer, body_of, live_of, read_of
from twin.api.runtime import Runtime
from twin.catalogue import BadMessage, clean, duration
from twin.telemetry import KINDS, JobEnded
from twin.wiring import Roster, advice_in_force

DECODER: web.AppKey[JobDecoder] = web.AppKey("job_decoder", JobDecoder)
LEASES: web.AppKey[JobLeases] = web.AppKey("job_leases", JobLeases)
POLICY = "checkpoint"
SETTLED_S, LOOK_S = 5.0, 0.01  # a tick that was made is in the journal within this long; between looks


def decoder_of(live: Runtime) -> JobDecoder:
    """Return the decoder of HTTP reports to a daemon."""
    return JobDecoder(Roster(lambda: live.engine).slot_of)


async def register(request: web.Request) -> web.Response:
    """Register a job that no scheduler reports; it is over when its client has not asked for `lease_s`.

    The same once more renews it. A job that a scheduler reported stays the scheduler's.
    """
    live, job = live_of(request), request.match_info["job"]
    slot = _own(request, acting=True)
    registration = await body_of(request, JobRegistration)
    try:
        level_of(job)
        nodes = nodes_of(live.engine.site, registration)
    except BadMessage as error:
        raise Refused(400, str(error)) from None
    if live.role != "leader":
        raise Refused(503, "this daemon is a standby; ask the leader", {"Retry-After": "10"})
    if slot is None or live.engine.jobs.lease_s[slot]:
        await _start(request, slot, nodes, registration)
    site, jobs = live.engine.site, live.engine.jobs
    held = jobs.nodes[jobs.slot_of[job]] if job in jobs.slot_of else np.array(nodes, np.int32)
    return answer({"job": job, "registered": bool(slot is None or jobs.lease_s[slot]),
                   "nodes": [site.name("node", node) for node in held.tolist()],
                   "gpus": int((site.gpu_start_of_node[held + 1] - site.gpu_start_of_node[held]).sum()),
                   "lease_s": registration.lease_s, "warnings": _doubts(live)})  # fmt: skip


async def _start(
    request: web.Request, slot: int | None, nodes: tuple[int, ...], registration: JobRegistration
) -> None:
    """Start a job that registers itself, unless it runs just so. Raises Refused."""
    live, job, token = live_of(request), request.match_info["job"], request[WHO]
    jobs, site = live.engine.jobs, live.engine.site
    for node in nodes:
        if (other := int(jobs.job_of_node[node])) not in (-1, slot):
            raise Refused(409, f"node {clean(site.name('node', node))} runs {clean(jobs.shown(other), 80)}; "
                               "name free nodes, or wait until that job has ended")  # fmt: skip
    kind, _, own = token.name.partition(".")
    tenant = own if token.role == "job" and kind == "tenant" else ""
    of_tenant = np.flatnonzero(jobs.alive & (jobs.lease_s > 0)).tolist()
    if slot is None and tenant and sum(jobs.tenants[i] == tenant for i in of_tenant) >= MAX_OF_TENANT:
        raise Refused(409, f"{MAX_OF_TENANT} jobs are registered by {token.name}; end some of them: "
                           "Advisor.close, or DELETE /v1/jobs/NAME")  # fmt: skip
    event = start_of(uuid.uuid4().hex, job, tenant, tuple(site.name("node", n) for n in nodes), registration)
    same = slot is not None and (
        tuple(jobs.nodes[slot].tolist()), KINDS[jobs.kind[slot]], jobs.lease_s[slot]
    ) == (nodes, event.kind, event.lease_s)  # fmt: skip
    if not same:
        # A slot rests after its job: whoever registered and ended jobs all the time would use them up
        if token.role == "job" and not request.app[LEASES].may_start(token.name, time.monotonic()):
            raise Refused(429, f"{token.name} has registered {MAX_OF_TENANT} jobs within ten minutes; keep "
                               "one registration for the life of a job", {"Retry-After": "60"})  # fmt: skip
        if (refused := await live.submit(event)) is not None:
            raise Refused(
                409, f"{refused}; try again in some minutes, or ask the operator for more `max_jobs`"
            )
    request.app[LEASES].renew(job, time.monotonic())


def _doubts(live: Runtime) -> list[str]:
    """Return the reasons for which a job gets no advice, with remedies for the operator."""
    authority = live.engine.intake.authority.get(POLICY)
    if authority is None:
        return ["no policy `checkpoint` runs here, so the job keeps its own interval; the operator adds "
                "`policies: {checkpoint: {authority: act}}` to the site file"]  # fmt: skip
    if authority != "act":
        return [f"the policy `checkpoint` has the authority {authority}, so the job keeps its own interval; "
                "jobs receive it at `act`"]  # fmt: skip
    return []


async def unregister(request: web.Request) -> web.Response:
    """End a job that registered itself."""
    live, job = live_of(request), request.match_info["job"]
    slot = _slot(request, acting=True)
    if not live.engine.jobs.lease_s[slot]:
        raise Refused(409, f"job {clean(job, 80)} was reported by a scheduler, which ends it")
    refused = await live.submit(
        JobEnded(id=f"registered/{uuid.uuid4().hex}", job=job, reason="its client ended")
    )
    if refused is not None:
        raise Refused(409, refused)
    return answer({"job": job, "registered": False})


def end_lapsed(live: Runtime, leases: JobLeases, now_s: float) -> None:
    """End self-registered jobs whose client no longer reports."""
    if live.role != "leader":
        leases.lapsed({}, now_s)  # clients ask another daemon: each has its whole lease after a takeover
        return
    jobs = live.engine.jobs
    leased = {jobs.names[i]: float(jobs.lease_s[i]) for i in np.flatnonzero(jobs.alive & (jobs.lease_s > 0))}
    for job in leases.lapsed(leased, now_s):
        event = JobEnded(
            id=f"lapsed/{job}#{uuid.uuid4().hex}",
            job=job,
            reason=f"its client has not asked for advice for {duration(leased[job])}",
        )
        if live.put_event(event):
            leases.renew(job, now_s)  # until the tick has ended it


async def advised(request: web.Request) -> web.Response:
    """Return the advice in force on a job's checkpoints, and the job's last report of them.

    Without advice both fields are null and it has expired; then the job's own interval holds.
    """
    live = live_of(request)
    _slot(request, acting=False)
    advice = await _advice(request)
    slot = _slot(request, acting=False)
    return answer({**msgspec.structs.asdict(advice), "told": _report_of(live, slot)})


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
    """Return the slot of a running job. Raises Refused for jobs that the token may not access, and for
    unknown jobs."""
    slot, job = _own(request, acting), request.match_info["job"]
    if slot is None:
        raise Refused(404, f"no job {clean(job, 80)} is known to run; expected a job that Slurm (as "
                           "slurm:CLUSTER:ID), Kubernetes or an event reported, or one that registered "
                           "itself: Advisor(..., nodes=[...])")  # fmt: skip
    if acting or request[WHO].role == "job":
        request.app[LEASES].renew(job, time.monotonic())
    return slot


def _own(request: web.Request, acting: bool) -> int | None:
    """Return the slot of the requested job; None if it does not run. Raises Refused for another's job."""
    live, job, token = live_of(request), request.match_info["job"], request[WHO]
    slot = live.engine.jobs.slot_of.get(job)
    if token.role == "job":
        kind, _, own = token.name.partition(".")
        mine = kind == "job" and own == job
        if kind == "tenant" and own:
            mine = slot is None or own == live.engine.jobs.tenants[slot]
        if not mine:
            request.app[REFUSALS].log(sender(request), "not its own job", name=token.name, role=token.role)
            raise Refused(403, f"the token {token.name} speaks for one job (job.NAME) or those of one tenant "
                               f"(tenant.NAME), and {clean(job, 80)} is another; ask the operator for a "
                               "token of the job or of its tenant")  # fmt: skip
    elif acting and not token.may("operator"):
        request.app[REFUSALS].log(sender(request), "role too small", name=token.name, role=token.role)
        raise Refused(
            403, f"needs the role job or operator; the token {token.name} has the role {token.role}"
        )
    return slot


async def _advice(request: web.Request) -> Advice:
    """Return the advice that is in force and in the journal; an expired one if there is none."""
    live, job = live_of(request), request.match_info["job"]
    if live.role != "leader":
        raise Refused(503, "this daemon is a standby; ask the leader", {"Retry-After": "10"})
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


def _report_of(live: Runtime, slot: int) -> dict[str, Any]:
    """Return a job's report of its checkpoints; null where it reported nothing."""
    jobs = live.engine.jobs
    names = ("checkpoint_interval_s", "checkpoint_save_s", "checkpoint_block_s", "checkpoint_flush_s",
             "checkpoint_restart_s", "checkpoint_local_block_s", "checkpoint_local_interval_s", "saved_ns",
             "saved_local_ns", "checkpoint_told_ns")  # fmt: skip
    columns: dict[str, np.ndarray] = {name: getattr(jobs, name) for name in names}
    return {name.removeprefix("checkpoint_"): column[slot].item() or None for name, column in columns.items()}
