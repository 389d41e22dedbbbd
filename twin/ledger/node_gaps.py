"""Node gaps: the energy of nodes without power readings for a while, by the energy counters of their GPUs.

The counters grow on while nobody reads them. The power of a node is a line over that of its GPUs, which is
learned while both are read: what is beside the GPUs partly follows their load.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool
from twin.telemetry import EntityState, Sizes, column

MEMORY_S = 86_400.0  # of the line; source: estimate
# Slope while the GPUs' power hardly moved, and by how much it has to: CPUs and losses that follow; estimates
SLOPE, MOVE_W = 1.15, 50.0
FILLED_PU = 0.02  # 1 sigma of what fills a gap, over it; source: estimate


class NodeGaps(EntityState):
    """Sums booked for each node since the last reading of its GPUs' counters, and its line."""

    booked_j: F64 = column("node", "f8")
    booked_var_j2: F64 = column("node", "f8")
    booked_s: F64 = column("node", "f8")
    gpus_j: F64 = column("node", "f8")
    gap: Bool = column("node", "?")
    # Decayed means and squares of the line: power of GPUs, of the node, their variance and covariance
    gpus_w: F64 = column("node", "f8", np.nan)
    node_w: F64 = column("node", "f8", np.nan)
    var_w2: F64 = column("node", "f8")
    covar_w2: F64 = column("node", "f8")
    learned_s: F64 = column("node", "f8")

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)

    def settle(
        self, energy_j: F64, var_j2: F64, known: Bool, gpus_j: F64, counted: Bool, span_s: float
    ) -> tuple[F64, F64, Bool]:
        """Return (energy, variance) of a look, and the nodes in a gap without data [n_node].

        `gpus_j`: growth of the counters of each node's GPUs, all of which were `counted` in this look.
        """
        self.booked_j += energy_j
        self.booked_var_j2 += var_j2
        self.booked_s += span_s
        self.gpus_j += gpus_j
        self.gap |= (var_j2 != 0.0) | ~known
        calm = counted & ~self.gap
        if calm.any():
            self._learn(calm)
        filled = counted & self.gap & np.isfinite(self.node_w)
        unfilled = self.gap & ~filled
        if filled.any():
            slope = (self.covar_w2 + SLOPE * MOVE_W**2) / (self.var_w2 + MOVE_W**2)
            node_j = (self.node_w - slope * self.gpus_w) * self.booked_s + slope * self.gpus_j
            node_j = np.maximum(node_j, self.gpus_j)
            energy_j = energy_j + np.where(filled, node_j - self.booked_j, 0.0)
            var_j2 = var_j2 + np.where(filled, (FILLED_PU * node_j) ** 2 - self.booked_var_j2, 0.0)
        over = calm | filled | (counted & self.gap & known)
        for held in (self.booked_j, self.booked_var_j2, self.booked_s, self.gpus_j):
            held[over] = 0.0
        self.gap[over] = False
        return energy_j, var_j2, unfilled

    def _learn(self, calm: Bool) -> None:
        """Update the lines of these nodes by their booked sums."""
        gpus_w, node_w = self.gpus_j / self.booked_s, self.booked_j / self.booked_s
        learned_s = self.learned_s + self.booked_s
        share = np.maximum(self.booked_s / learned_s, -np.expm1(-self.booked_s / MEMORY_S))
        new = ~np.isfinite(self.node_w)
        from_w = np.where(new, 0.0, gpus_w - self.gpus_w)
        from_node_w = np.where(new, 0.0, node_w - self.node_w)
        for held, value in (
            (self.var_w2, (1.0 - share) * (self.var_w2 + share * from_w**2)),
            (self.covar_w2, (1.0 - share) * (self.covar_w2 + share * from_w * from_node_w)),
            (self.gpus_w, np.where(new, gpus_w, self.gpus_w + share * from_w)),
            (self.node_w, np.where(new, node_w, self.node_w + share * from_node_w)),
            (self.learned_s, learned_s),
        ):
            np.copyto(held, value, where=calm)
