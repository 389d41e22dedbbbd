"""Withdrawals on a recorded log of faults: what each rule would have taken out, and what then came.

Every hour of the log from a day on, by what was known then: the faults so far and open repairs, nothing else,
as a log has no telemetry. Jobs are synthetic. A withdrawal is right if a fault of that node follows within a
week; a fault that begins while its node is out met nobody's work. What an exchange would have changed nobody
knows: the log goes on as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from models.failure import FaultLog
from tests.evaluation.replacement.fleet import DAY_S, HOUR_S
from tests.evaluation.replacement.quarter import SERVICE, TEST, Arm
from tests.evaluation.replacement.rivals import Counted, Ours
from tests.evaluation.replacement.view import START_NS, FleetView, plain_site
from twin.catalogue import I64, NS, Bool
from twin.contracts import FAILED_TEST, PASSED
from twin.telemetry import JobEnded, JobSlots, JobStarted

STEP_S = HOUR_S
TEST_S, REPAIR_S, EXCHANGE_S = 4 * HOUR_S, 32.9 * HOUR_S, 5 * DAY_S  # source: as in the simulated quarter
JOB_NODES, JOB_S, SAVE_EVERY_S = 25, 12 * HOUR_S, 1800.0  # of the synthetic jobs. source: estimate
RIGHT_D = 7.0
DRAINED, REPLACE = 3, 4


class Replayed:
    """One rule through the log."""

    def __init__(self, log: FaultLog, from_d: float, make: Callable[[FleetView], Arm]) -> None:
        self.log, self.from_d = log, from_d
        site = plain_site(log.n)
        self.jobs = JobSlots(site.sizes["job"], log.n)
        self.jobs.known = True
        self.view = FleetView(
            site, self.jobs, begin_ns=START_NS + round(log.begin_d * DAY_S) * NS, dt_s=STEP_S
        )
        self.arm = make(self.view)
        n = log.n
        self.level = np.zeros(n, np.int8)
        self.until_ns: I64 = np.zeros(n, np.int64)  # people or tests are at it
        self.test: Bool = np.zeros(n, np.bool_)
        self.visited: Bool = np.zeros(n, np.bool_)
        self.swapped: Bool = np.zeros(n, np.bool_)
        self.test_since_s = np.full(n, -1.0)
        self.began_s = np.full(n, -1.0)
        self.count = 0
        self.withdrawn: list[tuple[int, float]] = []
        self.met = 0
        self.out_d = 0.0
        self._starts, self._ends = 0, np.argsort(log.end_d, kind="stable")
        self._ended = 0

    def run(self, progress: Callable[[float], None] = lambda _: None) -> Replayed:
        """Through all of it; until `from_d` nobody acts."""
        first, last = self.log.begin_d, self.log.until_d
        for hour in range(int((last - first) * DAY_S / STEP_S) + 1):
            day = first + hour * STEP_S / DAY_S
            struck = self._happen(day)
            self.view.now_ns = now_ns = START_NS + round(day * DAY_S) * NS
            if day < self.from_d:
                continue
            self._people(now_ns)
            self._work(hour, now_ns)
            self.view.level = np.maximum(self.level, np.where(self.view.down, DRAINED, 0)).astype(np.float32)
            self.view.refresh(now_ns, struck)
            self._do(day)
            self.out_d += float(np.count_nonzero((self.level > 0) & ~self.view.down)) * STEP_S / DAY_S
            progress((day - first) / (last - first))
        return self

    def _happen(self, day: float) -> bool:
        """Read the log up to this day. Return True if it held a new line."""
        log, struck = self.log, False
        while self._ended < log.k and log.end_d[self._ends[self._ended]] <= day:
            # A fault that began and ended within this hour must begin first
            self._strike_until(float(log.start_d[self._ends[self._ended]]), day)
            fault = int(self._ends[self._ended])
            node, end_ns = int(log.node[fault]), START_NS + round(log.end_d[fault] * DAY_S) * NS
            self.view.rows.end(node, end_ns)
            self.view.down[node] = False
            self.visited[node] = self.level[node] >= REPLACE  # people have just been there
            self.view.ns["repaired"][node] = end_ns
            self._ended += 1
            struck = True
        return self._strike_until(day, day) or struck

    def _strike_until(self, start_d: float, day: float) -> bool:
        log, struck = self.log, False
        while self._starts < log.k and log.start_d[self._starts] <= start_d:
            node, at_d = int(log.node[self._starts]), float(log.start_d[self._starts])
            at_ns = START_NS + round(at_d * DAY_S) * NS
            self.view.rows.begin(node, at_ns)
            self.view.down[node], self.view.since_ns[node] = True, at_ns
            if at_d >= self.from_d:
                self.met += int(self.level[node] >= DRAINED)
            if self.test[node] and self.until_ns[node] > at_ns:
                self._tell(node, FAILED_TEST, at_ns)
            self.until_ns[node] = 0
            self._starts += 1
            struck = True
        return struck

    def _tell(self, node: int, result: int, at_ns: int) -> None:
        self.test[node] = False
        self.view.result[node] = result
        self.view.ns["began"][node] = START_NS + round(self.began_s[node] * NS)
        self.view.ns["ended"][node] = at_ns

    def _people(self, now_ns: int) -> None:
        """Visits and tests end and begin."""
        view = self.view
        for node in np.flatnonzero((self.until_ns > 0) & (self.until_ns <= now_ns)).tolist():
            if self.test[node]:
                self._tell(node, PASSED, int(self.until_ns[node]))
            else:
                view.ns["repaired"][node] = self.until_ns[node]
                if self.swapped[node]:
                    view.ns["replaced"][node] = self.until_ns[node]
                self.swapped[node] = False
            self.until_ns[node] = 0
        free = (self.jobs.job_of_node < 0) & ~view.down & (self.until_ns == 0)
        wished = self.arm.exchange()
        for node in np.flatnonzero(free & (self.level >= REPLACE) & ~self.visited).tolist():
            self.visited[node] = True
            swap = wished is not None and bool(wished[node])
            self.swapped[node] = swap
            self.until_ns[node] = now_ns + round((EXCHANGE_S if swap else REPAIR_S) * NS)
        now_s = (now_ns - START_NS) / NS
        due = free & (self.until_ns == 0) & (self.level > 0) & (self.test_since_s > self.began_s)
        for node in np.flatnonzero(due & (self.test_since_s <= now_s)).tolist():
            self.test[node], self.began_s[node] = True, now_s
            self.until_ns[node] = now_ns + round(TEST_S * NS)

    def _work(self, hour: int, now_ns: int) -> None:
        """Jobs of twelve hours on the nodes that are in service; one that is down or drained ends its job."""
        leaves = (self.jobs.job_of_node >= 0) & (self.view.down | (self.level >= DRAINED))
        slots = set(np.unique(self.jobs.job_of_node[leaves]).tolist())
        if hour % round(JOB_S / STEP_S) == 0:
            slots = set(np.flatnonzero(self.jobs.alive).tolist())
        for slot in slots:
            self.jobs.end(JobEnded(job=self.jobs.names[slot], reason="completed"), now_ns)
        usable = (self.jobs.job_of_node < 0) & ~self.view.down & (self.level == 0) & (self.until_ns == 0)
        free = np.flatnonzero(usable)
        for first in range(0, len(free), JOB_NODES):
            self.count += 1
            told = JobStarted(job=f"job{self.count}", nodes=(), kind="training", time_limit_s=JOB_S,
                              checkpoint_interval_s=SAVE_EVERY_S, checkpoint_save_s=60.0,
                              checkpoint_restart_s=600.0)  # fmt: skip
            self.jobs.start(told, free[first : first + JOB_NODES].tolist(), 0, now_ns)
        alive = self.jobs.alive
        self.jobs.saved_ns[alive] = now_ns - round(SAVE_EVERY_S / 2) * NS
        self.jobs.checkpoint_told_ns[alive] = now_ns

    def _do(self, day: float) -> None:
        """Apply the rule's proposals, which hold from now on."""
        for p in self.arm.decide(self.view):
            value = np.where(np.isfinite(p.want), p.want, p.lo)
            if p.control == TEST:
                self.test_since_s[p.index] = value - START_NS / NS
            elif p.control == SERVICE:
                level, before = value.astype(np.int8), self.level[p.index]
                for node in p.index[(before == 0) & (level > 0)].tolist():
                    if not self.view.down[node]:
                        self.withdrawn.append((node, day))
                self.level[p.index] = level
        self.visited[self.level < REPLACE] = False


