"""What the policy `replacement` has in mind for each node: phase, cause, costs, spare, what it waits for.

Read from the engine's present: the policy's memory, what it proposes, what the scheduler reads back. May
import the core and policies; changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from policies.replacement_costs import COURSES
from policies.replacement_evidence import CAUSES, DAY_S, HOUR_S, chance
from policies.replacement_gate import score
from policies.replacement_phases import PHASES
from policies.replacement_placement import KEPT, LAST, PLACEMENT, shown
from policies.replacement_words import HELD
from twin.app.api_health_part import job
from twin.app.checkpoint_plans import view_of
from twin.app.live import Live
from twin.app.replacement_journal import BURN_IN, POLICY, SERVICE
from twin.app.replacement_pool import breaker_of, pool_told
from twin.app.report_text import clean
from twin.contracts import Memory
from twin.frame import F64, I32, NS
from twin.health.levels import ACTIONS, todo_words
from twin.service_book import FAILED_TEST, NO_RESULT, PASSED
from twin.signals import find_control, find_signal
from twin.state import GOOD
from twin.view import EngineView

ADD_IT = (
    "no policy named replacement runs here: add `policies: {replacement: {}}` to the site file, then "
    "`racktwin reload`; it begins with authority `advise`, which shows and journals, and does nothing"
)
AUTHORITY_WORDS = {
    "off": "it is off: nothing is weighed, nothing is proposed",
    "advise": "it advises only: this is what it would do; `racktwin authority replacement` changes that",
    "approve": "it waits for approval of each step: `racktwin approve` lists them",
    "act": "it acts",
}
PHASE_WORDS = {
    "in_service": "in service",
    "suspect": "suspected; still in service, and nothing was done",
    "cordoned": "takes no new jobs; its job goes on",
    "saving": "its job was asked to save; then it is drained",
    "draining": "on its way out of service",
    "out": "out of service, for repair",
    "testing": "out of service, being tested",
    "probation": "back in service, watched closely",
    "rma": "out of service for good: return it",
}
COURSE_WORDS = {
    "watch": "do nothing",
    "cordon": "leave when its job ends",
    "at_next": "drain after the next planned save",
    "save_now": "save now, then drain",
    "at_once": "drain at once",
}
COSTS = ("watch_gpu_h", "cordon_gpu_h", "next_gpu_h", "save_gpu_h", "once_gpu_h")  # in the order of COURSES
GATE = ("act_gpu_h", "wait_gpu_h", "act_pu", "wait_pu", "use_pu")
FIRST = ("rma", "out", "testing", "draining", "saving", "cordoned", "probation", "suspect")  # as it is shown
# What phases wait for whose level nobody commands, by the policy's authority
NOT_YET = {
    "advise": "for leave to act: it advises only, and nothing was commanded",
    "approve": "for approval: racktwin approve",
}
LEAVING = ("cordoned", "saving", "draining")
STILL_IN = ("suspect", "cordoned", "saving")  # phases in which it may fail under a job
SHOWN_FEW = 8  # nodes on the status page
RESULTS = {PASSED: "passed", FAILED_TEST: "failed", NO_RESULT: "no result"}


def memory_of(live: Live) -> Memory | None:
    """The policy's memory; None where no policy of this name runs."""
    return live.engine.memory.get(POLICY) if POLICY in live.engine.intake.authority else None


def on_their_way(memory: Memory) -> I32:
    """Nodes that are not simply in service, those that need people first [k]."""
    phase = np.clip(memory["phase"], 0, len(PHASES) - 1)
    found = np.flatnonzero(phase > 0).astype(np.int32)
    rank = np.array([FIRST.index(p) if p in FIRST else len(FIRST) for p in PHASES])
    order = np.lexsort((found, -np.nan_to_num(memory["chance_24h_pu"][found]), rank[phase[found]]))
    return found[order]


def phase_counts(memory: Memory) -> dict[str, int]:
    """How many nodes are in each phase."""
    counts = np.bincount(np.clip(memory["phase"], 0, len(PHASES) - 1), minlength=len(PHASES))
    return dict(zip(PHASES, counts.tolist(), strict=True))


def overview(live: Live) -> dict[str, Any]:
    """All but the rows: whether the policy runs and may act, how many nodes are where, spares, breaker."""
    engine, memory = live.engine, memory_of(live)
    head = {"site": engine.site.file.site, "tick": engine.state.tick, "now_ns": engine.state.now_ns,
            "runs": memory is not None, "role": live.role}  # fmt: skip
    if memory is None:
        return {
            **head,
            "authority": None,
            "phases": {},
            "pool": None,
            "breaker": None,
            "score": None,
            "notes": [ADD_IT],
        }
    authority = engine.intake.authority[POLICY]
    notes = [AUTHORITY_WORDS.get(authority, authority)]
    if POLICY in engine.suspended:
        notes.append("the policy failed and is suspended; nothing new is proposed: racktwin alarms says why")
    if live.role != "leader":
        notes.append("this daemon stands by; the one that leads decides")
    lease = engine.arbiter.leases[SERVICE]
    out = {level: int(((lease.value == i) & lease.running()).sum())
           for i, level in enumerate(_levels()) if i}  # fmt: skip
    view = view_of(live)
    pool, broken = pool_told(view), breaker_of(live, view, memory)
    notes += _marks(view, authority)
    return {**head, "authority": authority, "suspended": POLICY in engine.suspended,
            "phases": phase_counts(memory), "commanded": out, "pool": pool, "breaker": broken,
            "score": score(memory)._asdict(), "notes": notes}  # fmt: skip


