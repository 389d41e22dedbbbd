"""Limits of what may be out at once: the same as asking one by one; and the breaker for common causes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.node_replacement.circuit_breaker import MOST_HELD_S, QUIET_S, check_breaker
from policies.node_replacement.limits import FREE, WithdrawalLimits, admit
from tests.support.builders import Twin, site_of, two_racks
from tests.support.scripted_health import ailing
from twin.catalogue import NS
from twin.contracts import DEGRADED, Fault
from twin.site import Site
from twin.telemetry import JobSlots, events as ev


def fleet(racks: int = 8, nodes: int = 8, profile: str = "air-8gpu", **more: Any) -> dict[str, Any]:
    """A hall of racks: two CDUs in one loop, a plane, and a feeder for each four racks on either side."""
    names = f"r[1-{racks}]"
    return {
        "site": "lab",
        "loops": [{"name": "l1"}],
        "halls": [{
            "name": "h",
            "racks": [{"name": names, "profile": profile, "nodes": nodes, "gpus_per_node": 1}],
            "cdus": [{"name": "cdu[1-2]", "serves": [names], "loop": "l1"}],
            "feeders": [{"name": "a[1-2]", "side": "A", "serves": [names]},
                        {"name": "b", "side": "B", "serves": [names]}],
            "planes": [{"name": "ib", "links_per_node": 2}],
        }],
        **more,
    }  # fmt: skip


def one_by_one(
    site: Site, jobs: JobSlots, out: np.ndarray, wanted: list[int], limits: WithdrawalLimits
) -> list[bool]:
    """The rival: ask each in turn."""
    gone, answers = out.copy(), []

    def full(members: np.ndarray, share: float, count: float = np.inf) -> bool:
        most = max(1, min(int(np.floor(share * members.sum() + 1e-9)), count))
        return bool((gone & members).sum() >= most)

    for node in wanted:
        if gone[node]:
            answers.append(True)
            continue
        job = int(jobs.job_of_node[node])
        stop = full(np.ones_like(out), limits.site_share, limits.site_count)
        stop |= full(site.rack_of_node == site.rack_of_node[node], limits.rack_share)
        stop |= full(site.supernode_of_node == site.supernode_of_node[node], limits.domain_share)
        stop |= job >= 0 and full(jobs.job_of_node == job, limits.job_share)
        answers.append(not stop)
        gone[node] |= not stop
    return answers


SITES = {
    "air": site_of(fleet(5, 7)),
    "domains": site_of(two_racks("gb200-nvl72", "r[1-3]")),
    "tiny": site_of(fleet(3, 2)),
}


def jobs_of(site: Site, held: list[int]) -> JobSlots:
    jobs = JobSlots(8, site.sizes["node"])
    jobs.job_of_node[:] = np.resize(np.array(held, np.int32), site.sizes["node"])
    return jobs


shares = st.floats(0.0, 1.0)


@settings(max_examples=120, deadline=None)
@given(
    which=st.sampled_from(sorted(SITES)),
    held=st.lists(st.integers(-1, 7), min_size=1, max_size=36),
    share_out=st.floats(0, 0.5),
    limits=st.builds(WithdrawalLimits, st.integers(0, 40), shares, shares, shares, shares),
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(0, 40),
)
def test_room_is_what_asking_one_by_one_gives(
    which: str, held: list[int], share_out: float, limits: WithdrawalLimits, seed: int, k: int
) -> None:
    site, rng = SITES[which], np.random.default_rng(seed)
    n = site.sizes["node"]
    jobs, out = jobs_of(site, held), rng.random(n) < share_out
    wanted = rng.integers(0, n, k).astype(np.int32)
    allowed, why = admit(site, jobs, out, wanted, limits)
    rival = np.array(one_by_one(site, jobs, out, wanted.tolist(), limits), np.bool_)
    # A second mention has the answer of the first
    first = dict(reversed(list(zip(wanted.tolist(), rival.tolist(), strict=True))))
    assert allowed.tolist() == [first[node] for node in wanted.tolist()]
    assert ((why == FREE) == allowed).all()
    # Never exceeded, but for the one that each group may always lose and what others took out
    gone = out.copy()
    gone[wanted[allowed]] = True
    if (gone & ~out).any():
        assert gone.sum() <= max(1, min(limits.site_count, np.floor(limits.site_share * n + 1e-9)))
    for of_node, share in ((site.rack_of_node, limits.rack_share), (jobs.job_of_node, limits.job_share)):
        for group in np.unique(of_node[of_node >= 0]):
            members = of_node == group
            if (gone & ~out & members).any():
                assert (gone & members).sum() <= max(1, np.floor(share * members.sum() + 1e-9))
    # Nodes that are out may always go on, and greedy-maximal: no refused one would fit now
    assert allowed[out[wanted]].all()
    for node in np.unique(wanted[~allowed]).tolist():
        assert not admit(site, jobs, gone, np.array([node], np.int32), limits)[0][0]


@pytest.mark.parametrize(
    ("share", "members", "most"), [(0.3, 10, 3), (0.1, 8, 1), (0.0, 8, 1), (1.0, 8, 8), (0.58, 50, 29)]
)
def test_a_share_allows_at_least_one_and_no_fraction(share: float, members: int, most: int) -> None:
    site = site_of(fleet(2, members))
    jobs, out = JobSlots(4, 2 * members), np.zeros(2 * members, np.bool_)
    limits = WithdrawalLimits(site_share=1.0, rack_share=share, domain_share=1.0, job_share=1.0)
    allowed, _ = admit(site, jobs, out, np.arange(members, dtype=np.int32), limits)
    assert allowed.sum() == most
    assert allowed[:most].all()


def test_jobs_of_one_node_are_never_held_up_by_their_own_limit() -> None:
    site = SITES["air"]
    jobs = JobSlots(64, site.sizes["node"])
    jobs.job_of_node[:] = np.arange(site.sizes["node"])
    limits = WithdrawalLimits(site_share=1.0, rack_share=1.0, domain_share=1.0, job_share=0.0)
    out = np.zeros(site.sizes["node"], np.bool_)
    assert admit(site, jobs, out, np.arange(site.sizes["node"], dtype=np.int32), limits)[0].all()


def test_what_others_took_out_counts_and_a_refusal_says_which_group_is_full() -> None:
    site = SITES["domains"]  # three racks of 18
    jobs, out = JobSlots(4, 54), np.zeros(54, np.bool_)
    out[[0, 1, 2, 3]] = True
    wanted = np.array([4, 18, 3], np.int32)
    allowed, why = admit(site, jobs, out, wanted, WithdrawalLimits(site_share=0.5))
    assert allowed.tolist() == [False, True, True]
    assert why.tolist() == [2, 0, 0]
    jobs.job_of_node[18:22] = 0
    _, why = admit(
        site, jobs, out, np.array([18, 19], np.int32), WithdrawalLimits(site_share=0.5, job_share=0.25)
    )
    assert why.tolist() == [0, 4]
    assert admit(site, jobs, out, wanted, WithdrawalLimits(site_count=4))[1].tolist() == [1, 1, 0]


# ---------------------------------------------------------------- breaker
USUAL_PER_H = 0.05  # nodes of a site of 64: 20 failures per 1000 node-days


class Pod(Twin):
    """A site whose health is as told, with suspects of the last hour."""

    def __init__(self, **more: Any) -> None:
        super().__init__(fleet(**more))
        self.ill = ailing(self.engine)
        self.tick(None)

    def ask(self, newly: list[int], faults: tuple[Fault, ...] = (), **more: Any) -> Any:
        self.engine.diagnosis.faults = faults
        view = self.engine.view(1.0)
        mask = np.zeros(self.site.sizes["node"], np.bool_)
        mask[newly] = True
        return check_breaker(view, mask, more.pop("usual", USUAL_PER_H), **more)


def fault(kind: str, table: str, entity: int, sure: float = 0.9, signal: str = "") -> Fault:
    return Fault(kind, table, entity, signal, "critical", sure, 0, ("a test says so",))


def held(found: Any) -> list[int]:
    return np.flatnonzero(found.nodes).tolist()


def test_two_suspects_are_two_suspects() -> None:
    found = Pod().ask([0, 1])
    assert not found.open
    assert found.why == ""


def test_three_of_one_rack_share_a_cause_and_a_fourth_elsewhere_does_not() -> None:
    pod = Pod(racks=32)
    found = pod.ask([8, 9, 12, 40])
    assert found.open
    assert held(found) == [8, 9, 12]
    assert (found.table, found.entity) == ("rack", 1)
    assert "of lab/h/r2" in found.why
    # In a fleet where so many are usual they are chance
    assert not pod.ask([8, 9, 12, 40], usual=20.0).open
    # Nobody knows what is usual: then the rate of a published fleet
    assert held(pod.ask([8, 9, 12, 40], usual=float("nan"))) == [8, 9, 12]


@pytest.mark.parametrize(
    ("nodes", "table", "name"),
    [
        ([0, 8, 16, 24], "feeder", "lab/h/a1 or of lab/h/cdu1 became"),
        ([0, 8, 16, 25, 33, 41, 50, 58], "feeder", "lab/h/b or of lab/l1 or of lab/h became"),
        ([2, 3, 4], "rack", "lab/h/r1 became"),
    ],
)
def test_the_lowest_entity_that_explains_them_is_named(nodes: list[int], table: str, name: str) -> None:
    found = Pod().ask(nodes)
    assert held(found) == nodes
    assert found.table == table
    assert name in found.why


def test_a_code_that_many_report_is_one_cause_and_others_stay_free() -> None:
    pod = Pod(racks=32)
    many = list(range(0, 200, 25))
    code = np.zeros(pod.site.sizes["gpu"])
    code[many] = 31
    pod.tick({"gpu.xid_code": code})
    found = pod.ask([*many, 3], usual=0.5)
    assert held(found) == many
    assert "XID 31" in found.why


def test_too_large_a_share_of_the_site_opens_whatever_is_usual() -> None:
    pod = Pod(racks=32)  # 256 nodes: 2 % are 6
    assert pod.ask([0, 40, 90, 130, 170, 220], usual=50.0).open
    assert not pod.ask([0, 40, 90, 130, 170], usual=50.0).open


@pytest.mark.parametrize(
    ("kind", "table", "entity", "holds"),
    [
        ("feed_lost", "feeder", 0, [3]),
        ("pump_trip", "cdu", 0, [3]),
        ("cooler_failed", "loop", 0, [3, 60]),
        ("branch_blocked", "rack", 7, [60]),
        ("grid_event", "site", 0, [3, 60]),
        ("gpu_off_bus", "gpu", 3, []),
        ("xid_burst", "gpu", 3, []),
    ],
)
def test_a_fault_above_holds_what_is_below_it(kind: str, table: str, entity: int, holds: list[int]) -> None:
    pod = Pod()
    found = pod.ask([3, 60], (fault(kind, table, entity),))
    assert held(found) == holds
    if holds:
        assert pod.site.name(table, entity) in found.why or "whole site" in found.why
    assert not pod.ask([3, 60], (fault(kind, table, entity, sure=0.3),)).open
    assert not pod.ask([3, 60], (fault(kind, table, entity, signal="power_w"),)).open


def test_failures_that_are_known_to_be_shared_are_held() -> None:
    pod = Pod()
    now = pod.now_ns
    pod.ill.failures.rows = [(5, now - 600 * NS, 0, "power", True), (6, now - 600 * NS, 0, "power", False),
                             (7, now - 7200 * NS, 0, "power", True)]  # fmt: skip
    assert held(pod.ask([5, 6, 7])) == [5]


def test_a_job_whose_nodes_fail_together_is_named() -> None:
    pod = Pod(racks=32)
    nodes = tuple(f"r{r}/node0" for r in range(1, 7))
    pod.tick(None, ev.JobStarted(id="j", job="big", nodes=nodes, kind="training"))
    found = pod.ask([0, 8, 16, 24, 100], usual=0.5)
    assert "job big" in found.why
    assert held(found) == [0, 8, 16, 24]


def test_bad_links_of_one_plane_are_the_network() -> None:
    pod = Pod(racks=32)
    many = [0, 40, 90, 130]
    for node in many:
        pod.ill.say("link", 2 * node, DEGRADED, "down")
    found = pod.ask([*many, 200], usual=0.02)
    assert set(many) <= set(held(found))
    assert "with bad links of ib became suspect within an hour, where 0.0017 do by chance" in found.why


def test_the_breaker_closes_after_a_quiet_time_and_not_while_all_are_still_suspect() -> None:
    pod = Pod()
    found = pod.ask([8, 9, 12])
    kept, suspect = found.held_ns, found.nodes.copy()
    pod.tick(None, dt_s=QUIET_S / 2)
    found = pod.ask([], held_ns=kept)
    assert held(found) == [8, 9, 12]
    assert "a while ago" in found.why
    pod.tick(None, dt_s=QUIET_S)
    assert not pod.ask([], held_ns=kept).open
    assert held(pod.ask([], held_ns=kept, suspect=suspect)) == [8, 9, 12]
    suspect[9] = False  # two are left: no longer together
    assert not pod.ask([], held_ns=kept, suspect=suspect).open
    suspect[9] = True
    pod.tick(None, dt_s=MOST_HELD_S)
    found = pod.ask([], held_ns=kept, suspect=suspect)
    assert not found.open
    assert not found.held_ns.any()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1), hours=st.floats(0, 30))
def test_only_suspects_are_ever_held(seed: int, share: float, hours: float) -> None:
    """Nodes on their way back are no suspects: nothing here can hold them."""
    rng = np.random.default_rng(seed)
    suspect = rng.random(64) < share
    newly = suspect & (rng.random(64) < share)
    then = np.where(rng.random(64) < 0.3, POD.now_ns - int(hours * 3600) * NS, 0)
    where = np.flatnonzero(newly).tolist()
    found = POD.ask(where, (fault("feed_lost", "feeder", 0),), suspect=suspect, held_ns=then)
    assert not (found.nodes & ~suspect).any()
    assert found.open == found.nodes.any()
    assert bool(found.why) == found.open


POD = Pod()
