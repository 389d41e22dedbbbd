"""Power balances of nodes and racks: a node against its GPUs and CPUs, its supplies against it, a rack
against its nodes.

A building's report of a rack is some seconds old, by an unknown delay: the delay is learned as the one under
which rack and nodes agree best.
"""

from __future__ import annotations

import numpy as np

from twin import kernels
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Residual, confidence_of
from twin.estimation.noise import FAULT_S, FAULT_SIGMAS, ResidualNoise
from twin.estimation.parameter import (
    ASKED_SIGMAS,
    KNOWN_SIGMAS,
    MOVE_S,
    NOISE_AFTER_MOVES,
    Covariance,
    Delayed,
    Fit,
    Parameter,
    Reference,
    moves_left_s,
    parts_of,
)
from twin.estimation.readings import Readings, filled
from twin.site import Site
from twin.telemetry import OWN, EntityState, OldOfNew, column, part, scalar

# Of a node: loss of its supplies in proportion, domain.md B (Titanium, 94-96 %) with most inside `other`.
NODE_LOSS_PU, NODE_LOSS_SPREAD = 0.02, 0.05
LOSS_SPREAD_PU = 0.3  # of what a profile states, regulators and fans as well; source: estimate
OTHER_SPREAD_PU, OTHER_SPREAD_W = 0.3, 60.0  # of what a node draws beside GPUs and CPUs; source: estimate
RACK_LOSS_PU, RACK_LOSS_SPREAD = 0.01, 0.03  # shelves and bars; source: estimate
OVERHEAD_SPREAD_PU, OVERHEAD_SPREAD_W = 0.4, 300.0  # source: estimate
SHARE_SPREAD = 0.1  # of a node's power that its first supply carries; source: estimate
ERROR_PU, FLOOR_PU = 0.01, 0.003  # of one reading, of the highest power; source: estimate
# Fans follow the heat late: for so long, and with so much of how far the power has moved, in air and beside
# coolant. Nodes of a rack may share fans or warm each other's air: the same share of how far the rack's mean
# has moved away from the node, since the node was learned; source: estimate, fans of full speed draw 5-10 %
# of a server in air
FAN_S, FAN_PU, FAN_LIQUID_PU = 30.0, 0.05, 0.005
MEMORY_S = 3600.0  # of relations
DELAYS_S = (0.0, 1.0, 2.0, 3.0, 4.0)  # that a rack's reading may have; source: estimate
DELAY_MEMORY_S = 900.0  # of how well each delay fits; source: estimate
DELAY_DOUBT = 0.15  # of how far the nodes' power has moved within the delays; source: estimate
BETWEEN_DOUBT = 0.35  # of the same from the delay before to the one after; a delay lies between two ticks
GAP_S = 3.0  # for so long a node's missing power is taken to stand still; source: estimate
PART = 2_048  # rows of a relation that learn in one tick, at most
SETTLED_S = 900.0  # of readings before a parameter's value is its reference; source: estimate
MOVE_PU = 0.1  # doubt in an expectation while it moves, of its last step; source: estimate
RING = 12  # ticks of the nodes' power that are remembered
MOVING = 6  # of these within which a building's meters read the same; source: estimate
NODE, PSU1, PSU2, RACK = "node.power_w", "node.psu1_power_w", "node.psu2_power_w", "rack.power_w"


