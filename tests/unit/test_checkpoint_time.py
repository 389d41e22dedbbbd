"""Closed forms of checkpoint intervals against the published table, each other, limits and rival numerics."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import gamma as gamma_of, lambertw, zeta

from policies.checkpointing import (
    best_ahead,
    best_interval,
    best_weibull,
    ettr,
    ettr_ahead,
    ettr_weibull,
    young_s,
)
from policies.checkpointing.belief import gauss_gamma, quadrature
from policies.checkpointing.prediction import worth_saving_s
from policies.checkpointing.single_tier import best_fraction, daly_s, maximise
from policies.checkpointing.weibull import scale_s
from tests.support.believed_rates import best_believed, ettr_believed

HOUR, MINUTE = 3600.0, 60.0
# (MTTF h, save s, restart s, best interval min, ETTR at it, at 30, 60 and 120 min)
# source: the field's reference values that the requirements of the project give
TABLE = (
    (1.8, 60, 600, 14.0, 0.793, (0.762, 0.667, 0.490)),
    (1.8, 10, 300, 5.9, 0.903, (0.823, 0.711, 0.519)),
    (7.9, 60, 600, 30.1, 0.917, (0.917, 0.902, 0.852)),
    (7.9, 10, 300, 12.5, 0.963, (0.953, 0.925, 0.868)),
    (24, 60, 600, 53.0, 0.957, (0.951, 0.956, 0.944)),
)
LIMITS = (0.0, 1e-9, 60.0, 1e12, np.inf)
SECONDS = st.floats(0.1, 1e5)
MTTF = st.floats(1e2, 1e7)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_the_published_table(row: tuple) -> None:
    hours, save, restart, minutes, worth, fixed = row
    mttf = hours * HOUR
    interval, found = best_interval(save, restart, mttf)
    assert interval == pytest.approx(minutes * MINUTE, rel=0.01)
    assert daly_s(save, mttf) == pytest.approx(minutes * MINUTE, rel=0.01)
    assert found == pytest.approx(worth, abs=0.001)
    assert ettr([30 * MINUTE, 60 * MINUTE, 120 * MINUTE], save, restart, mttf) == pytest.approx(
        fixed, abs=1e-3
    )


@given(save=SECONDS, restart=SECONDS, mttf=MTTF)
def test_the_optimum_is_lamberts_and_no_other_interval_is_better(
    save: float, restart: float, mttf: float
) -> None:
    interval, worth = best_interval(save, restart, mttf)
    exact = mttf * (1.0 + lambertw(-np.exp(-1.0 - save / mttf)).real)
    assert interval == pytest.approx(exact, rel=1e-6, abs=1e-3)
    around = ettr(interval * np.geomspace(1e-2, 1e2, 401), save, restart, mttf)
    assert around.max() <= worth * (1.0 + 1e-12)


def test_the_optimum_of_cheap_saves_is_youngs_and_dalys() -> None:
    """All three agree if a save is short beside the MTTF, the better the shorter it is."""
    cost = np.array([1e-2, 1e-4, 1e-6, 1e-8, 1e-12, 1e-20])
    interval, _ = best_interval(cost, 0.0, 1.0)
    assert np.abs(daly_s(cost, 1.0) / interval - 1.0).max() < 2e-3
    assert (np.abs(young_s(cost, 1.0) / interval - 1.0) < np.sqrt(cost)).all()
    assert best_fraction(cost) == pytest.approx(np.sqrt(2.0 * cost), rel=0.05)
    assert best_fraction(np.array([50.0])) == pytest.approx(1.0), "an endless save: once per MTTF"


def test_daly_where_a_save_takes_longer_than_all_else() -> None:
    assert daly_s([1.9, 2.0, 5.0], 1.0)[1:] == pytest.approx(1.0)
    assert daly_s(2.0 - 1e-12, 1.0) == pytest.approx(2.0 * (1 + 1 / 3 + 1 / 9) - 2.0)


def test_what_a_flush_and_a_restart_cost() -> None:
    """Both are time in which a failure undoes all: one factor each; neither moves the optimum."""
    at = ettr(1000.0, 10.0, 0.0, 1e4)
    assert ettr(1000.0, 10.0, 500.0, 1e4) == pytest.approx(at * np.exp(-0.05), rel=1e-12)
    assert ettr(1000.0, 10.0, 0.0, 1e4, 500.0) == pytest.approx(at * np.exp(-0.05), rel=1e-12)
    free, _ = best_interval(10.0, 0.0, 1e4)
    assert best_interval(10.0, 777.0, 1e4, 100.0)[0] == free
    assert best_interval(10.0, 0.0, 1e4, 2.0 * float(free))[0] == 2.0 * free, (
        "never faster than storage drains"
    )


def test_every_limit_has_an_answer() -> None:
    tau, save, restart, mttf = np.array(list(product(LIMITS, LIMITS, LIMITS, LIMITS))).T
    for flush in LIMITS:
        found = ettr(tau, save, restart, mttf, flush)
        assert ((found >= 0.0) & (found <= 1.0)).all()
        interval, found = best_interval(save, restart, mttf, flush)
        assert ((found >= 0.0) & (found <= 1.0) & (interval >= flush)).all()
    for rule in (young_s, daly_s):
        assert (rule(save, mttf) >= 0.0).all()
    assert (ettr_weibull(tau, save, restart, mttf, 0.7) >= 0.0).all()
    assert (best_weibull(save, restart, mttf, 0.7)[1] >= 0.0).all()
    for recall, precision in product((0.0, 0.5, 1.0), (0.0, 1e-9, 0.5, 1.0)):
        found = ettr_ahead(tau, save, restart, mttf, recall, precision)
        assert ((found >= 0.0) & (found <= 1.0)).all()
    for shape in (0.0, 1.0, np.inf):
        found = ettr_believed(tau, save, restart, shape, 1.0 / np.maximum(mttf, 1e-300))
        assert ((found >= 0.0) & (found <= 1.0 + 1e-12)).all()


def test_nan_comes_of_nan_alone() -> None:
    good = [600.0, 60.0, 300.0, 1e4, 10.0]
    for i in range(5):
        bad = [*good[:i], np.nan, *good[i + 1 :]]
        assert np.isnan(ettr(*bad))
        assert np.isnan(ettr_weibull(*bad[:4], 0.7, bad[4])).all()
        if i:
            assert np.isnan(best_interval(*bad[1:])[1])
    assert np.isnan(ettr_ahead(600.0, 60.0, 300.0, 1e4, np.nan, 0.5))
    assert np.isnan([young_s(np.nan, 1e4), daly_s(60.0, np.nan)]).all()
    assert np.isnan(ettr_believed(600.0, 60.0, 300.0, np.nan, 1e-4)).all()


@pytest.mark.parametrize(
    ("given_s", "answer"),
    [
        ((0.0, 0.0, 100.0, 1e3), np.exp(-0.1)),  # a free save all the time: what the restart costs
        ((0.0, 1.0, 0.0, 1e3), 0.0),  # nothing but saves
        ((np.inf, 1.0, 0.0, 1e3), 0.0),  # no saves
        ((np.inf, 1.0, 0.0, np.inf), 1.0),  # and none needed
        ((90.0, 10.0, 0.0, np.inf), 0.9),  # what the saves cost
        ((90.0, 10.0, 0.0, 0.0), 0.0),
        ((90.0, np.inf, 0.0, 1e3), 0.0),
        ((90.0, -10.0, -5.0, np.inf), 1.0),  # a negative time counts as none
    ],
)
def test_limits_by_name(given_s: tuple[float, ...], answer: float) -> None:
    assert ettr(*given_s) == pytest.approx(answer, abs=1e-9)


def test_limits_of_the_best_interval() -> None:
    assert best_interval(0.0, 0.0, 1e4)[0] == 0.0
    assert np.array(best_interval(60.0, 0.0, np.inf)) == pytest.approx([np.inf, 1.0])
    assert best_interval(1e9, 0.0, 1e3)[0] == pytest.approx(1e3)
    assert best_interval(60.0, 0.0, 0.0)[1] == 0.0


@given(shape=st.floats(0.3, 300.0), save=st.floats(1.0, 600.0), mttf=st.floats(1e4, 1e6))
def test_a_believed_rate_against_the_zeta_function(shape: float, save: float, mttf: float) -> None:
    """The mean over a Gamma belief is a sum of powers, Hurwitz's zeta: exact, and another way altogether."""
    restart, flush = 300.0, 100.0
    tau = float(best_interval(save, restart, mttf)[0])
    period, scale = tau + save, shape * mttf
    powers = shape * np.log(scale) - (shape + 1.0) * np.log(period)
    series = zeta(shape + 1.0, (scale + restart + flush) / period + 1.0)
    if series > 1e-280:
        exact = tau * shape * np.exp(powers) * series
        assert ettr_believed(tau, save, restart, shape, 1.0 / mttf, flush) == pytest.approx(exact, abs=3e-6)


