"""Cold plate: the thermal resistance between silicon and coolant, which falls with the flow.

At rest T = T_in + P R(Q).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

# Flow ratio whose convection equals what conduction and natural convection still carry from a plate without
# flow: bounds the resistance at about 16 times its convective part (0.02 ** -0.7); source: estimate.
STAGNANT_FLOW_PU = 0.02
# A finned heat sink in air: laminar to turbulent between fins gives -0.5 to -0.8; source: estimate.
AIR_EXPONENT = -0.6
AIR_CONVECTIVE_SHARE = 0.7  # of a heat sink's resistance at nominal air flow; source: estimate
STILL_AIR_PU = 0.1  # natural convection in a chassis, as a ratio of its nominal air flow; source: estimate


def resistance_k_per_w(
    nominal_k_per_w: F64,
    flow_ratio: F64,
    convective_share: F64 | float,
    exponent: F64 | float,
    stagnant_pu: float = STAGNANT_FLOW_PU,
) -> F64:
    """Resistance from silicon to incoming coolant, K/W [n]: R0 (1 - c) + R0 c (Q/Q0)^e (domain law, e < 0).

    `flow_ratio` is Q/Q0, its sign does not matter; it is bounded smoothly below by `stagnant_pu`, so that the
    result is finite without flow, exactly R0 at Q0, and falls strictly with the flow. NaN where an input is.
    """
    return nominal_k_per_w * (1.0 - convective_share * (1.0 - convection(flow_ratio, exponent, stagnant_pu)))


def convection(flow_ratio: F64, exponent: F64 | float, stagnant_pu: float = STAGNANT_FLOW_PU) -> F64:
    """The factor (Q/Q0)^e [n], bounded at no flow: the costly part, which a caller may evaluate per rack."""
    least = stagnant_pu * stagnant_pu
    bounded: F64 = ((flow_ratio * flow_ratio + least) / (1.0 + least)) ** (0.5 * exponent)
    return bounded


def air_resistance_k_per_w(nominal_k_per_w: F64, flow_ratio: F64) -> F64:
    """The same for a heat sink, K/W [n]; `flow_ratio` of air, which is the ratio of fan speeds."""
    return resistance_k_per_w(nominal_k_per_w, flow_ratio, AIR_CONVECTIVE_SHARE, AIR_EXPONENT, STILL_AIR_PU)
