"""A real daemon in a process of its own, configured by the test, followed through its interface.

with running(tmp_path, broker=port) as daemon:
    daemon.until(lambda s: s["ready"])
    daemon.kill(); daemon.start()
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.builders import two_racks
from tests.support.mosquitto import free_port
from tests.support.patience import PATIENCE_S
from twin.config import load_config
from twin.daemon.leader import lock_path
from twin.run import journal_lines

ROOT = Path(__file__).resolve().parents[2]


class RunningDaemon:
    """`racktwin daemon run` and its files. `broker` is its port, or the section; `settings` are keys of the
    configuration that the test changes.
    """

    def __init__(
        self,
        folder: Path,
        broker: int | str | dict[str, Any],
        site: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.site_path, self.config_path = folder / "site.yaml", folder / "racktwin.yaml"
        self.write_site(site or two_racks(policies={"thermal_guard": {"authority": "act"}}))
        self.config: dict[str, Any] = {
            "site": "site.yaml",
            "broker": {"host": "127.0.0.1", "port": broker} if isinstance(broker, int) else broker,
            "api": {"port": self.port},
            "quotas": {"journal_reserve_mb": 1},
            **settings,
        }
        self.write_config()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "daemon.log"
        # Of an earlier test whose broker had the same port: this is no successor of that daemon.
        if not (folder / "state").exists() and "leader" not in settings:
            with contextlib.suppress(OSError, KeyError):
                name = yaml.safe_load(self.site_path.read_text(encoding="utf-8"))["site"]
                path = lock_path(load_config(self.config_path), name)
                if path.exists() and time.time() - path.stat().st_mtime > 60:
                    path.unlink()

    def __enter__(self) -> RunningDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()

    def write_site(self, tree: dict[str, Any]) -> None:
        self.site_path.write_text(yaml.safe_dump(tree), encoding="utf-8")

    def write_config(self) -> None:
        self.config_path.write_text(yaml.safe_dump(self.config), encoding="utf-8")

    @property
    def run_folder(self) -> Path:
        return self.folder / "state" / "run"

    def start(self, wait: bool = True) -> None:
        """Start it; wait until its first tick is done."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "twin", "daemon", "run", "--config", str(self.config_path)],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "STATE_DIRECTORY")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            self.until(self.is_up, "the daemon's first tick")

    def is_up(self) -> bool:
        """Return True if the daemon answers and has ticked."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.words()}")
        try:
            return bool(self.get("/api/v1/summary")["ready"])
        except (OSError, http.client.HTTPException, AssertionError):
            return False

    def until(self, holds: Callable[[], Any], what: str = "a condition") -> Any:
        """Wait until `holds()` gives something true; fails with the log's end."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            found = holds()
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"waited {PATIENCE_S:g} s for {what}\n{self.words()}")

    def token(self) -> str:
        return (self.folder / "state" / "admin.token").read_text(encoding="utf-8").strip()

    def ask(self, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """(status, parsed answer)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            headers = {"Authorization": f"Bearer {self.token() if token is None else token}"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.getheader("Content-Type", "")
            return answer.status, json.loads(text) if "json" in kind else text.decode()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, answer = self.ask("GET", path)
        assert status == 200, f"{path}: {status} {answer}"
        return answer

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.ask("POST", path, body)
        assert status == 200, f"{path}: {status} {answer}"
        return answer

    def words(self) -> str:
        """The end of its log, for a message of a test that failed."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def journal(self, *kinds: str) -> list[dict[str, Any]]:
        """Parsed lines of the journal's open segment, of these kinds (none named: all)."""
        lines = [json.loads(line) for line in journal_lines(self.run_folder / "journal.jsonl")]
        return [line for line in lines if not kinds or line["kind"] in kinds]

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As systemd does; returns the exit code."""
        return self._end(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _end(self, number: signal.Signals) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the daemon did not end after {number.name}: {self.words()}") from None


@contextmanager
def running(folder: Path, broker: int | str, **settings: Any) -> Iterator[RunningDaemon]:
    """A daemon that runs and is ready."""
    with RunningDaemon(folder, broker, **settings) as daemon:
        daemon.start()
        yield daemon
