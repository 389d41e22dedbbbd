"""Caps of a place, by group and by job, against a sum over its GPUs one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.power_capping import held_caps as module
from policies.power_capping.headroom import PowerState, capped_counts
from policies.power_capping.held_caps import LIFTS, held_caps, job_caps
from tests.support.builders import Twin
from tests.unit.test_power_headroom import FEEDERS, PLACES, WHOLE, small_twin, state_of
from twin.catalogue import NS
from twin.contracts import LEASE_STATES, Proposal
from twin.telemetry import JobStarted, LoadTargetSet

CAP, NODE_CAP = "gpu.power_cap_w", "node.power_cap_w"
GPUS, MOST_W = 24, 1200.0
# Of each node of four GPUs: job, class and priority
JOBS = [("wide", "usual", 1), ("wide", "usual", 1), ("chat", "waited_for", 2), ("late", "high", 9),
        ("wide", "usual", 1), (None, "idle", None)]  # fmt: skip
REASONS = [
    "the demand below lab/h/a1 is more than its budget",
    "the demand below lab/h/a is more than its budget",
    "the demand below lab/h/r3, which lab/h/b feeds, is more",
    "the demand of the site is more than it may draw now",
    "lab/h/cdu1 has half of its flow",
    "below lab/h/a12 and lab/h/b/c nothing is known",
]
# The places that each reason names, the longest name first
NAMED = [["lab/h/a1"], ["lab/h/a"], ["lab/h/r3", "lab/h/b"], ["site"], ["lab/h/cdu1"], []]
TARGET = "dr 7"


def named(rack: int, reason: int) -> str | None:
    """The place above a rack that a reason names."""
    return next((place for place in NAMED[reason] if reason >= 0 and WHOLE[place][rack]), None)


def jobs_of(of_nodes: list[Any]) -> list[JobStarted]:
    names = [f"lab/h/r{1 + i // 2}/node{i % 2}" for i in range(6)]
    kinds: dict[str, Any] = {"chat": "inference"}
    return [
        JobStarted(id=job, job=job, kind=kinds.get(job, "training"), coupling="independent",
                   nodes=tuple(n for n, one in zip(names, of_nodes, strict=True) if one[0] == job),
                   priority=next(one[2] for one in of_nodes if one[0] == job))
        for job in dict.fromkeys(one[0] for one in of_nodes if one[0])
    ]  # fmt: skip


class Caps:
    """A hall with random leases, proposals, readings; owner 0 is power_guard, 1 power_cap, -1 nobody."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.power_w = rng.uniform(100.0, 1000.0, GPUS).round()
        self.read_back_w = rng.uniform(300.0, 1200.0, GPUS).round()
        silent = rng.random(GPUS) < 0.2
        self.power_w[silent] = self.read_back_w[silent] = np.nan
        target = LoadTargetSet(id="t", author="grid", target=TARGET, limit_w=30e3, kind="flex",
                               end_ns=1_700_000_500 * NS)  # fmt: skip
        readings = {"gpu.power_w": self.power_w, "gpu.power_limit_w": self.read_back_w}
        self.twin: Twin = small_twin(readings | {"rack.power_w": [14e3, 15e3, 16e3]}, target, *jobs_of(JOBS))
        self.cap_w = rng.choice([np.nan, 1200.0, 1199.5, 200.0, 650.0, 900.0], GPUS)
        self.owner = rng.choice([-1, 0, 1, 1], GPUS)
        self.lease_state = rng.integers(0, len(LEASE_STATES), GPUS)
        self.begun_ns, self.expires_ns = rng.integers(1, 10**9, (2, GPUS))
        lease = self.twin.engine.arbiter.leases[CAP]
        lease.value[:], lease.owner[:], lease.state[:] = self.cap_w, self.owner, self.lease_state
        lease.begun_ns[:], lease.expires_ns[:] = self.begun_ns, self.expires_ns
        self.node_cap_w = 5000.0
        self.twin.engine.arbiter.leases[NODE_CAP].value[5] = self.node_cap_w
        self.twin.engine.arbiter.leases[NODE_CAP].owner[5] = 1
        # Each policy gives a reason for two thirds of the GPUs, and means a cut by four fifths of these
        self.reason = np.full((2, GPUS), -1)
        for policy, name in enumerate(("power_guard", "power_cap")):
            of = rng.integers(-len(REASONS) // 2, len(REASONS), GPUS)
            proposals = []
            for at, reason in enumerate(REASONS):
                index = np.flatnonzero(of == at).astype(np.int32)
                hi_w = np.where(rng.random(len(index)) < 0.8, 700.0, MOST_W)
                self.reason[policy, index[hi_w < MOST_W]] = at
                low_w = np.full(len(index), 200.0)
                proposals.append(Proposal(CAP, index, low_w, hi_w, hi_w, reason))
                node = np.array([at], np.int32)  # a cap of a node is none of a GPU
                proposals.append(Proposal(NODE_CAP, node, low_w[:1], low_w[:1], low_w[:1], "a node"))
            self.twin.engine.in_force[name] = proposals
        self.state: PowerState = state_of(self.twin)

    @property
    def capped(self) -> np.ndarray:
        """By their own caps, or by that of the last node."""
        return (np.nan_to_num(self.cap_w, nan=MOST_W) < MOST_W - 1.0) | (np.arange(GPUS) >= GPUS - 4)

    def key(self, gpu: int) -> tuple[Any, ...]:
        owner = int(self.owner[gpu])
        reason = int(self.reason[owner, gpu]) if owner >= 0 else -1
        return gpu // 8, owner, reason, JOBS[gpu // 4]

    def need_w(self, place: str) -> float:
        """All that capped GPUs below a place lack, and what their racks lose on the way to them."""
        share = np.repeat(WHOLE[place], 8)
        missing_w = np.where(self.capped & np.isfinite(self.cap_w), MOST_W - self.cap_w, 0.0)
        return float(share @ np.nan_to_num(missing_w)) * (1.0 + float(self.twin.site.design.node_loss_pu[0]))

    def expected_group(self, key: tuple[Any, ...], mine: list[int]) -> dict[str, Any]:
        rack, owner, reason, (job, of_class, priority) = key
        policy = ("power_guard", "power_cap", "")[owner]
        place = named(rack, reason)
        limit_w = {
            "lab/h/b": 80e3,
            "lab/h/a1": 50e3,
            "lab/h/a": 90e3,
            "lab/h/r3": 25_334.0,
            "site": 30e3,
            "lab/h/cdu1": 66_121.74,
        }
        sources = {"site": f"load target {TARGET}", **dict.fromkeys(FEEDERS, "site file, budget_w")}
        loads_w = self.state.loads
        at = PLACES.index(place) if place else -1
        feeder = place in FEEDERS
        back_w, power_w = self.read_back_w[mine], self.power_w[mine]
        heard = bool(np.isfinite(power_w).any())
        states = {LEASE_STATES[s] for s in self.lease_state[mine] if s}
        return {
            "rack": f"lab/h/r{rack + 1}", "gpus": len(mine), "first": self.twin.site.name("gpu", mine[0]),
            "cap_low_w": self.cap_w[mine].min(), "cap_high_w": self.cap_w[mine].max(), "most_w": MOST_W,
            "floor_w": 200.0, "read_back_w": np.nanmax(back_w) if heard else None,
            "power_w": pytest.approx(np.nanmean(power_w)) if heard else None,
            "states": ", ".join(sorted(states)), "since_ns": self.begun_ns[mine].min(),
            "expires_ns": self.expires_ns[mine].min(), "policy": policy,
            "reason": REASONS[reason] if reason >= 0 else "", "releasing": reason < 0, "class": of_class,
            "class_words": module.CLASS_WORDS[of_class], "job": job, "priority": priority, "place": place,
            "place_kind": loads_w.kind[at] if place else None,
            "place_limit_w": pytest.approx(limit_w[place]) if place else None,
            "place_load_w": loads_w.now_w[at] if place else None,
            "place_lost_w": loads_w.lost_w[at] if feeder else None,
        } | ({"place_limit_from": sources[place]} if place in sources else {})  # fmt: skip

    def expected_lift(self, key: tuple[Any, ...]) -> str:
        policy, place = ("power_guard", "power_cap", "")[key[1]], named(key[0], key[2])
        then = LIFTS.get(policy, "it ends when its owner no longer proposes it")
        if key[2] < 0:
            return f"it is being lifted: {then}"
        if place is None:
            return then
        where = "for the site" if place == "site" else f"at {place}"
        words = f"{self.need_w(place) / 1e3:.1f} kW more {where}, or as much less other load, would lift"
        words += " all caps below"
        if place == "site":
            words = (f"it ends when load target {TARGET} ends or is withdrawn "
                     f"(`racktwin power withdraw {TARGET}`); {words}")  # fmt: skip
        return f"{words}; {then}"


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_gpus_that_are_capped_alike(seed: int) -> None:
    caps = Caps(seed)
    for name, kind, inside in (
        ("lab", "site", range(24)), ("r2", "rack", range(8, 16)), ("lab/h/r3/node0", "node", range(16, 20)),
        ("chat", "job", range(8, 12)), ("a1", "feeder", range(16)),
    ):  # fmt: skip
        found = held_caps(caps.state, name)
        assert (found.kind, found.gpus, found.capped_gpus) == (kind, len(inside), caps.capped[inside].sum())
        members: dict[tuple[Any, ...], list[int]] = {}
        for gpu in inside:
            if caps.cap_w[gpu] < MOST_W - 1.0:
                members.setdefault(caps.key(gpu), []).append(gpu)
        assert found.groups_total == len(found.groups) == len(members)
        order = [(-group["gpus"], group["rack"]) for group in found.groups]
        assert order == sorted(order)
        by_first = {group["first"]: group for group in found.groups}
        for key, mine in members.items():
            group, expected = by_first[caps.twin.site.name("gpu", mine[0])], caps.expected_group(key, mine)
            assert {k: group[k] for k in expected} == expected, key
            assert group["lift"] == caps.expected_lift(key)
        assert found.notes == []
        assert [one["node"] for one in found.nodes] == (["lab/h/r3/node1"] if 20 in inside else [])
        for one in found.nodes:
            assert (one["cap_w"], one["most_w"], one["policy"]) == (5000.0, 6667.0, "power_cap")


@pytest.mark.parametrize("seed", range(3))
def test_what_policies_only_advise_is_told_of_gpus_that_are_not_capped(seed: int) -> None:
    caps = Caps(seed)
    guard, cap = caps.state.request.policies
    policies = (replace(guard, authority="act"), cap)
    state = replace(caps.state, request=replace(caps.state.request, policies=policies))
    for name, inside in (("lab", range(24)), ("r1", range(8))):
        expected = []
        for at, reason in enumerate(REASONS):
            mine = [g for g in inside if caps.reason[1, g] == at and not caps.capped[g]]
            expected += [(reason, len(mine))] if mine else []
        found = held_caps(state, name).advised
        assert [(one["reason"], one["gpus"]) for one in found] == expected
        assert {(one["policy"], one["authority"]) for one in found} == {("power_cap", "advise")}
        assert {(one["cap_low_w"], one["cap_high_w"]) for one in found} == {(700.0, 700.0)}
    assert held_caps(caps.state, "lab").advised[-1]["policy"] == "power_cap"
    assert held_caps(caps.state, "lab").advised[0]["policy"] == "power_guard"


def test_answers_on_many_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = Caps(0)
    whole = held_caps(caps.state, "lab")
    monkeypatch.setattr(module, "MAX_GROUPS", 2)
    found = held_caps(caps.state, "lab")
    assert (len(found.groups), found.groups_total) == (2, whole.groups_total)
    assert len(found.advised) == 2
    assert len(job_caps(caps.state)) == 2
    assert found.first is not None
    assert found.first["place"] == "lab/h/r3", "of the first four places: the site is the last one"


def test_the_place_that_binds_first_is_above_what_is_asked_for() -> None:
    caps = Caps(0)
    for name in ("r1", "r3"):
        first = held_caps(caps.state, name).first
        assert first is not None
        above = [place for place in PLACES if WHOLE[place][int(name[1]) - 1]]
        used = {}
        for place in above:
            at = PLACES.index(place)
            limit_w = min(caps.state.now.limit_w[at], 30e3 if place == "site" else np.inf)
            used[place] = caps.state.loads.lost_w[at] / limit_w
        assert first["place"] == max(used, key=lambda place: used[place])


def test_nothing_is_capped_where_no_cap_runs() -> None:
    caps = Caps(0)
    state = replace(caps.state, request=replace(caps.state.request, leases=lambda control: None, policies=()))
    found = held_caps(state, "r1")
    assert (found.capped_gpus, found.groups, found.groups_total, found.nodes) == (0, [], 0, [])
    assert found.notes == [module.ADD_IT]
    bare = held_caps(caps.state, "cdu1")
    assert bare.kind == "cdu"


@pytest.mark.parametrize("seed", range(3))
def test_each_running_job_has_a_row_and_who_is_cut_last_comes_first(seed: int) -> None:
    caps = Caps(seed)
    rows = {row["job"]: row for row in job_caps(caps.state)}
    assert list(rows) == ["chat", "late", "wide"]
    for job, row in rows.items():
        mine = np.array([gpu for gpu in range(GPUS) if JOBS[gpu // 4][0] == job])
        held = mine[caps.capped[mine]]
        _, of_class, priority = next(one for one in JOBS if one[0] == job)
        assert (row["class"], row["priority"], row["gpus"]) == (of_class, priority, len(mine))
        assert row["capped"] == len(held)
        own_w = caps.cap_w[mine][caps.cap_w[mine] < MOST_W - 1.0]
        assert row["cap_w"] == (own_w.min() if len(own_w) else None)
        assert row["power_w"] == pytest.approx(np.nanmean(caps.power_w[mine]), rel=1e-6)


def test_jobs_of_one_class_are_ordered_by_priority_and_name_and_a_silent_or_free_one_has_no_figure() -> None:
    of_nodes = [("b", "usual", 1), ("a", "usual", 1), ("c", "usual", 3), ("d", "high", 6), ("e", "usual", 2),
                ("f", "high", 7)]  # fmt: skip
    power_w = np.repeat([100.0, np.nan, 300.0, 400.0, 500.0, 600.0], 4)
    twin = small_twin({"gpu.power_w": power_w}, *jobs_of(of_nodes))
    twin.engine.arbiter.leases[CAP].value[[1, 2, 9]] = 500.0, 400.0, 1199.5
    rows = job_caps(state_of(twin))
    assert [row["job"] for row in rows] == ["f", "d", "c", "e", "a", "b"]
    assert {row["job"]: row["power_w"] for row in rows} == {
        "b": 100.0, "a": None, "c": 300.0, "d": 400.0, "e": 500.0, "f": 600.0}  # fmt: skip
    assert {row["job"]: (row["capped"], row["cap_w"]) for row in rows if row["job"] in "bc"} == {
        "b": (2, 400.0), "c": (0, None)}  # fmt: skip


def test_a_lease_at_the_maximum_is_no_cap_beside_that_of_the_node() -> None:
    """GPU 0 has a lease at its maximum, GPU 1 a cap, GPUs 2 and 3 none; their node is capped as a whole."""
    twin = small_twin({"gpu.power_w": 500.0}, *jobs_of(JOBS))
    leases = twin.engine.arbiter.leases
    leases[CAP].value[[0, 1]], leases[CAP].owner[[0, 1]] = [MOST_W, 700.0], [0, 1]
    leases[NODE_CAP].value[0], leases[NODE_CAP].owner[0] = 5000.0, 0
    state = state_of(twin)
    found = held_caps(state, "lab/h/r1/node0")
    assert [(g["gpus"], g["cap_low_w"], g["cap_high_w"], g["policy"]) for g in found.groups] == [
        (1, 700.0, 700.0, "power_cap")
    ]
    assert (found.capped_gpus, [one["cap_w"] for one in found.nodes]) == (4, [5000.0])
    (wide,) = (row for row in job_caps(state) if row["job"] == "wide")
    assert (wide["capped"], wide["cap_w"]) == (4, 700.0)
    leases[CAP].value[1] = np.nan
    (wide,) = (row for row in job_caps(state) if row["job"] == "wide")
    assert (wide["capped"], wide["cap_w"]) == (4, None)
    assert capped_counts(state).by_policy == {"power_guard": 4}


def test_a_target_without_an_end_is_withdrawn_by_people() -> None:
    target = LoadTargetSet(id="t", author="grid", target=TARGET, limit_w=30e3, kind="flex", end_ns=0)
    twin = small_twin({"gpu.power_w": 500.0}, target)
    twin.engine.arbiter.leases[CAP].value[:] = 500.0
    twin.engine.arbiter.leases[CAP].owner[:] = 1
    every, watts = np.arange(GPUS, dtype=np.int32), np.full(GPUS, 500.0)
    twin.engine.in_force["power_cap"] = [Proposal(CAP, every, watts, watts, watts, REASONS[3])]
    (group,) = held_caps(state_of(twin), "lab/h/r1/node0").groups
    assert re.match(f"it ends when load target {TARGET} is withdrawn \\(`racktwin", group["lift"])
