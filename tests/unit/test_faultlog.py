"""The log of faults: what was known when, who is a candidate, and what came next."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.failure import FaultLog, scrambled
from tests.support.fault_logs import CLASSES, fleet, log_of
from twin.catalogue import ContractError

LOG = log_of([(0, 1.5, 4.0, 0), (1, 2.0, 2.0, 1), (0, 6.0, 99.0, 0)], 3, 10.0)


def test_a_fault_that_was_open_that_day_has_no_known_end() -> None:
    known = LOG.known_at(3.0)
    assert known.start_d.tolist() == [1.5, 2.0]
    assert known.end_d.tolist() == [np.inf, 2.0]
    assert known.until_d == 3.0
    assert LOG.known_at(4.0).end_d.tolist() == [4.0, 2.0]


def test_a_node_under_repair_is_no_candidate() -> None:
    up = LOG.up(np.array([1.0, 2.0, 4.0, 7.0]))
    assert up.tolist() == [[True, True, True], [False, True, True], [True, True, True], [False, True, True]]


def test_next_start_and_counts() -> None:
    days = np.array([0.0, 1.5, 6.0])
    assert LOG.next_start(days).tolist() == [
        [1.5, 2.0, np.inf], [6.0, 2.0, np.inf], [np.inf, np.inf, np.inf],
    ]  # fmt: skip
    assert LOG.counts(days, 4.5).tolist() == [2.0, 2.0, 0.0]
    assert LOG.down_d(7.0).tolist() == [3.5, 0.0, 0.0]


@given(st.integers(0, 50), st.floats(5.0, 60.0))
def test_next_start_is_the_first_of_the_later_ones(seed: int, day: float) -> None:
    log = fleet(seed, n=8, days=60.0, rate=0.05)
    days = np.sort(np.array([day, day / 2.0]))
    found, up = log.next_start(days), log.up(days)
    for i, at in enumerate(days):
        for node in range(log.n):
            mine = log.start_d[(log.node == node) & (log.start_d > at)]
            assert found[i, node] == (mine.min() if len(mine) else np.inf)
            repair = (log.node == node) & (log.start_d <= at) & (log.end_d > at)
            assert up[i, node] == (not repair.any())


def test_a_scrambled_log_is_the_same_up_to_that_day_and_no_further() -> None:
    log = fleet(1)
    other = scrambled(log, 50.0)
    one, two = log.known_at(50.0), other.known_at(50.0)
    assert all(np.array_equal(getattr(one, k), getattr(two, k)) for k in ("node", "start_d", "end_d", "kind"))
    assert other.known_at(51.0).k > log.known_at(51.0).k
    open_then = log.known_at(80.0).end_d == np.inf
    assert not np.isinf(scrambled(log, 80.0).end_d[: len(open_then)][open_then]).any()


@pytest.mark.parametrize(
    "change",
    [{"node": np.array([3], np.int32)}, {"end_d": np.array([0.5])}, {"start_d": np.array([11.0])},
     {"kind": np.array([9], np.int32)}, {"start_d": np.array([np.nan])}, {"kind": np.zeros(2, np.int32)}],
)  # fmt: skip
def test_what_is_no_log_is_refused(change: dict[str, np.ndarray]) -> None:
    good = {"node": np.zeros(1, np.int32), "start_d": np.ones(1), "end_d": np.full(1, 2.0),
            "kind": np.zeros(1, np.int32)}  # fmt: skip
    FaultLog(n=3, classes=CLASSES, begin_d=0.0, until_d=10.0, **good)
    with pytest.raises(ContractError):
        FaultLog(n=3, classes=CLASSES, begin_d=0.0, until_d=10.0, **(good | change))
