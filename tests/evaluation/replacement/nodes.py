"""Life of each node of the made-up fleet: faults strike, warnings show, people mend and test.

Faults come as they were drawn, whoever decides; one that meets a node in the hands of people is lost. A
repair may leave a defect, which runs on while the node runs, in a test too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from tests.evaluation.replacement.fleet import DAY_S, FALSE_S, HOUR_S, Truth
from tests.evaluation.replacement.view import START_NS, FleetView
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import FAILED_TEST, NO_RESULT, PASSED

TICK_S = 60.0
DRAINED, REPLACE = 3, 4
TEST_S, SENSITIVITY = 4 * HOUR_S, 0.5  # of a burn-in; it finds so many of the defects. source: estimate
FOUND_PU = 0.9  # of the defects that a warning names, people find. source: estimate
LEMON_SHOWS_PU = 0.25  # of the tests of a lemon fail. source: estimate
NO_RESULT_PU = 0.02  # of the tests end without one. source: estimate
NOTHING_S = 8 * HOUR_S  # until people have found nothing; their way included. source: estimate
EXCHANGE_S = 5 * DAY_S  # until another node stands there. source: estimate
RIGHT_S = 7 * DAY_S  # a drain was right if the node would have failed so soon. source: as in health

FAULT, LINK, SHOW, SHOW_LINK, FALSE, FALSE_OVER, BACK, TESTED, ENDED, SAVED = range(10)
SITE_IN, MENDED, VISITED, TESTING = range(4)  # what people do at a node
COUNTS = ("failures", "withdrawals", "false", "tests", "exchanges", "calls")


class Agenda:
    """Queue of coming events, at whole minutes, in order; within a minute in the order of their entry."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.pushed = 0

    def push(self, at_s: float, kind: int, what: int, turn: int) -> None:
        """Something that comes at the next whole minute; never, if `at_s` is inf."""
        if np.isfinite(at_s):
            self.pushed += 1
            heapq.heappush(self.heap, (float(np.ceil(at_s / TICK_S)) * TICK_S, self.pushed, kind, what, turn))

    def due_s(self) -> float:
        """Return the time of the next event, s; inf if there is none."""
        return self.heap[0][0] if self.heap else np.inf

    def pop(self) -> tuple[int, int, int]:
        """(kind, what, turn) of the next one."""
        return heapq.heappop(self.heap)[2:]


