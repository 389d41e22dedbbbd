"""Coolant that leaves its circuit: leaks, the reserve, the fill pump, falling pressure, and detectors.

A leak in a tray wets the tray's rope first, then the rack's pan, later the hall. May import the truth,
disturbances, hidden parameters and NumPy.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F64
from twin.plant.disturbance import Disturbance
from twin.plant.hydraulics import Hydraulics
from twin.plant.parameters import Parameters
from twin.plant.truth import Truth
from twin.site import Site

TRAY_WET_L, RACK_WET_L, CDU_WET_L = 0.02, 0.10, 0.15  # puddle that a detector feels; source: estimate
DRIED_LPM = 0.002  # of a puddle once nothing leaks; source: estimate
FILL_LPM = 1.5  # of the fill pump; source: estimate
FILL_ON_PU, FILL_OFF_PU = 0.75, 0.98  # of the reserve; source: estimate
FILL_STOCK_L = 40.0  # in the fill unit's own tank; source: estimate
ROOM_C = 24.0  # of reserve and fill water
PRIME_LOST_PU = 0.15  # of the reserve below which the static pressure falls away; source: estimate


class Leaks:
    """Inventories and puddles."""

    def __init__(self, site: Site, p: Parameters) -> None:
        n = site.sizes
        self.tray_l, self.rack_l, self.cdu_l = np.zeros(n["node"]), np.zeros(n["rack"]), np.zeros(n["cdu"])
        self.cdu_of_rack = site.cdu_of_rack
        self.rack_of_node = site.rack_of_node
        self.stock_l = np.full(n["cdu"], FILL_STOCK_L)
        self.lost_w_per_k = np.zeros(n["cdu"])  # heat that leaves with the coolant, per K over the reserve
        self.active = False

    def step(self, t: Truth, p: Parameters, d: Disturbance, h: Hydraulics, dt_s: float) -> None:
        """Move coolant for one step."""
        leaking = bool(
            (d.node_leak_lpm > 0).any() or (d.rack_leak_lpm > 0).any() or (d.cdu_leak_lpm > 0).any()
        )
        if not leaking and not self.active:
            self.lost_w_per_k[:] = 0.0
            return
        push = np.sqrt(np.maximum(h.prime, 0.0))  # a leak is driven by the pressure that is left
        at_rack = np.append(push, 0.0)[self.cdu_of_rack]
        # What is isolated empties no further than itself: its leak stops
        open_rack = np.where(t.rack_isolated, 0.0, 1.0) * p.rack_liquid
        tray = d.node_leak_lpm * (at_rack * open_rack)[self.rack_of_node]
        rack = d.rack_leak_lpm * at_rack * open_rack
        whole = rack + np.bincount(self.rack_of_node, weights=tray, minlength=len(rack))
        inside = self.cdu_of_rack >= 0
        lpm = d.cdu_leak_lpm * push
        lpm += np.bincount(self.cdu_of_rack[inside], weights=whole[inside], minlength=len(lpm))[: len(lpm)]
        minutes = dt_s / 60.0
        lost = np.minimum(lpm * minutes, t.cdu_coolant_l)
        fill = np.where(t.cdu_filling, np.minimum(FILL_LPM * minutes, self.stock_l), 0.0)
        t.cdu_coolant_l += fill - lost
        t.cdu_leaked_l += lost
        t.cdu_filled_l += fill
        self.stock_l -= fill
        np.multiply(lost / dt_s, 60.0 * p.watt_per_k_per_lpm, out=self.lost_w_per_k)
        reserve = (t.cdu_coolant_l - p.cdu_volume_l) / p.cdu_reserve_l
        t.cdu_filling[:] = np.where(t.cdu_filling, reserve < FILL_OFF_PU, reserve < FILL_ON_PU)
        t.cdu_filling &= self.stock_l > 0.0
        h.prime[:] = np.clip(reserve / PRIME_LOST_PU, 0.0, 1.0)
        h.pressures(t)
        self._puddles(t, d, tray, rack, minutes)
        self.active = leaking or bool(t.cdu_filling.any() or self.tray_l.any() or self.rack_l.any()
                                      or self.cdu_l.any())  # fmt: skip

    def _puddles(self, t: Truth, d: Disturbance, tray: F64, rack: F64, minutes: float) -> None:
        """A rope in the tray, a pan under the rack that gets what runs over, a pan under the CDU."""
        over = np.maximum(self.tray_l - 2.0 * TRAY_WET_L, 0.0)
        self.tray_l += (tray - DRIED_LPM) * minutes - over
        self.rack_l += (rack - DRIED_LPM) * minutes
        self.rack_l += np.bincount(self.rack_of_node, weights=over, minlength=len(rack))
        self.cdu_l += (d.cdu_leak_lpm - DRIED_LPM) * minutes
        for puddle, full in ((self.tray_l, np.inf), (self.rack_l, 1.0), (self.cdu_l, 1.0)):
            np.clip(puddle, 0.0, full, out=puddle)
        np.greater(self.tray_l, TRAY_WET_L, out=t.node_leak)
        np.greater(self.rack_l, RACK_WET_L, out=t.rack_leak)
        np.greater(self.cdu_l, CDU_WET_L, out=t.cdu_leak)
