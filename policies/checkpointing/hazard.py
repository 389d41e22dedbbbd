"""Interruption rates of jobs, from the forecasts and verdicts of the nodes that each job holds.

A node's chance of failing within a horizon becomes a rate; the rates of a job's nodes add up, since one lost
node stops a job. What is not sure of a node's rate has a part that all nodes share (the fleet's rate), which
does not average out, and one of its own, which does. Forecasts learn a fleet's rate over months; where nodes
everywhere fail more often or less often of late, all rates rise or fall by that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import DEGRADED, FAILED, Z90, Forecast, View, action, is_failure
from twin.telemetry import ago_d

NODE = "node.failure_pu"
DAY_S, HOUR_S = 86_400.0, 3600.0
MOST_PU = 0.999  # a chance of one has no rate
KNOWN_PU = 0.5  # of a job's nodes must have a forecast. source: estimate
# Chance within an hour that a node with such a verdict takes its job down. No published figure; a forecast
# that knows better has a hazard of its own. source: estimate
FAILED_PU, DEGRADED_PU = 0.5, 0.2
VERDICT_S = 6 * HOUR_S  # a node that lived so long with its verdict fails by the forecast. source: estimate
DRAIN = action("reset_gpu")  # this and all that is more wants the node drained
# A failure counts half as much for what is so of late after these days; so many failures as were expected
# stand beside those that were counted. source: estimate, chosen on simulated fleets
HALF_LIFE_D, PRIOR_FAILURES = 1.0, 5.0
# Nobody may have watched for some days, and a cause in common may not be known as one yet. source: estimate
LEAST_FACTOR, MOST_FACTOR = 1.0 / 3.0, 10.0
# One node counts as expected no more than so many times the middle one's rate: what its own signs foretell
# is no reason to think better of the others. source: estimate
MOST_OF_ONE = 20.0


class JobNodes(NamedTuple):
    """The nodes of m jobs, one after the other: `node` [k] belongs to the job in place `job` [k] of m."""

    node: I32
    job: I64
    size: I64  # nodes of each job [m]


class InterruptionRates(NamedTuple):
    """Of m jobs, per second: `per_s` for the days to come with the Gamma `shape` of its belief, `soon_per_s`
    for the next hour, `verdict_per_s` the part of it that verdicts alone make. NaN = unknown."""

    per_s: F64
    shape: F64
    soon_per_s: F64
    verdict_per_s: F64


def job_nodes(view: View, slots: I32) -> JobNodes:
    nodes = [view.jobs.nodes[slot] for slot in slots.tolist()]
    count = np.array([len(some) for some in nodes], np.int64)
    job = np.repeat(np.arange(len(slots)), count)
    return JobNodes(np.concatenate([np.zeros(0, np.int32), *nodes]).astype(np.int32), job, count)


def interruption_rates(view: View, held: JobNodes) -> InterruptionRates:
    """Return the rates at which their nodes interrupt these jobs; NaN if too little is known."""
    m = len(held.size)
    day = nearest_forecast(view, DAY_S)
    if day is None:
        nothing = np.full(m, np.nan)
        return InterruptionRates(nothing, nothing, nothing, nothing)
    mean = rate_per_s(day.mean, day.horizon_s)
    spread = spread_of(mean, rate_per_s(day.hi, day.horizon_s))
    known = np.isfinite(mean)
    common = float(spread[known].min(initial=np.inf))
    common = common if np.isfinite(common) else 0.0
    of, there = held.node, known[held.node]
    share = _sum_by_job(held, there) / np.maximum(held.size, 1)
    scale = np.where(share >= KNOWN_PU, 1.0 / np.maximum(share, KNOWN_PU), np.nan)
    rate = np.where(there, mean[of], 0.0)
    own = np.where(there, np.maximum(spread[of] - common, 0.0), 0.0)
    total = _sum_by_job(held, rate)
    with np.errstate(invalid="ignore", divide="ignore"):
        variation = common + _sum_by_job(held, rate * rate * own) / (total * total)
        shape = np.where(total > 0.0, 1.0 / variation, np.inf)
    hour = nearest_forecast(view, HOUR_S)
    soon = mean if hour is None else rate_per_s(hour.mean, hour.horizon_s)
    times = _fleet_factor(view, mean[known])
    # A factor that all nodes share moves with the fleet; the part of a node's own signs does not.
    soon = soon + (times - 1.0) * np.fmin(soon, mean)
    verdict = verdicts_per_s(view)[of]
    worst = np.fmax(np.where(np.isfinite(soon[of]), soon[of], 0.0), verdict)
    return InterruptionRates(
        total * scale * times, shape, _sum_by_job(held, worst) * scale, _sum_by_job(held, verdict)
    )


def _fleet_factor(view: View, per_s: F64) -> float:
    """Return `of_late` for rates [n] that include failures with a common cause, which do not scale with
    it."""
    log = view.failures()
    if not log.begin_ns:
        return 1.0
    watched_d = (view.now_ns - log.begin_ns) / NS / DAY_S
    age_d = (view.now_ns - log.start_ns) / NS / DAY_S
    counts = is_failure(log) & (age_d >= 0.0) & (log.start_ns >= log.begin_ns)
    own = counts & ~log.shared
    k = PRIOR_FAILURES + float(np.count_nonzero(own))
    share = k / (k + float(np.count_nonzero(counts & log.shared)))
    gaps_d = ago_d(log.unwatched_ns, view.now_ns)
    return 1.0 + share * (recent_factor(age_d[own], share * DAY_S * per_s, watched_d, gaps_d) - 1.0)


def recent_factor(age_d: F64, per_d: F64, watched_d: float, gaps_d: F64 | None = None) -> float:
    """Return the ratio of recent failures to the expected ones; 1 without data.

    age_d [k]: days since each failure of a node's own; per_d [n]: failures a day expected of each node;
    watched_d: for how many days failures were counted, but for gaps that began and ended so many days ago
    [g, 2]. Each counts 2^(-age / HALF_D), and so does, by its integral, what was expected.
    """
    if not len(per_d):
        return 1.0
    seen = float(np.exp2(-age_d / HALF_LIFE_D).sum())
    fleet_d = float(np.minimum(per_d, MOST_OF_ONE * np.median(per_d)).sum())
    half_d = HALF_LIFE_D / np.log(2.0)
    days = -half_d * np.expm1(-max(watched_d, 0.0) / half_d)
    if gaps_d is not None:
        since = np.clip(gaps_d, 0.0, max(watched_d, 0.0))
        days -= half_d * float((np.exp(-since[:, 1] / half_d) - np.exp(-since[:, 0] / half_d)).sum())
    expected = fleet_d * max(days, 0.0)
    return float(np.clip((PRIOR_FAILURES + seen) / (PRIOR_FAILURES + expected), LEAST_FACTOR, MOST_FACTOR))


def rate_per_s(chance_pu: np.ndarray, horizon_s: float) -> F64:
    """Return the constant rate [1/s] for this failure probability within the horizon: -ln(1 - p) / h."""
    clipped = np.clip(np.asarray(chance_pu, np.float64), 0.0, MOST_PU)
    out: F64 = -np.log1p(-clipped) / horizon_s
    return out


def spread_of(mean: F64, high: F64) -> F64:
    """Return 1 / shape of the Gamma whose 95 % quantile is `high` times its mean; 0 if it is not above it.

    The inverse of the quantile of Wilson and Hilferty (PNAS 17, 1931): with x = 1 / (3 sqrt(shape)),
    cbrt(high / mean) = 1 - x^2 + 1.645 x. Beyond what that can reach, the greatest that it can.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        root = np.cbrt(np.where(mean > 0.0, np.nan_to_num(high / mean, nan=np.inf), 1.0))
    x = 0.5 * (Z90 - np.sqrt(np.maximum(Z90 * Z90 - 4.0 * np.maximum(root - 1.0, 0.0), 0.0)))
    out: F64 = 9.0 * x * x
    return out


