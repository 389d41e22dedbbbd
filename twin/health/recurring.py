"""Recurrences: devices on which a harmless event recurs more often than usual.

One retried transfer, one short silence, one flap says nothing; the fifth within hours does. For each device
and each kind of trouble the times at which it came are weighed by a sequential test (Wald 1945, restarted as
in Page 1954): how much likelier are they if trouble comes every few hours than if it comes as it did before
on this device and on its like? The usual rate of a device is a Gamma-Poisson rate, learned from the fleet and
from the device itself. Trouble that many have at once, or as a rule, is no sign of recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma
from typing import NamedTuple

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, Bool
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.rates import Rates
from twin.site import Site
from twin.telemetry import OWN, EntityState, SparseState, cell, column, part, scalar

RECURS_PER_DAY = 6.0  # trouble that has come to stay: every four hours. source: estimate
DAY_NS = 86_400 * NS


class CounterSweep(NamedTuple):
    """Growth of a counter that is read seldom [k]: how many times trouble came, since when at the earliest,
    and the nats that the count before it was watched adds."""

    times: I64
    since_ns: I64
    prior: F64


class Cycles(SparseState):
    """Open cycles of one kind of trouble [k]: a cycle is a run of trouble on one device.

    a, b: the usual rate before it began, as known now, Gamma(a, b) with the mean a / b per day. Against it
    stands a rate of r = `per_day`; after m times in t days the log of the ratio of likelihoods is

        m ln r - r t - ln[ G(a + m) / G(a) b^a / (b + t)^(a + m) ].

    The score leaves out what the first time alone adds: once is no recurrence. `logs` is
    ln[ G(a + m) / G(a + 1) ].
    """

    first_ns: I64 = cell("i8")
    count: I32 = cell("i4", 1)
    a: F64 = cell("f8")
    b: F64 = cell("f8")
    logs: F64 = cell("f8")
    prior: F64 = cell("f8")  # nats that a count from before it was watched adds; then the first time counts

    def __init__(self, per_day: float = RECURS_PER_DAY, table: str = OWN) -> None:
        super().__init__({table: 0}, table)
        self.per_day = per_day  # of trouble that has come to stay

    def add(self, index: I32, now_ns: int, a: F64, b: F64, sweep: CounterSweep | None = None) -> I32:
        """Trouble came to these devices (ascending), whose usual rates are Gamma(a, b) [k], once each if no
        `sweep` says otherwise.

        Returns those to which it comes so often anyhow that once more begins nothing.
        """
        at, there = self.find(index)
        more = at[there]
        self.logs[more] += np.log(self.a[more] + self.count[more])
        self.count[more] += 1
        usual = ~there & (b * self.per_day <= a)
        fresh = ~there & ~usual
        if fresh.any():
            self.insert(index[fresh], first_ns=now_ns, a=a[fresh], b=b[fresh])
            if sweep is not None:
                at, _ = self.find(index[fresh])
                self.first_ns[at], self.prior[at] = sweep.since_ns[fresh], sweep.prior[fresh]
        if sweep is not None:
            at, there = self.find(index)
            left = np.where(there, sweep.times - 1, 0)
            while (open_ := left > 0).any():
                some = at[open_]
                self.logs[some] += np.log(self.a[some] + self.count[some])
                self.count[some] += 1
                left -= 1
        return index[usual]

    def scores(self, now_ns: int) -> tuple[F64, F64]:
        """Return (evidence for recurrence, the same including the first event), in nats [k]."""
        t = np.maximum(now_ns - self.first_ns, 0) / DAY_NS
        more = self.count - 1.0
        usual = self.logs + (self.a + 1.0) * np.log(self.b) - (self.a + 1.0 + more) * np.log(self.b + t)
        score = more * np.log(self.per_day) - self.per_day * t - usual
        whole = score + np.log(self.per_day * self.b / self.a)
        if self.prior.any():
            known = self.prior > 0.0
            score, whole = np.where(known, whole + self.prior, score), whole + self.prior
        return score, whole

    def again(self, a: F64, b: F64) -> None:
        """Update the scores with better usual rates: those before these cycles are Gamma(a, b) [k]."""
        self.a, self.b = a, b
        pairs = zip(a.tolist(), self.count.tolist(), strict=True)
        self.logs = np.array([lgamma(x + m) - lgamma(x + 1.0) for x, m in pairs], np.float64)


HOUR_NS = 3600 * NS
# Before anything is known: once in 50 days, weighed as one time of trouble, since sites differ by far more
# than that; a third of all trouble on a few devices, weighed as 20 times of trouble. source: estimate
PRIOR_PER_DAY, PRIOR_DAYS = 0.02, 50.0
PRIOR_SHAPE, PRIOR_TIMES = 0.3, 20.0
LEAST_SHAPE, MOST_SHAPE = 0.02, 5.0
MEMORY_NS = 60 * DAY_NS  # a device that has been watched for longer counts half of it. source: estimate
# So many beginnings, or that share of all trouble, are learned from before an hour is over: on a site where
# all devices have it the first of them would need people otherwise. source: estimate
MUCH, MUCH_PU = 16, 0.25


class BaselineRate(EntityState):
    """The usual rate of a kind of trouble, as Gamma-Poisson: counts of n devices and their observed time.

    Mean and spread come from the counts of all devices of the fleet, and each device's own count moves its
    rate away from that mean.
    """

    times: F32 = column(OWN, "f4")
    since_ns: I64 = column(OWN, "i8")  # 0: not reported yet
    last_ns: I64 = column(OWN, "i8")  # when trouble last counted
    mean_per_day: float = scalar(PRIOR_PER_DAY)
    shape: float = scalar(PRIOR_SHAPE)
    learned_ns: int = scalar(0)
    begun: int = scalar(0)  # what began since
    all_times: float = scalar(0.0)  # all trouble, as last learned
    all_days: float = scalar(0.0)  # of all devices, as last learned

    def __init__(self, n: int, table: str = OWN) -> None:
        super().__init__({table: n}, table)
        self.n_reporting = 0

    def watch(self, reporting: Bool, now_ns: int) -> None:
        """Start to observe these devices, if not done before [n]."""
        if self.n_reporting < len(reporting):
            new = reporting & (self.since_ns == 0)
            if new.any():
                self.since_ns[new] = now_ns
                self.n_reporting = int(np.count_nonzero(self.since_ns))

    def apart(self, index: I32, now_ns: int, apart_ns: int) -> I32:
        """Return those of these devices with trouble now and none just before."""
        since_ns = now_ns - self.last_ns[index]
        index = index[(self.last_ns[index] == 0) | (since_ns >= apart_ns) | (since_ns < 0)]
        self.last_ns[index] = now_ns
        return index

    def count(self, index: I32, times: I32) -> None:
        """Count this number of events as usual."""
        np.add.at(self.times, index, times.astype(np.float32))

    def learn(self, now_ns: int, cycles: Cycles) -> None:
        """Learn the fleet's mean and spread, once an hour and after much trouble; open cycles follow.

        What is still open counts once for each device.
        """
        much = self.begun >= max(MUCH, MUCH_PU * self.all_times)
        if self.learned_ns and abs(now_ns - self.learned_ns) < HOUR_NS and not much:
            return
        self.learned_ns, self.begun = now_ns, 0
        self._spread(now_ns, cycles)
        if len(cycles.index):
            cycles.again(*self._rates(cycles.index, cycles.first_ns))

    def _spread(self, now_ns: int, cycles: Cycles) -> None:
        watched = self.since_ns > 0
        old = watched & (now_ns - self.since_ns > MEMORY_NS)
        if old.any():
            self.times[old] *= 0.5
            self.since_ns[old] = now_ns - (now_ns - self.since_ns[old]) // 2
        days = np.maximum(now_ns - self.since_ns[watched], 0) / DAY_NS
        times = self.times.astype(np.float64)
        times[cycles.index] += 1.0
        times = times[watched]
        self.all_times = all_times = float(times.sum())
        self.all_days = all_days = float(days.sum())
        self.mean_per_day = (all_times + PRIOR_PER_DAY * PRIOR_DAYS) / (all_days + PRIOR_DAYS)
        if all_times <= 0.0:
            return
        # Moments: the mean square beyond chance is (mean days)^2 / shape more than that of equal rates
        own = all_times / max(all_days, 1e-9) * days
        beyond = float(((times - own) ** 2 - own).sum())
        square = float((own**2).sum())
        shape = square / beyond if beyond > 0.0 else MOST_SHAPE
        log = np.log(min(max(shape, LEAST_SHAPE), MOST_SHAPE))
        weighed = (all_times * log + PRIOR_TIMES * np.log(PRIOR_SHAPE)) / (all_times + PRIOR_TIMES)
        self.shape = float(np.exp(weighed))

    def rates(self, index: I32, now_ns: int) -> tuple[F64, F64]:
        """Return (a, b) of the Gamma rates of these devices, a / b per day [k]."""
        return self._rates(index, np.full(len(index), now_ns))

    def _rates(self, index: I32, at_ns: I64) -> tuple[F64, F64]:
        days = np.where(self.since_ns[index] > 0, np.maximum(at_ns - self.since_ns[index], 0), 0) / DAY_NS
        return self.shape + self.times[index].astype(np.float64), self.shape / self.mean_per_day + days

    def derive(self) -> None:
        """Recompute the number of watched devices."""
        self.n_reporting = int(np.count_nonzero(self.since_ns))


# Trouble within so long of trouble that was counted before is the same. source: estimate
APART_NS = 600 * NS
# A node of which that is true needs people; it stands until less than STILL is left. e^-A is the chance of a
# false alarm for each time that trouble begins (Wald 1945). Each family may bring FALSE_PER_MONTH of them to
# a node, so that A is the log of how many beginnings it has for each of these; what it has counts ALARM / A
# times, as families are added up. source: one false drain in 100 node-months, which the project requires,
# shared by five families
ALARM, STILL = 8.0, 4.0
FALSE_PER_MONTH, MONTH_D = 0.002, 30.0
LEAST_A, MOST_A = 4.0, 12.0  # nats; of trouble that is hardly ever seen, twice may yet be chance. estimate
LONGEST_NS = 7 * DAY_NS  # after which, if it did not fail, that is how the device is. source: estimate
SETTLE_NS = 3600 * NS  # after a repair or work, in which nothing is counted. source: estimate
# Of the devices of a site; with more, it is none's own. That more than MANY fall silent in one look, of a
# site of thousands too, is their collector's doing, unless that is usual. source: estimate
MANY_PU, MANY, SILENT_TIMES = 0.05, 4, 3.0
MOST_PU = 0.5  # of the devices of a site; with more of which anything recurs, that is how the site is
# The same of errors and replays of NVLinks: a GPU has 18, so that with one noisy link in a hundred a sixth of
# the GPUs are noisy. source: estimate
NVLINK_PU = 0.02
RACK_PU, RACK = 0.5, 3  # of the nodes of a rack: it is the rack's
# Of a count from before anybody watched: so many, and so many times those of the others that have any, as in
# the rules. source: estimate
LIFETIME, UNUSUAL = 10, 10.0
# Of the devices of a site, or MANY: if more have a count as high, that is how the site is; a used one would
# be full of them else. source: estimate
FEW_PU = 0.002
MOST_TIMES = 9  # that one reading of a counter may add beyond the first; source: estimate
RECOVERIES = "gpu.nvlink_recovery_count"
MOST_KINDS = 3  # kinds of trouble in one sentence
LATELY_NS = 3600 * NS  # trouble that came no longer ago came now


@dataclass(frozen=True, slots=True)
class Stream:
    """A kind of trouble: a growing counter, or gaps of telemetry. `drains`: evidence for a drain.

    One mishap makes several counters of a `family` grow, and one device's of all its links: what they show is
    counted once. `codes` are of the same trouble. `per_day` is how often it comes once it has come to stay.
    """

    key: str
    words: str
    family: str
    drains: bool = True
    codes: tuple[int, ...] = ()
    per_day: float = RECURS_PER_DAY
    lifetime: bool = False  # what it counted before it was watched speaks too
    many_links: bool = False  # a device has many parts, a few of which are noisy

    @property
    def table(self) -> str:
        """Return the table of the stream's devices."""
        return self.key.partition(".")[0]

    def most(self, n: int) -> float:
        """Return the number of n devices on which trouble may recur at once; more is a property of the
        site."""
        most = max(1.0, MOST_PU * n)
        return min(most, max(MANY, NVLINK_PU * n)) if self.many_links else most


