"""The jobs of the made-up fleet: a queue, who runs where, what is saved, and what an interruption costs.

Jobs arrive alike whoever decides. A job trains in step on all of its nodes, saves at Young's interval, and
starts again from its last durable save when a node is lost or leaves, on a spare or another free node; it
waits with the nodes it has if there is none. Simulated.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from policies.checkpointing import young_s
from tests.evaluation.replacement.fleet import DAY_S, GPUS, HOUR_S
from twin.catalogue import F64, I32, I64, NS, Bool
from twin.telemetry import JobEnded, JobSlots, JobStarted

SAVE_S, RESTART_S = 60.0, 600.0  # source: domain.md D, as in the tables of checkpoints
SIZES = 2 ** np.arange(10)  # nodes: 8 to 4096 GPUs
POWER = 0.7  # each doubling is 2 ** -POWER as frequent. source: estimate
SPREAD, MOST_S = 1.3, 7 * DAY_S  # of the log of a job's work; the longest. source: estimate
FILL_PU = 0.85  # of the fleet's nodes are asked for on average
LIMIT = 1.5  # the time limit that users ask for, over the work. source: estimate
BACKFILL = 128  # jobs behind the first that may pass it. source: estimate
LARGE = 64  # nodes of jobs of 512 GPUs


class Arrivals(NamedTuple):
    """Jobs to come [k], in order of `at_s`: nodes, seconds of work, and where the search for nodes begins."""

    at_s: F64
    size: I64
    work_s: F64
    offset: F64


def arrivals(seed: int, until_s: float, n: int, job_s: float) -> Arrivals:
    """Jobs that ask for FILL_PU of `n` nodes on average; none is larger than half of them."""
    rng = np.random.default_rng([seed, 78])
    sizes = SIZES[n // 2 >= SIZES]
    share = sizes**-POWER
    share = share / share.sum()
    draw_s = np.minimum(job_s * np.exp(SPREAD * rng.standard_normal(100_000)), MOST_S)
    rate = FILL_PU * n / float((sizes * share).sum()) / float(draw_s.mean())
    count = int(rng.poisson(rate * until_s))
    work_s = np.maximum(rng.choice(draw_s, count), 60.0)
    at_s = np.sort(rng.uniform(0.0, until_s, count))
    return Arrivals(at_s, rng.choice(sizes, count, p=share), work_s, rng.random(count))


@dataclass(slots=True)
class Run:
    """A job that has nodes. `done_s` is durable work; it trains since `since_s`, inf while it waits."""

    job: int
    size: int
    need_s: float
    interval_s: float
    nodes: I32
    done_s: float = 0.0
    since_s: float = float("inf")
    wait_s: float = float("inf")  # since when nodes are missing
    saved_s: float = 0.0  # when the last durable save began, before this stretch
    asked_s: float = -1.0  # when the save began that was asked for, while it runs
    kept_s: float = 0.0  # durable work once that save is
    turn: int = 0  # what was foretold of an earlier turn is void
    failures: int = 0
    moves: int = 0

    def useful_s(self, now_s: float) -> tuple[float, float]:
        """(work in this stretch, of it durable)."""
        spent = max(now_s - self.since_s, 0.0) if np.isfinite(self.since_s) else 0.0
        whole, rest = divmod(spent, self.interval_s + SAVE_S)
        return whole * self.interval_s + min(rest, self.interval_s), whole * self.interval_s

    def end_s(self) -> float:
        """Return the end of the job's work, s, if nothing happens."""
        left = max(self.need_s - self.done_s, 0.0)
        return self.since_s + left + SAVE_S * max(math.ceil(left / self.interval_s) - 1, 0)

    def last_save_s(self, now_s: float) -> float:
        """Return the begin of the newest durable save that the job has, s."""
        whole = int(max(now_s - self.since_s, 0.0) // (self.interval_s + SAVE_S)) if self.waits_not else 0
        return self.since_s + whole * (self.interval_s + SAVE_S) - SAVE_S if whole else self.saved_s

    @property
    def waits_not(self) -> bool:
        """True if the job has all its nodes."""
        return bool(np.isfinite(self.since_s))


@dataclass(slots=True)
class Tally:
    """GPU-hours and counts since `begin`; `runs` are of jobs of 512 GPUs and more that ended."""

    interruptions: int = 0
    moves: int = 0
    lost: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("work", "notice", "restart", "waiting", "saving"), 0.0)
    )
    useful: float = 0.0
    ended: int = 0
    large: int = 0
    large_failed: int = 0
    spares: int = 0

    def lose(self, what: str, seconds: float, nodes: int) -> None:
        """So many seconds of all GPUs of a job."""
        self.lost[what] += seconds * nodes * GPUS / HOUR_S