def _marks(view: EngineView, authority: str) -> list[str]:
    """How many nodes the scheduler uses last, or not at all, as we asked it to."""
    placed = shown(view)
    last, kept = (int(np.count_nonzero(placed == state)) for state in (LAST, KEPT))
    if not last + kept:
        return []
    said = f"the scheduler gives {last:,} nodes to jobs after all others, and keeps {kept:,} for spares"
    alone = "; these marks stay until the policy acts again or people take them away: see replacement.md"
    return [said if authority == "act" else said + alone]


class _Beside(NamedTuple):
    """What is said of nodes outside the policy's memory."""

    reasons: dict[int, str]
    partners: dict[int, int]
    levels: F64  # read back [n_node]; NaN = nobody says, or did so long ago
    placements: F64  # likewise
    hour: F64  # forecast chance of failing within an hour [n_node]; NaN = unknown
    day: F64  # within a day


def rows(live: Live, nodes: I32) -> list[dict[str, Any]]:
    """A row for each of these nodes."""
    memory = memory_of(live)
    if memory is None or not len(nodes):
        return []
    view = view_of(live)
    beside = _Beside(_reasons(live, nodes), _partners(memory), _read_back(live, SERVICE),
                     _read_back(live, PLACEMENT), chance(view, HOUR_S), chance(view, DAY_S))  # fmt: skip
    return [_row(live, memory, i, beside) for i in nodes.tolist()]


def _row(live: Live, memory: Memory, node: int, beside: _Beside) -> dict[str, Any]:
    """What the policy has in mind for a node."""
    engine = live.engine
    phase = PHASES[int(np.clip(memory["phase"][node], 0, len(PHASES) - 1))]
    course = _word(COURSES, memory["course"][node])
    action = _word(ACTIONS, memory["action"][node])
    spare, level, place = beside.partners.get(node), beside.levels[node], beside.placements[node]
    told: dict[str, Any] = {
        "node": engine.site.name("node", node), "phase": phase, "phase_words": PHASE_WORDS.get(phase, phase),
        "entered_ns": _ns(memory, "entered_ns", node), "deadline_ns": _ns(memory, "deadline_ns", node),
        "suspected_ns": _ns(memory, "suspected_ns", node), "withdrawn_ns": _ns(memory, "withdrawn_ns", node),
        "cause": _word(CAUSES, memory["cause"][node]), "course": course,
        "course_words": COURSE_WORDS.get(course, course), "action": action, "do": todo_words(action, "node"),
        "chance_1h_pu": _pu(memory["chance_1h_pu"][node]),
        "chance_24h_pu": _pu(memory["chance_24h_pu"][node]), "sure_pu": _pu(memory["sure_pu"][node]),
        "costs_gpu_h": {c: _pu(memory[name][node]) for c, name in zip(COURSES, COSTS, strict=True)},
        "weighed": phase != "in_service", "gate": None,
        "spare": engine.site.name("node", spare) if spare is not None else None,
        "held": _word(HELD, memory["held"][node]) if memory["held"][node] else "",
        "attempts": int(memory["attempts"][node]), "offences": int(memory["offences"][node]),
        "level": _wanted(live, node), "job": job(live, node),
        "read_back": _word(_levels(), level) if np.isfinite(level) else None,
        "placement": _word(_states(PLACEMENT), place) if np.isfinite(place) else None,
        "reason": clean(beside.reasons.get(node, ""), 400), "service": _service(live, node),
    }  # fmt: skip
    if not told["weighed"]:  # the memory of a node that nobody suspects says nothing of today
        told |= {"chance_1h_pu": _pu(beside.hour[node]), "chance_24h_pu": _pu(beside.day[node]),
                 "sure_pu": None, "costs_gpu_h": dict.fromkeys(COURSES)}  # fmt: skip
    if memory["gate_ns"][node]:
        told["gate"] = {"at_ns": int(memory["gate_ns"][node])} | {
            name: _pu(memory[f"gate_{name}"][node]) for name in GATE}  # fmt: skip
    authority = engine.intake.authority[POLICY]
    if phase in LEAVING and not memory["withdrawn_ns"][node] and authority in NOT_YET:
        told["phase_words"] = f"in service; if it may act: {told['phase_words']}"
        told["waits"] = f"as it is held back: {told['held']}" if told["held"] else NOT_YET[authority]
        return told
    told["waits"] = waits_for(told, bool(memory["repairs"][node]), _has_hook(live))
    return told


