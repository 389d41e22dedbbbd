"""A fitted LSTM forecasts with NumPy alone, looks at nothing later, and refuses damaged parameters."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.backtest.audit import SPOILS, spoil
from models.load import ForecastGrid, SeriesPanel
from tests.evaluation.forecasts.lstm import Lstm, candidates, network_says
from tests.evaluation.forecasts.lstm_windows import Windows
from tests.support.lstm_panels import HOURLY, drawn, loaded, panel_of, swinging
from twin.catalogue import ContractError


def test_one_cell_by_hand() -> None:
    def sigmoid(x: float) -> float:
        return float(1 / (1 + np.exp(-x)))

    arrays = {
        "lstm.weight_ih_l0": np.array([[1.0], [2.0], [3.0], [4.0]]),
        "lstm.weight_hh_l0": np.array([[0.5], [-0.5], [0.25], [1.0]]),
        "lstm.bias_ih_l0": np.array([0.1, 0.2, 0.3, 0.4]),
        "lstm.bias_hh_l0": np.zeros(4),
        "mix.weight": np.array([[2.0, -1.0]]),
        "mix.bias": np.array([0.5]),
        "out.weight": np.array([[3.0]]),
        "out.bias": np.array([-1.0]),
    }
    cell = state = 0.0
    for x in (0.7, -0.3):
        took, kept = sigmoid(x + 0.5 * state + 0.1), sigmoid(2 * x - 0.5 * state + 0.2)
        new, gave = np.tanh(3 * x + 0.25 * state + 0.3), sigmoid(4 * x + state + 0.4)
        cell = kept * cell + took * new
        state = gave * np.tanh(cell)
    expected = 3 * np.tanh(2 * state - 0.9 + 0.5) - 1
    said = network_says(arrays, np.array([[[0.7], [-0.3]]]), np.array([[0.9]]))
    np.testing.assert_allclose(said, [[expected]], rtol=1e-12)


def test_forecasts_import_no_torch() -> None:
    code = (
        "import sys; import numpy as np; from tests.support.lstm_panels import *;"
        "assert np.isfinite(loaded().predict(panel_of(swinging(300)), np.array([200])).point).all();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_to_say_before_a_fit_and_from_little() -> None:
    lstm = Lstm(HOURLY)
    panel = panel_of(swinging(60))
    assert lstm.fit(panel, 0) == {}
    assert lstm.fit(panel_of(np.full(2000, 5.0)), 0) == {}
    assert lstm.fit(panel_of(np.full(2000, np.nan)), 0) == {}
    assert np.isnan(lstm.predict(panel, np.array([3, 50])).point).all()
    lstm.load(drawn(HOURLY))
    assert np.isfinite(lstm.predict(panel, np.array([3, 50])).point).all()
    lstm.load({})
    assert np.isnan(lstm.predict(panel, np.array([3, 50])).point).all()


def test_it_sees_no_later_row_and_no_further_back_than_it_says() -> None:
    grid = ForecastGrid(3600.0, (1, 30))
    lstm = loaded(grid)
    n = lstm.reach_rows + 100
    panel = panel_of(swinging(n), swinging(n, 3))
    row = n - 50
    said = lstm.predict(panel, np.array([row])).point
    for how in SPOILS:
        np.testing.assert_array_equal(lstm.predict(spoil(panel, row, how), np.array([row])).point, said)
    first = row - lstm.reach_rows + 1
    values = panel.values.copy()
    values[:first] = np.nan
    before = SeriesPanel(0, 3600.0, values)
    np.testing.assert_array_equal(lstm.predict(before, np.array([row])).point, said)


def test_alone_it_says_what_it_says_among_others() -> None:
    lstm = loaded(n_known=1)
    known = np.random.default_rng(5).normal(size=900)
    panel = panel_of(swinging(800), swinging(800, 3), k0=known)
    origins = np.arange(0, 790, 7)
    all_at_once = lstm.predict(panel, origins).point
    assert all_at_once.shape == (2, len(origins), 2)
    for i in (0, 1, 50, len(origins) - 1):
        np.testing.assert_allclose(
            lstm.predict(panel, origins[i : i + 1]).point[:, 0], all_at_once[:, i], rtol=1e-9
        )


@settings(max_examples=25, deadline=None)
@given(
    factor=st.floats(1e-3, 1e6),
    offset=st.floats(-1e4, 1e4),
    seed=st.integers(0, 5),
)
def test_units_and_offsets_do_not_matter(factor: float, offset: float, seed: int) -> None:
    values = swinging(600, seed)
    lstm = loaded(seed=seed)
    origins = np.array([40, 300, 590])
    said = lstm.predict(panel_of(values), origins).point
    moved = lstm.predict(panel_of(factor * values + offset), origins).point
    np.testing.assert_allclose((moved - offset) / factor, said, rtol=1e-5, atol=1e-5)


def test_gaps_are_marked_and_still_series_stay() -> None:
    rng = np.random.default_rng(6)
    gappy = np.where(rng.random(600) < 0.3, np.nan, swinging(600))
    gappy[299], gappy[300:310] = 100.0, np.nan
    panel = panel_of(gappy, np.full(600, 0.1), np.full(600, np.nan))
    origins = np.array([305, 450])
    said = loaded().predict(panel, origins).point
    assert np.isfinite(said[:, :, 0]).all()
    np.testing.assert_allclose(said[:, :, 1], 0.1, rtol=1e-12)
    assert np.isnan(said[:, :, 2]).all()
    windows = Windows.at(HOURLY, panel, np.array([309]), np.array([0]), np.array([gappy[299]]))
    sequence = windows.sequence((2,) * 10 + (1,) * 4)[0]
    np.testing.assert_array_equal(sequence[-7:, :2], 0.0)  # 10 rows of nothing: 4 of one and 3 of two
    heard = np.isfinite(gappy[286:300]).reshape(7, 2).mean(axis=1)
    np.testing.assert_allclose(sequence[:7, 1], heard)


def test_a_step_is_the_mean_of_its_rows() -> None:
    values = swinging(200)
    windows = Windows.at(HOURLY, panel_of(values), np.array([150]), np.array([0]), values[150:151])
    sequence = windows.sequence((4, 4, 1, 1))[0, :, 0] * windows.scale[0] + values[150]
    expected = [values[141:145].mean(), values[145:149].mean(), values[149], values[150]]
    np.testing.assert_allclose(sequence, expected, rtol=1e-5)


def test_every_candidate_fits_its_reach() -> None:
    for grid in (
        HOURLY,
        ForecastGrid(60.0, (1, 5, 1440)),
        ForecastGrid(7.0, (1, 400)),
        ForecastGrid(86_400.0, (1,)),
    ):
        lstm = Lstm(grid)
        assert len(candidates(grid)) >= lstm.budget_fits
        for candidate in candidates(grid):
            assert sum(candidate.widths) <= lstm.reach_rows


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, None) for name in drawn(HOURLY)),
        ("other", np.zeros(1)),
        ("lstm.weight_ih_l5", np.zeros((20, 5), np.float32)),
        ("horizons", np.array([1, 7], np.int64)),
        ("mix.bias", np.zeros(5)),
        ("mix.weight", np.zeros((5, 6), np.float32)),
        ("out.bias", np.array([1.0, np.nan], np.float32)),
        ("widths", np.array([3, 0], np.int64)),
        ("widths", np.array([2**62, 2**62], np.int64)),
        ("widths", np.array([], np.int64)),
        ("widths", np.array([20_000], np.int64)),
        ("share", np.array([0.5, 1.5])),
        ("spread", np.array([0.0, 1.0])),
        ("epochs", np.array([0], np.int64)),
        ("known", np.frombuffer(b"price", np.uint8)),
        ("units", np.ones((1, 2))),
    ],
)
def test_damaged_parameters_are_refused(name: str, wrong: np.ndarray | None) -> None:
    parameters = drawn(HOURLY)
    parameters.pop(name, None)
    if wrong is not None:
        parameters[name] = wrong
    lstm = Lstm(HOURLY)
    with pytest.raises(ContractError):
        lstm.load(parameters)
    assert np.isnan(lstm.predict(panel_of(swinging(100)), np.array([50])).point).all()


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="budget_fits"):
        Lstm(HOURLY, 0)
