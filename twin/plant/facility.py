"""Facility loops of a plant: coolers with fans, and chillers, that reject its heat to the outside.

One integrator per loop: up to 1 it is the speed of the fans, from 1 to 2 the share of the chiller. The heat
and the work of the chiller leave by the same fans. A site has few loops, so they are stepped one by one.
"""

from __future__ import annotations

import math

import numpy as np

from twin.catalogue import F64
from twin.physics import (
    chilled_max_w,
    chiller_work_w,
    evaporated_l_per_s,
    makeup_l_per_s,
    tower_ntu,
    tower_w_per_k,
    wet_bulb_c,
)
from twin.plant.disturbance import Disturbance
from twin.plant.hydraulics import LEAST_W_PER_K
from twin.plant.layout import Groups
from twin.plant.parameters import BYPASS_PU, MOTOR_EFFICIENCY_PU, Parameters
from twin.plant.truth import Truth
from twin.plant.weather import HUMIDITY_PER_K, Weather
from twin.site import Site

FAN_FLOOR_PU = 0.15  # the lowest speed of a fan that runs; source: estimate
GAIN_PER_K, INTEGRAL_PER_K_S = 0.10, 0.002  # of the supply control; source: estimate
SLEW_PER_S = 0.05  # source: estimate
AIR_EXPONENT = 0.8  # of a dry cooler's conductance over fan speed
LEAST_AIR_PU = 1e-3  # what the wind drives through fans that stand; source: estimate
WEATHER_PERIOD_S = 60.0
LEAK_FELT_L = 5.0  # in the pit of a loop; source: estimate


