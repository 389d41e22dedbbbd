"""Queries of the embedded history: one signal of some entities over a time span. Gaps stay gaps.

Each query opens the file read-only, so that the writer never blocks it. Entities are found by name in every
layout that the site had.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from twin.catalogue import I64, NS, Signal, StorageError, TwinError
from twin.run.history_chunks import NO_COUNT, SLOT_S, Coarse, coarsen, missing, unpack_coarse, unpack_series
from twin.run.history_sample import recorded_signal, stored_key
from twin.run.history_schema import open_reader
from twin.run.history_store import BLOCK

MAX_POINTS = 50_000
GAP_PERIODS = 2.5  # samples further apart than this many of their usual distance have a gap between them
_NICE_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


def chosen_step_ns(
    since_ns: int, until_ns: int, step_s: float | None, max_points: int, every_s: float
) -> int | None:
    """The step of an answer; None for readings as sampled, or if `step_s` gives more than `max_points`."""
    span_s = (until_ns - since_ns) / NS
    if step_s is not None:
        return max(1, round(step_s * NS)) if span_s / step_s <= max_points else None
    if span_s / every_s <= max_points:
        return None
    least_s = max(span_s / max_points, every_s)
    for nice_s in _NICE_S:
        if nice_s >= least_s:
            return nice_s * NS
    return math.ceil(least_s / 86_400) * 86_400 * NS


def _answer(
    signal: Signal, names: dict[str, str], slots: Coarse, step_ns: int | None, extremes: bool
) -> dict[str, Any]:
    """Answer to a query, see `HistoryService.query`; `names`: full name by name as asked."""
    asked = list(names)
    out: dict[str, Any] = {
        "signal": signal.key,
        "unit": signal.unit,
        "states": list(signal.states),
        "step_s": None if step_ns is None else step_ns / NS,
        "t_ns": slots.t_ns.tolist(),
        "names": names,
        "values": _plain(signal, asked, slots.mean, 1),
    }
    if signal.kind != "counter" and extremes:
        out["min"], out["max"] = (_plain(signal, asked, part, 0) for part in (slots.low, slots.high))
    return out


def _with_gaps(slots: Coarse, means: int, every_s: float) -> Coarse:
    """Insert an instant without readings in each long gap, so that a plot draws no line across it."""
    steps = np.diff(slots.t_ns)
    exact = steps[means:]
    usual = np.full(len(steps), max(every_s * NS, float(np.median(exact)) if len(exact) else 0.0))
    usual[:means] = max(every_s, SLOT_S) * NS
    after = np.flatnonzero(steps > GAP_PERIODS * usual) + 1
    if len(after) == 0:
        return slots
    t_ns = np.insert(slots.t_ns, after, slots.t_ns[after - 1] + np.rint(usual[after - 1]).astype(np.int64))
    gap = np.nan if slots.mean.dtype.kind == "f" else NO_COUNT
    return Coarse(t_ns, *(np.insert(part, after, gap, axis=0) for part in slots[1:]))


def _stepped(slots: Coarse, step_ns: int, since_ns: int, until_ns: int) -> Coarse:
    """One slot per step, empty ones too; each begins at a whole multiple of the step."""
    first = since_ns // step_ns
    count = (until_ns - 1) // step_ns - first + 1
    t_ns = (np.arange(count, dtype=np.int64) + first) * step_ns
    found = folded(slots, step_ns)
    inside = (found.t_ns >= first * step_ns) & (found.t_ns < (first + count) * step_ns)
    at = found.t_ns[inside] // step_ns - first
    parts = []
    for part in found[1:]:
        whole = np.full((count, part.shape[1]), np.nan if part.dtype.kind == "f" else NO_COUNT, part.dtype)
        whole[at] = part[inside]
        parts.append(whole)
    return Coarse(t_ns, *parts)


def folded(slots: Coarse, step_ns: int) -> Coarse:
    """Slots, ascending in time, joined into longer ones; only those that had any."""
    at = slots.t_ns // step_ns
    begin = np.flatnonzero(np.diff(at, prepend=at[:1] - 1))
    if len(begin) == 0:
        return slots
    t_ns = at[begin] * step_ns
    # Segments of `begin` are never empty, so reduceat gives each its own.
    if slots.mean.dtype.kind != "f":
        last = np.maximum.reduceat(slots.high, begin, axis=0)
        return Coarse(t_ns, last, last, last)
    gaps = missing(slots.mean)
    sums = np.add.reduceat(np.where(gaps, 0.0, slots.mean.astype(np.float64)), begin, axis=0)
    known = np.add.reduceat(~gaps, begin, axis=0, dtype=np.int64)
    mean = (sums / np.where(known == 0, np.nan, known)).astype(np.float32)
    low = np.fmin.reduceat(slots.low, begin, axis=0)
    return Coarse(t_ns, mean, low, np.fmax.reduceat(slots.high, begin, axis=0))


def _plain(signal: Signal, names: list[str], values: Any, more_digits: int) -> dict[str, list[Any]]:
    gaps = missing(values)
    if signal.kind != "counter":
        digits = more_digits + max(0, math.ceil(-math.log10(signal.quantum))) if signal.quantum > 0 else 6
        values = np.round(values.astype(np.float64), digits)
    plain = values.astype(object)
    plain[gaps] = None
    return {name: plain[:, k].tolist() for k, name in enumerate(names)}


MAX_NAMES = 2000
MAX_CELLS = 20_000_000  # readings that one question may take into memory
FOLD_PIECES = 64
MAX_REMEMBERED = 1_000_000  # names, of all layouts
MAX_LAYOUTS = 100  # that are searched, the latest


class HistoryError(TwinError):
    """A query that the history cannot answer, with the reason."""


class _Piece(NamedTuple):
    """Some columns of the answer: `values` [instants, columns], or a Coarse of them."""

    columns: Any
    t_ns: I64
    values: Any


@dataclass
class _Asked:
    """State of a query: `places` is layout -> (index per name, -1 for none)."""

    db: sqlite3.Connection
    signal: int
    kind: str
    table: str  # of the entities
    kept_in: str  # table of the samples
    since_ns: int
    until_ns: int
    deadline_s: float
    places: dict[int, Any] = field(default_factory=dict)
    damaged: int = 0  # what could not be read; its time is a gap

    def check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise HistoryError("took too long: ask for a shorter span, fewer names or a longer step")


@dataclass
class HistoryReader:
    """Reader of the history. Several threads may use it."""

    path: Path
    every_s: float
    timeout_s: float = 10.0
    _names: OrderedDict[tuple[str, str], dict[str, int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def query(
        self,
        key: str,
        names: list[str],
        since_ns: int,
        until_ns: int,
        step_s: float | None = None,
        max_points: int = 2000,
    ) -> dict[str, Any]:
        """See `HistoryService.query`. Raises HistoryError for a bad question, StorageError for a bad file."""
        signal, stored = recorded_signal(key), stored_key(key)
        if signal is None or stored is None:
            raise HistoryError(f"{key!r} is no signal; expected TABLE.SIGNAL such as rack.power_w")
        names = list(dict.fromkeys(names))
        if not names or len(names) > MAX_NAMES:
            raise HistoryError(f"{len(names)} names; expected 1 to {MAX_NAMES}")
        if not 0 <= since_ns < until_ns < 2**63:
            raise HistoryError(f"from {since_ns} to {until_ns} ns; expected a span, its begin first")
        if not 1 <= max_points <= MAX_POINTS:
            raise HistoryError(f"max_points {max_points}; expected 1 to {MAX_POINTS}")
        if step_s is not None and not 0 < step_s < 1e9:
            raise HistoryError(f"step_s {step_s}; expected seconds > 0")
        if step_s is not None and step_s <= self.every_s:
            step_s = None  # as sampled: steps without a sample in them would look like gaps
        kind = "counter" if signal.kind == "counter" else "gauge"
        db = open_reader(self.path)
        try:
            db.execute("BEGIN")  # one moment of the file, whatever the writer does meanwhile
            row = db.execute("SELECT id FROM signal WHERE key=? AND kind=?", (stored[1], kind)).fetchone()
            asked = _Asked(
                db,
                row[0] if row else -1,
                kind,
                signal.table,
                stored[0],
                since_ns,
                until_ns,
                time.monotonic() + self.timeout_s,
            )
            full = self._resolve(asked, names)
            _clamp(asked)
            step_ns = chosen_step_ns(asked.since_ns, asked.until_ns, step_s, max_points, self.every_s)
            if step_ns is None and step_s is not None:
                raise HistoryError(
                    f"step_s {step_s:g} gives more than {max_points} points; expected at least "
                    f"{(asked.until_ns - asked.since_ns) / max_points / NS:.3g}"
                )
            slots, means = self._read(asked, len(names), step_ns)
            if step_ns is None:
                slots = _with_gaps(slots, means, self.every_s)
            else:
                slots = _stepped(slots, step_ns, asked.since_ns, asked.until_ns)
            extremes = means > 0 or step_ns is not None
            out = _answer(signal, dict(zip(names, full, strict=True)), slots, step_ns, extremes)
            return out | {"damaged": asked.damaged}
        except sqlite3.Error as error:
            raise StorageError(f"{self.path}: cannot be read: {error}") from error
        finally:
            db.close()

    def _resolve(self, asked: _Asked, names: list[str]) -> list[str]:
        """Full names; where they lie in each layout goes into `asked`. The latest layout decides first."""
        full: list[str | None] = [None] * len(names)
        layouts = asked.db.execute(
            "SELECT id, hash FROM layout ORDER BY id DESC LIMIT ?", (MAX_LAYOUTS,)
        ).fetchall()
        for number, digest in layouts:
            known = self._names_of(asked, number, digest)
            found_here = _full_names(known, {n for n, f in zip(names, full, strict=True) if f is None})
            full = [f or found_here.get(n) for n, f in zip(names, full, strict=True)]
            asked.places[number] = np.full(len(names), -1, np.int64)
        for i, found in enumerate(full):
            if found is None:
                raise HistoryError(
                    f"{names[i][:200]!r} is no {asked.table} that was ever here, or not the only one of that "
                    "name; expected a full path such as site/hall/rack"
                )
        for number, digest in layouts:
            known = self._names_of(asked, number, digest)
            asked.places[number][:] = [known.get(str(name), -1) for name in full]
        return [str(name) for name in full]

    def _names_of(self, asked: _Asked, number: int, digest: str) -> dict[str, int]:
        key = (digest, asked.table)
        with self._lock:
            if key in self._names:
                self._names.move_to_end(key)
                return self._names[key]
        asked.check_time()
        row = asked.db.execute(
            "SELECT names FROM names WHERE layout=? AND tbl=?", (number, asked.table)
        ).fetchone()
        if row is None:  # until the next sample, where the table came with an upgrade
            return {}
        text = zstandard.ZstdDecompressor().decompress(row[0]).decode()
        found = {name: i for i, name in enumerate(text.split("\n"))} if text else {}
        with self._lock:
            self._names[key] = found
            while len(self._names) > 1 and sum(map(len, self._names.values())) > MAX_REMEMBERED:
                self._names.popitem(last=False)
        return found

    def _read(self, asked: _Asked, n: int, step_ns: int | None) -> tuple[Coarse, int]:
        """The series as slots [instants, n], and how many of the first are means over a slot."""
        fine = list(_samples(asked))
        if step_ns is not None and step_ns >= round(SLOT_S * NS):
            tail = _joined(fine, n, asked)
            recent = coarsen(tail[0], tail[1], SLOT_S)
            slots = _slots(list(_folded(_coarse(asked), step_ns)), recent, n, asked)
            return slots, len(slots.t_ns)
        fine = [*_chunks(asked), *fine]  # where both have an instant they agree
        t_ns, values = _joined(fine, n, asked)
        exact = Coarse(t_ns, values, values, values)
        begun = int(t_ns[0]) if len(t_ns) else asked.until_ns
        if begun - asked.since_ns <= round(SLOT_S * NS):
            return exact, 0
        older = [p for p in _coarse(asked) if p.t_ns[0] < begun]
        cut = begun // round(SLOT_S * NS) * round(SLOT_S * NS)
        older = [_Piece(p.columns, p.t_ns[p.t_ns < cut], _cut(p.values, p.t_ns < cut)) for p in older]
        slots = _slots(older, exact, n, asked)
        return slots, len(slots.t_ns) - len(t_ns)


def _full_names(known: dict[str, int], wanted: set[str]) -> dict[str, str]:
    """Return the unique path that equals each name or ends with it."""
    out = {name: name for name in wanted if name in known}
    by_last: dict[str, list[str]] = {}
    for name in sorted(wanted - out.keys()):
        by_last.setdefault(name.rpartition("/")[2], []).append(name)
    found: dict[str, list[str]] = {}
    for path in known if by_last else ():
        for name in by_last.get(path.rpartition("/")[2], ()):
            if path.endswith(f"/{name}"):
                found.setdefault(name, []).append(path)
    return out | {name: paths[0] for name, paths in found.items() if len(paths) == 1}


def _clamp(asked: _Asked) -> None:
    """Limit the range to the time with data."""
    rows = asked.db.execute(
        "SELECT MIN(t0), MAX(t1) FROM (SELECT t0, t1 FROM coarse WHERE signal=?1 "
        "UNION ALL SELECT t_ns, t_ns FROM sample WHERE tbl=?2)",
        (asked.signal, asked.kept_in),
    ).fetchone()
    first, last = (rows[0], rows[1]) if rows[0] is not None else (asked.since_ns, asked.since_ns)
    slot_ns = round(SLOT_S * NS)
    asked.since_ns = min(max(asked.since_ns, first), asked.until_ns - 1)
    asked.until_ns = max(min(asked.until_ns, last + slot_ns), asked.since_ns + 1)


def _samples(asked: _Asked) -> Iterator[_Piece]:
    """Samples that are not compacted yet."""
    rows = asked.db.execute(
        "SELECT id, t_ns, layout, n, signals FROM sample WHERE tbl=? AND t_ns>=? AND t_ns<? ORDER BY t_ns",
        (asked.kept_in, asked.since_ns, asked.until_ns),
    ).fetchall()
    dtype = np.dtype("<f4") if asked.kind == "gauge" else np.dtype("<i8")
    for number, t_ns, layout, n, signals in rows:
        asked.check_time()
        gauges, counters = ([int(x) for x in part.split(",") if x] for part in signals.split("|"))
        mine = gauges if asked.kind == "gauge" else counters
        if asked.signal not in mine:
            continue
        skipped = mine.index(asked.signal) * n * dtype.itemsize
        skipped += 4 * n * len(gauges) if asked.kind == "counter" else 0
        place = asked.places.get(layout)
        if place is None:
            continue
        columns = np.flatnonzero(place >= 0)
        with asked.db.blobopen("sample", "data", number, readonly=True) as blob:
            blob.seek(min(skipped, len(blob)))
            row = np.frombuffer(blob.read(n * dtype.itemsize), np.uint8)
            row = row[: len(row) // dtype.itemsize * dtype.itemsize].view(dtype)
        if len(row) != n:
            asked.damaged += 1
            continue
        yield _Piece(columns, np.array([t_ns], np.int64), row[place[columns]][np.newaxis])


def _stored(asked: _Asked, table: str) -> Iterator[tuple[Any, Any, bytes]]:
    """(columns of the answer, columns of the chunk, bytes) of every chunk that holds some of it."""
    for layout, place in asked.places.items():
        blocks = np.where(place >= 0, place // BLOCK, -1)
        for block in np.unique(blocks[blocks >= 0]).tolist():
            columns = np.flatnonzero(blocks == block)
            inside = place[columns] % BLOCK
            cursor = asked.db.execute(
                f"SELECT data FROM {table} WHERE signal=? AND block=? AND layout=? AND t0<? AND t1>=? "
                "ORDER BY t0",
                (asked.signal, block, layout, asked.until_ns, asked.since_ns - round(SLOT_S * NS)),
            )
            for (data,) in cursor:
                asked.check_time()
                yield columns, inside, data


def _chunks(asked: _Asked) -> Iterator[_Piece]:
    for columns, inside, data in _stored(asked, "chunk"):
        try:
            t_ns, values = unpack_series(data, inside)
        except StorageError:
            asked.damaged += 1
            continue
        kept = (t_ns >= asked.since_ns) & (t_ns < asked.until_ns)
        yield _Piece(columns, t_ns[kept], values[kept])


def _coarse(asked: _Asked) -> Iterator[_Piece]:
    slot_ns = round(SLOT_S * NS)
    for columns, inside, data in _stored(asked, "coarse"):
        try:
            slots = unpack_coarse(data, inside)
        except StorageError:
            asked.damaged += 1
            continue
        kept = (slots.t_ns > asked.since_ns - slot_ns) & (slots.t_ns < asked.until_ns)
        if kept.any():
            yield _Piece(columns, slots.t_ns[kept], _cut(slots, kept))


def _folded(pieces: Iterator[_Piece], step_ns: int) -> Iterator[_Piece]:
    """Fold the past steps, so that a year fits into memory; the last step stays in slots."""
    pending: list[_Piece] = []
    for piece in pieces:
        if pending and piece.columns is not pending[0].columns:
            yield from pending
            pending = []
        pending.append(piece)
        if len(pending) >= FOLD_PIECES:
            whole = Coarse(
                *(np.concatenate(parts) for parts in zip(*[p.values for p in pending], strict=True))
            )
            past = whole.t_ns // step_ns < whole.t_ns[-1] // step_ns
            done, rest = folded(_cut(whole, past), step_ns), _cut(whole, ~past)
            yield _Piece(piece.columns, done.t_ns, done)
            pending = [_Piece(piece.columns, rest.t_ns, rest)]
    yield from pending


def _cut(slots: Coarse, kept: Any) -> Coarse:
    return Coarse(*(part[kept] for part in slots))


def _joined(pieces: list[_Piece], n: int, asked: _Asked) -> tuple[I64, Any]:
    """All pieces as one series [instants, n]."""
    dtype = np.float32 if asked.kind == "gauge" else np.int64
    t_ns = np.unique(np.concatenate([p.t_ns for p in pieces])) if pieces else np.zeros(0, np.int64)
    _check_room(len(t_ns), n)
    out = np.full((len(t_ns), n), np.nan if asked.kind == "gauge" else NO_COUNT, dtype)
    for piece in pieces:
        cells = np.ix_(np.searchsorted(t_ns, piece.t_ns), piece.columns)
        out[cells] = np.where(missing(piece.values), out[cells], piece.values)
    return t_ns, out


def _slots(pieces: list[_Piece], others: Coarse, n: int, asked: _Asked) -> Coarse:
    """Coarse pieces and further slots as one; where both have one, the coarse one holds."""
    every = [others.t_ns, *(p.t_ns for p in pieces)]
    t_ns = np.unique(np.concatenate(every))
    _check_room(3 * len(t_ns), n)
    parts = []
    for at in ("mean", "low", "high"):
        out = np.full((len(t_ns), n), np.nan if asked.kind == "gauge" else NO_COUNT, others.mean.dtype)
        out[np.searchsorted(t_ns, others.t_ns)] = getattr(others, at)
        for piece in pieces:
            cells = np.ix_(np.searchsorted(t_ns, piece.t_ns), piece.columns)
            values = getattr(piece.values, at)
            out[cells] = np.where(missing(values), out[cells], values)
        parts.append(out)
    return Coarse(t_ns, *parts)


def _check_room(instants: int, n: int) -> None:
    if instants * n > MAX_CELLS:
        raise HistoryError(
            f"{instants} instants of {n} entities; expected at most {MAX_CELLS} readings: ask for a shorter "
            "span, fewer names or a longer step"
        )
