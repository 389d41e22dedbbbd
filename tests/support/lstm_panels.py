"""Small panels and networks for the tests of the LSTM."""

from __future__ import annotations

import numpy as np

from models.load import ForecastGrid, Parameters, SeriesPanel
from tests.evaluation.forecasts.lstm import Lstm
from tests.evaluation.forecasts.lstm_training import Settings
from tests.evaluation.forecasts.lstm_windows import CHANNELS, beside_columns
from twin.catalogue import F64

HOURLY = ForecastGrid(3600.0, (1, 6))
SMALL = Settings((3, 3, 1, 1), 5, 2, 1e-2, 0.1)


def swinging(n: int, seed: int = 1) -> F64:
    """A day's swing and an autoregressive error of 0.9 around it. [n]"""
    rng = np.random.default_rng(seed)
    error = np.zeros(n)
    for i in range(1, n):
        error[i] = 0.9 * error[i - 1] + rng.normal() * 2.0
    hours = np.arange(n)
    return 100.0 + 20.0 * np.sin(2 * np.pi * hours / 24) + 6.0 * np.sin(4 * np.pi * hours / 24) + error


def panel_of(*columns: F64, **known: F64) -> SeriesPanel:
    return SeriesPanel(0, 3600.0, np.stack(columns, axis=1), known=known)


def drawn(grid: ForecastGrid, seed: int = 0, n_known: int = 0, setting: Settings = SMALL) -> Parameters:
    """Parameters of the right shapes by chance."""
    rng = np.random.default_rng(seed)
    hidden, n_out = setting.hidden, len(grid.horizons)
    shapes: dict[str, tuple[int, ...]] = {
        "mix.weight": (hidden, hidden + beside_columns(grid, n_known)),
        "mix.bias": (hidden,),
        "out.weight": (n_out, hidden),
        "out.bias": (n_out,),
    }
    for layer in range(setting.layers):
        shapes |= {
            f"lstm.weight_ih_l{layer}": (4 * hidden, hidden if layer else CHANNELS),
            f"lstm.weight_hh_l{layer}": (4 * hidden, hidden),
            f"lstm.bias_ih_l{layer}": (4 * hidden,),
            f"lstm.bias_hh_l{layer}": (4 * hidden,),
        }
    network = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {
        "horizons": np.array(grid.horizons, np.int64),
        "widths": np.array(setting.widths, np.int64),
        "rate": np.array([setting.rate]),
        "dropout": np.array([setting.dropout]),
        "epochs": np.array([3], np.int64),
        "searched": np.array([500], np.int64),
        "share": np.linspace(0.5, 1.0, n_out),
        "error": np.ones(n_out),
        "spread": np.linspace(0.5, 2.0, n_out),
        "units": np.tile([0.5, 2.0], (n_known, 1)),
        "known": np.frombuffer("\n".join(f"k{i}" for i in range(n_known)).encode(), np.uint8),
        **network,
    }


def loaded(grid: ForecastGrid = HOURLY, seed: int = 0, n_known: int = 0) -> Lstm:
    lstm = Lstm(grid)
    lstm.load(drawn(grid, seed, n_known))
    return lstm


def ratio(lstm: Lstm, panel: SeriesPanel, first: int) -> F64:
    """Mean absolute error over that of the last value, from origins after `first`. [n_horizon]"""
    origins = np.arange(first, panel.n_time - lstm.grid.horizons[-1])
    said = lstm.predict(panel, origins).point
    return np.array(
        [
            np.abs(point - panel.values[origins + h]).mean()
            / np.abs(panel.values[origins] - panel.values[origins + h]).mean()
            for h, point in zip(lstm.grid.horizons, said, strict=True)
        ]
    )
