"""One checkpoint tier: the share of time that a job trains, and the best interval.

One tier of checkpoints, failures that come at a constant rate. A job trains for an interval, saves, trains
on; a failure loses what no finished save holds, then the job restarts, and a failure in a restart begins the
restart again. The share of the time that ends as kept training is the effective training time ratio, ETTR.
Pure NumPy; functions take numbers or arrays that fit together, in seconds, and answer with an array.

This is the simplest case, in closed form; a rate that is only believed is in `belief`, two tiers in
`levels`, predictions in `prediction`, other laws of failure in `weibull`.

Every limit has an answer, and NaN comes of NaN alone: negative times count as 0; a rate is held within
1e-24 and 1e9 failures per second, so an MTTF of infinity never fails and one of 0 always does; an interval of
infinity counts as 1e12 s.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from twin.catalogue import F64

# Intervals that are set by hand, to compare with. source: estimate
FIXED_S = {"fixed_30_min": 1800.0, "fixed_60_min": 3600.0, "fixed_120_min": 7200.0}
# A rate outside of these is as good as never and always. They keep the algebra finite.
SELDOM_PER_S, OFTEN_PER_S = 1e-24, 1e9
LEAST_S, MOST_S = 1e-150, 1e12  # what an interval of 0 and of infinity are taken for
_GOLDEN = 0.5 * (np.sqrt(5.0) - 1.0)
_STEPS = 60  # of the golden section


def young_s(save_s: ArrayLike, mttf_s: ArrayLike) -> F64:
    """Return Young's first-order interval `sqrt(2 C M)`, seconds. source: Young, CACM 17 (9), 1974."""
    save, mttf = seconds(save_s), seconds(mttf_s)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.sqrt(2.0 * save) * np.sqrt(mttf)
    # 0 x infinity: a save that costs nothing is made all the time
    return np.where((save == 0) & ~np.isnan(mttf) | (mttf == 0) & ~np.isnan(save), 0.0, found)


def daly_s(save_s: ArrayLike, mttf_s: ArrayLike) -> F64:
    """Return Daly's higher-order interval, seconds; the MTTF if a save takes at least twice that.

    `sqrt(2CM) [1 + 1/3 sqrt(C/2M) + 1/9 (C/2M)] - C`. source: Daly, FGCS 22 (3), 2006.
    """
    save, mttf = np.broadcast_arrays(seconds(save_s), seconds(mttf_s))
    first = young_s(save, mttf)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.where(save == 0, 0.0, save / (2.0 * mttf))
        found = first * (1.0 + np.sqrt(share) / 3.0 + share / 9.0) - save
    found = np.where(share < 1.0, found, mttf)
    return np.where(np.isnan(save) | np.isnan(mttf), np.nan, np.where(np.isinf(mttf), first, found))


def ettr(
    interval_s: ArrayLike,
    save_s: ArrayLike,
    restart_s: ArrayLike,
    mttf_s: ArrayLike,
    flush_s: ArrayLike = 0.0,
) -> F64:
    """Return the share of time, 0 to 1, that becomes kept training; exact for a constant failure rate.

    `tau / (M e^((R+F)/M) (e^((tau+C)/M) - 1))`. source: domain.md D for F = 0; for F > 0 see below.

    interval_s: tau, useful training between two saves. save_s: C, how long a save stops the training.
    restart_s: R, from a failure until the job trains again. flush_s: F, from when the training goes on until
    the save can be recovered from; a failure before that falls back to the save before. A save counts only if
    no failure comes in F, and that alone is what F costs: a factor e^(-F/M). The formula wants F <= tau.

    An interval of 0 gives 0 unless a save is free; of infinity gives 0 unless nothing ever fails (then 1).
    """
    tau, save, restart, flush = (seconds(x) for x in (interval_s, save_s, restart_s, flush_s))
    rate = per_s(mttf_s)
    with np.errstate(over="ignore", invalid="ignore"):
        tau = np.clip(tau, LEAST_S, MOST_S)
        found = tau * rate * np.exp(-rate * (restart + flush)) / np.expm1(rate * (tau + save))
    return np.where(np.isnan(found), _nan_of(tau, save, restart, flush, rate), np.clip(found, 0.0, 1.0))


