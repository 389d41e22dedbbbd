"""Pumps against their affinity laws and their own inverses. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.physics import pump

Q0, H0, CURVE = np.array([500.0]), np.array([300e3]), np.array([0.3])


def test_a_curve_goes_through_its_nominal_point_and_its_shut_off_head() -> None:
    flow, head = np.array([250.0, 100.0]), np.array([155e3, 90e3])
    head0, curve = pump.curve_of(flow, head, 1.3, 0.75)
    assert pump.head_pa(np.full(2, 0.75), flow, head0, curve) == pytest.approx(head, rel=1e-14)
    assert pump.head_pa(np.full(2, 0.75), np.zeros(2), head0, curve) == pytest.approx(1.3 * head, rel=1e-14)


@given(st.floats(0.05, 1.5), st.floats(-800.0, 800.0), st.floats(0.1, 2.0))
def test_affinity(speed: float, flow: float, factor: float) -> None:
    n, q = np.array([speed]), np.array([flow])
    assert pump.head_pa(factor * n, factor * q, H0, CURVE) == pytest.approx(
        factor**2 * pump.head_pa(n, q, H0, CURVE), rel=1e-9, abs=1e-6
    )
    assert pump.power_w(factor * n, factor * q / Q0, 900.0) == pytest.approx(
        factor**3 * pump.power_w(n, q / Q0, 900.0), rel=1e-9
    )


@given(st.floats(0.0, 1.2), st.floats(-800.0, 800.0))
def test_flow_and_speed_are_inverses_of_the_head(speed: float, flow: float) -> None:
    n, q = np.array([speed]), np.array([flow])
    head = pump.head_pa(n, q, H0, CURVE)
    assert pump.flow_lpm(n, head, H0, CURVE) == pytest.approx(q, abs=1e-3)
    assert pump.speed_of(q, head, H0, CURVE) == pytest.approx(n, abs=1e-7)


def test_a_stopped_pump_resists_and_a_standing_liquid_costs_no_hydraulic_power() -> None:
    still = np.zeros(1)
    assert pump.head_pa(still, np.array([100.0]), H0, CURVE)[0] < 0.0
    assert pump.head_pa(still, np.array([-100.0]), H0, CURVE)[0] > 0.0
    assert pump.power_w(still, still, 900.0)[0] == 0.0
    assert pump.hydraulic_w(still, H0)[0] == 0.0
    assert pump.speed_of(still, np.array([-5.0]), H0, CURVE)[0] == 0.0


def test_powers() -> None:
    # 600 l/min is 0.01 m3/s; against 200 kPa that is 2 kW
    assert pump.hydraulic_w(np.array([600.0]), np.array([200e3]))[0] == pytest.approx(2000.0)
    one = np.ones(1)
    assert pump.power_w(one, one, 900.0)[0] == 900.0
    assert pump.power_w(one, np.zeros(1), 900.0)[0] == 450.0
    flows = np.linspace(0.0, 1.5, 20)
    assert (np.diff(pump.power_w(np.full(20, 0.8), flows, 900.0)) > 0.0).all()


def test_an_unknown_input_gives_an_unknown_answer() -> None:
    nan, one = np.array([np.nan]), np.ones(1)
    for found in (
        pump.head_pa(nan, one, H0, CURVE),
        pump.flow_lpm(one, nan, H0, CURVE),
        pump.speed_of(nan, one, H0, CURVE),
        pump.power_w(one, nan, 900.0),
    ):
        assert np.isnan(found).all()
