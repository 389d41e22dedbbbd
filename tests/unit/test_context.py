"""Restlessness and the sample of the recent past: closed forms, gaps, one origin as all of them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from models.load import CALM_ROWS, recent_sample, restlessness
from models.load.context import BRISK_ROWS, RECENT_ROWS, RECENT_SAMPLE
from twin.catalogue import F64


def at_end(values: F64) -> F64:
    return restlessness(values, np.array([len(values) - 1]))[0]


def column(*values: float) -> F64:
    return np.array(values)[:, None]


def test_a_ramp_is_as_restless_as_it_is_steep() -> None:
    rows = np.arange(1000.0)[:, None] * np.array([0.0, 2.0, -5.0])
    assert at_end(rows) == pytest.approx([0.0, 2.0, 5.0])
    assert at_end(rows[:2]) == pytest.approx([0.0, 2.0, 5.0])


def test_a_burst_counts_at_once_and_is_forgotten() -> None:
    """Calm for long, then 10 a row for as long as the brisk half sees: half of 10, and a share."""
    values = np.zeros((2000, 1))
    values[1000 : 1000 + BRISK_ROWS, 0] = np.tile([10.0, 0.0], BRISK_ROWS // 2)
    said = restlessness(values, np.arange(2000))[:, 0]
    assert said[999] == 0.0
    assert said[1000 + BRISK_ROWS - 1] == pytest.approx(5.0 + 5.0 * BRISK_ROWS / CALM_ROWS)
    assert said[1000 + CALM_ROWS + BRISK_ROWS] == 0.0


def test_before_any_change_nothing_is_known() -> None:
    assert np.isnan(at_end(column(5.0)))
    assert np.isnan(at_end(column(np.nan, np.nan, 5.0)))
    assert np.isnan(at_end(np.full((700, 1), np.nan)))
    assert at_end(column(np.nan, 5.0, 7.0)) == pytest.approx([2.0])


def test_silence_is_not_calm() -> None:
    """A series that alternates by 4, and was then not heard for an hour, is as restless as it was."""
    values = np.tile([0.0, 4.0], 400)[:, None]
    before = at_end(values)
    assert before == pytest.approx([4.0])
    for rows in (20, BRISK_ROWS, 60, CALM_ROWS - 1):
        silent = np.vstack([values, np.full((rows, 1), np.nan)])
        assert at_end(silent) == pytest.approx(before)
    assert np.isnan(at_end(np.vstack([values, np.full((CALM_ROWS, 1), np.nan)])))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 700), st.floats(0.0, 0.9))
def test_one_origin_is_as_all_of_them_and_reads_no_further(seed: int, n_time: int, silent: float) -> None:
    rng = np.random.default_rng(seed)
    values = np.cumsum(rng.normal(size=(n_time, 2)), axis=0)
    values[rng.random((n_time, 2)) < silent] = np.nan
    origins = np.unique(rng.integers(0, n_time, 10))
    together = restlessness(values, origins)
    for i, origin in enumerate(origins.tolist()):
        alone = at_end(values[: origin + 1])
        np.testing.assert_allclose(alone, together[i], rtol=1e-9, atol=1e-12)
        # As the daemon does it: no more rows than count.
        shortened = at_end(values[max(0, origin - CALM_ROWS) : origin + 1])
        if silent == 0.0:
            np.testing.assert_allclose(shortened, together[i], rtol=1e-9, atol=1e-12)
    assert (together[np.isfinite(together)] >= 0.0).all()


def test_the_sample_is_of_the_past_even_and_bounded() -> None:
    values = np.arange(5000.0)[:, None]
    for row in (0, 1, 50, RECENT_SAMPLE, 1999, 2000, 4999):
        sample = recent_sample(values, row)[:, 0]
        assert len(sample) == min(row + 1, RECENT_SAMPLE)
        assert sample[-1] == row
        assert sample[0] == max(0, row + 1 - RECENT_ROWS)
        gaps = np.diff(sample)
        assert gaps.size == 0 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)
