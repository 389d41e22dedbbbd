"""Store of the embedded history: writes samples, compacts them to chunks, and prunes by age and quota.

One thread uses it. Each sample is one transaction. Upkeep runs in small steps, so that samples never wait
long. `twin.run.history_query` can read the file at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from twin.catalogue import NS, StorageError
from twin.run.history_chunks import (
    NO_COUNT,
    SLOT_S,
    coarsen,
    merge,
    missing,
    pack_coarse,
    pack_series,
    unpack_series,
)
from twin.run.history_sample import Layout, Sample, TableSample, recorded_signal
from twin.run.history_schema import MIGRATIONS, file_bytes, open_store

BLOCK = 1024  # entities of a chunk
CHUNK_SAMPLES = 60
FULL_AT, VACUUM_AT = 0.9, 0.25  # share of the quota that is used at most; free share that is given back
PRUNE_ROWS = 2000  # removed in one step
EXPIRE_STEPS = 16  # per sample: a clock that leaps ahead for a while must not cost the whole history
VACUUM_PAGES = 500  # given back in one step


@dataclass
class HistoryStore:
    """The open file. Everything may raise sqlite3.Error; then `close`, and open another."""

    path: Path
    every_s: float
    keep_days: float
    quota_bytes: int
    migrations: Sequence[Sequence[str]] = MIGRATIONS
    samples: int = 0
    damaged: int = 0  # samples and chunks that could not be read back
    _layouts: dict[str, int] = field(default_factory=dict)
    _signals: dict[tuple[str, str], int] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)  # table -> instant
    _work: Iterator[None] | None = None
    _expire_steps: int = EXPIRE_STEPS

    def __post_init__(self) -> None:
        self.window_ns = window_ns(self.every_s)
        self.db = open_store(self.path, self.migrations)

    def close(self) -> None:
        """Close the file."""
        self._work = None
        self.db.close()

    def add(self, sample: Sample) -> None:
        """Write one sample in one transaction. A sample of the same instant is replaced."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            layout = self._layout(sample.layout)
            for part in (*sample.tables, *sample.expected):
                self._add_table(sample.t_ns, layout, part)
            self.db.execute("COMMIT")
        except BaseException:
            self._forget()
            raise
        for part in (*sample.tables, *sample.expected):
            self._newest[part.table] = sample.t_ns
        self.samples += 1
        self._expire_steps = EXPIRE_STEPS

    def _forget(self) -> None:
        """Forget the numbers of a failed transaction."""
        self._layouts.clear()
        self._signals.clear()
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")

    def _add_table(self, t_ns: int, layout: int, part: TableSample) -> None:
        gauges = [self._signal(f"{part.table}.{name}", "gauge") for name in part.gauges]
        counters = [self._signal(f"{part.table}.{name}", "counter") for name in part.counters]
        signals = "|".join(",".join(map(str, ids)) for ids in (gauges, counters))
        n = part.value.shape[1] if gauges else part.total.shape[1]
        data = part.value.astype("<f4", copy=False).tobytes() + part.total.astype("<i8", copy=False).tobytes()
        self.db.execute(
            "INSERT OR REPLACE INTO sample(tbl, t_ns, layout, n, signals, data) VALUES(?, ?, ?, ?, ?, ?)",
            (part.table, t_ns, layout, n, signals, data),
        )

    def _layout(self, layout: Layout) -> int:
        known = self._layouts.get(layout.hash)
        if known is not None:
            return known
        self.db.execute("INSERT OR IGNORE INTO layout(hash) VALUES(?)", (layout.hash,))
        found = self.db.execute("SELECT id FROM layout WHERE hash=?", (layout.hash,)).fetchone()
        number = int(found[0])
        named = {table for (table,) in self.db.execute("SELECT tbl FROM names WHERE layout=?", (number,))}
        for table in layout.site.sizes.keys() - named:  # all of a new site; what came with an upgrade
            text = zstandard.ZstdCompressor().compress("\n".join(layout.names(table)).encode())
            self.db.execute("INSERT INTO names VALUES(?, ?, ?)", (number, table, text))
        self._layouts[layout.hash] = number
        return number

    def _signal(self, key: str, kind: str) -> int:
        known = self._signals.get((key, kind))
        if known is None:
            self.db.execute("INSERT OR IGNORE INTO signal(key, kind) VALUES(?, ?)", (key, kind))
            row = self.db.execute("SELECT id FROM signal WHERE key=? AND kind=?", (key, kind)).fetchone()
            known = self._signals[key, kind] = int(row[0])
        return known

    def upkeep(self) -> bool:
        """Do one small step of compaction or pruning; return True if there may be more to do."""
        try:
            if self._work is not None:
                if next(self._work, self) is self:
                    self._work = None
                return True
            due = self._due()
            if due is not None:
                self._work = self._compact(*due)
                return True
            return self._prune()
        except BaseException:
            self._work = None
            self._forget()
            raise

    def _due(self) -> tuple[str, int] | None:
        """A table and the begin of a window of its samples that is over."""
        for (table,) in self.db.execute("SELECT DISTINCT tbl FROM sample").fetchall():
            if table not in self._newest:
                newest = self.db.execute("SELECT MAX(t_ns) FROM sample WHERE tbl=?", (table,)).fetchone()
                self._newest[table] = int(newest[0])
            now = self._newest[table] // self.window_ns * self.window_ns
            late = self.db.execute(
                "SELECT MIN(t_ns) FROM sample WHERE tbl=? AND t_ns<?", (table, now)
            ).fetchone()[0]
            if late is None:  # or ahead of the newest: a clock was set back
                late = self.db.execute(
                    "SELECT MIN(t_ns) FROM sample WHERE tbl=? AND t_ns>=?", (table, now + self.window_ns)
                ).fetchone()[0]
            if late is not None:
                return table, int(late) // self.window_ns * self.window_ns
        return None

    def _compact(self, table: str, t0: int) -> Iterator[None]:
        """Samples of a window become chunks, one signal a step; begun again, it gives the same."""
        rows = self.db.execute(
            "SELECT id, t_ns, layout, n, signals FROM sample "
            "WHERE tbl=? AND t_ns>=? AND t_ns<? ORDER BY t_ns",
            (table, t0, t0 + self.window_ns),
        ).fetchall()
        parts = [(*row[:4], *map(_ids, row[4].split("|"))) for row in rows]
        for layout in sorted({p[2] for p in parts}):
            mine = [p for p in parts if p[2] == layout]
            for kind, at in (("gauge", 4), ("counter", 5)):
                for signal in sorted({s for p in mine for s in p[at]}):
                    t_ns, values = self._series(mine, signal, kind, at)
                    self.db.execute("BEGIN IMMEDIATE")
                    self._store(signal, layout, t0, t_ns, values)
                    self.db.execute("COMMIT")
                    yield
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("DELETE FROM sample WHERE id=?", [(p[0],) for p in parts])
        self.db.execute("COMMIT")

    def _series(self, parts: list[Any], signal: int, kind: str, at: int) -> tuple[Any, Any]:
        """One signal of these samples: its instants and values [instants, n]."""
        n = max(p[3] for p in parts)
        dtype, width = (np.dtype("<f4"), 4) if kind == "gauge" else (np.dtype("<i8"), 8)
        out = np.full((len(parts), n), np.nan if kind == "gauge" else NO_COUNT, dtype)
        for i, part in enumerate(parts):
            if signal not in part[at]:
                continue
            offset = part[at].index(signal) * part[3] * width
            offset += len(part[4]) * part[3] * 4 if kind == "counter" else 0
            with self.db.blobopen("sample", "data", part[0], readonly=True) as blob:
                if offset + part[3] * width > len(blob):
                    self.damaged += 1
                    continue
                blob.seek(offset)
                out[i, : part[3]] = np.frombuffer(blob.read(part[3] * width), dtype)
        return np.array([p[1] for p in parts], np.int64), out

    def _store(self, signal: int, layout: int, t0: int, t_ns: Any, values: Any) -> None:
        key = self.db.execute("SELECT key FROM signal WHERE id=?", (signal,)).fetchone()[0]
        known = recorded_signal(key)
        quantum = known.quantum if known is not None and known.kind != "counter" else 0.0
        for first in range(0, values.shape[1], BLOCK):
            at, part = (signal, first // BLOCK, layout), values[:, first : first + BLOCK]
            if missing(part).all():
                continue
            instants, part = self._with_earlier(at, t0, t_ns, part)
            slots = coarsen(instants, part, SLOT_S, quantum)
            self._put("chunk", at, t0, int(instants[-1]), pack_series(instants, part, quantum))
            self._put("coarse", at, t0, int(slots.t_ns[-1]), pack_coarse(slots, quantum))

    def _put(self, table: str, at: tuple[int, int, int], t0: int, t1: int, data: bytes) -> None:
        self.db.execute(f"DELETE FROM {table} WHERE signal=? AND block=? AND layout=? AND t0=?", (*at, t0))
        self.db.execute(
            f"INSERT INTO {table}(signal, block, layout, t0, t1, data) VALUES(?, ?, ?, ?, ?, ?)",
            (*at, t0, t1, data),
        )

    def _with_earlier(self, at: tuple[int, int, int], t0: int, t_ns: Any, values: Any) -> tuple[Any, Any]:
        """A window may be compacted twice: after a kill, or when a clock was set back."""
        found = self.db.execute(
            "SELECT data FROM chunk WHERE signal=? AND block=? AND layout=? AND t0=?", (*at, t0)
        ).fetchone()
        if found is None:
            return t_ns, values
        try:
            return merge(*unpack_series(found[0]), t_ns, values)
        except (StorageError, ValueError):
            self.damaged += 1
            return t_ns, values

    def _prune(self) -> bool:
        """Remove data beyond age or quota: fine chunks first, then coarse ones, then samples."""
        newest = max(self._newest.values(), default=0)
        limit = newest - round(self.keep_days * 86_400 * NS)
        if self._newest and self._expire_steps > 0 and self._remove("chunk", limit):
            self._expire_steps -= 1
            return True
        pages, free = self._number("page_count"), self._number("freelist_count")
        page_bytes = self._number("page_size")
        if (pages - free) * page_bytes > FULL_AT * self.quota_bytes:
            if self._remove("chunk", None) or self._remove("coarse", None):
                return True
            first = self.db.execute("SELECT MIN(t_ns), COUNT(DISTINCT t_ns) FROM sample").fetchone()
            if first[1] > 1:
                self.db.execute("DELETE FROM sample WHERE t_ns=?", (first[0],))
                return True
        if free > VACUUM_PAGES and (pages * page_bytes > self.quota_bytes or free > VACUUM_AT * pages):
            self.db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
            return self._number("page_count") < pages
        return False

    def _remove(self, table: str, before_ns: int | None) -> bool:
        """Remove the oldest window, or a part of it; return True if one ended before `before_ns`."""
        oldest = self.db.execute(f"SELECT t0, t1 FROM {table} ORDER BY t0 LIMIT 1").fetchone()
        if oldest is None or (before_ns is not None and oldest[1] >= before_ns):
            return False
        self.db.execute(
            f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE t0=? LIMIT {PRUNE_ROWS})",
            (oldest[0],),
        )
        return True

    def _number(self, pragma: str) -> int:
        return int(self.db.execute(f"PRAGMA {pragma}").fetchone()[0])

    def facts(self) -> dict[str, int]:
        """Size of the store: bytes on the disk, the oldest and the newest instant (0: none), and damage."""
        oldest = self.db.execute(
            "SELECT MIN(t) FROM (SELECT MIN(t0) AS t FROM coarse UNION ALL SELECT MIN(t_ns) FROM sample)"
        ).fetchone()[0]
        newest = self.db.execute(
            "SELECT MAX(t) FROM (SELECT MAX(t0) AS t FROM coarse UNION ALL SELECT MAX(t_ns) FROM sample)"
        ).fetchone()[0]
        return {
            "bytes": file_bytes(self.path),
            "oldest_ns": oldest or 0,
            "newest_ns": newest or 0,
            "damaged": self.damaged,
        }


def window_ns(every_s: float) -> int:
    """Length of a chunk: sixty samples, as whole slots of the coarse resolution."""
    return round(max(1, math.ceil(CHUNK_SAMPLES * every_s / SLOT_S)) * SLOT_S * NS)


def _ids(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]
