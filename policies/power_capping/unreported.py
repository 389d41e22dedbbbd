"""Unreported GPUs: the power of GPUs that never reported.

The meter of a rack or a feeder includes them: its reading minus the power of reporting GPUs is theirs, spread
by their maximum. It is expected to rise no more than that of the others. Without a meter, such a GPU causes
no cut during the learning time; after that it counts with its maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import Carried, by_node, gain_of, stated_w, sums_w
from policies.power_capping.demand import Wants, expected, growth_of
from policies.power_capping.nodes import CappedNodes, limits_w
from policies.power_capping.unpowered import unpowered_gpus
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Memory, View
from twin.site import Site

# Learning time since the first report of the site: five scrapes of 15 s, or five periods of the site file
LEARNING_S, LEARNING_PERIODS = 75.0, 5.0


class UnreportedGpus(NamedTuple):
    """GPUs that never reported [n_gpu], nodes that stand in for theirs in the rows of their first ones.

    `power_w`: what a meter above leaves for them, W, NaN where none is read; `other_w` [n_rack]: what racks
    draw beside their GPUs, 0 where nothing of a rack is known yet; `learning`: they are waited for, and no
    longer than the learning time; `learning_rack` [n_rack]: racks with such GPUs, or whose meter is.
    `since`: columns of a policy's memory, since when each is waited for.
    """

    never: Bool
    power_w: F64
    other_w: F64
    learning: Bool
    learning_rack: Bool
    since: Memory

    @property
    def metered(self) -> Bool:
        """GPUs that count with the rest of a meter's reading [n_gpu]."""
        return self.never & np.isfinite(self.power_w)

    @property
    def waiting(self) -> Bool:
        """GPUs that do not count yet [n_gpu]."""
        return self.learning & np.isnan(self.power_w)

    @property
    def at_most(self) -> Bool:
        """GPUs that count with their maximum [n_gpu]."""
        return self.never & ~self.learning & np.isnan(self.power_w)


def never_reported(view: View, nodes: CappedNodes) -> Bool:
    """Return the GPUs that never reported power and are not known to be off or absent [n_gpu]."""
    never: Bool = np.isnan(view.believed("gpu.power_w")) & ~unpowered_gpus(view)
    if len(nodes.node):
        never &= ~nodes.inside
        never[nodes.gpu] = np.isnan(view.believed("node.power_w")[nodes.node])
    return never


def learning_s(site: Site) -> float:
    """Return the waiting time for a GPU, or a node in place of its GPUs, that never reported, in s."""
    gpu_s, node_s = (
        max(site.file.periods_s.get(key, 0.0) for key in (table, f"{table}.power_w"))
        for table in ("gpu", "node")
    )
    given_s = node_s if node_s > gpu_s and by_node(site).any() else gpu_s
    return max(LEARNING_S, LEARNING_PERIODS * given_s)


def unreported_gpus(
    view: View, carried: Carried, want: Wants, other: F64, nodes: CappedNodes, memory: Memory
) -> UnreportedGpus:
    """Return the unreported GPUs, with the evidence of the meters above them.

    `want.power_w` holds the most that these may draw; `other` [n_rack] is what racks draw beside their GPUs.
    """
    site, gain, limit_w = view.site, gain_of(view.site), limits_w(view, nodes)
    never, unread = never_reported(view, nodes), np.isnan(view.believed("rack.power_w")) & site.metered_rack
    since_ns, learning = _waited_for(view, never, memory["unheard_ns"])
    unread_ns, coming = _waited_for(view, unread, memory["unread_ns"])
    level = np.full(len(unread), np.nan)
    if never.any():
        likely_w = np.where(never, 0.0, np.fmin(np.maximum(want.power_w, want.peak_w), limit_w))
        known_w = site.sum_by_rack("gpu", likely_w) * gain
        most_w = site.sum_by_rack("gpu", np.where(never, want.power_w, 0.0)) * gain
        least_w = np.fmin(other, stated_w(view, len(nodes.node) > 0)[0])
        least, most = (_levels(view, carried, known_w + np.nan_to_num(x), most_w) for x in (other, least_w))
        # They do as those that report, as far as the meters allow: what is beside them is less then
        usual = likely_w.sum() / want.most_w[~never].sum() if want.most_w[~never].any() else 1.0
        level = np.maximum(least, np.minimum(most, usual))
        other = np.where(np.isnan(level), other, np.maximum(other - (level - least) * most_w, 0.0))
    waiting = learning & np.isnan(level)[site.rack_of_gpu]
    every = np.bincount(site.rack_of_gpu, minlength=len(unread))
    unknown = (every > 0) & (site.sum_by_rack("gpu", waiting.astype(np.float64)) >= every)
    return UnreportedGpus(
        never,
        np.where(never, level[site.rack_of_gpu] * want.power_w, np.nan),
        np.where(unknown, 0.0, other),
        learning,
        coming | (site.sum_by_rack("gpu", learning.astype(np.float64)) > 0),
        {"unheard_ns": since_ns, "unread_ns": unread_ns},
    )


