"""Broker process: Mosquitto, or the embedded broker where it is not installed, for one benchmark."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from twin.catalogue import ConnectorError
from twin.simulation import HOST, START_S, end_child, free_port, start_child, tail

SBIN = (os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin")  # where Debian has its brokers


@contextlib.contextmanager
def a_broker(folder: Path) -> Iterator[tuple[str, int]]:
    """(what it is, its port): Mosquitto where it is installed, else the embedded broker; without identities,
    on loopback. Raises ConnectorError if it does not come up."""
    program = shutil.which("mosquitto", path=os.pathsep.join(SBIN))
    log = folder / "broker.log"
    if program is None:
        child = start_child([sys.executable, "-W", "ignore", "-m", "twin.wiring.embedded_broker", "0"], log,
                            subprocess.PIPE, subprocess.PIPE)  # fmt: skip
        try:
            assert child.stdout is not None
            word, _, rest = child.stdout.readline().decode(errors="replace").strip().partition(" ")
            if word != "ready":
                raise ConnectorError(f"the embedded broker did not start: {rest}; {tail(log)}")
            yield "embedded (mosquitto is not installed)", int(rest)
        finally:
            end_child(child)
        return
    port, config = free_port(), folder / "mosquitto.conf"
    lines = [f"listener {port} {HOST}", "allow_anonymous true", "set_tcp_nodelay true", "persistence false"]
    lines += ["user root"] if os.geteuid() == 0 else []  # else it would drop to an account of its own
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    child = start_child([program, "-c", str(config)], log)
    try:
        _listens(child, port, log)
        yield f"mosquitto {_version(log)}".strip(), port
    finally:
        end_child(child)


def _listens(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and child.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.02)
    raise ConnectorError(f"mosquitto did not listen on {HOST}:{port}; {tail(log)}")


def _version(log: Path) -> str:
    _, _, rest = log.read_text(errors="replace").partition("mosquitto version ")
    return rest.split(maxsplit=1)[0] if rest else ""
