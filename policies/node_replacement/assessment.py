"""Assessment: facts about each candidate node, its options with their costs, and the obstacles to each.

Candidates are nodes with evidence against them and nodes that are withdrawn. Changes only the memory that it
is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.node_replacement.circuit_breaker import BreakerState, check_breaker
from policies.node_replacement.cost_benefit import REPAIR_S, expected_outcome, terms_of_option
from policies.node_replacement.costs import (
    AT_NEXT,
    AT_ONCE,
    CORDON,
    SAVE_NOW,
    WATCH,
    Chances,
    Delays,
    OptionCosts,
    Stakes,
    inspection_pays,
    option_costs,
    stakes_of,
)
from policies.node_replacement.drain_timing import DrainTiming, demand_curve, drain_timing
from policies.node_replacement.evidence import HARDWARE, LEMON, MENDS, RECURRING, NodeEvidence, one_of
from policies.node_replacement.limits import WithdrawalLimits, admit
from policies.node_replacement.ownership import ownership_of, service_levels
from policies.node_replacement.phases import (
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
    SUSPECT,
    TESTING,
    TOGETHER_S,
    WITHDRAWN,
    Conditions,
)
from policies.node_replacement.spares import free_spares
from twin.catalogue import F64, I8, I32, NS, Bool
from twin.contracts import FAILED_TEST, NO_RESULT, PASSED, Memory, View, is_failure

SERVICE = "node.service_level"
NEWLY_S = 3600.0  # for which the circuit breaker counts a suspect as new
MOST_SAVING = 32  # nodes that wait for a save at the same time, as storage is limited. source: estimate
# Nodes that become suspects for each one that is forecast to fail, false alarms included. source: estimate
ALARMS_PER_FAILURE = 2.0
# Reasons why a node stays where it is, though a step would pay
NOT_HELD, LIMIT_REACHED, COMMON_CAUSE, WAITING_IS_BETTER, SAVE_QUEUE, TROUGH_AHEAD = range(6)


@dataclass(frozen=True, slots=True)
class ReplacementRules:
    """Settings of the site. `offences`: withdrawals from which on a node is to be exchanged."""

    burn_in: bool
    delays: Delays
    limits: WithdrawalLimits
    offences: int
    probation_s: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes `at` [k], ascending, with all that is known of them. `marked` [n_node]: withdrawn, and marked
    as racktwin's, though no withdrawal is in memory."""

    view: View
    evidence: NodeEvidence
    memory: Memory
    rules: ReplacementRules
    marked: Bool
    at: I32

    def column(self, name: str) -> np.ndarray:
        """Return a column of the memory for these nodes [k]."""
        return self.memory[name][self.at]


@dataclass(frozen=True, slots=True)
class Assessment:
    """The outcome for the nodes `at` [k], ascending. `hold`: reason, NOT_HELD and following; `begun`: nodes
    whose withdrawal is in force since this run; `timing`: of suspects that wait for a trough of demand."""

    at: I32
    conditions: Conditions
    evidence: NodeEvidence
    stakes: Stakes
    costs: OptionCosts
    hold: I8
    begun: Bool
    timing: tuple[I32, DrainTiming] | None = None


@dataclass(frozen=True, slots=True)
class _Permissions:
    """Of k nodes: those that may take a step, the reason why the others may not, and planned withdrawals
    that are no longer permitted."""

    allowed: Bool
    hold: I8
    revoked: Bool


