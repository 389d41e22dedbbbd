"""A VictoriaMetrics of the tests' own, on loopback: started, stopped, frozen and killed at will.

vm = Victoria(server("victoria-metrics"), tmp_path)
vm.start(); vm.series("rack_power_w"); vm.stop(); vm.kill()
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from tests.support.patience import PATIENCE_S

Series = dict[tuple[tuple[str, str], ...], dict[int, float]]  # labels, sorted -> (ms -> value)


def free_port() -> int:
    """A port of loopback that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stands_still(pid: int) -> bool:
    """True if each thread has stopped: one that has not may still answer."""
    states = (
        task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")
    )
    return all(state == "T" for state in states)


class Victoria:
    """The server; `url` stays the same over restarts. Duplicates of an instant are one."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder, self.port = program, folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin, and wait until it answers."""
        with (self.folder / "victoria.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self.program), "-httpListenAddr", f"127.0.0.1:{self.port}",
                    "-storageDataPath", str(self.folder / "victoria"), "-retentionPeriod", "100y",
                    "-memory.allowedBytes", "64MB", "-dedup.minScrapeInterval", "1ms",
                    "-search.latencyOffset", "0s",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "victoria.log").read_text()[-2000:]
                assert time.monotonic() < ends, "it did not answer in time"
                time.sleep(0.05)

    def stop(self) -> None:
        """End in good order; what it holds is on the disk then."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As a crash would: what it held in memory is lost."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """It takes connections and never answers, until `thaw`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        ends = time.monotonic() + PATIENCE_S
        while not _stands_still(self._process.pid):
            assert time.monotonic() < ends, "it does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(20)
            self._process = None

    def get(self, path: str) -> bytes:
        """The answer to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            body: bytes = answer.read()
            return body

    def series(self, metric: str) -> Series:
        """All series of a metric, with all their points."""
        self.get("/internal/force_flush")
        match = urllib.parse.urlencode({"match[]": metric, "reduce_mem_usage": "0"})
        out: Series = {}
        for line in self.get(f"/api/v1/export?{match}").splitlines():
            row = json.loads(line)
            labels = tuple(sorted((k, v) for k, v in row["metric"].items() if k != "__name__"))
            out.setdefault(labels, {}).update(zip(row["timestamps"], row["values"], strict=True))
        return out
