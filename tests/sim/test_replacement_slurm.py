"""A daemon and a real Slurm: nodes leave and return by it, also through outages, restarts and takeovers."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_pod import pod
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon
from tests.support.mosquitto import mosquitto
from tests.support.node_agents import Client
from tests.support.slurm_cluster import Cluster, Find
from tests.support.standby_pair import role
from twin.cli.main import main

pytestmark = pytest.mark.slow
CONTROL, TESTED = "node.service_level", "node.burn_in_since_s"
NODE = "lab/h/r1/node{}"


@pytest.fixture
def slurm(server: Find) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        Cluster(Path(folder), server, nodes=2) as cluster,
    ):
        yield cluster


@pytest.fixture
def broker(server: Find, tmp_path: Path) -> Iterator[int]:
    """The port of a broker."""
    with mosquitto(server, tmp_path) as broker:
        yield broker.port


def daemon_of(
    slurm: Cluster, broker: int, folder: Path, policies: dict[str, Any] | None = None, **more: Any
) -> RunningDaemon:
    """A daemon that commands this Slurm for an operator and `policies`; its first two nodes are Slurm's."""
    settings: dict[str, Any] = {
        "conf": str(slurm.conf), "period_s": 1, "node_names": {"gpu[1-2]": "lab/h/r1/node[0-1]"},
        "kinds": {"train": "batch"}, "command": True, "requeue": True,
    }  # fmt: skip
    site = two_racks(
        policies={"operator": {"authority": "act"}} | (policies or {}),
        controls={CONTROL: {"blast_radius": 2}}
    )  # fmt: skip
    return RunningDaemon(folder, broker, site, jobs={"slurm": settings}, **more)


def drain_of(slurm: Cluster, host: str) -> str:
    """Reason, user and time of a drain, as Slurm has them; "" without one."""
    text = slurm.run("scontrol", "show", "node", host, "--oneliner").stdout
    return text.partition("Reason=")[2].strip() if "+DRAIN" in text.partition("State=")[2].split()[0] else ""


def shown(slurm: Cluster, host: str) -> str:
    return slurm.run("scontrol", "show", "node", host, "--oneliner").stdout


def ask(daemon: RunningDaemon, level: str, node: int = 0, **more: Any) -> str:
    """An operator's request for a level; its id."""
    body = {"control": CONTROL, "names": [NODE.format(node)], "lo": level, "hi": level, "reason": "a test's"}
    return str(daemon.post("/api/v1/requests", body | more)["id"])


def level_of(daemon: RunningDaemon, node: int = 0) -> Any:
    """The level that is read back."""
    rows = daemon.get("/api/v1/state/node?signals=service_level_state&limit=10")
    return rows["signals"]["service_level_state"]["value"][node]


def alarms(daemon: RunningDaemon) -> str:
    """What is wrong, in words."""
    return str(daemon.get("/api/v1/alarms?state=raised"))


def withdraw(daemon: RunningDaemon, request: str) -> None:
    assert daemon.ask("DELETE", f"/api/v1/requests/{request}")[0] == 200


def job_state(slurm: Cluster, job: str) -> str:
    return slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip()


def test_nodes_leave_and_return_through_an_outage(slurm: Cluster, broker: int, tmp_path: Path) -> None:
    job = slurm.submit("--nodes=2", "--exclusive")
    slurm.until(lambda: job_state(slurm, job) == "RUNNING", "a job runs")
    with daemon_of(slurm, broker, tmp_path) as daemon:
        daemon.start()
        daemon.until(lambda: level_of(daemon) == 0, what="Slurm is read")
        request = ask(daemon, "draining")
        daemon.until(lambda: drain_of(slurm, "gpu1").startswith("racktwin:2:"), what="a drain")
        daemon.until(lambda: level_of(daemon) == 2, what="the drain is read back")
        assert job_state(slurm, job) == "RUNNING"
        withdraw(daemon, request)

        request = ask(daemon, "drained")
        daemon.until(lambda: level_of(daemon) == 3, 40, "its job is requeued")
        assert job_state(slurm, job) == "PENDING"
        assert drain_of(slurm, "gpu2") == ""
        withdraw(daemon, request)

        slurm.stop("slurmctld")
        ask(daemon, "in_service")
        daemon.until(lambda: "do not reach slurm" in alarms(daemon), 40, "an alarm")
        slurm.start("slurmctld", "-D", "-f", str(slurm.conf))
        slurm.until(lambda: slurm.run("scontrol", "ping").returncode == 0, "slurmctld answers again")
        daemon.until(lambda: drain_of(slurm, "gpu1") == "", 60, "the node is back")
        daemon.until(lambda: level_of(daemon) == 0, 90, "that is read back")
        daemon.until(lambda: "do not reach slurm" not in alarms(daemon), 60, "the alarm ends")


