"""Cooling of a plant: the heat path through rack coolant, CDU, exchanger to the facility water, and hall air.

Every volume is a mixed tank. The outflow of a tank in a step is its mean over the step, by the exact
exponential; only the pipe that closes the circuit gives what it held when the step began. Each exchange is
one number that leaves one tank and enters another, so energy is kept to rounding.
"""

from __future__ import annotations

import math

import numpy as np

from twin.catalogue import F64
from twin.physics import effectiveness, film_factor
from twin.plant.disturbance import Disturbance
from twin.plant.hydraulics import LEAST_W_PER_K, ROOM_C, Hydraulics
from twin.plant.layout import Groups
from twin.plant.parameters import AIR_RISE_K, FACILITY_MARGIN_K, STAGNANT_SHARE, Parameters
from twin.plant.truth import Truth
from twin.site import PRIMARY_FLOW_RATIO, Site

VALVE_GAIN_PER_K, VALVE_INTEGRAL_PER_K_S = 0.04, 0.004  # source: estimate
VALVE_SLEW_PER_S = 0.03  # of its actuator: half a minute for the whole way; source: estimate
VALVE_MIN_PU = 0.02  # leaks by that much
FILM_PU = 0.05  # a facility flow that changed by a smaller share changes the exchanger in a straight line
FILM_PROBE_PU = 0.01  # how far away its slope is taken
DEW_MARGIN_K = 2.5  # supply above the dew point of the hall, domain.md B
FAN_MIN_PU = 0.35  # source: estimate
FAN_TAU_S = 15.0  # of a fan's control; source: estimate
FAN_PER_K = 0.025  # more fan per kelvin of inlet above 24 degC; source: estimate
AIR_BAND_K = 2.0  # of the air handlers' control from nothing to full capacity; source: estimate
AIR_HANDLER_W_PER_W, AIR_HANDLER_COP = 0.05, 4.5  # fans, and the chillers behind them; source: estimate


def phi(x: F64) -> F64:
    """Return (1 - e^-x)/x, 1 at 0: the mean of a decay over its step."""
    small = np.maximum(x, 1e-12)
    return -np.expm1(-small) / small


