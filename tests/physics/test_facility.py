"""Heat rejection against closed forms, a fixed point and usual figures. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest

from twin.physics import chilled_max_w, chiller_work_w, evaporated_l_per_s, makeup_l_per_s
from twin.physics.facility import CONDENSING_MAX_C, COP_MAX, COP_MIN, EVAPORATION_L_PER_KWH, cop

NOMINAL_W = 1e6


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_the_work_of_a_chiller_is_at_its_fixed_point() -> None:
    work, air, conductance = 0.0, 38.0, NOMINAL_W / 8.0
    for _ in range(50):
        sink = air + (NOMINAL_W + work) / conductance
        work = float(9e5 / cop(array(22.0), array(sink))[0])
    found = chiller_work_w(9e5, 22.0, air + NOMINAL_W / conductance, conductance)
    assert found == pytest.approx(work, rel=1e-9)


def test_a_chiller_at_its_limit_has_its_sink_there() -> None:
    conductance = np.linspace(1e3, 1e5, 20)
    most = chilled_max_w(22.0, 45.0, conductance)
    work = chiller_work_w(most, 22.0, 45.0 + most / conductance, conductance)
    assert 45.0 + (most + work) / conductance == pytest.approx(np.full(20, CONDENSING_MAX_C))
    assert chilled_max_w(22.0, CONDENSING_MAX_C + 1.0, 1e5) == 0.0
    # never beyond the performance that is meant
    assert chiller_work_w(1e6, 22.0, 300.0, 1e3) == pytest.approx(1e6 / COP_MIN)


def test_performance_of_a_chiller_is_that_of_usual_machines() -> None:
    # chilled water at 7 degC against 30 degC condenser water: water-cooled machines reach 4-6
    assert 4 < cop(array(7.0), array(30.0))[0] < 6
    assert 8 < cop(array(22.0), array(30.0))[0] < 12
    sinks = np.linspace(-10, 60, 100)
    assert (np.diff(cop(np.full(100, 18.0), sinks)) <= 0).all()
    assert COP_MIN <= cop(array(18.0), array(200.0))[0] <= cop(array(18.0), array(-50.0))[0] <= COP_MAX


def test_a_tower_drinks_what_towers_drink() -> None:
    # WUE of wet sites is published at 1.5-2 l/kWh, drains included
    assert 1.2 < EVAPORATION_L_PER_KWH < 1.5
    per_kwh = makeup_l_per_s(evaporated_l_per_s(array(1e6))) * 3600 / 1000
    assert 1.5 < per_kwh[0] < 2.0
    assert evaporated_l_per_s(array(-1.0, 0.0)).tolist() == [0.0, 0.0]
    assert (np.diff(evaporated_l_per_s(np.linspace(0.0, 1.5e6, 100))) > 0).all()