def _waited_for(view: View, never: Bool, since_ns: I64) -> tuple[I64, Bool]:
    """(since when each of `never` is waited for, 0 = not yet; whether for no longer than the learning time)
    [n]; `since_ns` as of the last call."""
    if not never.any():
        return np.zeros_like(since_ns), never
    keys = ("gpu.power_w", "node.power_w", "rack.power_w", "feeder.power_w")
    begun_ns = view.now_ns if any(np.isfinite(view.value(key)).any() for key in keys) else 0
    since_ns = np.where(never, np.where(since_ns > 0, since_ns, begun_ns), 0)
    learning = never & ((since_ns == 0) | (view.now_ns - since_ns < round(learning_s(view.site) * NS)))
    return since_ns, learning


def _levels(view: View, carried: Carried, known_w: F64, most_w: F64) -> F64:
    """Share of `most_w` that unreported GPUs draw, by rack [n_rack]; NaN where no meter above them was read.

    By the meter of the rack, else of the lowest feeders, each as high as it may read by now. It reads
    `known_w` beside them.
    """
    pairs, first, unreported = carried.pairs, carried.pairs.drawn, most_w > 0
    level = _share(view.worst("rack.power_w") - known_w, most_w)
    meter_w, depth = view.worst("feeder.power_w").astype(np.float64), _depth(view.site)
    fed = np.flatnonzero((pairs.place >= first) & (pairs.place < first + carried.n_feeder))
    feeder, rack, share = pairs.place[fed] - first, pairs.rack[fed], pairs.share[fed]
    for at in np.unique(depth[np.isfinite(meter_w)])[::-1]:
        unknown = unreported & np.isnan(level)
        if not unknown.any():
            break
        of_racks = known_w + np.nan_to_num(level) * most_w, np.where(unknown, most_w, 0.0)
        rest_w, open_w = (np.bincount(feeder, share * x[rack], len(meter_w)) for x in of_racks)
        of_feeder = _share(meter_w - rest_w, open_w.astype(np.float64))
        mine = (depth[feeder] == at) & unknown[rack]
        np.fmax.at(level, rack[mine], of_feeder[feeder[mine]])
    return level


def _share(left_w: F64, most_w: F64) -> F64:
    """`left_w` over `most_w` [n], 0 to 1; NaN where either is unknown or there is nothing to share."""
    share: F64 = np.divide(left_w, most_w, out=np.full(len(left_w), np.nan), where=most_w > 0)
    return np.clip(share, 0.0, 1.0)


def _depth(site: Site) -> I64:
    """Feeders above each feeder [n_feeder]."""
    above = site.parent_of_feeder.astype(np.int64)
    depth, up = np.zeros(len(above), np.int64), above
    while (up >= 0).any():
        depth += up >= 0
        up = np.where(up >= 0, above[np.maximum(up, 0)], -1)
    return depth


def with_unreported(
    view: View, want: Wants, unreported: UnreportedGpus, nodes: CappedNodes, peak_w: F64, since_s: float
) -> Wants:
    """`want` with what is known of the unreported GPUs; `peak_w` [n_gpu] are peaks `since_s` ago."""
    if not unreported.never.any():
        return want
    metered, waiting = unreported.metered, unreported.waiting
    power_w = np.where(metered, unreported.power_w, np.where(waiting, 0.0, want.power_w))
    # While others are still to come, what is left for these is not remembered
    before_w = np.where(unreported.learning, 0.0, peak_w)
    peak, demand_w = expected(power_w, metered, limits_w(view, nodes), want.most_w, before_w, since_s)
    growth = growth_of(view)
    demand_w = np.clip(demand_w if growth is None else demand_w * growth, want.floor_w, want.most_w)
    return want._replace(
        power_w=power_w,
        demand_w=np.where(metered, demand_w, want.demand_w),
        peak_w=np.where(metered, peak, want.peak_w),
        capped=want.capped & ~waiting,
    )


def waiting_places(
    site: Site, carried: Carried, want: Wants, left_w: F64, unreported: UnreportedGpus
) -> Bool:
    """Places [n_place] below which a GPU or a rack is waited for, and whose demand fits in what is left.

    They cut nobody yet: that all GPUs may rise to their most at once is judged when all report.
    """
    if not unreported.learning_rack.any():
        return np.zeros(len(left_w), np.bool_)
    waits = sums_w(carried, unreported.learning_rack.astype(np.float64)) > 0
    demand_w = site.sum_by_rack("gpu", np.where(want.capped, want.demand_w, 0.0)) * gain_of(site)
    return np.asarray(waits & (sums_w(carried, demand_w) <= left_w), np.bool_)