class Floor:
    """Jobs on nodes. `spare` [n]: nodes that only take over from others; `begin_ns`: the clock at 0 s.

    `last` [n]: nodes that the scheduler was told to use after all others.
    """

    def __init__(self, n: int, slots: int, spare: Bool, rate: float, come: Arrivals, begin_ns: int) -> None:
        self.n, self.spare, self.rate, self.come, self.begin_ns = n, spare, rate, come, begin_ns
        self.dirty, self._service = True, np.zeros(n, np.bool_)
        self.last: Bool = np.zeros(n, np.bool_)  # used only where no other node is free
        self.jobs = JobSlots(slots, n)
        self.jobs.known = True
        self.runs: dict[int, Run] = {}
        self.waiting: dict[int, Run] = {}
        self.queue: deque[int] = deque()
        self.queued_s: dict[int, float] = {}
        self.tally = Tally()
        self.next = 0
        self.limit_s = np.zeros(slots)
        self.size_of_slot: I64 = np.zeros(slots, np.int64)
        # Of each job that comes, as plain numbers: the scheduler looks at a hundred of them at every event
        self.size: list[int] = come.size.tolist()
        self.most_s: list[float] = (LIMIT * come.work_s).tolist()

    def usable(self, service: Bool) -> Bool:
        """Nodes in service without a job [n]."""
        free: Bool = service & (self.jobs.job_of_node < 0)
        return free

    def arrive(self, now_s: float) -> None:
        """Jobs that came since."""
        while self.next < len(self.come.at_s) and self.come.at_s[self.next] <= now_s:
            self.dirty = True
            self.queue.append(self.next)
            self.queued_s[self.next] = now_s
            self.next += 1

    def fill(self, service: Bool, now_s: float) -> list[int]:
        """Give nodes to jobs that wait for some, then to those in the queue; the slots that now run."""
        began: list[int] = []
        if not self.dirty and np.array_equal(service, self._service):
            return began
        self.dirty, self._service = False, service
        if self.waiting:
            able = self.usable(service)
            waiting = list(self.waiting.items())
            began += [slot for slot, run in waiting if self._complete(slot, run, able, now_s)]
        if not self.queue:
            return began
        able = self.usable(service) & ~self.spare
        free = np.flatnonzero(able)
        n_free, passed = len(free), list[int]()
        # The first that finds no room keeps its turn: who passes it must be gone by then, or leave it room
        until_s, room = np.inf, self.n
        for _ in range(min(len(self.queue), BACKFILL)):
            if not n_free:
                break
            job = self.queue.popleft()
            size, late = self.size[job], now_s + self.most_s[job] > until_s
            fits = size <= n_free and not (late and size > room)
            place = self._start(job, free, now_s) if fits else None
            if place is None:
                passed.append(job)
                if not np.isfinite(until_s):
                    until_s, room = self._turn(size, n_free, now_s)
                continue
            room -= size if late else 0
            able[self.runs[place].nodes] = False
            free = np.flatnonzero(able)
            n_free = len(free)
            began.append(place)
        self.queue.extendleft(reversed(passed))
        return began

    def _turn(self, size: int, free: int, now_s: float) -> tuple[float, int]:
        """(when so many nodes will be free by the time limits of what runs, nodes then left over).

        As in EASY backfilling. source: Lifka, JSSPP 1995
        """
        slots = np.fromiter(self.runs, np.int64, len(self.runs))
        end_s, more = np.maximum(self.limit_s[slots], now_s), self.size_of_slot[slots]
        order = np.lexsort((more, end_s))
        left = free + np.cumsum(more[order])
        at = int(np.searchsorted(left, size))
        return (float(end_s[order[at]]), int(left[at]) - size) if at < len(left) else (np.inf, self.n)

    def _start(self, job: int, free: I64, now_s: float) -> int | None:
        size, need_s = self.size[job], float(self.come.work_s[job])
        last = self.last[free]
        first, rest = free[~last], free[last]
        at = int(np.searchsorted(first, self.come.offset[job] * self.n))
        own = np.take(first, np.arange(at, at + size), mode="wrap") if len(first) >= size else first
        nodes = np.sort(np.r_[own, rest[: size - len(own)]]).astype(np.int32)
        interval_s = float(young_s(SAVE_S, DAY_S / (self.rate * size)))
        run = Run(job, size, need_s, interval_s, nodes, since_s=now_s, saved_s=now_s)
        slot = self._bind(run, now_s)
        if slot is None:
            return None
        del self.queued_s[job]
        self.runs[slot] = run
        self.limit_s[slot], self.size_of_slot[slot] = now_s + self.most_s[job], size
        return slot

    def _bind(self, run: Run, now_s: float) -> int | None:
        told = JobStarted(
            job=f"job{run.job}", nodes=(), kind="training", time_limit_s=LIMIT * run.need_s,
            checkpoint_interval_s=run.interval_s, checkpoint_save_s=SAVE_S, checkpoint_restart_s=RESTART_S,
        )  # fmt: skip
        return self.jobs.start(told, run.nodes.tolist(), 0, self.begin_ns + round(now_s * NS))

    def lose_nodes(self, slot: int, nodes: I32, now_s: float, failed: bool) -> None:
        """These nodes of a job fail or leave: all that is not durable is lost."""
        run, self.dirty = self.runs[slot], True
        work_s, durable_s = run.useful_s(now_s)
        if run.waits_not:
            self.tally.lose("work", work_s - durable_s, run.size)
            # A restart that is interrupted was for nothing as far as it went
            self.tally.lose("restart", -max(run.since_s - now_s, 0.0), run.size)
            run.saved_s = run.last_save_s(now_s)
            run.done_s += durable_s
            run.wait_s = now_s
            if failed:
                self.tally.interruptions += 1
                run.failures += 1
            else:
                self.tally.moves += 1
                run.moves += 1
        run.since_s, run.asked_s = float("inf"), -1.0
        run.turn += 1
        run.nodes = np.setdiff1d(run.nodes, nodes).astype(np.int32)
        self._bind(run, now_s)
        self.waiting[slot] = run

    def _complete(self, slot: int, run: Run, free: Bool, now_s: float) -> bool:
        """Fill up a job that lost nodes: spares first."""
        missing = run.size - len(run.nodes)
        pool = np.flatnonzero(free)
        if len(pool) < missing:
            return False
        taken = pool[np.lexsort((~self.spare[pool], self.last[pool]))][:missing]
        self.tally.spares += int(self.spare[taken].sum())
        free[taken] = False
        run.nodes = np.sort(np.concatenate([run.nodes, taken])).astype(np.int32)
        self.tally.lose("waiting", now_s - run.wait_s, run.size)
        self.tally.lose("restart", RESTART_S, run.size)
        run.since_s, run.wait_s = now_s + RESTART_S, float("inf")
        run.saved_s = run.since_s
        run.turn += 1
        del self.waiting[slot]
        self._bind(run, now_s)
        return True

    def save(self, slot: int, now_s: float) -> bool:
        """Begin a save that was asked for; False if the job cannot, or is at it."""
        run = self.runs.get(slot)
        if run is None or not run.waits_not or run.since_s > now_s or run.asked_s >= 0:
            return False
        run.asked_s, run.kept_s = now_s, run.done_s + run.useful_s(now_s)[0]
        run.turn += 1
        return True

    def saved(self, slot: int, turn: int, now_s: float) -> bool:
        """That save is durable; training goes on."""
        run = self.runs.get(slot)
        if run is None or run.turn != turn or run.asked_s < 0:
            return False
        self.tally.lose("saving", now_s - run.asked_s, run.size)
        run.done_s, run.saved_s = run.kept_s, run.asked_s
        run.since_s, run.asked_s = now_s, -1.0
        run.turn += 1
        return True

    def end(self, slot: int, turn: int, now_s: float) -> bool:
        """The job is done, unless something came between."""
        run = self.runs.get(slot)
        if run is None or run.turn != turn:
            return False
        self.jobs.end(JobEnded(job=f"job{run.job}", reason="completed"), self.begin_ns + round(now_s * NS))
        self.dirty = True
        del self.runs[slot]
        self.tally.useful += run.need_s * run.size * GPUS / HOUR_S
        self.tally.ended += 1
        if run.size >= LARGE:
            self.tally.large += 1
            self.tally.large_failed += run.failures > 0
        return True

    def tell_saves(self, now_s: float) -> None:
        """Write the durable saves that jobs reported into the table that policies see."""
        slots = np.fromiter(self.runs, np.int64, len(self.runs))
        some = [(r.since_s, r.interval_s + SAVE_S, r.saved_s) for r in self.runs.values()]
        since_s, cycle_s, saved_s = np.array(some).reshape(-1, 3).T
        whole = np.floor(np.maximum(now_s - since_s, 0.0) / cycle_s)
        last_s = np.where(
            whole > 0, np.where(np.isfinite(since_s), since_s, 0.0) + whole * cycle_s - SAVE_S, saved_s
        )
        self.jobs.saved_ns[slots] = self.begin_ns + np.round(last_s * NS).astype(np.int64)
        self.jobs.checkpoint_told_ns[slots] = self.begin_ns + round(now_s * NS)
