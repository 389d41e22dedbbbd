"""Common-cause failures: failures of several nodes with a common cause, which are no evidence against the
nodes.

Either a diagnosed fault above them explains them, or so many failed under one entity within ten minutes
that chance does not account for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from twin.catalogue import F64, I32, I64, NS, U8, Bool
from twin.contracts import FAILURE_CLASSES, Fault
from twin.diagnosis import Topology
from twin.health.context import HealthContext
from twin.site import Site
from twin.telemetry import EntityState, OldOfNew, records, scalar

WINDOW_S = 600.0  # within which failures are together; source: estimate
LEAST_NODES = 3
LEAST_LOG_PU = math.log(1e-3)  # of so many by chance; below, the cause is in common; source: estimate
# Failures per node-second before anything was seen, and the node-seconds that this weighs. source: 6.5 per
# 1000 node-days, arXiv 2410.21680; the weight is an estimate
PRIOR_PER_S, PRIOR_S = 6.5 / 1000.0 / 86_400.0, 1000.0 * 86_400.0
MAX_SHOCKS, MAX_NODES, MAX_JOBS = 256, 1000, 256
MAX_ENDS, MAX_TURNS = 16, 64  # windows looked at, and shocks found, in one look
JOIN_S = 3600.0  # failures that the same fault explains are one shock within this
SUPPLY, COOLING = ("power", "silent", "other"), ("thermal", "power", "silent")
# Faults that take nodes below them along, and the classes of failure that they explain; source: estimate
EXPLAINS: dict[str, tuple[str, ...]] = {
    "feed_lost": SUPPLY,
    "breaker_tripped": SUPPLY,
    "grid_event": SUPPLY,
    "pump_trip": COOLING,
    "filter_blocked": COOLING,
    "valve_stuck": COOLING,
    "branch_blocked": COOLING,
    "cooler_failed": COOLING,
    "heat_wave": ("thermal",),
    "leak": (*COOLING, "other"),
}
# The loss of a supply is reported within a period of the building's system, and takes nothing down before
SUPPLY_FAULTS, LATE_S = ("feed_lost", "breaker_tripped", "grid_event"), 120.0
_ABOVE = ("rack", "cdu", "loop", "hall")


class Fallen(NamedTuple):
    """Recent failures [k]; `fresh`: since the last look; `shared`: already known to be shared."""

    node: I32
    start_ns: I64
    kind: U8
    fresh: Bool
    shared: Bool


@dataclass(frozen=True, slots=True)
class Shock:
    """A common cause: an entity of `table`, or a job (then `entity` is -1 and `name` the job)."""

    start_ns: int
    table: str
    entity: int
    name: str
    nodes: tuple[int, ...]  # the first few, ascending
    count: int
    why: str
    fault: str = ""  # kind of the fault that explains it

    @property
    def key(self) -> tuple[str, int, str, str, int]:
        """Return the key of a shock: an entity or job has one shock at an instant, which others join."""
        return self.table, self.entity, self.name, self.fault, self.start_ns


class Shocks(EntityState):
    """The common causes found, bounded, and the jobs that ended recently."""

    _shocks: dict[tuple[str, int, str, str, int], Shock] = records(Shock, of_place=True, was="told")
    _jobs: list[Any] = scalar([])  # (ended_ns, name, nodes)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site, self.places = site, Topology(site)

    def job_ended(self, name: str, nodes: I32, now_ns: int) -> None:
        """Note that a job leaves its nodes: it may cause the next failures."""
        if len(nodes) < LEAST_NODES:
            return
        self._jobs = [j for j in self._jobs if now_ns - j[0] <= 2 * WINDOW_S * NS]
        self._jobs.append((now_ns, name, nodes.astype(np.int32)))
        del self._jobs[:-MAX_JOBS]

    def log(self) -> tuple[Shock, ...]:
        """Return the common causes, the newest last."""
        return tuple(self._shocks.values())

    def judge(self, now: HealthContext, fallen: Fallen, past: int, begin_ns: int) -> I64:
        """Return the places in `fallen`, ascending, of failures with a common cause.

        `past` failures of single nodes since `begin_ns` show how many to expect by chance.
        """
        shared: Bool = np.zeros(len(fallen.node), np.bool_)
        for fault in now.faults:
            if fault.kind in EXPLAINS and not fault.signal and fault.table != "node":
                shared |= self._explained(fault, fallen, now)
        if fallen.fresh.any() and len(fallen.node) >= LEAST_NODES:
            watched_s = len(self.places.site.rack_of_node) * (now.now_ns - begin_ns) / NS
            per_s = (past + PRIOR_PER_S * PRIOR_S) / (watched_s + PRIOR_S)
            self._by_chance(now, fallen, shared, per_s)
        return np.flatnonzero(shared).astype(np.int64)

    def _explained(self, fault: Fault, fallen: Fallen, now: HealthContext) -> Bool:
        below = self._below(fault.table, fault.entity)
        if below is None:
            return np.zeros(len(fallen.node), np.bool_)
        kinds = [FAILURE_CLASSES.index(c) for c in EXPLAINS[fault.kind]]
        mine = below[fallen.node] & np.isin(fallen.kind, kinds)
        before_s = LATE_S if fault.kind in SUPPLY_FAULTS else WINDOW_S
        mine &= fallen.start_ns >= fault.since_ns - round(before_s * NS)
        if fault.table == "feeder":
            rack = self.site.rack_of_node[fallen.node]
            unpowered = fallen.start_ns <= now.diagnosis.silence.unpowered_ns[rack]
            mine &= unpowered | (fallen.start_ns <= self._outlived_ns(fault, now)[rack])
        if (new := mine & ~fallen.shared).any():
            nodes = np.unique(fallen.node[new])
            name = self.site.name(fault.table, fault.entity)
            first = int(fallen.start_ns[new].min())
            self._merge(
                Shock(first, fault.table, fault.entity, name, tuple(nodes.tolist()), len(nodes),
                      f"{fault.kind.replace('_', ' ')} of {name} explains it", fault.kind), JOIN_S,
            )  # fmt: skip
        return mine

    def _outlived_ns(self, fault: Fault, now: HealthContext) -> I64:
        """Return the instants from which racks have outlived the loss of a feeder above them [n_rack].

        They run on their other feed then, and what fails later has another cause.
        """
        lost_ns = np.full(self.site.sizes["rack"], fault.since_ns, np.int64)
        feeder, rack = self.site.served_racks()
        below = np.isin(feeder, self.site.subtree(fault.entity))
        np.maximum.at(lost_ns, rack[below], now.diagnosis.reports.dark_ns[feeder[below]])
        return lost_ns + round(WINDOW_S * NS)

    def _by_chance(self, now: HealthContext, fallen: Fallen, shared: Bool, per_s: float) -> None:
        """Mark the groups that are improbable by chance, the most improbable first."""
        groups = self._groups(now, fallen)
        once = bool((np.bincount(fallen.node) <= 1).all())  # no node failed twice
        ends = np.unique(fallen.start_ns[fallen.start_ns >= fallen.start_ns[fallen.fresh].min()])
        for _ in range(MAX_TURNS):
            best: tuple[float, int, int, int] | None = None  # (log p, size, group, entity)
            rows = np.zeros(0, np.int64)
            for end_ns in ends[-MAX_ENDS:].tolist():
                near = (fallen.start_ns <= end_ns) & (fallen.start_ns > end_ns - round(WINDOW_S * NS))
                near &= ~shared
                if np.count_nonzero(near) < LEAST_NODES:
                    continue
                for g, group in enumerate(groups):
                    found = group.least_likely(near, fallen.node, per_s * WINDOW_S, once)
                    if found is not None and (best is None or (*found[:2], g, found[2]) < best):
                        best, rows = (*found[:2], g, found[2]), group.under(found[2], near)
            if best is None:
                return
            shared[rows] = True
            self._note(groups[best[2]], best, fallen, rows, per_s)

    def _note(
        self, group: _Group, best: tuple[float, int, int, int], fallen: Fallen, rows: I64, per_s: float
    ) -> None:
        log_pu, size, _, entity = best
        failed = np.count_nonzero(np.bincount(fallen.node[rows]))
        first = int(fallen.start_ns[rows].min())
        span_s = (int(fallen.start_ns[rows].max()) - first) / NS
        name = group.names[entity] if group.table == "job" else self.site.name(group.table, entity)
        new = np.unique(fallen.node[rows[~fallen.shared[rows]]])
        if not len(new):
            return
        mean = size * per_s * WINDOW_S
        pu = f"10^{log_pu / math.log(10.0):.0f}"
        why = (f"{failed} of {size} nodes of {name} failed within {span_s:.0f} s; by chance {mean:.2g} "
               f"do in {WINDOW_S:.0f} s, and so many with a probability of {pu}")  # fmt: skip
        at = -1 if group.table == "job" else entity
        self._merge(
            Shock(first, group.table, at, name, tuple(new[:MAX_NODES].tolist()), len(new), why), WINDOW_S
        )

    def _merge(self, shock: Shock, join_s: float) -> None:
        """Report a shock, or extend the shock that it continues."""
        shocks = list(self._shocks.values())
        for k in range(len(shocks) - 1, -1, -1):
            old = shocks[k]
            if old.key[:-1] == shock.key[:-1] and abs(shock.start_ns - old.start_ns) <= join_s * NS:
                shocks[k] = replace(
                    old, start_ns=min(old.start_ns, shock.start_ns), count=old.count + shock.count,
                    nodes=tuple(sorted({*old.nodes, *shock.nodes})[:MAX_NODES]),
                    why=shock.why,
                )  # fmt: skip
                break
        else:
            shocks.append(replace(shock, nodes=shock.nodes[:MAX_NODES]))
        self._shocks = {s.key: s for s in shocks[-MAX_SHOCKS:]}

    def _below(self, table: str, entity: int) -> Bool | None:
        """Return the nodes below an entity [n_node]."""
        rack_of_node = self.site.rack_of_node
        if table == "site":
            return np.ones(len(rack_of_node), np.bool_)
        if table == "feeder":
            racks = np.zeros(self.site.sizes["rack"], np.bool_)
            racks[self.site.racks_below(entity)] = True
            return racks[rack_of_node]
        if table not in _ABOVE:
            return None
        return np.asarray(self.places.above("node", table) == entity)

    def _groups(self, now: HealthContext, fallen: Fallen) -> list[_Group]:
        """Return the candidates for a common cause of the failed nodes, table by table."""
        out = []
        for table in _ABOVE:
            above = self.places.above("node", table)
            size = np.bincount(above[above >= 0], minlength=self.site.sizes[table])
            at = above[fallen.node]
            rows = np.flatnonzero(at >= 0)
            out.append(_Group(table, size, rows, at[rows]))
        feeder, rack = self.site.served_racks()
        nodes_of_rack = np.diff(self.site.node_start_of_rack)
        size = np.bincount(feeder, nodes_of_rack[rack], self.site.sizes["feeder"])
        racks = self.site.rack_of_node[fallen.node]
        order = np.argsort(rack, kind="stable")
        lo, hi = (np.searchsorted(rack[order], racks, side) for side in ("left", "right"))
        rows = np.repeat(np.arange(len(racks)), hi - lo)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(hi - lo) - (hi - lo), hi - lo)
        out.append(_Group("feeder", size, rows, feeder[order][np.repeat(lo, hi - lo) + within]))
        out.append(self._by_job(now, fallen))
        return out

    def _by_job(self, now: HealthContext, fallen: Fallen) -> _Group:
        """Group failures by the job that each node runs or ran recently."""
        jobs = now.jobs
        held = jobs.job_of_node[fallen.node]
        known: dict[int, tuple[str, int]] = {}  # row -> name and size
        if self._jobs:
            for k in np.flatnonzero(held < 0).tolist():
                if (ended := self._last_job(int(fallen.node[k]), int(fallen.start_ns[k]))) is not None:
                    known[k] = ended
        slots, first, of_slot = np.unique(held, return_index=True, return_inverse=True)
        for slot, k in zip(slots.tolist(), first.tolist(), strict=True):
            if slot >= 0:
                known[k] = jobs.names[slot], len(jobs.nodes[slot])
        names: dict[str, tuple[int, int]] = {}  # in order of their first rows: place and size
        for k in sorted(known):
            name, size = known[k]
            names.setdefault(name, (len(names), size))
        at = np.full(len(held), -1, np.int64)
        at_of_slot = [names[jobs.names[slot]][0] if slot >= 0 else -1 for slot in slots.tolist()]
        at[:] = np.array(at_of_slot, np.int64)[of_slot.reshape(-1)]
        for k in known:
            at[k] = names[known[k][0]][0]
        rows = np.flatnonzero(at >= 0)
        sizes = np.array([size for _, size in names.values()], np.int64)
        return _Group("job", sizes, rows, at[rows], tuple(names))

    def _last_job(self, node: int, start_ns: int) -> tuple[str, int] | None:
        """Return (name, nodes) of the last job that ended on a node when it failed."""
        for ended_ns, name, nodes in reversed(self._jobs):
            inside = np.searchsorted(nodes, node)
            near = abs(start_ns - ended_ns) <= WINDOW_S * NS
            if near and inside < len(nodes) and nodes[inside] == node:
                return name, len(nodes)
        return None

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over what entities that stay have; what struck removed entities is dropped."""
        super().adopt(old, old_of_new)
        new_of_old = np.full(old.site.sizes["node"], -1, np.int64)
        kept = np.flatnonzero(old_of_new["node"] >= 0)
        new_of_old[old_of_new["node"][kept]] = kept
        for key, shock in self._shocks.items():
            nodes = sorted(i for i in new_of_old[list(shock.nodes)].tolist() if i >= 0)
            self._shocks[key] = replace(shock, nodes=tuple(nodes))
        moved = [(ended_ns, name, new_of_old[nodes]) for ended_ns, name, nodes in old._jobs]
        self._jobs = [(at, name, np.sort(m[m >= 0]).astype(np.int32)) for at, name, m in moved]


