"""Recurrences: devices on which something harmless comes again and again, more often than it usually does.

One retried transfer, one short silence, one flap tells nothing; the fifth within hours does. For each device
and each kind of trouble the times at which it came are weighed by a sequential test (Wald 1945, restarted as
in Page 1954): how much likelier are they if trouble comes every few hours than if it comes as it did before
on this device and on its like? What a device usually has is a Gamma-Poisson rate, learned from the fleet and
from the device itself. What many have at once, or as a rule, is no sign of one. May import rates, the
moment, the site and frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from twin.frame import F32, F64, I32, NS, Bool
from twin.health.cycles import Cycles
from twin.health.now import Now
from twin.health.rates import Rates
from twin.health.usual import Usual
from twin.site import Site

DAY_NS = 86_400 * NS
# What comes within so long of what was counted before is the same trouble. source: estimate
APART_NS = 600 * NS
# A device of which that is true needs people. e^-8 is the chance of a false alarm for each time that trouble
# begins (Wald 1945): with some ten beginnings per node and month, well below one false drain in 100
# node-months. source: estimate, checked on simulated fleets
ALARM, STILL = 8.0, 4.0  # nats; an alarm stands until less is left
LONGEST_NS = 7 * DAY_NS  # after which, if it did not fail, that is how the device is. source: estimate
SETTLE_NS = 3600 * NS  # after a repair or work, in which nothing is counted. source: estimate
MANY_PU, MANY = 0.05, 4  # of the nodes of a site; with more, it is no node's own. source: estimate
RACK_PU, RACK = 0.5, 3  # of the nodes of a rack at once: it is the rack's
MOST_TOLD = 3  # kinds of trouble in one sentence


class Stream(NamedTuple):
    """A kind of trouble: a counter that grows, or telemetry that gaps. `drains`: it speaks for a drain."""

    key: str
    words: str
    drains: bool = True

    @property
    def table(self) -> str:
        """Whose it is."""
        return self.key.partition(".")[0]


STREAMS: tuple[Stream, ...] = (
    # Of HBM: who corrects many errors hardly has more uncorrectable ones. source: USENIX ATC 2024 (Wu et al.)
    Stream("gpu.ecc_sbe_count", "corrected memory errors", drains=False),
    Stream("gpu.row_remap_count", "remapped memory rows"),
    Stream("gpu.nvlink_error_count", "NVLink errors"),
    Stream("gpu.nvlink_replay_count", "NVLink replays"),
    Stream("gpu.nvlink_recovery_count", "NVLink recoveries"),
    Stream("gpu.pcie_replay_count", "PCIe replays"),
    Stream("gpu.gap", "silences"),
    Stream("node.gap", "silences"),
    Stream("node.reboot_count", "restarts"),
    Stream("link.error_count", "errors"),
    Stream("link.flap_count", "flaps"),
    Stream("link.symbol_error_count", "symbol errors"),
)
KEYS = tuple(s.key for s in STREAMS)


class Recurring:
    """What comes again and again, by stream and device; and how much of it speaks against each node."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.usual = {s.key: Usual(site.sizes[s.table]) for s in STREAMS}
        self.cycles = {s.key: Cycles() for s in STREAMS}
        self.now_ns = 0
        self.free_ns = np.zeros(site.sizes["node"], np.int64)  # from when on trouble is counted again
        self.standing: Bool = np.zeros(site.sizes["node"], np.bool_)
        self._score: F32 = np.zeros(site.sizes["node"], np.float32)

    def update(self, now: Now, rates: Rates, broken: Bool) -> None:
        """Take in what has come since the last look. broken [n_node]: who is down, but for short silences."""
        self.now_ns = now.now_ns
        if (work := now.under_work("node")) is not None:
            self.free_ns[work] = self.now_ns + SETTLE_NS
        if broken.any():
            self.free_ns[broken] = self.now_ns + SETTLE_NS
            for s in STREAMS:
                self._drop(s, broken)
        for s in STREAMS:
            if self.site.sizes[s.table]:
                self._stream(s, rates)
        self._weigh()

    def _drop(self, stream: Stream, nodes: Bool) -> None:
        """What came before a failure is over with it."""
        cycles = self.cycles[stream.key]
        if len(cycles.index):
            cycles.keep(~self._of_nodes(stream.table, cycles.index, nodes))

    def _of_nodes(self, table: str, index: I32, nodes: Bool) -> Bool:
        node = self.node_of(table, index)
        return np.asarray((node >= 0) & nodes[node], np.bool_)

    def node_of(self, table: str, index: I32) -> I32:
        """The node that each of these devices belongs to, -1 for none [k]."""
        if table == "node":
            return index
        return self.site.node_of_gpu[index] if table == "gpu" else self.site.node_of_link[index]

    def _stream(self, stream: Stream, rates: Rates) -> None:
        usual, cycles = self.usual[stream.key], self.cycles[stream.key]
        heard, came = _came(stream, rates)
        if heard is None:
            return
        usual.hear(heard, self.now_ns)
        if len(cycles.index):
            self._close(cycles, usual)
        usual.learn(self.now_ns, cycles)
        if len(came):
            came = usual.apart(self._own(stream, came, rates), self.now_ns, APART_NS)
        if len(came):
            common = cycles.add(came, self.now_ns, *usual.rates(came, self.now_ns))
            usual.count(common, np.ones(len(common), np.int32))

    def _own(self, stream: Stream, index: I32, rates: Rates) -> I32:
        """Of these devices, those whose trouble is their own and that nobody works at."""
        node = self.node_of(stream.table, index)
        known = (node >= 0) & (self.free_ns[node] <= self.now_ns)
        if stream.key == "gpu.gap":  # a node that falls silent takes its GPUs along
            site = self.site
            silent = np.bincount(site.node_of_gpu[rates.hushed["gpu"]], minlength=site.sizes["node"])
            size = np.diff(site.gpu_start_of_node)
            known &= ~rates.hushed["node"][node] & ((silent[node] < size[node]) | (size[node] == 1))
        index, node = index[known], node[known]
        some = np.unique(node)
        if len(some) > max(MANY, MANY_PU * self.site.sizes["node"]):
            return index[:0]
        rack = self.site.rack_of_node
        many = np.bincount(rack[some], minlength=self.site.sizes["rack"])
        whole = np.diff(self.site.node_start_of_rack)
        struck = (many >= RACK) & (many >= RACK_PU * whole)
        return index[~struck[rack[node]]]

    def _close(self, cycles: Cycles, usual: Usual) -> None:
        """What has become unlikely, or has gone on for long, or is common, is how those devices are."""
        score, whole = cycles.scores(self.now_ns)
        over = (whole <= 0.0) | (self.now_ns - cycles.first_ns >= LONGEST_NS)
        if np.count_nonzero(score >= STILL) > max(MANY, MANY_PU * usual.n_heard):
            over[:] = True
        if over.any():
            usual.count(cycles.index[over], cycles.count[over])
            cycles.keep(~over)

    def _weigh(self) -> None:
        """How much speaks against each node: its own trouble, that of its links, and of its worst GPU."""
        if not any(len(c.index) for c in self.cycles.values()):
            if self._score.any() or self.standing.any():
                self._score, self.standing = np.zeros_like(self._score), np.zeros_like(self.standing)
            return
        n = self.site.sizes["node"]
        score, gpus = np.zeros(n), np.zeros(self.site.sizes["gpu"])
        for s in STREAMS:
            cycles = self.cycles[s.key]
            if not s.drains or not len(cycles.index):
                continue
            mine = np.maximum(cycles.scores(self.now_ns)[0], 0.0)
            if s.table == "gpu":
                gpus[cycles.index] += mine
            else:
                node = self.node_of(s.table, cycles.index)
                np.add.at(score, node[node >= 0], mine[node >= 0])
        some = np.flatnonzero(gpus)
        worst = np.zeros(n)
        np.maximum.at(worst, self.site.node_of_gpu[some], gpus[some])
        self._score = (score + worst).astype(np.float32)
        self.standing = (self._score >= ALARM) | (self.standing & (self._score >= STILL))

    def score(self) -> F32:
        """How much speaks against each node, in nats [n_node]; 0 where nothing does. Not to be written to."""
        return self._score

    def of(self, key: str) -> tuple[I32, F64]:
        """(devices, how much each has in nats) of a stream; only those that have any."""
        cycles = self.cycles[key]
        score = cycles.scores(self.now_ns)[0]
        some = (score > 0.0) & (self.node_of(key.partition(".")[0], cycles.index) >= 0)
        return cycles.index[some], score[some]

    def told(self, node: int) -> str:
        """What recurs at a node, the gravest first, in words; empty where nothing does."""
        found: list[tuple[float, str]] = []
        for s in STREAMS:
            cycles = self.cycles[s.key]
            if not s.drains or not len(cycles.index):
                continue
            score = cycles.scores(self.now_ns)[0]
            for k in np.flatnonzero((self.node_of(s.table, cycles.index) == node) & (score > 0.0)).tolist():
                found.append((-float(score[k]), self._words(s, cycles, k, node)))
        return "; ".join(words for _, words in sorted(found)[:MOST_TOLD])

    def _words(self, stream: Stream, cycles: Cycles, k: int, node: int) -> str:
        whose = ""
        device = int(cycles.index[k])
        if stream.table == "gpu":
            whose = f"gpu{device - int(self.site.gpu_start_of_node[node])}: "
        elif stream.table == "link":
            whose = f"{self.site.name('link', device).rpartition('/')[2]}: "
        hours = (self.now_ns - int(cycles.first_ns[k])) / NS / 3600.0
        usual_days = float(cycles.b[k] / cycles.a[k])
        return (
            f"{whose}{stream.words} {int(cycles.count[k])} times in {hours:.2g} h "
            f"(usual: one in {usual_days:.2g} days)"
        )

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""
        for s in STREAMS:
            if s.table == table:
                self.usual[s.key].forget(entity)
                self.cycles[s.key].keep(self.cycles[s.key].index != entity)
        if table == "node":
            self.free_ns[entity], self.standing[entity] = 0, False

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Recurring:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        out = Recurring(site)
        out.now_ns = self.now_ns
        for s in STREAMS:
            source = old_of_new[s.table]
            out.usual[s.key] = self.usual[s.key].remapped(source)
            new_of_old = np.full(self.site.sizes[s.table], -1, np.int32)
            kept = np.flatnonzero(source >= 0)
            new_of_old[source[kept]] = kept
            out.cycles[s.key] = self.cycles[s.key].moved(new_of_old)
        node = old_of_new["node"]
        kept = np.flatnonzero(node >= 0)
        out.free_ns[kept], out.standing[kept] = self.free_ns[node[kept]], self.standing[node[kept]]
        out._weigh()
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "now_ns": self.now_ns, "free_ns": self.free_ns, "standing": self.standing,
            "usual": {k: u.dump() for k, u in self.usual.items()},
            "cycles": {k: c.dump() for k, c in self.cycles.items()},
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.now_ns = int(data["now_ns"])
        self.free_ns, self.standing = np.array(data["free_ns"]), np.array(data["standing"], np.bool_)
        for s in STREAMS:
            if s.key in data["usual"]:
                self.usual[s.key].restore(data["usual"][s.key])
                self.cycles[s.key].restore(data["cycles"][s.key])
        self._weigh()


def _came(stream: Stream, rates: Rates) -> tuple[Bool | None, I32]:
    """(who is heard [n], None while nobody is; who has trouble anew at this look)."""
    if stream.key.endswith(".gap"):
        spoke: Bool = rates.spoke[stream.table]
        return (spoke if spoke.any() else None), rates.fell[stream.table]
    counter = rates.counters.get(stream.key)
    if counter is None:
        return None, np.zeros(0, np.int32)
    return counter.heard, counter.moved
