"""The plans of checkpoints of the benchmark run small and yield all keys; goals are judged at their size."""

from __future__ import annotations

import math

from rich.console import Console

from tests.evaluation.bench import bench, checkpoint
from tests.evaluation.bench.checkpoint import CheckpointLoad, measured


def test_a_few_jobs_yield_all_keys() -> None:
    found = measured(CheckpointLoad(40, 2))
    for _, key in checkpoint.ROWS:
        assert all(found[f"{key}_{end}"] > 0.0 for end in ("p50", "p99", "max")), key
    assert all(math.isfinite(value) for value in found.values())
    assert abs(found["ettr_left_to_golden_max"]) < 1e-6
    shown: bench.Figures = {f"checkpoint.quick.{key}": value for key, value in found.items()}
    console = Console(record=True, width=150)
    bench.show(shown, [], console)
    assert "Checkpoints of 40 made-up jobs" in console.export_text()
    assert bench.judge(shown) == [], "small sizes judge no goal"


def test_the_goal_is_judged_at_its_size() -> None:
    key = "checkpoint.n10k.plan_ms_p50"
    assert [met for *_, met in bench.judge({key: 99.0})] == [True]
    assert [met for *_, met in bench.judge({key: 101.0})] == [False]
