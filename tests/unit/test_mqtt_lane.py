"""A lane of its own for job reports: bounded by number and rate, and nobody waits behind it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from connectors.jobs import REPORT
from connectors.mqtt.lane import (
    ALL_AT_ONCE,
    ALL_PER_S,
    EACH_AT_ONCE,
    EACH_PER_S,
    MAX_TOPICS,
    MAX_WAITING,
    NS,
    Lane,
)
from connectors.mqtt.source import flood_of
from connectors.mqtt.wire import MessageBacklog, Parcel

T = 1_700_000_000 * NS


def parcel(topic: str, mid: int = 0, at_s: float = 0.0, size: int = 500) -> Parcel:
    return Parcel(T + round(at_s * NS), topic, b"", mid, False, size)


def test_a_job_that_floods_gets_its_burst_and_its_rate_and_others_theirs() -> None:
    lane, taken = Lane(REPORT), dict.fromkeys(("liar", "calm"), 0)
    for ms in range(10_000):
        for _ in range(2):
            taken["liar"] += lane.admits("liar", T + ms * NS // 1000, 0, 0)
        if ms % 1000 == 0:
            taken["calm"] += lane.admits("calm", T + ms * NS // 1000, 0, 0)
    assert taken["liar"] == pytest.approx(EACH_AT_ONCE + 10.0 * EACH_PER_S, abs=2)
    assert taken["calm"] == 10


def test_all_together_have_a_limit_and_names_are_bounded() -> None:
    lane = Lane(REPORT)
    taken = sum(lane.admits(f"job{k}", T + k * NS // 20_000, 0, 0) for k in range(3 * MAX_TOPICS))
    assert taken == pytest.approx(ALL_AT_ONCE + 3.0 * ALL_PER_S, abs=2)
    assert len(lane._of) == MAX_TOPICS
    assert len(lane._by) <= MAX_TOPICS


def test_who_floods_is_named_once_a_look() -> None:
    lane = Lane(REPORT)
    assert lane.take_refusals(T) is None
    for k in range(1000):
        lane.admits(REPORT + ("4711" if k % 10 else "other"), T, 0, 0)
    refused = lane.take_refusals(T + 2 * NS)
    assert refused is not None
    assert (refused.number, refused.topic, refused.of_topic) == (1000 - 228, REPORT + "4711", 900 - 128)
    assert refused.within_s == 2.0
    assert flood_of(refused) == (
        "386/s over the limit, 772 dropped, 772 of them from job 4711; check its client"
    )
    assert lane.take_refusals(T + 3 * NS) is None
    assert "\x1b" not in flood_of(refused._replace(topic=REPORT + "\x1b[31m"))


def test_readings_go_before_reports_and_reports_are_not_left_for_ever() -> None:
    backlog = MessageBacklog(1000, 10**9, Lane(REPORT))
    backlog.put([parcel(f"{REPORT}{k}") for k in range(20)])
    backlog.put([parcel(f"IT/v1/PUB/Frame/{k}") for k in range(100)])
    out = [backlog.pop().topic.startswith(REPORT) for _ in range(len(backlog))]
    assert not any(out[:8])
    assert sum(out[:90]) == 10, "every ninth"
    assert sum(out) == 20


def test_a_full_lane_costs_the_queue_of_readings_nothing() -> None:
    backlog = MessageBacklog(100, 10**6, Lane(REPORT))
    backlog.put([parcel("reading") for _ in range(90)])
    backlog.put([parcel(f"{REPORT}{k}", mid=1 + k % 65535) for k in range(3 * MAX_WAITING)])
    assert backlog.dropped == 0
    assert not backlog.blocked
    assert len(backlog) == 90 + MAX_WAITING
    assert len(backlog.refused) == 2 * MAX_WAITING, "they are acknowledged, or the broker sends no more"
    assert backlog.bytes == 90 * 500


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 400)), max_size=300))
def test_nothing_is_lost_but_what_is_counted(steps: list[tuple[bool, int, int]]) -> None:
    """Every publication is popped, refused or dropped; bytes and numbers always add up."""
    backlog, number, popped = MessageBacklog(20, 10**6, Lane(REPORT)), 0, 0
    for put, kind, count in steps:
        if put:
            topic = (REPORT + "a", REPORT + "b", "reading", "event")[kind]
            rows = [parcel(topic, mid=(kind == 3) * (1 + number % 65535)) for _ in range(count % 30)]
            number += len(rows)
            backlog.put(rows)
        else:
            for _ in range(min(count % 30, len(backlog))):
                backlog.pop()
                popped += 1
        assert backlog.lane is not None
        assert number == popped + len(backlog) + backlog.dropped + backlog.lane.refused
    while backlog:
        backlog.pop()
    assert (backlog.bytes, backlog._side_bytes, backlog.blocked) == (0, 0, False)
