"""Power curves: speed and power of a job under a cap, and the value of one more watt.

domain.md B: under a cap a GPU lowers its clock s until it meets it; the share c of the time that waits for
the clock takes 1/s as long, so that the speed is 1 / (c/s + 1 - c). A cap below the energy minimum costs
energy as well as time. Pure mathematics, vectorised over GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.allocation import LEAST_W
from twin.catalogue import F64
from twin.physics import CLOCK_MIN_PU, EXPONENT, capped, dynamic_share_pu, performance_pu, power_at_clock_w

# Power without work over the highest limit, where nothing better is known: the median over the jobs of the
# sweeps of P100 in ml-energy/zeus, as `backtest power-curves` learns it. Too little of it puts the energy
# minimum too low: 0.20 instead cost 29 % energy on an RTX 6000.
STATIC_PU = 0.28
BISECTIONS = 40  # of the clock: to 1e-12
LEAST_SPREAD = 1e-4  # sum of squares of 1/s - 1: 1 % of the clock once. Less gives no share. source: estimate


class Curve(NamedTuple):
    """[n] each, or one number for all: W without work, W without a cap, the share of the time that waits for
    the clock (0..1), the exponent of dynamic power over the clock, and the clock below which the voltage no
    longer falls (0 = none)."""

    idle_w: F64 | float
    demand_w: F64 | float
    compute_pu: F64 | float
    gamma: F64 | float = EXPONENT
    knee_pu: F64 | float = 0.0


def static_w(idle_w: F64, most_w: F64) -> F64:
    """Idle watts of GPUs [n]: the stated value, or else the usual share of their highest cap."""
    return np.where(np.isfinite(idle_w), idle_w, STATIC_PU * most_w)


def perf(cap_w: F64 | float, curve: Curve) -> F64:
    """Speed of work under these caps over that without one, 0..1 [n]; NaN where something is not known."""
    cap, idle, demand, share, gamma, knee = _columns(cap_w, *curve)
    return performance_pu(capped(idle, demand, cap, gamma, CLOCK_MIN_PU, knee)[1], share)


def power(cap_w: F64 | float, curve: Curve) -> F64:
    """W drawn under these caps [n]: at most the demand, and at least what the lowest clock draws."""
    cap, idle, demand, _, gamma, knee = _columns(cap_w, *curve)
    return capped(idle, demand, cap, gamma, CLOCK_MIN_PU, knee)[0]


def fit(clock_pu: F64, speed_pu: F64) -> float:
    """The share of time that waits for the clock, by least squares; NaN where the clock hardly moved.

    `clock_pu` and `speed_pu` [n_sample] over their values without a cap: 1/speed - 1 = c (1/clock - 1).
    """
    known = np.isfinite(clock_pu) & np.isfinite(speed_pu) & (clock_pu > 0.0) & (speed_pu > 0.0)
    slower, later = 1.0 / clock_pu[known] - 1.0, 1.0 / speed_pu[known] - 1.0
    spread = float(slower @ slower)
    return float(np.clip(slower @ later / spread, 0.0, 1.0)) if spread > LEAST_SPREAD else float("nan")


def energy_minimum_w(curve: Curve, beside_w: F64 | float = 0.0) -> F64:
    """The cap at which a piece of work takes the least energy, W [n]; NaN where something is not known.

    `beside_w`: what runs as long as the GPU does and is not capped, such as its share of the node. Energy
    (beside + idle + D r(s)) (c/s + 1 - c) falls and then rises with the clock s: bisection of the sign of its
    slope finds the least, or the lowest clock.
    """
    beside, idle, demand, share, gamma, knee = _columns(beside_w, *curve)
    dynamic = np.maximum(demand - idle, 0.0)
    low, high = np.full(idle.shape, CLOCK_MIN_PU), np.ones(idle.shape)
    for _step in range(BISECTIONS):
        clock = 0.5 * (low + high)
        drawn = dynamic * dynamic_share_pu(clock, gamma, knee)
        steep = np.where(clock > knee, gamma, 1.0)  # d ln(drawn) / d ln(clock)
        rises = drawn * steep * (share + (1.0 - share) * clock) > share * (beside + idle + drawn)
        low, high = np.where(rises, low, clock), np.where(rises, clock, high)
    # Where nothing waits for the clock, or nothing is dynamic, the lowest clock and the demand are right
    least = power_at_clock_w(idle, idle + dynamic, high, gamma, knee)
    known = np.isfinite(beside + idle + demand + share + gamma + knee)
    return np.where(known, np.where(dynamic > LEAST_W, least, demand), np.nan)


def segments(curve: Curve, floor_w: F64, most_w: F64, k: int = 4) -> tuple[F64, F64]:
    """(W, speed per W) [n, k] of pieces from floor to most, the steepest first: what each watt more buys.

    The speed is exact at the cuts, and its upper hull where it is not concave: nothing happens below what the
    lowest clock draws. What lies beyond the demand is the last piece, and buys nothing. Where the curve is
    not known it is a straight line, up from the speed of a job that does nothing but compute.
    """
    floor, most, idle, demand, share, gamma, knee = _columns(floor_w, most_w, *curve)
    top = np.clip(demand, floor, np.maximum(most, floor))
    top = np.where(np.isfinite(top), top, most)
    beyond = top < most
    at = np.arange(k + 1.0) / np.where(beyond, max(k - 1, 1), k)[:, None]
    cut_w = floor[:, None] + np.minimum(at, 1.0) * (top - floor)[:, None]
    cut_w[:, -1] = np.maximum(most, floor)
    each = Curve(*(np.repeat(x, k + 1) for x in (idle, demand, share, gamma, knee)))
    speed = perf(cut_w.ravel(), each).reshape(cut_w.shape)
    room_w = np.diff(cut_w, axis=1)
    slope = _hull(room_w, np.diff(speed, axis=1))
    unknown = ~np.isfinite(speed).all(axis=1)
    if unknown.any():
        computing = Curve(idle, demand, np.ones(len(floor)), gamma, knee)
        least = np.nan_to_num(perf(floor, computing))
        range_w = np.where(most - floor > LEAST_W, most - floor, np.inf)
        slope[unknown] = np.broadcast_to(((1.0 - least) / range_w)[:, None], slope.shape)[unknown]
    return room_w, slope


def _hull(room_w: F64, rise: F64) -> F64:
    """Slopes [n, k] of the least concave curve over these pieces: min over starts of max over ends of the
    mean slope from start to end (Robertson, Wright and Dykstra, Order Restricted Statistical Inference, 1.4).
    """
    k = room_w.shape[1]
    width = np.concatenate([np.zeros((len(room_w), 1)), np.cumsum(room_w, axis=1)], axis=1)
    height = np.concatenate([np.zeros((len(rise), 1)), np.cumsum(rise, axis=1)], axis=1)
    out = np.full(room_w.shape, np.inf)
    for first in range(k):
        best = np.full(len(room_w), -np.inf)
        for last in range(k, first, -1):
            span = width[:, last] - width[:, first]
            rises = height[:, last] - height[:, first]
            mean = np.divide(rises, span, out=np.zeros(len(span)), where=span > LEAST_W)
            best = np.maximum(best, mean)
            out[:, last - 1] = np.minimum(out[:, last - 1], best)
    return out


def _columns(*values: F64 | float) -> list[F64]:
    """All of them as arrays of the same length [n]."""
    return [
        np.array(x) for x in np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, np.float64)) for v in values))
    ]
