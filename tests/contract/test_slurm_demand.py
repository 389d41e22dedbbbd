"""Demand of a real Slurm: what waits and runs agrees with its own count after rounds of random events."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from connectors.demand import DemandBook
from connectors.slurm import SlurmSettings, SlurmSource
from connectors.slurm.nodes import FORMAT, parse_nodes
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet, until
from tests.support.slurm_cluster import Cluster, Find
from twin.catalogue import ConnectorError
from twin.config.schedulers import Slurm as SlurmSection
from twin.telemetry import JobEnded, JobStarted, Reading

pytestmark = pytest.mark.slow

ARRIVES_S = 10.0  # of all demand, at the latest
GPUS, NODES, EVENTS = 8, 2, 50
ROUNDS = int(os.environ.get("RACKTWIN_SLURM_ROUNDS", "4"))  # 20 make a thousand events
QUEUES = {"queues": [{"name": "train"}, {"name": "debug"}], "tenants": [{"name": "root"}],
          "priorities": [{"name": "high", "least": 5000}, {"name": "low", "least": 1}]}  # fmt: skip
SITE = site_of({**two_racks(), **QUEUES})
SIGNALS = tuple(
    f"{what}_{state}_count" for what in ("gpu", "job") for state in ("running", "pending", "held")
)
WAITS = ("JobHeldUser", "JobHeldAdmin", "BeginTime", "Dependency", "DependencyNeverSatisfied",
         "JobArrayTaskLimit", "BadConstraints")  # fmt: skip
# Words for sbatch, and the GPUs of each job or task
ASKS = (
    (("--gres=gpu:1",), 1), (("--gres=gpu",), 1), (("--gpus=3",), 3),
    (("--gpus-per-task=2", "--ntasks=2"), 4),
    (("--nodes=2", "--gpus-per-node=4"), 8), (("--exclusive",), GPUS), ((), 0),
    (("--exclusive", "--gres=gpu:2"), GPUS), (("--gpus-per-socket=2", "--sockets-per-node=1"), 2),
)  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path, server: Find) -> Iterator[Cluster]:
    with Cluster(tmp_path, server, nodes=NODES, gpus=GPUS) as cluster:
        yield cluster


class Story:
    """Random events on a Slurm, and what it has then: GPUs as asked for here, states as it lists tasks."""

    def __init__(self, slurm: Cluster, seed: int) -> None:
        self.slurm, self.rng = slurm, random.Random(seed)
        self.gpus: dict[str, int] = {}
        self.done: Counter[str] = Counter()

    def run(self, *words: str) -> str:
        return self.slurm.run(*words).stdout

    def states(self) -> list[list[str]]:
        """(array or job, job, state, partition, reason, priority) of each task."""
        text = self.run("squeue", "--noheader", "--array", "--format=%F|%i|%T|%P|%r|%Q")
        return [line.split("|") for line in text.splitlines()]

    def event(self) -> None:
        listed = [row for row in self.states() if row[2] in ("PENDING", "RUNNING")]
        kinds = ("submit", "cancel", "hold", "release", "requeue", "move")
        kind = self.rng.choices(kinds, (40 if len(listed) < 60 else 5, 25, 10, 10, 10, 5))[0]
        if kind == "submit" or not listed:
            self.submit(listed)
            return
        runs = [row for row in listed if row[2] == "RUNNING"] if kind == "cancel" else []
        array, job, state, partition, *_ = self.rng.choice(runs or listed)
        if kind == "cancel":
            self.run("scancel", job)
        elif kind in ("hold", "release"):
            self.run("scontrol", kind, array if state == "PENDING" else job)
        elif kind == "requeue":
            self.run("scontrol", "requeue", job)
        else:
            other = "debug" if partition == "train" else "train"
            self.run("scontrol", "update", f"JobId={job}", f"Partition={other}")
        self.done[kind] += 1

    def submit(self, listed: list[list[str]]) -> None:
        words, gpus = self.rng.choice(ASKS)
        more = [f"--partition={self.rng.choice(('train', 'debug', 'train,debug'))}", "--time=1:00:00"]
        match self.rng.randrange(8):
            case 0:
                more.append("--hold")
            case 1:
                more.append("--begin=now+1hour")
            case 2:
                more.append(f"--array=0-{self.rng.randint(1, 9)}%{self.rng.randint(1, 3)}")
            case 3 if listed:
                more.append(f"--dependency=afterok:{self.rng.choice(listed)[0]}")
        more += self.rng.choice(((), ("--priority=100",), ("--priority=9000",)))
        job = self.slurm.submit(*words, *more)
        self.gpus[job] = gpus
        self.done["submit"] += 1

    def truth(self, states: list[list[str]]) -> dict[tuple[str, str], Counter[str]]:
        """Counts by (table, name)."""
        out = {
            key: Counter[str]()
            for key in (
                ("site", ""),
                ("queue", "train"),
                ("queue", "debug"),
                ("tenant", "root"),
                *(("priority", name) for name in ("high", "low", "rest")),
            )
        }
        for array, _, state, partition, reason, priority in states:
            kind = "running"
            if state == "PENDING":
                kind = "held" if reason.split(",")[0] in WAITS else "pending"
            rank = ("priority", "high" if int(priority) >= 5000 else "low" if int(priority) else "rest")
            for key in [
                ("site", ""),
                ("tenant", "root"),
                rank,
                *(("queue", p) for p in partition.split(",")),
            ]:
                out[key][f"gpu_{kind}_count"] += self.gpus[array]
                out[key][f"job_{kind}_count"] += 1
        return out

    def quiet(self) -> bool:
        """True if nothing is under way, by two looks."""
        states = self.states()
        return all(row[2] in ("PENDING", "RUNNING") for row in states) and states == self.states()


class Twin:
    """Readings of the source: demand by row, and the jobs that are taken to run."""

    def __init__(self) -> None:
        self.inlet, self.read = RecordingInlet(), 0
        self.now: dict[tuple[str, int, str], float | None] = {}
        self.running: set[str] = set()
        self.ids: list[str] = []
        self.polls, self._nodes_are_new = 0, False  # looks at jobs and nodes: nodes may be listed less often

    def take(self) -> None:
        for item in self.inlet.items[self.read :]:
            if isinstance(item, Reading):
                self.now[item.table, item.entity, item.signal] = item.value
                self._nodes_are_new |= item.signal == "service_level_state"
                if item.signal == "gpu_idle_count" and self._nodes_are_new:
                    self.polls, self._nodes_are_new = self.polls + 1, False
            elif isinstance(item, JobStarted):
                self.ids.append(item.id)
                self.running.add(item.job)
            elif isinstance(item, JobEnded):
                self.running.discard(item.job)
        self.read = len(self.inlet.items)

    def counts(self, table: str, name: str) -> Counter[str]:
        entity = 0 if table == "site" else SITE.entity(table, name)
        assert entity is not None
        return Counter({s: int(self.now[table, entity, s] or 0) for s in SIGNALS})


@pytest.mark.long
def test_demand_agrees_with_slurm_over_random_events(slurm: Cluster) -> None:
    names = {"gpu[1-2]": "r1/node[0-1]"}
    book = DemandBook(SITE, ["slurm"])
    settings = SlurmSettings(period_s=0.3, conf=str(slurm.conf), node_names=names, demand=book)
    source, story, twin = SlurmSource(SITE, settings), Story(slurm, seed=24), Twin()

    async def agreed() -> bool:
        """True where a whole poll agrees with what Slurm had before and after it."""
        if not await asyncio.to_thread(story.quiet):
            return False
        before = await asyncio.to_thread(story.states)
        twin.take()
        polls = twin.polls
        await until(lambda: twin.take() or twin.polls >= polls + 2, "two polls")
        if before != await asyncio.to_thread(story.states):
            return False
        for (table, name), counts in story.truth(before).items():
            assert twin.counts(table, name) == counts, Counter(row[4] for row in before)
        truth = {row[1] for row in before if row[2] == "RUNNING"}
        assert len(twin.running) == len(truth)
        used = twin.counts("site", "")["gpu_running_count"]
        stock = [twin.now["site", 0, f"gpu_{s}_count"] or 0 for s in ("idle", "spare", "out")]
        assert used + sum(stock) == GPUS * NODES
        return True

    async def rounds() -> None:
        for number in range(ROUNDS):
            task = asyncio.create_task(supervised(source, twin))
            try:
                for _ in range(EVENTS):
                    await asyncio.to_thread(story.event)
                if number % 3 == 1:
                    await asyncio.to_thread(restart, slurm)
                while not await agreed():
                    await asyncio.sleep(0.1)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(rounds())
    assert sum(story.done.values()) == ROUNDS * EVENTS
    assert len(twin.ids) == len(set(twin.ids)) > 2 * ROUNDS
    assert set(story.done) == {"submit", "cancel", "hold", "release", "requeue", "move"}


def test_changes_arrive_within_ten_seconds_by_slurms_own_times(slurm: Cluster) -> None:
    """One change after the other, each when the last was read, and so just after a listing: it waits long."""
    book = DemandBook(SITE, ["slurm"])
    names = {"gpu[1-2]": "r1/node[0-1]"}
    settings = SlurmSettings(conf=str(slurm.conf), node_names=names, demand=book)
    source, twin, lags = SlurmSource(SITE, settings), Twin(), dict[str, float]()
    assert settings.period_s == SlurmSection().period_s

    def told_s(words: list[str], key: str) -> float:
        """An instant that Slurm gives for something, in its whole seconds."""
        run = subprocess.run(
            words, env={**slurm.env, "SLURM_TIME_FORMAT": "%s"}, capture_output=True, text=True, check=True
        )
        found = re.search(rf"{key}([0-9]{{10}})", run.stdout)
        assert found is not None, run.stdout
        return float(found[1])

    async def arrival(what: str, key: str, value: int, words: list[str], told: str) -> None:
        await until(lambda: twin.take() or twin.now.get(("site", 0, key)) == value, what)
        at = [i.t_ns for i in twin.inlet.items if isinstance(i, Reading) and i.signal == key][-1]
        lags[what] = at / 1e9 - await asyncio.to_thread(told_s, words, told)

    async def story() -> None:
        task = asyncio.create_task(supervised(source, twin))
        try:
            await until(lambda: twin.take() or twin.polls > 0, "the first listing")
            show = [str(slurm.programs["scontrol"]), "show"]
            job = await asyncio.to_thread(slurm.submit, "--gres=gpu:3", "--hold", "--time=1:00:00")
            await arrival("held", "gpu_held_count", 3, [*show, "job", job], "SubmitTime=")
            await asyncio.to_thread(slurm.run, "scontrol", "release", job)
            await arrival("started", "gpu_running_count", 3, [*show, "job", job], "StartTime=")
            await asyncio.to_thread(slurm.run, "scancel", job)
            await arrival("ended", "gpu_running_count", 0, [*show, "job", job], "EndTime=")
            drain = ("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=test")
            await asyncio.to_thread(slurm.run, *drain)
            await arrival("drained", "gpu_out_count", GPUS, [*show, "node", "gpu2"], "Reason=test .root@")
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(story())
    print("seconds from Slurm's instant until it was read:", {k: round(lag, 1) for k, lag in lags.items()})
    assert max(lags.values()) < ARRIVES_S


async def supervised(source: SlurmSource, twin: Twin) -> None:
    """As the daemon does: a source whose scheduler is away is run again."""
    while True:
        with suppress(ConnectorError):
            await source.run(twin.inlet)
        await asyncio.sleep(0.2)


def restart(slurm: Cluster) -> None:
    slurm.stop("slurmctld")
    slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")


def test_nodes_that_share_a_line_are_those_of_a_line_each(slurm: Cluster) -> None:
    slurm.run("sbatch", "--gres=gpu:3", "--wrap", "sleep 60")
    slurm.run("scontrol", "update", "nodename=gpu2", "state=drain", "reason=racktwin:2:a b")
    ask = ("sinfo", "--noheader", "--all")
    slurm.until(lambda: "gpu:3" in slurm.run(*ask, f"--Format={FORMAT}").stdout, "its GPUs are in use")
    each, shared = (slurm.run(*ask, *more, f"--Format={FORMAT}").stdout for more in (("--Node",), ()))
    assert parse_nodes(shared) == parse_nodes(each)
    assert len(parse_nodes(shared)) == NODES
