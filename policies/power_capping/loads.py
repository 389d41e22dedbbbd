"""Loads: the present load of each feeder, from its meter and its racks, and the age of that value.

The load is the larger of the meter and the sum of its racks; a rack counts with no less than its nodes imply.
If the meter is silent, the load is the smaller of the worst cases of the meter and of the racks. The supplies
of nodes show within a second that a side has stopped feeding their racks; meters of a building take several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import SUPPLIES, Carried, gain_of, sums_w
from policies.power_capping.demand import current
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import View
from twin.site import HALL_BUDGET, Design
from twin.telemetry import GOOD

# Of a node's power: a supply without a feed delivers less than the first, and the other one more than the
# second of these. source: estimate; two that share differ by some percent
UNFED_PU, ALONE_PU = 0.03, 0.8
LEAST_NODE_W = 50.0  # below it supplies say nothing. source: estimate
MOST_PU = 0.9  # of the nodes of a rack that say so: a supply alone breaks now and then. source: estimate
# Of what a profile makes of the power of its nodes: a rack draws no less. source: estimate, profiles err
LEAST_PU = 0.9
FOREVER_S = 1e8  # an age that stands for none


class RackPower(NamedTuple):
    """Power of racks as they report it, of a hall as its daemon does [n_rack] each: whether it was just
    read, as last read, as bad as it may be by now (W), and its age (s)."""

    reporting: Bool
    read_w: F64
    worst_w: F64
    age_s: F64


def rack_power(view: View) -> RackPower:
    """Power of all racks."""
    is_hall = np.isfinite(view.site.envelopes[HALL_BUDGET].safe)
    columns = [
        (view.quality(key) == GOOD, view.believed(key), view.worst(key), view.age_s(key))
        for key in ("rack.power_w", *(("rack.hall_power_w",) if is_hall.any() else ()))
    ]
    reporting, read_w, worst_w, age_s = (
        np.where(is_hall, of_halls, of_racks)
        for of_racks, of_halls in zip(columns[0], columns[-1], strict=True)
    )
    return RackPower(reporting, *(x.astype(np.float64) for x in (read_w, worst_w, age_s)))


class Loads(NamedTuple):
    """Of each feeder [n_feeder]: load (W, NaN where nothing was ever reported), whether it was read and not
    only feared, and when; of each GPU [n_gpu]: whether it reports its power; of each rack [n_rack]: what it
    should draw by now from its meter and its nodes, and from its nodes alone (0: none reports), W."""

    load_w: F64
    metered: Bool
    read_ns: I64
    gpu_reporting: Bool
    rack_w: F64
    likely_w: F64


def loads_of(view: View, carried: Carried) -> Loads:
    """Loads of all feeders."""
    first, n = carried.feeder(0), view.site.sizes["feeder"]
    pairs = carried.pairs
    gpu_reporting = current(view, "gpu.power_w")
    gpu_w = np.where(gpu_reporting, view.believed("gpu.power_w"), 0.0).astype(np.float64)
    sure_w, likely_w = _by_nodes_w(view, gpu_w)
    rack = rack_power(view)
    # Whatever its meter says, a rack draws what its nodes do, and most of what comes with them
    least_w = np.fmax(sure_w, LEAST_PU * likely_w)
    rack_w = np.where(rack.reporting, np.fmax(rack.read_w, least_w), likely_w)
    racks_w = sums_w(carried, rack_w)[first : first + n]

    read = view.quality("feeder.power_w") == GOOD
    meter_w = np.where(read, view.believed("feeder.power_w"), np.nan).astype(np.float64)
    by_meter = read & ~(racks_w > meter_w)
    # All racks below report: their sum is a reading as well
    unreported = sums_w(carried, (~rack.reporting).astype(np.float64))[first : first + n] > 0
    metered = read | (~unreported & (racks_w > 0))

    worst_rack_w = np.where(np.isfinite(rack.worst_w), rack.worst_w, likely_w)
    worst_w = sums_w(carried, worst_rack_w)[first : first + n]
    feared_w = np.fmin(view.worst("feeder.power_w"), np.where(worst_w > 0, worst_w, np.nan))
    load_w = np.where(read, np.fmax(meter_w, racks_w), feared_w)

    # As old as the oldest reading in it
    age_of_rack = np.where(rack.reporting, np.minimum(rack.age_s, FOREVER_S), 0.0)
    oldest = np.zeros(len(carried.limit_w))
    np.maximum.at(oldest, pairs.place, age_of_rack[pairs.rack])
    age_s = np.where(by_meter, np.minimum(view.age_s("feeder.power_w"), FOREVER_S), oldest[first : first + n])
    read_ns = view.now_ns - np.where(metered, age_s * NS, 0.0).astype(np.int64)
    return Loads(load_w, metered, read_ns, gpu_reporting, np.fmax(rack_w, likely_w), likely_w)


def _by_nodes_w(view: View, gpu_w: F64) -> tuple[F64, F64]:
    """Return the least and the likely power of racks by their nodes [n_rack]; 0 where no node reports.

    Nodes and GPUs report within a second, a building's meters report a rise when it is over. `gpu_w`
    [n_gpu]: 0 where a GPU is silent. Where a profile does not say, less is likely.
    """
    site, design = view.site, view.site.design
    of = site.rack_of_node
    node = site.derived("node_of_gpu", lambda: site.node_of_gpu.astype(np.intp))
    gpus_w = np.bincount(node, gpu_w, site.sizes["node"])
    meter_w = np.where(view.quality("node.power_w") == GOOD, view.believed("node.power_w"), 0.0)
    sure_w = np.fmax(meter_w, gpus_w).astype(np.float64)
    gain, beside_w = site.derived("by_nodes", lambda: (gain_of(site)[of], _beside_w(design)[of]))
    likely_w = np.fmax(meter_w, gpus_w * gain + beside_w).astype(np.float64)
    some_w = site.sum_by_rack("node", sure_w)
    out_w = site.sum_by_rack("node", likely_w) + np.nan_to_num(design.rack_overhead_w)
    return some_w, np.where(some_w > 0, out_w, 0.0)


def _beside_w(design: Design) -> F64:
    """Return the least power of a node beside its GPUs [n_rack]; 0 where a profile does not say."""
    return np.nan_to_num(design.cpu_idle_w + design.node_other_w)


def lifted(share: F64, rack_w: F64, load_w: float) -> F64:
    """Shares of racks on a feeder [k] that account for its load: raised alike, none above 1.

    When the other side is lost and has not reported so yet, more than its share of a rack flows here.
    """
    out = share.copy()
    for _ in range(len(share)):
        free_w = float((out * rack_w)[out < 1.0].sum())
        missing_w = load_w - float(out @ rack_w)
        if not missing_w > 1e-6 * load_w or free_w <= 0.0:
            break
        out = np.where(out < 1.0, np.minimum(out * (1.0 + missing_w / free_w), 1.0), out)
    return out


def unfed_feeders(view: View, dead: Bool) -> Bool:
    """Return the feeders that deliver no power to their racks, by the supplies of the nodes [n_feeder].

    Supplies 1 and 2 hang on sides A and B. Of a feeder that serves racks itself all of them have to say so;
    `dead` [n_feeder] are known already. A rack that would be left without any feed contradicts them: then
    nothing is taken from its supplies.
    """
    site = view.site
    none: Bool = np.zeros(len(dead), np.bool_)
    direct = site.feeders_of_rack
    if not site.sizes["node"] or not len(direct.member):
        return none
    reported = view.quality("node.power_w") == GOOD
    for key in SUPPLIES:
        reported &= view.quality(key) == GOOD
    whole_w = np.where(reported, view.believed("node.power_w"), 0.0).astype(np.float64)
    reported &= whole_w >= LEAST_NODE_W
    if not reported.any():
        return none
    one, two = (np.nan_to_num(view.value(key)).astype(np.float64) for key in SUPPLIES)
    many = site.sum_by_rack("node", reported.astype(np.float64))
    rack, side = direct.row_of_member, site.side_of_feeder[direct.member]
    says = np.zeros(len(rack), np.bool_)
    for of, gone_w, kept_w in ((1, one, two), (2, two, one)):
        node = reported & (gone_w <= UNFED_PU * whole_w) & (kept_w >= ALONE_PU * whole_w)
        if node.any():
            lost = (many > 0) & (site.sum_by_rack("node", node.astype(np.float64)) >= MOST_PU * many)
            says |= lost[rack] & (side == of)
    if not says.any():
        return none
    n_feeder, n_rack = len(dead), site.sizes["rack"]
    taps = np.bincount(direct.member, minlength=n_feeder)
    out: Bool = (np.bincount(direct.member, says, n_feeder) >= np.maximum(taps, 1)) & ~dead
    left = np.bincount(rack, ~(dead | out)[direct.member], n_rack)
    torn = (left == 0)[rack]
    out[direct.member[torn]] = False
    return out
