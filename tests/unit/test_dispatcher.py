"""Commands on their way: gated, never late, refused in the engine's own terms, renewals repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import CommandBatch, Item
from twin.daemon import dispatcher
from twin.daemon.dispatcher import Dispatcher
from twin.site import Site
from twin.telemetry import CommandAcked

SITE = site_of(two_racks())
CAP = "gpu.power_cap_w"


class Sink:
    name, controls, enforces_safe = "agents", (CAP,), True

    def __init__(self) -> None:
        self.got: list[tuple[CommandBatch, ...]] = []
        self.error: Exception | None = None
        self.hangs = False

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.got.append(commands)


class World:
    def __init__(self) -> None:
        self.sink, self.leads, self.now_ns = Sink(), True, 1000 * NS
        self.staged: list[Item] = []
        self.flow = Dispatcher(self.sink, self._stage, lambda: self.leads, lambda: self.now_ns)

    def _stage(self, items: Any, now_ns: int) -> None:
        self.staged += items

    def batch(self, *index: int, **more: Any) -> CommandBatch:
        n = len(index)
        plain: dict[str, Any] = {
            "control": CAP, "policy": "p", "epoch": 7, "index": np.array(index, np.int32),
            "generation": np.arange(n, dtype=np.int32), "command": 10 + np.arange(n),
            "value": np.full(n, 800.0),
            "reason": "r", "issued_ns": self.now_ns, "expires_ns": self.now_ns + 30 * NS,
            "deadline_ns": self.now_ns + 10 * NS,
        }  # fmt: skip
        return CommandBatch(**(plain | more))

    def run(self, scene: Callable[[], Any], seconds: float = 5.0) -> None:
        async def main() -> None:
            task = asyncio.create_task(self.flow.run())
            try:
                async with asyncio.timeout(seconds):
                    await scene()
            finally:
                task.cancel()
                await asyncio.wait([task])

        asyncio.run(main())


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


@pytest.fixture
def world() -> World:
    return World()


def offer(world: World, *batches: CommandBatch, site: Site = SITE) -> None:
    world.flow.offer(site, batches)


def test_commands_go_to_the_sink_of_their_control_and_to_no_other(world: World) -> None:
    async def scene() -> None:
        offer(world, world.batch(0, 1), world.batch(0, control="rack.liquid_isolation"))
        await until(lambda: world.sink.got)
        assert [b.control for b in world.sink.got[0]] == [CAP]
        assert world.flow.counts["sent"] == 2

    world.run(scene)


def test_nothing_leaves_while_another_leads_or_when_a_lease_is_over(world: World) -> None:
    async def scene() -> None:
        world.leads = False
        offer(world, world.batch(0, 1))
        await until(lambda: world.flow.counts["not_leading"] == 2)
        world.leads = True
        offer(world, world.batch(0, expires_ns=world.now_ns), world.batch(5))
        await until(lambda: world.sink.got)
        assert world.sink.got[0][0].index.tolist() == [5]
        assert world.flow.counts["expired"] == 1
        offer(world, world.batch(3, expires_ns=0, final=True))
        await until(lambda: len(world.sink.got) == 2)

    world.run(scene)


@pytest.mark.parametrize("error", [ActuationError("no"), ConnectorError("down"), RuntimeError("a bug")])
def test_a_failure_is_a_refusal_of_each_command(world: World, error: Exception) -> None:
    async def scene() -> None:
        world.sink.error = error
        offer(world, world.batch(0, 5))
        await until(lambda: world.staged)
        acks = [a for a in world.staged if isinstance(a, CommandAcked)]
        assert [(a.name, a.generation, a.command, a.state) for a in acks] == [
            ("lab/h/r1/node0/gpu0", 0, "7-10", "failed"),
            ("lab/h/r1/node1/gpu1", 1, "7-11", "failed"),
        ]

    world.run(scene)


def test_a_sink_that_hangs_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "APPLY_S", 0.05)

    async def scene() -> None:
        world.sink.hangs = True
        offer(world, world.batch(0))
        await until(lambda: world.staged)
        assert "no answer within" in world.staged[0].detail  # type: ignore[union-attr]
        world.sink.hangs = False
        offer(world, world.batch(1))
        await until(lambda: world.sink.got)

    world.run(scene)


def test_a_renewal_that_failed_is_repeated_until_its_lease_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "AGAIN_S", 0.02)

    async def scene() -> None:
        world.sink.error = ConnectorError("down")
        offer(world, world.batch(0, renewal=True))
        await until(lambda: world.flow.counts["failed"] >= 3)
        assert not world.staged, "a renewal that failed is no refusal"
        world.sink.error = None
        await until(lambda: world.sink.got)
        assert world.sink.got[0][0].renewal
        world.sink.error = ConnectorError("down")
        offer(world, world.batch(1, renewal=True))
        await until(lambda: world.flow.counts["failed"] >= 5)
        world.now_ns += 31 * NS
        await until(lambda: world.flow.counts["expired"] == 1)

    world.run(scene)


def test_a_sink_that_lags_loses_the_oldest(world: World) -> None:
    async def scene() -> None:
        for n in range(dispatcher.QUEUE + 3):
            offer(world, world.batch(n))
        assert world.flow.counts["dropped"] == 3
        await until(lambda: len(world.sink.got) == dispatcher.QUEUE)
        assert world.sink.got[0][0].index.tolist() == [3]

    world.run(scene)


def test_what_waits_is_forgotten_when_we_lead_no_longer(world: World) -> None:
    async def scene() -> None:
        offer(world, world.batch(0, 1, 2))
        world.flow.clear()
        await asyncio.sleep(0.02)
        assert not world.sink.got
        assert world.flow.counts["not_leading"] == 3

    world.run(scene)


def test_a_renewal_is_repeated_under_steady_traffic_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "AGAIN_S", 0.05)

    async def scene() -> None:
        world.sink.error = ConnectorError("down")
        offer(world, world.batch(0, renewal=True))
        await until(lambda: world.flow.counts["failed"])
        assert "down" in world.flow.fault
        for n in range(40):
            offer(world, world.batch(1))
            await asyncio.sleep(0.005)
            if n == 5:
                world.sink.error = None
        assert any(b.renewal for got in world.sink.got for b in got)
        assert world.flow.fault == ""

    world.run(scene)


def test_a_failure_because_another_leads_is_no_fault(world: World) -> None:
    class Deposed(Sink):
        async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
            world.leads = False
            raise ActuationError("another daemon leads now")

    async def scene() -> None:
        world.flow.sink = Deposed()
        offer(world, world.batch(0))
        await until(lambda: world.flow.counts["not_leading"])
        assert world.flow.fault == ""
        assert not world.staged

    world.run(scene)


def test_a_renewal_that_waits_never_undoes_what_is_newer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rack was isolated, the link lost, and by now people have opened it."""
    monkeypatch.setattr(dispatcher, "AGAIN_S", 3600.0)

    async def scene() -> None:
        world.sink.error = ActuationError("the broker is away")
        offer(world, world.batch(0, 1, 2, renewal=True))
        await until(lambda: world.flow.counts["failed"] == 3)
        world.sink.error = None
        newer = world.batch(1, command=np.array([900]), value=np.array([0.0]))
        offer(world, newer)
        await until(lambda: len(world.sink.got) == 2)
        assert world.sink.got[0] == (newer,)
        late = world.sink.got[1][0]
        assert (late.index.tolist(), late.command.tolist()) == ([0, 2], [10, 12])
        assert late.generation.tolist() == [0, 2]
        world.sink.error = ActuationError("away again")
        offer(world, world.batch(1, renewal=True))
        await until(lambda: world.flow.counts["failed"] == 4)
        offer(world, world.batch(1, 3, command=np.array([950, 951])))
        await until(lambda: world.flow.counts["failed"] == 6)
        assert len(world.staged) == 2, "both are refused"
        world.sink.error = None
        world.flow._again_s = 0.0
        offer(world, world.batch(5))
        await until(lambda: len(world.sink.got) == 4)
        late = [b for got in world.sink.got[2:] for b in got if b.renewal]
        assert [b.command.tolist() for b in late] == [[950]], "the newest, in the place of what had waited"

    world.run(scene)


