from .prior_files import (
    PriorFile as PriorFile,
    StatisticsFile as StatisticsFile,
    TrustedKey as TrustedKey,
    chosen_spans as chosen_spans,
    file_bytes as file_bytes,
    merge_files as merge_files,
    prior_of as prior_of,
    read_file as read_file,
    sign_file as sign_file,
    verified as verified,
)
from .privacy import (
    PERIOD_D as PERIOD_D,
    SHARES as SHARES,
    BudgetLedger as BudgetLedger,
    Spending as Spending,
    discrete_laplace as discrete_laplace,
    epsilon_of as epsilon_of,
    noise_scale as noise_scale,
    noise_variance as noise_variance,
    publish as publish,
)
