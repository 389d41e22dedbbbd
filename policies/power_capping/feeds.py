"""Feeds: the load of the site and of each feeder, its bounds, and the nodes that could shed load.

The load of the site is the sum of its racks: the meter of a rack, or the sum of its GPUs if the meter is
silent. Racks that never reported are counted separately, so that nobody mistakes a part for the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import Carried, carried_by, dead_feeders, gain_of, pairs_of, sums_w
from policies.power_capping.demand import CONTROL, Tenant, classes
from policies.power_capping.loads import loads_of, rack_power
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Value, View, finite
from twin.site import HALL_BUDGET
from twin.telemetry import GOOD

CAPPED_W = 1.0  # below its most: a GPU is held back
LEAST_SHED_W = 10.0  # of a node; less is not worth asking for. source: estimate
SHED_PU = 1.1  # of the excess: some of those who are asked may not follow. source: estimate
MOST_NODES = 200


class FeedLoads(NamedTuple):
    """Load of the site (W, NaN where nothing was ever reported), its unreported racks, and of each feeder the
    load (W, NaN unknown), whether it was read and is not only feared, and the instant of the oldest reading
    in it [n_feeder]; `site_age_s` is that of the site's racks."""

    site_w: float
    unheard_racks: int
    feeder_w: F64
    metered: Bool
    read_ns: I64
    site_age_s: float


def carried_now(view: View) -> Carried:
    """Return the places with the racks that they carry now, without those that a failure would add."""
    return carried_by(view, pairs_of(view.site, dead_feeders(view), failover=False))


def feed_loads(view: View, carried: Carried) -> FeedLoads:
    """Return the loads of the site and of all feeders, at worst case for silent meters."""
    site, loads = view.site, loads_of(view, carried)
    rack = rack_power(view)
    read_w = np.where(rack.reporting, rack.read_w, rack.worst_w)
    # A NaN of one GPU must not hide the draw of the others of its rack
    gpus_w = site.sum_by_rack("gpu", np.nan_to_num(view.worst("gpu.power_w").astype(np.float64)))
    rack_w = np.where(np.isfinite(read_w), read_w, gpus_w * gain_of(site))
    unreported = ~np.isfinite(read_w) & (gpus_w <= 0)
    site_w = float(rack_w.sum()) if (~unreported).any() else np.nan
    age_s = float(rack.age_s[rack.reporting].max(initial=0.0))
    return FeedLoads(site_w, int(unreported.sum()), loads.load_w, loads.metered, loads.read_ns, age_s)


def feed_rows(view: View, carried: Carried, loads: FeedLoads) -> list[dict[str, Value]]:
    """A row for the site (`feeder` empty), then one for each feeder, in the order of the site."""
    site = view.site
    first, n = carried.feeder(0), site.sizes["feeder"]
    least_w, most_w, capped = *_extremes(view), _held_back(view)
    of_feeder = [sums_w(carried, x)[first : first + n] for x in (least_w, most_w, capped.astype(np.float64))]
    rows: list[dict[str, Value]] = [
        {
            "feeder": "",
            "load_w": finite(loads.site_w),
            "metered": loads.unheard_racks == 0,
            "age_s": finite(loads.site_age_s, 1),
            "least_w": float(least_w.sum()),
            "most_w": float(most_w.sum()),
            "held_back": bool(capped.any()),
        }
    ]
    for f in range(n):
        rows.append(
            {
                "feeder": site.name("feeder", f),
                "load_w": finite(loads.feeder_w[f]),
                "metered": bool(loads.metered[f]),
                "age_s": finite((view.now_ns - int(loads.read_ns[f])) / NS, 1) if loads.metered[f] else None,
                "least_w": float(of_feeder[0][f]),
                "most_w": float(of_feeder[1][f]),
                "held_back": bool(of_feeder[2][f] > 0),
            }
        )
    return rows


