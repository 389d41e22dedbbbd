"""A year of `cooling_setpoint` on a simulated site, beside fixed set points and three rules.

The plant's parameters are hidden, the jobs drawn; all arms live through the same weather and work. The
greedy rule goes as warm as the hottest GPU and the racks' guards allow, by true temperatures, half a kelvin
below the guard of the supply. No operator knows these. The same rule by readings keeps as far below that
guard as the policy's probability asks for, given how far coolant was read above its set point. The last one
is the rule that SustainDC publishes, "trim and respond" (its utils/trim_and_respond.py): half a kelvin warmer
after five quarters of an hour within the limit, half a kelvin colder in each beyond it. There it watches the
air of a room; here it watches what the greedy rule does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from models.persistence import Persistence
from policies import REGISTRY
from policies.cooling_setpoint.margins import SPREAD_S, SUPPLY_K
from tests.support.builders import site_of
from tests.support.year_weather import days_of, read_year
from twin.catalogue import F64, Bool, ConfigError
from twin.cli.traces import trace_root
from twin.engine import Engine
from twin.plant import Plant, Scenario, Sensors
from twin.plant.sensors import BMS_TEMP_K, Periods
from twin.plant.weather import DAY_S, Weather
from twin.run import Report
from twin.simulation import Simulation
from twin.site import RACK_DROP_PA, Site

NAME, RECORDING = "cooling_setpoint", "weather-years-sustaindc"
STEP_S = 200.0  # of the twin: shorter than the lease of a set point
PLANT_STEP_S = 4.0
WARM_DAYS = 1  # at the beginning, of which nothing counts: the policy watches a day before it trusts it
DECIDE_S, GREEDY_K = 600.0, 2.0  # of the greedy rule: how often, and how far below a guard it stays
TRIM_S, TRIM_K, TRIM_AFTER = 900.0, 0.5, 5  # of SustainDC's rule: its sample, its step, samples before a trim
FIXED, GREEDY, MEASURED, TRIM = "fixed", "greedy", "greedy_by_readings", "trim_and_respond"
PROBABILITY = 1e-3  # that the rule by readings passes the guard of the supply
SUPPLY_ONLY = "supply_only"  # the policy beside pumps whose pressure is never moved
ARMS = (FIXED, GREEDY, MEASURED, TRIM, SUPPLY_ONLY, NAME)
# Of the table that `result_of` makes
HEADS = (
    "loop", "climate", "plants", "cooling, kWh", "liquid, kWh", "saved, kWh", "of cooling",
    "by pumps, kWh", "of liquid", "below greedy", "by readings", "below trim", "expected/saved",
    "account/saved", "hot GPU-hours", "greedy's", "warm rack-hours", "greedy's", "by readings", "hottest, C",
    "mean set, C", "greedy's, C",
)  # fmt: skip
LEGEND = (
    "cooling: pumps, fans, chillers, air handlers with the BMS's fixed set points; liquid: without air "
    "handlers. saved: of all power of racks and cooling, leakage included. by pumps: of it, by their "
    "pressure. by readings: the greedy rule by readings, with the policy's probability. trim: "
    "SustainDC's rule, trim and respond. warm: beyond the guard of the supply. Goals: 10 % of cooling "
    "saved, below greedy, expected within 10 % of saved, at most 0.001 of GPU-hours hot."
)
# Weather file of each climate; all of typical years (TMYx) as collected in SustainDC
CLIMATES = {
    "hot and dry": "USA_AZ_Phoenix-Sky.Harbor.epw",
    "hot and humid": "USA_GA_Atlanta-Hartsfield-Jackson.epw",
    "temperate": "USA_WA_Seattle-Tacoma.epw",
}


@dataclass(frozen=True)
class SetpointYear:
    """One arm of one year."""

    climate: str
    cooling: str  # of the loop, as in a site file
    arm: str
    seed: int
    weather: Path | Weather
    days: tuple[int, ...]  # of the year, from 0
    profile: str = "gb200-nvl72"

    def site(self) -> Site:
        """Two racks on one CDU and a loop of its own."""
        racks = [{"name": "r[1-2]", "profile": self.profile, "nodes": 6}]
        cdus = [{"name": "cdu1", "loop": "fw1", "serves": ["r1", "r2"]}]
        lowest_pa = {"min": RACK_DROP_PA} if self.arm == SUPPLY_ONLY else {}
        return site_of({
            "controls": {"cdu.diff_pressure_target_pa": lowest_pa}, "site": "lab",
            "max_jobs": 64, "halls": [{"name": "h", "racks": racks, "cdus": cdus}],
            "loops": [{"name": "fw1", "cooling": self.cooling}],
        })  # fmt: skip


@dataclass(frozen=True)
class YearOutcome:
    """Energies in kWh over the sampled days; `expected_kwh` and `saved_kwh` by the policy's own account.

    `hot_pu` is the share of GPU-hours in which a GPU passed its guard, `warm_pu` that of rack-hours in which
    the supply did.
    """

    climate: str
    cooling: str
    arm: str
    seed: int
    total_kwh: float
    cooling_kwh: float
    loop_kwh: float
    expected_kwh: float
    saved_kwh: float
    hot_pu: float
    warm_pu: float
    hottest_c: float
    mean_c: float
    moves: int


class _Meter:
    """Energies and violations of an arm."""

    def __init__(self, plant: Plant) -> None:
        self.plant, limit = plant, plant.site.limits["gpu.temp_c"]
        self.guard_c, self.supply_c = limit.guard, plant.site.limits["rack.supply_temp_c"].guard
        self.total_j = self.cooling_j = self.loop_j = self.set_j = 0.0
        self.hottest_c, self.hot_hours, self.hours = -np.inf, 0, 0
        self.warm_hours = self.rack_hours = 0
        self.moves, self._last_c = 0, float(plant.truth.cdu_setpoint_c[0])
        self.hot: Bool = np.zeros(len(self.guard_c), np.bool_)
        self.warm: Bool = np.zeros(len(self.supply_c), np.bool_)

    def count(self, dt_s: float) -> None:
        """Count a step that has just passed."""
        t = self.plant.truth
        self.total_j += dt_s * (float(t.rack_power_w.sum()) + t.cooling_power_w)
        self.cooling_j += dt_s * t.cooling_power_w
        self.loop_j += dt_s * float(t.loop_power_w.sum() + t.cdu_pump_power_w.sum())
        self.set_j += dt_s * float(t.cdu_setpoint_c[0])
        self.moves += abs(float(t.cdu_setpoint_c[0]) - self._last_c) > 0.05
        self._last_c = float(t.cdu_setpoint_c[0])
        self.hottest_c = max(self.hottest_c, float(t.gpu_temp_c.max()))
        self.hot |= t.gpu_temp_c > self.guard_c
        self.warm |= t.rack_supply_c > self.supply_c
        if t.time_s % 3600.0 < dt_s:
            self.hot_hours += int(self.hot.sum())
            self.hours += len(self.hot)
            self.warm_hours += int(self.warm.sum())
            self.rack_hours += len(self.warm)
            self.hot[:] = self.warm[:] = False


def years_of(
    first_seed: int, places: tuple[Sequence[str], Sequence[str]], plants: int, days: int
) -> list[SetpointYear]:
    """Every arm of every loop and climate (`places`) and plant.

    Raises ConfigError if the recordings are not there.
    """
    folder = trace_root(os.environ) / RECORDING
    if not folder.is_dir():
        raise ConfigError([f"{folder}: not there; run `racktwin trace fetch {RECORDING}`"])
    dates = days_of(days)
    dates = (*dates[:WARM_DAYS], *dates)
    return [
        SetpointYear(climate, loop, arm, first_seed + k, folder / CLIMATES[climate], dates)
        for loop in places[0]
        for climate in places[1]
        for k in range(plants)
        for arm in ARMS
    ]


def live_through(year: SetpointYear, report: Report) -> YearOutcome:
    """One arm of a year."""
    site = year.site()
    weather = year.weather if isinstance(year.weather, Weather) else read_year(year.weather, year.days)
    span_s = len(year.days) * DAY_S
    scenario = Scenario.ordinary(span_s / 3600.0, year.seed)
    plant = Plant(site, year.seed, scenario, weather=weather)  # type: ignore[arg-type]
    plant.step_max_s = PLANT_STEP_S
    meter, begun = _Meter(plant), (0.0, 0.0)
    simulation: Simulation | None = None
    rule = Trim() if year.arm == TRIM else Measured(year.seed) if year.arm == MEASURED else None
    if year.arm in (NAME, SUPPLY_ONLY):
        forecasts = Persistence(horizons_s=(600.0, 3600.0))
        engine = Engine(site, [REGISTRY[NAME]()], [forecasts], {NAME: "act"})
        periods = Periods(STEP_S, STEP_S, STEP_S, STEP_S)
        simulation = Simulation(engine, plant, Sensors(site, year.seed, periods), dt_s=STEP_S)
    for step in range(round(span_s / STEP_S)):
        if simulation is not None:
            simulation.step()
        else:
            if year.arm == GREEDY and step % round(DECIDE_S / STEP_S) == 0:
                _move(plant, room_k(plant), DECIDE_S)
            elif rule is not None:
                rule.step(plant, STEP_S)
            plant.step((), STEP_S)
        if step == round(WARM_DAYS * DAY_S / STEP_S):
            meter, begun = _Meter(plant), account_of(simulation)
        meter.count(STEP_S)
        if step % 100 == 0:
            report(step * STEP_S / span_s, f"{year.climate}, {year.arm}")
    expected, saved = (now - before for now, before in zip(account_of(simulation), begun, strict=True))
    return YearOutcome(
        climate=year.climate,
        cooling=year.cooling,
        arm=year.arm,
        seed=year.seed,
        total_kwh=meter.total_j / 3.6e6,
        cooling_kwh=meter.cooling_j / 3.6e6,
        loop_kwh=meter.loop_j / 3.6e6,
        expected_kwh=expected / 3.6e6,
        saved_kwh=saved / 3.6e6,
        hot_pu=meter.hot_hours / max(meter.hours, 1),
        warm_pu=meter.warm_hours / max(meter.rack_hours, 1),
        hottest_c=meter.hottest_c,
        mean_c=meter.set_j / (span_s - WARM_DAYS * DAY_S),
        moves=meter.moves,
    )


def account_of(simulation: Simulation | None) -> tuple[float, float]:
    """(expected, saved) energy by the policy's own account so far, J. Raises RuntimeError if suspended."""
    if simulation is None:
        return 0.0, 0.0
    if simulation.engine.suspended:
        raise RuntimeError(f"suspended: {simulation.engine.suspended}")
    memory = simulation.engine.memory[NAME]
    expected_j, saved_j = (
        float((memory[name] + memory[f"pump_{name}"]).sum()) for name in ("expected_j", "saved_j")
    )
    return expected_j, saved_j


