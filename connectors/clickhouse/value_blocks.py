"""Value blocks: samples in a bounded queue for ClickHouse, and their rows in format Native.

Native is columns, as samples are: no row of values is ever made in Python. source: ClickHouse's
documentation, Interfaces / Formats / Native; a text is its length as a LEB128 number, then its bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from connectors.influx import LineColumns, SiteNames
from twin.catalogue import F64

BLOCK_ROWS = 100_000
MS_NS = 10**6


@dataclass(frozen=True)
class Labels:
    """Names of a daemon's rows among those of all halls."""

    site: str
    hall: str


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting sample; `size_bytes` of its arrays."""

    t_ns: int
    names: SiteNames
    tables: tuple[LineColumns, ...]
    rows: int
    size_bytes: int


class ValueBuffer:
    """Samples that wait for the server, the oldest first, within `room_bytes`; thread-safe."""

    def __init__(self, room_bytes: int) -> None:
        self._room, self._size = room_bytes, 0
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self.queue_points = self.dropped_points = 0

    def put(self, t_ns: int, names: SiteNames, tables: Sequence[LineColumns]) -> None:
        """Put one instant; its arrays must not change later. Without room the oldest samples are dropped."""
        rows = sum(t.value.size + t.total.size for t in tables)
        size = sum(t.value.nbytes + t.total.nbytes for t in tables)
        with self._lock:
            self._waiting.append(_Waiting(t_ns, names, tuple(tables), rows, size))
            self._size += size
            self.queue_points += rows
            while self._size > self._room and len(self._waiting) > 1:
                lost = self._pop()
                self.dropped_points += lost.rows

    @property
    def oldest(self) -> _Waiting | None:
        """Return the next sample."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def done(self, sample: _Waiting) -> None:
        """Remove an accepted or refused sample, unless it was dropped meanwhile."""
        with self._lock:
            if self._waiting and self._waiting[0] is sample:
                self._pop()

    def _pop(self) -> _Waiting:
        gone = self._waiting.popleft()
        self._size -= gone.size_bytes
        self.queue_points -= gone.rows
        return gone


class _EntityTexts:
    """Texts of the columns `rack` and `entity` of a table, packed once."""

    def __init__(self, table: str, paths: Sequence[str]) -> None:
        self.entities = [packed_text(path) for path in paths]
        self.racks = [packed_text(rack_of(table, path)) for path in paths]


class ValueBlocks:
    """Builds blocks of samples under these labels; caches the packed names of one site."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self._hash = ""
        self._texts: dict[str, _EntityTexts] = {}

    def of(self, sample: _Waiting) -> list[tuple[bytes, int]]:
        """Yield (block, rows) of a sample, each of at least one signal; the same sample gives the same
        blocks."""
        if sample.names.hash != self._hash:
            self._hash = sample.names.hash
            self._texts.clear()
        out: list[tuple[bytes, int]] = []
        parts: list[_Part] = []
        rows = 0
        for columns in sample.tables:
            for part in self._parts(columns, sample.names):
                if rows and rows + len(part.values) > BLOCK_ROWS:
                    out.append((value_block(self.labels, parts, sample.t_ns), rows))
                    parts, rows = [], 0
                parts.append(part)
                rows += len(part.values)
        if rows:
            out.append((value_block(self.labels, parts, sample.t_ns), rows))
        return out

    def _parts(self, columns: LineColumns, names: SiteNames) -> list[_Part]:
        table = columns.table
        texts = self._texts.get(table)
        if texts is None:
            texts = self._texts[table] = _EntityTexts(table, names.names(table))
        out: list[_Part] = []
        rows = [(name, ~np.isnan(row), row) for name, row in zip(columns.gauges, columns.value, strict=True)]
        rows += [(name, row >= 0, row) for name, row in zip(columns.counters, columns.total, strict=True)]
        for name, known, row in rows:
            for first in range(0, len(row), BLOCK_ROWS):
                chosen = slice(first, min(first + BLOCK_ROWS, len(row)))
                if known[chosen].any():
                    out.append(_Part.of(f"{table}.{name}", texts, chosen, known[chosen], row[chosen]))
        return out


@dataclass(frozen=True, slots=True)
class _Part:
    """Readings of one signal."""

    signal: str
    racks: bytes
    entities: bytes
    values: F64

    @staticmethod
    def of(signal: str, texts: _EntityTexts, chosen: slice, known: np.ndarray, row: np.ndarray) -> _Part:
        racks, entities = texts.racks[chosen], texts.entities[chosen]
        if not known.all():
            at = np.flatnonzero(known).tolist()
            racks, entities = [racks[i] for i in at], [entities[i] for i in at]
        return _Part(signal, b"".join(racks), b"".join(entities), row[known].astype("<f8"))


def value_block(labels: Labels, parts: Sequence[_Part], t_ns: int) -> bytes:
    """One block of the table `value`, all at one instant."""
    rows = sum(len(p.values) for p in parts)
    columns = (
        ("site", "String", packed_text(labels.site) * rows),
        ("hall", "String", packed_text(labels.hall) * rows),
        ("rack", "String", b"".join(p.racks for p in parts)),
        ("entity", "String", b"".join(p.entities for p in parts)),
        ("signal", "String", b"".join(packed_text(p.signal) * len(p.values) for p in parts)),
        ("t", "DateTime64(3, 'UTC')", np.full(rows, t_ns // MS_NS, "<i8").tobytes()),
        ("value", "Float64", b"".join(p.values.tobytes() for p in parts)),
    )
    head = packed_count(len(columns)) + packed_count(rows)
    return head + b"".join(packed_text(name) + packed_text(kind) + data for name, kind, data in columns)


def packed_count(number: int) -> bytes:
    """Return the LEB128 form of a number from 0 on."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def packed_text(text: str) -> bytes:
    """Return a text with its length in front."""
    data = text.encode("utf-8", "replace")
    return packed_count(len(data)) + data


def rack_of(table: str, path: str) -> str:
    """Return the rack of an entity, by its path `site/hall/rack/..`; "" without one."""
    parts = path.split("/")
    return parts[2] if len(parts) > 3 or (table == "rack" and len(parts) == 3) else ""
