"""Gaps in which nobody watched: they count for no rate, live, after a restart and in fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.failure import Failure, failure_history
from models.failure.fits import fit_all
from models.failure.rates import fleet_posterior
from policies.checkpointing import interruption_rates, job_nodes, recent_factor, save_terms
from policies.checkpointing.hazard import HALF_LIFE_D
from tests.support.failing_fleet import DAY_NS, START_NS, View, log_of, quiet
from tests.support.saving_jobs import DAY_S, EIGHT, Saving
from tests.support.scripted_health import ailing, days_ago_ns
from twin.catalogue import NS
from twin.telemetry import ago_d, events as ev, nothing, watched_ns, with_gap
from twin.telemetry.observation_gaps import LEAST_S, MOST

ROWS = [(k % 16, 0.5 + 0.5 * k, 0.6 + 0.5 * k, 0, False) for k in range(10)]  # ten failures in five days


def gap(from_d: float, to_d: float) -> np.ndarray:
    return np.array([[START_NS + round(from_d * DAY_NS), START_NS + round(to_d * DAY_NS)]], np.int64)


def test_short_pauses_are_watched_and_there_are_never_many_gaps() -> None:
    gaps = with_gap(nothing(), 0, round(LEAST_S * NS) - 1)
    assert len(gaps) == 0
    for k in range(2 * MOST):
        gaps = with_gap(gaps, 10**15 * k, 10**15 * k + round(LEAST_S * NS) * (1 + k))
    assert len(gaps) == MOST
    assert (np.diff(gaps.ravel()) > 0).all()
    assert gaps[0, 1] - gaps[0, 0] == round(LEAST_S * NS) * (1 + MOST), "the shortest are given up"


@given(st.lists(st.integers(1, 10**6), min_size=0, max_size=12), st.lists(st.integers(0, 10**7), max_size=20))
def test_the_clock_of_the_watch_stands_still_in_gaps_alone(steps: list[int], at: list[int]) -> None:
    edges = np.cumsum(steps[: len(steps) // 2 * 2]).astype(np.int64)
    gaps, times = edges.reshape(-1, 2), np.sort(np.array(at, np.int64))
    told = watched_ns(times, gaps)
    out = [t - sum(min(t, b) - a for a, b in gaps.tolist() if t > a) for t in times.tolist()]
    assert told.tolist() == out
    assert (np.diff(told) >= 0).all()


def test_a_gap_is_no_time_without_failures() -> None:
    """Five days watched and thirty not say what five days say."""
    log, later = log_of(ROWS), START_NS + round(35.6 * DAY_NS)
    watched = failure_history(log, 16, START_NS + round(5.6 * DAY_NS))
    paused = failure_history(replace(log, unwatched_ns=gap(5.6, 35.6)), 16, later)
    blind = failure_history(log, 16, later)
    assert fleet_posterior(paused) == pytest.approx(fleet_posterior(watched))
    assert paused.now_d == pytest.approx(5.6)
    assert fleet_posterior(blind)[0] < 0.75 * fleet_posterior(watched)[0], "else nothing would be shown"


def test_a_failure_over_a_gap_lasts_only_as_long_as_it_was_watched() -> None:
    log = replace(log_of([(3, 1.0, 31.5, 0, False), (4, 2.0, 0, 0, False)]), unwatched_ns=gap(1.25, 31.25))
    past = failure_history(log, 16, START_NS + round(32.0 * DAY_NS))
    assert past.own.end_d[0] - past.own.start_d[0] == pytest.approx(0.5)
    assert past.down[4]
    assert not past.down[3]


def test_the_model_says_the_same_after_days_off() -> None:
    told = []
    for days, gaps in ((5.6, nothing()), (35.6, gap(5.6, 35.6)), (35.6, nothing())):
        model = Failure()
        view = View(16, days, replace(log_of(ROWS), unwatched_ns=gaps), quiet(16))
        model.update(view)  # type: ignore[arg-type]
        told.append(model.predict(view)[1].mean)  # type: ignore[arg-type]
        fitted = model.fit(model.training(), 1)
        told.append(fitted["theta"])
    assert told[2] == pytest.approx(told[0], rel=1e-6)
    assert told[3] == pytest.approx(told[1], rel=1e-6, abs=1e-12), "and learns the same"
    assert (told[4] < 0.9 * told[0]).all()


def test_what_becomes_of_nodes_in_a_gap_is_no_outcome() -> None:
    model, log = Failure(), log_of(ROWS)
    for day in (5.6, 5.61):
        model.update(View(16, day, log, quiet(16) + 1.0))  # type: ignore[arg-type]
    assert model.cases.k
    assert not model.cases.get("lost_ns").any()
    gaps = gap(5.62, 35.0)
    model.update(View(16, 35.01, replace(log, unwatched_ns=gaps), quiet(16)))  # type: ignore[arg-type]
    before = model.cases.get("t_ns") < gaps[0, 0]
    assert (model.cases.get("lost_ns")[before] == gaps[0, 0]).all()
    assert not model.cases.get("lost_ns")[~before].any()


def test_fits_of_an_older_kind_are_refused_in_words() -> None:
    model = Failure()
    model.update(View(16, 5.6, log_of(ROWS), quiet(16)))  # type: ignore[arg-type]
    series = model.training()
    del series["log/unwatched_ns"]
    with pytest.raises(Exception, match="unwatched_ns"):
        fit_all(series, model.horizons_s, 1)


def test_days_off_do_not_make_the_fleet_look_well_of_late() -> None:
    per_d = np.full(100, 0.2)
    steady = np.arange(0.025, 3.0, 0.05)  # as expected, until the daemon was off
    whole = recent_factor(steady, per_d, 3.0)
    assert whole == pytest.approx(1.0, abs=0.05)
    off = recent_factor(steady + 4.0, per_d, 7.0, np.array([[4.0, 0.0]]))
    assert off == pytest.approx(1.0, abs=0.2)
    assert recent_factor(steady + 4.0, per_d, 7.0) < 0.5
    closed = 20.0 * HALF_LIFE_D / np.log(2.0) * (2.0**-4.0 - 2.0**-7.0)
    none = recent_factor(np.zeros(0), per_d, 7.0, np.array([[4.0, 0.0]]))
    assert none == pytest.approx(5.0 / (5.0 + closed))


def test_a_daemon_that_was_off_for_days_counts_as_watching_no_longer() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.3
    twin.wait(60)
    ill = ailing(twin.engine)
    ill.failures.begin_ns = days_ago_ns(twin.now_ns, 5.0)
    for k in range(40):
        ill.failed(20 + k % 16, days_ago_ns(twin.now_ns, 0.02 + k * 0.02), twin.now_ns)
    slots = np.array([0], np.int32)

    def rate() -> float:
        view = twin.engine.view(1.0)
        return float(interruption_rates(view, job_nodes(view, slots)).per_s[0])

    before = rate()
    twin.tick(None, ev.TicksSkipped(count=1, why="restart"), dt_s=3 * DAY_S)
    gaps = twin.engine.view(1.0).failures().unwatched_ns
    assert ago_d(gaps, twin.now_ns) == pytest.approx(np.array([[3.0, 0.0]]))
    after = rate()
    twin.engine.state.unwatched_ns = nothing()
    blind = rate()
    assert blind < 0.5 * before
    assert after == pytest.approx(before, rel=0.3)
    twin.engine.state.unwatched_ns = gaps
    view = twin.engine.view(1.0)
    held = job_nodes(view, slots)
    soft = save_terms(view, slots, held, interruption_rates(view, held))[0].soft_per_s[0]
    twin.engine.state.unwatched_ns = nothing()
    assert soft > save_terms(view, slots, held, interruption_rates(view, held))[0].soft_per_s[0]


def test_gaps_outlive_a_restart() -> None:
    twin, again = Saving({"a": EIGHT}), Saving({"a": EIGHT})
    twin.tick(None, ev.TicksSkipped(count=1, why="restart"), dt_s=3 * DAY_S)
    assert len(twin.engine.state.unwatched_ns) == 1
    again.engine.restore(twin.engine.dump())
    assert np.array_equal(again.engine.state.unwatched_ns, twin.engine.state.unwatched_ns)
    assert again.engine.state.checksum() == twin.engine.state.checksum()


def test_a_long_tick_that_nobody_calls_a_pause_is_watched() -> None:
    twin = Saving({"a": EIGHT})
    twin.tick(None, dt_s=DAY_S)
    assert not len(twin.engine.view(1.0).failures().unwatched_ns)
