"""Arms of the comparison on the made-up fleet: the policy itself, and its rivals.

Beside `policies.node_replacement.policy`, which is asked as the daemon asks it: nobody acts (reactive);
the same, but every node that was mended is tested before it works again; nodes that failed often of late
are exchanged (decayed count); and an oracle that knows every fault to come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.failure import decayed_counts, failure_history
from policies.node_replacement import PHASES, Replacement
from tests.evaluation.replacement.nodes import MENDED, Nodes
from tests.evaluation.replacement.quarter import SAVE, SERVICE, TEST
from tests.evaluation.replacement.view import FleetView
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Memory, Proposal
from twin.engine import fresh_memory

RMA = PHASES.index("rma")
SUSPECT, MOVING = PHASES.index("suspect"), tuple(PHASES.index(p) for p in ("saving", "draining"))
FRESH_S = 300.0  # a suspect is looked at every minute for so long. source: estimate
# Faults of a node, each of which counts half as much every 30 days, from which on it is exchanged: the third
# within a month or so. source: estimate
THRESHOLD = 2.0
AT_ONCE_PU = 0.02  # of the nodes are exchanged at once. source: estimate
CORDONED, DRAINING, DRAINED, REPLACE = 1.0, 2.0, 3.0, 4.0


def at(control: str, index: np.ndarray, value: F64 | float, reason: str) -> list[Proposal]:
    """A proposal of exactly this, or none."""
    if not len(index):
        return []
    index = index.astype(np.int32)
    want = np.broadcast_to(np.asarray(value, np.float64), index.shape).copy()
    return [Proposal(control, index, want, want, want, reason)]


class Ours:
    """The policy, with its memory, as the engine asks it; `place_last`: the scheduler takes its order."""

    def __init__(self, view: FleetView, place_last: bool = True) -> None:
        self.name = "replacement" if place_last else "replacement_unplaced"
        self.policy = Replacement(burn_in=True, place_last=place_last)
        self.memory: Memory = fresh_memory(self.policy, view.site)
        self.now_ns = view.now_ns

    def decide(self, view: FleetView) -> Sequence[Proposal]:
        """Return the policy's proposals, with its memory of last time."""
        self.now_ns = view.now_ns
        proposals, self.memory = self.policy.propose(view, self.memory)
        return proposals

    def exchange(self) -> Bool | None:
        """Nodes that it recommends to send back."""
        out: Bool = self.memory["phase"] == RMA
        return out

    def busy(self) -> bool:
        """While a node is on its way out, or has just become suspect."""
        phase = self.memory["phase"]
        fresh = (phase == SUSPECT) & (self.now_ns - self.memory["entered_ns"] <= round(FRESH_S * NS))
        return bool(fresh.any() or (phase == MOVING[0]).any() or (phase == MOVING[1]).any())


class AfterTest:
    """Reactive, but a node that was mended is tested before it works again."""

    name = "reactive_tested"

    def __init__(self, view: FleetView) -> None:
        n = view.site.sizes["node"]
        self.held: Bool = np.zeros(n, np.bool_)
        self.since_ns: I64 = np.zeros(n, np.int64)

    def decide(self, view: FleetView) -> Sequence[Proposal]:
        """Hold what failed until it was mended and tested; a failed test is followed by another repair."""
        fell = view.down & ~self.held
        self.held |= fell
        self.since_ns[fell] = view.now_ns
        book = view.service()
        mended = self.held & ~view.down & (book.repaired_ns >= self.since_ns)
        tested = mended & (book.ended_ns >= book.repaired_ns) & (book.began_ns > 0) & (book.result != 0)
        self.held &= ~tested
        waits = np.flatnonzero(mended & ~tested)
        # After a test without a result, and after each repair, it is tested anew
        since = (
            np.maximum(book.repaired_ns[waits], np.where(book.result[waits] == -1, book.ended_ns[waits], 0))
            / NS
        )
        return [
            *at(SERVICE, np.flatnonzero(tested), 0.0, "tested"),
            *at(SERVICE, np.flatnonzero(self.held), DRAINING, "waits for a test"),
            *at(TEST, waits, since, "test it"),
        ]

    def exchange(self) -> Bool | None:
        """None."""
        return None

    def busy(self) -> bool:
        """Never."""
        return False


