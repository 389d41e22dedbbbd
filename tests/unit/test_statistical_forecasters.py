"""Autoregression and exponential smoothing: statsmodels' own forecasts, no look ahead, hostile series."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from models.load import Forecaster, ForecastGrid, SeriesPanel
from models.load.autoregression import LARGEST_ROOT, AutoRegression, _iterated, _shrunk, fit_series
from models.load.state_space import KEYS, NO_SEASON, StateSpace, _largest_root, _stable, smooth
from twin.catalogue import F64, NS

BOTH: tuple[type[Forecaster], ...] = (AutoRegression, StateSpace)
HOUR = ForecastGrid(3600.0, (1, 2, 6, 24, 30))
MONDAY_NS = 1_699_833_600 * NS  # 13 November 2023, midnight UTC


def panel(values: F64, step_s: float = 3600.0, zone: str = "UTC") -> SeriesPanel:
    return SeriesPanel(MONDAY_NS, step_s, values, zone=zone)


def noise(seed: int, n_time: int, n: int, memory: float = 0.9, daily: float = 2.0) -> F64:
    """AR(1) round 50 with a daily wave of 24 rows."""
    dice = np.random.default_rng(seed)
    out = np.zeros((n_time, n))
    for row in range(1, n_time):
        out[row] = memory * out[row - 1] + dice.normal(size=n)
    return 50.0 + out + daily * np.sin(np.arange(n_time) / 24 * 2 * np.pi)[:, None]


def ready(kind: type[Forecaster], grid: ForecastGrid, past: SeriesPanel) -> Forecaster:
    rule = kind(grid)
    found = rule.fit(past, 0)
    assert found
    rule.load(found)
    return rule


def holed(values: F64, seed: int = 0) -> F64:
    out = values.copy()
    out[np.random.default_rng(seed).random(values.shape) < 0.05] = np.nan
    out[len(out) // 2 : len(out) // 2 + 30, 0] = np.nan
    return out


# --- what both must do


@pytest.mark.parametrize("kind", BOTH)
def test_a_fit_is_the_same_each_time_and_blind_to_scale(kind: type[Forecaster]) -> None:
    values = noise(1, 600, 2)
    once, again = (kind(HOUR).fit(panel(values), seed) for seed in (0, 1))
    scaled = kind(HOUR).fit(panel(values * np.array([1e7, 3.0]) + 1e9), 0)
    assert once.keys() == again.keys() == scaled.keys()
    for key, value in once.items():
        np.testing.assert_array_equal(again[key], value)
        np.testing.assert_allclose(scaled[key], value, atol=1e-3)


@pytest.mark.parametrize("kind", BOTH)
def test_forecasts_scale_with_the_series(kind: type[Forecaster]) -> None:
    values = holed(noise(2, 500, 2))
    rule = ready(kind, HOUR, panel(values))
    origins = np.arange(200, 500, 37)
    said = rule.predict(panel(values), origins).point
    big = rule.predict(panel(1e9 + 1e4 * values), origins).point
    np.testing.assert_allclose((big - 1e9) / 1e4, said, rtol=1e-6)
    if kind is StateSpace:
        np.testing.assert_allclose(rule.predict(panel(-values), origins).point, -said, rtol=1e-9)


@pytest.mark.parametrize("kind", BOTH)
def test_odd_series_beside_sound_ones(kind: type[Forecaster]) -> None:
    values = noise(4, 500, 6)
    values[:, 0], values[:, 1] = 3.0, np.nan
    values[:480, 2] = np.nan  # a new rack
    values[:, 3] = 1e9 + values[:, 3]
    values[-90:, 4] = np.nan  # not heard of any more
    values[:497, 5] = np.nan
    rule = ready(kind, HOUR, panel(values))
    said = rule.predict(panel(values), np.array([100, 499])).point
    np.testing.assert_allclose(said[:, :, 0], 3.0, rtol=1e-12)
    assert np.isnan(said[:, :, 1]).all()
    assert np.isnan(said[:, 0, 2]).all()
    assert np.all(np.abs(said[:, 1, 2] - 50.0) < 15.0)
    assert np.all(np.abs(said[:, :, 3] - 1e9 - 50.0) < 15.0)
    assert np.all(np.abs(said[:, 1, 4] - 50.0) < 15.0)
    few = said[:, 1, 5]
    assert np.isnan(few).all() if kind is AutoRegression else np.all(np.abs(few - 50.0) < 15.0)


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_ahead_beats_the_last_value_where_it_can(kind: type[Forecaster]) -> None:
    values = noise(5, 2400, 4, memory=0.5)
    rule = ready(kind, HOUR, panel(values[:1200]))
    origins = np.arange(1200, 2399)
    error = np.abs(rule.predict(panel(values), origins).point[0] - values[origins + 1]).mean()
    last = np.abs(values[origins] - values[origins + 1]).mean()
    best = np.sqrt(2 / np.pi)  # mean size of a normal error of one
    assert best * 0.95 < error < (best * 1.03 if kind is AutoRegression else last * 0.97)


# --- autoregression


@pytest.mark.parametrize("order", [1, 2, 4, 8])
def test_autoregression_has_as_many_lags_as_its_series_remember(order: int) -> None:
    dice = np.random.default_rng(order)
    values = dice.normal(size=(1500, 2))
    for row in range(order, len(values)):
        values[row] += 0.8 * values[row - order]
    assert len(AutoRegression(HOUR).fit(panel(values), 0)["phi"]) == order


@pytest.mark.parametrize("step_s", [3600.0, 90_000.0])
def test_autoregression_is_that_of_statsmodels(step_s: float) -> None:
    """On a week, which is the window of the mean too, both fit and say the same."""
    from statsmodels.tsa.ar_model import AutoReg

    values = noise(7, 168, 1, memory=0.7)[:, 0]
    grid = ForecastGrid(step_s, HOUR.horizons)
    rule = ready(AutoRegression, grid, panel(values[:, None], step_s))
    said = rule.predict(panel(values[:, None], step_s), np.array([167])).point[:, 0, 0]
    parameters = rule.fit(panel(values[:, None], step_s), 0)
    order, count = len(parameters["phi"]), len(parameters["day"])
    assert count == (4 if step_s == 3600.0 else 0)
    waves = [
        f(2 * np.pi * k * np.arange(168 + 30) / 24) for k in range(1, count + 1) for f in (np.cos, np.sin)
    ]
    exog = np.stack(waves, axis=1) if waves else None
    scaled = (values - values.mean()) / values.std()
    model = AutoReg(scaled, order, trend="c", exog=None if exog is None else exog[:168], hold_back=8)
    params = model.fit().params
    # The rule's first target comes after the longest lag it tries on so many rows.
    ours = np.r_[parameters["constant"], parameters["phi"], parameters["day"].ravel()]
    np.testing.assert_allclose(ours, params, rtol=1e-8, atol=1e-12)
    path = model.predict(ours, 168, 168 + 29, exog_oos=None if exog is None else exog[168:])
    np.testing.assert_allclose(
        said, values.mean() + values.std() * path[np.array(HOUR.horizons) - 1], rtol=1e-9
    )


def test_iterated_weights_are_the_iteration() -> None:
    dice = np.random.default_rng(0)
    phi, drives = dice.normal(size=4) / 4, dice.normal(size=(13, 2))
    lags, driven = _iterated(phi, drives, (1, 3, 12))
    past, amounts = dice.normal(size=4), dice.normal(size=2)
    path = list(past)
    for step in range(1, 13):
        path.append(float(phi @ path[:-5:-1]) + float(drives[step] @ amounts))
    expected = np.array(path)[[4, 6, 15]]
    np.testing.assert_allclose(lags @ past[::-1] + driven @ amounts, expected, rtol=1e-12)


@pytest.mark.parametrize("phi", [[1.2], [0.5, 0.7, -0.1], [2.0, -1.0], [0.0, 0.0, 1.3]])
def test_explosive_roots_are_shrunk(phi: list[float]) -> None:
    shrunk = _shrunk(np.array(phi))
    roots, before = (np.roots(np.r_[1.0, -np.asarray(p)]) for p in (shrunk, phi))
    assert np.abs(roots).max() == pytest.approx(LARGEST_ROOT, rel=1e-6)
    factor = LARGEST_ROOT / np.abs(before).max()
    np.testing.assert_allclose(np.sort(np.abs(roots)), factor * np.sort(np.abs(before)), rtol=1e-6)
    np.testing.assert_array_equal(_shrunk(np.array([0.5, 0.2])), [0.5, 0.2])


def test_an_exploding_series_does_not_explode_the_forecast() -> None:
    grid = ForecastGrid(10.0, (1, 100, 5000))
    values = 1.02 ** np.arange(400.0)[:, None]
    rule = ready(AutoRegression, grid, panel(values, 10.0))
    said = rule.predict(panel(values, 10.0), np.array([399])).point
    assert np.all(np.abs(said) < 10 * values.max())


def test_the_day_follows_local_clocks() -> None:
    """Berlin turns its clocks back on 29 October 2023: the wave of the local day stays where people are."""
    grid = ForecastGrid(3600.0, (1, 24, 48))
    start_ns = 1_696_118_400 * NS  # 1 October 2023, midnight UTC
    hours = np.arange(24 * 35)
    change = 28 * 24 + 1  # row at which UTC is 01:00 on the 29th
    local = hours + 2 - (hours >= change)
    dice = np.random.default_rng(0)
    values = (np.sin(2 * np.pi * local / 24) + 0.01 * dice.normal(size=len(hours)))[:, None]
    here = SeriesPanel(start_ns, 3600.0, values, zone="Europe/Berlin")
    rule = ready(AutoRegression, grid, here.upto(27 * 24))
    origins = np.arange(27 * 24, 28 * 24)
    said = rule.predict(here, origins).point[2, :, 0]
    np.testing.assert_allclose(said, values[origins + 48, 0], atol=0.1)


def test_series_to_fit_on_are_spread_and_vary() -> None:
    values = np.random.default_rng(0).normal(size=(50, 100))
    values[:, :10] = 1.0
    values[:45, 10:30] = np.nan
    chosen = fit_series(values, 8)
    assert len(chosen) == 8
    assert chosen.min() == 30
    assert chosen.max() == 99
    assert fit_series(values[:, :10], 8).size == 0
    assert fit_series(values[:, 5:33], 3).tolist() == [25, 26, 27]  # the complete ones


# --- state space


def gains_of(level: float, slope: float, season: float, damping: float) -> dict[str, F64]:
    return dict(zip(KEYS, np.array([[level], [slope], [season], [damping]]), strict=True))


@pytest.mark.parametrize("period", [0, 24])
def test_smoothing_is_that_of_statsmodels(period: int) -> None:
    """After so long that it does not matter where each began."""
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    values = noise(9, 8000, 1)
    level, slope, season, damping = 0.3, 0.02, 0.4, 0.9
    fixed = {"smoothing_level": level, "smoothing_trend": slope, "damping_trend": damping}
    if period:
        fixed["smoothing_seasonal"] = season
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ETSModel(values[:, 0], trend="add", damped_trend=True, seasonal="add" if period else None,
                         seasonal_periods=period or None, initialization_method="heuristic")  # fmt: skip
        with model.fix_params(fixed):
            theirs = model.fit(disp=False).forecast(24)
    states = smooth(values, (level, slope, season, damping), period, 2)
    said = states.level[-1] + np.cumsum(damping ** np.arange(1, 25)) * states.slope[-1]
    if period:
        said += states.season[-24:, 0]
    np.testing.assert_allclose(said, theirs, rtol=1e-9)


@pytest.mark.parametrize("season", [NO_SEASON, 0.4])
def test_a_forecast_is_that_of_the_smoothed_window(season: float) -> None:
    values = noise(9, 1000, 2)
    rule = StateSpace(HOUR)
    rule.load(gains_of(0.3, 0.02, season, 0.9))
    said = rule.predict(panel(values), np.array([999])).point[:, 0]
    begin = next(b for b in range(1000 - rule.reach_rows, 1000) if (rule_rows(b) + 336) % 128 == 0)
    states = smooth(values[begin:], (0.3, 0.02, season, 0.9), 24 if season > 0 else 0, 14)
    for place, h in enumerate(HOUR.horizons):
        expected = states.level[-1] + states.slope[-1] * (0.9 - 0.9 ** (h + 1)) / 0.1
        if season > 0:
            expected = expected + states.season[h - 1 - 24 * -(-h // 24)]
        np.testing.assert_allclose(said[place], expected, rtol=1e-12)


def rule_rows(row: int) -> int:
    """Hours since 1970."""
    return MONDAY_NS // (3600 * NS) + row


def test_gains_under_which_errors_would_grow_are_not_taken() -> None:
    assert _largest_root(np.array([0.3, 0.1, 0.35, 0.9]), 24) == pytest.approx(1.0025, abs=1e-4)
    assert _largest_root(np.array([0.3, 0.1, NO_SEASON, 0.9]), 24) < 1.0
    np.testing.assert_array_equal(_stable(np.array([0.3, 0.1, 0.35, 0.9]), 24), [0.3, 0.0, 0.35, 0.9])
    for level, season in ((0.01, 1.0), (1.0, 1.0), (0.5, 0.01)):
        assert _largest_root(np.array([level, 0.0, season, 0.98]), 24) <= 1.0 + 1e-9
    sound = np.array([0.3, 0.02, 0.4, 0.9])
    np.testing.assert_array_equal(_stable(sound, 24), sound)


def test_a_gap_changes_nothing_but_time() -> None:
    values = noise(10, 60, 1, daily=0.0)
    values[40:] = np.nan
    states = smooth(values, (0.4, 0.2, 0.0, 0.9), 0, 0)
    fading = 0.9 ** np.arange(1, 21)
    np.testing.assert_allclose(
        states.level[40:, 0], states.level[39, 0] + np.cumsum(fading) * states.slope[39, 0]
    )
    np.testing.assert_allclose(states.slope[40:, 0], fading * states.slope[39, 0])


def test_a_small_gain_starts_as_a_running_mean() -> None:
    values = noise(11, 30, 2)
    values[:3] = np.nan
    states = smooth(values, (1e-9, 0.0, 0.0, 1.0), 0, 0)
    np.testing.assert_allclose(states.level[-1], values[3:].mean(axis=0), rtol=1e-6)
    assert np.isnan(states.level[:3]).all()


def test_a_fading_trend_is_found() -> None:
    dice = np.random.default_rng(0)
    slope = np.zeros(1500)
    for row in range(1, 1500):
        slope[row] = 0.95 * slope[row - 1] + 0.3 * dice.normal()
    values = np.cumsum(slope)[:, None]
    found = StateSpace(ForecastGrid(90_000.0, (1,))).fit(panel(values, 90_000.0), 0)
    assert found["slope"][0] > 0.3
    assert found["season"][0] == NO_SEASON


def test_the_shape_of_the_day_is_taken_where_it_pays() -> None:
    flat, daily = noise(12, 1000, 3, daily=0.0), noise(12, 1000, 3, daily=6.0)
    assert StateSpace(HOUR).fit(panel(flat), 0)["season"][0] == NO_SEASON
    short = noise(0, 200, 1, daily=0.0)  # on which a shape that costs nothing would win
    assert StateSpace(HOUR).fit(panel(short), 0)["season"][0] == NO_SEASON
    assert StateSpace(HOUR).fit(panel(daily), 0)["season"][0] >= 0.0
    assert StateSpace(ForecastGrid(900.0, (1,))).fit(panel(daily, 900.0), 0)["season"][0] == NO_SEASON
