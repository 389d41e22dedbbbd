"""A daemon and a real Slurm: nodes leave and return by it, also through outages, restarts and takeovers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.slurm_cluster import Cluster
from tests.support.slurm_daemon import NODE, alarms, ask, daemon_of, drain_of, job_state, level_of, withdraw
from tests.support.standby_pair import role

pytestmark = [pytest.mark.slow, pytest.mark.long]
TESTED = "node.burn_in_since_s"


def test_nodes_leave_and_return_through_an_outage(slurm: Cluster, broker_port: int, tmp_path: Path) -> None:
    job = slurm.submit("--nodes=2", "--exclusive")
    slurm.until(lambda: job_state(slurm, job) == "RUNNING", "a job runs")
    with daemon_of(slurm, broker_port, tmp_path) as daemon:
        daemon.start()
        daemon.until(lambda: level_of(daemon) == 0, what="Slurm is read")
        request = ask(daemon, "draining")
        daemon.until(lambda: drain_of(slurm, "gpu1").startswith("racktwin:2:"), what="a drain")
        daemon.until(lambda: level_of(daemon) == 2, what="the drain is read back")
        assert job_state(slurm, job) == "RUNNING"
        withdraw(daemon, request)

        request = ask(daemon, "drained")
        daemon.until(lambda: level_of(daemon) == 3, what="its job is requeued")
        assert job_state(slurm, job) == "PENDING"
        assert drain_of(slurm, "gpu2") == ""
        withdraw(daemon, request)

        slurm.stop("slurmctld")
        ask(daemon, "in_service")
        daemon.until(lambda: "do not reach slurm" in alarms(daemon), what="an alarm")
        slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
        slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")
        daemon.until(lambda: drain_of(slurm, "gpu1") == "", what="the node is back")
        daemon.until(lambda: level_of(daemon) == 0, what="that is read back")
        daemon.until(lambda: "do not reach slurm" not in alarms(daemon), what="the alarm ends")


def test_nothing_is_done_twice_by_daemons_that_come_and_go(
    slurm: Cluster, broker_port: int, tmp_path: Path
) -> None:
    slurm.run("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=fan broke")
    # Of one host and one site: one leads, by the lock of the host.
    with (
        daemon_of(slurm, broker_port, tmp_path / "a") as a,
        daemon_of(slurm, broker_port, tmp_path / "b") as b,
    ):
        a.start()
        b.start()
        assert (role(a), role(b)) == ("leader", "standby")
        a.until(lambda: level_of(a) == 0 and level_of(a, 1) == 3, what="Slurm is read")
        ask(a, "drained")
        ask(a, "in_service", 1)
        a.until(lambda: level_of(a) == 3, what="the drain is read back")
        ours, others = drain_of(slurm, "gpu1"), drain_of(slurm, "gpu2")
        assert ours.startswith("racktwin:3:")
        assert others.startswith("fan broke")
        for leader, other in ((a, b), (b, a)):
            leader.kill()
            other.until(lambda other=other: role(other) == "leader", what="the other one leads")  # type: ignore[misc]
            leader.start()
            leader.until(lambda leader=leader: level_of(leader) == 3, what="it reads again")  # type: ignore[misc]
            time.sleep(3)
        # A drain has the time when it was asked for: had it been asked for twice, it would be another.
        assert (drain_of(slurm, "gpu1"), drain_of(slurm, "gpu2")) == (ours, others)


def test_a_node_is_tested_where_it_is_out_of_service(
    slurm: Cluster, broker_port: int, tmp_path: Path
) -> None:
    settings = {"command": ["/bin/sh", "-c", "sleep 0.5; echo tested {host}"], "test": "quick"}
    with daemon_of(slurm, broker_port, tmp_path, burn_in=settings) as daemon:
        daemon.start()
        daemon.until(lambda: level_of(daemon) == 0, what="Slurm is read")
        now_s = time.time()
        body = {"control": TESTED, "names": [NODE.format(0)], "lo": now_s, "hi": now_s,
                "reason": "it came back"}  # fmt: skip
        daemon.post("/api/v1/requests", body)
        folder = tmp_path / "state" / "burn-in"
        time.sleep(3)
        assert not list(folder.glob("*.log"))  # it is in service
        slurm.submit("--nodes=2", script="sleep 2")
        ask(daemon, "drained")
        daemon.until(lambda: list(folder.glob("*.log")), what="a test")
        (log,) = folder.glob("*.log")
        daemon.until(lambda: log.read_text() == "tested gpu1\n", what="its output")
        leases = f"/api/v1/leases?control={TESTED}"
        daemon.until(lambda: "done" in str(daemon.get(leases)), what="the answer")
        daemon.kill()
        daemon.start()
        daemon.until(lambda: level_of(daemon) == 3, what="the restarted one reads")
        time.sleep(3)
        assert list(folder.glob("*.log")) == [log]  # tested already
