"""Power of a plant: the feeders of each rack, their load and breakers, and the utility.

A rack with feeds on sides A and B draws from both; where one has no voltage the other takes all. Feeders lose
nothing themselves; UPS and transformer lose above the roots. Without the utility UPSs carry some of the load
for a while, and a generator all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64
from twin.physics import HOLD_PU, MAGNETIC_PU, TAU_S, TRANSFORMER, UPS, PowerTree
from twin.plant.disturbance import VOLTAGE_LEAST_PU, Disturbance
from twin.plant.layout import DENSE_MAX
from twin.plant.parameters import Parameters
from twin.plant.truth import Truth
from twin.site import Site

RECHARGE_PU = 0.1  # of a battery's discharge, at which it is charged again; source: estimate


@dataclass(slots=True)
class Backup:
    """UPSs and the generator: run time of racks, CDU pumps and the other cooling without the utility.

    A UPS with 0 s is none: what hangs on it stands until the generator takes over, which then carries all.
    """

    it_s: float = 300.0  # at full load: a lithium string of a rack UPS; source: estimate
    pumps_s: float = 300.0  # on the same UPS, where domain practice is followed; source: estimate
    cooling_s: float = 0.0  # chillers, fans and facility pumps are seldom on a UPS; source: estimate
    generator_s: float = 10.0  # until it carries load: NFPA 110, type 10; inf = it does not start
    lost_s: float = 0.0  # since the utility was lost; 0 = it is there
    used_s: float = 0.0  # of the batteries

    def step(self, d: Disturbance, dt_s: float) -> bool:
        """Set the consumers fed in the step that begins now. Return True if any changed."""
        if d.utility_ok and self.lost_s == 0.0 and self.used_s == 0.0:
            return False
        before = d.it_fed, d.pumps_fed, d.cooling_fed
        carried = d.utility_ok or self.lost_s >= self.generator_s
        it, pumps, cooling = (carried or self.used_s < s for s in (self.it_s, self.pumps_s, self.cooling_s))
        d.it_fed, d.pumps_fed, d.cooling_fed = it, pumps, cooling
        self.lost_s = 0.0 if d.utility_ok else self.lost_s + dt_s
        self.used_s = max(self.used_s - RECHARGE_PU * dt_s, 0.0) if carried else self.used_s + dt_s
        return before != (it, pumps, cooling)


class PlantPower:
    """Feeders and breakers."""

    def __init__(self, site: Site, it_max_w: float) -> None:
        n_feeder, n_rack = site.sizes["feeder"], site.sizes["rack"]
        served = site.feeders_of_rack
        rack = served.row_of_member
        self.tree = PowerTree.of(site.parent_of_feeder, rack, served.member, n_rack)
        self.of_b = site.side_of_feeder[served.member] == 2
        self.fed = self.tree.fed
        self.ok = np.ones(n_feeder, np.bool_)
        self.isolated = np.zeros(n_rack, np.bool_)
        self.side_ok = np.ones((n_rack, 2), np.bool_)
        self.count = np.ones((2, n_rack))  # living feeders of each side
        self.pair_share = np.zeros(len(rack))
        self.matrix: F64 | None = None
        self.ups_rating_w = max(it_max_w, 1.0)
        self.gone_dt_s, self.forget = 0.0, 0.0
        self.stale, self.any_unpowered, self.all_alive = True, False, False
        self.x, self.aim = np.zeros(n_feeder), np.zeros(n_feeder)
        self.grid_pu, self.grid_ok = 1.0, True  # behind the UPSs
        self.utility_ok, self.backup = True, Backup()

    def read_disturbance(self, t: Truth, d: Disturbance) -> None:
        """Read lost and restored sources, and open breakers."""
        self.grid_pu = d.grid_voltage_pu
        self.stale |= d.it_ok != self.grid_ok
        self.utility_ok = d.utility_ok
        opened = d.feeder_trip & ~t.feeder_tripped
        if opened.any():
            t.feeder_tripped |= opened
            self.stale = True
        ok = d.feeder_ok & ~t.feeder_tripped
        if not np.array_equal(ok, self.ok):
            self.stale = True

    def sense(self, t: Truth, d: Disturbance) -> None:
        """Update which feeders have voltage, and so which sides of each rack."""
        self.stale = False
        self.ok, self.grid_ok = d.feeder_ok & ~t.feeder_tripped, d.it_ok
        t.feeder_energised[:] = self.tree.alive(self.ok) & self.grid_ok
        held, n_rack = t.feeder_energised[self.tree.feeder], len(self.fed)
        for side, mine in ((0, ~self.of_b), (1, self.of_b)):
            self.count[side] = np.bincount(self.tree.rack, weights=held & mine, minlength=n_rack)
            self.side_ok[:, side] = self.count[side] > 0
        self.side_ok[~self.fed] = self.grid_ok
        np.logical_or(self.isolated, ~self.side_ok.any(axis=1), out=t.rack_unpowered)
        self.any_unpowered = bool(t.rack_unpowered.any())
        self.all_alive = bool(t.feeder_energised.all())

    def connect(self, t: Truth, share_a: F64) -> None:
        """Set the share of a rack's power on each feeder; `share_a` [n_rack] is drawn from side A.

        The feeders of one side share evenly what the side carries.
        """
        rack = self.tree.rack
        share = np.where(self.of_b, 1.0 - share_a[rack], share_a[rack])
        count = np.where(self.of_b, self.count[1][rack], self.count[0][rack])
        self.pair_share = self.tree.shares(t.feeder_energised, share / np.maximum(count, 1.0))
        self._fill(len(self.fed))

    def _fill(self, n_rack: int) -> None:
        """Compute the share of every rack on every feeder above it, as a matrix if it is small."""
        n = len(self.ok)
        self.matrix = None
        if 0 < n * n_rack <= DENSE_MAX:
            matrix = np.zeros((n, n_rack))
            np.add.at(matrix, (self.tree.feeder, self.tree.rack), self.pair_share)
            for level in self.tree.levels[:-1]:
                np.add.at(matrix, self.tree.parent[level], matrix[level])
            self.matrix = matrix

    def _carried(self, rack_w: F64, out: F64) -> None:
        if self.matrix is not None:
            np.dot(self.matrix, rack_w, out=out)
            return
        n = len(out)
        out[:] = np.bincount(self.tree.feeder, weights=rack_w[self.tree.rack] * self.pair_share, minlength=n)[
            :n
        ]
        for level in self.tree.levels[:-1]:
            out += np.bincount(self.tree.parent[level], weights=out[level], minlength=n)

    def step(self, t: Truth, p: Parameters, node_w: F64, dt_s: float) -> None:
        """Update racks, feeders and breakers from the power of the nodes of each rack."""
        rack = t.rack_power_w
        np.multiply(node_w, p.rack_overhead_pu, out=rack)
        rack += node_w
        rack += p.rack_overhead_w
        if self.any_unpowered:
            rack *= ~t.rack_unpowered
        self._carried(rack, t.feeder_power_w)
        x, aim = self.x, self.aim
        np.divide(t.feeder_power_w, p.feeder_rating_w, out=x)
        if self.grid_pu < 1.0:
            x /= max(self.grid_pu, VOLTAGE_LEAST_PU)
        np.multiply(x, p.feeder_impedance_pu, out=aim)
        np.subtract(self.grid_pu, aim, out=t.feeder_voltage_pu)
        if not self.all_alive:
            t.feeder_voltage_pu *= t.feeder_energised
        np.multiply(x, 1.0 / HOLD_PU, out=aim)
        aim *= aim
        if dt_s != self.gone_dt_s:
            self.gone_dt_s, self.forget = dt_s, float(-np.expm1(-dt_s / TAU_S))
        aim -= t.feeder_theta
        aim *= self.forget
        t.feeder_theta += aim
        if len(x) and (np.maximum.reduce(t.feeder_theta) >= 1.0 or np.maximum.reduce(x) >= MAGNETIC_PU):
            open_now = ((t.feeder_theta >= 1.0) | (x >= MAGNETIC_PU)) & ~t.feeder_tripped
            if open_now.any():
                t.feeder_tripped |= open_now
                self.stale = True

    def theta_steady(self) -> F64:
        """Return the steady state of the accumulators under the present load [n_feeder], below a trip."""
        aim: F64 = np.minimum((self.x / HOLD_PU) ** 2, 0.999)
        return aim

    def utility_w(self, it_w: float, cooling_w: float) -> float:
        """Return the power from the utility: IT through UPS and transformer, cooling through the
        transformer.

        0 while it is lost.
        """
        if not (self.grid_ok and self.utility_ok):
            return 0.0
        ups = it_w + _loss(it_w, self.ups_rating_w, UPS)
        return ups + cooling_w + _loss(ups + cooling_w, 1.3 * self.ups_rating_w, TRANSFORMER)


def _loss(output_w: float, rating_w: float, curve: tuple[float, float, float]) -> float:
    a, b, c = curve
    x = output_w / rating_w
    return rating_w * (a + x * (b + c * x))
