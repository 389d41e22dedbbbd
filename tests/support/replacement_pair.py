"""Two daemons that replace nodes of one real Slurm, elected through etcd, and what Slurm itself wrote of it.

with couple(server, tmp_path, slurm) as two:
    two.start(); two.fault(0, "boot-1"); two.drained("gpu1"); two.a.kill()

As a process, `python -m tests.support.replacement_pair run ...` is `racktwin daemon run`, waiting less: how
long a new leader changes nothing, and what must be over by then, are kept in proportion.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.builders import two_racks
from tests.support.daemon_process import ROOT, RunningDaemon
from tests.support.etcd_cluster import EtcdCluster
from tests.support.mosquitto import mosquitto
from tests.support.node_agents import Client
from tests.support.slurm_cluster import Cluster

CONTROL, TESTED = "node.service_level", "node.burn_in_since_s"
NODE = "lab/h/r1/node{}"
HOSTS, TERM_S = 3, 3
BLAST_RADIUS = 1
# In place of 300 s, 600 s, 10 s, 90 s and 180 s
SETTLES_S, LOOK_S, RESUMED_S, RESUMED_BY_HAND_S = 20.0, 3.0, 9.0, 18.0
SETTINGS = {"burn_in": True, "queue_h": 0.001, "test_h": 0.01}
# The site's test of a node ends when the test at hand lets it
TESTING = "until [ -e {folder}/well-{{host}} ]; do sleep 0.1; done; echo tested {{host}}"
# Requests to Slurm are noted, with who asks; an answer is kept back while the test wants it lost.
SCONTROL = """\
#!/bin/sh
case "$1" in show|ping|--all) exec {real} "$@" ;; esac
echo "{name} $*" >> {asked}
{real} "$@"; code=$?
while [ -e {deaf} ]; do sleep 0.05; done
exit $code
"""
_SET = re.compile(r"update_node: node (\S+) (reason|state) set to:? (.*)")


class Change(NamedTuple):
    """A change that Slurm's controller wrote: it set a node's state, for the reason that it had then."""

    host: str
    drain: bool
    reason: str


class Hurried(RunningDaemon):
    """`racktwin daemon run` with shorter waits; the program by which it asks Slurm is watched."""

    def __init__(
        self, folder: Path, broker: int, name: str, scontrol: Path, asked: Path, **more: Any
    ) -> None:
        super().__init__(folder, broker, **more)
        self.name, self.deaf = name, folder / "deaf"
        self._programs = folder / "bin"
        self._programs.mkdir()
        path = self._programs / "scontrol"
        path.write_text(SCONTROL.format(real=scontrol, name=name, asked=asked, deaf=self.deaf))
        path.chmod(0o755)

    def start(self, wait: bool = True) -> None:
        """As any daemon."""
        path = f"{self._programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.replacement_pair",
                    "run",
                    "--config",
                    str(self.config_path),
                ],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "STATE_DIRECTORY")}
                | {"PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            self.until(self.is_up, "the daemon's first tick")

    def forget(self) -> None:
        """Lose all files of its runs, as on a new disk."""
        assert self.process is None
        shutil.rmtree(self.folder / "state")


class Couple:
    """Daemons `a` and `b` before a Slurm. What that was asked for is read from its controller's log."""

    def __init__(self, folder: Path, slurm: Cluster, port: int, etcd: EtcdCluster) -> None:
        self.slurm, self.client = slurm, Client(port, hears="IT/v1/racktwin/#")
        self._asked = folder / "asked"
        self._asked.touch()
        self._folder = folder
        test = {"command": ["/bin/sh", "-c", TESTING.format(folder=folder)], "test": "quick"}
        self._at_ns: dict[str, int] = {}
        policies = {
            "operator": {"authority": "act"},
            "replacement": {"authority": "act", "settings": SETTINGS},
        }
        site = two_racks(policies=policies, controls={CONTROL: {"blast_radius": BLAST_RADIUS}})
        jobs = {
            "conf": str(slurm.conf), "period_s": 1, "node_names": {f"gpu[1-{HOSTS}]": "lab/h/r1/node[0-2]"},
            "kinds": {"train": "batch"}, "command": True, "requeue": True,
        }  # fmt: skip

        def daemon(name: str) -> Hurried:
            leader = {"kind": "etcd", "endpoints": etcd.urls, "name": name, "term_s": TERM_S}
            return Hurried(
                folder / name, port, name, slurm.programs["scontrol"], self._asked,
                site=site, jobs={"slurm": jobs}, burn_in=test, leader=leader,
            )  # fmt: skip

        self.a, self.b = daemon("a"), daemon("b")

    def start(self) -> None:
        """`a` leads, `b` stands by, and both have read Slurm."""
        self.a.start()
        self.leads(self.a)
        self.b.start()
        for one in (self.a, self.b):
            one.until(lambda one=one: level_of(one, HOSTS - 1) == 0, what="Slurm is read")  # type: ignore[misc]
        assert role(self.b) == "standby"

    def close(self) -> None:
        for one in (self.a, self.b):
            one.deaf.unlink(missing_ok=True)
            one.kill()

    def fault(self, node: int, name: str, times: int = 1) -> None:
        """A GPU of a node fell off the bus when this was said first; it is said so many times now."""
        body = {"type": "FaultReported", "id": name, "from": NODE.format(node), "table": "gpu",
                "name": NODE.format(node) + "/gpu2", "code": 79,
                "at_ns": self._at_ns.setdefault(name, time.time_ns()),
                "detail": "NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus."}  # fmt: skip
        for _ in range(times):
            self.client.say(f"IT/v1/PUB/Event/{NODE.format(node)}", json.dumps(body).encode())

    def passes(self, host: str) -> None:
        """The test of this node ends well from now on."""
        (self._folder / f"well-{host}").touch()

    def leads(self, one: Hurried) -> None:
        """Wait until it does."""
        one.until(lambda: role(one) == "leader", "to lead")

    def drained(self, one: Hurried, host: str) -> None:
        """Wait until Slurm's controller says that it has the node drained; `one` is who should ask for it."""
        one.until(lambda: self.out() == {host}, f"a drain of {host}: {self.changes()}")

    def returned(self, one: Hurried, host: str) -> None:
        """Wait until Slurm's controller says that the node is in service again."""
        back = Change(host, False, "")
        one.until(lambda: back in self.changes(), f"the return of {host}")

    def changes(self) -> list[Change]:
        """All that was ever asked of Slurm for its nodes, in order, as its controller wrote it."""
        out: list[Change] = []
        reasons: dict[str, str] = {}
        for line in (self.slurm.folder / "slurmctld.log").read_text(errors="replace").splitlines():
            if found := _SET.search(line):
                host, what, text = found.groups()
                if what == "reason":
                    reasons[host] = text
                else:
                    drain = text.startswith("DRAIN")
                    out.append(Change(host, drain, reasons.get(host, "") if drain else ""))
        return out

    def out(self) -> set[str]:
        """Hosts that are drained after all of these changes."""
        out: set[str] = set()
        for change in self.changes():
            (out.add if change.drain else out.discard)(change.host)
        return out

    def most_out(self) -> int:
        """The most hosts that were ever drained at once."""
        out, most = set[str](), 0
        for change in self.changes():
            (out.add if change.drain else out.discard)(change.host)
            most = max(most, len(out))
        return most

    def asked_by(self, one: Hurried) -> list[str]:
        """Return the commands that this daemon gave Slurm, in order."""
        lines = self._asked.read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{one.name} ")]

    def goes_on(self, one: Hurried, ticks: int) -> None:
        """Wait for so many ticks more."""
        last = one.get("/api/v1/summary")["ticks"]["tick"] + ticks
        one.until(lambda: one.get("/api/v1/summary")["ticks"]["tick"] >= last, f"{ticks} ticks")  # fmt: skip


