"""Two daemons before one real Slurm: nodes leave and return once each, whichever daemon dies or is deposed.

Elected through a real etcd, `replacement` at `act`. Checked is what Slurm's controller wrote and says.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replacement_pair import BLAST_RADIUS, HOSTS, Couple, couple, level_of, role
from tests.support.slurm_cluster import Cluster, Find

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def slurm(server: Find) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        Cluster(Path(folder), server, nodes=HOSTS) as cluster,
    ):
        yield cluster


def test_nodes_leave_and_return_once_each_whoever_leads(server: Find, slurm: Cluster, tmp_path: Path) -> None:
    with couple(server, tmp_path, slurm) as two:
        story(two, slurm)


def story(two: Couple, slurm: Cluster) -> None:
    """`a` is killed as it drains the first of two bad nodes, `b` frozen as it drains the second."""
    a, b = two.a, two.b
    job = slurm.submit(f"--nodelist=gpu{HOSTS}", "--exclusive", "--requeue", script="sleep 3600")
    two.start()
    two.fault(0, "boot-1", times=3)
    two.fault(1, "boot-2", times=2)
    killed_before_the_answer(two)
    drained_at = shown(slurm, "gpu1")[1]
    without_a_controller(two, slurm)
    assert shown(slurm, "gpu1")[1] == drained_at, "with the time of the first drain"
    a.forget()  # of the second node it will know nothing but the mark of its drain
    a.start()
    assert role(a) == "standby"
    two.passes("gpu1")
    two.returned(b, "gpu1")
    assert not two.asked_by(a)[1:], "it stands by"
    frozen_before_the_answer(two)
    two.passes("gpu2")
    two.returned(a, "gpu2")
    # Whatever one of them still believes to be undone, it would do by now
    two.goes_on(a, 25)
    the_truth(two, slurm, drained_at, job)


def killed_before_the_answer(two: Couple) -> None:
    """`a` never learns that its drain was carried out."""
    two.a.deaf.touch()
    two.drained(two.a, "gpu1")
    two.a.kill()
    two.a.deaf.unlink()
    assert len(two.asked_by(two.a)) == 1
    two.leads(two.b)


def without_a_controller(two: Couple, slurm: Cluster) -> None:
    """Slurm's controller goes and comes back while the new leader settles."""
    slurm.stop("slurmctld")
    two.goes_on(two.b, 4)
    slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
    slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")


def frozen_before_the_answer(two: Couple) -> None:
    """`b` sleeps through the end of its term, and wakes as one that was deposed."""
    a, b = two.a, two.b
    b.deaf.touch()
    two.drained(b, "gpu2")
    b.send(signal.SIGSTOP)
    asked = two.asked_by(b)
    two.leads(a)
    b.send(signal.SIGCONT)
    b.until(lambda: role(b) == "standby", what="the deposed one to notice")
    b.deaf.unlink()
    two.goes_on(b, 10)
    assert two.asked_by(b) == asked, "it commands no more"


def shown(slurm: Cluster, host: str) -> tuple[str, str]:
    """(flags of the state, reason with user and time) as Slurm shows them."""
    text = ""

    def answers() -> bool:
        nonlocal text
        text = slurm.run("scontrol", "show", "node", host, "--oneliner").stdout
        return " State=" in text

    slurm.until(answers, f"the controller's word on {host}")
    return text.partition(" State=")[2].split()[0], text.partition(" Reason=")[2].strip()


def the_truth(two: Couple, slurm: Cluster, drained_at: str, job: str) -> None:
    """By what the controller wrote of all that was ever asked of it, and by what it says now."""
    changes = two.changes()
    assert [(c.host, c.drain) for c in changes] == [
        ("gpu1", True), ("gpu1", False), ("gpu2", True), ("gpu2", False),
    ], changes  # fmt: skip
    for change in changes:
        assert not change.drain or change.reason.startswith("racktwin:3:"), change
        assert not change.drain or "its health verdict asks for it" in change.reason, change
    assert drained_at.startswith(changes[0].reason)
    assert two.most_out() <= BLAST_RADIUS
    slurm.until(lambda: all("DRAIN" not in shown(slurm, h)[0] for h in slurm.names), "no drain is left")
    assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T %r").stdout.startswith("RUNNING")
    for one in (two.a, two.b):
        assert [level_of(one, node) for node in range(HOSTS)] == [0] * HOSTS
    logs = [p.read_text() for d in (two.a, two.b) for p in (d.folder / "state" / "burn-in").glob("*.log")]
    assert sorted("".join(logs).splitlines()) == ["tested gpu1", "tested gpu2"]
    updates = [words for one in (two.a, two.b) for words in two.asked_by(one)]
    assert sum("State=DRAIN" in words for words in updates) == 2, updates