class Nodes:
    """The state of all nodes [n]. `take(node)` is called where a job loses a node that fails."""

    def __init__(self, truth: Truth, view: FleetView, agenda: Agenda, take: Callable[[int], None]) -> None:
        n = truth.n
        self.truth, self.view, self.agenda, self.take = truth, view, agenda, take
        self.now_s = 0.0
        self.work = np.zeros(n, np.int8)  # SITE_IN, ...
        self.level = np.zeros(n, np.int8)  # of service, as commanded
        self.link_s: F64 = np.full(n, np.inf)  # when the defect that a repair left will fail
        self.link: list[tuple[int, int]] = [(-1, 0)] * n  # its place in the truth
        self.turn: I64 = np.zeros(n, np.int64)  # what was foretold of an earlier turn is void
        self.told: list[tuple[int, int]] = [(-1, 0)] * n  # of what a warning tells
        self.false_until_s: F64 = np.zeros(n)
        self.gone: Bool = np.zeros(len(truth.node), np.bool_)  # mended before it failed
        self.lemon: Bool = truth.lemon.copy()
        self.visited: Bool = np.zeros(n, np.bool_)
        self.wish: Bool = np.zeros(n, np.bool_)  # to be exchanged
        self.swapped: Bool = np.zeros(n, np.bool_)  # another one is on its way
        self.test_since_s: F64 = np.full(n, -1.0)
        self.test_began_s: F64 = np.full(n, -1.0)
        self.tests: I64 = np.zeros(n, np.int64)
        self.changed = True
        self.counts = dict.fromkeys(COUNTS, 0)
        self.order = np.argsort(truth.node, kind="stable")  # faults by node, then by time
        self.first = np.searchsorted(truth.node[self.order], np.arange(n + 1))
        for k in range(len(truth.node)):
            agenda.push(truth.start_s[k], FAULT, k, 0)
            if truth.told[k, 0]:
                agenda.push(max(truth.start_s[k] - truth.lead_s[k, 0], 0.0), SHOW, k, 0)
        for k in range(len(truth.false_s)):
            agenda.push(truth.false_s[k], FALSE, int(truth.false_node[k]), 0)

    def now_ns(self) -> int:
        """By the fleet's clock."""
        return START_NS + round(self.now_s * NS)

    def service(self) -> Bool:
        """Nodes that the scheduler may use [n]."""
        out: Bool = (self.work == SITE_IN) & (self.level == 0)
        return out

    def happen(self, kind: int, what: int, turn: int) -> None:
        """One thing of the agenda."""
        truth = self.truth
        if kind in (FAULT, SHOW):
            node = int(truth.node[what])
            if self.gone[what] or (truth.extra[what] and not self.lemon[node]):
                return
            if kind == FAULT:
                self.strike(node, what, 0)
            elif self.work[node] in (SITE_IN, TESTING):
                self._show(node, what, 0)
        elif kind == FALSE:
            if self.work[what] == SITE_IN and not self.view.told[what]:
                self.false_until_s[what] = self.now_s + FALSE_S
                self._tell(what)
                self.agenda.push(self.now_s + FALSE_S, FALSE_OVER, what, 0)
        elif kind == FALSE_OVER:
            self._tell(what)
        elif self.turn[what] != turn:
            return
        elif kind == LINK:
            self.strike(what, *self.link[what])
        elif kind == SHOW_LINK:
            self._show(what, *self.link[what])
        elif kind == BACK:
            self._back(what)
        elif kind == TESTED:
            self._tested(what)

    def _show(self, node: int, fault: int, link: int) -> None:
        self.told[node] = (fault, link)
        self._tell(node)

    def _tell(self, node: int) -> None:
        """The verdict on a node, by what is wrong with it."""
        told = self.told[node][0] >= 0 or self.now_s < self.false_until_s[node]
        if told != self.view.told[node]:
            self.view.told[node] = told
            self.view.since_ns[node] = self.now_ns()
            self.changed = True

    def _quiet(self, node: int) -> None:
        self.told[node] = (-1, 0)
        self.false_until_s[node] = 0.0
        self._tell(node)

    def strike(self, node: int, fault: int, link: int) -> None:
        """A fault comes true, unless people have the node in their hands."""
        if self.work[node] in (MENDED, VISITED):
            return
        if self.work[node] == TESTING:
            self._write(node, FAILED_TEST)
        self.counts["failures"] += 1
        self.take(node)
        self._mend(node, fault, link, MENDED)
        self.view.rows.begin(node, self.now_ns())
        self.view.down[node] = True
        self.view.since_ns[node] = self.now_ns()

    def _mend(self, node: int, fault: int, link: int, work: int) -> None:
        """People mend it; what they leave undone fails so long after the return."""
        truth = self.truth
        self._quiet(node)
        self.turn[node] += 1
        self.work[node] = work
        self.link_s[node] = np.inf
        self.link[node] = (fault, link + 1) if truth.again[fault, link] else (-1, 0)
        took_s = self._exchange(node) if self.wish[node] else float(truth.repair_s[fault, link])
        self.agenda.push(self.now_s + took_s, BACK, node, int(self.turn[node]))
        self.changed = True

    def _exchange(self, node: int) -> float:
        self.link[node], self.link_s[node] = (-1, 0), np.inf
        self.lemon[node] = self.wish[node] = False
        self.swapped[node] = True
        self.counts["exchanges"] += 1
        return EXCHANGE_S

    def _back(self, node: int) -> None:
        """People are done with it."""
        self.work[node] = SITE_IN
        self.view.down[node] = False
        self.view.rows.end(node, self.now_ns())
        self.view.ns["repaired"][node] = self.now_ns()
        self.visited[node] = self.level[node] >= REPLACE  # they have just been there
        if self.swapped[node]:
            self.swapped[node] = False
            self.view.ns["replaced"][node] = self.now_ns()
            self.view.rows.forget(node)
        self.turn[node] += 1
        self.changed = True
        fault, link = self.link[node]
        if fault < 0:
            return
        if not np.isfinite(self.link_s[node]):
            self.link_s[node] = self.now_s + self.truth.delay_s[fault, link - 1]
        at_s, turn = float(self.link_s[node]), int(self.turn[node])
        self.agenda.push(at_s, LINK, node, turn)
        if self.truth.told[fault, link]:
            self.agenda.push(max(at_s - self.truth.lead_s[fault, link], self.now_s), SHOW_LINK, node, turn)

    def attend(self, idle: Bool) -> None:
        """People come, once, to idle nodes that they shall repair or exchange; they test what shall be.

        `idle` [n]: nodes without a job.
        """
        ready = idle & (self.work == SITE_IN)
        for node in np.flatnonzero(ready & (self.level >= REPLACE) & (~self.visited | self.wish)).tolist():
            self._visit(node)
        due = idle & (self.work == SITE_IN) & (self.level > 0) & (self.test_since_s <= self.now_s)
        for node in np.flatnonzero(due & (self.test_since_s > self.test_began_s)).tolist():
            self.work[node] = TESTING
            self.test_began_s[node] = self.now_s
            self.counts["tests"] += 1
            self.agenda.push(self.now_s + TEST_S, TESTED, node, int(self.turn[node]))

    def _visit(self, node: int) -> None:
        self.visited[node] = True
        found = self.defect(node)
        if found is not None:
            fault, link, named = found
            if self.truth.chance[fault, link] < (FOUND_PU if named else SENSITIVITY):
                self._cure(node, fault, link)
                return
        self._look(node)

    def _cure(self, node: int, fault: int, link: int) -> None:
        """The defect is found before it failed."""
        if link == 0:
            self.gone[fault] = True
        self._mend(node, fault, link, VISITED)

    def _look(self, node: int) -> None:
        """People look and find nothing; a defect stands still meanwhile."""
        self._quiet(node)
        self.turn[node] += 1
        self.work[node] = VISITED
        took_s = self._exchange(node) if self.wish[node] else NOTHING_S
        self.link_s[node] += took_s
        self.agenda.push(self.now_s + took_s, BACK, node, int(self.turn[node]))
        self.changed = True

    def defect(self, node: int) -> tuple[int, int, bool] | None:
        """Return the defect of a node that still works: (fault, link, whether a warning names it)."""
        if self.told[node][0] >= 0:
            return *self.told[node], True
        if np.isfinite(self.link_s[node]):
            return *self.link[node], False
        for fault in self.coming(node, RIGHT_S):
            begins_s = self.truth.start_s[fault] - self.truth.lead_s[fault, 0]
            if self.truth.shows[fault, 0] and begins_s <= self.now_s:
                return fault, 0, False
        return None

    def coming(self, node: int, within_s: float) -> list[int]:
        """First faults of chains that this node will have so soon, if nobody does anything."""
        faults = self.order[self.first[node] : self.first[node + 1]]
        start_s = self.truth.start_s[faults]
        soon = (start_s > self.now_s) & (start_s <= self.now_s + within_s) & ~self.gone[faults]
        return [int(k) for k in faults[soon] if self.lemon[node] or not self.truth.extra[k]]

    def would_fail(self, node: int) -> bool:
        """Return True if a drain now is right: the node fails soon, or is a lemon."""
        soon = bool(self.link_s[node] <= self.now_s + RIGHT_S) or self.told[node][0] >= 0
        return soon or bool(self.lemon[node]) or bool(self.coming(node, RIGHT_S))

    def _tested(self, node: int) -> None:
        self.work[node] = SITE_IN
        chance = self.truth.test_chance[node, int(self.tests[node]) % self.truth.test_chance.shape[1]]
        self.tests[node] += 1
        self.changed = True
        if chance > 1.0 - NO_RESULT_PU:
            self._write(node, NO_RESULT)
            return
        found = self.defect(node)
        # Another number of the same fault: what people overlooked, a test may find
        if found is not None and (self.truth.chance[found[0], found[1]] * 977.0) % 1.0 < SENSITIVITY:
            self._write(node, FAILED_TEST)
            self._cure(node, found[0], found[1])
        elif self.lemon[node] and chance < LEMON_SHOWS_PU:
            self._write(node, FAILED_TEST)
            self._look(node)
        else:
            self._write(node, PASSED)

    def _write(self, node: int, result: int) -> None:
        """Into the service book."""
        self.view.result[node] = result
        self.view.ns["began"][node] = START_NS + round(self.test_began_s[node] * NS)
        self.view.ns["ended"][node] = self.now_ns()
        self.changed = True
