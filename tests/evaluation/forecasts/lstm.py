"""lstm: a recurrent neural network over the recent past, the forecaster that the field's articles propose.

A comparator, not one of the default experts: the daemon never fits it by itself. Fitting needs PyTorch
(tests.evaluation.forecasts.lstm_training); a fitted one forecasts with NumPy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from models.load import (
    LAST_ROWS,
    ForecastGrid,
    Parameters,
    QuantileForecast,
    SeriesPanel,
    known_bytes,
    known_names,
    known_signals,
    last_within,
)
from tests.evaluation.forecasts.lstm_training import Sample, Settings, search, train
from tests.evaluation.forecasts.lstm_windows import CHANNELS, STRETCHES, Windows, beside_columns, units_of
from twin.catalogue import F64, I64, ContractError

SEARCH_WINDOWS, FIT_WINDOWS = 4000, 8000  # windows learned from. source: estimate
JUDGE_SHARE = 0.25  # of the past, the latest, on which candidates are judged. source: estimate
MIN_WINDOWS, MIN_JUDGED = 100, 30  # less is too little to learn from. source: estimate
SEARCH_AGAIN = 2.0  # when the past has grown by so much since the last search. source: estimate
MAX_SPAN = 10_080  # rows; a window spans no more. source: estimate
NETWORK = ("lstm.", "mix.", "out.")  # what names of the network's own arrays begin with
BLOCK_VALUES = 4_000_000  # values gathered at once, 32 MB
NETWORK_ROWS = 512  # windows through the network at once, so that they stay in cache. source: estimate


def candidates(grid: ForecastGrid) -> tuple[Settings, ...]:
    """Return the settings that a search tries, in order: windows of one width, and of a day or a week."""
    day = grid.seasons[0] if grid.seasons else 2 * grid.horizons[-1]
    week = grid.seasons[-1] if grid.seasons else 4 * grid.horizons[-1]
    short, long = (1,) * 24, (1,) * 64
    daily, weekly = _telescope(day), _telescope(week)
    return (
        Settings(short, 32, 1, 3e-3, 0.0),
        Settings(daily, 32, 1, 3e-3, 0.0),
        Settings(weekly, 32, 1, 3e-3, 0.1),
        Settings(long, 32, 1, 3e-3, 0.1),
        Settings(daily, 64, 1, 2e-3, 0.2),
        Settings(short, 16, 2, 5e-3, 0.1),
        Settings(daily, 32, 2, 2e-3, 0.2),
        Settings(weekly, 64, 1, 1e-3, 0.2),
        Settings(long, 64, 1, 1e-3, 0.2),
        Settings(weekly, 16, 1, 5e-3, 0.0),
        Settings(daily, 16, 1, 1e-2, 0.0),
        Settings(short, 64, 1, 1e-3, 0.0),
    )


def _telescope(rows: int) -> tuple[int, ...]:
    """Steps that span so many rows: single rows near the origin, before them means of equal width."""
    fine = 16
    coarse = max(1, -(-(min(rows, MAX_SPAN) - fine) // 24))
    return (coarse,) * 24 + (1,) * fine


def network_says(arrays: Mapping[str, np.ndarray], sequence: F64, beside: F64) -> F64:
    """Evaluate PyTorch's network of these arrays, in NumPy: [m, steps, CHANNELS], [m, k] -> [m, n_horizon].

    source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers, Schmidhuber and Cummins 2000;
    gates in PyTorch's order: input, forget, cell, output.
    """
    m, steps, _ = sequence.shape
    seen = list(np.moveaxis(sequence, 1, 0))
    layer = 0
    while f"lstm.weight_ih_l{layer}" in arrays:
        inward, across = arrays[f"lstm.weight_ih_l{layer}"].T, arrays[f"lstm.weight_hh_l{layer}"].T
        bias = arrays[f"lstm.bias_ih_l{layer}"] + arrays[f"lstm.bias_hh_l{layer}"]
        hidden = len(across)
        state, cell = np.zeros((m, hidden)), np.zeros((m, hidden))
        for step in range(steps):
            gates = seen[step] @ inward + state @ across + bias
            took, kept, new, gave = np.split(gates, 4, axis=1)
            cell = _sigmoid(kept) * cell + _sigmoid(took) * np.tanh(new)
            state = _sigmoid(gave) * np.tanh(cell)
            seen[step] = state
        layer += 1
    mixed = np.tanh(np.concatenate([seen[-1], beside], axis=1) @ arrays["mix.weight"].T + arrays["mix.bias"])
    out: F64 = mixed @ arrays["out.weight"].T + arrays["out.bias"]
    return out


def _sigmoid(x: F64) -> F64:
    out: F64 = 0.5 + 0.5 * np.tanh(0.5 * x)  # never overflows
    return out


class Lstm:
    """Median of the change from the last value, for all horizons from one network.

    Input: a window of the series, as its difference from the last value over its local scale, by rows near
    the origin and, in some candidates, in means of several rows further back; gaps are marked and count as
    the last value. Beside it: the means of longer stretches, and for each horizon sine and cosine of the hour
    and the day of the week at the target, what was there a day and a week before the target, where the grid
    has these seasons, and columns that are known ahead. One or two LSTM layers and one hidden layer serve all
    series alike. They learn the absolute error in units of each series' usual scale (Adam, dropout, a falling
    rate). Each horizon follows the share of the network's change that errs least on the later block, so that
    a network that learned nothing says the last value. A horizon with too few windows says nothing.

    Settings are searched for: the first `fit`, and a later one once the past has doubled, tries `budget_fits`
    candidates of window, width, depth, rate and dropout. Each learns from the first three quarters of the
    past that it is given, and is judged, and stopped early, on the last quarter, whose rows are no targets of
    the first part. The best then learns from all of that past for as many epochs. `load` keeps the settings,
    so that a `fit` in between only learns anew.

    The budget is counted in fits, so that results do not hang on the machine's speed. It is generous: the
    settings of our own experts are fixed, chosen on synthetic series and on weather, so that they spend no
    search on the series that are scored, while the LSTM searches on each of those. For 20,000 rows and five
    horizons on one core, a search of 8 costs some 25 to 40 s of processor time and a fit 9 to 11 s, where one
    fit of all default experts costs 4 to 5 s; so the search alone has over five times their seconds. Windows
    are sampled: more rows or series cost no more.
    """

    name: ClassVar[str] = "lstm"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: ForecastGrid, budget_fits: int = 8) -> None:
        """`budget_fits`: candidates that a search tries. Raises ContractError below 1."""
        if budget_fits < 1:
            raise ContractError(f"budget_fits: expected at least 1, got {budget_fits}")
        self.grid = grid
        self.budget_fits = budget_fits
        self._held: Parameters = {}
        self._weights: dict[str, F64] = {}

    @property
    def reach_rows(self) -> int:
        spans = [sum(c.widths) for c in candidates(self.grid)]
        return max(LAST_ROWS, *(span for span, _ in STRETCHES), *spans, *self.grid.seasons)

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        """Empty where there are too few windows. Raises ContractError where PyTorch is not installed."""
        chosen = self._held
        if not chosen or past.n_time >= SEARCH_AGAIN * int(chosen["searched"][0]):
            chosen = self._searched(past, seed)
        every = Windows.drawn(self.grid, past, 0, FIT_WINDOWS)
        if not chosen or len(every.rows) < MIN_WINDOWS:
            return {}
        settings = _settings(chosen)
        spread, units = every.spread(), units_of(past)
        sample = every.sample(settings.widths, spread, units)
        trained = train(settings, sample, None, int(chosen["epochs"][0]), seed)
        learned: Parameters = {"known": known_bytes(past), "units": units, "spread": spread}
        return {**chosen, **learned, **trained.arrays}

    def _searched(self, past: SeriesPanel, seed: int) -> Parameters:
        """Return the best of the candidates, and its scores in the search."""
        border = int(past.n_time * (1.0 - JUDGE_SHARE))
        before = past.upto(border - 1)  # targets from the border on are gaps there
        earlier = Windows.drawn(self.grid, before, 0, SEARCH_WINDOWS)
        later = Windows.drawn(self.grid, past, border, SEARCH_WINDOWS // 2)
        counts = [np.isfinite(w.actual()).sum(axis=0) for w in (earlier, later)]
        enough = (counts[0] >= MIN_WINDOWS) & (counts[1] >= MIN_JUDGED)
        if not enough.any():
            return {}
        spread, units = earlier.spread(), units_of(before)

        def split(settings: Settings) -> tuple[Sample, Sample]:
            judges = later.sample(settings.widths, spread, units)
            return earlier.sample(settings.widths, spread, units), replace(
                judges, weight=judges.weight * enough.astype(np.float32)
            )

        settings, found = search(candidates(self.grid)[: self.budget_fits], split, seed)
        return {
            "horizons": np.array(self.grid.horizons, np.int64),
            "widths": np.array(settings.widths, np.int64),
            "rate": np.array([settings.rate]),
            "dropout": np.array([settings.dropout]),
            "epochs": np.array([found.epochs], np.int64),
            "searched": np.array([past.n_time], np.int64),
            "share": np.where(enough, found.share, np.nan),
            "error": np.where(enough, found.error, np.nan),
            **found.arrays,
        }

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Use these; empty ones mean none. Raises ContractError for missing, misshapen or wild arrays."""
        if parameters:
            _check(parameters, self.grid, self.reach_rows)
        self._held = dict(parameters)
        self._weights = {
            name: array.astype(np.float64) for name, array in parameters.items() if name.startswith(NETWORK)
        }

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        point = np.full((len(self.grid.horizons), len(origins), panel.n), np.nan)
        if not self._held or not point.size or known_names(panel) != known_signals(self._held):
            return QuantileForecast(point)
        last = last_within(panel.values, origins, LAST_ROWS)
        span = max(STRETCHES[1][0], int(self._held["widths"].sum()))
        flat = point.reshape(len(point), -1)
        block = max(1, BLOCK_VALUES // span)
        for begin in range(0, flat.shape[1], block):
            index = np.arange(begin, min(begin + block, flat.shape[1]))
            rows, series = origins[index // panel.n], index % panel.n
            windows = Windows.at(self.grid, panel, rows, series, last.reshape(-1)[index])
            flat[:, index] = self._say(windows).T
        return QuantileForecast(point)

    def _say(self, windows: Windows) -> F64:
        """Values [m, n_horizon]; the last value where nothing moved."""
        held = self._held
        sequence = windows.sequence(held["widths"].tolist()).astype(np.float64)
        beside = windows.beside(held["units"]).astype(np.float64)
        parts = [slice(at, at + NETWORK_ROWS) for at in range(0, len(sequence), NETWORK_ROWS)]
        change = np.concatenate([network_says(self._weights, sequence[p], beside[p]) for p in parts])
        scale = np.where(windows.scale > 0, windows.scale, 0.0)
        out: F64 = windows.last[:, None] + change * held["spread"] * held["share"] * scale[:, None]
        return out


def _settings(parameters: Mapping[str, np.ndarray]) -> Settings:
    return Settings(
        tuple(parameters["widths"].tolist()),
        len(parameters["mix.bias"]),
        sum(name.startswith("lstm.bias_ih") for name in parameters),
        float(parameters["rate"][0]),
        float(parameters["dropout"][0]),
    )


def _check(parameters: Mapping[str, np.ndarray], grid: ForecastGrid, reach_rows: int) -> None:
    """Raises ContractError unless these are a whole network for this grid: a store may be damaged."""
    n_known, n_horizon = len(known_signals(parameters)), len(grid.horizons)
    layers = sum(name.startswith("lstm.bias_ih") for name in parameters)
    hidden = len(np.atleast_1d(parameters.get("mix.bias", np.zeros(0))))
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "horizons": (np.int64, (n_horizon,)),
        "widths": (np.int64, np.shape(parameters.get("widths", ()))[:1]),
        "epochs": (np.int64, (1,)),
        "searched": (np.int64, (1,)),
        "rate": (np.float64, (1,)),
        "dropout": (np.float64, (1,)),
        "share": (np.float64, (n_horizon,)),
        "error": (np.float64, (n_horizon,)),
        "spread": (np.float64, (n_horizon,)),
        "units": (np.float64, (n_known, 2)),
        "mix.weight": (np.float32, (hidden, hidden + beside_columns(grid, n_known))),
        "mix.bias": (np.float32, (hidden,)),
        "out.weight": (np.float32, (n_horizon, hidden)),
        "out.bias": (np.float32, (n_horizon,)),
    }
    for layer in range(layers):
        inward = hidden if layer else CHANNELS
        expected |= {
            f"lstm.weight_ih_l{layer}": (np.float32, (4 * hidden, inward)),
            f"lstm.weight_hh_l{layer}": (np.float32, (4 * hidden, hidden)),
            f"lstm.bias_ih_l{layer}": (np.float32, (4 * hidden,)),
            f"lstm.bias_hh_l{layer}": (np.float32, (4 * hidden,)),
        }
    for name in sorted({*expected, *parameters} - {"known"}):
        found = parameters.get(name)
        if name not in expected or found is None:
            raise ContractError(f"lstm: {name} is {'unknown' if found is not None else 'missing'}")
        kind, shape = expected[name]
        if found.dtype != kind or found.shape != shape:
            raise ContractError(
                f"lstm: {name}: expected {kind.__name__} {list(shape)}, got {found.dtype} {list(found.shape)}"
            )
        if name not in ("share", "error") and not np.isfinite(found).all():
            raise ContractError(f"lstm: {name}: expected finite numbers")
    if not layers or not hidden or tuple(parameters["horizons"].tolist()) != grid.horizons:
        raise ContractError(f"lstm: expected a network for horizons {grid.horizons}")
    widths, share = parameters["widths"], parameters["share"]
    if not len(widths) or widths.min() < 1 or widths.max() > reach_rows or widths.sum() > reach_rows:
        raise ContractError(f"lstm: widths: expected rows >= 1 that span at most {reach_rows}")
    if np.any(share < 0) or np.any(share > 1) or np.any(np.isinf(parameters["error"])):
        raise ContractError("lstm: share: expected 0 to 1 or NaN")
    if min(parameters["epochs"][0], parameters["searched"][0]) < 1:
        raise ContractError("lstm: epochs, searched: expected at least 1")
    if np.any(parameters["units"][:, 1:] <= 0) or np.any(parameters["spread"] <= 0):
        raise ContractError("lstm: units, spread: expected sizes > 0")
