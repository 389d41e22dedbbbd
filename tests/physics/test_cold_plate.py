"""Resistance against flow, and exact steps of first-order storage, with scipy as rival.

May import `twin.physics`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from twin.physics import air_resistance_k_per_w, cold_plate, resistance_k_per_w

R0 = np.array([0.03])


def resistance(flow: float, share: float = 0.6, exponent: float = -0.7) -> float:
    return float(resistance_k_per_w(R0, np.array([flow]), share, exponent)[0])


@given(st.floats(0.1, 3.0), st.floats(0.0, 1.0), st.floats(-0.8, -0.5))
def test_the_law_of_the_field_holds_down_to_a_tenth_of_the_flow(flow: float, share: float, e: float) -> None:
    # Bounding it at no flow bends it by at most 0.4 e (0.02/0.1)^2
    expected = 0.03 * (1 - share) + 0.03 * share * flow**e
    assert resistance(flow, share, e) == pytest.approx(expected, rel=0.02)
    assert resistance(1.0, share, e) == pytest.approx(0.03, rel=1e-15)


def test_resistance_falls_strictly_with_the_flow_and_is_bounded_without() -> None:
    flow = np.linspace(0.0, 3.0, 400)
    found = resistance_k_per_w(np.full(400, 0.03), flow, 0.6, -0.7)
    assert (np.diff(found) < 0.0).all()
    assert found[0] == pytest.approx(0.03 * (0.4 + 0.6 * 0.02**-0.7), rel=1e-3)
    assert np.isfinite(found).all()
    assert resistance(-0.5) == resistance(0.5)
    assert np.isnan(resistance(np.nan))


def test_a_heat_sink_without_fans_still_has_natural_convection() -> None:
    found = air_resistance_k_per_w(np.full(4, 0.07), np.array([0.0, 0.3, 1.0, np.nan]))
    assert 0.2 < found[0] < 0.3
    assert found[2] == pytest.approx(0.07, rel=1e-15)
    assert found[0] > found[1] > found[2]
    assert np.isnan(found[3])


levels = st.floats(-50.0, 150.0)


def test_constants_are_in_the_range_of_the_field() -> None:
    assert 0.0 < cold_plate.STAGNANT_FLOW_PU < 0.1
    # 1400 W through the bounded resistance: far beyond any limit, so a plate without flow always trips
    assert 1400.0 * resistance(0.0) > 200.0
