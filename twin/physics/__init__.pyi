from .breaker import (
    CONTINUOUS_PU as CONTINUOUS_PU,
    HOLD_PU as HOLD_PU,
    MAGNETIC_PU as MAGNETIC_PU,
    TAU_S as TAU_S,
    step as step,
    theta_steady as theta_steady,
)
from .cold_plate import (
    air_resistance_k_per_w as air_resistance_k_per_w,
    resistance_k_per_w as resistance_k_per_w,
)
from .electrical import (
    TRANSFORMER as TRANSFORMER,
    UPS as UPS,
    PowerTree as PowerTree,
    output_of_input_w as output_of_input_w,
)
from .exchanger import (
    effectiveness as effectiveness,
    film_factor as film_factor,
    heat_slope_k as heat_slope_k,
    transfer as transfer,
    ua_of as ua_of,
)
from .facility import (
    FAN_RATED_W_PER_W as FAN_RATED_W_PER_W,
    chilled_max_w as chilled_max_w,
    chiller_work_w as chiller_work_w,
    evaporated_l_per_s as evaporated_l_per_s,
    makeup_l_per_s as makeup_l_per_s,
)
from .figures import J_PER_KWH as J_PER_KWH, pue as pue, tue as tue, wue_l_per_kwh as wue_l_per_kwh
from .gpu_power import (
    ACTIVITY_WEIGHTS as ACTIVITY_WEIGHTS,
    CLOCK_MIN_PU as CLOCK_MIN_PU,
    EXPONENT as EXPONENT,
    LEAK_PU_PER_K as LEAK_PU_PER_K,
    LEAK_SPREAD_PU_PER_K as LEAK_SPREAD_PU_PER_K,
    capped as capped,
    clock_of_share_pu as clock_of_share_pu,
    dynamic_share_pu as dynamic_share_pu,
    performance_pu as performance_pu,
    power_at_clock_w as power_at_clock_w,
)
from .liquid import (
    AIR_PA as AIR_PA,
    COOLANTS as COOLANTS,
    Coolant as Coolant,
    boiling_c as boiling_c,
    heat_rate_w_per_k as heat_rate_w_per_k,
    heat_w as heat_w,
)
from .moist_air import dew_point_c as dew_point_c, rh_pu as rh_pu, wet_bulb_c as wet_bulb_c
from .network import Flow as Flow, Network as Network, Pumps as Pumps
from .tower import tower_ntu as tower_ntu, tower_w_per_k as tower_w_per_k
