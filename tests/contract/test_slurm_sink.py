"""Service levels in a real Slurm: munged, slurmctld and slurmd started here, and read back."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from connectors.orders import SinkContext
from connectors.slurm import CONTROL, SlurmSettings, SlurmSink, SlurmSource, sink
from connectors.slurm.sink import LAG_S, RESUMED_S
from tests.support.builders import site_of, two_racks
from tests.support.patience import PATIENCE_S
from tests.support.slurm_cluster import Cluster, Find
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import CommandBatch, Item
from twin.telemetry import CommandAcked, Reading

pytestmark = pytest.mark.slow
PAUSE_S = LAG_S + 1.1  # more than clocks may differ by


@pytest.fixture
def slurm(server: Find) -> Iterator[Cluster]:
    """Other users can look into its folder."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        os.chmod(folder, 0o755)
        with Cluster(Path(folder), server, nodes=2) as cluster:
            cluster.until(lambda: said(cluster, "gpu1")[0] == said(cluster, "gpu2")[0] == "idle", "both idle")
            yield cluster


def said(slurm: Cluster, host: str) -> tuple[str, str]:
    """(state, reason) of a node, as Slurm itself has it."""
    text = slurm.run("scontrol", "show", "node", host, "--oneliner").stdout
    state = text.partition("State=")[2].split()[0].lower().replace("+not_responding", "")
    return state, text.partition("Reason=")[2].partition(" [")[0]


class World:
    """A source, a sink, and what they tell."""

    def __init__(
        self, slurm: Cluster, racks: str = "r[1-2]", node_names: dict[str, str] | None = None, **more: Any
    ) -> None:
        self.slurm, self.site, self.leads = slurm, site_of(two_racks(racks=racks)), True
        names = node_names or {"gpu[1-2]": "r1/node[0-1]"}
        settings = SlurmSettings(period_s=0.3, conf=str(slurm.conf), node_names=names)
        self.source = SlurmSource(self.site, settings)
        self.staged: list[Item] = []
        self.sink = SlurmSink(self.site, self.source, SinkContext(self.stage, lambda: self.leads), **more)
        self.number = 0

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        self.staged += items

    def reject(self, where: str, why: str, remedy: str = "") -> None: ...
    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None: ...
    def fail(self, why: str, remedy: str = "") -> None: ...

    def drop(self, where: str, why: str, count: int = 1) -> None: ...

    def batch(self, level: float, *nodes: int, **more: Any) -> CommandBatch:
        k = len(nodes)
        self.number += 100
        plain: dict[str, Any] = {
            "control": CONTROL, "policy": "p", "epoch": 7, "index": np.array(nodes, np.int32),
            "generation": np.zeros(k, np.int32), "command": self.number + np.arange(k),
            "value": np.full(k, float(level)), "reason": "a test's", "issued_ns": 0, "expires_ns": 2**62,
            "deadline_ns": 2**62,
        }  # fmt: skip
        return CommandBatch(**(plain | more))

    def apply(self, *batches: CommandBatch) -> None:
        asyncio.run(self.sink.apply(batches))

    def acks(self, node: int = 0) -> list[tuple[str, str]]:
        name = self.site.name("node", node)
        return [(e.state, e.detail) for e in self.staged if isinstance(e, CommandAcked) and e.name == name]

    def level(self, node: int) -> float | None:
        return self.read("service_level_state", node)

    def read(self, signal: str, node: int) -> float | None:
        told = [e.value for e in self.staged
                if isinstance(e, Reading) and (e.signal, e.entity) == (signal, node)]  # fmt: skip
        return told[-1] if told else None

    def follow(self, met: Callable[[], object]) -> None:
        """Let the source list until this holds."""

        async def run() -> None:
            task = asyncio.create_task(self.source.run(self))
            end = time.monotonic() + PATIENCE_S
            while not met():
                if task.done():
                    task.result()
                assert time.monotonic() < end, self.staged[-3:]
                await asyncio.sleep(0.05)
            task.cancel()
            with suppress(asyncio.CancelledError, ConnectorError):
                await task

        asyncio.run(run())


