"""Who is a lemon, from counts: how much more often each node has incidents than the fleet, and how sure.

Empirical Bayes: the fleet's own distribution of rates is found from all counts, then each node's from it and
its own. May import frames only.
"""

from __future__ import annotations

from math import lgamma, log
from typing import NamedTuple

import numpy as np

from twin.frame import F64, I64, Bool

# Rates of nodes over the fleet's mean that are told apart, and from which one is a lemon's. source: estimate;
# the lemons of arXiv 2410.21680 fail several times as often as the rest
MULTIPLES = np.array([0.25, 0.5, 1.0, 1.7, 3.0, 5.0, 8.0, 13.0, 20.0])
LEMON_FROM = 3.0
# What is taken for granted of a fleet before it is seen, worth so many nodes: hardly any lemons. source: 1.2
# % of nodes were, arXiv 2410.21680; the weight is an estimate
PRIOR_NODES, LEMONS_PU = 100.0, 0.012
TURNS = 60  # of the search for the fleet's distribution
FALSE_PU = 0.1  # of those called lemons may be none, on average
# After an incident another one follows so often that has the same cause, as the repair cured nothing: what
# is taken for granted, worth so many incidents, and what is tried. source: 0.42 within 30 days against 0.12
# of all in a public trace of GPU servers is 0.34, lemons included; estimate
AGAIN_PU, AGAIN_COUNT = 0.25, 20.0
AGAINS = (0.02, 0.1, 0.18, 0.26, 0.34, 0.42)
MOST = 40  # more incidents say no more
LEAST_HARD = 2  # incidents of the hardware in 28 days
# Share of failed jobs of a single node that are its own doing in a usual fleet; source: estimate
OWN_PU = 0.1


class Counts(NamedTuple):
    """What was counted per node [n]: incidents, days in service, jobs of the node alone, how many failed."""

    incidents: I64
    hard: I64  # incidents that speak of the hardware
    days: F64
    jobs: I64
    jobs_failed: I64


class Score(NamedTuple):
    """The judgement per node [n]."""

    lemon: Bool
    innocent_pu: F64  # probability that its rate is not a lemon's
    rate_pu: F64  # rate over the fleet's mean, as best known
    per_day: float  # incidents of the fleet per node-day
    job_failed_pu: float  # of the fleet


def score(counts: Counts) -> Score:
    """Judge all nodes.

    Incidents follow a Poisson law with the node's multiple of the fleet's rate; failed jobs likewise, where
    only `OWN_PU` of the fleet's grow with that multiple. Of the nodes that are called, `FALSE_PU` may be
    innocent on average, the form of Benjamini and Hochberg's rule for posterior probabilities (source: Efron,
    Large-Scale Inference, 2010, chapter 5).
    """
    n = len(counts.days)
    days, jobs = float(counts.days.sum()), float(counts.jobs.sum())
    if n == 0 or days <= 0.0 or not counts.incidents.any():
        return Score(np.zeros(n, np.bool_), np.ones(n), np.ones(n), 0.0, np.nan)
    per_day = float(counts.incidents.sum()) / max(days, 1.0 / 24.0)  # a rate within an hour is none
    failed_pu = float(counts.jobs_failed.sum()) / jobs if jobs else 0.0
    # Nodes with about the same counts are judged as one
    key = np.stack([counts.incidents, np.round(counts.days).astype(np.int64), _step(counts.jobs),
                    _step(counts.jobs_failed)])  # fmt: skip
    _, first, inverse, many = np.unique(key, axis=1, return_index=True, return_inverse=True,
                                        return_counts=True)  # fmt: skip
    alike = Counts(counts.incidents[first], counts.hard[first], counts.days[first], counts.jobs[first],
                   counts.jobs_failed[first])  # fmt: skip
    best, posterior = -np.inf, np.zeros((len(first), len(MULTIPLES)))
    for again in AGAINS:
        like = _log_likelihood(alike, per_day, failed_pu, again)
        worth, found = _fleet(like, many)
        worth += AGAIN_COUNT * (AGAIN_PU * log(again) + (1.0 - AGAIN_PU) * log(1.0 - again))
        if worth > best:
            best, posterior = worth, found
    posterior = posterior[inverse.reshape(-1)]
    innocent = posterior[:, MULTIPLES < LEMON_FROM].sum(axis=1)
    return Score(_chosen(innocent, counts.hard), innocent, posterior @ MULTIPLES, per_day,
                 failed_pu if jobs else np.nan)  # fmt: skip


