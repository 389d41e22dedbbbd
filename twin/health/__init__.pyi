from .alarms import findings as findings
from .common_cause import (
    EXPLAINS as EXPLAINS,
    LEAST_NODES as LEAST_NODES,
    PRIOR_PER_S as PRIOR_PER_S,
    PRIOR_S as PRIOR_S,
    WINDOW_S as WINDOW_S,
    log_tail as log_tail,
)
from .error_log import ReportedFault as ReportedFault
from .fault_codes import find as find
from .features import QUIET as QUIET, TELEMETRY as TELEMETRY
from .health import HealthState as HealthState
from .lemons import SIGNALS as SIGNALS, LemonCounts as LemonCounts, score as score
from .nvlinks import PORTS as PORTS
from .rules_gpu import NVLINK_RULES as NVLINK_RULES
from .rules_node import RECURS as RECURS
from .verdict_specs import SPECS as SPECS
