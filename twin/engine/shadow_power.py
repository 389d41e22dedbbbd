"""Shadow power: the watts that devices would not draw under caps that are advised and not in force.

A GPU lowers its clock along the power curve that the estimator has learned of it until it meets its cap. With
each watt of its GPUs a rack saves what its regulators and fans lose of it, and its feeders carry their shares
of that. Meters tell of a load when it is over: from what they read is taken the most that would have
been saved of late, and no more than leaves what the GPUs would draw now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64, NS
from twin.contracts import View
from twin.estimation import Estimator
from twin.site import Site
from twin.telemetry import EntityState, column, scalar

POWER_TABLES = ("gpu", "node", "rack", "feeder")
GPU_POWER, NODE_POWER, CAP_READ = "gpu.power_w", "node.power_w", "gpu.power_limit_w"
LOST_FEED = ("feeder.energised_state", "feeder.breaker_state")
# A building's system may tell values of up to 3 s ago as if they were new, and devices need as long to obey.
# source: estimate, as of the guard of feeders
METER_LAG_S = 5.0


@dataclass(frozen=True, slots=True)
class SparedPower:
    """By table, W [n]: `watts` less than is read; what its GPUs would draw `now_w`, and drew at most of late.

    `node_pu`: the share of a node's power that it would not draw [n_node].
    """

    watts: Mapping[str, F64]
    now_w: Mapping[str, F64]
    late_w: Mapping[str, F64]
    node_pu: F64

    def left_w(self, table: str, read_w: F64) -> F64:
        """A reading of power as it would be [n]; negative savings are a rise."""
        left_w = np.maximum(read_w - self.watts[table], 0.0)
        if table == "gpu":
            return left_w
        beside_w = np.maximum(read_w - self.late_w[table], 0.0)
        return np.maximum(left_w, np.fmin(read_w, self.now_w[table] + beside_w))


class ShadowPower(EntityState):
    """The most that nodes and racks would have saved, and that their GPUs drew, W [2, 2, n].

    Saved and drawn, each in the present `METER_LAG_S` and in the one before.
    """

    node_w: F64 = column("node", "f8", lead=(2, 2))
    rack_w: F64 = column("rack", "f8", lead=(2, 2))
    turn_ns: int = scalar(0)  # since when the present one counts; 0 = nothing is saved

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site

    def update(
        self, view: View, estimator: Estimator, gpu_cap_w: F64 | None, node_cap_w: F64 | None
    ) -> SparedPower | None:
        """The effect of caps on GPUs and nodes ([n] W, NaN: none) on what is read of power; None: none."""
        if gpu_cap_w is None and node_cap_w is None and not self.turn_ns:
            return None
        site = self.site
        gain = (1.0 + np.nan_to_num(site.design.node_loss_pu))[site.rack_of_node]
        gpu_w = _by_gpus(view, estimator, gpu_cap_w)
        gpu_w, node_w = _by_nodes(view, gpu_w, gain, node_cap_w)
        drawn_w = np.nan_to_num(view.value(GPU_POWER).astype(np.float64))
        node_drawn_w, node_now_w = (
            np.bincount(site.node_of_gpu, of_gpu, site.sizes["node"]) * gain
            for of_gpu in (drawn_w, drawn_w - gpu_w)
        )
        rack_w, rack_drawn_w, rack_now_w = (
            site.sum_by_rack("node", of_node) for of_node in (node_w, node_drawn_w, node_now_w)
        )
        self._turn(view.now_ns, bool(node_w.any()))
        node_w, node_late_w = _of_late(self.node_w, node_w, node_drawn_w)
        rack_w, rack_late_w = _of_late(self.rack_w, rack_w, rack_drawn_w)
        feeder, rack, share = _living_taps(view, site)
        n = site.sizes["feeder"]
        feeder_w, feeder_now_w, feeder_late_w = (
            np.bincount(feeder, share * of_rack[rack], n).astype(np.float64)
            for of_rack in (rack_w, rack_now_w, rack_late_w)
        )
        read_w = np.nan_to_num(view.value(NODE_POWER).astype(np.float64))
        node_pu = np.divide(node_w, read_w, out=np.zeros(len(node_w)), where=read_w > 0)
        return SparedPower(
            {"gpu": gpu_w, "node": node_w, "rack": rack_w, "feeder": feeder_w},
            {"node": node_now_w, "rack": rack_now_w, "feeder": feeder_now_w},
            {"node": node_late_w, "rack": rack_late_w, "feeder": feeder_late_w},
            np.clip(node_pu, 0.0, 1.0),
        )

    def _turn(self, now_ns: int, saves: bool) -> None:
        """Begin anew after `METER_LAG_S`; end where nothing was saved for that long."""
        if now_ns - self.turn_ns < round(METER_LAG_S * NS):
            return
        for kept in (self.node_w, self.rack_w):
            kept[:, 1], kept[:, 0] = kept[:, 0], 0.0
        self.turn_ns = now_ns if saves or self.node_w[0].any() else 0


def _of_late(kept: F64, saved_w: F64, drawn_w: F64) -> tuple[F64, F64]:
    """(most saved of late, most drawn) with what is so now [n]; a rise, which is negative, after that."""
    np.maximum(kept[:, 0], (saved_w, drawn_w), out=kept[:, 0])
    saved_most_w, drawn_most_w = kept.max(axis=1)
    return np.where(saved_most_w > 0, saved_most_w, np.minimum(saved_w, 0.0)), drawn_most_w


def _by_gpus(view: View, estimator: Estimator, cap_w: F64 | None) -> F64:
    """Watts that each GPU would not draw under its cap [n_gpu]; negative where it would draw more."""
    out = np.zeros(view.site.sizes["gpu"])
    if cap_w is None:
        return out
    at = np.flatnonzero(np.isfinite(cap_w) & np.isfinite(view.value(GPU_POWER)))
    drawn_w, in_force_w = (view.value(key)[at].astype(np.float64) for key in (GPU_POWER, CAP_READ))
    out[at] = drawn_w - estimator.gpus.power.under(at, drawn_w, in_force_w, cap_w[at])
    return out


def _by_nodes(view: View, gpu_w: F64, gain: F64, cap_w: F64 | None) -> tuple[F64, F64]:
    """Watts that GPUs and nodes would not draw [n_gpu], [n_node], caps of whole nodes included."""
    site = view.site
    node_w = np.bincount(site.node_of_gpu, gpu_w, site.sizes["node"]) * gain
    if cap_w is None:
        return gpu_w, node_w
    more_w = np.nan_to_num(np.maximum(view.value(NODE_POWER) - node_w - cap_w, 0.0))
    drawn_w = np.nan_to_num(view.value(GPU_POWER).astype(np.float64)) - gpu_w
    of_node_w = np.bincount(site.node_of_gpu, drawn_w, site.sizes["node"])
    part = np.divide(more_w / gain, of_node_w, out=np.zeros(len(gain)), where=of_node_w > 0)
    return gpu_w + drawn_w * np.minimum(part, 1.0)[site.node_of_gpu], node_w + more_w


def _living_taps(view: View, site: Site) -> tuple[I64, I64, F64]:
    """(feeder, rack, share of the rack's living taps that are this feeder or hang below it) of all pairs."""
    dead = np.zeros(site.sizes["feeder"], np.bool_)
    for key in LOST_FEED:
        dead |= view.value(key) >= 1.0
    direct = site.feeders_of_rack
    living = ~dead[direct.member]
    feeder, rack = direct.member.astype(np.int64)[living], direct.row_of_member.astype(np.int64)[living]
    each = 1.0 / np.bincount(rack, minlength=site.sizes["rack"])[rack]
    feeders, racks, shares = [feeder], [rack], [each]
    while len(feeder):
        above = site.parent_of_feeder[feeder].astype(np.int64)
        kept = above >= 0
        feeder, rack, each = above[kept], rack[kept], each[kept]
        feeders.append(feeder)
        racks.append(rack)
        shares.append(each)
    return np.concatenate(feeders), np.concatenate(racks), np.concatenate(shares)
