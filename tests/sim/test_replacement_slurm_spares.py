"""Spare nodes that a daemon keeps in a real Slurm, by a reservation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.agent_pod import pod
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_daemon import NODE, job_state
from twin.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_spares_are_kept_for_nobody_until_a_node_is_out(
    slurm: Cluster, broker_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of Slurm's two nodes is the last of its rack, a spare; by the usual rates more are wanted."""
    policy = {"replacement": {"authority": "act", "settings": {"keep_spares": True}}}
    site = two_racks(racks="r1", policies=policy, models={"failure": {}})
    site["halls"][0]["racks"][0]["spare_nodes"] = 1
    settings = {"conf": str(slurm.conf), "period_s": 1, "command": True, "kinds": {"train": "batch"},
                "node_names": {"gpu1": NODE.format(0), "gpu2": NODE.format(17)}}  # fmt: skip
    job = slurm.submit("--nodes=1", "--exclusive")

    def reserved() -> str:
        return slurm.run("scontrol", "show", "reservation", "--oneliner").stdout

    with (
        RunningDaemon(tmp_path / "twin", broker_port, site, jobs={"slurm": settings}) as daemon,
        pod(broker_port, racks=1, state=tmp_path / "agent"),
    ):
        daemon.start()
        daemon.until(lambda: "ReservationName=racktwin_spares" in reserved(), "a reservation")
        assert " Nodes=gpu2 " in reserved()
        slurm.until(lambda: job_state(slurm, job) == "RUNNING", "a job runs")
        more = slurm.submit("--nodes=1", "--exclusive")
        why = ("squeue", "--noheader", f"--jobs={more}", "--format=%r")
        slurm.until(lambda: slurm.run(*why).stdout.strip() not in ("", "None"), "Slurm looked at it")
        assert job_state(slurm, more) == "PENDING", "the spare is for nobody"

        def told() -> bool:
            assert main(["device", "plan", "--config", str(daemon.config_path)]) == 0
            return "1 of them reserved by the scheduler" in capsys.readouterr().out

        daemon.until(told, what="that is told")
