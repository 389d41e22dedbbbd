"""The part of the benchmark on power runs small and yields all keys; goals are judged at their size."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console

from tests.evaluation.bench import bench, power
from tests.evaluation.bench.power import PowerLoad, measured

LAB = str(Path(__file__).resolve().parents[2] / "deploy" / "sites" / "lab.yaml")


def test_a_few_devices_yield_all_keys() -> None:
    found = measured(PowerLoad(200, 12, 2, LAB, 30))
    for _, key in power.ROWS:
        assert all(found[f"{key}_{end}"] > 0.0 for end in ("p50", "p99", "max")), key
    assert all(math.isfinite(value) for value in found.values())
    assert found["program_differs_pu"] < 1e-6, "the rival solves the same problem"
    shown: bench.Figures = {f"power.quick.{key}": value for key, value in found.items()}
    console = Console(record=True, width=150)
    bench.show(shown, [], console)
    assert "Power shared among 200 made-up devices" in console.export_text()
    assert bench.judge(shown) == [], "small sizes judge no goal"


def test_the_goal_is_judged_at_its_size() -> None:
    key = "power.n100k.allocate_ms_p50"
    assert [met for *_, met in bench.judge({key: 19.0})] == [True]
    assert [met for *_, met in bench.judge({key: 21.0})] == [False]
