"""Costs of each course: by hand, in limits, and that more danger never makes for a milder course."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from policies.node_replacement.costs import (
    AT_NEXT,
    AT_ONCE,
    CORDON,
    IDLE_PU,
    LATER_PU,
    LOOK_S,
    NOTICE_S,
    PRIOR_WORK_S,
    QUEUE_S,
    QUEUE_SPARE_S,
    SAVE_NOW,
    SPARE_PU,
    WATCH,
    Chances,
    Delays,
    Stakes,
    inspection_pays,
    option_costs,
    stakes_of,
)
from tests.support.replacement_site import EIGHT, Replacing
from twin.telemetry import events as ev

DAY_S, HOUR_S = 86_400.0, 3600.0
PRICES = Delays()
USUAL: dict[str, Any] = {
    "job_gpus": 512.0,
    "node_gpus": 8.0,
    "lost_s": 1500.0,
    "next_s": 2100.0,
    "usual_s": 1800.0,
    "block_s": 60.0,
    "durable_s": 90.0,
    "restart_s": 600.0,
    "left_s": 7 * DAY_S,
    "asks": True,
    "busy": True,
    "spare": False,
}


def stakes(**given: Any) -> Stakes:
    """Of one node."""
    kinds = {"asks": np.bool_, "busy": np.bool_, "spare": np.bool_}
    return Stakes(**{k: np.array([v], kinds.get(k, np.float64)) for k, v in (USUAL | given).items()})


def costs(
    day_pu: float,
    hour_pu: float | None = None,
    sure_pu: float = 0.9,
    stays: bool = False,
    delays: Delays = PRICES,
    **given: Any,
) -> Any:
    hour = -np.expm1(np.log1p(-min(day_pu, 1 - 1e-9)) / 24.0) if hour_pu is None else hour_pu
    chances = Chances(np.array([hour]), np.array([day_pu]), np.array([sure_pu]))
    found = option_costs(chances, np.array([stays]), np.array([False]), stakes(**given), delays)
    return found.gpu_h[:, 0], int(found.option[0])


def test_by_hand() -> None:
    """At a constant rate, sure of it: p x (work + notice + restart + queue) of all 512 GPUs."""
    cost, course = costs(0.3, sure_pu=1.0)
    stop = 600.0 + QUEUE_S
    assert cost[WATCH] == pytest.approx(0.3 * 512 * (1800.0 + NOTICE_S + stop) / HOUR_S)
    assert cost[CORDON] == pytest.approx(cost[WATCH]), "the job outlives the day"
    save = 0.3 * 90.0 / DAY_S * 512 * (1500.0 + NOTICE_S + stop) + 512 * (60.0 + stop)
    assert cost[SAVE_NOW] == pytest.approx(save / HOUR_S, rel=1e-3)
    later = 0.3 * 2190.0 / DAY_S * 512 * (1500.0 + 1095.0 + NOTICE_S + stop) + 512 * stop
    assert cost[AT_NEXT] == pytest.approx(later / HOUR_S, rel=1e-3)
    assert cost[AT_ONCE] == pytest.approx(512 * (1500.0 + stop) / HOUR_S)
    assert course == WATCH, "three in ten are not worth the restart of the whole job"


def test_a_false_alarm_costs_the_nodes_time() -> None:
    sure, doubtful = (costs(0.3, sure_pu=s)[0] for s in (1.0, 0.5))
    assert doubtful[AT_ONCE] - sure[AT_ONCE] == pytest.approx(0.5 * 8.0 * PRICES.test_s / HOUR_S)
    with_spare = costs(0.3, sure_pu=0.5, spare=True)[0]
    less = 512 * (QUEUE_S - QUEUE_SPARE_S) + 0.5 * 8.0 * PRICES.test_s * (1.0 - SPARE_PU)
    assert doubtful[AT_ONCE] - with_spare[AT_ONCE] == pytest.approx(less / HOUR_S)


def test_a_broken_part_works_for_nobody_while_it_is_watched() -> None:
    whole, broken = (
        option_costs(
            Chances(*(np.array([x]) for x in (0.1, 0.3, 0.8))),
            np.array([True]),
            np.array([b]),
            stakes(),
            PRICES,
        ).gpu_h
        for b in (False, True)
    )
    assert (broken - whole)[WATCH, 0] == pytest.approx(0.8 * 24.0)
    assert broken[CORDON:, 0] == pytest.approx(whole[CORDON:, 0])


COURSE = {
    "nothing is likely": (dict(day_pu=0.01), WATCH),
    "nobody knows": (dict(day_pu=np.nan), WATCH),
    "likely within the hour": (dict(day_pu=0.8, hour_pu=0.6), SAVE_NOW),
    "the planned save comes soon": (dict(day_pu=0.9, hour_pu=0.2, next_s=30.0, lost_s=3570.0), AT_NEXT),
    "nothing is lost yet": (dict(day_pu=0.9, hour_pu=0.85, lost_s=5.0, spare=True), AT_ONCE),
    "its job ends soon": (dict(day_pu=0.5, left_s=600.0, stays=True), CORDON),
    "it never saves": (dict(day_pu=0.98, hour_pu=0.95, asks=False, lost_s=60.0), AT_ONCE),
    "idle, and surely bad": (
        dict(day_pu=0.2, stays=True, sure_pu=0.95, busy=False, asks=False, left_s=0.0, job_gpus=16.0),
        CORDON,
    ),
    "idle, and hardly bad": (
        dict(day_pu=0.02, sure_pu=0.1, busy=False, asks=False, left_s=0.0, job_gpus=4.0),
        WATCH,
    ),
}


@pytest.mark.parametrize("case", COURSE)
def test_the_course_that_costs_least(case: str) -> None:
    given, course = COURSE[case]
    assert costs(**given)[1] == course  # type: ignore[arg-type]


def test_what_stays_broken_is_not_only_of_today() -> None:
    assert costs(0.001, sure_pu=0.95, left_s=600.0)[1] == WATCH
    cost, course = costs(0.001, sure_pu=0.95, left_s=600.0, stays=True)
    assert course == CORDON
    assert cost[WATCH] >= LATER_PU * 0.95 * 512 * (1800.0 + NOTICE_S + 600.0 + QUEUE_S) / HOUR_S


def test_a_margin_on_acting_does_not_make_for_a_milder_course_either() -> None:
    """The margin omits the chance that the node fails meanwhile, which is the same in both courses."""
    given: dict[str, Any] = {"asks": False, "lost_s": 1e6, "stays": True, "sure_pu": 0.05}
    free = Delays(test_s=0.0)
    assert costs(0.02, delays=free, **given)[1] == CORDON
    assert costs(0.95, delays=free, **given)[1] == CORDON


def test_an_idle_node_takes_no_course_that_asks_a_job() -> None:
    cost, _ = costs(0.9, busy=False, asks=False)
    assert np.isinf(cost[AT_NEXT:]).all()
    assert cost[CORDON] == pytest.approx(0.1 * IDLE_PU * 8.0 * PRICES.test_s / HOUR_S)


POSITIVE = {
    "job_gpus": st.floats(1, 1e5),
    "node_gpus": st.floats(1, 16),
    "lost_s": st.floats(0, 1e5),
    "next_s": st.one_of(st.floats(0, 1e5), st.just(np.inf)),
    "usual_s": st.floats(0, 1e5),
    "block_s": st.floats(0, 1e3),
    "durable_s": st.floats(0, 1e4),
    "restart_s": st.floats(0, 1e4),
    "left_s": st.floats(0, 1e6),
    "asks": st.booleans(),
    "busy": st.booleans(),
    "spare": st.booleans(),
}


@given(
    st.fixed_dictionaries(POSITIVE),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_more_danger_never_makes_for_a_milder_course(
    at: dict[str, Any], one: float, other: float, burst: float, sure: float, stays: bool
) -> None:
    """All else equal: the same part of the hazard comes within the first hour."""
    low, high = sorted((min(one, 1 - 1e-6), min(other, 1 - 1e-6)))
    share = 1 / 24 + burst * 23 / 24
    found = []
    for p in (low, high):
        hour = -np.expm1(share * np.log1p(-p))
        cost, course = costs(p, hour, sure, stays, **at)
        assert (cost >= 0).all()
        assert not np.isnan(cost).any()
        assert np.isfinite(cost[course])
        found.append(course)
    milder = np.argsort([WATCH, CORDON, AT_NEXT, SAVE_NOW, AT_ONCE])
    if low >= 1e-6:
        assert milder[found[0]] <= milder[found[1]]


@given(st.fixed_dictionaries(POSITIVE), st.floats(0, 1), st.floats(0, 1))
def test_a_surer_alarm_never_costs_more_to_act_on(at: dict[str, Any], one: float, other: float) -> None:
    low, high = sorted((one, other))
    unsure, sure = costs(0.4, None, low, **at)[0], costs(0.4, None, high, **at)[0]
    there = np.isfinite(unsure)
    assert (sure[there][1:] <= unsure[there][1:] + 1e-6 * (1 + unsure[there][1:])).all()


def test_people_look_where_the_doubt_that_a_test_leaves_costs_more_by_hand() -> None:
    """Half of what is wrong passes: of 0.6 are left 0.3 of 0.7."""
    left, fails_h = 0.3 / 0.7, (1800.0 + NOTICE_S + 600.0 + QUEUE_S) / HOUR_S
    break_even = LOOK_S / HOUR_S * IDLE_PU * 8.0 * (1.0 - left) / (LATER_PU * left * fails_h)
    sure = np.array([0.6])
    for gpus, wanted in ((0.99 * break_even, False), (1.01 * break_even, True)):
        at = stakes(busy=False, job_gpus=gpus, left_s=0.0)
        assert inspection_pays(sure, at).tolist() == [wanted]
    assert inspection_pays(np.array([np.nan, 0.0]), stakes().rows(np.array([0, 0]))).tolist() == [
        False,
        False,
    ]


def test_of_its_time_limit_a_job_is_expected_to_take_half_of_what_is_left() -> None:
    twin = Replacing({"a": EIGHT}, told={"time_limit_s": 36_000.0})
    twin.wait(7200.0, dt_s=600.0)
    at = stakes_of(twin.engine.view(1.0), np.array([0], np.int32), np.zeros(1, np.bool_))
    assert at.left_s[0] == pytest.approx((36_000.0 - 7200.0) / 2, abs=30.0)


def test_stakes_are_of_the_whole_job_where_it_is_synchronous() -> None:
    twin = Replacing({"a": EIGHT})
    twin.look(
        ev.JobStarted(id="b", job="b", nodes=("r2/node0", "r2/node1"), kind="batch", coupling="independent")
    )
    twin.saves(ago_s=1000.0)
    view = twin.engine.view(1.0)
    nodes = np.array([0, 9, 18], np.int32)
    at = stakes_of(view, nodes, np.zeros(3, np.bool_))
    assert at.node_gpus.tolist() == [4.0, 4.0, 4.0]
    assert at.job_gpus[0] == 32.0
    assert at.job_gpus[2] == 4.0, "each node of the other job works for itself"
    assert at.lost_s[0] == pytest.approx(1010.0, abs=11.0)
    assert at.busy.tolist() == [True, False, True]
    assert at.asks.tolist() == [True, False, False]
    assert at.usual_s[0] == pytest.approx(1800.0)
    assert at.lost_s[2] < 60.0, "what does not save loses all that it did"
    assert at.job_gpus[1] == pytest.approx(IDLE_PU * (8 * 32.0 + 2 * 4.0) / 10.0), "the usual job"


def test_stakes_of_a_job_that_says_nothing_of_saves() -> None:
    twin = Replacing({"a": EIGHT}, told={})
    twin.wait(7200.0, dt_s=600.0)
    at = stakes_of(twin.engine.view(1.0), np.array([0], np.int32), np.zeros(1, np.bool_))
    assert not at.asks[0]
    assert at.lost_s[0] == PRIOR_WORK_S
    assert at.left_s[0] == pytest.approx(7200.0 + HOUR_S, abs=30.0)
