"""Bounds on caps after a loss: of flow in a CDU or loop, of readings from GPUs and the feeders above them.

Neither needs a memory: where flow or readings are back, nothing is said any more, and caps rise no faster
than a control may.
"""

from __future__ import annotations

import numpy as np

from policies.power_capping.budgets import Carried, other_w, sums_w
from policies.power_capping.demand import CONTROL, classes, wants
from policies.power_capping.depth import below_of, caps_of, deep_enough
from policies.power_capping.loads import Loads
from twin.catalogue import Bool
from twin.contracts import Proposal, View, mask_index

AIM_PU = 0.95  # of what is left: as a feeder that was overloaded. source: domain.md E
LOST_PU = 0.999  # of its capacity: a CDU or loop with less has lost some
STAYS_PU = 0.10  # of its range, by which a cap that flow bounds may rise before it is moved. source: estimate
MOST_COOLED = 64  # CDUs and loops that lost flow and are looked at in a tick, the worst first


def unseen(view: View, carried: Carried, loads: Loads, bound: Bool) -> list[Proposal]:
    """Safe caps for silent GPUs below feeders of which nobody tells what flows there any more.

    `bound` [n_feeder]: those that have a budget. A rack that was never heard asks for nothing.
    """
    site, pairs = view.site, carried.pairs
    blind = np.zeros(len(carried.limit_w), np.bool_)
    first = carried.feeder(0)
    blind[first : first + len(bound)] = bound & ~loads.metered & np.isfinite(loads.load_w)
    if not blind.any():
        return []
    below = np.zeros(carried.n_rack, np.bool_)
    below[pairs.rack[blind[pairs.place]]] = True
    envelope = view.envelope(CONTROL)
    silent = ~loads.gpu_heard & np.isfinite(view.value("gpu.power_w"))
    index = mask_index(below[site.rack_of_gpu] & silent & np.isfinite(envelope.low))
    if not len(index):
        return []
    safe_w, commanded_w = envelope.safe[index], view.commanded(CONTROL)[index]
    # What stands lower is left there
    want_w = np.where(commanded_w <= safe_w, np.nan, safe_w)
    why = "neither these GPUs nor the feeders above them were heard for three periods: safe caps"
    return [Proposal(CONTROL, index, envelope.low[index], safe_w.copy(), want_w, why)]


def cooled(view: View, carried: Carried, high_priority: int) -> list[Proposal]:
    """Bounds for GPUs below CDUs and loops that lost flow: all at their caps make no more heat than is taken.

    Without a memory: a cap stays where it is until it may rise by a tenth of its range.
    """
    site, design = view.site, view.site.design
    whole_w = np.concatenate([design.cdu_heat_w, design.loop_heat_w])
    first = carried.n_rack + carried.n_feeder
    left_w = carried.limit_w[first : first + len(whole_w)]
    short = np.flatnonzero(np.isfinite(left_w) & (left_w < LOST_PU * whole_w))
    out: list[Proposal] = []
    if not len(short):
        return out
    want = wants(view, np.zeros(site.sizes["gpu"]), 0.0)
    rank = classes(view, high_priority).astype(np.float64)
    # What a cut saves on the way to GPUs comes on top of it: it is counted when it is read
    fixed_w = sums_w(carried, np.nan_to_num(other_w(view, want.power_w, gain=1.0)))
    commanded_w = view.commanded(CONTROL)
    for at in short[np.argsort(left_w[short] / whole_w[short], kind="stable")][:MOST_COOLED].tolist():
        below = below_of(view, carried, want, rank, first + at)
        goal_w = AIM_PU * float(left_w[at]) - float(fixed_w[first + at])
        cap_w = caps_of(below, deep_enough(below, below.most_w, goal_w, 0.0))
        held = (below.share > 0) & (cap_w < below.most_w)
        order = np.argsort(below.at[held], kind="stable")
        index, cap_w = below.at[held][order].astype(np.int32), cap_w[held][order]
        if not len(index):
            continue
        stays = commanded_w[index] >= cap_w - STAYS_PU * (want.most_w - want.floor_w)[index]
        wished_w = np.where(stays, np.nan, cap_w)
        why = f"{carried.name(site, first + at)} has {100 * left_w[at] / whole_w[at]:.0f} % of its flow"
        out.append(Proposal(CONTROL, index, want.floor_w[index], cap_w, wished_w, why))
    return out
