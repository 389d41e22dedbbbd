"""Jobs of a real Slurm: munged, slurmctld and slurmd started here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from connectors.slurm import SlurmSettings, SlurmSource
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet, until
from tests.support.slurm_cluster import Cluster, Find
from twin.catalogue import ConnectorError
from twin.site import Site
from twin.telemetry import JobEnded, JobStarted, Reading

pytestmark = pytest.mark.slow


class Kept(RecordingInlet):
    """An inlet, by jobs of Slurm."""

    def started(self, job: str) -> list[JobStarted]:
        return [e for e in self.items if isinstance(e, JobStarted) and e.job == f"slurm:lab:{job}"]

    def ended(self, job: str) -> list[JobEnded]:
        return [e for e in self.items if isinstance(e, JobEnded) and e.job == f"slurm:lab:{job}"]


@pytest.fixture
def slurm(tmp_path: Path, server: Find) -> Iterator[Cluster]:
    with Cluster(tmp_path, server, nodes=2) as cluster:
        yield cluster


def source(slurm: Cluster, known: dict[str, tuple[str, ...]] | None = None) -> SlurmSource:
    site: Site = site_of(two_racks())
    names = {"gpu[1-2]": "r1/node[0-1]"}
    settings = SlurmSettings(period_s=0.2, conf=str(slurm.conf), node_names=names)
    return SlurmSource(site, settings, lambda: known or {})


def watched(source: SlurmSource, story: Callable[[Kept, asyncio.Task[None]], object]) -> Kept:
    """Return the inlet of a source that runs while a story goes on."""

    async def run() -> Kept:
        inlet = Kept()
        task = asyncio.create_task(source.run(inlet))
        try:
            await story(inlet, task)  # type: ignore[misc]
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, ConnectorError):
                await task
        return inlet

    return asyncio.run(run())


def test_jobs_come_and_go(slurm: Cluster) -> None:
    early = slurm.submit("--nodes=2", "--time=1:00:00", "--exclusive")
    slurm.until(lambda: "RUNNING" in slurm.run("squeue", "--noheader", "--format=%T").stdout, "a job runs")

    async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
        await until(lambda: inlet.started(early) and inlet.ended("77"), task=task)
        (event,) = inlet.started(early)
        assert event.nodes == ("lab/h/r1/node0", "lab/h/r1/node1")
        assert (event.tenant, event.kind, event.time_limit_s) == ("root", "unknown", 3600.0)
        waiting = slurm.submit("--nodes=1")
        slurm.run("scancel", early)
        await until(lambda: inlet.ended(early) and inlet.started(waiting), task=task)
        assert inlet.ended(early)[0].reason == "cancelled"
        slurm.run("scontrol", "suspend", waiting)
        slurm.run("scontrol", "resume", waiting)
        brief = slurm.submit("--nodes=1", "--array=1-2", script="sleep 2")
        elements = {str(int(brief) + k) for k in range(2)}
        # of an array, each element is a job with a number of its own
        await until(lambda: sum(isinstance(e, JobStarted) for e in inlet.items) >= 4, task=task)
        assert not inlet.ended(waiting)
        assert all(len(inlet.started(e)) == 1 for e in elements)
        before = inlet.started(waiting)[0].id
        slurm.run("scontrol", "requeue", waiting)
        slurm.run("scontrol", "update", f"JobId={waiting}", "StartTime=now")
        await until(lambda: inlet.ended(waiting), task=task)
        assert inlet.ended(waiting)[0].id == f"{before}:end"

    inlet = watched(source(slurm, known={"slurm:lab:77": (), "slurm:lab:" + early: ()}), story)
    ids = [e.id for e in inlet.items if isinstance(e, JobStarted)]
    assert len(ids) == len(set(ids))
    assert not inlet.faults + inlet.skipped


def test_a_controller_that_is_gone_ends_no_job(slurm: Cluster) -> None:
    job = slurm.submit("--nodes=1")
    mine = source(slurm)

    async def gone(inlet: Kept, task: asyncio.Task[None]) -> None:
        await until(lambda: inlet.started(job), task=task)
        slurm.stop("slurmctld")
        with pytest.raises(ConnectorError, match=r"squeue|scontrol"):
            await asyncio.wait_for(task, 60)
        assert not inlet.ended(job)

    watched(mine, gone)
    slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")

    async def back(inlet: Kept, task: asyncio.Task[None]) -> None:
        slurm.run("scancel", job)
        await until(lambda: inlet.ended(job), task=task)
        assert not inlet.started(job)

    watched(mine, back)


def test_a_fresh_source_repeats_the_ids(slurm: Cluster) -> None:
    job = slurm.submit("--nodes=1")
    ids = set()

    async def seen(inlet: Kept, task: asyncio.Task[None]) -> None:
        await until(lambda: inlet.started(job), task=task)
        ids.add(inlet.started(job)[0].id)

    for _ in range(2):
        watched(source(slurm), seen)
    assert len(ids) == 1


def test_service_levels_are_read_back(slurm: Cluster) -> None:
    async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
        def level(node: int, signal: str = "service_level_state") -> float | None:
            told = [e.value for e in inlet.items
                    if isinstance(e, Reading) and (e.entity, e.signal) == (node, signal)]  # fmt: skip
            return told[-1] if told else None

        await until(lambda: level(0) == 0.0 and level(1) == 0.0, task=task)
        slurm.run("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=test")
        await until(lambda: level(1) == 3.0, task=task)
        assert level(0) == 0.0
        assert (level(0, "service_owner_state"), level(1, "service_owner_state")) == (0.0, 2.0)
        slurm.run("scontrol", "update", "NodeName=gpu2", "State=RESUME")
        await until(lambda: level(1) == 0.0, task=task)

    inlet = watched(source(slurm), story)
    assert {e.signal for e in inlet.items if isinstance(e, Reading)} == {
        "service_level_state", "service_owner_state"
    }  # fmt: skip
