"""Trends of points in time, and how long until one meets its limit, with an interval.

Least squares of many series at once; what their scatter owes to slow swings is allowed for. May import frames
only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.frame import F64, Bool

Z = 1.645  # of a 90 % interval
LEAST_POINTS, LEAST_SPAN_S = 12, 1.5 * 86_400.0  # source: estimate
SURE_T = 4.0  # slope over its standard error from which there is a drift; source: estimate
LONGEST_S = 10 * 365.25 * 86_400.0  # what lasts longer is not told


class Trend(NamedTuple):
    """A straight line through each series [k]: where it is at its end, and its slope per second.

    NaN where there are too few points, or over too short a time.
    """

    level: F64
    slope: F64
    level_sigma: F64
    slope_sigma: F64
    free: F64  # degrees of freedom, fewer where the scatter swings slowly
    first: F64  # value of the line at its first point
    span_s: F64


class Left(NamedTuple):
    """Seconds until a limit [k]: middle, and 90 % interval; NaN: unknown."""

    mid_s: F64
    lo_s: F64
    hi_s: F64


def trend(t_s: F64, y: F64) -> Trend:
    """The lines through the points y [m, k], NaN where one is missing, at the instants t_s [m].

    Ordinary least squares. Points whose errors follow each other with the correlation r (a series of first
    order, from the residuals) count as (1 - r) / (1 + r) of their number. source: Bartlett, J. R. Stat. Soc.
    98 (1935) 536.
    """
    known = np.isfinite(y)
    n = known.sum(axis=0).astype(np.float64)
    t = np.where(known, t_s[:, None], np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        low = np.where(known, t_s[:, None], np.inf).min(axis=0, initial=np.inf)
        high = np.where(known, t_s[:, None], -np.inf).max(axis=0, initial=-np.inf)
        enough = (n >= LEAST_POINTS) & (high - low >= LEAST_SPAN_S)
        mean_t, mean_y = _sum(t) / n, _sum(np.where(known, y, np.nan)) / n
        dt, dy = t - mean_t, y - mean_y
        square = _sum(dt * dt)
        slope = _sum(dt * dy) / square
        off = dy - slope * dt
        pairs = off[1:] * off[:-1]
        linked = np.clip(_sum(pairs) / np.maximum(_sum(off * off), 1e-300), 0.0, 0.95)
        worth = (1.0 - linked) / (1.0 + linked)
        free = np.maximum(n * worth - 2.0, 1.0)
        # The sum of squares is over all points, what they are worth is less
        variance = _sum(off * off) / np.maximum(n - 2.0, 1.0)
        slope_sigma = np.sqrt(variance / (square * worth))
        level_sigma = np.sqrt(variance / (n * worth) + (high - mean_t) ** 2 * slope_sigma**2)
        level = mean_y + slope * (high - mean_t)
        first = mean_y + slope * (low - mean_t)
        none = np.where(enough, 0.0, np.nan)
    return Trend(level + none, slope + none, level_sigma + none, slope_sigma + none, free + none,
                 first + none, high - low + none)  # fmt: skip


def _sum(values: F64) -> F64:
    return np.asarray(np.nansum(values, axis=0), np.float64)


def sure(found: Trend, floor: F64 | float) -> Bool:
    """Where there is a drift that can be told from noise [k]: of more than `floor` over the points' time."""
    with np.errstate(invalid="ignore"):
        moved = np.abs(found.slope) * found.span_s > floor
        return np.asarray(moved & (np.abs(found.slope) >= SURE_T * found.slope_sigma))


def until(found: Trend, limit: F64, rising: bool, floor: F64 | float) -> Left:
    """Time until each line meets its limit, if it goes on as it did; 0 where it has.

    NaN where no drift towards it can be told from noise, or it takes longer than `LONGEST_S`.
    """
    sign = 1.0 if rising else -1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        gap, speed = sign * (limit - found.level), sign * found.slope
        z = Z + (Z**3 + Z) / (4.0 * found.free)  # of Student's law. source: Abramowitz, Stegun 26.7.5
        mid = gap / speed
        lo = (gap - z * found.level_sigma) / (speed + z * found.slope_sigma)
        hi = (gap + z * found.level_sigma) / np.maximum(speed - z * found.slope_sigma, 1e-300)
        told = sure(found, floor) & (speed > 0.0) & (mid <= LONGEST_S)
        over = gap <= 0.0
    out = [np.where(over, 0.0, np.where(told, np.clip(v, 0.0, LONGEST_S), np.nan)) for v in (mid, lo, hi)]
    return Left(*out)


def until_counted(grown: F64, span_s: F64, left: F64, least: float) -> Left:
    """Time until `left` more events [k], after `grown` of them within `span_s`; 0 where none is left.

    Events are taken to come one by one by Poisson's law, so that a rate of k events is known to its root; NaN
    below `least` events.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        each_s = span_s / grown
        mid, spread = left * each_s, Z / np.sqrt(grown)
        lo, hi = mid / (1.0 + spread), mid / np.maximum(1.0 - spread, 1e-3)
        told = (grown >= least) & (span_s >= LEAST_SPAN_S) & (mid <= LONGEST_S)
        over = left <= 0.0
    out = [np.where(over, 0.0, np.where(told, np.clip(v, 0.0, LONGEST_S), np.nan)) for v in (mid, lo, hi)]
    return Left(*out)