def room_k(plant: Plant) -> float:
    """By how much coolant may be warmer now, by true temperatures and the rules' distance from guards."""
    t, limits = plant.truth, plant.site.limits
    room = float((limits["gpu.temp_c"].guard - t.gpu_temp_c).min()) - GREEDY_K
    room = min(room, float((limits["rack.return_temp_c"].guard - t.rack_return_c).min()) - GREEDY_K)
    most_c = float(limits["rack.supply_temp_c"].guard.min()) - 0.5
    return min(room, most_c - float(t.cdu_supply_c.max()))


class Measured:
    """The greedy rule by what a building reads, as far from the guard as a probability asks for."""

    def __init__(self, seed: int) -> None:
        self.rng, self.wait_s, self.over_k2 = np.random.default_rng([seed, 7]), 0.0, SUPPLY_K**2

    def step(self, plant: Plant, dt_s: float) -> None:
        """Before a step of the plant."""
        t, limits = plant.truth, plant.site.limits
        supply_c, return_c = (
            x + BMS_TEMP_K * self.rng.standard_normal(len(x)) for x in (t.rack_supply_c, t.rack_return_c)
        )
        gpu_c = np.rint(t.gpu_temp_c)
        self.wait_s -= dt_s
        off_k = float(supply_c.max()) - float(t.cdu_setpoint_c[0])
        if self.wait_s <= DECIDE_S / 2.0:  # its own move has passed by then
            self.over_k2 += -np.expm1(-dt_s / SPREAD_S) * (off_k**2 - self.over_k2)
        if self.wait_s > 0.0:
            return
        self.wait_s += DECIDE_S
        room = float((limits["gpu.temp_c"].guard - gpu_c).min()) - GREEDY_K
        room = min(room, float((limits["rack.return_temp_c"].guard - return_c).min()) - GREEDY_K)
        room_c = float(t.cdu_supply_c.max()) + room
        z = NormalDist().inv_cdf(1.0 - PROBABILITY)
        most_c = float(limits["rack.supply_temp_c"].guard.min()) - z * float(np.sqrt(self.over_k2))
        _move(plant, min(room_c, most_c) - float(t.cdu_setpoint_c[0]), DECIDE_S, t.cdu_setpoint_c)


