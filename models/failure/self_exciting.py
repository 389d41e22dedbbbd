"""Faults that excite faults: each node has a base rate, and its own faults raise it for a while.

A node's rate is a sum of parts, each a known curve of time times a strength >= 0: the fleet's mean; the
Gamma-Poisson rate (prior + own faults) / (prior days + days up), which shrinks a node's own count to the
mean; exponentials that decay from each fault's start and from each return from repair; and the fleet's
recent rate, which carries common causes and drift. Strengths are fitted to the past by maximum
likelihood. As a node's rate changes with its own faults alone, the probability of a first fault is in
closed form. The fleet's recent rate is held where it is, which is an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.failure.fault_log import FaultLog
from twin.catalogue import F64, ContractError

# source: estimate; from a day to a quarter, each about four times the one before
START_HALF_LIVES_D = (2.0, 8.0, 30.0, 120.0)
RETURN_HALF_LIVES_D = (1.0, 4.0, 16.0)
PRIOR_DAYS = (60.0, 240.0)  # of the Gamma priors that a fit chooses from. source: estimate
FLEET_HALF_LIVES_D = (10.0, 40.0)  # source: estimate
PARTS = (
    "mean",
    *(f"{what}_{d:g}d" for d in PRIOR_DAYS for what in ("prior", "own")),
    *(f"start_{d:g}d" for d in START_HALF_LIVES_D),
    *(f"return_{d:g}d" for d in RETURN_HALF_LIVES_D),
    *(f"fleet_{d:g}d" for d in FLEET_HALF_LIVES_D),
)
STEP_D = 1.0  # days ahead that strengths are fitted on: the finer, the more outcomes. source: estimate
WARM_D = 3.0  # days after the log's begin that no fit looks at. source: estimate
MEMORY_D = 180.0  # half-life of what a fit believes. source: estimate
ROUNDS = 300
PRIOR_FAULTS = 5.0  # of the mean, and of nothing else: few faults excite nothing. source: estimate


def exposures(known: FaultLog, day: float, span_d: float) -> F64:
    """The integral of each part over (day, day + span] as long as no further fault comes [n, n_part].

    `known` must be a log as known on `day`.
    """
    watched_d = max(day - known.begin_d, 0.0)
    up_d = np.maximum(watched_d - known.down_d(day), 0.0)
    own = known.per_node(np.ones(known.k))
    out = [np.full(known.n, span_d)]
    for prior_d in PRIOR_DAYS:
        longer = np.log1p(span_d / (prior_d + up_d))
        out += [longer, own * longer]
    for half_life_d in START_HALF_LIVES_D:
        out.append(known.per_node(_left(day - known.start_d, half_life_d, span_d)))
    back = known.returned
    age_d = day - np.where(back, known.end_d, day)
    for half_life_d in RETURN_HALF_LIVES_D:
        out.append(known.per_node(np.where(back, _left(age_d, half_life_d, span_d), 0.0)))
    for half_life_d in FLEET_HALF_LIVES_D:
        out.append(np.full(known.n, span_d * fleet_rate(known, day, half_life_d)))
    return np.stack(out, axis=1)


def _left(age_d: F64, half_life_d: float, span_d: float) -> F64:
    """The integral over the next `span_d` days of exponentials that began at 1, `age_d` days ago."""
    left: F64 = (
        0.5 ** (age_d / half_life_d) * (half_life_d / np.log(2.0)) * (1.0 - 0.5 ** (span_d / half_life_d))
    )
    return left


def fleet_rate(known: FaultLog, day: float, half_life_d: float) -> float:
    """Recent faults per node and day: decayed count over decayed days of all nodes."""
    days = half_life_d / np.log(2.0) * (1.0 - 0.5 ** ((day - known.begin_d) / half_life_d))
    faults = float((0.5 ** ((day - known.start_d) / half_life_d)).sum())
    return faults / (known.n * days) if days > 0 else 0.0


def strengths(total: F64, hit: F64, weight: F64, rounds: int = ROUNDS) -> F64:
    """Maximum likelihood of strengths >= 0 [n_part], drawn to a constant rate by PRIOR_FAULTS.

    total [n_part]: weighted exposures summed over all cases; hit [n_hit, n_part], weight [n_hit]: of those
    with one fault or more. Of a case it is only known whether there was any. The steps of expectation and
    maximisation never lower the likelihood and keep strengths >= 0.
    source: Dempster, Laird and Rubin, J. R. Stat. Soc. B 39 (1977)
    """
    n_part = len(total)
    prior = np.zeros(n_part)
    prior[0] = PRIOR_FAULTS
    faults = float(weight.sum())
    share = faults / n_part
    theta = np.where(total > 0, (share + prior / n_part) / np.where(total > 0, total, 1.0), 0.0)
    # The prior's faults come with as much exposure as they need at the mean rate.
    whole = total.copy()
    whole[0] += PRIOR_FAULTS * total[0] / max(faults, 1.0)
    for _ in range(rounds):
        mean = hit @ theta
        part = hit.T @ (weight / -np.expm1(-np.maximum(mean, 1e-12)))
        theta = np.where(whole > 0, (theta * part + prior) / np.where(whole > 0, whole, 1.0), 0.0)
    return theta


class SelfExciting:
    """Fit on a log, then the probability of a fault within a span. Says a constant rate before `load`."""

    name = "self_exciting"

    def __init__(self) -> None:
        self.theta = np.zeros(len(PARTS))

    def fit(self, known: FaultLog, day: float, seed: int = 0) -> dict[str, np.ndarray]:
        """Strengths from daily origins whose next day is over. {"theta": [n_part]}"""
        days = np.arange(np.ceil(known.begin_d + WARM_D), day - STEP_D + 1e-9)
        total, hits = np.zeros(len(PARTS)), []
        if len(days):
            up, later = known.up(days), known.next_start(days)
            for i, at in enumerate(days):
                x = exposures(known.known_at(at), at, STEP_D)
                weight = 0.5 ** ((day - at) / MEMORY_D)
                total += weight * x[up[i]].sum(axis=0)
                failed = up[i] & (later[i] <= at + STEP_D)
                hits.append((x[failed], np.full(int(failed.sum()), weight)))
        hit = np.concatenate([x for x, _ in hits]) if hits else np.zeros((0, len(PARTS)))
        weight = np.concatenate([w for _, w in hits]) if hits else np.zeros(0)
        return {"theta": strengths(total, hit, weight)}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        theta = parameters["theta"]
        if theta.shape != (len(PARTS),) or not np.isfinite(theta).all() or (theta < 0).any():
            raise ContractError(f"theta: expected {len(PARTS)} strengths >= 0")
        self.theta = theta

    def predict(self, known: FaultLog, day: float, spans_d: tuple[float, ...]) -> F64:
        """Probability of a fault in (day, day + span] of nodes that are up [n_span, n]."""
        return np.stack([-np.expm1(-(exposures(known, day, span_d) @ self.theta)) for span_d in spans_d])
