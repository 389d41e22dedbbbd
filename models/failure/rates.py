"""Failure rates of each node and of the fleet from a log of failures, available from the first minute.

Before anything failed, a rate from the literature; then the same as a Gamma prior that the fleet's own
failures outweigh, shared out to nodes by their own history (Gamma-Poisson), and, once fitted, by failures
that excite failures. Failures with a cause in common say nothing about a node: they are a rate of their own
that all share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from models.failure.fault_log import FaultLog
from models.failure.fleet_rate import LEAST_DAYS, fleet_forecast, interval, useful_ends
from models.failure.priors import FailurePrior, expected_failures
from models.failure.self_exciting import PARTS, PRIOR_DAYS, exposures_of, node_sums
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import FailureLog, is_failure
from twin.telemetry import nothing, watched_ns

DAY_NS = 86_400 * NS
# Failures per node and day of two clusters of A100 over 11 months: 6.50 and 2.34 per 1000 node-days. The
# prior is a Gamma with their mean and their spread. source: Kokolis et al., arXiv 2410.21680 (2024),
# section III
LITERATURE = (6.50e-3, 2.34e-3)
PRIOR_RATE = (LITERATURE[0] + LITERATURE[1]) / 2.0
PRIOR_SHAPE = (PRIOR_RATE / ((LITERATURE[0] - LITERATURE[1]) / 2.0)) ** 2
PRIOR_NODE_DAYS = PRIOR_SHAPE / PRIOR_RATE
OWN_DAYS = PRIOR_DAYS  # of the fleet's rate that a node's own history is drawn to
FITTED_FAULTS = 15.0  # failures at which fitted strengths count as much as the assumed. source: estimate
# The same where other fleets gave a prior: so many for each strength that is fitted. source: estimate
FITTED_FAULTS_PRIOR = FITTED_FAULTS * len(PARTS)
SHOCK_NS = 600 * NS  # failures in common so close to each other are one shock. source: estimate
MOST_DAYS = 120  # of the fleet's past that its outlook looks at. source: estimate
HOURLY_SPREAD = 1.5  # of the number in less than a day, as a multiple of Poisson's. source: estimate
LEAST_SHAPE = 0.05


class FailureHistory(NamedTuple):
    """A log of health as logs of failures, in days since the watch began.

    `own`: what is known of a node; `down` [n]: nodes that are not to be used now; `shock_d`, `shock_nodes`:
    when causes in common struck, and how many nodes; `all_d`: starts of all failures; node_days: watched so
    far.
    """

    own: FaultLog
    down: Bool
    shock_d: F64
    shock_nodes: F64
    all_d: F64
    now_d: float

    @property
    def node_days(self) -> float:
        return max(self.own.n * self.now_d - float(self.own.down_d(self.now_d).sum()), 0.0)


def failure_history(log: FailureLog, n: int, now_ns: int) -> FailureHistory:
    """History of n nodes as known at `now_ns`. Rows from before the watch began do not count.

    Days are those that somebody watched: what was not seen in the others is no sign of health.
    """
    log, now_ns = _by_watch(log, now_ns)
    began_ns = log.begin_ns or now_ns
    order = np.argsort(log.start_ns, kind="stable")
    order = order[(log.node[order] < n) & (log.node[order] >= 0) & (log.start_ns[order] <= now_ns)]
    node, start, end = log.node[order], log.start_ns[order], log.end_ns[order]
    down = np.zeros(n, np.bool_)
    down[node[end == 0]] = True
    counts = is_failure(log)[order] & (start >= began_ns)
    own = counts & ~log.shared[order]
    start_d = (start - began_ns) / DAY_NS
    end_d = np.where(end > 0, np.maximum((end - began_ns) / DAY_NS, start_d), np.inf)
    kind = log.kind[order][own].astype(np.int32)
    until_d = max((now_ns - began_ns) / DAY_NS, 0.0)
    classes = log.classes or ("other",)
    kept = FaultLog(n, node[own].astype(np.int32), start_d[own], end_d[own], kind, classes, 0.0, until_d)
    shock_d, struck = shock_times(start[counts & log.shared[order]])
    return FailureHistory(kept, down, (shock_d - began_ns) / DAY_NS, struck, start_d[counts], kept.until_d)


def _by_watch(log: FailureLog, now_ns: int) -> tuple[FailureLog, int]:
    """Return the log and the present by a clock that stops without observation."""
    gaps = log.unwatched_ns
    if not len(gaps):
        return log, now_ns
    end_ns = np.where(log.end_ns > 0, np.maximum(watched_ns(log.end_ns, gaps), 1), 0)
    begin_ns = int(watched_ns(log.begin_ns, gaps)) if log.begin_ns else 0
    moved = replace(
        log, start_ns=watched_ns(log.start_ns, gaps), end_ns=end_ns, begin_ns=begin_ns, unwatched_ns=nothing()
    )
    return moved, int(watched_ns(now_ns, gaps))


def own_failures(log: FailureLog) -> Bool:
    """Rows that count for a node itself [k]: failures by its own doing, since the watch began."""
    out: Bool = is_failure(log) & ~log.shared & (log.start_ns >= log.begin_ns)
    return out


def shock_times(start_ns: I64) -> tuple[I64, F64]:
    """(instants, nodes struck) of causes in common, from ascending starts of the failures that had one."""
    if not len(start_ns):
        return np.zeros(0, np.int64), np.zeros(0)
    first = np.flatnonzero(np.diff(start_ns, prepend=start_ns[0] - 2 * SHOCK_NS) > SHOCK_NS)
    return start_ns[first], np.diff(np.append(first, len(start_ns))).astype(np.float64)


def fleet_posterior(past: FailureHistory, prior: FailurePrior | None = None) -> tuple[float, float]:
    """(failures per node and day, shape of its Gamma posterior); without a prior the published one."""
    node_days = prior.node_days if prior else PRIOR_NODE_DAYS
    shape = (prior.rate_per_d * node_days if prior else PRIOR_SHAPE) + past.own.k
    return shape / (node_days + past.node_days), shape


def shock_rate(past: FailureHistory) -> float:
    """Failures with a cause in common per node and day; 0 while none was seen."""
    return float(past.shock_nodes.sum()) / max(past.node_days, PRIOR_NODE_DAYS)


class BaselineForecast(NamedTuple):
    """Of each node: expected failures [n_span, n], how surely: the shape of a Gamma around it [n]."""

    hazard: F64
    shape: F64


def baseline(
    past: FailureHistory,
    spans_d: tuple[float, ...],
    theta: F64 | None,
    faults: float,
    prior: FailurePrior | None = None,
) -> BaselineForecast:
    """Expected own failures of each node within each span, as long as there is none.

    Without `theta`, the strengths fitted on so many `faults`, a node's rate is Gamma-Poisson: the fleet's
    rate over OWN_DAYS, and its own failures over its days. Fitted strengths count the more, the more faults
    they saw. A `prior` of other fleets takes the place of what is assumed.
    """
    rate, shape = fleet_posterior(past, prior)
    assumed = np.zeros(len(PARTS))
    assumed[PARTS.index(f"prior_{OWN_DAYS:g}d")] = rate * OWN_DAYS
    assumed[PARTS.index(f"own_{OWN_DAYS:g}d")] = 1.0
    share = 0.0 if theta is None else faults / (faults + FITTED_FAULTS)
    strengths = assumed if theta is None else share * theta + (1.0 - share) * assumed
    (sums,) = node_sums(past.own, np.array([past.now_d]))
    watched_d = past.now_d - past.own.begin_d

    def summed(by: F64) -> F64:
        return np.stack([exposures_of(sums, watched_d, span_d) @ by for span_d in spans_d])

    if prior is None:
        hazard = summed(strengths)
    else:
        hazard = expected_failures(prior, past.own, past.now_d, spans_d, rate)
        if theta is not None:
            share = faults / (faults + FITTED_FAULTS_PRIOR)
            hazard = share * summed(theta) + (1.0 - share) * hazard
    own = past.own.per_node(np.ones(past.own.k))
    first = rate * _own_days(rate, prior)
    return BaselineForecast(hazard, 1.0 / (1.0 / np.maximum(first + own, LEAST_SHAPE) + 1.0 / shape))


def _own_days(rate: float, prior: FailurePrior | None) -> float:
    """Days of the fleet's rate that a node's own history is drawn to."""
    return prior.shape / rate if prior else OWN_DAYS


def unknown_node(
    past: FailureHistory, spans_d: tuple[float, ...], prior: FailurePrior | None = None
) -> tuple[F64, float]:
    """(expected failures [n_span], shape) of a node of which nothing is known: the fleet's rate, wide."""
    rate, shape = fleet_posterior(past, prior)
    own_days = _own_days(rate, prior)
    own = max(rate * own_days, LEAST_SHAPE)
    return rate * own_days * np.log1p(np.array(spans_d) / own_days), 1.0 / (1.0 / own + 1.0 / shape)


