"""The node agent as a real process on simulated devices, and a client that plays the daemon's part to it.

with agent(tmp_path, port) as process, Client(port) as client:
    client.say(*requests_of(...)); client.wait(lambda m: ...)
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
NODE = "lab/h/r1/node0"
WAIT_S = PATIENCE_S


class Heard(NamedTuple):
    """A message: its topic, its JSON, whether it was retained, and when it came (monotonic seconds)."""

    topic: str
    body: Any
    retained: bool
    at_s: float


class Client:
    """Hears everything on the IT tree and says what a test wants."""

    def __init__(self, port: int, identity: tuple[str, str, str] | None = None, hears: str = "IT/#") -> None:
        """`identity` are files: the authority, our certificate, our key."""
        self.heard: list[Heard] = []
        self._news = threading.Condition()
        self._mqtt = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv311)
        if identity is not None:
            self._mqtt.tls_set(*identity)
        self._mqtt.on_message = self._on_message
        self._mqtt.on_socket_open = lambda client, userdata, sock: sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )
        self._ready = threading.Event()
        self._mqtt.on_connect = lambda client, *_: client.subscribe(hears, 1)
        self._mqtt.on_subscribe = lambda *_: self._ready.set()
        self.port = port

    def __enter__(self) -> Client:
        self._mqtt.connect("127.0.0.1", self.port, 30)
        self._mqtt.loop_start()
        assert self._ready.wait(WAIT_S), "the broker did not accept the test's subscription"
        return self

    def __exit__(self, *_: object) -> None:
        self._mqtt.disconnect()
        self._mqtt.loop_stop()
        # Its callbacks know us: left to the collector, its sockets might be found before it closes them
        self._mqtt.on_message = self._mqtt.on_connect = self._mqtt.on_subscribe = None
        del self._mqtt

    def _on_message(self, client: Any, userdata: Any, message: mqtt.MQTTMessage) -> None:
        try:
            body = json.loads(message.payload)
        except (ValueError, RecursionError):
            body = None
        with self._news:
            self.heard.append(Heard(message.topic, body, message.retain, time.monotonic()))
            self._news.notify_all()

    def say(self, topic: str, payload: bytes, qos: int = 1, retain: bool = False) -> float:
        """Publish, and when that was."""
        began = time.monotonic()
        self._mqtt.publish(topic, payload, qos, retain).wait_for_publish(WAIT_S)
        return began

    def tell(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Publish at QoS 0, which waits for nobody."""
        self._mqtt.publish(topic, payload, 0, retain)

    def wait(self, wanted: Callable[[Heard], bool], since: int = 0, seconds: float = WAIT_S) -> Heard:
        """The first message from number `since` on that is wanted; fails the test after `seconds`."""
        until, at = time.monotonic() + seconds, since
        with self._news:
            while True:
                for message in self.heard[at:]:
                    if wanted(message):
                        return message
                at = len(self.heard)
                left = until - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    last = "\n".join(str(m)[:300] for m in self.heard[-8:])
                    raise AssertionError(f"not heard within {seconds} s; last were:\n{last}")

    def mark(self) -> int:
        """The number of the next message."""
        return len(self.heard)


def write_config(
    folder: Path,
    port: int,
    tables: str = "",
    broker: str = "",
    kernel_log: str = "off",
    interval_s: float = 0.5,
    node: str = NODE,
) -> Path:
    """A configuration of an agent of NODE with four simulated GPUs; `tables` and `broker` are more lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "agent.toml"
    path.write_text(
        f'node = "{node}"\ndevices = "simulated"\nstate_dir = "state"\ninterval_s = {interval_s}\n'
        f'kernel_log = "{kernel_log}"\n[broker]\nhost = "127.0.0.1"\nport = {port}\n{broker}\n{tables}\n'
    )
    return path


def start(config: Path) -> subprocess.Popen[bytes]:
    """An agent process; its log goes to `agent.log` beside the configuration."""
    with open(config.with_name("agent.log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "racktwin_agent", "--config", str(config)],
            cwd=ROOT / "deploy" / "agent",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@contextmanager
def agent(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running agent that is ended afterwards, whatever became of it."""
    process = start(config)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def frames(gpu: int, watts: float, path: str = NODE) -> Callable[[Heard], bool]:
    """A frame that shows this power limit of a GPU."""

    def wanted(message: Heard) -> bool:
        if message.topic != f"IT/v1/PUB/Frame/{path}" or message.body is None:
            return False
        limits = message.body.get("gpu", {}).get("power_limit_w", [])
        return len(limits) > gpu and limits[gpu] == watts

    return wanted


def results(state: str, path: str = NODE) -> Callable[[Heard], bool]:
    """A result of this node that has the state somewhere."""
    return lambda m: "/Result/" in m.topic and m.topic.endswith(path) and state in m.body["states"]


def status(**fields: Any) -> Callable[[Heard], bool]:
    """A state of the agent with these fields."""
    return lambda m: m.topic == f"IT/v1/PUB/Agent/{NODE}" and fields.items() <= (m.body or {}).items()
