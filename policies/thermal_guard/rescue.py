"""Rescue: the steps that follow if the lowest caps are not enough for the GPUs of a node: save, lock, drain,
stop, off.

A step is taken only if the step before is not enough. Jobs save if the time left allows it. Clocks are locked
at their lowest; if the plan says that this may be enough, the policy waits for the effect. The node is
drained and its system stopped while there is time. Its power is cut just before the first GPU would shut
itself down. Two GPUs of a rack must warm up at their lowest caps beyond doubt: one sensor that lies moves
nothing, nor does a flow meter. An order lasts as long as its danger and a minute more. Then the lease lapses,
and the node stays as it is: nothing is remembered that could strike a node which people have brought back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.thermal_guard.plan import CAPACITY_SPREAD, LOCK, plan_of, rate_at, seconds
from policies.thermal_guard.rise import Rise
from policies.thermal_guard.surge import Surge
from twin.catalogue import F64, I32, I64, NS, Bool
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
LOCK_WAIT_S = 4.0  # within which a locked clock is read back; source: estimate


@dataclass(frozen=True, slots=True)
class NodeSeconds:
    """Seconds until the first GPU of each node [n_node] would shut down, as far as its rate is known: at the
    power that it draws, at its lowest cap, with its clock locked; inf where none would."""

    now_s: F64
    lowest_s: F64
    locked_s: F64


@dataclass(frozen=True, slots=True)
class Rescue:
    """Nodes in danger [n_node]: seconds until their first GPU would shut down, the instant since when (0: not
    in danger), until when it lasts without another sign, and the order on their power."""

    seconds: NodeSeconds
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


def rescue(view: View, memory: Memory, found: Rise, fast: Surge) -> Rescue:
    """The dangers and orders of all nodes; the memory that follows from it gives the same again.

    Orders follow from what was measured at the lowest caps, and never from a surge, which the plan covers
    only what will come: before the caps are there, the heat that is stored is more in doubt than the heat of
    an idle GPU.
    """
    site, now_ns = view.site, view.now_ns
    witnesses = np.bincount(site.rack_of_gpu[found.gpu[found.rises]], minlength=site.sizes["rack"])
    enough = found.rises & (witnesses >= WITNESSES)[site.rack_of_gpu[found.gpu]]
    measured_s = np.where(enough, found.left_s, np.inf)
    left_s = _first(view, found.gpu, measured_s)
    begun_ns = np.where(memory["danger_ns"] > 0, memory["danger_ns"], now_ns)
    node = site.node_of_gpu[found.gpu]
    waits = _lock_may_do(view, found) & (now_ns - begun_ns[node] <= round(LOCK_WAIT_S * NS))
    stop_s = _first(view, found.gpu, np.where(waits, np.inf, measured_s))
    planned = _seconds(view, found, measured_s, fast)
    danger = np.maximum(planned.now_s, planned.lowest_s) < DANGER_S
    calm_ns = np.where(danger, now_ns + round(CALM_S * NS), memory["calm_ns"])
    lasts = calm_ns > now_ns
    level = np.where(left_s <= OFF_LEAD_S, OFF, np.where(stop_s <= STOP_LEAD_S, STOP, ON))
    order = np.where(lasts, np.maximum(memory["order"], level), ON)
    return Rescue(planned, np.where(lasts, begun_ns, 0), calm_ns, order)


def _first(view: View, gpu: I32, left_s: F64) -> F64:
    """The least seconds of the GPUs of each node [n_node]."""
    out = np.full(view.site.sizes["node"], np.inf)
    np.minimum.at(out, view.site.node_of_gpu[gpu], left_s)
    return out


def _lock_may_do(view: View, found: Rise) -> Bool:
    """GPUs [k] that have more than the time of a stop with their clock locked, by the greatest rate and the
    greatest heat capacity that may be, and more than that of a cut of their power until then."""
    plan = plan_of(view, found.gpu)
    most_j_per_k = plan.capacity_j_per_k * (1.0 + CAPACITY_SPREAD)
    locked_s = seconds(found.room_k, rate_at(found.most, plan.low_w, plan.locked_w, most_j_per_k))
    may_do: Bool = plan.lockable & plan.lock_helps & ~plan.locked
    return may_do & (locked_s > STOP_LEAD_S) & (found.left_s > OFF_LEAD_S)


def _seconds(view: View, found: Rise, measured_s: F64, fast: Surge) -> NodeSeconds:
    """The plan of each node: from readings at the lowest caps, or else from the rise at higher power."""
    plan, measured = plan_of(view, found.gpu), np.isfinite(measured_s)
    gpu, room_k, rate = found.gpu[measured], found.room_k[measured], found.rate[measured]
    drawn_w = np.where(plan.locked, plan.locked_w, plan.low_w)[measured]
    early = ~np.isin(fast.gpu, found.gpu)
    gpu = np.concatenate([gpu, fast.gpu[early]])
    room_k = np.concatenate([room_k, fast.room_k[early]])
    rate = np.concatenate([rate, fast.rate[early]])
    drawn_w = np.concatenate([drawn_w, fast.drawn_w[early]])
    plan = plan_of(view, gpu)

    def at(power_w: F64) -> F64:
        return _first(view, gpu, seconds(room_k, rate_at(rate, drawn_w, power_w, plan.capacity_j_per_k)))

    return NodeSeconds(_first(view, gpu, seconds(room_k, rate)), at(plan.low_w), at(plan.locked_w))


def proposals(view: View, found: Rescue, capped: Bool) -> list[Proposal]:
    """Saves of the jobs in danger, locked clocks, and the orders on nodes; `capped` [n_gpu] by heat."""
    out = _saves(view, found) + _locks(view, found, capped)
    allowed = view.envelope(POWER).high >= STOP
    ordered = mask_index((found.order > ON) & allowed)
    if len(ordered):
        why = "take out of service: its GPUs overheat at their lowest caps"
        out.append(Proposal.uniform(SERVICE, ordered, DRAINED, 4.0, why))
    # A system that has stopped is off: then it is to be switched off
    off = (found.order == OFF) | ((found.order > ON) & (view.readback(POWER) == OFF))
    for mask, level, verb, lead_s in (
        ((found.order == STOP) & ~off & allowed, STOP, "stop its system", STOP_LEAD_S),
        (off & allowed, OFF, "switch it off", OFF_LEAD_S),
    ):
        if len(index := mask_index(mask)):
            why = f"{verb}: at their lowest caps its GPUs shut down within {lead_s:.0f} s"
            out.append(Proposal.uniform(POWER, index, float(level), float(OFF), why))
    return out


def _locks(view: View, found: Rescue, capped: Bool) -> list[Proposal]:
    """Lock the clocks of nodes in danger at their lowest, and leave them so while heat caps the GPU: it would
    warm up again."""
    envelope, commanded = view.envelope(LOCK), view.commanded(LOCK)
    wanted = (found.danger_ns > 0)[view.site.node_of_gpu]
    wanted |= capped & (commanded <= envelope.low + envelope.deadband)
    index = mask_index(wanted & np.isfinite(envelope.low) & np.isfinite(view.readback(LOCK)))
    if not len(index):
        return []
    low = envelope.low[index]
    why = "lock its clock: it warms up at its lowest cap"
    return [Proposal(LOCK, index, low, low, np.full(len(index), np.nan), why)]


def _saves(view: View, found: Rescue) -> list[Proposal]:
    """Save the jobs of nodes in danger, except jobs that need more time than is left."""
    nodes = mask_index((found.danger_ns > 0) & (found.order == ON))
    slot_of = view.jobs.job_of_node[nodes]
    slots = np.unique(slot_of[slot_of >= 0]).astype(np.int32)
    if not len(slots):
        return []
    left_s, since_s = np.full(view.jobs.n, np.inf), np.full(view.jobs.n, np.inf)
    there = slot_of >= 0
    node_s = np.maximum(found.seconds.now_s, found.seconds.lowest_s)
    np.minimum.at(left_s, slot_of[there], node_s[nodes[there]])
    np.minimum.at(since_s, slot_of[there], found.danger_ns[nodes[there]] // NS)
    slots = slots[~(view.jobs.checkpoint_save_s[slots] > left_s[slots])]
    if not len(slots):
        return []
    at_s = since_s[slots]
    reason = "save now: GPUs of its nodes overheat at their lowest caps"
    return [Proposal(SAVE, slots, at_s, np.full(len(slots), 1e10), at_s, reason)]
