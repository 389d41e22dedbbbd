"""Real NATS servers on loopback: a hub with JetStream, and a leaf node with MQTT beside each hall.

with nats_fleet(server, tmp_path, ("hall-a", "hall-b")) as fleet:
    fleet.hub.url, fleet.leaf["hall-a"].url, fleet.mqtt_port["hall-a"]
    fleet.leaf["hall-a"].stop(); fleet.leaf["hall-a"].start()     # a cut of that hall
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from connectors.nats import NatsSettings
from tests.support.mosquitto import free_port
from tests.support.patience import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy" / "fleet"


class NatsServer:
    """A server process; its ports stay the same over restarts."""

    def __init__(self, program: Path, folder: Path, config: str, port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.program, self.folder, self.port = program, folder, port
        self.url = f"nats://127.0.0.1:{port}"
        self.file = folder / "nats.conf"
        self.file.write_text(config)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        log = (self.folder / "nats.log").open("ab")
        before = log.tell()
        self.process = subprocess.Popen(
            [str(self.program), "-c", str(self.file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"nats-server ended with {self.process.returncode}: {self.log()}")
            if b"Server is ready" in (self.folder / "nats.log").read_bytes()[before:]:
                return
            time.sleep(0.02)
        self.stop()
        raise AssertionError(f"nats-server was not ready within {PATIENCE_S} s: {self.log()}")

    def freeze(self) -> None:
        """Keep its connections and do nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it: what it has not written is lost."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def log(self) -> str:
        """The end of what it wrote."""
        return (self.folder / "nats.log").read_text(errors="replace")[-2000:]


@dataclass
class NatsFleet:
    """The servers of a fleet."""

    hub: NatsServer
    leaf: dict[str, NatsServer]
    mqtt_port: dict[str, int]
    user: str = "fleet"
    password: str = "CHANGE-FLEET"
    hall_user: str = "hall"
    hall_password: str = "CHANGE-DAEMON"

    def hall(self, name: str) -> NatsSettings:
        """Settings of the daemon of a hall."""
        return NatsSettings((self.leaf[name].url,), username=self.hall_user, password=self.hall_password)

    def daemon(self) -> NatsSettings:
        """Settings of the daemon of the hub."""
        return NatsSettings((self.hub.url,), username=self.user, password=self.password)


def server_version(program: Path) -> tuple[int, int]:
    """Version of a nats-server, such as (2, 9)."""
    said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def _filled(name: str, values: dict[str, object]) -> str:
    """A configuration that ships, with paths, ports and passwords of a test."""
    text = (DEPLOY / name).read_text()
    for key in values:
        assert key in text, f"{name} lacks {key}"
    longest_first = sorted(
        values, key=len, reverse=True
    )  # at once: a port may hold the digits of another key
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: str(values[found[0]]), text)


def hub_config(folder: Path, port: int, leaf_port: int) -> str:
    """The configuration of the hub."""
    return _filled("hub.conf", {"7422": leaf_port, "4222": port, "/var/lib/nats/hub": folder / "jetstream"})


def leaf_config(hall: str, folder: Path, ports: tuple[int, int, int]) -> str:
    """The configuration of a leaf node; ports of NATS, of MQTT, and of the hub for leaf nodes."""
    own, mqtt, leaf_port = ports
    places = {"7422": leaf_port, "4223": own, "1884": mqtt, "/var/lib/nats/hall-a": folder / "jetstream"}
    return _filled("leaf.conf", {**places, "hall-a": hall, "HALL-A": hall.upper()})


@contextmanager
def nats_fleet(
    server: Callable[..., Path],
    tmp_path: Path,
    halls: tuple[str, ...] = ("hall-a", "hall-b"),
    altered: Callable[[str, str], str] = lambda name, text: text,
) -> Iterator[NatsFleet]:
    """Servers with the configurations of deploy/fleet, `altered(name, text)` of hub or a hall."""
    program, port, leaf_port = server("nats-server"), free_port(), free_port()
    folder = tmp_path / "nats-hub"
    hub = NatsServer(program, folder, altered("hub", hub_config(folder, port, leaf_port)), port)
    leaves, mqtt = {}, {}
    for hall in halls:
        own, mqtt[hall] = free_port(), free_port()
        folder = tmp_path / f"nats-{hall}"
        text = leaf_config(hall, folder, (own, mqtt[hall], leaf_port))
        leaves[hall] = NatsServer(program, folder, altered(hall, text), own)
    with ExitStack() as stack:
        for one in (hub, *leaves.values()):
            one.start()
            stack.callback(one.stop)
        yield NatsFleet(hub, leaves, mqtt)
