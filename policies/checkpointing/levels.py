"""Two checkpoint tiers: a quick one in memory that survives a process, a durable one that survives nodes.

The scheme: after every `local_s` of training the state is saved to memory; every k-th time it is then saved
durably as well. A soft failure (a process) recovers from the last save in memory, a hard one (a node) from
the last durable save whose flush has ended, which fills the memory tier again. Failures of both kinds come at
constant rates, in training, saves, flushes and restarts alike. A restart that is struck begins again as the
kind that is due: a soft failure in the restart after a hard one leaves it that. A flush outlives a soft
failure, since what holds the memory tier carries it on, and a hard one undoes it. Times are in
seconds.

The hard failures are renewals: between two of them only soft failures strike. What a stretch keeps is k
local_s for each durable save that is done before its end, so

    ETTR = k local_s h  sum over j of E[e^(-h D_j)],   D_j = restart + j cycles + flush

with h the hard rate: each term is a Laplace transform, and those of a task that soft failures (rate s) make
begin again are known in closed form. With L = h + s and E(t) = e^(L t) - 1:

    restart of r:       rho(r) = 1 / (1 + (h/L) E(r))
    task of length t:   psi(t) = 1 / (1 + eps E(t)),   eps = 1 - (s/L) rho(local restart)
    ETTR = k local_s h rho(R) e^(-h F) / (psi(local_s + c)^-k psi(C)^-1 - 1)

With s = 0, c = 0 and k = 1 it is the ETTR of `single_tier`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from policies.checkpointing.single_tier import LEAST_S, MOST_S, OFTEN_PER_S, SELDOM_PER_S, best_fraction
from twin.catalogue import F64, Bool

NEWTON, NEWTON_BELIEF = 5, 2  # steps; each problem here is smooth and begun close to its answer
FREE_S = 1e-6  # what a save that costs nothing is planned with
LEAST_LOCAL_S = 1e-3  # no segment is shorter
MOST_LOCAL = 1e9  # saves to memory for one durable save: a bound where nothing needs the durable ones


@dataclass(frozen=True, slots=True)
class TierTerms:
    """Costs of the two tiers and failure rates, arrays of one shape: seconds, failures per second."""

    block_s: F64  # of a durable save, beside the save to memory before it
    flush_s: F64
    restart_s: F64
    local_block_s: F64
    local_restart_s: F64
    hard_per_s: F64
    soft_per_s: F64


class TierConstants(NamedTuple):
    """Terms that do not depend on the intervals: see the head of this file."""

    all_per_s: F64  # L
    eps: F64
    durable: F64  # log of 1 / psi(C)
    scale: F64  # h rho(R) e^(-h F), per second
    local_block_s: F64


def tier_constants(x: TierTerms) -> TierConstants:
    """Return the constants of `x`."""
    hard = np.clip(x.hard_per_s, SELDOM_PER_S, OFTEN_PER_S)
    soft = np.clip(x.soft_per_s, 0.0, OFTEN_PER_S)
    rate = hard + soft
    share = hard / rate
    with np.errstate(over="ignore", invalid="ignore"):
        local = _exp_minus_1(rate * x.local_restart_s)
        eps = share * (local + 1.0) / (1.0 + share * local)  # 1 - (1 - share) rho, without the cancellation
        durable = np.log1p(eps * _exp_minus_1(rate * x.block_s))
        kept = np.exp(-hard * x.flush_s) / (1.0 + share * _exp_minus_1(rate * x.restart_s))
    return TierConstants(rate, eps, durable, hard * kept, x.local_block_s)


def _exp_minus_1(x: F64) -> F64:
    """Return e^x - 1, kept finite: beyond e^700 every ETTR is 0 anyway."""
    return np.expm1(np.minimum(x, 700.0))


def segment_exponent(t: TierConstants, local_s: F64) -> F64:
    """Return the log of 1 / psi: the part of a cycle's exponent from one segment of training and its save
    to memory."""
    return np.log1p(t.eps * _exp_minus_1(t.all_per_s * (local_s + t.local_block_s)))


def ettr_two_tier(t: TierConstants, local_s: F64, k: F64) -> F64:
    """Return the ETTR, 0 to 1, of a save to memory after every `local_s` of training, every `k`-th durable
    as well."""
    with np.errstate(over="ignore", invalid="ignore"):
        local = np.clip(local_s, LEAST_S, MOST_S)
        k = np.clip(k, 1e-150, 1e150)
        found = k * local * t.scale / _exp_minus_1(k * segment_exponent(t, local) + t.durable)
    return np.where(found > 1.0, 1.0, found)


def best_two_tier(
    mean: TierTerms, nodes: TierTerms, weights: F64, floor_s: F64, tiered: Bool
) -> tuple[F64, F64]:
    """Return (interval_s, k), each [n], of the greatest ETTR expected over `nodes` [m, n]; interval_s >=
    floor_s.

    mean: [n], the same at the mean rate. tiered: [n], has a memory tier; the others get k = 1. interval_s
    is k local intervals.

    With both rates known and k any number the problem falls apart: ETTR is (u - v) / (e^u - 1), u the
    exponent of a cycle and v the durable save's part of it, times what the segment alone decides, its
    length over its exponent. So first the segment, then u as in `single_tier`, then Newton over the
    belief; at last the whole k on either side, each with the segment that is best for it.
    """
    mean, nodes = _positive_saves(mean), _positive_saves(nodes)
    t, at = tier_constants(mean), tier_constants(nodes)
    with np.errstate(all="ignore"):
        alone = _alone(mean)
        local = np.where(tiered, _best_local(t, mean, np.maximum(alone, floor_s)), alone)
        k = _climb_k(at, weights, local, best_fraction(t.durable) / segment_exponent(t, local))
        interval = np.maximum(k * local, floor_s)
        i = np.flatnonzero(tiered)
        inner, share = TierConstants(*(x[..., i] for x in at)), weights[:, i]
        most_parts = np.maximum(MOST_LOCAL, floor_s[i] / local[i])
        whole = np.floor(np.clip(interval[i] / local[i], 1.0, most_parts))
        picked, parts, most = interval[i], whole, np.full(len(i), -np.inf)
        for candidate in (whole, whole + 1.0):
            begun = np.minimum(interval[i] / candidate, 2.0 * local[i])
            tried = _climb_local(inner, share, begun, candidate)
            tried = np.maximum(tried, floor_s[i] / candidate)
            worth = (share * ettr_two_tier(inner, tried, candidate)).sum(axis=0)
            better = worth > most
            picked, parts = np.where(better, tried * candidate, picked), np.where(better, candidate, parts)
            most = np.where(better, worth, most)
        k = np.ones_like(interval)
        interval[i], k[i] = picked, parts
    return np.maximum(interval, floor_s), k


def best_part_count(mean: TierTerms, interval_s: F64) -> F64:
    """Return k [n], the best number of segments for a given durable interval, at the mean rate."""
    mean = _positive_saves(mean)
    t = tier_constants(mean)
    with np.errstate(all="ignore"):
        local = _best_local(t, mean, interval_s)
        fewer = np.floor(np.maximum(interval_s / local, 1.0))
        more = ettr_two_tier(t, interval_s / (fewer + 1.0), fewer + 1.0)
        return np.where(more > ettr_two_tier(t, interval_s / fewer, fewer), fewer + 1.0, fewer)


def _positive_saves(x: TierTerms) -> TierTerms:
    """Return `x` without zero save costs, so that an interval has a logarithm."""
    return replace(
        x, block_s=np.maximum(x.block_s, FREE_S), local_block_s=np.maximum(x.local_block_s, FREE_S)
    )


def _alone(mean: TierTerms) -> F64:
    """Return the best interval [n] of one tier at the mean rate; without failures, one beyond any life."""
    hard = np.clip(mean.hard_per_s, SELDOM_PER_S, OFTEN_PER_S)
    return np.clip(best_fraction(hard * (mean.block_s + mean.local_block_s)), 1e-12, 1.0) / hard


def _best_local(t: TierConstants, mean: TierTerms, most_s: F64) -> F64:
    """Return the segment [n] of the greatest local_s / segment exponent, at most `most_s`."""
    soft = np.clip(mean.soft_per_s, SELDOM_PER_S, OFTEN_PER_S)
    most = np.maximum(most_s, LEAST_LOCAL_S)
    local = np.clip(best_fraction(soft * mean.local_block_s) / soft, LEAST_LOCAL_S, most)
    for _ in range(NEWTON):
        spent, per_s, curve = _slopes(t, local)
        ratio = local * per_s / spent
        step = np.log(ratio) / np.maximum(1.0 + local * curve - ratio, 0.05)
        local = np.clip(local * np.exp(-np.clip(step, -1.0, 1.0)), LEAST_LOCAL_S, most)
    return local


def _slopes(t: TierConstants, local_s: F64) -> tuple[F64, F64, F64]:
    """Return (segment, its slope by local_s, slope over slope) at `local_s`."""
    more = t.eps * _exp_minus_1(t.all_per_s * (local_s + t.local_block_s))
    share = (t.eps + more) / (1.0 + more)
    return np.log1p(more), t.all_per_s * share, t.all_per_s * (1.0 - share)


def _climb_k(t: TierConstants, weights: F64, local_s: F64, k: F64) -> F64:
    """Return the k [n], any number, of the greatest expected ETTR at fixed `local_s`: Newton in log k."""
    spent = segment_exponent(t, local_s)
    for _ in range(NEWTON_BELIEF):
        slope = k * spent
        k = k * np.exp(_step(t, weights, slope + t.durable, slope, slope))
    return k


def _climb_local(t: TierConstants, weights: F64, local_s: F64, k: F64) -> F64:
    """Return the segment [n] of the greatest expected ETTR at fixed `k`: Newton in its logarithm."""
    for _ in range(NEWTON_BELIEF):
        spent, per_s, curve = _slopes(t, local_s)
        slope = k * local_s * per_s
        local_s = local_s * np.exp(
            _step(t, weights, k * spent + t.durable, slope, slope * (1.0 + local_s * curve))
        )
    return local_s


def _step(t: TierConstants, weights: F64, u: F64, slope: F64, bend: F64) -> F64:
    """Return Newton's step [n] for log of the mean of e^y / (e^u - 1): `slope` and `bend` are du/dy and
    its own."""
    less = 1.0 / _exp_minus_1(u)
    more = slope * (1.0 + less)  # du/dy e^u / (e^u - 1)
    worth = t.scale * weights * less
    first = 1.0 - more
    second = first * first + more * (slope * less) - bend * (1.0 + less)
    total = worth.sum(axis=0)
    mean = _mean(worth, first) / total
    bent = np.minimum(_mean(worth, second) / total - mean * mean, -1e-9)
    return np.asarray(np.clip(np.nan_to_num(-mean / bent), -1.0, 1.0))


def _mean(weights: F64, x: F64) -> F64:
    return np.asarray(np.einsum("mn,mn->n", weights, x))
