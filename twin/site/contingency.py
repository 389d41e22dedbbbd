"""Contingency caps: GPU caps with which either feed alone carries the site, without the daemon.

Delivered to the nodes' agents beforehand and applied by them on a local trigger. The same sums as in
`twin.site.safety`: a rack counts in full on every feeder that reaches it, since the other side may be the
one that is lost. All racks rise together from their lowest caps towards their highest; where a budget is
used up, the racks below it stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I32
from twin.site.profile import Profile
from twin.site.safety import CONTROL, budgets_w, lapse_power_w
from twin.site.site import Site

STEP_W = 1.0  # caps are whole watts, rounded down
_NEARLY_W = 1e-6


@dataclass(frozen=True, slots=True)
class Contingency:
    """`caps_w` [n_gpu]: NaN where no budget binds or nothing is known; `infeasible`: what cannot be met."""

    caps_w: F64
    infeasible: tuple[str, ...]


def contingency_caps(site: Site, profiles: dict[str, Profile], budget_w: F64 | None = None) -> Contingency:
    """Caps with which every feeder stays within its budget when the other feed is lost.

    `budget_w` [n_feeder], NaN for none; left out, the site's own with the guaranteed share of external ones.
    """
    budget_w = budgets_w(site) if budget_w is None else budget_w
    envelope = site.envelopes[CONTROL]
    managed = site.sum_by_rack("gpu", np.nan_to_num(envelope.safe, nan=np.inf))
    other_w = lapse_power_w(site, profiles) - managed  # what is not a GPU; NaN = unknown
    low_w = site.sum_by_rack("gpu", envelope.low)
    span_w = site.sum_by_rack("gpu", envelope.high) - low_w
    base_w = other_w + low_w
    known = np.isfinite(base_w) & np.isfinite(span_w)
    infeasible: list[str] = []
    members: list[I32] = []
    room_w: list[float] = []
    for feeder in np.flatnonzero(np.isfinite(budget_w)).tolist():
        racks = site.racks_below(feeder)
        name, mine = site.name("feeder", feeder), racks[known[racks]]
        if len(mine) < len(racks):
            unknown = site.name("rack", int(racks[~known[racks]][0]))
            infeasible.append(
                f"{name}: the load of {unknown} is unknown, so its caps vouch only for the other racks; "
                "expected a profile with safe caps"
            )
        room = float(budget_w[feeder] - base_w[mine].sum())
        if room < 0:
            infeasible.append(
                f"{name}: {base_w[mine].sum() / 1e3:.1f} kW at the lowest caps with the other feed lost, "
                f"budget {budget_w[feeder] / 1e3:.1f} kW; move racks or raise the budget"
            )
        members.append(mine)
        room_w.append(room)
    level, bound = _filled(members, np.array(room_w), np.where(known, span_w, 0.0))
    gpu_level, gpu_bound = level[site.rack_of_gpu], bound[site.rack_of_gpu]
    exact_w = envelope.low + gpu_level * (envelope.high - envelope.low)
    whole_w = np.maximum(envelope.low, np.floor(exact_w / STEP_W + _NEARLY_W) * STEP_W)
    return Contingency(np.where(gpu_bound, whole_w, np.nan), tuple(infeasible))


def _filled(members: list[I32], room_w: F64, span_w: F64) -> tuple[F64, np.ndarray]:
    """(level of each rack between 0 and 1, whether a budget holds it there).

    `room_w` [k] is what the racks `members[k]` may draw together above their base, `span_w` [n_rack] what
    each draws more at level 1.
    """
    n = len(span_w)
    level, bound = np.zeros(n), np.zeros(n, np.bool_)
    if not members:
        return level, bound
    row = np.repeat(np.arange(len(members)), [len(m) for m in members])
    rack = np.concatenate(members).astype(np.int32)
    rising, at = span_w > 0, 0.0
    while rising.any():
        used = np.bincount(row, weights=level[rack] * span_w[rack], minlength=len(members))
        rate = np.bincount(row, weights=(span_w * rising)[rack], minlength=len(members))
        left = np.where(rate > 0, np.maximum(room_w - used, 0.0) / np.where(rate > 0, rate, 1.0), np.inf)
        step = min(1.0 - at, float(left.min()))
        at += step
        level[rising] = at
        full = left <= step
        if at >= 1.0 - 1e-12 and not full.any():
            break
        stopped = rack[full[row]]
        stopped = stopped[rising[stopped]]
        rising[stopped], bound[stopped] = False, True
    return level, bound