def role(one: RunningDaemon) -> str:
    """As its interface says."""
    return str(one.get("/api/v1/summary")["role"])


def level_of(one: RunningDaemon, node: int) -> Any:
    """The level that a daemon reads back."""
    rows = one.get("/api/v1/state/node?signals=service_level_state&limit=10")
    return rows["signals"]["service_level_state"]["value"][node]


@contextmanager
def couple(server: Callable[..., Path], folder: Path, slurm: Cluster) -> Iterator[Couple]:
    """Everything but the daemons runs; these end with it."""
    with ExitStack() as stack:
        broker = stack.enter_context(mosquitto(server, folder))
        etcd = stack.enter_context(EtcdCluster(server("etcd", "etcd-server"), folder))
        two = Couple(folder, slurm, broker.port, etcd)
        stack.callback(two.close)
        stack.enter_context(two.client)
        yield two


def _hurry() -> None:
    """Shorten the waits of this process. Must come before anything of them is used."""
    from connectors.slurm import sink
    from policies.node_replacement import Replacement, assessment
    from twin.catalogue import find_control

    for key in (CONTROL, TESTED):
        object.__setattr__(find_control(key), "lease_s", SETTLES_S)
    Replacement.period_s = LOOK_S
    setattr(assessment, "RESUMED_S", RESUMED_S)  # noqa: B010
    sink.RESUMED_S = RESUMED_BY_HAND_S


if __name__ == "__main__":
    from twin.cli.main import main

    _hurry()
    sys.exit(main(sys.argv[1:]))
