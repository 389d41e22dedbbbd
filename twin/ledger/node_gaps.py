"""Node gaps: the energy of nodes whose power was not read for a while, by the energy counters of their GPUs.

The counters grow on while nobody reads them. What a node takes beside its GPUs moves little: it is taken from
the time before.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool
from twin.telemetry import EntityState, Sizes, column

MEMORY_S = 600.0  # of what a node takes beside its GPUs; source: estimate
BESIDE_PU = 0.1  # 1 sigma of that in a gap, over it; source: estimate
# 1 sigma of GPUs' own energy, over it: measured within some percent, but compared with the node's meter at a
# like load before; source: estimate
GPUS_PU = 0.01


class NodeGaps(EntityState):
    """What was booked of each node since its GPUs' counters were last read."""

    booked_j: F64 = column("node", "f8")
    booked_var_j2: F64 = column("node", "f8")
    booked_s: F64 = column("node", "f8")
    gpus_j: F64 = column("node", "f8")
    gap: Bool = column("node", "?")
    beside_w: F64 = column("node", "f8", np.nan)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)

    def settle(
        self, energy_j: F64, var_j2: F64, known: Bool, gpus_j: F64, counted: Bool, span_s: float
    ) -> tuple[F64, F64, Bool]:
        """(energy, variance) of a look, and the nodes in a gap that nothing fills [n_node].

        `gpus_j`: growth of the counters of each node's GPUs, all of which were `counted` in this look.
        """
        self.booked_j += energy_j
        self.booked_var_j2 += var_j2
        self.booked_s += span_s
        self.gpus_j += gpus_j
        self.gap |= (var_j2 != 0.0) | ~known
        calm = counted & ~self.gap
        if calm.any():
            beside_w = (self.booked_j - self.gpus_j) / self.booked_s
            share = -np.expm1(-self.booked_s / MEMORY_S)
            new = np.where(
                np.isfinite(self.beside_w), self.beside_w + share * (beside_w - self.beside_w), beside_w
            )
            np.copyto(self.beside_w, new, where=calm)
        unfilled = self.gap.copy()
        filled = counted & self.gap & np.isfinite(self.beside_w)
        if filled.any():
            beside_j = self.beside_w * self.booked_s
            energy_j = energy_j + np.where(filled, self.gpus_j + beside_j - self.booked_j, 0.0)
            sigma2 = (BESIDE_PU * beside_j) ** 2 + (GPUS_PU * self.gpus_j) ** 2
            var_j2 = var_j2 + np.where(filled, sigma2 - self.booked_var_j2, 0.0)
            unfilled &= ~filled
        over = calm | filled | (counted & self.gap & known)
        for held in (self.booked_j, self.booked_var_j2, self.booked_s, self.gpus_j):
            held[over] = 0.0
        self.gap[over] = False
        return energy_j, var_j2, unfilled
