"""The power chain: losses of supplies, UPSs and transformers, feeds A and B, roll-up to the utility.

Losses are polynomials of load, in units of the rating, so that one curve serves devices of any size. The tree
of feeders comes as index maps: nothing here knows a site. NumPy only; imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

# Frontier's node and rectifier: P_in = (P_out + standing) / efficiency; source: configuration of RAPS
NODE_STANDING_W, NODE_EFFICIENCY_PU = 13.0, 0.98
RECTIFIER_STANDING_W, RECTIFIER_EFFICIENCY_PU = 17.0, 0.96
# 80 PLUS Titanium, 230 V internal: least efficiency at load over rating
TITANIUM_LOAD_PU = (0.1, 0.2, 0.5, 1.0)
TITANIUM_EFFICIENCY_PU = (0.90, 0.94, 0.96, 0.91)
# Losses over rating as (standing, proportional, quadratic, quartic) in load over rating.
Curve = tuple[float, float, float, float]
# Least squares through the four Titanium points, no term below zero: within 0.1 points of efficiency at each
TITANIUM: Curve = (0.009830, 0.013141, 0.0, 0.075843)
UPS: Curve = (0.010, 0.012, 0.013, 0.0)  # 94.8 % at a quarter, 96.6 % at full load; source: estimate
TRANSFORMER: Curve = (0.0018, 0.0, 0.0085, 0.0)  # 99.2 % at half, 99.0 % at full load; source: estimate
BUSWAY: Curve = (0.0, 0.0, 0.005, 0.0)  # ohmic alone; source: estimate
LOSSLESS: Curve = (0.0, 0.0, 0.0, 0.0)


def input_w(output_w: F64, standing_w: F64 | float, efficiency_pu: F64 | float) -> F64:
    """Input of a converter, W: (out + standing loss) / efficiency, as RAPS models Frontier."""
    return np.asarray((output_w + standing_w) / efficiency_pu, np.float64)


def output_w(input_w: F64, standing_w: F64 | float, efficiency_pu: F64 | float) -> F64:
    """What such a converter gives from this input, W; the inverse of `input_w`."""
    return np.asarray(input_w * efficiency_pu - standing_w, np.float64)


def polynomial_loss_w(output_w: F64, p0_w: F64 | float, p1: F64 | float, p2_per_w: F64 | float) -> F64:
    """p0 + p1 P + p2 P^2, W: standing, proportional and ohmic loss."""
    return np.asarray(p0_w + output_w * (p1 + p2_per_w * output_w), np.float64)


def output_of_input_w(input_w: F64, p0_w: F64 | float, p1: F64 | float, p2_per_w: F64 | float) -> F64:
    """Output P of P + p0 + p1 P + p2 P^2 = input, W; closed form that also holds at p2 = 0."""
    linear = 1.0 + np.asarray(p1, np.float64)
    rest = input_w - p0_w
    return np.asarray(2.0 * rest / (linear + np.sqrt(linear**2 + 4.0 * p2_per_w * rest)), np.float64)


def curve_loss_w(output_w: F64, rating_w: F64 | float, curve: Curve, spread: F64 | float = 1.0) -> F64:
    """Loss of devices of `rating_w`, W; `spread` scales it per device. Load may exceed the rating."""
    a, b, c, d = curve
    x = output_w / rating_w
    return np.asarray(spread * rating_w * (a + x * (b + x * (c + x * x * d))), np.float64)


def efficiency_pu(output_w: F64, rating_w: F64 | float, curve: Curve) -> F64:
    """Output over input; 0 without load."""
    taken = output_w + curve_loss_w(output_w, rating_w, curve)
    return np.asarray(np.divide(output_w, taken, out=np.zeros_like(taken), where=taken > 0), np.float64)


def feed_share_pu(ok: Bool, share_a_pu: F64 | float = 0.5) -> F64:
    """How a load splits over feeds A and B [n, 2]: by `share_a_pu` while both hold, else all on one.

    `ok` [n, 2] is True where feed and supply both work. Without either both shares are 0.
    """
    share = np.empty(ok.shape, np.float64)
    share[:, 0], share[:, 1] = share_a_pu, 1.0 - np.asarray(share_a_pu, np.float64)
    share *= ok
    alone = ok[:, 0] ^ ok[:, 1]
    share[alone] = ok[alone]
    return share


def supplies_input_w(
    output_w: F64, share_pu: F64, rating_w: F64 | float, curve: Curve = TITANIUM, spread: F64 | float = 1.0
) -> F64:
    """Input of the two groups of supplies of each load [n, 2] from `output_w` [n], W.

    `rating_w` is that of one group. A group without a share draws nothing: it has lost its feed.
    """
    out = output_w[:, None] * share_pu
    return np.where(share_pu > 0.0, out + curve_loss_w(out, rating_w, curve, spread), 0.0)


def bank_input_w(output_w: F64, working: F64, rating_w: F64 | float, curve: Curve = TITANIUM) -> F64:
    """Input of a shelf whose `working` supplies of `rating_w` each share its load, W [n]; 0 if none."""
    each = output_w / np.maximum(working, 1.0)
    return np.where(working > 0, working * (each + curve_loss_w(each, rating_w, curve)), 0.0)


@dataclass(frozen=True, slots=True)
class Feeding:
    """Which way power goes: it changes only when something switches, so a caller may keep it meanwhile."""

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
        held = np.where(alive[self.feeder], weight, 0.0)
        total = np.bincount(self.rack, weights=held, minlength=len(self.fed))[self.rack]
        return np.divide(held, total, out=np.zeros(len(held)), where=total > 0)

    def feeding(self, ok: Bool, weight: F64 | float = 1.0) -> Feeding:
        """The way power goes while these feeders [n_feeder] are `ok`; `weight` as `shares` has it."""
        alive = self.alive(ok)
        living = np.bincount(self.rack, weights=alive[self.feeder], minlength=len(self.fed))
        return Feeding(alive, self.shares(alive, weight), self.fed & (living == 0))

    def roll_up(
        self,
        rack_w: F64,
        ok: Bool,
        standing_w: F64 | float = 0.0,
        proportional: F64 | float = 0.0,
        ohmic_per_w: F64 | float = 0.0,
        weight: F64 | float = 1.0,
    ) -> RollUp:
        """`carried` by the feeders that are `ok`, for those who ask once."""
        return self.carried(rack_w, self.feeding(ok, weight), standing_w, proportional, ohmic_per_w)

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


def curve_terms(rating_w: F64, curve: Curve) -> tuple[F64, F64, F64]:
    """(p0 W, p1, p2 1/W) of a curve, for devices of these ratings. Raises ValueError if it has a quartic."""
    a, b, c, d = curve
    if d:
        raise ValueError(f"a curve with a quartic term {d} has no quadratic form")
    return a * rating_w, np.full_like(rating_w, b), c / rating_w