class Facility:
    """Hot and cold legs of every loop [n_loop + 1]; the last serves CDUs without a known loop."""

    def __init__(self, site: Site, p: Parameters, weather: Weather) -> None:
        n = len(p.loop_heat_w)
        self.weather = weather
        self.n_loop = site.sizes["loop"]
        self.cdus = Groups(p.loop_of_cdu, n)
        self.used = np.flatnonzero(np.bincount(p.loop_of_cdu, minlength=n)).tolist()
        self.cold_c, self.hot_c, self.aim_c = np.full(n, 25.0), np.full(n, 32.0), np.full(n, 25.0)
        self.before_hot_c, self.before_cold_c = self.hot_c.copy(), self.cold_c.copy()
        self.level = [0.5] * n
        self.error_before_k = [0.0] * n
        self.fan_factor = np.ones(n)
        self.leak_lpm, self.leaked_l = np.zeros(n), np.zeros(n)
        self.leaking, self.grid_ok = False, True
        self.flow_lpm, self.into_w, self.rejected_w = np.zeros(n), np.zeros(n), np.zeros(n)
        self.power_w, self.fan_pu = np.zeros(n), np.zeros(n)
        self.pump_heat_w = np.zeros(n)  # of the loop's own pumps, into the cold leg
        self.water_l = np.zeros(n)  # drawn since the beginning: evaporated and drained
        self.work_w, self.sink_c = np.zeros(n), np.zeros(n)  # of the chiller: its work, what it works against
        self.nominal_w_per_k = (1.0 + BYPASS_PU) * p.loop_flow_lpm * p.water_w_per_k_per_lpm
        range_k = p.loop_heat_w / self.nominal_w_per_k
        self.tower_ntu = [
            tower_ntu(*x) for x in zip(p.loop_approach_k.tolist(), range_k.tolist(), strict=True)
        ]
        self.weather_s = -np.inf
        self.add_k = 0.0
        self.air_c = np.zeros(n)

    def read_disturbance(self, d: Disturbance) -> None:
        """Read failed fans, leaks, hotter weather, and the grid of pumps, fans and chillers."""
        self.grid_ok = d.cooling_ok
        self.fan_factor[: self.n_loop] = d.loop_fan_factor
        self.leak_lpm[: self.n_loop] = d.loop_leak_lpm
        self.leaking = bool(self.leak_lpm.any())
        if d.outdoor_add_k != self.add_k:
            self.add_k, self.weather_s = d.outdoor_add_k, -np.inf

    def look_outside(self, t: Truth, p: Parameters) -> None:
        """Read the weather, once a minute because it moves slowly."""
        if t.time_s - self.weather_s < WEATHER_PERIOD_S:
            return
        self.weather_s = t.time_s
        dry, rh = self.weather.at(t.time_s)
        t.outdoor_c = dry + self.add_k
        rh = float(np.clip(rh * math.exp(-HUMIDITY_PER_K * self.add_k), 0.05, 1.0))
        t.wet_bulb_c = float(wet_bulb_c(np.array([t.outdoor_c]), np.array([rh]))[0])
        self.air_c[:] = np.where(p.loop_wet, t.wet_bulb_c, t.outdoor_c)

    def step(self, t: Truth, p: Parameters, dt_s: float) -> None:
        """Move the heat of the CDUs through hot leg, cooler and cold leg."""
        np.copyto(self.before_hot_c, self.hot_c)
        np.copyto(self.before_cold_c, self.cold_c)
        self.cdus.sums(t.cdu_heat_w, self.into_w)
        self.cdus.sums(t.cdu_primary_flow_lpm, self.flow_lpm)
        for i in self.used:
            self._loop(p, i, dt_s)
        if self.leaking:
            self.leaked_l += self.leak_lpm * (dt_s / 60.0)
            np.greater(self.leaked_l[: self.n_loop], LEAK_FELT_L, out=t.loop_leak)
        n = self.n_loop
        if n:
            t.loop_supply_c[:], t.loop_return_c[:] = self.cold_c[:n], self.hot_c[:n]
            t.loop_flow_lpm[:], t.loop_power_w[:] = self.flow_lpm[:n], self.power_w[:n]
            t.loop_fan_pu[:], t.loop_rejected_w[:] = self.fan_pu[:n], self.rejected_w[:n]
            t.loop_water_l[:] = self.water_l[:n]

    def _loop(self, p: Parameters, i: int, dt_s: float) -> None:
        """Advance one loop: both legs exactly, with the other inputs constant over the step."""
        hot, cold, level = float(self.hot_c[i]), float(self.cold_c[i]), self.level[i]
        into, flow, nominal = float(self.into_w[i]), float(self.flow_lpm[i]), float(p.loop_heat_w[i])
        gain = dt_s / float(p.loop_tank_j_per_k[i])
        if not self.grid_ok:
            level = 0.0  # without a chiller, and with fans that stand
        bypass = BYPASS_PU * float(p.loop_flow_lpm[i]) * self.grid_ok
        w = max((flow + bypass) * p.water_w_per_k_per_lpm, LEAST_W_PER_K)
        moved = (into / w + cold - hot) * -math.expm1(-w * gain)
        self.hot_c[i] = hot + moved
        pump_w = float(p.loop_pump_w_per_lpm[i]) * (flow + bypass)
        pump_heat_w = MOTOR_EFFICIENCY_PU * pump_w
        self.pump_heat_w[i] = pump_heat_w
        out = into - moved / gain + pump_heat_w  # W (mean of the hot leg - cold leg), and the pumps
        fan = min(1.0, level)
        blown = max(fan * float(self.fan_factor[i]), LEAST_AIR_PU)
        if p.loop_wet[i]:
            rated = float(self.nominal_w_per_k[i])
            water = max(w, BYPASS_PU * rated)  # without pumps: as good as none
            ends_c = hot, cold, float(self.air_c[i])
            conductance = tower_w_per_k(self.tower_ntu[i], water, rated, blown, ends_c)
        else:
            conductance = nominal / float(p.loop_approach_k[i]) * blown**AIR_EXPONENT
        chilled, air = max(0.0, level - 1.0) * nominal, float(self.air_c[i])
        if chilled > 0.0:
            # The condenser has the air that the cooler has warmed, unless its dampers are shut
            chilled = min(chilled, float(chilled_max_w(cold, max(air, cold), conductance)))
        moved = (air + (out - chilled) / conductance - cold) * -math.expm1(-conductance * gain)
        # A cooler does not heat: where the air is warmer, its dampers shut
        rejected = max(out - moved / gain, chilled)
        cold += (out - rejected) * gain
        self.cold_c[i], self.rejected_w[i], self.fan_pu[i] = cold, rejected, fan
        work, sink = 0.0, air + rejected / conductance
        if chilled > 0.0:
            work = float(chiller_work_w(chilled, cold, sink, conductance))
        self.work_w[i], self.sink_c[i] = work, sink + work / conductance
        self.power_w[i] = float(p.loop_fan_w[i]) * fan**3 + work + pump_w
        if p.loop_wet[i]:
            self.water_l[i] += float(makeup_l_per_s(evaporated_l_per_s(rejected + work))) * dt_s
        error = cold - float(self.aim_c[i])
        move = GAIN_PER_K * (error - self.error_before_k[i]) + INTEGRAL_PER_K_S * dt_s * error
        self.error_before_k[i] = error
        limit = SLEW_PER_S * dt_s
        level += min(limit, max(-limit, move))
        self.level[i] = min(1.0 + float(p.loop_chiller_pu[i]), max(FAN_FLOOR_PU, level))

    def supply(self, out: F64) -> F64:
        """Return the facility water supply of each CDU, degC [n_cdu]."""
        return self.cdus.spread(self.cold_c, out)
