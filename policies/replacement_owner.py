"""Whose each node is that is out of service: people's, another policy's, or ours from before we remember.

A drain that carries the mark of racktwin, and of which neither people nor another policy of this daemon ever
asked, is one of replacement under the leader before. May import contracts and the other files of this policy;
changes only the memory that it is given.
"""

from __future__ import annotations

import numpy as np

from policies.replacement_evidence import FACILITY, SHARED, SOFTWARE, Evidence, one_of
from policies.replacement_phases import CORDONED, IN_SERVICE, LEVEL, PROBATION, SAVING, SUSPECT, WITHDRAWN
from twin.contracts import Memory, View
from twin.frame import I8, I32, Bool
from twin.state import GOOD

SERVICE, OWNER = "node.service_level", "node.service_owner_state"
OURS = 1.0  # of OWNER
# Who asked this daemon for a level: nobody that we know of, people or another policy, replacement
NOBODY, ELSEWHERE, MINE = range(3)
SPARED = (SOFTWARE, FACILITY, SHARED)  # causes for which nothing is ever withdrawn here


def asked(view: View) -> tuple[Bool, Bool]:
    """(people ask that it be out, and that it be in service) [n_node]."""
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


def current(view: View) -> Bool:
    """Where the level that is read back is of now [n_node]."""
    there: Bool = (view.quality(f"{SERVICE}_state") == GOOD) & ~np.isnan(view.readback(SERVICE))
    return there


def follow(view: View, kept: Memory) -> Bool:
    """Keep since when nodes that are not ours are out, and who came back; gives those to take up [n_node].

    `others_ns`: 0 = they are not, 1 = from the start. `whose` order is carried out: in NOBODY ... Who others
    brought back is well, they say: `returned_ns`. Replaces these columns of `kept`.
    """
    readback, commanded, now_ns = view.readback(SERVICE), view.commanded(SERVICE), view.now_ns
    known, before = current(view), kept["others_ns"]
    mine = (kept["withdrawn_ns"] > 0) | one_of(kept["phase"], WITHDRAWN)
    with np.errstate(invalid="ignore"):
        gone = ~mine & ((readback >= 1.0) | (before > 0) & ~known)
        ordered, ours = commanded >= 1.0, view.value(OWNER) == OURS
    begun = np.where(kept["looked_ns"] > 0, now_ns, 1)
    kept["others_ns"] = np.where(gone, np.where(before > 0, before, begun), 0)
    back = (before > 0) & known & (readback < 1.0)
    kept["returned_ns"] = np.where(back, now_ns, kept["returned_ns"])
    people, _ = asked(view)
    there = known & (readback >= 1.0)
    whose = np.where(there | ordered | people, kept["whose"], NOBODY)
    whose = np.where(mine, MINE, whose)
    # What is commanded before it is read back, and not for us, is another policy's
    whose = np.where(people | ordered & ~there & (whose == NOBODY), ELSEWHERE, whose)
    kept["whose"] = whose.astype(np.int8)
    fits = one_of(kept["phase"], (IN_SERVICE, SUSPECT, PROBATION)) & (kept["withdrawn_ns"] == 0)
    known_owner = view.quality(OWNER) == GOOD
    out: Bool = there & known_owner & ours & fits & (whose != ELSEWHERE)
    return out


def people(
    view: View, evidence: Evidence, kept: Memory, at: I32, level: I8, known: Bool, broke: Bool, found: Bool
) -> tuple[Bool, Bool, Bool, Bool, Bool]:
    """(people or others took the node out, people want it in service, people work at it, people asked for it
    to be out, it is ours though nothing is remembered of it) [k]. `found` [n]: of `follow`."""
    out, back = asked(view)
    work = view.maintenance("node")
    under = np.zeros(len(at), np.bool_) if work is None else np.asarray(work[at], np.bool_)
    phase = kept["phase"][at]
    idle = one_of(phase, (IN_SERVICE, SUSPECT, PROBATION)) & (kept["withdrawn_ns"][at] == 0)
    with np.errstate(invalid="ignore"):
        ours = (view.quality(OWNER)[at] == GOOD) & (view.value(OWNER)[at] == OURS)
    # What we never asked for is somebody else's: more than our level, once ours was in force
    more = one_of(phase, (CORDONED, SAVING)) & known & (level > LEVEL[phase]) & (kept["reached"][at] > 0)
    more &= ~(ours & (kept["whose"][at] != ELSEWHERE))
    adopts = found[at] & ~out[at] & ~under & ~one_of(evidence.cause[at], SPARED)
    theirs: Bool = out[at] | under | idle & (level >= 1) & ~adopts | more & ~broke
    return theirs, back[at], under, out[at], adopts
