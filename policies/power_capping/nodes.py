"""Nodes in place of their GPUs: for sites that cap nodes through their BMC, where GPUs take no caps.

Such a node is planned like one large GPU: in all GPU columns the row of its first GPU describes the whole
node, and the other rows are empty. Its power is the reading of its own meter, and its maximum is the highest
cap of the node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import by_node
from policies.power_capping.demand import CONTROL, Wants, current, expected
from policies.power_capping.unpowered import unpowered_gpus
from twin.catalogue import F64, I64, Bool
from twin.contracts import View
from twin.site import Site

NODE_CONTROL = "node.power_cap_w"


class CappedNodes(NamedTuple):
    """Nodes that stand in for their GPUs [k], ascending, their first GPUs, and all of their GPUs [n_gpu]."""

    node: I64
    gpu: I64
    inside: Bool


def nodes_of(site: Site) -> CappedNodes:
    """Return the capped nodes of a site; none if GPUs take caps themselves."""
    rack = by_node(site)
    if not rack.any():
        none = np.zeros(0, np.int64)
        return CappedNodes(none, none, np.zeros(site.sizes["gpu"], np.bool_))
    start, low = site.gpu_start_of_node, site.envelopes[NODE_CONTROL].low
    mine = rack[site.rack_of_node] & (start[1:] > start[:-1]) & np.isfinite(low)
    node = np.flatnonzero(mine)
    return CappedNodes(node, start[node].astype(np.int64), mine[site.node_of_gpu])


def standing_in(
    view: View, want: Wants, nodes: CappedNodes, peak_w: F64, since_s: float
) -> tuple[Wants, Bool]:
    """(`want` with these nodes in the rows of their first GPUs, whether each row has a reading [n_gpu]).

    `peak_w` [n_gpu]: peaks `since_s` ago.
    """
    reporting = current(view, "gpu.power_w") | unpowered_gpus(view)
    envelope, at = view.envelope(NODE_CONTROL), nodes.node
    floor_w, most_w = envelope.low[at], envelope.high[at]
    node_reporting = current(view, "node.power_w")[at]
    worst_w = view.worst("node.power_w")[at].astype(np.float64)
    power_w = np.minimum(np.where(np.isfinite(worst_w), worst_w, most_w), most_w)
    cap_w = np.fmin(view.readback(NODE_CONTROL)[at], view.commanded(NODE_CONTROL)[at])
    peak, demand_w = expected(power_w, node_reporting, cap_w, most_w, peak_w[nodes.gpu], since_s)

    def put(column: np.ndarray, values: np.ndarray | float) -> np.ndarray:
        out = np.where(nodes.inside, column.dtype.type(0), column)
        out[nodes.gpu] = values
        return out

    out = Wants(
        put(want.power_w, power_w),
        put(want.floor_w, floor_w),
        put(want.most_w, most_w),
        put(want.demand_w, np.clip(demand_w, floor_w, most_w)),
        put(want.peak_w, peak),
        put(want.capped, np.ones(len(at), np.bool_)),
    )
    reporting = np.where(nodes.inside, True, reporting)
    reporting[nodes.gpu] = node_reporting
    return out, reporting


def cap_age_s(view: View, nodes: CappedNodes) -> F64:
    """Return the age of caps that devices report [n_gpu], nodes in rows of their first GPUs; inf: never."""
    out = view.age_s("gpu.power_limit_w").astype(np.float64)
    out[nodes.gpu] = view.age_s("node.power_cap_readback_w")[nodes.node]
    return out


def readback_w(view: View, nodes: CappedNodes) -> F64:
    """Return the caps that devices report [n_gpu], nodes in the rows of their first GPUs; NaN: none."""
    out = view.readback(CONTROL).copy()
    out[nodes.gpu] = view.readback(NODE_CONTROL)[nodes.node]
    return out


def limits_w(view: View, nodes: CappedNodes) -> F64:
    """Return the lower of the reported and the commanded caps [n_gpu], nodes in the rows of their first GPUs;
    NaN: neither is known."""
    commanded_w = view.commanded(CONTROL).copy()
    commanded_w[nodes.gpu] = view.commanded(NODE_CONTROL)[nodes.node]
    return np.fmin(readback_w(view, nodes), commanded_w)
