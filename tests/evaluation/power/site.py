"""The two sites on which power capping is scored: a made-up node of 5,600 W at full, in eight or ten racks.

Site a is the test site of NVIDIA's Domain Power Service: 144 nodes on one path of utility, switchboard and
four PDUs. Site b has 174 nodes, 30 % more than the nameplates on feeds A and B allow, below PDUs that are
derated. A site also says which feeder carries how much of which rack while some are dead. Part of the shell;
NumPy only.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import F64, Bool
from twin.config import spec_of
from twin.site import Site, SiteSpec, build_site

SITES = ("a", "b")
GPUS = 4  # of a node
PROFILE = "gb300-nvl72"
# The node: 4 x 1,200 W of GPUs, 500 W of CPUs, 3.8 % lost on the way to them and 100 W that never change
# make 5,600 W, the highest node policy in the DPS simulator's documentation; the split is an estimate.
NODE_FULL_W, NODE_IDLE_W = 5600.0, 1000.0
GPU_MAX_W, GPU_IDLE_W, GPU_MIN_W = 1200.0, 200.0, 200.0
CPU_MAX_W, CPU_IDLE_W = 500.0, 100.0  # of both
OTHER_W = 100.0
LOSS_PU = (NODE_FULL_W - GPUS * GPU_MAX_W - CPU_MAX_W - OTHER_W) / (GPUS * GPU_MAX_W + CPU_MAX_W)
SAFE_W = 800.0  # of a GPU without the daemon: all nodes of site b then draw 688 kW
FEED_W = 750e3
SWITCHBOARD_W, PDU_W = 1.6e6, 450e3  # of site a. source: documentation of the DPS simulator
PDU_DERATED_W = 165e3  # of site b: two racks make 196 kW at full; binds at some hours. source: estimate
BREAKER_OVER_BUDGET = 1.25  # a continuous load takes at most 80 % of a breaker, domain.md B
HIGH_PU = 0.3  # of the nodes


class PowerSite(NamedTuple):
    """A site with what the plant needs of it; `high` [n_node] are the nodes of high priority."""

    name: str
    site: Site
    budget_w: F64  # [n_feeder]
    high: Bool

    @property
    def nodes(self) -> int:
        return self.site.sizes["node"]

    @property
    def gpus(self) -> int:
        return self.site.sizes["gpu"]


def power_site(name: str) -> PowerSite:
    """Site a or b. Raises KeyError for any other name."""
    return site_of_nodes(name, {"a": _site_a, "b": _site_b}[name]())


def site_of_nodes(name: str, tree: dict[str, Any]) -> PowerSite:
    """The site of this file, made of these nodes."""
    spec = spec_of(tree, None, f"site {name}")
    site = build_site(SiteSpec(spec.file, {PROFILE: _profile(spec.profiles[PROFILE])}), f"site {name}")
    return PowerSite(name, site, site.budget_w.copy(), _high(site))


def shares_of(site: Site, dead: Bool) -> F64:
    """Return the share of each watt of a rack that every feeder carries [n_feeder, n_rack]; `dead` do not.

    A rack draws alike from all of its living taps. One below a dead feeder is dead as well.
    """
    gone = dead_below(site, dead)
    n_feeder, n_rack = site.sizes["feeder"], site.sizes["rack"]
    tap = np.zeros((n_feeder, n_rack))
    np.add.at(tap, (site.feeders_of_rack.member, site.feeders_of_rack.row_of_member), 1.0)
    tap[gone] = 0.0
    tap /= np.maximum(tap.sum(axis=0), 1.0)
    out, above = tap.copy(), site.parent_of_feeder.copy()
    while (above >= 0).any():
        for feeder in np.flatnonzero(above >= 0).tolist():
            out[above[feeder]] += tap[feeder]
        above = np.where(above >= 0, site.parent_of_feeder[above], -1)
    return out


def dead_below(site: Site, dead: Bool) -> Bool:
    """These feeders and all that hang below them [n_feeder]."""
    out = dead.copy()
    for _ in range(len(out)):
        above = site.parent_of_feeder
        out |= (above >= 0) & out[np.maximum(above, 0)]
    return out


def shares_at_worst(site: Site) -> F64:
    """The same, with all of the other side lost where that is more [n_feeder, n_rack]."""
    out = shares_of(site, np.zeros(site.sizes["feeder"], np.bool_))
    for side in (1, 2):
        lost = site.side_of_feeder == side
        if lost.any() and not lost.all():
            out = np.maximum(out, shares_of(site, lost))
    return out


def _high(site: Site) -> Bool:
    """The first nodes of each rack, as many as come to the share of all."""
    rack, rows = site.rack_of_node, site.node_start_of_rack
    place = np.arange(site.sizes["node"]) - rows[rack]
    first = np.argsort(place * site.sizes["rack"] + rack, kind="stable")
    out = np.zeros(site.sizes["node"], np.bool_)
    out[first[: round(HIGH_PU * len(out))]] = True
    return out


def _profile(tree: dict[str, Any]) -> dict[str, Any]:
    """The packaged profile with the made-up node; what racks draw beside nodes is in the 5,600 W."""
    out = copy.deepcopy(tree)
    power, cap = out["power"], out["controls"]["gpu.power_cap_w"]
    made = {
        "gpu_min_w": GPU_MIN_W, "gpu_max_w": GPU_MAX_W, "gpu_idle_w": GPU_IDLE_W, "cpu_max_w": CPU_MAX_W / 2,
        "cpu_idle_w": CPU_IDLE_W / 2, "node_idle_w": NODE_IDLE_W, "node_max_w": NODE_FULL_W,
        "rack_overhead_w": 0,
    }  # fmt: skip
    for key, value in made.items():
        power[key] = {"value": value, "source": "estimate", "note": "the node of the power test sites"}
    for key, value in (("min", GPU_MIN_W), ("max", GPU_MAX_W), ("safe", SAFE_W)):
        cap[key] = {"value": value, "source": "estimate", "note": "the node of the power test sites"}
    node = out["controls"]["node.power_cap_w"]
    for key, value in (("min", 1600.0), ("max", NODE_FULL_W), ("safe", 3900.0)):
        node[key] = {"value": value, "source": "estimate", "note": "the node of the power test sites"}
    return out


def _site_a() -> dict[str, Any]:
    pairs = [f"r[{i}-{i + 1}]" for i in range(1, 9, 2)]
    return {"site": "power-a", "halls": [{
        "name": "h", "racks": [{"name": "r[1-8]", "profile": PROFILE}],
        "feeders": [
            {"name": "utility", "budget_w": FEED_W, "serves": ["switchboard"]},
            {"name": "switchboard", "budget_w": SWITCHBOARD_W, "serves": ["pdu[1-4]"]},
            *({"name": f"pdu{i + 1}", "budget_w": PDU_W, "serves": [pair]} for i, pair in enumerate(pairs)),
        ],
    }]}  # fmt: skip


def _site_b() -> dict[str, Any]:
    pairs = [f"r[{i}-{i + 1}]" for i in range(1, 11, 2)]
    return {"site": "power-b", "halls": [{
        "name": "h",
        "racks": [{"name": "r[1-4]", "profile": PROFILE},
                  {"name": "r[5-10]", "profile": PROFILE, "nodes": 17}],
        "feeders": [
            {"name": "a", "side": "A", "budget_w": FEED_W, "serves": ["pa[1-5]"]},
            {"name": "b", "side": "B", "budget_w": FEED_W, "serves": ["pb[1-5]"]},
            *({"name": f"p{side.lower()}{i + 1}", "side": side, "budget_w": PDU_DERATED_W, "serves": [pair]}
              for side in "AB" for i, pair in enumerate(pairs)),
        ],
    }]}  # fmt: skip