def test_rates_stand_for_their_belief() -> None:
    shapes = np.array([0.05, 0.31, 1.0, 2.5, 40.0, 1e5])
    rates, weights = quadrature(shapes, 8)
    assert weights.sum(axis=0) == pytest.approx(1.0)
    assert (weights * rates).sum(axis=0) == pytest.approx(1.0)
    assert (weights * rates**2).sum(axis=0) == pytest.approx(1.0 + 1.0 / shapes, rel=1e-3)
    exact, _ = gauss_gamma(np.array([2.5]), 8)
    assert rates[:, 3] == pytest.approx(exact[0], rel=1e-3)
    sure, weights = quadrature(np.array([np.inf]), 8)
    assert (sure * weights).sum() == pytest.approx(1.0)
    assert (sure == 1.0).all()


def test_a_vague_belief_means_longer_intervals_and_is_worth_little() -> None:
    shapes = np.array([0.5, 1.0, 3.0, 30.0, np.inf])
    interval, worth = best_believed(60.0, 600.0, shapes, 1.0 / (7.9 * HOUR))
    assert (np.diff(interval) < 0.0).all()
    sure, _ = best_interval(60.0, 600.0, 7.9 * HOUR)
    assert interval[-1] == pytest.approx(float(sure), rel=1e-4)
    planned_as_sure = ettr_believed(float(sure), 60.0, 600.0, shapes, 1.0 / (7.9 * HOUR))
    assert (worth - planned_as_sure < 2e-4).all()


