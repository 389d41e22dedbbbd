"""Air that carries heat, and fans. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.physics import air


def test_a_kilowatt_at_ten_kelvin_takes_the_usual_air() -> None:
    # The rule of thumb 3.16 cfm per watt and degF of rise, 1 cfm = 4.719e-4 m3/s
    flow = 3.16 * 1000.0 / 18.0 * 4.719e-4
    assert air.air_rise_k(np.array([1000.0]), np.array([flow]))[0] == pytest.approx(10.0, rel=0.03)


@given(st.floats(0.0, 1e5), st.floats(1e-4, 100.0))
def test_rise_flow_and_rate_agree(power: float, flow: float) -> None:
    p, v = np.array([power]), np.array([flow])
    rise = air.air_rise_k(p, v)
    assert rise * air.heat_rate_w_per_k(v) == pytest.approx(p)
    if power > 1.0:
        assert air.flow_of_rise_m3_per_s(p, rise) == pytest.approx(v)


def test_without_air_nothing_carries_the_heat() -> None:
    assert air.air_rise_k(np.array([0.0, 5.0]), np.zeros(2)).tolist() == [0.0, np.inf]
    assert np.isnan(air.air_rise_k(np.array([np.nan]), np.zeros(1))).all()


@given(st.floats(0.05, 1.2), st.floats(0.1, 2.0))
def test_fans_follow_their_laws(speed: float, factor: float) -> None:
    n = np.array([speed])
    assert air.fan_power_w(factor * n, 50.0) == pytest.approx(factor**3 * air.fan_power_w(n, 50.0))
    assert air.fan_pressure_pa(factor * n, 50.0) == pytest.approx(factor**2 * air.fan_pressure_pa(n, 50.0))
    assert air.fan_flow_ratio(n, 0.0) == pytest.approx(n)


def test_draught_bounds_the_flow_and_full_speed_is_nominal() -> None:
    speeds = np.linspace(0.0, 1.2, 50)
    flow = air.fan_flow_ratio(speeds)
    assert flow[0] == pytest.approx(air.DRAUGHT_PU, rel=2e-3)
    assert (np.diff(flow) > 0.0).all()
    assert air.fan_flow_ratio(np.ones(1))[0] == 1.0


def test_a_chassis_turns_its_fans_up_with_the_temperature() -> None:
    asked = air.fan_speed_pu(np.array([10.0, 25.0, 30.0, 35.0, 60.0, np.nan]), 25.0, 35.0, 0.3)
    assert asked[:5].tolist() == pytest.approx([0.3, 0.3, 0.65, 1.0, 1.0])
    assert np.isnan(asked[5])


def test_recirculation_solves_its_own_mixing_law() -> None:
    supply, rise, share = np.array([20.0]), np.array([12.0]), 0.15
    inlet = air.recirculated_inlet_c(supply, rise, share)
    assert inlet == pytest.approx((1 - share) * supply + share * (inlet + rise))
    assert air.recirculated_inlet_c(supply, rise, 0.0) == supply