@pytest.fixture
def world(slurm: Cluster) -> World:
    return World(slurm)


def running(slurm: Cluster, *arguments: str) -> str:
    """A job that runs on both nodes."""
    job = slurm.submit("--nodes=2", *arguments)
    slurm.until(lambda: state_of(slurm, job) == "RUNNING", "the job runs")
    return job


def state_of(slurm: Cluster, job: str) -> str:
    return slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip()


def test_the_life_of_a_drain(slurm: Cluster, world: World) -> None:
    job = running(slurm)
    for level, name in ((1, "cordoned"), (2, "draining")):
        world.apply(world.batch(level, 0))
        assert said(slurm, "gpu1") == ("mixed+drain", f"racktwin:{level}:a test's".replace("'", " ")), name
        assert world.acks()[-1] == ("done", "")
        world.follow(lambda level=level: world.level(0) == level)  # type: ignore[misc]
        assert world.level(1) == 0
        assert [world.read("service_owner_state", node) for node in (0, 1)] == [1, 0]
    world.apply(world.batch(3, 0))
    assert world.acks()[-1] == ("in_progress", "jobs still run on it")
    assert state_of(slurm, job) == "RUNNING"
    world.staged.clear()
    world.follow(lambda: world.level(0) is not None)
    assert (world.level(0), world.acks()) == (2, [])  # not empty yet; nothing new to say
    slurm.run("scancel", job)
    world.follow(lambda: world.acks() == [("done", "")] and world.level(0) == 3)
    world.apply(world.batch(4, 0))
    assert said(slurm, "gpu1") == ("idle+drain", "racktwin:4:a test s")
    world.apply(world.batch(0, 0))
    assert said(slurm, "gpu1") == ("idle", "")
    assert world.acks()[-1][0] == "done"  # it may be pinged before it is idle without doubt
    world.follow(lambda: world.level(0) == 0)


def test_jobs_are_requeued_where_that_is_configured(slurm: Cluster) -> None:
    world = World(slurm, requeue=True)
    job = running(slurm)
    world.apply(world.batch(2, 0))
    assert state_of(slurm, job) == "RUNNING"
    world.apply(world.batch(3, 0))
    slurm.until(lambda: state_of(slurm, job) == "PENDING", "the job is requeued")
    assert world.sink.counts["requeued"] == 1
    world.follow(lambda: world.acks()[-1] == ("done", "") and world.level(0) == 3)


def test_of_an_array_only_the_tasks_on_the_node_are_requeued(slurm: Cluster) -> None:
    world = World(slurm, requeue=True)
    job = slurm.submit("--nodes=1", "--exclusive", "--array=1-2")

    def tasks() -> dict[str, str]:
        listed = slurm.run("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%A %N %T").stdout
        found = (line.split() for line in listed.splitlines())
        return {words[0]: words[-1] + "".join(words[1:-1]) for words in found}

    slurm.until(lambda: sorted(tasks().values()) == ["RUNNINGgpu1", "RUNNINGgpu2"], "one runs on each node")
    # One of them bears the number of the array as a whole: that number would requeue them all.
    node = 0 if tasks()[job].endswith("gpu1") else 1
    world.apply(world.batch(3, node))
    assert world.sink.counts["requeued"] == 1
    slurm.until(lambda: len([t for t in tasks().values() if not t.startswith("RUNNING")]) >= 1, "one waits")
    assert f"RUNNINGgpu{2 - node}" in tasks().values()


def test_a_job_that_cannot_be_requeued_is_told_and_runs_on(slurm: Cluster) -> None:
    world = World(slurm, requeue=True)
    job = running(slurm, "--no-requeue")
    world.apply(world.batch(3, 0, 1))
    state, detail = world.acks(1)[-1]
    assert state == "in_progress"
    assert "is not requeued: " in detail
    assert "Requested operation is presently disabled" in detail
    calls = world.sink.counts["calls"]
    world.apply(world.batch(3, 0, 1, renewal=True, command=100 + np.arange(2)))
    assert (state_of(slurm, job), world.sink.counts["calls"]) == ("RUNNING", calls)


