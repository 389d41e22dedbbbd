"""The rules that `cooling_setpoint` is measured against."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.setpoint_year import Measured, room_k
from tests.unit.test_cooling_setpoint import lab, plant_of


@pytest.mark.parametrize("off_k", [0.0, 0.4])
def test_the_greedy_rule_by_readings_keeps_further_off_where_it_reads_further_above(off_k: float) -> None:
    """A thousandth of a normal error lies beyond 3.09 of its sigma."""
    plant = plant_of(lab(), 18.0)
    rule = Measured(1)
    for _ in range(27):
        rule.over_k2 = 0.05**2 + off_k**2
        rule.step(plant, 200.0)
        plant.settle(200.0)
    guard_c = float(plant.site.limits["rack.supply_temp_c"].guard.min())
    expected_c = guard_c - 3.09 * float(np.sqrt(rule.over_k2))
    assert float(plant.truth.cdu_setpoint_c[0]) == pytest.approx(expected_c, abs=0.05)
    assert room_k(plant) == pytest.approx(guard_c - 0.5 - float(plant.truth.cdu_supply_c[0]), abs=0.05)
