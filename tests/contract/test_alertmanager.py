"""Alertmanager itself hears of an alarm, that it got worse, that it was put aside and that it is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from twin.catalogue import NS
from twin.config import Config, Loaded, Notify
from twin.contracts import Finding
from twin.daemon import notify
from twin.daemon.alarms import AlarmBook
from twin.daemon.notify import Notifier

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alertmanager.yaml"
CONFIG = "route: {receiver: nobody, group_wait: 0s}\nreceivers: [{name: nobody}]\n" + RULES.read_text()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Alertmanager:
    """A process of its own, which may be stopped and started again on the same port."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder, self.port = program, folder, _free_port()
        (folder / "am.yml").write_text(CONFIG)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.folder / "am.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, f"--config.file={self.folder / 'am.yml'}",
                 f"--storage.path={self.folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}",
                 "--cluster.listen-address="],
                stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                self.alerts()
                return
            assert time.monotonic() < deadline, (self.folder / "am.log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def alerts(self, inhibited: bool = False) -> dict[str, str]:
        """Active alerts, or inhibited ones alone: alarm -> severity."""
        wanted = f"active={str(not inhibited).lower()}&inhibited={str(inhibited).lower()}"
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts?{wanted}", timeout=PATIENCE_S) as response:
            found = json.load(response)
        return {a["labels"]["alarm"]: a["labels"]["severity"] for a in found}


@pytest.fixture
def alertmanager(server: Callable[..., Path], tmp_path: Path) -> Iterator[Alertmanager]:
    held = Alertmanager(server("prometheus-alertmanager", "prometheus-alertmanager"), tmp_path)
    held.start()
    try:
        yield held
    finally:
        held.stop()


async def _until(read: Callable[[], Any], expected: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    found = None
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = await asyncio.to_thread(read)
            if found == expected:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"expected {expected}, found {found}")


def test_the_life_of_an_alarm(
    alertmanager: Alertmanager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "RESEND_S", 0.5)
    monkeypatch.setattr(notify, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(notify, "LAST_RETRY_S", 0.5)
    config = Config(
        site="s", broker="embedded", notify=[Notify(kind="alertmanager", url=alertmanager.url + "/")]
    )
    book = AlarmBook(tmp_path)

    def finding(identity: str, severity: str) -> Finding:
        return Finding(identity, severity, "Überhitzt", ("lab/r1",), ("70 °C\n",), 0.9, "Look.")

    async def story() -> None:
        notifier = Notifier(Loaded(config, tmp_path / "c.yaml"), "lab")

        def see(**found: str) -> None:
            now_ns = time.time_ns()
            notifier.offer(book.update([finding(f"{k}/lab/r1", v) for k, v in found.items()], now_ns))

        task = asyncio.create_task(notifier.run())
        try:
            see(heat="warning", leak="critical", small="info")
            await _until(alertmanager.alerts, {"heat/lab/r1": "warning", "leak/lab/r1": "critical"})
            see(heat="critical", leak="critical")
            await _until(alertmanager.alerts, {"heat/lab/r1": "critical", "leak/lab/r1": "critical"})
            book.shelve("leak/lab/r1", time.time_ns() + 60 * NS, "ada", "known")
            see(heat="critical", leak="critical")
            await _until(alertmanager.alerts, {"heat/lab/r1": "critical"})
            alertmanager.stop()  # what changes while it is down arrives afterwards
            book.unshelve("leak/lab/r1", "ada")
            see(leak="critical", flow="warning")
            await _until(lambda: bool(notifier.faults()), True)
            alertmanager.start()
            await _until(alertmanager.alerts, {"leak/lab/r1": "critical", "flow/lab/r1": "warning"})
            see()
            await _until(alertmanager.alerts, {})
            assert notifier.faults() == {}
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(story())


def test_what_follows_from_another_alarm_is_inhibited_by_the_shipped_rule(
    alertmanager: Alertmanager, tmp_path: Path
) -> None:
    config = Config(site="s", broker="embedded", notify=[Notify(kind="alertmanager", url=alertmanager.url)])
    book, causes = AlarmBook(tmp_path), {"silence/lab": ("part/mqtt", 30.0)}
    link, outage, other = (
        Finding(identity, "warning", "It is down", ("lab",), (), 1.0, "Look.")
        for identity in ("part/mqtt", "silence/lab", "heat/lab")
    )

    async def story() -> None:
        notifier = Notifier(Loaded(config, tmp_path / "c.yaml"), "lab")
        task = asyncio.create_task(notifier.run())
        try:
            notifier.offer(book.update([link, outage, other], time.time_ns(), causes))
            await _until(alertmanager.alerts, {"part/mqtt": "warning", "heat/lab": "warning"})
            await _until(lambda: alertmanager.alerts(inhibited=True), {"silence/lab": "warning"})
            notifier.offer(book.update([other], time.time_ns(), causes))
            await _until(lambda: alertmanager.alerts(inhibited=True), {})
            await _until(alertmanager.alerts, {"heat/lab": "warning"})
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(story())