def test_what_others_drained_is_theirs(slurm: Cluster, world: World) -> None:
    slurm.run("scontrol", "update", "NodeName=gpu1", "State=DRAIN", "Reason=fan broke")
    for level in (0, 1, 2, 3, 4):
        world.apply(world.batch(level, 0, 1))
        assert said(slurm, "gpu1") == ("idle+drain", "fan broke")
        state, detail = world.acks()[-1]
        assert state == ("failed" if level == 0 else "done")
        assert "others drained it: fan broke" in detail
        assert world.acks(1)[-1] == ("done", "")
    # Theirs over ours: ours is over.
    slurm.run("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=to be moved")
    world.apply(world.batch(0, 1))
    assert said(slurm, "gpu2") == ("idle+drain", "to be moved")
    assert world.acks(1)[-1][0] == "failed"


def test_duplicates_renewals_and_old_terms_ask_nothing(slurm: Cluster, world: World) -> None:
    first = world.batch(2, 0, 1)
    world.apply(first)
    calls = world.sink.counts["calls"]
    assert calls == 1
    world.apply(first)
    world.apply(world.batch(2, 0, 1, command=first.command, renewal=True, reason="renewal"))
    world.apply(world.batch(0, 0, 1, epoch=6))
    assert (world.sink.counts["calls"], world.sink.counts["old"]) == (calls, 2)
    # Another daemon, without memory, with the same wish under a new term
    other = World(slurm)
    other.apply(other.batch(2, 0, 1, epoch=8, renewal=True))
    assert other.sink.counts["calls"] == 0
    assert other.acks() == other.acks(1) == [("done", "")]
    assert said(slurm, "gpu1")[1] == "racktwin:2:a test s"
    assert len([a for a in world.acks() if a[0] == "done"]) == len(world.acks())


def test_who_resumes_a_node_by_hand_has_it(slurm: Cluster, world: World) -> None:
    time.sleep(PAUSE_S)  # since it was started, which may cost it its drains
    first = world.batch(2, 0)
    world.apply(first)
    slurm.run("scontrol", "update", "NodeName=gpu1", "State=RESUME")
    world.follow(lambda: world.level(0) == 0)
    world.apply(world.batch(2, 0, command=first.command, renewal=True))
    assert said(slurm, "gpu1")[0] == "idle"
    assert world.acks()[-1] == ("failed", "resumed by others: Slurm has it idle")
    world.apply(world.batch(3, 0))  # wanted anew, too soon
    assert said(slurm, "gpu1")[0] == "idle"
    assert world.acks()[-1] == ("failed", "resumed by others: Slurm has it idle")
    world.sink._now_ns = lambda: time.time_ns() + round(RESUMED_S * NS)
    world.apply(world.batch(2, 0))
    assert said(slurm, "gpu1")[0] == "idle+drain"


