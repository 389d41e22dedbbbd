"""A quarter in the life of the made-up fleet, a minute at a time, under one arm's decisions.

Between events nothing happens, so that only the minutes of events, and every tenth, are looked at. The levels
of service that an arm proposes hold until it proposes others; a job on a drained node moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from policies.node_replacement import PLACED_LAST, PLACEMENT
from tests.evaluation.replacement.fleet import DAY_S, GPUS, HOUR_S, Truth
from tests.evaluation.replacement.jobs import SAVE_S, Floor, Tally, arrivals
from tests.evaluation.replacement.nodes import DRAINED, ENDED, MENDED, REPLACE, SAVED, TICK_S, Agenda, Nodes
from tests.evaluation.replacement.view import START_NS, FleetView
from twin.catalogue import NS, Bool
from twin.contracts import Proposal
from twin.site import Site

CALL_S = 600.0  # between two questions at most
WARM_S, QUARTER_S = 28 * DAY_S, 90 * DAY_S  # before anybody acts; then what is scored
SERVICE, SAVE, TEST = "node.service_level", "job.checkpoint_since_s", "node.burn_in_since_s"
DRAINING = 2
NOTICE_S = 600.0  # until a job's collectives give up. source: default of process groups in PyTorch's docs


class Arm(Protocol):
    """Arm of the comparison: a policy or a rival that proposes withdrawals."""

    name: str

    def decide(self, view: FleetView) -> Sequence[Proposal]:
        """Return the proposals of now."""
        ...

    def exchange(self) -> Bool | None:
        """Nodes that it wants to be exchanged, not mended [n]; None for none."""
        ...

    def busy(self) -> bool:
        """Return True if the arm wants to be asked again in a minute."""
        ...


class Outcome(NamedTuple):
    """Of one arm on one seed; `out_gpu_h` is of nodes that no job may use."""

    arm: str
    tally: Tally
    counts: dict[str, int]
    out_gpu_h: float
    node_months: float


class Quarter:
    """The state of it; `run` lives it."""

    def __init__(self, site: Site, truth: Truth, seed: int, rate: float, job_s: float, sure_pu: float,
                 warm_s: float = WARM_S) -> None:  # fmt: skip
        come = arrivals(seed, truth.until_s, truth.n, job_s)
        spare = site.spare_rack[site.rack_of_node]
        self.truth, self.warm_s, self.now_s = truth, warm_s, 0.0
        self.floor = Floor(truth.n, site.sizes["job"], spare, rate, come, START_NS)
        self.view = FleetView(site, self.floor.jobs, sure_pu)
        self.agenda = Agenda()
        self.nodes = Nodes(truth, self.view, self.agenda, self._failed)
        self.arm: Arm | None = None
        self.called_s, self.moved, self.out_gpu_h = -np.inf, True, 0.0
        self._wished = np.zeros(truth.n, np.bool_)
        self._failures = -1

    def run(self, arm: Arm | None) -> Outcome:
        """Live until the end; what comes before the quarter's begin is not counted."""
        self.arm, scored = arm, False
        while self.now_s < self.truth.until_s:
            if not scored and self.now_s >= self.warm_s:
                scored, self.out_gpu_h = True, 0.0
                self.floor.tally = Tally()
                self.nodes.counts = dict.fromkeys(self.nodes.counts, 0)
            self._step()
        months = self.truth.n * (self.truth.until_s - self.warm_s) / (30 * DAY_S)
        name = "reactive" if arm is None else arm.name
        return Outcome(name, self.floor.tally, self.nodes.counts, self.out_gpu_h, months)

    def _step(self) -> None:
        due_s = self.agenda.due_s()
        if self.floor.next < len(self.floor.come.at_s):
            due_s = min(due_s, np.ceil(self.floor.come.at_s[self.floor.next] / TICK_S) * TICK_S)
        if self.arm is not None:
            due_s = min(due_s, max(self._call_s(), self.warm_s))
        if self.now_s < self.warm_s:
            due_s = min(due_s, self.warm_s)
        self._advance(min(max(due_s, self.now_s), self.truth.until_s))
        while self.agenda.due_s() <= self.now_s:
            self._happen(*self.agenda.pop())
        self.floor.arrive(self.now_s)
        self._fill()
        if self.arm is not None and self.now_s >= max(self._call_s(), self.warm_s):
            self._call(self.arm)
            self._fill()

    def _call_s(self) -> float:
        """Return the next time to ask the arm, s."""
        assert self.arm is not None
        soon = self.nodes.changed or self.arm.busy()
        return self.called_s + (TICK_S if soon else CALL_S)

    def _advance(self, to_s: float) -> None:
        """Count what is out of service until then."""
        if to_s > self.now_s:
            out = (self.floor.jobs.job_of_node < 0) & ~self.nodes.service()
            self.out_gpu_h += float(np.count_nonzero(out)) * GPUS * (to_s - self.now_s) / HOUR_S
        self.now_s = self.nodes.now_s = to_s

    def _happen(self, kind: int, what: int, turn: int) -> None:
        if kind == ENDED:
            self.floor.end(what, turn, self.now_s)
        elif kind == SAVED:
            if self.floor.saved(what, turn, self.now_s):
                run = self.floor.runs[what]
                self.agenda.push(run.end_s(), ENDED, what, run.turn)
                self.nodes.changed = True
        else:
            self.nodes.happen(kind, what, turn)

    def _fill(self) -> None:
        for slot in self.floor.fill(self.nodes.service(), self.now_s):
            run = self.floor.runs[slot]
            self.agenda.push(run.end_s(), ENDED, slot, run.turn)
        self.nodes.attend(self.floor.jobs.job_of_node < 0)

    def _failed(self, node: int) -> None:
        """A node is lost to its job."""
        slot = int(self.floor.jobs.job_of_node[node])
        if slot < 0:
            return
        run = self.floor.runs[slot]
        if run.waits_not:
            self.floor.tally.lose("notice", NOTICE_S, run.size)
        self.floor.lose_nodes(slot, np.array([node], np.int32), self.now_s, True)

    def _call(self, arm: Arm) -> None:
        """Ask, and do what it proposes."""
        self.called_s, nodes, view = self.now_s, self.nodes, self.view
        view.level = np.maximum(nodes.level, np.where(nodes.work == MENDED, DRAINED, 0)).astype(np.float32)
        self.floor.tell_saves(self.now_s)
        struck = len(view.rows.node) + len(view.rows.open)
        view.refresh(nodes.now_ns(), struck != self._failures)
        self._failures = struck
        nodes.changed = False
        nodes.counts["calls"] += 1
        proposals = arm.decide(view)
        wished = arm.exchange()
        if wished is not None:
            nodes.wish |= wished & ~self._wished
            self._wished = wished.copy()
        for p in proposals:
            value = np.where(np.isfinite(p.want), p.want, p.lo)
            if p.control == SERVICE:
                self._serve(p.index, value.astype(np.int8))
            elif p.control == TEST:
                nodes.test_since_s[p.index] = value - START_NS / NS
            elif p.control == PLACEMENT:
                view.placement[p.index] = value
                self.floor.last = view.placement == PLACED_LAST
            elif p.control == SAVE:
                self._save(p.index, value - START_NS / NS)

    def _serve(self, index: np.ndarray, level: np.ndarray) -> None:
        """Levels of service: what leaves is counted, jobs on drained nodes move."""
        nodes, before = self.nodes, self.nodes.level[index]
        if (before == level).all():
            return
        nodes.level[index] = level
        for node in index[(before < DRAINING) & (level >= DRAINING)].tolist():
            if nodes.work[node] != MENDED:
                nodes.counts["withdrawals"] += 1
                nodes.counts["false"] += not nodes.would_fail(node)
        nodes.visited[index[level < REPLACE]] = False
        leaves = index[level >= DRAINED]
        slots = self.floor.jobs.job_of_node[leaves]
        for slot in np.unique(slots[slots >= 0]).tolist():
            self.floor.lose_nodes(slot, leaves[slots == slot].astype(np.int32), self.now_s, False)
        nodes.changed = True

    def _save(self, slots: np.ndarray, since_s: np.ndarray) -> None:
        """Jobs that shall have saved since then begin to, unless they have."""
        for slot, asked_s in zip(slots.tolist(), since_s.tolist(), strict=True):
            run = self.floor.runs.get(slot)
            if run is None or asked_s > self.now_s or run.last_save_s(self.now_s) >= asked_s:
                continue
            if self.floor.save(slot, self.now_s):
                self.agenda.push(self.now_s + SAVE_S, SAVED, slot, run.turn)
