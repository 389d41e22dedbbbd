"""What replacement proposes and accounts for, from what it remembers, with the figures that were weighed.

The words are of the moment of the decision, so that a proposal in force says the same until it changes. May
import contracts and the other files of this policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies import replacement_gate as gate
from policies.checkpoint_words import span
from policies.replacement_costs import AT_NEXT, COURSES, SAVE_NOW, WATCH
from policies.replacement_evidence import CAUSES, FORECAST, one_of
from policies.replacement_phases import (
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
from policies.replacement_pool import pool, pool_of, repair_h
from twin.contracts import Memory, Proposal, View
from twin.frame import F64, I8, I32, NS
from twin.health.levels import ACTIONS

SERVICE, TESTED, SINCE = "node.service_level", "node.burn_in_since_s", "job.checkpoint_since_s"
FOR_EVER_S = 1e10
MOST_TOLD = 200  # nodes with a sentence of their own, of each control; the rest share one for each level
MOST_ACCOUNTS, MOST_LEFT = 100, 30  # moves, and nodes left alone, told in one call; the rest is counted
SPARED = ("software", "facility", "shared")
POOL_NS = 86_400 * NS  # between two accounts of the pool
HELD = ("", "as many nodes are out as may be at once", "it looks bad together with others: a common cause",
        "run forward, to act is worse than to wait", "as many jobs save as may at once")  # fmt: skip
WHY = {
    "none": "racktwin took it out before; why is not remembered",
    "hardware": "its health asks for it", "recurring": "trouble comes again and again",
    "lemon": "it fails more often than others", "forecast": "it is forecast to fail",
    "software": "its job's own fault: no hardware is to blame",
    "facility": "power or cooling is to blame, not the node", "shared": "it failed together with others",
}  # fmt: skip
SAYS = {
    CORDONED: "no new jobs, and out when its job ends", SAVING: "no new jobs, and out once its job has saved",
    DRAINING: "drain", OUT: "out until it is tested or repaired", TESTING: "out while it is tested",
    RMA: "to be exchanged",
}  # fmt: skip
PLAIN = {"watch": "to watch", "cordon": "to wait for its job's end", "at_next": "to wait for the next save",
         "save_now": "a save now", "at_once": "at once"}  # fmt: skip
_COSTS = ("watch_gpu_h", "cordon_gpu_h", "next_gpu_h", "save_gpu_h", "once_gpu_h")


def level_of(phase: np.ndarray, repairs: np.ndarray) -> I8:
    """The service level that each phase asks for [n]."""
    out = LEVEL[phase]
    return np.where((phase == OUT) & (repairs > 0), REPLACE, out).astype(np.int8)


def proposals(view: View, kept: Memory) -> list[Proposal]:
    """Levels for nodes that are out or on their way, tests, and saves before drains."""
    phase = kept["phase"]
    level = level_of(phase, kept["repairs"])
    returns = one_of(phase, (IN_SERVICE, SUSPECT, PROBATION)) & (kept["withdrawn_ns"] > 0)
    out: list[Proposal] = []
    gone = np.flatnonzero(level > 0).astype(np.int32)
    # Those that matter most get a sentence of their own
    order = np.argsort(-kept["watch_gpu_h"][gone], kind="stable")
    own = np.zeros(len(gone), np.bool_)
    own[order[:MOST_TOLD]] = True
    names = _spares(kept)
    for node in gone[own].tolist():
        at = np.array([node], np.int32)
        out.append(_level(at, level[at], _why(view, kept, node, names)))
    for value in np.unique(level[gone[~own]]).tolist():
        at = gone[~own & (level[gone] == value)]
        out.append(_level(at, level[at], f"{len(at)} more nodes, by what each of them is expected to cost"))
    back = np.flatnonzero(returns).astype(np.int32)
    if len(back):
        zero = np.zeros(len(back))
        out.append(
            Proposal(SERVICE, back, zero, zero.copy(), zero.copy(), "back in service: " + _back(kept, back))
        )
    testing = np.flatnonzero((phase == TESTING) & (kept["tested_ns"] > 0)).astype(np.int32)
    if len(testing):
        out.append(_since(TESTED, testing, kept["tested_ns"][testing] / NS, "test it before it comes back"))
    return out + _saves(view, kept)


def _level(at: I32, level: I8, why: str) -> Proposal:
    want = level.astype(np.float64)
    return Proposal(SERVICE, at, want, np.full(len(at), float(REPLACE)), want.copy(), why)


def _since(control: str, at: I32, since_s: F64, why: str) -> Proposal:
    return Proposal(control, at, since_s, np.full(len(at), FOR_EVER_S), since_s.copy(), why)


def _saves(view: View, kept: Memory) -> list[Proposal]:
    """Jobs that shall save before a node of theirs is drained: the latest that any of them waits for."""
    asks = (kept["phase"] == SAVING) & (kept["course"] == SAVE_NOW) & (kept["save_s"] > 0)
    nodes = np.flatnonzero(asks)
    slot = view.jobs.job_of_node[nodes]
    nodes, slot = nodes[slot >= 0], slot[slot >= 0]
    if not len(slot):
        return []
    since = np.zeros(view.jobs.n)
    np.maximum.at(since, slot, kept["save_s"][nodes])
    out: list[Proposal] = []
    jobs, first = np.unique(slot, return_index=True)
    for k, job in enumerate(jobs[:MOST_TOLD].tolist()):
        at, name = np.array([job], np.int32), view.site.name("node", int(nodes[first[k]]))
        out.append(_since(SINCE, at, since[at], f"save now: {name} leaves the job once the save is durable"))
    rest = jobs[MOST_TOLD:].astype(np.int32)
    if len(rest):
        out.append(_since(SINCE, rest, since[rest], f"save now: nodes leave {len(rest)} more jobs"))
    return out


def _spares(kept: Memory) -> dict[int, int]:
    """The spare of each node that has one: both carry the same number."""
    there = np.flatnonzero(kept["pair"] != 0)
    spare = {int(kept["pair"][i]): i for i in there[kept["phase"][there] == IN_SERVICE].tolist()}
    return {
        i: spare[int(kept["pair"][i])]
        for i in there[kept["phase"][there] != IN_SERVICE].tolist()
        if int(kept["pair"][i]) in spare
    }


def _why(view: View, kept: Memory, node: int, spares: dict[int, int]) -> str:
    """One sentence for a node: what is done, why, and what was weighed."""
    phase = int(kept["phase"][node])
    cause = CAUSES[int(kept["cause"][node])]
    text = f"{SAYS.get(phase, PHASES[phase])}: {WHY.get(cause, cause)}"
    action = int(kept["action"][node])
    text += f" ({ACTIONS[action].replace('_', ' ')})" if cause == "hardware" and action else ""
    if phase in (OUT, TESTING, RMA):
        text += f"; {RULES[int(kept['row'][node]) - 1].why}" if kept["row"][node] else ""
        return text + _trips(kept, node)
    text += "; " + _chances(kept, node)
    weighed = [
        f"{PLAIN[course]} {_amount(float(kept[name][node]))}"
        for course, name in zip(COURSES, _COSTS, strict=True)
        if np.isfinite(kept[name][node])
    ]
    text += f"; GPU-hours: {', '.join(weighed)}"
    if phase == SAVING:
        wait_s = float(kept["durable_s"][node])
        text += f"; a save takes {span(wait_s)}" if wait_s > 0 else ""
    if node in spares:
        text += f"; {view.site.name('node', spares[node])} takes over"
    return text + _trips(kept, node)


def _chances(kept: Memory, node: int) -> str:
    day, sure = float(kept["chance_24h_pu"][node]), float(kept["sure_pu"][node])
    said = "nobody forecasts it" if np.isnan(day) else f"{100 * day:.0f} % to fail within a day"
    return said + ("" if np.isnan(sure) else f", {100 * sure:.0f} % sure that it is the node's own")


def _trips(kept: Memory, node: int) -> str:
    trips, tests = int(kept["offences"][node]), int(kept["attempts"][node])
    said = f"; {trips} times out of late" if trips > 1 else ""
    return said + (f"; {tests} failed test{'s' * (tests > 1)}" if tests else "")


def _amount(gpu_h: float) -> str:
    return f"{gpu_h:.0f}" if gpu_h >= 99.5 else f"{gpu_h:.2g}"


def _back(kept: Memory, back: I32) -> str:
    rows = kept["row"][back]
    if len(back) == 1 and rows[0]:
        return RULES[int(rows[0]) - 1].why
    return f"{len(back)} nodes that were taken out here"


def accounts(view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
    """Moves, predictions and their outcomes, spares, and once a day the pool, as plain data."""
    out: list[dict[str, Any]] = []
    moved = np.flatnonzero(before["phase"] != after["phase"])
    for node in moved[:MOST_ACCOUNTS].tolist():
        out.append(_move(view, before, after, node))
    if len(moved) > MOST_ACCOUNTS:
        out.append({"what": "more", "count": len(moved) - MOST_ACCOUNTS, "at_ns": view.now_ns})
    out += _left_alone(view, before, after)
    foretold = gate.told(view, before, after)
    for account in foretold:
        node = view.site.entity("node", account["node"]) if account["what"] == "gate" else None
        if node is not None:
            account["repair_gpu_h"] = _finite(after["repair_gpu_h"][node])
    out += foretold[: 240 - len(out)]
    last, now = (int(m["looked_ns"].max(initial=0)) for m in (before, after))
    if last and last // POOL_NS != now // POOL_NS:
        out.append(_pool(view))
    return out


def _left_alone(view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
    """Nodes that are not taken out though something speaks against them: whose fault it is, or what holds."""
    out: list[dict[str, Any]] = []
    here = (after["phase"] == IN_SERVICE) & (after["cause"] != before["cause"])
    spared = np.flatnonzero(here & one_of(after["cause"], [CAUSES.index(c) for c in SPARED]))
    held = np.flatnonzero((after["held"] != before["held"]) & (after["held"] > 0))
    for node in spared[:MOST_LEFT].tolist():
        cause = CAUSES[int(after["cause"][node])]
        out.append({"what": "left_alone", "node": view.site.name("node", node), "cause": cause,
                    "why": WHY[cause], "at_ns": view.now_ns})  # fmt: skip
    for node in held[:MOST_LEFT].tolist():
        out.append({"what": "held", "node": view.site.name("node", node),
                    "cause": CAUSES[int(after["cause"][node])], "why": HELD[int(after["held"][node])],
                    "at_ns": view.now_ns})  # fmt: skip
    more = max(len(spared) - MOST_LEFT, 0) + max(len(held) - MOST_LEFT, 0)
    return [*out, {"what": "more", "count": more, "at_ns": view.now_ns}] if more else out


def _move(view: View, before: Memory, after: Memory, node: int) -> dict[str, Any]:
    row, phase = int(after["row"][node]), int(after["phase"][node])
    told: dict[str, Any] = {
        "what": "phase", "node": view.site.name("node", node), "from": PHASES[int(before["phase"][node])],
        "to": PHASES[phase], "cause": CAUSES[int(after["cause"][node])],
        "course": COURSES[int(after["course"][node])],
        "why": RULES[row - 1].why if 0 < row <= len(RULES) else "it was exchanged",
        "chance_1h_pu": _finite(after["chance_1h_pu"][node]),
        "chance_24h_pu": _finite(after["chance_24h_pu"][node]), "sure_pu": _finite(after["sure_pu"][node]),
        "offences": int(after["offences"][node]), "attempts": int(after["attempts"][node]),
        "at_ns": view.now_ns,
    }  # fmt: skip
    told |= {name: _finite(after[name][node]) for name in _COSTS}
    if after["pair"][node] and phase != IN_SERVICE and before["pair"][node] != after["pair"][node]:
        spare = _spares(after).get(node)
        told["spare"] = None if spare is None else view.site.name("node", spare)
    return told


def _pool(view: View) -> dict[str, Any]:
    """How many spares the forecast failures and the repairs of this site ask for."""
    have = int(np.count_nonzero(view.site.spare_node))
    found = pool_of(view) or pool(view, 0.0, repair_h(view), have)
    return {
        "what": "pool", "wanted": int(found.wanted), "have": int(found.have), "short": bool(found.short),
        "chance_short_pu": float(found.chance_short_pu), "sentence": found.sentence, "at_ns": view.now_ns,
    }  # fmt: skip


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if np.isfinite(number) else None


__all__ = ["AT_NEXT", "FORECAST", "HELD", "WATCH", "accounts", "level_of", "proposals"]
