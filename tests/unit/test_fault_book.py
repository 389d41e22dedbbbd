"""The fault book: what is counted, what stays open, and whatever devices may send."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import site_of, two_racks
from tests.support.error_logs import DAY, HOUR, MINUTE, NOW, SITE, fault, heard, opened, within
from twin.catalogue import NS, pack
from twin.health.error_log import MAX_DETAIL, MAX_TIMES, FaultBook
from twin.telemetry import FaultReported

BIG = 2**80


@pytest.mark.parametrize(
    "event, expected",
    [
        (fault(), (1, 1, 1)),
        (fault(ago_s=5 * MINUTE), (1, 1, 1)),
        (fault(ago_s=11 * MINUTE), (0, 1, 1)),
        (fault(ago_s=23 * HOUR), (0, 1, 1)),
        (fault(ago_s=25 * HOUR), (0, 0, 1)),
        (fault(ago_s=27.9 * DAY), (0, 0, 1)),
        (fault(ago_s=28 * DAY), (0, 0, 0)),
        (fault(ago_s=4000 * DAY), (0, 0, 0)),
        (fault(ago_s=-3 * DAY), (1, 1, 1)),  # the device's clock is fast
        (fault(at_ns=-1), (1, 1, 1)),
        (fault(at_ns=BIG), (1, 1, 1)),
        (fault(count=7), (7, 7, 7)),
        (fault(count=0), (1, 1, 1)),
        (fault(count=-BIG), (1, 1, 1)),
        (fault(code=999), (1, 1, 1)),
        (fault(code=-BIG), (1, 1, 1)),
        (fault(code=2**31 - 1), (1, 1, 1)),
        (fault(code=43), (0, 0, 0)),  # means nothing by itself
    ],
)
def test_where_a_fault_counts(event: FaultReported, expected: tuple[int, ...]) -> None:
    book = heard(event)
    assert within(book) == expected
    assert within(book, 1) == (0, 0, 0)
    pack(book.dump())


@pytest.mark.parametrize(
    "event, what",
    [
        (fault(ago_s=29 * DAY), "too_old"),
        (fault(ago_s=-1), "from_the_future"),
        (fault(at_ns=-1), "absurd_times"),
        (fault(count=0), "absurd_counts"),
        (fault(count=BIG), "absurd_counts"),
        (fault(code=BIG), "absurd_codes"),
        (fault(code=999), "unknown_codes"),
        (fault(table="weather"), "unknown_tables"),
        (fault(table="job", name="lab/job0"), "unknown_tables"),
        (fault(name="r1/node0/gpu1"), "unknown_entities"),
        (fault(name=""), "unknown_entities"),
        (fault(table="switch", name="r9/node0/nvswitch1"), "unknown_entities"),
    ],
)
def test_what_is_odd_is_counted(event: FaultReported, what: str) -> None:
    assert heard(event).counts[what] == 1
    assert heard(fault()).counts == {"heard": 1}


def test_a_count_without_end_fills_its_buckets_and_no_more() -> None:
    book = heard(*[fault(count=60_000)] * 5, fault(1, count=MAX_TIMES), fault(2, count=MAX_TIMES + 1))
    assert within(book) == within(book, 1) == (2**16 - 1,) * 3
    assert within(book, 2) == (1, 1, 1), "a count that cannot be is one"
    book.advance(NOW + 40 * DAY * NS)
    assert within(book) == (0, 0, 0)


def test_counts_run_out_as_time_goes_by() -> None:
    book = heard(fault())
    seen = []
    for later_s in (9 * MINUTE, 12 * MINUTE, 23 * HOUR, 26 * HOUR, 27 * DAY, 30 * DAY):
        book.advance(NOW + later_s * NS)
        seen.append(within(book))
    assert seen == [(1, 1, 1), (0, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 1), (0, 0, 0)]
    book.advance(NOW)  # time does not run back
    assert within(book) == (0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # GPU
            st.sampled_from([95, 79, 31, 43, 999, 12]),
            st.integers(-5, 30 * DAY),  # seconds ago, by the device's clock
            st.integers(1, 9),
            st.integers(0, 5),  # batch
        ),
        max_size=60,
    ),
    st.integers(1, 3 * DAY),
)
def test_counts_are_those_of_a_list_of_all_faults(
    draws: list[tuple[int, int, int, int, int]], step_s: int
) -> None:
    book, known = FaultBook(SITE), set[tuple[int, int, int]]()
    kept: list[tuple[int, int, int, int]] = []
    for number in range(6):
        now_ns = NOW + number * step_s * NS
        events = []
        for gpu, code, ago_s, times, batch in draws:
            if batch != number:
                continue
            at_ns = now_ns - ago_s * NS
            events.append(fault(gpu, code, at_ns=at_ns, count=times))
            clamped_ns = min(at_ns, now_ns)
            if ago_s < 28 * DAY and (gpu, code, clamped_ns) not in known:
                known.add((gpu, code, clamped_ns))
                kept.append((gpu, code, clamped_ns, times))
        book.receive(events, now_ns)
        for gpu in range(4):
            for span_s, bucket_s, counted in zip(
                (600, DAY, 28 * DAY), (MINUTE, HOUR, DAY), within(book, gpu), strict=True
            ):
                mine = [(at, n) for g, c, at, n in kept if g == gpu and c != 43]
                least = sum(n for at, n in mine if now_ns - at < span_s * NS)
                most = sum(n for at, n in mine if now_ns - at < (span_s + bucket_s) * NS)
                assert least <= counted <= most


def test_what_got_past_the_intake_twice_counts_once() -> None:
    again = fault(ago_s=30, id="one")
    book = heard(again, fault(ago_s=30, id="two"), fault(ago_s=31), fault(1, ago_s=30))
    assert within(book) == (2, 2, 2)
    assert not book.receive([again, again], NOW + 60 * NS)
    assert within(book) == (2, 2, 2)
    assert book.counts["heard_twice"] == 3
    book.receive([fault(), fault()], NOW + 60 * NS)  # nobody says when: each counts
    assert within(book) == (4, 4, 4)


def test_the_same_code_five_times_in_a_day() -> None:
    events = [fault(2, 31, ago_s=i * HOUR) for i in range(5)] + [fault(1, 31, ago_s=i) for i in range(4)]
    book = heard(*events, fault(0, 94, count=6), fault(0, 13, count=4), fault(3, 43, count=9))
    entity, code, count = book.repeated("gpu")
    assert list(zip(entity.tolist(), code.tolist(), count.tolist(), strict=True)) == [(0, 94, 6), (2, 31, 5)]
    book.advance(NOW + 23 * HOUR * NS)
    assert book.repeated("gpu")[0].tolist() == [0]
    assert [len(x) for x in book.repeated("node")] == [0, 0, 0]


def test_switches_that_the_site_does_not_list_are_shown_on_their_node() -> None:
    def event(table: str, name: str) -> FaultReported:
        return fault(code=20034, table=table, name=name)

    book = heard(event("switch", "r1/node3/nvswitch1"), event("node", "r1/node4"))
    assert book.open_code("node").tolist() == [0, 0, 0, 20034, 20034, 0, 0, 0]
    assert book.of("node", 3)[0].code == 20034
    tree = two_racks()
    tree["halls"][0]["switches"] = [{"name": "sw[1-2]"}]
    listed = site_of(tree)
    book = FaultBook(listed)
    book.receive([event("switch", listed.name("switch", 1))], NOW)
    assert opened(book, 1, "switch") == ("reboot_node", 20034)
    assert not book.open_code("node").any()


def test_what_is_told_of_a_device() -> None:
    book = heard(fault(0, 79, 50, detail="y" * 999), fault(0, 31, 90, detail="first", count=3), fault(1, 48))
    book.receive([fault(0, 31, 10, detail="last"), fault(0, 31, 70)], NOW + NS)
    told = book.of("gpu", 0)
    assert [(h.code, (NOW - h.at_ns) // NS, h.times) for h in told] == [
        (31, 90, 3), (31, 70, 1), (79, 50, 1), (31, 10, 1),
    ]  # fmt: skip
    assert told[-1].detail == "last"
    assert len(told[-2].detail) == MAX_DETAIL
    assert [h.received_ns - NOW for h in told] == [0, NS, 0, NS]
    assert book.of("gpu", 7) == book.of("cdu", 0) == ()


def test_decayed_counts_by_class() -> None:
    book = heard(fault(0, 95, count=2), fault(0, 48, ago_s=DAY), fault(1, 79), fault(2, 43))
    names, values = book.by_class()
    assert values.shape == (len(names), 8)
    memory, bus, app = (names.index(n) for n in ("memory", "bus", "app"))
    assert values[memory, 0] == pytest.approx(2 + np.exp(-1))
    assert values[bus, 1] == values[app, 2] == 1.0  # what means nothing by itself may still foretell
    assert values.sum() == pytest.approx(4 + np.exp(-1))
    for _ in range(3):
        book.receive([fault(3, 95, ago_s=0.0)], NOW + 20 * DAY * NS)
        assert book.by_class()[1][memory, 0] == pytest.approx((2 + np.exp(-1)) * np.exp(-20), rel=1e-3)
