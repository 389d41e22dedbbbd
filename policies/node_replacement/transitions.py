"""Transitions: changes of memory that a move from phase to phase brings: instants, deadlines, counts and the
figures that were weighed. Changes only the memory that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from policies.node_replacement.assessment import (
    SERVICE,
    TROUGH_AHEAD,
    Assessment,
    ReplacementRules,
    chances_of,
)
from policies.node_replacement.cost_benefit import REPAIR_S, SpareEffect, expected_outcome, terms_of_option
from policies.node_replacement.evidence import HARDWARE, MENDS, RECURRING, NodeEvidence, one_of
from policies.node_replacement.ownership import BY_OTHERS, service_levels
from policies.node_replacement.phases import (
    AGAIN_S,
    CORDONED,
    DRAINED,
    DRAINING,
    DRAINING_S,
    IN_SERVICE,
    OFFENCES_S,
    OUT,
    PROBATION,
    REPLACE,
    RMA,
    SAVING,
    SUSPECT,
    TESTING,
    TESTING_S,
    TRIES,
    WITHDRAWN,
    save_wait_s,
)
from policies.node_replacement.predictions import Prediction, limit_use, record_predictions
from policies.node_replacement.spares import assign_spares, free_spares
from policies.node_replacement.texts import COSTS
from twin.catalogue import I8, I32, NS, Bool
from twin.contracts import Memory, View, action

SINCE = "job.checkpoint_since_s"
CONTACT_SUPPORT = action("contact_support")  # this and beyond needs repair before a test
# A save requested so recently, by anyone, is the one that a drain waits for. source: estimate
ASKED_S = 300.0
RENEW_S = 600.0  # a step that comes into force so late asks for a newer save. source: estimate
RETURN_S, UNREAD_S = 86_400.0, 300.0  # a return is commanded for so long; where it is never read back
MOST_COUNTED = 1000  # of tests and offences, far below what their columns hold


def adopt_replaced(view: View, memory: Memory, fresh: Bool, last_ns: int) -> None:
    """Adopt nodes [n_node, `fresh`: without memory] that were exchanged while this policy had them out of
    service.

    They continue as replaced nodes. Changes `memory`.
    """
    replaced = view.service().replaced_ns
    ours = fresh & (replaced > last_ns) & memory["ours"]
    at = np.flatnonzero(ours).astype(np.int32)
    memory["phase"][at], memory["level_reached"][at], memory["level_confirmed"][at] = OUT, DRAINED, 1
    memory["entered_ns"][at] = view.now_ns
    memory["withdrawn_ns"][at] = np.maximum(replaced[at] - 1, 1)


def restart_confirmation(memory: Memory, now_ns: int) -> None:
    """Require a new confirmation of earlier suspicions after a pause, before any step."""
    waits = one_of(memory["phase"], (SUSPECT, CORDONED, SAVING))
    memory["suspected_ns"][waits] = now_ns
    memory["resumed_ns"][:] = 0


def apply_transitions(
    view: View, memory: Memory, a: Assessment, after: I8, by: I32, rules: ReplacementRules
) -> None:
    """Carry out the moves of this run. Changes `memory`."""
    at, now_ns = a.at, view.now_ns
    before = memory["phase"][at]
    moved = by >= 0
    _store_assessment(memory, a, before, after, moved)
    memory["phase"][at[moved]] = after[moved]
    memory["rule"][at[moved]] = by[moved] + 1
    memory["entered_ns"][at[moved]] = now_ns
    # A suspicion does not end a probation
    watched = (before == PROBATION) & (after == SUSPECT) | (before == SUSPECT) & (after == PROBATION)
    memory["deadline_ns"][at[moved & ~watched]] = 0
    memory["hold"][at] = np.where(a.conditions.bad, a.hold, 0)
    _store_timing(memory, a, now_ns)

    def to(phase: int, *start: int) -> I32:
        some = moved & (after == phase)
        out: I32 = at[some & one_of(before, start)] if start else at[some]
        return out

    new = to(SUSPECT)
    since = a.evidence.since_ns[new]
    memory["evidence_ns"][new] = np.where((since > 0) & (since < now_ns), since, now_ns)
    memory["suspected_ns"][new] = now_ns
    _count_withdrawals(memory, a, rules)
    adopted = moved & a.conditions.adopted & one_of(before, (IN_SERVICE, SUSPECT, PROBATION))
    left = at[moved & one_of(after, (CORDONED, SAVING, DRAINING)) & (before == SUSPECT) & ~adopted]
    _begin_withdrawal(view, memory, a, left, rules)
    _take_over(view, memory, a, np.union1d(to(OUT, IN_SERVICE, SUSPECT, PROBATION), at[adopted]))
    memory["needs_repair"][to(OUT, IN_SERVICE, SUSPECT, PROBATION, CORDONED, SAVING)] = 1
    people_look = (a.conditions.level >= REPLACE) | a.conditions.bad & (
        a.evidence.action[at] >= CONTACT_SUPPORT
    )
    memory["needs_repair"][at[adopted & ~a.conditions.takes_over]] = people_look[
        adopted & ~a.conditions.takes_over
    ]
    _update_tests(view, memory, a, to, rules)
    ended = to(IN_SERVICE)
    memory["test_attempts"][ended] = memory["failed_tests"][ended] = memory["level_reached"][ended] = 0
    memory["evidence_ns"][np.concatenate([ended, to(PROBATION)])] = 0
    # A node released before its return was read back for long enough has returned all the same
    early = (memory["resumed_ns"][at] > 0) & ~one_of(after, WITHDRAWN) & ~a.conditions.theirs
    memory["returned_ns"][at[moved & (a.conditions.resumed | early)]] = now_ns
    theirs = at[moved & a.conditions.theirs & (after == IN_SERVICE)]
    memory["withdrawn_ns"][theirs], memory["owner"][theirs] = 0, BY_OTHERS  # this policy never returns them
    _start_deadlines(view, memory, a)
    _finish_returns(view, memory)
    # Nodes in service whose cause is external show it
    idle = (memory["phase"] == IN_SERVICE) & ~one_of(a.evidence.cause, MENDS)
    np.copyto(memory["cause"], a.evidence.cause, where=idle)
    memory["ours"] = one_of(memory["phase"], WITHDRAWN) & (memory["withdrawn_ns"] > 0)


def _store_timing(memory: Memory, a: Assessment, now_ns: int) -> None:
    """Store when the suspects leave that wait for a trough of demand."""
    for name in ("leave_ns", "leave_by_ns", "wait_saves_gpu_h"):
        memory[name][:] = 0
    if a.timing is None:
        return
    at, timing = a.timing
    waits = timing.later & (memory["hold"][at] == TROUGH_AHEAD)
    at = at[waits]
    memory["leave_ns"][at] = now_ns + np.round(timing.leave_s[waits] * NS).astype(np.int64)
    memory["leave_by_ns"][at] = now_ns + np.round(timing.latest_s[waits] * NS).astype(np.int64)
    memory["wait_saves_gpu_h"][at] = timing.gain_gpu_h[waits]


def _store_evidence(memory: Memory, evidence: NodeEvidence, at: I32) -> None:
    """Store the evidence of these nodes."""
    for name in ("chance_1h_pu", "chance_24h_pu", "sure_pu", "cause", "action"):
        memory[name][at] = getattr(evidence, name)[at]


def _store_assessment(memory: Memory, a: Assessment, before: I8, after: I8, moved: Bool) -> None:
    """Store the figures of a decision, which are shown until the next one."""
    decides = moved & one_of(after, (SUSPECT, CORDONED, SAVING, DRAINING)) & a.conditions.bad
    decides &= before != SAVING  # the decision is being carried out
    # A suspect whose best option changed
    other = (before == SUSPECT) & a.conditions.bad & (a.conditions.option != memory["option"][a.at])
    rows = np.flatnonzero(decides | other)
    at = a.at[rows]
    _store_evidence(memory, a.evidence, at)
    memory["option"][at] = a.conditions.option[rows]
    for name, cost in zip(COSTS, a.costs.gpu_h, strict=True):
        memory[name][at] = cost[rows]
    stakes = a.stakes
    for name, column in (
        ("next_s", stakes.next_s),
        ("durable_s", stakes.durable_s),
        ("job_gpus", stakes.job_gpus),
        ("lost_s", stakes.lost_s),
    ):
        memory[name][at] = column[rows]


def _begin_withdrawal(view: View, memory: Memory, a: Assessment, left: I32, rules: ReplacementRules) -> None:
    """Begin the withdrawal of nodes: their prediction, and the spare that takes over."""
    _reset_withdrawal(memory, left)
    memory["needs_repair"][left] = a.evidence.action[left] >= CONTACT_SUPPORT
    if len(left):
        _predict(view, memory, a, left, _assign_spares(view, memory, left), rules)


def _count_withdrawals(memory: Memory, a: Assessment, rules: ReplacementRules) -> None:
    """Count the withdrawal of nodes whose withdrawal came into force; a mere plan does not count."""
    nodes = a.at[a.begun]
    away_ns = memory["withdrawn_ns"][nodes] - memory["returned_ns"][nodes]
    # A fault of its own so soon after a return counts double: the repair or the test missed it
    again = (memory["returned_ns"][nodes] > 0) & (away_ns < round(rules.probation_s * NS))
    hard = again & one_of(memory["cause"][nodes], (HARDWARE, RECURRING))
    _add_offences(memory, nodes, 1 + hard)


def _add_offences(memory: Memory, nodes: I32, more: np.ndarray) -> None:
    well_ns = memory["withdrawn_ns"][nodes] - memory["returned_ns"][nodes]
    well = (memory["returned_ns"][nodes] > 0) & (well_ns >= round(OFFENCES_S * NS))
    memory["offences"][nodes] = np.minimum(np.where(well, 0, memory["offences"][nodes]) + more, MOST_COUNTED)


def _reset_withdrawal(memory: Memory, left: I32) -> None:
    """Start the record of a withdrawal; a node that did not return since the last one continues it."""
    since = memory["withdrawn_ns"][left]
    memory["withdrawn_ns"][left] = np.where(since > memory["returned_ns"][left], since, 0)
    for name in ("level_reached", "failed_tests", "test_attempts", "test_requested_ns", "spare_pair"):
        memory[name][left] = 0


def _take_over(view: View, memory: Memory, a: Assessment, took: I32) -> None:
    """Take over nodes that failed by themselves, or that carry racktwin's mark, until they are repaired
    and tested."""
    rows = np.searchsorted(a.at, took)
    _reset_withdrawal(memory, took)
    more = (memory["withdrawn_ns"][took] == 0).astype(np.int16)
    memory["withdrawn_ns"][took] = view.now_ns
    _add_offences(memory, took, more)
    memory["level_reached"][took] = np.maximum(a.conditions.level[rows], 1)
    _store_evidence(memory, a.evidence, took)


def _assign_spares(view: View, memory: Memory, left: I32) -> I32:
    """Return the spare that takes over from each of these nodes [k], -1 for none; stores the pair."""
    out = np.full(len(left), -1, np.int32)
    spare = free_spares(view.site, view.jobs, np.fmax(view.commanded(SERVICE), view.readback(SERVICE)))
    if not spare.any():
        return out
    order = np.argsort(-memory["watch_gpu_h"][left], kind="stable")
    taken = (memory["spare_pair"] != 0) | (memory["phase"] != IN_SERVICE)
    out[order], _, _ = assign_spares(view, left[order], spare, taken)
    has = np.flatnonzero(out >= 0)
    memory["spare_pair"][left[has]] = memory["spare_pair"][out[has]] = view.now_ns + np.arange(len(has))
    return out


def _predict(
    view: View, memory: Memory, a: Assessment, left: I32, spare: I32, rules: ReplacementRules
) -> None:
    """Record the predictions for both options, with the share of the repair, which will be measured."""
    fresh = memory["prediction_ns"][left] == 0
    nodes, spare = left[fresh], spare[fresh]
    if not len(nodes):
        return
    option, chances = memory["option"][nodes], chances_of(a.evidence, nodes)
    stakes = replace(a.stakes.rows(np.searchsorted(a.at, nodes)), spare=spare >= 0)
    spare_pu = np.where(spare >= 0, a.evidence.chance_24h_pu[np.maximum(spare, 0)], 0.0)
    effect = SpareEffect(spare_pu, *limit_use(view, nodes, spare))
    whole, bare = (
        expected_outcome(terms_of_option(chances, option, stakes, rules.delays, repair_s, effect))
        for repair_s in (REPAIR_S, 0.0)
    )
    memory.update(record_predictions(view, memory, Prediction(nodes, option, whole, stakes, chances.sure_pu)))
    memory["repair_gpu_h"][nodes] = whole.act_gpu_h - bare.act_gpu_h


def _update_tests(
    view: View, memory: Memory, a: Assessment, to: Callable[..., I32], rules: ReplacementRules
) -> None:
    """Update requested saves, tests and returns. `to(phase, *from)`: the nodes with this move."""
    now_ns, now_s = view.now_ns, view.now_ns / NS
    saving = to(SAVING)
    memory["save_since_s"][saving] = save_since_s(view, memory, saving)
    memory["save_since_s"][np.concatenate([to(DRAINING), to(CORDONED), to(IN_SERVICE)])] = 0.0
    given_up = to(CORDONED, DRAINING, SAVING)
    memory["deadline_ns"][given_up] = now_ns + round(AGAIN_S * NS)
    failed = to(OUT, TESTING)
    rows = np.searchsorted(a.at, failed)
    real = failed[a.conditions.failed[rows]]
    memory["failed_tests"][real] = np.minimum(memory["failed_tests"][real] + 1, MOST_COUNTED)
    memory["test_attempts"][failed] = np.minimum(memory["test_attempts"][failed] + 1, MOST_COUNTED)
    memory["needs_repair"][
        failed[
            a.conditions.failed[rows] | a.conditions.evidence_outlasts_test[rows] & a.conditions.passed[rows]
        ]
    ] = 1
    memory["needs_repair"][failed[memory["test_attempts"][failed] >= TRIES]] = 1
    tested = to(TESTING)
    memory["test_requested_ns"][tested] = np.int64(np.ceil(now_s)) * NS
    memory["deadline_ns"][tested] = now_ns + round(TESTING_S * NS)
    repaired = to(TESTING, RMA)
    memory["offences"][repaired] = memory["failed_tests"][repaired] = memory["test_attempts"][repaired] = 0
    back = to(PROBATION, OUT, TESTING, RMA)
    memory["returned_ns"][back] = now_ns
    memory["deadline_ns"][back] = now_ns + round(rules.probation_s * NS)
    memory["needs_repair"][back] = memory["failed_tests"][back] = memory["test_attempts"][back] = 0


def save_since_s(view: View, memory: Memory, nodes: I32) -> np.ndarray:
    """The instant from which on a save of each node's job counts [k], unix s: that of a recent request, else
    now, less the time that a save in progress may have taken."""
    slot = view.jobs.job_of_node[nodes]
    now_s = view.now_ns / NS
    since_s = np.full(len(nodes), np.nan)
    busy = slot >= 0
    since_s[busy] = view.commanded(SINCE)[slot[busy]]
    fresh = np.floor(now_s - np.minimum(memory["durable_s"][nodes], ASKED_S))
    with np.errstate(invalid="ignore"):
        late = (since_s >= now_s - ASKED_S) & (since_s <= now_s)
    return np.where(late, since_s, fresh)


def _start_deadlines(view: View, memory: Memory, a: Assessment) -> None:
    """Start the deadlines of phases that came into force; an unapproved step does not expire."""
    now_ns = view.now_ns
    saving = a.at[memory["phase"][a.at] == SAVING]
    draining = a.at[memory["phase"][a.at] == DRAINING]
    level = np.zeros(len(memory["phase"]), np.int8)
    level[a.at], _ = service_levels(view, a.at)
    begins = saving[(level[saving] >= 1) & (memory["deadline_ns"][saving] == 0)]
    wait_s = save_wait_s(
        memory["durable_s"][begins],
        memory["next_s"][begins],
        memory["option"][begins],
        memory["chance_1h_pu"][begins],
    )
    memory["deadline_ns"][begins] = now_ns + np.round(wait_s * NS).astype(np.int64)
    # A request approved late asks for a new save
    old = begins[now_ns / NS - memory["save_since_s"][begins] >= RENEW_S]
    memory["save_since_s"][old] = save_since_s(view, memory, old)
    begins = draining[(level[draining] >= 1) & (memory["deadline_ns"][draining] == 0)]
    memory["deadline_ns"][begins] = now_ns + round(DRAINING_S * NS)


def _finish_returns(view: View, memory: Memory) -> None:
    """End the withdrawal of nodes that are back in service, or whose return is never confirmed."""
    on_way = one_of(memory["phase"], (IN_SERVICE, SUSPECT, PROBATION)) & (memory["withdrawn_ns"] > 0)
    at = np.flatnonzero(on_way).astype(np.int32)
    if not len(at):
        return
    level, known = service_levels(view, at)
    waited_s = (view.now_ns - memory["entered_ns"][at]) / NS
    done = (level < 1) & (known | (waited_s >= UNREAD_S)) | (waited_s >= RETURN_S)
    back = at[done]
    memory["withdrawn_ns"][back] = memory["level_reached"][back] = 0
    pairs = memory["spare_pair"][back]
    pairs = pairs[pairs != 0]
    if len(pairs):
        memory["spare_pair"][np.isin(memory["spare_pair"], pairs)] = 0
