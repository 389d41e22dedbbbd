"""GPU power as a function of activity, clock and cap.

P = P_static + P_dynamic * activity * r(s), where s is the clock over the highest clock and r the dynamic
power over that at the highest clock: r = s^gamma while voltage follows the clock, and in proportion to s
below the knee at which the voltage has reached its lowest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

EXPONENT = 2.7  # of power over clock, with voltage following; domain facts give 2.5-3
# Shares of full dynamic power that streaming multiprocessors, tensor cores and memory draw; source: estimate
ACTIVITY_WEIGHTS = (0.35, 0.40, 0.25)
# Leakage over the highest power, per kelvin, and 1 sigma of it: an idle accelerator draws a quarter more at
# 80 than at 40 degC; source: estimate
LEAK_PU_PER_K, LEAK_SPREAD_PU_PER_K = 3e-4, 1.5e-4
# An H100 goes from 345 to 1980 MHz; a cap that is not met at that clock is exceeded. source: estimate
CLOCK_MIN_PU = 0.17
_LEAST_W = 1e-9


def dynamic_share_pu(clock_pu: F64, exponent: F64 | float, knee_pu: F64 | float = 0.0) -> F64:
    """Dynamic power at a clock over that at the highest clock [n]: s^gamma, and linear below the knee."""
    scaled = np.maximum(clock_pu, knee_pu)
    return np.asarray(scaled**exponent * np.minimum(clock_pu / np.maximum(scaled, _LEAST_W), 1.0), np.float64)


def clock_of_share_pu(share_pu: F64, exponent: F64 | float, knee_pu: F64 | float = 0.0) -> F64:
    """The clock at which dynamic power has this share [n]; the inverse of `dynamic_share_pu`."""
    gamma, knee = np.asarray(exponent, np.float64), np.asarray(knee_pu, np.float64)
    if not knee.any():
        return np.asarray(share_pu ** (1.0 / gamma), np.float64)
    at_knee = knee**gamma
    root = np.maximum(share_pu, at_knee) ** (1.0 / gamma)
    return np.asarray(np.where(share_pu < at_knee, knee * share_pu / np.maximum(at_knee, _LEAST_W), root))


def power_at_clock_w(
    static_w: F64, demand_w: F64, clock_pu: F64, exponent: F64 | float, knee_pu: F64 | float = 0.0
) -> F64:
    """Power at a clock that something else than a cap has set, W [n]."""
    share = dynamic_share_pu(clock_pu, exponent, knee_pu)
    return np.asarray(static_w + (demand_w - static_w) * share, np.float64)


def capped(
    static_w: F64,
    demand_w: F64,
    cap_w: F64,
    exponent: F64 | float,
    clock_min_pu: F64 | float = CLOCK_MIN_PU,
    knee_pu: F64 | float = 0.0,
) -> tuple[F64, F64]:
    """(power W, clock 0..1) [n] of GPUs that lower their clock until they meet their cap.

    s = min(1, ((cap - static) / (demand - static))^(1/gamma)), not below `clock_min_pu`: a cap below what
    that clock draws is exceeded. No cap is inf. NaN stays NaN.
    """
    power, clock = np.array(demand_w, np.float64), np.ones(np.shape(demand_w))
    slowed = np.flatnonzero(
        ~(cap_w >= power)
    )  # the root is dear: taken only where it is needed, NaN included
    if not len(slowed):
        return power, clock
    static, cap, gamma, least, knee = (
        np.broadcast_to(np.asarray(x, np.float64), power.shape)[slowed]
        for x in (static_w, cap_w, exponent, clock_min_pu, knee_pu)
    )
    dynamic = power[slowed] - static
    share = np.clip((cap - static) / np.maximum(dynamic, _LEAST_W), 0.0, 1.0)
    wanted = clock_of_share_pu(share, gamma, knee)
    low = np.flatnonzero(wanted < least)
    share[low] = dynamic_share_pu(least[low], gamma[low], knee[low])
    # A GPU without work needs no lower clock: it would save nothing
    clock[slowed] = np.where(dynamic <= _LEAST_W, 1.0, np.maximum(wanted, least))
    power[slowed] = static + dynamic * share
    return power, clock


def performance_pu(clock_pu: F64, compute_share_pu: F64 | float) -> F64:
    """Speed of work over that at the highest clock [n]: 1 / (c/s + 1 - c); the clock is above 0.

    `compute_share_pu` is the share of time, at the highest clock, that waits for the clock.
    """
    return np.asarray(clock_pu / (compute_share_pu + (1.0 - compute_share_pu) * clock_pu), np.float64)
