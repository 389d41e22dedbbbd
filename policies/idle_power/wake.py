"""Wake-ups: selects the nodes to start in one pass, so that no rack, feeder or CDU exceeds its limit.

A rack that two feeders serve counts in full on each, as if the other were lost. A node counts with its power
at start. The starts of one pass raise no feeder by more than a share of its budget, and bring no breaker near
a trip, by heat or by inrush.
"""

from __future__ import annotations

import numpy as np

from policies.idle_power.breakers import INRUSH_PU, breaker_room
from policies.idle_power.nodes import WOKEN
from policies.node_replacement import LoadLimits
from twin.catalogue import F64, I32, NS
from twin.contracts import Memory, View

BOOT_PU = 1.25  # of a node's idle draw while it starts: fans at full speed; source: estimate
MOST = 512  # nodes that are looked at in one look
UNREAD_S = 60.0  # until a meter reports a node that was woken; source: estimate


def idle_draw_w(view: View, memory: Memory) -> F64:
    """Power of each node when idle, as read before it slept, else by its profile [n_node]."""
    site, design, rack, read_w = view.site, view.site.design, view.site.rack_of_node, memory["idle_w"]
    gpus = np.diff(site.gpu_start_of_node)
    by_profile = gpus * design.gpu_idle_w[rack] + (design.cpu_idle_w + design.node_other_w)[rack]
    out: F64 = np.where(np.isfinite(read_w), read_w, np.nan_to_num(by_profile))
    return out


def inrush_w(view: View) -> F64:
    """The most that each node draws for a moment when it starts [n_node]."""
    site, design = view.site, view.site.design
    count = np.maximum(np.diff(site.node_start_of_rack), 1)
    node_w = (design.rack_max_w - np.nan_to_num(design.rack_overhead_w)) / count
    return INRUSH_PU * np.nan_to_num(node_w)[site.rack_of_node]


def wake_first(
    view: View, memory: Memory, limits: LoadLimits, sleepers: I32, want_gpus: float, ramp_pu: float
) -> I32:
    """Of these sleepers those to wake now, until so many GPUs are on their way; fewer where limits bind.

    Racks with the most room go first.
    """
    site, rush_w = view.site, inrush_w(view)
    start_w, gpus = BOOT_PU * idle_draw_w(view, memory), np.diff(site.gpu_start_of_node)
    room_w, rush_room_w = limits.most_w - limits.now_w, np.full(len(limits.most_w), np.inf)
    feeders = slice(limits.n_rack, limits.n_rack + limits.n_feeder)
    breakers = breaker_room(view, memory, limits)
    room_w[feeders] = np.minimum(room_w[feeders], breakers.start_w)
    # Those that were just woken are not in the readings yet
    fresh = (memory["phase"] == WOKEN) & (view.now_ns - memory["phase_ns"] < round(UNREAD_S * NS))
    for node in np.flatnonzero(fresh)[:MOST].tolist():
        _take(room_w, limits, int(site.rack_of_node[node]), float(start_w[node]))
    # One start is always allowed, however small the feeder
    least_w = float(start_w[sleepers].max(initial=0.0))
    room_w[feeders] = np.minimum(room_w[feeders], np.maximum(ramp_pu * limits.most_w[feeders], least_w))
    rush_room_w[feeders] = np.maximum(breakers.inrush_w, float(rush_w[sleepers].max(initial=0.0)))
    for node in np.flatnonzero(fresh & (memory["phase_ns"] == view.now_ns))[:MOST].tolist():
        _take(rush_room_w, limits, int(site.rack_of_node[node]), float(rush_w[node]))
    over = limits.over[site.rack_of_node[sleepers]]
    free_w = np.where(over >= 0, room_w[np.maximum(over, 0)], np.inf).min(axis=1)
    chosen, got = list[int](), 0.0
    for node in sleepers[np.lexsort((sleepers, -free_w))][:MOST].tolist():
        if got >= want_gpus:
            break
        rack, watts = int(site.rack_of_node[node]), float(start_w[node])
        at = limits.over[rack]
        share = limits.share[rack][at >= 0]
        fits = (room_w[at[at >= 0]] >= share * watts).all()
        if fits and (rush_room_w[at[at >= 0]] >= share * rush_w[node]).all():
            _take(room_w, limits, rack, watts)
            _take(rush_room_w, limits, rack, float(rush_w[node]))
            chosen.append(node)
            got += float(gpus[node])
    return np.array(sorted(chosen), np.int32)


def _take(room_w: F64, limits: LoadLimits, rack: int, watts: float) -> None:
    over, share = limits.over[rack], limits.share[rack]
    room_w[over[over >= 0]] -= share[over >= 0] * watts
