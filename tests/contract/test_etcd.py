"""The election through a real etcd: one leads, the next takes over in time, and never do two.

`Contenders` are processes (tests/support/election_process.py); what they log says who could act when.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.etcd_cluster import EtcdCluster
from tests.support.patience import PATIENCE_S
from twin.daemon.leader import clock_s

ROOT = Path(__file__).parents[2]
TAKEOVER_S = 10.0


class Contenders:
    """Processes that contend, and the log that they share."""

    def __init__(self, folder: Path, urls: list[str], term_s: float) -> None:
        self.folder, self.urls, self.term_s, self.log = folder, urls, term_s, folder / "log"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log.touch()

    def start(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / f"{name}.err").open("ab") as errors:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.support.election_process", name,
                 str(self.folder / name), str(self.log),
                 str(self.term_s), *self.urls], cwd=ROOT, stderr=errors,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def acts(self) -> list[tuple[float, int, str]]:
        """(instant, epoch, name) of every moment at which somebody could act, in order."""
        out = []
        for line in self.log.read_text().splitlines():
            if not line.startswith("#"):
                at, epoch, name = line.split()
                out.append((float(at), int(epoch), name))
        return sorted(out)

    def wait_leader(self, since_s: float, but: str = "") -> tuple[float, int, str]:
        """The first moment after `since_s` at which one other than `but` could act."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for act in self.acts():
                if act[0] > since_s and act[2] != but:
                    return act
            time.sleep(0.05)
        errors = "".join(p.read_text() for p in self.folder.glob("*.err"))
        raise AssertionError(f"nobody leads: {self.log.read_text()[-300:]} {errors[-2000:]}")

    def check_one_at_a_time(self) -> None:
        """Epochs never go back, and each belongs to one: so no two could act at one moment."""
        acts = self.acts()
        owner: dict[int, str] = {}
        for before, after in itertools.pairwise(acts):
            assert before[1] <= after[1], f"a deposed leader could act: {before}, {after}"
        for _, epoch, name in acts:
            assert owner.setdefault(epoch, name) == name, f"epoch {epoch} is {owner[epoch]}'s and {name}'s"


@pytest.fixture
def program(server: Callable[..., Path]) -> Path:
    return server("etcd", "etcd-server")


@contextlib.contextmanager
def contending(folder: Path, urls: list[str], term_s: float, *names: str) -> Iterator[Contenders]:
    contenders = Contenders(folder, urls, term_s)
    try:
        for name in names:
            contenders.start(name)
        yield contenders
        contenders.check_one_at_a_time()
    finally:
        contenders.stop()


@pytest.mark.long
def test_after_a_kill_the_other_leads_within_ten_seconds(program: Path, tmp_path: Path) -> None:
    with EtcdCluster(program, tmp_path) as etcd, contending(tmp_path, etcd.urls, 6.0, "a", "b") as both:
        _, first, leader = both.wait_leader(0)
        time.sleep(3)  # renewed at least once, so that the head is published
        assert {name for _, _, name in both.acts()} == {leader}
        both.kill(leader)
        killed = clock_s()
        at, epoch, successor = both.wait_leader(killed, but=leader)
        assert successor != leader
        assert epoch > first
        assert at - killed <= TAKEOVER_S
        assert f"won {epoch} after {leader}@{first}" in both.log.read_text()


@pytest.mark.long
def test_without_etcd_the_leader_acts_to_the_end_of_its_term_and_nobody_follows(
    program: Path, tmp_path: Path
) -> None:
    with EtcdCluster(program, tmp_path) as etcd, contending(tmp_path, etcd.urls, 2.0, "a", "b") as both:
        _, first, leader = both.wait_leader(0)
        etcd.members[0].stop(hard=True)
        stopped = clock_s()
        time.sleep(3)
        acts = [act for act in both.acts() if act[0] > stopped]
        assert {name for _, _, name in acts} <= {leader}
        assert acts[-1][0] < stopped + 2.0
        assert acts[-1][0] > stopped + 0.2, "expected it to use its term"
        etcd.members[0].start()
        _, epoch, _ = both.wait_leader(stopped + 3)
        assert epoch > first


@pytest.mark.long
def test_a_leader_that_was_stopped_wakes_up_deposed(program: Path, tmp_path: Path) -> None:
    with EtcdCluster(program, tmp_path) as etcd, contending(tmp_path, etcd.urls, 2.0, "a", "b") as both:
        _, first, leader = both.wait_leader(0)
        both.signal(leader, signal.SIGSTOP)
        stopped = clock_s()
        _, epoch, successor = both.wait_leader(stopped, but=leader)
        both.signal(leader, signal.SIGCONT)
        time.sleep(1.5)
        assert epoch > first
        late = [act for act in both.acts() if act[0] > stopped + 2.0]
        assert {name for _, _, name in late} == {successor}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_whatever_is_paused_or_killed_never_do_two_lead(program: Path, tmp_path: Path, seed: int) -> None:
    """Daemons and members of a cluster of three, one of these at a time, so that a majority is left."""
    chance = random.Random(seed)
    names = ("a", "b", "c")
    faults = [("pause", 4.5), ("kill", 1.0), ("etcd pause", 1.5), ("both", 4.5), ("etcd kill", 0.3)]
    chance.shuffle(faults)
    with EtcdCluster(program, tmp_path, 3) as etcd, contending(tmp_path, etcd.urls, 2.0, *names) as all_three:
        for what, lasts_s in faults:
            _, _, victim = all_three.wait_leader(clock_s())
            member = chance.choice(etcd.members)
            if what == "kill":
                all_three.kill(victim)
            if what in ("pause", "both"):
                all_three.signal(victim, signal.SIGSTOP)
            if what in ("etcd pause", "both"):
                member.pause()
            if what == "etcd kill":
                member.stop(hard=True)
            time.sleep(lasts_s)
            if what == "kill":
                all_three.start(victim)
            if what in ("pause", "both"):
                all_three.signal(victim, signal.SIGCONT)
            if what in ("etcd pause", "both"):
                member.go_on()
            if what == "etcd kill":
                member.start()
        all_three.wait_leader(clock_s())
        all_three.check_one_at_a_time()
