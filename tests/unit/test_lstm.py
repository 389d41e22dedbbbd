"""A fitted LSTM forecasts with NumPy alone, looks at nothing later, and refuses damaged parameters."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from models.backtest.audit import SPOILS, spoil
from models.load import ForecastGrid, SeriesPanel
from tests.evaluation.forecasts.lstm import network_says
from tests.support.lstm_panels import loaded, panel_of, swinging


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
