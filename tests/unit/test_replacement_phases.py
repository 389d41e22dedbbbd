"""The table of phases: every row can happen, every phase ends, and what is not in force goes nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.replacement_costs import AT_NEXT, AT_ONCE, CORDON, SAVE_NOW, WATCH
from policies.replacement_phases import (
    CORDONED,
    CORDONED_S,
    DRAINING,
    IN_SERVICE,
    LEAST_SAVE_S,
    LEVEL,
    MOST_SAVE_S,
    OUT,
    PHASES,
    PRESSED_S,
    PROBATION,
    RMA,
    RULES,
    SAVING,
    STALE_S,
    SUSPECT,
    TESTING,
    WITHDRAWN,
    Seen,
    save_wait_s,
    step,
)

NUMBERS = {"course": np.int8, "level": np.int8, "since_s": np.float64}
BAD = {"bad": True, "ripe": True, "free": True}


def seen(k: int = 1, **told: Any) -> Seen:
    """Nothing but this."""
    columns = {n: np.full(k, told.get(n, 0), NUMBERS.get(n, np.bool_)) for n in Seen._fields}
    return Seen(**columns)


def after(phase: int, **told: Any) -> int:
    found, _ = step(np.array([phase], np.int8), seen(**told))
    return int(found[0])


MOVES = [
    (IN_SERVICE, {"bad": True}, SUSPECT),
    (IN_SERVICE, {"bad": True, "theirs": True}, IN_SERVICE),
    (IN_SERVICE, {}, IN_SERVICE),
    (SUSPECT, {}, SUSPECT),
    (SUSPECT, {"quiet": True}, IN_SERVICE),
    (SUSPECT, {**BAD, "course": WATCH, "busy": True}, SUSPECT),
    (SUSPECT, {**BAD, "course": CORDON, "busy": True}, CORDONED),
    (SUSPECT, {**BAD, "course": CORDON}, DRAINING),
    (SUSPECT, {**BAD, "course": AT_NEXT, "busy": True}, SAVING),
    (SUSPECT, {**BAD, "course": SAVE_NOW, "busy": True}, SAVING),
    (SUSPECT, {**BAD, "course": AT_ONCE, "busy": True}, DRAINING),
    (SUSPECT, {**BAD, "course": AT_ONCE, "busy": True, "ripe": False}, SUSPECT),
    (SUSPECT, {**BAD, "course": AT_ONCE, "busy": True, "free": False}, SUSPECT),
    (SUSPECT, {**BAD, "course": AT_ONCE, "busy": True, "theirs": True}, IN_SERVICE),
    (CORDONED, {**BAD, "busy": True, "level": 1, "course": CORDON}, CORDONED),
    (CORDONED, {"level": 1, "free": True}, DRAINING),
    (CORDONED, {"level": 1, "quiet": True, "free": True}, IN_SERVICE),
    (CORDONED, {**BAD, "level": 1, "course": SAVE_NOW, "busy": True}, SAVING),
    (CORDONED, {**BAD, "level": 1, "course": SAVE_NOW, "busy": True, "waits": True}, CORDONED),
    (CORDONED, {**BAD, "level": 1, "course": SAVE_NOW, "busy": True, "waits": True, "over": True}, SAVING),
    (CORDONED, {"busy": True, "level": 1, "since_s": CORDONED_S}, SUSPECT),
    (CORDONED, {"level": 1, "theirs": True}, IN_SERVICE),
    (CORDONED, {"level": 0, "resumed": True}, IN_SERVICE),
    (SAVING, {**BAD, "busy": True, "level": 1}, SAVING),
    (SAVING, {**BAD, "busy": True, "level": 1, "saved": True}, DRAINING),
    (SAVING, {**BAD, "busy": True, "level": 1, "saved": True, "free": False}, SAVING),
    (SAVING, {**BAD, "busy": True, "level": 0, "saved": True}, SAVING),
    (SAVING, {**BAD, "busy": False, "level": 1}, DRAINING),
    (SAVING, {**BAD, "busy": True, "level": 1, "over": True}, DRAINING),
    (SAVING, {**BAD, "busy": True, "level": 1, "over": True, "free": False}, CORDONED),
    (SAVING, {"busy": True, "level": 1, "quiet": True}, IN_SERVICE),
    (SAVING, {"level": 0, "since_s": STALE_S}, SUSPECT),
    (DRAINING, {"level": 3, "busy": True}, DRAINING),
    (DRAINING, {"level": 3}, OUT),
    (DRAINING, {"level": 3, "quiet": True}, OUT),
    (DRAINING, {"level": 0, "quiet": True}, IN_SERVICE),
    (DRAINING, {"level": 3, "busy": True, "over": True}, CORDONED),
    (DRAINING, {**BAD, "level": 0, "busy": True, "course": CORDON}, SUSPECT),
    (OUT, {"level": 3, "repairs": True, "hook": True}, OUT),
    (OUT, {"level": 3, "hook": True}, TESTING),
    (OUT, {"level": 3}, OUT),
    (OUT, {"level": 3, "repaired": True, "repairs": True, "hook": True}, TESTING),
    (OUT, {"level": 3, "repaired": True}, PROBATION),
    (OUT, {"level": 3, "hopeless": True, "hook": True}, RMA),
    (OUT, {"level": 3, "hopeless": True, "replaced": True, "repaired": True, "hook": True}, TESTING),
    (OUT, {"level": 0, "resumed": True}, PROBATION),
    (TESTING, {"level": 3, "hook": True}, TESTING),
    (TESTING, {"level": 3, "hook": True, "passed": True}, PROBATION),
    (TESTING, {"level": 3, "hook": True, "failed": True}, OUT),
    (TESTING, {"level": 3, "hook": True, "undone": True}, OUT),
    (TESTING, {"level": 3, "hook": True, "over": True}, OUT),
    (PROBATION, {}, PROBATION),
    (PROBATION, {"over": True}, IN_SERVICE),
    (PROBATION, {"bad": True}, SUSPECT),
    (CORDONED, {**BAD, "level": 3, "broke": True, "theirs": True}, OUT),
    (SAVING, {**BAD, "level": 3, "broke": True, "theirs": True}, OUT),
    (CORDONED, {**BAD, "level": 0, "broke": True, "course": CORDON}, DRAINING),
    (IN_SERVICE, {"level": 3, "takes": True, "theirs": True}, OUT),
    (PROBATION, {"level": 3, "takes": True, "theirs": True}, OUT),
    (SUSPECT, {"level": 3, "adopts": True}, OUT),
    (IN_SERVICE, {"level": 3, "adopts": True, "busy": True}, DRAINING),
    (PROBATION, {"level": 2, "adopts": True}, DRAINING),
    (IN_SERVICE, {"level": 1, "adopts": True, "busy": True}, CORDONED),
    (IN_SERVICE, {"level": 0, "adopts": True}, IN_SERVICE),
    (CORDONED, {**BAD, "level": 0, "crowded": True, "course": CORDON, "busy": True}, SUSPECT),
    (DRAINING, {**BAD, "level": 0, "crowded": True, "course": AT_ONCE, "busy": True}, SUSPECT),
    (RMA, {"level": 4, "repaired": True, "hook": True}, RMA),
    (RMA, {"level": 4, "repaired": True, "replaced": True, "hook": True}, TESTING),
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


BOOLS = [n for n in Seen._fields if n not in NUMBERS]


@st.composite
def looks(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    told = {n: draw(st.booleans()) for n in BOOLS}
    told |= {"course": draw(st.integers(0, 4)), "level": draw(st.integers(0, 4)),
              "since_s": draw(st.sampled_from([0.0, 1000.0, 1e7]))}  # fmt: skip
    return told | fixed


@given(st.lists(looks(level=0, takes=False), min_size=1, max_size=30))
def test_what_is_only_advised_never_counts_as_done(course: list[dict[str, Any]]) -> None:
    phase = IN_SERVICE
    for told in course:
        if phase != SAVING:  # deadlines begin when something is in force
            told = told | {"over": False}
        phase = after(phase, **told | {"over": False, "resumed": False})
        assert phase in (IN_SERVICE, SUSPECT, CORDONED, SAVING, DRAINING)


@given(looks(takes=False, broke=False, adopts=False),
       st.sampled_from([IN_SERVICE, SUSPECT, PROBATION, CORDONED]))  # fmt: skip
def test_nothing_is_disturbed_that_is_not_free_and_ripe(told: dict[str, Any], phase: int) -> None:
    if phase == CORDONED:
        told |= {"free": False}
    elif told["free"] and told["ripe"] and told["bad"]:
        told |= {"ripe": False}
    assert after(phase, **told) not in (SAVING, DRAINING, OUT, TESTING, RMA)


@given(looks(bad=False, theirs=False, over=False, takes=False, adopts=False), st.integers(0, 8))
def test_without_evidence_nothing_begins(told: dict[str, Any], phase: int) -> None:
    to = after(phase, **told)
    if phase in (IN_SERVICE, SUSPECT, PROBATION):
        assert to in (IN_SERVICE, SUSPECT, PROBATION)


@given(looks(), st.integers(0, 8), st.integers(1, 4))
def test_nodes_do_not_see_each_other(told: dict[str, Any], phase: int, k: int) -> None:
    alone, _ = step(np.array([phase], np.int8), seen(**told))
    many, by = step(np.full(k, phase, np.int8), seen(k, **told))
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
