from .audit import LookAhead as LookAhead, differ as differ
from .comparison import (
    compare_errors as compare_errors,
    overall as overall,
    to_best as to_best,
    to_rival as to_rival,
    winner as winner,
)
from .failure_scores import ratio as ratio, reliability as reliability, score_failures as score_failures
from .failures import backtest_failures as backtest_failures
from .life_scores import score_lives as score_lives
from .lives import backtest_lives as backtest_lives
from .load import (
    FIT_ISSUES as FIT_ISSUES,
    BacktestGroup as BacktestGroup,
    BacktestResult as BacktestResult,
    BacktestTerms as BacktestTerms,
    GroupResult as GroupResult,
    HorizonForecasts as HorizonForecasts,
    groups_of as groups_of,
    join as join,
    published_coverage as published_coverage,
    run_group as run_group,
)
from .new_site import backtest_new_site as backtest_new_site, score_new_site as score_new_site
from .scores import (
    LEAST_BLOCKS as LEAST_BLOCKS,
    Cells as Cells,
    apart_targets as apart_targets,
    binomial as binomial,
    each_cells as each_cells,
    score_load as score_load,
)
