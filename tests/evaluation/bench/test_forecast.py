"""The forecasts' part of the benchmark runs small, yields its keys, and measures what it says it does."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from models.load import DEFAULT_EXPERTS, FORECASTERS
from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.bench import forecast
from tests.evaluation.bench.forecast_run import FITTED

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


def test_every_fitted_expert_is_measured() -> None:
    assert set(FITTED) == {n for n in DEFAULT_EXPERTS if FORECASTERS[n].fitted}
    assert "lstm" not in FITTED
