from .common_cause import (
    WINDOW_D as WINDOW_D,
    common_causes as common_causes,
    either_probability as either_probability,
    individual_faults as individual_faults,
    shared_faults as shared_faults,
    shared_rate as shared_rate,
)
from .decayed_count import Isotonic as Isotonic, decayed_counts as decayed_counts
from .fault_log import FaultLog as FaultLog, scrambled as scrambled
from .fleet_rate import FleetForecast as FleetForecast, fleet_forecast as fleet_forecast
from .hazard import Hazard as Hazard
from .model import Failure as Failure
from .rates import (
    LITERATURE as LITERATURE,
    FailureHistory as FailureHistory,
    baseline as baseline,
    failure_history as failure_history,
    probability as probability,
    shock_rate as shock_rate,
)
from .recalibration import PRIOR as PRIOR, Logistic as Logistic
from .self_exciting import SelfExciting as SelfExciting
