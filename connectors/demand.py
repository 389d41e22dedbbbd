"""Demand of GPUs: granted and waiting GPUs of the site, of queues, tenants and priorities.

Several schedulers may share a site: a row is the sum of their parts, and unknown while one of them is silent.
A queue that no scheduler has is unknown, one without jobs is zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

from twin.catalogue import NS
from twin.contracts import Inlet
from twin.site import REST_CLASS, Site
from twin.telemetry import Reading

MAX_STRANGERS = 1000
SCOPED = ("queue", "tenant", "priority")
_COUNTS = ("gpu_running_count", "gpu_pending_count", "gpu_held_count",
           "job_running_count", "job_pending_count", "job_held_count", "pending_gpu_s")  # fmt: skip
_STATES = ("running", "pending", "held")


@dataclass(frozen=True, slots=True)
class JobClaim:
    """GPUs that equal jobs hold or request, together; `limit_s` is of each of them.

    `queues`: those in which it may start. `tenants`: names of its owner, of which the first that the site has
    counts. `priorities`: names of its class of priority, likewise; without one, `priority` applies.
    `since_s`: since when it could have started; `start_s`: when the scheduler expects it to; 0: unknown.
    `hosts`: the nodes that it holds whole where the scheduler counts no GPUs, with the GPUs of each.
    """

    state: Literal["running", "pending", "held"]
    gpus: int
    queues: tuple[str, ...]
    tenants: tuple[str, ...]
    _: KW_ONLY
    jobs: int = 1
    limit_s: float = 0.0
    since_s: float = 0.0
    start_s: float = 0.0
    hosts: tuple[tuple[str, int], ...] = ()
    priorities: tuple[str, ...] = ()
    priority: int = 0


class Stock(NamedTuple):
    """GPUs of nodes that run no job: free for one, kept as spares, out of service."""

    idle: int
    spare: int
    out: int


class DemandTally:
    """Sums over the claims of a row: in the order of _COUNTS, and the waits. A host counts once."""

    __slots__ = ("counts", "hosts", "next_s", "oldest_s")

    def __init__(self) -> None:
        self.counts = [0.0] * len(_COUNTS)
        self.oldest_s, self.next_s = 0.0, math.inf
        self.hosts: dict[str, int] = {}

    def add(self, claim: JobClaim, now_s: float) -> None:
        """Count a claim in."""
        at = _STATES.index(claim.state)
        self.counts[3 + at] += claim.jobs
        self.counts[at] += claim.gpus
        for host, gpus in claim.hosts:
            if host not in self.hosts:
                self.hosts[host] = gpus
                self.counts[at] += gpus
        if claim.state == "pending":
            self.counts[6] += claim.gpus * claim.limit_s
            if claim.since_s > 0:
                self.oldest_s = max(self.oldest_s, now_s - claim.since_s)
            if claim.start_s > 0:
                self.next_s = min(self.next_s, max(claim.start_s - now_s, 0.0))

    def join(self, other: DemandTally) -> None:
        """Count in what another scheduler has of this row."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.oldest_s = max(self.oldest_s, other.oldest_s)
        self.next_s = min(self.next_s, other.next_s)

    def values(self) -> dict[str, float | None]:
        """Return the values by signal."""
        next_s = self.next_s if math.isfinite(self.next_s) else None
        waits: dict[str, float | None] = {"oldest_wait_s": self.oldest_s, "next_start_s": next_s}
        return {**dict(zip(_COUNTS, self.counts, strict=True)), **waits}


_UNKNOWN: dict[str, float | None] = dict.fromkeys((*_COUNTS, "oldest_wait_s", "next_start_s"))
_NO_STOCK: dict[str, float | None] = dict.fromkeys(("gpu_idle_count", "gpu_spare_count", "gpu_out_count"))


@dataclass(frozen=True, slots=True)
class _Part:
    """One scheduler's share: `until_ns` it counts as current."""

    until_ns: int
    rows: dict[tuple[str, int], DemandTally]
    stock: Stock | None


def priority_bands(site: Site) -> tuple[list[tuple[int, int]], int | None]:
    """Return ((least number, row) of the priority classes with a number, the highest first; the row of the
    rest)."""
    groups = site.file.priorities
    rows = ((g.least, site.entity("priority", g.name)) for g in groups if g.least is not None)
    bands = [(least, row) for least, row in rows if least is not None and row is not None]
    return sorted(bands, reverse=True), site.sizes["priority"] - 1 if groups else None


