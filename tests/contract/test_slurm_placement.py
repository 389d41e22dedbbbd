"""Placement of nodes in a real Slurm: last, kept and back; what others set stays theirs."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.orders import SinkContext
from connectors.slurm import SlurmPlacement, SlurmSettings, SlurmSource, placement
from connectors.slurm.marks import CONTROL, END_S, LEASE_S, MARK, RENEW_S, SPARES, Reservation, parse_marks
from tests.contract.test_slurm_sink import World as Levels, said, state_of
from tests.support.slurm_cluster import Cluster, Find
from twin.catalogue import ActuationError, ConnectorError
from twin.contracts import CommandBatch
from twin.telemetry import CommandAcked

pytestmark = pytest.mark.slow
USUAL, LAST, KEPT = range(3)
OVERLAPS = "Requested reservation overlaps with another reservation"


class World(Levels):
    """A source that reads placement, a sink that commands it, and what they tell."""

    def __init__(self, slurm: Cluster, **more: Any) -> None:
        super().__init__(slurm, **more)
        names = more.get("node_names") or {"gpu[1-2]": "r1/node[0-1]"}
        settings = SlurmSettings(period_s=0.3, conf=str(slurm.conf), placement=True, node_names=names)
        self.source = SlurmSource(self.site, settings)
        self.placing = SlurmPlacement(self.site, self.source, SinkContext(self.stage, lambda: self.leads))

    def batch(self, level: float, *nodes: int, **more: Any) -> CommandBatch:
        return super().batch(level, *nodes, **({"control": CONTROL} | more))

    def renewed(self, batch: CommandBatch) -> CommandBatch:
        """The same commands, said again."""
        return self.batch(0, *batch.index.tolist(), value=batch.value, command=batch.command, renewal=True)

    def apply(self, *batches: CommandBatch) -> None:
        asyncio.run(self.placing.apply(batches))

    def calls(self) -> int:
        return self.placing.counts["calls"]

    def placed(self, node: int = 0) -> float | None:
        """Wait for the next placement that the source reads, and return that of a node."""
        self.source.marks_s = -1e9  # not what was read before others changed it
        self.staged = [e for e in self.staged if isinstance(e, CommandAcked)]
        self.follow(lambda: any(getattr(e, "signal", "") == "placement_state" for e in self.staged))
        return self.read("placement_state", node)


@pytest.fixture
def slurm(server: Find) -> Iterator[Cluster]:
    """Other users can look into its folder."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        os.chmod(folder, 0o755)
        with Cluster(Path(folder), server, nodes=2) as cluster:
            cluster.until(lambda: said(cluster, "gpu1")[0] == said(cluster, "gpu2")[0] == "idle", "both idle")
            yield cluster


@pytest.fixture
def world(slurm: Cluster) -> World:
    return World(slurm)


def weight_of(slurm: Cluster, host: str) -> int:
    text = slurm.run("scontrol", "show", "node", host, "--oneliner").stdout
    return int(text.partition(" Weight=")[2].split()[0])


def set_weight(slurm: Cluster, host: str, weight: int) -> None:
    assert slurm.run("scontrol", "update", f"NodeName={host}", f"Weight={weight}").returncode == 0


def spares(slurm: Cluster) -> Reservation | None:
    slurm.env["SLURM_TIME_FORMAT"] = "%s"
    return parse_marks("", slurm.run("scontrol", "show", "reservation", "--oneliner").stdout).spares


def kept(slurm: Cluster) -> list[str]:
    found = spares(slurm)
    return [] if found is None else sorted(found.hosts)


def reserve(slurm: Cluster, name: str, hosts: str, start: str = "now", flags: str = "IGNORE_JOBS") -> None:
    words = f"ReservationName={name} Nodes={hosts} StartTime={start} Duration=30 Users=root Flags={flags}"
    answer = slurm.run("scontrol", "create", "reservation", *words.split())
    assert answer.returncode == 0, answer.stderr


def host_of(slurm: Cluster, job: str) -> str:
    return slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T %N").stdout.strip()


def started(slurm: Cluster, *arguments: str) -> tuple[str, str]:
    """A job that has a whole node: its number, its node."""
    job = slurm.submit("--nodes=1", "--exclusive", *arguments)
    slurm.until(lambda: host_of(slurm, job).startswith("RUNNING "), "the job runs")
    return job, host_of(slurm, job).split()[1]


def restart(slurm: Cluster) -> None:
    slurm.stop("slurmctld")
    slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")


