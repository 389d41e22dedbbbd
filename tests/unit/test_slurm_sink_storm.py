"""The sink over a Slurm that is only thought of: outages, lost answers, people, duplicates, other terms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from connectors.orders import SinkContext
from connectors.slurm import CONTROL, SlurmSink
from connectors.slurm.hostlist import expand_hosts
from connectors.slurm.nodes import SlurmNode, parse_nodes
from connectors.slurm.sink import RESUMED_S, SINGLY
from tests.support.builders import site_of, two_racks
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import CommandBatch, Item
from twin.telemetry import CommandAcked

SITE = site_of(two_racks())
THEIRS = "fan broke"


class Slurm:
    """As the source has it: `nodes` and `ask`. `away`: no answer; `deaf`: does as told, says nothing."""

    nodes_every_s = 1.0
    watch: Any = None

    def __init__(self, n: int) -> None:
        self.ledger = self
        self.drains: dict[str, str] = {f"gpu{i}": "" for i in range(n)}
        self.busy: set[str] = set()
        self.away = self.deaf = False
        self.refuses: dict[str, str] = {}
        self.whole = False  # whether a call with such a node does nothing at all
        self.calls: list[tuple[str, ...]] = []
        self.boot_s = 1

    def entity_of(self, host: str) -> int | None:
        return int(host[3:])

    async def nodes(self) -> dict[str, SlurmNode]:
        if self.away:
            raise ConnectorError("sinfo: Unable to contact slurm controller")
        lines = [f"{h}|{('draining' if h in self.busy else 'drained') if r else 'idle'}||||{r or 'none'}|"
                 for h, r in self.drains.items()]  # fmt: skip
        return parse_nodes("\n".join(lines))

    async def ask(self, *words: str) -> str:
        if self.away:
            raise ConnectorError("scontrol: Unable to contact slurm controller")
        if words[:3] == ("scontrol", "show", "config"):
            return f"BOOT_TIME = {self.boot_s}\n"
        self.calls.append(words)
        if words[1] != "update":
            return ""
        told = dict(word.partition("=")[::2] for word in words[2:])
        hosts = expand_hosts(told["NodeName"])
        for host in hosts:
            if host not in self.refuses and not (self.whole and self.refuses.keys() & set(hosts)):
                self.drains[host] = told.get("Reason", "") if told["State"] == "DRAIN" else ""
        if self.deaf:
            raise ConnectorError("scontrol: no answer within 10 s")
        if bad := [self.refuses[h] for h in hosts if h in self.refuses]:
            raise ConnectorError(f"scontrol: ends with 1: {bad[0]}")
        return ""


class World:
    def __init__(self, n: int = 4) -> None:
        self.slurm, self.staged, self.leads, self.number = Slurm(n), list[Item](), True, 0
        self.now_ns = 10**18
        self.sink = self.another()

    def another(self) -> SlurmSink:
        """A daemon that knows nothing of before."""
        slurm: Any = self.slurm
        stage = lambda items, _: self.staged.extend(items)  # noqa: E731
        return SlurmSink(SITE, slurm, SinkContext(stage, lambda: self.leads, lambda: self.now_ns))

    def batch(self, levels: Sequence[float], epoch: int = 1, **more: Any) -> CommandBatch:
        k = len(levels)
        self.number += k
        plain: dict[str, Any] = {
            "control": CONTROL, "policy": "p", "epoch": epoch, "index": np.arange(k, dtype=np.int32),
            "generation": np.zeros(k, np.int32), "command": self.number + np.arange(k),
            "value": np.array(levels, float), "reason": "why", "issued_ns": 0, "expires_ns": 2**62,
            "deadline_ns": 2**62,
        }  # fmt: skip
        return CommandBatch(**(plain | more))

    def apply(self, *batches: CommandBatch) -> None:
        asyncio.run(self.sink.apply(batches))

    def listed(self, after_s: float = 0.0) -> None:
        """The source lists the nodes, so many seconds later."""
        self.now_ns += round(after_s * NS)
        self.sink.observe(asyncio.run(self.slurm.nodes()), time.monotonic())

    def acks(self) -> dict[str, str]:
        return {e.name: e.state for e in self.staged if isinstance(e, CommandAcked)}


Step = tuple[str, int, list[int]]
KINDS = ["command", "renew", "again", "drain", "resume", "away", "back", "deaf", "hears", "restart", "term"]
LEVELS = st.lists(st.integers(0, 4), min_size=4, max_size=4)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), LEVELS), max_size=25)


@given(STEPS)
def test_a_storm_leaves_what_is_wanted_and_never_ends_what_others_did(steps: list[Step]) -> None:
    world, epoch = World(), 1
    slurm, last = world.slurm, world.batch([0, 0, 0, 0])
    theirs: set[str] = set()
    for what, node, levels in steps:
        host, before = f"gpu{node}", len(slurm.calls)
        if what == "command":
            last = world.batch(levels, epoch)
        if what == "term":
            epoch += 1
            last = world.batch(last.value.tolist(), epoch)
        if what == "restart":
            world.sink = world.another()
        if what in ("command", "renew", "again", "term"):
            batch = world.batch(last.value.tolist(), epoch, command=last.command, renewal=what == "renew")
            with suppress(ConnectorError, ActuationError):
                world.apply(batch)
        if what == "drain":
            slurm.drains[host] = THEIRS
            theirs.add(host)
        if what == "resume":
            slurm.drains[host] = ""
            theirs.discard(host)
        if what in ("away", "back"):
            slurm.away = what == "away"
        if what in ("deaf", "hears"):
            slurm.deaf = what == "deaf"
        assert {h for h, reason in slurm.drains.items() if reason == THEIRS} == theirs
        told = [h for call in slurm.calls[before:] for h in expand_hosts(call[2].partition("=")[2])]
        assert not set(told) & theirs
        if what != "restart":
            assert len(told) == len(set(told))  # nothing is asked for twice
    slurm.away = slurm.deaf = False
    world.listed()
    world.now_ns += round(RESUMED_S * NS)  # whoever resumed a node has had it long enough
    final = world.batch(last.value.tolist(), epoch + 1)
    world.apply(final)
    calls = len(slurm.calls)
    for host, level in zip(slurm.drains, last.value.tolist(), strict=True):
        if host not in theirs:
            assert slurm.drains[host][:11] == (f"racktwin:{level:.0f}:" if level else "")
    world.apply(final)
    world.apply(world.batch(last.value.tolist(), epoch + 1, command=final.command, renewal=True))
    world.sink = world.another()
    world.apply(world.batch(last.value.tolist(), epoch + 1, command=final.command, renewal=True))
    assert len(slurm.calls) == calls


@pytest.mark.parametrize("whole, calls", [(False, 1 + 1), (True, 1 + 4)])
def test_a_node_that_slurm_refuses_costs_the_others_nothing(whole: bool, calls: int) -> None:
    world = World()
    world.slurm.whole = whole
    world.slurm.refuses = {"gpu1": "slurm_update error: Invalid node state specified"}
    with pytest.raises(ActuationError, match="Invalid node state specified"):
        world.apply(world.batch([2, 2, 2, 2]))
    assert [r != "" for r in world.slurm.drains.values()] == [True, False, True, True]
    assert list(world.acks().values()) == ["done", "failed", "done", "done"]
    assert len(world.slurm.calls) == calls


def test_what_slurm_does_and_calls_a_failure_is_no_failure() -> None:
    world = World()
    world.apply(world.batch([2, 2, 2, 2]))
    done = world.slurm.ask

    async def complains(*words: str) -> str:
        await done(*words)
        raise ConnectorError("scontrol: ends with 1: slurm_update error: Invalid node state specified")

    world.slurm.ask = complains  # type: ignore[method-assign]
    world.apply(world.batch([0, 0, 0, 0]))
    assert set(world.acks().values()) == {"done"}
    assert len(world.slurm.calls) == 2


def test_what_fails_for_many_is_not_asked_for_one_by_one_without_end() -> None:
    world = World(SITE.sizes["node"])
    world.slurm.refuses = dict.fromkeys(world.slurm.drains, "odd")
    with pytest.raises(ActuationError, match="odd"):
        world.apply(world.batch([2] * SITE.sizes["node"]))
    assert len(world.slurm.calls) <= 1 + SINGLY


def test_a_refusal_of_rights_is_asked_once_and_explained() -> None:
    world = World()
    world.slurm.refuses = dict.fromkeys(world.slurm.drains, "slurm_update error: Invalid user id")
    with pytest.raises(ActuationError, match=r"Invalid user id: .* run racktwin as SlurmUser"):
        world.apply(world.batch([2, 2, 2, 2]))
    assert len(world.slurm.calls) == 1


def test_an_answer_that_is_lost_is_found_by_reading() -> None:
    world = World()
    world.slurm.deaf = True
    world.apply(world.batch([3, 3, 0, 0]))
    assert len(world.slurm.calls) == 1
    assert world.acks()[SITE.name("node", 0)] == "done"


def test_a_slurm_that_began_anew_is_told_again_and_a_hand_is_not_overruled() -> None:
    world = World()
    first = world.batch([2, 2, 2, 2])
    world.apply(first)
    renewal = world.batch([2, 2, 2, 2], command=first.command, renewal=True)
    world.slurm.drains["gpu0"] = ""
    world.sink._read_s = -1e9  # the listing is old by now
    world.apply(renewal)
    assert world.slurm.drains["gpu0"] == ""
    assert world.acks()[SITE.name("node", 0)] == "failed"
    world.slurm.boot_s = 10**9 + 60
    world.apply(renewal)
    assert world.slurm.drains["gpu0"].startswith("racktwin:2:")


def test_a_new_level_does_not_overrule_a_hand_that_no_listing_has_told_of() -> None:
    world = World()
    world.apply(world.batch([4, 4, 4, 4]))
    world.slurm.drains["gpu0"] = ""
    calls = len(world.slurm.calls)
    late = world.batch([3, 3, 3, 3])
    world.apply(late)  # a repair is done: the policy brings them down a level
    assert [reason[:11] for reason in world.slurm.drains.values()] == ["", *["racktwin:3:"] * 3]
    assert len(world.slurm.calls) == calls + 1
    ack = next(e for e in reversed(world.staged) if isinstance(e, CommandAcked) and e.name.endswith("node0"))
    assert (ack.state, ack.detail) == ("failed", "resumed by others: Slurm has it idle")
    world.apply(world.batch([3, 3, 3, 3], epoch=2))  # a new term of the same daemon
    world.now_ns += round((RESUMED_S + 1) * NS)
    world.apply(world.batch([3, 3, 3, 3], command=late.command))  # sent again: it stays refused
    assert world.slurm.drains["gpu0"] == ""


@pytest.mark.parametrize(
    "after_s, policy, drained",
    [
        (0.0, "p", False),
        (RESUMED_S - 1, "p", False),
        (RESUMED_S + 1, "p", True),
        (0.0, "operator", True),
        (0.0, "leak_guard", True),
    ],
)
def test_a_new_command_waits_after_a_listing_that_shows_a_hand(
    after_s: float, policy: str, drained: bool
) -> None:
    world = World()
    world.apply(world.batch([2, 2, 2, 2]))
    world.slurm.drains["gpu0"] = ""
    world.listed(60.0)
    world.listed(after_s)
    world.apply(world.batch([3, 3, 3, 3], policy=policy))
    assert (world.slurm.drains["gpu0"] != "") == drained
    assert world.acks()[SITE.name("node", 0)] == ("done" if drained else "failed")


def test_what_we_resumed_or_others_drained_over_ours_is_told_apart() -> None:
    world = World()
    world.apply(world.batch([2, 2, 2, 2]))
    world.slurm.deaf = True
    world.apply(world.batch([0, 0, 2, 2]))  # by our own word
    world.slurm.deaf = False
    world.apply(world.batch([2, 2, 2, 2]))
    assert set(world.slurm.drains.values()) == {"racktwin:2:why"}
    world.slurm.drains["gpu0"] = THEIRS
    world.listed(30.0)
    world.slurm.drains["gpu0"] = ""
    world.listed(30.0)
    world.apply(world.batch([3, 3, 3, 3]))
    assert world.slurm.drains["gpu0"] == ""


def test_a_slurm_that_lost_its_drains_is_nobodys_hand() -> None:
    world = World()
    world.apply(world.batch([2, 2, 2, 2]))
    world.slurm.drains = dict.fromkeys(world.slurm.drains, "")
    world.slurm.boot_s = 10**9 + 60
    world.listed(90.0)
    world.apply(world.batch([3, 3, 3, 3]))
    assert set(world.slurm.drains.values()) == {"racktwin:3:why"}


def test_who_led_not_takes_no_resume_for_a_hand() -> None:
    world = World()
    world.apply(world.batch([2, 2, 2, 2]))
    world.leads = False
    world.listed()
    world.slurm.drains["gpu0"] = ""  # by the word of the other daemon
    world.listed(30.0)
    world.leads = True
    world.apply(world.batch([2, 2, 2, 2], epoch=3))
    assert world.slurm.drains["gpu0"] == "racktwin:2:why"


def test_an_older_term_or_command_has_no_say() -> None:
    world = World()
    before, now = world.batch([0, 0, 0, 0], epoch=3), world.batch([2, 2, 2, 2], epoch=3)
    world.apply(now)
    world.apply(before, world.batch([0, 0, 0, 0], epoch=2))
    assert set(world.slurm.drains.values()) == {"racktwin:2:why"}
    assert (world.sink.counts["old"], len(world.slurm.calls)) == (8, 1)


def test_listings_follow_what_goes_on() -> None:
    world = World()
    world.slurm.busy = {"gpu0"}
    world.apply(world.batch([3, 3, 0, 0]))
    assert list(world.acks().values()) == ["in_progress", "done", "done", "done"]
    nodes = asyncio.run(world.slurm.nodes())
    assert world.sink.observe(nodes, 1e18) == []  # nothing new
    world.slurm.busy.clear()
    nodes = asyncio.run(world.slurm.nodes())
    assert world.sink.observe(nodes, -1.0) == ()  # asked for before the command
    (ack,) = world.sink.observe(nodes, 1e18)
    assert isinstance(ack, CommandAcked)
    assert (ack.state, ack.name) == ("done", SITE.name("node", 0))
    assert world.sink.observe(nodes, 1e18) == []
