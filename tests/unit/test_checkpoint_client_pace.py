"""Times of saves: the job's own interval, the advised one, and the share that saves may cost at most."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from racktwin_client.advisor import NOTHING, Advisor, Pace, StandingAdvice

from tests.support.checkpoint_advice import advice, held, made, pace, put, reports, wait

__all__ = ["made"]


def saves(
    p: Pace, until: float, said: Callable[[float], StandingAdvice] = lambda now: NOTHING, cost_s: float = 1.0
) -> list[float]:
    """Return when a job that asks every half second begins to save, and trains and saves on."""
    now, found = 0.0, []
    while now < until:
        now += 0.5
        if p.due(now, None, said(now)):
            found.append(now)
            p.ended(now + cost_s, now)
            now += cost_s
    return found


def test_without_advice_the_own_interval_counts_from_the_end_of_a_save() -> None:
    assert saves(pace(10.0), 40.0) == [10.0, 21.0, 32.0]


def test_own_steps_and_a_count_that_goes_back() -> None:
    p = Pace(0.0, math.inf, 3, math.inf, 1.0, 0.2)
    found = []
    for at, step in enumerate([500, 501, 502, 503, 504, 505, 506, 0, 1, 2, 3]):
        if p.due(float(at), step):
            found.append(step)
            p.ended(float(at), float(at))
    assert found == [502, 505, 2]
    calls = Pace(0.0, math.inf, 3, math.inf, 1.0, 0.2)
    assert [calls.due(float(i)) for i in range(6)] == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("advised_s", "first"), [(20.0, 20.0), (0.001, 1.0), (150.0, 150.0), (1e6, 400.0), (100.0, 100.0)]
)
def test_advice_moves_the_first_save_within_its_limits(advised_s: float, first: float) -> None:
    p = pace()
    assert p.in_force(held(advised_s)) == (1.0 if advised_s < 1 else min(advised_s, 400.0))
    assert saves(p, 500.0, lambda now: held(advised_s))[0] == first


def test_saves_to_memory_follow_their_own_advice(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    """Nothing is due there until it is advised; a durable save counts as one in memory as well."""
    advisor = made(most_share=1.0)
    assert not advisor.due(0, tier="memory")
    wait(lambda: reports(tmp_path))
    assert not [r for r in reports(tmp_path) if r["tier"] == "memory"], "it has no interval to tell"
    put(tmp_path, advice(interval_s=600.0, local_interval_s=300.0))
    wait(lambda: [r for r in reports(tmp_path) if r["tier"] == "memory"])
    told = {r["tier"]: r["interval_s"] for r in reports(tmp_path)}
    assert told == {"durable": 600.0, "memory": 300.0}

    def later() -> bool:
        """Return True if a save is due in memory, and only there, five minutes after the last."""
        advisor._local._ended -= 300.0
        return advisor.due(tier="memory") and not advisor.due()

    assert not advisor.due(tier="memory")
    for tier in ("memory", "durable"):
        assert later()
        with advisor.saving(tier):
            pass
        assert not advisor.due(tier="memory"), "each counts"
    put(tmp_path, advice(interval_s=600.0, issued_ns=time.time_ns()))
    wait(lambda: advisor._held.local_s is None)
    assert not later()


def test_a_job_that_never_asks_for_memory_does_not_claim_to_follow(
    tmp_path: Path, made: Callable[..., Advisor]
) -> None:
    advisor = made()
    put(tmp_path, advice(interval_s=600.0, local_interval_s=30.0))
    wait(lambda: advisor.interval_s == 600.0)
    with advisor.saving("memory"):
        pass
    wait(lambda: [r for r in reports(tmp_path) if r["tier"] == "memory"])
    assert {r["interval_s"] for r in reports(tmp_path) if r["tier"] == "memory"} == {0.0}


def test_a_jobs_own_interval_in_memory_holds_without_advice(
    tmp_path: Path, made: Callable[..., Advisor]
) -> None:
    advisor = made(own_local_interval_s=0.2)
    wait(lambda: [r for r in reports(tmp_path) if r["tier"] == "memory"])
    assert {r["interval_s"] for r in reports(tmp_path) if r["tier"] == "memory"} == {0.2}
    wait(lambda: advisor.due(tier="memory"))
    with pytest.raises(ValueError, match="above 0"):
        Advisor("j", "", 60.0, own_local_interval_s=0.0)


def test_a_lie_costs_no_more_than_the_share() -> None:
    found = saves(pace(1e6), 10_000.0, lambda now: held(0.001), cost_s=10.0)
    assert 0.19 < 10.0 * len(found) / 10_000.0 < 0.205


def test_an_interval_that_is_worth_it_is_kept_within_the_share() -> None:
    found = saves(pace(3600.0), 10_000.0, lambda now: held(840.0), cost_s=60.0)
    assert [b - a for a, b in pairwise(found)] == [900.0] * 10


def test_one_save_for_a_wish_and_the_next_wish_finds_something_left() -> None:
    p = pace(1000.0)
    wish = lambda now: held(None, (1, 7) if now < 900 else (1, 8), 450.0 if now < 900 else 960.0)  # noqa: E731
    found = saves(p, 1100.0, wish, cost_s=20.0)
    assert found == [450.0, 960.0]


def test_a_wish_ends_with_a_save_that_began_later_whatever_its_reason() -> None:
    p = pace(100.0)
    assert p.due(100.0)
    p.ended(101.0, 100.0)
    assert not p.due(150.0, None, held(None, (1, 5), 99.0))
    assert p.due(150.5, None, held(None, (1, 6), 100.5))


def test_a_wish_that_is_heard_again_late_brings_no_second_save() -> None:
    p = pace(1000.0)
    assert p.due(50.0, None, held(None, (1, 5), 50.0))
    p.ended(51.0, 50.0)
    assert not p.due(100.0, None, held(None, (1, 5), 90.0))
    assert p.due(101.0, None, held(None, (2, 5), 90.0))


def test_a_wish_for_later_waits() -> None:
    p = pace(100.0)
    assert not p.due(50.0, None, held(None, (1, 5), 60.0))
    assert p.due(60.0, None, held(None, (1, 5), 60.0))


def test_a_save_that_fails_is_tried_again_later_the_longer_it_took() -> None:
    p = pace(100.0)
    assert p.due(100.0)
    p.ended(104.0, 100.0, ok=False)
    assert not p.due(123.5)
    assert p.due(124.0)  # 4 s at a share of 0.2
    p.ended(125.0, 124.0)
    assert not p.due(224.5)
    assert p.due(225.0)


def test_a_save_that_nobody_measures_counts_until_the_next_question() -> None:
    p = pace(1e6, share=0.1)
    assert p.due(5.0, None, held(2.0))
    assert not p.due(15.0, None, held(2.0))
    assert not p.due(104.5, None, held(2.0))
    assert p.due(105.0, None, held(2.0))  # 10 s paid at 0.1 a second


def test_no_closer_than_the_storage_takes_them() -> None:
    p = pace(1000.0)
    p.flush_s = 90.0
    assert saves(p, 300.0, lambda now: held(10.0))[0] == 90.0