class Linear(EntityState):
    """A relation over a table: `prior` and `spread` [k, n]; `error` [n] of one reading, `floor` of noise."""

    sigma: F64 = column(OWN, "f8", np.nan)
    expected: F64 = column(OWN, "f8", np.nan)
    taught_ns: I64 = column(OWN, "i8")
    elapsed_s: F64 = column("part", "f8")
    since_s: F64 = column("part", "f8")
    moves: I64 = column("part", "i8")
    turn: int = scalar(0)
    set: Delayed = part()
    fit: Fit = part()
    covariance: Covariance = part()
    reference: Reference = part()
    noise: ResidualNoise = part()

    def __init__(
        self, name: str, prior: F64, spread: F64, error: F64, floor: F64, memory_s: float = MEMORY_S
    ) -> None:
        table = name.partition(".")[0]
        self.name = name
        self.k, self.n = prior.shape
        self.parts = parts_of(self.n, PART)
        super().__init__({table: self.n, "part": len(self.parts)}, table)
        self.prior, self.spread, self.error = prior, spread, error
        self.set, self.fit = Delayed(prior, table), Fit(self.k, self.n, memory_s, table)
        self.covariance = Covariance(spread, table)
        self._at = np.zeros(self.n, np.int64)
        self._unknown = np.zeros(self.n)  # 1 sigma for that parameters are not known, where it was asked
        self.reference = Reference(self.k, self.n, SETTLED_S, table)
        self.noise = ResidualNoise(self.n, floor, table)

    def compare(
        self,
        features: list[F64],
        measured: F64,
        received_ns: I64,
        dt_s: float,
        untouched: Bool | None = None,
        doubt: F64 | None = None,
    ) -> Residual:
        """Compare a tick; `features` k times [n]. Learns from new readings that are `untouched`.

        `doubt` [n] is more uncertainty in y's unit.
        """
        self.elapsed_s += dt_s
        self.since_s += dt_s
        part = self.turn % len(self.parts)
        self.turn += 1
        if self.since_s[part] >= MOVE_S:
            self._move(part)
        expected, loose, sigma = np.empty((3, self.n))
        given = self.set.in_use, self.expected, self.sigma, measured, doubt, MOVE_PU, ASKED_SIGMAS
        found = kernels.compare_linear(*given, expected, loose, sigma, self._at, *features)
        self.expected, at = expected, self._at[:found]
        self._unknown[:] = 0.0
        self._unknown[at] = self.covariance.sigma(at, [x[at] for x in features])
        sigma[at] = np.hypot(sigma[at], self._unknown[at])
        self._learn(part, features, measured, received_ns, untouched, loose)
        return Residual(self.name, expected, measured, sigma)

    def learning_left(self) -> tuple[F64, I64]:
        """See `Estimator.learning_left`."""
        wait_s = moves_left_s(self.parts, self.moves, self.since_s)
        return wait_s, self.noise.readings_left()

    def _move(self, part: int) -> None:
        rows = self.parts[part]
        theta, variance, factor = self.fit.solve(rows, self.prior[:, rows], self.spread[:, rows])
        self.set.learning[:, rows] = theta
        self.set.move(rows)
        self.covariance.move(rows, factor)
        self.reference.settle(rows, theta, self.fit.taught_s[rows], self.taught_ns[rows])
        self.reference.sigma[:, rows] = np.sqrt(variance)
        early = self.reference.value[:, rows]
        self.reference.confidence[:, rows] = confidence_of(
            self.set.in_use[:, rows] - early, self.reference.sigma[:, rows]
        )
        self.since_s[part] = 0.0
        self.moves[part] += 1

    def _learn(
        self,
        part: int,
        features: list[F64],
        measured: F64,
        received_ns: I64,
        untouched: Bool | None,
        loose: F64,
    ) -> None:
        rows, dt_s = self.parts[part], float(self.elapsed_s[part])
        self.elapsed_s[part] = 0.0
        read_ns = received_ns[rows]
        clipped, weight, off = np.empty((3, len(read_ns)))
        taught = kernels.teach_linear(
            measured[rows],
            read_ns,
            self.taught_ns[rows],
            None if untouched is None else untouched[rows],
            self.expected[rows],
            self.noise.off_ns[rows],
            self.sigma[rows],
            self._unknown[rows],
            loose[rows],
            self.error[rows],
            FAULT_S * NS,
            FAULT_SIGMAS,
            KNOWN_SIGMAS,
            clipped,
            weight,
            off,
        )
        if not taught:
            return
        self.fit.learn(rows, [x[rows] for x in features], clipped, self.error[rows], weight, dt_s)
        if self.moves[part] < NOISE_AFTER_MOVES:
            return
        self.noise.learn(off, read_ns, dt_s, rows)
        self.sigma[rows] = self.noise.sigma(rows)

    def parameter(self, name: str, k: int) -> Parameter:
        """Return one coefficient in use; a read-only view."""
        of = self.reference
        return Parameter(name, self.table, self.set.in_use[k], of.value[k], of.sigma[k], of.confidence[k])

    def adopt(self, old: Linear, old_of_new: OldOfNew) -> None:
        """Take over the learned state of another site, whose parts may differ."""
        super().adopt(old, old_of_new)
        self.turn, self.moves[:] = 0, int(old.moves.min(initial=0))