class _Group:
    """Failures under each entity of a table: pairs (row, entity)."""

    def __init__(
        self, table: str, size: I64 | F64 | I32, rows: I64, entity: I64 | I32, names: tuple[str, ...] = ()
    ) -> None:
        self.table, self.size, self.rows, self.entity, self.names = table, size, rows, entity, names

    def under(self, entity: int, near: Bool) -> I64:
        """Return the `near` failures of nodes under an entity."""
        return np.asarray(self.rows[(self.entity == entity) & near[self.rows]])

    def least_likely(
        self, near: Bool, node: I32, each: float, once: bool = False
    ) -> tuple[float, int, int] | None:
        """Return (log of the chance, size, entity) of the most improbable group of `near` failures.

        `each` is what chance gives per node; `once` shows that each node is there once. None where chance
        accounts for all.
        """
        mine = near[self.rows]
        if np.count_nonzero(mine) < LEAST_NODES:
            return None
        if once:
            count = np.bincount(self.entity[mine])
        else:
            nodes = int(node.max()) + 1
            pairs = np.unique(self.entity[mine].astype(np.int64) * nodes + node[self.rows[mine]])
            count = np.bincount(pairs // nodes)
        known: dict[tuple[int, int], float] = {}
        best: tuple[float, int, int] | None = None
        for entity in np.flatnonzero(count >= LEAST_NODES).tolist():
            key = int(count[entity]), int(self.size[entity])
            if key not in known:
                known[key] = log_tail(key[0], key[1] * each)
            this = known[key], key[1], entity
            if this[0] <= LEAST_LOG_PU and (best is None or this < best):
                best = this
        return best


def log_tail(count: int, mean: float) -> float:
    """Natural logarithm of a bound on the chance of `count` or more by a Poisson law; 0 from the mean on.

    The first term times the sum of the geometric series that bounds the rest.
    """
    if mean <= 0.0:
        return -math.inf
    if count <= mean:
        return 0.0
    first = count * math.log(mean) - mean - math.lgamma(count + 1.0)
    return min(first - math.log1p(-mean / (count + 1.0)), 0.0)
