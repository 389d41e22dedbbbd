from .costs import (
    DECLARED as DECLARED,
    MEASURED as MEASURED,
    PRIOR as PRIOR,
    SOURCES as SOURCES,
    reports_checkpoints as reports_checkpoints,
    save_terms as save_terms,
)
from .early_save import at_risk_s as at_risk_s, facility_trouble_pu as facility_trouble_pu
from .hazard import (
    DAY_S as DAY_S,
    DEGRADED_PU as DEGRADED_PU,
    FAILED_PU as FAILED_PU,
    VERDICT_S as VERDICT_S,
    InterruptionRates as InterruptionRates,
    interruption_rates as interruption_rates,
    job_nodes as job_nodes,
    nearest_forecast as nearest_forecast,
    rate_per_s as rate_per_s,
    recent_factor as recent_factor,
    spread_of as spread_of,
)
from .plan import (
    IntervalPlan as IntervalPlan,
    SaveTerms as SaveTerms,
    best_plan as best_plan,
    ettr_at as ettr_at,
)
from .policy import (
    CHANGE_S as CHANGE_S,
    LEAST_GAIN as LEAST_GAIN,
    LONG_GAIN as LONG_GAIN,
    LONG_S as LONG_S,
    MOST_S as MOST_S,
    PRESSING_GAIN as PRESSING_GAIN,
    Checkpoint as Checkpoint,
    rounded_interval as rounded_interval,
)
from .prediction import best_ahead as best_ahead, ettr_ahead as ettr_ahead
from .single_tier import FIXED_S as FIXED_S, best_interval as best_interval, ettr as ettr, young_s as young_s
from .texts import span as span
from .weibull import best_weibull as best_weibull, ettr_weibull as ettr_weibull
