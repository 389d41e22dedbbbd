"""Power chain: losses of UPSs and transformers, and the tree of feeders with its shares of each rack.

Losses are polynomials of the load over the rating, so one curve serves devices of any size. The tree of
feeders is given as index maps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

# Losses over rating as (standing, proportional, quadratic) in load over rating.
Curve = tuple[float, float, float]
UPS: Curve = (0.010, 0.012, 0.013)  # 94.8 % at a quarter, 96.6 % at full load; source: estimate
TRANSFORMER: Curve = (0.0018, 0.0, 0.0085)  # 99.2 % at half, 99.0 % at full load; source: estimate


def output_of_input_w(input_w: F64, p0_w: F64 | float, p1: F64 | float, p2_per_w: F64 | float) -> F64:
    """Output P of P + p0 + p1 P + p2 P^2 = input, W; closed form that also holds at p2 = 0."""
    linear = 1.0 + np.asarray(p1, np.float64)
    rest = input_w - p0_w
    return np.asarray(2.0 * rest / (linear + np.sqrt(linear**2 + 4.0 * p2_per_w * rest)), np.float64)


@dataclass(frozen=True, slots=True)
class PowerTree:
    """Feeders as a forest, and which rack hangs on which of them."""

    parent: I32  # [n_feeder] -1 = root
    levels: tuple[I32, ...]  # feeders by depth, the deepest first; the last level holds the roots
    rack: I32  # [n_pair] ascending
    feeder: I32  # [n_pair] serves that rack
    fed: Bool  # [n_rack] by any feeder

    @classmethod
    def of(cls, parent: I32, rack: I32, feeder: I32, n_rack: int) -> PowerTree:
        """From the parent of each feeder and pairs (rack, feeder). Raises ValueError if there is a loop."""
        depth = np.zeros(len(parent), np.int32)
        at = parent
        for _ in range(len(parent) + 1):
            above = at >= 0
            if not above.any():
                break
            depth += above
            at = np.where(above, parent[at], -1).astype(np.int32)
        else:
            raise ValueError("the feeders form a loop; expected a tree")
        deepest = int(depth.max(initial=0))
        levels = tuple(np.flatnonzero(depth == d).astype(np.int32) for d in range(deepest, -1, -1))
        fed = np.bincount(rack, minlength=n_rack) > 0
        return cls(parent, levels, rack.astype(np.int32), feeder.astype(np.int32), fed)

    def alive(self, ok: Bool) -> Bool:
        """Feeders that have voltage [n_feeder]: their own breaker and source `ok`, and all above them."""
        alive = ok.copy()
        for level in self.levels[-2::-1]:
            alive[level] &= alive[self.parent[level]]
        return alive

    def shares(self, alive: Bool, weight: F64 | float = 1.0) -> F64:
        """Share of a rack's power on each feeder [n_pair]: by weight among those alive; sums to 1 or 0."""
        carried = np.where(alive[self.feeder], weight, 0.0)
        total = np.bincount(self.rack, weights=carried, minlength=len(self.fed))[self.rack]
        return np.divide(carried, total, out=np.zeros(len(carried)), where=total > 0)
