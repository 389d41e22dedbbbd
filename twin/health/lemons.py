"""Lemons: nodes that fail more than others, by seven signals over 28 days (source: arXiv 2410.21680).

What speaks of a node is gathered by day; once an hour all nodes are judged. May import events, jobs, the
fault book, records, words of failures, the score and the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.events import Event, JobEnded, MaintenanceBegun, OperatorRequest
from twin.frame import F32, F64, I32, I64, NS, Bool
from twin.health.failure_words import NODE_ENDS, is_failure
from twin.health.fault_book import FaultBook
from twin.health.lemon_score import Counts, Score, score
from twin.health.levels import action
from twin.health.now import Now
from twin.health.records import FailureLog
from twin.jobs import Jobs
from twin.signals import find_signal
from twin.site import Site

SIGNALS = (
    "excluded",
    "xids",
    "tickets",
    "out_of_service",
    "multi_node_failures",
    "single_node_failures",
    "single_node_failure_pu",
)
DAYS, DAY_NS = 28, 86_400 * NS
JUDGE_S, XIDS_S = 3600.0, 600.0  # between judgements, and between looks at the fault book
SETTLED_S = 1200.0  # after its start it is known whether a failure had a cause in common
# Evidence so soon after other evidence is of the same incident: of the hardware; of people. source: estimate
SAME_S, SAME_BY_PEOPLE_S = 6 * 3600.0, 24 * 3600.0
# Ends of jobs that say how a run went, and those that are failures, in the words of Slurm. Time limits and
# memory are the user's.
ENDED = ("completed", "failed", "timeout", "deadline", "out_of_memory", *NODE_ENDS)
FAILED = ("failed", *NODE_ENDS)
MAX_NAMED = 8  # nodes; who names more means no single one; source: estimate
MAX_IDS = 1000
# How much codes of the catalogue's classes speak of the hardware of a GPU; source: estimate
HARDWARE = {"memory": 1.0, "nvlink": 1.0, "pcie": 1.0, "bus": 1.0, "firmware": 0.5, "driver": 0.25}
CROWD, CROWD_PU = 5, 0.01  # so many nodes at once report for a reason in common
_BY_DAY = {"excluded": np.uint16, "xids": np.float32, "tickets": np.uint16, "multi": np.uint16,
           "single": np.uint16, "runs": np.uint16, "incidents": np.uint8, "hard": np.uint8}  # fmt: skip
_OF_NODE = ("since_ns", "evidence_ns", "excluded_ns", "level", "xids_seen", "lemon", "innocent_pu", "rate_pu")
_FLAGS = ("jobs_heard", "people_heard", "xids_heard")
_TIMES = ("day", "judged_ns", "asked_ns", "taken_ns")


class Lemons:
    """Daily counts of the signals per node [28, n_node], and who is a lemon."""

    def __init__(self, site: Site) -> None:
        self.site, n = site, site.sizes["node"]
        self.by_day: dict[str, Any] = {k: np.zeros((DAYS, n), kind) for k, kind in _BY_DAY.items()}
        self.day = self.judged_ns = self.asked_ns = self.taken_ns = 0
        self.since_ns, self.evidence_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.excluded_ns = np.zeros(n, np.int64)
        self.level = np.full(n, np.nan, np.float32)  # of service, as last heard
        self.xids_seen = np.zeros(n, np.float32)
        self.out: I64 = np.zeros(n, np.int64)  # times out of service
        self.lemon: Bool = np.zeros(n, np.bool_)
        self.innocent_pu, self.rate_pu = np.ones(n), np.ones(n)
        self.per_day, self.job_failed_pu = 0.0, float("nan")
        self.jobs_heard = self.people_heard = self.xids_heard = False
        self._ids: dict[str, None] = {}  # of maintenance windows that were counted
        self._named: list[int] = []  # nodes that people took out since the last look
        self._signals: F32 | None = None
        self._told_of = (False, False, False)  # what had been heard of when `_signals` was made

    def take(self, event: Event, jobs: Jobs, now_ns: int) -> None:
        """Note what an event says of nodes, before it is applied: a job that ends still has its nodes."""
        if isinstance(event, JobEnded):
            self._ended(event, jobs, now_ns)
        elif isinstance(event, MaintenanceBegun) and event.table in ("node", "gpu"):
            if event.until_ns > now_ns and len(event.names) <= MAX_NAMED and event.id not in self._ids:
                self._ids[event.id] = None
                if len(self._ids) > MAX_IDS:
                    del self._ids[next(iter(self._ids))]
                self._by_people("tickets", self._nodes(event.table, event.names), now_ns)
        elif isinstance(event, OperatorRequest) and event.control == "node.service_level":
            self.people_heard = True
            if event.lo >= 1.0 and len(event.names) <= MAX_NAMED:
                self._named += self._nodes("node", event.names)
                del self._named[:-1000]

    def _nodes(self, table: str, names: tuple[str, ...]) -> list[int]:
        found = [i for name in names if (i := self.site.entity(table, name)) is not None]
        at = self.site.node_of_gpu[found].tolist() if table == "gpu" else found
        return sorted(set(at))

    def _ended(self, event: JobEnded, jobs: Jobs, now_ns: int) -> None:
        slot = jobs.slot_of.get(event.job)
        nodes = jobs.unslotted.get(event.job) if slot is None else jobs.nodes[slot]
        if nodes is None or not len(nodes) or event.reason not in ENDED:
            return
        self._to_day(now_ns)
        self.jobs_heard = True
        if len(nodes) > 1:
            if event.reason in FAILED:
                self._count("multi", nodes)
            return
        self._count("runs", nodes)
        if event.reason in FAILED:
            self._count("single", nodes)
        if event.reason in NODE_ENDS:
            self._incident(nodes, np.full(1, now_ns), True)

    def _by_people(self, name: str, nodes: list[int], now_ns: int) -> None:
        """People held a node to be bad: evidence where nothing else has said so lately."""
        self._to_day(now_ns)
        at = np.array(nodes, np.int32)
        self._count(name, at)
        self._incident(at, np.full(len(at), now_ns), False)

    def _count(self, name: str, nodes: I32) -> None:
        row = self.by_day[name][self.day % DAYS]
        row[nodes] += row[nodes] < np.iinfo(row.dtype).max
        self._signals = None

    def _incident(self, nodes: I32, at_ns: I64, hard: bool) -> None:
        """Evidence against nodes at these instants; what comes soon after other evidence is one with it."""
        if not len(nodes):
            return
        last = self.evidence_ns[nodes]
        new = (last == 0) | (at_ns - last > (SAME_S if hard else SAME_BY_PEOPLE_S) * NS)
        for name in ("incidents", "hard") if hard else ("incidents",):
            self._count(name, nodes[new])
        self.evidence_ns[nodes] = np.maximum(last, at_ns)

    def _to_day(self, now_ns: int) -> None:
        """Begin the present day; what is older than 28 is forgotten."""
        today = now_ns // DAY_NS
        if today <= self.day:
            return
        gone = np.arange(max(self.day + 1, today - DAYS + 1), today + 1) % DAYS
        for column in self.by_day.values():
            column[gone] = 0
        self.day = today
        self._signals = None

    def update(self, now: Now, book: FaultBook, failures: FailureLog, suspects: Bool | None = None) -> None:
        """Take in the faults and failures that are new; judge once an hour.

        `suspects` [n_node]: where health itself spoke against a node lately, so that to exclude it is no
        sign of what health does not see.
        """
        t_ns = now.now_ns
        self._to_day(t_ns)
        self.since_ns[self.since_ns == 0] = t_ns
        self._excluded(now, book, suspects)
        self._failed(failures, t_ns)
        if t_ns - self.asked_ns >= XIDS_S * NS:
            self.asked_ns = t_ns
            self._ask(book, failures, t_ns)
        if t_ns - self.judged_ns >= JUDGE_S * NS:
            self.judged_ns = t_ns
            self._judge(failures, t_ns)

    def _excluded(self, now: Now, book: FaultBook, suspects: Bool | None) -> None:
        """Nodes that were taken out of service although nothing is known against them."""
        signal = find_signal("node.service_level_state")
        assert signal is not None
        level = now.state.tables["node"].value[signal.row]
        with np.errstate(invalid="ignore"):
            left = (level >= 1.0) & (self.level < 1.0)
        moved = level != self.level
        if moved.any():
            self.people_heard |= bool(np.isfinite(level).any())
            self.level[:] = level
        named, self._named = self._named, []
        if not (left.any() or named):
            return
        left[named] = True
        left &= (self.excluded_ns == 0) | (now.now_ns - self.excluded_ns > SAME_S * NS)
        if (work := now.under_work("node")) is not None:
            left &= ~work
        self.excluded_ns[left] = now.now_ns
        if suspects is None:
            asked = np.flatnonzero(book.open_action("gpu") > action("watch"))
            suspects = np.zeros(len(left), np.bool_)
            suspects[self.site.node_of_gpu[asked]] = True
        self._by_people("excluded", np.flatnonzero(left & ~suspects).tolist(), now.now_ns)

    def _failed(self, log: FailureLog, t_ns: int) -> None:
        """Failures whose cause is settled by now."""
        settled_ns = t_ns - round(SETTLED_S * NS)
        if len(log.node) == 0 or log.start_ns[-1] <= self.taken_ns:
            return
        new = (log.start_ns > self.taken_ns) & (log.start_ns <= settled_ns) & (log.start_ns >= log.begin_ns)
        own = np.flatnonzero(new & ~log.shared & is_failure(log))
        self.taken_ns = max(self.taken_ns, settled_ns)
        for k in own.tolist():
            self._incident(log.node[k : k + 1], log.start_ns[k : k + 1], True)

    def _ask(self, book: FaultBook, log: FailureLog, t_ns: int) -> None:
        """What the fault book has gained of codes that mean hardware."""
        # As long as a node is down, what is heard of it is of the same incident
        broken = log.node[(log.end_ns == 0) & is_failure(log)]
        self.evidence_ns[broken] = np.where(self.evidence_ns[broken] > 0, t_ns, 0)
        names, faded = book.by_class()
        weights = np.array([HARDWARE.get(name, 0.0) for name in names], np.float32)
        if not len(names) or faded.shape[1] == 0:
            return
        self.xids_heard |= bool(faded.any())
        of_gpu = weights @ faded
        sums = np.bincount(self.site.node_of_gpu, of_gpu, len(self.lemon)).astype(np.float32)
        # What was there fades by no more than 1 % in between, so that any fault shows as a gain
        gained = np.flatnonzero(sums > self.xids_seen + 0.05)
        grown = sums[gained] - self.xids_seen[gained]
        self.xids_seen = sums
        if not gained.size:
            return
        self.by_day["xids"][self.day % DAYS, gained] += grown
        self._signals = None
        alike = (log.start_ns >= t_ns - 2 * round(SETTLED_S * NS)) & log.shared
        own = np.setdiff1d(gained[grown >= 0.2], log.node[alike]).astype(np.int32)
        if len(own) <= max(CROWD, CROWD_PU * len(self.lemon)):
            self._incident(own, np.full(len(own), t_ns), True)

    def _judge(self, log: FailureLog, t_ns: int) -> None:
        n, begin_ns = len(self.lemon), t_ns - DAYS * DAY_NS
        lately = (log.start_ns >= begin_ns) & ~log.shared
        self.out = np.bincount(log.node[lately], minlength=n).astype(np.int64)
        watched_ns = t_ns - np.maximum(self.since_ns, max(begin_ns, (self.day - DAYS + 1) * DAY_NS))
        ended_ns = np.where(log.end_ns == 0, t_ns, log.end_ns)
        down_ns = np.clip(ended_ns - np.maximum(log.start_ns, begin_ns), 0, None)
        down_d = np.bincount(log.node, down_ns / DAY_NS, n)
        days = np.maximum(watched_ns / DAY_NS - down_d, 0.0)
        found: Score = score(
            Counts(self._sum("incidents"), self._sum("hard"), days, self._sum("runs"), self._sum("single"))
        )
        self.lemon, self.innocent_pu, self.rate_pu = found.lemon, found.innocent_pu, found.rate_pu
        self.per_day, self.job_failed_pu = found.per_day, found.job_failed_pu
        self._signals = None

    def _sum(self, name: str) -> I64:
        return np.asarray(self.by_day[name].sum(axis=0, dtype=np.int64))

    def is_lemon(self) -> Bool:
        """Nodes that are lemons [n_node]."""
        return self.lemon

    def signals(self) -> F32:
        """The seven signals over the last 28 days [n_node, 7]; NaN: nothing that tells of it was heard.

        `excluded`: times that people or the scheduler took a node out of service although its health looked
        fine. Jobs that exclude nodes by themselves are not told by any source, so that these are not among
        them.
        """
        told_of = self.people_heard, self.xids_heard, self.jobs_heard
        if self._signals is None or told_of != self._told_of:
            self._told_of = told_of
            runs = self._sum("runs")
            with np.errstate(invalid="ignore", divide="ignore"):
                failed_pu = self._sum("single") / np.where(runs > 0, runs, np.nan)
            xids: F64 = self.by_day["xids"].sum(axis=0, dtype=np.float64)
            columns = (
                (self._sum("excluded"), self.people_heard), (xids, self.xids_heard),
                (self._sum("tickets"), True), (self.out, True), (self._sum("multi"), self.jobs_heard),
                (self._sum("single"), self.jobs_heard), (failed_pu, self.jobs_heard),
            )  # fmt: skip
            self._signals = np.stack(
                [values if heard else np.full(len(runs), np.nan) for values, heard in columns], axis=1
            ).astype(np.float32)
            self._signals.flags.writeable = False
        return self._signals

    def evidence(self, node: int) -> tuple[str, ...]:
        """Why a node is one, in sentences with figures; what was not heard is told too."""
        days = min((self.judged_ns - int(self.since_ns[node])) / DAY_NS, float(DAYS))
        count, hard = int(self._sum("incidents")[node]), int(self._sum("hard")[node])
        usual = self.per_day * days
        out = [f"{count} incidents in {days:.0f} d, {hard} of them of the hardware; a node of this fleet has "
               f"{usual:.2g} on average",
               f"it has about {self.rate_pu[node]:.1f} times the fleet's rate; that it is no lemon has a "
               f"probability of {self.innocent_pu[node]:.2g}"]  # fmt: skip
        for name, value in zip(SIGNALS, self.signals()[node].tolist(), strict=True):
            words = name.replace("_pu", " share").replace("_", " ")
            if np.isnan(value):
                out.append(f"{words}: unknown")
            elif value > 0:
                out.append(f"{words}: {value:.3g}")
        return tuple(out)

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot. A node with a new GPU is the same node still."""
        if table != "node":
            return
        for column in self.by_day.values():
            column[:, entity] = 0
        for name in ("since_ns", "evidence_ns", "excluded_ns", "xids_seen", "lemon"):
            getattr(self, name)[entity] = 0
        self.out[entity], self.level[entity] = 0, np.nan
        self.innocent_pu[entity] = self.rate_pu[entity] = 1.0
        self._signals = None

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Lemons:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        out = Lemons(site)
        to = np.flatnonzero(old_of_new["node"] >= 0)
        source = old_of_new["node"][to]
        for name, column in out.by_day.items():
            column[:, to] = self.by_day[name][:, source]
        for name in (*_OF_NODE, "out"):
            getattr(out, name)[to] = getattr(self, name)[source]
        for name in (*_FLAGS, *_TIMES, "per_day", "job_failed_pu"):
            setattr(out, name, getattr(self, name))
        out._ids = dict(self._ids)
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        kept = {name: getattr(self, name) for name in (*_OF_NODE, "out", *_FLAGS, *_TIMES)}
        own = {"ids": list(self._ids), "named": list(self._named), "by_day": dict(self.by_day)}
        return kept | own | {"per_day": self.per_day, "job_failed_pu": self.job_failed_pu}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.by_day = {k: np.array(data["by_day"][k], kind) for k, kind in _BY_DAY.items()}
        for name in (*_OF_NODE, "out"):
            setattr(self, name, np.array(data[name]))
        for name in _FLAGS:
            setattr(self, name, bool(data[name]))
        for name in _TIMES:
            setattr(self, name, int(data[name]))
        self.per_day, self.job_failed_pu = float(data["per_day"]), float(data["job_failed_pu"])
        self._ids = dict.fromkeys(data["ids"])
        self._named = [int(i) for i in data["named"]]
        self._signals = None
