"""What agents tell of the health of parts, where a plant lives it: margins, replays, remaps, restarts.

Apart from the other meters, so that a plant without such a life reports exactly what it did. Exact readings;
what has not changed is not read again. May import meters, reports, the truth and disturbances.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F32, I64, Bool
from twin.plant.disturbance import Disturbance
from twin.plant.meters import Meter, Noise, Panel
from twin.plant.observation import Report
from twin.plant.truth import Truth
from twin.site import Site

GPU_HEALTH = (
    Meter("thermal_margin_k"),
    Meter("row_remap_pending_state", seldom=True),
    Meter("row_remap_failed_state", seldom=True),
    Meter("recovery_action_state", seldom=True),
)
GPU_COUNTERS = ("pcie_replay_count", "nvlink_replay_count", "nvlink_recovery_count", "row_remap_count")
NODE_COUNTERS = ("reboot_count",)


class HealthPanels:
    """The panels of GPUs and nodes; `ahead_ns` [n_node] as of the agents' other reports."""

    def __init__(self, site: Site, ahead_ns: I64, period_s: float, noise: Noise) -> None:
        of_gpu = ahead_ns[site.node_of_gpu]
        self.gpu = Panel("gpu", GPU_HEALTH, GPU_COUNTERS, of_gpu, period_s, noise, 0.0)
        self.node = Panel("node", (), NODE_COUNTERS, ahead_ns, period_s, noise, 0.0)
        self.gpu.often = self.node.often = 0
        self._margin_k = np.empty(site.sizes["gpu"])
        self._seen = -1  # the truth's count of changes

    def reports(
        self, t: Truth, d: Disturbance, temp_c: F32, now_ns: int, agent: Bool | None, of_gpu: Bool | None
    ) -> list[Report]:
        """A round. `temp_c` [n_gpu] is what GPUs report, NaN = nothing: the margin is that of it.

        `agent` [n_node] and `of_gpu` [n_gpu]: who speaks; None = all. A GPU off the bus reads nothing.
        """
        changed = t.health_count != self._seen
        self._seen = t.health_count
        np.subtract(t.gpu_slowdown_c, temp_c, out=self._margin_k)
        self.gpu.read((
            self._margin_k, d.gpu_remap_pending, d.gpu_remap_failed, d.gpu_recovery_action,
        ), (
            t.gpu_pcie_replays, t.gpu_nvlink_replays, t.gpu_nvlink_recoveries, t.gpu_row_remaps,
        ), now_ns, changed)  # fmt: skip
        self.node.read((), (t.node_reboots,), now_ns, changed)
        if not t.gpu_alive.all():
            self.gpu.blank(~t.gpu_alive)
        panels = ((self.node, agent), (self.gpu, of_gpu))
        return [panel.report(who) for panel, who in panels if panel.n and (who is None or who.any())]
