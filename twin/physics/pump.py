"""A centrifugal pump: flow ~ n, head ~ n^2, power ~ n^3 (affinity laws). NumPy only; imports nothing of ours.

H = n^2 H0 - a Q|Q|, with n the speed over full speed, H0 the head at full speed and no flow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

M3_PER_S_PER_LPM = 1.0 / 60_000.0  # by definition
# Power at no flow over power at nominal flow, same speed: centrifugal pumps of low specific speed take about
# half; source: estimate.
SHUTOFF_POWER_PU = 0.5


def curve_of(
    flow_lpm: F64, head_pa: F64, shutoff_ratio: F64 | float, speed_pu: F64 | float
) -> tuple[F64, F64]:
    """(H0, a) of the pump that gives `head_pa` at `flow_lpm` and `speed_pu`: Pa and Pa per (l/min)^2, [n].

    `shutoff_ratio` is head at no flow over `head_pa`, same speed; above 1. Two pumps in parallel: half the
    flow each.
    """
    return shutoff_ratio * head_pa / (speed_pu * speed_pu), (shutoff_ratio - 1.0) * head_pa / (
        flow_lpm * flow_lpm
    )


def head_pa(speed_pu: F64, flow_lpm: F64, head0_pa: F64, curve: F64) -> F64:
    """Rise of pressure, Pa [n]; below 0 where flow is forced through."""
    return speed_pu * speed_pu * head0_pa - curve * flow_lpm * np.abs(flow_lpm)


def flow_lpm(speed_pu: F64, head: F64, head0_pa: F64, curve: F64) -> F64:
    """Flow against this head, l/min [n]; below 0 where the head is more than the pump can give."""
    spare = (speed_pu * speed_pu * head0_pa - head) / curve
    flow: F64 = np.sign(spare) * np.sqrt(np.abs(spare))
    return flow


def speed_of(flow: F64, head: F64, head0_pa: F64, curve: F64) -> F64:
    """Speed at which the pump gives this flow and head, pu [n]; 0 where it need not turn."""
    speed: F64 = np.sqrt(np.maximum((head + curve * flow * np.abs(flow)) / head0_pa, 0.0))
    return speed


def hydraulic_w(flow: F64, head: F64) -> F64:
    """Power in the liquid, W [n], from l/min and Pa."""
    return flow * head * M3_PER_S_PER_LPM


def power_w(
    speed_pu: F64, flow_ratio: F64, nominal_w: F64 | float, shutoff_pu: float = SHUTOFF_POWER_PU
) -> F64:
    """Electric power, W [n]: nominal (s n^3 + (1 - s) n^2 q), q = |Q|/Q0 with Q0 the flow at n = 1.

    Along one circuit q ~ n and so P ~ n^3 exactly. `nominal_w` at n = 1 and q = 1: hydraulic over efficiency.
    """
    return nominal_w * speed_pu * speed_pu * (shutoff_pu * speed_pu + (1.0 - shutoff_pu) * np.abs(flow_ratio))
