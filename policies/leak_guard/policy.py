"""leak_guard: isolates a rack when two independent witnesses report a leak.

All detectors that one system reads are one witness. One witness only raises an alarm, as does missing coolant
while every detector is dry. With two witnesses, jobs save, the rack is drained and its caps are lowered. Then
its valves are shut and its power is cut. Wet trays and those below them are switched off at once; the others,
which have lost their coolant, shut down in order. The BMS and the boards may refuse a command; their
read-back counts. The policy never opens a valve or switches a node on: people clear a dry rack by a request
to open it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from policies.leak_guard.detectors import CDU, HALL, HOLD_S, KEYS, ROPE, SUM, TRAY, age_s, columns
from policies.leak_guard.evidence import (
    ASKED,
    BUILDING,
    CONTROLLERS,
    EACH,
    JOIN_S,
    LIQUID,
    SPENT,
    WITNESSES,
    LeakEvidence,
    LeakSystems,
    assess,
)
from policies.leak_guard.switches import ENDED, POWER, LeakSwitches, orders, switches
from twin.catalogue import I32, NS, ContractError, signal_of
from twin.contracts import (
    PAGE,
    Columns,
    DataTable,
    ExplainRequest,
    Explanation,
    KeyFigure,
    Memory,
    Proposal,
    Sentence,
    TableColumn,
    Topic,
    Value,
    View,
    finite,
    in_scope,
    mask_index,
    scope_of,
    table_of,
)
from twin.telemetry import QUALITY_NAMES

SAVE, SERVICE, CAP = "job.checkpoint_since_s", "node.service_level", "gpu.power_cap_w"
ELECTRICAL = "rack.electrical_isolation"
DRAINED = 3.0

MAX_ROWS = 200
RACK_COLUMNS = (
    TableColumn("rack"),
    TableColumn("detectors", "count", "wet detectors"),
    TableColumn("needed", "count", detail=True),
    TableColumn("witnesses", "count", "witnesses in all"),
    TableColumn("since_s", "s", "leaks since"),
    TableColumn("isolates_s", "s", detail=True),
    TableColumn("nodes", "count"),
    TableColumn("off", "count", "nodes to be off"),
    TableColumn("gpus", "count"),
    TableColumn("jobs", "count"),
    TableColumn("action"),
    TableColumn("lift", text="ends by"),
)
DETECTOR_COLUMNS = (
    "entity",
    "signal",
    "value",
    ("age_s", "s"),
    "quality",
    TableColumn("since_s", "s", "wet since"),
)
SUSPECT_COLUMNS = (
    TableColumn("rack"),
    TableColumn("cdu", text="of the circuit of"),
    TableColumn("missing_s", "s", "which has lost coolant for"),
    TableColumn("detectors", text="its detectors"),
)


class LeakGuard:
    """Proposes, per rack with two witnesses: save now, lowest caps and drain, then isolation and switches."""

    name: ClassVar[str] = "leak_guard"
    controls: ClassVar[tuple[str, ...]] = (SAVE, SERVICE, CAP, LIQUID, ELECTRICAL, POWER)
    rank: ClassVar[int] = 1
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(
        node={**columns(TRAY), "switched": "u1"},
        rack={
            **columns(ROPE),
            **columns(SUM),
            "since_ns": "i8",
            "ripe": "?",
            "shut_ns": "i8",
            "asked": "u1",
        },
        cdu=columns(CDU),
        hall=columns(HALL),
    )

    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def __init__(
        self,
        trays: str = EACH,
        ropes: str = BUILDING,
        pans: str = BUILDING,
        circuits: str = BUILDING,
        halls: str = BUILDING,
        coolant: str = CONTROLLERS,
    ) -> None:
        """The system that reads each kind of detector, by any name; what has one name is one witness. `trays`
        "": each board is a system. `pans`: what is said of all trays of a rack. `circuits`: detectors of
        CDUs. `coolant`: the pressures and fill pumps that show missing coolant.
        """
        self.systems = LeakSystems(trays, ropes, pans, circuits, halls, coolant)
        for kind, name in self.systems._asdict().items():
            if not isinstance(name, str) or (name == EACH and kind != "trays"):
                raise ContractError(f"{kind}: expected the name of a system, got {name!r}")

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Nothing but memory, until a rack has two witnesses; then it is held until people clear it."""
        found = assess(view, memory, self.systems)
        switched = switches(view, memory, found)
        racks = mask_index(found.since_ns > 0)
        out: list[Proposal] = []
        if len(racks):
            why = _why(view, racks)
            out = self._proposals(view, racks, found, why) + orders(view, switched, why)
        return out, {**found.memory, "switched": switched.order}

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The racks with a wet detector: witnesses, time since, the next step, and its end; the racks that
        may leak where coolant is missing."""
        entity, inside = scope_of(view, request)
        found = assess(view, memory, self.systems)
        switched = switches(view, memory, found)
        wet = in_scope(inside, "rack", mask_index((found.own > 0) | (found.since_ns > 0)))
        leaking = wet[found.since_ns[wet] > 0]
        where = f" in {entity}" if entity else ""
        text = f"racks with a wet detector{where}: {len(wet)}; leaking by {WITNESSES} or more: {len(leaking)}"
        sentences = [Sentence(text, "warning" if len(leaking) else "summary")]
        suspects = in_scope(inside, "rack", mask_index((found.missing_ns > 0) & (found.own == 0)))
        if len(suspects):
            text = "coolant is missing: nothing is powered down before a detector agrees"
            sentences.append(Sentence(text, "warning"))
        if ended := int((switched.order == ENDED).sum()):
            text = f"nodes that people switched on before their rack was cleared: {ended}"
            sentences.append(Sentence(text, "warning"))
        rows = [_row(view, found, switched, rack) for rack in wet[:MAX_ROWS].tolist()]
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(
                KeyFigure("leaking_racks", len(leaking), "count", "racks treated as leaking"),
                KeyFigure("wet_racks", len(wet), "count", "racks with a wet detector"),
                KeyFigure("suspect_racks", len(suspects), "count", "racks of circuits that lose coolant"),
            ),
            tables=(
                table_of("racks", RACK_COLUMNS, rows, "racks with a wet detector", len(wet)),
                _detectors(view, found, wet),
                _suspects(view, found, suspects),
            ),
        )

    @staticmethod
    def _proposals(view: View, racks: I32, found: LeakEvidence, why: str) -> list[Proposal]:
        site, since_ns = view.site, found.since_ns
        leaking = since_ns > 0
        out: list[Proposal] = []
        nodes = mask_index(leaking[site.rack_of_node])
        jobs = view.jobs.job_of_node[nodes]
        slots = np.unique(jobs[jobs >= 0]).astype(np.int32)
        if len(slots):
            first_s = np.full(view.jobs.n, np.inf)
            for node, slot in zip(nodes.tolist(), jobs.tolist(), strict=True):
                if slot >= 0:
                    first_s[slot] = min(first_s[slot], since_ns[site.rack_of_node[node]] // NS)
            at_s = first_s[slots]
            out.append(Proposal(SAVE, slots, at_s, np.full(len(slots), 1e10), at_s, f"save now: {why}"))
        caps = view.envelope(CAP)
        gpus = mask_index(leaking[site.rack_of_gpu] & np.isfinite(caps.low))
        if len(gpus):
            low_w = caps.low[gpus]
            out.append(Proposal(CAP, gpus, low_w, low_w, low_w, f"power down: {why}"))
        # A drained node stays so until people bring it back: a report that flickers drains none
        lasts = leaking & (view.now_ns - since_ns >= round(JOIN_S * NS))
        if len(nodes := mask_index(lasts[site.rack_of_node])):
            out.append(Proposal.uniform(SERVICE, nodes, DRAINED, 4.0, f"take out of service: {why}"))
        ripe = racks[found.ripe[racks]]
        if len(ripe):
            out.append(Proposal.uniform(ELECTRICAL, ripe, 1.0, 1.0, f"isolate: {why}"))
            out.append(Proposal.uniform(LIQUID, ripe, 1.0, 1.0, f"isolate: {why}"))
        return out


def _why(view: View, racks: I32) -> str:
    names = ", ".join(view.site.name("rack", int(r)) for r in racks[:3]) + (", ..." if len(racks) > 3 else "")
    return f"two or more detectors or signs show that {names} leak{'s' if len(racks) == 1 else ''}"


def _row(view: View, found: LeakEvidence, switched: LeakSwitches, rack: int) -> dict[str, Value]:
    site = view.site
    nodes = np.flatnonzero(site.rack_of_node == rack)
    jobs = view.jobs.job_of_node[nodes]
    leaks = found.since_ns[rack] > 0
    grace_s = float(found.grace_s(view.now_ns)[rack]) if leaks else None
    action = "none: an alarm only"
    lift = f"an operator: a request for {LIQUID} 0, with all detectors dry for {HOLD_S:.0f} s"
    if found.asked[rack] == ASKED:
        lift = f"the pending request, once all detectors are dry for {HOLD_S:.0f} s"
    elif found.asked[rack] == SPENT:
        lift = "a new request: the present one was already granted"
    if grace_s is not None:
        action = "save, lowest caps, drain, isolate, switch off"
        if grace_s > 0.0:
            action = f"save, lowest caps, drain; isolate in {grace_s:.0f} s"
    return {
        "rack": site.name("rack", rack),
        "detectors": int(found.own[rack]),
        "needed": WITNESSES,
        "witnesses": int(found.witnesses[rack]),
        "since_s": age_s(view.now_ns, int(found.since_ns[rack])),
        "isolates_s": grace_s,
        "nodes": len(nodes),
        "off": int(np.count_nonzero(switched.wanted[nodes])),
        "gpus": int((site.rack_of_gpu == rack).sum()),
        "jobs": len(np.unique(jobs[jobs >= 0])),
        "action": action,
        "lift": lift,
    }


def _detectors(view: View, found: LeakEvidence, racks: I32) -> DataTable:
    """The detectors that count, of racks and around them: last reading, age, quality, wet since."""
    site, kinds = view.site, found.kinds
    sources: list[tuple[str, int]] = []
    for rack in racks[:MAX_ROWS].tolist():
        first, last = site.node_start_of_rack[rack : rack + 2].tolist()
        sources += [(TRAY, first + int(k)) for k in np.flatnonzero(kinds[TRAY].counts[first:last])]
        around = (
            (SUM, rack),
            (ROPE, rack),
            (CDU, int(site.cdu_of_rack[rack])),
            (HALL, int(site.hall_of_rack[rack])),
        )
        sources += [
            (kind, at) for kind, at in around if 0 <= at < len(kinds[kind].counts) and kinds[kind].counts[at]
        ]
    rows: list[dict[str, Value]] = []
    for kind, at in dict.fromkeys(sources):
        key = KEYS[kind]
        signal = signal_of(key)
        rows.append(
            {
                "entity": site.name(signal.table, at),
                "signal": key,
                "value": finite(view.value(key)[at]),
                "age_s": finite(view.age_s(key)[at], 1),
                "quality": QUALITY_NAMES[view.quality(key)[at]],
                "since_s": age_s(view.now_ns, int(kinds[kind].first_ns[at])),
            }
        )
    text = "detectors that are wet, or were so more than once since they were cleared"
    return table_of("detectors", DETECTOR_COLUMNS, rows[:MAX_ROWS], text, len(rows))


def _suspects(view: View, found: LeakEvidence, racks: I32) -> DataTable:
    """Racks of circuits that lose coolant, all dry as far as reported; those not reported first."""
    site, kinds = view.site, found.kinds
    deaf = ~kinds[TRAY].dry
    silent = np.bincount(site.rack_of_node[deaf], minlength=site.sizes["rack"]) + ~kinds[ROPE].dry
    rows: list[dict[str, Value]] = []
    for rack in racks[np.argsort(-silent[racks], kind="stable")][:MAX_ROWS].tolist():
        n_silent = int(silent[rack])
        text = f"{n_silent} do not report dry" if n_silent else "all report dry"
        rows.append(
            {
                "rack": site.name("rack", rack),
                "cdu": site.name("cdu", int(site.cdu_of_rack[rack])),
                "missing_s": age_s(view.now_ns, int(found.missing_ns[rack])),
                "detectors": text,
            }
        )
    return table_of("suspects", SUSPECT_COLUMNS, rows, "racks that may leak unseen", len(racks))
