"""Power curves against closed forms, a search over a fine grid, and hulls by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.power_capping import Curve, energy_minimum_w, fit, perf
from policies.power_capping.curves import power, segments, static_w

SHARE = st.floats(0.0, 1.0)
GAMMA = st.floats(1.2, 4.0)
KNEE = st.floats(0.0, 0.9)


def one(idle: float, demand: float, share: float, gamma: float = 2.7, knee: float = 0.0) -> Curve:
    return Curve(np.array([idle]), np.array([demand]), np.array([share]), gamma, knee)


@pytest.mark.parametrize(("share", "speed"), [(0.0, 1.0), (1.0, 0.8), (0.5, 1.0 / (0.5 / 0.8 + 0.5))])
def test_speed_at_four_fifths_of_the_clock(share: float, speed: float) -> None:
    curve = one(200.0, 700.0, share, 3.0)
    cap = 200.0 + 500.0 * 0.8**3
    assert perf(cap, curve) == pytest.approx(speed)
    assert power(cap, curve) == pytest.approx(cap)


def test_power_without_work_is_as_stated_or_the_usual_part() -> None:
    found = static_w(np.array([100.0, np.nan]), np.array([1000.0, 1000.0]))
    assert found == pytest.approx([100.0, 280.0])


def test_edges() -> None:
    curve = Curve(np.full(5, 200.0), np.array([700, 700, 700, 150, np.nan]), np.full(5, 0.5))
    caps = np.array([np.inf, 700.0, 0.0, 100.0, 500.0])
    lowest = 1.0 / (0.5 / 0.17 + 0.5)
    assert perf(caps, curve) == pytest.approx([1.0, 1.0, lowest, 1.0, np.nan], nan_ok=True)
    least = 200.0 + 500.0 * 0.17**2.7
    assert power(caps, curve)[:3] == pytest.approx([700.0, 700.0, least]), "less than that cannot be drawn"


def test_all_computing_has_its_energy_minimum_in_closed_form() -> None:
    # (I + D s^g) / s is least where D (g - 1) s^g = I
    for beside in (0.0, 90.0):
        expected = 200.0 + (200.0 + beside) / 1.7
        assert energy_minimum_w(one(200.0, 700.0, 1.0), beside) == pytest.approx(expected)


def test_where_nothing_waits_the_lowest_clock_takes_the_least() -> None:
    assert energy_minimum_w(one(200.0, 700.0, 0.0)) == pytest.approx(200.0 + 500.0 * 0.17**2.7)


def test_energy_minimum_of_what_does_no_work_or_is_not_known() -> None:
    curve = Curve(np.array([200.0, np.nan, 200.0]), np.array([150.0, 700, 700]), np.array([0.5, 0.5, np.nan]))
    assert energy_minimum_w(curve) == pytest.approx([150.0, np.nan, np.nan], nan_ok=True)


@settings(max_examples=100, deadline=None)
@given(st.floats(20, 400), st.floats(10, 1200), SHARE, GAMMA, KNEE, st.floats(0, 300))
def test_energy_minimum_by_search(
    idle: float, dynamic: float, share: float, gamma: float, knee: float, beside: float
) -> None:
    curve = one(idle, idle + dynamic, share, gamma, knee)
    least = energy_minimum_w(curve, beside)
    caps = np.linspace(idle, idle + dynamic, 4001)
    many = Curve(*(np.full(4001, x) for x in (idle, idle + dynamic, share, gamma, knee)))
    energy = (beside + power(caps, many)) / perf(caps, many)
    found = (beside + power(least, curve)) / perf(least, curve)
    assert found[0] <= energy.min() * (1.0 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.floats(20, 400), st.floats(1, 1200), SHARE, GAMMA, KNEE, st.floats(0, 800), st.floats(1, 1400))
def test_segments_are_concave_and_exact_at_the_ends(
    idle: float, dynamic: float, share: float, gamma: float, knee: float, floor: float, room: float
) -> None:
    curve = one(idle, idle + dynamic, share, gamma, knee)
    most = floor + room
    room_w, slope = segments(curve, np.array([floor]), np.array([most]))
    assert room_w.sum() == pytest.approx(room)
    assert (room_w >= 0).all()
    assert (np.diff(slope[0][room_w[0] > 1e-6]) <= 1e-12).all(), "the steepest first"
    gained = perf(most, curve)[0] - perf(floor, curve)[0]
    assert (room_w * slope).sum() == pytest.approx(gained, abs=1e-9)
    # The hull lies above the curve at each cut
    cut = floor + np.cumsum(room_w[0])
    speed = perf(cut, Curve(*(np.full(4, x) for x in (idle, idle + dynamic, share, gamma, knee))))
    assert (perf(floor, curve) + np.cumsum(room_w * slope) >= speed - 1e-9).all()


def test_segments_of_a_concave_stretch_are_its_chords() -> None:
    curve = one(200.0, 700.0, 0.6)
    room_w, slope = segments(curve, np.array([300.0]), np.array([900.0]), 5)
    assert room_w[0] == pytest.approx([100, 100, 100, 100, 200])
    speed = perf(np.array([300.0, 400, 500, 600, 700]), one(200.0, 700.0, 0.6))
    assert slope[0] == pytest.approx([*(np.diff(speed) / 100.0), 0.0])


def test_a_watt_buys_most_where_more_waits_for_the_clock() -> None:
    curve = Curve(np.full(3, 200.0), np.full(3, 700.0), np.array([0.2, 0.9, np.nan]))
    slope = segments(curve, np.full(3, 400.0), np.full(3, 700.0))[1]
    assert (slope[1] > slope[0]).all()
    # Not known: as much in all as a job of nothing but computing, evenly
    assert slope[2] * 300.0 == pytest.approx(np.full(4, 1.0 - (200 / 500) ** (1 / 2.7)))


def test_segments_of_nothing() -> None:
    room_w, slope = segments(one(200.0, 700.0, 0.5), np.array([300.0]), np.array([300.0]))
    assert not room_w.any()
    assert np.isfinite(slope).all()
    assert segments(Curve(np.zeros(0), np.zeros(0), np.zeros(0)), np.zeros(0), np.zeros(0))[0].shape == (0, 4)
    unknown = Curve(np.full(1, np.nan), np.full(1, np.nan), np.full(1, np.nan))
    room_w, slope = segments(unknown, np.array([200.0]), np.array([700.0]))
    assert room_w.sum() == 500.0
    assert slope[0] == pytest.approx(np.full(4, 1.0 / 500.0))


@given(SHARE)
def test_the_share_is_learned_back(share: float) -> None:
    clock = np.array([1.0, 0.95, 0.8, np.nan, 0.7])
    speed = 1.0 / (share / clock + 1.0 - share)
    assert fit(clock, speed) == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize("clock", [[1.0, 1.0], [0.999, 1.0], [], [np.nan, 0.5]])
def test_nothing_is_learned_from_clocks_that_stood(clock: list[float]) -> None:
    speed = np.full(len(clock), np.nan if clock and np.isnan(clock[0]) else 0.9)
    assert np.isnan(fit(np.array(clock), speed))
