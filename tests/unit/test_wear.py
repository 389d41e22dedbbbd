"""Trends of learned parameters, and what is left until a limit: closed forms, and noise that is no drift."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from tests.support.health_contexts import Look
from twin.catalogue import NS, find_signal, utc
from twin.estimation import Parameter
from twin.health import wear as bounds
from twin.health.wear import (
    FASTER,
    LEAST_POINTS,
    POINT_S,
    POINTS,
    REMAPS,
    SETTLING_S,
    SLOWER,
    SURE_T,
    Left,
    Wear,
    trend,
    until,
    until_counted,
    widened,
)

DAY_S = 86_400.0
SITE = site_of(two_racks())


class Course:
    """Wear, with parameters that go as a test says; a point every four hours."""

    def __init__(self, site=SITE) -> None:
        self.look, self.wear = Look(site), Wear(site)
        self.days = 0.0

    def put(self, what: str, value, reference=1.0, sigma=0.001) -> None:
        table = what.partition(".")[0]
        n = self.look.n(table)
        columns = [np.array(np.broadcast_to(v, n), np.float64) for v in (value, reference, sigma)]
        self.look.parameters[what] = Parameter(what, table, *columns, np.zeros(n))

    def point(self) -> None:
        self.look.pass_s(POINT_S)
        self.days += POINT_S / DAY_S
        self.wear.update(self.look)

    def run(self, days: float, what: str, law, **more) -> None:
        for _ in range(round(days * DAY_S / POINT_S)):
            self.put(what, law(self.days + POINT_S / DAY_S), **more)
            self.point()

    def left(self, what: str, entity: int = 0) -> tuple[float, float, float] | None:
        """(middle, low, high) in days; None: nothing is told."""
        for r in self.wear.remaining():
            if r.what == what and np.isfinite(r.mid_s[entity]):
                return tuple(float(v[entity]) / DAY_S for v in (r.mid_s, r.lo_s, r.hi_s))
        return None


@pytest.mark.parametrize(("slope", "start"), [(-0.01, 1.0), (0.02, 5.0), (0.0, 3.0)])
def test_a_line_is_found_as_it_is(slope, start):
    t_s = np.arange(30) * POINT_S
    y = (start + slope * t_s / DAY_S)[:, None]
    found = trend(t_s, y)
    assert found.slope[0] * DAY_S == pytest.approx(slope, abs=1e-12)
    assert found.level[0] == pytest.approx(y[-1, 0])
    assert found.first[0] == pytest.approx(start)
    assert found.span_s[0] == t_s[-1]
    assert found.slope_sigma[0] * DAY_S < 1e-9


def test_slope_and_its_error_are_those_of_the_textbook():
    rng = np.random.default_rng(0)
    t_s = np.arange(60) * POINT_S
    y = 2.0 + 1e-7 * t_s + rng.normal(0, 0.01, 60)
    x = t_s - t_s.mean()
    slope = float(x @ y / (x @ x))
    off = y - y.mean() - slope * x
    linked = max(float(off[1:] @ off[:-1] / (off @ off)), 0.0)
    worth = (1 - linked) / (1 + linked)
    found = trend(t_s, y[:, None])
    assert found.slope[0] == pytest.approx(slope)
    assert found.slope_sigma[0] == pytest.approx(np.sqrt(off @ off / 58 / (x @ x) / worth))
    gone = y.copy()
    gone[10:20] = np.nan
    kept = np.isfinite(gone)
    assert trend(t_s, gone[:, None]).slope[0] == pytest.approx(np.polyfit(t_s[kept], y[kept], 1)[0])


def test_the_interval_holds_what_it_says():
    rng = np.random.default_rng(3)
    n, t_s = 4000, np.arange(60) * POINT_S
    y = 1.0 - 0.01 * t_s[:, None] / DAY_S + rng.normal(0, 0.004, (60, n))
    left = until(trend(t_s, y), np.full(n, 0.6), False, 0.01)
    true_s = 40.0 * DAY_S - t_s[-1]
    assert np.isfinite(left.mid_s).all()
    inside = ((left.lo_s <= true_s) & (true_s <= left.hi_s)).mean()
    assert 0.88 <= inside <= 0.99
    assert np.median(left.mid_s) == pytest.approx(true_s, rel=0.02)


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_noise_is_no_drift_even_if_it_swings_slowly(memory):
    rng = np.random.default_rng(5)
    n, t_s = 3000, np.arange(POINTS) * POINT_S
    y = np.zeros((POINTS, n))
    y[0] = rng.normal(0, 1, n)
    for k in range(1, POINTS):
        y[k] = memory * y[k - 1] + np.sqrt(1 - memory**2) * rng.normal(0, 1, n)
    left = until(trend(t_s, 1.0 + 0.02 * y), np.full(n, 0.6), False, 0.0)
    assert np.isfinite(left.mid_s).mean() <= 0.02


@pytest.mark.parametrize(
    ("points", "days", "known"),
    [(LEAST_POINTS - 1, 10, False), (LEAST_POINTS, 10, True), (LEAST_POINTS, 1.4, False)],
)
def test_too_few_points_or_too_short_say_nothing(points, days, known):
    t_s = np.linspace(0, days * DAY_S, points)
    found = trend(t_s, (1.0 - 1e-7 * t_s)[:, None])
    assert np.isfinite(found.slope[0]) == known
    assert np.isfinite(until(found, np.array([0.5]), False, 0.0).mid_s[0]) == known


def test_time_to_a_limit_in_closed_form():
    t_s = np.arange(40) * POINT_S
    found = trend(t_s, np.stack([1.0 - 0.02 * t_s / DAY_S, 1.0 + 0.02 * t_s / DAY_S, 0.5 - 1e-9 * t_s], 1))
    down = until(found, np.array([0.6, 0.6, 0.6]), False, 0.01)
    assert down.mid_s[0] / DAY_S == pytest.approx(20.0 - t_s[-1] / DAY_S)
    assert down.lo_s[0] == pytest.approx(down.hi_s[0])
    assert np.isnan(down.mid_s[1])  # it goes away from the limit
    assert down.mid_s[2] == down.hi_s[2] == 0.0  # it is past it, drift or none
    up = until(found, np.array([2.0, 2.0, 2.0]), True, 0.01)
    assert np.isnan(up.mid_s[0])
    assert up.mid_s[1] / DAY_S == pytest.approx(50.0 - t_s[-1] / DAY_S)
    assert np.isnan(until(found, np.array([0.6] * 3), False, 0.2).mid_s[0])  # no more than what is but noise
    assert SURE_T >= 3.0


@pytest.mark.parametrize(
    ("grown", "days", "left", "mid"),
    [(16, 8, 100, 50.0), (3, 8, 100, None), (16, 1, 100, None), (1, 8, 0, 0.0)],
)
def test_counted_events_are_known_to_their_root(grown, days, left, mid):
    found = until_counted(np.array([grown]), np.array([days * DAY_S]), np.array([left]), 4.0)
    if mid is None:
        assert np.isnan(found.mid_s[0])
        return
    assert found.mid_s[0] / DAY_S == pytest.approx(mid)
    if mid:
        assert found.lo_s[0] / DAY_S == pytest.approx(mid / (1 + 1.645 / np.sqrt(grown)))
        assert found.hi_s[0] / DAY_S == pytest.approx(mid / (1 - 1.645 / np.sqrt(grown)))


@pytest.mark.parametrize(
    ("what", "law", "limit", "words"),
    [
        (
            "cdu.ua",
            lambda d: 1.0 - 0.012 * d,
            0.6,
            "The conductance of the heat exchanger fell by 11%",
        ),
        ("cdu.pump_head", lambda d: 1.0 - 0.012 * d, 0.7, "The head of the pumps fell by 11% of its"),
        ("cdu.filter", lambda d: np.exp(0.05 * d), 2.5, "The resistance of the filter rose by 56% of its"),
    ],
)
def test_what_wears_is_told_with_the_date_of_its_end(what, law, limit, words):
    course = Course()
    course.run(9, what, lambda d: 4.0 * law(d), reference=4.0)
    mid, lo, hi = course.left(what)
    assert law(9.0 + mid) == pytest.approx(limit, rel=1e-3)
    assert 0.5 * mid < lo < 0.9 * mid < 1.2 * mid < hi < 3.0 * mid
    said = course.wear.evidence("cdu", 0)
    assert len(said) == 1
    assert said[0].startswith(words)
    dates = [utc(course.look.now_ns + round(days * DAY_S * NS), "%Y-%m-%d") for days in (mid, lo, hi)]
    assert "is reached on {} (90 %: {} to {}), ".format(*dates) in said[0]
    assert said[0].endswith(f"in {mid:.0f} days")


@pytest.mark.parametrize("age", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("power", [FASTER, 1.0, SLOWER])
def test_the_interval_holds_wear_that_speeds_up_or_slows_down(power, age):
    """Of a life of 100 days, at this age; the line knows where it is and how fast it goes now."""
    way = age**power
    mid_s = (1.0 - way) / (power * way / age) * 100.0 * DAY_S
    exact = Left(*(np.array([mid_s]) for _ in range(3)))
    left = widened(exact, np.array([way]), np.zeros(1), 0.0)
    end = {FASTER: left.lo_s, 1.0: left.mid_s, SLOWER: left.hi_s}[power]
    assert end[0] / DAY_S == pytest.approx(100.0 * (1.0 - age))
    doubtful = widened(exact, np.array([way]), np.zeros(1), 0.1)
    assert doubtful.lo_s < left.lo_s < left.mid_s < left.hi_s < doubtful.hi_s
    loose = Left(left.mid_s, 0.2 * left.mid_s, 9.0 * left.mid_s)
    assert widened(loose, np.array([way]), np.zeros(1), 0.0).lo_s < loose.lo_s
    # A line over all that it wore shows the speed that it had in the middle of that
    half = (0.5 ** (1.0 / power)) ** (power - 1.0)
    late = Left(*(v / half for v in exact))
    end = {FASTER: 1, 1.0: 0, SLOWER: 2}[power]
    assert widened(late, np.array([way]), np.array([way]), 0.0)[end] / DAY_S == pytest.approx(
        100.0 * (1 - age)
    )


def test_what_has_drifted_but_nobody_knows_how_fast_says_so():
    course = Course()
    rng = np.random.default_rng(2)
    course.run(9, "cdu.ua", lambda d: 0.9 + rng.normal(0, 0.005))
    assert course.left("cdu.ua") is None
    assert course.wear.evidence("cdu", 0) == (
        f"The conductance of the heat exchanger is {1 - course.wear.points['cdu.ua'].value[53, 0]:.0%} below "
        "its early value; how fast it changes is unknown",
    )
    steady = Course()
    steady.run(9, "cdu.ua", lambda d: 1.0 + rng.normal(0, 0.005))
    assert steady.wear.evidence("cdu", 0) == ()
    assert steady.wear.remaining() == ()


def test_a_cleaning_begins_the_trend_anew():
    course = Course()
    course.run(9, "cdu.ua", lambda d: 1.0 - 0.02 * d)
    assert course.left("cdu.ua") is not None
    course.run(1, "cdu.ua", lambda d: 0.99 - 0.005 * (d - 9))
    assert course.left("cdu.ua") is None
    course.run(4, "cdu.ua", lambda d: 0.99 - 0.005 * (d - 9))
    assert course.left("cdu.ua")[0] == pytest.approx((0.99 - 0.6) / 0.005 - 5.0, rel=0.01)


@pytest.mark.parametrize("why", ["work", "stale", "unsettled"])
def test_what_is_not_heard_or_worked_at_is_no_point(why):
    course = Course()
    if why == "work":
        course.look.work["cdu"] = np.ones(1, np.bool_)
    elif why == "stale":
        course.look.quiet.add("cdu.flow_lpm")
    course.run(9, "cdu.ua", lambda d: 1.0 - 0.02 * d, reference=np.nan if why == "unsettled" else 1.0)
    assert not np.isfinite(course.wear.points["cdu.ua"].value).any()
    assert course.wear.remaining() == ()


def test_between_points_nothing_is_read():
    course = Course()
    course.run(1, "cdu.ua", lambda d: 1.0)
    del course.look.estimator
    for _ in range(3):
        course.wear.update(course.look.pass_s(POINT_S / 4 - 1))
    with pytest.raises(AttributeError):
        course.wear.update(course.look.pass_s(POINT_S))


def test_only_gpus_that_drift_are_tracked(monkeypatch):
    course = Course()
    n = SITE.sizes["gpu"]
    law = np.ones(n)

    def value(days):
        out = law.copy()
        out[[5, 9]] += 0.03 * days
        return out

    course.run(10, "gpu.resistance", value)
    points = course.wear.points["gpu.resistance"]
    assert points.index.tolist() == [5, 9]
    assert course.left("gpu.resistance", 5)[0] == pytest.approx(1.0 / 0.03 - 10.0, rel=1e-3)
    assert course.left("gpu.resistance", 6) is None
    assert "thermal resistance" in course.wear.evidence("gpu", 9)[0]
    assert course.wear.evidence("gpu", 6) == ()
    course.wear.forget("gpu", 5)
    assert course.wear.points["gpu.resistance"].index.tolist() == [9]
    assert course.left("gpu.resistance", 5) is None
    monkeypatch.setattr(bounds, "MAX_TRACKS", 3)
    law[20:60] = 1.0 + 0.01 * np.arange(20, 60)
    course.run(1, "gpu.resistance", value)
    assert course.wear.points["gpu.resistance"].index.tolist() == [9, 58, 59]
    law[:] = 1.0
    law[[9, 58, 59]] = 0.5
    course.put("gpu.resistance", law)
    course.point()
    assert course.wear.points["gpu.resistance"].index.tolist() == []


def test_a_resistance_that_is_still_being_found_is_no_wear():
    """The early value of one comes from 15 minutes at one load: for a day nothing is held against it."""
    course, day = Course(), SETTLING_S / DAY_S
    found = np.where(np.arange(SITE.sizes["gpu"]) == 5, 1.0, 0.0)
    course.run(9, "gpu.resistance", lambda d: 1.0 + 0.2 * min(d, day) * found)
    assert course.left("gpu.resistance", 5) is None
    course.wear.forget("gpu", 5)  # another GPU, of which an early value is known anew
    course.run(0.8, "gpu.resistance", lambda d: 1.0 + 0.2 * found)
    assert course.wear.points["gpu.resistance"].index.tolist() == []


def test_what_a_rack_has_alike_is_no_wear_of_a_plate():
    """A circuit whose flow falls warms all plates of its racks; one that wears beside that is told alone."""
    course = Course()
    rack = SITE.rack_of_gpu

    def value(days):
        out = np.where(rack == 0, 1.0 + 0.03 * days, 1.0)
        out[[5, 100]] *= 1.0 + 0.02 * days
        return out

    course.run(10, "gpu.resistance", value)
    assert course.wear.points["gpu.resistance"].index.tolist() == [5, 100]
    assert course.left("gpu.resistance", 5) == pytest.approx(course.left("gpu.resistance", 100), rel=1e-3)
    assert course.left("gpu.resistance", 100)[0] == pytest.approx(40.0, rel=1e-3)


def test_what_a_filter_takes_is_no_wear_of_the_pumps():
    course, clogging = Course(), Course()
    for one, takes in ((course, 0.0), (clogging, 0.012)):
        for _ in range(54):
            one.look.estimator.clogged_pu = np.array([takes * one.days])
            one.put("cdu.pump_head", 1.0 - 0.012 * one.days)
            one.point()
    assert course.left("cdu.pump_head")[0] == pytest.approx(25.0 - 9.0, rel=0.02)
    assert clogging.left("cdu.pump_head") is None
    course.look.estimator.clogged_pu = np.array([np.nan])
    course.put("cdu.pump_head", 1.0 - 0.012 * course.days)
    course.point()
    assert course.left("cdu.pump_head") is not None, "without a meter at the filter nothing is taken off"


def test_rows_of_memory_that_are_used_up():
    course = Course()
    signal = find_signal(REMAPS)
    column = course.look.state.tables["gpu"]
    column.raw[signal.row] = 0
    column.raw[signal.row, 7] = 448
    for k in range(60):
        grown = k // 3
        column.raw[signal.row, 7] = 448 + grown
        column.total[signal.row, 7] = grown
        course.point()
    mid, lo, hi = course.left(REMAPS, 7)
    assert course.wear.points[REMAPS].index.tolist() == [7]
    # 18 in the 56 points since it was first seen to grow; 45 rows are left
    assert mid == pytest.approx((512 - 467) / (18 / (56 * POINT_S / DAY_S)), rel=0.01)
    assert lo < mid < hi
    assert "467 of 512 rows of memory are remapped" in course.wear.evidence("gpu", 7)[0]
    assert course.left(REMAPS, 8) is None


def test_the_ring_forgets_and_a_gap_of_weeks_does_no_harm():
    course = Course()
    course.run(15, "cdu.ua", lambda d: 1.0)
    course.run(POINTS * POINT_S / DAY_S, "cdu.ua", lambda d: 1.0 - 0.002 * (d - 15))
    assert course.left("cdu.ua")[0] == pytest.approx((0.4 - 0.002 * 21.33) / 0.002, rel=0.01)
    course.look.pass_s(60 * DAY_S)
    course.days += 60
    course.put("cdu.ua", 1.0 - 0.002 * (course.days - 15))
    course.point()
    assert course.left("cdu.ua") is None  # it jumped meanwhile: the trend begins anew


def test_it_does_not_matter_where_in_the_ring_points_lie():
    rng = np.random.default_rng(4)
    off = np.cumsum(rng.normal(0, 0.001, POINTS))
    course, later = Course(), Course()
    later.run(5, "cdu.ua", lambda d: 1.0)
    later.days = 0.0
    for one in (course, later):
        for k in range(POINTS):
            one.put("cdu.ua", 1.0 - 0.01 * one.days + off[k])
            one.point()
    assert course.left("cdu.ua") == pytest.approx(later.left("cdu.ua"))


def test_a_track_ends_when_the_drift_is_half_gone():
    course = Course()
    course.run(SETTLING_S / DAY_S + 0.2, "gpu.resistance", lambda d: 1.0)
    for drift, tracked in ((0.04, []), (0.06, [3]), (0.03, [3]), (0.024, []), (0.04, [])):
        course.put("gpu.resistance", 1.0 + drift * (np.arange(SITE.sizes["gpu"]) == 3))
        course.point()
        assert course.wear.points["gpu.resistance"].index.tolist() == tracked


def test_a_restart_changes_nothing_and_a_changed_site_keeps_the_trends():
    course = Course()
    rng = np.random.default_rng(8)
    for _ in range(50):
        course.put("cdu.ua", 1.0 - 0.01 * course.days + rng.normal(0, 0.002))
        course.put("gpu.resistance", 1.0 + 0.02 * course.days * (np.arange(SITE.sizes["gpu"]) == 3))
        course.point()
    again = Wear(SITE)
    again.restore(course.wear.dump())
    for ours, theirs in zip(course.wear.remaining(), again.remaining(), strict=True):
        assert ours.what == theirs.what
        assert np.array_equal(ours.lo_s, theirs.lo_s, equal_nan=True)
    assert again.evidence("cdu", 0) == course.wear.evidence("cdu", 0)
    again.update(course.look.pass_s(POINT_S))
    course.wear.update(course.look)
    assert again.evidence("gpu", 3) == course.wear.evidence("gpu", 3) != ()
    same = {t: np.arange(n, dtype=np.int32) for t, n in SITE.sizes.items()}
    same["gpu"] = np.roll(same["gpu"], 1)
    moved, gone = Wear(SITE), Wear(SITE)
    moved.adopt(course.wear, same)
    assert moved.points["gpu.resistance"].index.tolist() == [4]
    assert moved.evidence("gpu", 4) == course.wear.evidence("gpu", 3)
    assert moved.evidence("cdu", 0) == course.wear.evidence("cdu", 0)
    gone.adopt(course.wear, same | {"cdu": np.array([-1], np.int32)})
    assert gone.evidence("cdu", 0) == ()
    course.wear.forget("cdu", 0)
    assert course.wear.evidence("cdu", 0) == ()
    assert course.look.now_ns % NS == 0
