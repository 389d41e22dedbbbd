"""Air through racks and rooms: its rise over a heat load, and the laws of fans. NumPy only; nothing of ours.

Flow ~ n, pressure ~ n^2, power ~ n^3 (affinity laws).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

DENSITY_KG_PER_M3 = 1.184  # dry air at 25 degC and 101,325 Pa: p M/(R T)
HEAT_CAPACITY_J_PER_KG_K = 1006.0  # dry air at constant pressure near 25 degC; source: any table of air
# Draught through a rack whose fans stand still, as a ratio of its nominal flow; source: estimate.
DRAUGHT_PU = 0.05


def heat_rate_w_per_k(flow_m3_per_s: F64) -> F64:
    """Heat per kelvin of rise, W/K [n]: rho V c_p."""
    return flow_m3_per_s * (DENSITY_KG_PER_M3 * HEAT_CAPACITY_J_PER_KG_K)


def air_rise_k(power_w: F64, flow_m3_per_s: F64) -> F64:
    """How much warmer air leaves than it came, K [n]; without flow inf under load and 0 without load."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = power_w / heat_rate_w_per_k(flow_m3_per_s)
    return np.where((power_w == 0.0) & (flow_m3_per_s == 0.0), 0.0, rise)


def flow_of_rise_m3_per_s(power_w: F64, rise_k: F64 | float) -> F64:
    """The air flow that carries `power_w` with this rise, m3/s [n]: the inverse of `air_rise_k`."""
    return power_w / (rise_k * (DENSITY_KG_PER_M3 * HEAT_CAPACITY_J_PER_KG_K))


def fan_flow_ratio(speed_pu: F64, draught_pu: float = DRAUGHT_PU) -> F64:
    """Flow over nominal flow, [n]: the speed, bounded smoothly below by the draught; 1 at full speed."""
    least = draught_pu * draught_pu
    ratio: F64 = np.sqrt((speed_pu * speed_pu + least) / (1.0 + least))
    return ratio


def fan_pressure_pa(speed_pu: F64, nominal_pa: F64 | float) -> F64:
    """Pressure at the same point of the curve, Pa [n]: n^2."""
    return nominal_pa * speed_pu * speed_pu


def fan_power_w(speed_pu: F64, nominal_w: F64 | float) -> F64:
    """Power of the fans, W [n]: n^3."""
    return nominal_w * speed_pu * speed_pu * speed_pu


def fan_speed_pu(temp_c: F64, low_c: F64 | float, high_c: F64 | float, least_pu: F64 | float) -> F64:
    """Speed that a chassis asks for at this temperature, [n]: `least_pu` to `low_c`, full from `high_c`."""
    share = np.clip((temp_c - low_c) / (high_c - low_c), 0.0, 1.0)
    return least_pu + (1.0 - least_pu) * share


def recirculated_inlet_c(supply_c: F64, rise_k: F64, recirculation_pu: F64 | float) -> F64:
    """Air at the inlet, degC [n], where this share of it came out of the rack itself.

    T_in = (1 - r) T_supply + r (T_in + rise). Finite only for r < 1.
    """
    return supply_c + rise_k * (recirculation_pu / (1.0 - recirculation_pu))
