"""Loop model: the power of a facility loop's pumps, fans and chiller at an operating point.

Textbook physics (`twin.physics`) around the nameplate of the site file, with four learned factors: of the
cooler's conductance, and of the power of fans, chiller and pumps. The factors are learned from the loop's
electricity meter by recursive least squares on a linearised model; their covariance is the doubt of a
prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from twin.catalogue import F64
from twin.physics import (
    COOLANTS,
    FAN_RATED_W_PER_W,
    chilled_max_w,
    chiller_work_w,
    film_factor,
    heat_rate_w_per_k,
    tower_ntu,
    tower_w_per_k,
    transfer,
    ua_of,
)
from twin.site import (
    COOLER_APPROACH_K,
    LOOP_PUMP_W_PER_LPM,
    TOWER_APPROACH_K,
    TOWER_PUMP_W_PER_LPM,
    LoopGroup,
    Site,
    expand,
)

FACTORS = 4
CONDUCTANCE, FANS, CHILLER, PUMPS = range(FACTORS)
# 1 sigma of the logarithm of each factor before anything was learned; source: estimate
PRIOR = np.array([0.25, 0.3, 0.25, 0.3])
DRIFT_PER_DAY = 0.02  # of each logarithm, 1 sigma: coolers foul, filters load; source: estimate
METER_PU, MODEL_PU, LEAST_W_PU = (
    0.02,
    0.04,
    0.002,
)  # of the power, of it, of the nominal heat; source: estimate
FAN_FLOOR_PU = 0.15  # the lowest speed of a fan that runs; source: estimate
AIR_EXPONENT = 0.8  # of a dry cooler's conductance over fan speed, as of a film (Dittus and Boelter)
CHILLER_PU = 1.2  # what a chiller carries over the nominal heat, where one may be; source: estimate
PASSED_PU = 1.1  # what a loop's pumps pass over the CDUs' flow at nominal: with a bypass; source: estimate
SHAFT_PU = 0.86  # of a pump's power ends in its water: IE3 motor with drive; source: estimate
WATER_C = 30.0  # at which the facility water's heat capacity is taken
STEPS = 24  # of a bisection: 1e-7 of its interval
FLOWS_PU = np.linspace(0.02, 1.0, 99)  # of the highest, between which a flow is interpolated
FLOW_MOST_PU = 1.5  # of the nominal flow, with the valves of the CDUs open; source: estimate


@dataclass(frozen=True, slots=True)
class LoopPlate:
    """Nameplate of a facility loop: from the site file, otherwise usual values."""

    heat_w: float
    flow_lpm: float
    wet: bool  # a tower: it cools towards the wet bulb
    chiller_pu: float  # of the nominal heat; 0 without one
    approach_k: float
    ntu: float  # of a tower
    pump_w_per_lpm: float
    fan_w: float

    @property
    def water_w_per_k(self) -> float:
        """Return the heat rate of all water at nominal flow, W/K."""
        return PASSED_PU * self.flow_lpm * water_w_per_k_per_lpm()


@dataclass(frozen=True, slots=True)
class LoopPoint:
    """Operating point of a facility loop: its supply, the heat of its CDUs, the outdoor air (wet bulb of a
    tower) and the flow through the CDUs."""

    supply_c: float
    heat_w: float
    air_c: float
    flow_lpm: float


@dataclass(frozen=True, slots=True)
class ExchangerPoint:
    """The exchangers of a loop's CDUs taken as one, as they stand: conductance and flow that belong together.

    `warm_w_per_k` is the heat rate of the racks' coolant. NaN in `ua_w_per_k`: no conductance explains it.
    """

    warm_w_per_k: float
    ua_w_per_k: float
    flow_lpm: float

    def slowed(self, slower: float) -> ExchangerPoint:
        """Return the exchangers with this share of the racks' flow."""
        film = float(film_factor(np.ones(1), np.full(1, slower))[0])
        return ExchangerPoint(self.warm_w_per_k * slower, self.ua_w_per_k / film, self.flow_lpm)

    def flow_at(self, supply_c: float, point: LoopPoint, most_lpm: float) -> float:
        """Return the facility flow at which the CDUs hold `supply_c` with the water of `point`, l/min."""
        if not np.isfinite(self.ua_w_per_k):
            return self.flow_lpm
        flows = most_lpm * FLOWS_PU
        water, ones = water_w_per_k_per_lpm(), np.ones(len(flows))
        ua = self.ua_w_per_k * _films(np.ones(1)) / _films(flows / self.flow_lpm)
        warm_in_c = ones * (supply_c + point.heat_w / self.warm_w_per_k)
        across = transfer(ua, self.warm_w_per_k * ones, flows * water, warm_in_c, ones * point.supply_c)
        return float(np.interp(point.heat_w, across.heat_w, flows))


