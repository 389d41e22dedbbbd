"""A site with the replacement policy, whose scheduler obeys, for tests of it.

twin = Replacing({"a": EIGHT})
twin.ill.say("node", 0, DEGRADED, "bad", action_name="drain", since_ns=twin.now_ns)
twin.wait(120)
twin.phase(0), twin.level[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from policies.node_replacement import PHASES, Replacement
from policies.node_replacement.policy import SERVICE, TESTED
from policies.operator import Operator
from tests.support.builders import Twin, two_racks
from tests.support.saving_jobs import Says
from tests.support.scripted_health import ailing
from twin.catalogue import NS
from twin.contracts import DEGRADED, HEALTHY, AccountRecord, Memory, Policy
from twin.telemetry import events as ev

EIGHT = tuple(f"r1/node{i}" for i in range(8))
SAVES = {"checkpoint_interval_s": 3600.0, "checkpoint_save_s": 60.0, "checkpoint_restart_s": 600.0}
ROOMY = {"site_share": 1.0, "rack_share": 1.0, "domain_share": 1.0, "job_share": 1.0}
STATE, OWNER = "node.service_level_state", "node.service_owner_state"
PLACEMENT = "node.placement"


class Replacing(Twin):
    """Looks every ten seconds; service levels are as commanded a tick later, unless `obeys` says no."""

    def __init__(
        self, jobs: Mapping[str, tuple[str, ...]] | None = None, authority: str = "act",
        told: Mapping[str, float] | None = None, tree: Mapping[str, Any] | None = None,
        reads: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        self.says = Says()
        tree = tree or two_racks(controls={SERVICE: {"blast_radius": 36}}, max_jobs=8)
        policies: list[Policy] = [Replacement(**(ROOMY | settings)), Operator()]
        names = {"replacement": authority, "operator": "act"}
        super().__init__(dict(tree), policies, [self.says], authority=names)
        self.says.day = 0.002
        self.ill = ailing(self.engine)
        self.n = self.site.sizes["node"]
        self.level = np.zeros(self.n)
        self.placement: np.ndarray | None = None  # as the scheduler has it; None: nobody tells
        self.unmoved: list[int] = []  # nodes whose placement it will not change
        self.owner: np.ndarray | None = None  # of those that are out: 1 ours, 2 others; None: no source tells
        self.obeys, self.reads, self.evicts = True, reads, True
        self.accounts: list[dict[str, Any]] = []
        self.commanded: list[tuple[str, int, float, str]] = []
        given: Any = SAVES if told is None else told
        events = [
            ev.JobStarted(id=k, job=k, nodes=nodes, kind="training", coupling="synchronous", **given)
            for k, nodes in (jobs or {}).items()
        ]
        if not events:  # somebody speaks of jobs: all nodes are known to be free
            events = [ev.JobStarted(id="none", job="none", nodes=(), kind="batch")]
        self.look(*events)

    def look(self, *events: ev.Event, dt_s: float = 10.0) -> None:
        """One tick; what was commanded is done."""
        values = {STATE: self.level} if self.reads else None
        if values is not None and self.owner is not None:
            values[OWNER] = np.where(self.level >= 1.0, self.owner, 0.0)
        if self.placement is not None:
            values = (values or {}) | {f"{PLACEMENT}_state": self.placement}
        decision = self.tick(values, *events, dt_s=dt_s)
        for record in decision.records:
            if isinstance(record, AccountRecord):
                self.accounts.append(record.account)
        for batch in decision.commands:
            for i, value in zip(batch.index.tolist(), batch.value.tolist(), strict=True):
                if not batch.renewal:
                    self.commanded.append((batch.control, i, value, batch.reason))
            if batch.control == SERVICE and self.obeys:
                self.level[batch.index] = batch.value
            if batch.control == PLACEMENT and self.placement is not None and self.obeys:
                moves = ~np.isin(batch.index, self.unmoved)
                self.placement[batch.index[moves]] = batch.value[moves]
        if self.evicts:
            jobs = self.engine.jobs
            gone = {int(s) for s in jobs.job_of_node[self.level >= 3.0] if s >= 0}
            for slot in sorted(gone):
                name = jobs.names[slot]
                self.tick(None, ev.JobEnded(id=f"{name}-{self.number}", job=name), dt_s=1e-3)

    def wait(self, seconds: float, *events: ev.Event, dt_s: float = 10.0) -> None:
        """Looks of ten seconds, with these events in the first."""
        for k in range(round(seconds / dt_s)):
            self.look(*(events if k == 0 else ()), dt_s=dt_s)

    def bad(self, node: int = 0, level: int = DEGRADED, action: str = "drain", sure_pu: float = 0.9) -> None:
        """Its health speaks against a node from now on."""
        self.ill.say("node", node, level, "bad", action_name=action, sure_pu=sure_pu, since_ns=self.now_ns)

    def well(self, node: int = 0) -> None:
        """Nothing speaks against it any more."""
        held = self.ill.verdicts.held["node"]
        held.level[node], held.action[node], held.since_ns[node] = HEALTHY, 0, self.now_ns

    def saves(self, job: str = "a", ago_s: float = 0.0) -> None:
        """The job tells of a durable save that began so long ago."""
        began_ns = self.now_ns - round(ago_s * NS)
        self.look(ev.CheckpointTold(job=job, at_ns=self.now_ns, began_ns=began_ns, save_s=60.0))

    def tests(self, node: int, passed: bool | None) -> None:
        """The site's test of a node ends."""
        name = self.site.name("node", node)
        end = self.now_ns + 2 * NS
        self.look(
            ev.NodeTested(id=f"t{self.number}", name=name, began_ns=end - NS, ended_ns=end, passed=passed)
        )

    @property
    def memory(self) -> Memory:
        return self.engine.memory["replacement"]

    def phase(self, node: int = 0) -> str:
        return PHASES[int(self.memory["phase"][node])]

    def moves(self, node: int = 0) -> list[str]:
        """Return the phases that a node went to, from account to account."""
        name = self.site.name("node", node)
        return [a["to"] for a in self.accounts if a["what"] == "phase" and a["node"] == name]

    def asked(self, control: str = SERVICE) -> list[tuple[int, float]]:
        """(entity, value) of all commands on a control so far."""
        return [(i, value) for key, i, value, _ in self.commanded if key == control]

    def test_asked(self, node: int = 0) -> bool:
        return any(i == node for i, _ in self.asked(TESTED))
