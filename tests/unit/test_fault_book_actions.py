"""Actions that codes ask for: the strongest stays open until it is done, lapses or is taken back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.error_logs import DAY, HOUR, MINUTE, NOW, SITE, fault, heard, opened, within
from twin.catalogue import NS
from twin.contracts import action
from twin.health.error_log import FaultBook


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
        grave = book.receive([fault(0, code)], NOW + i * NS)
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
    book.receive([fault(0, 95), fault(1, 31), fault(2, 95)], NOW + 60 * NS)
    assert [opened(book, g)[1] for g in range(3)] == [79, 79, 167]
    book.resolve("gpu", np.arange(3, dtype=np.int32), action("reboot_node"), NOW + 30 * NS)
    assert [opened(book, g) for g in range(3)] == [("reset_gpu", 95), ("restart_app", 31), ("drain", 167)]
    book.resolve("gpu", np.arange(3, dtype=np.int32), action("replace"), NOW + 90 * NS)
    assert not book.open_action("gpu").any()


def test_a_late_fault_from_before_the_reboot_opens_nothing() -> None:
    book = heard(fault(0, 79))
    book.resolve("gpu", np.array([0], np.int32), action("reboot_node"), NOW + 60 * NS)
    late = [fault(0, 79, at_ns=NOW + 30 * NS), fault(0, 167, at_ns=NOW + 30 * NS)]
    book.receive(late[:1], NOW + 90 * NS)
    assert opened(book) == ("none", 0)
    book.receive(late[1:], NOW + 91 * NS)  # more than a reboot was asked for
    assert opened(book) == ("drain", 167)
    book.receive([fault(1, 79, at_ns=NOW + 61 * NS)], NOW + 92 * NS)
    assert opened(book, 1) == ("reboot_node", 79)


def test_the_gpu_itself_says_when_nothing_is_needed() -> None:
    told = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    done = "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
    book = heard(fault(0, 95), fault(0, 154, detail=told), fault(1, 167))
    assert opened(book) == ("reboot_node", 154)
    book.receive([fault(0, 154, detail=done), fault(1, 154, detail=done)], NOW + NS)
    assert opened(book) == ("none", 0)
    assert opened(book, 1) == ("drain", 167)
    book.receive([fault(0, 154, detail=done), fault(0, 79)], NOW + 2 * NS)
    assert opened(book) == ("reboot_node", 79), "what came after it stays open"


def test_mild_actions_lapse_and_grave_ones_do_not() -> None:
    book = heard(fault(0, 31), fault(1, 79), fault(2, 999), fault(3, 31), fault(4, 163))
    book.receive([fault(3, 31)], NOW + 1800 * NS)
    for later_s, codes in (
        (3500, [31, 79, 999, 31, 163]),
        (3700, [0, 79, 999, 31, 0]),
        (5500, [0, 79, 999, 0, 0]),
        (29 * DAY, [0, 79, 0, 0, 0]),
    ):
        book.advance(NOW + later_s * NS)
        assert book.open_code("gpu")[:5].tolist() == codes


def test_what_broke_before_another_daemon_saw_the_node_return_asks_for_nothing() -> None:
    late, new = fault(1, 79, ago_s=HOUR), fault(1, 95, ago_s=MINUTE)
    book = heard(fault(0, 79, ago_s=HOUR), fault(2, 79, ago_s=MINUTE))
    assert book.returned() == {}
    book.take_returns({f"r1/node{i}": NOW - 1800 * NS for i in range(3)} | {"r9/node0": NOW}, NOW)
    assert [opened(book, g)[1] for g in range(3)] == [0, 0, 79]
    assert not book.receive([late], NOW)
    assert book.receive([fault(3, 79, ago_s=HOUR)], NOW)
    assert [opened(book, g)[1] for g in range(4)] == [0, 0, 79, 79]
    assert within(book, 1) == (0, 1, 1), "it is shown all the same"
    assert book.receive([new], NOW)
    assert opened(book, 1)[1] == 95
    assert book.returned() == {SITE.name("node", i): NOW - 1800 * NS for i in range(3)}


def test_returns_are_told_for_a_day_and_never_of_the_future() -> None:
    book = heard()
    book.take_returns({"r1/node0": NOW + DAY * NS, "r1/node1": NOW - 2 * DAY * NS}, NOW)
    assert book.returned() == {SITE.name("node", 0): NOW}
    book.take_returns({"r1/node0": NOW - DAY * NS}, NOW)
    assert book.returned() == {SITE.name("node", 0): NOW}, "the newest counts"
    book.advance(NOW + 2 * DAY * NS)
    assert book.returned() == {}
