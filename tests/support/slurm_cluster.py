"""A Slurm of a test's own: munged, slurmctld and slurmd as root without systemd, on loopback, under a folder.

with Cluster(folder, server, nodes=2) as slurm:
    slurm.run("sbatch", "--wrap", "sleep 60")
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.patience import PATIENCE_S

Find = Callable[..., Path]

CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/{scheduler}
PriorityType=priority/basic
ReturnToService=2
MessageTimeout=5
KillWait=1
MinJobAge=60
SwitchType=switch/none
{more}
{nodes}
PartitionName=train Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
# The host has neither so many cores nor GPUs
GPU_CONF = "GresTypes=gpu\nSlurmdParameters=config_overrides\n"
GPU_CONF += "SchedulerParameters=bf_interval=1\n"


class Cluster:
    """A running cluster of `nodes` nodes called `gpu1`, `gpu2`, ... on this machine.

    `absent` more are called `far0001`, ...: they are known to it, and never answer. With `gpus`, each node
    has so many of them and 64 CPUs, as far as Slurm knows; there is a partition `debug`, and backfill.
    `more`: lines of its configuration.
    """

    def __init__(
        self,
        folder: Path,
        server: Find,
        nodes: int = 1,
        cluster: str = "lab",
        absent: int = 0,
        gpus: int = 0,
        more: str = "",
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("slurmd runs jobs as root only: run as root to test this")
        self.programs = {
            p: server(p, package)
            for p, package in (
                ("munged", "munge"),
                ("slurmctld", "slurmctld"),
                ("slurmd", "slurmd"),
                ("squeue", "slurm-client"),
                ("sinfo", "slurm-client"),
                ("scontrol", "slurm-client"),
                ("sbatch", "slurm-client"),
                ("scancel", "slurm-client"),
            )
        }
        self.folder, self.cluster, self.more = folder, cluster, more
        self.names = [f"gpu{i + 1}" for i in range(nodes)]
        self.gpus = gpus
        self.absent = f"far[0001-{absent:04d}]" if absent else ""
        self.conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._write()
            self._munge()
            self.start("slurmctld", "-D", "-c", "-f", str(self.conf))
            self.until(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld answers")
            for name in self.names:
                self.start("slurmd", "-D", "-c", "-N", name, "-f", str(self.conf), tag=name)
            self.until(self._idle, "its nodes are idle")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", "--signal=KILL")
        for tag in reversed(list(self._running)):
            self.stop(tag)

    def _write(self) -> None:
        host = socket.gethostname()
        cpus, sockets = os.cpu_count() or 1, [socket.socket() for _ in range(len(self.names) + 1)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in sockets]
        for s in sockets:
            s.close()
        names = ",".join(filter(None, (*self.names, self.absent)))
        gres, more, last = "", self.more, ""
        if self.gpus:
            cpus, gres, more = 64, f" Gres=gpu:{self.gpus}", GPU_CONF + self.more
            last = f"PartitionName=debug Nodes={names} MaxTime=INFINITE State=UP OverSubscribe=NO\n"
            for i in range(self.gpus):
                (self.folder / f"gpu{i}").touch()
            text = f"Name=gpu File={self.folder}/gpu[0-{self.gpus - 1}]\n"
            (self.folder / "gres.conf").write_text(text)
        lines = [
            f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs={cpus}{gres} State=UNKNOWN"
            for n, p in zip(self.names, ports, strict=False)
        ]
        if self.absent:
            lines.append(f"NodeName={self.absent} NodeAddr=127.0.0.1 Port=1 State=UNKNOWN")
        (self.folder / "state").mkdir(parents=True)
        self.conf.write_text(
            CONF.format(
                cluster=self.cluster,
                host=host,
                ctld_port=ports[-1],
                folder=self.folder,
                munge=self.folder / "munge" / "socket",
                nodes="\n".join(lines),
                names=names,
                more=more,
                scheduler="backfill" if self.gpus else "builtin",
            )
            + last
        )

    def _munge(self) -> None:
        home = self.folder / "munge"
        home.mkdir(mode=0o711)
        key = home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={home}/socket",
            f"--key-file={key}",
            f"--log-file={home}/log",
            f"--pid-file={home}/pid",
            f"--seed-file={home}/seed",
            "--num-threads=2",
        )
        self.until((home / "socket").exists, "munged has its socket")

    def start(self, program: str, *arguments: str, tag: str | None = None) -> None:
        """Start a daemon in the foreground; `stop` knows it by its tag."""
        with (self.folder / f"{tag or program}.out").open("ab") as log:
            self._running[tag or program] = subprocess.Popen(
                [str(self.programs[program]), *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def stop(self, tag: str) -> None:
        """End a daemon that `start` began."""
        process = self._running.pop(tag)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, with its answer."""
        return subprocess.run(
            [str(self.programs[program]), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            cwd=self.folder,
        )

    def submit(self, *arguments: str, script: str = "sleep 300") -> str:
        """Submit a batch job; its number."""
        answer = self.run("sbatch", "--parsable", "--output=/dev/null", *arguments, f"--wrap={script}")
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip().split(";")[0]

    def _idle(self) -> bool:
        answer = self.run("scontrol", "show", "nodes", "--oneliner").stdout
        return answer.count("State=IDLE ") == len(self.names)

    def until(self, met: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Wait for a condition; fails with the ends of the logs."""
        deadline = time.monotonic() + seconds
        while not met():
            if time.monotonic() > deadline:
                logs = [p for p in self.folder.rglob("*") if p.suffix in (".log", ".out") or p.name == "log"]
                tails = "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in sorted(logs))
                pytest.fail(f"Slurm: waited {seconds:g} s until {what}\n{tails}", pytrace=False)
            time.sleep(0.05)
