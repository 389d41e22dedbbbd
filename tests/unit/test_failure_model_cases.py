"""Cases of the failure model: what they weigh, what becomes of them and when, and that they are bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.failure import cases as failure_cases
from models.failure.cases import (
    BEFORE,
    QUIET,
    QUIET_PER_DAY,
    RAREST,
    SETTLED_NS,
    SLOT_NS,
    UNUSUAL,
    CaseLog,
    half_precision,
)
from tests.support.failing_fleet import DAY_NS, START_NS
from twin.catalogue import NS, ContractError, digest

NAMES = ("a", "b")
HOUR = 6  # slots


def looked(cases: CaseLog, slots: range, signs: Any = None, up: Any = None) -> None:
    """Look in these slots; feature a is the slot, b the node; `signs`: nodes that show one, or of a slot."""
    n = cases.n
    for slot in slots:
        values = np.stack([np.full(n, slot), np.arange(n)], axis=1).astype(np.float32)
        told = np.zeros(n, np.int64)
        if signs is not None:
            told[signs(slot) if callable(signs) else signs] = 1
        said = np.full((n, 4), slot / 1e4, np.float32)
        cases.sample(START_NS + slot * SLOT_NS, values, told, said, np.ones(n, bool) if up is None else up)


def at(slot: float) -> int:
    return START_NS + round(slot * SLOT_NS)


def settled(cases: CaseLog, rows: list[tuple[int, float, bool]], slot: float) -> None:
    node, start, failed = (np.array(x) for x in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 3
    start_ns = np.array([at(s) for s in start], np.int64)
    cases.settle(node.astype(np.int32), start_ns, failed.astype(bool), at(slot) + SETTLED_NS)


def test_weights_sum_to_the_time_of_the_whole_fleet() -> None:
    """Each case stands for so many nodes and slots: quiet ones in all, unusual ones as long as they last."""
    n, period = 300, 300 * 144 // QUIET_PER_DAY
    cases = CaseLog(n, NAMES, 4)
    looked(cases, range(4 * period), signs=[3, 40])
    quiet = cases.get("how") == QUIET
    assert cases.get("weight")[quiet].sum() == pytest.approx((n - 2) * 4 * period, rel=0.01)
    assert len(np.unique(cases.get("node")[quiet])) == n - 2
    for node in (3, 40):
        mine = (cases.get("node") == node) & (cases.get("how") == UNUSUAL)
        assert cases.get("weight")[mine].sum() == pytest.approx(4 * period, abs=RAREST)
        assert cases.get("x")[mine, 0][:5].tolist() == [0, 1, 3, 7, 15]


def test_what_gets_worse_is_looked_at_anew() -> None:
    cases = CaseLog(2, NAMES, 4)
    values, up = np.zeros((2, 2), np.float32), np.ones(2, bool)
    for slot in range(20):
        signs = np.array([1 if slot < 10 else 2, 0])
        cases.sample(at(slot), values, signs, np.zeros((2, 4), np.float32), up)
    taken = cases.get("t_ns")[cases.get("how") == UNUSUAL]
    assert ((taken - START_NS) // SLOT_NS).tolist() == [0, 1, 3, 7, 10, 11, 13, 17]


def test_outcomes_come_when_they_have_settled_and_never_before() -> None:
    cases = CaseLog(3, NAMES, 4)
    looked(cases, range(12), signs=lambda slot: [1] if slot == 9 else [0, 1])
    rows = [(0, 10.0, True), (1, 11.5, True)]
    settled(cases, rows, 9.9)
    assert not cases.get("failed_ns").any()
    settled(cases, rows, 10.0)
    failed = cases.get("failed_ns")[cases.get("node") == 0]
    assert (failed[cases.get("t_ns")[cases.get("node") == 0] < at(10)] == at(10)).all()
    back = cases.get("t_ns")[cases.get("node") == 0] >= at(10)
    assert back.any()
    assert not failed[back].any()
    assert not cases.get("failed_ns")[cases.get("node") == 1].any()
    settled(cases, rows, 12.0)
    assert (
        cases.get("failed_ns")[(cases.get("node") == 1) & (cases.get("how") == UNUSUAL)] == at(11.5)
    ).all()


def test_the_hour_before_a_failure_is_kept_whole() -> None:
    cases = CaseLog(4, NAMES, 4)
    looked(cases, range(20))
    settled(cases, [(2, 19.2, True)], 19.5)
    before = cases.get("how") == BEFORE
    assert cases.get("x")[before].tolist() == [[14, 2], [16, 2], [18, 2]]
    assert cases.get("said")[before, 0] == pytest.approx([14e-4, 16e-4, 18e-4])
    assert cases.get("weight")[before].sum() == pytest.approx(HOUR)
    assert (cases.get("failed_ns")[before] == at(19.2)).all()


def test_what_was_taken_away_is_lost_and_not_well() -> None:
    cases = CaseLog(3, NAMES, 4)
    looked(cases, range(8), signs=[0, 1, 2])
    settled(cases, [(0, 5.0, False)], 7.0)
    cases.lose(np.array([1]), at(7.5))
    lost, node = cases.get("lost_ns"), cases.get("node")
    assert not cases.get("failed_ns").any()
    assert set(lost[(node == 0) & (cases.get("t_ns") < at(5))].tolist()) == {at(5.0)}
    assert set(lost[node == 1].tolist()) == {at(7.5)}
    assert not lost[node == 2].any()
    settled(cases, [(1, 8.0, True)], 9.0)
    mine = (node == 1) & (cases.get("how")[: len(node)] != BEFORE)
    assert not cases.get("failed_ns")[: len(node)][mine].any(), "it was lost before it failed"


def test_memory_is_bounded_and_nothing_that_failed_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_cases, "MOST", 400)
    cases = CaseLog(20, NAMES, 4)
    looked(cases, range(30), signs=list(range(10)))
    settled(cases, [(0, 29.5, True)], 30.0)
    failed = int((cases.get("failed_ns") > 0).sum())
    weight = cases.get("weight").sum()
    mine = cases.get("how") == UNUSUAL
    monkeypatch.setattr(failure_cases, "MOST", cases.k)
    cases._thin(at(31))
    assert cases.k < len(mine)
    assert int((cases.get("failed_ns") > 0).sum()) == failed
    assert cases.get("weight").sum() == pytest.approx(weight), "what goes leaves its weight"
    monkeypatch.setattr(failure_cases, "MOST", 400)
    looked(cases, range(40, 4000), signs=lambda slot: [slot % 20])
    assert cases.k <= 400
    assert max(len(c) for c in cases.columns.values()) <= 400
    assert len(cases.recent) <= failure_cases.RECENT


def test_old_cases_go() -> None:
    cases = CaseLog(5, NAMES, 4)
    looked(cases, range(5), signs=[1])
    cases._thin(START_NS + 121 * DAY_NS)
    assert cases.k == 0


def test_a_snapshot_holds_all_of_it() -> None:
    cases = CaseLog(40, NAMES, 4)
    looked(cases, range(100), signs=lambda slot: [slot % 7, 11])
    settled(cases, [(11, 99.0, True), (3, 99.5, False)], 100.0)
    other = CaseLog.restored(cases.memory())
    assert digest(other.memory()) == digest(cases.memory())
    for each in (cases, other):
        looked(each, range(100, 160), signs=[11, 12])
        settled(each, [(12, 150.0, True)], 160.0)
    assert digest(other.memory()) == digest(cases.memory())
    torn = cases.memory() | {"x": np.zeros((3, 9), np.uint16)}
    with pytest.raises(ContractError):
        CaseLog.restored(torn)


def test_a_snapshot_is_not_written_to_later() -> None:
    cases = CaseLog(10, NAMES, 4)
    looked(cases, range(30), signs=[1, 2])
    memory = cases.memory()
    before = digest(memory)
    looked(cases, range(30, 60), signs=[1, 2])
    cases.lose(np.array([1]), at(61))
    settled(cases, [(2, 55.0, True)], 61.0)
    assert digest(memory) == before


def test_cases_follow_their_nodes() -> None:
    cases = CaseLog(4, NAMES, 4)
    looked(cases, range(12), signs=[0, 1, 2, 3])
    moved = cases.remapped(np.array([2, -1, 0], np.int32), at(12))
    was = {0: 2, 2: 0, 1: -1, 3: -1}
    assert moved.get("node").tolist() == [was[node] for node in cases.get("node").tolist()]
    gone = moved.get("node") < 0
    assert (moved.get("lost_ns")[gone] == at(12)).all()
    assert not moved.get("lost_ns")[~gone].any()
    assert moved.recent[-1][1][:, 1].tolist()[0] == 2.0
    assert not moved.recent[-1][3][1], "nothing was seen of a new node"
    settled(moved, [(0, 13.0, True)], 14.0)
    mine = (cases.get("node") == 2).nonzero()[0]
    assert (moved.get("failed_ns")[mine] == at(13)).all()


def test_what_is_no_number_is_unknown() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 0.5], np.float32)
    held = half_precision(values).astype(float)
    assert np.isnan(held[:3]).all()
    assert held[3:].tolist() == [60_000.0, -60_000.0, 0.5]


def test_a_slot_is_looked_at_once() -> None:
    cases = CaseLog(2, NAMES, 4)
    assert cases.due(at(0))
    looked(cases, range(1))
    assert not cases.due(at(0) + 599 * NS)
    assert cases.due(at(1))


def test_a_new_feature_costs_no_case() -> None:
    cases = CaseLog(4, NAMES, 4)
    looked(cases, range(20))
    k, b = cases.k, cases.get("x")[:, 1].copy()
    cases.rename(("b", "c"))
    assert cases.k == k > 0
    assert np.array_equal(cases.get("x")[:, 0], b)
    assert np.isnan(cases.get("x")[:, 1]).all()
    settled(cases, [(2, 19.2, True)], 19.5)
    before = cases.get("x")[cases.get("how") == BEFORE]
    assert before[:, 0].tolist() == [2.0, 2.0, 2.0], "images of the hour before are of the new names too"
    assert np.isnan(before[:, 1]).all()
    kept = CaseLog.restored(cases.memory())
    assert kept.names == ("b", "c")
