"""The part of the benchmark on replacement runs small and yields all keys; goals are judged at their size."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from tests.evaluation.bench import bench, replacement
from tests.evaluation.bench.replacement import ARM_ROWS, ReplacementLoad, measured
from tests.evaluation.replacement.scores import ARMS


@pytest.mark.evaluation
def test_a_small_fleet_yields_all_keys() -> None:
    found = measured(ReplacementLoad(1, 20, 2, 1.0, 0.5, (1,)))
    assert found["flagged"] == 20
    assert found["nodes"] == 64
    for arm in ARMS:
        assert all(math.isfinite(found[f"{arm}.{key}"]) for _, key in ARM_ROWS), arm
    shown: bench.Figures = {f"replacement.quick.{key}": value for key, value in found.items()}
    console = Console(record=True, width=150)
    bench.show(shown, [], console)
    text = console.export_text()
    assert "Simulated: 64 nodes" in text
    assert "20 flagged nodes are triaged" in text
    assert bench.judge(shown) == [], "small sizes judge no goal"


def test_the_goal_is_judged_at_its_size() -> None:
    (key, *_), *_ = replacement.GOALS
    assert [met for *_, met in bench.judge({key: 999.0})] == [True]
    assert [met for *_, met in bench.judge({key: 1001.0})] == [False]
