"""Demand as people see it: `racktwin demand`, and /demand for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders import two_racks
from tests.support.in_process_daemon import Desk, serving_aside

TREE = two_racks(
    queues=[{"name": "train"}],
    tenants=[{"name": "phys"}],
    services=[{"name": "chat"}],
    priorities=[{"name": "high"}],
)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with serving_aside(tmp_path, monkeypatch, tree=TREE, columns=200) as desk:
        yield desk


def test_what_jobs_hold_and_wait_for_is_shown(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "site.gpu_running_count": 96.0, "site.gpu_pending_count": 24.0, "site.gpu_idle_count": 40.0,
        "site.gpu_spare_count": 8.0, "queue.gpu_running_count": 96.0, "queue.gpu_pending_count": 0.0,
        "queue.oldest_wait_s": 300.0, "priority.gpu_pending_count": [24.0, 0.0],
        "service.requests_per_s": 12.5, "service.kv_cache_used_pu": 0.42,
        "gpu.sm_active_pu": [0.9] * 72 + [0.0] * 72,
    }  # fmt: skip
    desk.do(lambda: desk.pod.tick(values))
    assert desk.run("demand") == 0
    said = capsys.readouterr().out
    for expected in ("96 granted", "40 idle", "8 spare", "- out of service", "72 busy", "queue lab/train",
                     "tenant lab/phys", "priority lab/high", "priority lab/rest", "5 min",
                     "lab/chat", "12.5", "42%"):  # fmt: skip
        assert expected in said, said
    assert desk.run("demand", "--format", "json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["lab"]["gpu_busy_count"] == 72
    # a queue without waiting jobs is empty; of a tenant of whom nobody speaks nothing is known
    assert rows["lab/train"]["gpu_pending_count"] == 0
    assert rows["lab/phys"]["gpu_pending_count"] is None
    assert [rows[f"lab/{name}"]["gpu_pending_count"] for name in ("high", "rest")] == [24, 0]


def test_without_a_scheduler_it_says_what_to_do(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: desk.pod.tick({}))
    assert desk.run("demand") == 0
    said = capsys.readouterr().out
    assert "expected `jobs.slurm` or `kubernetes`" in said
    assert "- granted" in said
