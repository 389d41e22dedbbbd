"""Expected temperature of GPUs: a free-running first-order model, driven by power, inlet and flow.

T = L(T_in) + R L(P f(Q)) + offset, where L is the lag of the plate and R stands over the rack's supply: what
coolant that others of the tray have warmed adds is part of it, since a tray works as one. A lag longer or
shorter than designed enters by its derivative, so all GPUs share the lags of the design and yet have time
constants of their own.
"""

from __future__ import annotations

import numpy as np

from twin import kernels
from twin.catalogue import F64, I32, I64, NS, Bool
from twin.estimation.noise import ResidualNoise
from twin.estimation.parameter import Covariance, Delayed, Fit, Reference
from twin.estimation.readings import Readings, filled
from twin.estimation.seldom_power import Gaps, SeldomPower
from twin.physics import air_resistance_k_per_w, resistance_k_per_w
from twin.site import CONVECTIVE_SHARE, FLOW_EXPONENT, Site
from twin.telemetry import EntityState, column, part, scalar

MEMORY_S = 2400.0  # of resistance and lag; source: estimate
# Of weighted readings, and 1 sigma over its value, before a resistance is its reference, and how far it moves
# within two minutes by then; source: estimate
SETTLED_S, KNOWN_PU = 900.0, 0.04
# 1 sigma of the prior: of the resistance as a share of the design's, of the lag as a share of itself, and of
# the offset (a sensor's error); source: estimate.
SPREAD_PU, LAG_SPREAD_PU, OFFSET_K = 0.2, 0.3, 0.7
MODEL_ERROR_K = 0.6  # of one reading: whole degrees, noise, what the model leaves out; source: estimate
NOISE_K = 0.3  # floor of the learned noise: a step of 1 K is 0.29 K
FULL_POWER_PU = 0.5  # of the highest power: from here on a reading teaches in full; source: estimate
LEAST_WEIGHT = 0.02  # of a reading without power; source: estimate
HOLD_S = 5.0  # for so long a missing power is taken to stand still; source: estimate
SETTLING = 4.0  # lags until a model that began in the middle of things is right (e^-4 of its error is left)
# A model that moves is less certain: by this share of the way that its lag has yet to go; source: estimate.
MOVE_PU = 0.15
# GPUs that have taught so much, so many at the least and about so many at most, show what is typical of their
# profile; source: estimate.
POOLED_AFTER_S, LEAST_POOL, POOLED = 1000.0, 8, 10_001
# The inlet is read so long before or after the plate feels it; source: estimate, racks are read each 2 s
LATE_S = 3.0
LEAST_INLET_K = 0.1  # of doubt for that: below, it is lost in the noise; source: estimate
# Air through a node at full power and nominal flow warms by so much; source: estimate, servers of this class
# are made for 10-15 K.
AIR_RISE_K = 12.0
AIR_SMOOTHING_S = 20.0  # whole and half degrees of inlet and outlet against a rise of 10 K; source: estimate
LEAST_RISE_PU = 0.15  # of that rise; source: estimate
AIR_RATIO = (0.2, 2.0)  # of air flow over nominal: outside, a sensor errs; source: estimate
LEAST_AWAY_PU = 0.01  # of a factor: below, its doubt is lost in the noise; source: estimate
LEAST_OTHERS = 3  # GPUs of a node that show its air: then one that is wrong does not sway their median
# The way of a resistance with the flow is known to this share of the way from where it was learned: laws of
# fins and channels have exponents from -0.5 to -0.8; source: estimate
FLOW_DOUBT_PU = 0.2
# Each GPU feels a common error of a node in air by its own heat sink and lag; source: estimate, from
# healthy simulated nodes: 3 K off after a move of the load, they leave 0.8 K (1 sigma) between their GPUs
COMMON_DOUBT_PU = 0.25
OFFSET, RESISTANCE, LAG = range(3)


