"""Rescue: the steps that follow where the lowest caps do not save the GPUs of a node: save, drain, stop, off.

A step is taken only where the one before will not do: jobs save if they can in the time that is left; the
node is drained and its system stopped while there is time for that; its power is cut just before the first
GPU would shut itself down. Two GPUs of a rack must be read beyond their guard: one sensor that lies moves
nothing, nor does a flow meter alone. A node that is off stays off until people switch it on again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.thermal_guard.caps import CONTROL
from policies.thermal_guard.endurance import Endurance
from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import Memory, Proposal, View, mask_index

SAVE, SERVICE, POWER = "job.checkpoint_since_s", "node.service_level", "node.power_state"
ON, STOP, OFF = 0, 1, 2  # states of node.power_state
LEVELS = ("on", "stop its system", "switch it off")
DRAINED = 3.0
WITNESSES = 2  # GPUs of a rack beyond their guard, read, before anything but a cap follows
# Until the first GPU of a node would shut itself down, at its lowest cap. A system stops within 12-45 s; a
# board's controller cuts the power within 2-4 s, and a reading is up to 2 s old; source: estimate
STOP_LEAD_S, OFF_LEAD_S = 45.0, 8.0
DANGER_S = 900.0  # nobody saves for what is further away; the longest saves take minutes (domain: 10-60 s)
CALM_S = 60.0  # so long after it the danger is over


@dataclass(frozen=True, slots=True)
class Rescue:
    """Nodes in danger [n_node]: seconds until the first GPU would shut down, at present power and at the
    lowest cap (inf: none), the instant since when (0: not), and the order on its power with its instant."""

    now_s: F64
    left_s: F64
    danger_ns: I64
    calm_ns: I64  # the danger is over if nothing speaks for it until then
    order: I64
    order_ns: I64
    went_off: Bool  # read as off after the order

    @property
    def memory(self) -> Memory:
        """The columns that the next assessment begins with."""
        return {
            "danger_ns": self.danger_ns,
            "calm_ns": self.calm_ns,
            "order": self.order.astype(np.int8),
            "order_ns": self.order_ns,
            "went_off": self.went_off,
        }


def rescue(view: View, memory: Memory, found: Endurance) -> Rescue:
    """The dangers and orders of all nodes; the memory that follows from it gives the same again."""
    now_ns = view.now_ns
    now_s, left_s = (_of_node(view, found, seconds) for seconds in _left(view, found))
    danger = left_s < DANGER_S
    calm_ns = np.where(danger, now_ns + round(CALM_S * NS), memory["calm_ns"])
    lasts = danger | (calm_ns > now_ns)
    begun = np.where(memory["danger_ns"] > 0, memory["danger_ns"], now_ns)
    level = np.where(left_s <= OFF_LEAD_S, OFF, np.where(left_s <= STOP_LEAD_S, STOP, ON))
    readback, before = view.readback(POWER), memory["order"].astype(np.int64)
    went_off = memory["went_off"] | ((before > ON) & (readback == OFF))
    # Switched on again: people were here, and only new evidence counts
    over = (went_off & (readback == ON)) | _asked_back(view)
    standing = np.where(over, ON, before)
    order = np.maximum(standing, level)
    order_ns = np.where(order > standing, now_ns, np.where(order > ON, memory["order_ns"], 0))
    return Rescue(
        now_s,
        left_s,
        np.where(lasts, begun, 0),
        calm_ns,
        order,
        order_ns,
        went_off & ~over & (order > ON),
    )


def _left(view: View, found: Endurance) -> tuple[F64, F64]:
    """Seconds left of each GPU [k], at present power and at the lowest cap; inf with too few witnesses."""
    gpu, site = found.gpu, view.site
    rack = site.rack_of_gpu[gpu]
    limit, envelope = view.limit("gpu.temp_c"), view.envelope(CONTROL)
    none = np.full(len(gpu), np.inf)
    if limit is None:
        return none, none
    hot = found.measured & (found.temp_c >= limit.guard[gpu])
    witnesses = np.bincount(rack[hot], minlength=site.sizes["rack"])
    gpus_of_rack = np.bincount(site.rack_of_gpu, minlength=site.sizes["rack"])
    enough = hot & (witnesses >= np.minimum(gpus_of_rack, WITNESSES))[rack]
    low_w = envelope.low[gpu]
    capped = view.readback(CONTROL)[gpu] <= low_w + envelope.deadband
    lowest_w = np.where(capped | ~(found.power_w > low_w), found.power_w, low_w)
    return (
        np.where(enough, found.left_s(found.power_w), np.inf),
        np.where(enough, found.left_s(lowest_w), np.inf),
    )


def _of_node(view: View, found: Endurance, seconds: F64) -> F64:
    """The least of its GPUs [n_node]; inf without any."""
    out = np.full(view.site.sizes["node"], np.inf)
    np.minimum.at(out, view.site.node_of_gpu[found.gpu], seconds)
    return out


def _asked_back(view: View) -> Bool:
    """Nodes that a standing request of people wants on [n_node]."""
    out = np.zeros(view.site.sizes["node"], np.bool_)
    for request in view.requests:
        if request.control == POWER and request.hi < 0.5:
            out[view.targets(request)] = True
    return out


def proposals(view: View, found: Rescue) -> list[Proposal]:
    """Saves of the jobs in danger, and the orders on nodes."""
    out = _saves(view, found)
    ordered = mask_index(found.order > ON)
    if len(ordered):
        out.append(_at(SERVICE, ordered, DRAINED, 4.0, "take out of service: its GPUs would overheat"))
    # What has stopped is off: then off is what shall be
    off = (found.order == OFF) | ((found.order > ON) & (view.readback(POWER) == OFF))
    for mask, level, why in (
        ((found.order == STOP) & ~off, STOP, "stop its system: even at their lowest caps its GPUs overheat"),
        (off, OFF, "off: even at their lowest caps its GPUs overheat at once; people switch it on again"),
    ):
        if len(index := mask_index(mask)):
            out.append(_at(POWER, index, float(level), float(OFF), why))
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
    reason = "save now: GPUs of its nodes would overheat even at their lowest caps"
    return [Proposal(SAVE, slots, at_s, np.full(len(slots), 1e10), at_s, reason)]


def _at(control: str, index: I32, low: float, high: float, why: str) -> Proposal:
    k = len(index)
    return Proposal(control, index, np.full(k, low), np.full(k, high), np.full(k, low), why)