STREAMS: tuple[Stream, ...] = (
    # Of HBM: who corrects many errors hardly has more uncorrectable ones. source: USENIX ATC 2024 (Wu et al.)
    Stream("gpu.ecc_sbe_count", "corrected memory errors", "memory", drains=False),
    # 63: a row was remapped, 94: an uncorrectable error was contained. source: NVIDIA GPU memory error
    # management, by which uncorrectable errors use up spare rows one by one; that cells wear by days, not by
    # hours: estimate
    Stream(
        "gpu.row_remap_count",
        "remapped rows or contained errors of its memory",
        "memory",
        codes=(63, 94),
        per_day=1.0,
    ),
    Stream("gpu.nvlink_error_count", "NVLink errors", "nvlink", many_links=True),
    Stream("gpu.nvlink_replay_count", "NVLink replays", "nvlink", many_links=True),
    # One link with 505 recoveries where 5,759 others had none recovered three times in 21 minutes, once more
    # that day, and died five days later. source: marin-community/marin, issue 9086; the rate: estimate
    Stream(RECOVERIES, "NVLink recoveries", "nvlink", per_day=3.0, lifetime=True),
    Stream("gpu.pcie_replay_count", "PCIe replays", "pcie"),
    Stream("gpu.gap", "silences", "silence"),
    Stream("node.gap", "silences", "silence"),
    Stream("node.reboot_count", "restarts", "silence"),
    Stream("link.error_count", "errors", "link"),
    Stream("link.flap_count", "flaps", "link"),
    Stream("link.symbol_error_count", "symbol errors", "link"),
)
KEYS = tuple(s.key for s in STREAMS)
FAMILIES = tuple(dict.fromkeys(s.family for s in STREAMS))


