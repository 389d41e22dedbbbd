"""The simulated world of storms: its time, executors, deaths, and what a loss of power leaves of files."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.storm.disk import SimulatedDisk, simulated_disks
from tests.support.storm.hosts import LIFE, Host, Killed, Life, simulated_clocks
from tests.support.storm.loop import SimulatedLoop
from twin.catalogue import NS
from twin.run import atomic_write


def world() -> tuple[SimulatedLoop, Life]:
    loop = SimulatedLoop(random.Random(1))
    return loop, Life(Host("a", loop))


def begin(loop: SimulatedLoop, life: Life, work: Any) -> asyncio.Task[Any]:
    context = contextvars.copy_context()
    context.run(LIFE.set, life)
    return loop.create_task(work, context=context)


def test_an_hour_passes_at_once_and_each_host_has_its_own_clock() -> None:
    loop, life = world()
    life.host.step_ns = 7 * NS

    async def wait() -> tuple[float, float]:
        begun = time.monotonic(), time.time()
        await asyncio.sleep(3600.0)
        return time.monotonic() - begun[0], time.time() - begun[1]

    with simulated_clocks():
        assert loop.run_until_complete(begin(loop, life, wait())) == pytest.approx((3600.0, 3600.0), abs=0.01)
        assert abs(life.host.wall_ns() - Host("b", loop).wall_ns() - 7 * NS) < NS
    loop.close()


def test_an_executor_does_one_thing_after_the_other() -> None:
    loop, life = world()
    done: list[int] = []

    async def work() -> None:
        await asyncio.gather(*(loop.run_in_executor("disk", done.append, k) for k in range(20)))

    loop.run_until_complete(begin(loop, life, work()))
    assert done == list(range(20))
    loop.close()


def test_what_was_killed_does_nothing_more_and_what_is_frozen_waits() -> None:
    loop, life = world()
    steps: list[float] = []

    async def count() -> None:
        while True:
            await asyncio.sleep(1.0)
            steps.append(loop.time())

    begin(loop, life, count())
    loop.call_at(3.5, loop.freeze, life, 10.0)
    loop.call_at(20.5, life.kill)
    loop.run_until_complete(_until(loop, 60.0))
    gap_s = max(b - a for a, b in itertools.pairwise(steps))
    assert gap_s >= 10.0
    assert steps[-1] < 21.0
    loop.bury(life)
    loop.close()


async def _until(loop: SimulatedLoop, when: float) -> None:
    await asyncio.sleep(when - loop.time())


def test_a_loss_of_power_takes_what_was_not_forced_to_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    disk, (loop, life) = SimulatedDisk(folder, random.Random(2)), world()
    token = LIFE.set(life)
    try:
        with simulated_disks({"a": disk}):
            atomic_write(folder / "kept", "first")
            with (folder / "log").open("ab", buffering=0) as file:
                file.write(b"one ")
                os.fsync(file.fileno())
                file.write(b"two")
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)
            for _ in range(20):
                atomic_write(folder / "kept", "later", sync=False)
            disk.lose_power()
            disk.kill_at = disk.calls + 1
            with pytest.raises(Killed):
                (folder / "log").write_bytes(b"x")
    finally:
        LIFE.reset(token)
        loop.close()
    assert (folder / "log").read_bytes()[:4] == b"one "
    assert (folder / "kept").read_text() in ("first", "later", "late", "lat", "la", "l", "")
