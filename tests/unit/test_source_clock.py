"""The clock of a source: a step back is found and corrected, a slow path and a backlog are not touched."""

from __future__ import annotations

import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import NS
from twin.daemon import Ingest
from twin.sources import SourceClock
from twin.telemetry import Reading

T = 1_700_000_000 * NS
HOUR_S = 3600.0


def stamps(clock: SourceClock, *messages: tuple[float, float]) -> list[float]:
    """What becomes of the stamps of messages (arrival, stamp), in seconds from T."""
    out = []
    for arrival_s, stamp_s in messages:
        reading = Reading("rack", 0, "power_w", 1.0, T + round(stamp_s * NS))
        (found,) = clock.corrected([reading], T + round(arrival_s * NS))
        out.append((found.t_ns - T) / NS)
    return out


def test_a_clock_that_is_set_back_is_corrected_from_the_second_message_on() -> None:
    clock = SourceClock()
    before = [(10.0 * k, 10.0 * k - 1.0) for k in range(5)]
    assert stamps(clock, *before) == [s for _, s in before]
    late = [(50.0, 50.0 - HOUR_S), (60.0, 60.0 - HOUR_S), (70.0, 70.0 - HOUR_S)]
    assert stamps(clock, *late) == [50.0 - HOUR_S, 60.0, 70.0]
    assert stamps(clock, (80.0, 79.0)) == [79.0]
    assert clock.back_ns == 0


@pytest.mark.parametrize(
    "messages",
    [
        [(600.0, 50.0 + k) for k in range(60)],  # what was kept while the broker was away, at once
        [(600.0 + k, 50.0 + 10.0 * k) for k in range(50)],  # the same, more slowly
        [(600.0 + 10 * k, 50.0 + 10.0 * k) for k in range(50)],  # a path that became slow
        [
            (50.0 + k, 45.0 - 700.0 * (k % 3)) for k in range(50)
        ],  # points of a gateway that have stood for long
    ],
    ids=["backlog", "slow backlog", "slow path", "old points"],
)
def test_what_is_late_in_order_is_late(messages: list[tuple[float, float]]) -> None:
    clock = SourceClock()
    stamps(clock, *((10.0 * k, 10.0 * k - 1.0) for k in range(5)))
    assert stamps(clock, *messages) == [s for _, s in messages]


def test_a_clock_that_was_late_from_the_beginning_is_left() -> None:
    late = [(10.0 * k, 10.0 * k - HOUR_S) for k in range(9)]
    assert stamps(SourceClock(), *late) == [s for _, s in late]


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_a_wrong_clock_is_one_sentence_until_it_is_right(offset_s: float) -> None:
    ingest = Ingest(site_of(two_racks()), {})
    account = ingest.of("topic telegraf/gpu001")
    found = []
    for k in range(60):
        now_ns = T + 10 * k * NS
        off_s = offset_s if 20 <= k < 40 else 0.0
        account.stage([Reading("rack", 0, "power_w", 1.0, now_ns + round(off_s * NS))], now_ns)
        found.append(ingest.ledger.wrong_clocks(now_ns))
    assert not any(found[:20])
    assert not any(found[48:])
    ((text,),) = [found[39]]
    side = "ahead of" if offset_s > 0 else "behind"
    assert text == f"topic telegraf/gpu001: 1 h {side} our clock; its readings count from their arrival"