class Trim:
    """SustainDC's rule: when it samples next, and for how many samples it has been within the limit."""

    def __init__(self) -> None:
        self.wait_s, self.calm = 0.0, 0

    def step(self, plant: Plant, dt_s: float) -> None:
        """Before a step of the plant."""
        self.wait_s -= dt_s
        if self.wait_s > 0.0:
            return
        self.wait_s += TRIM_S
        if room_k(plant) < 0.0:
            _move(plant, -TRIM_K, TRIM_S, plant.cooling.target_c)
        elif self.calm >= TRIM_AFTER:
            self.calm = 0
            _move(plant, TRIM_K, TRIM_S, plant.cooling.target_c)
        else:
            self.calm += 1


def _move(plant: Plant, by_k: float, since_s: float, from_c: F64 | None = None) -> None:
    """Move all set points, from what coolant has unless told otherwise, as fast as the BMS allows."""
    envelope, before_c = plant.site.envelopes["cdu.supply_temp_target_c"], plant.cooling.target_c
    wanted_c = np.clip(
        (plant.truth.cdu_supply_c if from_c is None else from_c) + by_k, envelope.low, envelope.high
    )
    plant.cooling.target_c = np.minimum(wanted_c, before_c + since_s * envelope.slew_per_s)
    plant.apply_set_points()


