"""PI controllers against a continuous loop, and at their limits. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from twin.physics.control import PI


def one(output: float = 0.0, gain: float = 0.0, rate: float = 0.0, **limits: float) -> PI:
    return PI.of(np.array([output]), gain, rate, **limits)


def err(value: float) -> np.ndarray:
    return np.array([value])


def test_proportional_and_integral_parts() -> None:
    loop = one(0.2, 0.1, 0.05)
    assert loop.step(err(1.0), 2.0)[0] == pytest.approx(0.2 + 0.1 + 0.05 * 2.0)
    assert loop.step(err(0.0), 2.0)[0] == pytest.approx(0.3)


def closed_loop(dt: float, end: float) -> float:
    """dx/dt = (2 u - x)/5 steered to 1 from 0, by exact steps of the plant."""
    loop, x = one(0.0, 0.4, 0.15, low=-10.0, high=10.0), 0.0
    keep = np.exp(-dt / 5.0)
    for _ in range(round(end / dt)):
        u = float(loop.step(err(1.0 - x), dt)[0])
        x = 2 * u + (x - 2 * u) * keep
    return x


def test_halving_the_step_halves_the_distance_to_the_continuous_loop() -> None:
    def rates(t: float, y: np.ndarray) -> list[float]:
        e = 1.0 - y[0]
        return [(2 * (0.4 * e + y[1]) - y[0]) / 5.0, 0.15 * e]

    exact = solve_ivp(rates, (0.0, 6.0), [0.0, 0.0], rtol=1e-10, atol=1e-12).y[0, -1]
    errors = [abs(closed_loop(dt, 6.0) - exact) for dt in (0.5, 0.25, 0.125, 0.0625)]
    orders = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (np.abs(orders - 1.0) < 0.25).all(), (errors, orders)


def test_it_comes_to_rest_without_error() -> None:
    assert closed_loop(1.0, 200.0) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_long_time_at_a_limit_is_not_stored(sign: float) -> None:
    loop = one(0.5, 0.1, 0.05)
    for _ in range(10_000):
        loop.step(err(3.0 * sign), 1.0)
    assert loop.output[0] == (1.0 if sign > 0 else 0.0)
    # It leaves the limit within two steps of the error turning, as a fresh one would.
    loop.step(err(-1.0 * sign), 1.0)
    loop.step(err(-1.0 * sign), 1.0)
    assert 0.0 < loop.output[0] < 1.0


def test_a_negative_gain_reverses_the_action() -> None:
    opening, closing = one(0.5, 0.1, 0.05), one(0.5, -0.1, -0.05)
    for _ in range(3):
        opening.step(err(0.3), 1.0)
        closing.step(err(0.3), 1.0)
    assert opening.output[0] - 0.5 == pytest.approx(0.5 - closing.output[0])
    for _ in range(1000):
        closing.step(err(1.0), 1.0)
    closing.step(err(-1.0), 1.0)
    closing.step(err(-1.0), 1.0)
    assert closing.output[0] > 0.0


def test_the_rate_is_kept_and_does_not_wind_up_either() -> None:
    loop = one(0.0, 0.0, 0.5, slew_per_s=0.01)
    for i in range(20):
        loop.step(err(1.0), 1.0)
        assert loop.output[0] == pytest.approx(0.01 * (i + 1))
    # The integral is at most one gain ahead, so a turned error turns the output at once.
    assert loop.integral[0] <= 0.5 + 1e-12
    for _ in range(2):
        loop.step(err(-1.0), 1.0)
    assert loop.output[0] < 0.2


def test_a_proportional_kick_arrives_in_full_after_the_slew() -> None:
    loop = one(0.2, 0.5, 0.0, slew_per_s=0.1)
    for _ in range(10):
        loop.step(err(1.0), 1.0)
    assert loop.output[0] == pytest.approx(0.7)


def test_an_unknown_error_holds_that_one_alone() -> None:
    loop = PI.of(np.array([0.3, 0.3]), 0.1, 0.05)
    out = loop.step(np.array([np.nan, 1.0]), 1.0)
    assert out.tolist() == pytest.approx([0.3, 0.45])
    assert loop.integral.tolist() == pytest.approx([0.3, 0.35])
    # The part that followed the last known error stays too
    assert loop.step(np.array([np.nan, np.nan]), 1.0).tolist() == pytest.approx([0.3, 0.45])


def test_after_manual_operation_it_goes_on_without_a_bump() -> None:
    loop = PI.of(np.array([0.9, 0.4]), 0.2, 0.01)
    loop.track(np.array([0.25, np.nan]), np.array([0.5, 0.5]))
    assert loop.output.tolist() == [0.25, 0.4]
    assert loop.step(np.array([0.5, 0.0]), 1.0)[0] == pytest.approx(0.25 + 0.01 * 0.5)
    loop.track(np.array([7.0, 7.0]), np.array([np.nan, 0.0]))
    assert loop.output.tolist() == [1.0, 1.0]


def test_it_begins_within_its_limits_and_no_time_moves_nothing() -> None:
    loop = one(2.0, 0.1, 0.1, low=0.1, high=0.8)
    assert loop.output[0] == 0.8
    still = one(0.5, 0.0, 1.0, slew_per_s=1.0)
    assert still.step(err(1.0), 0.0)[0] == 0.5


@settings(max_examples=100, deadline=None)
@given(
    st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), st.floats(0.01, 10.0),
    st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), min_size=1, max_size=30), st.floats(0.1, 5.0),
)  # fmt: skip
def test_limits_and_rate_hold_whatever_comes(
    gain: float, rate: float, slew: float, errors: list[float], dt: float
) -> None:
    loop = one(0.5, gain, rate, low=0.2, high=0.9, slew_per_s=slew)
    was = 0.5
    for e in errors:
        now = float(loop.step(err(e), dt)[0])
        assert 0.2 <= now <= 0.9
        assert abs(now - was) <= slew * dt * (1 + 1e-12) + 1e-12
        assert np.isfinite(loop.integral[0])
        was = now