def waits_for(told: dict[str, Any], repairs: bool, hook: bool) -> str:
    """What has to happen next, and who does it. `repairs`: people first; `hook`: the site has a test."""
    node, running = told["node"], told["job"]
    if told["held"] and told["phase"] in STILL_IN:
        return f"as it is held back: {told['held']}"
    if told["phase"] == "suspect" and told["course"] == "watch":
        return "for its case to change, as to do nothing costs least now"
    testable = told["phase"] == "out" and hook and not repairs
    said = {
        "suspect": "for the evidence to last, or to go",
        "cordoned": f"for {running} to end" if running else "for the scheduler to say that it is free",
        "saving": f"for a durable save of {running}" if running else "for a durable save of its job",
        "draining": f"for the scheduler to take {running} off it" if running
        else "for the scheduler to say that it is drained",
        "out": "for its test to begin" if testable else f"for its repair: racktwin node repaired {node}",
        "testing": f"for a test: burn-in, or racktwin node tested {node} --passed",
        "probation": "for its probation to end",
        "rma": f"for people: racktwin replacement report {node}, then a new node in its place",
    }  # fmt: skip
    return said.get(told["phase"], "")


def _has_hook(live: Live) -> bool:
    """Whether the policy was told that the site runs a test of its own."""
    policy = next((p for p in live.engine.policies if p.name == POLICY), None)
    return bool(getattr(getattr(policy, "rules", None), "burn_in", False))


def _levels() -> tuple[str, ...]:
    return _states(SERVICE)


def _states(key: str) -> tuple[str, ...]:
    control = find_control(key)
    return control.states if control is not None else ()


def _word(words: Any, place: Any) -> str:
    i = int(place)
    return str(words[i]) if 0 <= i < len(words) else "?"


def _ns(memory: Memory, name: str, node: int) -> int | None:
    return int(memory[name][node]) or None


def _pu(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _read_back(live: Live, key: str) -> F64:
    """What the scheduler says now of a control of each node [n_node]; NaN where nobody says."""
    control, state = find_control(key), live.engine.state
    signal = find_signal(f"node.{control.readback}") if control is not None else None
    assert signal is not None
    table = state.tables["node"]
    current = table.quality_of(signal, state.now_ns) == GOOD
    return np.where(current, table.value[signal.row].astype(np.float64), np.nan)


def _wanted(live: Live, node: int) -> str:
    """The service level that the policy asks for now."""
    asked = 0
    for p in live.engine.in_force.get(POLICY, []):
        at = int(np.searchsorted(p.index, node))
        if p.control == SERVICE and at < len(p.index) and p.index[at] == node:
            asked = max(asked, int(p.lo[at]))
    return _word(_levels(), asked)


def _reasons(live: Live, nodes: I32) -> dict[int, str]:
    """What the policy says of each of these nodes now."""
    out: dict[int, str] = {}
    wanted = set(nodes.tolist())
    for p in live.engine.in_force.get(POLICY, []):
        if p.control in (SERVICE, BURN_IN):
            for i in p.index.tolist():
                if i in wanted:
                    out.setdefault(i, p.reason)
    return out


def _partners(memory: Memory) -> dict[int, int]:
    """Node -> the spare that was chosen for it: both bear the same number."""
    pair, phase = memory["pair"], memory["phase"]
    out: dict[int, int] = {}
    held: dict[int, list[int]] = {}
    for i in np.flatnonzero(pair > 0).tolist():
        held.setdefault(int(pair[i]), []).append(i)
    for both in held.values():
        if len(both) == 2:
            leaving = [i for i in both if phase[i] > 0]
            if len(leaving) == 1:
                out[leaving[0]] = both[0] if leaving[0] == both[1] else both[1]
    return out


def _service(live: Live, node: int) -> dict[str, Any]:
    """What the service book says of it."""
    page = live.engine.book.service()
    return {"test": RESULTS.get(int(page.result[node])), "tested_ns": int(page.ended_ns[node]) or None,
            "repaired_ns": int(page.repaired_ns[node]) or None,
            "replaced_ns": int(page.replaced_ns[node]) or None}  # fmt: skip


def block(live: Live) -> dict[str, Any] | None:
    """The part of the summary, made once a second: counts, the first few nodes; None without the policy."""
    memory = memory_of(live)
    if memory is None:
        return None
    nodes = on_their_way(memory)
    told = overview(live)
    few = [{k: r[k] for k in ("node", "phase", "cause", "spare", "chance_24h_pu", "entered_ns")}
           | {"since_s": _age_s(live, r["entered_ns"]), "going": r["phase"] in STILL_IN,
              "waits": f"waits {r['waits'].partition(':')[0]}" if r["waits"] else ""}
           for r in rows(live, nodes[:SHOWN_FEW])]  # fmt: skip
    return {"authority": told["authority"], "phases": told["phases"], "total": len(nodes), "rows": few,
            "pool": told["pool"], "breaker": told["breaker"], "notes": told["notes"][1:]}  # fmt: skip


def _age_s(live: Live, since_ns: int | None) -> float | None:
    return (live.engine.state.now_ns - since_ns) / NS if since_ns else None
