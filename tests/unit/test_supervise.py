"""Supervision: what fails comes back, waits longer each time, and never reaches anybody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from twin.api import Part
from twin.catalogue import ConnectorError
from twin.daemon import supervision
from twin.daemon.supervision import Supervisor


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_S", 0.002)
    monkeypatch.setattr(supervision, "LONGEST_S", 0.02)
    monkeypatch.setattr(supervision, "ALARM_S", 0.05)
    monkeypatch.setattr(supervision, "BACK_S", 0.05)
    monkeypatch.setattr(supervision, "STOP_S", 0.2)


class World:
    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.told: list[tuple[str, str | None]] = []
        self.supervisor = Supervisor(self.parts, lambda part, error: self.told.append((part.name, error)))


async def until(holds: Any, within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.002)


ENDS = (ConnectorError("the link is down"), RuntimeError("a bug"), asyncio.CancelledError(), None)


@pytest.mark.parametrize("error", ENDS)
def test_what_fails_or_ends_is_started_again_and_alarmed(error: BaseException | None) -> None:
    async def scene() -> None:
        world, runs, well = World(), 0, asyncio.Event()

        async def part() -> None:
            nonlocal runs
            runs += 1
            if not well.is_set():
                if error is not None:
                    raise error
                return
            await asyncio.Event().wait()

        async def steady() -> None:
            await asyncio.Event().wait()

        world.supervisor.start("other", "service", steady)
        world.supervisor.start("mqtt", "source", part)
        await until(lambda: world.told)
        assert world.told[0][0] == "mqtt"
        assert world.told[0][1]
        assert runs >= 3
        assert world.parts["other"].restarts == 0
        well.set()
        await until(lambda: world.told[-1][1] is None)
        assert world.parts["mqtt"].state == "running"
        assert world.parts["mqtt"].error == ""
        await world.supervisor.stop_all()
        assert not world.parts

    asyncio.run(scene())


def test_a_part_that_was_well_and_fails_for_a_moment_is_no_alarm() -> None:
    async def scene() -> None:
        world, runs = World(), 0

        async def part() -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                await asyncio.sleep(0.15)  # longer than an alarm takes
                raise ConnectorError("the connection was lost")
            await asyncio.Event().wait()

        world.supervisor.start("mqtt", "source", part)
        await until(lambda: runs == 2 and world.parts["mqtt"].state == "running")
        assert world.told == []
        await world.supervisor.stop_all()

    asyncio.run(scene())


def test_the_alarm_of_a_part_that_is_away_can_be_due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "ALARM_S", 600.0)
    monkeypatch.setattr(supervision, "LONGEST_S", 60.0)
    monkeypatch.setattr(supervision, "FIRST_S", 60.0)

    async def scene() -> None:
        world = World()

        async def part() -> None:
            raise ConnectorError("the link is down")

        async def steady() -> None:
            await asyncio.Event().wait()

        world.supervisor.start("mqtt", "source", part)
        world.supervisor.start("api", "service", steady)
        await until(lambda: world.parts["mqtt"].state == "waiting")
        assert world.told == []
        for name in ("mqtt", "api", "nobody", "mqtt"):
            world.supervisor.alarm_now(name)
        assert world.told == [("mqtt", "the link is down")]
        await world.supervisor.stop_all()
        assert world.told[1:] == [("mqtt", None)]

    asyncio.run(scene())


def test_a_part_that_hangs_is_not_back_before_its_time() -> None:
    """An exporter that does not answer keeps a run up for as long as its time limit."""

    async def scene() -> None:
        world, runs = World(), 0

        async def part() -> None:
            nonlocal runs
            runs += 1
            await asyncio.sleep(0.1)  # longer than what usually says that it is back
            raise ConnectorError("no answer")

        world.supervisor.start("scrape", "source", part, back_s=0.4)
        await until(lambda: runs >= 5)
        assert {error for _, error in world.told} == {"no answer"}
        await world.supervisor.stop_all()

    asyncio.run(scene())


def test_a_part_that_will_not_end_is_left_behind() -> None:
    async def scene() -> None:
        world, leave, runs = World(), asyncio.Event(), 0

        async def stubborn() -> None:
            nonlocal runs
            runs += 1
            while not leave.is_set():
                try:
                    await leave.wait()
                except asyncio.CancelledError:
                    continue

        world.supervisor.start("stubborn", "sink", stubborn)
        await asyncio.sleep(0.01)
        async with asyncio.timeout(2):
            await world.supervisor.stop("stubborn")
        assert "stubborn" not in world.parts
        leave.set()
        await asyncio.sleep(0.05)
        assert runs == 1, "it does not come back as nobody's"

    asyncio.run(scene())


def test_to_stop_nothing_stops_nothing() -> None:
    async def scene() -> None:
        world = World()

        async def part() -> None:
            await asyncio.Event().wait()

        world.supervisor.start("api", "service", part)
        await world.supervisor.stop()
        await asyncio.sleep(0.01)
        assert world.parts["api"].state == "running"
        await world.supervisor.stop_all()

    asyncio.run(scene())


def test_names_are_unique_and_free_again() -> None:
    async def scene() -> None:
        world = World()

        async def part() -> None:
            await asyncio.Event().wait()

        world.supervisor.start("a", "service", part)
        with pytest.raises(ValueError, match="runs already"):
            world.supervisor.start("a", "service", part)
        await world.supervisor.stop("a", "unknown")
        world.supervisor.start("a", "service", part)
        await world.supervisor.stop_all()

    asyncio.run(scene())
