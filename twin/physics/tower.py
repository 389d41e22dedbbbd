"""Counterflow cooling tower by Merkel's theory, as an exchanger between water and the enthalpy of its air.

Braun, Klein and Mitchell, "Effectiveness models for cooling towers and cooling coils", ASHRAE Transactions 95
(1989): Q = eps m_a (h_s(hot) - h_s(wet bulb)), with eps that of a counterflow exchanger at the capacity ratio
m_a c_s/(m_w c_w) and NTU = c (m_w/m_a)^0.4. c_s is the slope of the enthalpy of saturated air between the
water's two ends: it falls to a half from 30 to 10 degC, so that the approach grows in the cold.

One tower at a time, in plain numbers: a site has few.
"""

from __future__ import annotations

import math

import numpy as np

from twin.physics.exchanger import ntu_of
from twin.physics.moist_air import MAGNUS, MAGNUS_C, PRESSURE_PA, SATURATION_PA

DESIGN_WET_BULB_C = 25.6  # at which towers are rated: 78 degF, CTI STD-201 and AHRI 550/590
WATER_OVER_AIR = 1.2  # mass of water over air at nominal flows; usual towers have 0.8-1.5; source: estimate
FILL_EXPONENT = 0.4  # of NTU over the ratio of water to air; ASHRAE Handbook of systems and equipment
WATER_J_PER_KG_K = 4186.0
LEAST_K = 0.5  # differences of temperature below it are taken as this


def saturated_j_per_kg(temp_c: float) -> float:
    """Enthalpy of saturated air over that of dry air at 0 degC, J per kg of dry air.

    h = 1006 T + w (2.501e6 + 1860 T), w = 0.62198 e/(p - e); source: ASHRAE Handbook of fundamentals.
    """
    vapour = SATURATION_PA * math.exp(MAGNUS * temp_c / (MAGNUS_C + temp_c))
    humidity = 0.62198 * vapour / (PRESSURE_PA - vapour)
    return 1006.0 * temp_c + humidity * (2.501e6 + 1860.0 * temp_c)


def tower_ntu(approach_k: float, range_k: float) -> float:
    """NTU at nominal flows of a tower that cools water by `range_k` to `approach_k` above its wet bulb at
    `DESIGN_WET_BULB_C`; NaN where no tower does with so little air.
    """
    cold_c = DESIGN_WET_BULB_C + approach_k
    hot_c = cold_c + max(range_k, LEAST_K)
    hot_j, cold_j, wet_j = (saturated_j_per_kg(x) for x in (hot_c, cold_c, DESIGN_WET_BULB_C))
    water_j_per_k = WATER_OVER_AIR * WATER_J_PER_KG_K  # per kg of air
    eps = water_j_per_k * (hot_c - cold_c) / (hot_j - wet_j)
    ratio = (hot_j - cold_j) / (hot_c - cold_c) / water_j_per_k
    return float(ntu_of(np.array([eps]), np.array([ratio]))[0])


def tower_w_per_k(
    ntu: float,
    water_w_per_k: float,
    nominal_w_per_k: float,
    air_pu: float,
    ends_c: tuple[float, float, float],
) -> float:
    """Heat over the approach, W/K, for water of `water_w_per_k` and this share of the nominal air, above 0.

    `ends_c` are the temperatures of the water that comes and of that which leaves, and the wet bulb.
    """
    hot_c, cold_c, wet_c = ends_c
    hot_c = max(hot_c, wet_c + LEAST_K)
    cold_c = min(cold_c, hot_c - LEAST_K)
    hot_j, cold_j, wet_j = saturated_j_per_kg(hot_c), saturated_j_per_kg(cold_c), saturated_j_per_kg(wet_c)
    air_kg_per_s = air_pu * nominal_w_per_k / (WATER_J_PER_KG_K * WATER_OVER_AIR)
    ratio = air_kg_per_s * (hot_j - cold_j) / (hot_c - cold_c) / water_w_per_k
    transfer = ntu * (water_w_per_k / (air_pu * nominal_w_per_k)) ** FILL_EXPONENT
    spare = 1.0 - ratio
    passed = transfer if abs(spare) < 1e-9 else -math.expm1(-transfer * spare) / spare
    heat_w = air_kg_per_s * (hot_j - wet_j) / (1.0 / passed + ratio)
    return heat_w / max(hot_c - heat_w / water_w_per_k - wet_c, 0.01)
