from .common_cause import (
    WINDOW_D as WINDOW_D,
    common_causes as common_causes,
    individual_faults as individual_faults,
    shared_faults as shared_faults,
)
from .decayed_count import Isotonic as Isotonic, decayed_counts as decayed_counts
from .fault_log import FaultLog as FaultLog, scrambled as scrambled
from .fleet_rate import (
    TOO_WIDE as TOO_WIDE,
    FleetForecast as FleetForecast,
    fleet_forecast as fleet_forecast,
    fleet_forecasts as fleet_forecasts,
    useful_ends as useful_ends,
)
from .model import Failure as Failure
from .prior_merger import (
    FleetStatistics as FleetStatistics,
    merge_statistics as merge_statistics,
    random_effects as random_effects,
)
from .priors import FailurePrior as FailurePrior, parse_prior as parse_prior
from .rates import (
    LITERATURE as LITERATURE,
    FailureHistory as FailureHistory,
    baseline as baseline,
    failure_history as failure_history,
    probability as probability,
    shock_rate as shock_rate,
)
from .recalibration import at_level as at_level, level as level
from .self_exciting import SelfExciting as SelfExciting
from .shared_and_own import SharedAndOwn as SharedAndOwn
from .site_statistics import GROUPS as GROUPS, SENSITIVITY as SENSITIVITY, site_statistics as site_statistics
