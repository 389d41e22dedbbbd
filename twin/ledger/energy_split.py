"""Energy split: what each rack took in a look, by all meters at once, so that the parts make the whole.

The meters of roots, of racks and of nodes each have an error; losses between them are small. What they
disagree by is shared by least squares: each gives way as its variance is to the sum of all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64, Bool
from twin.ledger.rack_meters import GAIN_PU, RackGain
from twin.ledger.row_sums import row_sums
from twin.site import Site

# 1 sigma of an energy counter: class 0.2, its limits as a 90 % interval; source: IEC 62053-22
COUNTER_PU = 0.0012
LOSS_PU = 0.002  # 1 sigma of what is lost between roots and racks, of what goes through; source: estimate
UNREAD_PU = 0.3  # of an energy that follows from what others left; source: estimate


class Metered(NamedTuple):
    """Energy of a look with the variance of its gaps [n], and whether anything told it."""

    energy_j: F64
    var_j2: F64
    known: Bool


class Settled(NamedTuple):
    """Energy as it adds up, and its variance by gains, which last, and by gaps, which do not [n]."""

    energy_j: F64
    sigma2: F64
    var_j2: F64


class Split(NamedTuple):
    """Racks and nodes as they add up; `unmetered`: nodes of whose power nothing tells [n_node]; `losses` of
    each group of roots in its hall, with the variances of all that the group takes.
    """

    rack: Settled
    node: Settled
    unmetered: Bool
    losses: Settled
    hall: I64


class RootGroups:
    """Groups of roots that share racks; racks that no feeder serves are a group each hall, without roots."""

    def __init__(self, site: Site) -> None:
        self.site = site
        feeder, rack = site.served_racks()
        roots = site.parent_of_feeder < 0
        n_rack = site.sizes["rack"]
        of_root = roots[feeder]
        lead = np.arange(site.sizes["feeder"])
        while True:  # each rack's roots are in the group of the first of them
            first = np.full(n_rack, len(lead))
            np.minimum.at(first, rack[of_root], lead[feeder[of_root]])
            new = lead.copy()
            np.minimum.at(new, feeder[of_root], first[rack[of_root]])
            new = new[new]
            if (new == lead).all():
                break
            lead = new
        fed = first < len(lead)
        keys = np.where(fed, first, len(lead) + site.hall_of_rack)
        used, self.of_rack = np.unique(keys, return_inverse=True)
        self.n = len(used)
        self.roots = np.flatnonzero(roots & np.isin(lead, used)).astype(np.int64)
        self.of_root = np.searchsorted(used, lead[self.roots])
        self.hall = np.zeros(self.n, np.int64)
        self.hall[self.of_rack[::-1]] = site.hall_of_rack[::-1]  # of its first rack


def split(
    groups: RootGroups, feeder: Metered, rack: Metered, node: Metered, gain: RackGain, counted: Bool
) -> Split:
    """Share a look among racks and nodes. `counted` [n_feeder]: by its energy counter."""
    site, n_rack = groups.site, len(rack.energy_j)
    of_node = site.rack_of_node
    nodes_j = row_sums(of_node, np.where(node.known, node.energy_j, 0.0), n_rack)
    dark = row_sums(of_node, ~node.known, n_rack)
    by_nodes = ~rack.known & (dark == 0) & (np.diff(site.node_start_of_rack) > 0)
    rack_j = np.where(rack.known, rack.energy_j * gain.meter, np.where(by_nodes, nodes_j * gain.nodes, 0.0))
    rack_var = np.where(rack.known, rack.var_j2, row_sums(of_node, node.var_j2, n_rack))
    told = rack.known | by_nodes
    own2, common = (gain.own_pu * rack_j) ** 2, gain.common_pu * rack_j
    own2 = np.where(told, own2, 0.0)
    # Roots: a group counts where all of them are known
    of, roots = groups.of_root, groups.roots
    root_j, n = feeder.energy_j[roots], groups.n
    whole = row_sums(of, ~feeder.known[roots], n) == 0
    whole &= row_sums(of, np.ones(len(of)), n) > 0
    root_pu = np.where(counted[roots], COUNTER_PU, GAIN_PU)
    fed_j = row_sums(of, np.where(feeder.known[roots], root_j, 0.0), n)
    fed_sigma2 = row_sums(of, (root_pu * root_j) ** 2, n)
    fed_var = row_sums(of, feeder.var_j2[roots], n)
    # Racks of which nothing tells share what the others leave
    g = groups.of_rack
    lone = ~told
    left_j = np.maximum(fed_j - row_sums(g, rack_j, n), 0.0)
    many = np.maximum(row_sums(g, lone, n), 1)
    guess = lone & whole[g]
    rack_j = np.where(guess, np.maximum(left_j[g] / many[g], nodes_j), rack_j)
    rack_var = np.where(guess, (UNREAD_PU * rack_j) ** 2, rack_var)
    # Of others only the nodes are known that tell of themselves
    rack_j = np.where(lone & ~guess, nodes_j * np.maximum(gain.nodes, 1.0), rack_j)
    racks = _Errors(rack_j, rack_var, own2, common, whole[g])
    rack_, losses = _reconciled(groups, racks, _Roots(fed_j, fed_sigma2, fed_var, whole))
    node_, unmetered = _nodes(site, rack_.energy_j, node, told | guess, nodes_j)
    return Split(rack_, node_, unmetered, losses, groups.hall)


class _Errors(NamedTuple):
    """Racks before the meters of roots are heard: energy, variances of gaps and gains [n_rack], the part of
    the latter that is common to all, and whether the roots of each are known."""

    energy_j: F64
    var_j2: F64
    own2: F64
    common: F64
    whole: Bool


class _Roots(NamedTuple):
    """Groups of roots: energy, variances of gains and gaps, whether all of each are known [n]."""

    energy_j: F64
    sigma2: F64
    var_j2: F64
    whole: Bool


def _reconciled(groups: RootGroups, racks: _Errors, roots: _Roots) -> tuple[Settled, Settled]:
    """Racks, and losses of groups, after the meters of roots are heard.

    The end of a gap takes variance back, so that of a look may be below 0: as a weight it counts by its size.
    """
    g, n = groups.of_rack, groups.n
    off_j = np.where(roots.whole, roots.energy_j - row_sums(g, racks.energy_j, n), 0.0)
    share = row_sums(g, racks.common, n)
    pull = racks.own2 + np.abs(racks.var_j2) + racks.common * share[g]
    loss2 = (LOSS_PU * roots.energy_j) ** 2
    below = row_sums(g, pull, n) + loss2
    total = np.maximum(below + roots.sigma2 + np.abs(roots.var_j2), 1e-12)
    gain = np.where(racks.whole, pull / total[g], 0.0)
    all_own, all_var = row_sums(g, racks.own2, n), row_sums(g, racks.var_j2, n)
    sigma2 = racks.own2 * (1.0 - gain) ** 2 + (racks.common - gain * share[g]) ** 2
    sigma2 += gain**2 * (all_own[g] - racks.own2 + (loss2 + roots.sigma2)[g])
    var = racks.var_j2 * (1.0 - gain) ** 2 + gain**2 * (all_var[g] - racks.var_j2 + roots.var_j2[g])
    weight = np.where(roots.whole, below / total, 0.0)  # of the roots' meters in the sum
    group_sigma2 = weight**2 * roots.sigma2 + (1.0 - weight) ** 2 * (all_own + share**2 + loss2)
    group_var = weight**2 * roots.var_j2 + (1.0 - weight) ** 2 * all_var
    energy_j = racks.energy_j + gain * off_j[g]
    return Settled(energy_j, sigma2, var), Settled(off_j * loss2 / total, group_sigma2, group_var)


def _nodes(site: Site, rack_j: F64, node: Metered, told: Bool, nodes_j: F64) -> tuple[Settled, Bool]:
    """Nodes within their racks, and those of whose power nothing tells. `nodes_j`: of known nodes by rack."""
    of_node = site.rack_of_node
    dark = row_sums(of_node, ~node.known, len(rack_j))
    left_j = np.where(told, np.maximum(rack_j - nodes_j, 0.0), 0.0) / np.maximum(dark, 1.0)
    node_j = np.where(node.known, node.energy_j, left_j[of_node])
    # Nodes take no more than their rack does
    sums = row_sums(of_node, node_j, len(rack_j))
    over = told & (sums > rack_j) & (sums > 0.0)
    scale = np.divide(rack_j, sums, out=np.ones(len(rack_j)), where=over)
    node_j = node_j * scale[of_node]
    var_j2 = np.where(node.known, node.var_j2, (UNREAD_PU * node_j) ** 2)
    return Settled(node_j, (GAIN_PU * node_j) ** 2, var_j2), ~node.known & ~told[of_node]
