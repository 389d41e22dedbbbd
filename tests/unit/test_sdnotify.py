"""Messages to systemd, read at the other end of the socket."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from twin.daemon import SdNotify


@pytest.fixture(params=["path", "abstract"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SdNotify, socket.socket]]:
    """(ours, systemd's)"""
    abstract = request.param == "abstract"
    address = f"@racktwin-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
        theirs.bind("\0" + address[1:] if abstract else address)
        theirs.settimeout(5)
        ours = SdNotify(address)
        yield ours, theirs
        ours.close()


def test_each_state_is_one_datagram(ends: tuple[SdNotify, socket.socket]) -> None:
    ours, theirs = ends
    ours.ready("tick 7")
    assert theirs.recv(1000) == b"READY=1\nSTATUS=tick 7"
    ours.reloading()
    assert re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=\d+", theirs.recv(1000))
    ours.watchdog()
    assert theirs.recv(1000) == b"WATCHDOG=1"
    ours.stopping()
    assert theirs.recv(1000) == b"STOPPING=1"
    ours.status("a\nREADY=1\x00 b" + "x" * 1000)
    assert theirs.recv(2000) == b"STATUS=a READY=1  b" + b"x" * (200 - 12)


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    ours = SdNotify()
    ours.ready()
    ours.watchdog()
    ours.close()
    assert (ours.active, ours.failed, ours.watchdog_s) == (False, 0, 0.0)


def test_a_socket_that_is_gone_or_full_holds_nobody_up(tmp_path: Path) -> None:
    gone = SdNotify(str(tmp_path / "nobody"))
    gone.ready()
    assert gone.failed == 1
    gone.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
        theirs.bind(str(tmp_path / "full"))
        full = SdNotify(str(tmp_path / "full"))
        for _ in range(10_000):
            full.watchdog()
        assert full.failed > 0
        full.close()


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("30000000", "", 30.0),
        ("30000000", "own", 30.0),
        ("30000000", "1", 0.0),
        ("soon", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_the_watchdog_is_ours_or_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usec: str, pid: str, expected: float
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    ours = SdNotify(str(tmp_path / "x"))
    assert ours.watchdog_s == expected
    ours.close()
