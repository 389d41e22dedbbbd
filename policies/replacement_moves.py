"""What a move from phase to phase leaves in the memory: instants, deadlines, counts, and what was weighed.

May import contracts and the other files of this policy; changes only the memory that it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.replacement_costs import Stakes
from policies.replacement_evidence import HARDWARE, MENDS, RECURRING, one_of
from policies.replacement_forward import REPAIR_S, forward
from policies.replacement_gate import opened, uses
from policies.replacement_look import SERVICE, Look, Rules, foretold, levels
from policies.replacement_owner import ELSEWHERE
from policies.replacement_phases import (
    AGAIN_S,
    CORDONED,
    DRAINED,
    DRAINING,
    DRAINING_S,
    IN_SERVICE,
    OFFENCES_S,
    OUT,
    PROBATION,
    REPLACE,
    RMA,
    SAVING,
    SUSPECT,
    TESTING,
    TESTING_S,
    TRIES,
    WITHDRAWN,
    save_wait_s,
)
from policies.replacement_spares import choose, roles
from twin.contracts import Memory, View
from twin.frame import I8, I32, NS, Bool
from twin.health.levels import action

SINCE = "job.checkpoint_since_s"
CONTACT_SUPPORT = action("contact_support")  # this and more needs people before a test
# A save that was asked for so lately is the one that a drain waits for, whoever asked. source: estimate
ASKED_S = 300.0
RENEW_S = 600.0  # what comes in force so late asks for a newer save. source: estimate
RETURN_S, UNREAD_S = 86_400.0, 300.0  # a return is commanded for so long; where nothing reads it back
COSTS = ("watch_gpu_h", "cordon_gpu_h", "next_gpu_h", "save_gpu_h", "once_gpu_h")


def adopt(view: View, kept: Memory, fresh: Bool, last_ns: int) -> None:
    """Nodes [n, `fresh`: of which nothing is remembered] that were exchanged while they were ours.

    Who they were is forgotten with the device, but the place next to them knows that it was us who took this
    one out. They are as one that was just replaced. Changes `kept`.
    """
    replaced = view.service().replaced_ns
    ours = fresh & (replaced > last_ns) & np.roll(kept["ward"] > 0, 1)
    at = np.flatnonzero(ours).astype(np.int32)
    kept["phase"][at], kept["reached"][at], kept["shown"][at] = OUT, DRAINED, 1
    kept["entered_ns"][at] = view.now_ns
    kept["withdrawn_ns"][at] = np.maximum(replaced[at] - 1, 1)


def confirm_anew(kept: Memory, now_ns: int) -> None:
    """Nobody looked for a while: what was suspected then must be confirmed before anything is done."""
    waits = one_of(kept["phase"], (SUSPECT, CORDONED, SAVING))
    kept["suspected_ns"][waits] = now_ns
    kept["resumed_ns"][:] = 0


def apply(view: View, kept: Memory, seen: Look, after: I8, by: I32, rules: Rules) -> None:
    """Carry out the moves of this look. Changes `kept`."""
    at, now_ns = seen.at, view.now_ns
    before = kept["phase"][at]
    moved = by >= 0
    _weighed(kept, seen, before, after, moved)
    kept["phase"][at[moved]] = after[moved]
    kept["row"][at[moved]] = by[moved] + 1
    kept["entered_ns"][at[moved]] = now_ns
    kept["deadline_ns"][at[moved]] = 0
    kept["held"][at] = np.where(seen.seen.bad, seen.held, 0)

    def to(phase: int, *start: int) -> I32:
        some = moved & (after == phase)
        out: I32 = at[some & one_of(before, start)] if start else at[some]
        return out

    new = to(SUSPECT)
    since = seen.evidence.since_ns[new]
    kept["begun_ns"][new] = np.where((since > 0) & (since < now_ns), since, now_ns)
    kept["suspected_ns"][new] = now_ns
    _offend(kept, seen, rules)
    adopted = moved & seen.seen.adopts & one_of(before, (IN_SERVICE, SUSPECT, PROBATION))
    left = at[moved & one_of(after, (CORDONED, SAVING, DRAINING)) & (before == SUSPECT) & ~adopted]
    _leave(view, kept, seen, left, rules)
    _took(view, kept, seen, np.union1d(to(OUT, IN_SERVICE, SUSPECT, PROBATION), at[adopted]))
    kept["repairs"][to(OUT, IN_SERVICE, SUSPECT, PROBATION, CORDONED, SAVING)] = 1
    people_look = (seen.seen.level >= REPLACE) | seen.seen.bad & (seen.evidence.action[at] >= CONTACT_SUPPORT)
    kept["repairs"][at[adopted & ~seen.seen.takes]] = people_look[adopted & ~seen.seen.takes]
    _out(view, kept, seen, to, rules)
    ended = to(IN_SERVICE)
    kept["tries"][ended] = kept["attempts"][ended] = kept["reached"][ended] = 0
    kept["begun_ns"][np.concatenate([ended, to(PROBATION)])] = 0
    # Who is let go before its return was read back for long enough is back all the same
    early = (kept["resumed_ns"][at] > 0) & ~one_of(after, WITHDRAWN) & ~seen.seen.theirs
    kept["returned_ns"][at[moved & (seen.seen.resumed | early)]] = now_ns
    theirs = at[moved & seen.seen.theirs & (after == IN_SERVICE)]
    kept["withdrawn_ns"][theirs], kept["whose"][theirs] = 0, ELSEWHERE  # never brought back by us
    _deadlines(view, kept, seen)
    _returned(view, kept)
    # Who is in service and of no interest to us is told why
    idle = (kept["phase"] == IN_SERVICE) & ~one_of(seen.evidence.cause, MENDS)
    np.copyto(kept["cause"], seen.evidence.cause, where=idle)
    ours = one_of(kept["phase"], WITHDRAWN) & (kept["withdrawn_ns"] > 0)
    kept["ward"] = np.roll(ours, -1).astype(np.int8)


def _weighed(kept: Memory, seen: Look, before: I8, after: I8, moved: Bool) -> None:
    """Keep what was weighed when a decision was made; it is told until the next one."""
    decides = moved & one_of(after, (SUSPECT, CORDONED, SAVING, DRAINING)) & seen.seen.bad
    decides &= before != SAVING  # then it is carried out, as it was decided
    # A suspect that is held back, or for whom another course is best now, says so
    other = (before == SUSPECT) & seen.seen.bad & (seen.seen.course != kept["course"][seen.at])
    rows = np.flatnonzero(decides | other)
    at, e = seen.at[rows], seen.evidence
    for name, column in (("chance_1h_pu", e.chance_1h_pu), ("chance_24h_pu", e.chance_24h_pu),
                         ("sure_pu", e.sure_pu), ("cause", e.cause), ("action", e.action)):  # fmt: skip
        kept[name][at] = column[at]
    kept["course"][at] = seen.seen.course[rows]
    for name, cost in zip(COSTS, seen.costs.gpu_h, strict=True):
        kept[name][at] = cost[rows]
    stakes = seen.stakes
    for name, column in (("next_s", stakes.next_s), ("durable_s", stakes.durable_s),
                         ("job_gpus", stakes.job_gpus), ("lost_s", stakes.lost_s)):  # fmt: skip
        kept[name][at] = column[rows]


def _leave(view: View, kept: Memory, seen: Look, left: I32, rules: Rules) -> None:
    """Nodes that begin to leave: what is foretold of it, and who takes over."""
    _begin(kept, left)
    kept["repairs"][left] = seen.evidence.action[left] >= CONTACT_SUPPORT
    if len(left):
        _foretell(view, kept, seen, left, _spares(view, kept, left), rules)


def _offend(kept: Memory, seen: Look, rules: Rules) -> None:
    """Count it against nodes whose withdrawal is in force now that they go out again.

    What was only planned counts for nothing. Whoever was well for weeks begins anew.
    """
    nodes = seen.at[seen.begun]
    away_ns = kept["withdrawn_ns"][nodes] - kept["returned_ns"][nodes]
    # Trouble of its own so soon after a return counts double: the repair or the test did not find it
    again = (kept["returned_ns"][nodes] > 0) & (away_ns < round(rules.probation_s * NS))
    hard = again & one_of(kept["cause"][nodes], (HARDWARE, RECURRING))
    _count(kept, nodes, 1 + hard)


def _count(kept: Memory, nodes: I32, more: np.ndarray) -> None:
    well_ns = kept["withdrawn_ns"][nodes] - kept["returned_ns"][nodes]
    well = (kept["returned_ns"][nodes] > 0) & (well_ns >= round(OFFENCES_S * NS))
    kept["offences"][nodes] = np.minimum(np.where(well, 0, kept["offences"][nodes]) + more, 1000)


def _begin(kept: Memory, left: I32) -> None:
    """Nothing is known yet of this time out; who did not come back since the last is out from then on."""
    since = kept["withdrawn_ns"][left]
    kept["withdrawn_ns"][left] = np.where(since > kept["returned_ns"][left], since, 0)
    for name in ("reached", "attempts", "tries", "tested_ns", "pair"):
        kept[name][left] = 0


def _took(view: View, kept: Memory, seen: Look, took: I32) -> None:
    """Nodes that failed by themselves, or that are ours by their mark: ours until they are repaired and
    tested."""
    rows = np.searchsorted(seen.at, took)
    _begin(kept, took)
    more = (kept["withdrawn_ns"][took] == 0).astype(np.int16)
    kept["withdrawn_ns"][took] = view.now_ns
    _count(kept, took, more)
    kept["reached"][took] = np.maximum(seen.seen.level[rows], 1)
    e = seen.evidence
    for name, column in (("chance_1h_pu", e.chance_1h_pu), ("chance_24h_pu", e.chance_24h_pu),
                         ("sure_pu", e.sure_pu), ("cause", e.cause), ("action", e.action)):  # fmt: skip
        kept[name][took] = column[took]


def _spares(view: View, kept: Memory, left: I32) -> I32:
    """The spare that takes over from each of these nodes [k], -1 for none; the pair is remembered."""
    out = np.full(len(left), -1, np.int32)
    spare = roles(view.site, view.jobs, np.fmax(view.commanded(SERVICE), view.readback(SERVICE)))
    if not spare.any():
        return out
    order = np.argsort(-kept["watch_gpu_h"][left], kind="stable")
    taken = (kept["pair"] != 0) | (kept["phase"] != IN_SERVICE)
    out[order], _, _ = choose(view, left[order], spare, taken)
    has = np.flatnonzero(out >= 0)
    kept["pair"][left[has]] = kept["pair"][out[has]] = view.now_ns + np.arange(len(has))
    return out


def _foretell(view: View, kept: Memory, seen: Look, left: I32, spare: I32, rules: Rules) -> None:
    """Write down what both courses are foretold to bring, with the repair, which is what will be seen."""
    fresh = kept["gate_ns"][left] == 0
    nodes, spare = left[fresh], spare[fresh]
    if not len(nodes):
        return
    rows, course = np.searchsorted(seen.at, nodes), kept["course"][nodes]
    stakes = seen.stakes._replace(spare=seen.stakes.spare.copy())
    stakes.spare[rows] = spare >= 0
    chance = seen.evidence.chance_24h_pu
    its = np.where(spare >= 0, chance[np.maximum(spare, 0)], 0.0)
    use = uses(view, nodes, spare)
    whole = forward(foretold(seen.evidence, nodes, course, stakes, rows, rules.prices, REPAIR_S, use, its))
    bare = forward(foretold(seen.evidence, nodes, course, stakes, rows, rules.prices, 0.0, use, its))
    some = Stakes(*(column[rows] for column in stakes))
    kept.update(opened(view, kept, nodes, course, whole, some, seen.evidence.sure_pu[nodes]))
    kept["repair_gpu_h"][nodes] = whole.act_gpu_h - bare.act_gpu_h


def _out(view: View, kept: Memory, seen: Look, to: Callable[..., I32], rules: Rules) -> None:
    """Saves that are asked for, tests, returns, and what counts of them. `to(phase, *from)`: who moved so."""
    now_ns, now_s = view.now_ns, view.now_ns / NS
    saving = to(SAVING)
    kept["save_s"][saving] = save_since_s(view, kept, saving)
    kept["save_s"][np.concatenate([to(DRAINING), to(CORDONED), to(IN_SERVICE)])] = 0.0
    given_up = to(CORDONED, DRAINING, SAVING)
    kept["deadline_ns"][given_up] = now_ns + round(AGAIN_S * NS)
    failed = to(OUT, TESTING)
    rows = np.searchsorted(seen.at, failed)
    real = failed[seen.seen.failed[rows]]
    kept["attempts"][real] += 1
    kept["tries"][failed] += 1
    kept["repairs"][failed[seen.seen.failed[rows] | seen.seen.stands[rows] & seen.seen.passed[rows]]] = 1
    kept["repairs"][failed[kept["tries"][failed] >= TRIES]] = 1
    tested = to(TESTING)
    kept["tested_ns"][tested] = np.int64(np.ceil(now_s)) * NS
    kept["deadline_ns"][tested] = now_ns + round(TESTING_S * NS)
    repaired = to(TESTING, RMA)
    kept["offences"][repaired] = kept["attempts"][repaired] = kept["tries"][repaired] = 0
    back = to(PROBATION)
    kept["returned_ns"][back] = now_ns
    kept["deadline_ns"][back] = now_ns + round(rules.probation_s * NS)
    kept["repairs"][back] = kept["attempts"][back] = kept["tries"][back] = 0


def save_since_s(view: View, kept: Memory, nodes: I32) -> np.ndarray:
    """From when on a save of each node's job counts [k], unix s: the instant that it is asked for already,
    where that is of late; else from now on, and one that is being written counts."""
    slot = view.jobs.job_of_node[nodes]
    now_s = view.now_ns / NS
    asked = np.full(len(nodes), np.nan)
    held = slot >= 0
    asked[held] = view.commanded(SINCE)[slot[held]]
    fresh = np.floor(now_s - np.minimum(kept["durable_s"][nodes], ASKED_S))
    with np.errstate(invalid="ignore"):
        late = (asked >= now_s - ASKED_S) & (asked <= now_s)
    return np.where(late, asked, fresh)


def _deadlines(view: View, kept: Memory, seen: Look) -> None:
    """Deadlines run from when a phase is in force; what is not asked in earnest yet does not grow old."""
    now_ns = view.now_ns
    saving = seen.at[kept["phase"][seen.at] == SAVING]
    draining = seen.at[kept["phase"][seen.at] == DRAINING]
    level = np.zeros(len(kept["phase"]), np.int8)
    level[seen.at], _ = levels(view, seen.at)
    begins = saving[(level[saving] >= 1) & (kept["deadline_ns"][saving] == 0)]
    wait_s = save_wait_s(kept["durable_s"][begins], kept["next_s"][begins], kept["course"][begins],
                         kept["chance_1h_pu"][begins])  # fmt: skip
    kept["deadline_ns"][begins] = now_ns + np.round(wait_s * NS).astype(np.int64)
    # One that nobody approved until now must be of now
    old = begins[now_ns / NS - kept["save_s"][begins] >= RENEW_S]
    kept["save_s"][old] = save_since_s(view, kept, old)
    begins = draining[(level[draining] >= 1) & (kept["deadline_ns"][draining] == 0)]
    kept["deadline_ns"][begins] = now_ns + round(DRAINING_S * NS)


def _returned(view: View, kept: Memory) -> None:
    """Nodes that are back in service, or whose return nobody answers: no more is said of them."""
    on_way = one_of(kept["phase"], (IN_SERVICE, SUSPECT, PROBATION)) & (kept["withdrawn_ns"] > 0)
    at = np.flatnonzero(on_way).astype(np.int32)
    if not len(at):
        return
    level, known = levels(view, at)
    waited_s = (view.now_ns - kept["entered_ns"][at]) / NS
    done = (level < 1) & (known | (waited_s >= UNREAD_S)) | (waited_s >= RETURN_S)
    back = at[done]
    kept["withdrawn_ns"][back] = kept["reached"][back] = 0
    pairs = kept["pair"][back]
    pairs = pairs[pairs != 0]
    if len(pairs):
        kept["pair"][np.isin(kept["pair"], pairs)] = 0
