from .arguments import write_json as write_json
from .backtest import (
    SCORING as SCORING,
    BacktestCase as BacktestCase,
    chosen_forecasters as chosen_forecasters,
    horizons_of as horizons_of,
    scored as scored,
)
from .grammar import declare as declare
