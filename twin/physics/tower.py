"""Counterflow cooling tower by Merkel's theory, as an exchanger between water and the enthalpy of its air.

Braun, Klein and Mitchell, "Effectiveness models for cooling towers and cooling coils", ASHRAE Transactions 95
(1989): Q = eps m_a (h_s(hot) - h_s(wet bulb)), with eps that of a counterflow exchanger at the capacity ratio
m_a c_s/(m_w c_w) and NTU = c (m_w/m_a)^0.4. c_s is the slope of the enthalpy of saturated air between the
water's two ends: it falls to a half from 30 to 10 degC, so that the approach grows in the cold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.physics.exchanger import effectiveness, ntu_of
from twin.physics.moist_air import saturated_j_per_kg

F64 = NDArray[np.float64]

DESIGN_WET_BULB_C = 25.6  # at which towers are rated: 78 degF, CTI STD-201 and AHRI 550/590
WATER_OVER_AIR = 1.2  # mass of water over air at nominal flows; usual towers have 0.8-1.5; source: estimate
FILL_EXPONENT = 0.4  # of NTU over the ratio of water to air; ASHRAE Handbook of systems and equipment
WATER_J_PER_KG_K = 4186.0
LEAST_K = 0.5  # differences of temperature below it are taken as this


def _slope_j_per_kg_k(hot_c: F64, cold_c: F64) -> F64:
    """Mean slope of the enthalpy of saturated air between the water's two ends [n]."""
    low_c = np.minimum(cold_c, hot_c - LEAST_K)
    slope: F64 = (saturated_j_per_kg(hot_c) - saturated_j_per_kg(low_c)) / (hot_c - low_c)
    return slope


def tower_ntu(approach_k: F64, range_k: F64) -> F64:
    """NTU at nominal flows [n] of a tower that cools water by `range_k` to `approach_k` above its wet bulb
    at `DESIGN_WET_BULB_C`; NaN where no tower does with so little air.
    """
    cold_c = DESIGN_WET_BULB_C + approach_k
    hot_c = cold_c + range_k
    room = saturated_j_per_kg(hot_c) - saturated_j_per_kg(np.full_like(hot_c, DESIGN_WET_BULB_C))
    ratio = _slope_j_per_kg_k(hot_c, cold_c) / (WATER_OVER_AIR * WATER_J_PER_KG_K)
    return ntu_of(WATER_OVER_AIR * WATER_J_PER_KG_K * range_k / room, ratio)


def tower_w_per_k(
    ntu: F64, water_w_per_k: F64, nominal_w_per_k: F64, air_pu: F64, ends_c: tuple[F64, F64, F64]
) -> F64:
    """Heat over the approach, W/K [n], for water of `water_w_per_k` and this share of the nominal air.

    `ends_c` are the temperatures of the water that comes and of that which leaves, and the wet bulb.
    """
    hot_c, cold_c, wet_c = ends_c
    hot_c = np.maximum(hot_c, wet_c + LEAST_K)
    air_kg_per_s = air_pu * nominal_w_per_k / (WATER_J_PER_KG_K * WATER_OVER_AIR)
    ratio = air_kg_per_s * _slope_j_per_kg_k(hot_c, cold_c) / water_w_per_k
    water_over_air = water_w_per_k / WATER_J_PER_KG_K / air_kg_per_s / WATER_OVER_AIR
    eps = effectiveness(ntu * water_over_air**FILL_EXPONENT, ratio)
    heat_w = eps * air_kg_per_s * (saturated_j_per_kg(hot_c) - saturated_j_per_kg(wet_c))
    approach_k = np.maximum(hot_c - heat_w / water_w_per_k - wet_c, 0.01)
    return heat_w / approach_k
