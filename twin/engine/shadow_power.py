"""Shadow power: the power that advised caps, which are not in force, would save.

A GPU lowers its clock along its learned power curve until it meets its cap. For each watt that its GPUs save,
a rack also saves the losses of regulators and fans, and its feeders carry their shares of the sum. Meters lag
behind the load: the largest recent saving is subtracted from their reading. The result is never lower than
the present power of the GPUs under the caps plus the recent power of all other devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import View
from twin.estimation import Estimator
from twin.site import Site
from twin.telemetry import EntityState, column, keyed, scalar

METERED = ("node", "rack", "feeder")
POWER_TABLES = ("gpu", *METERED)
GPU_POWER, NODE_POWER, CAP_READ = "gpu.power_w", "node.power_w", "gpu.power_limit_w"
LOST_FEED = ("feeder.energised_state", "feeder.breaker_state")
# A building's system may report values of up to 3 s ago as if they were new, and devices need as long to
# obey. source: estimate, as of the guard of feeders
METER_LAG_S = 5.0


# Caps of GPUs or nodes that count as obeyed (W, NaN: none; None: nowhere), and which of them meters know [n]
Caps = tuple[F64 | None, Bool | None]


@dataclass(frozen=True, slots=True)
class SparedPower:
    """By table, W [n]: `watts` less than is read; what its GPUs would draw `now_w`, and drew at most of late;
    the least that was surely `beside_w` them of late.

    `node_pu`: the share of a node's power that it would not draw [n_node].
    """

    watts: Mapping[str, F64]
    now_w: Mapping[str, F64]
    late_w: Mapping[str, F64]
    beside_w: Mapping[str, F64]
    node_pu: F64

    def left_w(self, table: str, read_w: F64) -> F64:
        """A reading of power as it would be [n]; negative savings are a rise."""
        left_w = np.maximum(read_w - self.watts[table], 0.0)
        if table == "gpu":
            return left_w
        beside_w = np.maximum(read_w - self.late_w[table], self.beside_w[table])
        return np.maximum(left_w, np.fmin(read_w, self.now_w[table] + beside_w))


class ShadowPower(EntityState):
    """The most that nodes and racks would have saved, and that their GPUs drew, W [2, 2, n].

    Saved and drawn, each in the present `METER_LAG_S` and in the one before. `beside`: in the same two, the
    most by which a meter read more than its GPUs can have drawn when it was read [2, n].
    """

    node_w: F64 = column("node", "f8", lead=(2, 2))
    rack_w: F64 = column("rack", "f8", lead=(2, 2))
    beside: dict[str, F64] = keyed("f8", keys=METERED, lead=(2,))
    turn_ns: int = scalar(0)  # since when the present one counts; 0 = nothing is saved

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self._gain = (1.0 + np.nan_to_num(site.design.node_loss_pu))[site.rack_of_node]

    def update(self, view: View, estimator: Estimator, gpu: Caps, node: Caps) -> SparedPower | None:
        """The effect of caps on GPUs and nodes on what is read of power; None: none."""
        (gpu_cap_w, gpu_metered), (node_cap_w, node_metered) = gpu, node
        if gpu_cap_w is None and node_cap_w is None and not self.turn_ns:
            return None
        site = self.site
        gain = self._gain
        gpu_w = _by_gpus(view, estimator, gpu_cap_w)
        gpu_w, node_w = _by_nodes(view, gpu_w, gain, node_cap_w)
        new_w = node_w * _unmetered_pu(site, gpu_w, gpu_metered, node_metered)
        drawn_w = _drawn_w(view, "gpu")
        node_drawn_w, node_now_w = (
            np.bincount(site.node_of_gpu, of_gpu, site.sizes["node"]) * gain
            for of_gpu in (drawn_w, drawn_w - gpu_w)
        )
        rack_w, rack_drawn_w, rack_now_w = (
            site.sum_by_rack("node", of_node) for of_node in (new_w, node_drawn_w, node_now_w)
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
        late_w = {"node": node_late_w, "rack": rack_late_w, "feeder": feeder_late_w}
        read_w = {key: _drawn_w(view, key) for key in METERED}
        for key, kept in self.beside.items():
            np.maximum(kept[0], read_w[key] - late_w[key], out=kept[0])
        node_pu = np.divide(node_w, read_w["node"], out=np.zeros(len(node_w)), where=read_w["node"] > 0)
        return SparedPower(
            {"gpu": gpu_w, "node": node_w, "rack": rack_w, "feeder": feeder_w},
            {"node": node_now_w, "rack": rack_now_w, "feeder": feeder_now_w},
            late_w,
            {key: kept.max(axis=0) for key, kept in self.beside.items()},
            np.clip(node_pu, 0.0, 1.0),
        )

    def _turn(self, now_ns: int, saves: bool) -> None:
        """Start again after `METER_LAG_S`; end where nothing was saved for that long."""
        if now_ns - self.turn_ns < round(METER_LAG_S * NS):
            return
        for kept in (self.node_w, self.rack_w, *(of[None] for of in self.beside.values())):
            kept[:, 1], kept[:, 0] = kept[:, 0], 0.0
        self.turn_ns = now_ns if saves or self.node_w[0].any() else 0


def _of_late(kept: F64, saved_w: F64, drawn_w: F64) -> tuple[F64, F64]:
    """Return (largest recent saving, largest power) with the present values [n]; a rise counts negative."""
    np.maximum(kept[:, 0], (saved_w, drawn_w), out=kept[:, 0])
    saved_most_w, drawn_most_w = kept.max(axis=1)
    return np.where(saved_most_w > 0, saved_most_w, np.minimum(saved_w, 0.0)), drawn_most_w


def _drawn_w(view: View, table: str) -> F64:
    """Power as it is read [n], 0 where it is not known."""
    power_w = view.believed(f"{table}.power_w").astype(np.float64)
    np.copyto(power_w, 0.0, where=np.isnan(power_w))
    return power_w


def _by_gpus(view: View, estimator: Estimator, cap_w: F64 | None) -> F64:
    """Watts that each GPU would not draw under its cap [n_gpu]; negative where it would draw more."""
    out = np.zeros(view.site.sizes["gpu"])
    if cap_w is None:
        return out
    at = np.flatnonzero(np.isfinite(cap_w) & np.isfinite(view.believed(GPU_POWER)))
    drawn_w, in_force_w = (view.believed(key)[at].astype(np.float64) for key in (GPU_POWER, CAP_READ))
    out[at] = drawn_w - estimator.gpus.power.under(at, drawn_w, in_force_w, cap_w[at])
    return out


def _by_nodes(view: View, gpu_w: F64, gain: F64, cap_w: F64 | None) -> tuple[F64, F64]:
    """Watts that GPUs and nodes would not draw [n_gpu], [n_node], caps of whole nodes included."""
    site = view.site
    node_w = np.bincount(site.node_of_gpu, gpu_w, site.sizes["node"]) * gain
    if cap_w is None:
        return gpu_w, node_w
    more_w = np.nan_to_num(np.maximum(view.believed(NODE_POWER) - node_w - cap_w, 0.0))
    drawn_w = _drawn_w(view, "gpu") - gpu_w
    of_node_w = np.bincount(site.node_of_gpu, drawn_w, site.sizes["node"])
    part = np.divide(more_w / gain, of_node_w, out=np.zeros(len(gain)), where=of_node_w > 0)
    return gpu_w + drawn_w * np.minimum(part, 1.0)[site.node_of_gpu], node_w + more_w


def _unmetered_pu(site: Site, gpu_w: F64, gpu_metered: Bool | None, node_metered: Bool | None) -> F64:
    """Share of what each node saves that the meters of racks and feeders do not know yet [n_node]."""
    if gpu_metered is None and node_metered is None:
        return np.ones(site.sizes["node"])
    known: Bool = np.zeros(len(gpu_w), np.bool_) if gpu_metered is None else gpu_metered
    if node_metered is not None:
        known = known | node_metered[site.node_of_gpu]
    whole, rest = (
        np.bincount(site.node_of_gpu, of, site.sizes["node"]) for of in (gpu_w, np.where(known, 0.0, gpu_w))
    )
    return np.divide(rest, whole, out=np.ones(len(whole)), where=whole != 0)


def _living_taps(view: View, site: Site) -> tuple[I64, I64, F64]:
    """(feeder, rack, share of the rack's living taps that are this feeder or hang below it) of all pairs."""
    dead = np.zeros(site.sizes["feeder"], np.bool_)
    for key in LOST_FEED:
        dead |= view.value(key) >= 1.0
    return site.derived("living_taps", lambda: _taps_of(site, dead), dead.tobytes())


def _taps_of(site: Site, dead: Bool) -> tuple[I64, I64, F64]:
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
