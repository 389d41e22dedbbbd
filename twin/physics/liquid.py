"""Coolant: its properties, and the heat that a stream of it carries.

Q = rho * V * c_p * dT, with properties at the mean of supply and return.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coolant:
    """Density and heat capacity, linear in temperature around `ref_temp_c`."""

    name: str
    density_kg_per_m3: float
    density_slope: float  # kg/m3 per K
    heat_capacity_j_per_kg_k: float
    heat_capacity_slope: float  # J/kg K per K
    ref_temp_c: float
    boiling_c: float  # at AIR_PA
    source: str


COOLANTS: dict[str, Coolant] = {
    # 25 % propylene glycol by volume; slopes are zero: the figures are stated without a temperature
    # Its boiling point by Raoult's law: 7.7 mol-% of glycol take 8 % of water's vapour pressure
    "pg25": Coolant("PG25", 1012.0, 0.0, 3950.0, 0.0, 40.0, 102.3,
                    "15.0 l/min K per kW, common practice for PG25 (density 1012 kg/m3, 3.95 kJ/kg K)"),
    # Water: IAPWS-IF97 at 0.1 MPa gives 992.2 kg/m3 and 4179 J/kg K at 40 degC; slope of density near there
    "water": Coolant("water", 992.2, -0.38, 4179.0, 0.0, 40.0, 100.0, "IAPWS-IF97, 40 degC, 0.1 MPa"),
}  # fmt: skip

AIR_PA = 101_325.0
# Of water at its boiling point, IAPWS-IF97: 40.66 kJ/mol over the gas constant, K
VAPORISATION_K, ZERO_C = 40_660.0 / 8.314, 273.15


def heat_w(coolant: Coolant, flow_lpm: F64, supply_temp_c: F64, return_temp_c: F64) -> F64:
    """Heat taken up between supply and return, W; NaN where any input is."""
    mean_temp_c = (supply_temp_c + return_temp_c) / 2
    return heat_rate_w_per_k(coolant, flow_lpm, mean_temp_c) * (return_temp_c - supply_temp_c)


def heat_rate_w_per_k(coolant: Coolant, flow_lpm: F64, mean_temp_c: F64) -> F64:
    """Heat per kelvin of rise, W/K."""
    away_k = mean_temp_c - coolant.ref_temp_c
    density = coolant.density_kg_per_m3 + coolant.density_slope * away_k
    heat_capacity = coolant.heat_capacity_j_per_kg_k + coolant.heat_capacity_slope * away_k
    return flow_lpm / 60_000.0 * density * heat_capacity


def boiling_c(coolant: Coolant, gauge_pa: F64) -> F64:
    """Boiling point at a gauge pressure, by Clausius and Clapeyron, degC: 128 at 150 kPa for water."""
    ratio = (np.maximum(gauge_pa, 0.0) + AIR_PA) / AIR_PA
    point: F64 = 1.0 / (1.0 / (coolant.boiling_c + ZERO_C) - np.log(ratio) / VAPORISATION_K) - ZERO_C
    return point
