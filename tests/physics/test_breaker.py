"""The breaker against closed forms, Runge-Kutta and the bands of UL 489. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.physics import CONTINUOUS_PU, HOLD_PU, MAGNETIC_PU, TAU_S, step, theta_steady


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def runge_kutta(theta: float, load: float, time_s: float, steps: int) -> float:
    def slope(x: float) -> float:
        return ((load / HOLD_PU) ** 2 - x) / TAU_S

    dt = time_s / steps
    for _ in range(steps):
        k1 = slope(theta)
        k2 = slope(theta + dt / 2 * k1)
        k3 = slope(theta + dt / 2 * k2)
        k4 = slope(theta + dt * k3)
        theta += dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return theta


def seconds_to_trip(theta: float, load: float) -> float:
    """tau ln((a - theta)/(a - 1)): when a constant load trips it by heat; inf = never."""
    aim = (load / HOLD_PU) ** 2
    return TAU_S * float(np.log((aim - theta) / (aim - 1.0))) if aim > 1.0 else np.inf


loads = st.floats(0, 6.9)


@settings(max_examples=100)
@given(st.floats(0, 1), loads, st.floats(0.1, 3600))
def test_a_step_is_exact_and_may_be_halved(theta: float, load: float, dt_s: float) -> None:
    whole = step(array(theta), array(load), dt_s)
    halves = step(step(array(theta), array(load), dt_s / 2), array(load), dt_s / 2)
    assert halves == pytest.approx(whole, rel=1e-12, abs=1e-14 * max(1.0, load**2))  # it tends to load**2
    assert whole == pytest.approx(runge_kutta(theta, load, dt_s, 200), rel=1e-6, abs=1e-9)


@settings(max_examples=200)
@given(st.floats(0, 0.99), st.floats(HOLD_PU + 0.01, MAGNETIC_PU - 0.01))
def test_the_time_to_trip_is_when_theta_reaches_one(theta: float, load: float) -> None:
    assert step(array(theta), array(load), seconds_to_trip(theta, load)) == pytest.approx(1.0, rel=1e-9)


def test_ul_489_bands() -> None:
    cold = [seconds_to_trip(0.0, load) for load in (CONTINUOUS_PU, 1.0, 1.35, 2.0)]
    assert np.isinf(cold[:2]).all()
    assert cold[2] < 3600
    assert 120 <= cold[3] <= 480
    # it has carried its continuous load for long: sooner, and still not at once
    warm = seconds_to_trip(float(theta_steady(array(CONTINUOUS_PU))[0]), 2.0)
    assert 60 <= warm < cold[3]


def test_against_scipy() -> None:
    integrate = pytest.importorskip("scipy.integrate", reason="scipy is not installed")

    def slope(t: float, y: np.ndarray) -> np.ndarray:
        load = 1.6 if t < 300 else 0.7
        return ((load / HOLD_PU) ** 2 - y) / TAU_S

    rival = integrate.solve_ivp(slope, (0, 900), [0.2], rtol=1e-9, atol=1e-12, max_step=5.0).y[0, -1]
    theta = array(0.2)
    for load, dt_s in ((1.6, 300.0), (0.7, 600.0)):
        theta = step(theta, array(load), dt_s)
    assert theta == pytest.approx(rival, rel=1e-5)
