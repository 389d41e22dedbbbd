"""NVLink counts: one row per link of a GPU with a nonzero count; a link without a row is at zero.

A site of 100,000 GPUs has 1.8 million NVLinks, nearly all of which never count anything, so only those that
did cost memory. Which GPU's recoveries recur is judged by the sum over its links (`twin.health.recurring`);
this table says which link it is, what it counted before anybody watched, and where its other end is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Self

import numpy as np

from twin.catalogue import F32, I32, I64, NS, U8, Bool, clean
from twin.contracts import DEGRADED, HEALTHY, UNKNOWN, WATCH
from twin.site import Site, far_end
from twin.telemetry import (
    OWN,
    FaultColumns,
    FaultReported,
    NvlinksCounted,
    OldOfNew,
    SparseState,
    cell,
    column,
    entries,
    scalar,
)

PORTS = 64  # numbers that a link of one GPU may have; NVLink 5 has 18. source: NVML, NVML_NVLINK_MAX_LINKS
TABLE = "nvlink"  # of rows: PORTS * GPU + link
MAX_FAR = 80  # characters of the far end's name
DAYS, DAY_NS = 28, 86_400 * NS  # whose recoveries are kept day by day; source: estimate, as for lemons
COUNTS = ("recoveries", "failures", "errors", "replays", "symbols")
# XIDs of a unit of NVLink 5, whose text names the link. source: NVIDIA XID catalogue
CODES = range(144, 151)
NAMED_NS = 7 * 86_400 * NS  # for which an XID stands against a link; source: estimate, as for its recoveries
_LINK = re.compile(r"\bLink (\d{1,2})\b")


class Nvlinks(SparseState):
    """Counts by link [k], and the number of links that each GPU reads [n_gpu]."""

    recoveries: I64 = cell("i8")
    failures: I64 = cell("i8")  # recoveries that failed
    errors: I64 = cell("i8")
    replays: I64 = cell("i8")
    symbols: I64 = cell("i8")  # symbol errors
    symbol_ber: F32 = cell("f4")  # their rate, as the device has it
    before: I64 = cell("i8")  # recoveries when the link was first read
    began_ns: I64 = cell("i8")  # recoveries grew, first and last
    grew_ns: I64 = cell("i8")
    code: I32 = cell("i4")  # the gravest XID that names it
    code_ns: I64 = cell("i8")  # when one first did
    by_day: I32 = cell("i4", lead=(DAYS,))  # recoveries, at the number of the day modulo DAYS
    day: int = scalar(0)
    far: dict[int, str] = entries(OWN)  # the other end, where a device reports it
    read: U8 = column("gpu", "u1")
    most: U8 = column("gpu", "u1")  # links that were ever read

    def __init__(self, site: Site) -> None:
        super().__init__({**site.sizes, TABLE: PORTS * site.sizes["gpu"]}, TABLE)
        self.site = site

    def take(self, events: Sequence[NvlinksCounted], now_ns: int) -> None:
        """Note counts of nodes' links; rows of GPUs or links that they cannot have are left out."""
        self._to_day(now_ns)
        rows: dict[int, tuple[NvlinksCounted, int]] = {}
        first_read: set[int] = set()  # GPUs of which nothing was read before
        whole: list[int] = []  # GPUs of which all links are read
        nodes = self.site.entities("node", [event.name for event in events]).tolist()
        for node, event in dict(zip(nodes, events, strict=True)).items():  # the last of each node
            if node < 0:
                continue
            first, last = self.site.gpu_start_of_node[node : node + 2].tolist()
            for gpu, read in enumerate(event.read[: last - first], first):
                if not self.read[gpu]:
                    first_read.add(gpu)
                self.read[gpu] = min(max(read, 0), PORTS)
                if self.read[gpu] and self.read[gpu] >= self.most[gpu]:
                    self.most[gpu] = self.read[gpu]
                    whole.append(gpu)
            for row, (gpu, link) in enumerate(zip(event.gpu, event.link, strict=False)):
                if 0 <= gpu < last - first and 0 <= link < PORTS:
                    rows[PORTS * (first + gpu) + link] = event, row
        if rows:
            self._write(rows, first_read, now_ns)
        if len(self.index) and whole:
            self._begin_anew(np.array(whole), list(rows))

    def _begin_anew(self, whole: I64, rows: list[int]) -> None:
        """Drop the links of these GPUs with counts that are zero now: their driver was reloaded.

        A link that cannot be read any more keeps its row: then not all of its GPU are read.
        """
        anew = np.isin(self.index // PORTS, whole) & ~np.isin(self.index, rows)
        self._drop(anew & np.any([getattr(self, name) > 0 for name in COUNTS], axis=0))

    def _drop(self, gone: Bool) -> None:
        if gone.any():
            for index in self.index[gone].tolist():
                self.far.pop(index, None)
            self.keep(~gone)

    def _to_day(self, now_ns: int) -> None:
        """Begin the present day, and drop days older than DAYS."""
        today = now_ns // DAY_NS
        if today > self.day:
            self.by_day[np.arange(max(self.day + 1, today - DAYS + 1), today + 1) % DAYS] = 0
            self.day = today

    def recovered(self, gpu: int, link: int) -> list[tuple[str, int]]:
        """Return the recoveries of a link in the last 28 days as (UTC day, count), the oldest first."""
        at, there = self.find(np.array([PORTS * gpu + link], np.int32))
        if not there[0]:
            return []
        days = [
            (day, int(self.by_day[day % DAYS, at[0]])) for day in range(self.day - DAYS + 1, self.day + 1)
        ]
        return [(str(np.datetime64(day, "D")), count) for day, count in days if count]

    def fade(self, now_ns: int) -> None:
        """Drop old XIDs that named a link."""
        self._to_day(now_ns)
        old = (self.code > 0) & (now_ns - self.code_ns >= NAMED_NS)
        if old.any():
            self.code[old] = 0
            self._drop(old & ~np.any([getattr(self, name) > 0 for name in COUNTS], axis=0))

    def _write(self, rows: dict[int, tuple[NvlinksCounted, int]], first_read: set[int], now_ns: int) -> None:
        index = np.array(sorted(rows), np.int32)
        sums = {name: _counts([rows[i] for i in index.tolist()], name) for name in COUNTS}
        _, there = self.find(index)
        if not there.all():
            new = index[~there]
            # A link of a GPU that was read before stood at zero
            fresh = np.isin(new // PORTS, np.fromiter(first_read, np.int64, len(first_read)))
            before = np.where(fresh, sums["recoveries"][~there], 0)
            self.insert(new, before=before, recoveries=before)
        at, _ = self.find(index)
        anew = sums["recoveries"] < self.recoveries[at]  # its driver was loaded again
        self.before[at[anew]] = 0
        self.recoveries[at[anew]] = 0
        grown = sums["recoveries"] > self.recoveries[at]
        self.began_ns[at[grown]] = np.where(self.began_ns[at[grown]] > 0, self.began_ns[at[grown]], now_ns)
        self.grew_ns[at[grown]] = now_ns
        today, more = self.by_day[self.day % DAYS], (sums["recoveries"] - self.recoveries[at])[grown]
        room = np.iinfo(np.int32).max - today[at[grown]]
        today[at[grown]] += np.minimum(more, room).astype(np.int32)
        for name in COUNTS:
            getattr(self, name)[at] = sums[name]
        for k, (i, (event, row)) in enumerate(sorted(rows.items())):
            rate = event.symbol_ber[row] if row < len(event.symbol_ber) else 0.0
            self.symbol_ber[at[k]] = min(max(rate, 0.0), 1.0) if math.isfinite(rate) else 0.0
            if row < len(event.far) and event.far[row]:
                self.far[i] = clean(event.far[row], MAX_FAR)

    def receive(self, faults: Sequence[FaultReported], now_ns: int) -> None:
        """Note which link an XID of NVLink 5 names."""
        mine, gpus = FaultColumns.of(faults).of_table("gpu", self.site)
        for k in np.flatnonzero(np.isin(mine.code, CODES) & (gpus >= 0)).tolist():
            fault, gpu = mine[k], int(gpus[k])
            found = _LINK.search(fault.detail)
            if found is None or int(found[1]) >= PORTS:
                continue
            index = np.array([PORTS * gpu + int(found[1])], np.int32)
            at, there = self.find(index)
            if not there[0]:
                self.insert(index)
                at, _ = self.find(index)
            if not self.code[at[0]]:
                self.code_ns[at[0]] = now_ns
            self.code[at[0]] = max(int(self.code[at[0]]), fault.code)

    def of_gpu(self, gpu: int) -> I64:
        """Return the rows of a GPU's links, the one with the latest recoveries first."""
        some = np.arange(*np.searchsorted(self.index, [PORTS * gpu, PORTS * (gpu + 1)]))
        return some[np.lexsort((self.index[some], -self.recoveries[some], -self.grew_ns[some]))]

    def named_ns(self, gpu: int) -> int:
        """Return the first XID that named a link of this GPU which had recovered before; 0 = none."""
        places = self.of_gpu(gpu)
        places = places[(self.code[places] > 0) & (self.recoveries[places] > 0)]
        return int(self.code_ns[places].min()) if len(places) else 0

    def name(self, index: int) -> str:
        """Return the name of a link by both ends: its GPU and number, and the other end if known."""
        gpu, link = divmod(index, PORTS)
        ends = f"{self.site.name('gpu', gpu)}/nvlink{link}"
        end = self.far.get(index)
        assumed = far_end(self.site, gpu, link)
        if end:
            return f"{ends} to {end}"
        return (
            f"{ends} to {assumed} (by its profile, not reported)"
            if assumed
            else f"{ends} (far end not known)"
        )

    def text(self, gpu: int) -> str:
        """Return a sentence on the recovering link of a GPU compared with others; "" if no link is known."""
        places = self.of_gpu(gpu)
        places = places[self.recoveries[places] > 0]
        if not len(places):
            return ""
        k = int(places[0])
        total, before = int(self.recoveries[k]), int(self.before[k])
        since = f"recovered {_times(total - before)}" if total > before or not before else ""
        life = f"had recovered {_times(before)} before it was watched" if before else ""
        words = [f"{self.name(int(self.index[k]))} {' and '.join(w for w in (life, since) if w)}"]
        if failed := int(self.failures[k]):
            words.append(f"failed to recover {_times(failed)}")
        others = int(np.count_nonzero(self.recoveries)) - 1
        links = int(self.read.astype(np.int64).sum())
        if links > 1:
            words.append(f"of the other {links - 1:,} links {others or 'none'} did")
        if code := int(self.code[k]):
            words.append(f"XID {code} names it")
        return ", ".join(words)

    def level(self, gpu: int, link: int, failing: bool) -> int:
        """Return the level of a link. `failing`: its GPU has a link that keeps recovering."""
        at, there = self.find(np.array([PORTS * gpu + link], np.int32))
        if not there[0]:
            return HEALTHY if link < self.read[gpu] else UNKNOWN
        if self.code[at[0]] or (failing and self.of_gpu(gpu)[0] == at[0]):
            return DEGRADED
        return WATCH if self.recoveries[at[0]] or self.failures[at[0]] else HEALTHY

    def counts(self, gpu: int, link: int) -> dict[str, int]:
        """Return the counts of a link by name; empty if it is not read."""
        at, there = self.find(np.array([PORTS * gpu + link], np.int32))
        if there[0]:
            return {name: int(getattr(self, name)[at[0]]) for name in COUNTS}
        return dict.fromkeys(COUNTS, 0) if link < self.read[gpu] else {}

    def forget(self, table: str, entity: int) -> None:
        """Drop the links of this slot for a new GPU."""
        super().forget(table, entity)
        if table == "gpu":
            self._drop(self.index // PORTS == entity)

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the links of GPUs that the new site still has."""
        gpu, ports = old_of_new["gpu"].astype(np.int64), np.arange(PORTS)
        links = np.where(gpu[:, None] < 0, -1, PORTS * gpu[:, None] + ports).reshape(-1).astype(np.int32)
        super().adopt(old, {**old_of_new, TABLE: links})


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _counts(rows: Sequence[tuple[NvlinksCounted, int]], name: str) -> I64:
    """Return one count of these rows; a count that an event leaves out is zero."""
    columns = ((getattr(event, name), row) for event, row in rows)
    return np.array([max(0, int(some[row])) if row < len(some) else 0 for some, row in columns], np.int64)
