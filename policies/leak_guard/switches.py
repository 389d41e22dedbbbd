"""Power switches of the nodes of a leaking rack: off at once, shut down in order, or left to people.

A wet tray and all trays below it go off at once, since the coolant runs down. The other nodes lose their
coolant when the valves close, and shut down in order. No more racks are switched off than may be isolated. A
node that people switch on again is left alone until another detector of its rack gets wet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.leak_guard.detectors import TRAY
from policies.leak_guard.evidence import LIQUID, LeakEvidence
from twin.catalogue import U8, Bool
from twin.contracts import Memory, Proposal, View, mask_index

POWER = "node.power_state"
ON, STOP, OFF = 0, 1, 2  # states of node.power_state
NONE, ORDERED, CARRIED_OUT, ENDED = 0, 1, 2, 3  # what became of an order


@dataclass(frozen=True, slots=True)
class LeakSwitches:
    """Nodes [n_node] that shall be off at once, those that shall stop in order, and what became of it."""

    wet: Bool
    dry: Bool
    order: U8

    @property
    def wanted(self) -> Bool:
        """Nodes that must be off, except those that people switched on."""
        out: Bool = (self.wet | self.dry) & (self.order != ENDED)
        return out


def switches(view: View, memory: Memory, found: LeakEvidence) -> LeakSwitches:
    """The switches now; the memory that follows from it gives the same again."""
    site = view.site
    before = memory["switched"]
    begun = np.bincount(site.rack_of_node[before > NONE], minlength=len(found.ripe)) > 0
    # An isolation that has begun goes on, also where it is refused
    struck = (_isolated(view, found) | (begun & found.ripe))[site.rack_of_node]
    if not struck.any():
        return LeakSwitches(struck, struck, np.zeros(len(before), np.uint8))
    wet = np.zeros(len(before), np.bool_)
    for tray in np.flatnonzero(struck & found.kinds[TRAY].counts).tolist():
        wet[tray] = True
        wet[site.nodes_below(tray)] = True
    wet &= struck
    stands = view.readback(POWER)
    order = np.where(struck, np.maximum(before, ORDERED), NONE)
    order = np.where((order == ENDED) & found.new[site.rack_of_node], ORDERED, order)
    order = np.where((order == ORDERED) & (stands == OFF), CARRIED_OUT, order)
    order = np.where((order == CARRIED_OUT) & (stands == ON), ENDED, order)
    return LeakSwitches(wet, struck & ~wet, order.astype(np.uint8))


def _isolated(view: View, found: LeakEvidence) -> Bool:
    """Racks that are to be isolated, and are or have been commanded to be [n_rack]; where nothing can isolate
    them, as many as might be at once, the longest leaking first."""
    envelope = view.envelope(LIQUID)
    ordered = (view.commanded(LIQUID) == 1.0) | (view.readback(LIQUID) == 1.0)
    out: Bool = found.ripe & ordered
    others = np.flatnonzero(found.ripe & ~np.isfinite(envelope.low))
    order = np.argsort(found.since_ns[others], kind="stable")
    out[others[order[: envelope.blast_radius]]] = True
    return out


def orders(view: View, found: LeakSwitches, why: str) -> list[Proposal]:
    """Proposals for the power of nodes."""
    allowed = (view.envelope(POWER).high >= STOP) & found.wanted
    stopped = view.readback(POWER) == OFF  # then off is what shall be
    out = []
    for mask, level, text in (
        (found.wet | stopped, OFF, "switch off wet equipment and everything below it"),
        (~found.wet & ~stopped, STOP, "stop equipment that loses its coolant"),
    ):
        if len(index := mask_index(mask & allowed)):
            out.append(Proposal.uniform(POWER, index, float(level), float(OFF), f"{text}: {why}"))
    return out
