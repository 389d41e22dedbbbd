"""Scores of simulated fleets: what counts as an alarm that came true, and figures that are known by hand."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from tests.evaluation.health.alarms import FALSE, PENDING, TRUE, alarms_of
from tests.evaluation.health.course import DAY_S, HOUR_S, Course, Failed, Spell
from tests.evaluation.health.intervals import median_interval, rate_interval, share_interval
from tests.evaluation.health.scores import calibration, coverage, goals, lemons, scores

D, H = DAY_S, HOUR_S
NAN = math.nan


def course(
    failures: list[Failed] | None = None, spells: list[Spell] | None = None, *, n: int = 4,
    days: float = 60.0, train: float = 10.0, seeded: tuple[int, ...] = (),
) -> Course:  # fmt: skip
    return Course(1, 1.0, n, n, 0.0, train * D, days * D, failures or [], list(seeded), spells or [],
                  flagged_s=np.full(n, np.inf))  # fmt: skip


def fails(at_d: float, back_d: float = math.inf, precursor_d: float = NAN, shared: bool = False) -> Failed:
    return Failed(0, "memory", at_d * D, back_d * D, precursor_d * D, shared)


def said(begin_d: float, last_d: float) -> Spell:
    return Spell(0, begin_d * D, last_d * D, "rule")


TABLE = [
    ("drained until it failed", [fails(20)], [said(19, 21)], [(19, TRUE)]),
    ("over for less than a day when it failed", [fails(20)], [said(18, 19.1)], [(18, TRUE)]),
    ("over for more than a day when it failed", [fails(20)], [said(18, 18.9)], [(18, FALSE)]),
    ("seven days to the failure", [fails(20)], [said(13, 20)], [(13, TRUE)]),
    ("more than seven days to the failure", [fails(20)], [said(12.9, 20)], [(12.9, FALSE)]),
    ("with the failure", [fails(20)], [said(20, 21)], []),
    ("after the failure, before it is back", [fails(20, 30)], [said(22, 29)], []),
    ("stands on after the repair", [fails(20, 30)], [said(20, 33)], [(30 + 1 / 24, FALSE)]),
    ("fades within an hour of the repair", [fails(20, 30)], [said(20, 30.04)], []),
    ("two spells less than a day apart", [fails(20)], [said(15, 15.1), said(16, 16.1)], [(15, FALSE)]),
    ("two spells more than a day apart", [fails(20)], [said(15, 15.1), said(19.5, 19.6)],
     [(15, FALSE), (19.5, TRUE)]),
    ("put together they reach the failure", [fails(20)], [said(18, 18.1), said(19, 19.1)], [(18, TRUE)]),
    ("a cause in common is not its own", [fails(20, shared=True)], [said(19, 20)], [(19, FALSE)]),
    ("never", [], [said(30, 31)], [(30, FALSE)]),
    ("the week is not over", [], [said(55, 60)], [(55, PENDING)]),
    ("the day after it is not over", [], [said(58, 59.5)], [(58, PENDING)]),
    ("the day after it is over", [], [said(57, 58.5)], [(57, FALSE)]),
    ("two failures, an alarm each", [fails(20, 21), fails(30)], [said(19, 20), said(29, 30)],
     [(19, TRUE), (29, TRUE)]),
    ("one that ended is no alarm of the next", [fails(20, 20.1), fails(20.5)], [said(19.5, 20)],
     [(19.5, TRUE)]),
]  # fmt: skip


@pytest.mark.parametrize(("failures", "spells", "expected"), [row[1:] for row in TABLE],
                         ids=[row[0] for row in TABLE])  # fmt: skip
def test_which_alarms_come_true(
    failures: list[Failed], spells: list[Spell], expected: list[tuple[float, str]]
) -> None:
    found = alarms_of(course(failures, spells))
    assert [(pytest.approx(a.begin_s / D), a.outcome) for a in found] == expected


DAYS = st.floats(0.0, 60.0)


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Failed], list[Spell]]:
    failures, at = [], 0.0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.floats(0.1, 20.0))
        back = at + draw(st.floats(0.01, 10.0))
        failures.append(Failed(0, "memory", at * D, back * D, shared=draw(st.booleans())))
        at = back
    spells, at = [], 0.0
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.floats(0.01, 15.0))
        last = at + draw(st.floats(0.0, 12.0))
        spells.append(Spell(0, at * D, last * D, "rule"))
        at = last
    return [f for f in failures if f.begin_s < 60 * D], [s for s in spells if s.begin_s < 60 * D]


@settings(max_examples=200, deadline=None)
@given(lives())
def test_alarms_never_overlap_and_keep_their_word(life: tuple[list[Failed], list[Spell]]) -> None:
    failures, spells = life
    found = alarms_of(course(failures, spells))
    assert found == alarms_of(course(failures[::-1], spells[::-1]))
    for a, b in pairwise(found):
        assert a.begin_s <= a.last_s <= b.begin_s
    for a in found:
        down = [f for f in failures if f.begin_s <= a.begin_s < f.end_s]
        assert not down
        if a.outcome == TRUE:
            assert a.failure is not None
            assert a.failure.own
            assert 0.0 < a.lead_s <= 7 * D
            assert a.failure.begin_s - a.last_s <= D
    announced = [a.failure for a in found if a.failure is not None]
    assert len(announced) == len({f.begin_s for f in announced})


def known() -> Course:
    """Two nodes with precursors, one announced; one without; one shared; 4 nodes, 50 days scored."""
    failures = [
        Failed(0, "memory", 20 * D, 25 * D, 18 * D),
        Failed(1, "link", 30 * D, 31 * D, 29.5 * D),
        Failed(2, "memory", 40 * D, 44 * D),
        Failed(3, "rack", 35 * D, 35.5 * D, shared=True),
        Failed(3, "memory", 5 * D, 6 * D, 4 * D),  # while it was learning
    ]
    spells = [
        Spell(0, 20 * D - 2 * H, 20 * D, "rows"),
        Spell(1, 15 * D, 16 * D, "forecast"),
        Spell(3, 4.5 * D, 5 * D, "rows"),
        Spell(3, 50 * D, 51 * D, "forecast"),
    ]
    return course(failures, spells)


def test_figures_that_are_known_by_hand() -> None:
    told = scores([known()])
    months = (4 * 50 - 5 - 1 - 4 - 0.5) / 30
    assert told["node_months"] == pytest.approx(months)
    assert (told["failures"], told["failures_shared"]) == (4, 1)
    drains = told["drains"]
    assert (drains["true"], drains["false"], drains["pending"]) == (1, 2, 0)
    assert drains["false_per_node_month"] == pytest.approx(2 / months)
    assert drains["precision"] == pytest.approx(1 / 3)
    assert drains["low"] < drains["false_per_node_month"] < drains["high"]
    yes, no = told["with_precursors"], told["without_precursors"]
    assert (yes["failures"], yes["announced"], yes["recall"], yes["early"]) == (2, 1, 0.5, 0)
    assert (no["failures"], no["announced"]) == (1, 0)
    assert told["lead_time_min"]["median"] == pytest.approx(120.0)
    assert told["by_reason"] == {
        "forecast": {TRUE: 0, FALSE: 2, PENDING: 0}, "rows": {TRUE: 1, FALSE: 0, PENDING: 0},
    }  # fmt: skip
    assert told["by_class"]["memory"]["reasons"] == {"rows": 1}
    assert told["by_class"]["memory"]["precursor_min"] == pytest.approx(2 * 24 * 60)
    assert told["by_class"]["link"]["with_precursors"]["recall"] == 0.0
    assert told["by_class"]["rack"]["failures"] == 0


def chances(p: np.ndarray, at_d: list[float], failures: list[Failed]) -> Course:
    out = course(failures, n=p.shape[1])
    out.origin_s, out.said = np.array(at_d) * D, {D: p.astype(np.float32)}
    return out


def test_chances_are_judged_on_nodes_that_are_up_and_days_that_are_over() -> None:
    p = np.array([[0.5, 0.1], [0.5, 0.1], [NAN, 0.1], [0.5, 0.1], [0.9, 0.9]])
    failures = [fails(20.5, 22.5), Failed(1, "rack", 20.2 * D, 20.3 * D, shared=True)]
    told = calibration([chances(p, [20, 21, 25, 40, 59.5], failures)], D)
    # Node 0 is down on day 21 and unknown on day 25; a cause in common counts as well
    assert (told["pairs"], told["positives"], told["unknown"]) == (6, 2, 1)
    assert told["brier"] == pytest.approx((0.25 + 0.81 + 0.25 + 3 * 0.01) / 6, abs=1e-6)
    assert told["brier_base_rate"] == pytest.approx(2 / 6 * 4 / 6)


def test_a_true_chance_has_little_error_and_some_resolution() -> None:
    rng = np.random.default_rng(1)
    n, at = 2000, list(range(11, 59))
    risk = rng.choice([0.01, 0.3], n)
    p = np.tile(risk, (len(at), 1))
    failures = [
        Failed(i, "memory", (day + 0.5) * D, (day + 0.6) * D)
        for day in at
        for i in np.flatnonzero(rng.random(n) < risk).tolist()
    ]
    told = calibration([chances(p, [float(d) for d in at], failures)], D)
    assert told["ece"] < 0.005
    assert told["resolution"] == pytest.approx(np.var(risk), rel=0.05)
    assert told["skill"] > 0.1
    wrong = calibration([chances(1 - p, [float(d) for d in at], failures)], D)
    assert wrong["ece"] > 0.5


def test_the_fleets_number_is_held_against_its_interval() -> None:
    out = course([fails(20.5, 20.6), fails(20.7, 20.8), fails(30.5, 31)])
    out.origin_s = np.array([5, 20, 30, 40, 59.5]) * D
    out.counted = {D: np.array([[9, 9, 9], [1.0, 0, 1], [1, 1, 2], [0.5, 0, 1], [9, 9, 9]])}
    told = coverage([out], D)
    assert told["origins"] == 3  # one is of the training days, one ends after the course
    assert told["coverage90"] == pytest.approx(2 / 3)
    assert told["mean_actual"] == pytest.approx(1.0)
    assert told["independent_spans"] == pytest.approx(50.0)


def test_lemons_are_judged_on_the_28th_day() -> None:
    out = course(n=6, seeded=(0, 1, 2))
    out.flagged_s = np.array([5.0, 28.0, 28.5, 10.0, np.inf, np.inf]) * D
    out.flagged_28d = [1, 3]
    told = lemons([out, out])
    assert (told["seeded"], told["called"], told["found"]) == (6, 6, 4)
    assert told["precision"] == pytest.approx(2 / 3)
    assert (told["called_on_day_28"], told["right_on_day_28"]) == (4, 2)
    short = lemons([dataclasses.replace(out, end_s=20 * D)])
    assert math.isnan(short["found_pu"])


def test_goals_are_met_missed_or_not_to_be_judged() -> None:
    verdicts = {g["goal"]: g["met"] for g in goals(scores([known()]))}
    assert verdicts == {
        "false_drains_per_node_month": False, "precision": False, "recall": True, "lead_min": True,
        "lemons_found": None, "lemons_precision": None,
    }  # fmt: skip
    perfect = {g["goal"]: g["met"] for g in goals(scores([course([fails(20, 21, 19)], [said(19.5, 20)])]))}
    assert perfect["precision"] is True
    assert perfect["false_drains_per_node_month"] is True


@pytest.mark.parametrize("count", [0, 1, 3, 10, 50])
def test_the_interval_of_a_rate_is_nearly_the_exact_one(count: int) -> None:
    low, high = rate_interval(count, 100.0)
    exact_low = stats.chi2.ppf(0.05, 2 * count) / 2 if count else 0.0
    assert low == pytest.approx(exact_low / 100.0, abs=0.001)
    assert high == pytest.approx(stats.chi2.ppf(0.95, 2 * count + 2) / 200.0, abs=0.001)


def test_nodes_that_repeat_themselves_widen_the_interval() -> None:
    alone = share_interval(np.tile([1.0, 0.0], 50), np.ones(100))
    thrice = share_interval(np.tile([10.0, 0.0], 5), np.full(10, 10.0))
    assert thrice[1] - thrice[0] > 1.5 * (alone[1] - alone[0])
    low, high = share_interval(np.ones(20), np.ones(20))
    assert low < 0.95
    assert high == 1.0
    assert all(math.isnan(x) for x in share_interval(np.zeros(5), np.zeros(5)))


def test_the_interval_of_a_median_holds_it_nine_times_in_ten() -> None:
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        low, high = median_interval(rng.exponential(1.0, 25))
        held += low <= math.log(2.0) <= high
    assert 0.87 <= held / 400 <= 0.98
