"""Lemons: nodes that fail more often than others, by seven signals over 28 days (source: arXiv 2410.21680).

Signals of a node are gathered by day; once an hour all nodes are judged. The score is empirical Bayes: the
fleet's own distribution of incident rates is found from all counts, then each node's from it and its own.
"""

from __future__ import annotations

from math import lgamma, log
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, Bool, signal_of
from twin.contracts import NODE_ENDS, FailureLog, action, is_failure
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.site import Site
from twin.telemetry import (
    ColumnSpec,
    EntityState,
    Event,
    JobEnded,
    JobSlots,
    MaintenanceBegun,
    OldOfNew,
    OperatorRequest,
    column,
    keyed,
    scalar,
)

# Rates of nodes over the fleet's mean that are distinguished, and from which one is a lemon's. source:
# estimate; the lemons of arXiv 2410.21680 fail several times as often as the rest
MULTIPLES = np.array([0.25, 0.5, 1.0, 1.7, 3.0, 5.0, 8.0, 13.0, 20.0])
LEMON_FROM = 3.0
# Prior of a fleet before it is seen, worth so many nodes: hardly any lemons. source: 1.2 % of nodes were,
# arXiv 2410.21680; the weight is an estimate
PRIOR_NODES, LEMONS_PU = 100.0, 0.012
TURNS = 60  # of the search for the fleet's distribution
FALSE_PU = 0.1  # of those called lemons may be none, on average
# After an incident another one follows so often that has the same cause, as the repair cured nothing: what
# is taken for granted, worth so many incidents, and what is tried. source: 0.42 within 30 days against 0.12
# of all in a public trace of GPU servers is 0.34, lemons included; estimate
AGAIN_PU, AGAIN_COUNT = 0.25, 20.0
AGAINS = (0.02, 0.1, 0.18, 0.26, 0.34, 0.42)
MOST = 40  # more incidents say no more
LEAST_HARD = 2  # incidents of the hardware in 28 days
# Share of failed jobs of a single node that are its own doing in a usual fleet; source: estimate
OWN_PU = 0.1


class LemonCounts(NamedTuple):
    """Counts per node [n]: incidents, days in service, jobs of the node alone, how many failed."""

    incidents: I64
    hard: I64  # incidents that speak of the hardware
    days: F64
    jobs: I64
    jobs_failed: I64


class Score(NamedTuple):
    """The verdict per node [n]."""

    lemon: Bool
    innocent_pu: F64  # probability that its rate is not a lemon's
    rate_pu: F64  # rate over the fleet's mean, as best known
    per_day: float  # incidents of the fleet per node-day
    job_failed_pu: float  # of the fleet


def score(counts: LemonCounts) -> Score:
    """Return the verdict on all nodes.

    Incidents follow a Poisson law with the node's multiple of the fleet's rate; failed jobs likewise, where
    only `OWN_PU` of the fleet's grow with that multiple. Of the nodes that are called, `FALSE_PU` may be
    innocent on average, the form of Benjamini and Hochberg's rule for posterior probabilities (source: Efron,
    Large-Scale Inference, 2010, chapter 5).
    """
    n = len(counts.days)
    days, jobs = float(counts.days.sum()), float(counts.jobs.sum())
    if n == 0 or days <= 0.0 or not counts.incidents.any():
        return Score(np.zeros(n, np.bool_), np.ones(n), np.ones(n), 0.0, np.nan)
    per_day = float(counts.incidents.sum()) / max(days, 1.0 / 24.0)  # a rate within an hour is none
    failed_pu = float(counts.jobs_failed.sum()) / jobs if jobs else 0.0
    # Nodes with about the same counts are judged as one
    key = np.stack([counts.incidents, np.round(counts.days).astype(np.int64), _step(counts.jobs),
                    _step(counts.jobs_failed)])  # fmt: skip
    _, first, inverse, many = np.unique(key, axis=1, return_index=True, return_inverse=True,
                                        return_counts=True)  # fmt: skip
    alike = LemonCounts(counts.incidents[first], counts.hard[first], counts.days[first], counts.jobs[first],
                   counts.jobs_failed[first])  # fmt: skip
    best, posterior = -np.inf, np.zeros((len(first), len(MULTIPLES)))
    for again in AGAINS:
        like = _log_likelihood(alike, per_day, failed_pu, again)
        worth, found = _fleet(like, many)
        worth += AGAIN_COUNT * (AGAIN_PU * log(again) + (1.0 - AGAIN_PU) * log(1.0 - again))
        if worth > best:
            best, posterior = worth, found
    posterior = posterior[inverse.reshape(-1)]
    innocent = posterior[:, MULTIPLES < LEMON_FROM].sum(axis=1)
    return Score(_chosen(innocent, counts.hard), innocent, posterior @ MULTIPLES, per_day,
                 failed_pu if jobs else np.nan)  # fmt: skip


