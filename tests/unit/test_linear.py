"""Linear forecasts: near the best there is, near quantile regression, robust, and no look ahead."""

from __future__ import annotations

import numpy as np
import pytest

from models.load import ForecastGrid, Parameters, SeriesPanel, linear
from models.load.linear import LinearForecaster
from models.load.training_set import TrainingSet
from twin.catalogue import F64

GRID = ForecastGrid(900.0, (1, 8))


def panel_of(values: F64, **known: F64) -> SeriesPanel:
    return SeriesPanel(0, GRID.step_s, values, known=known)


def returning(n: int = 1500, seed: int = 0, phi: float = 0.7) -> F64:
    """Two series that return to their means: the best forecast is known."""
    dice = np.random.default_rng(seed)
    x = np.zeros((n, 2))
    for row in range(1, n):
        x[row] = phi * x[row - 1] + dice.normal(size=2)
    return 100 + x * np.array([1.0, 40.0])


def fitted(past: SeriesPanel, grid: ForecastGrid = GRID) -> tuple[LinearForecaster, Parameters]:
    model = LinearForecaster(grid)
    parameters = model.fit(past, 1)
    model.load(parameters)
    return model, parameters


def test_it_is_nearly_as_good_as_the_best_there_is() -> None:
    values = returning()
    panel = panel_of(values)
    model, _ = fitted(panel.upto(1099))
    origins = np.arange(1100, 1490)
    said = model.predict(panel, origins).point
    for place, horizon in enumerate(GRID.horizons):
        actual, last = values[origins + horizon], values[origins]
        errors = [
            np.abs(f - actual).mean(axis=0) for f in (said[place], 100 + 0.7**horizon * (last - 100), last)
        ]
        assert np.all(errors[0] < 1.06 * errors[1])
        assert np.all(errors[0] < 0.97 * errors[2])


def test_without_a_ridge_it_is_median_regression() -> None:
    smf = pytest.importorskip("statsmodels.regression.quantile_regression")
    dice = np.random.default_rng(2)
    x = dice.normal(size=(600, 2)) * 0.5
    y = 0.3 + 2 * x[:, 0] - x[:, 1] + dice.standard_t(2, size=600)
    every = np.ones(600, bool)
    columns = np.full((600, 5), np.nan)
    columns[:, [1, 3]] = x
    lesson = TrainingSet(1, columns, y, np.ones(600), np.arange(600), every, every, 600.0)
    rule = linear._rule(lesson, every, np.array([False, True, False, True, False]), 0.0)
    bent = linear.compress(x)
    design = np.column_stack([np.ones(600), bent])
    best = design @ smf.QuantReg(y, design).fit(q=0.5).params
    loss = np.abs(y - rule.change(columns.T)).mean() / np.abs(y - best).mean()
    assert 1 - 1e-9 <= loss < 1.005


def test_little_past_and_long_horizons_teach_nothing() -> None:
    model = LinearForecaster(GRID)
    assert model.fit(panel_of(returning(70)), 1) == {}
    assert sorted(model.fit(panel_of(returning(300)[:, :1]), 1)) == [
        "1.belief",
        "1.weights",
        "8.belief",
        "8.weights",
        "known",
    ]
    long = LinearForecaster(ForecastGrid(900.0, (1, 100)))
    assert sorted(long.fit(panel_of(returning(390)), 1)) == ["1.belief", "1.weights", "known"]
    assert np.isnan(model.predict(panel_of(returning()), np.array([5, 900])).point).all()


def test_a_column_known_ahead_is_used_and_asked_for() -> None:
    dice = np.random.default_rng(1)
    heat = np.repeat(dice.normal(size=200), 8)
    values = (50 + 5 * heat[:1500] + dice.normal(size=1500) * 0.2)[:, None]
    panel = panel_of(values, heat=heat)
    model, _ = fitted(panel.upto(1099))
    origins = np.arange(1100, 1480)
    error = np.abs(model.predict(panel, origins).point[1, :, 0] - values[origins + 8, 0]).mean()
    assert error < 0.4 * np.abs(values[origins + 8] - values[origins]).mean()
    assert np.isnan(model.predict(panel_of(values), origins).point).all()
