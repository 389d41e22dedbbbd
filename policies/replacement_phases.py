"""The way of a node out of service and back: a table of phases, and what must be so to go to another one.

Every phase has an end: a timeout, an abort where nothing was disrupted yet, and a way back. A node moves by
one row of the table in a look, the first that fits. Where nothing was commanded, since the policy only
advises or nobody approved, no phase goes further by itself. Pure NumPy; may import courses and frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from policies.replacement_costs import AT_NEXT, AT_ONCE, CORDON, SAVE_NOW
from twin.frame import F64, I8, I32, Bool

IN_SERVICE, SUSPECT, CORDONED, SAVING, DRAINING, OUT, TESTING, PROBATION, RMA = range(9)
PHASES = ("in_service", "suspect", "cordoned", "saving", "draining", "out", "testing", "probation", "rma")
WITHDRAWN = (CORDONED, SAVING, DRAINING, OUT, TESTING, RMA)
# The service level that a phase asks for; OUT asks for one more where people must repair
LEVEL = np.array([0, 0, 1, 1, 3, 3, 3, 0, 4], np.int8)
REPLACE = 4
DRAINED = 3

# Evidence must stand for so long before anything is done; where a node is broken already. source: estimate
CONFIRM_S, CONFIRM_FAILED_S = 60.0, 5.0
QUIET_S = 600.0  # without evidence, before a step is taken back. source: estimate
RESUMED_S = 90.0  # a read-back of "in service" must last, as read-backs come once a minute. source: estimate
# A node that came back is judged by what began since, for so long. source: estimate
REST_S = 6 * 3600.0
STALE_S = 900.0  # what is not in force by then is weighed anew. source: estimate
CORDONED_S = 7 * 86_400.0  # after which all is weighed anew. source: estimate
DRAINING_S = 2 * 3600.0  # after which a job that does not leave is let go. source: catalogue, its deadline_s
AGAIN_S = 3600.0  # between two tries to drain. source: estimate
TESTING_S = 86_400.0  # without a result. source: catalogue, deadline_s of the control
TOGETHER_S, BEFORE_S = 600.0, 60.0  # a scheduler takes a node that failed out so soon. source: estimate
OFFENCES_S = 28 * 86_400.0  # after a return, trouble is a new matter. source: arXiv 2410.21680, of lemons
TRIES = 3  # to test, before people are waited for. source: estimate
FAILED_TESTS = 2  # source: issue; two repairs without a cure
# The most that a save is waited for, and the least; a few times what it should take. source: estimate
MOST_SAVE_S, LEAST_SAVE_S, SAVE_TIMES = 1800.0, 60.0, 3.0
PRESSING_PU, PRESSED_S = 0.3, 600.0  # such a chance within the hour allows no longer wait. source: estimate


class Seen(NamedTuple):
    """What is known of k nodes at this look; Bool unless it says otherwise."""

    bad: Bool  # evidence stands that taking it out can help
    quiet: Bool  # there was none for QUIET_S
    ripe: Bool  # it stood for long enough
    free: Bool  # there is room, no common cause, and the gate says that acting is better
    course: I8
    busy: Bool  # it has a job
    level: I8  # of service, as read back, else as commanded
    resumed: Bool  # people put it back in service
    theirs: Bool  # people took it out themselves, or work at it
    saved: Bool  # the job holds the save that was asked for
    waits: Bool  # the phase has a deadline
    over: Bool  # which has passed
    since_s: F64  # in this phase
    passed: Bool  # the test that was asked for
    failed: Bool
    undone: Bool  # it gave no result
    repaired: Bool  # somebody said so, or it is another device, since it was taken out
    replaced: Bool
    repairs: Bool  # it needs people before a test
    hopeless: Bool  # failed tests, or came back too often, or a lemon
    hook: Bool  # the site has a test
    broke: Bool  # it failed by itself, and nothing runs on it any more
    takes: Bool  # it did, others took it out as it failed, and the site has a test
    stands: Bool  # what speaks against it is older than its test, and worth that people look
    adopts: Bool  # it is out by the mark of racktwin, and nothing is remembered of it
    crowded: Bool  # it is planned out only, and there is no room any more, or a common cause


class Rule(NamedTuple):
    """One row: from a phase to another, when, and why in words."""

    start: int
    end: int
    when: Callable[[Seen], Bool]
    why: str


def _drains(s: Seen) -> Bool:
    out: Bool = _acts(s) & ((s.course == AT_ONCE) | ((s.course >= CORDON) & ~s.busy))
    return out


def _saves(s: Seen) -> Bool:
    out: Bool = _acts(s) & s.busy & ((s.course == SAVE_NOW) | (s.course == AT_NEXT))
    return out


def _acts(s: Seen) -> Bool:
    out: Bool = s.bad & s.ripe & s.free
    return out


def _stale(s: Seen) -> Bool:
    """What is not in force after a while: nobody approved it, or something holds it back."""
    out: Bool = (s.level < 1) & (s.since_s >= STALE_S)
    return out


def _resting(s: Seen) -> Bool:
    """A drain that failed a while ago is not tried again yet."""
    out: Bool = s.waits & ~s.over
    return out


RULES: tuple[Rule, ...] = (
    # What failed by itself is held until it was repaired and tested, whoever took it out
    *(
        Rule(p, OUT, lambda s: s.broke & (s.level >= 1), "it failed before it could leave")
        for p in (CORDONED, SAVING)
    ),
    *(
        Rule(p, OUT, lambda s: s.takes, "it failed, and is tested before it works again")
        for p in (IN_SERVICE, SUSPECT, PROBATION)
    ),
    # What the leader before withdrew, as far as it came with it
    *(
        Rule(p, end, when, "racktwin had taken it out before, why is not remembered")
        for p in (IN_SERVICE, SUSPECT, PROBATION)
        for end, when in (
            (OUT, lambda s: s.adopts & (s.level >= DRAINED) & ~s.busy),
            (DRAINING, lambda s: s.adopts & (s.level > LEVEL[CORDONED])),
            (CORDONED, lambda s: s.adopts & (s.level >= 1)),
        )
    ),
    # What people do comes first
    *(
        Rule(p, IN_SERVICE, lambda s: s.theirs, "people have taken it over")
        for p in (SUSPECT, CORDONED, SAVING)
    ),
    *(
        Rule(p, IN_SERVICE, lambda s: s.resumed, "people put it back in service")
        for p in (CORDONED, SAVING, DRAINING)
    ),
    *(Rule(p, PROBATION, lambda s: s.resumed, "people put it back in service") for p in (OUT, TESTING, RMA)),
    *(
        Rule(p, SUSPECT, lambda s: s.crowded, "it may not leave any more, and is in service yet")
        for p in (CORDONED, SAVING, DRAINING)
    ),
    # Out
    Rule(IN_SERVICE, SUSPECT, lambda s: s.bad & ~s.theirs, "something speaks against it"),
    Rule(PROBATION, SUSPECT, lambda s: s.bad & ~s.theirs, "something speaks against it again"),
    Rule(SUSPECT, IN_SERVICE, lambda s: s.quiet, "nothing speaks against it any more"),
    Rule(SUSPECT, DRAINING, _drains, "to drain it now costs least"),
    Rule(SUSPECT, SAVING, _saves, "to drain it once its job has saved costs least"),
    Rule(
        SUSPECT,
        CORDONED,
        lambda s: _acts(s) & (s.course == CORDON),
        "to let it go when its job ends costs least",
    ),
    Rule(CORDONED, IN_SERVICE, lambda s: s.quiet, "nothing speaks against it any more"),
    Rule(CORDONED, DRAINING, lambda s: (s.level >= 1) & ~s.busy & s.free, "its job has ended"),
    Rule(CORDONED, DRAINING, lambda s: _drains(s) & ~_resting(s), "to drain it now costs least"),
    Rule(
        CORDONED, SAVING, lambda s: _saves(s) & ~_resting(s), "to drain it once its job has saved costs least"
    ),
    Rule(
        CORDONED,
        SUSPECT,
        lambda s: (s.since_s >= CORDONED_S) | _stale(s) & (s.course != CORDON),
        "all is weighed anew",
    ),
    Rule(SAVING, IN_SERVICE, lambda s: s.quiet, "nothing speaks against it any more"),
    Rule(SAVING, DRAINING, lambda s: (s.level >= 1) & s.free & s.saved, "its job holds a durable save"),
    Rule(SAVING, DRAINING, lambda s: (s.level >= 1) & s.free & ~s.busy, "its job has ended"),
    Rule(SAVING, DRAINING, lambda s: s.over & s.free & s.bad, "the save was waited for as long as may be"),
    Rule(SAVING, SUSPECT, lambda s: _stale(s) & ~_saves(s), "all is weighed anew"),
    Rule(SAVING, CORDONED, lambda s: s.over, "it may not be drained now"),
    Rule(DRAINING, IN_SERVICE, lambda s: s.quiet & (s.level < 1), "nothing speaks against it any more"),
    Rule(
        DRAINING, SUSPECT, lambda s: (s.level < 1) & s.busy & ~_drains(s), "work came before it was drained"
    ),
    Rule(DRAINING, SUSPECT, lambda s: _stale(s) & ~_drains(s), "all is weighed anew"),
    Rule(DRAINING, OUT, lambda s: (s.level >= DRAINED) & ~s.busy, "nothing runs on it any more"),
    Rule(DRAINING, CORDONED, lambda s: s.over & s.busy, "its job does not leave: it is let go when it ends"),
    Rule(DRAINING, OUT, lambda s: s.over & (s.level >= 1), "nothing runs on it any more"),
    # Back
    Rule(OUT, RMA, lambda s: s.hopeless & ~s.replaced, "it came back too often"),
    Rule(OUT, TESTING, lambda s: s.repaired & s.hook, "it was repaired"),
    Rule(OUT, PROBATION, lambda s: s.repaired & ~s.hook, "it was repaired, and this site has no test"),
    Rule(OUT, TESTING, lambda s: ~s.repairs & s.hook, "a test tells if anything is wrong"),
    Rule(TESTING, OUT, lambda s: s.passed & s.stands, "it passed its test, but what spoke against it stands"),
    Rule(TESTING, PROBATION, lambda s: s.passed, "it passed its test"),
    Rule(TESTING, OUT, lambda s: s.failed, "it failed its test"),
    Rule(TESTING, OUT, lambda s: s.undone | s.over, "its test gave no result"),
    Rule(RMA, TESTING, lambda s: s.replaced & s.hook, "it was replaced"),
    Rule(RMA, PROBATION, lambda s: s.replaced & ~s.hook, "it was replaced, and this site has no test"),
    Rule(PROBATION, IN_SERVICE, lambda s: s.over, "it has been well for long enough"),
)


def step(phase: I8, seen: Seen) -> tuple[I8, I32]:
    """(phase after this look, place in RULES of the row that moved it, -1 for none) [k]."""
    after, by = phase.copy(), np.full(len(phase), -1, np.int32)
    for number, rule in enumerate(RULES):
        there = (phase == rule.start) & (by < 0)
        if not there.any():
            continue
        moves = there & rule.when(seen)
        after[moves], by[moves] = rule.end, number
    return after, by


def save_wait_s(durable_s: F64, next_s: F64, course: I8, hour_pu: F64) -> F64:
    """How long a drain waits for its job's save at most [k], s: an absolute deadline."""
    wait = np.clip(SAVE_TIMES * durable_s, LEAST_SAVE_S, MOST_SAVE_S)
    planned = np.where(np.isfinite(next_s), next_s, 0.0)
    wait = np.where(course == AT_NEXT, planned + wait, wait)
    pressing = np.nan_to_num(hour_pu) >= PRESSING_PU
    return np.where(pressing, np.minimum(wait, np.maximum(PRESSED_S, durable_s)), wait)