class NodeEstimator(EntityState):
    """Residuals and learned parameters of nodes, and of racks by the power of their nodes."""

    calm_w: F64 = column("node", "f8", np.nan)  # lag of what GPUs and CPUs draw
    apart_w: F64 = column("node", "f8", np.nan)  # lag of the rack's mean of that over the node's own
    sum_ns: I64 = column("rack", "i8")  # when all nodes of a rack were last known
    rack_ns: I64 = column("rack", "i8")
    misfit: F64 = column("rack", "f8", lead=(len(DELAYS_S),))
    # Of the last ticks, and at the rack's reading; sums over nodes restart on another site
    ring: F64 = column("sums", "f8", np.nan, lead=(RING,))
    ring_ns: I64 = column("ticks", "i8")
    then: F64 = column("sums", "f8", np.nan, lead=(len(DELAYS_S),))
    delay: Delayed = part()  # which of DELAYS_S
    relations: dict[str, Linear] = part()

    def __init__(self, site: Site) -> None:
        n, n_rack = site.sizes["node"], site.sizes["rack"]
        super().__init__({"node": n, "rack": n_rack, "sums": n_rack, "ticks": RING})
        self.site = site
        design, of = site.design, site.rack_of_node
        nodes = np.maximum(np.diff(site.node_start_of_rack), 1)
        rated = ((design.rack_max_w - np.nan_to_num(design.rack_overhead_w)) / nodes)[of]
        other, slope = _design_law(site)
        one = np.ones(n)
        self._fan_pu = np.where(design.liquid[of], FAN_LIQUID_PU, FAN_PU)
        self.relations = {
            NODE: Linear(
                NODE,
                np.stack([other, slope]),
                np.stack(
                    [
                        OTHER_SPREAD_PU * np.maximum(other, 0.0) + OTHER_SPREAD_W,
                        np.maximum(NODE_LOSS_SPREAD, LOSS_SPREAD_PU * (slope - 1.0)),
                    ]
                ),
                ERROR_PU * rated,
                _known(FLOOR_PU * rated),
            ),
            RACK: Linear(
                RACK,
                np.stack([design.rack_overhead_w, np.ones(n_rack) + RACK_LOSS_PU]),
                np.stack(
                    [
                        OVERHEAD_SPREAD_PU * design.rack_overhead_w + OVERHEAD_SPREAD_W,
                        np.full(n_rack, RACK_LOSS_SPREAD),
                    ]
                ),
                ERROR_PU * design.rack_max_w,
                _known(FLOOR_PU * design.rack_max_w),
            ),
        }
        for name in (PSU1, PSU2):
            self.relations[name] = Linear(
                name, 0.5 * one[None], SHARE_SPREAD * one[None], ERROR_PU * rated, _known(FLOOR_PU * rated)
            )
        gpus = np.diff(site.gpu_start_of_node)
        self._each = int(gpus[0]) if n and (gpus == gpus[0]).all() else 0  # GPUs of any node; 0 = it varies
        self._counts = np.diff(site.node_start_of_rack).astype(np.float64)
        self._filled: Bool = self._counts > 0
        self.delay = Delayed(np.full((1, n_rack), 2.0), "rack")

    def update(
        self, readings: Readings, dt_s: float, touched: dict[str, Bool] | None = None
    ) -> dict[str, Residual]:
        """Compare all, then learn, except nodes and racks that are `touched` (by table, [n])."""
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
        power_w, received_ns = readings.good("node", "power_w")
        gpu_w, _ = readings.good("gpu", "power_w")
        inner_w = self._of_gpus(gpu_w)
        if readings.known("node", "cpu_power_w"):
            inner_w = inner_w + readings.good("node", "cpu_power_w")[0]
        out = {
            NODE: self.relations[NODE].compare(
                [np.ones_like(inner_w), inner_w],
                power_w,
                received_ns,
                dt_s,
                untouched,
                self._fans(inner_w, dt_s),
            )
        }
        for name in (PSU1, PSU2):
            supply_w, supply_ns = readings.good("node", name.partition(".")[2])
            out[name] = self.relations[name].compare([power_w], supply_w, supply_ns, dt_s, untouched)
        return out

    def _fans(self, inner_w: F64, dt_s: float) -> F64:
        """Return 1 sigma [n_node], W, for fans that have not settled at the present heat, and for fans that
        follow neighbours."""
        known = np.isfinite(inner_w)
        sums_w, counts = self.site.sum_by_rack("node", np.where(known, inner_w, 0.0)), self._counts
        if not known.all():
            counts = self.site.sum_by_rack("node", known.astype(np.float64))
        apart_w = (sums_w / counts)[self.site.rack_of_node] - inner_w
        off_w = []
        for now_w, lag_w, lag_s in ((inner_w, self.calm_w, FAN_S), (apart_w, self.apart_w, MEMORY_S)):
            np.copyto(lag_w, now_w, where=known & np.isnan(lag_w))
            lag_w += np.where(known, (now_w - lag_w) * -np.expm1(-dt_s / lag_s), 0.0)
            off_w.append(now_w - lag_w)
        return filled(self._fan_pu * np.hypot(*off_w))

    def _of_gpus(self, gpu_w: F64) -> F64:
        """Return the sum over each node's GPUs [n_node]; NaN if one is unknown."""
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
        power_w, received_ns = readings.good("rack", "power_w")
        node_w, _ = readings.good("node", "power_w")
        sums = np.where(self._filled, self.site.sum_by_rack("node", node_w), np.nan)
        # Of a time without ticks, as between an end and a restart, nothing is remembered
        newest_ns, before_ns = self.ring_ns[:2].tolist()
        if readings.now_ns - newest_ns > max(GAP_S * NS, 2 * (newest_ns - before_ns)):
            self.ring[:] = np.nan
        for ring in (self.ring, self.ring_ns):
            ring[1:] = ring[:-1].copy()
        # One node that missed a tick does not hide its rack: its reading before stands in
        known = np.isfinite(sums)
        self.sum_ns[known] = readings.now_ns
        recent = readings.now_ns - self.sum_ns <= GAP_S * NS
        if not known.all():
            lately_w = self.site.sum_by_rack("node", readings.lately("node", "power_w"))
            sums = np.where(known, sums, np.where(recent & self._filled, lately_w, np.nan))
        self.ring[0] = sums
        self.ring_ns[0] = readings.now_ns
        fresh = received_ns > self.rack_ns
        self.rack_ns = received_ns.copy()
        if fresh.any():
            for k, delay_s in enumerate(DELAYS_S):
                np.copyto(self.then[k], self._at(received_ns - round(delay_s * NS)), where=fresh)
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
        beside = np.stack([np.maximum(chosen - 1, 0), np.minimum(chosen + 1, len(DELAYS_S) - 1)])
        step = np.abs(np.take_along_axis(self.then, beside, axis=0) - then).max(axis=0)
        doubt = filled(slope * np.maximum(DELAY_DOUBT * span, BETWEEN_DOUBT * step))
        return relation.compare([np.ones_like(then), then], power_w, received_ns, dt_s, untouched, doubt)

    def lately_w(self) -> F64:
        """Return the power of the racks' nodes in the last ticks [MOVING, n_rack]; 0 if one is unknown."""
        last = self.ring[:MOVING]
        return np.where(np.isfinite(last).all(axis=0), last, 0.0)

    def _at(self, t_ns: I64) -> F64:
        """Return the nodes' power at these instants [n_rack]; NaN beyond the memory."""
        newer = (self.ring_ns[:, None] > t_ns + NS // 2).sum(axis=0)
        power_w = np.take_along_axis(self.ring, np.minimum(newer, RING - 1)[None], axis=0)[0]
        return np.where(newer < RING, power_w, np.nan)

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


def _design_law(site: Site) -> tuple[F64, F64]:
    """(other power, W; slope) of a node over its GPUs and CPUs [n_node]. In air by what its profile says that
    it draws idle and full: its fans grow with the load.
    """
    design, of = site.design, site.rack_of_node
    gpus = np.diff(site.gpu_start_of_node)
    full_w = gpus * design.gpu_max_w[of] + design.cpu_max_w[of]
    idle_w = gpus * design.gpu_idle_w[of] + design.cpu_idle_w[of]
    slope = 1.0 + design.node_loss_pu[of] * full_w / (full_w - idle_w)
    stated = ~design.liquid[of] & np.isfinite(slope) & (full_w > idle_w) & (slope > 1.0 + NODE_LOSS_PU)
    slope = np.where(stated, slope, 1.0 + NODE_LOSS_PU)
    other_w = design.node_other_w[of]
    return np.where(stated, other_w - (slope - 1.0) * idle_w, other_w), slope


def _known(floor: F64) -> F64:
    """Return the noise floor; 1 W without a profile's value."""
    return np.where(np.isfinite(floor), floor, 1.0)
