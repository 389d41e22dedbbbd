"""Boosted forecasts: better than the last value, honest at the edges, exact where nothing moves."""

from __future__ import annotations

import numpy as np
import pytest

from models.load import ForecastGrid, Parameters, SeriesPanel
from models.load.gradient_boosting import GradientBoosting
from twin.catalogue import F64

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


def test_little_past_and_long_horizons_teach_nothing() -> None:
    assert GradientBoosting(GRID).fit(panel_of(days(70)), 1) == {}
    assert GradientBoosting(ForecastGrid(900.0, (100,))).fit(panel_of(days(390)), 1) == {}
    unfitted = GradientBoosting(GRID)
    unfitted.load({})
    said = unfitted.predict(panel_of(days()), np.array([5, 900]))
    assert np.isnan(said.point).all()
    assert said.point.shape == (2, 2, 2)


def test_it_says_nothing_without_the_columns_that_it_learned_from(
    learned: tuple[GradientBoosting, Parameters],
) -> None:
    other = panel_of(days(), heat=np.zeros(2000))
    assert np.isnan(learned[0].predict(other, np.array([1200])).point).all()