def test_last_kept_and_back(slurm: Cluster, world: World) -> None:
    set_weight(slurm, "gpu1", 17)
    assert (world.placed(0), world.placed(1)) == (USUAL, USUAL)
    for state, weight, members in (
        (LAST, 17 + MARK, []),
        (KEPT, 17, ["gpu1"]),
        (LAST, 17 + MARK, []),
        (USUAL, 17, []),
        (KEPT, 17, ["gpu1"]),
        (USUAL, 17, []),
    ):
        world.apply(world.batch(state, 0))
        assert (weight_of(slurm, "gpu1"), kept(slurm)) == (weight, members)
        assert world.acks()[-1] == ("done", "")
        assert (world.placed(0), world.placed(1)) == (state, USUAL)
    assert spares(slurm) is None
    assert weight_of(slurm, "gpu2") == 1


@pytest.mark.long
def test_jobs_go_elsewhere_first_and_never_to_a_spare(slurm: Cluster, world: World) -> None:
    for node, host in enumerate(("gpu1", "gpu2")):
        world.apply(world.batch(LAST, node), world.batch(USUAL, 1 - node))
        first, there = started(slurm)
        assert there != host
        second, there = started(slurm)  # as nothing else is free
        assert there == host
        slurm.run("scancel", first, second)
        slurm.until(lambda: said(slurm, "gpu1")[0] == said(slurm, "gpu2")[0] == "idle", "both idle")
    world.apply(world.batch(USUAL, 0, 1))
    job, host = started(slurm)
    node = ("gpu1", "gpu2").index(host)
    world.apply(world.batch(KEPT, node))
    other, there = started(slurm)
    assert there != host
    slurm.run("scancel", other)
    asked = slurm.submit("--nodes=1", f"--nodelist={host}")
    whole = slurm.submit("--nodes=2", "--begin=now+3600")  # it may wait, and is in nobody's way
    next_one, there = started(slurm)
    assert there != host
    assert state_of(slurm, job) == "RUNNING"  # what was there goes on
    slurm.run("scancel", job, next_one, whole)
    slurm.until(lambda: said(slurm, host)[0] == "idle+reserved", "the spare is empty")
    assert state_of(slurm, asked) == "PENDING"
    world.apply(world.batch(USUAL, node))
    slurm.until(lambda: state_of(slurm, asked) == "RUNNING", "it was let in")


def test_duplicates_renewals_and_old_terms_ask_nothing(slurm: Cluster, world: World) -> None:
    first = world.batch(LAST, 0), world.batch(KEPT, 1)
    world.apply(*first)
    assert world.calls() == 2
    world.apply(*first)
    world.apply(*(world.renewed(batch) for batch in first))
    world.apply(world.batch(USUAL, 0, 1, epoch=6))
    assert (world.calls(), world.placing.counts["old"]) == (2, 2)
    told = len(world.acks())
    asked_s = world.source.marks_s
    world.apply(*(world.renewed(batch) for batch in first))  # by the listing that there is
    assert (world.source.marks_s, len(world.acks())) == (asked_s, told)
    # Another daemon, without memory, with the same wish under a new term
    other = World(slurm)
    other.apply(other.batch(LAST, 0, epoch=8, renewal=True), other.batch(KEPT, 1, epoch=8, renewal=True))
    assert other.calls() == 0
    assert other.acks(0) == other.acks(1) == [("done", "")]
    assert (weight_of(slurm, "gpu1"), kept(slurm)) == (1 + MARK, ["gpu2"])


def test_who_is_not_spoken_of_stays_kept(slurm: Cluster, world: World) -> None:
    world.apply(world.batch(KEPT, 0))
    other = World(slurm)
    other.apply(other.batch(KEPT, 1))
    assert kept(slurm) == ["gpu1", "gpu2"]
    other.apply(other.batch(USUAL, 1))
    assert kept(slurm) == ["gpu1"]
    assert other.placed(0) == KEPT
    other.apply(other.batch(USUAL, 0))
    assert spares(slurm) is None


def test_a_controller_that_forgets_weights_is_told_again(slurm: Cluster, world: World) -> None:
    set_weight(slurm, "gpu2", 9)
    first = world.batch(LAST, 0), world.batch(KEPT, 1)
    world.apply(*first)
    slurm.stop("slurmctld")
    with pytest.raises(ConnectorError, match=r"scontrol: .*Unable to contact"):
        world.apply(world.batch(USUAL, 0))
    with pytest.raises(ConnectorError, match=r"Unable to contact"):
        asyncio.run(world.source.read_marks())
    first = world.batch(LAST, 0), first[1]
    slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")
    # As in slurm.conf: the mark is lost, and so is what others had set; spares are kept.
    assert (weight_of(slurm, "gpu1"), weight_of(slurm, "gpu2"), kept(slurm)) == (1, 1, ["gpu2"])
    assert (world.placed(0), world.placed(1)) == (USUAL, KEPT)
    world.apply(first[0], world.renewed(first[1]))
    assert (weight_of(slurm, "gpu1"), kept(slurm)) == (1 + MARK, ["gpu2"])
    assert world.placed(0) == LAST
    for forget in (lambda: restart(slurm), lambda: slurm.run("scontrol", "reconfigure")):
        forget()
        slurm.until(lambda: weight_of(slurm, "gpu1") == 1, "it forgot")
        assert world.placed(0) == USUAL
        world.apply(world.renewed(first[0]))
        assert weight_of(slurm, "gpu1") == 1 + MARK


