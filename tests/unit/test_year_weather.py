"""Sampled days of a year as weather: the hours of the file, and no jump from one day to the next."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.year_weather import JOINT_H, YearWeather, days_of


def test_days_are_as_in_the_file_and_the_air_does_not_jump_between_them() -> None:
    hours = np.arange(365 * 24, dtype=np.float64).reshape(365, 24) / 100.0
    weather = YearWeather(hours, 0.5 + 0.0 * hours, (10, 200, 3))
    for day, row in enumerate((10, 200, 3)):
        for hour in (0.0, 5.5, 24.0 - JOINT_H):
            assert weather.at(3600.0 * (24 * day + hour))[0] == pytest.approx((24 * row + hour) / 100.0)
    air_c = np.array([weather.at(60.0 * k)[0] for k in range(3 * 24 * 60)])
    assert np.abs(np.diff(air_c)).max() < 1.01 * (hours[200, 0] - hours[11, 0]) / (JOINT_H * 60.0) + 0.01


def test_sampled_days_are_of_all_months() -> None:
    assert {int(12 * day / 365.0) for day in days_of(24)} == set(range(12))
