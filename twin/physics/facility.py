"""Heat rejection of a facility loop: the work of its chiller and the water of its tower."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

FAN_RATED_W_PER_W = 0.018  # power of all fans at full speed over nominal heat; source: estimate
# Latent heat of water near 30 degC is 2.43 MJ/kg; nine tenths of a tower's heat leave by it; source: estimate
EVAPORATION_L_PER_KWH = 0.9 * 3.6 / 2.43
CYCLES = 5.0  # of concentration: evaporated water over that drained is cycles - 1; source: estimate
# A chiller's work over that of the Carnot process, and what its heat exchangers need; source: estimate
CARNOT_PU, CHILLER_APPROACH_K = 0.5, 4.0
CONDENSING_MAX_C = 65.0  # of the sink, above which a chiller unloads: high-pressure limit; source: estimate
COP_MIN, COP_MAX = 2.0, 15.0  # beyond these no machine is meant; source: estimate
ZERO_C_K = 273.15


def cop(chilled_c: F64 | float, sink_c: F64 | float) -> F64:
    """Heat moved over work [n] of a chiller from water at `chilled_c` to a sink at `sink_c`, degC."""
    cold_k = chilled_c - CHILLER_APPROACH_K + ZERO_C_K
    lift_k = np.maximum(sink_c - chilled_c + 2.0 * CHILLER_APPROACH_K, 1e-3)
    return np.asarray(np.clip(CARNOT_PU * cold_k / lift_k, COP_MIN, COP_MAX), np.float64)


def chiller_work_w(
    chilled_w: F64 | float, chilled_c: F64 | float, sink_c: F64 | float, conductance_w_per_k: F64 | float
) -> F64:
    """Work of a chiller whose work itself leaves by the air and so warms the sink it works against, W [n].

    `sink_c` is the sink without that work, `conductance_w_per_k` what leaves by the air per kelvin. Lift is
    linear in work, so P = q (lift + P/K)/(c T) has the closed solution q lift/(c T - q/K), within the bounds
    of `cop`.
    """
    carnot_k = CARNOT_PU * (chilled_c - CHILLER_APPROACH_K + ZERO_C_K)
    lift_k = np.maximum(sink_c - chilled_c + 2.0 * CHILLER_APPROACH_K, 1e-3)
    spare_k = np.maximum(carnot_k - chilled_w / conductance_w_per_k, 1e-6)
    work = chilled_w * lift_k / spare_k
    return np.asarray(np.clip(work, chilled_w / COP_MAX, chilled_w / COP_MIN), np.float64)


def chilled_max_w(chilled_c: F64 | float, sink_c: F64 | float, conductance_w_per_k: F64 | float) -> F64:
    """Heat that a chiller can carry before its sink, `sink_c` when idle, is at `CONDENSING_MAX_C`, W [n].

    Heat and work leave by the same air: q (1 + 1/COP) = K (limit - sink).
    """
    room_w = conductance_w_per_k * np.maximum(CONDENSING_MAX_C - sink_c, 0.0)
    return np.asarray(room_w / (1.0 + 1.0 / cop(chilled_c, CONDENSING_MAX_C)), np.float64)


def evaporated_l_per_s(heat_w: F64 | float) -> F64:
    """Water that a tower turns to vapour, l/s [n]."""
    return np.asarray(np.maximum(heat_w, 0.0) / 3.6e6 * EVAPORATION_L_PER_KWH, np.float64)


def makeup_l_per_s(evaporated_l_per_s: F64 | float) -> F64:
    """Water drawn: what evaporates and what is drained to keep salts down, l/s [n]."""
    return np.asarray(evaporated_l_per_s * CYCLES / (CYCLES - 1.0), np.float64)