@cache
def water_w_per_k_per_lpm() -> float:
    """Return the heat rate of facility water, W/K per l/min."""
    return float(heat_rate_w_per_k(COOLANTS["water"], np.ones(1), np.full(1, WATER_C))[0])


def plates_of(site: Site) -> tuple[LoopPlate, ...]:
    """Return the nameplate of every loop."""
    return site.derived("loop_plates", lambda: _plates(site))


def _plates(site: Site) -> tuple[LoopPlate, ...]:
    stated = {name: group for group in site.file.loops for name in expand(group.name)}
    out = []
    for i, full in enumerate(site.names["loop"]):
        name = full.rpartition("/")[2]
        group = stated.get(name, LoopGroup(name=name))
        wet = group.cooling == "tower"
        heat_w = max(float(site.design.loop_heat_w[i]), 1000.0)
        flow_lpm = max(float(site.design.loop_flow_lpm[i]), 1.0)
        usual_w = (LOOP_PUMP_W_PER_LPM + TOWER_PUMP_W_PER_LPM * wet) * PASSED_PU * flow_lpm
        usual_k = TOWER_APPROACH_K if wet else COOLER_APPROACH_K
        approach_k = group.approach_k if group.approach_k is not None else usual_k
        range_k = heat_w / (PASSED_PU * flow_lpm * water_w_per_k_per_lpm())
        out.append(
            LoopPlate(
                heat_w=heat_w,
                flow_lpm=flow_lpm,
                wet=wet,
                chiller_pu=CHILLER_PU if group.cooling in ("chiller", "unknown") else 0.0,
                approach_k=approach_k,
                ntu=tower_ntu(approach_k, range_k) if wet else np.nan,
                pump_w_per_lpm=(group.pumps_w if group.pumps_w is not None else usual_w)
                / (PASSED_PU * flow_lpm),
                fan_w=group.fans_w if group.fans_w is not None else FAN_RATED_W_PER_W * heat_w,
            )
        )
    return tuple(out)


def exchanger_of(plate: LoopPlate, supply_c: float, warm_w_per_k: float, point: LoopPoint) -> ExchangerPoint:
    """Return the present exchangers of a loop's CDUs, from measurements on both sides."""
    flow_lpm = max(point.flow_lpm, 0.02 * plate.flow_lpm)
    if not warm_w_per_k > 0.0 or not point.heat_w > 0.0:
        return ExchangerPoint(np.nan, np.nan, flow_lpm)
    cold = flow_lpm * water_w_per_k_per_lpm()
    sides = (point.heat_w, warm_w_per_k, cold, supply_c + point.heat_w / warm_w_per_k, point.supply_c)
    return ExchangerPoint(warm_w_per_k, float(ua_of(*(np.array([x]) for x in sides))[0]), flow_lpm)


def loop_power_w(plate: LoopPlate, factors: F64, at: LoopPoint) -> float:
    """Return the power of pumps, fans and chiller of a loop at this supply, W."""
    share = np.exp(factors)
    pump_w = _pump_w(plate, at) * float(share[PUMPS])
    heat_w = at.heat_w + SHAFT_PU * pump_w
    most_w = _carried_w(plate, factors, at, 1.0)
    if most_w >= heat_w:
        fan = max(_fan_pu(plate, factors, at, heat_w, most_w), FAN_FLOOR_PU)
        return pump_w + plate.fan_w * float(share[FANS]) * fan**3
    work_w = 0.0
    if plate.chiller_pu > 0.0:
        work_w = float(share[CHILLER]) * _chiller_w(plate, factors, at, heat_w, most_w)
    return pump_w + plate.fan_w * float(share[FANS]) + work_w


def _chiller_w(plate: LoopPlate, factors: F64, at: LoopPoint, heat_w: float, free_w: float) -> float:
    """Return the work of a chiller beside a cooler that carries `free_w` alone, W."""
    w_per_k = _w_per_k(plate, factors, at, 1.0)
    most_w = float(chilled_max_w(at.supply_c, max(at.air_c, at.supply_c), w_per_k))
    chilled_w = min(heat_w - free_w, heat_w, plate.chiller_pu * plate.heat_w, most_w)
    return float(chiller_work_w(chilled_w, at.supply_c, at.air_c + heat_w / w_per_k, w_per_k))


def reached_c(plate: LoopPlate, factors: F64, aim_c: float, at: LoopPoint) -> float:
    """Supply temperature that a loop reaches with this aim: fans that turn at their lowest speed may cool it
    further, and without a chiller full fans may not cool it so far."""
    aimed = LoopPoint(aim_c, at.heat_w, at.air_c, at.flow_lpm)
    heat_w = at.heat_w + SHAFT_PU * _pump_w(plate, at)

    def spare_w(fan: float) -> Callable[[float], float]:
        return lambda c: (
            heat_w - _carried_w(plate, factors, LoopPoint(c, at.heat_w, at.air_c, at.flow_lpm), fan)
        )

    if _carried_w(plate, factors, aimed, FAN_FLOOR_PU) > heat_w:
        return _root(spare_w(FAN_FLOOR_PU), min(at.air_c, aim_c - 0.1), aim_c)
    if plate.chiller_pu == 0.0 and _carried_w(plate, factors, aimed, 1.0) < heat_w:
        return _root(spare_w(1.0), aim_c, aim_c + 40.0)
    return aim_c


