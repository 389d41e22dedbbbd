"""Headroom: the load that racks, feeders and CDUs can still take, and whether one more node fits.

A rack that two feeders serve counts in full on each, as when the other is lost. An unmeasured load counts
with the most that its profile allows, which then includes a new load already; an unknown one leaves no
headroom.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, I64, Bool
from twin.contracts import View
from twin.telemetry import GOOD


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Loads (W) and limits (inf: no limit) of each rack, feeder and CDU, one after the other.

    `over` [n_rack, m]: the places that carry a rack: itself, each feeder above it, its CDU; -1 pads. `share`
    is how much of a watt of the rack reaches each of them. `measured` [n_rack]: known by a reading.
    """

    now_w: F64
    most_w: F64
    over: I32
    share: F64
    measured: Bool
    n_rack: int
    n_feeder: int

    def name(self, view: View, place: int) -> str:
        """Return the full name of a rack, feeder or CDU by its place."""
        if place < self.n_rack:
            return view.site.name("rack", place)
        place -= self.n_rack
        return (
            view.site.name("feeder", place)
            if place < self.n_feeder
            else view.site.name("cdu", place - self.n_feeder)
        )


def good_readings(view: View, key: str) -> F64:
    """Return the present good readings [n]; NaN elsewhere."""
    return np.where(view.quality(key) == GOOD, view.value(key), np.nan).astype(np.float64)


def load_limits(view: View) -> LoadLimits:
    """Return the present loads and limits of every rack, feeder and CDU."""
    site, design = view.site, view.site.design
    n_rack, n_feeder, n_cdu = site.sizes["rack"], site.sizes["feeder"], site.sizes["cdu"]
    nodes_w = site.sum_by_rack("node", good_readings(view, "node.power_w")) + np.nan_to_num(
        design.rack_overhead_w
    )
    nodes_w[np.diff(site.node_start_of_rack) == 0] = np.nan
    read_w = good_readings(view, "rack.power_w")
    rack_w = np.where(np.isfinite(read_w), read_w, nodes_w)
    measured = np.isfinite(rack_w)
    rack_w = np.where(measured, rack_w, design.rack_max_w)
    limit = view.limit("rack.power_w")
    stated_w = np.fmin(limit.guard, limit.max) if limit is not None else np.full(n_rack, np.nan)
    rack_most_w = np.fmin(stated_w, design.rack_max_w)
    feeder, rack = site.served_racks()
    feeder_w = np.bincount(feeder, rack_w[rack], n_feeder).astype(np.float64)
    capture = np.nan_to_num(design.capture_pu)
    cooled = site.cdu_of_rack >= 0
    heat_w = np.where(capture > 0.0, capture * rack_w, 0.0)
    cdu_w = np.bincount(site.cdu_of_rack[cooled], heat_w[cooled], n_cdu).astype(np.float64)
    most_w = np.concatenate([rack_most_w, view.budget_w(), design.cdu_heat_w])
    over, share = _carriers(view, feeder, rack, capture)
    return LoadLimits(
        np.concatenate([rack_w, feeder_w, cdu_w]),
        np.where(np.isnan(most_w), np.inf, most_w),
        over,
        share,
        measured,
        n_rack,
        n_feeder,
    )


def _carriers(view: View, feeder: I64, rack: I64, capture: F64) -> tuple[I32, F64]:
    """Return (places that carry each rack, the share of its power that they carry) [n_rack, m]; -1 and 0
    pad."""
    site = view.site
    n_rack, n_feeder = site.sizes["rack"], site.sizes["feeder"]
    many = np.bincount(rack, minlength=n_rack)
    width = 2 + int(many.max(initial=0))
    over = np.full((n_rack, width), -1, np.int32)
    share = np.zeros((n_rack, width))
    over[:, 0], share[:, 0] = np.arange(n_rack), 1.0
    cooled = (site.cdu_of_rack >= 0) & (capture > 0.0)
    over[cooled, 1] = n_rack + n_feeder + site.cdu_of_rack[cooled]
    share[cooled, 1] = capture[cooled]
    order = np.argsort(rack, kind="stable")
    at = np.arange(len(rack)) - np.repeat(np.cumsum(many) - many, many)
    over[rack[order], 2 + at] = n_rack + feeder[order]
    share[rack[order], 2 + at] = 1.0
    return over, share


