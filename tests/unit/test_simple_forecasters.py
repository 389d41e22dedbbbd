"""Forecasters without parameters: closed forms, rivals (pandas, NumPy), no look ahead, hostile series."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.load import (
    LAST_ROWS,
    Forecaster,
    ForecastGrid,
    SeriesPanel,
    fill_gaps,
    hours_of_week,
    last_within,
)
from models.load.climatology import (
    Climatology,
    HourlyMedian,
    SeasonalMean,
    WeeklyMean,
    known_median,
    of_recent_rows,
)
from models.load.ewma import (
    Ewma1,
    Ewma2,
    Ewma5,
    Ewma15,
    Ewma60,
    Ewma240,
    mean_by_doubling,
    mean_by_product,
    weighted_mean,
)
from models.load.last_value import LastValue, rows_since_epoch
from models.load.seasonal_naive import OwnPeriod, SeasonalDay, SeasonalWeek, own_periods, season_rows
from twin.catalogue import F64, NS

EWMAS = (Ewma1, Ewma2, Ewma5, Ewma15, Ewma60, Ewma240)
SIMPLE: tuple[type[Forecaster], ...] = (
    LastValue,
    SeasonalDay,
    SeasonalWeek,
    OwnPeriod,
    *EWMAS,
    Climatology,
    HourlyMedian,
    SeasonalMean,
    WeeklyMean,
)
USUAL = (HourlyMedian, SeasonalMean, WeeklyMean)
HOUR = ForecastGrid(3600.0, (1, 5, 24, 30))
START_NS = 1_700_000_123 * NS


def panel(values: F64, step_s: float = 3600.0, start_ns: int = START_NS) -> SeriesPanel:
    return SeriesPanel(start_ns, step_s, values, zone="Europe/Berlin")


def gappy(seed: int, n_time: int, n: int, share: float = 0.1) -> F64:
    """Random walks round 100 with single gaps and one outage."""
    dice = np.random.default_rng(seed)
    values = 100.0 + dice.normal(size=(n_time, n)).cumsum(axis=0)
    values[dice.random((n_time, n)) < share] = np.nan
    at = int(dice.integers(0, n_time))
    values[at : at + n_time // 10, 0] = np.nan
    return values


def says(kind: type[Forecaster], grid: ForecastGrid, values: F64, *origins: int) -> F64:
    return kind(grid).predict(panel(values, grid.step_s), np.array(origins)).point


# --- no look ahead, and no look further back than it says


# --- hostile series


@pytest.mark.parametrize("kind", sorted({*SIMPLE} - {SeasonalMean, WeeklyMean}, key=lambda kind: kind.name))
def test_a_forecast_lies_within_the_past(kind: type[Forecaster]) -> None:
    values = gappy(1, 900, 3) * np.array([1e9, -1.0, 1e-6])
    said = says(kind, HOUR, values, *range(900))
    low, high = (f(values, axis=0) for f in (np.nanmin, np.nanmax))
    slack = 1e-12 * np.abs(values[np.isfinite(values)]).max()
    assert np.all(np.isnan(said) | ((said >= low - slack) & (said <= high + slack)))


def test_three_values_are_enough_for_some() -> None:
    values = np.array([[1.0], [2.0], [6.0]])
    assert (says(LastValue, HOUR, values, 2) == 6.0).all()
    assert (says(Climatology, HOUR, values, 2) == 2.0).all()
    np.testing.assert_allclose(says(Ewma1, HOUR, values, 2), (6 + 2 / 2 + 1 / 4) / 1.75)
    assert says(SeasonalDay, HOUR, values, 2)[2] == 6.0
    for kind in (SeasonalWeek, *USUAL):
        assert np.isnan(says(kind, HOUR, values, 2)).all()


def test_infinity_is_a_gap() -> None:
    values = gappy(2, 900, 2, share=0.0)
    holed, infinite = values.copy(), values.copy()
    holed[850:860, 0], infinite[850:860, 0] = np.nan, np.inf
    for kind in SIMPLE:
        for origins in ((855, 899), range(900)):
            np.testing.assert_array_equal(
                says(kind, HOUR, infinite, *origins), says(kind, HOUR, holed, *origins)
            )


# --- last


def test_last_looks_past_gaps_up_to_a_limit() -> None:
    values = np.full((LAST_ROWS + 2, 2), np.nan)
    values[0], values[5, 1] = 3.0, 4.0
    said = says(LastValue, HOUR, values, 0, LAST_ROWS - 1, LAST_ROWS)[0]
    np.testing.assert_array_equal(said, [[3.0, 3.0], [3.0, 4.0], [np.nan, 4.0]])


@given(st.integers(0, 99), st.integers(1, 60), st.integers(1, 70))
def test_filled_looks_back_row_by_row(seed: int, n_time: int, rows: int) -> None:
    values = gappy(seed, n_time, 2, 0.7)
    expected = np.full_like(values, np.nan)
    for row, column in np.ndindex(*values.shape):
        recent = values[max(0, row - rows + 1) : row + 1, column]
        expected[row, column] = next((v for v in recent[::-1] if np.isfinite(v)), np.nan)
    np.testing.assert_array_equal(fill_gaps(values, rows), expected)
    np.testing.assert_array_equal(last_within(values, np.arange(n_time), rows), expected)


# --- seasonal naive


def test_seasonal_says_what_was_there_a_season_before() -> None:
    hours = np.arange(500.0)[:, None]
    said = says(SeasonalDay, HOUR, hours, 400)[:, 0, 0]
    assert said.tolist() == [377.0, 381.0, 400.0, 382.0]  # 30 h ahead: two days before the target
    assert says(SeasonalWeek, HOUR, hours, 400)[:, 0, 0].tolist() == [233.0, 237.0, 256.0, 262.0]
    assert np.isnan(says(SeasonalDay, HOUR, hours, 22)[0]).all()
    assert says(SeasonalDay, HOUR, hours, 23)[0] == 0.0


def test_seasonal_steps_over_a_gap() -> None:
    hours = np.arange(500.0)[:, None]
    hours[377] = np.nan
    assert says(SeasonalDay, HOUR, hours, 400)[0] == 353.0
    hours[353] = np.nan
    assert np.isnan(says(SeasonalDay, HOUR, hours, 400)[0])


@pytest.mark.parametrize("step_s", [7.0, 86_400.0, 25_200.0, 43_200.0])
def test_a_grid_without_seasons_has_no_seasonal_forecast(step_s: float) -> None:
    grid = ForecastGrid(step_s, (1,))
    for kind in (SeasonalDay, SeasonalWeek, *USUAL):
        assert np.isnan(says(kind, grid, np.ones((40, 1)), 39)).all()
    assert season_rows(grid, 86_400.0) == 0


# --- ewma


@pytest.mark.parametrize("kind", EWMAS)
def test_ewma_is_that_of_pandas(kind: type[Forecaster]) -> None:
    pandas = pytest.importorskip("pandas")
    values = gappy(5, 400, 3, 0.2)
    said = says(kind, HOUR, values, *range(400))[0]
    reach = kind(HOUR).reach_rows
    halving = reach // 8
    for row in range(0, 400, 23):
        window = pandas.DataFrame(values[max(0, row - reach + 1) : row + 1])
        expected = window.ewm(halflife=halving, ignore_na=False).mean().to_numpy()[-1]
        np.testing.assert_allclose(said[row], expected, rtol=1e-10)


@given(st.integers(0, 99), st.integers(1, 300), st.integers(1, 400), st.floats(0.3, 1.0))
def test_both_ways_to_a_mean_agree(seed: int, n_time: int, rows: int, decay: float) -> None:
    values = gappy(seed, n_time, 3, 0.5 if seed % 2 else 0.02)
    origins = np.arange(n_time)
    slow = mean_by_product(values, origins, decay, rows)
    np.testing.assert_allclose(mean_by_doubling(values, origins, decay, rows), slow, rtol=1e-9)


def test_a_past_of_huge_values_is_forgotten() -> None:
    values = np.r_[np.full(500, 1e15), np.full(500, 1.0)][:, None]
    for origins in (np.array([999]), np.arange(1000)):
        assert weighted_mean(values, origins, 0.5, 64)[-1] == pytest.approx(1.0, rel=1e-12)


# --- climatology


@given(st.integers(0, 99), st.integers(1, 12), st.sampled_from((0.0, 0.4, 0.9)))
def test_known_median_is_that_of_numpy(seed: int, rows: int, share: float) -> None:
    dice = np.random.default_rng(seed)
    values = dice.normal(size=(4, 5, rows))
    values[dice.random(values.shape) < share] = np.nan
    some = np.isfinite(values).any(axis=-1)
    median = known_median(values)
    np.testing.assert_allclose(median[some], np.nanmedian(values[some], axis=-1), rtol=1e-12)
    assert np.isnan(median[~some]).all()


def test_climatology_is_the_median_of_two_weeks() -> None:
    values = gappy(4, 600, 2)
    said = says(Climatology, HOUR, values, 100, 335, 599)[0]
    for place, row in enumerate((100, 335, 599)):
        np.testing.assert_allclose(said[place], np.nanmedian(values[max(0, row - 335) : row + 1], axis=0))


def test_a_sample_of_a_long_window_spans_it() -> None:
    rows = np.arange(20_000.0)[:, None]
    here = panel(rows, 60.0)
    first = rows_since_epoch(here)
    windows = []

    def keep(window: F64) -> F64:
        windows.append(window)
        return window[None, :, 0]

    ends = of_recent_rows(here, np.array([599, 600, 19_999]), 10_000, 600, keep)[0, :, 0]
    assert [w.shape[1] for w in windows] == [600, 600, 370]  # thinned by 1, 3 and 27
    assert ends[0] == 599.0
    assert all((first + int(end)) % thin == 0 for end, thin in zip(ends[1:], (3, 27), strict=True))
    assert windows[2].min() >= 10_000.0
    assert windows[2].min() < 10_060.0


@pytest.mark.parametrize("kind", [HourlyMedian, SeasonalMean])
def test_a_day_that_repeats_is_foretold(kind: type[Forecaster]) -> None:
    shape = np.sin(np.arange(24) / 24 * 2 * np.pi)
    values = np.tile(shape, 10)[:, None]
    said = says(kind, HOUR, values, 150)[:, 0, 0]
    np.testing.assert_allclose(said, [shape[(150 + h) % 24] for h in HOUR.horizons], atol=1e-12)
    assert np.isnan(says(kind, HOUR, values, 4 * 24 + 22)[0]).all()  # its hour was seen four times
    assert np.isfinite(says(kind, HOUR, values, 4 * 24 + 23)[0]).all()


def test_a_week_that_repeats_is_foretold() -> None:
    shape = np.random.default_rng(0).normal(size=168)
    values = np.tile(shape, 4)[:, None]
    said = says(WeeklyMean, HOUR, values, 400)[:, 0, 0]
    np.testing.assert_allclose(said, [shape[(400 + h) % 168] for h in HOUR.horizons], atol=1e-12)
    assert np.isnan(says(WeeklyMean, HOUR, values, 2 * 168 - 2)[0]).all()
    assert np.isfinite(says(WeeklyMean, HOUR, values, 2 * 168 - 1)[0]).all()


def test_an_hour_of_quarters_is_one() -> None:
    """With quarters of an hour, the hour's median comes first, that over days second."""
    hours = np.random.default_rng(0).exponential(size=(40, 24, 4))
    here = SeriesPanel(0, 900.0, hours.reshape(-1, 1))  # begins on the hour
    origin = np.array([35 * 96 + 3])  # the first hour of day 35 is complete
    said = HourlyMedian(ForecastGrid(900.0, (1, 2, 96))).predict(here, origin).point[:, 0, 0]
    medians = np.median(hours, axis=2)
    np.testing.assert_allclose(said[:2], np.median(medians[7:35, 1]))
    np.testing.assert_allclose(said[2], np.median(medians[8:36, 0]))


