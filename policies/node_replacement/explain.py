"""Explanation of replacement: the phase of each node, its options and their costs, its next event, spares.

Made from the memory of the policy, which holds the figures of each decision, and from the proposals in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from policies.node_replacement.assessment import NEWLY_S, usual_suspects_per_h
from policies.node_replacement.circuit_breaker import check_breaker
from policies.node_replacement.costs import OPTIONS
from policies.node_replacement.drain_timing import MOST_WAIT_S, RISK_PU, demand_curve
from policies.node_replacement.evidence import (
    CAUSES,
    DAY_S,
    HOUR_S,
    evidence_of,
    failed_nodes,
    failure_chance,
    one_of,
)
from policies.node_replacement.ownership import level_is_current
from policies.node_replacement.phases import (
    CORDONED,
    DRAINING,
    IN_SERVICE,
    OUT,
    PHASES,
    PROBATION,
    RMA,
    SAVING,
    SUSPECT,
    TESTING,
)
from policies.node_replacement.placement import PLACED_LAST, PLACEMENT, RESERVED, current_placement
from policies.node_replacement.predictions import score
from policies.node_replacement.spare_count import spare_pool_of
from policies.node_replacement.spares import free_spares
from policies.node_replacement.texts import COSTS, HOLD_TEXTS, spare_of_node
from twin.catalogue import F64, I32, NS, Bool, clean, duration, find_control
from twin.contracts import (
    ACTIONS,
    FAILED_TEST,
    NO_RESULT,
    PASSED,
    DataTable,
    ExplainRequest,
    Explanation,
    ExplanationRefused,
    FigureMetric,
    KeyFigure,
    Memory,
    PolicyStatus,
    Sentence,
    Topic,
    TopicOption,
    Value,
    View,
    entities_within,
    finite,
    table_of,
    todo_words,
)

NAME = "replacement"
SERVICE, BURN_IN = "node.service_level", "node.burn_in_since_s"
MOST_ROWS = 1000
MOST_NAMED = 8  # nodes that the breaker holds back, by name
_PAGE = (
    TopicOption("phase", "only these phases, such as draining,out", default=""),
    TopicOption("offset", "rows to skip", "integer", 0, 0, 1e9),
    TopicOption("limit", "rows at most", "integer", 100, 1, MOST_ROWS),
)
TOPICS = (
    Topic("nodes", "nodes that are suspected, withdrawn or on probation, in brief", _PAGE),
    Topic(
        "plan",
        "all figures of these nodes, or of one node",
        (TopicOption("node", "this node alone, whatever its phase", default=""), *_PAGE),
        path="replacement",
    ),
    Topic("metrics", "counts and scores that are exported as metrics"),
)
NOT_CONFIGURED = (
    "no policy named replacement runs here: add `policies: {replacement: {}}` to the site file, then "
    "`racktwin daemon reload`; it begins with authority `advise`, which shows and journals proposals and "
    "sends no commands"
)
AUTHORITY_TEXTS = {
    "off": "it is off: it makes no proposals",
    "advise": "it advises only: this is what it would do; `racktwin policy set replacement` changes that",
    "approve": "it waits for approval of each step: `racktwin policy approvals` lists them",
    "act": "it may act: it withdraws nodes by itself",
}
PHASE_TEXTS = {
    IN_SERVICE: "in service",
    SUSPECT: "suspected; still in service, and nothing was done",
    CORDONED: "takes no new jobs; its job continues",
    SAVING: "its job was asked to save; then it is drained",
    DRAINING: "on its way out of service",
    OUT: "out of service, for repair",
    TESTING: "out of service, being tested",
    PROBATION: "back in service, watched closely",
    RMA: "out of service for good: return it",
}
OPTION_TEXTS = {
    "watch": "do nothing",
    "cordon": "leave when its job ends",
    "at_next": "drain after the next planned save",
    "save_now": "save now, then drain",
    "at_once": "drain at once",
}
# Steps that are not commanded yet, by the policy's authority
NOT_COMMANDED = {
    "advise": "for authority to act: it advises only, and nothing was commanded",
    "approve": "for approval: racktwin policy approvals",
}
ORDER = (RMA, OUT, TESTING, DRAINING, SAVING, CORDONED, PROBATION, SUSPECT)  # of the rows
LEAVING = (CORDONED, SAVING, DRAINING)
NOT_DRAINED = (SUSPECT, CORDONED, SAVING)  # phases in which the node may fail under a job
RESULTS = {PASSED: "passed", FAILED_TEST: "failed", NO_RESULT: "no result"}
PREDICTED = ("act_gpu_h", "wait_gpu_h", "act_pu", "wait_pu", "use_pu")
BRIEF = (
    "node",
    "phase",
    ("since_s", "s"),
    "cause",
    ("chance_24h_pu", "1"),
    "waits",
    "spare",
)
# Figures of one node: field of its row, unit, text
NODE_FIGURES = (
    ("entered_ns", "ns", "start of this phase"), ("deadline_ns", "ns", "end of this phase at the latest"),
    ("leave_ns", "ns", "trough of demand in which it leaves"),
    ("leave_by_ns", "ns", "the latest that it leaves"),
    ("wait_saves_gpu_h", "GPU-h", "expected gain of the wait for that trough"),
    ("cause", "", "cause of the evidence against it"), ("do", "", "remedy"),
    ("chance_1h_pu", "1", "chance of failing within 1 h"),
    ("chance_24h_pu", "1", "chance of failing within 24 h"),
    ("sure_pu", "1", "confidence that the fault is its own"), ("job", "", "job that runs on it"),
    ("spare", "", "spare opened for its work"), ("level", "", "service level that the policy wants"),
    ("read_back", "", "service level that the scheduler reports"),
    ("placement", "", "order in which the scheduler uses it"),
    ("offences", "count", "withdrawals that count against it"), ("attempts", "count", "failed tests since"),
    ("gate.at_ns", "ns", "last prediction"), ("gate.act_gpu_h", "GPU-h", "predicted loss of acting"),
    ("gate.act_pu", "1", "predicted chance of an interruption by acting"),
    ("gate.wait_gpu_h", "GPU-h", "predicted loss of waiting"),
    ("gate.wait_pu", "1", "predicted chance of an interruption by waiting"),
    ("service.test", "", "result of its last test"), ("service.tested_ns", "ns", "end of its last test"),
    ("service.repaired_ns", "ns", "last repair"), ("service.replaced_ns", "ns", "last exchange"),
)  # fmt: skip


def explain(view: View, memory: Memory, request: ExplainRequest, burn_in: bool) -> Explanation:
    """Return the explanation of the site, an entity or a topic. `burn_in`: the site has a test of its own."""
    present = Present(view, memory, request, burn_in)
    if request.topic == "metrics":
        return Explanation(policy=NAME, now_ns=view.now_ns, figures=_metrics(present))
    if request.topic == "plan":
        return _plan(present)
    if request.entity:
        _, name, inside = entities_within(view, request.entity)
        nodes = inside.get("node", np.zeros(0, np.int32))
        if len(nodes) == 1:
            return _of_node(present, int(nodes[0]))
        found = present.listed[np.isin(present.listed, nodes)]
        return _brief(present, found, clean(name, 120))
    return _brief(present, _in_phases(present, present.listed), "")


@dataclass(frozen=True)
class Present:
    """The policy at this instant: the view, its memory and its context. Figures are computed once."""

    view: View
    memory: Memory
    request: ExplainRequest
    burn_in: bool

    @cached_property
    def status(self) -> PolicyStatus:
        """Return the policy's authority and the proposals in force."""
        return self.request.status(NAME)

    @cached_property
    def runs(self) -> bool:
        """Return True if the policy is configured."""
        return any(p.name == NAME for p in self.request.policies)

    @cached_property
    def listed(self) -> I32:
        """Return the nodes that are not in normal service [k]; those that need an operator come first."""
        phase = self.memory["phase"]
        found = np.flatnonzero(phase > 0).astype(np.int32)
        rank = np.array([ORDER.index(p) if p in ORDER else len(ORDER) for p in range(len(PHASES))])
        chance = -np.nan_to_num(self.memory["chance_24h_pu"][found])
        return found[np.lexsort((found, chance, rank[phase[found]]))]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the nodes in each phase."""
        counts = np.bincount(self.memory["phase"], minlength=len(PHASES))
        return dict(zip(PHASES, counts.tolist(), strict=True))

    @cached_property
    def level(self) -> F64:
        """Return the service level that the scheduler reports now [n_node]; NaN without a report."""
        return np.where(level_is_current(self.view), self.view.readback(SERVICE), np.nan)

    @cached_property
    def placement(self) -> F64:
        """Return the placement that the scheduler reports now [n_node]; NaN without a report."""
        return current_placement(self.view)

    @cached_property
    def chances(self) -> tuple[F64, F64]:
        """Return the forecast chances of failing within an hour and a day [n_node]; NaN = unknown."""
        return failure_chance(self.view, HOUR_S), failure_chance(self.view, DAY_S)

    @cached_property
    def failed(self) -> Bool:
        """Return the nodes that have failed already [n_node]."""
        return failed_nodes(self.view)

    @cached_property
    def spares(self) -> dict[int, int]:
        """Return the spare of each node that has one."""
        return spare_of_node(self.memory)

    @cached_property
    def reasons(self) -> dict[int, str]:
        """Return the reason of the proposal in force for each node."""
        out: dict[int, str] = {}
        for p in self.status.proposals:
            if p.control in (SERVICE, BURN_IN):
                for node in p.index.tolist():
                    out.setdefault(node, p.reason)
        return out

    @cached_property
    def wanted(self) -> np.ndarray:
        """Return the service level that the policy proposes now [n_node]."""
        out = np.zeros(len(self.memory["phase"]), np.int64)
        for p in self.status.proposals:
            if p.control == SERVICE:
                out[p.index] = np.maximum(out[p.index], p.lo.astype(np.int64))
        return out

    @cached_property
    def breaker(self) -> dict[str, Value]:
        """Return the circuit breaker: open or closed, the nodes that it holds back, and the reason."""
        memory, view = self.memory, self.view
        suspect: Bool = one_of(memory["phase"], NOT_DRAINED)
        if suspect.any():
            evidence = evidence_of(view, memory["phase"] == SUSPECT, memory["phase"] == PROBATION)
            newly = suspect & (view.now_ns - memory["evidence_ns"] < round(NEWLY_S * NS))
            usual = usual_suspects_per_h(evidence.chance_24h_pu)
            state = check_breaker(view, newly, usual, suspect, memory["common_cause_ns"])
            blocked = np.flatnonzero(state.nodes & suspect)
            if len(blocked):
                first = ", ".join(view.site.name("node", i) for i in blocked[:MOST_NAMED].tolist())
                return {"open": True, "nodes": len(blocked), "why": clean(state.why, 400), "first": first}
        return {"open": False, "nodes": 0, "why": "", "first": ""}

    @cached_property
    def pool(self) -> dict[str, Value]:
        """Return the spares that exist, are free, are reserved by the scheduler, and are wanted (None: no
        forecast)."""
        view = self.view
        spare, have = (
            free_spares(view.site, view.jobs, view.readback(SERVICE)),
            int(view.site.spare_node.sum()),
        )
        free, kept = int(np.count_nonzero(spare)), int(np.count_nonzero(spare & (self.placement == RESERVED)))
        reserved = f", {kept} of them reserved by the scheduler" if kept else ""
        found = spare_pool_of(view)
        if found is None:
            text = f"{have}, {free} of them free{reserved}; without a forecast the number needed is unknown"
            return {
                "have": have,
                "free": free,
                "kept": kept,
                "wanted": None,
                "short": False,
                "chance_short_pu": None,
                "sentence": text,
            }
        return {
            "have": found.have,
            "free": free,
            "kept": kept,
            "wanted": found.wanted,
            "short": bool(found.short),
            "chance_short_pu": float(found.chance_short_pu),
            "sentence": clean(f"{free} free now{reserved}; {found.sentence}", 400),
        }

    def notes(self) -> list[Sentence]:
        """Return notes on authority, trouble with the policy, placement, the breaker, and spares."""
        if not self.runs:
            return [Sentence(NOT_CONFIGURED, "note")]
        out = [Sentence(AUTHORITY_TEXTS.get(self.status.authority, self.status.authority), "note")]
        if self.status.suspended:
            text = "the policy failed and is suspended; no new proposals: racktwin alarm list says why"
            out.append(Sentence(text, "warning"))
        if self.request.role != "leader":
            out.append(Sentence("this daemon is a standby; the leader decides", "note"))
        last, kept = (int(np.count_nonzero(self.placement == state)) for state in (PLACED_LAST, RESERVED))
        if last + kept:
            text = (
                f"the scheduler gives {last:,} nodes to jobs after all others, and keeps {kept:,} for spares"
            )
            if self.status.authority != "act":
                text += "; these marks stay until the policy acts again or operators remove them"
            out.append(Sentence(text, "note"))
        return out


def _in_phases(present: Present, nodes: I32) -> I32:
    """Return the nodes in the requested phases. Raises ExplanationRefused for an unknown phase."""
    names = [p for p in str(present.request.options.get("phase") or "").split(",") if p]
    if strange := [p for p in names if p not in PHASES]:
        known = ", ".join(PHASES)
        raise ExplanationRefused(f"no phase {clean(strange[0], 40)}; expected one of {known}")
    return nodes[one_of(present.memory["phase"][nodes], [PHASES.index(p) for p in names])] if names else nodes


def _page(present: Present, nodes: I32) -> tuple[int, int, I32]:
    """Return (offset, limit, the nodes of this page)."""
    options = present.request.options
    offset, limit = int(options.get("offset") or 0), int(options.get("limit") or 100)
    return offset, limit, nodes[offset : offset + limit]


def _brief(present: Present, nodes: I32, entity: str) -> Explanation:
    """Return a line for each node outside normal service."""
    _, _, page = _page(present, nodes)
    now_ns, rows = present.view.now_ns, []
    for row in (row_of(present, i) for i in page.tolist()):
        entered_ns = row["entered_ns"]
        since_s = (now_ns - entered_ns) / NS if isinstance(entered_ns, int) else None
        rows.append(row | {"since_s": since_s, "waits": f"waits {row['waits']}" if row["waits"] else ""})
    counted = ", ".join(f"{n:,} {p.replace('_', ' ')}" for p, n in present.counts.items() if n)
    where = f" in {entity}" if entity else ""
    those = f"1 node{where} is" if len(nodes) == 1 else f"{len(nodes):,} nodes{where} are"
    preview = (
        " as it would be, while nothing is commanded" if present.status.authority in NOT_COMMANDED else ""
    )
    text = f"{those} suspected, withdrawn or on probation; of the site{preview}: {counted}"
    if not len(nodes):
        text = f"no node{where} is suspected or withdrawn"
    sentences = [*([Sentence(text)] if present.runs else []), *present.notes(), *_warnings(present)]
    if present.runs:
        sentences.append(Sentence(f"spares: {present.pool['sentence']}", "note"))
    return Explanation(
        policy=NAME,
        now_ns=now_ns,
        entity=entity,
        sentences=tuple(sentences),
        figures=_metrics(present),
        tables=(table_of("nodes", BRIEF, rows, "nodes that are not in normal service", len(nodes)),),
    )


def _warnings(present: Present) -> list[Sentence]:
    breaker = present.breaker
    if not present.runs or not breaker["open"]:
        return []
    text = (
        f"not withdrawn, because too many became suspect at once: {breaker['nodes']:,} nodes; "
        f"{breaker['why']}"
    )
    return [Sentence(f"{text}; nodes still return to service", "warning")]


def _plan(present: Present) -> Explanation:
    """Return all figures, page by page, or of one node."""
    view, name = present.view, str(present.request.options.get("node") or "")
    nodes = present.listed
    if name:
        node = view.site.entity("node", name.rstrip("/"))
        if node is None:
            raise ExplanationRefused(f"no node {clean(name, 120)} on this site", "unknown")
        nodes = np.array([node], np.int32)
    nodes = _in_phases(present, nodes) if present.runs else nodes[:0]
    offset, limit, page = _page(present, nodes)
    more = offset + limit < len(nodes)
    authority = present.status.authority if present.runs else None
    values: dict[str, Value] = {
        "runs": present.runs,
        "authority": authority,
        "suspended": present.status.suspended,
        **{f"phases.{p}": n for p, n in present.counts.items()},
        **{f"commanded.{level}": n for level, n in _commanded(present).items()},
        **{f"pool.{k}": v for k, v in present.pool.items()},
        **{f"breaker.{k}": v for k, v in present.breaker.items()},
        **{f"score.{k}": v for k, v in asdict(score(present.memory)).items()},
        "total": len(nodes),
        "offset": offset,
        "limit": limit,
        "next_offset": offset + limit if more else None,
    }
    rows = [row_of(present, i) for i in page.tolist()]
    columns = list(rows[0]) if rows else ["node"]
    return Explanation(
        policy=NAME,
        now_ns=view.now_ns,
        sentences=tuple(present.notes()),
        figures=tuple(KeyFigure(k, v) for k, v in values.items()),
        tables=(table_of("nodes", columns, rows, total=len(nodes)),),
    )


def _commanded(present: Present) -> dict[str, int]:
    """Return the nodes under command at each service level but the first."""
    leases = present.request.leases(SERVICE)
    value = np.zeros(0) if leases is None else leases.value
    return {level: int((value == i).sum()) for i, level in enumerate(_states(SERVICE)) if i}


def row_of(present: Present, node: int) -> dict[str, Value]:
    """Return all figures of a node. The memory of a node that is not suspected is out of date."""
    memory, site = present.memory, present.view.site
    phase, weighed = int(memory["phase"][node]), memory["phase"][node] != IN_SERVICE
    option, action = OPTIONS[int(memory["option"][node])], ACTIONS[int(memory["action"][node])]
    spare, level, place = present.spares.get(node), present.level[node], present.placement[node]
    hour, day = (memory[f"chance_{h}_pu"][node] if weighed else present.chances[k][node]
                 for k, h in enumerate(("1h", "24h")))  # fmt: skip
    if present.failed[node]:  # the chance at which it was weighed has come true
        hour = day = np.nan
    book, predicted = present.view.service(), bool(memory["prediction_ns"][node])
    slot = int(present.view.jobs.job_of_node[node])
    row: dict[str, Value] = {
        "node": site.name("node", node),
        "phase": PHASES[phase],
        "phase_words": PHASE_TEXTS[phase],
        "entered_ns": _instant(memory, "entered_ns", node),
        "deadline_ns": _instant(memory, "deadline_ns", node),
        "suspected_ns": _instant(memory, "suspected_ns", node),
        "withdrawn_ns": _instant(memory, "withdrawn_ns", node),
        "leave_ns": _instant(memory, "leave_ns", node),
        "leave_by_ns": _instant(memory, "leave_by_ns", node),
        "wait_saves_gpu_h": finite(memory["wait_saves_gpu_h"][node]) if memory["leave_ns"][node] else None,
        "cause": CAUSES[int(memory["cause"][node])],
        "course": option,
        "course_words": OPTION_TEXTS[option],
        "action": action,
        "do": todo_words(action, "node"),
        "chance_1h_pu": finite(hour),
        "chance_24h_pu": finite(day),
        "sure_pu": finite(memory["sure_pu"][node]) if weighed else None,
        **{
            f"costs_gpu_h.{o}": finite(memory[c][node]) if weighed else None
            for o, c in zip(OPTIONS, COSTS, strict=True)
        },
        "weighed": bool(weighed),
        "gate.at_ns": _instant(memory, "prediction_ns", node),
        **{
            f"gate.{name}": finite(memory[f"prediction_{name}"][node]) if predicted else None
            for name in PREDICTED
        },
        "spare": None if spare is None else site.name("node", spare),
        "held": HOLD_TEXTS[int(memory["hold"][node])],
        "attempts": int(memory["failed_tests"][node]),
        "offences": int(memory["offences"][node]),
        "level": _states(SERVICE)[present.wanted[node]],
        "job": clean(present.view.jobs.names[slot]) if slot >= 0 and present.view.jobs.alive[slot] else None,
        "read_back": _states(SERVICE)[int(level)] if np.isfinite(level) else None,
        "placement": _states(PLACEMENT)[int(place)] if np.isfinite(place) else None,
        "reason": clean(present.reasons.get(node, ""), 400),
        "service.test": RESULTS.get(int(book.result[node])),
        "service.tested_ns": int(book.ended_ns[node]) or None,
        "service.repaired_ns": int(book.repaired_ns[node]) or None,
        "service.replaced_ns": int(book.replaced_ns[node]) or None,
    }
    authority = present.status.authority
    if phase in LEAVING and not memory["withdrawn_ns"][node] and authority in NOT_COMMANDED:
        row["phase_words"] = f"in service; if it may act: {row['phase_words']}"
        row["waits"] = f"as it is held back: {row['held']}" if row["held"] else NOT_COMMANDED[authority]
        return row
    row["waits"] = _waits(row, phase, bool(memory["needs_repair"][node]), present.burn_in)
    return row


def _waits(row: Mapping[str, Value], phase: int, needs_repair: bool, burn_in: bool) -> str:
    """Return the next event, and the party that causes it."""
    node, job = row["node"], row["job"]
    if row["held"] and phase in NOT_DRAINED:
        return f"as it is held back: {row['held']}"
    if phase == SUSPECT and row["course"] == "watch":
        return "for a change of its case: doing nothing costs least now"
    return {
        SUSPECT: "for the evidence to last, or to go",
        CORDONED: f"for {job} to end" if job else "for the scheduler to report it free",
        SAVING: f"for a durable save of {job or 'its job'}",
        DRAINING: f"for the scheduler to take {job} off it"
        if job
        else "for the scheduler to report it drained",
        OUT: "for its test to begin"
        if burn_in and not needs_repair
        else f"for its repair: racktwin device repaired {node}",
        TESTING: f"for a test: burn-in, or racktwin device tested {node} --passed",
        PROBATION: "for its probation to end",
        RMA: f"for an operator: racktwin device report {node}, then a new node in its place",
    }.get(phase, "")


def _of_node(present: Present, node: int) -> Explanation:
    """Return one node: its state, and the options with their costs."""
    row = row_of(present, node)
    name, chosen = str(row["node"]), row["course"] if row["weighed"] else None
    text = f"{name}: {row['phase_words']}" + (f"; waits {row['waits']}" if row["waits"] else "")
    sentences = [Sentence(text)]
    if row["reason"]:
        sentences.append(Sentence(f"reason: {row['reason']}"))
    if row["leave_ns"] is not None:
        sentences.append(Sentence(_timing_text(present, node)))
    if not row["weighed"]:
        sentences.append(
            Sentence("no option is weighed, as it is no suspect; racktwin device health has its health")
        )
    costs: list[dict[str, Value]] = [
        {
            "option": OPTION_TEXTS[o],
            "cost": row[f"costs_gpu_h.{o}"],
            "chosen": "chosen" if o == chosen else "",
        }
        for o in OPTIONS
        if row["weighed"]
    ]
    options: DataTable = table_of(
        "options", ("option", ("cost", "GPU-h"), "chosen"), costs, "options and their expected cost"
    )
    return Explanation(
        policy=NAME,
        now_ns=present.view.now_ns,
        entity=name,
        sentences=(*sentences, *present.notes(), *_warnings(present)),
        figures=tuple(KeyFigure(key, row[key], unit, text) for key, unit, text in NODE_FIGURES),
        tables=(options,),
    )


def _timing_text(present: Present, node: int) -> str:
    """Return the trough of demand that a suspect waits for, its latest departure, and the saving."""
    memory, now_ns = present.memory, present.view.now_ns
    leave_s, latest_s = ((int(memory[name][node]) - now_ns) / NS for name in ("leave_ns", "leave_by_ns"))
    text = f"it leaves in {duration(max(leave_s, 0.0))}, in a trough of demand"
    curve = demand_curve(present.view)
    if curve is not None:
        then = float(np.interp(leave_s, curve.at_s, curve.mean))
        text += (
            f": {curve.mean[0]:,.0f} GPUs are wanted now and {then:,.0f} then, of {curve.there:,} in service"
        )
    text += f"; at the latest in {duration(max(latest_s, 0.0))}, when its chance of having failed since it"
    text += f" became a suspect is {RISK_PU:.0%}, or it has waited {duration(MOST_WAIT_S)}"
    return f"{text}; the wait saves {float(memory['wait_saves_gpu_h'][node]):,.1f} GPU-h after that risk"


def _metrics(present: Present) -> tuple[KeyFigure, ...]:
    """Return the figures for metrics; none if the policy does not run."""
    if not present.runs:
        return ()
    out: list[KeyFigure] = []

    def add(name: str, value: Any, text: str, kind: Any = "gauge", **labels: str) -> None:
        key = ".".join((name, *labels.values()))
        out.append(KeyFigure(key, value, "", text, FigureMetric(f"replacement_{name}", kind, labels)))

    for phase, count in present.counts.items():
        add("nodes", count, "nodes in a phase", phase=phase)
    for what in ("have", "free", "kept", "wanted"):
        if present.pool[what] is not None:
            add("spares", present.pool[what], "spare nodes", what=what)
    add(
        "breaker_open",
        int(bool(present.breaker["open"])),
        "1 while withdrawals are stopped, as too many nodes became suspect at once",
    )
    add("held", present.breaker["nodes"], "nodes that the breaker holds back")
    total = score(present.memory)
    add("predictions", total.settled, "predictions of which the outcome is known", "counter")
    if total.settled:
        add("brier", total.brier, "mean square of (chance - outcome) of settled predictions")
    interruptions = {"predicted": total.said_pu, "came": total.failed}
    for what, value in interruptions.items():
        add("interruptions", value, "interruptions: predicted, and occurred", "counter", what=what)
    for what, value in {"predicted": total.said_gpu_h, "lost": total.came_gpu_h}.items():
        add("gpu_hours", max(0.0, value), "GPU-hours: predicted, and lost", "counter", what=what)
    for what, count in {"bad": total.bad, "well": max(0, total.tests - total.bad)}.items():
        add("tests", count, "tests of withdrawn nodes", "counter", what=what)
    return tuple(out)


def _instant(memory: Memory, name: str, node: int) -> int | None:
    return int(memory[name][node]) or None


def _states(key: str) -> tuple[str, ...]:
    control = find_control(key)
    return control.states if control is not None else ()
