"""Every registered policy keeps its contract; one that does not is suspended, alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import REGISTRY
from policies.operator import Operator
from tests.support.contract_plugins import BAD, CAP, FULL_W, START_NS, Capper, Seer, World, engine_of, site
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS, TABLES, digest, find_control, pack, unpack
from twin.config import spec_of
from twin.contracts import Memory, Policy, Proposal, read_only
from twin.engine import Engine, encode
from twin.engine.snapshot import decode
from twin.site import SiteSpec
from twin.telemetry import events as ev

POLICIES = pytest.mark.parametrize("name", sorted(REGISTRY))
ASK = ev.OperatorRequest(
    id="q", author="ada", control=CAP, names=("contract/h1/r0/node0/gpu1",), lo=0.0, hi=700.0, want=700.0
)
JOB = ev.JobStarted(
    id="j", job="train", nodes=("contract/h1/r0/node0",), kind="training", checkpoint_interval_s=86_400.0
)


def seen(name: str, temp_c: float = 85.0, racks: int = 3) -> tuple[Engine, Policy, World]:
    """An engine with that policy alone, after twelve seconds of hot GPUs, a job, a request and a forecast."""
    policy: Policy = REGISTRY[name]()
    engine = engine_of(site(racks), [policy], [Seer()])
    world = World(engine)
    for k in range(12):
        world.step(temp_c, (ASK, JOB) if k == 0 and racks else ())
    return engine, policy, world


def ask(engine: Engine, policy: Policy) -> tuple[list[Proposal], Memory]:
    memory = {k: read_only(v) for k, v in engine.memory[policy.name].items()}
    return policy.propose(engine.view(1.0), memory)


def plain(proposals: list[Proposal]) -> list[list[Any]]:
    return [[p.control, p.index, p.lo, p.hi, p.want, p.reason] for p in proposals]


@POLICIES
def test_it_says_what_it_is(name: str) -> None:
    policy: Policy = REGISTRY[name]()
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert policy.controls
    assert all(find_control(key) is not None for key in policy.controls)
    assert policy.period_s > 0
    assert isinstance(policy.urgent, bool)
    assert isinstance(policy.rank, int)
    if policy.memory is not None:
        assert set(policy.memory.tables) <= set(TABLES)
        memory = policy.memory.fresh(dict.fromkeys(TABLES, 2))
        assert {k: v.dtype for k, v in unpack(pack(memory)).items()} == {
            k: v.dtype for k, v in memory.items()
        }


def test_ranks_are_distinct() -> None:
    """Or the order of two policies would hang on their names."""
    assert len({p.rank for p in REGISTRY.values()}) == len(REGISTRY)


@POLICIES
def test_the_same_view_gives_the_same_proposals_and_stays_as_it_was(name: str) -> None:
    engine, policy, _ = seen(name)
    before, checksum = digest(engine.memory), engine.checksum()
    first, memory = ask(engine, policy)
    second, again = ask(engine, policy)
    assert digest(plain(first)) == digest(plain(second))
    assert digest(memory) == digest(again)
    assert digest(engine.memory) == before
    assert engine.checksum() == checksum
    assert first, f"{name} proposed nothing: see World.step in tests/support/contract_plugins.py"


@POLICIES
def test_proposals_are_well_formed(name: str) -> None:
    engine, policy, _ = seen(name)
    for p in ask(engine, policy)[0]:
        control = find_control(p.control)
        assert control is not None
        assert p.control in policy.controls
        assert p.reason
        assert (np.diff(p.index) > 0).all()
        assert p.index.min() >= 0
        assert p.index.max() < engine.site.sizes[control.table]
        assert len(p.lo) == len(p.hi) == len(p.want) == len(p.index)
        assert (p.lo <= p.hi).all()
        assert np.isfinite(p.lo).all()


@POLICIES
def test_knowing_nothing_it_does_nothing(name: str) -> None:
    policy: Policy = REGISTRY[name]()
    engine = engine_of(site(), [policy], [])
    world = World(engine)
    for _ in range(5):
        decision = world.step(silent=True)
        assert decision.commands == ()
        assert decision.advice == ()
    assert engine.suspended == {}


@POLICIES
def test_an_empty_site_is_no_trouble(name: str) -> None:
    engine, _, _ = seen(name, racks=0)
    assert engine.suspended == {}


@pytest.mark.long
def test_silence_after_a_while_is_no_trouble() -> None:
    engine = engine_of(site(), [cls() for cls in REGISTRY.values()], [Seer()])
    world = World(engine)
    for k in range(8):
        world.step(85.0, (ASK, JOB) if k == 0 else ())
    assert sum(bool(some) for some in engine.in_force.values()) >= 4
    for _ in range(200):
        world.step(silent=True)
    assert engine.suspended == {}


@POLICIES
def test_memory_survives_a_snapshot(name: str) -> None:
    engine, policy, world = seen(name)
    other = engine_of(site(3), [REGISTRY[name]()], [Seer()])
    other.restore(decode(encode(engine.dump())))
    assert other.checksum() == engine.checksum()
    for column, kept in other.memory[name].items():
        assert kept.dtype == engine.memory[name][column].dtype
    assert digest(plain(ask(other, policy)[0])) == digest(plain(ask(engine, policy)[0]))
    world.step(90.0)
    other.tick(world.frame)
    assert other.checksum() == engine.checksum()


@POLICIES
def test_the_site_may_change_under_it(name: str) -> None:
    """A rack is added in front: the same GPUs are proposed for, under their new numbers."""
    engine, policy, world = seen(name)
    old = {
        engine.site.name(p.control.partition(".")[0], int(i)) for p in ask(engine, policy)[0] for i in p.index
    }
    tree = dict(engine.site.file.halls and _tree())
    later: SiteSpec = spec_of(tree, None, "later")
    world.inbox.events.append(ev.SiteChanged(id="s", site_hash=later.digest(), spec=later.packed()))
    world.step(silent=True)
    assert engine.suspended == {}
    assert engine.site.sizes["rack"] == 4
    new = {
        engine.site.name(p.control.partition(".")[0], int(i)) for p in ask(engine, policy)[0] for i in p.index
    }
    assert new == old


def _tree() -> dict[str, Any]:
    names = ["q9", "r0", "r1", "r2"]
    return {
        "site": "contract",
        "max_jobs": 4,
        "halls": [
            {
                "name": "h1",
                "racks": [{"name": n, "profile": "gb200-nvl72", "nodes": 2} for n in names],
                "cdus": [{"name": "cdu1", "serves": names[1:]}],
                "feeders": [
                    {"name": n, "side": n.upper(), "budget_w": FULL_W, "serves": names[1:3]}
                    for n in ("a", "b")
                ],
            }
        ],
    }


@POLICIES
def test_a_replaced_device_is_a_stranger_to_it(name: str) -> None:
    engine, policy, world = seen(name)
    gone = "contract/h1/r0/node0/gpu0"
    world.step(85.0, (ev.EntityReplaced(id="e", table="gpu", name=gone, serial="S9"),))
    assert engine.suspended == {}
    if policy.memory is not None and "gpu" in policy.memory.tables:
        world.step(silent=True)
        assert engine.state.tables["gpu"].generation[0] == 1


@pytest.mark.parametrize("how", BAD)
def test_a_bad_policy_is_suspended_alone(how: str) -> None:
    """Its intervals hold until their leases end; the others go on; people are told once."""
    bad_ns = START_NS + 5 * NS
    engine = engine_of(site(), [Capper(how, bad_ns), Operator()], [])
    world = World(engine)
    told: list[str] = []
    for k in range(90):
        decision = world.step(events=(ASK,) if k == 0 else ())
        told += [r["id"] for r in bodies_of(decision) if r["kind"] == "finding" and "suspended" in r["id"]]
        lease = engine.arbiter.leases[CAP]
        assert lease.value[1] == 700.0, "the operator's request goes on"
        if k == 3:
            assert engine.suspended == {}
        if 4 <= k < 30:
            assert engine.suspended == {"capper": bad_ns}
            assert (lease.value[[0, 2, 3]] == 800.0).all()
    assert told == ["suspended/capper"]
    assert np.isnan(engine.arbiter.leases[CAP].value[[0, 2, 3]]).all()
    assert (engine.state.tables["gpu"].value[1] >= 0).all(), "the view could be written to"


def test_a_suspended_policy_stays_suspended_over_a_restart() -> None:
    engine = engine_of(site(), [Capper("raises", START_NS + 3 * NS), Operator()], [])
    world = World(engine)
    for _ in range(6):
        world.step()
    other = engine_of(site(), [Capper(), Operator()], [])
    other.restore(decode(encode(engine.dump())))
    assert other.suspended == engine.suspended != {}
