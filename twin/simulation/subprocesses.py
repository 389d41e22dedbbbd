"""Subprocesses: a daemon or agents that this process starts on its own host, waits for and ends.

Used by the demo and the benchmark, which run a whole site on one machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from twin.api import Client, connect
from twin.catalogue import ConnectorError, StorageError, TwinError

HOST = "127.0.0.1"
START_S, STOP_S = 120.0, 10.0
# In a checkout; in an installed wheel it lies beside this module
_PLACES = (Path(__file__).resolve().parents[2] / "deploy" / "agent", Path(__file__).parent / "agent")
AGENT = next((place for place in _PLACES if place.is_dir()), _PLACES[0])


def free_port(wanted: int = 0) -> int:
    """This loopback port if it is free, or else any free one."""
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
    command: list[str],
    log: Path,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    programs: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start it, with the agent importable, and with the programs of a folder before all others; what it says
    goes to `log` unless `stdout` is given."""
    env = dict(os.environ)
    if programs is not None:
        env["PATH"] = os.pathsep.join((str(programs), env.get("PATH", os.defpath)))
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


def start_daemon(config: Path, log: Path, programs: Path | None = None) -> subprocess.Popen[bytes]:
    """`racktwin daemon run` with this configuration; `programs` as `start_child` has it."""
    command = [sys.executable, "-m", "twin", "daemon", "run", "--config", str(config)]
    return start_child(command, log, programs=programs)


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
