"""Lanes of BMCs, and what one of them may do to the others: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from connectors.bmc import GPU_CAP, NODE_CAP, Bmc, BmcSink, BmcSource, Fleet, Key
from connectors.bmc.limits import BmcReading, Cap
from tests.support.bmc_harness import Driven
from tests.support.builders import site_of, two_racks
from twin.catalogue import ActuationError, ConnectorError


class Stub:
    """A BMC of one GPU, whose look is whatever a test makes it."""

    def __init__(self, number: int, look: Callable[[], Awaitable[BmcReading]] | None = None) -> None:
        self.name, self.node, self.keys = f"bmc{number}", number, (Key(GPU_CAP, number),)
        self.has = Cap(self.keys[0], 1200.0, 200.0, 1200.0)
        self.looks = self.puts = 0
        self._look = look

    async def read(self) -> BmcReading:
        self.looks += 1
        return (
            BmcReading((self.has,), (("gpu", self.node, 300.0),))
            if self._look is None
            else await self._look()
        )

    async def cap(self, key: Key) -> Cap:
        return self.has

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        self.puts += 1
        self.has = cap._replace(limit_w=value_w, free=False)

    async def close(self) -> None:
        """Nothing is open."""


def test_bmcs_that_failed_last_take_no_place_of_others() -> None:
    async def run() -> None:
        stubs = [Stub(i) for i in range(8)]
        fleet = Fleet(stubs, at_once=2)
        for stub in stubs[:6]:
            with pytest.raises(ConnectorError):
                async with fleet.lane(stub):
                    raise ConnectorError("no answer")
        end = asyncio.Event()

        async def hang(bmc: Bmc) -> None:
            async with fleet.lane(bmc):
                await end.wait()

        hanging = [asyncio.create_task(hang(stub)) for stub in stubs[:6]]
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            async with fleet.lane(stubs[6]), fleet.lane(stubs[7]):
                assert sum(not t.done() for t in hanging) == 6
        end.set()
        await asyncio.gather(*hanging)
        assert fleet.failing == set()  # all answered

    asyncio.run(run())


def test_a_refusal_is_an_answer() -> None:
    async def run() -> None:
        fleet = Fleet([stub := Stub(0)], 1)
        fleet.failing.add("bmc0")
        with pytest.raises(ActuationError):
            async with fleet.lane(stub):
                raise ActuationError("out of range")
        assert fleet.failing == set()

    asyncio.run(run())


def test_nobody_reads_while_somebody_sets() -> None:
    async def run() -> None:
        fleet, inside = Fleet([stub := Stub(0)], 8), [0, 0]

        async def one() -> None:
            async with fleet.lane(stub):
                inside[0] += 1
                inside[1] = max(inside)
                await asyncio.sleep(0)
                inside[0] -= 1

        await asyncio.gather(*(one() for _ in range(9)))
        assert inside == [0, 1]

    asyncio.run(run())


def test_what_one_says_ends_no_look_at_others() -> None:
    async def bad() -> BmcReading:
        raise ZeroDivisionError("a fault of ours")

    async def away() -> BmcReading:
        raise ConnectorError("no answer")

    async def run() -> None:
        stubs = [Stub(0, bad), Stub(1, away), Stub(2)]
        fleet = Fleet(stubs, 4)
        mine = Driven(site_of(two_racks()), fleet)
        task = asyncio.create_task(BmcSource("bmc", fleet, 0.01).run(mine))
        await mine.until(lambda: stubs[2].looks > 40)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert set(mine.spoiled) == {
            ("", "bmc0: ZeroDivisionError: a fault of ours"),
            ("", "no answer"),
        }
        assert stubs[1].looks <= 12  # more and more seldom
        assert mine.read("power_w")[0] == (2, 300.0)

    asyncio.run(run())


def test_thousands_of_caps_are_set_and_answered_once_each() -> None:
    """Orders, answers and tasks are as many as there are caps, and none is left over."""
    site = site_of(two_racks(racks="r[1-28]"))

    async def run() -> None:
        stubs = [Stub(i) for i in range(2000)]
        fleet = Fleet(stubs, 64)
        async with Driven(site, fleet) as mine:
            await mine.command(dict.fromkeys(range(2000), 700.0), deadline_s=300.0)
            await mine.until(lambda: len(mine.answers()) == 2000)
            assert {a.state for a in mine.answers()} == {"done"}
            assert all(stub.puts == 1 for stub in stubs)
            sink: Any = mine.sink
            await mine.until(lambda: not sink._tasks and not sink._due)
            assert len(sink._orders) == 2000

    asyncio.run(run())


def test_commands_for_nodes_without_a_bmc_are_not_ours_to_answer() -> None:
    site = site_of(two_racks())

    async def run() -> None:
        async with Driven(site, Fleet([Stub(0)], 1)) as mine:
            assert mine.sink.controls == (GPU_CAP,)
            await mine.command({0: 700.0, 1: 700.0, 2: 700.0})
            await mine.command({0: 4000.0}, NODE_CAP)
            assert await mine.answer(0) == ("done", "")
            assert len(mine.answers()) == 1
        assert isinstance(mine.sink, BmcSink)

    asyncio.run(run())


@pytest.mark.parametrize("free", [False, True])
def test_a_cap_that_an_agent_takes_over_is_given_back(free: bool) -> None:
    """An agent that comes back could not raise its GPU above the cap that its BMC keeps."""

    async def run() -> None:
        stub, theirs = Stub(0), set[Key]()
        stub.has = stub.has._replace(limit_w=1200.0 if free else 900.0, free=free)
        fleet = Fleet([stub], 1)
        left = lambda key: "the node's agent carries it out" if key in theirs else ""  # noqa: E731
        async with Driven(site_of(two_racks()), fleet, left=left) as mine:
            batch = await mine.command({0: 300.0})
            assert await mine.answer(0) == ("done", "")
            assert stub.has.limit_w == 300.0
            theirs.add(Key(GPU_CAP, 0))
            await mine.again(batch)
            await mine.until(lambda: stub.has.limit_w > 300.0)
            await mine.again(batch)
            assert stub.has.limit_w == (1200.0 if free else 900.0), "as it was found"
            assert len(mine.answers()) == 1, "the agent answers"
            theirs.clear()
            await mine.again(batch)
            await mine.until(lambda: stub.has.limit_w == 300.0)

    asyncio.run(run())


@pytest.mark.parametrize("moved_w", [300.0, 350.0])
def test_after_a_restart_an_agent_gets_back_what_was_found_and_not_our_own_cap(moved_w: float) -> None:
    async def run() -> None:
        stub, theirs = Stub(0), set[Key]()
        stub.has = stub.has._replace(limit_w=300.0)  # of the daemon before
        left = lambda key: "the node's agent carries it out" if key in theirs else ""  # noqa: E731
        async with Driven(site_of(two_racks()), Fleet([stub], 1), left=left, found=lambda key: 900.0) as mine:
            batch = await mine.command({0: moved_w})
            assert await mine.answer(0) == ("done", "")
            theirs.add(Key(GPU_CAP, 0))
            await mine.again(batch)
            await mine.until(lambda: stub.has.limit_w == 900.0)

    asyncio.run(run())
