"""What replacement sees of the nodes that it looks at: levels, jobs, tests, people, room and the gate.

May import contracts and the other files of this policy; changes only the memory that it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.replacement_costs import (
    AT_NEXT,
    AT_ONCE,
    CORDON,
    SAVE_NOW,
    WATCH,
    Costs,
    Prices,
    Stakes,
    people_pay,
    stakes_of,
    weigh,
)
from policies.replacement_evidence import HARDWARE, LEMON, MENDS, RECURRING, Evidence, one_of
from policies.replacement_forward import Terms, forward, terms_of
from policies.replacement_limits import Breaker, Limits, breaker, room
from policies.replacement_owner import people
from policies.replacement_phases import (
    BEFORE_S,
    CONFIRM_FAILED_S,
    CONFIRM_S,
    CORDONED,
    DRAINING,
    FAILED_TESTS,
    IN_SERVICE,
    LEVEL,
    OUT,
    QUIET_S,
    REST_S,
    RESUMED_S,
    RMA,
    SAVING,
    TESTING,
    TOGETHER_S,
    WITHDRAWN,
    Seen,
)
from policies.replacement_spares import roles
from twin.contracts import Memory, View
from twin.frame import F64, I8, I32, I64, NS, Bool
from twin.health.failure_words import is_failure
from twin.service_book import FAILED_TEST, NO_RESULT, PASSED
from twin.state import GOOD

SERVICE = "node.service_level"
NEWLY_S = 3600.0  # for which a suspect is a new one to the breaker
MOST_SAVING = 32  # nodes that wait for a save at once; storage has limits too. source: estimate
# Nodes of this site that become suspects within an hour, for each that is forecast to fail: false alarms are
# some too. source: estimate
ALARMS_PER_FAILURE = 2.0
# Why a node is left where it is, though it would be best to act
FREE, ROOM, COMMON, GATE, QUEUE = range(5)


class Rules(NamedTuple):
    """What a site has set."""

    burn_in: bool
    prices: Prices
    limits: Limits
    offences: int
    probation_s: float


class Look(NamedTuple):
    """Of the nodes `at` [k], ascending."""

    at: I32
    seen: Seen
    evidence: Evidence
    stakes: Stakes
    costs: Costs
    held: I8  # why not, place in FREE ..
    begun: Bool  # its withdrawal is in force since this look
    breaker: Breaker | None
    refused: Bool  # by the gate: it foretells that to act is worse


def look(view: View, evidence: Evidence, kept: Memory, rules: Rules, found: Bool) -> Look:
    """All that decides what becomes of each node that anything is to be said of. `found` [n]: out, and ours
    by its mark, though nothing is remembered."""
    now_ns, phase = view.now_ns, kept["phase"]
    mends = one_of(evidence.cause, MENDS)
    at = np.flatnonzero((phase != IN_SERVICE) | mends | (kept["withdrawn_ns"] > 0) | found).astype(np.int32)
    level, known = levels(view, at)
    broke = _broke(view, evidence, at)
    theirs, wanted_in, under, asked, adopts = people(view, evidence, kept, at, level, known, broke, found)
    takes = rules.burn_in & broke & ~under & ~asked & ~wanted_in & ~found[at]
    takes &= _with_it(evidence, kept, at, level)
    bad = mends[at] & _news(evidence, kept, at, now_ns, rules) & ~theirs & ~wanted_in & ~under
    begun = _remember(kept, at, bad, level, known, now_ns)
    quiet = (kept["quiet_ns"][at] > 0) & (now_ns - kept["quiet_ns"][at] >= round(QUIET_S * NS))
    broken = evidence.failed[at]
    stood_s = (now_ns - kept["suspected_ns"][at]) / NS
    ripe = bad & (stood_s >= np.where(broken, CONFIRM_FAILED_S, CONFIRM_S))
    stakes = stakes_of(view, at, _at_hand(view, evidence, at))
    stays = one_of(evidence.cause[at], (HARDWARE, RECURRING, LEMON))
    costs = weigh(evidence.chance_1h_pu[at], evidence.chance_24h_pu[at], evidence.sure_pu[at], stays, stakes,
                  rules.prices, broken & stays)  # fmt: skip
    course = np.where(bad, costs.course, WATCH).astype(np.int8)
    # That it is not heard is no reason to disturb what runs
    course = np.where(evidence.silent[at] & (course > CORDON), CORDON, course).astype(np.int8)
    free, held, state, crowded = _may(view, evidence, kept, at, bad, ripe, course, costs, stakes, rules)
    slot = view.jobs.job_of_node[at]
    saved_ns = np.where(slot >= 0, view.jobs.saved_ns[slot] if view.jobs.n else 0, 0)
    save_s = kept["save_s"][at]
    saved = (save_s > 0) & (saved_ns >= np.round(save_s * NS)) & stakes.busy
    deadline = kept["deadline_ns"][at]
    over = (deadline > 0) & (now_ns >= deadline) & ~under
    worse = _worse(evidence, kept, at, free & ripe, course, saved | over, stakes, rules)
    free, held = free & ~worse, np.where(worse, GATE, held).astype(np.int8)
    book, tested = view.service(), kept["tested_ns"][at]
    answered = (tested > 0) & (book.began_ns[at] >= tested)
    after = np.maximum(kept["withdrawn_ns"][at], tested)
    replaced = (book.replaced_ns[at] > after) & (after > 0)
    hopeless = (kept["attempts"][at] >= FAILED_TESTS) | (kept["offences"][at] >= rules.offences)
    resumed = (kept["resumed_ns"][at] > 0) & (now_ns - kept["resumed_ns"][at] >= round(RESUMED_S * NS))
    seen = Seen(
        bad, quiet, ripe, free, course, stakes.busy, level,
        (resumed | wanted_in) & ~under, theirs, saved, deadline > 0, over,
        (now_ns - kept["entered_ns"][at]) / NS,
        answered & (book.result[at] == PASSED), answered & (book.result[at] == FAILED_TEST),
        answered & (book.result[at] == NO_RESULT), (book.repaired_ns[at] > after) & (after > 0) | replaced,
        replaced, kept["repairs"][at] > 0, hopeless | (kept["cause"][at] == LEMON),
        np.full(len(at), rules.burn_in), broke & ~under & ~asked, takes,
        _stands(view, evidence, at, stakes), adopts, crowded,
    )  # fmt: skip
    return Look(at, seen, evidence, stakes, costs, held, begun, state, worse)


def _worse(
    evidence: Evidence, kept: Memory, at: I32, may: Bool, course: I8, now: Bool, stakes: Stakes, rules: Rules
) -> Bool:
    """Where both courses, run forward, say that to disturb the work is worse than to wait [k].

    What needs repair needs it in either course, so that only the time of a false alarm counts for the node.
    """
    out = np.zeros(len(at), np.bool_)
    saving = kept["phase"][at] == SAVING
    planned = np.where(saving, np.where(now, AT_ONCE, kept["course"][at]), course).astype(np.int8)
    rows = np.flatnonzero(may & stakes.busy & (planned >= AT_NEXT))
    if len(rows):
        told = forward(foretold(evidence, at[rows], planned[rows], stakes, rows, rules.prices, 0.0))
        out[rows] = told.act_gpu_h > told.wait_gpu_h
    return out


def foretold(
    evidence: Evidence, nodes: I32, course: I8, stakes: Stakes, rows: np.ndarray, prices: Prices,
    repair_s: float, use_pu: tuple[F64, F64] | None = None, spare_day_pu: F64 | None = None,
) -> Terms:  # fmt: skip
    """What the gate is asked of these nodes, which stand in `rows` of the stakes."""
    return terms_of(
        evidence.chance_1h_pu[nodes], evidence.chance_24h_pu[nodes], evidence.sure_pu[nodes], course,
        Stakes(*(column[rows] for column in stakes)), prices, repair_s, spare_day_pu, use_pu,
    )  # fmt: skip


def levels(view: View, at: I32) -> tuple[I8, Bool]:
    """(service level in force [k]; whether that is read back): the read-back where it is current, else the
    command that runs, else in service."""
    readback, commanded = view.readback(SERVICE)[at], view.commanded(SERVICE)[at]
    current = (view.quality(f"{SERVICE}_state")[at] == GOOD) & ~np.isnan(readback)
    # Where no source reads levels back, what is commanded is all there is
    level = np.where(current, readback, np.where(np.isnan(readback), commanded, np.fmax(readback, commanded)))
    return np.nan_to_num(level).astype(np.int8), current


def _broke(view: View, evidence: Evidence, at: I32) -> Bool:
    """Nodes that failed by themselves and hold no job [k]."""
    own = evidence.failed[at] & one_of(evidence.cause[at], MENDS)
    return own & (view.jobs.job_of_node[at] < 0)


def _with_it(evidence: Evidence, kept: Memory, at: I32, level: I8) -> Bool:
    """Where others took a node out as it failed, and not before, nor long after [k]: a scheduler does so."""
    after_s = (kept["others_ns"][at] - evidence.since_ns[at]) / NS
    out: Bool = (level >= 1) & (evidence.since_ns[at] > 0) & (after_s >= -BEFORE_S) & (after_s <= TOGETHER_S)
    return out


def _news(evidence: Evidence, kept: Memory, at: I32, now_ns: int, rules: Rules) -> Bool:
    """Where what speaks against a node counts [k].

    Who came back passed a test, or people say that it is well: a verdict from before is answered with that,
    unless it is broken still. Forecasts learn it in a while, and the name of a lemon is forgotten after the
    probation.
    """
    since_s = np.where(kept["returned_ns"][at] > 0, (now_ns - kept["returned_ns"][at]) / NS, np.inf)
    cause = evidence.cause[at]
    later = (evidence.since_ns[at] > kept["returned_ns"][at]) | np.isinf(since_s)
    told = one_of(cause, (HARDWARE, RECURRING))
    out: Bool = np.where(told, later | evidence.failed[at] & (since_s >= REST_S), since_s >= REST_S)
    return np.where(cause == LEMON, since_s >= rules.probation_s, out)


def _remember(kept: Memory, at: I32, bad: Bool, level: I8, known: Bool, now_ns: int) -> Bool:
    """Since when evidence is there or gone, and what level was reached; gives whose withdrawal began [k]."""
    was_quiet = kept["quiet_ns"][at] > 0
    kept["suspected_ns"][at[bad & was_quiet]] = now_ns
    kept["quiet_ns"][at[bad]] = 0
    kept["quiet_ns"][at[~bad & ~was_quiet]] = now_ns
    ours = one_of(kept["phase"][at], WITHDRAWN)
    begun: Bool = ours & (level >= 1) & (kept["withdrawn_ns"][at] == 0)
    kept["withdrawn_ns"][at[begun]] = now_ns
    kept["reached"][at] = np.where(ours, np.maximum(kept["reached"][at], level), kept["reached"][at])
    # What was commanded, and never read back, nobody can have put back: the scheduler may not have answered
    kept["shown"][at] = ours & ((kept["shown"][at] > 0) | known & (level >= 1))
    back = ours & known & (level < 1) & (kept["shown"][at] > 0)
    kept["resumed_ns"][at[~back]] = 0
    kept["resumed_ns"][at[back & (kept["resumed_ns"][at] == 0)]] = now_ns
    return begun


def _at_hand(view: View, evidence: Evidence, at: I32) -> Bool:
    """Who would find a spare if all of these left, the likeliest to fail first [k]."""
    level = np.fmax(view.commanded(SERVICE), view.readback(SERVICE))
    free = roles(view.site, view.jobs, level)
    spares = int(np.count_nonzero(free)) - int(np.count_nonzero(free[at]))
    out = np.zeros(len(at), np.bool_)
    if spares > 0:
        chance = np.nan_to_num(evidence.chance_24h_pu[at])
        out[np.argsort(-chance, kind="stable")[:spares]] = True
    return out


def _may(
    view: View, evidence: Evidence, kept: Memory, at: I32, bad: Bool, ripe: Bool, course: I8, costs: Costs,
    stakes: Stakes, rules: Rules,
) -> tuple[Bool, I8, Breaker | None, Bool]:  # fmt: skip
    """(who may go further now [k], why the others may not [k], the breaker, who was to leave, is in service
    yet, and may not any more [k])."""
    free, held = np.ones(len(at), np.bool_), np.zeros(len(at), np.int8)
    phase = kept["phase"][at]
    level = np.nan_to_num(np.fmax(view.commanded(SERVICE), view.readback(SERVICE)))
    # What nobody approved yet, or what waits for the lead, is in service still, and takes no room of others
    planned = one_of(phase, (CORDONED, SAVING, DRAINING)) & (level[at] < 1.0)
    asks = ripe & (course >= CORDON) | one_of(phase, (CORDONED, SAVING)) | planned
    if not (bad.any() or asks.any()):
        return free, held, None, planned
    state = _common(view, evidence, kept, at, bad)
    order = np.lexsort((-_gain(costs, course), ~planned))
    order = order[asks[order]]
    out = (level >= 1.0) | (LEVEL[kept["phase"]] >= 1) | _down(view)
    out[at[planned]] = _down(view)[at[planned]]
    allowed, _ = room(view.site, view.jobs, out, at[order], rules.limits)
    free[order], held[order[~allowed]] = allowed, ROOM
    saving = one_of(course, (AT_NEXT, SAVE_NOW)) & asks & (phase != SAVING) & stakes.busy
    waits = int(np.count_nonzero(kept["phase"] == SAVING))
    queued = order[saving[order] & free[order]][max(MOST_SAVING - waits, 0) :]
    free[queued], held[queued] = False, QUEUE
    common = state.nodes[at] & bad
    free[common], held[common] = False, COMMON
    return free, held, state, planned & one_of(held, (ROOM, COMMON))


def _down(view: View) -> Bool:
    """Nodes that failed and are not back [n_node]: out, though nobody may have said so yet."""
    log = view.failures()
    out: Bool = np.zeros(view.site.sizes["node"], np.bool_)
    out[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    return out


def _stands(view: View, evidence: Evidence, at: I32, stakes: Stakes) -> Bool:
    """Where what spoke against a node still does, nobody has looked at it since, and people should [k]:
    a test finds only some of what is wrong."""
    book, since_ns = view.service(), evidence.since_ns[at]
    told = one_of(evidence.cause[at], (HARDWARE, RECURRING)) & (since_ns > 0)
    told &= since_ns > np.maximum(book.repaired_ns[at], book.replaced_ns[at])
    return told & people_pay(evidence.sure_pu[at], stakes)


def _common(view: View, evidence: Evidence, kept: Memory, at: I32, bad: Bool) -> Breaker:
    """Whether what is bad has a cause in common; who was held is remembered."""
    n, now_ns = view.site.sizes["node"], view.now_ns
    suspect, newly = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    # Who is out already shows a cause in common, but is none of those that the breaker waits for
    suspect[at[bad & ~one_of(kept["phase"][at], (OUT, TESTING, RMA))]] = True
    begun = np.where(kept["begun_ns"][at] > 0, kept["begun_ns"][at], _begun(evidence, at, now_ns))
    newly[at] = bad & (now_ns - begun < round(NEWLY_S * NS))
    known = evidence.chance_24h_pu[~np.isnan(evidence.chance_24h_pu)]
    usual = ALARMS_PER_FAILURE * float(np.median(known)) * n / 24.0 if len(known) else 0.0
    state = breaker(view, newly, usual, suspect, kept["shared_ns"])
    kept["shared_ns"] = state.held_ns.astype(np.int64)
    return state


def _begun(evidence: Evidence, at: I32, now_ns: int) -> I64:
    since = evidence.since_ns[at]
    return np.where((since > 0) & (since < now_ns), since, now_ns)


def _gain(costs: Costs, course: I8) -> F64:
    """What the course of each node saves, GPU-hours [k]; nothing for those that are only watched."""
    k = len(course)
    gain = costs.gpu_h[WATCH] - costs.gpu_h[course, np.arange(k)]
    return np.nan_to_num(np.where(np.isfinite(gain), gain, 0.0))
