"""Saves ahead of predicted failures: their value by recall and precision of the predictions.

Failures come at a constant rate; a share of them, the recall, is predicted at least as long ahead as a
save takes. Beside them come false alarms, so that a share of all alarms, the precision, is true. An alarm
is answered with a save at once if enough work would be lost, and the job then begins a new interval. One
tier, seconds; saves are durable when training goes on.

The model, exactly: alarms come as a Poisson process of rate recall / (precision MTTF). One that finds the
job training, with at least `answered_s` of work at stake, is answered; if it is true the failure strikes
when that save is done. One that comes in a save is answered by this save. One that is not answered, and one
that comes in a restart, strikes at once if it is true and is nothing otherwise. All else is as in
`single_tier`.

Warnings come longer ahead than a save takes. Then the save is best begun as late as it may be, or training
does not go on after it (a drain): a job that saves at once and trains on loses again what it trains until the
failure, `recall (lead - save) / MTTF` of its time, which this does not count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from policies.checkpointing.single_tier import LEAST_S, MOST_S, best_interval, maximise, per_s, seconds
from twin.catalogue import F64, Bool

WIDE = 1e3  # how much longer than without predictions the best interval may be


def worth_saving_s(save_s: ArrayLike, precision: ArrayLike) -> F64:
    """Return the work at stake from which an alarm is worth a save, seconds: precision x work > cost of
    the save.

    A little less is best, since the save also stands for the next regular one; that matters by 1e-4 of ETTR.
    """
    right = np.clip(np.asarray(precision, np.float64), 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((seconds(save_s) == 0) & (right == 0), 0.0, seconds(save_s) / right)


def ettr_ahead(
    interval_s: ArrayLike,
    save_s: ArrayLike,
    restart_s: ArrayLike,
    mttf_s: ArrayLike,
    recall: ArrayLike,
    precision: ArrayLike,
    answered_s: ArrayLike | None = None,
) -> F64:
    """Return the ETTR, 0 to 1, of an interval with early saves; the arguments broadcast as arrays.

    recall, precision: 0 to 1, held there. answered_s: work at stake from which on alarms are answered, as
    `worth_saving_s` unless given; inf: alarms are ignored, and the result is that of `single_tier.ettr`.
    With a precision of 0 nothing is answered, whatever the recall. NaN comes of NaN alone.
    """
    save, restart = np.minimum(seconds(save_s), MOST_S), np.minimum(seconds(restart_s), MOST_S)
    tau = np.clip(seconds(interval_s), LEAST_S, MOST_S)
    rate = per_s(mttf_s)
    known = np.clip(np.asarray(recall, np.float64), 0.0, 1.0)
    right = np.clip(np.asarray(precision, np.float64), 1e-12, 1.0)
    answered = worth_saving_s(save_s, precision) if answered_s is None else seconds(answered_s)
    blind = np.where(np.asarray(precision, np.float64) <= 0, tau, np.minimum(answered, tau))
    missed, alarms = rate * (1.0 - known), rate * known / right
    both, attentive = missed + alarms, blind < tau
    unannounced = np.where(attentive, missed, rate)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # From the begin of an interval: blind, then attentive, then in a save that an alarm or the end began
        fails_blind = -np.expm1(-rate * blind)
        sees = 1.0 - fails_blind
        rest = both * (tau - blind)
        ends = -np.expm1(-rest)
        alarm = sees * ends * alarms / np.where(both > 0, both, 1.0)
        finish = sees * (1.0 - ends)
        at_stake = blind * alarm + sees * alarms * _twice(rest) * (tau - blind) ** 2
        safe = np.exp(-unannounced * save)
        kept = safe * (at_stake + finish * tau)
        in_save = alarm + finish
        struck = fails_blind + sees * ends * missed / np.where(both > 0, both, 1.0)
        predicted = np.where(attentive, -np.expm1(-rate * known * save), 0.0)
        ended = finish * predicted + alarm * (1.0 - (1.0 - right) * (1.0 - predicted))
        struck = struck + in_save * (1.0 - safe) + safe * ended
        took = (
            fails_blind / rate
            + sees * _mean_time(both, tau - blind)
            + in_save * _mean_time(unannounced, save)
        )
        found = kept / (took + struck * np.expm1(np.minimum(rate * restart, 700.0)) / rate)
    lost = _lost(tau, save, restart, rate, known, right, answered)
    return np.where(np.isnan(found), np.where(lost, np.nan, 0.0), np.clip(found, 0.0, 1.0))


def best_ahead(
    save_s: ArrayLike,
    restart_s: ArrayLike,
    mttf_s: ArrayLike,
    recall: ArrayLike,
    precision: ArrayLike,
) -> tuple[F64, F64]:
    """Return (interval_s, ettr) of the greatest ETTR with early saves, by golden section."""
    given = (save_s, restart_s, mttf_s, recall, precision)
    arrays = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in given))
    save, restart, mttf, known, right = arrays

    def worth(interval_s: F64) -> F64:
        return ettr_ahead(interval_s, save, restart, mttf, known, right)

    about, _ = best_interval(np.maximum(save, 1e-9), restart, mttf)
    about = np.clip(about, 1e-9, MOST_S / WIDE)
    found = maximise(worth, about / 10.0, about * WIDE)
    return found, worth(found)


def _mean_time(rate: F64, length_s: F64) -> F64:
    """Return the mean of the shorter of `length_s` and the time to an event of `rate`."""
    return np.where(
        rate * length_s > 0, -np.expm1(-rate * length_s) / np.where(rate > 0, rate, 1.0), length_s
    )


def _twice(x: F64) -> F64:
    """Return (1 - e^-x (1 + x)) / x^2, the work of a phase that an event ends, by its length and rate; 1/2
    at 0."""
    wide = np.where(x < 1e-6, 1.0, x)
    return np.where(x < 1e-6, 0.5, -(np.expm1(-wide) + wide * np.exp(-wide)) / wide**2)


def _lost(*given: F64) -> Bool:
    return np.asarray(np.any([np.isnan(x) for x in np.broadcast_arrays(*given)], axis=0))
