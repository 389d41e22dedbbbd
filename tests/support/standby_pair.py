"""Two daemons for one site, agents that remember what they accepted, and an eye on their devices' limits.

with pair(server, tmp_path) as two:
    two.start(); two.a.kill(); two.until_leads(two.b)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.agent_pod import Pod, pod
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon
from tests.support.etcd_cluster import EtcdCluster
from tests.support.mosquitto import mosquitto
from tests.support.node_agents import Client
from twin.catalogue import F64

TERM_S = 3
HEARS = "IT/v1/racktwin/#"  # requests, results, presence: no telemetry
CAP = "gpu.power_cap_w"
ARMED = {"thermal_guard": {"authority": "act"}, "operator": {"authority": "act"}}
SAFE_W, TOP_W = 750.0, 1200.0
HOT_C = 100.0  # coolant that brings a GPU from its guard beyond its limit within seconds


@dataclass(frozen=True)
class Taken:
    """A request that a node answered, at an instant (monotonic seconds)."""

    at_s: float
    node: str
    epoch: int
    orders: dict[str, tuple[int, float]]  # accepted: GPU -> (command, value)
    refused: dict[str, str]  # GPU -> why


class Eye:
    """Samples the limits of all devices, and hears what every node makes of each request."""

    def __init__(self, racks: Pod) -> None:
        self.racks, self.taken = racks, list[Taken]()
        self.seen: list[tuple[float, F64]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        for path, node in racks.fleet.nodes.items():
            setattr(node.book, "take", self._noting(path, node.book.take))  # noqa: B010

    def _noting(self, path: str, take: Callable[..., Any]) -> Callable[..., Any]:
        def noted(request: Any, orders: Any, at: Any) -> Any:
            answers = take(request, orders, at)
            values = {o.name: (o.command, o.value) for o in orders}
            good = {a.name: values[a.name] for a in answers if a.state != "failed"}
            bad = {a.name: a.detail for a in answers if a.state == "failed"}
            self.taken.append(Taken(time.monotonic(), path, request.epoch, good, bad))
            return answers

        return noted

    def _look(self) -> None:
        while not self._end.wait(0.01):
            caps = self.racks.caps()
            if not self.seen or (caps != self.seen[-1][1]).any():
                self.seen.append((time.monotonic(), caps))

    def __enter__(self) -> Eye:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def since(self, at_s: float) -> F64:
        """Limits of all devices in force since then, a row for each change [rows, gpus]."""
        rows = [caps for t, caps in self.seen if t >= at_s]
        before = [caps for t, caps in self.seen if t < at_s][-1:]
        return np.array(before + rows)

    def epochs(self) -> list[int]:
        """The epochs of what was accepted, in order of time."""
        return [t.epoch for t in list(self.taken) if t.orders]


class Pair:
    """Daemons `a` and `b` on separate state folders, a broker, agents, and an etcd for their election."""

    def __init__(self, folder: Path, port: int, racks: Pod, eye: Eye, etcd: EtcdCluster | None) -> None:
        self.etcd, self.racks, self.eye, self.port = etcd, racks, eye, port
        site = two_racks(policies=ARMED)

        def daemon(name: str) -> RunningDaemon:
            leader: dict[str, Any] = {"kind": "host"}
            if etcd is not None:
                leader = {"kind": "etcd", "endpoints": etcd.urls, "name": name, "term_s": TERM_S}
            return RunningDaemon(folder / name, port, site, leader=leader)

        self.a, self.b = daemon("a"), daemon("b")
        self.client = Client(port, hears=HEARS)

    def start(self, hot: int | None = None) -> None:
        """`a` leads, `b` stands by, and both have heard every GPU; a node may grow `hot` meanwhile."""
        if hot is not None:
            self.racks.heat(hot, HOT_C)
        self.a.start()
        self.until_leads(self.a)
        self.b.start()
        for one in (self.a, self.b):
            one.until(lambda one=one: heard(one) == len(self.racks.caps()), what="all GPUs heard")
        assert role(self.b) == "standby"

    def until_leads(self, one: RunningDaemon) -> float:
        """Wait until it leads and has ticked as the leader; how long that took."""
        began = time.monotonic()
        one.until(lambda: role(one) == "leader", "to lead")
        return time.monotonic() - began

    def capped(self, by: RunningDaemon, node: int) -> F64:
        """Heat a node until its caps are in force and rest; the caps of all GPUs."""
        self.racks.heat(node, HOT_C)
        by.until(lambda: self.racks.caps(node).max() <= SAFE_W - 50, what="caps on the hot node")
        by.until(lambda: self.resting(), what="the caps rest")
        return self.racks.caps()

    def resting(self, for_s: float = 1.5) -> bool:
        """Return True if no limit has changed for so long."""
        return time.monotonic() - self.eye.seen[-1][0] >= for_s

    def close(self) -> None:
        for one in (self.a, self.b):
            if one.process is not None:
                one.kill()


def role(one: RunningDaemon) -> str:
    """As its interface says."""
    return str(one.get("/api/v1/summary")["role"])


def epoch(one: RunningDaemon) -> int:
    """The last term that it has won."""
    return int(one.get("/api/v1/summary")["epoch"])


def heard(one: RunningDaemon) -> int:
    """GPUs whose temperature is good."""
    rows = one.get("/api/v1/state/gpu?signals=temp_c&limit=1000")
    return sum(q.lower() == "good" for q in rows["signals"]["temp_c"]["quality"])


def levels(one: RunningDaemon) -> dict[str, str]:
    """Return the authority of each policy."""
    return {p["name"]: p["authority"] for p in one.get("/api/v1/summary")["policies"]}


@contextmanager
def pair(server: Callable[..., Path], folder: Path, kind: str = "etcd") -> Iterator[Pair]:
    """Everything but the daemons runs; these end with it."""
    with ExitStack() as stack:
        broker = stack.enter_context(mosquitto(server, folder))
        etcd = None
        if kind == "etcd":
            etcd = stack.enter_context(EtcdCluster(server("etcd", "etcd-server"), folder))
        racks = stack.enter_context(pod(broker.port, state=None))
        eye = stack.enter_context(Eye(racks))
        two = Pair(folder, broker.port, racks, eye, etcd)
        stack.callback(two.close)
        stack.enter_context(two.client)
        yield two