def assess(
    view: View, evidence: NodeEvidence, memory: Memory, rules: ReplacementRules, marked: Bool
) -> Assessment:
    """Return the assessment of every node that has evidence against it or is withdrawn. Updates timers in
    memory."""
    now_ns, mends = view.now_ns, one_of(evidence.cause, MENDS)
    concerned = (memory["phase"] != IN_SERVICE) | mends | (memory["withdrawn_ns"] > 0) | marked
    at = np.flatnonzero(concerned).astype(np.int32)
    c = Candidates(view, evidence, memory, rules, marked, at)
    level, known = service_levels(view, at)
    failed_in_use = _failed_in_use(c)
    owner = ownership_of(view, evidence, memory, at, failed_in_use, marked)
    takes_over = rules.burn_in & failed_in_use & ~owner.under_maintenance & ~owner.wanted_out
    takes_over &= ~owner.wanted_in & ~marked[at] & _withdrawn_on_failure(c, level)
    bad = mends[at] & _evidence_is_new(c) & ~owner.theirs & ~owner.wanted_in & ~owner.under_maintenance
    begun = _update_timers(c, bad, level, known)
    quiet_ns = c.column("quiet_ns")
    broken = evidence.failed[at]
    stood_s = (now_ns - c.column("suspected_ns")) / NS
    confirmed = bad & (stood_s >= np.where(broken, CONFIRM_FAILED_S, CONFIRM_S))
    stakes = stakes_of(view, at, _spare_available(c))
    stays = one_of(evidence.cause[at], (HARDWARE, RECURRING, LEMON))
    costs = option_costs(
        Chances(evidence.chance_1h_pu[at], evidence.chance_24h_pu[at], evidence.sure_pu[at]),
        stays,
        broken & stays,
        stakes,
        rules.delays,
    )
    option = np.where(bad, costs.option, WATCH).astype(np.int8)
    # Silence alone is no reason to disturb a running job
    option = np.where(evidence.silent[at] & (option > CORDON), CORDON, option).astype(np.int8)
    # A verdict on hardware raises the chance for some hours only, and is no less true after
    may_wait = confirmed & ~broken & ~evidence.silent[at] & (evidence.cause[at] != HARDWARE)
    later, timing = _later_is_better(c, option, may_wait, stakes)
    may = _permissions(c, bad, confirmed & ~later, option, costs, stakes.busy)
    slot = view.jobs.job_of_node[at]
    saved_ns = np.where(slot >= 0, view.jobs.saved_ns[slot] if view.jobs.n else 0, 0)
    save_s = c.column("save_since_s")
    saved = (save_s > 0) & (saved_ns >= np.round(save_s * NS)) & stakes.busy
    deadline_ns = c.column("deadline_ns")
    expired = (deadline_ns > 0) & (now_ns >= deadline_ns) & ~owner.under_maintenance
    drains_now = np.where(saved | expired, AT_ONCE, c.column("option"))
    planned = np.where(c.column("phase") == SAVING, drains_now, option).astype(np.int8)
    waits = _waiting_is_better(c, planned, may.allowed & confirmed & stakes.busy, stakes)
    resumed_ns = c.column("resumed_ns")
    resumed = (resumed_ns > 0) & (now_ns - resumed_ns >= round(RESUMED_S * NS))
    conditions = Conditions(
        bad=bad,
        quiet=(quiet_ns > 0) & (now_ns - quiet_ns >= round(QUIET_S * NS)) & ~owner.under_maintenance,
        confirmed=confirmed,
        allowed=may.allowed & ~waits & ~later & ~owner.under_maintenance,
        option=option,
        busy=stakes.busy,
        level=level,
        resumed=(resumed | owner.wanted_in) & ~owner.under_maintenance,
        theirs=owner.theirs,
        saved=saved,
        timed=deadline_ns > 0,
        expired=expired,
        since_s=(now_ns - c.column("entered_ns")) / NS,
        failed_in_use=failed_in_use & ~owner.under_maintenance & ~owner.wanted_out,
        takes_over=takes_over,
        **_service_facts(c),
        evidence_outlasts_test=_evidence_outlasts_test(c, stakes),
        adopted=owner.adopted,
        revoked=may.revoked,
    )
    hold = np.where(waits, WAITING_IS_BETTER, may.hold)
    hold = np.where(later & (hold == NOT_HELD), TROUGH_AHEAD, hold).astype(np.int8)
    return Assessment(at, conditions, evidence, stakes, costs, hold, begun, timing)


def _service_facts(c: Candidates) -> dict[str, Bool]:
    """Return the conditions that follow from tests and repairs."""
    at, book, tested = c.at, c.view.service(), c.column("test_requested_ns")
    answered = (tested > 0) & (book.began_ns[at] >= tested)
    after = np.maximum(c.column("withdrawn_ns"), tested)
    replaced = (book.replaced_ns[at] > after) & (after > 0)
    hopeless = (c.column("failed_tests") >= FAILED_TESTS) | (c.column("offences") >= c.rules.offences)
    return {
        "passed": answered & (book.result[at] == PASSED),
        "failed": answered & (book.result[at] == FAILED_TEST),
        "inconclusive": answered & (book.result[at] == NO_RESULT),
        "repaired": (book.repaired_ns[at] > after) & (after > 0) | replaced,
        "replaced": replaced,
        "mended": np.maximum(book.repaired_ns[at], book.replaced_ns[at]) > c.column("entered_ns"),
        "needs_repair": c.column("needs_repair") > 0,
        "hopeless": hopeless | (c.column("cause") == LEMON),
        "has_test": np.full(len(at), c.rules.burn_in),
    }


def _waiting_is_better(c: Candidates, planned: I8, may: Bool, stakes: Stakes) -> Bool:
    """Return the nodes for which disturbing their job is predicted to be worse than waiting [k].

    A repair is needed either way, so that of the node's own time only a false alarm counts.
    """
    out = np.zeros(len(c.at), np.bool_)
    rows = np.flatnonzero(may & (planned >= AT_NEXT))
    if len(rows):
        chances = chances_of(c.evidence, c.at[rows])
        terms = terms_of_option(chances, planned[rows], stakes.rows(rows), c.rules.delays, repair_s=0.0)
        outcome = expected_outcome(terms)
        out[rows] = outcome.act_gpu_h > outcome.wait_gpu_h
    return out