def lifetime_nats(count: I64, index: I32, grown: F64) -> F64:
    """Return the surprise, in nats, of these devices' lifetime counts [k]; 0 for unsurprising ones.

    `count` [n] is as read now, -1 where it is not; `grown` [k] since the look before. High is at least
    LIFETIME, and UNUSUAL times what those have that have any beside the few with the highest, of which it
    must be one; then it is the log of how few are as high.
    """
    before = count[index] - grown
    if not (before >= LIFETIME).any():
        return np.zeros(len(index))
    read, some = np.count_nonzero(count >= 0), np.sort(count[count > 0])
    few = max(MANY, int(FEW_PU * read))
    usual = float(np.median(some[:-few])) if len(some) > few else 1.0
    rank = np.maximum(len(some) - np.searchsorted(some, before), 1)
    odd = (before >= max(LIFETIME, UNUSUAL * usual)) & (rank <= few)
    return np.where(odd, np.log(read / rank), 0.0)


class Recurring(EntityState):
    """Recurring trouble by stream and device, and the evidence against each node."""

    now_ns: int = scalar(0)
    free_ns: I64 = column("node", "i8")  # from when on trouble is counted again
    standing: Bool = column("node", "?")
    failing: Bool = column("gpu", "?")  # on an NVLink that recovers again and again
    out: Bool = column("node", "?")  # who is down or out of service
    usual: dict[str, BaselineRate] = part()
    cycles: dict[str, Cycles] = part()

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.usual = {s.key: BaselineRate(site.sizes[s.table], s.table) for s in STREAMS}
        self.cycles = {s.key: Cycles(s.per_day, s.table) for s in STREAMS}
        self._score: F32 = np.zeros(site.sizes["node"], np.float32)
        self._since_ns = self._before_ns = 0  # from the look before to this one, and when that was
        self._paused: dict[str, I32] = {}  # devices of nodes that are out, by table

    def update(self, now: HealthContext, rates: Rates, broken: Bool, book: FaultBook | None = None) -> None:
        """Take in what has come since the last look. broken [n_node]: who is down, but for short silences."""
        self._before_ns = self.now_ns
        self._since_ns = max(now.now_ns - self.now_ns, 0) if self.now_ns else 0
        self.now_ns = now.now_ns
        self._work(now)
        if broken.any() or self.out.any():
            self._pause(broken)
        for s in STREAMS:
            if self.site.sizes[s.table]:
                self._stream(s, rates, book, now)
        self._weigh()

    def _work(self, now: HealthContext) -> None:
        """Restart the history of devices under maintenance, and of their nodes: the trouble before it may be
        cured. Sleep cures nothing: the history of what sleeps stands still.
        """
        for s in STREAMS:
            if (covered := now.under_work(s.table)) is None:
                continue
            node = self.node_of(s.table, np.flatnonzero(covered).astype(np.int32))
            self.free_ns[node[node >= 0]] = self.now_ns + SETTLE_NS
            usual, cycles = self.usual[s.key], self.cycles[s.key]
            usual.since_ns[covered & (usual.since_ns > 0)] += self._since_ns
            if len(cycles.index):
                later_ns = np.minimum(cycles.first_ns + self._since_ns, self.now_ns)
                cycles.first_ns = np.where(covered[cycles.index], later_ns, cycles.first_ns)
                if (work := now.under_work(s.table, asleep=False)) is not None:
                    cycles.keep(~work[cycles.index])

    def _pause(self, out: Bool) -> None:
        """Pause the observation of a node that is out; its recurrences stay in force until it returns."""
        self.free_ns[out] = self.now_ns + SETTLE_NS
        back = self.out & ~out
        if not self._paused or not np.array_equal(out, self.out):
            self.out = out.copy()
            for table in sorted({s.table for s in STREAMS}):
                everyone = np.arange(self.site.sizes[table], dtype=np.int32)
                self._paused[table] = everyone[self._of_nodes(table, everyone, out)]
        for s in STREAMS:
            usual, cycles = self.usual[s.key], self.cycles[s.key]
            unwatched = self._paused[s.table]
            usual.since_ns[unwatched[usual.since_ns[unwatched] > 0]] += self._since_ns
            if len(cycles.index):
                paused = self._of_nodes(s.table, cycles.index, out)
                cycles.first_ns = np.where(paused, cycles.first_ns + self._since_ns, cycles.first_ns)
                cycles.keep(~self._of_nodes(s.table, cycles.index, back))

    def _of_nodes(self, table: str, index: I32, nodes: Bool) -> Bool:
        node = self.node_of(table, index)
        return np.asarray((node >= 0) & nodes[node], np.bool_)

    def node_of(self, table: str, index: I32) -> I32:
        """Return the node of each of these devices, -1 for none [k]."""
        if table == "node":
            return index
        return self.site.node_of_gpu[index] if table == "gpu" else self.site.node_of_link[index]

    def _stream(self, stream: Stream, rates: Rates, book: FaultBook | None, now: HealthContext) -> None:
        usual, cycles = self.usual[stream.key], self.cycles[stream.key]
        reporting, came = _came(stream, rates)
        if stream.codes and book is not None:
            codes = book.lately(stream.table, stream.codes, self._before_ns)
            if len(codes):
                came = np.union1d(came, codes).astype(np.int32)
                reporting = rates.spoke[stream.table] if reporting is None else reporting
        if reporting is None:
            return
        usual.watch(reporting, self.now_ns)
        if len(cycles.index):
            self._close(stream, cycles, usual)
        if len(came):
            came = usual.apart(self._own(stream, came, rates), self.now_ns, APART_NS)
        if len(came):
            before = len(cycles.index)
            sweep = self._sweep(stream, came, rates, now) if stream.lifetime else None
            common = cycles.add(came, self.now_ns, *usual.rates(came, self.now_ns), sweep)
            usual.count(common, np.ones(len(common), np.int32))
            usual.begun += len(cycles.index) - before + len(common)
        usual.learn(self.now_ns, cycles)

    def _sweep(self, stream: Stream, came: I32, rates: Rates, now: HealthContext) -> CounterSweep:
        """Return the growth of a rarely read counter at these devices: at most one event in APART_NS, as
        elsewhere."""
        counter = rates.counters[stream.key]
        at = np.searchsorted(counter.moved, came)
        grown, in_ns = counter.moved_by[at], (counter.moved_in_s[at] * NS).astype(np.int64)
        times = np.minimum(grown.astype(np.int64), 1 + np.minimum(in_ns // APART_NS, MOST_TIMES))
        since_ns = self.now_ns - np.where(times > 1, in_ns, 0)
        return CounterSweep(times, since_ns, lifetime_nats(now.raw(stream.key), came, grown))

    def _own(self, stream: Stream, index: I32, rates: Rates) -> I32:
        """Return those of these devices with trouble of their own and outside maintenance."""
        node = self.node_of(stream.table, index)
        known = (node >= 0) & (self.free_ns[node] <= self.now_ns)
        if stream.key == "gpu.gap":  # a node that falls silent takes its GPUs along
            site = self.site
            silent = np.bincount(site.node_of_gpu[rates.hushed["gpu"]], minlength=site.sizes["node"])
            size = np.diff(site.gpu_start_of_node)
            known &= ~rates.hushed["node"][node] & ((silent[node] < size[node]) | (size[node] == 1))
        index, node = index[known], node[known]
        some = np.unique(node)
        n = self.site.sizes["node"]
        limit = _many(n)
        if stream.key.endswith(".gap"):
            usual = self.usual[stream.key]
            chance = usual.mean_per_day * usual.n_reporting * self._since_ns / DAY_NS
            limit = min(limit, max(_many(n, 0.0), SILENT_TIMES * chance))
        if len(some) > limit:
            return index[:0]
        return index[~self._struck(some)[self.site.rack_of_node[node]]]

    def _struck(self, nodes: I32) -> Bool:
        """Return the racks that contain most of these nodes [n_rack]."""
        many = np.bincount(self.site.rack_of_node[nodes], minlength=self.site.sizes["rack"])
        whole = np.diff(self.site.node_start_of_rack)
        return np.asarray((many >= RACK) & (many >= RACK_PU * whole), np.bool_)

    def _close(self, stream: Stream, cycles: Cycles, usual: BaselineRate) -> None:
        """Move cycles that became unlikely, lasted long or are common to the usual rate."""
        score, whole = cycles.scores(self.now_ns)
        # A link that has recovered for a week is no better for it
        since_ns = usual.last_ns[cycles.index] if stream.lifetime else cycles.first_ns
        over = (whole <= 0.0) | (self.now_ns - since_ns >= LONGEST_NS)
        strong = score >= STILL
        some = (score > 0.0) & (cycles.count > 1)
        most, most_some = _many(usual.n_reporting), stream.most(usual.n_reporting)
        if self._spread(stream, cycles.index[strong], most) or self._spread(
            stream, cycles.index[some], most_some
        ):
            over[:] = True
        elif strong.any():
            node = self.node_of(stream.table, cycles.index)
            strong &= node >= 0
            struck = self._struck(np.unique(node[strong]))
            over |= strong & struck[self.site.rack_of_node[node]]
        if over.any():
            usual.count(cycles.index[over], cycles.count[over])
            cycles.keep(~over)

    def _spread(self, stream: Stream, index: I32, most: float) -> bool:
        """Return True if more than `most` of these devices have trouble, beyond what one node has.

        Where most devices of a node have it, what they share is to blame, such as its baseboard: they count
        once.
        """
        if len(index) <= most:
            return False
        everyone = self.node_of(stream.table, np.arange(self.site.sizes[stream.table], dtype=np.int32))
        node = self.node_of(stream.table, index)
        whole, many = (np.bincount(x[x >= 0], minlength=self.site.sizes["node"]) for x in (everyone, node))
        own = int(np.where(2 * many > whole, many - 1, 0).max(initial=0))
        return len(index) - own > most

    def _weigh(self) -> None:
        """Weigh the evidence against each node: per family, by the device and kind with most of it."""
        if not any(len(c.index) for c in self.cycles.values()):
            if self._score.any() or self.standing.any():
                self._score, self.standing = np.zeros_like(self._score), np.zeros_like(self.standing)
            if self.failing.any():
                self.failing = np.zeros_like(self.failing)
            return
        worst = np.zeros((len(FAMILIES), self.site.sizes["node"]))
        for s in STREAMS:
            if s.drains and len(self.cycles[s.key].index):
                index, score = self.of(s.key)
                np.maximum.at(worst[FAMILIES.index(s.family)], self.node_of(s.table, index), score)
        self._score = (self.weights() @ worst).astype(np.float32)
        self.standing = (self._score >= ALARM) | (self.standing & (self._score >= STILL))
        if len(self.cycles[RECOVERIES].index) or self.failing.any():
            index, score = self.of(RECOVERIES)
            score *= self.weights()[FAMILIES.index("nvlink")]
            still = (score >= ALARM) | (self.failing[index] & (score >= STILL))
            self.failing = np.zeros_like(self.failing)
            self.failing[index[still]] = True

    def weights(self) -> F64:
        """Return the weight of a nat of each family: the more, the seldomer its trouble begins [n_family].

        Until a node-month is watched, hardly more or less than 1.
        """
        nodes = max(self.site.sizes["node"], 1)
        per_month, months = np.zeros(len(FAMILIES)), np.full(len(FAMILIES), np.inf)
        for s in STREAMS:
            usual, k = self.usual[s.key], FAMILIES.index(s.family)
            if s.drains and usual.n_reporting:
                per_node = self.site.sizes[s.table] / nodes
                per_month[k] += usual.mean_per_day * per_node * MONTH_D
                months[k] = min(months[k], usual.all_days / per_node / MONTH_D)
        known = np.where(np.isfinite(months), months, 0.0)
        begins = (per_month * known + FALSE_PER_MONTH * np.exp(ALARM)) / (known + 1.0)
        return np.asarray(ALARM / np.clip(np.log(begins / FALSE_PER_MONTH), LEAST_A, MOST_A), np.float64)

    def score(self) -> F32:
        """Return the evidence against each node [n_node]: ALARM and more is a drain; 0 where there is none.

        Not to be written to.
        """
        return self._score

    def of(self, key: str) -> tuple[I32, F64]:
        """Return (devices, evidence of each in nats) of a stream; only those with evidence."""
        cycles = self.cycles[key]
        score = self._scores(cycles)
        some = (score > 0.0) & (self.node_of(key.partition(".")[0], cycles.index) >= 0)
        return cycles.index[some], score[some]

    def _scores(self, cycles: Cycles) -> F64:
        """Return the score of each cycle [k]; trouble that came once does not recur."""
        frequent = (cycles.count > 1) | (cycles.prior > 0.0)
        return np.where(frequent, cycles.scores(self.now_ns)[0], 0.0)

    def text(self, node: int) -> str:
        """Return the text of a node's recurrences, the gravest first; empty where there is none."""
        found: list[tuple[float, str]] = []
        for s in STREAMS:
            cycles = self.cycles[s.key]
            if not s.drains or not len(cycles.index):
                continue
            score = self._scores(cycles)
            for k in np.flatnonzero((self.node_of(s.table, cycles.index) == node) & (score > 0.0)).tolist():
                found.append((-float(score[k]), self._words(s, cycles, k, node)))
        return "; ".join(words for _, words in sorted(found)[:MOST_KINDS])

    def _words(self, stream: Stream, cycles: Cycles, k: int, node: int) -> str:
        whose = ""
        device = int(cycles.index[k])
        if stream.table == "gpu":
            whose = f"gpu{device - int(self.site.gpu_start_of_node[node])}: "
        elif stream.table == "link":
            whose = f"{self.site.name('link', device).rpartition('/')[2]}: "
        last_ns = self.now_ns - int(self.usual[stream.key].last_ns[device])
        last = f", the last {_span(last_ns / DAY_NS)} ago" if last_ns >= LATELY_NS else ""
        since = _span(max(self.now_ns - int(cycles.first_ns[k]), 0) / DAY_NS)
        return (
            f"{whose}{stream.words} {int(cycles.count[k])} times in {since}{last} "
            f"(usual: once in {_span(float(cycles.b[k] / cycles.a[k]))})"
        )

    def derive(self) -> None:
        """Weigh the evidence against each node again."""
        self._paused = {}
        self._weigh()

    def forget(self, table: str, entity: int) -> None:
        """Clear the record of this slot for a new device."""
        if table == "node":  # what its GPUs and links had may have been its doing
            for s in STREAMS:
                cycles = self.cycles[s.key]
                cycles.keep(self.node_of(s.table, cycles.index) != entity)
        super().forget(table, entity)


def _many(n: int, share_pu: float = MANY_PU) -> float:
    """Return the number of n devices that may have trouble at once by chance."""
    return max(1.0, min(MANY, n // 2), share_pu * n)


def _span(days: float) -> str:
    """Return a time in words."""
    for unit, number in (("min", 1440.0 * days), ("h", 24.0 * days)):
        if number < (90.0 if unit == "min" else 48.0):
            return f"{number:.0f} {unit}"
    return f"{days:.2g} days" if days < 10.0 else f"{days:.0f} days"


def _came(stream: Stream, rates: Rates) -> tuple[Bool | None, I32]:
    """Return (devices that report [n], None for none; devices with new trouble at this look)."""
    if stream.key.endswith(".gap"):
        spoke: Bool = rates.spoke[stream.table]
        return (spoke if spoke.any() else None), rates.fell[stream.table]
    counter = rates.counters.get(stream.key)
    if counter is None:
        return None, np.zeros(0, np.int32)
    return counter.heard, counter.moved