def test_a_deviation_from_the_usual_fades() -> None:
    shape = np.repeat(np.sin(np.arange(24) / 24 * 2 * np.pi), 4)
    means, middles = shape[::4], np.arange(24) + 0.5
    values = np.tile(shape, 20)[:, None]
    row = 10 * 96 + 41
    values[row] += 5.0
    grid = ForecastGrid(900.0, (1, 24, 96))
    said = SeasonalMean(grid).predict(SeriesPanel(0, 900.0, values), np.array([row])).point[:, 0, 0]

    def usual(at: int) -> float:
        return float(np.interp((at + 0.5) / 4, middles, means))

    off = 5.0 + shape[row % 96] - usual(row % 96)
    for place, horizon in enumerate(grid.horizons):
        left = 0.5 ** (horizon / 96) * off
        assert said[place] == pytest.approx(usual((row + horizon) % 96) + left, abs=1e-12)
    values[row - 3 : row + 1] = np.nan  # nothing was heard for an hour
    said = SeasonalMean(grid).predict(SeriesPanel(0, 900.0, values), np.array([row])).point[:, 0, 0]
    assert said[0] == pytest.approx(usual(row % 96 + 1), abs=1e-12)


def test_a_mean_over_days_halves_its_weights_in_a_week() -> None:
    values = np.random.default_rng(0).normal(size=(40 * 24, 1))
    at = 35 * 24 + 7
    weights = 0.5 ** (np.arange(28) / 7)
    usual = [weights @ values[at + 1 - 24 * (1 + np.arange(28)), 0] / weights.sum() for at in (at, at - 1)]
    said = says(SeasonalMean, ForecastGrid(3600.0, (1,)), values, at)[0, 0, 0]
    assert said == pytest.approx(usual[0] + 0.5 ** (1 / 24) * (values[at, 0] - usual[1]))


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("ahead_h", [1, 24, 60])
def test_the_usual_follows_local_clocks(kind: type[Forecaster], ahead_h: int) -> None:
    """Berlin put its clocks back on 29 October 2023 and forward on 26 March: what is usual moves along."""
    grid = ForecastGrid(3600.0, (ahead_h,))
    for middle_ns in (1_698_541_200 * NS, 1_679_792_400 * NS):
        start_ns = middle_ns - 40 * 24 * 3600 * NS
        hours = hours_of_week(start_ns + 3600 * NS * np.arange(80 * 24), "Europe/Berlin").astype(int)
        values = np.random.default_rng(0).normal(size=168 if kind is WeeklyMean else 24)
        values = values[hours % len(values)][:, None]
        hours %= 24
        origins = np.arange(30 * 24, 55 * 24)
        said = (
            kind(grid).predict(SeriesPanel(start_ns, 3600.0, values, zone="Europe/Berlin"), origins).point[0]
        )
        wrong = np.abs(said - values[origins + ahead_h])[:, 0] > 1e-9
        # The hour that came twice, or never, is in the means of its own hour alone.
        night = [(hours[rows] >= 2) & (hours[rows] < 4) for rows in (origins, origins + ahead_h)]
        assert not np.any(wrong & ~night[0] & ~night[1])
        assert wrong.sum() <= 35


