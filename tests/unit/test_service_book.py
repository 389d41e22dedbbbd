"""The service book: what events write of nodes, what it refuses, and that it survives restarts and moves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import NS
from twin.contracts import FAILED_TEST, NO_RESULT, PASSED, UNTESTED, ServiceBook
from twin.engine.remap import slots_kept
from twin.telemetry import events as ev

NOW = 1_800_000_000 * NS


def book_of() -> ServiceBook:
    return ServiceBook(site_of(two_racks()))


def node_name(book: ServiceBook, node: int) -> str:
    return book.site.name("node", node)


@pytest.mark.parametrize(("passed", "result"), [(True, PASSED), (False, FAILED_TEST), (None, NO_RESULT)])
def test_a_test_is_written_down(passed: bool | None, result: int) -> None:
    book = book_of()
    told = ev.NodeTested(name=node_name(book, 3), began_ns=NOW - 600 * NS, ended_ns=NOW, passed=passed)
    assert book.take(told, NOW) is None
    page = book.service()
    assert (page.result[3], page.began_ns[3], page.ended_ns[3]) == (result, NOW - 600 * NS, NOW)
    assert (np.delete(page.result, 3) == UNTESTED).all()


@pytest.mark.parametrize(
    ("name", "began_ns", "ended_ns", "why"),
    [
        ("nowhere", NOW - NS, NOW, "does not have"),
        ("", NOW, NOW - NS, "began before it ended"),
        ("", 0, NOW, "began before it ended"),
        ("", NOW, NOW + 3600 * NS, "not in the future"),
        ("", NOW - 900 * NS, NOW, "older test"),
    ],
)
def test_what_cannot_be_so_is_refused(name: str, began_ns: int, ended_ns: int, why: str) -> None:
    book = book_of()
    known = ev.NodeTested(name=node_name(book, 0), began_ns=NOW - 600 * NS, ended_ns=NOW, passed=True)
    book.take(known, NOW)
    told = ev.NodeTested(name=name or node_name(book, 0), began_ns=began_ns, ended_ns=ended_ns, passed=False)
    assert why in (book.take(told, NOW) or "")
    assert book.service().result[0] == PASSED


def test_a_replaced_gpu_is_a_replacement_of_its_node_and_a_repair_is_a_repair() -> None:
    book = book_of()
    gpu = int(book.site.gpu_start_of_node[5])
    name = book.site.name("gpu", gpu)
    assert book.take(ev.EntityReplaced(table="gpu", name=name, serial="x"), NOW) is None
    assert book.take(ev.NodeRepaired(author="kim", name=node_name(book, 6)), NOW + NS) is None
    page = book.service()
    assert (page.replaced_ns[5], page.repaired_ns[6]) == (NOW, NOW + NS)
    assert np.count_nonzero(page.replaced_ns) == np.count_nonzero(page.repaired_ns) == 1


def test_it_survives_a_restart_and_a_change_of_the_site() -> None:
    book = book_of()
    for node in (1, book.site.sizes["node"] - 1):
        told = ev.NodeTested(name=node_name(book, node), began_ns=NOW - NS, ended_ns=NOW, passed=True)
        book.take(told, NOW)
    again = ServiceBook(book.site)
    again.restore(book.dump())
    np.testing.assert_array_equal(again.service().result, book.service().result)
    new = site_of(two_racks(racks="r[2-3]"))
    moved = book.remapped(new, slots_kept(book.site, new))
    names = [new.name("node", i) for i in np.flatnonzero(moved.service().result == PASSED)]
    assert names == [node_name(book, book.site.sizes["node"] - 1)]


def test_what_is_given_out_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        book_of().service().result[0] = PASSED