def replay(
    log: FaultLog, from_d: float, progress: Callable[[float], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Every rule through the log from this day on: what it withdrew and how right that was."""
    rules: Sequence[tuple[str, Callable[[FleetView], Arm]]] = (
        ("replacement", Ours),
        ("decayed_count", Counted),
    )
    out = [scored(log, from_d, "reactive", [], 0, 0.0)]
    for i, (name, make) in enumerate(rules):
        found = Replayed(log, from_d, make).run(partial(_tell_part, progress, i, len(rules)))
        out.append(scored(log, from_d, name, found.withdrawn, found.met, found.out_d))
    return out


def _tell_part(progress: Callable[[float], None], part: int, parts: int, share: float) -> None:
    progress((part + share) / parts)


def scored(log: FaultLog, from_d: float, rule: str, withdrawn: Sequence[tuple[int, float]], met: int,
           out_d: float) -> dict[str, Any]:  # fmt: skip
    """Precision of withdrawals a week before the log's end or earlier, beside all nodes; recall of faults."""
    judged = [(node, day) for node, day in withdrawn if day <= log.until_d - RIGHT_D]
    right = sum(_fails(log, node, day) for node, day in judged)
    late = log.start_d > from_d
    foreseen = 0
    for node, start_d in zip(log.node[late].tolist(), log.start_d[late].tolist(), strict=True):
        foreseen += any(n == node and start_d - RIGHT_D <= day < start_d for n, day in withdrawn)
    days = np.arange(np.ceil(from_d), log.until_d - RIGHT_D + 1e-9)
    up = log.up(days)
    soon = log.next_start(days) <= days[:, None] + RIGHT_D
    return {
        "rule": rule, "withdrawn": len(withdrawn), "judged": len(judged),
        "precision": right / len(judged) if judged else float("nan"),
        "base_precision": float((soon & up).sum() / max(up.sum(), 1)),
        "faults": int(late.sum()), "recall": foreseen / max(int(late.sum()), 1), "avoided": met,
        "node_days_out": out_d,
    }  # fmt: skip


def _fails(log: FaultLog, node: int, day: float) -> bool:
    start_d = log.start_d[log.node == node]
    return bool(((start_d > day) & (start_d <= day + RIGHT_D)).any())