class Counted:
    """Nodes whose faults of late count to a threshold are exchanged when their job ends."""

    name = "decayed_count"

    def __init__(self, view: FleetView, threshold: float = THRESHOLD) -> None:
        n = view.site.sizes["node"]
        self.threshold, self.most = threshold, max(1, round(AT_ONCE_PU * n))
        self.out: Bool = np.zeros(n, np.bool_)
        self.since_ns: I64 = np.zeros(n, np.int64)

    def decide(self, view: FleetView) -> Sequence[Proposal]:
        """Cordon, exchange once idle, back after that."""
        past = failure_history(view.failures(), len(self.out), view.now_ns)
        score = decayed_counts(past.own, past.now_d)
        back = self.out & ~view.down & (view.service().repaired_ns > self.since_ns)
        self.out &= ~back
        wanted = np.flatnonzero((score >= self.threshold) & ~self.out & ~view.down)
        wanted = wanted[np.argsort(-score[wanted], kind="stable")][: max(self.most - int(self.out.sum()), 0)]
        self.out[wanted] = True
        self.since_ns[wanted] = view.now_ns
        busy = view.jobs.job_of_node >= 0
        return [
            *at(SERVICE, np.flatnonzero(back), 0.0, "exchanged"),
            *at(SERVICE, np.flatnonzero(self.out & busy), CORDONED, "fails often; when its job ends"),
            *at(SERVICE, np.flatnonzero(self.out & ~busy), REPLACE, "fails often"),
        ]

    def exchange(self) -> Bool | None:
        """All that it takes out."""
        return self.out.copy()

    def busy(self) -> bool:
        """Never."""
        return False


class Oracle:
    """Knows every fault: a job saves three minutes before and moves one minute before; lemons go first."""

    name = "oracle"
    AHEAD_S, LEAVE_S, IDLE_S, NEAR_S = 180.0, 60.0, 3600.0, 900.0

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.place = nodes.first[:-1].copy()
        self.next_s: F64 = np.full(len(self.place), -1.0)
        self.moved: Bool = np.zeros(len(self.place), np.bool_)
        self.lemon = nodes.lemon.copy()
        self.near = False

    def _next(self) -> F64:
        """Return the time of each node's next failure, as things stand [n], s."""
        nodes, truth = self.nodes, self.nodes.truth
        for node in np.flatnonzero(self.next_s <= nodes.now_s).tolist():
            k, last = int(self.place[node]), int(nodes.first[node + 1])
            while k < last and (
                truth.start_s[nodes.order[k]] <= nodes.now_s
                or nodes.gone[nodes.order[k]]
                or (truth.extra[nodes.order[k]] and not nodes.lemon[node])
            ):
                k += 1
            self.place[node] = k
            self.next_s[node] = truth.start_s[nodes.order[k]] if k < last else np.inf
        return np.minimum(self.next_s, nodes.link_s)

    def decide(self, view: FleetView) -> Sequence[Proposal]:
        """Saves and moves just before what comes; idle nodes get no job in their last hour."""
        nodes, now_s = self.nodes, self.nodes.now_s
        next_s = self._next()
        left_s = np.ceil(next_s / 60.0) * 60.0 - now_s
        self.near = bool((left_s <= self.NEAR_S).any())
        busy = view.jobs.job_of_node >= 0
        here = nodes.work != MENDED
        done = self.lemon & ~nodes.lemon & (nodes.work == 0)
        self.lemon &= ~done
        # The faults that were due at the old node will not come to the new one
        self.place[done], self.next_s[done] = nodes.first[:-1][done], -1.0
        goes = self.lemon & here & (nodes.work == 0)
        leave = here & busy & (left_s <= self.LEAVE_S) & (left_s > 0)
        over = (self.moved & ~here) | done
        self.moved &= ~over
        self.moved |= leave
        idle = here & ~busy & (left_s <= self.IDLE_S) & (left_s > 0) & ~self.moved & ~goes
        self.moved |= idle
        slots = np.unique(
            view.jobs.job_of_node[here & busy & (left_s <= self.AHEAD_S) & (left_s > self.LEAVE_S)]
        )
        at_s = np.full(len(slots), view.now_ns / NS - self.AHEAD_S)
        return [
            *at(SAVE, slots, at_s, "save"),
            *at(SERVICE, np.flatnonzero(over), 0.0, "over"),
            *at(SERVICE, np.flatnonzero(goes & busy & ~leave), CORDONED, "a lemon"),
            *at(SERVICE, np.flatnonzero(goes & ~busy), REPLACE, "a lemon"),
            *at(SERVICE, np.flatnonzero(idle), CORDONED, "no job for it"),
            *at(SERVICE, np.flatnonzero(leave), DRAINED, "it fails in a minute"),
        ]

    def exchange(self) -> Bool | None:
        """The lemons."""
        return self.lemon.copy()

    def busy(self) -> bool:
        """Return True if a failure comes soon."""
        return self.near
