"""A grid's blend: what it keeps from row to row changes no forecast, and its memory stays as it was given."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.load import (
    CALM_ROWS,
    FORECASTERS,
    Blend,
    ForecastGrid,
    KeptRows,
    Parameters,
    SeriesPanel,
    last_within,
    restlessness,
)
from models.load.combination import MANY, middle_half
from models.load.context import restlessness_now
from twin.catalogue import F64, ContractError

GRID = ForecastGrid(900.0, (1, 4, 24))
EXPERTS = ("last", "climatology", "hourly_median", "seasonal_ewma", "state_space", "linear")
ROWS, N = 700, 6
GAINS = {"level": 0.3, "slope": 0.05, "season": -1.0, "damping": 0.9}


def rows_of(n_time: int, n: int = N, seed: int = 0) -> F64:
    """A day's season, noise, counts, gaps of one series and of all."""
    rng = np.random.default_rng(seed)
    day = np.sin(2 * np.pi * np.arange(n_time)[:, None] / 96)
    out: F64 = 100 + 10 * day + rng.normal(0, 3, (n_time, n))
    out[:, 1] = np.round(out[:, 1] / 10)
    out[rng.random(n_time) < 0.1, 2] = np.nan
    out[n_time // 3 : n_time // 3 + 5] = np.nan
    out[:, 3] = np.nan
    return out


@functools.cache
def linear_parameters() -> Parameters:
    return FORECASTERS["linear"](GRID).fit(SeriesPanel(0, GRID.step_s, rows_of(ROWS)), 0)


def blend_of(n: int = N) -> Blend:
    experts = [FORECASTERS[name](GRID) for name in EXPERTS]
    experts[4].load({key: np.array([gain]) for key, gain in GAINS.items()})
    experts[5].load(linear_parameters())
    return Blend(GRID, n, KeptRows(ROWS, "Europe/Berlin"), experts)


@pytest.mark.parametrize("change", ["none", "remap", "restore", "silence"])
def test_what_is_kept_from_row_to_row_changes_no_forecast(change: str) -> None:
    """Each expert says what it says of rows that nobody looked at before."""
    blend, values = blend_of(), rows_of(ROWS + 300)
    for row in range(ROWS + 70):
        blend.append(1000 + row, values[row])
    row = 1000 + ROWS + 70
    for step in range(40):  # in which the buffer moves its rows once
        if step == 20 and change == "remap":
            blend.remap(np.array([5, 4, -1, 2, 1, 0], np.int32))
        if step == 20 and change == "restore":
            fresh = blend_of()
            fresh.restore(blend.memory())
            blend = fresh
        if step == 20 and change == "silence":
            row += ROWS + 3
        blend.append(row, values[(ROWS + 70 + step) % len(values)])
        row += 1
        assert np.isfinite(blend.say({})[:, 0, 1]).all()
        for expert in blend.experts:
            panel = blend.panel(expert.reach_rows)
            unseen = SeriesPanel(panel.start_ns, panel.step_s, panel.values.copy(), zone=panel.zone)
            origin = np.array([panel.n_time - 1])
            for one, other in zip(
                vars(expert.predict(panel, origin)).values(),
                vars(expert.predict(unseen, origin)).values(),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other, err_msg=f"{expert.name} at step {step}")


def test_memory_is_not_written_to_later_and_gives_the_same_forecasts() -> None:
    blend, values = blend_of(), rows_of(ROWS + 300)
    for row in range(ROWS + 170):
        blend.append(row, values[row])
        if row > ROWS + 110:
            blend.say({})
    memory = blend.memory()
    held = {key: array.copy() for key, array in memory.items()}
    fresh = blend_of()
    fresh.restore(memory)
    for row in range(ROWS + 170, ROWS + 200):
        blend.append(row, values[row])
        fresh.append(row, values[row])
        np.testing.assert_array_equal(blend.say({}), fresh.say({}))
    for key, array in held.items():
        np.testing.assert_array_equal(memory[key], array, err_msg=key)
    rows = np.concatenate([held[key] for key in held if key.startswith("rows/")])
    first = blend.span.first(ROWS + 169)
    assert 170 - 64 < first <= 170
    np.testing.assert_array_equal(rows, values[first : ROWS + 170].astype(np.float32))


def test_rows_of_other_series_or_too_many_are_refused() -> None:
    memory = blend_of(2).memory()
    with pytest.raises(ContractError, match="blocks"):
        blend_of(2).restore(memory | {"rows/0": np.zeros((3, 5), np.float32)})
    with pytest.raises(ContractError, match="at most"):
        blend_of(2).restore(memory | {"rows/0": np.zeros((ROWS + 64, 2), np.float32)})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, CALM_ROWS + 20), st.integers(0, 10_000), st.sampled_from([0.0, 0.05, 0.6]))
def test_restlessness_now_is_restlessness_at_the_last_row(n_time: int, seed: int, gaps: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n_time, 5)) * 10.0 ** rng.integers(-3, 6, 5)
    values[rng.random(values.shape) < gaps * rng.random(5)] = np.nan
    values[rng.random(n_time) < gaps * rng.random()] = np.nan
    near = values[-CALM_ROWS - 1 :]
    whole = restlessness(near, np.array([len(near) - 1]))[0]
    np.testing.assert_allclose(restlessness_now(values), whole, rtol=1e-11, atol=1e-12)
    last = last_within(values, np.array([n_time - 1]), 100)
    several = last_within(values, np.arange(max(0, n_time - 2), n_time), 100)
    np.testing.assert_array_equal(last[0], several[-1])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(0, 10_000))
def test_many_columns_give_the_same_middle_half_as_each_alone(k: int, seed: int) -> None:
    """Many are compared in pairs, few are sorted."""
    rng = np.random.default_rng(seed)
    points = np.round(rng.normal(size=(k, MANY)), 1)
    weights = np.where(rng.random(points.shape) < 0.3, 0.0, rng.random(points.shape))
    points[(weights == 0.0) & (rng.random(points.shape) < 0.5)] = np.nan
    together = middle_half(points, weights)
    alone = [middle_half(points[:, i : i + 32], weights[:, i : i + 32]) for i in range(0, MANY, 32)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-12, atol=1e-13)
