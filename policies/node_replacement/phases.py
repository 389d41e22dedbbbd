"""Phase table: the phases of a withdrawal, and the rule that moves a node from one to the next.

Every phase ends: by a timeout, by an abort where nothing was disrupted yet, or by a return to service. A node
moves by at most one rule per run, the first that applies. While nothing is commanded, because the policy only
advises or a step awaits approval, no phase advances by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.node_replacement.costs import AT_NEXT, AT_ONCE, CORDON, SAVE_NOW
from twin.catalogue import F64, I8, I32, Bool

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
CORDONED_S = 7 * 86_400.0  # after which its options are weighed again. source: estimate
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Facts about k nodes that the phase rules test; Bool [k] unless stated otherwise."""

    bad: Bool  # there is evidence that a withdrawal can remedy
    quiet: Bool  # there was no evidence for QUIET_S
    confirmed: Bool  # the evidence stood for long enough
    allowed: Bool  # limits, the circuit breaker and the prediction permit a step
    option: I8  # the option of least expected cost
    busy: Bool  # a job runs on it
    level: I8  # service level, as read back, else as commanded
    resumed: Bool  # operators put it back in service
    theirs: Bool  # operators or others took it out, or maintenance is under way
    saved: Bool  # its job holds the save that was requested
    timed: Bool  # the phase has a deadline
    expired: Bool  # the deadline has passed
    since_s: F64  # time in this phase
    passed: Bool  # result of the requested test
    failed: Bool
    inconclusive: Bool
    repaired: Bool  # reported repaired or exchanged since it was withdrawn
    replaced: Bool  # exchanged since it was withdrawn
    mended: Bool  # reported repaired or exchanged since it entered this phase
    needs_repair: Bool  # before a test
    hopeless: Bool  # too many failed tests or withdrawals, or a lemon
    has_test: Bool  # the site has a burn-in test
    failed_in_use: Bool  # it failed by itself and no job runs on it
    takes_over: Bool  # it failed, others withdrew it at once, and the site has a test
    evidence_outlasts_test: Bool  # the evidence is older than the test, and an inspection pays
    adopted: Bool  # it carries racktwin's mark, but no withdrawal is in memory
    revoked: Bool  # its withdrawal is only planned and no longer permitted


class PhaseRule(NamedTuple):
    """One rule: from a phase to another, its condition, and its reason in words."""

    start: int
    end: int
    when: Callable[[Conditions], Bool]
    why: str


def _drains(s: Conditions) -> Bool:
    out: Bool = _acts(s) & ((s.option == AT_ONCE) | ((s.option >= CORDON) & ~s.busy))
    return out


def _saves(s: Conditions) -> Bool:
    out: Bool = _acts(s) & s.busy & ((s.option == SAVE_NOW) | (s.option == AT_NEXT))
    return out


def _acts(s: Conditions) -> Bool:
    out: Bool = s.bad & s.confirmed & s.allowed
    return out


def _stale(s: Conditions) -> Bool:
    """Return the phases whose command is not in force after STALE_S: unapproved, or held back."""
    out: Bool = (s.level < 1) & (s.since_s >= STALE_S)
    return out


def _resting(s: Conditions) -> Bool:
    """Return True before the deadline of a failed drain, which must not be retried earlier, and of a
    suspect's probation."""
    out: Bool = s.timed & ~s.expired
    return out


