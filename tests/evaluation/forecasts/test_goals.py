"""Goals of the forecasts, judged: each bound from both sides, what has nothing to judge, and the summary."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.evaluation.forecasts.goals import coverage_by_targets, goals, mase_met, summary

NONE = math.nan


def unit(**given: Any) -> dict[str, Any]:
    base = {"mase": 0.9, "mase_low": 0.85, "mase_high": 0.95, "pinball": 0.8, "pinball_persistence": 1.0,
            "coverage90": 0.9, "independent_targets": 600, "unchanged_share": 0.1}  # fmt: skip
    return base | given


def data_of(name: str = "A", series: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """A data set of one horizon whose scores are those of its only series."""
    told = unit(**given)
    whole = {"mase": told["mase"], "mase_low": told["mase_low"], "mase_high": told["mase_high"]}
    horizon = told | {"horizon_s": 60.0, "series": {"a": told} if series is None else series}
    return {"name": name, "horizons": [horizon], "overall": whole, "overall_of": {}}


def verdicts(*data: dict[str, Any]) -> list[bool | None]:
    return [one["met"] for one in goals(data)]


@pytest.mark.parametrize(
    "mase, still, met",
    [(0.9999, 0.1, True), (1.0, 0.1, False), (1.0, 0.5, False), (1.0, 0.51, True), (1.001, 0.9, False)],
)
def test_one_is_enough_only_where_most_changes_are_zero(mase: float, still: float, met: bool) -> None:
    assert mase_met(mase, still) == met
    assert verdicts(data_of(mase=mase, mase_high=1.1, unchanged_share=still))[:2] == [met, met]


@pytest.mark.parametrize(
    "given, place",
    [
        ({"mase": 1.2}, (0, 1)),
        ({"pinball": 1.0}, (2,)),
        ({"pinball": 0.1, "pinball_persistence": 0.0}, (2,)),
        ({"coverage90": 0.879}, (3,)),
        ({"coverage90": 0.921}, (3,)),
        ({"coverage90": 0.975}, (3, 4)),
        ({"coverage90": 0.79, "independent_targets": 500}, (3, 4)),
        ({"coverage90": 0.79, "independent_targets": 499}, (3,)),
    ],
)
def test_each_goal_is_missed_by_itself(given: dict[str, Any], place: tuple[int, ...]) -> None:
    told = verdicts(data_of(**given))
    assert tuple(i for i, met in enumerate(told) if met is False) == place


def test_what_cannot_be_judged_is_neither_met_nor_missed() -> None:
    keys = ("mase", "mase_low", "mase_high", "pinball", "pinball_persistence", "coverage90")
    nothing: dict[str, Any] = dict.fromkeys(keys, NONE)
    assert verdicts(data_of(**nothing)) == [None] * 5
    assert all("nothing to judge" in line for line in summary(goals([data_of(**nothing)])))
    assert verdicts(data_of(pinball=0.0, pinball_persistence=0.0))[2] is None


def test_series_are_judged_one_by_one_and_what_is_not_pooled_by_itself() -> None:
    series = {"a": unit(pinball=1.1), "sum": unit(mase=1.3)}
    data = data_of(series=series) | {"overall_of": {"sum": unit(mase=1.3)}}
    judged = goals([data])
    assert [one["of_cases"] for one in judged] == [2, 2, 3, 1, 2]
    assert [[case["where"] for case in one["missed"]] for one in judged] == [
        ["A: sum"], ["A, 1 min, sum"], ["A, 1 min, a"], [], [],
    ]  # fmt: skip


def test_coverage_over_all_weighs_by_targets_that_do_not_overlap() -> None:
    series = {
        "a": unit(coverage90=0.8, independent_targets=30),
        "b": unit(coverage90=1.0, independent_targets=10),
        "c": unit(coverage90=NONE, independent_targets=99),
    }
    assert list(coverage_by_targets([data_of(series=series)])) == pytest.approx([0.85, 40])


def test_the_rival_is_one_more_goal_for_data_sets_that_have_one() -> None:
    better = {"ratio": 0.95, "low": 0.9, "high": 1.01}
    worse = {"ratio": 1.05, "low": 1.01, "high": 1.1}
    data = data_of() | {"rival": {"name": "lstm", "overall": better, "overall_of": {"sum": worse}}}
    judged = goals([data, data_of("B")])
    assert len(judged) == 6
    assert judged[5]["met"] is False
    assert [case["where"] for case in judged[5]["missed"]] == ["A: sum"]
    lines = summary(judged)
    assert "MISSED (met in 1 of 2): error below that of lstm" in lines[5]
    assert "with an interval that reaches 1" in lines[6]
    assert "missed: A: sum: 1.050 (1.010 to 1.100)" in lines[7]
