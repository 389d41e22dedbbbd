"""Water of a plant beside its heat: condensation, refill, expansion, check valves, uneven manifolds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.physics import AIR_PA
from twin.plant import Plant
from twin.plant.hydraulics import (
    DRIED_LPM,
    EXPANSION_PER_K,
    FILL_LPM,
    FILL_OFF_PU,
    FILL_STOCK_L,
    RACK_WET_L,
    STATIC_PA,
    SWEAT_LPM_PER_K,
)


def plant_of(racks: str = "r[1-2]", spread: float = 0.0) -> Plant:
    return Plant(site_of(two_racks(racks=racks)), seed=1, spread=spread)


@pytest.mark.long
def test_what_is_colder_than_the_dew_point_gets_wet_when_the_film_says() -> None:
    plant = plant_of()
    t, p = plant.truth, plant.parameters
    p.hall_moisture_c[:] = float(t.rack_supply_c[0]) + 10.0
    wet_s = 60.0 * RACK_WET_L / (10.0 * SWEAT_LPM_PER_K - DRIED_LPM)
    for _ in range(round(0.95 * wet_s / 2.0)):
        plant.step(dt_s=2.0)
    assert not t.rack_leak.any()
    for _ in range(round(0.1 * wet_s / 2.0)):
        plant.step(dt_s=2.0)
    assert t.rack_leak.all()
    assert not t.node_leak.any(), "manifolds and hoses, not trays"
    assert t.cdu_leaked_l.sum() == 0.0, "it is the air's water"
    p.hall_moisture_c[:] = 10.0
    for _ in range(60):
        plant.step(dt_s=120.0)
    assert not t.rack_leak.any(), "it dries"


@pytest.mark.long
def test_a_little_below_the_dew_point_what_condenses_dries() -> None:
    plant = plant_of()
    plant.parameters.hall_moisture_c[:] = (
        float(plant.truth.rack_supply_c[0]) + 0.8 * DRIED_LPM / SWEAT_LPM_PER_K
    )
    for _ in range(200):
        plant.step(dt_s=60.0)
    assert not plant.truth.rack_leak.any()


def test_a_set_point_follows_the_dew_point_and_nothing_gets_wet() -> None:
    plant = plant_of()
    plant.parameters.hall_moisture_c[:] = float(plant.truth.rack_supply_c[0]) + 3.0
    plant.apply_set_points()
    for _ in range(1200):
        plant.step(dt_s=2.0)
    assert plant.truth.rack_supply_c.min() > plant.parameters.hall_moisture_c[0]
    assert not plant.truth.rack_leak.any()


@pytest.mark.long
def test_a_loop_is_refilled_to_its_mark_and_no_further_than_the_stock_lasts() -> None:
    plant = plant_of()
    t, p = plant.truth, plant.parameters
    full_l, reserve_l = float(t.cdu_coolant_l[0]), float(p.cdu_reserve_l[0])
    plant.disturbance.cdu_leak_lpm[0] = 20.0
    while not t.cdu_filling[0]:
        plant.step()
    plant.disturbance.cdu_leak_lpm[0] = 0.0
    plant.step()
    missing_l, seconds = full_l - float(t.cdu_coolant_l[0]), 1
    while t.cdu_filling[0]:
        plant.step()
        seconds += 1
        assert plant.balances()["mass_coolant"] < 1e-6
    wanted_l = missing_l - (1.0 - FILL_OFF_PU) * reserve_l
    assert seconds == pytest.approx(60.0 * wanted_l / FILL_LPM, abs=2.0)
    assert full_l - t.cdu_coolant_l[0] == pytest.approx((1.0 - FILL_OFF_PU) * reserve_l, abs=FILL_LPM / 60.0)
    plant.disturbance.cdu_leak_lpm[0] = 3.0
    for _ in range(1800):
        plant.step(dt_s=2.0)
    assert t.cdu_filled_l[0] == pytest.approx(FILL_STOCK_L)
    assert not t.cdu_filling[0]


@pytest.mark.parametrize("warmer_k", [-20.0, 10.0, 20.0])
def test_coolant_that_warms_presses_the_gas_of_its_vessel(warmer_k: float) -> None:
    """p V stays: the gas gives way by what the coolant expands; nothing leaves and nothing is filled."""
    plant = plant_of()
    t, p, h = plant.truth, plant.parameters, plant.hydraulics
    at_c = p.cdu_supply_c + 5.0 + warmer_k
    h.warm(t, p, at_c)
    swollen = EXPANSION_PER_K * warmer_k * p.cdu_volume_l[0] / p.cdu_reserve_l[0]
    assert t.cdu_return_pa[0] == pytest.approx((STATIC_PA + AIR_PA) / (1.0 - swollen) - AIR_PA)
    assert t.cdu_supply_pa[0] - t.cdu_return_pa[0] == pytest.approx(t.cdu_drop_pa[0])
    assert t.cdu_leaked_l[0] == t.cdu_filled_l[0] == 0.0


def test_nothing_runs_back_through_a_pump_that_stands() -> None:
    """Its check valve: the other pump works on the circuit alone, H0 n^2 = (a + k) Q^2."""
    plant = plant_of()
    t, p, h = plant.truth, plant.parameters, plant.hydraulics
    plant.disturbance.cdu_pump_ok[0, 0] = False
    for _ in range(60):
        plant.step()
    circuit = (
        1.0 / h.network.fold(h.branch, p.rack_segment).conductance[0] ** 2 + p.cdu_inner[0] + h.filter[0]
    )
    lpm = np.sqrt(p.cdu_head0_pa[0, 1] / (p.cdu_curve[0, 1] + circuit)) * h.speed[0]
    assert t.cdu_flow_lpm[0] == pytest.approx(lpm, rel=1e-6)
    assert t.rack_flow_lpm.sum() == pytest.approx(lpm, rel=1e-6)


def test_racks_far_along_a_manifold_get_less_and_are_warmer() -> None:
    plant = plant_of("r[1-8]")
    t = plant.truth
    assert (np.diff(t.rack_flow_lpm) < 0.0).all()
    assert (np.diff(t.rack_return_c) > 0.0).all()
    hottest = np.maximum.reduceat(t.gpu_temp_c, np.arange(0, len(t.gpu_temp_c), len(t.gpu_temp_c) // 8))
    assert (np.diff(hottest) > 0.0).all()
