"""Dew point and wet bulb against tables, Stull's closed form and bisection. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import brentq

from twin.physics import rh_pu, wet_bulb_c
from twin.physics.moist_air import saturation_pa

temps = st.floats(-10.0, 50.0)
humidities = st.floats(0.01, 1.0)


# ASHRAE Handbook, Fundamentals: saturation over water
@pytest.mark.parametrize("temp, pascal", [(0, 611.2), (10, 1228.0), (20, 2338.8), (30, 4246.0), (40, 7383.5)])
def test_saturation_of_the_tables(temp: float, pascal: float) -> None:
    assert saturation_pa(np.array([float(temp)]))[0] == pytest.approx(pascal, rel=4e-3)


# A psychrometric chart at sea level
@pytest.mark.parametrize(
    "temp, rh, dew, wet",
    [(25, 0.5, 13.9, 17.9), (30, 0.5, 18.4, 22.0), (35, 0.4, 19.4, 24.0), (20, 0.6, 12.0, 15.2)],
)
def test_points_of_the_chart(temp: float, rh: float, dew: float, wet: float) -> None:
    t, h = np.array([float(temp)]), np.array([rh])
    assert rh_pu(t, np.array([dew]))[0] == pytest.approx(rh, rel=0.01)
    assert wet_bulb_c(t, h)[0] == pytest.approx(wet, abs=0.25)


@given(temps, humidities)
def test_dew_point_wet_bulb_and_air_stand_in_order(temp: float, rh: float) -> None:
    t, h = np.array([temp]), np.array([rh])
    wet = wet_bulb_c(t, h)[0]
    assert rh_pu(t, np.array([wet]))[0] >= rh * (1.0 - 1e-9)  # the dew point lies at or below it
    assert wet <= temp + 1e-9


@given(temps, humidities)
def test_bisection_finds_the_same_wet_bulb(temp: float, rh: float) -> None:
    def short(wet: float) -> float:
        saturated = 610.94 * np.exp(17.625 * wet / (243.04 + wet))
        vapour = rh * 610.94 * np.exp(17.625 * temp / (243.04 + temp))
        return float(saturated - 6.53e-4 * (1 + 9.44e-4 * wet) * 101_325.0 * (temp - wet) - vapour)

    rival = brentq(short, -60.0, temp + 1e-6, xtol=1e-10)
    assert wet_bulb_c(np.array([temp]), np.array([rh]))[0] == pytest.approx(rival, abs=1e-7)


def test_stull_agrees_within_its_error() -> None:
    temp, rh = (x.ravel() for x in np.meshgrid(np.linspace(0.0, 45.0, 19), np.linspace(0.1, 0.99, 15)))
    p = 100.0 * rh
    stull = (
        temp * np.arctan(0.151977 * np.sqrt(p + 8.313659))
        + np.arctan(temp + p)
        - np.arctan(p - 1.676331)
        + 0.00391838 * p**1.5 * np.arctan(0.023101 * p)
        - 4.686035
    )
    assert np.abs(wet_bulb_c(temp, rh) - stull).max() < 1.0


def test_saturated_air_is_its_own_dew_point_and_wet_bulb() -> None:
    temp = np.linspace(-10.0, 50.0, 13)
    assert rh_pu(temp, temp) == pytest.approx(np.ones(13), abs=1e-12)
    assert wet_bulb_c(temp, np.ones(13)) == pytest.approx(temp, abs=1e-9)


def test_damper_or_warmer_air_has_a_higher_wet_bulb_and_thin_air_a_lower() -> None:
    rh, temp = np.linspace(0.0, 1.0, 40), np.linspace(-10.0, 50.0, 40)
    assert (np.diff(wet_bulb_c(np.full(40, 32.0), rh)) > -1e-12).all()
    assert (np.diff(wet_bulb_c(temp, np.full(40, 0.4))) > 0.0).all()
    some = np.array([30.0]), np.array([0.4])
    assert wet_bulb_c(*some, pressure_pa=80_000.0)[0] < wet_bulb_c(*some)[0]


def test_unknown_weather_stays_unknown_and_impossible_humidity_is_bounded() -> None:
    nan, some = np.array([np.nan]), np.array([0.5])
    for found in (
        wet_bulb_c(nan, some),
        wet_bulb_c(some, nan),
    ):
        assert np.isnan(found).all()
    assert wet_bulb_c(np.array([20.0]), np.array([1.2]))[0] == pytest.approx(20.0)
    assert np.isfinite(wet_bulb_c(np.array([20.0]), np.zeros(1))).all()
