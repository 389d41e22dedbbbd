"""Reports of what-if courses: curves, groups and their spread, the page, the bar."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.recorded_site import lab, question_of, recorded
from twin.plant import Scenario
from twin.run import ProgressBar
from twin.simulation import Case, Result, run_cases, summary_of
from twin.simulation.whatif import ARMS, ArmResult, Trail
from twin.simulation.whatif_report import FIGURES, groups_of, render, spread

__all__ = ["lab", "recorded"]


def test_a_trail_keeps_the_worst_of_each_stretch_in_bounded_room() -> None:
    trail = Trail(1000.0, points=10)
    for second in range(1, 1001):
        trail.add(
            float(second),
            50.0 + (second == 555) * 40.0,
            0.0,
            float(second % 2),
            100.0 - (second == 42),
            np.nan,
        )
    columns = trail.columns()
    assert columns["time_s"] == [100.0 * (k + 1) for k in range(10)]
    assert columns["hottest_gpu_c"] == [50.0] * 5 + [90.0] + [50.0] * 4
    assert columns["lowest_flow_lpm"][0] == 99.0
    assert columns["it_power_kw"] == pytest.approx([0.5] * 10)
    assert all(x != x for x in columns["warmest_supply_c"])


def result_of(number: int, varied: dict[str, Any], hottest: float | None) -> Result:
    figures: dict[str, float | None] = dict.fromkeys(FIGURES, 1.0)
    course = ArmResult(figures | {"highest_gpu_temp_c": hottest}, [], Trail(10.0).columns(), 0, [])
    result = Result(Case(number, varied, Scenario("x", seed=number)))
    result.courses = dict.fromkeys(ARMS, course)
    return result


def test_groups_and_their_spread() -> None:
    results = [result_of(i, {"seed": i, "b": i // 3}, None if i == 4 else float(i)) for i in range(6)]
    assert [(v, len(members)) for v, members in groups_of(results)] == [({"b": 0}, 3), ({"b": 1}, 3)]
    first, second = summary_of(results)
    assert first["policies"]["highest_gpu_temp_c"] == {"median": 1.0, "lowest": 0.0, "highest": 2.0}
    assert second["nothing"]["highest_gpu_temp_c"] == {"median": 4.0, "lowest": 3.0, "highest": 5.0}
    assert first["difference"]["pue"]["median"] == 0.0
    assert spread([None]) == {"median": None, "lowest": None, "highest": None}


def test_what_a_scenario_is_called_is_not_markup() -> None:
    result = result_of(0, {"a<b>": "<script>"}, 1.0)
    told = {
        "site": "<i>", "scenario": "<script>alert(1)</script>", "horizon_s": 10.0, "from": None,
        "authority": {"<u>": "act"}, "site_authority": {"<u>": "off"}, "warnings": ["<q>"],
        "not_carried": ["<b>x"], "summary": summary_of([result]),
        "cases": [{"error": "<p>", "varied": {"<q>": 1}}],
    }  # fmt: skip
    page = render(told, result)
    for raw in ("<script>alert", "<i>,", "<u>", "<b>x", "<q>", "a<b>"):
        assert raw not in page


@pytest.mark.long
def test_the_bar_is_silent_where_there_is_no_terminal(lab: Path) -> None:
    said = io.StringIO()
    with ProgressBar(Console(file=said), "what if") as bar:
        results = run_cases(question_of(lab, horizon_s=3.0), [Case(0, {}, Scenario("calm"))], 1, bar)
    assert said.getvalue() == ""
    assert list(results[0].courses) == list(ARMS)