def load_w(view: View) -> tuple[F64, F64]:
    """Return (power of each node with its work, idle power) [n_node], W; NaN = no reading and no profile.

    The first is the greater of its mean and its peak reading, else the most of its profile; the second what
    it draws where no job is on it, else that of its profile, and no more than it draws.
    """
    site, design = view.site, view.site.design
    rack, count = site.rack_of_node, np.maximum(np.diff(site.node_start_of_rack), 1)
    gpus = np.diff(site.gpu_start_of_node)
    most_w = ((design.rack_max_w - np.nan_to_num(design.rack_overhead_w)) / count)[rack]
    idle_w = gpus * design.gpu_idle_w[rack] + (design.cpu_idle_w + design.node_other_w)[rack]
    mean_w = good_readings(view, "node.power_w")
    read_w = np.fmax(mean_w, good_readings(view, "node.power_w_max"))
    busy_w = np.where(np.isfinite(read_w), read_w, most_w)
    free = np.isfinite(mean_w) & (view.jobs.job_of_node < 0)
    return busy_w, np.where(free, mean_w, np.fmin(idle_w, busy_w))


class LoadShift(NamedTuple):
    """The effect of moving a load from one node to another [k] on the places that carry the second.

    `use_pu` [k]: the greatest share of a limit that is then used of any of them; `place` [k] where; `fits`:
    no limit is broken that was not, and none is broken further.
    """

    use_pu: F64
    place: I32
    fits: Bool


def shift_load(
    view: View, limits: LoadLimits, leaving: I32, spare: I32, busy_w: F64, idle_w: F64
) -> LoadShift:
    """Return the effect on the limits if each leaving node's load [k] moves to the spare beside it [k].

    `busy_w` and `idle_w` [n_node] as `load_w` gives them. A place that carries both is relieved of the first.
    """
    rack = view.site.rack_of_node
    added_w, freed_w = _change_w(limits, rack, leaving, spare, busy_w, idle_w)
    over, share = limits.over[rack[spare]], limits.share[rack[spare]]
    here = over >= 0
    both = (over[:, :, None] == limits.over[rack[leaving]][:, None, :]).any(axis=2) & here
    change_w = share * (added_w[:, None] - np.where(both, freed_w[:, None], 0.0))
    at = np.maximum(over, 0)
    then_w, most_w = limits.now_w[at] + change_w, limits.most_w[at]
    with np.errstate(invalid="ignore", divide="ignore"):
        use = np.where(here & np.isfinite(most_w), then_w / most_w, 0.0)
    use = np.where(np.isnan(use), np.inf, use)
    # A limit that is broken already is no reason against what takes load off it
    breaks = (use > 1.0) & ~(change_w <= 0.0)
    worst = np.argmax(np.where(breaks, np.inf, use), axis=1)
    row = np.arange(len(spare))
    fits: Bool = ~np.asarray(breaks.any(axis=1))
    return LoadShift(use[row, worst], over[row, worst], fits)


def _change_w(
    limits: LoadLimits, rack: I32, leaving: I32, spare: I32, busy_w: F64, idle_w: F64
) -> tuple[F64, F64]:
    """Return (W more at the spare, W less at the leaving node) [k]; without measurements, no change."""
    step_w = busy_w[leaving] - idle_w[leaving]
    more_w = np.maximum(busy_w[leaving] - idle_w[spare], 0.0)
    added_w = np.where(limits.measured[rack[spare]], more_w, 0.0)
    return added_w, np.where(limits.measured[rack[leaving]], np.nan_to_num(step_w), 0.0)


def limits_after_shift(
    view: View, limits: LoadLimits, leaving: int, spare: int, busy_w: F64, idle_w: F64
) -> LoadLimits:
    """Return the limits after this load has moved."""
    rack = view.site.rack_of_node
    pair = np.array([leaving], np.int32), np.array([spare], np.int32)
    added_w, freed_w = _change_w(limits, rack, *pair, busy_w, idle_w)
    now_w = limits.now_w.copy()
    for node, watts in ((spare, np.nan_to_num(added_w[0])), (leaving, -freed_w[0])):
        over, share = limits.over[rack[node]], limits.share[rack[node]]
        now_w[over[over >= 0]] += share[over >= 0] * watts
    return replace(limits, now_w=now_w)


def present_use(view: View, limits: LoadLimits, node: I32) -> F64:
    """Return the greatest used share of a limit among the places that carry these nodes [k]; inf =
    unknown."""
    over = limits.over[view.site.rack_of_node[node]]
    at = np.maximum(over, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        use = np.where(
            (over >= 0) & np.isfinite(limits.most_w[at]), limits.now_w[at] / limits.most_w[at], 0.0
        )
    out: F64 = np.where(np.isnan(use), np.inf, use).max(axis=1)
    return out