def result_of(outcomes: Sequence[dict[str, Any]], draw: str) -> dict[str, Any]:
    """A row for each loop and climate, of all plants."""
    places = dict.fromkeys((x["cooling"], x["climate"]) for x in outcomes)
    rows = [_row(place, [x for x in outcomes if (x["cooling"], x["climate"]) == place]) for place in places]
    return {"simulated": True, "draw": draw, "rows": rows, "years": list(outcomes)}


def _row(place: tuple[str, str], some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def of(arm: str, key: str) -> float:
        return sum(float(x[key]) for x in some if x["arm"] == arm)

    saved, greedy, measured, trim, pumps = (
        of(arm, "total_kwh") - of(NAME, "total_kwh") for arm in (FIXED, GREEDY, MEASURED, TRIM, SUPPLY_ONLY)
    )
    warm, greedy_warm, measured_warm = (
        max(float(x["warm_pu"]) for x in some if x["arm"] == arm) for arm in (NAME, GREEDY, MEASURED)
    )
    mine = [x for x in some if x["arm"] == NAME]
    return {
        "loop": place[0],
        "climate": place[1],
        "plants": len(mine),
        "cooling_kwh": of(FIXED, "cooling_kwh"),
        "liquid_kwh": of(FIXED, "loop_kwh"),
        "saved_kwh": saved,
        "saved_pu": saved / max(of(FIXED, "cooling_kwh"), 1e-9),
        "pumps_kwh": pumps,
        "saved_liquid_pu": saved / max(of(FIXED, "loop_kwh"), 1e-9),
        "below_greedy_kwh": greedy,
        "below_measured_kwh": measured,
        "below_trim_kwh": trim,
        "expected_over_saved": of(NAME, "expected_kwh") / saved if saved else None,
        "account_over_saved": of(NAME, "saved_kwh") / saved if saved else None,
        "hot_pu": max(float(x["hot_pu"]) for x in mine),
        "greedy_hot_pu": max(float(x["hot_pu"]) for x in some if x["arm"] == GREEDY),
        "warm_pu": warm,
        "greedy_warm_pu": greedy_warm,
        "measured_warm_pu": measured_warm,
        "hottest_c": max(float(x["hottest_c"]) for x in mine),
        "mean_c": sum(float(x["mean_c"]) for x in mine) / len(mine),
        "greedy_c": of(GREEDY, "mean_c") / len(mine),
    }
