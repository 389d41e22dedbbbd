"""leak_guard: saves, powers down and isolates a rack of which two independent detectors say that it leaks.

One detector is an alarm (the diagnosis raises it) and nothing more. Trays count one by one, as water that
runs down wets the detector of the tray below; the rack's rope, the hall's rope and the CDU's detector count
once each, the last two only beside a detector of the rack itself. What was wet stays so for a while, since
detectors flap. The BMS carries out the isolation and may refuse; its echo is what counts. Nothing is ever
opened again from here: that is for people.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from twin.catalogue import I32, I64, NS, Bool
from twin.contracts import Columns, Memory, Proposal, View, mask_index
from twin.telemetry import GOOD, STALE

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

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Nothing but memory, until a rack has two wet detectors; then it is held until people take over."""
        n = view.site.sizes["rack"]
        trays, rope = _wet_trays(view), _wet(view, "rack", "leak_state") & _trusted_rope(view)
        hold_ns, now_ns = round(HOLD_S * NS), view.now_ns
        tray_ns = np.where(trays > 0, now_ns, memory["tray_ns"])
        rope_ns = np.where(rope, now_ns, memory["rope_ns"])
        seen = np.where((tray_ns > 0) & (now_ns - tray_ns < hold_ns), memory["trays"] | trays, trays)
        roped = (rope_ns > 0) & (now_ns - rope_ns < hold_ns)
        # The BMS's sum of the trays is no detector of its own beside any of them
        wet_trays = np.bitwise_count(seen & ~SUMMED).astype(np.int64)
        own = np.maximum(wet_trays, (seen & SUMMED) > 0) + roped
        detectors = np.where(own > 0, own + _beside(view, n), 0)
        dry_and_open = _reopened(view, n) & (own == 0)
        since_ns = np.where(memory["since_ns"] > 0, memory["since_ns"], 0)
        since_ns = np.where((detectors >= DETECTORS) & (since_ns == 0), now_ns, since_ns)
        since_ns = np.where(dry_and_open, 0, since_ns)
        racks = mask_index(since_ns > 0)
        proposals = self._proposals(view, racks, since_ns, detectors) if len(racks) else []
        return proposals, {"trays": seen, "tray_ns": tray_ns, "rope_ns": rope_ns, "since_ns": since_ns}

    @staticmethod
    def _proposals(view: View, racks: I32, since_ns: I64, detectors: I64) -> list[Proposal]:
        site, n_rack = view.site, view.site.sizes["rack"]
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
            out.append(_at(SERVICE, nodes, DRAINED, 4.0, DRAINED, f"take out of service: {why}"))
        waited_s = (view.now_ns - since_ns[racks]) / NS
        ripe = racks[(waited_s >= GRACE_S) | (detectors[racks] >= SPREADING)]
        if len(ripe):
            out.append(_at(ELECTRICAL, ripe, 1.0, 1.0, 1.0, f"isolate: {why}"))
            out.append(_at(LIQUID, ripe, 1.0, 1.0, 1.0, f"isolate: {why}"))
        return out


def _at(control: str, index: I32, lo: float, hi: float, want: float, why: str) -> Proposal:
    k = len(index)
    return Proposal(control, index, np.full(k, lo), np.full(k, hi), np.full(k, want), why)


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
