from .arguments import write_json as write_json
from .backtest import (
    BacktestCase as BacktestCase,
    add_scoring as add_scoring,
    chosen_forecasters as chosen_forecasters,
    horizons_of as horizons_of,
    scored as scored,
)
