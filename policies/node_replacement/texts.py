"""Texts of replacement: proposals and journal accounts, with the figures that were weighed.

A sentence describes the moment of the decision, so that a proposal in force keeps its text until it changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.checkpointing import span
from policies.node_replacement import predictions
from policies.node_replacement.costs import OPTIONS, SAVE_NOW
from policies.node_replacement.evidence import CAUSES, failed_nodes, one_of
from policies.node_replacement.phases import (
    CORDONED,
    DRAINING,
    IN_SERVICE,
    LEVEL,
    OUT,
    PHASES,
    PROBATION,
    REPLACE,
    RMA,
    RULES,
    SAVING,
    SUSPECT,
    TESTING,
)
from policies.node_replacement.spare_count import repair_h, spare_pool, spare_pool_of
from twin.catalogue import F64, I8, I32, NS
from twin.contracts import ACTIONS, Memory, Proposal, View, finite

SERVICE, TESTED, SINCE = "node.service_level", "node.burn_in_since_s", "job.checkpoint_since_s"
NO_LIMIT_S = 1e10
MOST_SENTENCES = 200  # nodes with a sentence of their own, per control; the rest share one per level
MOST_ACCOUNTS, MOST_LEFT_IN = 100, 30  # moves, and nodes left in service, in one call; the rest is counted
SPARED = ("software", "facility", "shared")
POOL_NS = 86_400 * NS  # between two accounts of the pool
HOLD_TEXTS = (
    "",
    "the maximum number of nodes is already out",
    "it became suspect together with others: a common cause is likely",
    "waiting is predicted to cost less",
    "the maximum number of jobs is already saving",
    "it leaves in the coming trough of demand",
)
CAUSE_TEXTS = {
    "none": "racktwin withdrew it earlier; the reason is not in memory",
    "hardware": "its health verdict asks for it",
    "recurring": "its faults recur",
    "lemon": "it fails more often than others",
    "forecast": "it is forecast to fail",
    "software": "its job failed by its own fault, not the hardware",
    "facility": "power or cooling is to blame, not the node",
    "shared": "it failed together with others",
}
PHASE_TEXTS = {
    CORDONED: "no new jobs; it leaves when its job ends",
    SAVING: "no new jobs; it leaves once its job has saved",
    DRAINING: "drain",
    OUT: "out until it is tested or repaired",
    TESTING: "out while it is tested",
    RMA: "to be exchanged",
}
OPTION_TEXTS = {
    "watch": "to watch",
    "cordon": "to wait for its job's end",
    "at_next": "to wait for the next save",
    "save_now": "a save now",
    "at_once": "at once",
}
COSTS = ("watch_gpu_h", "cordon_gpu_h", "next_gpu_h", "save_gpu_h", "once_gpu_h")


def level_of(phase: np.ndarray, repairs: np.ndarray) -> I8:
    """Return the service level of each phase [n]."""
    out = LEVEL[phase]
    return np.where((phase == OUT) & (repairs > 0), REPLACE, out).astype(np.int8)


def proposals(view: View, memory: Memory) -> list[Proposal]:
    """Return proposals: levels for nodes that are out or leave, tests, and saves before drains."""
    phase = memory["phase"]
    level = level_of(phase, memory["needs_repair"])
    returns = one_of(phase, (IN_SERVICE, SUSPECT, PROBATION)) & (memory["withdrawn_ns"] > 0)
    out: list[Proposal] = []
    # People may have put a node that reads as in service there: nothing anew until that is decided
    gone = np.flatnonzero((level > 0) & (memory["resumed_ns"] == 0)).astype(np.int32)
    # The most important nodes get a sentence of their own
    order = np.argsort(-memory["watch_gpu_h"][gone], kind="stable")
    own = np.zeros(len(gone), np.bool_)
    own[order[:MOST_SENTENCES]] = True
    names, failed = spare_of_node(memory), failed_nodes(view)
    for node in gone[own].tolist():
        at = np.array([node], np.int32)
        out.append(_level(at, level[at], _sentence(view, memory, node, names, bool(failed[node]))))
    for value in np.unique(level[gone[~own]]).tolist():
        at = gone[~own & (level[gone] == value)]
        out.append(_level(at, level[at], f"{len(at)} more nodes, by what each of them is expected to cost"))
    back = np.flatnonzero(returns).astype(np.int32)
    if len(back):
        zero = np.zeros(len(back))
        out.append(
            Proposal(
                SERVICE,
                back,
                zero,
                zero.copy(),
                zero.copy(),
                "back in service: " + _return_text(memory, back),
            )
        )
    testing = np.flatnonzero((phase == TESTING) & (memory["test_requested_ns"] > 0)).astype(np.int32)
    if len(testing):
        out.append(
            _since(TESTED, testing, memory["test_requested_ns"][testing] / NS, "test it before it comes back")
        )
    return out + _saves(view, memory)


def _level(at: I32, level: I8, why: str) -> Proposal:
    want = level.astype(np.float64)
    return Proposal(SERVICE, at, want, np.full(len(at), float(REPLACE)), want.copy(), why)


def _since(control: str, at: I32, since_s: F64, why: str) -> Proposal:
    return Proposal(control, at, since_s, np.full(len(at), NO_LIMIT_S), since_s.copy(), why)


def _saves(view: View, memory: Memory) -> list[Proposal]:
    """Return the jobs to save before a drain of one of their nodes: the latest request of their nodes."""
    asks = (memory["phase"] == SAVING) & (memory["option"] == SAVE_NOW) & (memory["save_since_s"] > 0)
    nodes = np.flatnonzero(asks)
    slot = view.jobs.job_of_node[nodes]
    nodes, slot = nodes[slot >= 0], slot[slot >= 0]
    if not len(slot):
        return []
    since = np.zeros(view.jobs.n)
    np.maximum.at(since, slot, memory["save_since_s"][nodes])
    out: list[Proposal] = []
    jobs, first = np.unique(slot, return_index=True)
    for k, job in enumerate(jobs[:MOST_SENTENCES].tolist()):
        at, name = np.array([job], np.int32), view.site.name("node", int(nodes[first[k]]))
        out.append(_since(SINCE, at, since[at], f"save now: {name} leaves the job once the save is durable"))
    rest = jobs[MOST_SENTENCES:].astype(np.int32)
    if len(rest):
        out.append(_since(SINCE, rest, since[rest], f"save now: nodes leave {len(rest)} more jobs"))
    return out


def spare_of_node(memory: Memory) -> dict[int, int]:
    """Return the spare of each node that has one: both have the same pair number."""
    there = np.flatnonzero(memory["spare_pair"] != 0)
    spare = {int(memory["spare_pair"][i]): i for i in there[memory["phase"][there] == IN_SERVICE].tolist()}
    return {
        i: spare[int(memory["spare_pair"][i])]
        for i in there[memory["phase"][there] != IN_SERVICE].tolist()
        if int(memory["spare_pair"][i]) in spare
    }


def _sentence(view: View, memory: Memory, node: int, spares: dict[int, int], failed: bool) -> str:
    """Return one sentence for a node, which may have failed: the action, the reason, and the alternatives."""
    phase = int(memory["phase"][node])
    cause = CAUSES[int(memory["cause"][node])]
    text = f"{PHASE_TEXTS.get(phase, PHASES[phase])}: {CAUSE_TEXTS.get(cause, cause)}"
    action = int(memory["action"][node])
    text += f" ({ACTIONS[action].replace('_', ' ')})" if cause == "hardware" and action else ""
    if phase in (OUT, TESTING, RMA):
        text += f"; {RULES[int(memory['rule'][node]) - 1].why}" if memory["rule"][node] else ""
        return text + _history_text(memory, node)
    text += "; it has failed" if failed else "; " + _chance_text(memory, node)
    weighed = [
        f"{OPTION_TEXTS[course]} {_amount(float(memory[name][node]))}"
        for course, name in zip(OPTIONS, COSTS, strict=True)
        if np.isfinite(memory[name][node])
    ]
    text += f"; GPU-hours: {', '.join(weighed)}"
    if phase == SAVING:
        wait_s = float(memory["durable_s"][node])
        text += f"; a save takes {span(wait_s)}" if wait_s > 0 else ""
    if node in spares:
        text += f"; {view.site.name('node', spares[node])} is opened for its work"
    return text + _history_text(memory, node)


def _chance_text(memory: Memory, node: int) -> str:
    day, sure = float(memory["chance_24h_pu"][node]), float(memory["sure_pu"][node])
    chance_text = "no forecast" if np.isnan(day) else f"{100 * day:.0f} % to fail within a day"
    return chance_text + (
        "" if np.isnan(sure) else f", {100 * sure:.0f} % sure that the fault is the node's own"
    )


def _history_text(memory: Memory, node: int) -> str:
    trips, tests = int(memory["offences"][node]), int(memory["failed_tests"][node])
    trips_text = f"; {trips} withdrawals of late" if trips > 1 else ""
    return trips_text + (f"; {tests} failed test{'s' * (tests > 1)}" if tests else "")


def _amount(gpu_h: float) -> str:
    return f"{gpu_h:.0f}" if gpu_h >= 99.5 else f"{gpu_h:.2g}"


def _return_text(memory: Memory, back: I32) -> str:
    rows = memory["rule"][back]
    if len(back) == 1 and rows[0]:
        return RULES[int(rows[0]) - 1].why
    return f"{len(back)} nodes that were taken out here"


def accounts(view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
    """Return moves, predictions and their outcomes, spares, and once a day the pool, as plain data."""
    out: list[dict[str, Any]] = []
    moved = np.flatnonzero(before["phase"] != after["phase"])
    for node in moved[:MOST_ACCOUNTS].tolist():
        out.append(_phase_account(view, before, after, node))
    if len(moved) > MOST_ACCOUNTS:
        out.append({"what": "more", "count": len(moved) - MOST_ACCOUNTS, "at_ns": view.now_ns})
    out += _left_in_service(view, before, after)
    predicted = predictions.prediction_accounts(view, before, after)
    for account in predicted:
        node = view.site.entity("node", account["node"]) if account["what"] == "gate" else None
        if node is not None:
            account["repair_gpu_h"] = finite(after["repair_gpu_h"][node])
    out += predicted[: 240 - len(out)]
    last, now = (int(m["ran_ns"]) for m in (before, after))
    if last and last // POOL_NS != now // POOL_NS:
        out.append(_pool_account(view))
    return out


def _left_in_service(view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
    """Return the nodes left in service despite the evidence, with the external cause or the limit."""
    out: list[dict[str, Any]] = []
    here = (after["phase"] == IN_SERVICE) & (after["cause"] != before["cause"])
    spared = np.flatnonzero(here & one_of(after["cause"], [CAUSES.index(c) for c in SPARED]))
    blocked = np.flatnonzero((after["hold"] != before["hold"]) & (after["hold"] > 0))
    for node in spared[:MOST_LEFT_IN].tolist():
        cause = CAUSES[int(after["cause"][node])]
        out.append(
            {
                "what": "left_alone",
                "node": view.site.name("node", node),
                "cause": cause,
                "why": CAUSE_TEXTS[cause],
                "at_ns": view.now_ns,
            }
        )
    for node in blocked[:MOST_LEFT_IN].tolist():
        out.append(
            {
                "what": "held",
                "node": view.site.name("node", node),
                "cause": CAUSES[int(after["cause"][node])],
                "why": HOLD_TEXTS[int(after["hold"][node])],
                "at_ns": view.now_ns,
            }
        )
    more = max(len(spared) - MOST_LEFT_IN, 0) + max(len(blocked) - MOST_LEFT_IN, 0)
    return [*out, {"what": "more", "count": more, "at_ns": view.now_ns}] if more else out


def _phase_account(view: View, before: Memory, after: Memory, node: int) -> dict[str, Any]:
    row, phase = int(after["rule"][node]), int(after["phase"][node])
    entry: dict[str, Any] = {
        "what": "phase",
        "node": view.site.name("node", node),
        "from": PHASES[int(before["phase"][node])],
        "to": PHASES[phase],
        "cause": CAUSES[int(after["cause"][node])],
        "course": OPTIONS[int(after["option"][node])],
        "why": RULES[row - 1].why if 0 < row <= len(RULES) else "it was exchanged",
        "chance_1h_pu": finite(after["chance_1h_pu"][node]),
        "chance_24h_pu": finite(after["chance_24h_pu"][node]),
        "sure_pu": finite(after["sure_pu"][node]),
        "offences": int(after["offences"][node]),
        "attempts": int(after["failed_tests"][node]),
        "at_ns": view.now_ns,
    }
    entry |= {name: finite(after[name][node]) for name in COSTS}
    if (
        after["spare_pair"][node]
        and phase != IN_SERVICE
        and before["spare_pair"][node] != after["spare_pair"][node]
    ):
        spare = spare_of_node(after).get(node)
        entry["spare"] = None if spare is None else view.site.name("node", spare)
    return entry


def _pool_account(view: View) -> dict[str, Any]:
    """Return the number of spares needed for the forecast failures and repairs of this site."""
    have = int(np.count_nonzero(view.site.spare_node))
    found = spare_pool_of(view) or spare_pool(view, 0.0, repair_h(view), have)
    return {
        "what": "pool",
        "wanted": int(found.wanted),
        "have": int(found.have),
        "short": bool(found.short),
        "chance_short_pu": float(found.chance_short_pu),
        "sentence": found.sentence,
        "at_ns": view.now_ns,
    }
