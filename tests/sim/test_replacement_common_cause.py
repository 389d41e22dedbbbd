"""Common causes before the policy itself: no mass drain, the cause is named, healthy nodes stay in service.

The light View of the replacement backtest, with jobs on all nodes; what health and diagnosis say is written
into it as the daemon would say it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.node_replacement import CAUSES, Replacement
from tests.evaluation.replacement.view import START_NS, FleetView, quarter_site
from twin.catalogue import NS, Bool
from twin.contracts import BY_FACILITY, DEGRADED, FAILED, HEALTHY, Fault, Health, action
from twin.engine import fresh_memory
from twin.telemetry import JobSlots, JobStarted

SITE = quarter_site(racks=16)
N = SITE.sizes["node"]
SERVICE = "node.service_level"


class Daemon:
    """The policy, asked every ten seconds; the levels that it asks for come true at once."""

    def __init__(self) -> None:
        self.jobs = JobSlots(SITE.sizes["job"], N)
        self.jobs.known = True
        for k in range(N // 16):
            told = JobStarted(job=f"job{k}", nodes=(), kind="training", time_limit_s=86_400.0,
                              checkpoint_interval_s=1800.0, checkpoint_save_s=60.0,
                              checkpoint_restart_s=600.0)  # fmt: skip
            self.jobs.start(told, list(range(16 * k, 16 * k + 16)), 0, START_NS)
        self.view = FleetView(SITE, self.jobs, dt_s=10.0)
        self.policy = Replacement(burn_in=True)
        self.memory = fresh_memory(self.policy, SITE)
        self.accounts: list[dict[str, Any]] = []
        self.reasons: set[str] = set()
        self.now_s = 3600.0
        self.ask(60.0)

    def ask(self, seconds: float) -> None:
        for _ in range(round(seconds / 10.0)):
            self.now_s += 10.0
            self.view.refresh(START_NS + round(self.now_s * NS), False)
            before = self.memory
            proposals, self.memory = self.policy.propose(self.view, before)
            self.accounts += self.policy.accounts(self.view, before, self.memory)
            for p in proposals:
                self.reasons.add(p.reason)
                if p.control == SERVICE:
                    self.view.level[p.index] = np.where(np.isfinite(p.want), p.want, p.lo)

    def out(self) -> Bool:
        out: Bool = self.view.level >= 1.0
        return out

    def judge(self, nodes: Bool, level: int, todo: str, sure_pu: float, lowered: int = 0) -> None:
        """The verdict on nodes, and on all of their GPUs."""
        for part, ill in (("node", nodes), ("gpu", nodes[SITE.node_of_gpu])):
            len(ill)
            self.view.verdicts[part] = Health(
                part, np.where(ill, level, HEALTHY).astype(np.uint8),
                np.where(ill, START_NS + round(self.now_s * NS), 0).astype(np.int64),
                np.where(ill, action(todo), 0).astype(np.uint8),
                np.where(ill, sure_pu, 1.0).astype(np.float32),
                np.where(ill & (part == "gpu"), lowered, 0).astype(np.uint8),
            )  # fmt: skip

    def words(self) -> str:
        return " ".join([*self.reasons, *(str(a) for a in self.accounts)])


def below(table: str, entity: int) -> Bool:
    """Nodes that an entity serves."""
    if table == "cdu":
        return SITE.cdu_of_rack[SITE.rack_of_node] == entity  # type: ignore[no-any-return]
    _, racks = SITE.below_feeder()
    return np.isin(SITE.rack_of_node, racks.of_row(entity))


def fault(kind: str, table: str, entity: int, now_s: float) -> Fault:
    return Fault(kind, table, entity, "", "critical", 0.95, START_NS + round(now_s * NS), ("seen",), 64)


def test_a_single_bad_node_is_withdrawn() -> None:
    """Without this the others prove nothing."""
    daemon = Daemon()
    one = np.zeros(N, np.bool_)
    one[5] = True
    daemon.judge(one, FAILED, "replace", 0.95)
    daemon.ask(1800.0)
    assert np.flatnonzero(daemon.out()).tolist() == [5]


def test_a_lost_cdu_drains_nobody_and_is_named() -> None:
    daemon = Daemon()
    hot = below("cdu", 1)
    daemon.view.diagnosed = (fault("pump_trip", "cdu", 1, daemon.now_s),)
    daemon.judge(hot, DEGRADED, "check_facility", 0.9, BY_FACILITY)
    daemon.ask(1800.0)
    assert not daemon.out().any()
    causes = {CAUSES[c] for c in daemon.memory["cause"][hot].tolist()}
    assert causes <= {"none", "facility", "shared"}


@pytest.mark.long
def test_a_lost_feed_drains_nobody() -> None:
    daemon = Daemon()
    dark = below("feeder", 2)
    daemon.view.diagnosed = (fault("feed_lost", "feeder", 2, daemon.now_s),)
    now_ns = START_NS + round(daemon.now_s * NS)
    for node in np.flatnonzero(dark).tolist():
        daemon.view.rows.begin(node, now_ns, shared=True)
    daemon.view.down |= dark
    daemon.view.since_ns[dark] = now_ns
    daemon.ask(3600.0)
    assert not daemon.out().any()


@pytest.mark.long
@pytest.mark.parametrize("spread_s", [0.0, 600.0])
def test_a_bad_driver_on_two_hundred_nodes_drains_no_mass(spread_s: float) -> None:
    """No diagnosis names it: what speaks is only that so many look bad at once, wherever they stand."""
    daemon = Daemon()
    some = np.zeros(N, np.bool_)
    chosen = np.random.default_rng(4).permutation(N)[:200]
    for part in range(10):
        some[chosen[20 * part : 20 * part + 20]] = True
        daemon.judge(some.copy(), DEGRADED, "drain", 0.67)
        daemon.ask(max(spread_s / 10.0, 10.0))
    daemon.ask(3600.0)
    out = daemon.out()
    assert not out[~some].any(), "healthy nodes stay"
    assert np.count_nonzero(out) <= max(5, round(0.02 * N)), "a few before it showed, at most"
    assert "at once" in daemon.words() or "together" in daemon.words() or "many" in daemon.words()


@pytest.mark.long
def test_one_bad_node_beside_a_lost_cdu_is_still_withdrawn() -> None:
    """A common cause holds those below it, and nobody else."""
    daemon = Daemon()
    hot = below("cdu", 1)
    other = int(np.flatnonzero(~hot)[3])
    daemon.view.diagnosed = (fault("pump_trip", "cdu", 1, daemon.now_s),)
    ill = hot.copy()
    ill[other] = True
    daemon.judge(ill, FAILED, "replace", 0.95)
    daemon.ask(3600.0)
    assert np.flatnonzero(daemon.out()).tolist() == [other]
