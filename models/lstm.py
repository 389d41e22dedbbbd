"""lstm: a recurrent neural network over the recent past, the forecaster that the field's articles propose.

A comparator, not one of the default experts: the daemon never fits it by itself. Fitting needs PyTorch
(models.lstm_training); a fitted one forecasts with NumPy alone. May import the contract of forecasters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from models.calendar import hours_of_week
from models.forecaster import Grid, Parameters, Said
from models.last_value import LAST_ROWS, filled
from models.lstm_training import Sample, Settings, Trained, search, train
from models.panel import Panel
from twin.errors import ContractError
from twin.frame import F32, F64, I64

SCALE_ROWS = (48, 480)  # rows over which the size of a series' moves is averaged. source: estimate
LIMIT = 10.0  # inputs are cut to this many scales. source: estimate
CHANNELS = 3  # of a step: its mean less the last value, the share of its rows that were heard, its width
SINES = 2  # harmonics of the day, and of the week
SEARCH_WINDOWS, FIT_WINDOWS = 4000, 8000  # windows learned from. source: estimate
JUDGE_SHARE = 0.25  # of the past, the latest, on which candidates are judged. source: estimate
MIN_WINDOWS, MIN_JUDGED = 100, 30  # less is too little to learn from. source: estimate
MAX_SPAN = 10_080  # rows; a window spans no more. source: estimate
BLOCK_VALUES = 4_000_000  # values gathered at once, 32 MB
GOLDEN = 0.6180339887498949  # steps by this share of a line fill it evenly and meet no season


class Lstm:
    """Median of the change from the last value, for all horizons from one network.

    Input: a window of the series, as its difference from the last value divided by its local scale, fine near
    the origin and, in some candidates, in means of several rows further back; gaps are marked and count as
    the last value. Beside it, for each horizon: sine and cosine of the hour and the day of the week at the
    target, and what was there a day and a week before the target, where the grid has these seasons. One
    network of one or two LSTM layers and one hidden layer serves all series alike. It learns the absolute
    error in units of each series' usual scale (Adam, dropout, a falling rate).

    Settings are searched for: the first `fit` tries `budget_fits` candidates of window, width, depth, rate
    and dropout. Each learns from the first three quarters of the past that it is given, and is judged, and
    stopped early, on the last quarter; targets of the first part end before the second begins. The best then
    learns from all of that past for as many epochs. `load` keeps the settings, so that a later `fit` of the
    same object only learns anew. This is generous to it: the settings of our own experts are fixed, and were
    chosen on synthetic series and on weather, so that they spend no search on the series that are scored.

    Costs a search of COST_S and then FIT_S per fit on one core for 20,000 rows and four horizons, whatever
    the number of series, since windows are sampled.
    """

    name: ClassVar[str] = "lstm"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: Grid, budget_fits: int = 8) -> None:
        """`budget_fits`: candidates that a search tries. Raises ContractError below 1."""
        if budget_fits < 1:
            raise ContractError(f"budget_fits: expected at least 1, got {budget_fits}")
        self.grid = grid
        self.budget_fits = budget_fits
        self._loaded: Trained | None = None
        self._settings: Settings | None = None
        self._spread: F64 = np.ones(len(grid.horizons))

    @property
    def reach_rows(self) -> int:
        spans = [sum(c.widths) for c in candidates(self.grid)]
        return max(LAST_ROWS, *SCALE_ROWS, *spans, *self.grid.seasons)

    def fit(self, past: Panel, seed: int) -> Parameters:
        """Empty where there are too few windows. Raises ContractError where PyTorch is not installed."""
        past = Panel(past.start_ns, past.step_s, past.values, past.names, past.zone)
        horizon = self.grid.horizons[-1]
        border = int(past.n_time * (1.0 - JUDGE_SHARE))
        known = filled(past.values, LAST_ROWS)
        if self._settings is None or self._loaded is None:
            earlier = _Windows.drawn(self.grid, past, known, 0, border - horizon, SEARCH_WINDOWS)
            later = _Windows.drawn(
                self.grid, past, known, border, past.n_time - self.grid.horizons[0], SEARCH_WINDOWS // 2
            )
            if earlier.m < MIN_WINDOWS or later.m < MIN_JUDGED:
                return {}
            settings, found = search(
                candidates(self.grid)[: self.budget_fits],
                lambda s: (earlier.sample(s, earlier.spread), later.sample(s, earlier.spread)),
                seed,
            )
        else:
            settings, found = self._settings, self._loaded
        every = _Windows.drawn(
            self.grid, past, known, 0, past.n_time - self.grid.horizons[0], FIT_WINDOWS
        )
        if every.m < MIN_WINDOWS:
            return {}
        trained = train(settings, every.sample(settings, every.spread), None, found.epochs, seed)
        return {
            "step_s": np.array([self.grid.step_s]),
            "horizons": np.array(self.grid.horizons, np.int64),
            "widths": np.array(settings.widths, np.int64),
            "rate": np.array([settings.rate]),
            "dropout": np.array([settings.dropout]),
            "epochs": np.array([found.epochs], np.int64),
            "share": found.share,
            "error": found.error,
            "spread": every.spread,
            **trained.arrays,
        }
