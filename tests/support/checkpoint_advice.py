"""The checkpoint client beside advice that a test writes: pace, folder, reports.

made("file://...").due(step)         # the fixture `made`: advisors that look often, closed at the end
put(tmp_path, advice(interval_s=60.0))
reports(tmp_path)
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import racktwin_client.advisor as client
from racktwin_client.advisor import NS, Advisor, Pace, StandingAdvice

from tests.support.patience import PATIENCE_S

CLIENT = Path(client.__file__).parents[1]
NOW_NS = 1_800_000_000 * NS


def advice(job: str = "j", now_ns: int | None = None, lease_s: float = 60.0, **fields: Any) -> bytes:
    at_ns = time.time_ns() if now_ns is None else now_ns
    body = {"v": 1, "job": job, "interval_s": 60.0, "save_since_ns": None, "issued_ns": at_ns,
            "expires_ns": at_ns + int(lease_s * NS), "epoch": 1, "reason": "because"}  # fmt: skip
    return json.dumps(body | fields).encode()


def held(
    interval_s: float | None = None, want: tuple[int, int] | None = None, since: float = math.inf
) -> StandingAdvice:
    return StandingAdvice(interval_s, want, since)


def pace(own_s: float = 100.0, steps: int = 0, least_s: float = 1.0, share: float = 0.2) -> Pace:
    return Pace(0.0, own_s, steps, 4 * own_s, least_s, share)


def wait(until: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Advisor]]:
    """Advisors of a folder that look often, closed at the end."""
    found: list[Advisor] = []

    def make(source: str | None = None, **terms: Any) -> Advisor:
        terms = {"own_interval_s": 1000.0, "poll_s": 0.02, "least_interval_s": 0.001, "rank": 0} | terms
        found.append(Advisor("j", f"file://{tmp_path}" if source is None else source, **terms))
        return found[-1]

    yield make
    for one in found:
        one.close()


def put(folder: Path, body: bytes) -> None:
    (folder / ".x").write_bytes(body)
    (folder / ".x").replace(folder / "j.json")


def reports(folder: Path) -> list[dict[str, Any]]:
    path = folder / "j.reports.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(CLIENT), **variables}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def built_wheel(folder: Path) -> list[Path]:
    """The wheel of the client, built into a folder without a network, as `make client` does."""
    pytest.importorskip("hatchling", reason="hatchling is not here: run `make test`, which installs it")
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder)]
    build = [sys.executable, "-m", "pip", "wheel", *options, str(CLIENT)]
    answer = subprocess.run(build, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return list(folder.glob("racktwin_client-*-py3-none-any.whl"))
