"""Hydraulics of a plant: coolant flows of its CDUs, their pressure control, pumps that trip, and leaks.

All resistances are quadratic and the running pumps of a CDU share one speed, so a solution at full speed
scales with the speed: the network is solved again only when a resistance or the set of pumps has changed. A
CDU whose solution fails keeps its last one and is flagged in `failed`.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool
from twin.physics import AIR_PA, Flow, Network, Pumps
from twin.plant.disturbance import Disturbance
from twin.plant.layout import Groups
from twin.plant.parameters import MOTOR_EFFICIENCY_PU, Parameters
from twin.plant.truth import Truth
from twin.site import RISE_NOMINAL_K, Site

SPEED_MIN_PU = 0.25  # source: estimate
SPEED_SLEW_PER_S = 0.03  # of a drive; source: estimate
GAIN, INTEGRAL_PER_S = 0.15, 0.08  # of the pressure control, per unit of relative error; source: estimate
EASED_PU = 0.7  # speed below which a drive eases its gains; source: estimate
STILL_PU = 2e-5  # relative error of pressure below which the speed is left alone
TAKE_OVER_S = 5.0  # from a pump's trip to full speed of the other
# A pump without power runs down against the square of its speed and the friction of its seals, until it
# stands: dn/dt = -(n^2 + friction)/coast. 2 * kinetic energy over shaft power of 7.5 kW at 2,900 1/min with
# 0.03 kg m2 is 0.4 s; source: estimate
COAST_S, FRICTION_PU = 0.4, 0.02
START_PER_S = 0.1  # ramp of a drive whose power is back, on a pump that may still turn; source: estimate
STATIC_PA = 150_000.0  # of a full circuit at rest, gauge; source: estimate
# Of water at 40 degC, IAPWS-IF97: 3.9e-4; glycol adds to it
EXPANSION_PER_K = 4e-4
GAS_PU = 1.0  # of an expansion vessel, over the reserve of its circuit, when that is full; source: estimate
SWOLLEN_MAX_PU = 0.5  # of the gas: then a relief valve opens; source: estimate
LEAST_W_PER_K = 1e-3  # of a stream that stands: keeps quotients finite
BLOCKED = 1e12  # on the resistance of a closed valve


class Hydraulics:
    """Flows of racks and CDUs. `changed` is True if the last step changed any."""

    def __init__(self, site: Site, p: Parameters) -> None:
        n_cdu, n_rack = site.sizes["cdu"], site.sizes["rack"]
        served = np.flatnonzero(p.rack_liquid)
        order = served[np.argsort(site.cdu_of_rack[served], kind="stable")]
        count = np.bincount(site.cdu_of_rack[served], minlength=n_cdu)
        start = np.zeros(n_cdu + 1, np.int64)
        start[1:] = np.cumsum(count)
        self.network = Network(start, order.astype(np.int64), n_rack)
        self.racks = Groups(np.where(p.rack_liquid, site.cdu_of_rack, -1).astype(np.intp), n_cdu)
        self.serves = count > 0
        self.speed = np.full(n_cdu, 0.75)
        self.error_before = np.zeros(n_cdu)
        self.asked_pa = np.full(n_cdu, np.nan)  # set point of the pressure control; NaN: the BMS's own
        self.trip_s = np.full(n_cdu, np.inf)  # since a pump was lost; inf = none
        self.ok = np.ones((n_cdu, 2), np.bool_)
        self.running = np.ones(n_cdu, np.bool_)
        # Pumps that turn: those with power, or the last ones that had it; CDUs whose drives ramp up
        self.turning, self.starting = np.ones((n_cdu, 2), np.bool_), np.zeros(n_cdu, np.bool_)
        self.branch, self.filter = p.rack_branch.copy(), p.cdu_filter.copy()
        self.head0 = p.cdu_head0_pa.copy()
        self.expanded = np.ones(
            n_cdu
        )  # volume of the gas in the expansion vessel, over that of a full circuit
        self.swollen = np.zeros(n_cdu)  # what warm coolant takes of it, likewise
        self.prime = np.ones(n_cdu)  # of the pumps' head, as the static pressure allows
        self.failures = 0  # solutions that did not converge
        self.failed = np.zeros(n_cdu, np.bool_)  # flows are those of an earlier solution
        self.unit_rack, self.unit_cdu = np.zeros(n_rack), np.zeros(n_cdu)
        self.unit_drop, self.unit_head, self.unit_rack_drop = (
            np.zeros(n_cdu),
            np.zeros(n_cdu),
            np.zeros(n_rack),
        )
        self.rack_w_per_k, self.cdu_w_per_k = np.zeros(n_rack), np.zeros(n_cdu)
        self.ratio = np.ones(n_rack)  # flow over nominal; of air-cooled racks, that of their fans
        self.pump_heat_w, self.motor_heat_w = np.zeros(n_cdu), np.zeros(n_cdu)  # into coolant, into the hall
        self._unit: Flow | None = None
        self.stale, self.changed, self.steady = True, True, False
        self._spread = np.ones(n_rack)

    def read_disturbance(self, p: Parameters, d: Disturbance, isolated: Bool) -> None:
        """Read the present resistances, pumps and heads; solves again after a change."""
        branch = p.rack_branch * np.where(isolated, BLOCKED, d.rack_branch_factor)
        clogged = p.cdu_filter * d.cdu_filter_factor
        head0 = p.cdu_head0_pa * d.cdu_pump_head_factor * self.prime[:, None]
        ok = d.cdu_pump_ok & d.pumps_ok
        same = (
            np.array_equal(branch, self.branch)
            and np.array_equal(clogged, self.filter)
            and np.array_equal(head0, self.head0)
            and np.array_equal(ok, self.ok)
        )
        if same:
            return
        lost = self.ok.all(axis=1) & ~ok.all(axis=1)
        self.trip_s[lost] = 0.0
        self.trip_s[ok.all(axis=1)] = np.inf
        self.branch, self.filter, self.head0 = branch, clogged, head0
        running: Bool = ok[:, 0] | ok[:, 1]
        self.ok = ok
        self.starting = (self.starting | ~self.running) & running
        self.running[:] = running
        self.turning = np.where(running[:, None], ok, self.turning)
        self.stale = True

    def ask(self, t: Truth, p: Parameters, asked_pa: F64) -> None:
        """Take set points of the pressure control [n_cdu], NaN = the BMS's own."""
        self.asked_pa, self.steady = asked_pa.copy(), False
        t.cdu_drop_set_pa[:] = self.set_pa(p)

    def set_pa(self, p: Parameters) -> F64:
        """Return the set points in force [n_cdu]."""
        return np.where(np.isnan(self.asked_pa), p.cdu_drop_set_pa, self.asked_pa)

    def step(self, t: Truth, p: Parameters, dt_s: float) -> None:
        """Update speeds by the pressure control, then flows at these speeds."""
        solved = self.stale
        if self.stale:
            self._solve(p)
        moved = self._control(p, dt_s)
        self.changed = moved or solved
        if self.changed:
            self._flows(t, p)

    def _solve(self, p: Parameters) -> None:
        self.stale = False
        pumps = Pumps(self.turning.astype(np.float64), self.head0, p.cdu_curve)
        inner = p.cdu_inner + self.filter
        flow = self.network.solve(pumps, inner, self.branch, p.rack_segment, self._unit)
        self.failed = ~flow.converged & self.serves
        self.failures += int(np.count_nonzero(self.failed))
        self._unit = flow
        known = ~self.failed
        for kept, found in (
            (self.unit_cdu, flow.cdu_lpm), (self.unit_drop, flow.drop_pa),
            (self.unit_head, flow.pump_head_pa),
        ):  # fmt: skip
            np.copyto(kept, np.nan_to_num(found), where=known)
        at_rack = self.racks.spread(known.astype(np.float64), self._spread) > 0.0
        np.copyto(self.unit_rack, np.nan_to_num(flow.rack_lpm), where=at_rack)
        np.copyto(self.unit_rack_drop, np.nan_to_num(flow.rack_drop_pa), where=at_rack)
        self.steady = False

    def _control(self, p: Parameters, dt_s: float) -> bool:
        """Step the pressure control, one integrator per CDU. After a trip the other pump goes to full speed;
        without any pump the last ones run down. True if a speed changed.
        """
        if self.steady:
            return False
        speed = self.speed
        drop = self.unit_drop * speed * speed
        error = 1.0 - drop / self.set_pa(p)
        tripped = np.isfinite(self.trip_s) & self.running
        self.trip_s += dt_s
        coasting = ~self.running
        moves = coasting & (speed > 0.0)
        controlled = self.serves & self.running
        if not tripped.any() and not moves.any() and np.abs(error * controlled).max(initial=0.0) < STILL_PU:
            self.error_before[:] = error
            self.steady = True
            return False
        move = GAIN * (error - self.error_before) + INTEGRAL_PER_S * dt_s * error
        move *= np.minimum(speed / EASED_PU, 1.0)  # pressure answers a slow pump more
        limit = SPEED_SLEW_PER_S * dt_s
        np.clip(move, -limit, limit, out=move)
        move[tripped & (self.trip_s >= TAKE_OVER_S)] = np.inf  # the drive's own emergency ramp is a jump
        self.error_before[:] = error
        least = np.full(len(speed), SPEED_MIN_PU)
        if self.starting.any() or coasting.any():
            self.starting &= (error > 0.0) & (speed < 1.0)
            move[self.starting] = START_PER_S * dt_s
            least[self.starting | coasting] = 0.0
            move[coasting] = _coasted(speed[coasting], dt_s) - speed[coasting]
        np.clip(speed + move, least, 1.0, out=speed)
        return True

    def _flows(self, t: Truth, p: Parameters) -> None:
        speed = self.speed
        at_rack = self.racks.spread(speed, self._spread)
        np.multiply(self.unit_rack, at_rack, out=t.rack_flow_lpm)
        np.multiply(self.unit_rack_drop, at_rack * at_rack, out=t.rack_drop_pa)
        np.multiply(self.unit_cdu, speed, out=t.cdu_flow_lpm)
        squared = speed * speed
        np.multiply(self.unit_drop, squared, out=t.cdu_drop_pa)
        head = self.unit_head * squared
        np.multiply(self.filter, t.cdu_flow_lpm * t.cdu_flow_lpm, out=t.cdu_filter_drop_pa)
        np.multiply(self.ok, speed[:, None], out=t.cdu_pump_speed_pu)
        hydraulic = head * t.cdu_flow_lpm / 60_000.0 * self.running  # a pump that runs down draws nothing
        # A pump that turns against no flow still churns: a tenth of its nominal power; source: estimate
        churn = 0.1 * p.cdu_head0_pa.mean(axis=1) * p.cdu_flow_lpm / 60_000.0 * speed**3 * self.running
        np.divide(hydraulic + churn, p.cdu_efficiency_pu, out=t.cdu_pump_power_w)
        np.multiply(t.cdu_pump_power_w, MOTOR_EFFICIENCY_PU, out=self.pump_heat_w)
        np.subtract(t.cdu_pump_power_w, self.pump_heat_w, out=self.motor_heat_w)
        w = p.watt_per_k_per_lpm
        np.maximum(t.rack_flow_lpm * w, LEAST_W_PER_K, out=self.rack_w_per_k)
        self.racks.sums(self.rack_w_per_k, self.cdu_w_per_k)
        np.maximum(self.cdu_w_per_k, LEAST_W_PER_K, out=self.cdu_w_per_k)
        np.divide(t.rack_flow_lpm, p.rack_flow_lpm, out=self.ratio, where=p.rack_liquid)
        self.pressures(t)

    def warm(self, t: Truth, p: Parameters, coolant_c: F64) -> None:
        """Expand the coolant to its mean temperature [n_cdu]; at the design's temperature it fills the
        circuit."""
        swollen_l = EXPANSION_PER_K * p.cdu_volume_l * (coolant_c - p.cdu_supply_c - 0.5 * RISE_NOMINAL_K)
        np.minimum(swollen_l / (GAS_PU * p.cdu_reserve_l), SWOLLEN_MAX_PU, out=self.swollen)
        self.pressures(t)

    def pressures(self, t: Truth) -> None:
        """Gauge pressures of supply and return: the static one is of a gas that expands as coolant leaves, or
        as it cools and shrinks."""
        gas = self.expanded - self.swollen
        static = np.maximum((STATIC_PA + AIR_PA) / gas - AIR_PA, 0.0) * self.prime
        np.add(static, 0.0, out=t.cdu_return_pa)
        np.add(static, t.cdu_drop_pa, out=t.cdu_supply_pa)


