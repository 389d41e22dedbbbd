"""Checkpoints under non-Poisson failures: Weibull times from each failure to the next.

A shape below 1 says that a job that has just failed is likely to fail again soon (source: Schroeder and
Gibson, DSN 2006: 0.7 to 0.8 for nodes of LANL), 1 is the constant rate. For backtests and tests of the
interval chosen by `single_tier`, not for the tick. Times are in seconds.

The clock of the next failure starts at a failure, not when the restart is over, so each stretch between two
failures begins with a restart and is as good as any other. It keeps one interval for each save that is
durable before its end: with S the chance to live longer than a time,

    ETTR = tau  sum over j of S(restart + flush + j (tau + save)) / MTTF
"""

from __future__ import annotations

from math import lgamma

import numpy as np
from numpy.typing import ArrayLike

from policies.checkpointing.single_tier import LEAST_S, MOST_S, best_interval, maximise, seconds
from twin.catalogue import F64

ADDED = 40  # terms that are added one by one; the rest by the formula of Euler and Maclaurin
_STEP = 0.1  # of the trapezoid rule for what remains of the integral
WIDE = 100.0  # how far from the best for a constant rate the best is looked for, as a factor


def scale_s(mttf_s: ArrayLike, shape: ArrayLike) -> F64:
    """Return the Weibull scale, seconds, of a mean of `mttf_s`: MTTF / Gamma(1 + 1/shape)."""
    return np.asarray(seconds(mttf_s) / np.exp(_log_gamma(1.0 + 1.0 / np.asarray(shape, np.float64))))


def ettr_weibull(
    interval_s: ArrayLike,
    save_s: ArrayLike,
    restart_s: ArrayLike,
    mttf_s: ArrayLike,
    shape: ArrayLike,
    flush_s: ArrayLike = 0.0,
) -> F64:
    """Return the ETTR [n], 0 to 1, as `single_tier.ettr` but for Weibull times between failures of mean
    `mttf_s`.

    shape: 0.1 to 10 is what this is made for. The bounds of `single_tier` hold: times count as 1e12 s at
    most and an MTTF as 1e-9 s at least; NaN comes of NaN alone.
    """
    arrays = np.broadcast_arrays(
        *(
            np.atleast_1d(np.asarray(x, np.float64))
            for x in (interval_s, save_s, restart_s, mttf_s, shape, flush_s)
        )
    )
    tau, save, restart, mttf = (np.clip(x, 0.0, MOST_S) for x in arrays[:4])
    k, flush = np.clip(arrays[4], 0.1, 10.0), np.clip(arrays[5], 0.0, MOST_S)
    tau, mttf = np.maximum(tau, LEAST_S), np.where(np.isinf(arrays[3]), 1e24, np.maximum(mttf, 1e-9))
    scale = scale_s(mttf, k)
    with np.errstate(over="ignore", under="ignore"):
        kept = tau * _survivals(restart + flush, tau + save, scale, k) / mttf
    return np.asarray(np.clip(kept, 0.0, 1.0))


def best_weibull(
    save_s: ArrayLike, restart_s: ArrayLike, mttf_s: ArrayLike, shape: ArrayLike, flush_s: ArrayLike = 0.0
) -> tuple[F64, F64]:
    """Return (interval_s, ettr), each [n], of the greatest ETTR among all constant intervals; by golden
    section."""
    arrays = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, np.float64)) for x in (save_s, restart_s, mttf_s, shape, flush_s))
    )
    save, restart, mttf, k, flush = arrays
    about, _ = best_interval(np.maximum(save, 1e-9), restart, mttf, flush)
    about = np.clip(about, 1e-9, MOST_S)
    low = np.maximum(about / WIDE, seconds(flush))
    found = maximise(lambda x: ettr_weibull(x, save, restart, mttf, k, flush), low, about * WIDE)
    return found, ettr_weibull(found, save, restart, mttf, k, flush)


def _survivals(begin_s: F64, period_s: F64, scale_s: F64, shape: F64) -> F64:
    """Return the sum over j = 1, 2, .. of S(begin + j period), each [n]."""
    j = np.arange(1, ADDED + 1).reshape(-1, *(1,) * begin_s.ndim)
    added = np.exp(-(((begin_s + j * period_s) / scale_s) ** shape)).sum(axis=0)
    last = begin_s + ADDED * period_s
    x = last / scale_s
    alive = np.exp(-(x**shape))
    slope = -shape * x ** (shape - 1.0) * (period_s / scale_s) * alive
    rest = _integral(x, shape) * scale_s / period_s - 0.5 * alive - slope / 12.0
    # Where a period is long beside the scale hardly anything is left and the formula does not hold
    return np.asarray(added + np.where(alive > 1e-14, np.maximum(rest, 0.0), 0.0))


def _integral(x: F64, shape: F64) -> F64:
    """Return the integral of e^-(t^shape) from `x` on: with t^shape = x^shape + v and v = e^(y - e^-y), by
    the trapezoid rule.

    The substitution makes both ends vanish doubly fast (source: Takahasi and Mori, Publ. RIMS 9, 1974).
    """
    y = np.arange(-4.0, 6.0, _STEP).reshape(-1, *(1,) * x.ndim)
    v = np.exp(y - np.exp(-y))
    weight = v * (1.0 + np.exp(-y)) * np.exp(-v) * _STEP
    low = x**shape
    inner = (weight * (low + v) ** (1.0 / shape - 1.0)).sum(axis=0)
    return np.asarray(np.exp(-low) * inner / shape)


def _log_gamma(x: F64) -> F64:
    return np.asarray(np.vectorize(lgamma, otypes=[np.float64])(x))
