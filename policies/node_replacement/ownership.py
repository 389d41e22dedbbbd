"""Ownership: the party that withdrew each node: operators, another policy, or racktwin before a restart.

A drain that carries racktwin's mark, and that neither operators nor another policy of this daemon requested,
was made by this policy under the previous leader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.node_replacement.evidence import FACILITY, SHARED, SOFTWARE, NodeEvidence, one_of
from policies.node_replacement.phases import (
    CORDONED,
    IN_SERVICE,
    LEVEL,
    PROBATION,
    SAVING,
    SUSPECT,
    WITHDRAWN,
)
from twin.catalogue import I8, I32, Bool
from twin.contracts import Memory, View
from twin.telemetry import GOOD

SERVICE, OWNER = "node.service_level", "node.service_owner_state"
OWNED_BY_RACKTWIN = 1.0  # of OWNER
# The party that requested the level from this daemon: none known, operators or another policy, this policy
BY_NOBODY, BY_OTHERS, BY_US = range(3)
EXTERNAL_CAUSES = (SOFTWARE, FACILITY, SHARED)  # causes for which this policy never withdraws a node


@dataclass(frozen=True, slots=True)
class Ownership:
    """Of k nodes: withdrawn by operators or others; requested in service, or out of it, by operators; under
    maintenance; ours by the mark alone, without a withdrawal in memory."""

    theirs: Bool
    wanted_in: Bool
    wanted_out: Bool
    under_maintenance: Bool
    adopted: Bool


def operator_requests(view: View) -> tuple[Bool, Bool]:
    """Return (nodes that operators request out of service, and in service) [n_node]."""
    n = view.site.sizes["node"]
    out, back = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    for request in view.requests:
        if request.control != SERVICE:
            continue
        wish = request.lo if request.want is None else max(request.lo, request.want)
        if wish >= 1.0:
            out[view.targets(request)] = True
        elif request.hi < 1.0:
            back[view.targets(request)] = True
    return out, back


def level_is_current(view: View) -> Bool:
    """Return the nodes whose service level is read back and current [n_node]."""
    there: Bool = (view.quality(f"{SERVICE}_state") == GOOD) & ~np.isnan(view.readback(SERVICE))
    return there


def service_levels(view: View, at: I32) -> tuple[I8, Bool]:
    """(service level in force [k], nodes whose level is read back): the read-back where it is current, else
    the running command, else in service."""
    readback, commanded = view.readback(SERVICE)[at], view.commanded(SERVICE)[at]
    current = (view.quality(f"{SERVICE}_state")[at] == GOOD) & ~np.isnan(readback)
    # Where no source reads levels back, the command is all there is
    level = np.where(current, readback, np.where(np.isnan(readback), commanded, np.fmax(readback, commanded)))
    return np.nan_to_num(level).astype(np.int8), current


def track_owners(view: View, memory: Memory) -> Bool:
    """Store since when others withdrew nodes, and which returned; gives nodes to adopt [n_node].

    `others_withdrew_ns`: 0 = not withdrawn by others, 1 = since before the first run. `owner`: BY_NOBODY and
    following. A node that others returned counts as vouched for: `returned_ns`. Replaces these columns of
    `memory`.
    """
    readback, commanded, now_ns = view.readback(SERVICE), view.commanded(SERVICE), view.now_ns
    known, before = level_is_current(view), memory["others_withdrew_ns"]
    mine = (memory["withdrawn_ns"] > 0) | one_of(memory["phase"], WITHDRAWN)
    with np.errstate(invalid="ignore"):
        gone = ~mine & ((readback >= 1.0) | (before > 0) & ~known)
        ordered, marked = commanded >= 1.0, view.value(OWNER) == OWNED_BY_RACKTWIN
    begun = np.where(memory["known"], now_ns, 1)
    memory["others_withdrew_ns"] = np.where(gone, np.where(before > 0, before, begun), 0)
    back = (before > 0) & known & (readback < 1.0)
    memory["returned_ns"] = np.where(back, now_ns, memory["returned_ns"])
    wanted_out, _ = operator_requests(view)
    there = known & (readback >= 1.0)
    owner = np.where(there | ordered | wanted_out, memory["owner"], BY_NOBODY)
    owner = np.where(mine, BY_US, owner)
    # A command that is not read back yet, and not ours, is another policy's
    owner = np.where(wanted_out | ordered & ~there & (owner == BY_NOBODY), BY_OTHERS, owner)
    memory["owner"] = owner.astype(np.int8)
    idle = one_of(memory["phase"], (IN_SERVICE, SUSPECT, PROBATION)) & (memory["withdrawn_ns"] == 0)
    out: Bool = there & (view.quality(OWNER) == GOOD) & marked & idle & (owner != BY_OTHERS)
    return out


def ownership_of(
    view: View, evidence: NodeEvidence, memory: Memory, at: I32, failed_in_use: Bool, marked: Bool
) -> Ownership:
    """Return the ownership of these nodes [k]. `marked` [n_node]: of `track_owners`."""
    out, back = operator_requests(view)
    level, known = service_levels(view, at)
    work = view.maintenance("node")
    under = np.zeros(len(at), np.bool_) if work is None else np.asarray(work[at], np.bool_)
    phase = memory["phase"][at]
    idle = one_of(phase, (IN_SERVICE, SUSPECT, PROBATION)) & (memory["withdrawn_ns"][at] == 0)
    with np.errstate(invalid="ignore"):
        ours = (view.quality(OWNER)[at] == GOOD) & (view.value(OWNER)[at] == OWNED_BY_RACKTWIN)
    # A level beyond ours, once ours was in force, is somebody else's
    more = (
        one_of(phase, (CORDONED, SAVING)) & known & (level > LEVEL[phase]) & (memory["level_reached"][at] > 0)
    )
    more &= ~(ours & (memory["owner"][at] != BY_OTHERS))
    adopted = marked[at] & ~out[at] & ~under & ~one_of(evidence.cause[at], EXTERNAL_CAUSES)
    # What a window is about is ours again after it, if we withdrew it before
    begins = under & ~(one_of(phase, (CORDONED, SAVING)) & (memory["level_reached"][at] > 0))
    theirs: Bool = out[at] | begins | idle & (level >= 1) & ~adopted | more & ~failed_in_use
    return Ownership(theirs, back[at], out[at], under, adopted)