def best_interval(
    save_s: ArrayLike, restart_s: ArrayLike, mttf_s: ArrayLike, flush_s: ArrayLike = 0.0
) -> tuple[F64, F64]:
    """Return (interval_s, ettr) of the greatest ETTR; exact, by Newton's method.

    The optimum solves `1 - x = e^-(x + c)`, x = tau/M and c = C/M, whatever the restart takes. It is never
    shorter than a flush, since storage must drain one save before the next. A free save gives 0, no failures
    give infinity; where a save takes far longer than the MTTF the interval tends to the MTTF.
    """
    save, flush, rate = seconds(save_s), seconds(flush_s), per_s(mttf_s)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        interval = best_fraction(rate * save) / rate
    interval = np.where((rate == SELDOM_PER_S) & (save > 0), np.inf, interval)
    interval = np.where(np.isnan(flush), np.nan, np.maximum(interval, flush))
    return interval, ettr(interval, save, restart_s, mttf_s, flush)


def best_fraction(cost: F64) -> F64:
    """Return x in 0..1 with `1 - x = e^-(x + cost)`: interval over MTTF for a save of `cost` MTTFs.

    That is x = 1 + W(-e^-(1 + cost)) of Lambert's function; begun from its series about the branch point
    (source: Corless et al., Adv. Comput. Math. 5, 1996, eq. 4.22), then Newton.
    """
    p = np.sqrt(-2.0 * np.expm1(-cost))
    x = p * (1.0 - p * (1.0 / 3.0 - p * (11.0 / 72.0 - p * (43.0 / 540.0))))
    for _ in range(4):
        left = np.expm1(-(x + cost))
        # Where p is small its series is exact and the sum below is all rounding
        step = np.where(p > 1e-3, (x + left) / np.where(left < 0, -left, 1.0), 0.0)
        x = np.clip(x - step, 0.0, 1.0)
    return x


def seconds(given: ArrayLike) -> F64:
    """As an array of times that are not negative; NaN stays."""
    return np.maximum(np.asarray(given, np.float64), 0.0)


def per_s(mttf_s: ArrayLike) -> F64:
    """Failures per second of an MTTF, held within the bounds of this file; NaN stays."""
    with np.errstate(divide="ignore"):
        return np.clip(1.0 / seconds(mttf_s), SELDOM_PER_S, OFTEN_PER_S)


def maximise(worth: Callable[[F64], F64], low_s: F64, high_s: F64) -> F64:
    """The point at which `worth` [n] is greatest between `low_s` and `high_s` [n], each element on its own.

    Golden section on the logarithm of the interval, for a worth with one hill: its steps narrow any bracket
    of 12 decades to 1e-11 of it. Raises nothing; where a bound is NaN, so is the answer.
    """
    a, b = np.log(low_s), np.log(high_s)
    x, y = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    fx, fy = worth(np.exp(x)), worth(np.exp(y))
    for _ in range(_STEPS):
        left = fx >= fy
        a, b = np.where(left, a, x), np.where(left, y, b)
        probe = np.where(left, b - _GOLDEN * (b - a), a + _GOLDEN * (b - a))
        found = worth(np.exp(probe))
        x, y, fx, fy = (
            np.where(left, probe, y),
            np.where(left, x, probe),
            np.where(left, found, fy),
            np.where(left, fx, found),
        )
    return np.exp(0.5 * (a + b))


def _nan_of(*given: F64) -> F64:
    """NaN where any of `given` is NaN, or else 0: the value used for infinity over infinity."""
    return np.where(np.any([np.isnan(x) for x in np.broadcast_arrays(*given)], axis=0), np.nan, 0.0)
