from .checkpoint_formulas import (
    GOAL_MTTF_S as GOAL_MTTF_S,
    ArgumentCheck as ArgumentCheck,
    JobTerms as JobTerms,
    closed_forms as closed_forms,
    parse_terms as parse_terms,
    print_forms as print_forms,
    print_goals as print_goals,
)
from .checkpoint_page import (
    check_folder as check_folder,
    write_curve as write_curve,
    write_replay as write_replay,
)
from .checkpoint_replay import (
    FIXED as FIXED,
    SIZES as SIZES,
    Predictions as Predictions,
    ReplayResult as ReplayResult,
    SaveCosts as SaveCosts,
    SaveOutcome as SaveOutcome,
    place_jobs as place_jobs,
    replay as replay,
    simulate_saves as simulate_saves,
)
from .checkpoint_scores import print_scores as print_scores, print_table as print_table, scores as scores
from .load_report import (
    PAGE as PAGE,
    amount as amount,
    better_of as better_of,
    print_load_scores as print_load_scores,
    ratio_span as ratio_span,
    ratio_words as ratio_words,
    write_page as write_page,
)
from .load_run import (
    BacktestTask as BacktestTask,
    Rival as Rival,
    backtest_terms as backtest_terms,
    compare_rival as compare_rival,
    find_rival as find_rival,
    run_all as run_all,
)
from .power_curves import run_backtest as run_backtest
from .step_trace import KINDS as KINDS, StepTrace as StepTrace, read_step_trace as read_step_trace
from .stragglers import (
    LIMIT_PU as LIMIT_PU,
    analyse_trace as analyse_trace,
    compare_published as compare_published,
    what_if as what_if,
)
