"""A year of `cooling_setpoint` on a simulated site, beside fixed set points and a greedy rule.

The plant's parameters are hidden, the jobs drawn; all arms live through the same weather and work. The greedy
rule goes as warm as the hottest GPU and the racks' guards allow, by true temperatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.persistence import Persistence
from policies import REGISTRY
from tests.evaluation.cooling.year_weather import read_year
from tests.support.builders import site_of
from twin.catalogue import Bool
from twin.engine import Engine
from twin.plant import Plant, Scenario, Sensors
from twin.plant.sensors import Periods
from twin.plant.weather import DAY_S
from twin.run import Report
from twin.simulation import Simulation
from twin.site import Site

NAME = "cooling_setpoint"
STEP_S = 200.0  # of the twin: shorter than the lease of a set point
PLANT_STEP_S = 4.0
DECIDE_S, GREEDY_K = 600.0, 2.0  # of the greedy rule: how often, and how far below a guard it stays
ARMS = ("fixed", "greedy", NAME)
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
    weather: Path
    days: tuple[int, ...]  # of the year, from 0
    profile: str = "gb200-nvl72"

    def site(self) -> Site:
        """Two racks on one CDU and a loop of its own."""
        racks = [{"name": "r[1-2]", "profile": self.profile, "nodes": 6}]
        cdus = [{"name": "cdu1", "loop": "fw1", "serves": ["r1", "r2"]}]
        return site_of({
            "site": "lab", "max_jobs": 64, "halls": [{"name": "h", "racks": racks, "cdus": cdus}],
            "loops": [{"name": "fw1", "cooling": self.cooling}],
        })  # fmt: skip


@dataclass(frozen=True)
class YearOutcome:
    """Energies in kWh over the sampled days; `expected_kwh` and `saved_kwh` by the policy's own account.

    `hot_pu` is the share of GPU-hours in which a GPU passed its guard.
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
    hottest_c: float
    mean_c: float
    moves: int


class _Meter:
    """Energies and violations of an arm."""

    def __init__(self, plant: Plant) -> None:
        self.plant, limit = plant, plant.site.limits["gpu.temp_c"]
        self.guard_c = limit.guard
        self.total_j = self.cooling_j = self.loop_j = self.set_j = 0.0
        self.hottest_c, self.hot_hours, self.hours = -np.inf, 0, 0
        self.moves, self._last_c = 0, float(plant.truth.cdu_setpoint_c[0])
        self.hot: Bool = np.zeros(len(self.guard_c), np.bool_)

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
        if t.time_s % 3600.0 < dt_s:
            self.hot_hours += int(self.hot.sum())
            self.hours += len(self.hot)
            self.hot[:] = False


def live_through(year: SetpointYear, report: Report) -> YearOutcome:
    """One arm of a year."""
    site = year.site()
    weather = read_year(year.weather, year.days)
    span_s = len(weather.days) * DAY_S
    scenario = Scenario.ordinary(span_s / 3600.0, year.seed)
    plant = Plant(site, year.seed, scenario, weather=weather)  # type: ignore[arg-type]
    plant.step_max_s = PLANT_STEP_S
    meter, expected, saved = _Meter(plant), 0.0, 0.0
    simulation: Simulation | None = None
    if year.arm == NAME:
        forecasts = Persistence(horizons_s=(600.0, 3600.0))
        engine = Engine(site, [REGISTRY[NAME]()], [forecasts], {NAME: "act"})
        periods = Periods(STEP_S, STEP_S, STEP_S, STEP_S)
        simulation = Simulation(engine, plant, Sensors(site, year.seed, periods), dt_s=STEP_S)
    for step in range(round(span_s / STEP_S)):
        if simulation is not None:
            simulation.step()
        else:
            if year.arm == "greedy" and step % round(DECIDE_S / STEP_S) == 0:
                _greedy(plant)
            plant.step((), STEP_S)
        meter.count(STEP_S)
        if step % 100 == 0:
            report(step * STEP_S / span_s, f"{year.climate}, {year.arm}")
    if simulation is not None:
        memory = simulation.engine.memory[NAME]
        expected, saved = float(memory["expected_j"].sum()), float(memory["saved_j"].sum())
        if simulation.engine.suspended:
            raise RuntimeError(f"suspended: {simulation.engine.suspended}")
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
        hottest_c=meter.hottest_c,
        mean_c=meter.set_j / span_s,
        moves=meter.moves,
    )


def _greedy(plant: Plant) -> None:
    """As warm as guards allow, by the temperatures of now."""
    t, site = plant.truth, plant.site
    room_k = float((site.limits["gpu.temp_c"].guard - t.gpu_temp_c).min()) - GREEDY_K
    room_k = min(room_k, float((site.limits["rack.return_temp_c"].guard - t.rack_return_c).min()) - GREEDY_K)
    most_c = float(site.limits["rack.supply_temp_c"].guard.min()) - 0.5
    envelope = site.envelopes["cdu.supply_temp_target_c"]
    wanted_c = np.clip(t.cdu_supply_c + room_k, envelope.low, np.minimum(envelope.high, most_c))
    plant.cooling.target_c = np.minimum(wanted_c, plant.cooling.target_c + DECIDE_S * envelope.slew_per_s)
    plant.apply_set_points()
