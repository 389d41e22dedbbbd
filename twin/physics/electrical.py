"""Power chain: losses of UPSs and transformers, and the roll-up of rack power over feeders to the utility.

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

# Losses over rating as (standing, proportional, quadratic, quartic) in load over rating.
Curve = tuple[float, float, float, float]
UPS: Curve = (0.010, 0.012, 0.013, 0.0)  # 94.8 % at a quarter, 96.6 % at full load; source: estimate
TRANSFORMER: Curve = (0.0018, 0.0, 0.0085, 0.0)  # 99.2 % at half, 99.0 % at full load; source: estimate


def polynomial_loss_w(output_w: F64, p0_w: F64 | float, p1: F64 | float, p2_per_w: F64 | float) -> F64:
    """p0 + p1 P + p2 P^2, W: standing, proportional and ohmic loss."""
    return np.asarray(p0_w + output_w * (p1 + p2_per_w * output_w), np.float64)


def output_of_input_w(input_w: F64, p0_w: F64 | float, p1: F64 | float, p2_per_w: F64 | float) -> F64:
    """Output P of P + p0 + p1 P + p2 P^2 = input, W; closed form that also holds at p2 = 0."""
    linear = 1.0 + np.asarray(p1, np.float64)
    rest = input_w - p0_w
    return np.asarray(2.0 * rest / (linear + np.sqrt(linear**2 + 4.0 * p2_per_w * rest)), np.float64)


@dataclass(frozen=True, slots=True)
class Feeding:
    """Paths of power. They change only when something switches, so a caller may keep them meanwhile."""

    alive: Bool  # [n_feeder] energised, and all above it too
    share_pu: F64  # [n_pair] of a rack's power on each of its feeders; sums to 1 per rack, or 0 if none lives
    unpowered: Bool  # [n_rack] has feeders, and none alive


@dataclass(frozen=True, slots=True)
class RollUp:
    """Powers of one instant, W. `output` of a feeder is what a meter on its load side reads."""

    output_w: F64  # [n_feeder]
    input_w: F64  # [n_feeder] output and the feeder's own loss
    pair_w: F64  # [n_pair] what each rack draws from each of its feeders
    alive: Bool  # [n_feeder] energised, and all above it too
    unpowered: Bool  # [n_rack] has feeders, and none alive
    utility_w: float  # inputs of all roots, and racks that no feeder is known of
    loss_w: float  # in all feeders


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

    def feeding(self, ok: Bool, weight: F64 | float = 1.0) -> Feeding:
        """The way power goes while these feeders [n_feeder] are `ok`; `weight` as `shares` has it."""
        alive = self.alive(ok)
        living = np.bincount(self.rack, weights=alive[self.feeder], minlength=len(self.fed))
        return Feeding(alive, self.shares(alive, weight), self.fed & (living == 0))

    def carried(
        self,
        rack_w: F64,
        feeding: Feeding,
        standing_w: F64 | float = 0.0,
        proportional: F64 | float = 0.0,
        ohmic_per_w: F64 | float = 0.0,
    ) -> RollUp:
        """Powers from the racks [n_rack] up to the utility, each feeder with loss p0 + p1 P + p2 P^2.

        A dead feeder carries and loses nothing; a rack without a living one counts as drawing nothing. A rack
        with no feeder at all draws straight from the utility.
        """
        n, alive = len(self.parent), feeding.alive
        pair = rack_w[self.rack] * feeding.share_pu
        out = np.bincount(self.feeder, weights=pair, minlength=n).astype(np.float64)
        taken = np.zeros(n)
        p0, p1, p2 = (np.broadcast_to(np.asarray(x, np.float64), n)
                      for x in (standing_w, proportional, ohmic_per_w))  # fmt: skip
        for i, level in enumerate(self.levels, 1):
            load = out[level]
            through = load + polynomial_loss_w(load, p0[level], p1[level], p2[level])
            taken[level] = np.where(alive[level], through, 0.0)
            if i < len(self.levels):
                out += np.bincount(self.parent[level], weights=taken[level], minlength=n)
        utility_w = float(taken[self.levels[-1]].sum() + rack_w[~self.fed].sum())
        loss_w = float((taken - out).sum())
        return RollUp(out, taken, pair, alive, feeding.unpowered, utility_w, loss_w)
