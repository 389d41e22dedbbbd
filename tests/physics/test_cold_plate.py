"""Resistance against flow, and exact steps of first-order storage, with scipy as rival.

May import `twin.physics`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from twin.physics import cold_plate
from twin.physics.cold_plate import air_resistance_k_per_w, relax, relaxation, resistance_k_per_w, tank_tau_s
from twin.physics.exchanger import transfer

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


@given(levels, levels, st.floats(1e-3, 1e4), st.floats(0.0, 1e4))
def test_two_half_steps_are_one_and_the_mean_balances(
    level: float, aim: float, tau: float, dt: float
) -> None:
    x, to = np.array([level]), np.array([aim])
    once, mean = relax(x, to, tau, dt)
    half, mean1 = relax(x, to, tau, dt / 2)
    twice, mean2 = relax(half, to, tau, dt / 2)
    assert twice == pytest.approx(once, abs=1e-9)
    assert (mean1 + mean2) / 2 == pytest.approx(mean, abs=1e-9)
    # Conservation: what is stored is what came in
    assert (once - x) * tau == pytest.approx((to - mean) * dt, abs=1e-7 * (1 + abs(dt)))
    low, high = min(level, aim) - 1e-9, max(level, aim) + 1e-9
    assert low <= once[0] <= high
    assert low <= mean[0] <= high


def test_the_mean_is_the_integral() -> None:
    fine = np.linspace(0.0, 12.0, 200_001)
    path = 40.0 + (90.0 - 40.0) * np.exp(-fine / 7.0)
    level, mean = relax(np.array([90.0]), np.array([40.0]), 7.0, 12.0)
    assert level[0] == pytest.approx(path[-1], rel=1e-12)
    assert mean[0] == pytest.approx(np.trapezoid(path, fine) / 12.0, rel=1e-9)


def test_limits_of_time() -> None:
    x, to = np.array([90.0]), np.array([40.0])
    assert relax(x, to, 0.0, 1.0) == (40.0, 40.0)
    assert relax(x, to, np.inf, 1.0) == (90.0, 90.0)
    assert relax(x, to, 7.0, 0.0) == (90.0, 90.0)
    assert relax(x, to, 0.0, 0.0) == (90.0, 90.0)
    assert relax(x, to, 1e-300, 1e10) == (40.0, 40.0)
    assert np.isnan(relax(x, to, np.nan, 1.0)).all()
    assert np.isnan(relax(np.array([np.nan]), to, 7.0, 1.0)).all()
    left, mean = relaxation(np.array([1e12, 7.0]), 1.0)
    assert left[0] == pytest.approx(1.0 - 1e-12, rel=1e-15)
    assert mean[0] == pytest.approx(1.0 - 0.5e-12, rel=1e-15)


def test_a_tank_without_flow_keeps_what_it_has() -> None:
    tau = tank_tau_s(np.array([20.0, 20.0, 20.0]), np.array([100.0, -100.0, 0.0]))
    assert tau.tolist() == [12.0, 12.0, np.inf]
    assert relax(np.full(3, 50.0), np.full(3, 30.0), tau, 12.0)[0] == pytest.approx(
        [30 + 20 / np.e, 30 + 20 / np.e, 50.0]
    )


def test_a_stagnant_plate_warms_at_first_by_its_own_power() -> None:
    # 1400 W on 200 J/K: 7 K/s, within the 4 to 8 of the field
    r = resistance(0.0)
    after, _ = relax(np.array([60.0]), np.array([32.0 + 1400.0 * r]), r * 200.0, 0.1)
    assert (after[0] - 60.0) / 0.1 == pytest.approx(7.0 - 28.0 / r / 200.0, rel=0.01)


# A stiff loop: a GPU (tau 6 s), its lid (tau 0.05 s), a rack's water (12 s), a slow return leg, an exchanger.
LOOP = {
    "r": 0.03,
    "c": 200.0,
    "lid": 0.05,
    "rack_s": 12.0,
    "leg_s": 300.0,
    "ua": 900.0,
    "w": 140.0,
    "cold": 180.0,
}


def load_w(t: float) -> float:
    """A swing of 20 s, as a training job makes."""
    return 900.0 + 400.0 * float(np.sin(2 * np.pi * t / 20.0))


def rates(t: float, y: np.ndarray) -> list[float]:
    gpu, lid, rack, leg = y
    back = transfer(*(np.array([LOOP[k]]) for k in ("ua", "w", "cold")), np.array([leg]), np.array([30.0]))
    supply = back.warm_out_c[0]
    heat = (gpu - rack) / LOOP["r"]
    return [
        (load_w(t) - heat) / LOOP["c"],
        (gpu - lid) / LOOP["lid"],
        (supply + heat / LOOP["w"] - rack) / LOOP["rack_s"],
        (rack - leg) / LOOP["leg_s"],
    ]


def stepped(dt: float, end: float) -> np.ndarray:
    """The same by exact steps of each part in turn: GPU, rack and leg at every whole second."""
    gpu, lid, rack, leg = (np.array([x]) for x in (40.0, 40.0, 33.0, 33.0))
    path, per_s = [], round(1 / dt)
    for i in range(round(end / dt)):
        power = load_w((i + 0.5) * dt)
        supply = transfer(
            *(np.array([LOOP[k]]) for k in ("ua", "w", "cold")), leg, np.array([30.0])
        ).warm_out_c
        was = gpu
        gpu, mean = relax(gpu, rack + power * LOOP["r"], LOOP["r"] * LOOP["c"], dt)
        lid, _ = relax(lid, mean, LOOP["lid"], dt)
        # By conservation: what the silicon did not keep goes into the water
        heat = power - LOOP["c"] * (gpu - was) / dt
        rack, passed = relax(rack, supply + heat / LOOP["w"], LOOP["rack_s"], dt)
        leg, _ = relax(leg, passed, LOOP["leg_s"], dt)
        if (i + 1) % per_s == 0:
            path.append(np.concatenate([gpu, rack, leg]))
    return np.array(path)


def test_halving_the_step_halves_the_distance_to_a_stiff_integrator() -> None:
    end, whole = 60.0, np.arange(1.0, 61.0)
    rival = solve_ivp(
        rates, (0.0, end), [40.0, 40.0, 33.0, 33.0], method="Radau", rtol=1e-9, atol=1e-9, t_eval=whole
    )
    exact = rival.y[[0, 2, 3]].T
    errors = [np.abs(stepped(dt, end) - exact).max() for dt in (1.0, 0.5, 0.25, 0.125)]
    assert errors[0] < 0.1
    orders = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (orders > 0.75).all(), (errors, orders)
    assert orders.mean() > 0.85


def test_constants_are_in_the_range_of_the_field() -> None:
    assert 0.0 < cold_plate.STAGNANT_FLOW_PU < 0.1
    # 1400 W through the bounded resistance: far beyond any limit, so a plate without flow always trips
    assert 1400.0 * resistance(0.0) > 200.0
