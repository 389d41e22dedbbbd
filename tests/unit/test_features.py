"""Features: closed forms, units that cancel, nothing outside of the reach is seen, any batch is alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.load import ForecastGrid, SeriesPanel, features
from models.load.features import (
    TrainingCases,
    all_cases,
    columns_at,
    names,
    present_features,
    reach_rows,
    sample,
    targets,
)
from twin.catalogue import F64, I64

GRID = ForecastGrid(900.0, (1, 4, 96, 100))  # 96 rows a day
N = 2600


def panel_of(values: F64, zone: str = "UTC", **known: F64) -> SeriesPanel:
    return SeriesPanel(0, GRID.step_s, values, zone=zone, known=known)


def walks(n: int = N, n_series: int = 3, seed: int = 0) -> F64:
    dice = np.random.default_rng(seed)
    return 50 + np.cumsum(dice.normal(size=(n, n_series)), axis=0).round(1)


def table(panel: SeriesPanel, origins: I64, horizon: int = 4) -> dict[str, F64]:
    cases = all_cases(origins, panel.n)
    columns = columns_at(panel, cases, present_features(panel, cases), GRID, horizon)
    named = names(GRID, features.known_names(panel))
    assert len(named) == len(set(named)) == len(columns)
    return dict(zip(named, columns.reshape(len(columns), len(origins), panel.n), strict=True))


def test_a_straight_line() -> None:
    panel = panel_of(np.arange(400.0)[:, None])
    cases = all_cases(np.array([399]), 1)
    seen = present_features(panel, cases)
    row = {name: float(column[0, 0]) for name, column in table(panel, np.array([399])).items()}
    scale = float(seen.scale[0])
    assert float(seen.last[0]) == 399.0
    # 240 rows on a line deviate by 60 in the mean; each step is 1; of two farther rows one deviates by 288.
    assert scale == pytest.approx(60 + 1 + 288 / 2)
    for k in features.RAMP_ROWS:
        assert row[f"ramp_{k}"] * scale == pytest.approx(k)
    assert row["mean_60"] * scale == pytest.approx(-29.5)
    assert row["deviation_5"] * scale == pytest.approx(np.sqrt(2.0))
    assert row["lowest_240"] * scale == pytest.approx(-239)
    assert row["highest_240"] == 0.0
    assert row["move_15"] * scale == pytest.approx(1.0)
    assert row["still_60"] == 0.0
    assert row["place"] == row["far_rank"] == row["farther_rank"] == 1.0
    assert row["far_median"] * scale == pytest.approx(-4 * 48)
    assert row["level"] * scale == pytest.approx(399)
    assert row["lag_96"] * scale == pytest.approx(4 - 96)
    assert row["rise_96"] * scale == pytest.approx(4)
    age = np.arange(241)
    for half_life in features.HALF_LIVES:
        weight = 0.5 ** (age / half_life)
        expected = -np.sum(age * weight) / np.sum(weight)
        assert row[f"ewma_{half_life:g}"] * scale == pytest.approx(expected)


def test_steps_and_gaps_are_counted() -> None:
    values = np.repeat(np.arange(100.0), 10)[:, None]
    values[995:] = np.nan
    values[900] = np.nan
    row = {name: float(column[0, 0]) for name, column in table(panel_of(values), np.array([999])).items()}
    assert row["stale"] == pytest.approx(np.log1p(5))
    assert row["since_gap"] == 0.0
    assert row["since_change"] == pytest.approx(np.log1p(9))
    assert row["still_60"] == pytest.approx(54 / 60)
    before = {n: float(c[0, 0]) for n, c in table(panel_of(values), np.array([950])).items()}
    assert before["since_gap"] == pytest.approx(np.log1p(50))
    assert before["stale"] == 0.0


@settings(max_examples=25, deadline=None)
@given(row=st.integers(0, N - 1), seed=st.integers(0, 99), share=st.sampled_from((0.0, 0.1, 0.6)))
def test_nothing_after_the_origin_nor_beyond_the_reach_is_seen(row: int, seed: int, share: float) -> None:
    dice = np.random.default_rng(seed)
    values = walks(seed=seed)
    values[dice.random(values.shape) < share] = np.nan
    changed = values.copy()
    changed[row + 1 :] = dice.normal(size=changed[row + 1 :].shape) * 1e6
    changed[: max(0, row + 1 - reach_rows(GRID))] = -1e6
    for horizon in GRID.horizons:
        one, other = (table(panel_of(v), np.array([row]), horizon) for v in (values, changed))
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_the_panel_stays_as_it_was() -> None:
    """Also where a season before the target lies just before the first row."""
    values = walks()
    panel = panel_of(values.copy())
    for row in range(200):
        for horizon in GRID.horizons:
            table(panel, np.array([row]), horizon)
    np.testing.assert_array_equal(panel.values, values)


def test_the_reach_is_no_further_than_needed() -> None:
    values = walks()
    changed = values.copy()
    changed[: N - reach_rows(GRID) + 2 * features._apart(GRID) + 1] += 1.0
    one, other = (table(panel_of(v), np.array([N - 1]), GRID.horizons[-1]) for v in (values, changed))
    assert any(np.any(one[name] != other[name]) for name in one)


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_any_batch_says_the_same(share: float) -> None:
    values = walks(n_series=5)
    values[np.random.default_rng(3).random(values.shape) < share] = np.nan
    origins = np.array([0, 7, 239, 240, 241, 700, 2000, 2599])
    together = table(panel_of(values), origins)
    for place, origin in enumerate(origins):
        alone = table(panel_of(values), np.array([origin]))
        for series in range(5):
            single = table(panel_of(values[:, [series]]), np.array([origin]))
            for name, column in together.items():
                same = dict(rtol=1e-9, atol=1e-12, err_msg=f"{name} {origin}")
                np.testing.assert_allclose(column[place], alone[name][0], **same)  # type: ignore[arg-type]
                np.testing.assert_allclose(column[place, series], single[name][0, 0], **same)  # type: ignore[arg-type]


def test_units_cancel() -> None:
    values = walks()
    origins = np.array([30, 300, 2500])
    one, other = table(panel_of(values), origins), table(panel_of(1024 * values - 7), origins)
    for name in one:
        if name != "level":
            np.testing.assert_allclose(one[name], other[name], atol=1e-6, err_msg=name)


def test_what_nothing_moves_has_no_scale_and_what_is_new_has_none_yet() -> None:
    values = walks(600)
    values[:, 1] = 0.1
    values[:-5, 2] = np.nan
    cases = all_cases(np.array([599]), 3)
    seen = present_features(panel_of(values), cases)
    assert seen.scale[0] > 0
    assert seen.scale[1] == 0
    assert np.isnan(seen.scale[2])
    assert seen.last[2] == values[-1, 2]
    assert np.isnan(targets(panel_of(values), TrainingCases(cases.row - 2, cases.series), seen, 1)[1:]).all()


def test_targets_are_changes_over_the_scale() -> None:
    values = walks()
    cases = all_cases(np.array([1000, 2599]), 3)
    seen = present_features(panel_of(values), cases)
    y = targets(panel_of(values), cases, seen, 4)
    np.testing.assert_allclose(y[:3] * seen.scale[:3], values[1004] - values[1000])
    assert np.isnan(y[3:]).all()


def test_seasons_look_at_the_targets_own_hour() -> None:
    day = 10 * np.sin(np.arange(N) * 2 * np.pi / 96)
    values = (day + np.arange(N) // 96)[:, None]
    cases = all_cases(np.array([2500]), 1)
    panel = panel_of(values)
    scale = float(present_features(panel, cases).scale[0])
    for horizon, days in ((4, 1), (100, 2)):
        row = table(panel, np.array([2500]), horizon)
        last, lag = values[2500, 0], values[2500 + horizon - 96 * days, 0]
        assert row["lag_96"][0, 0] * scale == pytest.approx(lag - last)
        # One more day ago is one less: the middle of seven is three less.
        assert row["usual_96"][0, 0] * scale == pytest.approx(lag - 3 - last)
        assert row["usual_rise_96"][0, 0] * scale == pytest.approx(lag - values[2500 - 96 * days, 0])


def test_the_clock_and_known_columns_are_the_targets() -> None:
    ahead = np.arange(N + 3.0)
    panel = panel_of(walks(), zone="Asia/Kolkata", heat=ahead**2)
    row = table(panel, np.array([10, N - 1]))
    np.testing.assert_allclose(row["hour"][:, 0], [(14 / 4 + 5.5) % 24, ((N + 3) / 4 + 5.5) % 24])
    np.testing.assert_allclose(row["weekday"][:, 0], [3, (3 + ((N + 3) / 4 + 5.5) // 24) % 7])
    np.testing.assert_allclose(row["minute"][:, 0], [0, 15])
    np.testing.assert_allclose(row["then_heat"][:, 0], [196, np.nan])
    np.testing.assert_allclose(row["change_heat"][:, 0], [96, np.nan])


@given(rows=st.integers(1, 400), n=st.integers(1, 50), most=st.integers(1, 300))
def test_a_sample_is_even_and_has_no_case_twice(rows: int, n: int, most: int) -> None:
    cases = sample(rows, n, most)
    at = cases.row * n + cases.series
    assert cases.n == min(most, rows * n)
    assert np.all(np.diff(at) > 0)
    assert at[0] >= 0
    assert at[-1] < rows * n
    stretch = np.arange(cases.n + 1) * (rows * n) // cases.n
    assert np.all((stretch[:-1] <= at) & (at < stretch[1:]))