def test_a_controller_that_starts_again_keeps_drains_or_is_told_again(slurm: Cluster, world: World) -> None:
    first = world.batch(2, 0)
    world.apply(first)
    slurm.stop("slurmctld")
    with pytest.raises(ConnectorError, match=r"sinfo: .*Unable to contact"):
        world.apply(world.batch(3, 1))
    assert world.acks(1) == []
    slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")
    slurm.until(lambda: said(slurm, "gpu1") == ("idle+drain", "racktwin:2:a test s"), "the drain is there")
    world.apply(world.batch(2, 0, command=first.command, renewal=True))
    world.apply(world.batch(3, 1, command=world.batch(3, 1).command - 100, renewal=True))
    assert said(slurm, "gpu2")[1].startswith("racktwin:3:")
    world.apply(world.batch(0, 1))

    # Its state is lost: what we wanted is asked for again.
    slurm.stop("slurmctld")
    time.sleep(PAUSE_S)
    slurm.start("slurmctld", "-D", "-c", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")
    slurm.until(lambda: said(slurm, "gpu1")[0] == "idle", "it forgot the drain")
    world.follow(lambda: world.level(0) == 0)
    world.apply(world.batch(2, 0, command=first.command, renewal=True))
    assert said(slurm, "gpu1") == ("idle+drain", "racktwin:2:a test s")


def test_nobody_else_may_and_that_is_told(
    slurm: Cluster, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "scontrol"
    shim.write_text(
        f'#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups '
        f'{slurm.programs["scontrol"]} "$@"\n'
    )  # fmt: skip
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    other = World(slurm)
    refused = r"Invalid user id: Slurm lets this user change neither nodes"
    first = other.batch(2, 0, 1)
    with pytest.raises(ActuationError, match=refused):
        other.apply(first)
    assert "sacctmgr" in other.acks()[-1][1]
    assert other.acks()[-1][0] == "failed"
    assert other.sink.counts["calls"] == 1
    assert said(slurm, "gpu1")[0] == "idle"
    # Nor is Slurm asked the same again at once; something new is asked for, and the old after a while
    again = other.batch(2, 0, 1, command=first.command, renewal=True)
    with pytest.raises(ActuationError, match=refused):
        other.apply(again)
    assert other.sink.counts["calls"] == 1
    second = other.batch(1, 1)
    with pytest.raises(ActuationError, match=refused):
        other.apply(second)
    assert other.sink.counts["calls"] == 2
    monkeypatch.setattr(sink, "REFUSED_S", 0.0)
    slurm.run("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=by hand")
    asked_s = time.monotonic()
    assert not other.sink.observe(asyncio.run(other.source.nodes()), asked_s)
    other.apply(other.batch(1, 1, command=second.command, renewal=True))
    assert other.acks(1)[-1][0] == "done", "it was said to have failed"
    assert other.sink.counts["calls"] == 2
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    other.source._env["PATH"] = os.environ["PATH"]
    other.apply(other.batch(2, 0, command=first.command[:1], renewal=True))
    assert said(slurm, "gpu1")[0] == "idle+drain"
    assert other.acks()[-1] == ("done", "")


def test_a_daemon_that_leads_no_longer_asks_nothing(slurm: Cluster, world: World) -> None:
    world.leads = False
    with pytest.raises(ActuationError, match="another daemon leads"):
        world.apply(world.batch(2, 0))
    assert said(slurm, "gpu1")[0] == "idle"


def test_what_is_no_node_or_no_level_is_refused(slurm: Cluster, world: World) -> None:
    world.apply(world.batch(2, 2), world.batch(9, 0), world.batch(float("nan"), 1))
    name = world.site.name("node", 2)
    assert world.acks(2) == [("failed", f"Slurm has no node for {name}; name it in jobs.slurm.node_names")]
    assert world.acks(0) == world.acks(1) == [("failed", "expected a level from 0 to 4")]
    assert world.sink.counts["calls"] == 0


def test_a_thousand_nodes_in_one_call(server: Find, tmp_path: Path) -> None:
    with Cluster(tmp_path, server, nodes=1, absent=1008) as slurm:
        world = World(slurm, racks="r[01-56]", node_names={"far[0001-1008]": "r[01-56]/node[0-17]"})
        everyone = range(1008)
        world.apply(world.batch(2, *everyone))
        assert world.sink.counts["calls"] == 1
        assert {world.acks(node)[-1] for node in everyone} == {("done", "")}
        text = slurm.run("sinfo", "--noheader", "--Node", "--format=%N|%E").stdout
        assert text.count("|racktwin:2:a test s") == 1008
        slurm.run("scontrol", "update", "NodeName=far[0100-0199]", "State=DRAIN", "Reason=theirs")
        world.apply(world.batch(0, *everyone))
        assert world.sink.counts["calls"] == 2
        text = slurm.run("sinfo", "--noheader", "--Node", "--format=%N|%E").stdout
        assert (text.count("|racktwin:"), text.count("|theirs")) == (0, 100)
        assert sum(world.acks(node)[-1][0] == "failed" for node in everyone) == 100
