"""ETTR expected over a belief in the rate, and the interval that makes most of it, by golden section.

What `policies.checkpointing.best_plan` finds in closed form is held against it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from policies.checkpointing.belief import quadrature
from policies.checkpointing.single_tier import MOST_S, best_interval, ettr, maximise, seconds
from twin.catalogue import F64

WIDE = 30.0  # how far from the interval for the mean rate the best one is looked for, as a factor


def ettr_believed(
    interval_s: ArrayLike,
    save_s: ArrayLike,
    restart_s: ArrayLike,
    shape: ArrayLike,
    per_s: ArrayLike,
    flush_s: ArrayLike = 0.0,
) -> F64:
    """ETTR [n] expected over a Gamma belief in the rate of failures, of mean `per_s` and `shape` (inf: sure).

    One tier, as `single_tier.ettr`. NaN where an input is NaN.
    """
    arrays = np.broadcast_arrays(
        *(
            np.atleast_1d(np.asarray(x, np.float64))
            for x in (interval_s, save_s, restart_s, shape, per_s, flush_s)
        )
    )
    interval, save, restart, shapes, rate, flush = arrays
    rates, weights = quadrature(shapes)
    with np.errstate(divide="ignore", invalid="ignore"):
        mttf = 1.0 / np.maximum(rates * rate, 0.0)
    return np.asarray((weights * ettr(interval, save, restart, mttf, flush)).sum(axis=0))


def best_believed(
    save_s: ArrayLike, restart_s: ArrayLike, shape: ArrayLike, per_s: ArrayLike, flush_s: ArrayLike = 0.0
) -> tuple[F64, F64]:
    """(interval_s, ettr), each [n], of the greatest ETTR expected over a Gamma belief, by golden section.

    Little is lost by planning with the mean rate: to first order the belief's width does not matter, and a
    rate that is wrong by a factor costs as much to either side (0.4 points at twice or half the true rate,
    at an MTTF of 7.9 h and a save of 60 s). An interval that is itself wrong by a factor costs a little
    more when it is too long (1.46 against 1.42 points at a factor of 2 there, 4.97 against 4.22 at 1 h and
    300 s).
    """
    save, restart, shapes, rate, flush = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, np.float64)) for x in (save_s, restart_s, shape, per_s, flush_s))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        sure, _ = best_interval(np.maximum(save, 1e-9), restart, 1.0 / np.maximum(rate, 0.0), flush)
    sure = np.clip(sure, 1e-9, MOST_S)
    low = np.maximum(sure / WIDE, seconds(flush))
    found = maximise(lambda x: ettr_believed(x, save, restart, shapes, rate, flush), low, sure * WIDE)
    return found, ettr_believed(found, save, restart, shapes, rate, flush)
