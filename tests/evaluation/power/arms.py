"""Our own arm: the engine with power_cap and power_guard, in a loop with the light plant.

Its commands go through the arbiter and its leases as in the daemon; what the plant's instruments tell enters
as readings. Between ticks of a minute, leases are renewed as a daemon that ticks each second would renew
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from policies.power_capping import PowerCap, PowerGuard
from tests.evaluation.power.demand import KINDS, TRAINING, Demand
from tests.evaluation.power.plant import Reading
from tests.evaluation.power.site import PowerSite
from twin.catalogue import F64, NS
from twin.contracts import Model, Policy
from twin.engine import Engine
from twin.telemetry import Block, Event, Inbox, JobEnded, JobStarted

CAP = "gpu.power_cap_w"
HIGH_PRIORITY = 10
START_NS = 1_767_225_600 * NS  # 2026-01-01
LEASE_S = 30.0  # as long as leases of this control are


class Arm(Protocol):
    """Arm of the comparison: a policy or a rival that decides on caps."""

    name: str
    still: bool  # never asks for another cap: nothing need be looked at closely

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """Caps that it commands now [n_gpu]; None where nothing changes."""
        ...


def jobs_told(site: PowerSite, demand: Demand, minute: int) -> list[Event]:
    """Jobs that ended and began with this minute, as a scheduler tells of them."""
    core, row = site.site, demand.job[minute]
    before = demand.job[minute - 1] if minute else np.full(len(row), -1)
    if minute and (row == before).all():
        return []
    was, now = set(before[before >= 0].tolist()), set(row[row >= 0].tolist())
    out: list[Event] = [JobEnded(job=f"j{j}") for j in sorted(was - now)]
    for j in sorted(now - was):
        kind = int(demand.kind[j])
        nodes = tuple(core.name("node", i) for i in np.flatnonzero(row == j).tolist())
        out.append(
            JobStarted(
                job=f"j{j}",
                nodes=nodes,
                kind=KINDS[kind],
                coupling="synchronous" if kind == TRAINING else "independent",
                priority=HIGH_PRIORITY if demand.high[j] else 0,
            )
        )
    return out


class Ours:
    """The engine with these policies at `act`; by default power_guard and power_cap."""

    name, still = "racktwin", False

    def __init__(
        self, site: PowerSite, policies: Sequence[Policy] | None = None, models: Sequence[Model] = ()
    ) -> None:
        if policies is None:
            policies = (PowerGuard(high_priority=HIGH_PRIORITY), PowerCap(high_priority=HIGH_PRIORITY))
        self.engine = Engine(site.site, policies, models, {p.name: "act" for p in policies})
        self.inbox = Inbox(site.site.sizes)
        self.ticks = 0
        self.cap_w = np.full(site.gpus, np.nan)

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """One tick. Raises RuntimeError where a policy broke its contract: its scores would mean nothing."""
        now_ns = START_NS + (second + 1) * NS
        self._tell(read, now_ns)
        for event in events:
            self.inbox.put_event(event)
        lease = self.engine.arbiter.leases[CAP]
        running = lease.running()
        if dt_s > 1 and running.any():
            lease.expires_ns[running] = now_ns + round(LEASE_S * NS)
        frame = self.inbox.take(self.ticks, now_ns, float(dt_s))
        self.ticks += 1
        decision = self.engine.tick(frame)
        if self.engine.suspended:
            told = [f.evidence for f in decision.findings if f.id.startswith("suspended/")]
            raise RuntimeError(f"a policy broke its contract in second {second}: {told}")
        before = np.where(np.isfinite(self.cap_w), self.cap_w, read.cap_w)
        after = np.where(np.isfinite(lease.value), lease.value, before)
        for batch in decision.commands:
            if batch.control == CAP and not batch.renewal:
                after[batch.index] = batch.value
        self.cap_w = after
        return None if (after == before).all() else after

    def _tell(self, read: Reading, now_ns: int) -> None:
        told = {
            "gpu": {"power_w": read.gpu_w, "power_limit_w": read.cap_w},
            "rack": {"power_w": read.rack_w},
            "feeder": {"power_w": read.feeder_w, "energised_state": read.dead.astype(np.float64),
                       "breaker_state": read.tripped.astype(np.float64)},
        }  # fmt: skip
        for table, signals in told.items():
            values = np.array(list(signals.values()), np.float32)
            none = np.empty((0, values.shape[1]), np.int64)
            block = Block(table, 0, tuple(signals), values, (), none, now_ns)
            self.inbox.put_block(block, now_ns)
