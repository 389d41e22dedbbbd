"""The live rule in a backtest: the plan for the rate believed at each instant, changed only where it pays.

When a job is told anew follows the policy's own constants; it looks each minute, here at each instant at
which something new is known. Part of the shell; NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.checkpoint import (
    CHANGE_S,
    LEAST_GAIN,
    LONG_GAIN,
    LONG_S,
    MOST_S,
    PRESSING_GAIN,
    rounded,
)
from policies.checkpoint_plan import Terms, ettr_at, plan
from twin.app.checkpoint_account import Costs
from twin.app.checkpoint_known import DAY_S
from twin.frame import F64

AT_ONCE = 20_000  # plans worked out together


class Live(NamedTuple):
    """Intervals in force and as planned each time [n_job, n_instant]; changes of each [n_job]."""

    interval_s: F64
    planned_s: F64
    changes: F64
    planned_changes: F64


def live(days: F64, rate_per_s: F64, shape: F64, costs: Costs) -> Live:
    """From beliefs [n_job, n_instant] at these days [n_instant]."""
    planned = np.concatenate([
        plan(_terms(rate_per_s.ravel()[a : a + AT_ONCE], shape.ravel()[a : a + AT_ONCE], costs)).interval_s
        for a in range(0, rate_per_s.size, AT_ONCE)
    ])  # fmt: skip
    planned = np.minimum(planned, MOST_S).reshape(rate_per_s.shape)
    wanted = rounded(planned, np.full(planned.shape, costs.flush_s))
    held, changed_d = wanted.copy(), np.full(len(wanted), days[0])
    for t in range(1, planned.shape[1]):
        terms = _terms(rate_per_s[:, t], shape[:, t], costs)
        gain = ettr_at(terms, wanted[:, t]) - ettr_at(terms, held[:, t - 1])
        rested_s = (days[t] - changed_d) * DAY_S
        enough = (gain >= LEAST_GAIN) & ((rested_s >= CHANGE_S) | (gain >= PRESSING_GAIN))
        enough |= (rested_s >= LONG_S) & (gain >= LONG_GAIN)
        held[:, t] = np.where(enough, wanted[:, t], held[:, t - 1])
        changed_d = np.where(held[:, t] != held[:, t - 1], days[t], changed_d)
    return Live(held, planned, _changes(held), _changes(planned))


def _terms(rate_per_s: F64, shape: F64, costs: Costs) -> Terms:
    n = len(rate_per_s)
    none, zero = np.full(n, np.nan), np.zeros(n)
    return Terms(np.full(n, costs.save_s), np.full(n, costs.flush_s), np.full(n, costs.restart_s), none, none,
                 shape, rate_per_s, zero)  # fmt: skip


def _changes(interval_s: F64) -> F64:
    """How often a job is told something else [n_job]; a change of a hundredth is none."""
    ratio = interval_s[:, 1:] / interval_s[:, :-1]
    out: F64 = (np.abs(ratio - 1.0) > 0.01).sum(axis=1).astype(np.float64)
    return out
