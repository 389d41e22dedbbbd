"""Random series, gaps and sleepers: order of quantiles, no look ahead, each series by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from models.load import LEVELS, MEDIAN, ExpertAggregation, Issue

K, N, N_TIME = 3, 2, 24
VALUE = st.one_of(st.just(float("nan")), st.just(0.0), st.floats(-1e9, 1e9), st.integers(-5, 5).map(float))
SERIES = hnp.arrays(np.float64, (N_TIME, N), elements=VALUE, fill=st.just(float("nan")))
POINTS = hnp.arrays(np.float64, (N_TIME, K, N), elements=VALUE, fill=st.just(float("nan")))
QUANTUM = hnp.arrays(np.float64, N, elements=st.sampled_from([0.0, 1.0, 0.5]))
HORIZON = st.integers(1, 6)


def filled(values: np.ndarray) -> np.ndarray:
    out = values.copy()
    for row in range(1, len(out)):
        out[row] = np.where(np.isfinite(out[row]), out[row], out[row - 1])
    return out


def issue_of(values: np.ndarray, points: np.ndarray, quantum: np.ndarray, row: int) -> Issue:
    known = filled(values)[: row + 1]
    size = np.nan_to_num(np.abs(np.diff(known, axis=0))).max(axis=0, initial=0.0)
    scale = np.where(size > 0.0, size, np.nan)
    here = points[row].copy()
    here[0] = known[row]
    return Issue(here, known[row], scale, quantum, known[row] - 1.0, known[row] + 2.0, known)


def run(values: np.ndarray, points: np.ndarray, quantum: np.ndarray, horizon: int, upto: int) -> np.ndarray:
    online = ExpertAggregation(horizon, values.shape[1], ("last", "a", "b"))
    out = []
    for row in range(upto):
        online.learn(row, values[row])
        out.append(online.issue(row, issue_of(values, points, quantum, row)))
    return np.array(out)


@settings(max_examples=60, deadline=None)
@given(SERIES, POINTS, QUANTUM, HORIZON)
def test_quantiles_are_in_order_and_hold_the_median(values, points, quantum, horizon) -> None:
    said = run(values, points, quantum, horizon, N_TIME)
    last = filled(values)
    assert said.shape == (N_TIME, N, len(LEVELS))
    assert np.array_equal(np.isfinite(said[..., MEDIAN]), np.isfinite(last))
    whole = np.isfinite(said).all(axis=-1)
    assert np.array_equal(whole, np.isfinite(said[..., 0]))
    assert (np.diff(said[whole], axis=-1) >= 0.0).all()
    moved = np.maximum.accumulate(np.abs(np.diff(last, axis=0, prepend=last[:1])) > 1e-30, axis=0)
    assert whole[moved & np.isfinite(last)].all()


@settings(max_examples=40, deadline=None)
@given(SERIES, SERIES, POINTS, QUANTUM, HORIZON, st.integers(1, N_TIME - 1))
def test_what_comes_later_changes_nothing(values, others, points, quantum, horizon, row) -> None:
    changed = np.concatenate([values[:row], others[row:]])
    plain = run(values, points, quantum, horizon, row)
    assert np.array_equal(plain, run(changed, points, quantum, horizon, row), equal_nan=True)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(SERIES, SERIES, POINTS, QUANTUM, HORIZON, st.integers(0, N_TIME - 2))
def test_an_outcome_teaches_not_before_its_row(values, others, points, quantum, horizon, row) -> None:
    """An outcome learned at one row cannot reach earlier forecasts, though their targets lie beyond it."""
    issues = [issue_of(values, points, quantum, i) for i in range(N_TIME)]
    said = []
    for outcomes in (values, np.concatenate([values[: row + 1], others[row + 1 :]])):
        online = ExpertAggregation(horizon, N, ("last", "a", "b"))
        rows = []
        for i in range(N_TIME):
            online.learn(i, outcomes[i])
            rows.append(online.issue(i, issues[i]))
        said.append(np.array(rows))
    assert np.array_equal(said[0][: row + 1], said[1][: row + 1], equal_nan=True)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(SERIES, POINTS, QUANTUM, HORIZON)
def test_each_series_by_itself(values, points, quantum, horizon) -> None:
    both = run(values, points, quantum, horizon, N_TIME)
    for i in range(N):
        alone = run(values[:, [i]], points[:, :, [i]], quantum[[i]], horizon, N_TIME)
        assert np.allclose(both[:, [i]], alone, rtol=1e-9, atol=1e-9, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(SERIES, POINTS, QUANTUM, HORIZON, st.integers(1, N_TIME - 2))
def test_a_restart_changes_nothing(values, points, quantum, horizon, row) -> None:
    online = ExpertAggregation(horizon, N, ("last", "a", "b"))
    plain = run(values, points, quantum, horizon, N_TIME)
    for i in range(N_TIME):
        if i == row:
            memory = online.memory()
            online = ExpertAggregation(horizon, N, ("last", "a", "b"))
            online.restore(memory)
        online.learn(i, values[i])
        assert np.array_equal(online.issue(i, issue_of(values, points, quantum, i)), plain[i], equal_nan=True)
