"""Every registered forecaster keeps what `models.load.Forecaster` asks: no look ahead, hostile series."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from models.load import FORECASTERS, Forecaster, ForecastGrid, SeriesPanel
from twin.catalogue import F64, NS, ContractError

EVERY = pytest.mark.parametrize("name", FORECASTERS)
FITTED = sorted(name for name, kind in FORECASTERS.items() if kind.fitted)
BY_FEATURES = pytest.mark.parametrize("name", ["linear", "gradient_boosting"])
START_NS = 1_700_000_123 * NS
HORIZONS = (1, 7, 30, 200)
QUARTERS = ForecastGrid(900.0, (1, 8))
LEVELS = (0.0, -7.25, 1e9, 1e-9)


def panel(values: F64, step_s: float = 3600.0, start_ns: int = START_NS) -> SeriesPanel:
    return SeriesPanel(start_ns, step_s, values, zone="Europe/Berlin")


def days(n_time: int, n: int, wave: float = 8.0) -> F64:
    """Noise that returns, and days of 96 rows; each series twenty times as large as the one before."""
    dice = np.random.default_rng(0)
    x = np.zeros((n_time, n))
    for row in range(1, n_time):
        x[row] = 0.8 * x[row - 1] + dice.normal(size=n)
    day = wave * np.sign(np.sin(np.arange(n_time) * 2 * np.pi / 96))
    return 30 + (x + day[:, None]) * 20.0 ** np.arange(n)


def holed(values: F64, share: float = 0.1, seed: int = 0) -> F64:
    """With single gaps, and one outage."""
    dice = np.random.default_rng(seed)
    out = values.copy()
    out[dice.random(values.shape) < share] = np.nan
    at = int(dice.integers(0, len(out)))
    out[at : at + len(out) // 10, 0] = np.nan
    return out


def ready(name: str, grid: ForecastGrid, past: SeriesPanel) -> Forecaster:
    rule = FORECASTERS[name](grid)
    found = rule.fit(past, 1)
    assert bool(found) == rule.fitted
    rule.load(found)
    return rule


@cache
def learned(name: str) -> Forecaster:
    """One that has seen eleven days of quarters."""
    return ready(name, QUARTERS, panel(days(1100, 2), QUARTERS.step_s))


@pytest.mark.long
@EVERY
@pytest.mark.parametrize("step_s, n_time", [(3600.0, 1100), (900.0, 1500), (5400.0, 1100), (7.0, 1300)])
def test_only_the_reach_before_an_origin_counts(name: str, step_s: float, n_time: int) -> None:
    values = holed(days(n_time, 3), 0.6 if step_s == 5400.0 and name not in FITTED else 0.1)
    whole = panel(values, step_s)
    rule = ready(name, ForecastGrid(step_s, HORIZONS), whole)
    origins = np.unique(np.r_[0, 3, np.linspace(5, n_time - 1, 20).astype(int)])
    said = rule.predict(whole, origins).point
    assert said.shape == (len(HORIZONS), len(origins), 3)
    assert np.isfinite(said).any() or step_s == 7.0, "which no season is a multiple of"
    for place, origin in enumerate(origins):
        begin = max(0, int(origin) - rule.reach_rows + 1)
        cut = panel(values[begin : origin + 1], step_s, int(whole.t_ns(np.array([begin]))[0]))
        alone = rule.predict(cut, np.array([origin - begin])).point[:, 0]
        np.testing.assert_allclose(alone, said[:, place], rtol=1e-9, equal_nan=True)
        for future in (np.nan, -1e12):
            scrambled = values.copy()
            scrambled[origin + 1 :] = future
            later = rule.predict(panel(scrambled, step_s), origins).point[:, place]
            np.testing.assert_allclose(later, said[:, place], rtol=1e-12, equal_nan=True)


@EVERY
def test_a_constant_stays_what_it_is_and_of_what_was_never_heard_nothing_is_said(name: str) -> None:
    odd = np.tile([*LEVELS, np.nan], (1500, 1))
    values = np.concatenate([days(1500, 2), odd], axis=1)
    rule = ready(name, QUARTERS, panel(values, QUARTERS.step_s))
    for said in vars(rule.predict(panel(values, QUARTERS.step_s), np.array([0, 3, 500, 1499]))).values():
        if said is None:
            continue
        assert np.isfinite(said[:, -1, :2]).all()
        level = said[:, :, 2:-1]
        assert np.isfinite(level[:, -1]).all()
        assert np.all(np.isnan(level) | np.isclose(level, LEVELS, rtol=1e-12, atol=0.0))
        assert np.isnan(said[:, :, -1]).all()


@EVERY
def test_where_nothing_is_known_nothing_is_said(name: str) -> None:
    late = np.where(np.arange(500.0) < 490, np.nan, np.arange(500.0))
    for values in (np.full((800, 2), np.nan), np.arange(3.0)[:, None], np.empty((0, 2)), np.empty((500, 0)),
                   late[:, None]):  # fmt: skip
        rule = FORECASTERS[name](QUARTERS)
        assert rule.fit(panel(values, QUARTERS.step_s), 0) == {}
        rule.load({})
        if rule.fitted:
            assert np.isnan(
                rule.predict(panel(np.ones((9, 2)), QUARTERS.step_s), np.array([0, 8])).point
            ).all()
    rule = learned(name)
    nothing = panel(np.full((800, 2), np.nan), QUARTERS.step_s)
    assert np.isnan(rule.predict(nothing, np.array([0, 3, 799])).point).all()
    none = rule.predict(panel(np.empty((5, 0)), QUARTERS.step_s), np.array([1, 4])).point
    assert none.shape == (2, 2, 0)
    assert rule.predict(nothing, np.empty(0, np.int64)).point.shape == (2, 0, 2)


@pytest.mark.long
@EVERY
def test_damaged_parameters_are_refused_and_the_old_ones_are_gone(name: str) -> None:
    past = panel(days(1100, 2), QUARTERS.step_s)
    sound = FORECASTERS[name](QUARTERS).fit(past, 1)
    damaged = [{**sound, "9.belief": np.zeros(2)}]
    for key, array in sound.items():
        damaged += [{k: v for k, v in sound.items() if k != key}, {**sound, key: np.full((2, 3), 0.5)}]
        if array.size and array.dtype.kind == "f" and not key.endswith(".threshold"):
            damaged.append({**sound, key: array * np.nan})
    if "known" in sound:
        damaged += [{**sound, "known": np.array(v, np.uint8)} for v in ([0xFF], list(b"heat"))]
    if name == "linear":
        damaged.append({**sound, "8.belief": sound["8.belief"].astype(np.float32)})
    for parameters in damaged:
        rule = FORECASTERS[name](QUARTERS)
        rule.load(sound)
        with pytest.raises(ContractError):
            rule.load(parameters)
        assert not rule.fitted or np.isnan(rule.predict(past, np.array([1000])).point).all()


@BY_FEATURES
def test_what_hardly_ever_changes_stays_exactly_where_it_is(name: str) -> None:
    dice = np.random.default_rng(0)
    moves = np.where(dice.random((2000, 2)) < 0.02, dice.integers(-9, 10, (2000, 2)), 0)
    values = np.cumsum(moves, axis=0) + 500.0
    steps = panel(values, 900.0)
    origins = np.arange(1500, 1990)
    said = ready(name, ForecastGrid(900.0, (1,)), steps.upto(1499)).predict(steps, origins)
    np.testing.assert_array_equal(said.point[0], values[origins])


@BY_FEATURES
def test_spikes_do_not_ruin_it(name: str) -> None:
    values = days(1500, 2, wave=0.0)
    values[::97, 0] += 3000.0
    spiky = panel(values, 900.0)
    origins = np.arange(1100, 1490)
    said = ready(name, ForecastGrid(900.0, (8,)), spiky.upto(1099)).predict(spiky, origins)
    for value in vars(said).values():
        if value is not None:
            assert np.all((value[0, :, 0] >= -1600) & (value[0, :, 0] <= 4600))
    actual = values[origins + 8, 0]
    plain = (actual < 100) & (values[origins, 0] < 100)
    error = np.abs(said.point[0, plain, 0] - actual[plain]).mean()
    assert error < 1.1 * np.abs(values[origins, 0] - actual)[plain].mean()
