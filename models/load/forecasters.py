"""The registry of forecasters: one file each and one line here."""

from __future__ import annotations

from models.load.autoregression import AutoRegression
from models.load.climatology import Climatology, HourlyMedian, SeasonalMean, WeeklyMean
from models.load.ewma import Ewma1, Ewma2, Ewma5, Ewma15, Ewma60, Ewma240
from models.load.forecaster import Forecaster
from models.load.gradient_boosting import GradientBoosting
from models.load.last_value import LastValue
from models.load.linear import LinearForecaster
from models.load.seasonal_naive import OwnPeriod, SeasonalDay, SeasonalWeek
from models.load.state_space import StateSpace

FORECASTERS: dict[str, type[Forecaster]] = {
    "last": LastValue,
    "seasonal_day": SeasonalDay,
    "seasonal_week": SeasonalWeek,
    "own_period": OwnPeriod,
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
    "linear": LinearForecaster,
    "gradient_boosting": GradientBoosting,
}
DEFAULT_EXPERTS = tuple(FORECASTERS)
