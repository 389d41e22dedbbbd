from .load import (
    BacktestCase as BacktestCase,
    add_parser as add_parser,
    add_scoring as add_scoring,
    chosen_forecasters as chosen_forecasters,
    horizons_of as horizons_of,
    run_backtest as run_backtest,
    scored as scored,
)