def _step(count: I64) -> I64:
    """Return counts in steps of about a sixth."""
    return np.round(6.0 * np.log1p(count / 6.0)).astype(np.int64)


def _fleet(log_pu: F64, many: I64) -> tuple[float, F64]:
    """Return (log likelihood of all, probability of each multiple [n, n_multiple]) under the fleet's
    distribution.

    Found by expectation and maximisation.
    """
    # Counts that no rate explains, as they overflow, say nothing
    log_pu = np.where(np.isfinite(log_pu).any(axis=1, keepdims=True), log_pu, 0.0)
    top = log_pu.max(axis=1, keepdims=True)
    like = np.exp(log_pu - top)
    lemons = MULTIPLES >= LEMON_FROM
    prior = np.where(lemons, LEMONS_PU / lemons.sum(), (1.0 - LEMONS_PU) / (~lemons).sum())
    weight = prior
    for _ in range(TURNS):
        weight = (many / (like @ weight)) @ like * weight + PRIOR_NODES * prior
        weight = weight / weight.sum()
    total = like @ weight
    return float(many @ (np.log(total) + top[:, 0])), like * weight / total[:, None]


def _log_likelihood(counts: LemonCounts, per_day: float, failed_pu: float, again: float) -> F64:
    """Return the log likelihood of each node's counts under each multiple [n, n_multiple], up to a
    constant per node."""
    # One that was hardly ever in service is judged as if it had been for an hour
    mean = per_day * (1.0 - again) * np.maximum(counts.days, 1.0 / 24.0)
    seen = np.minimum(counts.incidents, MOST)
    value, place = np.unique(seen, return_inverse=True)
    out = np.zeros((len(mean), len(MULTIPLES)))
    log_mean = np.log(np.outer(mean, MULTIPLES))
    for k, count in enumerate(value.tolist()):
        mine = place.reshape(-1) == k
        out[mine] = log_clustered(count, log_mean[mine], again)
    out -= np.outer(mean, MULTIPLES)
    grown = 1.0 - OWN_PU + OWN_PU * MULTIPLES
    out += np.outer(counts.jobs_failed, np.log(grown)) - np.outer(failed_pu * counts.jobs, grown)
    return out


def log_clustered(count: int, log_mean: F64, again: float) -> F64:
    """Return the logarithm of the sum over the number of first events, without the factor e^-mean.

    Incidents come in trains: a first one by Poisson's law, after each with the probability `again` a next
    one (the law of Polya and Aeppli): sum over j of C(count - 1, j - 1) mean^j / j! p^(count - j) (1 - p)^j.
    """
    if count == 0:
        return np.zeros_like(log_mean)
    terms = [
        lgamma(count) - lgamma(j) - lgamma(count - j + 1) - lgamma(j + 1)
        + (count - j) * log(again) + j * (log(1.0 - again) + log_mean)
        for j in range(1, count + 1)
    ]  # fmt: skip
    return np.asarray(np.logaddexp.reduce(np.stack(terms)), np.float64)


