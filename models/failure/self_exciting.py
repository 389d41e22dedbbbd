"""Self-exciting rate: each fault of a node raises its rate, partly for good and partly for a while.

A node's rate is a sum of known curves of time, each times a strength >= 0: the fleet's mean; the
Gamma-Poisson rate (prior + own faults) / (prior days + days up), which shrinks a node's own count to the
mean; one exponential that decays from each fault's start; and one of a day from each return from repair.
Strengths, and which half-life the exponential has, are fitted to the past by maximum likelihood. As a node's
rate changes with its own faults alone, the probability of a first fault is in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from models.failure.fault_log import FaultLog
from twin.catalogue import F64, Bool, ContractError

PRIOR_DAYS = 240.0  # of the fleet's rate that a node's own count is drawn to. source: estimate
# Of which a fit takes one. source: LANL's systems of even number
START_HALF_LIVES_D = (8.0, 16.0, 30.0, 60.0)
FIRST_CHOICE = START_HALF_LIVES_D.index(16.0)
# Logarithm of likelihood by which another half-life must be likelier. source: LANL's systems of even number
LEAST_GAIN = 2.0
RETURN_HALF_LIFE_D = 1.0  # source: LANL's systems of even number; what is not mended fails at once
PARTS = (
    "mean",
    f"prior_{PRIOR_DAYS:g}d",
    f"own_{PRIOR_DAYS:g}d",
    f"return_{RETURN_HALF_LIFE_D:g}d",
    *(f"start_{d:g}d" for d in START_HALF_LIVES_D),
)
COMMON = 4  # parts before the exponentials of which a fit takes one
STEP_D = 1.0  # days ahead that strengths are fitted on: the finer, the more outcomes. source: estimate
WARM_D = 3.0  # days after the log's begin that no fit looks at. source: estimate
MEMORY_D = 365.0  # half-life of what a fit believes. source: LANL's systems of even number
ROUNDS = 120
PRIOR_FAULTS = 5.0  # of the mean, and of nothing else: few faults excite nothing. source: estimate
MOST_FAULTS = 20_000  # of a log whose every day is learned from. source: estimate; bounds the time of a fit
WEEK = 7


def node_sums(known: FaultLog, days: F64) -> Iterator[F64]:
    """Of each of these days, ascending: each node's days away, its faults, and their decayed numbers.

    [2 + n_half_life, n]: decayed from returns first, then from starts. Only ends up to that day count.
    """
    n, half_life_d = known.n, np.array([RETURN_HALF_LIFE_D, *START_HALF_LIVES_D])
    back = np.flatnonzero(known.returned)
    back = back[np.argsort(known.end_d[back], kind="stable")]
    first, last = (
        np.searchsorted(known.start_d, days, "right"),
        np.searchsorted(known.end_d[back], days, "right"),
    )
    count, still, began_d, away_d = (np.zeros(n) for _ in range(4))
    decayed = np.zeros((len(half_life_d), n))
    a = b = 0
    before = known.begin_d
    for day, a_next, b_next in zip(days.tolist(), first.tolist(), last.tolist(), strict=True):
        started, ended = slice(a, a_next), back[b:b_next]
        node, at = known.node[started], known.start_d[started]
        left, fixed = known.node[ended], known.end_d[ended]
        decayed *= (0.5 ** ((day - before) / half_life_d))[:, None]
        decayed[0] += np.bincount(left, 0.5 ** ((day - fixed) / RETURN_HALF_LIFE_D), n)
        for i, half in enumerate(START_HALF_LIVES_D, 1):
            decayed[i] += np.bincount(node, 0.5 ** ((day - at) / half), n)
        come, gone = np.bincount(node, minlength=n), np.bincount(left, minlength=n)
        count += come
        still += come - gone
        began_d += np.bincount(node, at, n) - np.bincount(left, known.start_d[ended], n)
        away_d += np.bincount(left, fixed - known.start_d[ended], n)
        a, b, before = a_next, b_next, day
        yield np.stack([away_d + still * day - began_d, count, *decayed])


def exposures_of(sums: F64, watched_d: float, span_d: float) -> F64:
    """Integral of each part over (day, day + span] as long as no further fault comes [n, n_part].

    `sums`: those of `node_sums` on that day, after so many days of watch.
    """
    up_d = np.maximum(watched_d - sums[0], 0.0)
    longer = np.log1p(span_d / (PRIOR_DAYS + up_d))
    half_life_d = np.array([RETURN_HALF_LIFE_D, *START_HALF_LIVES_D])
    left_d = half_life_d / np.log(2.0) * (1.0 - 0.5 ** (span_d / half_life_d))
    whole = np.full(len(longer), span_d)
    return np.concatenate([[whole, longer, sums[1] * longer], left_d[:, None] * sums[2:]]).T


def strengths(
    total: F64, hit: F64, weight: F64, rounds: int = ROUNDS, prior_faults: float = PRIOR_FAULTS
) -> F64:
    """Maximum likelihood of strengths >= 0 [n_part], drawn to a constant rate by so many faults.

    total [n_part]: weighted exposures summed over all cases; hit [n_hit, n_part], weight [n_hit]: of those
    with one fault or more. Of a case it is only known whether there was any. The steps of expectation and
    maximisation never lower the likelihood and keep strengths >= 0.
    source: Dempster, Laird and Rubin, J. R. Stat. Soc. B 39 (1977)
    """
    n_part = len(total)
    prior = np.zeros(n_part)
    prior[0] = prior_faults
    faults = float(weight.sum())
    share = faults / n_part
    theta = np.where(total > 0, (share + prior / n_part) / np.where(total > 0, total, 1.0), 0.0)
    # The prior's faults come with as much exposure as they need at the mean rate.
    whole = total.copy()
    whole[0] += prior_faults * total[0] / max(faults, 1.0)
    for _ in range(rounds):
        mean = hit @ theta
        part = hit.T @ (weight / -np.expm1(-np.maximum(mean, 1e-12)))
        theta = np.where(whole > 0, (theta * part + prior) / np.where(whole > 0, whole, 1.0), 0.0)
    return theta


def log_likelihood(theta: F64, total: F64, hit: F64, weight: F64) -> float:
    """Of cases with a fault and cases without; arguments as of `strengths`."""
    mean = np.maximum(hit @ theta, 1e-12)
    return float((weight * (np.log(-np.expm1(-mean)) + mean)).sum() - total @ theta)


def likeliest(total: F64, hit: F64, weight: F64, prior_faults: float = PRIOR_FAULTS) -> F64:
    """Strengths with one exponential from the start: that of FIRST_CHOICE, or a likelier one [n_part]."""
    out, most = np.zeros(len(PARTS)), -np.inf
    for i in range(len(START_HALF_LIVES_D)):
        parts = [*range(COMMON), COMMON + i]
        theta = strengths(total[parts], hit[:, parts], weight, prior_faults=prior_faults)
        gain = log_likelihood(theta, total[parts], hit[:, parts], weight) + LEAST_GAIN * (i == FIRST_CHOICE)
        if gain > most:
            out, most = np.zeros(len(PARTS)), gain
            out[parts] = theta
    return out


class SelfExciting:
    """Fit on a log, then the probability of a fault within a span. Says a constant rate before `load`."""

    name = "self_exciting"

    def __init__(self) -> None:
        self.theta = np.zeros(len(PARTS))

    def fit(
        self, known: FaultLog, day: float, seed: int = 0, prior_faults: float = PRIOR_FAULTS
    ) -> dict[str, np.ndarray]:
        """Strengths from daily origins whose next day is over. {"theta": [n_part]}"""
        days = np.arange(np.ceil(known.begin_d + WARM_D), day - STEP_D + 1e-9)
        days = days[:: -_stride(known.k)][::-1]
        total, hits, weights = np.zeros(len(PARTS)), [np.zeros((0, len(PARTS)))], [np.zeros(0)]
        up, later = known.up(days), known.next_start(days)
        for i, sums in enumerate(node_sums(known, days)):
            x = exposures_of(sums, days[i] - known.begin_d, STEP_D)
            weight = 0.5 ** ((day - days[i]) / MEMORY_D)
            total += weight * (up[i] @ x)
            failed: Bool = up[i] & (later[i] <= days[i] + STEP_D)
            hits.append(x[failed])
            weights.append(np.full(int(failed.sum()), weight))
        return {"theta": likeliest(total, np.concatenate(hits), np.concatenate(weights), prior_faults)}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        theta = parameters["theta"]
        if theta.shape != (len(PARTS),) or not np.isfinite(theta).all() or (theta < 0).any():
            raise ContractError(f"theta: expected {len(PARTS)} strengths >= 0")
        self.theta = theta

    def predict(self, known: FaultLog, day: float, spans_d: tuple[float, ...]) -> F64:
        """Probability of a fault in (day, day + span] of nodes that are up [n_span, n]."""
        (sums,) = node_sums(known, np.array([day]))
        watched_d = day - known.begin_d
        return np.stack(
            [-np.expm1(-(exposures_of(sums, watched_d, span_d) @ self.theta)) for span_d in spans_d]
        )


def _stride(faults: int) -> int:
    """Days between origins that are learned from; never whole weeks, so that every weekday teaches."""
    stride = max(1, -(-faults // MOST_FAULTS))
    return stride + (stride % WEEK == 0)
