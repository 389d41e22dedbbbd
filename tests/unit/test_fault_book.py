"""The fault book: what is counted, what stays open, and whatever devices may send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import START_NS, eight_nodes, site_of, two_racks
from twin.events import FaultReported, JobEnded, JobStarted
from twin.frame import NS
from twin.health.fault_book import MAX_DETAIL, MAX_DETAILS, MAX_TIMES, FaultBook
from twin.health.fault_counts import MAX_CODES, MAX_UNKNOWN, FaultCounts
from twin.health.levels import ACTIONS, action
from twin.jobs import Jobs
from twin.tree import digest, pack, unpack

SITE = site_of(eight_nodes())  # r1/node0/gpu0 .. r1/node7/gpu0: GPU i is node i's
MINUTE, HOUR, DAY = 60, 3600, 86_400
NOW = START_NS
BIG = 2**80


def fault(gpu: int = 0, code: int = 95, ago_s: float | None = None, **more: Any) -> FaultReported:
    at_ns = 0 if ago_s is None else NOW - round(ago_s * NS)
    given = {"table": "gpu", "name": f"r1/node{gpu}/gpu0", "code": code, "at_ns": at_ns}
    return FaultReported(**(given | more))


def heard(*events: FaultReported, now_ns: int = NOW) -> FaultBook:
    book = FaultBook(SITE)
    book.hear(events, now_ns)
    return book


def within(book: FaultBook, gpu: int = 0, table: str = "gpu") -> tuple[int, ...]:
    return tuple(int(book.within(table, span)[gpu]) for span in (600, DAY, 28 * DAY))


def opened(book: FaultBook, gpu: int = 0, table: str = "gpu") -> tuple[str, int]:
    return ACTIONS[book.open_action(table)[gpu]], int(book.open_code(table)[gpu])


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
        book.hear(events, now_ns)
        for gpu in range(4):
            for span_s, bucket_s, counted in zip(
                (600, DAY, 28 * DAY), (MINUTE, HOUR, DAY), within(book, gpu), strict=True
            ):
                mine = [(at, n) for g, c, at, n in kept if g == gpu and c != 43]
                least = sum(n for at, n in mine if now_ns - at < span_s * NS)
                most = sum(n for at, n in mine if now_ns - at < (span_s + bucket_s) * NS)
                assert least <= counted <= most


def test_the_order_of_arrival_does_not_matter_to_counts() -> None:
    rng = np.random.default_rng(3)
    events = [
        fault(int(g), int(c), float(s))
        for g, c, s in zip(
            rng.integers(0, 8, 300), rng.choice([79, 95, 31, 999], 300), rng.uniform(0, 28 * DAY, 300),
            strict=True,
        )
    ]  # fmt: skip
    one = heard(*events)
    other = FaultBook(SITE)
    for i in rng.permutation(300).tolist():
        other.hear([events[i]], NOW)
    for span in (600, DAY, 28 * DAY):
        assert np.array_equal(one.within("gpu", span), other.within("gpu", span))
    np.testing.assert_allclose(one.by_class()[1], other.by_class()[1], rtol=1e-4, atol=1e-9)
    assert [one.of("gpu", g) for g in range(8)] == [other.of("gpu", g) for g in range(8)]


def test_what_got_past_the_intake_twice_counts_once() -> None:
    again = fault(ago_s=30, id="one")
    book = heard(again, fault(ago_s=30, id="two"), fault(ago_s=31), fault(1, ago_s=30))
    assert within(book) == (2, 2, 2)
    assert not book.hear([again, again], NOW + 60 * NS)
    assert within(book) == (2, 2, 2)
    assert book.counts["heard_twice"] == 3
    book.hear([fault(), fault()], NOW + 60 * NS)  # nobody says when: each counts
    assert within(book) == (4, 4, 4)


def test_the_same_code_five_times_in_a_day() -> None:
    events = [fault(2, 31, ago_s=i * HOUR) for i in range(5)] + [fault(1, 31, ago_s=i) for i in range(4)]
    book = heard(*events, fault(0, 94, count=6), fault(0, 13, count=4), fault(3, 43, count=9))
    entity, code, count = book.repeated("gpu")
    assert list(zip(entity.tolist(), code.tolist(), count.tolist(), strict=True)) == [(0, 94, 6), (2, 31, 5)]
    book.advance(NOW + 23 * HOUR * NS)
    assert book.repeated("gpu")[0].tolist() == [0]
    assert [len(x) for x in book.repeated("node")] == [0, 0, 0]


@pytest.mark.parametrize(
    "codes, expected",
    [
        ((), ("none", 0)),
        ((43, 63), ("none", 0)),
        ((31,), ("restart_app", 31)),
        ((31, 13), ("restart_app", 31)),  # of equals the first
        ((31, 95, 13), ("reset_gpu", 95)),
        ((95, 79, 48), ("reboot_node", 79)),
        ((79, 999), ("reboot_node", 79)),  # what nobody knows hides nothing grave
        ((999, 79), ("reboot_node", 79)),
        ((999, 31), ("run_diagnostics", 999)),
        ((79, 167), ("drain", 167)),
    ],
)
def test_the_strongest_action_is_open(codes: tuple[int, ...], expected: tuple[str, int]) -> None:
    assert opened(heard(*[fault(0, code) for code in codes])) == expected
    book = FaultBook(SITE)
    for i, code in enumerate(codes):
        grave = book.hear([fault(0, code)], NOW + i * NS)
        assert grave == (code in (95, 79, 48, 167))
    assert opened(book) == expected
    assert bool(book.open_grave("gpu")[0]) == bool({95, 79, 48, 167} & set(codes))


def test_an_action_is_open_until_it_is_done() -> None:
    book = heard(fault(0, 95), fault(1, 79), fault(2, 167), fault(3, 999))
    every = np.arange(8, dtype=np.int32)
    book.resolve("gpu", every, action("reset_gpu"), NOW + 60 * NS)
    assert [opened(book, g)[1] for g in range(4)] == [0, 79, 167, 999]
    book.resolve("gpu", every[:2], action("reboot_node"), NOW + 120 * NS)
    assert [opened(book, g)[1] for g in range(4)] == [0, 0, 167, 999]
    book.resolve("gpu", every, action("replace"), NOW + 180 * NS)
    assert not book.open_action("gpu").any()
    assert within(book, 1) == (1, 1, 1), "what happened has happened"
    book.resolve("cdu", every[:0], action("replace"), NOW)


def test_what_was_asked_after_a_reboot_stays_when_the_reboot_is_learnt_of() -> None:
    book = heard(fault(0, 79), fault(1, 79), fault(2, 167))
    book.hear([fault(0, 95), fault(1, 31), fault(2, 95)], NOW + 60 * NS)
    assert [opened(book, g)[1] for g in range(3)] == [79, 79, 167]
    book.resolve("gpu", np.arange(3, dtype=np.int32), action("reboot_node"), NOW + 30 * NS)
    assert [opened(book, g) for g in range(3)] == [("reset_gpu", 95), ("restart_app", 31), ("drain", 167)]
    book.resolve("gpu", np.arange(3, dtype=np.int32), action("replace"), NOW + 90 * NS)
    assert not book.open_action("gpu").any()


def test_a_late_fault_from_before_the_reboot_opens_nothing() -> None:
    book = heard(fault(0, 79))
    book.resolve("gpu", np.array([0], np.int32), action("reboot_node"), NOW + 60 * NS)
    late = [fault(0, 79, at_ns=NOW + 30 * NS), fault(0, 167, at_ns=NOW + 30 * NS)]
    book.hear(late[:1], NOW + 90 * NS)
    assert opened(book) == ("none", 0)
    book.hear(late[1:], NOW + 91 * NS)  # more than a reboot was asked for
    assert opened(book) == ("drain", 167)
    book.hear([fault(1, 79, at_ns=NOW + 61 * NS)], NOW + 92 * NS)
    assert opened(book, 1) == ("reboot_node", 79)


def test_the_gpu_itself_says_when_nothing_is_needed() -> None:
    told = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    done = "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
    book = heard(fault(0, 95), fault(0, 154, detail=told), fault(1, 167))
    assert opened(book) == ("reboot_node", 154)
    book.hear([fault(0, 154, detail=done), fault(1, 154, detail=done)], NOW + NS)
    assert opened(book) == ("none", 0)
    assert opened(book, 1) == ("drain", 167)
    book.hear([fault(0, 154, detail=done), fault(0, 79)], NOW + 2 * NS)
    assert opened(book) == ("reboot_node", 79), "what came after it stays open"


def test_mild_actions_lapse_and_grave_ones_do_not() -> None:
    book = heard(fault(0, 31), fault(1, 79), fault(2, 999), fault(3, 31), fault(4, 163))
    book.hear([fault(3, 31)], NOW + 1800 * NS)
    for later_s, codes in (
        (3500, [31, 79, 999, 31, 163]),
        (3700, [0, 79, 999, 31, 0]),
        (5500, [0, 79, 999, 0, 0]),
        (29 * DAY, [0, 79, 0, 0, 0]),
    ):
        book.advance(NOW + later_s * NS)
        assert book.open_code("gpu")[:5].tolist() == codes


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
    book.hear([event("switch", listed.name("switch", 1))], NOW)
    assert opened(book, 1, "switch") == ("reboot_node", 20034)
    assert not book.open_code("node").any()


def test_what_is_told_of_a_device() -> None:
    book = heard(fault(0, 79, 50, detail="y" * 999), fault(0, 31, 90, detail="first", count=3), fault(1, 48))
    book.hear([fault(0, 31, 10, detail="last"), fault(0, 31, 70)], NOW + NS)
    told = book.of("gpu", 0)
    assert [(h.code, (NOW - h.at_ns) // NS, h.times) for h in told] == [
        (31, 90, 3), (31, 70, 1), (79, 50, 1), (31, 10, 1),
    ]  # fmt: skip
    assert told[-1].detail == "last"
    assert len(told[-2].detail) == MAX_DETAIL
    assert [h.heard_ns - NOW for h in told] == [0, NS, 0, NS]
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
        book.hear([fault(3, 95, ago_s=0.0)], NOW + 20 * DAY * NS)
        assert book.by_class()[1][memory, 0] == pytest.approx((2 + np.exp(-1)) * np.exp(-20), rel=1e-3)


def jobs_on(*slots: tuple[str, list[int]]) -> Jobs:
    jobs = Jobs(8, 8)
    for name, nodes in slots:
        jobs.start(JobStarted(job=name, nodes=()), nodes, 0, NOW)
    return jobs


@pytest.mark.parametrize(
    "events, expected",
    [
        ([fault(0, 31), fault(1, 31)], [0, 1]),
        ([fault(0, 31), fault(1, 13, ago_s=500)], [0, 1]),
        ([fault(0, 31), fault(1, 13, ago_s=700)], []),
        ([fault(0, 31), fault(0, 13), fault(0, 31)], []),  # one node: it may be the GPU
        ([fault(0, 31), fault(4, 31)], []),  # two jobs
        ([fault(6, 31), fault(7, 31)], []),  # no job
        ([fault(0, 31), fault(1, 95)], []),
        ([fault(0, 31), fault(1, 31), fault(2, 79), fault(4, 31)], [0, 1]),
    ],
)
def test_faults_on_several_nodes_of_a_job_are_the_jobs_own(
    events: list[FaultReported], expected: list[int]
) -> None:
    jobs = jobs_on(("a", [0, 1, 2]), ("b", [4, 5]))
    book = FaultBook(SITE)
    book.hear(events, NOW, jobs)
    assert np.flatnonzero(book.of_software).tolist() == expected
    one_by_one = FaultBook(SITE)
    for i, event in enumerate(events):
        one_by_one.hear([event], NOW + i * NS, jobs)
    assert np.flatnonzero(one_by_one.of_software).tolist() == expected
    assert not heard(*events).of_software.any(), "nobody knows the jobs"


def test_another_job_in_the_same_slot_is_another_job() -> None:
    jobs = jobs_on(("a", [0, 1]))
    book = FaultBook(SITE)
    book.hear([fault(0, 31)], NOW, jobs)
    jobs.end(JobEnded(job="a"), NOW)
    jobs.freed_ns[:] = -(2**62)
    jobs.start(JobStarted(job="c", nodes=()), [0, 1], 0, NOW)
    book.hear([fault(1, 31)], NOW + NS, jobs)
    assert not book.of_software.any()
    book.hear([fault(0, 31)], NOW + 2 * NS, jobs)
    assert np.flatnonzero(book.of_software).tolist() == [0, 1]
    book.forget("gpu", 1)
    book.advance(NOW + 2 * DAY * NS)
    assert not book.of_software.any()


def test_a_new_board_is_not_blamed_for_the_old_ones_faults() -> None:
    book = heard(fault(0, 79, detail="old"), fault(1, 79))
    book.forget("gpu", 0)
    assert opened(book) == ("none", 0)
    assert within(book) == (0, 0, 0)
    assert book.of("gpu", 0) == ()
    assert not book.by_class()[1][:, 0].any()
    assert opened(book, 1) == ("reboot_node", 79)
    book.hear([fault(0, 95, ago_s=30)], NOW + 5 * NS)  # delivered late
    assert opened(book) == ("none", 0)
    assert book.counts["of_a_replaced_device"] == 1
    book.hear([fault(0, 95, at_ns=NOW + 6 * NS)], NOW + 7 * NS)
    assert opened(book) == ("reset_gpu", 95)


def storm(seed: int, n: int, now_ns: int = NOW) -> list[FaultReported]:
    rng = np.random.default_rng(seed)
    columns = (
        rng.integers(0, 8, n), rng.choice([13, 31, 43, 48, 63, 79, 94, 95, 154, 999], n),
        rng.integers(-20, 40, n), rng.integers(1, 4, n),
    )  # fmt: skip
    return [
        fault(g, c, at_ns=now_ns - s * NS if s % 3 else 0, count=k, detail=f"{c} fatal {s}")
        for g, c, s, k in zip(*(x.tolist() for x in columns), strict=True)
    ]


def test_a_restart_goes_on_bit_by_bit() -> None:
    jobs = jobs_on(("a", [0, 1, 2]), ("b", [4, 5]))
    book = FaultBook(SITE)
    book.hear(storm(1, 200), NOW, jobs)
    book.resolve("gpu", np.array([2, 3], np.int32), action("reboot_node"), NOW)
    book.forget("gpu", 5)
    kept = unpack(pack(book.dump()))
    other = FaultBook(SITE)
    other.restore(kept)
    assert digest(other.dump()) == digest(book.dump())
    for later_s in (10, 900, 5000, 2 * DAY, 30 * DAY):
        now_ns = NOW + later_s * NS
        events = storm(later_s, 100, now_ns)
        assert book.hear(events, now_ns, jobs) == other.hear(events, now_ns, jobs)
        assert digest(other.dump()) == digest(book.dump())
        assert np.array_equal(book.within("gpu", 600), other.within("gpu", 600))
        assert np.array_equal(book.by_class()[1], other.by_class()[1])
        assert np.array_equal(book.of_software, other.of_software)


def test_what_is_known_moves_with_the_devices() -> None:
    book = FaultBook(SITE)
    jobs = jobs_on(("a", [0, 1]))
    book.hear([fault(0, 31), fault(1, 31), fault(2, 79, detail="two"), fault(7, 48)], NOW, jobs)
    book.forget("gpu", 3)
    moved = site_of(eight_nodes() | {"site": "other"})
    old_of_new = {t: np.arange(n, dtype=np.int32) for t, n in SITE.sizes.items()}
    swapped = np.array([2, 1, -1, 0, 4, 5, 6, 3], np.int32)
    old_of_new["gpu"] = old_of_new["node"] = swapped
    new = book.remapped(moved, old_of_new)
    assert new.open_code("gpu").tolist() == [79, 31, 0, 31, 0, 0, 0, 0]
    assert new.within("gpu", 600).tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert new.of("gpu", 0)[0].detail == "two"
    assert np.flatnonzero(new.of_software).tolist() == [1, 3]
    assert new.by_class()[1].sum(axis=0).tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    new.hear([fault(7, 95, ago_s=10)], NOW + NS)
    assert new.counts["of_a_replaced_device"] == 1
    pack(new.dump())


def test_everything_has_a_limit() -> None:
    book = FaultBook(SITE)
    for tick in range(30):
        some = [fault(g, 200 + tick * 100 + i, detail="x" * 500) for g in range(8) for i in range(100)]
        book.hear(some, NOW + tick * NS)
    counts = book._heard["gpu"]
    assert counts.size == 8 * (MAX_UNKNOWN + 1)
    assert within(book) == (3000,) * 3, "no fault is lost, only whose code it was"
    assert counts.merged > 0
    book.hear(
        [fault(0, 79, detail="bus")], NOW + 31 * NS
    )  # invented codes leave room for those that are known
    assert book.of("gpu", 0)[-1].detail == "bus"
    assert opened(book) == ("reboot_node", 79)
    book.hear([fault(1, code) for code in range(1, 173)], NOW + 32 * NS)
    assert counts.size == 8 * (MAX_UNKNOWN + 1) + 1 + MAX_CODES - MAX_UNKNOWN - 1
    assert len(book._details) <= 2 * MAX_DETAILS
    assert len(book.of("gpu", 1)) <= 32
    assert len(pack(book.dump())) < 8_000_000


def test_room_is_made_of_what_is_long_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultCounts, "most", 300)
    book = FaultBook(SITE)
    for day in range(90):
        book.hear([fault(g, 1 + day) for g in range(8)], NOW + day * DAY * NS)
        assert book._heard["gpu"].size <= 300
    assert {h.code for h in book.of("gpu", 0)} >= set(range(63, 91))
    assert book._heard["gpu"].merged == 0


def test_a_storm_is_counted_whole() -> None:
    book = FaultBook(SITE)
    for tick in range(3):
        book.hear([fault(i % 8, 79) for i in range(10_000)], NOW + tick * NS)
    assert book.within("gpu", 600).sum() == 30_000
    assert book.counts == {"heard": 30_000}
    assert book.repeated("gpu")[2].tolist() == [3750] * 8
