"""The page of a backtest: what is drawn, what its read-out tells, a rival, a series that was never scored."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from models.backtest import BacktestResult, HorizonForecasts
from models.load import SeriesPanel
from twin.backtest import amount
from twin.backtest.load_report import at_rows, render
from twin.cli.main import main

SCORES = ["mae", "mae_naive", "mae_seasonal", "mae_ewma", "mase", "mase_low", "mase_high", "pinball",
          "pinball_persistence", "coverage50", "coverage90", "coverage99", "coverage90_low",
          "coverage90_high", "peak_error", "ramp_hit_rate", "ramp_false_rate"]  # fmt: skip


def test_a_drawn_row_shows_what_was_issued_for_it_or_up_to_a_stride_before() -> None:
    quantiles = np.arange(3.0)[:, None, None] + np.zeros((3, 1, 7))
    course = HorizonForecasts(10, 4, np.array([20, 24, 28]), quantiles, np.ones((1, 1)), 0.0)
    shown = at_rows(course, np.array([29, 30, 33, 34, 41, 42]), 0)[:, 0]
    np.testing.assert_array_equal(shown, [np.nan, 0.0, 0.0, 1.0, 2.0, np.nan])


def test_the_page_of_a_series_that_was_never_scored() -> None:
    panel = SeriesPanel(0, 60.0, np.full((40, 1), np.nan), ("a",))
    course = HorizonForecasts(1, 1, np.arange(20, 40), np.full((20, 1, 7), np.nan), np.ones((1, 1)), 0.0)
    blank = dict.fromkeys(SCORES, 0.5) | {"mase": math.nan, "ewma_half_life": 5, "targets": 10,
             "independent_targets": 10, "horizon_s": 60.0, "told_targets": 0}  # fmt: skip
    horizon = blank | {"series": {"a": blank}}
    told: dict[str, Any] = {
        "series": ["a"], "rows": 40, "step_s": 60.0, "from": 0.5, "notes": [], "losses": [],
        "lookahead_origins_checked": 0, "overall": {"mase": math.nan, "coverage90": math.nan},
        "horizons": [horizon],
    }  # fmt: skip
    assert "No rival was better" in render(told, BacktestResult(panel, 20, ("x",), (course,), 0.0, (), 0))


def test_the_read_out_names_only_lines_that_have_values_and_a_rival_is_told(tmp_path: Path) -> None:
    rows = [f"{1_700_000_000 + 60 * i},{np.sin(i / 9):.3f}" for i in range(200)]
    (tmp_path / "wave.csv").write_text("\n".join(["t,v", *rows]) + "\n")
    words = ["backtest", "load", "--series", str(tmp_path / "wave.csv"), "--time-column", "t",
             "--value-column", "v", "--experts", "last,ewma5", "--rival", "ewma60"]  # fmt: skip
    assert main([*words, "--report", str(tmp_path)]) == 0
    page = (tmp_path / "backtest.html").read_text()
    drawn = [json.loads(html.unescape(found)) for found in re.findall(r'data-p="([^"]*)"', page)]
    assert drawn
    for plot in drawn:
        assert [name for name, _, _ in plot["s"]] == ["forecast", "measured"]
        assert all(any(v is not None for v in values) for _, _, values in plot["s"])
    assert "Beside ewma60" in page
    assert "processor time of all fits" in page


def test_amounts_of_any_size_fit_a_table() -> None:
    assert [amount(v) for v in (0.0, 12.345, 1e-9, 3.5e300, math.nan)] == [
        "0",
        "12.3",
        "1e-09",
        "3.5e+300",
        "–",
    ]
