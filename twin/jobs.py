"""Jobs: a bounded table of slots with generations, and which nodes each job holds.

A freed slot rests for the longest lease before it is used again, so that a late command or acknowledgement
cannot meet a stranger. May import events and frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.events import JobEnded, JobStarted
from twin.frame import I32, NS

KINDS = ("training", "inference", "batch", "unknown")
REST_S = 600.0  # the longest lease of the catalogue
_SLOT_COLUMNS = (
    "alive",
    "generation",
    "priority",
    "kind",
    "synchronous",
    "floor_w",
    "started_ns",
    "freed_ns",
)


class Jobs:
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
        self.names: list[str] = [""] * n
        self.tenants: list[str] = [""] * n
        self.nodes: list[I32] = [np.zeros(0, np.int32)] * n
        self.job_of_node = np.full(n_node, -1, np.int32)
        self.slot_of: dict[str, int] = {}
        self.counts = {"refused_full": 0, "unknown_nodes": 0, "unknown_ended": 0, "restarted": 0}

    def start(self, event: JobStarted, nodes: list[int], unknown: int, now_ns: int) -> int | None:
        """Give the job a slot; None when all are taken or resting. A second start replaces the first."""
        self.counts["unknown_nodes"] += unknown
        slot = self.slot_of.get(event.job)
        if slot is not None:
            self.counts["restarted"] += 1
            self._unbind(slot)
        else:
            free = np.flatnonzero(~self.alive & (now_ns - self.freed_ns >= REST_S * NS))
            if len(free) == 0:
                self.counts["refused_full"] += 1
                return None
            slot = int(free[0])
            self.generation[slot] += 1
        self.alive[slot] = True
        self.priority[slot] = event.priority
        self.kind[slot] = KINDS.index(event.kind)
        self.synchronous[slot] = event.coupling == "synchronous"
        self.floor_w[slot] = event.floor_w
        self.started_ns[slot] = now_ns
        self.names[slot], self.tenants[slot] = event.job, event.tenant
        self.nodes[slot] = np.unique(np.array(nodes, np.int32))
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
        self.names[slot] = self.tenants[slot] = ""
        return slot

    def _unbind(self, slot: int) -> None:
        held = self.nodes[slot]
        self.job_of_node[held[self.job_of_node[held] == slot]] = -1
        self.nodes[slot] = np.zeros(0, np.int32)

    def remapped(self, n_node: int, old_of_new: I32, n: int | None = None) -> Jobs:
        """The same jobs on another site: nodes that left are dropped, and jobs beyond `n` slots end."""
        out = Jobs(self.n, n_node)
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
            moved = new_of_old[self.nodes[slot]]
            out.nodes[slot] = np.sort(moved[moved >= 0])
        return out

    def _resize(self, n: int) -> None:
        fresh = Jobs(n, len(self.job_of_node))
        kept = min(n, self.n)
        for name in _SLOT_COLUMNS:
            column = getattr(fresh, name)
            column[:kept] = getattr(self, name)[:kept]
            setattr(self, name, column)
        self.names, self.tenants = (self.names + [""] * n)[:n], (self.tenants + [""] * n)[:n]
        self.nodes = (self.nodes + fresh.nodes)[:n]
        self.n = n
        self.slot_of = {self.names[i]: i for i in np.flatnonzero(self.alive).tolist()}

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "alive": self.alive, "generation": self.generation, "priority": self.priority, "kind": self.kind,
            "synchronous": self.synchronous, "floor_w": self.floor_w, "started_ns": self.started_ns,
            "freed_ns": self.freed_ns, "names": list(self.names), "tenants": list(self.tenants),
            "nodes_flat": np.concatenate([np.zeros(0, np.int32), *self.nodes]).astype(np.int32),
            "nodes_len": np.array([len(x) for x in self.nodes], np.int32),
            "job_of_node": self.job_of_node, "counts": dict(self.counts),
        }  # fmt: skip

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        for name in (*_SLOT_COLUMNS, "job_of_node"):
            setattr(self, name, np.array(data[name]))
        self.names, self.tenants = list(data["names"]), list(data["tenants"])
        cuts = np.cumsum(data["nodes_len"])[:-1]
        self.nodes = [np.array(x, np.int32) for x in np.split(data["nodes_flat"], cuts)]
        self.counts = dict(data["counts"])
        self.slot_of = {self.names[i]: i for i in np.flatnonzero(self.alive).tolist()}
