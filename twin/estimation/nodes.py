"""Power balances of nodes and racks: a node against its GPUs and CPUs, its supplies against it, a rack
against its nodes.

A building's report of a rack is some seconds old, by an unknown delay: the delay is learned as the one under
which rack and nodes agree best.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Residual
from twin.estimation.linear import Linear
from twin.estimation.parameter import Delayed, Parameter
from twin.estimation.reading import Readings
from twin.site import Site
from twin.telemetry import EntityState, column, part

# Of a node: loss of its supplies in proportion, domain.md B (Titanium, 94-96 %) with most inside `other`.
NODE_LOSS_PU, NODE_LOSS_SPREAD = 0.02, 0.05
OTHER_SPREAD_PU, OTHER_SPREAD_W = 0.3, 60.0  # of what a node draws beside GPUs and CPUs; source: estimate
RACK_LOSS_PU, RACK_LOSS_SPREAD = 0.01, 0.03  # shelves and bars; source: estimate
OVERHEAD_SPREAD_PU, OVERHEAD_SPREAD_W = 0.4, 300.0  # source: estimate
SHARE_SPREAD = 0.1  # of a node's power that its first supply carries; source: estimate
ERROR_PU, FLOOR_PU = 0.01, 0.003  # of one reading, of the highest power; source: estimate
DELAYS_S = (0.0, 1.0, 2.0, 3.0, 4.0)  # that a rack's reading may have; source: estimate
DELAY_MEMORY_S = 900.0  # of how well each delay fits; source: estimate
DELAY_DOUBT = 0.15  # of how far the nodes' power has moved within the delays; source: estimate
GAP_S = 3.0  # so long a node's power that is not heard is taken to stand still; source: estimate
RING = 12  # ticks of the nodes' power that are remembered
NODE, PSU1, PSU2, RACK = "node.power_w", "node.psu1_power_w", "node.psu2_power_w", "rack.power_w"


class NodeEstimator(EntityState):
    """Residuals and learned parameters of nodes, and of racks by the power of their nodes."""

    sum_ns: I64 = column("rack", "i8")  # when all nodes of a rack were last known
    rack_ns: I64 = column("rack", "i8")
    misfit: F64 = column("rack", "f8", lead=(len(DELAYS_S),))
    # Of the last ticks, and when the rack's reading was taken; sums over nodes begin anew on another site
    ring: F64 = column("sums", "f8", np.nan, lead=(RING,))
    ring_ns: I64 = column("ticks", "i8")
    then: F64 = column("sums", "f8", np.nan, lead=(len(DELAYS_S),))
    delay: Delayed = part()  # which of DELAYS_S
    relations: dict[str, Linear] = part()

    def __init__(self, site: Site) -> None:
        n, n_rack = site.sizes["node"], site.sizes["rack"]
        super().__init__({"rack": n_rack, "sums": n_rack, "ticks": RING})
        self.site = site
        design, of = site.design, site.rack_of_node
        nodes = np.maximum(np.diff(site.node_start_of_rack), 1)
        rated = ((design.rack_max_w - np.nan_to_num(design.rack_overhead_w)) / nodes)[of]
        other = design.node_other_w[of]
        one = np.ones(n)
        self.relations = {
            NODE: Linear(
                NODE, np.stack([other, one + NODE_LOSS_PU]),
                np.stack([OTHER_SPREAD_PU * other + OTHER_SPREAD_W, one * NODE_LOSS_SPREAD]),
                ERROR_PU * rated, _known(FLOOR_PU * rated)),
            RACK: Linear(
                RACK, np.stack([design.rack_overhead_w, np.ones(n_rack) + RACK_LOSS_PU]),
                np.stack([OVERHEAD_SPREAD_PU * design.rack_overhead_w + OVERHEAD_SPREAD_W,
                          np.full(n_rack, RACK_LOSS_SPREAD)]),
                ERROR_PU * design.rack_max_w, _known(FLOOR_PU * design.rack_max_w)),
        }  # fmt: skip
        for name in (PSU1, PSU2):
            self.relations[name] = Linear(name, 0.5 * one[None], SHARE_SPREAD * one[None], ERROR_PU * rated,
                                          _known(FLOOR_PU * rated))  # fmt: skip
        gpus = np.diff(site.gpu_start_of_node)
        self._each = int(gpus[0]) if n and (gpus == gpus[0]).all() else 0  # GPUs of any node; 0 = it varies
        self._filled: Bool = np.diff(site.node_start_of_rack) > 0
        self.delay = Delayed(np.full((1, n_rack), 2.0), "rack")

    def update(
        self, readings: Readings, dt_s: float, touched: dict[str, Bool] | None = None
    ) -> dict[str, Residual]:
        """Compare all, then learn; nothing of nodes and racks that are `touched` (by table, [n])."""
        untouched = {table: ~mask for table, mask in (touched or {}).items()}
        out: dict[str, Residual] = {}
        if self.site.sizes["node"] and any(readings.known("node", k) for k in ("power_w", "psu1_power_w")):
            with np.errstate(divide="ignore", invalid="ignore"):
                out |= self._nodes(readings, dt_s, untouched.get("node"))
                out[RACK] = self._rack(readings, dt_s, untouched.get("rack"))
            return out
        for name in (NODE, PSU1, PSU2, RACK):
            none = np.full(self.relations[name].n, np.nan)
            out[name] = Residual(name, none, none, none)
        return out

    def _nodes(self, readings: Readings, dt_s: float, untouched: Bool | None) -> dict[str, Residual]:
        power_w, heard_ns = readings.good("node", "power_w")
        gpu_w, _ = readings.good("gpu", "power_w")
        inner_w = self._of_gpus(gpu_w)
        if readings.known("node", "cpu_power_w"):
            inner_w = inner_w + readings.good("node", "cpu_power_w")[0]
        out = {NODE: self.relations[NODE].compare([np.ones_like(inner_w), inner_w], power_w, heard_ns, dt_s,
                                                  untouched)}  # fmt: skip
        for name in (PSU1, PSU2):
            supply_w, supply_ns = readings.good("node", name.partition(".")[2])
            out[name] = self.relations[name].compare([power_w], supply_w, supply_ns, dt_s, untouched)
        return out

    def _of_gpus(self, gpu_w: F64) -> F64:
        """Sum over each node's GPUs [n_node]; NaN where one is unknown."""
        if self._each:
            out = gpu_w[:: self._each].copy()
            for k in range(1, self._each):
                out += gpu_w[k :: self._each]
            return out
        start = self.site.gpu_start_of_node
        out = np.zeros(len(start) - 1)
        filled = np.flatnonzero(np.diff(start))
        if len(filled):
            out[filled] = np.add.reduceat(gpu_w, start[filled])
        return out

    def _rack(self, readings: Readings, dt_s: float, untouched: Bool | None) -> Residual:
        power_w, heard_ns = readings.good("rack", "power_w")
        node_w, _ = readings.good("node", "power_w")
        sums = np.where(self._filled, self.site.sum_by_rack("node", node_w), np.nan)
        for held in (self.ring, self.ring_ns):
            held[1:] = held[:-1].copy()
        # One node that missed a tick does not hide its rack: the sum before stands in
        known = np.isfinite(sums)
        self.sum_ns[known] = readings.now_ns
        recent = readings.now_ns - self.sum_ns <= GAP_S * NS
        self.ring[0] = np.where(known, sums, np.where(recent, self.ring[1], np.nan))
        self.ring_ns[0] = readings.now_ns
        fresh = heard_ns > self.rack_ns
        self.rack_ns = heard_ns.copy()
        if fresh.any():
            for k, delay_s in enumerate(DELAYS_S):
                np.copyto(self.then[k], self._at(heard_ns - round(delay_s * NS)), where=fresh)
        self.delay.advance(dt_s)
        relation = self.relations[RACK]
        overhead, slope = relation.set.in_use
        off = (overhead + slope * self.then - power_w) / relation.error
        fits = fresh & np.isfinite(off).all(axis=0)
        share = min(dt_s / DELAY_MEMORY_S, 1.0)
        self.misfit += np.where(fits, share * (np.minimum(off * off, 100.0) - self.misfit), 0.0)
        self.delay.learning[0] = np.where(self.misfit.any(axis=0), self.misfit.argmin(axis=0), 2.0)
        chosen = self.delay.in_use[0].astype(np.intp)
        then = np.take_along_axis(self.then, chosen[None], axis=0)[0]
        then = np.where(recent, then, np.nan)
        span = self.then.max(axis=0) - self.then.min(axis=0)
        doubt = DELAY_DOUBT * np.nan_to_num(slope * span)
        return relation.compare([np.ones_like(then), then], power_w, heard_ns, dt_s, untouched, doubt)

    def _at(self, t_ns: I64) -> F64:
        """The nodes' power at these instants [n_rack]; NaN where that is not remembered."""
        newer = (self.ring_ns[:, None] > t_ns + NS // 2).sum(axis=0)
        found = np.take_along_axis(self.ring, np.minimum(newer, RING - 1)[None], axis=0)[0]
        return np.where(newer < RING, found, np.nan)

    def parameters(self) -> dict[str, Parameter]:
        """Return the learned parameters, as now in use; views, to be read only."""
        out = [
            self.relations[NODE].parameter("node.other_w", 0),
            self.relations[NODE].parameter("node.loss_factor", 1),
            self.relations[RACK].parameter("rack.overhead", 0),
            self.relations[RACK].parameter("rack.loss_factor", 1),
            self.relations[PSU1].parameter("node.psu1_share", 0),
        ]
        return {p.name: p for p in out}


def _known(floor: F64) -> F64:
    """A floor of noise where no profile gives one: 1 W."""
    return np.where(np.isfinite(floor), floor, 1.0)
