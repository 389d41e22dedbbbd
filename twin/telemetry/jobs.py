"""Job table: a bounded table of slots with generations, and the nodes of each job.

A freed slot rests for the longest lease before it is used again, so that a late command or acknowledgement
cannot meet a stranger. While no source of jobs has reported, the placement is unknown, and every node is
protected.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from twin.catalogue import I32, NS, Bool
from twin.telemetry.events import JobEnded, JobStarted

KINDS = ("training", "inference", "batch", "unknown")
REST_S = 600.0  # the longest lease of the catalogue
MAX_UNSLOTTED = 10_000  # jobs without a slot whose nodes are remembered
TOLD = ("time_limit_s", "checkpoint_interval_s", "checkpoint_save_s", "checkpoint_restart_s")
# What reports of a job are measurements of, each a column of its own; 0 = it never said so.
DURATIONS = (
    "checkpoint_save_s",
    "checkpoint_block_s",
    "checkpoint_flush_s",
    "checkpoint_restart_s",
    "checkpoint_local_block_s",
    "checkpoint_local_restart_s",
)
MEASURED = 5  # of which the estimate is the median. source: estimate
# What only reports tell of a job: zeros at its start, and kept when it starts again in its slot.
REPORTED = (
    "checkpoint_block_s",
    "checkpoint_flush_s",
    "checkpoint_local_block_s",
    "checkpoint_local_restart_s",
    "checkpoint_local_interval_s",
    "saved_ns",
    "saved_local_ns",
    "checkpoint_told_ns",
    "checkpoint_at_ns",
    "recovered_ns",
    "recoveries",
)
_SLOT_COLUMNS = (
    "alive",
    "generation",
    "priority",
    "kind",
    "synchronous",
    "floor_w",
    "started_ns",
    "freed_ns",
    *TOLD,
    *REPORTED,
    "checkpoint_past",
)


class JobSlots:
    """Columns over slots [n]; `nodes` are ascending node indices per slot."""

    def __init__(self, n: int, n_node: int) -> None:
        self.n = n
        self.alive = np.zeros(n, np.bool_)
        self.generation = np.zeros(n, np.int32)
        self.priority = np.zeros(n, np.int32)
        self.kind = np.full(n, KINDS.index("unknown"), np.int8)
        self.synchronous = np.zeros(n, np.bool_)
        self.floor_w = np.zeros(n, np.float64)
        self.started_ns = np.zeros(n, np.int64)
        self.freed_ns = np.full(n, -(2**62), np.int64)
        # What a job says of itself; 0 where it says nothing.
        self.time_limit_s = np.zeros(n, np.float64)
        self.checkpoint_interval_s = np.zeros(n, np.float64)
        self.checkpoint_save_s = np.zeros(n, np.float64)
        self.checkpoint_restart_s = np.zeros(n, np.float64)
        # What it reports of its saves. A durable save outlives its nodes, one in memory outlives its process;
        # training stands still for `block`, and a save is durable after `flush`.
        self.checkpoint_block_s = np.zeros(n, np.float64)
        self.checkpoint_flush_s = np.zeros(n, np.float64)
        self.checkpoint_local_block_s = np.zeros(n, np.float64)
        self.checkpoint_local_restart_s = np.zeros(n, np.float64)
        self.checkpoint_local_interval_s = np.zeros(n, np.float64)  # between saves in memory, as it keeps it
        self.saved_ns = np.zeros(n, np.int64)  # when the durable save began that it holds; 0 = unknown
        self.saved_local_ns = np.zeros(n, np.int64)  # the same in memory
        self.checkpoint_told_ns = np.zeros(n, np.int64)  # of its last report, by our clock; 0 = none
        self.checkpoint_at_ns = np.zeros((n, 2), np.int64)  # by its own clock: durable, in memory
        self.recovered_ns = np.zeros(n, np.int64)  # of its last recovery, by its own clock
        self.recoveries = np.zeros(n, np.int32)  # from lost processes, no node with them
        # The last measurements of DURATIONS, and how late reports came [s], oldest first; NaN = none yet
        self.checkpoint_past = np.full((n, len(DURATIONS) + 1, MEASURED), np.nan)
        self.known = False  # whether a source of jobs has ever spoken
        self.names: list[str] = [""] * n
        self.tenants: list[str] = [""] * n
        self.accounts: list[str] = [""] * n
        self.nodes: list[I32] = [np.zeros(0, np.int32)] * n
        self.job_of_node = np.full(n_node, -1, np.int32)
        self.slot_of: dict[str, int] = {}
        self.unslotted: dict[str, I32] = {}  # jobs for which there was no slot, and their nodes
        self.counts = {"refused_full": 0, "unknown_nodes": 0, "unknown_ended": 0, "restarted": 0}

    def start(self, event: JobStarted, nodes: list[int], unknown: int, now_ns: int) -> int | None:
        """Give the job a slot; None when all are taken or resting. A second start replaces the first."""
        self.counts["unknown_nodes"] += unknown
        self.known = True
        held = np.unique(np.array(nodes, np.int32))
        self.unslotted.pop(event.job, None)
        slot = self.slot_of.get(event.job)
        if slot is not None:
            self.counts["restarted"] += 1
            self._unbind(slot)
        else:
            free = np.flatnonzero(~self.alive & (now_ns - self.freed_ns >= REST_S * NS))
            if len(free) == 0:
                self.counts["refused_full"] += 1
                self.unslotted[event.job] = held
                while len(self.unslotted) > MAX_UNSLOTTED:
                    del self.unslotted[next(iter(self.unslotted))]
                return None
            slot = int(free[0])
            self.generation[slot] += 1
            for name in REPORTED:
                getattr(self, name)[slot] = 0
            self.checkpoint_past[slot] = np.nan
        self.alive[slot] = True
        self.priority[slot] = event.priority
        self.kind[slot] = KINDS.index(event.kind)
        self.synchronous[slot] = event.coupling == "synchronous"
        self.floor_w[slot] = event.floor_w
        self.started_ns[slot] = now_ns
        for name in TOLD:
            getattr(self, name)[slot] = getattr(event, name)
        self.names[slot], self.tenants[slot] = event.job, event.tenant
        self.accounts[slot], self.nodes[slot] = event.account, held
        self.job_of_node[self.nodes[slot]] = slot
        self.slot_of[event.job] = slot
        return slot

    def end(self, event: JobEnded, now_ns: int) -> int | None:
        """Free the job's slot; None (and counted) if no such job runs."""
        slot = self.slot_of.pop(event.job, None)
        if slot is None:
            self.counts["unknown_ended"] += 1
            return None
        self._unbind(slot)
        self.alive[slot] = False
        self.freed_ns[slot] = now_ns
        self.names[slot] = self.tenants[slot] = self.accounts[slot] = ""
        return slot

    def shown(self, slot: int) -> str:
        """A job as people know it, `job:4711`: slots are for us; "" for a slot where none runs."""
        return f"job:{self.names[slot]}" if 0 <= slot < self.n and self.alive[slot] else ""

    def protected_nodes(self) -> Bool:
        """Nodes whose work may not be disturbed unasked [n_node].

        All, while no source of jobs has spoken; then those of jobs of unknown kind, and of jobs that found no
        slot, of which nothing but their nodes is known.
        """
        if not self.known:
            return np.ones(len(self.job_of_node), np.bool_)
        out = np.zeros(len(self.job_of_node), np.bool_)
        unknown = np.flatnonzero(self.alive & (self.kind == KINDS.index("unknown")))
        for nodes in (*(self.nodes[slot] for slot in unknown.tolist()), *self.unslotted.values()):
            out[nodes] = True
        return out

    def _unbind(self, slot: int) -> None:
        held = self.nodes[slot]
        self.job_of_node[held[self.job_of_node[held] == slot]] = -1
        self.nodes[slot] = np.zeros(0, np.int32)

    def remapped(self, n_node: int, old_of_new: I32, n: int | None = None) -> JobSlots:
        """The same jobs on another site: nodes that left are dropped, and jobs beyond `n` slots end."""
        out = JobSlots(self.n, n_node)
        out.restore(self.dump())
        if n is not None and n != self.n:
            out._resize(n)
        new_of_old = np.full(len(self.job_of_node), -1, np.int32)
        kept = np.flatnonzero(old_of_new >= 0)
        new_of_old[old_of_new[kept]] = kept
        out.job_of_node = np.full(n_node, -1, np.int32)
        out.job_of_node[kept] = self.job_of_node[old_of_new[kept]]
        out.job_of_node[out.job_of_node >= out.n] = -1
        for slot in np.flatnonzero(out.alive).tolist():
            out.nodes[slot] = _moved(self.nodes[slot], new_of_old)
        out.unslotted = {job: _moved(nodes, new_of_old) for job, nodes in self.unslotted.items()}
        return out

    def _resize(self, n: int) -> None:
        fresh = JobSlots(n, len(self.job_of_node))
        kept = min(n, self.n)
        for name in _SLOT_COLUMNS:
            column = getattr(fresh, name)
            column[:kept] = getattr(self, name)[:kept]
            setattr(self, name, column)
        self.names, self.tenants, self.accounts = (
            (some + [""] * n)[:n] for some in (self.names, self.tenants, self.accounts)
        )
        self.nodes = (self.nodes + fresh.nodes)[:n]
        self.n = n
        self.slot_of = {self.names[i]: i for i in np.flatnonzero(self.alive).tolist()}

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "alive": self.alive, "generation": self.generation, "priority": self.priority, "kind": self.kind,
            "synchronous": self.synchronous, "floor_w": self.floor_w, "started_ns": self.started_ns,
            "freed_ns": self.freed_ns, "checkpoint_past": self.checkpoint_past,
            **{k: getattr(self, k) for k in REPORTED},
            "names": list(self.names), "tenants": list(self.tenants),
            "accounts": list(self.accounts), "known": self.known, **{k: getattr(self, k) for k in TOLD},
            "unslotted": [[job, nodes] for job, nodes in self.unslotted.items()],
            "nodes_flat": np.concatenate([np.zeros(0, np.int32), *self.nodes]).astype(np.int32),
            "nodes_len": np.array([len(x) for x in self.nodes], np.int32),
            "job_of_node": self.job_of_node, "counts": dict(self.counts),
        }  # fmt: skip

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        for name in (*_SLOT_COLUMNS, "job_of_node"):
            if name in data:  # a snapshot of a version before knows less of jobs
                setattr(self, name, np.array(data[name]))
        self.names, self.tenants = list(data["names"]), list(data["tenants"])
        self.accounts, self.known = list(data["accounts"]), bool(data["known"])
        self.unslotted = {job: np.array(nodes, np.int32) for job, nodes in data["unslotted"]}
        cuts = np.cumsum(data["nodes_len"])[:-1]
        self.nodes = [np.array(x, np.int32) for x in np.split(data["nodes_flat"], cuts)]
        self.counts = dict(data["counts"])
        self.slot_of = {self.names[i]: i for i in np.flatnonzero(self.alive).tolist()}


def _moved(nodes: I32, new_of_old: I32) -> I32:
    moved = new_of_old[nodes]
    return cast(I32, np.sort(moved[moved >= 0]))
