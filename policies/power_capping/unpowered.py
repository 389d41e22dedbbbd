"""Unpowered devices: nodes and GPUs that are known to draw nothing.

A silent GPU that is present may draw its maximum. A GPU draws nothing while the controller of its node
reports that the node is off, or while the scheduler reports that the node sleeps. A slot whose device was
found elsewhere is empty until it reports again.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import Bool
from twin.contracts import ASLEEP, View
from twin.telemetry import GOOD

POWERED, STANDBY = "node.power_on_state", "node.standby_state"  # 0 = off


def unpowered_nodes(view: View) -> Bool:
    """Nodes that are off or not there [n_node]. One that draws more than idle CPUs by its meter is on."""
    site = view.site
    off: Bool = (view.value(POWERED) == 0.0) & (view.quality(POWERED) == GOOD)
    off = off | (view.value(STANDBY) == ASLEEP) & (view.quality(STANDBY) == GOOD)
    vacant = view.vacant("node")
    if vacant is not None:
        off = off | vacant & np.isnan(view.believed("node.power_w"))
    if off.any():
        idle_w = np.nan_to_num(site.design.cpu_idle_w)[site.rack_of_node]
        off = off & ~((view.quality("node.power_w") == GOOD) & (view.believed("node.power_w") > idle_w))
    return off


def unpowered_gpus(view: View) -> Bool:
    """GPUs of such nodes, or that are not there themselves [n_gpu]. One whose power is read is there."""
    nodes = unpowered_nodes(view)
    off: Bool = np.zeros(view.site.sizes["gpu"], np.bool_)
    if nodes.any():
        off = nodes[view.site.node_of_gpu] & (view.quality("gpu.power_w") != GOOD)
    vacant = view.vacant("gpu")
    return off if vacant is None else off | vacant & np.isnan(view.believed("gpu.power_w"))