def _later_is_better(
    c: Candidates, option: I8, may: Bool, stakes: Stakes
) -> tuple[Bool, tuple[I32, DrainTiming] | None]:
    """Return the suspects whose drain waits for a trough of demand [k], with the rows and times of those
    weighed."""
    out = np.zeros(len(c.at), np.bool_)
    drains = (option >= AT_NEXT) | (option >= CORDON) & ~stakes.busy
    rows = np.flatnonzero(may & (c.column("phase") == SUSPECT) & drains)
    curve = demand_curve(c.view) if len(rows) else None
    if curve is None:
        return out, None
    waited_s = (c.view.now_ns - c.column("entered_ns")[rows]) / NS
    chances = chances_of(c.evidence, c.at[rows])
    timing = drain_timing(curve, chances, stakes.rows(rows), waited_s, c.rules.delays, REPAIR_S)
    out[rows] = timing.later
    return out, (c.at[rows], timing)


def chances_of(evidence: NodeEvidence, nodes: I32) -> Chances:
    """Return these nodes' chances of failing."""
    return Chances(evidence.chance_1h_pu[nodes], evidence.chance_24h_pu[nodes], evidence.sure_pu[nodes])


def _failed_in_use(c: Candidates) -> Bool:
    """Return the nodes that failed by themselves and hold no job [k]."""
    own = c.evidence.failed[c.at] & one_of(c.evidence.cause[c.at], MENDS)
    return own & (c.view.jobs.job_of_node[c.at] < 0)


def _withdrawn_on_failure(c: Candidates, level: I8) -> Bool:
    """Return the nodes that others withdrew at their failure, neither before nor long after, as a
    scheduler does [k]."""
    since_ns = c.evidence.since_ns[c.at]
    after_s = (c.column("others_withdrew_ns") - since_ns) / NS
    out: Bool = (level >= 1) & (since_ns > 0) & (after_s >= -BEFORE_S) & (after_s <= TOGETHER_S)
    return out


def _evidence_is_new(c: Candidates) -> Bool:
    """Return the nodes whose evidence counts [k].

    A node that returned passed a test, or operators vouch for it: earlier verdicts no longer count unless it
    is still broken. Forecasts adapt after a while, and a lemon is cleared after its probation.
    """
    returned_ns, cause = c.column("returned_ns"), c.evidence.cause[c.at]
    since_s = np.where(returned_ns > 0, (c.view.now_ns - returned_ns) / NS, np.inf)
    later = (c.evidence.since_ns[c.at] > returned_ns) | np.isinf(since_s)
    verdict = one_of(cause, (HARDWARE, RECURRING))
    rested = since_s >= REST_S
    out: Bool = np.where(verdict, later | c.evidence.failed[c.at] & rested, rested)
    return np.where(cause == LEMON, since_s >= c.rules.probation_s, out)


def _update_timers(c: Candidates, bad: Bool, level: I8, known: Bool) -> Bool:
    """Store since when evidence is there or gone, and the level reached; gives withdrawals that begin [k]."""
    memory, at, now_ns = c.memory, c.at, c.view.now_ns
    was_quiet = memory["quiet_ns"][at] > 0
    memory["suspected_ns"][at[bad & was_quiet]] = now_ns
    memory["quiet_ns"][at[bad]] = 0
    memory["quiet_ns"][at[~bad & ~was_quiet]] = now_ns
    ours = one_of(memory["phase"][at], WITHDRAWN)
    begun: Bool = ours & (level >= 1) & (memory["withdrawn_ns"][at] == 0)
    memory["withdrawn_ns"][at[begun]] = now_ns
    memory["level_reached"][at] = np.where(
        ours, np.maximum(memory["level_reached"][at], level), memory["level_reached"][at]
    )
    # A command that was never read back cannot have been undone: the scheduler may not have answered
    memory["level_confirmed"][at] = ours & ((memory["level_confirmed"][at] > 0) | known & (level >= 1))
    back = ours & known & (level < 1) & (memory["level_confirmed"][at] > 0)
    memory["resumed_ns"][at[~back]] = 0
    memory["resumed_ns"][at[back & (memory["resumed_ns"][at] == 0)]] = now_ns
    return begun


def _spare_available(c: Candidates) -> Bool:
    """Return the nodes that would find a spare if all of these left, the most likely to fail first [k]."""
    level = np.fmax(c.view.commanded(SERVICE), c.view.readback(SERVICE))
    free = free_spares(c.view.site, c.view.jobs, level)
    spares = int(np.count_nonzero(free)) - int(np.count_nonzero(free[c.at]))
    out = np.zeros(len(c.at), np.bool_)
    if spares > 0:
        chance = np.nan_to_num(c.evidence.chance_24h_pu[c.at])
        out[np.argsort(-chance, kind="stable")[:spares]] = True
    return out


