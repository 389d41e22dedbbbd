"""Saves and restarts that share a file system: exact ends, the mean under load, and predictions from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.checkpointing.contention import alone_s, restart_under_load_s, shared_s
from tests.support.shared_storage import finish_s
from twin.catalogue import F64

TRANSFERS = st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(TRANSFERS)
def test_transfers_end_as_in_small_steps_and_none_of_the_bandwidth_is_lost(
    transfers: list[tuple[float, float]],
) -> None:
    begin, work = np.array(transfers).T
    end = finish_s(begin, work)
    left, t, dt, stepped = work.copy(), 0.0, 0.02, np.full(len(work), np.nan)
    while np.isnan(stepped).any():
        active = (begin <= t) & (left > 0)
        left[active] -= dt / max(1, active.sum())
        t += dt
        stepped[active & (left <= 0)] = t
    assert end == pytest.approx(stepped, abs=0.04 * (1 + len(work)))
    assert end.max() >= work.sum() + begin.min() - 1e-9


def test_equal_transfers_that_begin_at_once_end_at_once() -> None:
    assert finish_s(np.zeros(5), np.full(5, 3.0)) == pytest.approx(np.full(5, 15.0))


def simulated(load: float, sizes: F64, seed: int) -> F64:
    """Times of transfers that arrive at random and keep the storage busy by `load`, but for the first."""
    rng = np.random.default_rng(seed)
    begin = np.cumsum(rng.exponential(sizes.mean() / load, len(sizes)))
    return (finish_s(begin, sizes) - begin)[200:]


@pytest.mark.parametrize("load", [0.3, 0.6])
@pytest.mark.parametrize("form", ["equal", "exponential"])
def test_the_mean_under_load_follows_the_closed_form_whatever_the_sizes(load: float, form: str) -> None:
    rng = np.random.default_rng(7)
    sizes = np.full(12_000, 20.0) if form == "equal" else rng.exponential(20.0, 12_000)
    found = simulated(load, sizes, 11)
    assert found.mean() == pytest.approx(float(shared_s(sizes[200:].mean(), load)), rel=0.05)


@pytest.mark.parametrize("then, now", [(0.0, 0.5), (0.2, 0.6), (0.6, 0.1)])
def test_restarts_are_predicted_within_a_tenth_when_the_load_changes(then: float, now: float) -> None:
    """A restart is 60 s to start, and a read of 45 s alone. Measured at one load, predicted for another."""
    start_s, read_s, other_s = 60.0, 45.0, 30.0

    def mean_restart(load: float, seed: int) -> float:
        if load == 0.0:
            return start_s + read_s
        rng, times = np.random.default_rng(seed), []
        for _ in range(400):  # one reader among saves that come at random
            n = int(2000 * load / other_s) + 1
            begin = np.sort(rng.uniform(0.0, 2000.0, rng.poisson(n)))
            begin = np.append(begin, 1000.0)
            work = np.append(np.full(len(begin) - 1, other_s), read_s)
            times.append(start_s + finish_s(begin, work)[-1] - 1000.0)
        return float(np.mean(times))

    measured = mean_restart(then, 3)
    predicted = restart_under_load_s(
        np.array([measured]), np.array([read_s]), np.array([then]), np.array([now])
    )
    assert float(predicted[0]) == pytest.approx(mean_restart(now, 5), rel=0.10)


def test_what_does_not_read_does_not_scale() -> None:
    out = restart_under_load_s(np.array([100.0, 100.0]), np.array([0.0, 500.0]), np.zeros(2), np.full(2, 0.5))
    assert out.tolist() == [100.0, 200.0], "a read takes no more than all of a restart"
    assert alone_s(shared_s(7.0, 0.4), 0.4) == pytest.approx(7.0)