def test_renewals_that_fail_more_often_than_that_hold_nobody_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "AGAIN_S", 0.1)

    async def scene() -> None:
        world.sink.error = ActuationError("one of them is dead")
        offer(world, world.batch(0, renewal=True))
        for n in range(1, 60):
            offer(world, world.batch(n, renewal=True))
            await asyncio.sleep(0.01)
        assert world.flow.counts["failed"] > 60, "0 was tried again meanwhile"

    world.run(scene, 30.0)


def test_what_fails_for_long_is_said_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher, "AGAIN_S", 0.01)

    def lines() -> int:
        return sum(r.name == "twin.daemon.dispatcher" for r in caplog.records)

    async def scene() -> None:
        world.sink.error = ActuationError("no such node")
        offer(world, world.batch(0, renewal=True))
        await until(lambda: world.flow.counts["failed"] >= 20)
        assert lines() == 1
        world.sink.error = ActuationError("not allowed")
        await until(lambda: lines() == 2)
        world.sink.error = None
        await until(lambda: world.sink.got)
        world.sink.error = ActuationError("not allowed")
        offer(world, world.batch(0, renewal=True))
        await until(lambda: lines() == 3)
        monkeypatch.setattr(dispatcher, "SAY_S", 0.05)
        await until(lambda: lines() >= 5)

    world.run(scene, 30.0)
