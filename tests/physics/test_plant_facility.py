"""A plant's heat rejection: a chiller needs its cooler's air, drains count, and water carries heat."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.physics import COOLANTS, FAN_RATED_W_PER_W, heat_w
from twin.physics.facility import CONDENSING_MAX_C, CYCLES, EVAPORATION_L_PER_KWH, cop
from twin.plant import Plant
from twin.plant.parameters import BYPASS_PU
from twin.plant.weather import Weather


def cooled(cooling: str, outdoor_c: float, seconds: int = 0, fans: float = 1.0) -> Plant:
    """Two busy racks on one loop, with this share of the air left for so long."""
    tree = two_racks(loops=[{"name": "l1", "cooling": cooling}])
    tree["halls"][0]["cdus"][0]["loop"] = "l1"
    plant = Plant(site_of(tree), 3, weather=Weather(mean_c=outdoor_c, swing_k=0.0))
    plant.truth.gpu_sm_pu[:], plant.truth.gpu_tensor_pu[:] = 0.9, 0.7
    plant.settle()
    if fans < 1.0:
        plant.disturbance.loop_fan_factor[0] = fans
    for _ in range(seconds // 2):
        plant.step(dt_s=2.0)
        assert max(plant.balances().values()) < 1e-6
    return plant


@pytest.mark.long
def test_with_less_air_a_chiller_works_harder_and_then_its_supply_rises() -> None:
    plants = [cooled("chiller", 45.0, 1800, fans) for fans in (1.0, 0.6, 0.1)]
    works, sinks = ([float(getattr(p.facility, name)[0]) for p in plants] for name in ("work_w", "sink_c"))
    supplies = [float(p.truth.loop_supply_c[0]) for p in plants]
    assert works[1] > 1.05 * works[0] > 0.0
    assert sinks[0] + 2.0 < sinks[1] < CONDENSING_MAX_C
    assert supplies[1] == pytest.approx(supplies[0], abs=0.5)
    assert plants[1].truth.loop_power_w[0] > plants[0].truth.loop_power_w[0]
    # The remaining air cannot carry the heat
    assert supplies[2] > supplies[0] + 5.0


@pytest.mark.parametrize("outdoor_c", [30.0, 45.0])
def test_heat_and_work_of_a_chiller_leave_by_the_air(outdoor_c: float) -> None:
    plant = cooled("chiller", outdoor_c, 20, 0.7)
    f, p = plant.facility, plant.parameters
    assert f.work_w[0] > 0.0
    conductance = p.loop_heat_w[:1] / p.loop_approach_k[:1] * (0.7 * f.fan_pu[:1]) ** 0.8
    carried = float(conductance[0] * (f.sink_c[0] - f.air_c[0]))
    assert carried == pytest.approx(float(f.rejected_w[0] + f.work_w[0]), rel=1e-9)
    if outdoor_c > f.cold_c[0] + 5.0:  # dampers shut: all of it went through the chiller
        assert f.rejected_w[0] / f.work_w[0] == pytest.approx(cop(f.cold_c, f.sink_c)[0], rel=1e-9)


def test_a_tower_draws_what_evaporates_and_what_is_drained() -> None:
    plant = cooled("tower", 20.0)
    evaporated = 0.0
    for _ in range(60):
        plant.step()
        evaporated += float(plant.truth.loop_rejected_w[0]) / 3.6e6 * EVAPORATION_L_PER_KWH
    drawn = float(plant.truth.loop_water_l[0])
    assert drawn == pytest.approx(evaporated * CYCLES / (CYCLES - 1.0), rel=1e-9)
    figures = plant.figures()
    assert figures["water_l"] == pytest.approx(drawn)
    assert 1.2 < figures["wue_l_per_kwh"] < 2.0


def test_the_facility_side_is_water() -> None:
    plant = cooled("dry_cooler", 20.0, 10)
    t, p = plant.truth, plant.parameters
    said = heat_w(COOLANTS["water"], t.cdu_primary_flow_lpm, t.cdu_primary_supply_c, t.cdu_primary_return_c)
    assert np.abs(said / t.cdu_heat_w - 1.0).max() < 0.005
    passed = t.loop_flow_lpm + BYPASS_PU * p.loop_flow_lpm[:1]
    said = heat_w(COOLANTS["water"], passed, t.loop_supply_c, t.loop_return_c)
    assert said / t.loop_rejected_w == pytest.approx(1.0, abs=0.01)


def test_pumps_draw_what_pumps_of_such_sites_draw() -> None:
    plant = cooled("tower", 20.0)
    t, p = plant.truth, plant.parameters
    # Frontier's CDUs draw 0.8 % of its peak power, those of usual sites 0.7-1.3 % of their heat
    nominal = t.cdu_flow_lpm / p.cdu_flow_lpm
    assert 0.008 < (t.cdu_pump_power_w / p.loop_heat_w[:1] / nominal)[0] < 0.013
    # 41 W/gpm of water for both circuits of a tower, 22 for a loop alone: ASHRAE 90.1-2019 G3.1.3
    gpm = (t.loop_flow_lpm[0] + BYPASS_PU * p.loop_flow_lpm[0]) / 3.785
    fans_w = FAN_RATED_W_PER_W * p.loop_heat_w[0] * t.loop_fan_pu[0] ** 3
    assert (t.loop_power_w[0] - fans_w) / gpm == pytest.approx(41.0, rel=0.01)


def test_a_plant_has_the_cooling_that_its_site_states() -> None:
    """Of two loops alike, one states a tower of Frontier's kind: pumps and fans of 3 and 4 % of its heat."""
    tree = two_racks(loops=[{"name": "l1", "cooling": "tower"}])
    tree["halls"][0]["cdus"][0]["loop"] = "l1"
    usual = Plant(site_of(tree), 3, spread=0.0)
    heat_w = float(usual.parameters.loop_heat_w[0])
    tree["loops"][0] |= {"approach_k": 6.0, "pumps_w": 0.03 * heat_w, "fans_w": 0.04 * heat_w}
    stated = Plant(site_of(tree), 3, spread=0.0)
    p, t = stated.parameters, stated.truth
    assert p.loop_approach_k[0] == 1.5 * usual.parameters.loop_approach_k[0] == 6.0
    passed = (t.loop_flow_lpm[0] / p.loop_flow_lpm[0] + BYPASS_PU) / (1.0 + BYPASS_PU)
    expected_w = 0.03 * heat_w * passed + 0.04 * heat_w * t.loop_fan_pu[0] ** 3
    assert t.loop_power_w[0] == pytest.approx(expected_w, rel=1e-6)
    assert t.loop_power_w[0] > 2.0 * usual.truth.loop_power_w[0]
