"""Bands from a cold start: what is shown holds, and what too short a history cannot support is not shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.half_widths import ENOUGH_SPANS, LEAST_SPANS, SIDE_SPANS, half_widths_of
from models.load import DEFAULT_EXPERTS, FORECASTERS, Blend, ForecastGrid, KeptRows
from twin.catalogue import F64

N = 100  # series of each kind
ORIGINS = 10  # rows in a row whose forecasts are scored
KINDS = ("constant", "ar1", "walk", "week", "shifts")
# Experts that need no fit: none is made within the first hours.
EXPERTS = [name for name in DEFAULT_EXPERTS if not FORECASTERS[name].fitted]


def process(kind: str, n_time: int, step_min: float, rng: np.random.Generator) -> F64:
    """A simulated load in W, rows of `step_min` minutes [n_time, N]."""
    t, noise = np.arange(n_time)[:, None] * step_min, rng.normal(size=(n_time, N))
    if kind == "constant":
        return np.full((n_time, N), 74e3)
    if kind == "walk":
        return 1e6 + np.cumsum(200.0 * np.sqrt(step_min) * noise, axis=0)
    if kind == "ar1":  # it forgets in two hours
        keep, x = np.exp(-step_min / 120.0), noise.copy()
        for i in range(1, n_time):
            x[i] = keep * x[i - 1] + np.sqrt(1.0 - keep**2) * noise[i]
        return 6e4 + 5e3 * x
    if kind == "week":  # days of which two of seven are quiet, each series from another hour on
        at = t + np.floor(rng.uniform(0.0, 10_080.0, N))
        return 5e4 + 2e4 * np.sin(2 * np.pi * at / 1440.0) * (at % 10_080.0 < 7200.0) + 500.0 * noise
    assert kind == "shifts"  # jobs that begin and end, one every three hours
    run = np.cumsum(rng.random((n_time, N)) < step_min / 180.0, axis=0)
    levels = rng.uniform(2e4, 1.2e5, (int(run.max()) + 1, N))
    return np.take_along_axis(levels, run, axis=0) + 200.0 * noise


def coverage(step_s: float, horizons: tuple[int, ...], rows: tuple[int, ...]) -> dict[tuple[int, int], F64]:
    """(rows of history, horizon in rows) -> share inside the band of each kind; NaN where none is shown."""
    rng = np.random.default_rng(7)
    n_time = rows[-1] + ORIGINS + horizons[-1]
    values = np.hstack([process(kind, n_time, step_s / 60.0, rng) for kind in KINDS]).astype(np.float32)
    values = values.astype(np.float64)
    grid = ForecastGrid(step_s, horizons)
    blend = Blend(grid, values.shape[1], KeptRows(2688), [FORECASTERS[name](grid) for name in EXPERTS])
    out: dict[tuple[int, int], list[F64]] = {}
    for row in range(rows[-1] + ORIGINS):
        blend.append(row, values[row])
        low, _, high = np.moveaxis(blend.say({}), -1, 0)
        for begin in (r for r in rows if 0 <= row + 1 - r < ORIGINS):
            for i, horizon in enumerate(horizons):
                actual = values[row + horizon]
                inside = np.where(np.isfinite(low[i]), (low[i] <= actual) & (actual <= high[i]), np.nan)
                out.setdefault((begin, horizon), []).append(inside.reshape(len(KINDS), N).mean(axis=1))
    return {key: np.mean(shares, axis=0) for key, shares in out.items()}


def check(found: dict[tuple[int, int], F64]) -> None:
    for (history, horizon), shares in found.items():
        shown = history > LEAST_SPANS * horizon
        assert np.isfinite(shares).all() == shown, (history, horizon)
        assert not shown or (shares >= 0.88).all(), (history, horizon, dict(zip(KINDS, shares, strict=True)))


@pytest.mark.long
def test_what_is_shown_in_the_first_hours_holds() -> None:
    """Less than 10 min, 30 min, an hour and 3 h of history: up to 15 min ahead."""
    found = coverage(60.0, (1, 3, 5, 15, 60), (0, 30, 60, 180))
    check(found)
    assert {h for (history, h), shares in found.items() if history == 30 and shares[0] > 0} == {1, 3}
    assert {h for (history, h), shares in found.items() if history == 180 and shares[0] > 0} == {1, 3, 5, 15}


@pytest.mark.long
@pytest.mark.slow
def test_what_is_shown_in_the_first_days_holds() -> None:
    """A day and a week of history: up to 6 h ahead; tomorrow is not among it."""
    found = coverage(900.0, (1, 4, 24, 96), (96, 672))
    check(found)
    assert {h for (history, h), shares in found.items() if history == 96 and shares[0] > 0} == {1, 4}
    assert {h for (history, h), shares in found.items() if history == 672 and shares[0] > 0} == {1, 4, 24}


@settings(max_examples=30, deadline=None)
@given(st.integers(LEAST_SPANS, ENOUGH_SPANS + 20), st.integers(0, 1000))
def test_the_largest_errors_hold_nine_of_ten_that_come_from_the_same_source(n: int, seed: int) -> None:
    """Closed form: n / (n + 1) by the largest size, 1 - 2 / (n + 1) by the largest on each side."""
    errors = np.random.default_rng(seed).standard_t(2, (n + 1, 4000))
    largest = np.maximum(np.stack([-errors[:n].min(axis=0), errors[:n].max(axis=0)], axis=-1), 0.0)
    half = half_widths_of(np.zeros((4000, 2)), np.full(4000, n), largest)
    share = ((-half[:, 0] <= errors[n]) & (errors[n] <= half[:, 1])).mean()
    expected = n / (n + 1) if n < SIDE_SPANS else 1.0 - 2.0 / (n + 1) if n < ENOUGH_SPANS else 0.0
    assert abs(share - expected) < 0.025
    assert n >= ENOUGH_SPANS or expected >= 0.9 - 1e-12


def test_below_nine_spans_there_is_no_band() -> None:
    spans = np.array([0, LEAST_SPANS - 1, LEAST_SPANS])
    half = half_widths_of(np.ones((3, 2)), spans, np.full((3, 2), [2.0, 5.0]))
    assert np.array_equal(half, [[np.nan] * 2, [np.nan] * 2, [5.0, 5.0]], equal_nan=True)
