"""The table of phases: every row can happen, every phase ends, and what is not in force goes nowhere."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from policies.node_replacement import CORDONED, PHASES, SAVING, SUSPECT
from policies.node_replacement.costs import AT_NEXT, AT_ONCE, CORDON, SAVE_NOW, WATCH
from policies.node_replacement.phases import (
    CORDONED_S,
    DRAINING,
    IN_SERVICE,
    LEAST_SAVE_S,
    LEVEL,
    MOST_SAVE_S,
    OUT,
    PRESSED_S,
    PROBATION,
    RMA,
    RULES,
    STALE_S,
    TESTING,
    WITHDRAWN,
    Conditions,
    next_phases,
    save_wait_s,
)

CONDITIONS = tuple(f.name for f in fields(Conditions))
NUMBERS = {"option": np.int8, "level": np.int8, "since_s": np.float64}
BAD = {"bad": True, "confirmed": True, "allowed": True}


def seen(k: int = 1, **told: Any) -> Conditions:
    """Nothing but this."""
    columns = {n: np.full(k, told.get(n, 0), NUMBERS.get(n, np.bool_)) for n in CONDITIONS}
    return Conditions(**columns)


def after(phase: int, **told: Any) -> int:
    found, _ = next_phases(np.array([phase], np.int8), seen(**told))
    return int(found[0])


MOVES = [
    (IN_SERVICE, {"bad": True}, SUSPECT),
    (IN_SERVICE, {"bad": True, "theirs": True}, IN_SERVICE),
    (IN_SERVICE, {}, IN_SERVICE),
    (SUSPECT, {}, SUSPECT),
    (SUSPECT, {"quiet": True}, IN_SERVICE),
    (SUSPECT, {**BAD, "option": WATCH, "busy": True}, SUSPECT),
    (SUSPECT, {**BAD, "option": CORDON, "busy": True}, CORDONED),
    (SUSPECT, {**BAD, "option": CORDON}, DRAINING),
    (SUSPECT, {**BAD, "option": AT_NEXT, "busy": True}, SAVING),
    (SUSPECT, {**BAD, "option": SAVE_NOW, "busy": True}, SAVING),
    (SUSPECT, {**BAD, "option": AT_ONCE, "busy": True}, DRAINING),
    (SUSPECT, {**BAD, "option": AT_ONCE, "busy": True, "confirmed": False}, SUSPECT),
    (SUSPECT, {**BAD, "option": AT_ONCE, "busy": True, "allowed": False}, SUSPECT),
    (SUSPECT, {**BAD, "option": AT_ONCE, "busy": True, "theirs": True}, IN_SERVICE),
    (CORDONED, {**BAD, "busy": True, "level": 1, "option": CORDON}, CORDONED),
    (CORDONED, {"level": 1, "allowed": True}, DRAINING),
    (CORDONED, {"level": 1, "quiet": True, "allowed": True}, IN_SERVICE),
    (CORDONED, {**BAD, "level": 1, "option": SAVE_NOW, "busy": True}, SAVING),
    (CORDONED, {**BAD, "level": 1, "option": SAVE_NOW, "busy": True, "timed": True}, CORDONED),
    (CORDONED, {**BAD, "level": 1, "option": SAVE_NOW, "busy": True, "timed": True, "expired": True}, SAVING),
    (CORDONED, {"busy": True, "level": 1, "since_s": CORDONED_S}, SUSPECT),
    (CORDONED, {"level": 1, "theirs": True}, IN_SERVICE),
    (CORDONED, {"level": 0, "resumed": True}, IN_SERVICE),
    (SAVING, {**BAD, "busy": True, "level": 1}, SAVING),
    (SAVING, {**BAD, "busy": True, "level": 1, "saved": True}, DRAINING),
    (SAVING, {**BAD, "busy": True, "level": 1, "saved": True, "allowed": False}, SAVING),
    (SAVING, {**BAD, "busy": True, "level": 0, "saved": True}, SAVING),
    (SAVING, {**BAD, "busy": False, "level": 1}, DRAINING),
    (SAVING, {**BAD, "busy": True, "level": 1, "expired": True}, DRAINING),
    (SAVING, {**BAD, "busy": True, "level": 1, "expired": True, "allowed": False}, CORDONED),
    (SAVING, {"busy": True, "level": 1, "quiet": True}, IN_SERVICE),
    (SAVING, {"level": 0, "since_s": STALE_S}, SUSPECT),
    (DRAINING, {"level": 3, "busy": True}, DRAINING),
    (DRAINING, {"level": 3}, OUT),
    (DRAINING, {"level": 3, "quiet": True}, OUT),
    (DRAINING, {"level": 0, "quiet": True}, IN_SERVICE),
    (DRAINING, {"level": 3, "busy": True, "expired": True}, CORDONED),
    (DRAINING, {**BAD, "level": 0, "busy": True, "option": CORDON}, SUSPECT),
    (OUT, {"level": 3, "needs_repair": True, "has_test": True}, OUT),
    (OUT, {"level": 3, "has_test": True}, TESTING),
    (OUT, {"level": 3}, OUT),
    (OUT, {"level": 3, "repaired": True, "needs_repair": True, "has_test": True}, TESTING),
    (OUT, {"level": 3, "repaired": True}, PROBATION),
    (OUT, {"level": 3, "hopeless": True, "has_test": True}, RMA),
    (OUT, {"level": 3, "hopeless": True, "replaced": True, "repaired": True, "has_test": True}, TESTING),
    (OUT, {"level": 0, "resumed": True}, PROBATION),
    (TESTING, {"level": 3, "has_test": True}, TESTING),
    (TESTING, {"level": 3, "has_test": True, "passed": True}, PROBATION),
    (TESTING, {"level": 3, "has_test": True, "failed": True}, OUT),
    (TESTING, {"level": 3, "has_test": True, "inconclusive": True}, OUT),
    (TESTING, {"level": 3, "has_test": True, "expired": True}, OUT),
    (PROBATION, {}, PROBATION),
    (PROBATION, {"expired": True}, IN_SERVICE),
    (PROBATION, {"bad": True}, SUSPECT),
    (CORDONED, {**BAD, "level": 3, "failed_in_use": True, "theirs": True}, OUT),
    (SAVING, {**BAD, "level": 3, "failed_in_use": True, "theirs": True}, OUT),
    (CORDONED, {**BAD, "level": 0, "failed_in_use": True, "option": CORDON}, DRAINING),
    (IN_SERVICE, {"level": 3, "takes_over": True, "theirs": True}, OUT),
    (PROBATION, {"level": 3, "takes_over": True, "theirs": True}, OUT),
    (SUSPECT, {"level": 3, "adopted": True}, OUT),
    (IN_SERVICE, {"level": 3, "adopted": True, "busy": True}, DRAINING),
    (PROBATION, {"level": 2, "adopted": True}, DRAINING),
    (IN_SERVICE, {"level": 1, "adopted": True, "busy": True}, CORDONED),
    (IN_SERVICE, {"level": 0, "adopted": True}, IN_SERVICE),
    (CORDONED, {**BAD, "level": 0, "revoked": True, "option": CORDON, "busy": True}, SUSPECT),
    (DRAINING, {**BAD, "level": 0, "revoked": True, "option": AT_ONCE, "busy": True}, SUSPECT),
    (RMA, {"level": 4, "repaired": True, "has_test": True}, RMA),
    (RMA, {"level": 4, "repaired": True, "replaced": True, "has_test": True}, TESTING),
    (RMA, {"level": 4, "repaired": True, "replaced": True}, PROBATION),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "told", "to"), MOVES)
def test_moves(phase: int, told: dict[str, Any], to: int) -> None:
    assert PHASES[after(phase, **told)] == PHASES[to]


def test_every_phase_can_be_left_and_reached() -> None:
    assert {r.start for r in RULES} == set(range(len(PHASES)))
    assert {r.end for r in RULES} == set(range(len(PHASES)))
    assert all(r.why for r in RULES)
    ahead = {p: {r.end for r in RULES if r.start == p} for p in range(len(PHASES))}
    for phase in range(len(PHASES)):  # from everywhere there is a way back
        reached, rest = {phase}, [phase]
        while rest:
            new = ahead[rest.pop()] - reached
            reached |= new
            rest += new
        assert IN_SERVICE in reached


def test_levels_rise_only_for_those_on_their_way_out() -> None:
    assert {int(p) for p in np.flatnonzero(LEVEL)} == set(WITHDRAWN)


BOOLS = [n for n in CONDITIONS if n not in NUMBERS]


@st.composite
def looks(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    told = {n: draw(st.booleans()) for n in BOOLS}
    told |= {"option": draw(st.integers(0, 4)), "level": draw(st.integers(0, 4)),
              "since_s": draw(st.sampled_from([0.0, 1000.0, 1e7]))}  # fmt: skip
    return told | fixed


@given(st.lists(looks(level=0, takes_over=False), min_size=1, max_size=30))
def test_what_is_only_advised_never_counts_as_done(course: list[dict[str, Any]]) -> None:
    phase = IN_SERVICE
    for told in course:
        if phase != SAVING:  # deadlines begin when something is in force
            told = told | {"expired": False, "timed": False}
        phase = after(phase, **told | {"expired": False, "resumed": False})
        assert phase in (IN_SERVICE, SUSPECT, CORDONED, SAVING, DRAINING)


@given(looks(takes_over=False, failed_in_use=False, adopted=False),
       st.sampled_from([IN_SERVICE, SUSPECT, PROBATION, CORDONED]))  # fmt: skip
def test_nothing_is_disturbed_that_is_not_free_and_ripe(told: dict[str, Any], phase: int) -> None:
    if phase == CORDONED:
        told |= {"allowed": False}
    elif told["allowed"] and told["confirmed"] and told["bad"]:
        told |= {"confirmed": False}
    assert after(phase, **told) not in (SAVING, DRAINING, OUT, TESTING, RMA)


@given(looks(bad=False, theirs=False, expired=False, takes_over=False, adopted=False), st.integers(0, 8))
def test_without_evidence_nothing_begins(told: dict[str, Any], phase: int) -> None:
    to = after(phase, **told)
    if phase in (IN_SERVICE, SUSPECT, PROBATION):
        assert to in (IN_SERVICE, SUSPECT, PROBATION)


@given(looks(), st.integers(0, 8), st.integers(1, 4))
def test_nodes_do_not_see_each_other(told: dict[str, Any], phase: int, k: int) -> None:
    alone, _ = next_phases(np.array([phase], np.int8), seen(**told))
    many, by = next_phases(np.full(k, phase, np.int8), seen(k, **told))
    assert (many == alone[0]).all()
    assert ((by >= 0) | (many == phase)).all()


def test_a_save_is_waited_for_a_few_times_as_long_as_it_takes() -> None:
    def wait(durable_s: float, next_s: float = 0.0, course: int = SAVE_NOW, hour_pu: float = 0.0) -> float:
        found = save_wait_s(np.array([durable_s]), np.array([next_s]), np.array([course], np.int8),
                            np.array([hour_pu]))  # fmt: skip
        return float(found[0])

    assert wait(100.0) == 300.0
    assert wait(1.0) == LEAST_SAVE_S
    assert wait(1e5) == MOST_SAVE_S
    assert wait(100.0, 700.0, AT_NEXT) == 1000.0
    assert wait(500.0, hour_pu=0.5) == PRESSED_S
    assert wait(500.0, hour_pu=np.nan) == 1500.0
    assert wait(100.0, np.inf, AT_NEXT) == 300.0