def _chosen(innocent: F64, hard: I64) -> Bool:
    """Return the largest set whose mean probability of innocence is at most `FALSE_PU`."""
    out: Bool = np.zeros(len(innocent), np.bool_)
    able = np.flatnonzero(hard >= LEAST_HARD)
    order = able[np.argsort(innocent[able], kind="stable")]
    mean = np.cumsum(innocent[order]) / np.arange(1, len(order) + 1)
    out[order[: int(np.count_nonzero(mean <= FALSE_PU))]] = True
    return out


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
# Share to which codes of each class speak of the hardware of a GPU; source: estimate
HARDWARE = {"memory": 1.0, "nvlink": 1.0, "pcie": 1.0, "bus": 1.0, "firmware": 0.5, "driver": 0.25}
OURS = 1.0  # of service_owner_state
CROWD, CROWD_PU = 5, 0.01  # so many nodes at once report for a reason in common
_BY_DAY = {
    name: ColumnSpec(kind, 0, (DAYS,), (), "node")
    for name, kind in (
        ("excluded", "u2"), ("xids", "f4"), ("tickets", "u2"), ("multi", "u2"), ("single", "u2"),
        ("runs", "u2"), ("incidents", "u1"), ("hard", "u1"),
    )
}  # fmt: skip


class Lemons(EntityState):
    """Daily counts of the signals per node [28, n_node], and the lemons."""

    by_day: dict[str, Any] = keyed(keys=_BY_DAY)
    since_ns: I64 = column("node", "i8")
    evidence_ns: I64 = column("node", "i8")
    excluded_ns: I64 = column("node", "i8")
    level: F32 = column("node", "f4", np.nan)  # of service, as last reported
    xids_seen: F32 = column("node", "f4")
    out: I64 = column("node", "i8")  # times out of service
    lemon: Bool = column("node", "?")
    innocent_pu: F64 = column("node", "f8", 1.0)
    rate_pu: F64 = column("node", "f8", 1.0)
    day: int = scalar(0)
    judged_ns: int = scalar(0)
    asked_ns: int = scalar(0)
    taken_ns: int = scalar(0)
    per_day: float = scalar(0.0)
    job_failed_pu: float = scalar(np.nan)
    jobs_heard: bool = scalar(False)
    people_heard: bool = scalar(False)
    xids_heard: bool = scalar(False)
    _ids: list[str] = scalar([])  # of maintenance windows that were counted
    _named: list[int] = scalar([])  # nodes that people took out since the last look

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self._signals: F32 | None = None
        self._sources = (False, False, False)  # sources that had reported when `_signals` was made

    def take(self, event: Event, jobs: JobSlots, now_ns: int) -> None:
        """Take an event about nodes before it is applied: an ending job still has its nodes."""
        if isinstance(event, JobEnded):
            self._job_ended(event, jobs, now_ns)
        elif isinstance(event, MaintenanceBegun) and event.table in ("node", "gpu"):
            if event.until_ns > now_ns and len(event.names) <= MAX_NAMED and event.id not in self._ids:
                self._ids.append(event.id)
                del self._ids[:-MAX_IDS]
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

    def _job_ended(self, event: JobEnded, jobs: JobSlots, now_ns: int) -> None:
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
        """Add the judgement of people as evidence if nothing else was evidence recently."""
        self._to_day(now_ns)
        at = np.array(nodes, np.int32)
        self._count(name, at)
        self._incident(at, np.full(len(at), now_ns), False)

    def _count(self, name: str, nodes: I32) -> None:
        row = self.by_day[name][self.day % DAYS]
        row[nodes] += row[nodes] < np.iinfo(row.dtype).max
        self._signals = None

    def _incident(self, nodes: I32, at_ns: I64, hard: bool) -> None:
        """Add evidence against nodes at these instants; evidence soon after other evidence is the same
        incident."""
        if not len(nodes):
            return
        last = self.evidence_ns[nodes]
        new = (last == 0) | (at_ns - last > (SAME_S if hard else SAME_BY_PEOPLE_S) * NS)
        for name in ("incidents", "hard") if hard else ("incidents",):
            self._count(name, nodes[new])
        self.evidence_ns[nodes] = np.maximum(last, at_ns)

    def _to_day(self, now_ns: int) -> None:
        """Begin the present day, and drop days older than 28."""
        today = now_ns // DAY_NS
        if today <= self.day:
            return
        gone = np.arange(max(self.day + 1, today - DAYS + 1), today + 1) % DAYS
        for counts in self.by_day.values():
            counts[gone] = 0
        self.day = today
        self._signals = None

    def update(
        self, now: HealthContext, book: FaultBook, failures: FailureLog, suspects: Bool | None = None
    ) -> None:
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

    def _excluded(self, now: HealthContext, book: FaultBook, suspects: Bool | None) -> None:
        """Note the nodes that others than racktwin took out of service without known evidence."""
        value = now.state.tables["node"].value
        level, owner = (
            value[signal_of(f"node.{name}").row] for name in ("service_level_state", "service_owner_state")
        )
        with np.errstate(invalid="ignore"):
            left = (level >= 1.0) & (self.level < 1.0) & (owner != OURS)
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
        """Return the failures with a settled cause."""
        settled_ns = t_ns - round(SETTLED_S * NS)
        if len(log.node) == 0 or log.start_ns[-1] <= self.taken_ns:
            return
        new = (log.start_ns > self.taken_ns) & (log.start_ns <= settled_ns) & (log.start_ns >= log.begin_ns)
        own = np.flatnonzero(new & ~log.shared & is_failure(log))
        self.taken_ns = max(self.taken_ns, settled_ns)
        for k in own.tolist():
            self._incident(log.node[k : k + 1], log.start_ns[k : k + 1], True)

    def _ask(self, book: FaultBook, log: FailureLog, t_ns: int) -> None:
        """Read the fault book's new codes that mean hardware."""
        # While a node is down, all its evidence belongs to the same incident
        broken = log.node[(log.end_ns == 0) & is_failure(log)]
        self.evidence_ns[broken] = np.where(self.evidence_ns[broken] > 0, t_ns, 0)
        names, faded = book.by_class()
        weights = np.array([HARDWARE.get(name, 0.0) for name in names], np.float32)
        if not len(names) or faded.shape[1] == 0:
            return
        self.xids_heard |= bool(faded.any())
        of_gpu = weights @ faded
        sums = np.bincount(self.site.node_of_gpu, of_gpu, len(self.lemon)).astype(np.float32)
        # The old count fades by no more than 1 % in between, so that any fault shows as a gain
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
            LemonCounts(
                self._sum("incidents"), self._sum("hard"), days, self._sum("runs"), self._sum("single")
            )
        )
        self.lemon, self.innocent_pu, self.rate_pu = found.lemon, found.innocent_pu, found.rate_pu
        self.per_day, self.job_failed_pu = found.per_day, found.job_failed_pu
        self._signals = None

    def _sum(self, name: str) -> I64:
        return np.asarray(self.by_day[name].sum(axis=0, dtype=np.int64))

    def is_lemon(self) -> Bool:
        """Return the nodes that are lemons [n_node]."""
        return self.lemon

    def signals(self) -> F32:
        """Return the seven signals over the last 28 days [n_node, 7]; NaN: no source reported the signal.

        `excluded`: times that people or the scheduler took a node out of service although its health looked
        fine. Jobs that exclude nodes by themselves are not reported by any source, so that these are not
        among them.
        """
        sources = self.people_heard, self.xids_heard, self.jobs_heard
        if self._signals is None or sources != self._sources:
            self._sources = sources
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
                [values if known else np.full(len(runs), np.nan) for values, known in columns], axis=1
            ).astype(np.float32)
            self._signals.flags.writeable = False
        return self._signals

    def evidence(self, node: int) -> tuple[str, ...]:
        """Return the reasons why a node is a lemon, with figures, and the signals that were silent."""
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

    def derive(self) -> None:
        """Drop the sums; they are rebuilt from the signals."""
        self._signals = None

    def adopt(self, old: Lemons, old_of_new: OldOfNew) -> None:
        """Take over the state of another site; known lemons there are not checked again."""
        super().adopt(old, old_of_new)
        self._named = []
