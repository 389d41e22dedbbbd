"""Savings: what the BMS would hold by itself, and what cold coolant and slow pumps save on a cold day, as
expected and as a plant of hidden parameters has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.cooling_setpoint.policy import STOOD_S, CoolingSetpoint
from tests.unit.test_cooling_setpoint import NAME, lab, plant_of, simulated, total_w, wanted
from twin.plant import Plant
from twin.simulation import Simulation
from twin.telemetry import GOOD


@pytest.mark.parametrize(
    ("base_c", "requested_c", "before_c", "now_c", "expected_c"),
    [
        (30.0, 31.0, 31.0, 31.0, 30.0),  # of a lease that lapsed, however small its step was
        (30.0, 30.2, 30.2, 30.2, 30.0),
        (30.0, 31.0, 30.5, 30.5, 30.5),  # people or the BMS moved it since
        (30.0, np.nan, 31.0, 31.0, 31.0),
        (30.0, 25.0, 25.0, 25.0, 30.0),  # colder, and left as well
        (30.0, 25.0, 25.0, 29.0, 30.0),  # on its way back
        (30.0, 25.0, np.nan, 29.0, 30.0),
        (np.nan, 32.5, np.nan, 32.5, 32.5),
        (np.nan, 35.0, np.nan, 35.0, 32.0),
    ],
)
def test_neither_a_request_that_was_left_nor_the_way_back_from_it_is_the_bms_s_own_set_point(
    base_c: float, requested_c: float, before_c: float, now_c: float, expected_c: float
) -> None:
    value = {"cdu.supply_temp_request_c": requested_c, "cdu.supply_temp_setpoint_c": now_c}
    none = np.zeros(0)
    view: Any = SimpleNamespace(
        value=lambda key: np.array([value.get(key, np.nan)]) if key.startswith("cdu.") else none,
        believed=lambda key: np.array([value.get(key, np.nan)]) if key.startswith("cdu.") else none,
        quality=lambda key: np.array([GOOD]) if key.startswith("cdu.") else none,
        lately_good=lambda key: np.array([True]),
        envelope=lambda control: SimpleNamespace(safe=np.array([32.0])),
        site=SimpleNamespace(cdu_of_rack=np.zeros(0, np.int32)),
    )
    out = {"want_c": np.array([np.nan]), "base_c": np.array([base_c])}
    out |= {"set_c": np.array([before_c]), "stood_s": np.zeros(1)}
    CoolingSetpoint._note_base(view, out, np.zeros(1, np.int32), np.full(1, STOOD_S))
    assert out["base_c"].tolist() == [expected_c]


@pytest.fixture(scope="module")
def cold_day() -> Simulation:
    sim = simulated(plant_of(lab(), 5.0))
    sim.run(5 * 3600.0)
    assert sim.engine.suspended == {}
    return sim


def settled_w(plant: Plant) -> float:
    """All that racks and cooling draw after half an hour."""
    plant.settle(1800.0)
    return total_w(plant)


def test_what_is_expected_on_a_cold_day_is_what_comes(cold_day: Simulation) -> None:
    memory, plant = cold_day.engine.memory[NAME], cold_day.plant.fork()
    assert wanted(cold_day) < 30.0, "leakage outweighs fans"
    assert memory["want_pa"][0] < 0.7 * memory["own_pa"][0]
    as_asked_w = settled_w(plant)
    plant.hydraulics.ask(plant.truth, plant.parameters, np.full(1, np.nan))
    own_pressure_w = settled_w(plant)
    plant.cooling.target_c[:] = 32.0
    plant.apply_set_points()
    own_w = settled_w(plant)
    assert memory["pump_expected_w"][0] == pytest.approx(own_pressure_w - as_asked_w, rel=0.1)
    assert memory["expected_w"][0] == pytest.approx(own_w - own_pressure_w, rel=0.15)