def _step(count: I64) -> I64:
    """Counts in steps of about a sixth."""
    return np.round(6.0 * np.log1p(count / 6.0)).astype(np.int64)


def _fleet(log_pu: F64, many: I64) -> tuple[float, F64]:
    """(log likelihood of all, probability of each multiple [n, n_multiple]) under the fleet's distribution.

    Found by expectation and maximisation.
    """
    # Counts that no rate explains, as they overflow, tell nothing
    log_pu = np.where(np.isfinite(log_pu).any(axis=1, keepdims=True), log_pu, 0.0)
    top = log_pu.max(axis=1, keepdims=True)
    like = np.exp(log_pu - top)
    lemons = MULTIPLES >= LEMON_FROM
    prior = np.where(lemons, LEMONS_PU / lemons.sum(), (1.0 - LEMONS_PU) / (~lemons).sum())
    weight = prior
    for _ in range(TURNS):
        weight = (many / (like @ weight)) @ like * weight + PRIOR_NODES * prior
        weight = weight / weight.sum()
    total = like @ weight
    return float(many @ (np.log(total) + top[:, 0])), like * weight / total[:, None]


def _log_likelihood(counts: Counts, per_day: float, failed_pu: float, again: float) -> F64:
    """Of each node's counts under each multiple [n, n_multiple], up to a constant per node."""
    # One that was hardly ever in service is judged as if it had been for an hour
    mean = per_day * (1.0 - again) * np.maximum(counts.days, 1.0 / 24.0)
    seen = np.minimum(counts.incidents, MOST)
    value, place = np.unique(seen, return_inverse=True)
    out = np.zeros((len(mean), len(MULTIPLES)))
    log_mean = np.log(np.outer(mean, MULTIPLES))
    for k, count in enumerate(value.tolist()):
        mine = place.reshape(-1) == k
        out[mine] = log_clustered(count, log_mean[mine], again)
    out -= np.outer(mean, MULTIPLES)
    grown = 1.0 - OWN_PU + OWN_PU * MULTIPLES
    out += np.outer(counts.jobs_failed, np.log(grown)) - np.outer(failed_pu * counts.jobs, grown)
    return out


def log_clustered(count: int, log_mean: F64, again: float) -> F64:
    """Logarithm of the sum over the number of first ones, without the factor e^-mean.

    Incidents come in trains: a first one by Poisson's law, after each with the probability `again` a next
    one (the law of Polya and Aeppli): sum over j of C(count - 1, j - 1) mean^j / j! p^(count - j) (1 - p)^j.
    """
    if count == 0:
        return np.zeros_like(log_mean)
    terms = [
        lgamma(count) - lgamma(j) - lgamma(count - j + 1) - lgamma(j + 1)
        + (count - j) * log(again) + j * (log(1.0 - again) + log_mean)
        for j in range(1, count + 1)
    ]  # fmt: skip
    return np.asarray(np.logaddexp.reduce(np.stack(terms)), np.float64)


def _chosen(innocent: F64, hard: I64) -> Bool:
    """The largest set that is innocent by no more than `FALSE_PU` on average."""
    out: Bool = np.zeros(len(innocent), np.bool_)
    able = np.flatnonzero(hard >= LEAST_HARD)
    order = able[np.argsort(innocent[able], kind="stable")]
    mean = np.cumsum(innocent[order]) / np.arange(1, len(order) + 1)
    out[order[: int(np.count_nonzero(mean <= FALSE_PU))]] = True
    return out
