"""Depth: how far GPUs below a place are cut, as one number, the class that waits least first.

At depth 0 all may have their most; from d to d + 1 the caps of class d fall from their most to their floors,
and all classes below it stand at theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import Carried
from policies.power_capping.demand import Wants
from policies.power_capping.loads import Loads, lifted
from twin.catalogue import F64, I64
from twin.contracts import View


class Below(NamedTuple):
    """GPUs below one place [k]: which, watts at it for a watt of each, and their bounds."""

    at: I64
    share: F64
    floor_w: F64
    most_w: F64
    rank: F64


def below_of(
    view: View, carried: Carried, want: Wants, rank: F64, place: int, loads: Loads | None = None
) -> Below:
    """GPUs below a place; with `loads`, of a feeder.

    Where more flows than its racks should make, they draw more of their power here.
    """
    site = view.site
    mine = carried.pairs.place == place
    racks, share = carried.pairs.rack[mine], carried.pairs.share[mine]
    if loads is not None and loads.metered[place - carried.feeder(0)]:
        share = lifted(share, loads.rack_w[racks], float(loads.load_w[place - carried.feeder(0)]))
    start = site.gpu_start_of_node[site.node_start_of_rack]
    many = start[racks + 1] - start[racks]
    at = np.repeat(start[racks] - np.cumsum(many) + many, many) + np.arange(many.sum())
    return Below(at, np.repeat(share, many) * want.capped[at], want.floor_w[at], want.most_w[at], rank[at])


def caps_w(depth: F64 | float, rank: F64, floor_w: F64, most_w: F64) -> F64:
    """Caps at a depth: a class that it passed is at its floor, the one that it stands in is in between."""
    return floor_w + np.clip(1.0 - (depth - rank), 0.0, 1.0) * (most_w - floor_w)


def caps_of(x: Below, depth: float) -> F64:
    """Caps of these GPUs at a depth [k]."""
    return caps_w(depth, x.rank, x.floor_w, x.most_w)


def deep_enough(x: Below, power_w: F64, goal_w: float, least: float) -> float:
    """The least depth, and at least `least`, at which GPUs that want `power_w` [k] draw at most `goal_w`."""

    def drawn_w(depth: float) -> float:
        return float(x.share @ np.minimum(power_w, caps_of(x, depth)))

    low, high = least, max(least, float(x.rank.max(initial=0.0)) + 1.0)  # no class is above the last one
    if drawn_w(low) <= goal_w:
        return low
    if drawn_w(high) > goal_w:
        return high
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if drawn_w(middle) > goal_w else (low, middle)
    return high
