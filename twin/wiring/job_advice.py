"""Job advice: the job of each slot, its advice in force, and the acknowledgement that a report gives.

Advice is read off the arbiter's leases: the same for every wire, with the expiry of the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from connectors.jobs import CONTROLS, INTERVAL, LOCAL, MAX_REASON, SINCE, Advice, JobLease, compose
from twin.catalogue import NS
from twin.contracts import Item
from twin.control import DONE
from twin.engine import Engine
from twin.telemetry import CheckpointTold, CommandAcked, Event

SAME_S = 0.1  # as finely as an interval is read back


class Roster:
    """The jobs of an engine, looked up at each call."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine

    def slots(self) -> Mapping[str, int]:
        """The slot of each job that runs."""
        return self._engine().jobs.slot_of

    def slot_of(self, job: str) -> int | None:
        """The slot of a job, None if it does not run."""
        return self._engine().jobs.slot_of.get(job)

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """The nodes of each job that runs."""
        jobs, site = self._engine().jobs, self._engine().site
        return {job: tuple(site.name("node", i) for i in jobs.nodes[slot].tolist())
                for job, slot in jobs.slot_of.items()}  # fmt: skip

    def job_of(self, slot: int, generation: int) -> str | None:
        """The job that got a lease of this generation; None when it is gone, whoever sits there now."""
        engine = self._engine()
        jobs, table = engine.jobs, engine.state.tables["job"]
        if not 0 <= slot < jobs.n or not jobs.alive[slot] or int(table.generation[slot]) != generation:
            return None
        return jobs.names[slot] or None

    def leases(self) -> list[tuple[str, int, JobLease]]:
        """The leases on jobs that run."""
        engine = self._engine()
        return [
            (control, slot, _part(engine, control, slot))
            for control in CONTROLS
            for slot in np.flatnonzero(engine.arbiter.leases[control].running()).tolist()
        ]


def advice_in_force(engine: Engine, job: str, slot: int) -> Advice | None:
    """The advice to a job at this tick; None without one, or where a lease is not this job's own."""
    now_ns, parts = engine.state.now_ns, dict[str, JobLease]()
    for control in CONTROLS:
        lease = engine.arbiter.leases[control]
        mine = lease.generation[slot] == engine.state.tables["job"].generation[slot]
        if mine and not np.isnan(lease.value[slot]):
            parts[control] = _part(engine, control, slot)
    return compose(job, parts.get(INTERVAL), parts.get(SINCE), now_ns, parts.get(LOCAL))


def _part(engine: Engine, control: str, slot: int) -> JobLease:
    lease = engine.arbiter.leases[control]
    return JobLease(
        int(lease.generation[slot]),
        float(lease.value[slot]),
        int(lease.issued_ns[slot]),
        int(lease.expires_ns[slot]),
        engine.arbiter.epoch,
        _reason(engine, control, slot),
    )


def _reason(engine: Engine, control: str, slot: int) -> str:
    """The reason that the policy owning a lease gives now; "" without one."""
    owner = int(engine.arbiter.leases[control].owner[slot])
    if not 0 <= owner < len(engine.policies):
        return ""
    for proposal in engine.in_force[engine.policies[owner].name]:
        if proposal.control == control and slot in proposal.index:
            return proposal.reason[:MAX_REASON]
    return ""


def answers_of(engine: Engine, events: Iterable[Event]) -> list[Item]:
    """Acknowledgements that follow from reports: a job keeps an interval that it was advised, or holds a
    durable save as new as it was asked for."""
    out: list[Item] = []
    jobs, leases = engine.jobs, engine.arbiter.leases
    reporting = [e.job for e in events if isinstance(e, CheckpointTold)]
    for slot in sorted({slot for job in reporting if (slot := jobs.slot_of.get(job)) is not None}):
        follows = abs(float(jobs.checkpoint_interval_s[slot]) - leases[INTERVAL].value[slot]) <= SAME_S
        local_s = float(jobs.checkpoint_local_interval_s[slot])
        local = abs(local_s - leases[LOCAL].value[slot]) <= SAME_S
        saved = int(jobs.saved_ns[slot]) >= leases[SINCE].value[slot] * NS
        # All are False where no lease runs: NaN
        for control, done in ((INTERVAL, follows), (LOCAL, local), (SINCE, saved)):
            lease = leases[control]
            if done and lease.state[slot] != DONE:
                out.append(
                    CommandAcked(
                        control=control,
                        name=engine.site.name("job", slot),
                        generation=int(lease.generation[slot]),
                        state="done",
                        command=f"{engine.arbiter.epoch}-{lease.command[slot]}",
                        detail="as the job reports",
                    )
                )
    return out
