"""Advice at the client: the clock that counts, advice that replaces other advice, and refusals."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import racktwin_client.advisor as client
from racktwin_client.advisor import NOTHING, NS, Advisor, StandingAdvice, advice_of

from tests.support.checkpoint_advice import NOW_NS, advice


def test_advice_is_counted_from_when_it_was_heard() -> None:
    got = advice_of(
        advice(now_ns=NOW_NS, save_since_ns=NOW_NS - 5 * NS), "j", NOTHING, 100.0, NOW_NS + 10 * NS
    )
    assert got == StandingAdvice(60.0, (1, NOW_NS - 5 * NS), 95.0, 150.0, (1, NOW_NS))
    behind = advice_of(advice(now_ns=NOW_NS), "j", NOTHING, 100.0, NOW_NS - 86_400 * NS)
    assert behind.until == 160.0  # a clock that is behind prolongs nothing
    long = advice_of(advice(now_ns=NOW_NS, lease_s=1e6), "j", NOTHING, 100.0, NOW_NS)
    assert long.until == 100.0 + client.MAX_LEASE_S


def test_older_advice_changes_nothing_and_a_renewal_keeps_the_instant() -> None:
    wish = NOW_NS - 5 * NS
    first = advice_of(advice(now_ns=NOW_NS, save_since_ns=wish), "j", NOTHING, 100.0, NOW_NS)
    for epoch, age in ((1, 0), (1, 1), (0, -1)):
        body = advice(now_ns=NOW_NS - age * NS, epoch=epoch, interval_s=1.0)
        assert advice_of(body, "j", first, 101.0, NOW_NS) is first
    late = advice_of(advice(now_ns=NOW_NS + NS, save_since_ns=wish), "j", first, 109.0, NOW_NS + NS)
    assert late.since == 95.0
    assert advice_of(advice(now_ns=NOW_NS - 9 * NS, epoch=2), "j", first, 1.0, NOW_NS).order[0] == 2


def test_advice_that_ends_at_once_takes_back_what_was_said() -> None:
    first = advice_of(advice(now_ns=NOW_NS), "j", NOTHING, 100.0, NOW_NS)
    none = advice(now_ns=NOW_NS + 1, lease_s=0.0, interval_s=None)
    assert advice_of(none, "j", first, 101.0, NOW_NS) == StandingAdvice(order=(1, NOW_NS + 1))


said = partial(advice, now_ns=NOW_NS)
BAD = [
    b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 4000, b"9" * 4000, b'{"v":1,"job":"j"}', b" " * 5000,
    said(job="k"), said(v=2), said(interval_s=0), said(interval_s=-1), said(interval_s=math.nan),
    said(interval_s=math.inf), said(interval_s=1e8), said(interval_s="60"), said(interval_s=True),
    said(interval_s=[]), said(epoch=-1), said(epoch=None), said(epoch=1.5), said(epoch=True),
    said(epoch=2**62), said(issued_ns=None), said(expires_ns="x"), said(save_since_ns=-1),
    said(save_since_ns=""), said(save_since_ns=False), said(save_since_ns=1.5),
    said(reason="x" * 5000),
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        advice_of(body, "j", NOTHING, 100.0, NOW_NS)


def test_what_has_expired_by_this_clock_is_refused() -> None:
    assert advice_of(said(), "j", NOTHING, 100.0, NOW_NS).interval_s == 60.0
    with pytest.raises(ValueError, match="expired by the clock of this host"):
        advice_of(said(), "j", NOTHING, 100.0, NOW_NS + 60 * NS)


@pytest.mark.parametrize(
    "terms",
    [
        {}, {"own_interval_s": 0.0}, {"own_interval_s": -1.0}, {"own_interval_s": math.nan},
        {"most_share": 0.0}, {"most_share": 1.1}, {"poll_s": 0.0}, {"poll_s": math.inf},
        {"least_interval_s": -1.0},
        {"most_interval_s": -1.0}, {"job": ""},
    ],
)  # fmt: skip
def test_terms_of_the_job_itself_are_checked(terms: dict[str, Any]) -> None:
    given: dict[str, Any] = {"job": "j", "own_interval_s": 10.0} | terms if terms else {"job": "j"}
    with pytest.raises(ValueError, match="expected"):
        Advisor(**given)
