"""A tower against Merkel's integral, which knows no effectiveness. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq

from tests.physics.test_plant_facility import cooled
from twin.physics import tower_ntu, tower_w_per_k
from twin.physics.tower import (
    DESIGN_WET_BULB_C,
    WATER_J_PER_KG_K,
    WATER_OVER_AIR,
    saturated_j_per_kg as enthalpy,
)

DESIGN = [(4.0, 5.6), (4.0, 10.0), (5.0, 13.0), (3.0, 7.0)]


def merkel(cold_c: float, range_k: float, wet_c: float, water_over_air: float = WATER_OVER_AIR) -> float:
    """The integral of c dT/(h_s - h_a) over the fill: KaV/L. Very large where the air would be saturated."""

    def room(temp_c: float) -> float:
        air = enthalpy(wet_c) + water_over_air * WATER_J_PER_KG_K * (temp_c - cold_c)
        return enthalpy(temp_c) - air

    if min(room(t) for t in np.linspace(cold_c, cold_c + range_k, 50)) <= 1.0:
        return 1e6
    return float(quad(lambda t: WATER_J_PER_KG_K / room(t), cold_c, cold_c + range_k)[0])


def merkel_approach_k(approach_k: float, range_k: float, wet_c: float) -> float:
    """The approach at another wet bulb of a tower with this one at its rating: the same heat and flows."""
    fill = merkel(DESIGN_WET_BULB_C + approach_k, range_k, DESIGN_WET_BULB_C)
    return float(brentq(lambda a: merkel(wet_c + a, range_k, wet_c) - fill, 0.1, 45.0))


def approach_k(ntu: float, range_k: float, wet_c: float, air_pu: float = 1.0) -> float:
    def missing(a: float) -> float:
        return tower_w_per_k(ntu, 1.0, 1.0, air_pu, (wet_c + a + range_k, wet_c + a, wet_c)) * a - range_k

    return float(brentq(missing, 0.1, 45.0))


@pytest.mark.parametrize(("design_k", "range_k"), DESIGN)
@pytest.mark.parametrize("wet_c", [-5.0, 5.0, 15.0, DESIGN_WET_BULB_C])
def test_the_approach_is_that_of_merkel(design_k: float, range_k: float, wet_c: float) -> None:
    ntu = tower_ntu(design_k, range_k)
    exact = merkel_approach_k(design_k, range_k, wet_c)
    assert approach_k(ntu, range_k, wet_c) == pytest.approx(exact, abs=0.1 + 0.04 * (exact - design_k))


def test_a_tower_rated_at_four_kelvin_has_eleven_in_the_cold() -> None:
    ntu = tower_ntu(4.0, 5.6)
    assert approach_k(ntu, 5.6, DESIGN_WET_BULB_C) == pytest.approx(4.0, abs=1e-6)
    assert approach_k(ntu, 5.6, 5.0) == pytest.approx(10.9, abs=0.2)
    assert approach_k(ntu, 5.6, 15.0, 0.7) > approach_k(ntu, 5.6, 15.0) + 1.0


def test_heat_is_finite_and_rises_with_the_air_at_any_water() -> None:
    ntu = tower_ntu(4.0, 10.0)
    for ends_c in ((40.0, 30.0, 24.0), (24.0, 24.0, 24.0), (10.0, 12.0, 20.0), (5.0, 1.0, -10.0)):
        found = [tower_w_per_k(ntu, 0.6, 1.0, a, ends_c) for a in np.linspace(1e-3, 1.0, 50).tolist()]
        assert np.isfinite(found).all()
        assert found[0] >= 0.0
        assert (np.diff(found) > 0.0).all()


@pytest.mark.parametrize(
    ("celsius", "enthalpy_j"), [(0.0, 9473.0), (15.0, 42113.0), (25.0, 76504.0), (35.0, 129455.0)]
)
def test_saturated_air_has_the_enthalpy_of_ashraes_table(celsius: float, enthalpy_j: float) -> None:
    assert enthalpy(celsius) == pytest.approx(enthalpy_j, rel=0.006)


@pytest.mark.parametrize("outdoor_c", [2.0, 14.0, 28.0])
def test_a_plants_tower_has_that_approach(outdoor_c: float) -> None:
    plant = cooled("tower", outdoor_c)
    f, p = plant.facility, plant.parameters
    f.aim_c = np.full_like(f.aim_c, -50.0)  # all its fans, whatever comes of it
    plant.disturbance.cdu_valve_stuck_pu[:] = 0.6
    plant.step()
    plant.settle(3600.0)
    found, range_k = float(f.cold_c[0] - f.air_c[0]), float(f.hot_c[0] - f.cold_c[0])
    water = (f.flow_lpm[:1] / p.loop_flow_lpm[:1] + 0.1) / 1.1
    rated_k = float(p.loop_heat_w[0] / f.nominal_w_per_k[0])
    fill = merkel(DESIGN_WET_BULB_C + float(p.loop_approach_k[0]), rated_k, DESIGN_WET_BULB_C)
    fill *= float(water[0]) ** -0.6
    ratio = WATER_OVER_AIR * float(water[0])
    wet_c = float(f.air_c[0])
    exact = brentq(lambda a: merkel(wet_c + a, range_k, wet_c, ratio) - fill, 0.1, 60.0)
    assert found == pytest.approx(exact, rel=0.07)
