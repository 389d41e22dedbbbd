"""Breaker: a thermal accumulator, and the threshold of its magnetic trip.

tau d(theta)/dt = (x / hold)^2 - theta, with x the current over the rating; trips at theta = 1. `hold` is the
largest load that it carries for ever. All steps are exact while the load is constant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

# Between 100 %, which UL 489 lets no breaker trip at, and 135 %, at which it has to within 1 or 2 h;
# IEC 60898 has 113 % and 145 %. source: estimate
HOLD_PU = 1.15
# From cold: 200 % in 4 min, 135 % in 13 min. UL 489 asks for 2-8 min by size, and 1-2 h. source: estimate
TAU_S = 600.0
MAGNETIC_PU = 7.0  # 5-10 times the rating for usual frames; source: estimate
CONTINUOUS_PU = 0.8  # a continuous load may have so much of the rating; source: US National Electrical Code


def theta_steady(load_pu: F64, hold_pu: F64 | float = HOLD_PU) -> F64:
    """Steady state of theta under a constant load [n]; above 1 the breaker trips."""
    return np.asarray((load_pu / hold_pu) ** 2, np.float64)


def step(
    theta: F64, load_pu: F64, dt_s: float, tau_s: F64 | float = TAU_S, hold_pu: F64 | float = HOLD_PU
) -> F64:
    """Theta after `dt_s` at a constant load [n], exact for any step."""
    aim = theta_steady(load_pu, hold_pu)
    return np.asarray(aim + (theta - aim) * np.exp(-dt_s / np.asarray(tau_s, np.float64)), np.float64)
