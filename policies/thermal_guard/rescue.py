"""Rescue: the steps that follow where the lowest caps do not save the GPUs of a node: save, drain, stop, off.

A step is taken only where the one before will not do: jobs save if they can in the time that is left; the
node is drained and its system stopped while there is time for that; its power is cut just before the first
GPU would shut itself down. Two GPUs of a rack must warm up at their lowest caps beyond doubt: one sensor that
lies moves nothing, nor does a flow meter. An order lasts as long as its danger and a minute more. Then the
lease lapses, and the node stays as it is: nothing is remembered that could strike a node which people have
brought back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.thermal_guard.rise import Rise
from twin.catalogue import F64, I64, NS
from twin.contracts import Memory, Proposal, View, mask_index

SAVE, SERVICE, POWER = "job.checkpoint_since_s", "node.service_level", "node.power_state"
ON, STOP, OFF = 0, 1, 2  # states of node.power_state
DRAINED = 3.0
WITNESSES = 2  # GPUs of a rack that warm up at their lowest caps, before anything but a cap follows
# Until the first GPU of a node would shut itself down, at its lowest cap. A system stops within 12-45 s; a
# board's controller cuts the power within 2-4 s, and a reading is up to 2 s old; source: estimate
STOP_LEAD_S, OFF_LEAD_S = 45.0, 8.0
DANGER_S = 900.0  # nobody saves for what is further away; the longest saves take minutes (domain: 10-60 s)
CALM_S = 60.0  # so long after its last sign a danger is over


@dataclass(frozen=True, slots=True)
class Rescue:
    """Nodes in danger [n_node]: seconds until their first GPU would shut down (inf: none), the instant since
    when (0: not in danger), until when it lasts without another sign, and the order on their power."""

    left_s: F64
    danger_ns: I64
    calm_ns: I64
    order: I64

    @property
    def memory(self) -> Memory:
        """The columns that the next assessment begins with."""
        return {
            "danger_ns": self.danger_ns,
            "calm_ns": self.calm_ns,
            "order": self.order.astype(np.int8),
        }


def rescue(view: View, memory: Memory, found: Rise) -> Rescue:
    """The dangers and orders of all nodes; the memory that follows from it gives the same again."""
    site, now_ns = view.site, view.now_ns
    witnesses = np.bincount(site.rack_of_gpu[found.gpu[found.rises]], minlength=site.sizes["rack"])
    enough = found.rises & (witnesses >= WITNESSES)[site.rack_of_gpu[found.gpu]]
    left_s = np.full(site.sizes["node"], np.inf)
    np.minimum.at(left_s, site.node_of_gpu[found.gpu], np.where(enough, found.left_s, np.inf))
    danger = left_s < DANGER_S
    calm_ns = np.where(danger, now_ns + round(CALM_S * NS), memory["calm_ns"])
    lasts = calm_ns > now_ns
    begun_ns = np.where(memory["danger_ns"] > 0, memory["danger_ns"], now_ns)
    level = np.where(left_s <= OFF_LEAD_S, OFF, np.where(left_s <= STOP_LEAD_S, STOP, ON))
    order = np.where(lasts, np.maximum(memory["order"], level), ON)
    return Rescue(left_s, np.where(lasts, begun_ns, 0), calm_ns, order)


def proposals(view: View, found: Rescue) -> list[Proposal]:
    """Saves of the jobs in danger, and the orders on nodes."""
    out = _saves(view, found)
    allowed = view.envelope(POWER).high >= STOP
    ordered = mask_index((found.order > ON) & allowed)
    if len(ordered):
        why = "take out of service: its GPUs overheat at their lowest caps"
        out.append(Proposal.uniform(SERVICE, ordered, DRAINED, 4.0, why))
    # What has stopped is off: then off is what shall be
    off = (found.order == OFF) | ((found.order > ON) & (view.readback(POWER) == OFF))
    for mask, level, verb, lead_s in (
        ((found.order == STOP) & ~off & allowed, STOP, "stop its system", STOP_LEAD_S),
        (off & allowed, OFF, "switch it off", OFF_LEAD_S),
    ):
        if len(index := mask_index(mask)):
            why = f"{verb}: at their lowest caps its GPUs shut down within {lead_s:.0f} s"
            out.append(Proposal.uniform(POWER, index, float(level), float(OFF), why))
    return out


def _saves(view: View, found: Rescue) -> list[Proposal]:
    """Save the jobs of nodes in danger, but for those that need longer than they have."""
    nodes = mask_index((found.danger_ns > 0) & (found.order == ON))
    slot_of = view.jobs.job_of_node[nodes]
    slots = np.unique(slot_of[slot_of >= 0]).astype(np.int32)
    if not len(slots):
        return []
    left_s, since_s = np.full(view.jobs.n, np.inf), np.full(view.jobs.n, np.inf)
    there = slot_of >= 0
    np.minimum.at(left_s, slot_of[there], found.left_s[nodes[there]])
    np.minimum.at(since_s, slot_of[there], found.danger_ns[nodes[there]] // NS)
    slots = slots[~(view.jobs.checkpoint_save_s[slots] > left_s[slots])]
    if not len(slots):
        return []
    at_s = since_s[slots]
    reason = "save now: GPUs of its nodes overheat at their lowest caps"
    return [Proposal(SAVE, slots, at_s, np.full(len(slots), 1e10), at_s, reason)]