def _permissions(
    c: Candidates, bad: Bool, confirmed: Bool, option: I8, costs: OptionCosts, busy: Bool
) -> _Permissions:
    """Apply the limits, the queue for saves and the circuit breaker."""
    view, at, phase = c.view, c.at, c.column("phase")
    allowed, hold = np.ones(len(at), np.bool_), np.zeros(len(at), np.int8)
    level = np.nan_to_num(np.fmax(view.commanded(SERVICE), view.readback(SERVICE)))
    # A step that awaits approval or the lead leaves the node in service, so that it takes no room of others
    planned = one_of(phase, (CORDONED, SAVING, DRAINING)) & (level[at] < 1.0)
    asks = confirmed & (option >= CORDON) | one_of(phase, (CORDONED, SAVING)) | planned
    if not (bad.any() or asks.any()):
        return _Permissions(allowed, hold, planned)
    state = _run_breaker(c, bad)
    order = np.lexsort((-_savings_gpu_h(costs, option), ~planned))
    order = order[asks[order]]
    down = _down_nodes(view)
    out = (level >= 1.0) | (LEVEL[c.memory["phase"]] >= 1) | down
    out[at[planned]] = down[at[planned]]
    admitted, _ = admit(view.site, view.jobs, out, at[order], c.rules.limits)
    allowed[order], hold[order[~admitted]] = admitted, LIMIT_REACHED
    saving = one_of(option, (AT_NEXT, SAVE_NOW)) & asks & (phase != SAVING) & busy
    waits = int(np.count_nonzero(c.memory["phase"] == SAVING))
    queued = order[saving[order] & allowed[order]][max(MOST_SAVING - waits, 0) :]
    allowed[queued], hold[queued] = False, SAVE_QUEUE
    common = state.nodes[at] & bad
    allowed[common], hold[common] = False, COMMON_CAUSE
    return _Permissions(allowed, hold, planned & one_of(hold, (LIMIT_REACHED, COMMON_CAUSE)))


def _down_nodes(view: View) -> Bool:
    """Return the nodes that failed and are not back [n_node]: out of service, reported or not."""
    log = view.failures()
    out: Bool = np.zeros(view.site.sizes["node"], np.bool_)
    out[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    return out


def _evidence_outlasts_test(c: Candidates, stakes: Stakes) -> Bool:
    """Nodes whose evidence still stands, that nobody inspected since, and where an inspection pays [k]: a
    test finds only some faults."""
    book, since_ns = c.view.service(), c.evidence.since_ns[c.at]
    stands = one_of(c.evidence.cause[c.at], (HARDWARE, RECURRING)) & (since_ns > 0)
    stands &= since_ns > np.maximum(book.repaired_ns[c.at], book.replaced_ns[c.at])
    return stands & inspection_pays(c.evidence.sure_pu[c.at], stakes)


def _run_breaker(c: Candidates, bad: Bool) -> BreakerState:
    """Run the circuit breaker for the present suspects; stores when each was last held."""
    n, memory, at = c.view.site.sizes["node"], c.memory, c.at
    suspect, newly = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    # A withdrawn node points to a common cause too, but is none of those that the breaker holds
    suspect[at[bad & ~one_of(memory["phase"][at], (OUT, TESTING, RMA))]] = True
    since_ns = c.evidence.since_ns[at]
    since_ns = np.where((since_ns > 0) & (since_ns < c.view.now_ns), since_ns, c.view.now_ns)
    begun_ns = np.where(memory["evidence_ns"][at] > 0, memory["evidence_ns"][at], since_ns)
    newly[at] = bad & (c.view.now_ns - begun_ns < round(NEWLY_S * NS))
    state = check_breaker(
        c.view, newly, usual_suspects_per_h(c.evidence.chance_24h_pu), suspect, memory["common_cause_ns"]
    )
    memory["common_cause_ns"] = state.held_ns.astype(np.int64)
    return state


def usual_suspects_per_h(chance_24h_pu: F64) -> float:
    """Return the nodes that become suspects per hour, by the forecasts [n_node]; 0 without a forecast."""
    known = chance_24h_pu[~np.isnan(chance_24h_pu)]
    return ALARMS_PER_FAILURE * float(np.median(known)) * len(chance_24h_pu) / 24.0 if len(known) else 0.0


def _savings_gpu_h(costs: OptionCosts, option: I8) -> F64:
    """Return the GPU-hours that the option of each node saves over watching it [k]."""
    gain = costs.gpu_h[WATCH] - costs.gpu_h[option, np.arange(len(option))]
    return np.nan_to_num(np.where(np.isfinite(gain), gain, 0.0))