def verdicts_per_s(view: View) -> F64:
    """Return rates [n_node] from fresh verdicts on a node and its GPUs; 0 without one."""
    chance = np.zeros(view.site.sizes["node"])
    for part, owner in (("node", None), ("gpu", view.site.node_of_gpu)):
        health = view.health(part)
        fresh = view.now_ns - health.since_ns <= round(VERDICT_S * NS)
        bad: Bool = (health.level == DEGRADED) & (health.action >= DRAIN) | (health.level == FAILED)
        at = np.flatnonzero(bad & fresh)
        pu = np.where(health.level[at] == FAILED, FAILED_PU, DEGRADED_PU) * health.sure_pu[at]
        np.maximum.at(chance, at if owner is None else owner[at], pu)
    return rate_per_s(chance, HOUR_S)


def nearest_forecast(view: View, horizon_s: float) -> Forecast | None:
    """Return the forecast of nodes at the horizon nearest to this one, by ratio."""
    found = [view.forecasts[key] for key in view.forecasts if key[0] == NODE]
    return min(found, key=lambda f: abs(np.log(f.horizon_s / horizon_s)), default=None)


def _sum_by_job(held: JobNodes, values: np.ndarray) -> F64:
    return np.bincount(held.job, weights=values, minlength=len(held.size)).astype(np.float64)
