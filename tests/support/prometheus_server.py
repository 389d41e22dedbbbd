"""A Prometheus of the tests' own, on loopback, that scrapes and evaluates every half second.

with Prometheus(server("prometheus"), tmp_path, config) as prometheus:
    prometheus.query("up")
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.mosquitto import free_port
from tests.support.patience import PATIENCE_S

Series = list[tuple[dict[str, str], float]]


class Prometheus:
    """The server. `config` is its file, but for the periods."""

    def __init__(self, program: Path, folder: Path, config: dict[str, Any]) -> None:
        self.program, self.folder, port = program, folder, free_port()
        self.address = f"127.0.0.1:{port}"
        paced = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        self.config = config | {"global": paced}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(self.config), encoding="utf-8")
        with (self.folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(self.program), f"--config.file={self.folder}/prometheus.yaml",
                    f"--web.listen-address={self.address}", f"--storage.tsdb.path={self.folder}/tsdb",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self._wait(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=10).close()
                return
            except OSError:  # nobody there, or 503 until it is ready
                assert process.poll() is None, self.words()
                assert time.monotonic() < ends, f"it did not answer in time\n{self.words()}"
                time.sleep(0.05)

    def words(self) -> str:
        """The end of its log."""
        return (self.folder / "prometheus.log").read_text()[-2000:]

    def get(self, path: str, **more: str) -> Any:
        """`data` of an answer. Raises ValueError with the server's own words if it refuses."""
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(more)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from None

    def query(self, expr: str, at_s: float | None = None) -> Series:
        """The instant vector of an expression."""
        data = self.get("/api/v1/query", query=expr, time=f"{time.time() if at_s is None else at_s:.3f}")
        assert data["resultType"] == "vector", data["resultType"]
        return [(row["metric"], float(row["value"][1])) for row in data["result"]]

    def label_values(self, match: str, label: str) -> list[str]:
        """The values that a label has in the series that match."""
        values: list[str] = self.get(f"/api/v1/label/{label}/values", **{"match[]": match})
        return values
