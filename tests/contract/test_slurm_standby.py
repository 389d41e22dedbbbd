"""Standby of nodes in a real Slurm with power saving: asleep, awake, and what is left alone."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from connectors.orders import SinkContext
from connectors.slurm import SlurmSettings, SlurmSource, SlurmStandby
from connectors.slurm.nodes import ASLEEP, READY, WAKING
from connectors.slurm.standby import CONTROL, OFF
from tests.contract.test_slurm_sink import World as Levels, running, said
from tests.support.patience import PATIENCE_S
from tests.support.slurm_cluster import Cluster, Find
from twin.contracts import CommandBatch

pytestmark = pytest.mark.slow
SAVING = """\
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTimeout=3
ResumeTimeout=60
SuspendTime=10000000
"""


class World(Levels):
    """A source, a sink that commands standby, and what they tell."""

    def __init__(self, slurm: Cluster) -> None:
        super().__init__(slurm)
        settings = SlurmSettings(period_s=0.3, conf=str(slurm.conf), node_names={"gpu[1-2]": "r1/node[0-1]"})
        self.source = SlurmSource(self.site, settings)
        self.standing = SlurmStandby(self.site, self.source, SinkContext(self.stage, lambda: self.leads))

    def batch(self, level: float, *nodes: int, **more: Any) -> CommandBatch:
        return super().batch(level, *nodes, **({"control": CONTROL} | more))

    def apply(self, *batches: CommandBatch) -> None:
        asyncio.run(self.standing.apply(batches))

    def work_until(self, met: Callable[[], object]) -> None:
        """Let the sink go on with what is not done until this holds."""

        async def run() -> None:
            task = asyncio.create_task(self.standing.run())
            end = time.monotonic() + PATIENCE_S
            while not met():
                assert not task.done()
                assert time.monotonic() < end, self.staged[-3:]
                await asyncio.sleep(0.1)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        asyncio.run(run())

    def state(self, node: int) -> float | None:
        """As Slurm has it now."""
        return asyncio.run(self.source.nodes())[f"gpu{node + 1}"].standby

    def told(self, node: int = 0) -> float | None:
        return self.read("standby_state", node)


@pytest.fixture
def slurm(server: Find, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Other users can look into its folder."""
    more = getattr(request, "param", SAVING)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        os.chmod(folder, 0o755)
        with Cluster(Path(folder), server, nodes=2, more=more) as cluster:
            cluster.until(lambda: said(cluster, "gpu1")[0] == said(cluster, "gpu2")[0] == "idle", "both idle")
            yield cluster


def boot(slurm: Cluster, host: str) -> None:
    """Start its slurmd, as a node that starts does."""
    with suppress(KeyError):
        slurm.stop(host)
    slurm.start("slurmd", "-D", "-c", "-b", "-N", host, "-f", str(slurm.conf), tag=host)


def test_a_node_sleeps_and_is_woken_also_while_it_still_powers_down(slurm: Cluster) -> None:
    world = World(slurm)
    world.apply(world.batch(ASLEEP, 0))
    assert world.acks()[-1] == ("done", "")
    assert (world.told(0), world.told(1)) == (ASLEEP, None)  # told at once, before it falls silent
    world.apply(world.batch(READY, 0))  # Slurm would ignore this
    assert world.acks()[-1][0] == "in_progress"
    world.work_until(lambda: world.told(0) == WAKING)
    boot(slurm, "gpu1")
    world.work_until(lambda: world.acks()[-1] == ("done", ""))
    assert world.told(0) == READY
    world.follow(lambda: world.told(1) == READY)
    calls = world.standing.counts["calls"]
    world.apply(world.batch(READY, 0, 1))
    assert world.standing.counts["calls"] == calls


def test_a_node_with_a_job_or_a_drain_is_left_alone(slurm: Cluster) -> None:
    world = World(slurm)
    job = running(slurm)
    world.apply(world.batch(ASLEEP, 0, 1))
    assert [world.acks(n)[-1] for n in (0, 1)] == [("failed", "a job is on it")] * 2
    assert world.standing.counts["calls"] == 0
    slurm.run("scancel", job)
    slurm.until(lambda: said(slurm, "gpu1")[0] == said(slurm, "gpu2")[0] == "idle", "both idle")
    slurm.run("scontrol", "update", "NodeName=gpu1", "State=DRAIN", "Reason=fans")
    world.apply(world.batch(ASLEEP, 0, 1))
    assert (world.acks(0)[-1], world.acks(1)[-1][0]) == (("failed", "it is drained: fans"), "done")
    assert (world.state(0), world.state(1)) == (READY, ASLEEP)


@pytest.mark.parametrize("slurm", [""], indirect=True)
def test_without_power_saving_nothing_is_read_back_and_the_refusal_says_what_to_do(slurm: Cluster) -> None:
    world = World(slurm)
    world.apply(world.batch(ASLEEP, 0))
    state, words = world.acks()[-1]
    assert state == "failed"
    assert OFF[:40] in words
    world.staged.clear()
    world.follow(lambda: world.level(0) == 0)
    assert world.told(0) is None
