"""The forecasts' part of the benchmark runs small, yields its keys, and measures what it says it does."""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from models.load import DEFAULT_EXPERTS, FORECASTERS, Load
from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.bench import bench, forecast
from tests.evaluation.bench.forecast_run import FITTED, STEP_S, Clocks, bytes_held, make_values

MAY_BE_ZERO = ("load_average", "loop_lag", "handing_over_lag", "statistics_modules", "rest_ms", "rest_cpu_ms")


@pytest.mark.evaluation
def test_a_quick_run_yields_all_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert evaluate(["bench", "--quick", "--only", "forecast", "--out", str(out)]) == 0
    found = msgspec.json.decode(out.read_bytes(), type=dict[str, float | int | str])
    mine = {k.removeprefix("forecast.quick."): v for k, v in found.items() if k.startswith("forecast.quick.")}
    for key, value in mine.items():
        if isinstance(value, int | float):
            assert math.isfinite(value), key
            assert value > 0 or any(part in key for part in MAY_BE_ZERO), (key, value)
    assert {f"fit.{name}_s" for name in FITTED} <= mine.keys()
    n = mine["fit_many_series"]
    for grid in ("fine", "coarse"):
        for part in (*(f"expert.{name}" for name in DEFAULT_EXPERTS), "online", "rest", "all"):
            assert {f"{grid}.{part}_ms_p50", f"{grid}.{part}_cpu_ms_p50"} <= mine.keys()
        assert mine[f"{grid}.learn_ms_p50"], "outcomes are judged while it is measured"
    assert mine["outcomes_judged"], "the longest horizon has seen an outcome"
    assert {f"predict_{n}_series_ms_{end}" for end in ("p50", "p99", "max")} <= mine.keys()
    for _, key, _ in forecast.ROWS:
        assert key.startswith("backtest") or {key, f"{key}_p50"} & mine.keys(), key
    assert mine["start.statistics_modules"] == 0, mine["start.statistics_names"]
    assert not any(key.startswith("goal.") for key in found), "small sizes judge no goal"
    assert list(tmp_path.iterdir()) == [out], "what was written for the start is thrown away"
    assert "gradient_boosting" in capsys.readouterr().out


def test_goals_and_rows_show_in_the_table() -> None:
    found: bench.Figures = {
        "forecast.fit_two_weeks_s": 5.1,
        "forecast.fit.linear_s": 0.25,
        "forecast.fit.linear_cpu_s": 0.24,
        "forecast.predict_2000_series_tick_cpu_ms_p50": 49.0,
    }
    assert [met for *_, met in bench.judge(found)] == [False, True]
    console = Console(record=True, width=150)
    bench.show(found, [], console)
    text = console.export_text()
    assert "MISSED" in text
    assert "linear" in text


def test_series_have_seasons_and_remember() -> None:
    values = make_values(3000, 3, STEP_S)
    assert values.shape == (3000, 3)
    assert np.array_equal(values, make_values(3000, 3, STEP_S)), "seeded"
    away = values - values.mean(axis=0)
    kept = (away[1:] * away[:-1]).sum(axis=0) / (away**2).sum(axis=0)
    assert (kept > 0.9).all()
    assert (np.ptp(values, axis=0) > 5000).all(), "a day's season of 6 kW from low to high"


def test_clocks_add_up_what_happens_in_a_round() -> None:
    clocks = Clocks()
    wait = clocks.timed("wait", time.sleep)
    for naps in (1, 2, 3):
        if naps > 1:
            clocks.rounds.append({})
        for _ in range(naps):
            wait(0.002)
    found = clocks.figures("x.", {"all": ("wait", "never"), "never": ("never",)})
    assert found["x.all_ms_p50"] >= 4.0
    assert found["x.all_ms_max"] >= 6.0
    assert found["x.all_cpu_ms_p50"] < found["x.all_ms_p50"], "sleep takes no processor time"
    assert found["x.never_ms_max"] == 0.0


def test_bytes_are_counted_once_and_through_views() -> None:
    whole = np.zeros(1000)
    assert bytes_held({"a": whole, "b": [whole, whole[10:]]}, set()) == 8000
    assert bytes_held(Load(("rack.power_w",)), set()) < 10_000, "nothing was gathered yet"


def test_every_fitted_expert_is_measured() -> None:
    assert set(FITTED) == {n for n in DEFAULT_EXPERTS if FORECASTERS[n].fitted}
    assert "lstm" not in FITTED
