"""Watches over a running daemon in tests of faults: requests on the wire, agents' leases, and its ticks.

with Wire(broker.port) as wire, Leases(pod) as leases, Probe(daemon) as probe:
    ...
    assert leases.outlived == []; wire.check()
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import paho.mqtt.client as paho
import psutil
from racktwin_agent.clock import current_instant
from racktwin_agent.leases import ENDED, RUNNING

from tests.support.agent_pod import PER_TRAY, Pod
from tests.support.daemon_process import RunningDaemon
from tests.support.patience import PATIENCE_S
from twin.catalogue import NS, find_control
from twin.contracts import column
from twin.run import journal_lines

LEASE_S = 30.0  # of gpu.power_cap_w
FULL_W = 1200.0
WARM_C, HOT_C = 100.0, 88.0  # of coolant; of a GPU: beyond its limit of 87
LATE_S = 1.0  # the agents of a pod share one thread, which looks at leases each 0.2 s


class Watcher:
    """A thread that looks until the block ends; what it raised is raised there."""

    every_s = 0.05

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._error: BaseException | None = None

    def look(self) -> None:
        """Called again and again."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.every_s):
                self.look()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(20)
        if self._error is not None and error is None:
            raise self._error


class Asked(NamedTuple):
    """One command as it passed on the wire."""

    epoch: int
    command: int
    name: str
    value: float
    expires_ns: int
    renewal: bool


class Wire:
    """Listens to all requests, by a client that is not ours."""

    def __init__(self, port: int, integration: str = "racktwin") -> None:
        self.asked: list[Asked] = []
        self.faults: list[str] = []  # requests that should never have been sent
        self._topic = f"IT/v1/{integration}/Request/#"
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = lambda client, *_: client.subscribe(self._topic, 1)
        self._ready = threading.Event()
        self._client.on_subscribe = lambda *_: self._ready.set()
        self._client.on_message = self._heard
        self._client.connect("127.0.0.1", port)

    def __enter__(self) -> Wire:
        self._client.loop_start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _heard(self, client: Any, userdata: Any, message: paho.MQTTMessage) -> None:
        heard_ns, body = time.time_ns(), json.loads(message.payload)
        span_s = (body["expires_ns"] - body["issued_ns"]) / NS
        if heard_ns > body["expires_ns"] + LATE_S * NS and not body["final"]:
            self.faults.append(f"sent {(heard_ns - body['expires_ns']) / NS:.2f} s after its lease: {body}")
        control = find_control(body["control"])
        assert control is not None, body
        if not 0 <= span_s <= control.lease_s:
            self.faults.append(f"a lease of {span_s} s: {body}")
        if message.retain:
            self.faults.append(f"a retained request: {body}")
        rack = message.topic.split("/", 5)[5]
        for name, command, value in zip(body["names"], body["commands"], body["values"], strict=True):
            self.asked.append(
                Asked(body["epoch"], command, f"{rack}/{name}", value, body["expires_ns"], body["renewal"])
            )

    def check(self) -> None:
        """No command after its lease, and no number used twice for different things."""
        assert not self.faults, self.faults[:5]
        known: dict[tuple[int, int], tuple[str, float]] = {}
        for a in list(self.asked):
            assert known.setdefault((a.epoch, a.command), (a.name, a.value)) == (a.name, a.value), a


class Leases(Watcher):
    """Holds the agents' own books against their devices' limits."""

    def __init__(self, pod: Pod) -> None:
        super().__init__()
        self.pod, self.looks = pod, 0
        self.outlived: list[str] = []

    def look(self) -> None:
        self.looks += 1
        for path, node in self.pod.fleet.nodes.items():
            at = current_instant()  # before the lease is read: one that is renewed meanwhile ends later
            for key, lease in list(node.book.leases.items()):
                over_s = (at.boot_ns - lease.until.boot_ns) / NS
                if lease.phase == RUNNING and over_s > LATE_S:
                    self.outlived.append(f"{path}/{key.name}: {over_s:.2f} s after its lease ended")
            for gpu, limit_w in enumerate(self.pod.devices[path]._limit):
                known = {key.name for key in list(node.book.leases)}
                if limit_w != FULL_W and f"gpu{gpu}" not in known and node.contingency.state == "armed":
                    self.outlived.append(f"{path}/gpu{gpu}: {limit_w} W without any lease")
        del self.outlived[20:]

    def running(self) -> int:
        """Count the leases that run now."""
        return sum(node.book.running() for node in self.pod.fleet.nodes.values())

    def lapsed(self) -> bool:
        """Return True if all leases have ended, each device at its safe value or, where its cap was given
        back before, as it was found."""
        for path, node in self.pod.fleet.nodes.items():
            for key, lease in list(node.book.leases.items()):
                limit_w = self.pod.devices[path]._limit[int(key.name[3:])]
                given_back = limit_w == lease.value == FULL_W
                if lease.phase != ENDED or not (lease.lapse in (None, limit_w) or given_back):
                    return False
        return True


class Probe(Watcher):
    """Asks the daemon for its health each 50 ms, and looks at its memory."""

    def __init__(self, daemon: RunningDaemon) -> None:
        super().__init__()
        assert daemon.process is not None
        self.took_s: list[float] = []
        self.failed = 0
        self.rss_bytes = 0
        self._process = psutil.Process(daemon.process.pid)
        self._connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_S)

    def look(self) -> None:
        begun = time.perf_counter()
        try:
            self._connection.request("GET", "/healthz")
            self._connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self.failed += 1
        self.took_s.append(time.perf_counter() - begun)
        self.rss_bytes = max(self.rss_bytes, self._process.memory_info().rss)

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._connection.close()

    def p99_s(self) -> float:
        """Of the answers' times."""
        return float(np.quantile(self.took_s, 0.99))


def scald(pod: Pod, node: int) -> None:
    """The coolant of a tray is far too warm, and its GPUs have become hot already."""
    pod.heat(node, WARM_C)
    pod.node(node)._temp[:] = [HOT_C] * PER_TRAY


def lines_of(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Parsed lines of the whole journal, closed segments included."""
    lines = [json.loads(line) for line in journal_lines(run / "journal.jsonl")]
    return [line for line in lines if not kinds or line["kind"] in kinds]


def numbers_of(lines: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """(epoch, number) of the commands that these journal lines tell of."""
    out: set[tuple[int, int]] = set()
    for line in lines:
        body = line["body"]
        if line["kind"] == "command":
            out |= {(body["epoch"], body["first_command"] + k) for k in range(len(column(body["index"])))}
    return out


def alarms_of(daemon: RunningDaemon) -> dict[str, dict[str, Any]]:
    """Active alarms by their id."""
    told = daemon.get("/api/v1/alarms?limit=1000")["alarms"]
    return {a["id"]: a for a in told if a["active"]}


def ticks_of(daemon: RunningDaemon) -> dict[str, Any]:
    """Return the daemon's summary of its ticks."""
    found: dict[str, Any] = daemon.get("/api/v1/summary")["ticks"]
    return found


def until(holds: Any, within_s: float, what: str) -> Any:
    """Wait until `holds()` gives something true, with no daemon to ask."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {within_s:g} s for {what}")