def test_nothing_is_done_twice_by_daemons_that_come_and_go(
    slurm: Cluster, broker: int, tmp_path: Path
) -> None:
    slurm.run("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=fan broke")
    # Of one host and one site: one leads, by the lock of the host.
    with daemon_of(slurm, broker, tmp_path / "a") as a, daemon_of(slurm, broker, tmp_path / "b") as b:
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
            other.until(lambda other=other: role(other) == "leader", 30, "the other one leads")  # type: ignore[misc]
            leader.start()
            leader.until(lambda leader=leader: level_of(leader) == 3, what="it reads again")  # type: ignore[misc]
            time.sleep(3)
        # A drain has the time when it was asked for: had it been asked for twice, it would be another.
        assert (drain_of(slurm, "gpu1"), drain_of(slurm, "gpu2")) == (ours, others)


def test_a_node_is_tested_where_it_is_out_of_service(slurm: Cluster, broker: int, tmp_path: Path) -> None:
    settings = {"command": ["/bin/sh", "-c", "sleep 0.5; echo tested {host}"], "test": "quick"}
    with daemon_of(slurm, broker, tmp_path, burn_in=settings) as daemon:
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
        daemon.until(lambda: list(folder.glob("*.log")), 60, "a test")
        (log,) = folder.glob("*.log")
        daemon.until(lambda: log.read_text() == "tested gpu1\n", what="its output")
        leases = f"/api/v1/leases?control={TESTED}"
        daemon.until(lambda: "done" in str(daemon.get(leases)), what="the answer")
        daemon.kill()
        daemon.start()
        daemon.until(lambda: level_of(daemon) == 3, what="the restarted one reads")
        time.sleep(3)
        assert list(folder.glob("*.log")) == [log]  # tested already


def test_the_policy_withdraws_a_node_that_failed_and_brings_it_back(
    slurm: Cluster, broker: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A short queue and a short test: a job that just began loses least when it begins again elsewhere at once
    settings = {"burn_in": True, "queue_h": 0.001, "test_h": 0.01}
    policy = {"replacement": {"authority": "act", "settings": settings}}
    test = {"command": ["/bin/sh", "-c", "sleep 1; echo tested {host}"], "test": "quick"}
    job = slurm.submit("--nodelist=gpu1", "--exclusive", "--requeue")
    slurm.until(lambda: job_state(slurm, job) == "RUNNING", "a job runs")
    with daemon_of(slurm, broker, tmp_path, policies=policy, burn_in=test) as daemon, Client(broker) as agent:
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
        daemon.until(lambda: drain_of(slurm, "gpu1").startswith("racktwin:"), 40, "a drain for that")
        assert "its health asks for it" in drain_of(slurm, "gpu1")
        daemon.until(lambda: job_state(slurm, job) == "PENDING", 40, "its job is requeued")
        # Slurm holds back what was requeued for two minutes; people need not wait for that
        slurm.run("scontrol", "update", f"JobId={job}", "ReqNodeList=", "StartTime=now")
        slurm.until(lambda: job_state(slurm, job) == "RUNNING", "its job goes on")
        assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").stdout.strip() == "gpu2"
        folder = tmp_path / "state" / "burn-in"
        daemon.until(lambda: list(folder.glob("*.log")), 40, "a test")
        daemon.until(lambda: drain_of(slurm, "gpu1") == "", 40, "the node is back")
        daemon.until(lambda: level_of(daemon) == 0, 20, "that is read back")
        weight = "Weight=2000000001"
        daemon.until(lambda: weight in shown(slurm, "gpu1"), 40, "on probation it gets jobs last")
        assert weight not in shown(slurm, "gpu2")
        assert [log.read_text() for log in folder.glob("*.log")] == ["tested gpu1\n"]
        assert drain_of(slurm, "gpu2") == ""
        assert main(["device", "history", "--config", str(daemon.config_path)]) == 0
        told = " ".join(capsys.readouterr().out.split())
        for word in ("suspect", "draining", "testing", "probation", "passed"):
            assert word in told, told


def test_spares_are_kept_for_nobody_until_a_node_is_out(
    slurm: Cluster, broker: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        RunningDaemon(tmp_path / "twin", broker, site, jobs={"slurm": settings}) as daemon,
        pod(broker, racks=1, state=tmp_path / "agent"),
    ):
        daemon.start()
        daemon.until(lambda: "ReservationName=racktwin_spares" in reserved(), 150, "a reservation")
        assert " Nodes=gpu2 " in reserved()
        slurm.until(lambda: job_state(slurm, job) == "RUNNING", "a job runs")
        more = slurm.submit("--nodes=1", "--exclusive")
        why = ("squeue", "--noheader", f"--jobs={more}", "--format=%r")
        slurm.until(lambda: slurm.run(*why).stdout.strip() not in ("", "None"), "Slurm looked at it")
        assert job_state(slurm, more) == "PENDING", "the spare is for nobody"

        def told() -> bool:
            assert main(["device", "plan", "--config", str(daemon.config_path)]) == 0
            return "1 of them reserved by the scheduler" in capsys.readouterr().out

        daemon.until(told, 30, "that is told")
