"""The parts of the benchmark run small and yield all their keys; goals are judged at their own size alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from tests.evaluation.bench import bench, checkpoint, health, power, replacement
from tests.evaluation.bench.checkpoint import CheckpointLoad
from tests.evaluation.bench.health import StormLoad
from tests.evaluation.bench.plant import MODES, SIZES, Size, measured as plant_measured
from tests.evaluation.bench.power import PowerLoad
from tests.evaluation.bench.replacement import ARM_ROWS, ReplacementLoad
from tests.evaluation.replacement.scores import ARMS
from tests.support.builders import site_of

LAB = str(Path(__file__).resolve().parents[3] / "deploy" / "sites" / "lab.yaml")


def shown(part: str, found: dict[str, float], keys: Iterable[str]) -> str:
    """The table of these figures, which are all there and of a size that no goal is set for."""
    values = [found.get(key, found.get(f"{key}_p50", math.nan)) for key in keys]
    assert all(math.isfinite(value) for value in values)
    figures: bench.Figures = {f"{part}.quick.{key}": value for key, value in found.items()}
    console = Console(record=True, width=150)
    bench.show(figures, [], console)
    assert bench.judge(figures) == [], "small sizes judge no goal"
    return console.export_text()


def test_a_few_jobs() -> None:
    found = checkpoint.measured(CheckpointLoad(40, 2))
    assert "Checkpoints of 40 made-up jobs" in shown("checkpoint", found, (k for _, k in checkpoint.ROWS))
    assert abs(found["ettr_left_to_golden_max"]) < 1e-6


def test_a_few_devices_that_share_power() -> None:
    found = power.measured(PowerLoad(200, 12, 2, LAB, 30))
    assert "Power shared among 200 made-up devices" in shown("power", found, (k for _, k in power.ROWS))
    assert found["program_differs_pu"] < 1e-6, "the rival solves the same problem"


@pytest.mark.evaluation
def test_a_small_fleet() -> None:
    found = replacement.measured(ReplacementLoad(1, 20, 2, 1.0, 0.5, (1,)))
    text = shown("replacement", found, (f"{arm}.{key}" for arm in ARMS for _, key in ARM_ROWS))
    assert "Simulated: 64 nodes" in text
    assert "20 flagged nodes are triaged" in text


@pytest.mark.evaluation
def test_a_small_storm_of_faults_loses_nothing(tmp_path: Path) -> None:
    found = health.measured(StormLoad(1, 40, 12, 2, str(tmp_path)))
    keys = [key for _, *some, _ in health.ROWS for key in some if key]
    keys = [key for key in keys if found.get(key.replace("look_ms", "looks"), 1)]
    assert "faults a second of work" in shown("health", found, keys)
    assert (found["gpus"], found["nodes"]) == (72, 18)
    assert (found["events_sent"], found["events_lost"]) == (40 * (12 + 2), 0)
    assert found["storm_looks"] >= 1


@pytest.mark.evaluation
@pytest.mark.parametrize("mode", MODES)
def test_a_small_plant(mode: str) -> None:
    found = plant_measured(Size(2, 4, 4, 1), mode, steps=2)
    assert found["x_real_time"] == pytest.approx(1e6 / found["step_us"])
    assert found["mean_x_real_time"] <= found["x_real_time"]
    assert found["balance_error"] < 1e-6
    sizes = site_of(SIZES["n10k"].tree()).sizes
    assert (sizes["gpu"], sizes["node"], sizes["cdu"]) == (10_008, 2_502, 35)


@pytest.mark.parametrize(
    ("key", "met", "missed"),
    [
        ("n100k.replay_x_real_time", 20.1, 19.9),
        ("checkpoint.n10k.plan_ms_p50", 99.0, 101.0),
        ("power.n100k.allocate_ms_p50", 19.0, 21.0),
        (replacement.GOALS[0][0], 999.0, 1001.0),
        ("health.n100k.storm_take_trace_tick_journal_ms_p50", 49.0, 51.0),
        ("forecast.fit_two_weeks_s", 4.9, 5.1),
        ("live.ordinary_latency_s_p99", 2.4, 2.6),
    ],
)
def test_a_goal_is_judged_at_its_size(key: str, met: float, missed: float) -> None:
    assert [verdict for *_, verdict in bench.judge({key: met})] == [True]
    assert [verdict for *_, verdict in bench.judge({key: missed})] == [False]
    assert bench.judge({"n10k.peak_rss_bytes": 1e12}) == []