def shed_rows(
    view: View, feeder: int | None, excess_w: float, high_priority: int, tenants: dict[str, Tenant]
) -> list[dict[str, Value]]:
    """Nodes whose GPUs could be cut to their least, until an excess of a feeder (None: the site) is covered.

    In the order in which the policies cut: no job, usual, high, inference.
    """
    site = view.site
    low = np.asarray(view.envelope(CONTROL).low, np.float64)
    reported = view.quality("gpu.power_w") == GOOD
    gpu_w = np.where(reported, view.believed("gpu.power_w"), np.nan).astype(np.float64)
    node, n_node = site.node_of_gpu, site.sizes["node"]
    shed_w = np.bincount(node, np.nan_to_num(np.maximum(gpu_w - low, 0.0)), n_node)
    share: F64 = np.ones(site.sizes["rack"])
    if feeder is not None:
        carried = carried_now(view)
        mine = carried.pairs.place == carried.feeder(feeder)
        share = np.bincount(carried.pairs.rack[mine], carried.pairs.share[mine], site.sizes["rack"]).astype(
            np.float64
        )
    here_w = shed_w * (share * gain_of(site))[site.rack_of_node]
    class_of = np.zeros(n_node, np.int64)
    np.maximum.at(class_of, node, classes(view, high_priority, tenants).astype(np.int64))
    order = np.lexsort((-here_w, class_of))
    order = order[here_w[order] >= LEAST_SHED_W]
    enough = int(np.searchsorted(np.cumsum(here_w[order]), SHED_PU * excess_w)) + 1
    draws_w = _node_w(view, np.bincount(node, np.nan_to_num(gpu_w), n_node).astype(np.float64))
    return [
        {
            "node": site.name("node", n),
            "class": int(class_of[n]),
            "keeps_w": float(max(draws_w[n] - shed_w[n], 0.0)),
        }
        for n in order[: min(enough, MOST_NODES)].tolist()
    ]


def _extremes(view: View) -> tuple[F64, F64]:
    """Return the power of racks at their lowest and at their highest caps, in W [n_rack]."""
    site, design, envelope = view.site, view.site.design, view.envelope(CONTROL)
    nodes, gain = np.diff(site.node_start_of_rack), gain_of(site)
    overhead_w = np.nan_to_num(design.rack_overhead_w)
    most_gpu_w = np.nan_to_num(design.gpu_max_w)[site.rack_of_gpu]
    floor_w = np.where(np.isfinite(envelope.low), envelope.low, most_gpu_w)
    least_w = nodes * np.nan_to_num(design.cpu_idle_w + design.node_other_w) + overhead_w
    least_w = least_w + site.sum_by_rack("gpu", floor_w) * gain
    all_w = nodes * np.nan_to_num(design.cpu_max_w + design.node_other_w) + overhead_w
    all_w = all_w + site.sum_by_rack("gpu", most_gpu_w) * gain
    of_hall = site.envelopes[HALL_BUDGET]
    least_w = np.where(np.isfinite(of_hall.safe), of_hall.safe, least_w)
    most_w = np.where(np.isfinite(design.rack_max_w), design.rack_max_w, all_w)
    return least_w, np.where(np.isfinite(of_hall.safe), of_hall.high, most_w)


def _held_back(view: View) -> Bool:
    """Return racks with a GPU capped below its maximum, and halls with less than their demand [n_rack]."""
    capped = view.commanded(CONTROL) < view.envelope(CONTROL).high - CAPPED_W  # NaN: no lease, not capped
    held: Bool = view.site.sum_by_rack("gpu", capped.astype(np.float64)) > 0
    return held | (view.commanded(HALL_BUDGET) < view.believed("rack.hall_demand_w"))


def _node_w(view: View, gpus_w: F64) -> F64:
    """Power of nodes [n_node]: from their meter, or else their GPUs plus the maximum of the rest."""
    site, design = view.site, view.site.design
    rest_w = np.nan_to_num(design.cpu_max_w + design.node_other_w)[site.rack_of_node]
    metered = view.quality("node.power_w") == GOOD
    return np.where(metered, view.believed("node.power_w"), gpus_w + rest_w).astype(np.float64)
