"""Incidents of health: which something justifies, their rates, and a healthy fleet that lives for hours."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.evaluation.health.course import DAY_S, Course, Failed
from tests.evaluation.health.failure_timeline import draw_timeline, ordinary_life
from tests.evaluation.health.incidents import HealthIncident, by_kind, justified
from tests.evaluation.health.run import FleetRun, fleet_site, run_course
from tests.evaluation.incidents import OpenIncidents
from twin.catalogue import NS
from twin.contracts import SAME_S, Finding

FAILS = Failed(0, "memory", 20 * DAY_S, 21 * DAY_S)


@pytest.mark.parametrize(
    ("kind", "node", "at_d", "right"),
    [
        ("recurs", 0, 13.1, True), ("recurs", 0, 12.9, False), ("recurs", 0, 20.5, True),
        ("recurs", 0, 21.03, True), ("recurs", 0, 21.1, False), ("recurs", 1, 20.0, False),
        ("recurs", 2, 5.0, True), ("psu", 1, 5.0, True), ("shared", -1, 5.0, True),
    ],
)  # fmt: skip
def test_a_failure_near_in_time_a_lemon_or_what_the_device_states_justifies(
    kind: str, node: int, at_d: float, right: bool
) -> None:
    course = Course(1, 1.0, 4, 4, 0.0, 0.0, 60 * DAY_S, [FAILS], [2])
    assert justified(course, HealthIncident(kind, node, at_d * DAY_S, "warning")) is right


def test_incidents_count_once_and_from_the_end_of_training() -> None:
    course = Course(1, 1.0, 4, 4, 0.0, 10 * DAY_S, 60 * DAY_S, [FAILS], [])
    course.incidents = [
        HealthIncident(kind, node, at_d * DAY_S, "warning", again)
        for kind, node, at_d, again in (
            ("recurs", 1, 5, False), ("recurs", 1, 15, False), ("recurs", 1, 15.01, True),
            ("wear", 0, 19, False),
        )
    ]  # fmt: skip
    every, recurs, wear = by_kind([course], 10.0)
    assert (every["alarms"], every["incidents"], every["unjustified"]) == (3, 2, 1)
    assert (recurs["kind"], recurs["per_node_month"]) == ("recurs", 0.1)
    assert (wear["incidents"], wear["unjustified"], wear["low"]) == (1, 0, 0.0)
    assert math.isnan(by_kind([], 0.0)[0]["per_node_month"])


def test_findings_are_followed_as_the_book_of_alarms_follows_them() -> None:
    incidents = OpenIncidents()
    f = Finding("health/n", "warning", "ill", ("n",), (), 1.0)

    def look(at_s: float, *found: Finding) -> list[bool]:
        return [again for _, again in incidents.look({f.id: f for f in found}, round(at_s * NS))]

    assert look(0.0, f) == [False]
    assert look(10.0, f) == look(20.0) == []
    assert look(SAME_S, f) == [True]
    assert look(SAME_S + 10.0) == []
    assert look(3 * SAME_S, f) == [False]
    incidents.begin()
    assert look(3 * SAME_S + 10.0, f) == [False]


def test_ordinary_life_is_what_happens_beside_failures() -> None:
    site = fleet_site(FleetRun(18, 2, 30.0, 0.0, 7))
    healthy, failing = ordinary_life(site, 7, 30.0), draw_timeline(site, 7, 30.0, 0.0)
    assert len(healthy.failures) == 0
    assert not healthy.lemons.any()
    times = {(e.time_s, e.act, e.field, e.at) for e in healthy.events if e.act in ("xid", "count")}
    shared = {(e.time_s, e.act, e.field, e.at) for e in failing.events if e.act in ("xid", "count")}
    assert len(times & shared) > 0.8 * len(times), "a fleet that fails has the same, but where it is down"


def test_a_healthy_fleet_lives_and_no_lemon_is_in_it() -> None:
    course = run_course(FleetRun(18, 1, 0.1, 0.0, 7, healthy=True, dt_s=60.0))
    assert (course.failures, course.lemons) == ([], [])
    assert course.ticks == 144
    assert np.isinf(course.flagged_s).all()
