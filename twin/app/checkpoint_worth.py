"""Which closed form answers for a job's terms: one tier, two tiers, failures foretold, or Weibull times.

Part of the shell; NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies import checkpoint_time as single
from policies.checkpoint_plan import Terms, ettr_at, plan
from policies.checkpoint_prediction import best_ahead, ettr_ahead
from policies.checkpoint_weibull import best_weibull, ettr_weibull
from twin.app.checkpoint_terms import Asked
from twin.frame import F64


class Best(NamedTuple):
    """The best interval, what it is worth; NaN or None where it does not apply."""

    interval_s: float
    ettr: float
    local_interval_s: float = np.nan
    plain_interval_s: float | None = None  # without a prediction
    plain_ettr: float | None = None


def best_of(asked: Asked) -> Best:
    """The greatest share of time that is kept, and by which interval."""
    if asked.two_levels or asked.rate_shape != np.inf:
        found = plan(_terms(asked))
        return Best(float(found.interval_s[0]), float(found.ettr[0]), float(found.local_interval_s[0]))
    if asked.weibull != 1.0:
        pair = best_weibull(asked.save_s, asked.restart_s, asked.mttf_s, asked.weibull, asked.flush_s)
        return Best(*(float(np.ravel(x)[0]) for x in pair))
    plain = single.best(asked.save_s, asked.restart_s, asked.mttf_s, asked.flush_s)
    interval_s, ettr = (float(x) for x in plain)
    if asked.recall == 0.0:
        return Best(interval_s, ettr)
    told = best_ahead(asked.save_s, asked.restart_s, asked.mttf_s, recall(asked), asked.precision)
    ahead_s, ahead = (float(np.ravel(x)[0]) for x in told)
    return Best(ahead_s, ahead, np.nan, interval_s, ettr)


def recall(asked: Asked) -> float:
    """Of failures foretold early enough for a save."""
    return asked.recall if asked.lead_s >= asked.save_s else 0.0


def worth(asked: Asked, interval_s: F64) -> F64:
    """The share of time that these intervals keep [n]."""
    if asked.two_levels or asked.rate_shape != np.inf:
        terms = _terms(asked, len(interval_s))
        return ettr_at(terms, interval_s)
    if asked.weibull != 1.0:
        return ettr_weibull(interval_s, asked.save_s, asked.restart_s, asked.mttf_s, asked.weibull,
                            asked.flush_s)  # fmt: skip
    if asked.recall > 0.0:
        return ettr_ahead(interval_s, asked.save_s, asked.restart_s, asked.mttf_s, recall(asked),
                          asked.precision)  # fmt: skip
    return single.ettr(interval_s, asked.save_s, asked.restart_s, asked.mttf_s, asked.flush_s)


def _terms(asked: Asked, n: int = 1) -> Terms:
    soft_per_s = 1.0 / asked.soft_mttf_s if asked.two_levels else 0.0
    of = (asked.save_s, asked.flush_s, asked.restart_s, asked.local_save_s, asked.local_restart_s,
          asked.rate_shape, 1.0 / asked.mttf_s, soft_per_s)  # fmt: skip
    return Terms(*(np.full(n, x) for x in of))