class DemandBook:
    """Demand of a site from all its schedulers. `parts`: the names of the schedulers."""

    def __init__(self, site: Site, parts: Sequence[str]) -> None:
        self._parts = tuple(parts)
        self._rows = {
            table: {site.name(table, e).rpartition("/")[2]: e for e in range(site.sizes[table])}
            for table in SCOPED
        }
        # (least number, row), the highest first, and the row of all others
        self._bands, self._rest = priority_bands(site)
        self._part_of: dict[str, _Part] = {}
        # (table, name) that the site file does not list among others; the caller clears it
        self.strangers: dict[tuple[str, str], None] = {}

    def take(
        self,
        part: str,
        claims: Iterable[JobClaim],
        stock: Stock | None,
        queues: Collection[str],
        now_ns: int,
        fresh_s: float,
    ) -> list[Reading]:
        """Take all present demand of a scheduler, with the names of its `queues`, as readings of the site.

        They are good for `fresh_s`: later, a sum with other schedulers is unknown.
        """
        rows = {
            ("site", 0): DemandTally(),
            **{(t, e): DemandTally() for t in ("tenant", "priority") for e in self._rows[t].values()},
        }
        rows |= {("queue", e): DemandTally() for name, e in self._rows["queue"].items() if name in queues}
        for claim in claims:
            for key in (("site", 0), *self._scopes(claim)):
                rows.setdefault(key, DemandTally()).add(claim, now_ns / NS)
        self._part_of[part] = _Part(now_ns + round(fresh_s * NS), rows, stock)
        return self._readings(now_ns)

    def report(self, inlet: Inlet) -> None:
        """Report names of queues and tenants that the site file does not list among others, once."""
        for table, name in self.strangers:
            shown = repr(name[:60])
            why = f"the {table} {shown} of the scheduler is not in the site file"
            inlet.skip(table, why, name[:60], f"list it under `{table}s` of the site file")
        self.strangers.clear()

    def _scopes(self, claim: JobClaim) -> Iterator[tuple[str, int]]:
        """Return the rows of queues and tenants that a claim counts in."""
        queues, tenants = self._rows["queue"], self._rows["tenant"]
        for name in claim.queues:
            if (row := queues.get(name)) is not None:
                yield "queue", row
            elif queues:
                self._note("queue", name)
        found = next((row for name in claim.tenants if (row := tenants.get(name)) is not None), None)
        if found is not None:
            yield "tenant", found
        elif tenants:
            self._note("tenant", next(filter(None, claim.tenants), ""))
        if (row := self._class_of(claim)) is not None:
            yield "priority", row

    def _class_of(self, claim: JobClaim) -> int | None:
        """Return the priority class of a claim: by name, by number, or the rest; None without classes."""
        classes = self._rows["priority"]
        for name in claim.priorities:
            if name != REST_CLASS and (row := classes.get(name)) is not None:
                return row
        return next((row for least, row in self._bands if claim.priority >= least), self._rest)

    def _note(self, table: str, name: str) -> None:
        if name and len(self.strangers) < MAX_STRANGERS:
            self.strangers[table, name] = None

    def _readings(self, now_ns: int) -> list[Reading]:
        parts = [self._part_of.get(part) for part in self._parts]
        whole = all(part is not None and now_ns <= part.until_ns for part in parts)
        known = [part for part in parts if part is not None]
        rows: dict[tuple[str, int], DemandTally] = {}
        for part in known if whole else ():
            for key, tally in part.rows.items():
                rows.setdefault(key, DemandTally()).join(tally)
        stocks = [part.stock for part in known]
        stock = _NO_STOCK
        if whole and all(s is not None for s in stocks):
            sums = [float(sum(column)) for column in zip(*filter(None, stocks), strict=True)]
            stock = dict(zip(_NO_STOCK, sums, strict=True))
        keys = [("site", 0), *((t, e) for t in SCOPED for e in self._rows[t].values())]
        out = [Reading("site", 0, signal, value, now_ns) for signal, value in stock.items()]
        for table, entity in keys:
            found = rows.get((table, entity))
            values = _UNKNOWN if found is None else found.values()
            out += [Reading(table, entity, signal, value, now_ns) for signal, value in values.items()]
        return out
