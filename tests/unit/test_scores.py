"""Scores of a backtest: closed forms, rivals computed in another way, forecasts whose scores are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import norm, poisson
from statsmodels.stats.proportion import proportion_confint

from models.backtest import BacktestResult, HorizonForecasts, binomial, published_coverage, scores
from models.backtest.scores import (
    band_share,
    cells,
    count_independent,
    ewma,
    interval,
    persistence_bands,
    pinball,
    score_load,
    seasonal_naive,
    unchanged_share,
)
from models.load import BANDS, LEVELS, MEDIAN, SeriesPanel
from twin.catalogue import F64


def wave(n: int = 600, k: int = 2, seed: int = 1) -> F64:
    rng = np.random.default_rng(seed)
    return 100 + 20 * np.sin(np.arange(n) / 9.0)[:, None] + rng.normal(size=(n, k)).cumsum(axis=0)


def course_of(values: F64, horizon: int, said: F64, width: float = 1.0, stride: int = 1) -> HorizonForecasts:
    """Issued: `said` [k, n] as the median from every row of the second half, bands `width` apart."""
    origins = np.arange(len(values) // 2, len(values))[::stride]
    offsets = width * (np.arange(len(LEVELS)) - MEDIAN)
    return HorizonForecasts(
        horizon, stride, origins, said[..., None] + offsets, np.ones((values.shape[1], 1)), 0.5
    )


def result_of(
    values: F64, *courses: HorizonForecasts, step_s: float = 60.0, names: Sequence[str] = ("a", "b")
) -> BacktestResult:
    panel = SeriesPanel(0, step_s, values, tuple(names))
    return BacktestResult(panel, len(values) // 2, ("x",), courses, 2.0, (), 7)


def future(values: F64, horizon: int) -> F64:
    at = np.minimum(np.arange(len(values) // 2, len(values)) + horizon, len(values) - 1)
    return values[at]


def test_the_told_band_counts_what_lies_in_it_of_the_outcomes_that_have_one() -> None:
    values = wave(200)
    half = np.full((100, 2, 2), 1e6)
    half[:10] = np.nan  # nothing was told yet
    half[50:60, 0] = 0.0  # the first series is missed
    course = replace(course_of(values, 3, values[100:]), half=half)
    result = result_of(values, course)
    missed = 10 / (2 * (100 - 3 - 10))
    assert published_coverage(result, 0, [0, 1]) == (pytest.approx(1.0 - missed), 2 * (100 - 3 - 10))
    assert published_coverage(result, 0, [1]) == (1.0, 100 - 3 - 10)
    share, count = published_coverage(
        result_of(values, replace(course, half=np.full_like(half, np.nan))), 0, [0]
    )
    assert (np.isnan(share), count) == (True, 0)
    wide = replace(course, horizon=5, half=0.0 * half)  # never narrower than the shorter one
    assert published_coverage(result_of(values, course, wide), 1, [1])[0] == 1.0


def test_a_perfect_forecast_scores_zero_and_the_last_value_scores_one() -> None:
    values = wave()
    last = values[300:]
    perfect, naive = (
        score_load(result_of(values, course_of(values, 6, said)))[0] for said in (future(values, 6), last)
    )
    assert perfect["mase"] == 0.0
    assert perfect["peak_error"] == 0.0
    assert perfect["ramp_hit_rate"] == 1.0
    assert perfect["ramp_false_rate"] == 0.0
    assert perfect["coverage50"] > 0.99
    assert naive["mae"] == naive["mae_naive"]
    assert naive["mase"] >= 1.0
    assert naive["ramp_hit_rate"] == 0.0
    assert np.isnan(naive["ramp_false_rate"])
    assert perfect["targets"] == 2 * (300 - 6)
    assert perfect["independent_targets"] == 294 // 6
    assert perfect["fit_s"], perfect["predict_ms"] == (2.0, 0.5)
    assert perfect["mase_low"] == perfect["mase_high"] == 0.0, "three hundred rows are enough for an interval"
    assert naive["mase_low"] <= naive["mase"] <= naive["mase_high"]


def test_errors_are_summed_over_series_and_the_rivals_too() -> None:
    values = wave()
    values[:, 1] *= 50.0
    told = score_load(result_of(values, course_of(values, 3, values[300:] * 1.01)))[0]
    one, two = told["series"]["a"], told["series"]["b"]
    assert told["mae"] == pytest.approx((one["mae"] + two["mae"]) / 2)
    assert told["mae_naive"] == pytest.approx((one["mae_naive"] + two["mae_naive"]) / 2)
    best = min(told["mae_naive"], told["mae_seasonal"], told["mae_ewma"])
    assert told["mase"] == pytest.approx(told["mae"] / best)
    only = score_load(result_of(values, course_of(values, 3, values[300:] * 1.01)), pooled=[1])[0]
    assert only["mae"] == two["mae"]


def test_peaks_that_were_forecast_a_tenth_too_low_say_so() -> None:
    values = wave(k=1)
    told = score_load(result_of(values, course_of(values, 1, 0.9 * future(values, 1)), names=["a"]))[0]
    assert told["peak_error"] == pytest.approx(-0.1)


def test_a_ramp_counts_as_announced_from_half_its_least_size_in_the_right_direction() -> None:
    values = np.zeros((400, 1))
    values[:200, 0] = np.arange(200) % 2  # changes of one row: all 1
    values[300:, 0] = 5.0  # the only ramp beyond, from row 299
    values[260, 0] = 1.0  # no greater than those before
    said = np.zeros((200, 1))
    for level, hit in ((0.4, 0.0), (0.5, 1.0), (-0.5, 0.0)):
        said[99] = level
        forecast = np.where(said, said, values[200:])
        told = score_load(result_of(values, course_of(values, 1, forecast), names=["a"]))
        assert told[0]["ramps"] == 1
        assert told[0]["ramp_hit_rate"] == hit


def test_gaps_count_neither_at_the_origin_nor_at_the_target() -> None:
    values = wave(k=1)
    values[400:410] = np.nan
    told = score_load(result_of(values, course_of(values, 3, np.full((300, 1), 100.0)), names=["a"]))[0]
    assert told["targets"] == 297 - 10 - 3
    assert all(np.isfinite(told[key]) for key in ("mae", "mase", "pinball", "coverage90"))


def test_a_constant_series_that_is_forecast_right_is_as_good_as_its_rivals() -> None:
    values = np.full((200, 1), 3.0)
    told = score_load(result_of(values, course_of(values, 2, values[100:]), names=["a"]))[0]
    assert told["mase"] == 1.0
    assert told["unchanged_share"] == 1.0
    assert told["coverage90"] == 1.0
    wrong = score_load(result_of(values, course_of(values, 2, values[100:] + 1.0), names=["a"]))[0]
    assert np.isnan(wrong["mase"])


@given(st.lists(st.integers(-3, 3), min_size=7, max_size=7), st.integers(-4, 4))
def test_coverage_of_ties_is_that_of_the_randomised_transform(steps: list[int], outcome: int) -> None:
    quantiles = np.sort(np.array(steps, np.float64))
    y = np.array([[float(outcome)]])
    # Rival: spread the outcome over the levels that it may stand for, a thousand of them, and count.
    edges = [0.0, *LEVELS, 1.0]
    low = max([level for level, q in zip(LEVELS, quantiles, strict=True) if q < outcome], default=0.0)
    high = min([level for level, q in zip(LEVELS, quantiles, strict=True) if q > outcome], default=1.0)
    assert low in edges
    assert high in edges
    u = low + (high - low) * (np.arange(4000) + 0.5) / 4000
    for band, (a, b) in BANDS.items():
        share = ((u > LEVELS[a]) & (u < LEVELS[b])).mean()
        assert band_share(quantiles[None, None], y, band)[0, 0] == pytest.approx(share, abs=2e-3)


def test_right_quantiles_cover_what_they_should() -> None:
    rng = np.random.default_rng(3)
    y = rng.normal(size=(20_000, 1))
    q = np.broadcast_to(norm.ppf(LEVELS), (20_000, 1, len(LEVELS)))
    counts = rng.poisson(1.2, (20_000, 1)).astype(np.float64)
    of_counts = np.broadcast_to(poisson.ppf(LEVELS, 1.2), (20_000, 1, len(LEVELS)))
    for band, (low, high) in BANDS.items():
        share = LEVELS[high] - LEVELS[low]
        assert band_share(q, y, band).mean() == pytest.approx(share, abs=0.012)
        if band != "50":  # its edges are too coarse for counts of 0, 1 and 2
            assert band_share(of_counts, counts, band).mean() == pytest.approx(share, abs=0.03)


def test_an_outcome_that_is_unknown_or_a_band_that_is_missing_is_in_no_band() -> None:
    q = np.array([[[0, 1, 2, 3, 4, 5, 6.0]], [[np.nan, 1, 2, 3, 4, 5, 6.0]]])
    assert np.isnan(band_share(q, np.array([[np.nan], [3.0]]), "90")).all()


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_pinball_of_a_point_is_half_its_error(at: float, outcome: float) -> None:
    loss = pinball(np.full((1, 1, len(LEVELS)), at), np.array([[outcome]]))[0, 0]
    assert loss == pytest.approx(abs(at - outcome) / 2)  # the levels lie evenly around 0.5


def test_pinball_is_least_at_the_right_quantiles() -> None:
    y = np.random.default_rng(0).normal(size=(40_000, 1))
    right = np.quantile(y, LEVELS)
    losses = {
        scale: pinball(np.broadcast_to(scale * right, (40_000, 1, 7)), y).mean() for scale in (0.7, 1.0, 1.4)
    }
    assert losses[1.0] < losses[0.7]
    assert losses[1.0] < losses[1.4]


def test_ewma_is_that_of_pandas() -> None:
    values = wave(300, 2)
    values[:4, 1] = np.nan
    values[50:60, 0] = np.nan
    mine = ewma(values, (5, 15))
    for i, life in enumerate((5, 15)):
        held = pd.DataFrame(values).ewm(halflife=life, adjust=True, ignore_na=True).mean().ffill()
        np.testing.assert_allclose(mine[i], held.to_numpy(), rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(30, 150), st.one_of(st.none(), st.integers(4, 30)))
def test_rivals_know_nothing_after_the_origin(horizon: int, origin: int, season: int | None) -> None:
    values = wave(250, 1)
    other = values.copy()
    other[origin + 1 :] = 1e9
    at = np.array([origin])
    one = seasonal_naive(values, at, horizon, season)
    assert one == seasonal_naive(other, at, horizon, season)
    if season is not None and origin + horizon - season * -(-horizon // season) >= 0:
        assert one[0, 0] in values[(origin + horizon) % season :: season, 0]
    elif season is None:
        assert one == values[at]
    np.testing.assert_array_equal(
        persistence_bands(values, at, horizon, 1), persistence_bands(other, at, horizon, 1)
    )
    np.testing.assert_array_equal(ewma(values)[:, at], ewma(other)[:, at])


def test_bands_of_the_last_value_are_the_quantiles_of_its_errors_so_far() -> None:
    values = wave(400, 2)
    values[100:120, 1] = np.nan
    origins = np.array([200, 260, 390])
    bands = persistence_bands(values, origins, 7, 1)
    for i, row in enumerate(origins):
        errors = values[7 : row + 1] - values[: row + 1 - 7]
        want = values[row][:, None] + np.nanquantile(errors, LEVELS, axis=0).T
        np.testing.assert_allclose(bands[i], want)
    assert np.isnan(persistence_bands(values, np.array([10]), 7, 1)).all()


def test_the_interval_of_independent_errors_is_that_of_the_normal_law() -> None:
    rng = np.random.default_rng(2)
    error, rival = rng.exponential(1.0, 4000), rng.exponential(2.0, 4000)
    low, high = interval(error, rival, 1, 0)
    ratio = error.mean() / rival.mean()
    half = 1.645 * np.std(error - ratio * rival) / rival.mean() / np.sqrt(4000)
    assert low == pytest.approx(ratio - half, abs=0.2 * half)
    assert high == pytest.approx(ratio + half, abs=0.2 * half)


def test_the_interval_grows_with_correlation_and_needs_blocks() -> None:
    rng = np.random.default_rng(2)
    slow = np.repeat(rng.exponential(1.0, 100), 40)
    rival = np.ones(4000)
    short, long = (np.diff(interval(slow, rival, length, 0))[0] for length in (1, 80))
    assert long > 3 * short
    assert np.isnan(interval(slow, rival, 2000, 0)).all()
    assert interval(slow, rival, 40, 0) == interval(slow, rival, 40, 0)


@given(st.integers(1, 400), st.floats(0, 1))
def test_the_binomial_interval_is_that_of_wilson(n: int, share: float) -> None:
    low, high = proportion_confint(share * n, n, alpha=0.1, method="wilson")
    assert binomial(share, n) == pytest.approx((max(low, 0.0), min(high, 1.0)), abs=1e-4)


def test_coverage_has_its_interval_where_targets_are_few_only() -> None:
    values = wave(2400)
    few = score_load(result_of(values, course_of(values, 6, future(values, 6))))[0]
    many = score_load(result_of(values, course_of(values, 2, future(values, 2))))[0]
    assert few["independent_targets"] < scores.ENOUGH_TARGETS <= many["independent_targets"]
    assert few["coverage90_low"] <= few["coverage90"] <= few["coverage90_high"]
    assert np.isnan(many["coverage90_low"])


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 9))
def test_targets_that_are_counted_as_apart_are_apart(counts: list[bool], horizon: int) -> None:
    rows = np.arange(len(counts)) * 2
    number = count_independent(rows, np.array(counts), horizon)
    held = rows[np.array(counts, bool)]
    # Rival: the greatest number of points a horizon apart, by dynamic programming.
    best = [0] * (len(held) + 1)
    for i in reversed(range(len(held))):
        after = next((j for j in range(i + 1, len(held)) if held[j] - held[i] >= horizon), len(held))
        best[i] = max(best[i + 1], 1 + best[after])
    assert number == best[0]


def test_unchanged_share_leaves_gaps_out() -> None:
    values = np.array([[1.0, 1.0, np.nan, 1.0, 2.0, 2.0]]).T
    assert unchanged_share(values)[0] == pytest.approx(2 / 3)


def test_a_season_is_used_where_the_grid_has_days() -> None:
    values = np.tile(np.arange(24.0) ** 2, 20)[:, None]
    course = course_of(values, 5, np.zeros((240, 1)))
    hourly = cells(SeriesPanel(0, 3600.0, values), course, 240, ewma(values))
    assert np.nansum(hourly.rivals["seasonal"]) == 0.0
    odd = cells(SeriesPanel(0, 3601.0, values), course, 240, ewma(values))
    np.testing.assert_array_equal(odd.rivals["seasonal"], odd.rivals["naive"])
