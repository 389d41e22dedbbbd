from .checkpoint import TERMS as TERMS
from .load import (
    SCORING as SCORING,
    BacktestCase as BacktestCase,
    chosen_forecasters as chosen_forecasters,
    horizons_of as horizons_of,
    scored as scored,
)