class Cooling:
    """Tanks of racks, CDUs and halls. Temperatures that no table has stand here."""

    def __init__(self, site: Site, p: Parameters, h: Hydraulics) -> None:
        n = site.sizes
        self.racks, self.h = h.racks, h
        self.halls = Groups(site.hall_of_rack.astype(np.intp), n["hall"])
        self.hot_c = p.cdu_supply_c + 10.0  # hot leg [n_cdu]
        self.cold_c = p.cdu_supply_c.copy()  # behind the exchanger
        self.pipe_c = p.cdu_supply_c.copy()  # on the way to the racks
        self.primary_supply_c = p.cdu_supply_c - 6.0
        self.target_c = p.cdu_supply_c.copy()  # as requested
        self.error_before_k = np.zeros(n["cdu"])
        self.gain_rack, self.gain_hot, self.gain_cold = (
            np.zeros(n["rack"]),
            np.zeros(n["cdu"]),
            np.zeros(n["cdu"]),
        )
        self.gain_pipe, self.tank_w_per_k = np.zeros(n["cdu"]), np.zeros(n["rack"])
        self.stagnant = np.zeros(n["rack"])
        # Primary ratio for which the exchanger was worked out, and how far the straight line from there holds
        self.film_at, self.film_reach = np.full(n["cdu"], np.nan), np.zeros(n["cdu"])
        self.ratio_per_lpm = 1.0 / (PRIMARY_FLOW_RATIO * p.cdu_flow_lpm)
        self.ua_factor = np.ones(n["cdu"])
        self.grid_ok = True  # facility pumps and air handlers run
        self.stuck: F64 | None = None  # valve positions that do not move; NaN = free
        self.fan = np.full(n["rack"], 0.6)
        self.fan_factor = np.ones(n["rack"])
        self.hall_air_w = np.zeros(n["hall"])  # carried away by the air handlers
        self.hall_heat_w = np.zeros(n["hall"])
        self.before_hall_c = p.hall_set_c.copy()
        self.reference_c = np.zeros(n["rack"])
        self.primary_w_per_k = np.zeros(n["cdu"])
        self.leak_w, self.leaking = np.zeros(n["cdu"]), False
        self.a, self.b, self.out_w = np.zeros(n["rack"]), np.zeros(n["rack"]), np.zeros(n["rack"])
        self.c, self.e, self.mixed = np.zeros(n["cdu"]), np.zeros(n["cdu"]), np.zeros(n["cdu"])
        # Temperatures of the legs when the step began
        self.before_hot_c, self.before_cold_c, self.before_pipe_c = (x.copy() for x in (
            self.hot_c, self.cold_c, self.pipe_c))  # fmt: skip
        self.into_w, self.across_w_per_k, self.moved, self.far = (np.zeros(n["cdu"]) for _ in range(4))
        self.film_w_per_k, self.film_slope = np.zeros(n["cdu"]), np.zeros(n["cdu"])
        self.hall_of_cdu = np.where(site.hall_of_cdu >= 0, site.hall_of_cdu, 0)
        self.motors, self.motor_w = Groups(self.hall_of_cdu.astype(np.intp), n["hall"]), np.zeros(n["hall"])

    def read_disturbance(self, d: Disturbance) -> None:
        """Read fouling, stuck valves, blocked fans, and the grid of facility pumps and air handlers."""
        if d.cooling_ok != self.grid_ok or not np.array_equal(d.cdu_ua_factor, self.ua_factor):
            self.ua_factor[:], self.grid_ok = d.cdu_ua_factor, d.cooling_ok
            self.film_at[:] = np.nan
        self.stuck = d.cdu_valve_stuck_pu.copy() if np.isfinite(d.cdu_valve_stuck_pu).any() else None
        self.fan_factor[:] = d.rack_fan_factor

    def tune(self, p: Parameters, dt_s: float) -> None:
        """Update the gains of the tanks at the present flows."""
        h = self.h
        np.multiply(phi(h.rack_w_per_k * (dt_s / p.rack_tank_j_per_k)), dt_s / p.rack_tank_j_per_k,
                    out=self.gain_rack)  # fmt: skip
        self.gain_rack *= p.rack_liquid
        np.divide(p.rack_tank_j_per_k, dt_s, out=self.tank_w_per_k)
        self.hot_w_per_k, self.cold_w_per_k = p.cdu_hot_j_per_k / dt_s, p.cdu_cold_j_per_k / dt_s
        w = h.cdu_w_per_k
        np.multiply(phi(w * (dt_s / p.cdu_hot_j_per_k)), dt_s / p.cdu_hot_j_per_k, out=self.gain_hot)
        np.multiply(phi(w * (dt_s / p.cdu_cold_j_per_k)), dt_s / p.cdu_cold_j_per_k, out=self.gain_cold)
        np.divide(dt_s, p.cdu_pipe_j_per_k, out=self.gain_pipe)
        np.divide(STAGNANT_SHARE, STAGNANT_SHARE + np.maximum(h.ratio, 0.0), out=self.stagnant)
        self.stagnant *= p.rack_liquid
        self.film_at[:] = np.nan

    def plates(self, t: Truth, p: Parameters) -> F64:
        """Return the reference temperature of each rack's plates, or heat sinks in air, degC [n_rack]."""
        ref = self.reference_c
        self.racks.spread(self.pipe_c, t.rack_supply_c)
        np.subtract(t.rack_return_c, t.rack_supply_c, out=ref)
        ref *= self.stagnant
        ref += t.rack_supply_c
        np.copyto(ref, t.rack_inlet_c, where=~p.rack_liquid)
        return ref

    def air_side(self, t: Truth, p: Parameters, dt_s: float) -> F64:
        """Update the fans of racks and their power [n_rack], W: they follow load and inlet with a lag."""
        a, b = self.a, self.b
        np.divide(t.rack_air_heat_w, p.rack_air_max_w, out=a)
        np.subtract(t.rack_inlet_c, 24.0, out=b)
        b *= FAN_PER_K
        a += b
        np.maximum(a, FAN_MIN_PU, out=a)
        np.minimum(a, 1.0, out=a)
        a -= self.fan
        a *= -np.expm1(-dt_s / FAN_TAU_S)
        self.fan += a
        np.multiply(self.fan, self.fan, out=b)
        b *= self.fan
        b *= p.rack_fan_w
        return b

    def rack_step(self, t: Truth, p: Parameters, plates_w: F64, gpu_w: F64, dt_s: float) -> None:
        """Move the heat of the racks into coolant and air; updates their coolant's temperature."""
        h, a, q, air = self.h, self.a, t.rack_liquid_heat_w, t.rack_air_heat_w
        np.subtract(t.rack_return_c, t.rack_inlet_c, out=a)
        a *= p.rack_to_air_w_per_k
        np.subtract(t.rack_power_w, gpu_w, out=q)
        np.add(q, plates_w, out=air)
        q *= p.rack_rest_capture_pu
        np.multiply(plates_w, p.rack_plate_capture_pu, out=self.b)
        q += self.b
        q -= a
        air -= q
        # The tank: dT = (q - W (T - Ts)) g, with what flows out by difference
        np.subtract(t.rack_return_c, t.rack_supply_c, out=a)
        a *= h.rack_w_per_k
        np.subtract(q, a, out=a)
        a *= self.gain_rack
        t.rack_return_c += a
        a *= self.tank_w_per_k
        np.subtract(q, a, out=self.out_w)

    def cdu_step(self, t: Truth, p: Parameters, dt_s: float) -> None:
        """Advance hot leg, exchanger, cold leg and pipe of every CDU, then its valve."""
        h, c, e = self.h, self.c, self.e
        w = h.cdu_w_per_k
        np.copyto(self.before_hot_c, self.hot_c)
        np.copyto(self.before_cold_c, self.cold_c)
        np.copyto(self.before_pipe_c, self.pipe_c)
        self.racks.sums(self.out_w, self.mixed)
        into = self.into_w
        np.add(self.mixed, h.pump_heat_w, out=into)
        if self.leaking:
            into -= self.leak_w
        np.subtract(self.hot_c, self.pipe_c, out=c)
        c *= w
        np.subtract(into, c, out=c)
        c *= self.gain_hot
        self.hot_c += c
        c *= self.hot_w_per_k
        np.subtract(into, c, out=c)  # W (mean of the hot leg - pipe)
        np.divide(c, w, out=e)
        e += self.pipe_c
        self._exchange(t, p, e)
        np.subtract(e, self.cold_c, out=e)
        e *= w
        e -= t.cdu_heat_w
        np.multiply(e, self.gain_cold, out=c)
        np.subtract(self.cold_c, self.pipe_c, out=into)
        into *= w
        self.cold_c += c
        c *= self.cold_w_per_k
        np.subtract(e, c, out=c)
        c += into  # W (mean of the cold leg - pipe)
        c *= self.gain_pipe
        self.pipe_c += c
        np.copyto(t.cdu_supply_c, self.cold_c)
        np.copyto(t.cdu_return_c, self.hot_c)
        self._valve(t, p, dt_s)

    def _exchange(self, t: Truth, p: Parameters, warm_c: F64) -> None:
        """Return the heat to the facility water, from the mean of the hot leg and the incoming water."""
        np.multiply(t.cdu_valve_pu, p.cdu_primary_lpm, out=t.cdu_primary_flow_lpm)
        if not self.grid_ok:
            t.cdu_primary_flow_lpm[:] = 0.0
        cold = self.primary_w_per_k
        np.multiply(t.cdu_primary_flow_lpm, p.water_w_per_k_per_lpm, out=cold)
        np.maximum(cold, LEAST_W_PER_K, out=cold)
        self._films(t, p)
        heat = t.cdu_heat_w
        np.subtract(warm_c, self.primary_supply_c, out=heat)
        heat *= self.across_w_per_k
        np.divide(heat, cold, out=t.cdu_primary_return_c)
        t.cdu_primary_return_c += self.primary_supply_c
        np.copyto(t.cdu_primary_supply_c, self.primary_supply_c)

    def _films(self, t: Truth, p: Parameters) -> None:
        """Return the conductance of the exchangers between both inlets; recomputed where flows have moved."""
        moved, far = self.moved, self.far
        np.multiply(t.cdu_primary_flow_lpm, self.ratio_per_lpm, out=moved)
        moved -= self.film_at
        np.abs(moved, out=far)
        far -= self.film_reach
        if not (len(far) and np.maximum.reduce(far) <= 0.0):  # NaN: flows have changed altogether
            ratio = t.cdu_primary_flow_lpm * self.ratio_per_lpm
            self.film_at[:] = ratio
            np.multiply(ratio, FILM_PU, out=self.film_reach)
            step = np.maximum(ratio, 1e-4) * FILM_PROBE_PU
            self.film_w_per_k[:] = self._across(t, p, ratio)
            self.film_slope[:] = (self._across(t, p, ratio + step) - self.film_w_per_k) / step
            moved[:] = 0.0
        np.multiply(moved, self.film_slope, out=self.across_w_per_k)
        self.across_w_per_k += self.film_w_per_k

    def _across(self, t: Truth, p: Parameters, ratio: F64) -> F64:
        """Return the heat over the difference of both inlets, W/K, at this ratio of primary to nominal
        flow [n_cdu]."""
        cold = np.maximum(ratio / self.ratio_per_lpm * p.water_w_per_k_per_lpm, LEAST_W_PER_K)
        least = np.minimum(self.h.cdu_w_per_k, cold)
        mixed = least / np.maximum(self.h.cdu_w_per_k, cold)
        return effectiveness(self.ua_w_per_k(t, p, ratio) / least, mixed) * least

    def ua_w_per_k(self, t: Truth, p: Parameters, ratio: F64) -> F64:
        """Return the conductance of the plates [n_cdu] at this ratio of primary to nominal flow."""
        films = film_factor(np.maximum(ratio, 1e-4), np.maximum(t.cdu_flow_lpm / p.cdu_flow_lpm, 1e-4))
        ua: F64 = p.cdu_ua_w_per_k * self.ua_factor / films
        return ua

    def _valve(self, t: Truth, p: Parameters, dt_s: float) -> None:
        error, move, valve = self.c, self.e, t.cdu_valve_pu
        np.subtract(t.cdu_supply_c, t.cdu_setpoint_c, out=error)
        np.subtract(error, self.error_before_k, out=move)
        np.copyto(self.error_before_k, error)
        move *= VALVE_GAIN_PER_K
        error *= VALVE_INTEGRAL_PER_K_S * dt_s
        move += error
        limit = VALVE_SLEW_PER_S * dt_s
        np.maximum(move, -limit, out=move)
        np.minimum(move, limit, out=move)
        valve += move
        np.maximum(valve, VALVE_MIN_PU, out=valve)
        np.minimum(valve, 1.0, out=valve)
        if self.stuck is not None:
            np.copyto(valve, self.stuck, where=np.isfinite(self.stuck))

    def set_points(self, t: Truth, p: Parameters) -> None:
        """Return the supply set points: as requested, but never near the dew point of the hall."""
        dew = p.hall_moisture_c[self.hall_of_cdu] if len(p.hall_moisture_c) else 0.0
        np.maximum(self.target_c, dew + DEW_MARGIN_K, out=t.cdu_setpoint_c)

    def facility_aim_c(self, t: Truth, p: Parameters) -> F64:
        """Set point of each loop [n_loop + 1]: cold enough for the coldest CDU on it."""
        aim = np.full(len(p.loop_heat_w), np.inf)
        np.minimum.at(aim, p.loop_of_cdu, t.cdu_setpoint_c)
        return np.where(np.isfinite(aim), aim, 32.0) - 4.0 - FACILITY_MARGIN_K

    def hall_step(self, t: Truth, p: Parameters, dt_s: float) -> None:
        """Advance the air of every hall: racks and CDU motors heat it, and air handlers remove the excess.

        dT/dt = (heat - max (T - low)/band)/C, exact between the ends of the band. Halls are few: one by one.
        """
        cold = t.hall_cold_c
        self.halls.sums(t.rack_air_heat_w, self.hall_heat_w)
        self.hall_heat_w += self.motors.sums(self.h.motor_heat_w, self.motor_w)
        np.copyto(self.before_hall_c, cold)
        for i, heat in enumerate(self.hall_heat_w.tolist()):
            capacity, now = float(p.hall_j_per_k[i]), float(cold[i])
            if not self.grid_ok:
                self.hall_air_w[i], cold[i] = 0.0, now + heat * dt_s / capacity
                continue
            most = float(p.hall_air_max_w[i])
            rate = most / (AIR_BAND_K * capacity)
            aim = float(p.hall_set_c[i]) - 0.5 * AIR_BAND_K + heat / (rate * capacity)
            taken = heat + (aim - now) * math.expm1(-rate * dt_s) * capacity / dt_s
            self.hall_air_w[i] = taken = min(max(taken, 0.0), most)
            cold[i] = now + (heat - taken) * dt_s / capacity
        np.add(cold, AIR_RISE_K * 0.8, out=t.hall_hot_c)
        self.halls.spread(cold, t.rack_inlet_c)
        t.rack_inlet_c += p.rack_inlet_add_k

    def air_power_w(self) -> float:
        """Return the electric power of air handlers and the chillers behind them."""
        return float(np.add.reduce(self.hall_air_w)) * (AIR_HANDLER_W_PER_W + 1.0 / AIR_HANDLER_COP)

    def leak_heat(self, lost_w_per_k: F64) -> None:
        """Remove the heat of leaked coolant from the hot leg; the reserve replaces it at room temperature."""
        np.multiply(lost_w_per_k, self.hot_c - ROOM_C, out=self.leak_w)
        self.leaking = bool(self.leak_w.any())
