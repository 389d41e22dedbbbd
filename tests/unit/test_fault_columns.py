"""Faults as columns: each is read once, each name looked up once, and calls grow with devices and codes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, eight_nodes, site_of, two_racks
from twin import kernels
from twin.catalogue import NS
from twin.contracts import Decision
from twin.site import Site
from twin.telemetry import FaultColumns, FaultReported, Frame, Resumed

CODES = (13, 31, 79)


def reports(many: int, begin: int = 0) -> list[FaultReported]:
    """Reports of the same few devices and codes."""
    return [
        FaultReported(
            id=f"f{begin + k}",
            table="gpu",
            name=f"r1/node{k % 8}/gpu0",
            code=CODES[k // 8 % 3],
            detail="NVRM",
            at_ns=START_NS - NS + begin + k,
        )
        for k in range(many)
    ]


class CountedTwin(Twin):
    """A twin that counts the functions, in Python or in C, that the engine calls in a tick."""

    def _decide(self, frame: Frame) -> Decision:
        self.calls = 0
        sys.setprofile(self._note)
        try:
            return super()._decide(frame)
        finally:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event in ("call", "c_call")


@pytest.mark.skipif(not kernels.COMPILED, reason="NumPy's form reads event by event")
def test_a_tick_calls_no_function_for_each_report() -> None:
    calls = []
    for many in (2_500, 10_000):
        twin = CountedTwin(eight_nodes())
        twin.tick({"gpu.power_w": 300.0, "node.power_w": 800.0})
        twin.tick(None, *reports(3_000))
        twin.tick(None, *reports(many, 3_000))
        calls.append(twin.calls)
        book = twin.engine.health.book
        assert book.counts == {"heard": 3_000 + many}, "none is lost"
        assert book._heard["gpu"].size == 8 * len(CODES)
    assert calls[1] < calls[0] + 100, calls


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of names that a site is asked for; negative: of faults that are read."""
    numbers, entities, read = list[int](), Site.entities, kernels.read_faults

    def counted(self: Site, table: str, names: list[str]) -> Any:
        numbers.append(len(names))
        return entities(self, table, names)

    def reading(events: list[FaultReported], *columns: Any) -> Any:
        numbers.append(-len(events))
        return read(events, *columns)

    monkeypatch.setattr(Site, "entities", counted)
    monkeypatch.setattr(kernels, "read_faults", reading)
    return numbers


def test_health_and_diagnosis_look_up_a_name_once(asked: list[int]) -> None:
    twin = Twin(eight_nodes())
    twin.tick(None, *reports(50))
    assert asked == [-50, 50]


def test_among_other_events_faults_are_read_once_and_count_alike(asked: list[int]) -> None:
    apart, mixed = Twin(eight_nodes()), Twin(eight_nodes())
    others = [Resumed(author="ann") for _ in range(30)]
    apart.tick(None, *others, *reports(30))
    asked.clear()
    mixed.tick(None, *(event for pair in zip(others, reports(30), strict=True) for event in pair))
    assert asked == [-30, 30, 30], "read once; health and diagnosis each join the runs"
    assert mixed.engine.health.book.counts == {"heard": 30}
    assert mixed.engine.checksum() == apart.engine.checksum()


def test_selections_and_joins_keep_what_belongs_together() -> None:
    site = site_of(two_racks())
    events = [
        FaultReported(id="a", table="node", name="r1/node0", code=2**80, count=3),
        FaultReported(table="gpu", name="r1/node0/gpu0", code=79, at_ns=5),
        FaultReported(id="b", table="elsewhere", name="?", code=31),
        FaultReported(id="c", table="gpu", name="nobody", code=48),
    ]
    faults = FaultColumns.of(events)
    assert FaultColumns.of(faults) is faults
    assert faults.tables() == {"node", "gpu"}
    assert (faults.code.tolist(), faults.times.tolist()) == ([-1, 79, 31, 48], [3, 1, 1, 1])
    assert (faults.mark >= 0).tolist() == [True, False, True, True]
    gpus, entity = faults.of_table("gpu", site)
    assert (list(gpus), entity.tolist()) == ([events[1], events[3]], [0, -1])
    assert faults.of_table("gpu", site)[0] is gpus
    assert faults.some(slice(0, 4)) is faults
    again = FaultColumns.joined([faults.some(slice(0, 1)), faults.some(np.array([1, 2, 3]))])
    assert list(again) == events
    assert again.names == [event.name for event in events]
    assert np.array_equal(again.numbers, faults.numbers)
    assert not FaultColumns.joined([])
