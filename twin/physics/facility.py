"""Heat rejection of a facility loop: dry cooler or tower, with or without a chiller. NumPy only.

A cooler carries heat away in proportion to how far its water is above the air (dry bulb, or wet bulb where it
evaporates) and to a power of its air flow. What it cannot bring down to the aim, a chiller may. Imports
nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

# Water above the air at nominal heat and full fans; usual ranges are 6-10 K dry and 3-5 K wet
DRY_APPROACH_K, WET_APPROACH_K = 8.0, 4.0
AIR_EXPONENT = 0.8  # of conductance over air flow, which is in proportion to fan speed; source: estimate
FAN_MIN_PU = 0.15  # the lowest speed of a fan that runs; source: estimate
FAN_RATED_W_PER_W = 0.018  # power of all fans at full speed over nominal heat; source: estimate
# Latent heat of water near 30 degC is 2.43 MJ/kg; nine tenths of a tower's heat leave by it; source: estimate
EVAPORATION_L_PER_KWH = 0.9 * 3.6 / 2.43
CYCLES = 5.0  # of concentration: evaporated water over that drained is cycles - 1; source: estimate
# A chiller's work over that of the Carnot process, and what its heat exchangers need; source: estimate
CARNOT_PU, CHILLER_APPROACH_K = 0.5, 4.0
CONDENSING_MAX_C = 65.0  # of the sink, above which a chiller unloads: high-pressure limit; source: estimate
COP_MIN, COP_MAX = 2.0, 15.0  # beyond these no machine is meant; source: estimate
ZERO_C_K = 273.15


@dataclass(frozen=True, slots=True)
class Rejection:
    """A steady state of heat rejection, per loop [n]."""

    supply_c: F64  # of the water that goes back to the CDUs
    fan_pu: F64
    fan_power_w: F64
    compressor_power_w: F64
    water_l_per_s: F64  # evaporated; what is drained comes on top, see `makeup_l_per_s`
    chilled_w: F64  # heat that the chiller carried
    free_supply_c: F64  # what the cooler alone reaches at this fan speed


def conductance_w_per_k(heat_nominal_w: F64, approach_k: F64 | float, fan_pu: F64) -> F64:
    """Heat per kelvin between water and air, W/K [n]."""
    return np.asarray(heat_nominal_w / approach_k * fan_pu**AIR_EXPONENT, np.float64)


def fan_power_w(heat_nominal_w: F64, fan_pu: F64) -> F64:
    """Fans follow the cube of their speed, W [n]."""
    return np.asarray(FAN_RATED_W_PER_W * heat_nominal_w * fan_pu**3, np.float64)


def fan_aim_pu(
    heat_w: F64, heat_nominal_w: F64, approach_k: F64 | float, above_air_k: F64, running: float = FAN_MIN_PU
) -> F64:
    """Fan speed that carries `heat_w` with water `above_air_k` over the air [n], within `running`..1."""
    need = np.maximum(heat_w, 0.0) / heat_nominal_w * approach_k / np.maximum(above_air_k, 1e-3)
    return np.clip(need ** (1.0 / AIR_EXPONENT), running, 1.0)


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


def makeup_l_per_s(evaporated_l_per_s: F64 | float, cycles: float = CYCLES) -> F64:
    """Water drawn: what evaporates and what is drained to keep salts down, l/s [n]."""
    return np.asarray(evaporated_l_per_s * cycles / (cycles - 1.0), np.float64)


def supply_aim_c(wanted_c: F64, air_c: F64, supply_max_c: F64 | float) -> F64:
    """Set point of the loop [n]: as wanted, not below what air allows by itself, not above the limit."""
    return np.minimum(np.maximum(wanted_c, air_c + 1.0), supply_max_c)


def reject(
    heat_w: F64,
    heat_nominal_w: F64,
    aim_c: F64,
    outdoor_c: F64 | float,
    wet_bulb_c: F64 | float,
    wet: Bool,
    chiller_w: F64,
    water_w_per_k: F64,
    air_factor: F64 | float = 1.0,
) -> Rejection:
    """The steady state that carries `heat_w` [n] with supply water as near to `aim_c` as can be.

    Economiser first: the cooler alone while it reaches the aim. Where full fans are not enough, a chiller of
    capacity `chiller_w` (0 = none) cools the water the rest of the way, and its work leaves by the same
    cooler; a stream of `water_w_per_k` needs so much for a kelvin. `air_factor` below 1 is a fault of the
    fans: less air at the same speed and power.
    """
    air_c = np.where(wet, wet_bulb_c, outdoor_c)
    approach = np.where(wet, WET_APPROACH_K, DRY_APPROACH_K) / np.maximum(air_factor, 1e-3) ** AIR_EXPONENT
    fan = fan_aim_pu(heat_w, heat_nominal_w, approach, aim_c - air_c)
    conductance = conductance_w_per_k(heat_nominal_w, approach, fan)
    free_c = air_c + heat_w / conductance
    chilled = np.minimum(np.maximum(free_c - aim_c, 0.0) * water_w_per_k, np.minimum(heat_w, chiller_w))
    chilled = np.maximum(chilled, 0.0)
    supply = free_c - chilled / water_w_per_k
    work = chiller_work_w(chilled, supply, free_c, conductance)
    water = np.where(wet, evaporated_l_per_s(heat_w + work), 0.0)
    return Rejection(supply, fan, fan_power_w(heat_nominal_w, fan), work, water, chilled, free_c)
