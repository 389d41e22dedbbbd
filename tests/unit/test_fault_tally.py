"""A storm of faults is journaled in summary: the first ones one by one, the rest counted by code."""

from __future__ import annotations

from tests.support.journal_bodies import body_of
from twin.engine.records import MOST_FAULTS, FaultTally
from twin.telemetry import FaultReported


def fault(i: int, code: int, table: str = "gpu", count: int = 1) -> FaultReported:
    return FaultReported(id=f"f{i}", table=table, name=f"h/r/n/gpu{i}", code=code, count=count)


def test_few_faults_are_told_one_by_one() -> None:
    tally = FaultTally()
    for i in range(3):
        tally.add(fault(i, 79))
    records = [body_of(r) for r in tally.records()]
    assert [r["kind"] for r in records] == ["event"] * 3
    assert records[2]["event"]["name"] == "h/r/n/gpu2"


def test_the_rest_of_a_storm_is_counted_and_nothing_is_lost() -> None:
    tally = FaultTally()
    for i in range(10_000):
        tally.add(fault(i, 79 if i % 2 else 48))
    tally.add(fault(0, 48, count=50))
    records = [body_of(r) for r in tally.records()]
    assert len(records) == MOST_FAULTS + 2
    assert {r["code"]: r["count"] for r in records[MOST_FAULTS:]} == {
        48: 5000 - MOST_FAULTS // 2 + 50, 79: 5000 - MOST_FAULTS // 2,
    }  # fmt: skip


def test_codes_without_end_and_long_names_stay_bounded() -> None:
    tally = FaultTally()
    for i in range(10_000):
        tally.add(fault(i, i, table="x" * 1000))
    counted = [body_of(r) for r in tally.records()[MOST_FAULTS:]]
    assert len(counted) <= MOST_FAULTS + 1
    assert sum(r["count"] for r in counted) == 10_000 - MOST_FAULTS
    assert max(len(r["table"]) for r in counted) <= 20