# --- a period of their own


def cycles(n_time: int, *periods: int) -> F64:
    """Series that are lower for a fifth of each period, with a little noise."""
    rows, dice = np.arange(n_time), np.random.default_rng(0)
    return np.stack([100.0 - 40.0 * (rows % p < max(1, p // 5)) for p in periods], axis=1) + dice.normal(
        scale=0.5, size=(n_time, len(periods))
    )


def test_the_period_of_each_series_is_found_in_its_last_rows() -> None:
    periods = (5, 17, 60, 160)
    assert own_periods(cycles(512, *periods), 512).tolist() == list(periods)
    gaps = cycles(512, *periods)
    gaps[np.random.default_rng(1).random(gaps.shape) < 0.1] = np.nan
    assert own_periods(gaps, 512).tolist() == list(periods)
    assert not own_periods(cycles(300, 160), 512).any(), "which 300 rows do not hold three times"


def test_what_has_no_period_of_its_own_has_none() -> None:
    dice = np.random.default_rng(2)
    noise, walk = dice.normal(size=(512, 20)), dice.normal(size=(512, 20)).cumsum(axis=0)
    assert np.count_nonzero(own_periods(noise, 512)) == 0
    assert np.count_nonzero(own_periods(walk, 512)) <= 2
    assert np.isnan(says(OwnPeriod, HOUR, noise, 511)).all()


def test_what_comes_is_what_was_there_whole_periods_ago() -> None:
    values = cycles(700, 60)
    for origin in (600, 650, 699):
        said = says(OwnPeriod, ForecastGrid(60.0, (1, 60, 61)), values, origin)[:, 0, 0]
        assert said.tolist() == [values[origin - 59, 0], values[origin, 0], values[origin - 59, 0]]