def probability(hazard: F64) -> F64:
    """Of one or more failures where so many are expected."""
    out: F64 = -np.expm1(-np.maximum(hazard, 0.0))
    return out


def daily_counts(past: FailureHistory) -> F64:
    """Failures of the whole fleet on each whole day of the watch, the last MOST_DAYS [n_day]."""
    days = int(past.now_d)
    count = np.bincount(past.all_d[past.all_d < days].astype(np.int64), minlength=days)[:days]
    return count[-MOST_DAYS:].astype(np.float64) if days else np.zeros(0)


def fleet_count(
    past: FailureHistory, days: F64, span_d: float, prior: FailurePrior | None = None
) -> tuple[float, float, float]:
    """(mean, low, high) of the fleet's number of failures within a span, by `daily_counts` counts so far.

    In the first week by the prior and what was counted, later by how well past counts would have predicted.
    The ends are NaN where they would say next to nothing.
    """
    if len(days) < LEAST_DAYS:
        rate, shape = fleet_posterior(past, prior)
        n_up = past.own.n - int(past.down.sum())
        mean = (rate + shock_rate(past)) * n_up * span_d
        return mean, *interval(mean, mean + mean * mean / shape)
    if span_d >= 1.0:
        mean, low, high = (float(x) for x in fleet_forecast(days, round(span_d)))
        return mean, *useful_ends(mean, low, high)
    mean = fleet_forecast(days, 1).mean * span_d
    return mean, *interval(mean, HOURLY_SPREAD * mean)
