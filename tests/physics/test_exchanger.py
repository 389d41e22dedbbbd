"""The exchanger against closed forms, integration along its plate and its inverse.

May import `twin.physics`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from scipy.integrate import solve_ivp

from twin.physics import effectiveness, film_factor, heat_slope_k, transfer, ua_of
from twin.physics.exchanger import Transfer, effectiveness_slope, ntu_of

ntus, ratios = st.floats(1e-6, 30.0), st.floats(0.0, 1.0)
capacities = st.floats(1.0, 1e6)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def across(*values: float) -> Transfer:
    """(ua, warm, cold, warm in, cold in)."""
    return transfer(*(array(v) for v in values))


# Worked by hand to three digits; at C = 0 it is 1 - e^-NTU, at C = 1 NTU/(1 + NTU)
@pytest.mark.parametrize(
    "ntu, ratio, expected",
    [(1.0, 0.0, 0.632), (1.0, 0.5, 0.565), (2.0, 0.75, 0.722), (3.0, 1.0, 0.750), (5.0, 0.5, 0.957)],
)
def test_points_worked_by_hand(ntu: float, ratio: float, expected: float) -> None:
    assert effectiveness(array(ntu), array(ratio))[0] == pytest.approx(expected, abs=1e-3)


@given(ntus, st.floats(0.0, 0.99))
def test_the_textbook_formula(ntu: float, c: float) -> None:
    e = np.exp(-ntu * (1 - c))
    assert effectiveness(array(ntu), array(c))[0] == pytest.approx((1 - e) / (1 - c * e), rel=1e-7)


@pytest.mark.parametrize("ntu", [1e-3, 0.5, 3.0, 40.0])
def test_it_is_smooth_where_both_streams_are_alike(ntu: float) -> None:
    below = 1.0 - np.array([0.0, 1e-16, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6])
    found = effectiveness(np.full(7, ntu), below)
    assert found[0] == pytest.approx(ntu / (1 + ntu), rel=1e-15)
    # d eps/dC at C = 1 is -N^2/2/(1 + N)^2 in size
    assert np.abs(found - found[0]).max() <= 0.6e-6 * (ntu / (1 + ntu)) ** 2 + 1e-15
    assert (np.diff(found) >= -1e-15).all()
    assert ntu_of(found, below) == pytest.approx(ntu, rel=1e-9)


@given(ntus, ratios)
def test_ntu_is_the_inverse(ntu: float, c: float) -> None:
    eps = effectiveness(array(ntu), array(c))
    assume(eps[0] < 0.999)
    assert ntu_of(eps, array(c))[0] == pytest.approx(ntu, rel=1e-9)


@given(st.floats(0.01, 10.0), ratios)
def test_its_slope_is_the_difference_quotient(ntu: float, c: float) -> None:
    h = 1e-5 * ntu
    low, mid, high = (effectiveness(array(x), array(c)) for x in (ntu - h, ntu, ntu + h))
    assert effectiveness_slope(mid, array(c))[0] == pytest.approx(
        (high - low)[0] / (2 * h), rel=1e-5, abs=1e-9
    )


def test_limits_of_ntu() -> None:
    c = array(0.0, 0.3, 1.0)
    assert effectiveness(np.zeros(3), c).tolist() == [0.0, 0.0, 0.0]
    assert effectiveness(np.full(3, np.inf), c).tolist() == [1.0, 1.0, 1.0]
    assert ntu_of(np.zeros(3), c).tolist() == [0.0, 0.0, 0.0]
    assert ntu_of(np.ones(3), c).tolist() == [np.inf] * 3
    assert np.isnan(ntu_of(array(-0.1, 1.1, np.nan), c)).all()
    assert np.isnan(effectiveness(array(np.nan, 1.0), array(0.5, np.nan))).all()


def shot(ua: float, warm: float, cold: float, warm_in: float, cold_in: float) -> float:
    """Heat by integrating both streams along the plate: linear, so two shots at the cold outlet suffice."""

    def ends(cold_out: float) -> tuple[float, float]:
        path = solve_ivp(
            lambda x, t: [-ua / warm * (t[0] - t[1]), -ua / cold * (t[0] - t[1])],
            (0.0, 1.0), [warm_in, cold_out], rtol=1e-11, atol=1e-11,
        )  # fmt: skip
        return path.y[0, -1], path.y[1, -1]

    (_, at0), (_, at1) = ends(cold_in), ends(warm_in)
    share = (cold_in - at0) / (at1 - at0)
    return warm * (warm_in - ends(cold_in + share * (warm_in - cold_in))[0])


@pytest.mark.parametrize(
    "ua, warm, cold", [(9e3, 7e3, 8e3), (2e4, 7e3, 7e3), (500.0, 9e3, 2e3), (6e3, 1e3, 9e3)]
)
def test_integrating_along_the_plate_gives_the_same_heat(ua: float, warm: float, cold: float) -> None:
    assert across(ua, warm, cold, 47.0, 30.0).heat_w[0] == pytest.approx(
        shot(ua, warm, cold, 47.0, 30.0), rel=1e-8
    )


@given(capacities, capacities, capacities, st.floats(-20.0, 90.0), st.floats(-20.0, 90.0))
def test_heat_is_conserved_and_the_second_law_holds(
    ua: float, warm: float, cold: float, warm_in: float, cold_in: float
) -> None:
    found = across(ua, warm, cold, warm_in, cold_in)
    size = 1e-9 * max(warm, cold) * 110.0
    assert warm * (warm_in - found.warm_out_c[0]) == pytest.approx(found.heat_w[0], abs=size)
    assert cold * (found.cold_out_c[0] - cold_in) == pytest.approx(found.heat_w[0], abs=size)
    low, high = min(warm_in, cold_in) - 1e-9, max(warm_in, cold_in) + 1e-9
    assert low <= found.warm_out_c[0] <= high
    assert low <= found.cold_out_c[0] <= high
    assert found.heat_w[0] * (warm_in - cold_in) >= 0.0
    more = across(1.1 * ua, warm, cold, warm_in, cold_in)
    assert abs(more.heat_w[0]) >= abs(found.heat_w[0]) * (1 - 1e-12)


@given(st.floats(0.05, 8.0), st.floats(0.2, 5.0), st.floats(1.0, 40.0))
def test_the_estimator_finds_the_conductance_again(ntu: float, ratio: float, apart: float) -> None:
    warm, cold = 7e3, 7e3 * ratio
    ua = ntu * min(warm, cold)
    heat = across(ua, warm, cold, 30.0 + apart, 30.0).heat_w
    streams = array(warm), array(cold), array(30.0 + apart), array(30.0)
    assert ua_of(heat, *streams)[0] == pytest.approx(ua, rel=1e-6)
    slope = (across(ua * 1.0001, warm, cold, 30.0 + apart, 30.0).heat_w - heat) / (1e-4 * ua)
    assert heat_slope_k(array(ua), *streams)[0] == pytest.approx(slope[0], rel=5e-3, abs=1e-6)


@pytest.mark.parametrize(
    "heat, warm, cold, warm_in, cold_in",
    [(1e6, 7e3, 8e3, 40.0, 30.0),  # more than the greatest possible
     (-1e3, 7e3, 8e3, 40.0, 30.0),  # against the temperatures
     (1e3, 7e3, 8e3, 30.0, 30.0), (0.0, 7e3, 8e3, 30.0, 30.0), (0.0, 0.0, 8e3, 40.0, 30.0),
     (0.0, 0.0, 0.0, 40.0, 30.0), (7e4, 7e3, 8e3, 40.0, 30.0), (np.nan, 7e3, 8e3, 40.0, 30.0),
     (1e3, np.nan, 8e3, 40.0, 30.0), (-1e3, -7e3, 8e3, 40.0, 30.0)],
)  # fmt: skip
def test_a_heat_that_no_conductance_explains(
    heat: float, warm: float, cold: float, warm_in: float, cold_in: float
) -> None:
    assert np.isnan(ua_of(array(heat), array(warm), array(cold), array(warm_in), array(cold_in))).all()


def test_zero_flow_is_the_limit_of_ever_smaller_flow() -> None:
    ua0, nominal = array(9e3), 7e3
    last = None
    for ratio in (1e-4, 1e-8, 1e-12, 0.0):
        ua = ua0 / film_factor(array(ratio), array(1.0))
        found = transfer(ua, array(nominal), array(nominal * ratio), array(45.0), array(30.0))
        last = found.heat_w[0], found.warm_out_c[0], found.cold_out_c[0]
    assert last == (0.0, 45.0, 45.0)
    near = transfer(
        ua0 / film_factor(array(1e-12), array(1.0)),
        array(nominal),
        array(nominal * 1e-12),
        array(45.0),
        array(30.0),
    )
    assert (near.heat_w[0], near.warm_out_c[0], near.cold_out_c[0]) == pytest.approx(last, abs=1e-6)
    both = across(9e3, 0.0, 0.0, 45.0, 30.0)
    assert (both.heat_w[0], both.warm_out_c[0], both.cold_out_c[0]) == (0.0, 45.0, 30.0)
    none = across(0.0, 7e3, 8e3, 45.0, 30.0)
    assert (none.heat_w[0], none.warm_out_c[0], none.cold_out_c[0]) == (0.0, 45.0, 30.0)
    assert across(9e3, -1.0, 8e3, 45.0, 30.0).heat_w[0] == 0.0
    assert heat_slope_k(array(9e3), array(0.0), array(8e3), array(45.0), array(30.0))[0] == 0.0


def test_films_follow_the_flows() -> None:
    assert film_factor(array(1.0), array(1.0))[0] == pytest.approx(1.0, rel=1e-15)
    assert film_factor(array(2.0), array(2.0))[0] == pytest.approx(2**-0.8, rel=1e-14)
    assert film_factor(array(0.0, -0.1), array(1.0, 1.0)).tolist() == [np.inf, np.inf]
    assert (np.diff(film_factor(np.linspace(0.01, 2.0, 50), np.full(50, 0.7))) < 0.0).all()


def test_a_design_approach_comes_out_again() -> None:
    # 1 MW, 1000 l/min of PG25 (66.7 kW/K) against 10 % more: warm leaves 4 K above the entry of the cold
    warm, cold, heat = 66.7e3, 73.4e3, 1e6
    ends = 4.0, 4.0 + heat / warm - heat / cold
    ua = heat / ((ends[1] - ends[0]) / np.log(ends[1] / ends[0]))
    found = across(ua, warm, cold, 32.0 + heat / warm, 28.0)
    assert found.heat_w[0] == pytest.approx(heat, rel=1e-9)
    assert found.warm_out_c[0] == pytest.approx(32.0, abs=1e-9)
