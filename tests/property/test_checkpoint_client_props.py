"""Whatever a daemon says, the client in a job saves within its bounds, and raises ValueError alone."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given, strategies as st
from racktwin_client.advisor import MAX_INTERVAL_S, MAX_LEASE_S, NOTHING, NS, Pace, StandingAdvice, advice_of

SECONDS = st.floats(0.001, 1e5)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
KEYS = ("v", "job", "interval_s", "save_since_ns", "issued_ns", "expires_ns", "epoch", "reason")
INSTANT = st.integers(0, 2**62) | st.sampled_from([0, NS, 10 * NS])
LIKELY = {
    "v": st.just(1) | JSON,
    "job": st.just("j") | JSON,
    "interval_s": st.none() | SECONDS | JSON,
    "save_since_ns": st.none() | INSTANT | JSON,
    "issued_ns": INSTANT | JSON,
    "expires_ns": INSTANT | JSON,
    "epoch": st.integers(0, 3) | JSON,
}


@given(
    st.binary(max_size=200) | JSON.map(lambda x: json.dumps(x).encode()) | st.fixed_dictionaries(LIKELY).map(
        lambda x: json.dumps(x).encode()
    ),
    st.integers(0, 20 * NS),
    st.floats(0.0, 1e9),
    st.none() | st.tuples(st.integers(0, 2), st.integers(0, 20 * NS)),
)  # fmt: skip
def test_any_bytes_are_sound_advice_or_a_value_error(
    body: bytes, wall_ns: int, now: float, order: tuple[int, int] | None
) -> None:
    before = NOTHING if order is None else StandingAdvice(order=order)
    try:
        got = advice_of(body, "j", before, now, wall_ns)
    except ValueError:
        return
    assert got.order >= before.order
    assert got is before or got.order > before.order
    assert got.interval_s is None or 0 < got.interval_s <= MAX_INTERVAL_S
    if got is not before and (got.interval_s, got.want) != (None, None):
        told = json.loads(body)
        left_s = (told["expires_ns"] - max(wall_ns, told["issued_ns"])) / NS
        assert now <= got.until <= now + min(MAX_LEASE_S, left_s) * (1 + 1e-9) + 1e-6


@st.composite
def lives(draw: st.DrawFn) -> tuple[dict[str, float], list[tuple[float, float, bool, StandingAdvice]]]:
    """Terms of a job, and its steps: (how long one takes, how long its save, whether that works, advice)."""
    terms = {
        "own_s": draw(st.floats(1.0, 1000.0)),
        "least_s": draw(st.floats(0.01, 50.0)),
        "share": draw(st.floats(0.01, 1.0)),
    }
    held = st.builds(
        StandingAdvice,
        st.none() | st.floats(1e-6, 1e6),
        st.none() | st.tuples(st.integers(1, 2), st.integers(0, 5)),
        st.floats(0.0, 3000.0) | st.just(math.inf),
    )
    steps = draw(
        st.lists(
            st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.booleans(), held),
            min_size=1,
            max_size=60,
        )
    )
    return terms, steps


@given(lives())
def test_advice_only_saves_within_the_share_and_no_wait_is_longer_than_the_limit(
    life: tuple[dict[str, float], list[tuple[float, float, bool, StandingAdvice]]],
) -> None:
    terms, steps = life
    own_s, most_s = terms["own_s"], 2 * terms["own_s"]
    pace = Pace(0.0, own_s, 0, most_s, terms["least_s"], terms["share"])
    now = ended = extra = longest = 0.0
    tried_until = 0.0
    for step_s, save_s, ok, held in steps:
        now += step_s
        due = pace.due(now, None, held)
        if now - ended >= most_s and now >= tried_until:
            assert due, "it never waits longer than its limit"
        if held.interval_s is None and now - ended >= own_s and now >= tried_until:
            assert due, "without advice on the interval its own holds"
        if not due:
            continue
        if now - ended < own_s:
            assert held.interval_s is not None or held.want is not None
            assert now - ended >= terms["least_s"]
            extra, longest = extra + save_s, max(longest, save_s)
        pace.ended(now + save_s, now, ok)
        longest = max(longest, save_s)
        now += save_s
        ended = now if ok else ended
        tried_until = 0.0 if ok else now + own_s
    assert extra <= terms["share"] * now + 2 * longest + 1e-6


@given(lives(), st.integers(0, 3))
def test_each_wish_is_answered_once(
    life: tuple[dict[str, float], list[tuple[float, float, bool, StandingAdvice]]], number: int
) -> None:
    """The same wish at every step brings at most one save that works."""
    _, steps = life
    pace = Pace(0.0, 1e9, 0, 1e9, 0.01, 0.5)
    now, made = 0.0, 0
    for step_s, save_s, ok, held in steps:
        now += step_s
        if pace.due(now, None, StandingAdvice(None, (1, number), held.since)):
            pace.ended(now + save_s, now, ok)
            now, made = now + save_s, made + ok
    assert made <= 1
