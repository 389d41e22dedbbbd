"""The replacement policy before a real Slurm: a node that failed leaves, is tested and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.node_agents import Client
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_daemon import NODE, daemon_of, drain_of, job_state, level_of, shown
from twin.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_the_policy_withdraws_a_node_that_failed_and_brings_it_back(
    slurm: Cluster, broker_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A short queue and a short test: a job that just began loses least when it begins again elsewhere at once
    settings = {"burn_in": True, "queue_h": 0.001, "test_h": 0.01}
    policy = {"replacement": {"authority": "act", "settings": settings}}
    test = {"command": ["/bin/sh", "-c", "sleep 1; echo tested {host}"], "test": "quick"}
    job = slurm.submit("--nodelist=gpu1", "--exclusive", "--requeue")
    slurm.until(lambda: job_state(slurm, job) == "RUNNING", "a job runs")
    with (
        daemon_of(slurm, broker_port, tmp_path, policies=policy, burn_in=test) as daemon,
        Client(broker_port) as agent,
    ):
        daemon.start()
        daemon.until(lambda: level_of(daemon) == 0, what="Slurm is read")
        body = {"type": "JobStarted", "id": "more", "job": f"slurm:lab:{job}", "nodes": [NODE.format(0)],
                "kind": "training", "checkpoint_interval_s": 7200, "checkpoint_save_s": 60,
                "checkpoint_restart_s": 60}  # fmt: skip
        agent.say("IT/v1/PUB/Event/jobs/slurm", json.dumps(body).encode())
        body = {"type": "FaultReported", "id": "boot-1", "from": NODE.format(0), "table": "gpu",
                "name": NODE.format(0) + "/gpu2", "code": 79,
                "detail": "NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus."}  # fmt: skip
        agent.say(f"IT/v1/PUB/Event/{NODE.format(0)}", json.dumps(body).encode())
        daemon.until(lambda: drain_of(slurm, "gpu1").startswith("racktwin:"), what="a drain for that")
        assert "its health verdict asks for it" in drain_of(slurm, "gpu1")
        daemon.until(lambda: job_state(slurm, job) == "PENDING", what="its job is requeued")
        # Slurm holds back what was requeued for two minutes; people need not wait for that
        slurm.run("scontrol", "update", f"JobId={job}", "ReqNodeList=", "StartTime=now")
        slurm.until(lambda: job_state(slurm, job) == "RUNNING", "its job goes on")
        assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").stdout.strip() == "gpu2"
        folder = tmp_path / "state" / "burn-in"
        daemon.until(lambda: list(folder.glob("*.log")), what="a test")
        daemon.until(lambda: drain_of(slurm, "gpu1") == "", what="the node is back")
        daemon.until(lambda: level_of(daemon) == 0, what="that is read back")
        weight = "Weight=2000000001"
        daemon.until(lambda: weight in shown(slurm, "gpu1"), what="on probation it gets jobs last")
        assert weight not in shown(slurm, "gpu2")
        assert [log.read_text() for log in folder.glob("*.log")] == ["tested gpu1\n"]
        assert drain_of(slurm, "gpu2") == ""
        assert main(["device", "history", "--config", str(daemon.config_path)]) == 0
        told = " ".join(capsys.readouterr().out.split())
        for word in ("suspect", "draining", "testing", "probation", "passed"):
            assert word in told, told