RULES: tuple[PhaseRule, ...] = (
    # A node that failed by itself is held until it was repaired and tested, whoever took it out
    *(
        PhaseRule(p, OUT, lambda s: s.failed_in_use & (s.level >= 1), "it failed before it could leave")
        for p in (CORDONED, SAVING)
    ),
    *(
        PhaseRule(p, OUT, lambda s: s.takes_over, "it failed, and is tested before it returns to service")
        for p in (IN_SERVICE, SUSPECT, PROBATION)
    ),
    # Nodes that the leader before withdrew, as far as the new leader knows of it
    *(
        PhaseRule(p, end, when, "racktwin withdrew it earlier; the reason is not in memory")
        for p in (IN_SERVICE, SUSPECT, PROBATION)
        for end, when in (
            (OUT, lambda s: s.adopted & (s.level >= DRAINED) & ~s.busy),
            (DRAINING, lambda s: s.adopted & (s.level > LEVEL[CORDONED])),
            (CORDONED, lambda s: s.adopted & (s.level >= 1)),
        )
    ),
    # An act of people comes first
    *(
        PhaseRule(p, IN_SERVICE, lambda s: s.theirs, "operators took it over")
        for p in (SUSPECT, CORDONED, SAVING)
    ),
    *(
        PhaseRule(p, IN_SERVICE, lambda s: s.resumed, "operators returned it to service")
        for p in (CORDONED, SAVING, DRAINING)
    ),
    *(
        PhaseRule(p, PROBATION, lambda s: s.resumed, "operators returned it to service")
        for p in (OUT, TESTING, RMA)
    ),
    *(
        PhaseRule(p, SUSPECT, lambda s: s.revoked, "it may no longer be withdrawn, and is still in service")
        for p in (CORDONED, SAVING, DRAINING)
    ),
    # Out
    PhaseRule(IN_SERVICE, SUSPECT, lambda s: s.bad & ~s.theirs, "there is evidence against it"),
    PhaseRule(PROBATION, SUSPECT, lambda s: s.bad & ~s.theirs, "there is new evidence against it"),
    PhaseRule(SUSPECT, IN_SERVICE, lambda s: s.quiet & ~_resting(s), "the evidence against it is gone"),
    PhaseRule(SUSPECT, DRAINING, _drains, "draining it now costs least"),
    PhaseRule(SUSPECT, SAVING, _saves, "draining it once its job has saved costs least"),
    PhaseRule(
        SUSPECT,
        CORDONED,
        lambda s: _acts(s) & (s.option == CORDON),
        "waiting until its job ends costs least",
    ),
    PhaseRule(CORDONED, IN_SERVICE, lambda s: s.quiet, "the evidence against it is gone"),
    PhaseRule(CORDONED, DRAINING, lambda s: (s.level >= 1) & ~s.busy & s.allowed, "its job has ended"),
    PhaseRule(CORDONED, DRAINING, lambda s: _drains(s) & ~_resting(s), "draining it now costs least"),
    PhaseRule(
        CORDONED, SAVING, lambda s: _saves(s) & ~_resting(s), "draining it once its job has saved costs least"
    ),
    PhaseRule(
        CORDONED,
        SUSPECT,
        lambda s: (s.since_s >= CORDONED_S) | _stale(s) & (s.option != CORDON),
        "its options are weighed again",
    ),
    PhaseRule(SAVING, IN_SERVICE, lambda s: s.quiet, "the evidence against it is gone"),
    PhaseRule(
        SAVING, DRAINING, lambda s: (s.level >= 1) & s.allowed & s.saved, "its job holds a durable save"
    ),
    PhaseRule(SAVING, DRAINING, lambda s: (s.level >= 1) & s.allowed & ~s.busy, "its job has ended"),
    PhaseRule(
        SAVING, DRAINING, lambda s: s.expired & s.allowed & s.bad, "the time limit for the save is over"
    ),
    PhaseRule(SAVING, SUSPECT, lambda s: _stale(s) & ~_saves(s), "its options are weighed again"),
    PhaseRule(SAVING, CORDONED, lambda s: s.expired, "it may not be drained now"),
    PhaseRule(DRAINING, IN_SERVICE, lambda s: s.quiet & (s.level < 1), "the evidence against it is gone"),
    PhaseRule(
        DRAINING,
        SUSPECT,
        lambda s: (s.level < 1) & s.busy & ~_drains(s),
        "a job started before it was drained",
    ),
    PhaseRule(DRAINING, SUSPECT, lambda s: _stale(s) & ~_drains(s), "its options are weighed again"),
    PhaseRule(DRAINING, OUT, lambda s: (s.level >= DRAINED) & ~s.busy, "no job runs on it any more"),
    PhaseRule(
        DRAINING,
        CORDONED,
        lambda s: s.expired & s.busy,
        "its job keeps running: the node leaves when the job ends",
    ),
    PhaseRule(DRAINING, OUT, lambda s: s.expired & (s.level >= 1), "no job runs on it any more"),
    # Back
    PhaseRule(OUT, RMA, lambda s: s.hopeless & ~s.replaced, "it was withdrawn too often"),
    PhaseRule(OUT, TESTING, lambda s: s.repaired & s.has_test, "it was repaired"),
    PhaseRule(
        OUT, PROBATION, lambda s: s.repaired & ~s.has_test, "it was repaired, and this site has no test"
    ),
    PhaseRule(OUT, TESTING, lambda s: ~s.needs_repair & s.has_test, "a test shows whether it is faulty"),
    PhaseRule(
        TESTING,
        OUT,
        lambda s: s.passed & s.evidence_outlasts_test,
        "it passed its test, but the evidence against it remains",
    ),
    PhaseRule(TESTING, PROBATION, lambda s: s.passed, "it passed its test"),
    PhaseRule(TESTING, OUT, lambda s: s.failed, "it failed its test"),
    PhaseRule(TESTING, OUT, lambda s: s.inconclusive | s.expired, "its test gave no result"),
    PhaseRule(RMA, TESTING, lambda s: (s.replaced | s.mended) & s.has_test, "it was replaced or repaired"),
    PhaseRule(
        RMA,
        PROBATION,
        lambda s: (s.replaced | s.mended) & ~s.has_test,
        "it was replaced or repaired, and this site has no test",
    ),
    PhaseRule(PROBATION, IN_SERVICE, lambda s: s.expired, "it stayed healthy for its probation"),
    PhaseRule(
        SUSPECT,
        PROBATION,
        lambda s: s.quiet & _resting(s),
        "the evidence against it is gone, and its probation goes on",
    ),
)


def next_phases(phase: I8, found: Conditions) -> tuple[I8, I32]:
    """Return (next phase, index in RULES of the applied rule, -1 for none) [k]."""
    after, by = phase.copy(), np.full(len(phase), -1, np.int32)
    for number, rule in enumerate(RULES):
        there = (phase == rule.start) & (by < 0)
        if not there.any():
            continue
        moves = there & rule.when(found)
        after[moves], by[moves] = rule.end, number
    return after, by


def save_wait_s(durable_s: F64, next_s: F64, option: I8, hour_pu: F64) -> F64:
    """Return the longest time that a drain waits for its job's save [k], s."""
    wait = np.clip(SAVE_TIMES * durable_s, LEAST_SAVE_S, MOST_SAVE_S)
    planned = np.where(np.isfinite(next_s), next_s, 0.0)
    wait = np.where(option == AT_NEXT, planned + wait, wait)
    pressing = np.nan_to_num(hour_pu) >= PRESSING_PU
    return np.where(pressing, np.minimum(wait, np.maximum(PRESSED_S, durable_s)), wait)