def sensitivity_w(plate: LoopPlate, factors: F64, at: LoopPoint) -> F64:
    """Return d power/d logarithm of each factor [4], W."""
    out, step = np.empty(FACTORS), 1e-3
    for k in range(FACTORS):
        moved = factors.copy()
        moved[k] += step
        high_w = loop_power_w(plate, moved, at)
        moved[k] -= 2.0 * step
        out[k] = (high_w - loop_power_w(plate, moved, at)) / (2.0 * step)
    return out


@dataclass(frozen=True, slots=True)
class LoopFit:
    """The factors of a loop after a reading, and its difference from the expected value, in sigmas."""

    factors: F64
    covariance: F64  # [4, 4]
    off_sigmas: float


def fresh_covariance() -> F64:
    """Return the initial covariance of the factors [4, 4]."""
    return np.diag(PRIOR**2)


def fit(
    plate: LoopPlate, factors: F64, covariance: F64, at: LoopPoint, power_w: float, gap_s: float
) -> LoopFit:
    """Take in a reading of the loop's power, `gap_s` after the one before."""
    drift = DRIFT_PER_DAY**2 * min(gap_s / 86_400.0, 30.0)
    covariance = covariance + np.diag(np.full(FACTORS, drift))
    # Forgetting makes no uncertainty larger than the prior's
    bound = np.minimum(1.0, PRIOR / np.sqrt(np.diag(covariance)))
    covariance = covariance * np.outer(bound, bound)
    slope = sensitivity_w(plate, factors, at)
    noise_w = np.hypot(np.hypot(METER_PU, MODEL_PU) * power_w, LEAST_W_PU * plate.heat_w)
    var = float(slope @ covariance @ slope) + noise_w**2
    off_w = power_w - loop_power_w(plate, factors, at)
    sigmas = off_w / np.sqrt(var)
    gain = covariance @ slope / var
    bounded_w = float(np.clip(off_w, -3.0 * np.sqrt(var), 3.0 * np.sqrt(var)))  # one reading may lie
    after = covariance - np.outer(gain, slope @ covariance)
    moved = np.clip(factors + gain * bounded_w, -4.0 * PRIOR, 4.0 * PRIOR)
    return LoopFit(moved, 0.5 * (after + after.T), float(sigmas))


def _pump_w(plate: LoopPlate, at: LoopPoint) -> float:
    return plate.pump_w_per_lpm * (at.flow_lpm + (PASSED_PU - 1.0) * plate.flow_lpm)


def _w_per_k(plate: LoopPlate, factors: F64, at: LoopPoint, fan_pu: float) -> float:
    """Return the conductance of the cooler between the loop's supply and the air, W/K."""
    share = float(np.exp(factors[CONDUCTANCE]))
    if not plate.wet:
        return float(share * plate.heat_w / plate.approach_k * fan_pu**AIR_EXPONENT)
    passed_lpm = at.flow_lpm + (PASSED_PU - 1.0) * plate.flow_lpm
    water = passed_lpm * water_w_per_k_per_lpm()
    ends_c = at.supply_c + at.heat_w / water, at.supply_c, at.air_c
    return float(share * tower_w_per_k(plate.ntu, water, plate.water_w_per_k, fan_pu, ends_c))


def _carried_w(plate: LoopPlate, factors: F64, at: LoopPoint, fan_pu: float) -> float:
    """Return the heat that the cooler alone carries away, W; 0 if the air is warmer."""
    return max(_w_per_k(plate, factors, at, fan_pu) * (at.supply_c - at.air_c), 0.0)


def _fan_pu(plate: LoopPlate, factors: F64, at: LoopPoint, heat_w: float, most_w: float) -> float:
    """Return the fan speed for this heat, given `most_w` at full speed."""
    if not plate.wet:
        return float((heat_w / most_w) ** (1.0 / AIR_EXPONENT))
    return _root(lambda fan: heat_w - _carried_w(plate, factors, at, fan), 0.02, 1.0)


def _films(flow_pu: F64) -> F64:
    """Return the resistance of an exchanger over that at this flow's reference, with the other side
    unchanged [n]."""
    return film_factor(flow_pu, np.ones(len(flow_pu)))


def _root(short: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a falling function within low..high; the nearer end without one."""
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        if short(middle) > 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
