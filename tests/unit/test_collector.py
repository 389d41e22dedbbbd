"""Garbage is collected between ticks, and what outlives a pass is found by a later one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from twin.daemon import collect_garbage, freeze_heap


class Node:
    """One of a circle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    freeze_heap()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def circle() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_no_pass_begins_within_a_tick_that_makes_much() -> None:
    gone, kept = circle(), [[i] for i in range(50_000)]
    assert gone() is not None, "a pass ran among the allocations"
    collect_garbage(1)
    assert gone() is None
    assert len(kept) == 50_000


@pytest.mark.parametrize(("ticks", "found_at"), [(1, 10), (11, 600)])
def test_what_outlives_passes_is_found_by_one_over_all(ticks: int, found_at: int) -> None:
    node = Node()
    gone = weakref.ref(node)
    for tick in range(1, ticks + 1):
        collect_garbage(tick)
    del node
    collect_garbage(ticks)
    assert (gone() is None) is (ticks % 10 == 0), "survivors are looked at less often"
    collect_garbage(found_at)
    assert gone() is None
