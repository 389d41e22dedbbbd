"""Job table: a bounded table of slots with generations, and the nodes of each job.

A freed slot rests for the longest lease on a job before it is used again, so that a late command or
acknowledgement cannot meet a stranger. While no source of jobs has reported, the placement is unknown, and
every node is protected.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from twin.catalogue import F64, I8, I32, I64, NS, Bool, clean
from twin.telemetry.columns import EntityState, column, scalar
from twin.telemetry.events import JobEnded, JobStarted

KINDS = ("training", "inference", "batch", "unknown")
REST_S = 600.0  # the longest lease on a job of the catalogue
MAX_AHEAD_S = 60.0  # of a clock that is ahead of ours, before its start times are ignored; source: estimate
MAX_RAN_S = 10 * 366 * 86_400.0  # the longest run of a job that is believed; source: estimate
MAX_UNSLOTTED = 10_000  # jobs without a slot whose nodes are remembered
STATED_FIELDS = (
    "time_limit_s",
    "checkpoint_interval_s",
    "checkpoint_save_s",
    "checkpoint_restart_s",
    "lease_s",
)
# Reports of a job that are measurements, each a column of its own; 0 = it never said so.
DURATIONS = (
    "checkpoint_save_s",
    "checkpoint_block_s",
    "checkpoint_flush_s",
    "checkpoint_restart_s",
    "checkpoint_local_block_s",
    "checkpoint_local_restart_s",
)
MEASURED = 5  # of which the estimate is the median. source: estimate
# Columns that only reports fill: zeros at a job's start, and kept when it starts again in its slot.
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
_NODES = np.zeros(0, np.int32)


class JobSlots(EntityState):
    """Columns over slots [n]; `nodes` are ascending node indices per slot.

    Jobs may share a node: `job_of_node` is one of those that run there.
    """

    alive: Bool = column("job", "?")
    generation: I32 = column("job", "i4")
    priority: I32 = column("job", "i4")
    kind: I8 = column("job", "i1", KINDS.index("unknown"))
    synchronous: Bool = column("job", "?")
    floor_w: F64 = column("job", "f8")
    started_ns: I64 = column("job", "i8")  # when we received its report on these nodes
    reported_start_ns: I64 = column("job", "i8")  # as its scheduler says; 0 = unknown
    freed_ns: I64 = column("job", "i8", -(2**62))
    # From the job's start; 0 where nothing was said.
    time_limit_s: F64 = column("job", "f8")
    checkpoint_interval_s: F64 = column("job", "f8")
    checkpoint_save_s: F64 = column("job", "f8")
    checkpoint_restart_s: F64 = column("job", "f8")
    lease_s: F64 = column("job", "f8")  # of a job that registered itself; 0 = a scheduler reported it
    # From the job's reports of its saves. A durable save outlives its nodes, one in memory outlives its
    # process; training stands still for `block`, and a save is durable after `flush`.
    checkpoint_block_s: F64 = column("job", "f8")
    checkpoint_flush_s: F64 = column("job", "f8")
    checkpoint_local_block_s: F64 = column("job", "f8")
    checkpoint_local_restart_s: F64 = column("job", "f8")
    checkpoint_local_interval_s: F64 = column("job", "f8")  # between saves in memory, as the job keeps it
    saved_ns: I64 = column("job", "i8")  # when the durable save began that it holds; 0 = unknown
    saved_local_ns: I64 = column("job", "i8")  # the same in memory
    checkpoint_told_ns: I64 = column("job", "i8")  # of its last report, by our clock; 0 = none
    checkpoint_at_ns: I64 = column("job", "i8", trail=(2,))  # by its own clock: durable, in memory
    recovered_ns: I64 = column("job", "i8")  # of its last recovery, by its own clock
    recoveries: I32 = column("job", "i4")  # from lost processes, no node with them
    # The last measurements of DURATIONS, and how late reports came [s], oldest first; NaN = none yet
    checkpoint_past: F64 = column("job", "f8", np.nan, trail=(len(DURATIONS) + 1, MEASURED))
    job_of_node: I32 = column("node", "i4", -1)
    known: bool = scalar(False)  # whether a source of all jobs, a scheduler, has ever spoken
    names: list[str] = scalar([])
    tenants: list[str] = scalar([])
    accounts: list[str] = scalar([])
    queues: list[str] = scalar([])
    storages: list[str] = scalar([])  # as jobs say
    counts: dict[str, int] = scalar(
        {"refused_full": 0, "unknown_nodes": 0, "unknown_ended": 0, "restarted": 0}
    )
    # `nodes` and `unslotted`, as a snapshot has them
    nodes_flat: I32 = scalar(_NODES)
    nodes_len: I32 = scalar(_NODES)
    _unslotted: list[tuple[str, I32]] = scalar([])

    def __init__(self, n: int, n_node: int) -> None:
        super().__init__({"job": n, "node": n_node})
        self.n = n
        self.nodes: list[I32] = [_NODES] * n
        self.slot_of: dict[str, int] = {}
        self.unslotted: dict[str, I32] = {}  # jobs for which there was no slot, and their nodes
        self._jobs_on: I64 = np.zeros(n_node, np.int64)  # jobs in slots that hold each node
        self.names, self.tenants, self.accounts = ([""] * n for _ in range(3))
        self.queues, self.storages = [""] * n, [""] * n

    def running_since_ns(self, slots: Any) -> I64:
        """Return the start of these jobs: as the scheduler reports it, else when they first reported."""
        reported_ns = self.reported_start_ns[slots]
        start_ns: I64 = np.where(reported_ns > 0, reported_ns, self.started_ns[slots])
        return start_ns

    def start(self, event: JobStarted, nodes: list[int], unknown: int, now_ns: int) -> int | None:
        """Give the job a slot; None when all are taken or resting. A second start replaces the first.

        The second is no restart if it is on the same nodes and its scheduler reports a start from before the
        first reported. A job that registered itself says nothing of the other nodes: they stay protected. A
        start time that `start_fault` refuses is ignored.
        """
        self.counts["unknown_nodes"] += unknown
        self.known |= not event.lease_s
        placed = np.unique(np.array(nodes, np.int32))
        self.unslotted.pop(event.job, None)
        slot = self.slot_of.get(event.job)
        same = slot is not None and self._same_run(slot, event, placed)
        if slot is not None:
            self.counts["restarted"] += not same
            self._unbind(slot)
        else:
            free = np.flatnonzero(~self.alive & (now_ns - self.freed_ns >= REST_S * NS))
            if len(free) == 0:
                self.counts["refused_full"] += 1
                self.unslotted[event.job] = placed
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
        if not same:
            self.started_ns[slot] = now_ns
        self.reported_start_ns[slot] = 0 if start_fault(event, now_ns) else min(event.started_ns, now_ns)
        for name in STATED_FIELDS:
            getattr(self, name)[slot] = getattr(event, name)
        self.names[slot], self.tenants[slot] = event.job, event.tenant
        self.accounts[slot], self.queues[slot] = event.account, event.queue
        self.storages[slot] = event.storage
        self.nodes[slot] = placed
        self.job_of_node[placed] = slot
        self._jobs_on[placed] += 1
        self.slot_of[event.job] = slot
        return slot

    def end(self, event: JobEnded, now_ns: int) -> int | None:
        """Free the job's slot; returns None (and counts) if no such job runs."""
        slot = self.slot_of.pop(event.job, None)
        if slot is None:
            self.counts["unknown_ended"] += 1
            return None
        self._unbind(slot)
        self.alive[slot] = False
        self.freed_ns[slot] = now_ns
        self.names[slot] = self.tenants[slot] = self.accounts[slot] = ""
        self.queues[slot] = self.storages[slot] = ""
        return slot

    def _same_run(self, slot: int, event: JobStarted, nodes: I32) -> bool:
        """Return True if an event repeats the start of the run in this slot."""
        before = 0 < event.started_ns <= int(self.started_ns[slot])
        return before and np.array_equal(self.nodes[slot], nodes)

    def slot_named(self, name: str) -> int | None:
        """Return the slot of a running job by its name, with or without `job:` in front; None if it does
        not run.

        The scheduler's own number (`101` for `slurm:demo:101`) is enough where only one job has it.
        """
        own = name.removeprefix("job:")
        slot = self.slot_of.get(name, self.slot_of.get(own))
        if slot is None and own:
            found = [s for job, s in self.slot_of.items() if job.endswith(f":{own}")]
            slot = found[0] if len(found) == 1 else None
        return slot

    def shown(self, slot: int) -> str:
        """Return the public name of a job, `job:4711`; "" for a free slot."""
        return f"job:{self.names[slot]}" if 0 <= slot < self.n and self.alive[slot] else ""

    def protected_nodes(self) -> Bool:
        """Return the nodes that may not be disturbed unless an operator requests it [n_node].

        All nodes, while no source of jobs has reported. Afterwards the nodes of jobs of unknown kind, and of
        jobs that found no slot: of these only the nodes are known.
        """
        if not self.known:
            return np.ones(len(self.job_of_node), np.bool_)
        out = np.zeros(len(self.job_of_node), np.bool_)
        unknown = np.flatnonzero(self.alive & (self.kind == KINDS.index("unknown")))
        for nodes in (*(self.nodes[slot] for slot in unknown.tolist()), *self.unslotted.values()):
            out[nodes] = True
        return out

    def _unbind(self, slot: int) -> None:
        placed = self.nodes[slot]
        self.job_of_node[placed[self.job_of_node[placed] == slot]] = -1
        self.nodes[slot] = _NODES
        self._jobs_on[placed] -= 1
        self._bind_shared(placed)

    def _bind_shared(self, nodes: I32) -> None:
        """Bind those of these nodes that are bound to no job, and that another job holds too, to that."""
        shared = nodes[(self._jobs_on[nodes] > 0) & (self.job_of_node[nodes] < 0)]
        if len(shared):
            every = np.concatenate(self.nodes)
            slots = np.repeat(np.arange(self.n, dtype=np.int32), [len(x) for x in self.nodes])
            here = np.isin(every, shared)
            self.job_of_node[every[here]] = slots[here]

    def remapped(self, n_node: int, old_of_new: I32, n: int | None = None) -> JobSlots:
        """Return the same jobs on another site: removed nodes are dropped, and jobs beyond `n` slots end."""
        out = JobSlots(self.n if n is None else n, n_node)
        slots = np.arange(out.n, dtype=np.int32)
        self._flatten()
        out.adopt(self, {"node": old_of_new, "job": np.where(slots < self.n, slots, np.int32(-1))})
        out.job_of_node[out.job_of_node >= out.n] = -1
        out.names, out.tenants, out.accounts, out.queues, out.storages = (
            (some + [""] * out.n)[: out.n]
            for some in (self.names, self.tenants, self.accounts, self.queues, self.storages)
        )
        new_of_old = np.full(len(self.job_of_node), -1, np.int32)
        kept = np.flatnonzero(old_of_new >= 0)
        new_of_old[old_of_new[kept]] = kept
        out.nodes = [_moved(nodes, new_of_old) for nodes in (self.nodes + [_NODES] * out.n)[: out.n]]
        out.unslotted = {job: _moved(nodes, new_of_old) for job, nodes in self.unslotted.items()}
        out._count()
        out._bind_shared(np.arange(n_node, dtype=np.int32))
        return out

    def dump(self) -> dict[str, Any]:
        """Return the whole state, for a snapshot or a checksum."""
        self._flatten()
        return super().dump()

    def _flatten(self) -> None:
        self.nodes_flat = np.concatenate([_NODES, *self.nodes]).astype(np.int32)
        self.nodes_len = np.array([len(x) for x in self.nodes], np.int32)
        self._unslotted = [(job, nodes) for job, nodes in self.unslotted.items()]

    def derive(self) -> None:
        """Recompute the nodes of each slot, and the slot of each job."""
        self.nodes = np.split(self.nodes_flat, np.cumsum(self.nodes_len)[:-1]) if len(self.nodes_len) else []
        self.unslotted = {job: np.array(nodes, np.int32) for job, nodes in self._unslotted}
        self.slot_of = {self.names[i]: i for i in np.flatnonzero(self.alive).tolist()}
        self._count()

    def _count(self) -> None:
        held = np.concatenate([_NODES, *self.nodes])
        self._jobs_on = np.bincount(held, minlength=len(self.job_of_node))


def start_fault(event: JobStarted, now_ns: int) -> str | None:
    """Return a reason to ignore the start time of a job; None if it is plausible or unknown."""
    ran_s = (now_ns - event.started_ns) / NS
    if event.started_ns == 0 or -MAX_AHEAD_S <= ran_s <= MAX_RAN_S:
        return None
    off = f"{-ran_s:.0f} s ahead of our clock" if ran_s < 0 else f"{ran_s / 86_400:.0f} days ago"
    return (
        f"job {clean(event.job)}: its start is {off}; expected at most {MAX_AHEAD_S:.0f} s ahead and "
        f"{MAX_RAN_S / 86_400:.0f} days ago"
    )


def _moved(nodes: I32, new_of_old: I32) -> I32:
    moved = new_of_old[nodes]
    return cast(I32, np.sort(moved[moved >= 0]))
