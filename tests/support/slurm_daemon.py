"""A daemon that commands a real Slurm whose first two nodes are those of its first rack.

with daemon_of(slurm, broker_port, tmp_path) as daemon:
    daemon.start(); ask(daemon, "draining"); drain_of(slurm, "gpu1")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon
from tests.support.slurm_cluster import Cluster

CONTROL = "node.service_level"
NODE = "lab/h/r1/node{}"


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
    """The node as Slurm shows it."""
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
    """Return the raised alarms as text."""
    return str(daemon.get("/api/v1/alarms?state=raised"))


def withdraw(daemon: RunningDaemon, request: str) -> None:
    """Withdraw a request."""
    assert daemon.ask("DELETE", f"/api/v1/requests/{request}")[0] == 200


def job_state(slurm: Cluster, job: str) -> str:
    """The state of a job as Slurm has it; "" where it knows none."""
    return slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip()
