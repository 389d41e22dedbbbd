"""The weather of a simulated site: closed forms of the day, fronts of the stated size, one sky per seed."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from twin.plant.weather import DAY_S, Weather


def test_the_day_is_warmest_at_three_and_coldest_at_three_at_night() -> None:
    sky = Weather(mean_c=10.0, swing_k=8.0, begin_s=0.0)
    assert sky.at(15 * 3600.0)[0] == pytest.approx(18.0)
    assert sky.at(3 * 3600.0)[0] == pytest.approx(2.0)
    assert sky.at(9 * 3600.0) == pytest.approx((10.0, sky.rh_pu))
    assert sky.at(100.0)[0] == pytest.approx(sky.at(100.0 + DAY_S)[0])


def test_the_beginning_shifts_the_day() -> None:
    early, late = Weather(begin_s=0.0), Weather(begin_s=7200.0)
    assert early.at(9000.0) == pytest.approx(late.at(1800.0))


def test_the_same_vapour_is_drier_in_warm_air() -> None:
    sky = Weather(mean_c=15.0, swing_k=6.0, rh_pu=0.6, begin_s=0.0)
    hours = np.arange(0.0, 24.0)
    temp, rh = np.array([sky.at(h * 3600.0) for h in hours]).T
    assert np.all(np.diff(rh[np.argsort(temp)]) <= 1e-12)
    assert rh.min() > 0.0
    assert rh.max() <= 1.0
    # dew point by Magnus (Alduchov and Eskridge 1996) stays within a kelvin over the day
    g = np.log(rh) + 17.625 * temp / (243.04 + temp)
    dew = 243.04 * g / (17.625 - g)
    assert np.ptp(dew[rh < 1.0]) < 1.0


def test_without_swing_and_fronts_nothing_changes() -> None:
    sky = Weather(mean_c=21.0, swing_k=0.0, rh_pu=0.4)
    assert {sky.at(t) for t in (0.0, 1e4, 1e6)} == {(21.0, 0.4)}


def test_fronts_have_their_size_and_their_seed() -> None:
    spans = []
    for seed in range(20):
        sky = Weather(swing_k=0.0, fronts_k=3.0, seed=seed)
        series = np.array([sky.at(t)[0] for t in np.arange(0.0, 30 * DAY_S, 1800.0)])
        assert series.mean() == pytest.approx(sky.mean_c, abs=0.5)
        assert series.std() == pytest.approx(3.0, rel=0.15)
        # no faster than weather is: half an hour moves it by a few kelvins at most
        assert np.abs(np.diff(series)).max() < 5.0
        spans.append(series[100])
    assert np.std(spans) > 1.0
    again = copy.deepcopy(Weather(fronts_k=2.0, seed=3))
    assert again.at(5e4) == Weather(fronts_k=2.0, seed=3).at(5e4)