class Trays:
    """GPUs of nodes: `spread` gives each GPU its node's value, `others` what its neighbours have."""

    def __init__(self, site: Site) -> None:
        self.start, self.count = site.gpu_start_of_node, np.diff(site.gpu_start_of_node)
        self.of: I32 = site.node_of_gpu
        count = self.count
        self.each = int(count[0]) if len(count) and (count == count[0]).all() else 0

    def spread(self, of_node: F64) -> F64:
        """Return the value of each GPU's node [n_gpu]."""
        return np.repeat(of_node, self.each) if self.each else np.asarray(of_node[self.of], np.float64)

    def others(self, values: F64, nodes: np.ndarray) -> tuple[I64, F64]:
        """(GPUs of these nodes [m], the median of `values` [n_gpu] over the other GPUs of their node); NaN
        where fewer than LEAST_OTHERS others have one."""
        most = int(self.count[nodes].max(initial=0))
        seats = self.start[nodes][:, None] + np.arange(most)
        there = np.arange(most) < self.count[nodes][:, None]
        mine = np.where(there, values[np.where(there, seats, 0)], np.nan)
        order = np.argsort(mine, axis=1)  # NaN last
        ordered, rank = np.take_along_axis(mine, order, axis=1), np.argsort(order, axis=1)
        others = np.count_nonzero(np.isfinite(mine), axis=1)[:, None] - 1
        low, high = (np.clip(at, 0, None) for at in ((others - 1) // 2, others // 2))
        ends = [
            np.take_along_axis(ordered, np.minimum(at + (at >= rank), most - 1), axis=1) for at in (low, high)
        ]
        median = np.where(others >= LEAST_OTHERS, 0.5 * (ends[0] + ends[1]), np.nan)
        return seats[there].astype(np.int64), median[there]


class GpuTemp(EntityState):
    """Expectations of `gpu.temp_c`, and resistance, lag and offset of each GPU behind them."""

    sigma: F64 = column("gpu", "f8", np.nan)
    # Lags: of power times flow's factor, of that again, of the inlet; what they were driven by last
    heated: F64 = column("gpu", "f8", np.nan)
    twice: F64 = column("gpu", "f8", np.nan)
    power_w: F64 = column("gpu", "f8", np.nan)
    silent_s: F64 = column("gpu", "f8")
    unseen_k: F64 = column("gpu", "f8")  # 1 sigma for that the power in between is not known
    settled_s: F64 = column("gpu", "f8")
    typical: F64 = column("gpu", "f8", 1.0)  # resistance of its profile over the design's
    inlet_c: F64 = column("node", "f8", np.nan)
    inlet_s: F64 = column("node", "f8")
    air: F64 = column("node", "f8", np.nan, lead=(2,))  # smoothed power and rise of air over their most
    factor: F64 = column("rack", "f8", 1.0)
    usual_factor: F64 = column("node", "f8", 1.0)  # mean over the memory of what is learned
    away_pu: F64 = column("node", "f8")  # lag of how far the factor is from that
    driven_s: float = scalar(0.0)
    driven_ns: int = scalar(0)  # instant of the last tick
    step_s: float = scalar(0.0)  # usual time between two, the longest of the last ones
    set: Delayed = part()
    fit: Fit = part()
    covariance: Covariance = part()
    reference: Reference = part()
    noise: ResidualNoise = part()
    seldom: SeldomPower = part()

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        design, of, node_rack = site.design, site.rack_of_gpu, site.rack_of_node
        n, n_node = site.sizes["gpu"], site.sizes["node"]
        self.n, self.trays = n, Trays(site)
        self.rack_of_node = node_rack
        self.liquid = design.liquid[node_rack]
        self.all_liquid = bool(self.liquid.all())
        self.tau_s = design.gpu_tau_s[node_rack]
        self._rack_tau_s = design.gpu_tau_s
        self._longest_s = float(np.nanmax(self.tau_s, initial=0.0))
        self.nominal_lpm = design.rack_flow_lpm
        self.resistance = design.gpu_resistance_k_per_w[of]
        self.full_w = FULL_POWER_PU * design.gpu_max_w[of]
        first = np.stack([np.zeros(n), self.resistance, np.zeros(n)])
        self.set, self.fit = Delayed(first, "gpu"), Fit(3, n, MEMORY_S, "gpu")
        self.covariance = Covariance(_spread(self.resistance), "gpu")
        self.unknown_k = np.zeros(n)  # 1 sigma for that the parameters are not known, where it was asked
        self.reference = Reference(1, n, SETTLED_S, "gpu")
        self.noise = ResidualNoise(n, np.full(n, NOISE_K), "gpu")
        self.seldom = SeldomPower(site.sizes, design.gpu_max_w[of])
        self.node_factor = np.ones(n_node)
        nodes = np.maximum(np.diff(site.node_start_of_rack), 1)
        # GPUs whose flow no neighbours confirm: see `share_air`
        self.lonely = self.liquid | (self.trays.count <= LEAST_OTHERS)
        self.node_max_w = (design.rack_max_w / nodes)[node_rack]
        self._scratch = np.empty(n, np.int64)
        self._move_k_per_w = MOVE_PU * self.resistance
        self.expected = np.full(n, np.nan)
        self.inlet_doubt_k = np.zeros(n_node)  # 1 sigma for that the inlet moves while it is read
        self.common_k = np.zeros(n)  # by which the others of its node are off with it, where it was asked

    @property
    def resistance_k_per_w(self) -> F64:
        """Return the resistance in use at nominal flow, K/W [n]: the design's until it is learned."""
        resistance: F64 = self.set.in_use[RESISTANCE]
        return resistance

    def _inlet(self, readings: Readings) -> F64:
        """Return the inlet temperature at the plates of each node [n_node], degC: coolant of its rack, else
        air.
        """
        of = self.rack_of_node
        coolant, _ = readings.good("rack", "supply_temp_c")
        wet: F64 = coolant[of]
        if not (known := np.isfinite(wet)).all():
            wet = np.where(known, wet, readings.good("node", "water_inlet_temp_c")[0])
        if self.all_liquid:
            return wet
        air, _ = readings.good("node", "inlet_temp_c")
        room, _ = readings.good("rack", "inlet_temp_c")
        return np.where(self.liquid, wet, np.where(np.isfinite(air), air, room[of]))

    def _air(self, readings: Readings, dt_s: float) -> F64:
        """Return the factor on the resistance of heat sinks [n_node] from the air flow; 1 if unknown.

        The flow follows from the node's heat and the rise of its air, both smoothed alike.
        """
        power_w, _ = readings.good("node", "power_w")
        inlet_c, _ = readings.good("node", "inlet_temp_c")
        outlet_c, _ = readings.good("node", "outlet_temp_c")
        now = np.stack([power_w / self.node_max_w, (outlet_c - inlet_c) / AIR_RISE_K])
        known = np.isfinite(now).all(axis=0)
        began = known & np.isnan(self.air).any(axis=0)
        share = -np.expm1(-dt_s / AIR_SMOOTHING_S)
        self.air = np.where(began, now, np.where(known, self.air + share * (now - self.air), self.air))
        ratio = np.clip(self.air[0] / np.maximum(self.air[1], LEAST_RISE_PU), *AIR_RATIO)
        factor = air_resistance_k_per_w(np.ones_like(ratio), ratio)
        return np.where(np.isfinite(factor), factor, 1.0)

    def drive(self, readings: Readings, power_w: F64, power_ns: I64, dt_s: float) -> F64:
        """Move the lags on by `dt_s` with the readings of this tick; returns the expected temperature [n],
        degC.

        `power_ns` [n]: instants of the powers.
        """
        away = self._away(readings.now_ns)
        flow_lpm, _ = readings.good("rack", "flow_lpm")
        factor = resistance_k_per_w(
            np.ones_like(flow_lpm), flow_lpm / self.nominal_lpm, CONVECTIVE_SHARE, FLOW_EXPONENT
        )
        np.copyto(self.factor, factor, where=np.isfinite(factor))
        of_node = self.factor[self.rack_of_node]
        if not self.all_liquid:
            of_node = np.where(self.liquid, of_node, self._air(readings, dt_s))
        self.node_factor = of_node
        self.driven_s = min(self.driven_s + dt_s, MEMORY_S)
        self.usual_factor += min(dt_s / self.driven_s, 1.0) * (of_node - self.usual_factor)
        # The lag is R C: it is longer where less flows
        if self.all_liquid:
            left = np.exp(-dt_s / (self._rack_tau_s * self.factor))[self.rack_of_node]
        else:
            left = np.exp(-dt_s / (self.tau_s * of_node))
        # An error of the law of flow shows as fast as a plate follows its flow
        away_pu = np.abs(of_node - self.usual_factor) / of_node * self.lonely
        self.away_pu = away_pu + (self.away_pu - away_pu) * np.where(np.isnan(left), 0.0, left)
        gaps, new = self.seldom.update(readings, power_w, power_ns, self.power_w)
        if self.unseen_k.any():
            left_of_gpu = self.trays.spread(filled(left.copy()))
            np.multiply(self.unseen_k, left_of_gpu, out=self.unseen_k, where=new)
        self._hold_power(power_w, dt_s)
        if away:
            self.settled_s[:] = 0.0
            self._begin(np.arange(self.n))
        inlet = self._inlet(readings)
        known = np.isfinite(inlet)
        fresh = known & ~np.isfinite(self.inlet_c)
        self.inlet_c[fresh] = inlet[fresh]
        self.inlet_c = np.where(known, inlet + (self.inlet_c - inlet) * left, self.inlet_c)
        self.inlet_doubt_k = filled(np.abs(inlet - self.inlet_c) * (LATE_S / self.tau_s))
        self.inlet_s = np.where(known, 0.0, self.inlet_s + dt_s)
        inlet_c = np.where(self.inlet_s <= HOLD_S, self.inlet_c, np.nan)
        expected = np.empty(self.n)
        kernels.follow_heat(
            self.heated,
            self.twice,
            self.power_w,
            of_node,
            left,
            inlet_c,
            self.trays.of,
            self.set.in_use[OFFSET],
            self.set.in_use[RESISTANCE],
            self.set.in_use[LAG],
            self.settled_s,
            SETTLING * self._longest_s,
            expected,
        )
        if len(gaps.gpus) and not away:
            self._bridge(gaps, dt_s, expected)
        return expected

    def _bridge(self, gaps: Gaps, dt_s: float, expected: F64) -> None:
        """Correct lags and `expected` of GPUs whose power was read long after the reading before."""
        gpus = gaps.gpus
        nodes = self.trays.of[gpus]
        factor = self.node_factor[nodes]
        heat = self.seldom.heat(gaps, self.tau_s[nodes] * factor, dt_s)
        once, twice = factor * heat.once_w, factor * heat.twice_w
        self.heated[gpus] += once
        self.twice[gpus] += twice
        _, resistance, lag = self.set.in_use[:, gpus]
        expected[gpus] += resistance * once - lag * (once - twice)
        self.unseen_k[gpus] = filled(self.resistance[gpus] * factor * heat.sigma_w)

    def _hold_power(self, power_w: F64, dt_s: float) -> None:
        """Take the power of this tick, hold missing values for a while, and start again after longer gaps."""
        held = self.power_w, self.silent_s, self.settled_s
        if anew := kernels.hold_power(power_w, *held, HOLD_S, dt_s, self._scratch):
            self._begin(self._scratch[:anew].copy())

    def _begin(self, gpus: I64) -> None:
        """Assume that these GPUs have drawn their present power for a long time."""
        start = self.power_w[gpus] * self.trays.spread(self.node_factor)[gpus]
        self.heated[gpus], self.twice[gpus] = start, start

    def _away(self, now_ns: int) -> bool:
        """Return True after a time without ticks in which no power is held, as between an end and a restart:
        nobody knows what was drawn meanwhile. Ticks that are usually so long are none."""
        step_s = (now_ns - self.driven_ns) / NS if self.driven_ns else 0.0
        usual_s, self.step_s = self.step_s, max(step_s, 0.5 * self.step_s)
        self.driven_ns = now_ns
        return step_s > max(HOLD_S, 2.0 * usual_s)

    def doubt(self, rows: slice = slice(None)) -> F64:
        """Return 1 sigma [m], K, for a moving model, a moving inlet, or a flow other than the learned one."""
        heated = self.heated[rows]
        out = heated - self.twice[rows]
        np.abs(out, out=out)
        out *= self._move_k_per_w[rows]
        out += self.unseen_k[rows]
        if self.away_pu.max(initial=0.0) > LEAST_AWAY_PU:
            away_pu = (FLOW_DOUBT_PU * self.away_pu)[self.trays.of[rows]]
            out += away_pu * np.abs(heated) * self.resistance[rows]
        if self.inlet_doubt_k.max(initial=0.0) > LEAST_INLET_K:
            out += self.inlet_doubt_k[self.trays.of[rows]]
        return out

    def share_air(self, at: I64, measured: F64) -> None:
        """Find by how much all GPUs of a node in air are off together, for the nodes of the GPUs `at`.

        Their inlet and their fans are known to whole and half degrees, so it is their air that is expected
        wrongly; a heat sink of its own stands out against its neighbours.
        """
        nodes = np.zeros(len(self.liquid), np.bool_)
        nodes[self.trays.of[at]] = True
        gpus, common_k = self.trays.others(measured - self.expected, np.flatnonzero(nodes & ~self.liquid))
        self.common_k[:] = 0.0
        self.common_k[gpus] = filled(common_k)

    def common_doubt(self, rows: slice = slice(None)) -> F64:
        """Return 1 sigma [m], K, for the unequal parts of a common deviation of a node's GPUs."""
        return np.asarray(COMMON_DOUBT_PU * np.abs(self.common_k[rows]), np.float64)

    def air_drift(self) -> F64:
        """Share by which the resistances of a node's other GPUs have drifted in air [n], NaN where that is
        not known yet; 0 for those that share no air."""
        out = np.zeros(self.n)
        if not self.all_liquid:
            drift = self.set.in_use[RESISTANCE] / self.reference.value[0] - 1.0
            gpus, common = self.trays.others(drift, np.flatnonzero(~self.lonely))
            out[gpus] = common
        return out

    def _taught_s(self, rows: slice) -> F64:
        """Weighted readings of each GPU [m], or of its neighbours in air: these have a reference at once."""
        own = self.fit.taught_s
        if not self.lonely.all():
            gpus, others = self.trays.others(own, np.flatnonzero(~self.lonely))
            own = own.copy()
            own[gpus] = others
        return own[rows]

    def parameter_sigma(self, at: I64) -> F64:
        """1 sigma, K, of the expectation of GPUs `at` for that their parameters are not known; kept in
        `unknown_k`, which is 0 elsewhere."""
        self.unknown_k[:] = 0.0
        heated = self.heated[at]
        features = [np.ones(len(at)), heated, self.twice[at] - heated]
        self.unknown_k[at] = filled(self.covariance.sigma(at, features))
        return self.unknown_k[at]

    def learn(self, rows: slice, measured: F64, received_ns: I64, taught: Bool, dt_s: float) -> None:
        """Take in the readings of a part of the GPUs; `taught` [m]: new ones, outside maintenance."""
        temp, read_ns, expected = measured[rows], received_ns[rows], self.expected[rows]
        usable = np.isfinite(temp - expected) & taught & ~self.noise.lasting(read_ns, rows)
        heated = self.heated[rows]
        share = np.clip(heated / self.full_w[rows], 0.0, 1.0)
        weight = np.where(usable, np.maximum(share, LEAST_WEIGHT), 0.0)
        sigma = self.sigma[rows]
        moving_k = np.abs(heated - self.twice[rows]) * self._move_k_per_w[rows] + self.unseen_k[rows]
        bound = np.where(np.isfinite(sigma), 4.0 * (sigma + self.unknown_k[rows]), np.inf) + moving_k
        around = expected if self.all_liquid else expected + self.common_k[rows]
        y = np.minimum(np.maximum(temp, around - bound), around + bound)
        # The part that its own parameters account for: all but the inlet
        offset, resistance, lag = self.set.in_use[:, rows]
        moving = self.twice[rows] - heated
        y = y - (expected - offset - resistance * heated - lag * moving)
        features = [np.ones(len(y)), heated, moving]
        error_k = np.hypot(MODEL_ERROR_K, self.unseen_k[rows])
        self.fit.learn(rows, features, y, error_k, weight, dt_s)

    def refresh_pool(self, group: I32, n_group: int) -> None:
        """Update the mean deviation of a profile's resistances from its design; idle GPUs are taken to
        follow."""
        ratio = self.set.learning[RESISTANCE] / self.resistance
        taught = np.flatnonzero((self.fit.taught_s > POOLED_AFTER_S) & np.isfinite(ratio))[
            :: self.n // POOLED + 1
        ]
        for k in range(n_group):
            mine = ratio[taught[group[taught] == k]]
            if len(mine) >= LEAST_POOL:
                self.typical[group == k] = np.median(mine)

    def move(self, rows: slice, taught_ns: I64) -> None:
        """Move the learned parameters one step towards use; `taught_ns` [m]: newest reading used."""
        nominal = self.resistance[rows] * self.typical[rows]
        zero = np.zeros(len(nominal))
        prior = np.stack([zero, nominal, zero])
        theta, variance, factor = self.fit.solve(rows, prior, _spread(nominal))
        theta[LAG] = np.clip(theta[LAG], -0.6 * nominal, 1.5 * nominal)
        self.set.learning[:, rows] = theta
        self.set.move(rows)
        self.covariance.move(rows, factor)
        # A drift compares parameters in use now and earlier: those still being learned are neither
        in_use = self.set.in_use[RESISTANCE : RESISTANCE + 1, rows]
        least = KNOWN_PU * in_use[0]
        known = self.covariance.variance(RESISTANCE, rows) <= least**2
        known &= np.abs(theta[RESISTANCE] - in_use[0]) <= least
        self.reference.settle(rows, in_use, np.where(known, self._taught_s(rows), 0.0), taught_ns)
        self.reference.sigma[0, rows] = np.sqrt(variance[RESISTANCE])

    def forget(self, table: str, entity: int) -> None:
        """Clear the slot of a new GPU; the values of its profile stay."""
        typical = self.typical.copy()
        super().forget(table, entity)
        self.typical = typical


def _spread(nominal: F64) -> F64:
    """Return 1 sigma of the prior of offset, resistance and lag [3, n] around a resistance [n]."""
    return np.stack([np.full(len(nominal), OFFSET_K), SPREAD_PU * nominal, LAG_SPREAD_PU * nominal])