def test_a_deposed_daemon_changes_nothing(slurm: Cluster, world: World) -> None:
    world.apply(world.batch(KEPT, 1))
    world.leads, before = False, spares(slurm)
    for state, node in ((LAST, 0), (KEPT, 0), (USUAL, 1)):
        with pytest.raises(ActuationError, match="another daemon leads"):
            world.apply(world.batch(state, node))
    assert (weight_of(slurm, "gpu1"), spares(slurm)) == (1, before)


def test_no_answer_is_no_refusal(slurm: Cluster, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = world.source.ask

    async def lost(*words: str) -> str:
        if "update" in words:
            raise ConnectorError("scontrol: no answer within 10 s")
        return await ask(*words)

    batch = world.batch(LAST, 0)
    with monkeypatch.context() as patch:
        patch.setattr(world.source, "ask", lost)
        with pytest.raises(ConnectorError, match="no answer within"):
            world.apply(batch)
    assert (world.acks(), world.placing.counts["refused"]) == ([], 0)
    world.apply(world.renewed(batch))
    assert (world.acks(), weight_of(slurm, "gpu1")) == ([("done", "")], 1 + MARK)


def test_the_end_moves_on_and_comes_when_nobody_does(slurm: Cluster, world: World) -> None:
    first = world.batch(KEPT, 0)
    world.apply(first)
    found = spares(slurm)
    assert found is not None
    assert END_S == 2 * LEASE_S == 1200
    assert found.end_s - found.start_s in (1200, 1201)
    world.apply(world.renewed(first))
    assert (world.calls(), world.placing.counts["renewed"]) == (1, 0)
    slurm.run("scontrol", "update", f"ReservationName={SPARES}", f"EndTime=now+{RENEW_S - 5:.0f}")
    soon = spares(slurm)
    assert soon is not None
    assert soon.end_s < found.end_s - 200
    world.source.marks_s = -1e9  # the listing is old by then
    world.apply(world.batch(LAST, 1))  # no spare is spoken of
    assert world.placing.counts["renewed"] == 0
    world.apply(world.renewed(first))
    found = spares(slurm)
    assert found is not None
    assert found.end_s > soon.end_s + 200
    assert world.placing.counts["renewed"] == 1
    # Nobody moves it on: others get the node, whatever ran there goes on.
    job = slurm.submit("--nodes=1", "--nodelist=gpu1")
    slurm.run("scontrol", "update", f"ReservationName={SPARES}", "EndTime=now+1")
    slurm.until(lambda: state_of(slurm, job) == "RUNNING", "the spare was given back", seconds=90)
    slurm.until(lambda: world.placed(0) == USUAL, "the reservation is gone")
    world.apply(world.renewed(first))
    assert (kept(slurm), state_of(slurm, job)) == (["gpu1"], "RUNNING")


def test_a_reservation_of_others_is_theirs(
    slurm: Cluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(slurm, "theirs", "gpu2")
    first = world.batch(KEPT, 0, 1)
    for number, batch in enumerate((first, world.batch(KEPT, 0, 1), first := world.batch(KEPT, 0, 1)), 1):
        world.apply(batch)
        assert (kept(slurm), world.placing.counts["refused"]) == (["gpu1"], number)
        assert world.acks(0)[-1] == ("done", "")
        state, detail = world.acks(1)[-1]
        assert state == "failed"
        assert OVERLAPS in detail
        assert detail.endswith(": theirs")
    # Renewals ask nothing of what was just refused, however old the listing
    calls, told = world.calls(), len(world.acks(1))
    for _ in range(3):
        world.source.marks_s = -1e9
        world.apply(world.renewed(world.batch(KEPT, 1, command=first.command[1:])))
        assert (world.source.marks_s, world.calls(), len(world.acks(1))) == (-1e9, calls, told)
    with monkeypatch.context() as patch:
        patch.setattr(placement, "REFUSED_S", 0.0)  # that long ago
        world.apply(world.renewed(first))
        assert (world.calls() > calls, len(world.acks(1))) == (True, told + 1)
    world.apply(world.batch(USUAL, 0))
    world.apply(world.batch(KEPT, 1))
    assert OVERLAPS in world.acks(1)[-1][1]
    assert spares(slurm) is None
    slurm.run("scontrol", "delete", "ReservationName=theirs")
    reserve(slurm, "theirs", "gpu[1-2]", flags="MAINT,IGNORE_JOBS")  # with which others may overlap
    world.apply(world.batch(KEPT, 0, 1))
    assert kept(slurm) == ["gpu1", "gpu2"]


def test_a_reservation_of_others_that_begins_later(slurm: Cluster, world: World) -> None:
    reserve(slurm, "theirs", "gpu2", start="now+1000")
    world.apply(world.batch(KEPT, 0))
    world.apply(world.batch(KEPT, 1))
    assert kept(slurm) == ["gpu1"]
    assert world.acks(1)[-1][0] == "failed"
    assert OVERLAPS in world.acks(1)[-1][1]


def test_weights_of_others(slurm: Cluster, world: World) -> None:
    theirs = 2 * MARK + 5
    set_weight(slurm, "gpu1", theirs)
    assert world.placed(0) == LAST
    world.apply(world.batch(LAST, 0))
    assert world.acks()[-1] == ("done", f"others gave it the weight {theirs}")
    world.apply(world.batch(USUAL, 0))
    state, detail = world.acks()[-1]
    assert state == "failed"
    assert "racktwin does not change it" in detail
    world.apply(world.batch(KEPT, 0))
    assert (weight_of(slurm, "gpu1"), kept(slurm)) == (theirs, ["gpu1"])
    # Each keeps its own below our mark; one that others change meanwhile is theirs.
    set_weight(slurm, "gpu2", 3)
    batch = world.batch(LAST, 1)
    world.apply(batch)
    set_weight(slurm, "gpu2", 7)
    world.source.marks_s = -1e9
    world.apply(world.renewed(batch))
    assert weight_of(slurm, "gpu2") == 7 + MARK
    world.apply(world.batch(USUAL, 1))
    assert weight_of(slurm, "gpu2") == 7


def test_what_is_no_node_or_no_placement_is_refused(slurm: Cluster, world: World) -> None:
    world.apply(world.batch(LAST, 2), world.batch(3, 0), world.batch(float("nan"), 1))
    name = world.site.name("node", 2)
    assert world.acks(2) == [("failed", f"Slurm has no node for {name}; name it in jobs.slurm.node_names")]
    assert world.acks(0) == world.acks(1) == [("failed", "expected a placement from 0 to 2")]
    assert world.calls() == 0


def test_nobody_else_may_and_that_is_told(
    slurm: Cluster,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shim = tmp_path / "scontrol"
    shim.write_text(
        f'#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups '
        f'{slurm.programs["scontrol"]} "$@"\n'
    )  # fmt: skip
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    other = World(slurm)
    for state in (LAST, KEPT):
        other.apply(other.batch(state, 0))
        assert other.acks()[-1][0] == "failed"
        assert "Invalid user id: Slurm lets this user change" in other.acks()[-1][1]
        assert caplog.messages[-1].endswith("set adminlevel=Administrator")
    world.apply(world.batch(KEPT, 1))
    # It may not move the end on: it is kept as yet, and that is said.
    slurm.run("scontrol", "update", f"ReservationName={SPARES}", "EndTime=now+100")
    other.apply(other.batch(KEPT, 1))
    assert other.acks(1)[-1][0] == "done"
    assert other.acks(1)[-1][1].startswith("but Slurm refuses: ")
    assert (weight_of(slurm, "gpu1"), kept(slurm)) == (1, ["gpu2"])


def test_a_thousand_nodes_in_two_calls(server: Find, tmp_path: Path) -> None:
    with Cluster(tmp_path, server, nodes=1, absent=1008) as cluster:
        world = World(cluster, racks="r[01-56]", node_names={"far[0001-1008]": "r[01-56]/node[0-17]"})
        some, rest = np.arange(0, 1008, 2), np.arange(1, 1008, 2)
        world.apply(world.batch(KEPT, *some.tolist()), world.batch(LAST, *rest.tolist()))
        assert world.calls() == 2
        assert {world.acks(node)[-1] for node in range(1008)} == {("done", "")}
        assert len(kept(cluster)) == 504
        world.apply(world.batch(USUAL, *range(1008)))
        assert world.calls() == 4
        assert spares(cluster) is None
        assert f" Weight={1 + MARK} " not in cluster.run("scontrol", "show", "nodes", "--oneliner").stdout
