"""Moist air: wet bulb temperature and relative humidity.

Saturation over water by Magnus with the coefficients of Alduchov and Eskridge (1996), good to 0.4 % from
-40 to 50 degC; the wet bulb from the psychrometer equation with the WMO's coefficient.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

# Alduchov and Eskridge, "Improved Magnus form approximation of saturation vapor pressure", 1996
SATURATION_PA, MAGNUS, MAGNUS_C = 610.94, 17.625, 243.04
# WMO-No. 8, guide to instruments: aspirated psychrometer, water on the bulb
PSYCHROMETER_PER_K, PSYCHROMETER_SLOPE = 6.53e-4, 9.44e-4
PRESSURE_PA = 101_325.0  # standard atmosphere
DRIEST_PU = 1e-3  # no outdoor air is drier; keeps logarithms finite
_STEPS = 6  # Newton on a smooth convex curve from within 2 K


def saturation_pa(temp_c: F64) -> F64:
    """Vapour pressure of saturated air, Pa [n]."""
    pressure: F64 = SATURATION_PA * np.exp(MAGNUS * temp_c / (MAGNUS_C + temp_c))
    return pressure


def rh_pu(temp_c: F64, dew_c: F64) -> F64:
    """Relative humidity, [n], of air at `temp_c` with this dew point."""
    return saturation_pa(dew_c) / saturation_pa(temp_c)


def dew_point_c(temp_c: F64, rh_pu: F64) -> F64:
    """Dew point, degC [n], of air at `temp_c`: the inverse of `rh_pu`; humidity within 0.001..1."""
    x = np.log(np.clip(rh_pu, DRIEST_PU, 1.0)) + MAGNUS * temp_c / (MAGNUS_C + temp_c)
    dew: F64 = MAGNUS_C * x / (MAGNUS - x)
    return dew


def wet_bulb_c(temp_c: F64, rh_pu: F64, pressure_pa: float = PRESSURE_PA) -> F64:
    """Temperature of a wet bulb in moving air, degC [n], between dew point and air; humidity within 0.001..1.

    Solves e_s(T_w) - A (1 + b T_w) p (T - T_w) = e by Newton. Stull's closed form (2011) is within 1 K of it.
    """
    rh = np.clip(rh_pu, DRIEST_PU, 1.0)
    vapour = rh * saturation_pa(temp_c)
    wet = temp_c - (1.0 - rh) * np.clip(0.35 * (temp_c + 20.0), 2.0, None) * 0.8
    coefficient = PSYCHROMETER_PER_K * pressure_pa
    for _ in range(_STEPS):
        saturated = saturation_pa(wet)
        away = temp_c - wet
        value = saturated - coefficient * (1.0 + PSYCHROMETER_SLOPE * wet) * away - vapour
        slope = (
            saturated * MAGNUS * MAGNUS_C / (MAGNUS_C + wet) ** 2
            + coefficient * (1.0 + PSYCHROMETER_SLOPE * wet)
            - coefficient * PSYCHROMETER_SLOPE * away
        )
        wet = wet - value / slope
    return wet
