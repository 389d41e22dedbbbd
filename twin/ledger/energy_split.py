"""Energy split: the energy of each rack in a look, by all meters at once, so that the parts make the whole.

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
from twin.telemetry import EntityState, column

# 1 sigma of an energy counter: class 0.2, its limits as a 90 % interval; source: IEC 62053-22
COUNTER_PU = 0.0012
LOSS_PU = 0.002  # 1 sigma of what is lost between roots and racks, of what goes through; source: estimate
UNREAD_PU = 0.3  # of an energy that follows from what others left; source: estimate


class Metered(NamedTuple):
    """Energy of a look with the variance of its gaps [n], and a mask of known energies."""

    energy_j: F64
    var_j2: F64
    known: Bool


class Settled(NamedTuple):
    """Energy that adds up, with its lasting variance by gains and its passing variance by gaps [n]."""

    energy_j: F64
    sigma2: F64
    var_j2: F64


class Split(NamedTuple):
    """Racks and nodes as they add up; `unmetered`: nodes of whose power is unknown [n_node]; `losses` of
    each group of roots in its hall, with the variances of all that the group takes.
    """

    rack: Settled
    node: Settled
    unmetered: Bool
    losses: Settled
    hall: I64


class LateRoots(EntityState):
    """Energies with the variance of their gaps since all roots of a group were last read: of roots, racks.

    A counter that is read again covers all the time since; it is compared with racks over that time.
    """

    root_j: F64 = column("feeder", "f8")
    root_var: F64 = column("feeder", "f8")
    rack_j: F64 = column("rack", "f8")
    rack_var: F64 = column("rack", "f8")


class RootGroups:
    """Groups of roots with shared racks; racks without a feeder form a group per hall, without roots."""

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


class RootMeters(NamedTuple):
    """Feeders of a look [n]; `counted`: by their energy counters, `fresh`: read in it."""

    metered: Metered
    counted: Bool
    fresh: Bool
    late: LateRoots


def split(groups: RootGroups, meters: RootMeters, rack: Metered, node: Metered, gain: RackGain) -> Split:
    """Split a look among racks and nodes."""
    feeder, counted, fresh, late = meters
    site, n_rack = groups.site, len(rack.energy_j)
    of_node = site.rack_of_node
    nodes_j = row_sums(of_node, np.where(node.known, node.energy_j, 0.0), n_rack)
    dark = row_sums(of_node, ~node.known, n_rack)
    by_nodes = ~rack.known & (dark == 0) & (np.diff(site.node_start_of_rack) > 0)
    rack_j = np.where(rack.known, rack.energy_j * gain.meter, np.where(by_nodes, nodes_j * gain.nodes, 0.0))
    rack_var = np.where(rack.known, rack.var_j2, row_sums(of_node, node.var_j2, n_rack))
    is_known = rack.known | by_nodes
    own2, common = (gain.own_pu * rack_j) ** 2, gain.common_pu * rack_j
    own2 = np.where(is_known, own2, 0.0)
    # Roots: a group counts where all of them are known
    of, roots = groups.of_root, groups.roots
    root_j, n = feeder.energy_j[roots], groups.n
    whole = row_sums(of, ~feeder.known[roots], n) == 0
    whole &= row_sums(of, np.ones(len(of)), n) > 0
    root_pu = np.where(counted[roots], COUNTER_PU, GAIN_PU)
    fed_j = row_sums(of, np.where(feeder.known[roots], root_j, 0.0), n)
    fed_sigma2 = row_sums(of, (root_pu * root_j) ** 2, n)
    fed_var = row_sums(of, feeder.var_j2[roots], n)
    # Racks without readings share the rest of the others
    g = groups.of_rack
    lone = ~is_known
    left_j = np.maximum(fed_j - row_sums(g, rack_j, n), 0.0)
    many = np.maximum(row_sums(g, lone, n), 1)
    guess = lone & whole[g]
    rack_j = np.where(guess, np.maximum(left_j[g] / many[g], nodes_j), rack_j)
    rack_var = np.where(guess, (UNREAD_PU * rack_j) ** 2, rack_var)
    # Of others only the nodes that report are known
    rack_j = np.where(lone & ~guess, nodes_j * np.maximum(gain.nodes, 1.0), rack_j)
    fresh = whole & (row_sums(of, ~fresh[roots], n) == 0)
    racks = _Errors(rack_j, rack_var, own2, common, late.rack_j, late.rack_var)
    late_j, late_var = row_sums(of, late.root_j[roots], n), row_sums(of, late.root_var[roots], n)
    rack_, losses = _reconciled(groups, racks, _Roots(fed_j, fed_sigma2, fed_var, late_j, late_var, fresh))
    waits, root_waits = (whole & ~fresh)[g], (whole & ~fresh)[of]
    late.rack_j[:] = np.where(waits, late.rack_j + rack_j, 0.0)
    late.rack_var[:] = np.where(waits, late.rack_var + rack_var, 0.0)
    late.root_j[roots] = np.where(root_waits, late.root_j[roots] + root_j, 0.0)
    late.root_var[roots] = np.where(root_waits, late.root_var[roots] + feeder.var_j2[roots], 0.0)
    node_, unmetered = _nodes(site, rack_.energy_j, node, is_known | guess, nodes_j)
    return Split(rack_, node_, unmetered, losses, groups.hall)


class _Errors(NamedTuple):
    """Racks before the meters of roots count: energy, variances of gaps and gains [n_rack], the part of
    the latter that is common to all; energy and variance of gaps that wait from before."""

    energy_j: F64
    var_j2: F64
    own2: F64
    common: F64
    late_j: F64
    late_var: F64


class _Roots(NamedTuple):
    """Groups of roots: energy, variances of gains and gaps, what waits of both, whether all were read [n]."""

    energy_j: F64
    sigma2: F64
    var_j2: F64
    late_j: F64
    late_var: F64
    fresh: Bool


def _reconciled(groups: RootGroups, racks: _Errors, roots: _Roots) -> tuple[Settled, Settled]:
    """Return racks, and losses of groups, for the whole waiting time, once the meters of roots have
    reported.

    The end of a gap takes variance back, so that of a look may be below 0: as a weight it counts by its size.
    """
    g, n = groups.of_rack, groups.n
    rack_j, root_j = racks.energy_j + racks.late_j, roots.energy_j + roots.late_j
    rack_var, root_var = racks.var_j2 + racks.late_var, roots.var_j2 + roots.late_var
    longer = np.divide(rack_j, racks.energy_j, out=np.ones_like(rack_j), where=racks.energy_j > 0.0)
    root_longer = np.divide(root_j, roots.energy_j, out=np.ones_like(root_j), where=roots.energy_j > 0.0)
    off_j = np.where(roots.fresh, root_j - row_sums(g, rack_j, n), 0.0)
    pull = racks.own2 * longer**2 + np.abs(rack_var)
    pull += racks.common * longer * row_sums(g, racks.common * longer, n)[g]
    loss2 = LOSS_PU**2 * np.array([root_j**2, roots.energy_j**2])  # of all that time, of the look
    below = row_sums(g, pull, n) + loss2[0]
    total = np.maximum(below + roots.sigma2 * root_longer**2 + np.abs(root_var), 1e-12)
    gain = np.where(roots.fresh[g], pull / total[g], 0.0)
    weight = np.where(roots.fresh, below / total, 0.0)  # of the roots' meters in the sum
    share, all_own = row_sums(g, racks.common, n), row_sums(g, racks.own2, n)
    sigma2 = racks.own2 * (1.0 - gain) ** 2 + (racks.common - gain * share[g]) ** 2
    sigma2 += gain**2 * (all_own[g] - racks.own2 + (loss2[1] + roots.sigma2)[g])
    group_sigma2 = weight**2 * roots.sigma2 + (1.0 - weight) ** 2 * (all_own + share**2 + loss2[1])
    # Energy stated before is taken back where it is settled now
    all_var = row_sums(g, rack_var, n)
    var = rack_var * (1.0 - gain) ** 2 + gain**2 * (all_var[g] - rack_var + root_var[g]) - racks.late_var
    group_var = weight**2 * root_var + (1.0 - weight) ** 2 * all_var - row_sums(g, racks.late_var, n)
    losses_j = np.where(roots.fresh, off_j * loss2[0] / total, 0.0)
    racks_ = Settled(racks.energy_j + gain * off_j[g], sigma2, var)
    return racks_, Settled(losses_j, group_sigma2, group_var)


def _nodes(site: Site, rack_j: F64, node: Metered, is_known: Bool, nodes_j: F64) -> tuple[Settled, Bool]:
    """Split racks into nodes, and find those without known power. `nodes_j`: of known nodes by rack."""
    of_node = site.rack_of_node
    dark = row_sums(of_node, ~node.known, len(rack_j))
    left_j = np.where(is_known, np.maximum(rack_j - nodes_j, 0.0), 0.0) / np.maximum(dark, 1.0)
    node_j = np.where(node.known, node.energy_j, left_j[of_node])
    # Nodes take no more than their rack does
    sums = row_sums(of_node, node_j, len(rack_j))
    over = is_known & (sums > rack_j) & (sums > 0.0)
    scale = np.divide(rack_j, sums, out=np.ones(len(rack_j)), where=over)
    node_j = node_j * scale[of_node]
    var_j2 = np.where(node.known, node.var_j2, (UNREAD_PU * node_j) ** 2)
    return Settled(node_j, (GAIN_PU * node_j) ** 2, var_j2), ~node.known & ~is_known[of_node]
