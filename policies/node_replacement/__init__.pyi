from .assessment import ALARMS_PER_FAILURE as ALARMS_PER_FAILURE
from .circuit_breaker import WINDOW_S as WINDOW_S, check_breaker as check_breaker
from .costs import OPTIONS as OPTIONS
from .evidence import CAUSES as CAUSES, DAY_S as DAY_S, HOUR_S as HOUR_S, failure_chance as failure_chance
from .headroom import LoadLimits as LoadLimits, load_limits as load_limits
from .phases import CORDONED as CORDONED, PHASES as PHASES, SAVING as SAVING, SUSPECT as SUSPECT
from .placement import (
    PLACED_LAST as PLACED_LAST,
    PLACEMENT as PLACEMENT,
    RESERVED as RESERVED,
    current_placement as current_placement,
)
from .policy import Replacement as Replacement
from .predictions import score as score
from .spare_count import spare_pool_of as spare_pool_of
from .spares import free_spares as free_spares, unwell as unwell
from .texts import HOLD_TEXTS as HOLD_TEXTS
