"""Bands of every load model: none shrinks with the horizon or reaches beyond what can be; coverage holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from models import REGISTRY
from models.backtest.load import BacktestTerms, backtest
from models.backtest.scores import band_share, pinball
from models.half_widths import never_shrinking
from models.load import FORECASTERS, LEVELS, MEDIAN, Blend, ForecastGrid, KeptRows, Load, SeriesPanel
from models.load.blend import EDGES, SIDES
from models.persistence import Persistence
from tests.support.builders import Twin, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import F64, find_quantity

MIN, QUARTER = 60.0, 900.0
FINE = (MIN, 2 * MIN, 3 * MIN, 4 * MIN)  # some learned, some of the largest errors, after a hundred rows
SAMPLE = ("last", "ewma5", "ewma15", "seasonal_day", "climatology", "hourly_median")


def series_of(kind: str, n_time: int, n: int, seed: int = 0) -> F64:
    """A simulated load, W: a level and what moves it."""
    rng, t = np.random.default_rng(seed), np.arange(n_time)[:, None]
    noise = rng.normal(0.0, 1.0, (n_time, n))
    if kind == "walk":
        return 6e4 + np.cumsum(200.0 * noise, axis=0)
    if kind == "noise":
        return 6e4 + 1e3 * noise
    if kind == "day":
        return 6e4 + 2e4 * np.sin(2 * np.pi * t / 1440.0) + 1e3 * noise
    if kind == "jobs":
        steps = np.zeros((n_time, n))
        for at, length, i in zip(*(rng.integers(0, k, 60) for k in (n_time, 600, n)), strict=True):
            steps[at : at + length, i] += 1e4
        return 6e4 + steps + 500.0 * noise
    assert kind == "idle"  # falls to nothing, and stays there for a while
    return np.maximum(0.0, 5e3 * np.sin(2 * np.pi * t / 300.0) + 1e3 * noise)


KINDS = ("walk", "noise", "day", "jobs", "idle")


def forecasts_of(model: Any, values: F64) -> dict[float, list[Any]]:
    """The forecasts of `rack.power_w` after each of the last ticks of a minute, by horizon."""
    twin, out = Twin(two_racks(), models=[model]), dict[float, list[Any]]()
    for i, row in enumerate(values):
        twin.tick({"rack.power_w": row}, dt_s=MIN)
        if i >= len(values) - 20:
            for (_, horizon_s), forecast in twin.engine.forecasts.items():
                out.setdefault(horizon_s, []).append(forecast)
    assert twin.engine.suspended == {}
    return out


def check_order(of: dict[float, list[Any]], horizons_s: Sequence[float]) -> int:
    """Assert that each band is as wide as any of a shorter horizon, or ends at a limit. Count them."""
    what, seen = find_quantity("rack.power_w"), 0
    assert what is not None
    for issued in zip(*(of[h] for h in horizons_s), strict=True):
        widest = np.zeros(2)
        for f in issued:
            assert not ((f.lo < what.low) | (f.hi > what.high)).any()
            width, known = f.hi - f.lo, np.isfinite(f.lo)
            ends = (f.lo == what.low) | (f.hi == what.high)
            assert ((width >= widest * (1 - 1e-5) - 0.1) | ends | ~known).all(), f
            widest = np.fmax(widest, width)
            seen += int(known.sum())
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    "expert", sampled([*FORECASTERS], "last", "seasonal_day", "autoregression", "state_space")
)
def test_no_expert_makes_a_band_that_shrinks_with_the_horizon(expert: str) -> None:
    model = Load(("rack.power_w",), FINE, experts=expert)
    series = np.column_stack([series_of(kind, 100, 1)[:, 0] for kind in ("noise", "idle")])
    assert check_order(forecasts_of(model, series), FINE) > 100


@pytest.mark.parametrize("kinds", [("walk", "day"), ("jobs", "idle")])
@pytest.mark.parametrize("name", ["load", "persistence"])
def test_no_model_of_load_makes_a_band_that_shrinks_with_the_horizon(name: str, kinds: Sequence[str]) -> None:
    more = {"experts": ",".join(SAMPLE)} if name == "load" else {}
    model: Any = REGISTRY[name](("rack.power_w",), FINE, **more)
    series = np.column_stack([series_of(kind, 80, 1, 1)[:, 0] for kind in kinds])
    assert check_order(forecasts_of(model, series), FINE) > 100


def test_what_was_at_nothing_and_never_below_it_is_not_expected_below_it() -> None:
    """Also where neither the catalogue ends a quantity at 0 nor the widest shorter band did."""
    values = np.array([0.0, 50.0, 400.0])[np.random.default_rng(0).integers(0, 3, (60, 1))]
    grid = ForecastGrid(MIN, (1, 4))
    blend = Blend(grid, 1, KeptRows(100), [FORECASTERS[name](grid) for name in SAMPLE])
    lows = []
    for row, value in enumerate(values):
        blend.append(row, value)
        lows.append(blend.say({})[:, 0, 0])
    assert np.nanmin(lows, axis=0).tolist() == [0.0, 0.0]


def test_fitted_quantiles_of_persistence_are_put_in_order() -> None:
    model = Persistence(("rack.power_w",), FINE)
    t_ns = np.arange(400) * round(MIN * 1e9)
    values = series_of("noise", 400, 2)
    model.load(model.fit({"t_ns": t_ns, "rack.power_w": values}, 0))
    raw = [model.parameters()[f"rack.power_w@{h:g}:high"] for h in FINE]
    assert (np.diff(raw, axis=0) < 0).any(), "else this shows nothing"
    assert check_order(forecasts_of(model, values[:30]), FINE) > 100


@pytest.mark.long
def test_horizons_beyond_an_hour_are_in_order_too() -> None:
    far = (2 * 3600.0, 3 * 3600.0, 4 * 3600.0)
    model = Load(("rack.power_w",), far, experts=",".join(SAMPLE))
    twin, out = Twin(two_racks(), models=[model]), dict[float, list[Any]]()
    for row in series_of("noise", 180, 2):
        twin.tick({"rack.power_w": row}, dt_s=QUARTER)
        for (_, horizon_s), forecast in twin.engine.forecasts.items():
            out.setdefault(horizon_s, []).append(forecast)
    assert check_order(out, far) > 200


@pytest.mark.long
def test_bands_that_never_shrink_hold_as_many_outcomes_and_lose_nothing() -> None:
    """The measures of the evaluation, on simulated series, with and without."""
    horizons, kinds = (1, 5, 15, 60), [kind for kind in KINDS if kind != "idle"]
    values = np.column_stack([series_of(kind, 2000, 1, 2)[:, 0] for kind in kinds])
    panel = SeriesPanel(0, MIN, values)
    chosen = {name: FORECASTERS[name] for name in SAMPLE}
    result = backtest(panel, horizons, chosen, BacktestTerms(start=0.5, as_one=True, checks_fits=False))
    common = sorted(set.intersection(*(set(c.origins.tolist()) for c in result.courses)))
    origins = np.array([row for row in common if row + horizons[-1] < panel.n_time])
    said = np.array([c.quantiles[np.searchsorted(c.origins, origins)] for c in result.courses])
    median = said[..., MEDIAN, None]
    sides = np.sign(np.array(LEVELS) - 0.5)
    wide = median + sides * never_shrinking((said - median) * sides)
    for i, horizon in enumerate(horizons):
        actual = values[origins + horizon]
        before, after = (np.nanmean(band_share(q[i], actual, "90"), axis=0) for q in (said, wide))
        assert (after >= before - 1e-12).all()
        assert (after <= np.maximum(before, 0.9) + 0.03).all(), (horizon, before, after)
        before, after = (np.nanmean(pinball(q[i], actual), axis=0) for q in (said, wide))
        assert (after <= 1.015 * before).all(), (horizon, before, after)


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float64, (5, 3), elements=st.one_of(st.just(float("nan")), st.floats(0.0, 1e9))))
def test_a_half_width_is_the_widest_so_far_and_a_gap_stays_one(half: F64) -> None:
    out = never_shrinking(half)
    assert np.array_equal(np.isnan(out), np.isnan(half))
    for i in range(len(half)):
        widest = np.fmax.reduce(half[: i + 1], axis=0)
        assert np.array_equal(out[i], np.where(np.isnan(half[i]), np.nan, widest), equal_nan=True)


def test_edges_have_their_sides() -> None:
    assert [(LEVELS[edge], side) for edge, side in zip(EDGES, SIDES, strict=True)] == [(0.05, -1), (0.95, 1)]
