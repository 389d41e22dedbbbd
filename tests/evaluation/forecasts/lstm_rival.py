"""LSTM rival: the network as `--rival lstm` of the forecast suite, fitted seldom as its fits take long."""

from __future__ import annotations

import importlib.util

from models.load import ForecastGrid
from tests.evaluation.forecasts.lstm import Lstm
from twin.backtest import Rival
from twin.catalogue import ConfigError

_TRIES = Lstm(ForecastGrid(1.0, (1,))).budget_fits
LSTM = Rival(
    "lstm",
    Lstm,
    refits=4,
    as_one=True,
    cost_note=f"; the first, and each one on twice its rows, tries {_TRIES} settings; "
    "one network serves all horizons",
)
RIVALS = {"lstm": LSTM}


def check_installed(rival: Rival) -> None:
    """ConfigError if the rival needs a library that is not here, before anything is read or fitted."""
    if rival.name in RIVALS and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"--rival {rival.name}: needs PyTorch, which is not installed: pip install 'racktwin[torch]', "
            "or choose another forecaster"
        )