def test_which_side_errs_cheaper() -> None:
    """Too long costs a little more than too short by the same factor; a wrong MTTF the same both ways."""
    for mttf, save in ((7.9 * HOUR, 60.0), (1.8 * HOUR, 60.0), (HOUR, 300.0)):
        interval, worth = best_interval(save, 600.0, mttf)
        for factor in (1.25, 1.5, 2.0, 4.0):
            too_long = worth - ettr(interval * factor, save, 600.0, mttf)
            too_short = worth - ettr(interval / factor, save, 600.0, mttf)
            assert too_short < too_long < 1.5 * too_short
            high = worth - ettr(best_interval(save, 0.0, mttf * factor)[0], save, 600.0, mttf)
            low = worth - ettr(best_interval(save, 0.0, mttf / factor)[0], save, 600.0, mttf)
            assert high == pytest.approx(float(low), rel=0.01)
    losses = worth - ettr(interval * np.array([0.5, 2.0]), save, 600.0, mttf)
    assert losses * 100 == pytest.approx([4.217, 4.973], abs=1e-3)


@pytest.mark.parametrize("shape", [0.5, 0.6, 0.75, 0.9, 1.0, 1.5])
def test_weibull_against_the_plain_sum(shape: float) -> None:
    for tau, save, mttf in ((2e3, 50.0, 1e5), (300.0, 10.0, 1e5), (5e4, 500.0, 1e4)):
        scale = mttf / gamma_of(1.0 + 1.0 / shape)
        assert scale_s(mttf, shape) == pytest.approx(scale)
        j = np.arange(1, 400_000)
        plain = tau * np.exp(-(((400.0 + j * (tau + save)) / scale) ** shape)).sum() / mttf
        assert ettr_weibull(tau, save, 300.0, mttf, shape, 100.0) == pytest.approx(plain, abs=1e-6)


def test_weibull_of_shape_1_is_a_constant_rate() -> None:
    tau = np.geomspace(1.0, 1e5, 50)
    assert ettr_weibull(tau, 30.0, 300.0, 2e4, 1.0, 60.0) == pytest.approx(
        ettr(tau, 30.0, 300.0, 2e4, 60.0), abs=1e-8
    )
    found = np.ravel(best_weibull(30.0, 300.0, 2e4, 1.0))
    assert found == pytest.approx(np.array(best_interval(30.0, 300.0, 2e4)), rel=1e-3)


