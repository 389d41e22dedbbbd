"""leak_guard: saves, powers down and isolates a rack of which two independent detectors say that it leaks.

One detector is an alarm (the diagnosis raises it) and nothing more. Trays count one by one, as water that
runs down wets the detector of the tray below; the rack's rope, the hall's rope and the CDU's detector count
once each, the last two only beside a detector of the rack itself. What was wet stays so for a while, since
detectors flap. The BMS carries out the isolation and may refuse; its echo is what counts. Nothing is ever
opened again from here: that is for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool
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
from twin.telemetry import GOOD, QUALITY_NAMES, STALE

SAVE, SERVICE, CAP = "job.checkpoint_since_s", "node.service_level", "gpu.power_cap_w"
LIQUID, ELECTRICAL = "rack.liquid_isolation", "rack.electrical_isolation"
DETECTORS = 2
# A detector that was wet counts for so long, as drops come and go; source: estimate.
HOLD_S = 300.0
# Between the order to save and the isolation: a checkpoint of a large job takes 10-60 s (domain.md D). Water
# that spreads does not wait.
GRACE_S = 60.0
SPREADING = 3  # detectors at which there is no grace
DRAINED = 3.0
MAX_TRAYS = 62  # told apart in a rack; those beyond share the last bit
SUMMED = np.int64(1) << MAX_TRAYS  # the bit of what the BMS says of all trays of a rack

MAX_ROWS = 200
RACK_COLUMNS = (
    TableColumn("rack"),
    TableColumn("detectors", "count", "wet detectors"),
    TableColumn("needed", "count", detail=True),
    TableColumn("since_s", "s", "leaks since"),
    TableColumn("isolates_s", "s", detail=True),
    TableColumn("nodes", "count"),
    TableColumn("gpus", "count"),
    TableColumn("jobs", "count"),
    TableColumn("action"),
    TableColumn("lift", text="ends by"),
)
DETECTOR_COLUMNS = ("entity", "signal", "value", ("age_s", "s"), "quality")


@dataclass(frozen=True, slots=True)
class WetDetectors:
    """The wet detectors of all racks [n_rack].

    `trays`: a bit for each tray that was wet within HOLD_S, and SUMMED; `roped`: the rope was; `tray_ns`,
    `rope_ns`: last wet; `detectors`: how many count; `since_ns`: leaking since, 0 = not.
    """

    trays: I64
    tray_ns: I64
    roped: Bool
    rope_ns: I64
    detectors: I64
    since_ns: I64

    def grace_s(self, now_ns: int) -> F64:
        """Seconds from now to the isolation of a rack that leaks [n_rack]; 0 = now."""
        left_s = np.maximum(GRACE_S - (now_ns - self.since_ns) / NS, 0.0)
        return np.where(self.detectors >= SPREADING, 0.0, left_s)


class LeakGuard:
    """Proposes, per rack with two wet detectors: save now, lowest caps and drain, then isolation."""

    name: ClassVar[str] = "leak_guard"
    controls: ClassVar[tuple[str, ...]] = (SAVE, SERVICE, CAP, LIQUID, ELECTRICAL)
    rank: ClassVar[int] = 1
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(
        rack={"trays": "i8", "tray_ns": "i8", "rope_ns": "i8", "since_ns": "i8"}
    )

    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Nothing but memory, until a rack has two wet detectors; then it is held until people take over."""
        found = assess(view, memory)
        racks = mask_index(found.since_ns > 0)
        proposals = self._proposals(view, racks, found) if len(racks) else []
        return proposals, {
            "trays": found.trays,
            "tray_ns": found.tray_ns,
            "rope_ns": found.rope_ns,
            "since_ns": found.since_ns,
        }

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The racks with a wet detector: detectors, time since, the next step, and what ends it."""
        entity, inside = scope_of(view, request)
        found = assess(view, memory)
        wet = in_scope(inside, "rack", mask_index((found.detectors > 0) | (found.since_ns > 0)))
        leaking = wet[found.since_ns[wet] > 0]
        where = f" in {entity}" if entity else ""
        text = f"racks with a wet detector{where}: {len(wet)}; leaking by {DETECTORS} or more: {len(leaking)}"
        rows = [_row(view, found, rack) for rack in wet[:MAX_ROWS].tolist()]
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=(Sentence(text, "warning" if len(leaking) else "summary"),),
            figures=(
                KeyFigure("leaking_racks", len(leaking), "count", "racks held as leaking"),
                KeyFigure("wet_racks", len(wet), "count", "racks with a wet detector"),
            ),
            tables=(
                table_of("racks", RACK_COLUMNS, rows, "racks with a wet detector", len(wet)),
                _detectors(view, found, wet),
            ),
        )

    @staticmethod
    def _proposals(view: View, racks: I32, found: WetDetectors) -> list[Proposal]:
        site, n_rack, since_ns = view.site, view.site.sizes["rack"], found.since_ns
        leaking = np.zeros(n_rack, np.bool_)
        leaking[racks] = True
        names = ", ".join(site.name("rack", int(r)) for r in racks[:3]) + (", ..." if len(racks) > 3 else "")
        why = f"two detectors or more say that {names} leak{'s' if len(racks) == 1 else ''}"
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
        if len(nodes):
            out.append(Proposal.uniform(SERVICE, nodes, DRAINED, 4.0, f"take out of service: {why}"))
        ripe = racks[found.grace_s(view.now_ns)[racks] <= 0.0]
        if len(ripe):
            out.append(Proposal.uniform(ELECTRICAL, ripe, 1.0, 1.0, f"isolate: {why}"))
            out.append(Proposal.uniform(LIQUID, ripe, 1.0, 1.0, f"isolate: {why}"))
        return out


def assess(view: View, memory: Memory) -> WetDetectors:
    """The wet detectors of all racks; the memory that follows from it gives the same assessment again."""
    n = view.site.sizes["rack"]
    trays, rope = _wet_trays(view), _wet(view, "rack", "leak_state") & _trusted_rope(view)
    hold_ns, now_ns = round(HOLD_S * NS), view.now_ns
    tray_ns = np.where(trays > 0, now_ns, memory["tray_ns"])
    rope_ns = np.where(rope, now_ns, memory["rope_ns"])
    trays = np.where((tray_ns > 0) & (now_ns - tray_ns < hold_ns), memory["trays"] | trays, trays)
    roped = (rope_ns > 0) & (now_ns - rope_ns < hold_ns)
    # The BMS's sum of the trays is no detector of its own beside any of them
    wet_trays = np.bitwise_count(trays & ~SUMMED).astype(np.int64)
    own = np.maximum(wet_trays, (trays & SUMMED) > 0) + roped
    detectors = np.where(own > 0, own + _beside(view, n), 0)
    since_ns = np.where(memory["since_ns"] > 0, memory["since_ns"], 0)
    since_ns = np.where((detectors >= DETECTORS) & (since_ns == 0), now_ns, since_ns)
    since_ns = np.where(_reopened(view, n) & (own == 0), 0, since_ns)
    return WetDetectors(trays, tray_ns, roped, rope_ns, detectors, since_ns)


def _row(view: View, found: WetDetectors, rack: int) -> dict[str, Value]:
    site = view.site
    nodes = np.flatnonzero(site.rack_of_node == rack)
    jobs = view.jobs.job_of_node[nodes]
    leaks = found.since_ns[rack] > 0
    grace_s = float(found.grace_s(view.now_ns)[rack]) if leaks else None
    action, lift = "none: an alarm, and nothing more", f"{HOLD_S:.0f} s without a wet detector"
    if grace_s is not None:
        action = "save, lowest caps, drain, isolate"
        if grace_s > 0.0:
            action = f"save, lowest caps, drain; isolate in {grace_s:.0f} s"
        lift = f"a person: all dry, and a request for {LIQUID} 0"
    return {
        "rack": site.name("rack", rack),
        "detectors": int(found.detectors[rack]),
        "needed": DETECTORS,
        "since_s": (view.now_ns - int(found.since_ns[rack])) / NS if leaks else None,
        "isolates_s": grace_s,
        "nodes": len(nodes),
        "gpus": int((site.rack_of_gpu == rack).sum()),
        "jobs": len(np.unique(jobs[jobs >= 0])),
        "action": action,
        "lift": lift,
    }


def _detectors(view: View, found: WetDetectors, racks: I32) -> DataTable:
    """The wet detectors of racks and around them: signal, last reading, age and quality."""
    site = view.site
    sources: list[tuple[str, str, int]] = []
    for rack in racks[:MAX_ROWS].tolist():
        first, last = site.node_start_of_rack[rack : rack + 2].tolist()
        bits = int(found.trays[rack] & ~SUMMED)
        sources += [
            ("node", "leak_state", node)
            for node in range(first, last)
            if bits >> min(node - first, MAX_TRAYS - 1) & 1
        ]
        if found.trays[rack] & SUMMED:
            sources.append(("rack", "tray_leak_state", rack))
        if found.roped[rack]:
            sources.append(("rack", "leak_state", rack))
        sources += [(table, "leak_state", at) for table, at in _around(view, rack)]
    rows: list[dict[str, Value]] = []
    for table, signal, at in dict.fromkeys(sources):
        key = f"{table}.{signal}"
        rows.append(
            {
                "entity": site.name(table, at),
                "signal": key,
                "value": finite(view.value(key)[at]),
                "age_s": finite(view.age_s(key)[at], 1),
                "quality": QUALITY_NAMES[view.quality(key)[at]],
            }
        )
    text = f"detectors that were wet within {HOLD_S:.0f} s"
    return table_of("detectors", DETECTOR_COLUMNS, rows[:MAX_ROWS], text, len(rows))


def _around(view: View, rack: int) -> Iterator[tuple[str, int]]:
    """The wet detectors of the CDU and the hall of a rack."""
    for table, of in (("cdu", view.site.cdu_of_rack), ("hall", view.site.hall_of_rack)):
        at = int(of[rack])
        if 0 <= at < view.site.sizes[table] and _wet(view, table, "leak_state")[at]:
            yield table, at


def _wet(view: View, table: str, signal: str) -> Bool:
    """Detectors that say "leak": a wet one that fell silent is wet; one that its source distrusts is not."""
    key = f"{table}.{signal}"
    quality = view.quality(key)
    wet: Bool = (view.value(key) == 1.0) & ((quality == GOOD) | (quality == STALE))
    return wet


def _trusted_rope(view: View) -> Bool:
    return ~_wet(view, "rack", "leak_sensor_fault_state")


def _wet_trays(view: View) -> I64:
    """Wet trays of each rack, a bit for each [n_rack], and one for what the BMS says of all of them."""
    site = view.site
    trays = np.zeros(site.sizes["rack"], np.int64)
    wet = np.flatnonzero(_wet(view, "node", "leak_state"))
    rack = site.rack_of_node[wet]
    bit = np.minimum(wet - site.node_start_of_rack[rack], MAX_TRAYS - 1)
    np.bitwise_or.at(trays, rack, np.left_shift(np.int64(1), bit.astype(np.int64)))
    return np.where(_wet(view, "rack", "tray_leak_state"), trays | SUMMED, trays)


def _beside(view: View, n: int) -> I64:
    """Wet detectors around each rack: its CDU's and its hall's [n]."""
    site = view.site
    out = np.zeros(n, np.int64)
    cooled = site.cdu_of_rack >= 0
    cdu = _wet(view, "cdu", "leak_state")
    out[cooled] += cdu[site.cdu_of_rack[cooled]]
    hall = _wet(view, "hall", "leak_state")
    return out + hall[site.hall_of_rack] if len(hall) else out


def _reopened(view: View, n: int) -> Bool:
    """Racks that a person asks to open again: a standing request for no liquid isolation [n]."""
    out = np.zeros(n, np.bool_)
    for request in view.requests:
        if request.control == LIQUID and request.hi < 0.5:
            out[view.targets(request)] = True
    return out
