"""A real Mosquitto on a free port of loopback, which a test can stop, freeze and start again.

with mosquitto(server, tmp_path) as broker:
    ... broker.port ...
    broker.stop(); broker.start()      # an outage; sessions and retained messages survive it
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.patience import PATIENCE_S


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mosquitto:
    """A broker process; `port` stays the same over restarts."""

    def __init__(self, program: Path, folder: Path, extra_lines: tuple[str, ...], open_to_all: bool) -> None:
        self.program, self.folder, self.port = program, folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"listener {self.port} 127.0.0.1",
            f"allow_anonymous {str(open_to_all).lower()}",
            "set_tcp_nodelay true",
            # As in deploy/mosquitto/racktwin.conf: by default a busy broker drops what a burst leaves waiting
            "max_inflight_messages 1000",
            "max_queued_messages 200000",
            "persistence true",
            f"persistence_location {folder}/",
            "log_type all",
            f"log_dest file {folder}/mosquitto.log",
            *(["user root"] if os.geteuid() == 0 else []),
            *extra_lines,
        ]
        self.config = folder / "mosquitto.conf"
        self.config.write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        self.process = subprocess.Popen(
            [str(self.program), "-c", str(self.config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"mosquitto ended with {self.process.returncode}: {self.log()}")
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"mosquitto did not listen within {PATIENCE_S} s: {self.log()}")

    def stop(self) -> None:
        """Stop it; it writes its sessions and retained messages to disk."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it without a chance to write anything."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """It keeps its connections and does nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """Return the end of the broker's log, for a message of a test that failed."""
        path = self.folder / "mosquitto.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def mosquitto(
    server: Callable[..., Path],
    tmp_path: Path,
    extra_lines: tuple[str, ...] = (),
    open_to_all: bool = True,
) -> Iterator[Mosquitto]:
    """A running broker, its files in a folder below `tmp_path`."""
    broker = Mosquitto(server("mosquitto"), tmp_path / "mosquitto", extra_lines, open_to_all)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
