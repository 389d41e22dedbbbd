"""Withdrawal limits: maximum number of nodes out at once, for the site and each rack, domain and job.

The node asked for first goes first, as long as every group that it belongs to has room. Nodes that are out
already count, whoever withdrew them, and need no room again. A return needs none, so that no limit holds a
node back from service. The circuit breaker is in `circuit_breaker`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I8, I32, I64, Bool
from twin.site import Site
from twin.telemetry import JobSlots

NO_COUNT = 2**31 - 1
# Reasons for which a node has to wait, in order of precedence
FREE, SITE, RACK, DOMAIN, JOB = range(5)
GROUPS = ("", "site", "rack", "domain", "job")


class WithdrawalLimits(NamedTuple):
    """The maximum out at once, as a count (of the site) and as shares of each group's nodes.

    A share allows at least one node of every group: of a rack of four, a quarter or less would else mean that
    a failing node is never taken out, and a limit is to slow us down, not to forbid the work. So a job of one
    node is never held up by its own limit.
    """

    site_count: int = NO_COUNT
    # About 5 % of nodes are out or spare where nobody acts ahead (arXiv 2503.11901); half as much again for
    # those that leave before they fail. source: estimate
    site_share: float = 0.08
    rack_share: float = 0.25  # source: estimate
    domain_share: float = 0.25  # source: estimate
    job_share: float = 0.25  # source: estimate


def admit(site: Site, jobs: JobSlots, out: Bool, wanted: I32, limits: WithdrawalLimits) -> tuple[Bool, I8]:
    """Return (wanted nodes that may leave, the reason for the others) [k]; `wanted`: the most important
    first.

    `out` [n_node]: every node that is out of service. The same as going through `wanted` one by one: each
    leaves if its site, rack, domain and job have room left after those before it. A node that is out already
    may proceed, and so may a second mention of one. The reason is an index of GROUPS.
    """
    allowed: Bool = np.ones(len(wanted), np.bool_)
    why = np.zeros(len(wanted), np.int8)
    _, first, again = np.unique(wanted, return_index=True, return_inverse=True)
    asks = np.sort(first[~out[wanted[first]]])
    if not len(asks):
        return allowed, why
    node = wanted[asks]
    group, left = _groups(site, jobs, out, node, limits)
    granted, reason = _in_order(group, left)
    allowed[asks], why[asks] = granted, reason
    here = first[again.reshape(-1)]
    return allowed[here], why[here]


def _groups(site: Site, jobs: JobSlots, out: Bool, node: I32, limits: WithdrawalLimits) -> tuple[I64, I64]:
    """Return (group of each node in each of the four ways [4, k], numbered apart; places left in each
    group).

    A node without a job belongs to a group of its own, which has room.
    """
    n, n_rack, n_domain = len(site.rack_of_node), site.sizes["rack"], site.sizes["supernode"]
    whole = np.zeros(n, np.int64)
    held: I64 = jobs.job_of_node.astype(np.int64)
    ways = (
        (whole, 1, limits.site_share, limits.site_count),
        (site.rack_of_node.astype(np.int64), n_rack, limits.rack_share, NO_COUNT),
        (site.supernode_of_node.astype(np.int64), n_domain, limits.domain_share, NO_COUNT),
        (np.where(held >= 0, held, jobs.n), jobs.n + 1, limits.job_share, NO_COUNT),
    )
    groups, lefts, offset = [], [], 0
    for of_node, size, share, count in ways:
        members = np.bincount(of_node, minlength=size).astype(np.float64)
        gone = np.bincount(of_node[out], minlength=size)
        groups.append(of_node[node] + offset)
        lefts.append(np.maximum(_most(members, share, count) - gone, 0))
        offset += size
    lefts[-1][-1] = NO_COUNT  # without a job
    return np.stack(groups), np.concatenate(lefts)


def _most(members: F64, share: float, count: int) -> I64:
    """The number of nodes that may be out at once, of groups of so many members: at least one."""
    # The product 0.3 of 10 must not round down to 2 in floating point
    share_of = np.floor(np.nan_to_num(share, nan=0.0) * members + 1e-9)
    out: I64 = np.maximum(np.minimum(share_of, float(max(count, 0))), 1.0).astype(np.int64)
    return out


def _in_order(group: I64, left: I64) -> tuple[Bool, I8]:
    """Nodes that leave if all of them [k] are asked one by one, and what stops the others (an index of
    GROUPS).

    In rounds: a node leaves that has room in all groups even if all before it leave; a node stays that finds
    a group full of nodes that surely leave. Each round decides at least the first undecided node.
    """
    k = group.shape[1]
    granted: Bool = np.zeros(k, np.bool_)
    reason, left = np.zeros(k, np.int8), left.copy()
    rest = np.arange(k)
    while len(rest):
        full = left[group[:, rest]] <= 0
        stays = full.any(axis=0)
        reason[rest[stays]] = 1 + np.argmax(full[:, stays], axis=0)
        rest = rest[~stays]
        if not len(rest):
            break
        fits = np.all([_place_in(row[rest]) < left[row[rest]] for row in group], axis=0)
        leaves = rest[fits]
        granted[leaves] = True
        np.subtract.at(left, group[:, leaves].reshape(-1), 1)
        rest = rest[~fits]
    return granted, reason


def _place_in(group: I64) -> I64:
    """Return the number of members of the same group before each [k]."""
    order = np.argsort(group, kind="stable")
    sorted_ = group[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_[1:] != sorted_[:-1]]))
    lengths = np.diff(np.concatenate([starts, [len(group)]]))
    place = np.empty(len(group), np.int64)
    place[order] = np.arange(len(group)) - np.repeat(starts, lengths)
    return place
