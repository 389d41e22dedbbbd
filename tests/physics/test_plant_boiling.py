"""Coolant that stands in a plate boils: it holds the GPU at one temperature until the plate is dry."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.physics import COOLANTS, boiling_c
from twin.plant import Plant
from twin.plant.compute import CRITICAL_SUPERHEAT_K, CRITICAL_W, EVAPORATION_J_PER_KG, PLATE_KG

WATER = COOLANTS["water"]


def stagnant(shutdown_c: float, gauge_pa: float | None = None, load: float = 0.9) -> Plant:
    """Without flow, in a circuit of this pressure, with GPUs that shut down at this temperature."""
    plant = Plant(site_of(two_racks()), seed=1, spread=0.0)
    p, t = plant.parameters, plant.truth
    p.gpu_shutdown_c[:], p.gpu_slowdown_c[:] = shutdown_c, shutdown_c
    plant.compute.shutdown_least = plant.compute.slowdown_least = shutdown_c
    t.gpu_sm_pu[:], t.gpu_tensor_pu[:] = load, load
    plant.settle()
    plant.disturbance.cdu_pump_ok[:] = False
    if gauge_pa is not None:
        plant.hydraulics.expanded[:] = (150_000.0 + 101_325.0) / (gauge_pa + 101_325.0)
    return plant


def until(plant: Plant, done: str, limit_s: int = 600) -> int:
    for second in range(limit_s):
        plant.step()
        assert max(plant.balances().values()) < 1e-6
        c = plant.compute
        if (c.dry(plant.parameters) if done == "dry" else c.burnt).all():
            return second
    return limit_s


@pytest.mark.parametrize(("gauge_pa", "point_c"), [(0.0, 100.0), (98_675.0, 120.2), (150_000.0, 127.5)])
def test_water_boils_where_steam_tables_say(gauge_pa: float, point_c: float) -> None:
    assert boiling_c(WATER, np.array([gauge_pa]))[0] == pytest.approx(point_c, abs=0.7)


def test_a_gpu_on_a_boiling_plate_holds_its_temperature_until_the_plate_is_dry() -> None:
    plant = stagnant(400.0, 0.0)
    p, t, c = plant.parameters, plant.truth, plant.compute
    while not c.boiled_j[0] > 0.0:
        plant.step()
    plant.step()
    power_w = float(t.gpu_power_w[0])
    superheat_k = CRITICAL_SUPERHEAT_K * (power_w / CRITICAL_W) ** (1 / 3)
    holds_c = 102.3 + superheat_k + power_w * float(p.gpu_conduction_k_per_w[0])
    assert t.gpu_temp_c[0] == pytest.approx(holds_c, abs=0.2)
    # The boiling heat is the heat that the GPU gives off less what conducts into the coolant that stands
    boiled_j, expected_j = float(c.boiled_j[0]), float(c.boiled_j[0])
    while not c.dry(p)[0]:
        plant.step()
        aside_w = (t.gpu_temp_c[0] - plant.cooling.reference_c[0]) / c.resistance[0]
        expected_j += t.gpu_power_w[0] - aside_w
        assert t.gpu_temp_c[0] == pytest.approx(holds_c, abs=1.0)
    assert expected_j - boiled_j == pytest.approx(PLATE_KG * EVAPORATION_J_PER_KG - boiled_j, rel=0.05)
    held_c = float(t.gpu_temp_c[0])
    for _ in range(5):
        plant.step()
    assert t.gpu_temp_c[0] > held_c + 10.0, "dry: it warms up again"


def test_more_pressure_boils_later() -> None:
    temps = []
    for gauge_pa in (0.0, 50_000.0, 150_000.0):
        plant = stagnant(400.0, gauge_pa)
        while not plant.compute.any_boiled:
            plant.step()
        plant.step()
        temps.append(float(plant.truth.gpu_temp_c[0]))
    assert temps[0] + 5.0 < temps[1] < temps[2] - 5.0


@pytest.mark.parametrize("gauge_pa", [0.0, None])
def test_a_gpu_that_shuts_down_at_95_degrees_does_so_before_anything_boils(gauge_pa: float | None) -> None:
    plant = stagnant(95.0, gauge_pa)
    assert until(plant, "burnt") < 60
    assert not plant.compute.any_boiled


def test_boiling_gives_time_where_the_shutdown_lies_above_it() -> None:
    plant = stagnant(180.0, 0.0)
    wet_s = until(plant, "burnt")
    dry = stagnant(180.0, 0.0)
    dry.compute.boils_least = np.inf
    assert wet_s > until(dry, "burnt") + 20


def test_beyond_the_critical_flux_a_plate_is_dry_at_once() -> None:
    plant = stagnant(400.0, 0.0)
    plant.compute.boils_least = -np.inf
    plant.truth.gpu_temp_c[0], plant.truth.gpu_power_w[0] = 250.0, CRITICAL_W + 1.0
    plant.compute._boil(plant.truth, plant.parameters, 1.0)
    assert plant.compute.dry(plant.parameters).tolist() == [True] + [False] * (
        len(plant.truth.gpu_temp_c) - 1
    )


def test_coolant_that_flows_again_fills_the_plates() -> None:
    plant = stagnant(400.0, 0.0)
    until(plant, "dry")
    plant.step()
    resistance = float(plant.compute.resistance[0])
    plant.disturbance.cdu_pump_ok[:] = True
    for _ in range(60):
        plant.step()
    assert not plant.compute.any_boiled
    assert plant.compute.resistance[0] < 0.1 * resistance
    assert plant.truth.gpu_temp_c.max() < 70.0