def test_bursts_of_failures_spare_work_and_want_longer_intervals() -> None:
    """Of as many failures as at a constant rate more come together, where little is lost."""
    shapes = np.array([0.5, 0.7, 1.0])
    interval, worth = best_weibull(60.0, 0.0, 7.9 * HOUR, shapes)
    assert (np.diff(interval) < 0.0).all()
    at_constant = ettr_weibull(float(interval[-1]), 60.0, 0.0, 7.9 * HOUR, shapes)
    assert (worth - at_constant < 0.012).all(), "shaping intervals to bursts gains about a point at most"


@given(tau=st.floats(10.0, 1e5), save=st.floats(1.0, 1e3), mttf=st.floats(1e3, 1e6))
def test_predictions_that_tell_nothing_change_nothing(tau: float, save: float, mttf: float) -> None:
    plain = float(ettr(tau, save, 300.0, mttf))
    assert ettr_ahead(tau, save, 300.0, mttf, 0.0, 0.85) == pytest.approx(plain, rel=1e-9)
    assert ettr_ahead(tau, save, 300.0, mttf, 0.7, 0.85, np.inf) == pytest.approx(plain, rel=1e-9)
    assert ettr_ahead(tau, save, 300.0, mttf, 0.7, 0.0) == pytest.approx(plain, rel=1e-9)


def young_ahead_s(save_s: float, mttf_s: float, recall: float) -> float:
    """First-order interval. source: Aupy, Robert, Vivien and Zaidouni, JPDC 74 (2), 2014."""
    return float(np.sqrt(2.0 * save_s * mttf_s / (1.0 - recall)))


def test_predictions_against_the_published_figure_and_the_first_order_rule() -> None:
    """Recall 0.7 at precision 0.85 lifts 0.920 to 0.945, as the field has it; here 0.917 to 0.944."""
    interval, worth = best_ahead(60.0, 600.0, 7.9 * HOUR, 0.7, 0.85)
    assert worth - best_interval(60.0, 600.0, 7.9 * HOUR)[1] == pytest.approx(0.027, abs=1e-3)
    assert interval == pytest.approx(young_ahead_s(60.0, 7.9 * HOUR, 0.7), rel=0.01)
    for recall in (0.0, 0.5, 0.9):
        interval, _ = best_ahead(1.0, 60.0, 1e7, recall, 0.8)
        assert interval == pytest.approx(young_ahead_s(1.0, 1e7, recall), rel=2e-3)


def test_an_alarm_is_answered_where_enough_work_is_at_stake() -> None:
    """Save over precision is just above the best threshold: the save also stands for a regular one."""
    assert worth_saving_s([60.0, 60.0, 0.0], [0.5, 0.0, 0.0]) == pytest.approx([120.0, np.inf, 0.0])
    save, mttf, recall, precision = 60.0, 2e4, 0.7, 0.2
    interval, worth = best_ahead(save, 300.0, mttf, recall, precision)
    least = np.linspace(0.0, float(interval), 200)
    tried = ettr_ahead(float(interval), save, 300.0, mttf, recall, precision, least)
    assert 0.7 * save / precision < least[np.argmax(tried)] < save / precision
    assert tried.max() - worth < 1e-4
    assert tried[0] < worth, "false alarms are not free"


def test_more_recall_and_more_precision_are_worth_more() -> None:
    recall, precision = np.meshgrid(np.linspace(0.0, 1.0, 9), np.linspace(0.1, 1.0, 9))
    _, worth = best_ahead(60.0, 600.0, 7.9 * HOUR, recall, precision)
    assert (np.diff(worth, axis=0) >= -1e-9).all()
    assert (np.diff(worth, axis=1) >= -1e-9).all()


def test_the_golden_section_finds_a_hill() -> None:
    tops = np.array([3.0, 700.0, 1e6])
    found = maximise(lambda x: -(np.log(x / tops) ** 2), np.full(3, 1e-3), np.full(3, 1e9))
    assert found == pytest.approx(tops, rel=1e-6)
    rival = minimize_scalar(
        lambda x: -float(ettr(np.exp(x), 60.0, 0.0, 1e4)), bounds=(0.0, 12.0), method="bounded"
    )
    assert best_interval(60.0, 0.0, 1e4)[0] == pytest.approx(np.exp(rival.x), rel=1e-3)
    assert maximise(lambda x: x, np.array([np.nan]), np.array([1.0])) != 0.0
