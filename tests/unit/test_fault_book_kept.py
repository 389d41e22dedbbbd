"""Faults in the book: by job and by device, over a restart, a changed site and a storm, within limits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import eight_nodes, site_of
from tests.support.error_logs import DAY, NOW, SITE, fault, heard, opened, within
from twin.catalogue import NS, digest, pack, unpack
from twin.contracts import action
from twin.health.error_log import MAX_DETAILS, FaultBook
from twin.health.fault_counts import MAX_CODES, MAX_UNKNOWN, FaultCounts
from twin.telemetry import FaultReported, JobEnded, JobSlots, JobStarted


def jobs_on(*slots: tuple[str, list[int]]) -> JobSlots:
    jobs = JobSlots(8, 8)
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
    book.receive(events, NOW, jobs)
    assert np.flatnonzero(book.of_software).tolist() == expected
    one_by_one = FaultBook(SITE)
    for i, event in enumerate(events):
        one_by_one.receive([event], NOW + i * NS, jobs)
    assert np.flatnonzero(one_by_one.of_software).tolist() == expected
    assert not heard(*events).of_software.any(), "nobody knows the jobs"


def test_another_job_in_the_same_slot_is_another_job() -> None:
    jobs = jobs_on(("a", [0, 1]))
    book = FaultBook(SITE)
    book.receive([fault(0, 31)], NOW, jobs)
    jobs.end(JobEnded(job="a"), NOW)
    jobs.freed_ns[:] = -(2**62)
    jobs.start(JobStarted(job="c", nodes=()), [0, 1], 0, NOW)
    book.receive([fault(1, 31)], NOW + NS, jobs)
    assert not book.of_software.any()
    book.receive([fault(0, 31)], NOW + 2 * NS, jobs)
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
    book.receive([fault(0, 95, ago_s=30)], NOW + 5 * NS)  # delivered late
    assert opened(book) == ("none", 0)
    assert book.counts["of_a_replaced_device"] == 1
    book.receive([fault(0, 95, at_ns=NOW + 6 * NS)], NOW + 7 * NS)
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
    book.receive(storm(1, 200), NOW, jobs)
    book.resolve("gpu", np.array([2, 3], np.int32), action("reboot_node"), NOW)
    book.forget("gpu", 5)
    kept = unpack(pack(book.dump()))
    other = FaultBook(SITE)
    other.restore(kept)
    assert digest(other.dump()) == digest(book.dump())
    for later_s in (10, 900, 5000, 2 * DAY, 30 * DAY):
        now_ns = NOW + later_s * NS
        events = storm(later_s, 100, now_ns)
        assert book.receive(events, now_ns, jobs) == other.receive(events, now_ns, jobs)
        assert digest(other.dump()) == digest(book.dump())
        assert np.array_equal(book.within("gpu", 600), other.within("gpu", 600))
        assert np.array_equal(book.by_class()[1], other.by_class()[1])
        assert np.array_equal(book.of_software, other.of_software)


def test_what_is_known_moves_with_the_devices() -> None:
    book = FaultBook(SITE)
    jobs = jobs_on(("a", [0, 1]))
    book.receive([fault(0, 31), fault(1, 31), fault(2, 79, detail="two"), fault(7, 48)], NOW, jobs)
    book.forget("gpu", 3)
    moved = site_of(eight_nodes() | {"site": "other"})
    old_of_new = {t: np.arange(n, dtype=np.int32) for t, n in SITE.sizes.items()}
    swapped = np.array([2, 1, -1, 0, 4, 5, 6, 3], np.int32)
    old_of_new["gpu"] = old_of_new["node"] = swapped
    new = FaultBook(moved)
    new.adopt(book, old_of_new)
    assert new.open_code("gpu").tolist() == [79, 31, 0, 31, 0, 0, 0, 0]
    assert new.within("gpu", 600).tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert new.of("gpu", 0)[0].detail == "two"
    assert np.flatnonzero(new.of_software).tolist() == [1, 3]
    assert new.by_class()[1].sum(axis=0).tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    new.receive([fault(7, 95, ago_s=10)], NOW + NS)
    assert new.counts["of_a_replaced_device"] == 1
    pack(new.dump())


def test_everything_has_a_limit() -> None:
    book = FaultBook(SITE)
    for tick in range(30):
        some = [fault(g, 200 + tick * 100 + i, detail="x" * 500) for g in range(8) for i in range(100)]
        book.receive(some, NOW + tick * NS)
    counts = book._heard["gpu"]
    assert counts.size == 8 * (MAX_UNKNOWN + 1)
    assert within(book) == (3000,) * 3, "no fault is lost, only whose code it was"
    assert counts.merged > 0
    book.receive(
        [fault(0, 79, detail="bus")], NOW + 31 * NS
    )  # invented codes leave room for those that are known
    assert book.of("gpu", 0)[-1].detail == "bus"
    assert opened(book) == ("reboot_node", 79)
    book.receive([fault(1, code) for code in range(1, 173)], NOW + 32 * NS)
    assert counts.size == 8 * (MAX_UNKNOWN + 1) + 1 + MAX_CODES - MAX_UNKNOWN - 1
    assert len(book._details) <= 2 * MAX_DETAILS
    assert len(book.of("gpu", 1)) <= 32
    assert len(pack(book.dump())) < 8_000_000


def test_room_is_made_of_what_is_long_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultCounts, "most", 300)
    book = FaultBook(SITE)
    for day in range(90):
        book.receive([fault(g, 1 + day) for g in range(8)], NOW + day * DAY * NS)
        assert book._heard["gpu"].size <= 300
    assert {h.code for h in book.of("gpu", 0)} >= set(range(63, 91))
    assert book._heard["gpu"].merged == 0