def _coasted(speed: F64, dt_s: float) -> F64:
    """Return the speed of unpowered pumps after a step, exactly."""
    root = np.sqrt(FRICTION_PU)
    left = np.arctan(speed / root) - root * dt_s / COAST_S
    out: F64 = np.where(left > 0.0, root * np.tan(np.maximum(left, 0.0)), 0.0)
    return out


TRAY_WET_L, RACK_WET_L, CDU_WET_L = 0.02, 0.10, 0.15  # puddle that a detector feels; source: estimate
DRIED_LPM = 0.002  # of a puddle once nothing leaks; source: estimate
# Of what runs over the rim of a tray, as much gets into the next one below; the rest runs down outside, into
# the pan of the rack; source: estimate
BELOW_PU = 0.3
# Condensation on manifolds and hoses of a rack, and on the pipes of a CDU, per kelvin below the dew point:
# 2 m2 with 5 W/m2 K over the heat capacity of air (Lewis), and 6.0e-4 kg/kg K of humidity near 13 degC
# (Magnus); area and film are estimates
SWEAT_LPM_PER_K = 60.0 * 2.0 * 5.0 / 1006.0 * 6.0e-4
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
        # The tray below each; itself if there is none. Trays are counted from the bottom by default
        at = np.arange(n["node"])
        step = np.where(site.upward_of_rack[self.rack_of_node] < 0, 1, -1)
        next_of = np.clip(at + step, 0, max(n["node"] - 1, 0))
        self.below = np.where(self.rack_of_node[next_of] == self.rack_of_node, next_of, at)
        self.lowest = self.below == at
        self.hall_of_rack, self.hall_of_cdu = (
            np.maximum(x, 0) for x in (site.hall_of_rack, site.hall_of_cdu)
        )
        self.rack_sweat_lpm, self.cdu_sweat_lpm = np.zeros(n["rack"]), np.zeros(n["cdu"])
        self.sweating = False
        self.stock_l = np.full(n["cdu"], FILL_STOCK_L)
        self.lost_w_per_k = np.zeros(n["cdu"])  # heat that leaves with the coolant, per K over the reserve
        self.active = False

    def sweats(self, t: Truth, p: Parameters) -> bool:
        """Condense water from the halls' air on surfaces colder than its dew point; returns True if any
        does."""
        if len(p.hall_moisture_c):
            below_k = p.hall_moisture_c[self.hall_of_rack] - t.rack_supply_c
            self.rack_sweat_lpm = SWEAT_LPM_PER_K * np.maximum(below_k, 0.0) * p.rack_liquid
            below_k = p.hall_moisture_c[self.hall_of_cdu] - t.cdu_supply_c
            self.cdu_sweat_lpm = SWEAT_LPM_PER_K * np.maximum(below_k, 0.0)
            self.sweating = bool(self.rack_sweat_lpm.any() or self.cdu_sweat_lpm.any())
        return self.sweating

    def step(self, t: Truth, p: Parameters, d: Disturbance, h: Hydraulics, dt_s: float) -> None:
        """Move leaking coolant for one step."""
        from_cdu = d.cdu_leak_lpm + d.cdu_unseen_lpm
        leaking = bool((d.node_leak_lpm > 0).any() or (d.rack_leak_lpm > 0).any() or (from_cdu > 0).any())
        leaking |= self.sweating
        if not leaking and not self.active:
            self.lost_w_per_k[:] = 0.0
            return
        push = np.sqrt(np.maximum(h.prime, 0.0))  # a leak is driven by the pressure that is left
        at_rack = np.append(push, 0.0)[self.cdu_of_rack]
        # An isolated rack empties no further than itself: its leak stops
        open_rack = np.where(t.rack_isolated, 0.0, 1.0) * p.rack_liquid
        tray = d.node_leak_lpm * (at_rack * open_rack)[self.rack_of_node]
        rack = d.rack_leak_lpm * at_rack * open_rack
        whole = rack + np.bincount(self.rack_of_node, weights=tray, minlength=len(rack))
        inside = self.cdu_of_rack >= 0
        lpm = from_cdu * push
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
        h.expanded[:] = 1.0 + np.maximum(1.0 - reserve, 0.0) / GAS_PU
        h.pressures(t)
        self._puddles(t, d, tray, rack, minutes)
        self.active = leaking or bool(t.cdu_filling.any() or self.tray_l.any() or self.rack_l.any()
                                      or self.cdu_l.any())  # fmt: skip

    def _puddles(self, t: Truth, d: Disturbance, tray: F64, rack: F64, minutes: float) -> None:
        """Update the puddles: a rope in each tray, which overflows into the one below; a pan under rack
        and CDU."""
        over = np.maximum(self.tray_l - 2.0 * TRAY_WET_L, 0.0)
        caught = np.where(self.lowest, 0.0, BELOW_PU * over)
        self.tray_l += (tray - DRIED_LPM) * minutes - over
        self.tray_l += np.bincount(self.below, weights=caught, minlength=len(over))
        self.rack_l += (rack + self.rack_sweat_lpm - DRIED_LPM) * minutes
        self.rack_l += np.bincount(self.rack_of_node, weights=over - caught, minlength=len(rack))
        self.cdu_l += (d.cdu_leak_lpm + self.cdu_sweat_lpm - DRIED_LPM) * minutes
        for puddle, full in ((self.tray_l, np.inf), (self.rack_l, 1.0), (self.cdu_l, 1.0)):
            np.clip(puddle, 0.0, full, out=puddle)
        np.greater(self.tray_l, TRAY_WET_L, out=t.node_leak)
        np.greater(self.rack_l, RACK_WET_L, out=t.rack_leak)
        np.greater(self.cdu_l, CDU_WET_L, out=t.cdu_leak)
