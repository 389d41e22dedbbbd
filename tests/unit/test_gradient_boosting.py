"""Boosted forecasts: better than the last value, honest at the edges, exact where nothing moves."""

from __future__ import annotations

import numpy as np
import pytest

from models.load import ForecastGrid, Parameters, SeriesPanel
from models.load.gradient_boosting import FORESTS, GradientBoosting
from twin.catalogue import F64, ContractError

GRID = ForecastGrid(900.0, (1, 8))
N_FIT = 1100


def panel_of(values: F64, **known: F64) -> SeriesPanel:
    return SeriesPanel(0, GRID.step_s, values, known=known)


def days(n: int = 1500, seed: int = 0) -> F64:
    """Two series with a day of 96 rows and noise that returns; of sizes that differ a thousandfold."""
    dice = np.random.default_rng(seed)
    x = np.zeros((n, 2))
    for row in range(1, n):
        x[row] = 0.8 * x[row - 1] + dice.normal(size=2)
    day = 8 * np.sign(np.sin(np.arange(n) * 2 * np.pi / 96))
    return 30 + (x + day[:, None]) * np.array([1.0, 1000.0])


def fitted(past: SeriesPanel, grid: ForecastGrid = GRID) -> tuple[GradientBoosting, Parameters]:
    model = GradientBoosting(grid)
    parameters = model.fit(past, 1)
    model.load(parameters)
    return model, parameters


@pytest.fixture(scope="module")
def learned() -> tuple[GradientBoosting, Parameters]:
    return fitted(panel_of(days()).upto(N_FIT - 1))


@pytest.mark.slow
def test_it_beats_the_last_value_and_its_edges_hold_nine_in_ten(
    learned: tuple[GradientBoosting, Parameters],
) -> None:
    values = days()
    origins = np.arange(N_FIT, 1490)
    said = learned[0].predict(panel_of(values), origins)
    assert said.low is not None
    assert said.high is not None
    for place, (horizon, most) in enumerate(zip(GRID.horizons, (1.0, 0.75), strict=True)):
        actual = values[origins + horizon]
        error = np.abs(said.point[place] - actual).mean(axis=0)
        assert np.all(error < most * np.abs(values[origins] - actual).mean(axis=0))
        inside = (said.low[place] <= actual) & (actual <= said.high[place])
        assert 0.82 < inside.mean() < 0.98
        assert np.all(said.low[place] <= said.point[place])
        assert np.all(said.point[place] <= said.high[place])


@pytest.mark.slow
def test_rows_after_the_origin_change_nothing(learned: tuple[GradientBoosting, Parameters]) -> None:
    values = days()
    scrambled = values.copy()
    scrambled[N_FIT:] = -1e6
    model, parameters = fitted(panel_of(scrambled).upto(N_FIT - 1))
    assert parameters.keys() == learned[1].keys()
    assert all(np.array_equal(parameters[key], learned[1][key]) for key in parameters)
    origins = np.array([3, 500, N_FIT - 1])
    for one, other in zip(
        *(vars(model.predict(panel_of(v), origins)).values() for v in (values, scrambled)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_any_batch_says_the_same(learned: tuple[GradientBoosting, Parameters]) -> None:
    panel = panel_of(days())
    origins = np.arange(1200, 1210)
    together = learned[0].predict(panel, origins).point
    for place, origin in enumerate(origins):
        alone = learned[0].predict(panel, np.array([origin])).point
        np.testing.assert_allclose(together[:, place], alone[:, 0], rtol=1e-9)
        past = learned[0].predict(panel.upto(int(origin)), np.array([origin])).point
        np.testing.assert_array_equal(past, alone)


@pytest.mark.slow
def test_what_hardly_ever_changes_stays_exactly_where_it_is() -> None:
    dice = np.random.default_rng(0)
    moves = np.where(dice.random((2000, 2)) < 0.02, dice.integers(-9, 10, (2000, 2)), 0)
    values = np.cumsum(moves, axis=0) + 500.0
    model, _ = fitted(panel_of(values).upto(1499), ForecastGrid(900.0, (1,)))
    origins = np.arange(1500, 1990)
    np.testing.assert_array_equal(model.predict(panel_of(values), origins).point[0], values[origins])


@pytest.mark.slow
def test_spikes_do_not_ruin_it() -> None:
    values = days()
    values[::97, 0] += 3000.0
    panel = panel_of(values)
    model, _ = fitted(panel.upto(N_FIT - 1), ForecastGrid(900.0, (8,)))
    origins = np.arange(N_FIT, 1490)
    said = model.predict(panel, origins)
    for value in vars(said).values():
        assert np.all((value[0, :, 0] >= -1600) & (value[0, :, 0] <= 4600))
    actual = values[origins + 8, 0]
    plain = (actual < 100) & (values[origins, 0] < 100)
    error = np.abs(said.point[0, plain, 0] - actual[plain]).mean()
    assert error < 1.1 * np.abs(values[origins, 0] - actual)[plain].mean()


def test_a_constant_is_forecast_exactly_and_what_is_new_not_at_all(
    learned: tuple[GradientBoosting, Parameters],
) -> None:
    values = np.concatenate([days(), np.full((1500, 2), 0.1)], axis=1)
    values[:-3, 3] = np.nan
    for value in vars(learned[0].predict(panel_of(values), np.array([1499]))).values():
        assert np.isfinite(value[:, 0, :2]).all()
        assert np.all(value[:, 0, 2] == 0.1)
        assert np.isnan(value[:, 0, 3]).all()


def test_little_past_and_long_horizons_teach_nothing() -> None:
    assert GradientBoosting(GRID).fit(panel_of(days(70)), 1) == {}
    assert GradientBoosting(ForecastGrid(900.0, (100,))).fit(panel_of(days(390)), 1) == {}
    unfitted = GradientBoosting(GRID)
    unfitted.load({})
    said = unfitted.predict(panel_of(days()), np.array([5, 900]))
    assert np.isnan(said.point).all()
    assert said.point.shape == (2, 2, 2)


def test_no_series_and_all_gaps() -> None:
    for values in (np.zeros((900, 0)), np.full((900, 2), np.nan)):
        assert GradientBoosting(GRID).fit(panel_of(values), 1) == {}


def test_it_says_nothing_without_the_columns_that_it_learned_from(
    learned: tuple[GradientBoosting, Parameters],
) -> None:
    other = panel_of(days(), heat=np.zeros(2000))
    assert np.isnan(learned[0].predict(other, np.array([1200])).point).all()


@pytest.mark.parametrize(
    "key, value",
    [
        ("1.belief", np.zeros(3)),
        ("1.belief", np.array([np.inf, 0.0])),
        ("1.belief", None),
        ("8.low.value", None),
        ("8.low.value", np.zeros(3)),
        ("1.point.n_feature", np.array([9999], np.int32)),
        ("known", None),
        ("known", np.frombuffer(b"heat", np.uint8)),
        ("9.belief", np.zeros(2)),
    ],
)
def test_damaged_parameters_are_refused_and_the_old_ones_are_gone(
    learned: tuple[GradientBoosting, Parameters], key: str, value: np.ndarray | None
) -> None:
    parameters = dict(learned[1])
    assert len(parameters) == 1 + 2 * (1 + 9 * len(FORESTS))
    if value is None:
        del parameters[key]
    else:
        parameters[key] = value
    model = GradientBoosting(GRID)
    model.load(learned[1])
    with pytest.raises(ContractError):
        model.load(parameters)
    assert np.isnan(model.predict(panel_of(days()), np.array([1200])).point).all()
