"""The registry of forecasters: one file each and one line here."""

from __future__ import annotations

from models.autoregression import AutoRegression
from models.climatology import Climatology, HourlyMedian, SeasonalMean, WeeklyMean
from models.ewma import Ewma1, Ewma2, Ewma5, Ewma15, Ewma60, Ewma240
from models.forecaster import Forecaster
from models.gradient_boosting import GradientBoosting
from models.last_value import LastValue
from models.linear import Linear
from models.lstm import Lstm
from models.seasonal_naive import SeasonalDay, SeasonalWeek
from models.state_space import StateSpace

FORECASTERS: dict[str, type[Forecaster]] = {
    "last": LastValue,
    "seasonal_day": SeasonalDay,
    "seasonal_week": SeasonalWeek,
    "ewma1": Ewma1,
    "ewma2": Ewma2,
    "ewma5": Ewma5,
    "ewma15": Ewma15,
    "ewma60": Ewma60,
    "ewma240": Ewma240,
    "climatology": Climatology,
    "hourly_median": HourlyMedian,
    "seasonal_ewma": SeasonalMean,
    "weekly_ewma": WeeklyMean,
    "state_space": StateSpace,
    "autoregression": AutoRegression,
    "linear": Linear,
    "gradient_boosting": GradientBoosting,
    "lstm": Lstm,
}
# All but the LSTM, which needs PyTorch and is there to be compared with.
DEFAULT_EXPERTS = tuple(name for name in FORECASTERS if name != "lstm")
