"""Children: processes that this one starts on its own host, waits for and ends: a daemon, agents, a broker.

For the demo and the benchmark, which play a whole site on one machine. Part of the shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from twin.app.client import Client, connect
from twin.errors import ConnectorError, StorageError, TwinError

HOST = "127.0.0.1"
START_S, STOP_S = 30.0, 10.0
AGENT = Path(__file__).resolve().parents[2] / "deploy" / "agent"
SBIN = (os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin")  # where Debian has its brokers


def free_port(wanted: int = 0) -> int:
    """This port of loopback if it is free, else any."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise StorageError("no port of 127.0.0.1 is free")


def need_agent() -> None:
    """Raises StorageError where the agent's package is not at hand."""
    if importlib.util.find_spec("racktwin_agent") is None and not AGENT.is_dir():
        raise StorageError("the agent (deploy/agent) is not installed: pip install deploy/agent")


def start_child(
    command: list[str], log: Path, stdin: int = subprocess.DEVNULL, stdout: int | IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start it, with the agent importable; what it says goes to `log` unless `stdout` is given."""
    env = dict(os.environ)
    if AGENT.is_dir():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(AGENT), env.get("PYTHONPATH", ""))))
    with log.open("ab") as file:
        # A session of its own: Ctrl-C is for this process, which ends the others in order.
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=file if stdout is None else stdout,
            stderr=file,
            env=env,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509
        )


def _end_with_parent() -> None:
    """In the child: SIGTERM once its parent is gone, however that went (prctl(2))."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def start_daemon(config: Path, log: Path) -> subprocess.Popen[bytes]:
    """`racktwin run` with this configuration."""
    return start_child([sys.executable, "-m", "twin.app", "run", "--config", str(config)], log)


def reached(config: Path, daemon: subprocess.Popen[bytes], log: Path) -> Client:
    """A client of the daemon, once it has ticked. Raises ConnectorError if that does not come."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if daemon.poll() is not None:
            break
        with contextlib.suppress(TwinError):
            client = connect(None, config, None)
            if client.get("/summary")["ready"]:
                return client
        time.sleep(0.1)
    raise ConnectorError(f"the daemon did not come up; the end of {log}:\n{tail(log)}")


def tail(log: Path) -> str:
    """The end of a log, for a message."""
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


@contextlib.contextmanager
def a_broker(folder: Path) -> Iterator[tuple[str, int]]:
    """(what it is, its port): Mosquitto where it is installed, else the embedded broker; without identities,
    on loopback. Raises ConnectorError if it does not come up."""
    program = shutil.which("mosquitto", path=os.pathsep.join(SBIN))
    log = folder / "broker.log"
    if program is None:
        child = start_child([sys.executable, "-W", "ignore", "-m", "twin.app.broker", "0"], log,
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
