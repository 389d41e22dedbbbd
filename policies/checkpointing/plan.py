"""Checkpoint plan: durable and in-memory intervals of many jobs at once, under an uncertain failure rate.

What is known of each job comes as `Terms`, what is best for it goes as a `Plan`. Jobs with a memory tier
follow the scheme of `levels`, the others that of `single_tier`; what is maximised is the
mean of the ETTR over the belief. Nothing is raised: times and rates below 0 count as 0, those beyond 1e12 s
as 1e12 s, and a job with NaN where a time or rate should be gets NaN and no other job notices. Pure NumPy;
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from policies.checkpointing.belief import quadrature
from policies.checkpointing.levels import (
    TierTerms,
    best_part_count,
    best_two_tier,
    ettr_two_tier,
    tier_constants,
)
from policies.checkpointing.single_tier import MOST_S, OFTEN_PER_S, SELDOM_PER_S, daly_s, seconds, young_s
from twin.catalogue import F64, Bool

# Rates that stand for a belief: with 5 the interval is found, with 8 the ETTR near it is right to 1e-6 where
# the shape is at least 0.3, and to 2e-3 at 0.05.
SEARCH_NODES, VALUE_NODES = 5, 8
DOUBT = 0.5  # share of the loss without a memory tier, from which on it is asked whether the tier pays
# Share of a storage's time that the saves of all its jobs may take: the rest is for restores and for
# collisions. source: estimate
STORAGE_SHARE = 0.8


class SaveTerms(NamedTuple):
    """Save costs and failure rates of n jobs; arrays [n], seconds and failures per second."""

    block_s: F64  # how long a durable save stops the training
    flush_s: F64  # from then until the save can be recovered from; 0: at once when the training goes on
    restart_s: F64  # from a failure until training goes on from the durable tier
    local_block_s: F64  # how long a save to memory stops the training; NaN: no memory tier
    local_restart_s: F64  # the same as restart_s from the memory tier; NaN: no memory tier
    hard_shape: F64  # Gamma shape of the belief in the hard rate; inf: the rate is sure
    hard_per_s: F64  # its mean: failures that need the durable tier (a node is lost)
    soft_per_s: F64  # failures that leave the memory tier whole (a process is lost); known


class IntervalPlan(NamedTuple):
    """The best intervals of n jobs: arrays [n], seconds; ETTR 0 to 1, expected over the belief.

    interval_s: training between two durable saves; inf: nothing ever fails. local_interval_s: training
    between two saves to memory, a whole part of interval_s; NaN: no memory tier; inf: there is one, but
    saving to it costs more than it spares. young_s, daly_s: rules of thumb for the durable tier, from its
    save and the mean rate of all failures that need it; they know no flush.
    """

    interval_s: F64
    local_interval_s: F64
    ettr: F64
    young_s: F64
    daly_s: F64


def best_plan(terms: SaveTerms, least_s: ArrayLike = 0.0) -> IntervalPlan:
    """Return the intervals of greatest expected ETTR, the durable ones no shorter than a flush and than
    `least_s`.

    least_s: [n] or one number; NaN says nothing. Where the memory tier is of no use, soft failures too
    recover from the durable tier. No interval has a greater ETTR by 1e-6 where the shape is at least 0.5;
    below, where a belief says next to nothing, up to 0.004 is left.
    """
    arrays = _arrays(terms)
    floor = np.maximum(arrays.flush_s, np.nan_to_num(np.minimum(seconds(least_s), MOST_S)))
    interval, k, tiered, worth = _solved(arrays, floor)
    unused, i = np.zeros(tiered.shape, np.bool_), np.flatnonzero(_doubtful(arrays))
    if len(i):
        without = SaveTerms(*(x[i] for x in arrays))._replace(local_block_s=np.full(len(i), np.nan))
        other, _, _, alone = _solved(without, floor[i])
        unused[i] = alone > worth[i]
        interval[i], k[i] = np.where(unused[i], other, interval[i]), np.where(unused[i], 1.0, k[i])
    local = np.where(unused, np.inf, np.where(tiered, interval / k, np.nan))
    taken = arrays._replace(local_block_s=np.where(unused, np.nan, arrays.local_block_s))
    ettr = _expected(*_levels(taken, VALUE_NODES)[2:], interval, k)
    hard = arrays.hard_per_s + np.where(np.isfinite(local), 0.0, arrays.soft_per_s)
    with np.errstate(divide="ignore"):
        mttf = 1.0 / hard
    interval = np.where(
        (interval >= MOST_S) | (hard <= SELDOM_PER_S) & (arrays.block_s > 0), np.inf, interval
    )
    return IntervalPlan(interval, local, ettr, young_s(arrays.block_s, mttf), daly_s(arrays.block_s, mttf))


def ettr_at(terms: SaveTerms, interval_s: ArrayLike, local_interval_s: ArrayLike = np.nan) -> F64:
    """Return the expected ETTR [n] of given intervals, to compare alternatives. One job may have n
    intervals.

    interval_s: training between durable saves. local_interval_s: between saves to memory; NaN: as often as is
    best for that durable interval where the job has a memory tier; inf: the tier is not used. The number of
    local intervals in a durable one is rounded to a whole number of at least 1; the durable interval is kept.
    """
    *columns, interval, local = np.broadcast_arrays(*terms, seconds(interval_s), seconds(local_interval_s))
    arrays, interval = _arrays(SaveTerms(*columns)), np.atleast_1d(np.minimum(interval, MOST_S))
    unused = np.isinf(local)
    arrays = arrays._replace(local_block_s=np.where(unused, np.nan, arrays.local_block_s))
    tiered, mean, nodes, weights = _levels(arrays, VALUE_NODES)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        k = np.clip(np.rint(np.nan_to_num(interval / local, nan=1.0)), 1.0, 1e15)
    k = np.where(np.isnan(local), best_part_count(mean, interval), k)
    return _expected(nodes, weights, interval, np.where(tiered, k, 1.0))


def least_interval_s(
    flush_s: F64,
    storage: ArrayLike,
    wanted_s: F64 | None = None,
    share: float = STORAGE_SHARE,
    weight: ArrayLike = 1.0,
) -> F64:
    """Return the shortest interval [n] of each job at which the saves of all jobs of one storage fit,
    seconds.

    flush_s: [n], how long one save of the job keeps the storage busy when it is alone there. storage: [n],
    numbers of storages, -1 for none that is known: bound by the job's own flush alone. wanted_s: [n], the
    intervals that the jobs want; a wish of 0 or NaN counts as the job's own flush. The saves fit if the sum
    of flush over interval is at most `share`. Without wishes all jobs of a storage get the same interval.
    With them the storage's time is shared out max-min fairly by `weight` [n], such as nodes: wishes that fit
    are left alone, and a job that asks for more than its part gets its part and takes nothing from others,
    whatever it claims of its saves.
    """
    flush, places = np.nan_to_num(np.minimum(seconds(flush_s), MOST_S)), np.asarray(storage)
    known = (places >= 0) & (flush > 0)
    if wanted_s is None:
        _, place = np.unique(places, return_inverse=True)
        return np.where(known, np.maximum(np.bincount(place, flush)[place] / share, flush), flush)
    wanted = np.maximum(np.nan_to_num(seconds(wanted_s)), flush)
    demand = np.where(known, flush / np.where(wanted > 0, wanted, 1.0), 0.0)
    given = fair_shares(demand, places, share, np.broadcast_to(np.asarray(weight, np.float64), flush.shape))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(known & (given < demand), np.maximum(flush / given, flush), flush)


def fair_shares(demand: F64, place: ArrayLike, most: float, weight: F64) -> F64:
    """Return the weighted max-min fair share of each of n demands; each place has `most` to give.

    Nobody gets more than its demand (>= 0); what it leaves is for the others at the place, by their weights
    (> 0). Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2.
    """
    places = np.asarray(place)
    given, level = demand.copy(), demand / weight
    order = np.lexsort((level, places))
    for at in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
        if demand[at].sum() <= most:
            continue
        # Jobs that ask for least by weight come first: from the first that cannot get it, all get one level
        before = np.cumsum(demand[at]) - demand[at]
        levels = (most - before) / (np.cumsum(weight[at][::-1])[::-1])
        first = int(np.argmax(levels < level[at]))
        given[at[first:]] = levels[first] * weight[at[first:]]
    return given


def _arrays(terms: SaveTerms) -> SaveTerms:
    """Return float arrays of one shape, within bounds, with NaN in all relevant ones where one is NaN."""
    x = SaveTerms(*(seconds(x) for x in np.broadcast_arrays(*(np.atleast_1d(np.asarray(x)) for x in terms))))
    lost = np.isnan(x.block_s + x.flush_s + x.restart_s + x.hard_shape + x.hard_per_s + x.soft_per_s)
    x = x._replace(block_s=np.where(lost, np.nan, x.block_s))
    block, flush, restart, local_block, local_restart = (np.minimum(t, MOST_S) for t in x[:5])
    hard, soft = np.minimum(x.hard_per_s, OFTEN_PER_S), np.minimum(x.soft_per_s, OFTEN_PER_S)
    return SaveTerms(block, flush, restart, local_block, local_restart, x.hard_shape, hard, soft)


def _doubtful(x: SaveTerms) -> Bool:
    """Return the jobs [n] whose memory tier may cost more than it saves: by first-order losses with and
    without it."""
    with np.errstate(over="ignore", invalid="ignore"):
        hard, soft = x.hard_per_s, x.soft_per_s
        lost = np.sqrt(2.0 * x.local_block_s * soft) + np.sqrt(2.0 * x.block_s * hard)
        alone = np.sqrt(2.0 * x.block_s * (hard + soft)) + (hard + soft) * x.restart_s
        return np.asarray(lost + soft * x.local_restart_s + hard * x.restart_s >= DOUBT * alone)


def _levels(terms: SaveTerms, count: int) -> tuple[Bool, TierTerms, TierTerms, F64]:
    """Return (has a memory tier [n], at the mean rate [n], at `count` believed rates [count, n], their
    weights)."""
    block, flush, restart, local_block, local_restart, shape, hard, soft = terms
    tiered = ~(np.isnan(local_block) | np.isnan(local_restart))
    rates, weights = quadrature(shape, count)
    own, alone = np.where(tiered, soft, 0.0), np.where(tiered, 0.0, soft)
    mean = TierTerms(
        block,
        flush,
        restart,
        np.where(tiered, local_block, 0.0),
        np.where(tiered, local_restart, 0.0),
        hard + alone,
        own,
    )
    return tiered, mean, replace(mean, hard_per_s=rates * hard + alone), weights


def _solved(terms: SaveTerms, floor_s: F64) -> tuple[F64, F64, Bool, F64]:
    """Return (interval, k, has a memory tier, about the expected ETTR), each [n]."""
    tiered, mean, nodes, weights = _levels(terms, SEARCH_NODES)
    interval, k = best_two_tier(mean, nodes, weights, floor_s, tiered)
    return interval, k, tiered, _expected(nodes, weights, interval, k)


def _expected(nodes: TierTerms, weights: F64, interval_s: F64, k: F64) -> F64:
    found = (weights * ettr_two_tier(tier_constants(nodes), interval_s / k, k)).sum(axis=0)
    return np.asarray(np.clip(found, 0.0, 1.0))
