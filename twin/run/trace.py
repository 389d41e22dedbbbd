"""The trace: frames as bytes, exactly as the engine saw them.

A segment is a magic number, then records of length, CRC-32 and zstd-compressed msgpack; the first record is
the header with the whole site, so that a segment explains itself. Values are integer deltas against the last
value of the same cell; every `KEYFRAME_EVERY` frames they begin anew, so that reading can start there. A torn
tail is cut, not fatal. Pure: bytes in, frames out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
import zstandard

from twin.catalogue import CATALOGUE_HASH, I32, I64, TABLES, StorageError
from twin.telemetry import Counts, Event, Frame, SiteChanged, TableUpdate

FORMAT = 2
READS = (2,)  # formats that this version reads
MAGIC = b"rttrace1"
KEYFRAME_EVERY = 57  # not 60: then each would fall into a tick in which all that is asked each 10 s is done
MAX_RECORD = 256 * 2**20
MAX_UPDATES, MAX_CELLS = 2000, 2**27  # of one frame, of one update
MAX_ROWS, MAX_ENTITIES = 1000, 2**25  # of one update; what a damaged record claims beyond is not believed
# From so many events on they have a buffer of their own, so far behind its start, which is never mapped. The
# buffer is cut there before it is filled, and a bytearray that is cut to less than half gives its memory back
MANY_EVENTS, EVENTS_AT = 5000, 2**25
_NO_BYTES, _MOST_HEAD = b"\xc4\x00", 5  # empty bytes in msgpack; the size of the longest head of bytes
_EXCEPTIONS = 0.02  # share of outliers that are listed rather than widening a whole row
_KINDS = ("i1", "i2", "i4", "i8")
_SAME = "="  # a row whose steps are those of an earlier row of the update
# Row of a companion -> row of the signal that it accompanies, by table
_BASE_ROW = {t: {s.row: spec.by_name[s.base].row for s in spec.gauges if s.base in spec.by_name}
             for t, spec in TABLES.items()}  # fmt: skip

# msgpack, since JSON has no infinity: an operator's "no upper bound" must come back
_events_out, _packed_out = msgspec.msgpack.Encoder(), msgspec.msgpack.Encoder()
_events_in = msgspec.msgpack.Decoder(tuple[Event, ...])
_NOT_ONE = (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError,
            RecursionError, MemoryError)  # fmt: skip


class OtherFormat(StorageError):
    """A file of another version, which is not damaged: it must stay unchanged and must not be replaced."""


class _Version(msgspec.Struct, frozen=True):
    format: int


class Header(msgspec.Struct, frozen=True):
    """Header of a segment. `spec` is the packed SiteSpec, `start` says how the run began."""

    format: int
    site_hash: str
    spec: bytes
    first_tick: int
    note: str = ""
    catalogue: str = CATALOGUE_HASH


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    tick: int
    now_ns: int
    dt_s: float
    urgent: bool
    key: bool
    updates: Annotated[list[Any], msgspec.Meta(max_length=MAX_UPDATES)]
    counts: Annotated[list[Any], msgspec.Meta(max_length=MAX_UPDATES)]
    runs: Annotated[list[tuple[bytes, bytes]], msgspec.Meta(max_length=2 * MAX_UPDATES)]
    events: bytes


class _Memory:
    """The last integers of every cell, on both sides of the wire. Grows with what is seen."""

    def __init__(self) -> None:
        self.q: dict[tuple[str, int], I32] = {}
        self.raw: dict[tuple[str, int], I64] = {}
        self.gain: dict[tuple[str, int], I64] = {}

    def clear(self) -> None:
        for row in self.q.values():
            row.fill(0)
        for counter in (*self.raw.values(), *self.gain.values()):
            counter.fill(0)

    def row_q(self, table: str, row: int, n: int) -> I32:
        have = self.q.get((table, row))
        if have is None or len(have) < n:
            grown = np.zeros(n, np.int32)
            if have is not None:
                grown[: len(have)] = have
            have = self.q[table, row] = grown
        return have

    def row_raw(self, table: str, row: int, n: int) -> I64:
        return self._counter(self.raw, table, row, n)

    def row_gain(self, table: str, row: int, n: int) -> I64:
        return self._counter(self.gain, table, row, n)

    @staticmethod
    def _counter(rows: dict[tuple[str, int], I64], table: str, row: int, n: int) -> I64:
        have = rows.get((table, row))
        if have is None or len(have) < n:
            grown = np.zeros(n, np.int64)
            if have is not None:
                grown[: len(have)] = have
            have = rows[table, row] = grown
        return have


class TraceEncoder:
    """Encoder of frames to record payloads, in order."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._zstd = zstandard.ZstdCompressor(level=1)
        self._since_key = KEYFRAME_EVERY
        # Kept from frame to frame, since megabytes of new memory take longer to be mapped than to be filled;
        # the second one for frames with many events, which begin at EVENTS_AT
        self._buffers = bytearray(), bytearray()

    def header(self, header: Header) -> bytes:
        """The payload of the first record; the next frame is a keyframe."""
        self._since_key = KEYFRAME_EVERY
        return self._zstd.compress(msgspec.msgpack.encode(header))

    def encode(self, frame: Frame) -> bytes:
        """The payload of one frame. Raises StorageError for an unwritable event; the next is a keyframe."""
        changed = SiteChanged in map(type, frame.events)  # of up to a hundred thousand
        key = changed or self._since_key >= KEYFRAME_EVERY
        since = 1 if key else self._since_key + 1
        self._since_key = KEYFRAME_EVERY
        if key:
            self._memory.clear()
        # Gauges and counters of one report share their instants: those are written once.
        runs: dict[tuple[bytes, bytes], int] = {}
        updates = [[*self._update(u), _pooled(runs, u.t_ns, frame.now_ns)] for u in frame.updates]
        counts = [[*self._count(c), _pooled(runs, c.t_ns, frame.now_ns)] for c in frame.counts]
        packed = _Packed(
            frame.tick, frame.now_ns, frame.dt_s, frame.urgent, key, updates, counts, list(runs), b""
        )
        try:
            payload = self._zstd.compress(self._packed(packed, frame.events))
        except (OverflowError, TypeError, ValueError) as error:
            raise StorageError(f"tick {frame.tick}: an event cannot be written: {error}") from error
        self._since_key = since
        return payload

    def _packed(self, packed: _Packed, events: tuple[Event, ...]) -> bytearray | memoryview:
        """Return the bytes of a frame, with the bytes of `events` in place of the empty ones at its end."""
        buffer, long = self._buffers
        _packed_out.encode_into(packed, buffer)
        if not events:
            return buffer
        end = len(buffer) - len(_NO_BYTES)
        if len(events) <= MANY_EVENTS:
            _events_out.encode_into(events, buffer, end + _MOST_HEAD)
            buffer[end : end + _MOST_HEAD] = _head_of_bytes(len(buffer) - end - _MOST_HEAD)
            return buffer
        at = max(EVENTS_AT, end + _MOST_HEAD)
        _events_out.encode_into(events, long, at)
        head, out = _head_of_bytes(len(long) - at), memoryview(long)
        start = at - len(head) - end
        out[start : start + end] = memoryview(buffer)[:end]
        out[start + end : at] = head
        return out[start:]

    def _update(self, u: TableUpdate) -> list[Any]:
        n = len(u.t_ns) if u.entity is None else int(u.entity[-1]) + 1
        coded: list[list[Any]] = []
        order = u.rows.tolist()
        # A peak that is its mean (one reading in the tick) need not be written twice.
        peers = {
            k: order.index(base)
            for k, row in enumerate(order)
            if (base := _BASE_ROW[u.table].get(row)) in order[:k]
        }
        kept: dict[int, I32] = dict.fromkeys(peers.values(), np.zeros(0, np.int32))
        step = np.empty(u.q.shape[1], np.int32)
        for k, row in enumerate(order):
            last = self._memory.row_q(u.table, row, n)
            if u.entity is None:
                np.subtract(u.q[k], last[:n], out=step)  # wraps around, and back on decoding
                last[:n] = u.q[k]
            else:
                np.subtract(u.q[k], last[u.entity], out=step)
                last[u.entity] = u.q[k]
            if k in kept:
                kept[k] = step.copy()
            same = k in peers and np.array_equal(step, kept[peers[k]])
            coded.append([_SAME, peers[k]] if same else _narrow(step))
        return [u.table, u.rows.tobytes(), _ascending(u.entity), coded]

    def _count(self, c: Counts) -> list[Any]:
        n = len(c.t_ns) if c.entity is None else int(c.entity[-1]) + 1
        rows = []
        for k, row in enumerate(c.rows.tolist()):
            last = self._memory.row_raw(c.table, row, n)
            cells = slice(0, n) if c.entity is None else c.entity
            off = c.raw[k] - (last[cells] + c.gain[k])
            last[cells] = c.raw[k]
            gain = self._memory.row_gain(c.table, row, n)
            rows.append([_narrow(c.gain[k] - gain[cells]), _narrow(off) if off.any() else None])
            gain[cells] = c.gain[k]
        return [c.table, c.rows.tobytes(), _ascending(c.entity), rows]


class TraceDecoder:
    """Decoder of record payloads to frames. It needs them in order, from a keyframe on."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._zstd = zstandard.ZstdDecompressor()
        self._frame = msgspec.msgpack.Decoder(_Packed)
        self._started = False

    def header(self, payload: bytes) -> Header:
        """The header of a segment; the decoder waits for its keyframe."""
        self._started = False
        try:
            inflated = self._inflate(payload)
            found = msgspec.msgpack.decode(inflated, type=_Version).format
            if found not in READS:
                raise OtherFormat(
                    f"trace format {found}; expected {FORMAT}"
                    + (f", or one of {READS}" if len(READS) > 1 else "")
                )
            header = msgspec.msgpack.decode(inflated, type=Header)
        except _NOT_ONE as error:
            raise StorageError(f"not a header: {error}") from error
        if header.catalogue != CATALOGUE_HASH:
            raise OtherFormat(
                f"recorded with the catalogue {header.catalogue}; this version has {CATALOGUE_HASH}"
            )
        return header

    def decode(self, payload: bytes) -> Frame:
        """One frame. Raises StorageError if these bytes are not one, or no keyframe came before.

        What follows a frame that was refused builds on it: it is refused too, up to the next keyframe.
        """
        started, self._started = self._started, False
        try:
            p = self._frame.decode(self._inflate(payload))
            if not (0 <= p.tick < 2**62 and 0 <= p.now_ns < 2**62 and 0.0 <= p.dt_s < 1e9):
                raise StorageError(f"tick {p.tick} at {p.now_ns} ns, dt {p.dt_s} s: expected 0 to 2^62")
            if p.key:
                self._memory.clear()
            elif not started:
                raise StorageError("no keyframe yet")
            updates = tuple(self._update(u, p.runs, p.now_ns) for u in p.updates)
            counts = tuple(self._count(c, p.runs, p.now_ns) for c in p.counts)
            events = _events_in.decode(p.events) if p.events else ()
        except _NOT_ONE as error:
            raise StorageError(f"not a frame: {error}") from error
        self._started = True
        return Frame(p.tick, p.now_ns, p.dt_s, updates, counts, events, p.urgent)

    def _inflate(self, payload: bytes) -> bytes:
        try:
            # A frame that states its size is given that much, whatever `max_output_size` says: look first.
            size = zstandard.frame_content_size(payload)
            if not 0 <= size <= MAX_RECORD:
                raise StorageError(f"claims to hold {size} bytes; expected at most {MAX_RECORD}")
            return self._zstd.decompress(payload, max_output_size=MAX_RECORD)
        except zstandard.ZstdError as error:
            raise StorageError(f"cannot be decompressed: {error}") from error

    def _update(self, packed: list[Any], runs: list[tuple[bytes, bytes]], now_ns: int) -> TableUpdate:
        table, rows, entity, m, coded, starts, times = _opened(packed, runs)
        n = m if entity is None else int(entity[-1]) + 1
        q = np.empty((len(rows), m), np.int32)
        order, steps = rows.tolist(), dict[int, I32]()
        peers = {c[1] for c in coded if c[0] == _SAME}
        for k, row in enumerate(order):
            # A peer that did not come before is not among the steps: refused as a KeyError
            step = steps[coded[k][1]] if coded[k][0] == _SAME else _widen(coded[k], m, np.int32)
            if k in peers:
                steps[k] = step
            last = self._memory.row_q(table, row, n)
            cells = slice(0, n) if entity is None else entity
            q[k] = last[cells] + step
            last[cells] = q[k]
        return TableUpdate(table, rows, entity, q, _unrun(starts, times, m, now_ns))

    def _count(self, packed: list[Any], runs: list[tuple[bytes, bytes]], now_ns: int) -> Counts:
        table, rows, entity, m, coded, starts, times = _opened(packed, runs)
        n = m if entity is None else int(entity[-1]) + 1
        raw, gain = np.empty((len(rows), m), np.int64), np.empty((len(rows), m), np.int64)
        for k, row in enumerate(rows.tolist()):
            cells = slice(0, n) if entity is None else entity
            before = self._memory.row_gain(table, row, n)
            gain[k] = before[cells] + _widen(coded[k][0], m, np.int64)
            before[cells] = gain[k]
            last = self._memory.row_raw(table, row, n)
            raw[k] = last[cells] + gain[k]
            if coded[k][1] is not None:
                raw[k] += _widen(coded[k][1], m, np.int64)
            last[cells] = raw[k]
        return Counts(table, rows, entity, raw, gain, _unrun(starts, times, m, now_ns))


def _opened(
    packed: list[Any], runs: list[tuple[bytes, bytes]]
) -> tuple[str, I32, I32 | None, int, list[Any], bytes, bytes]:
    """(table, rows, entities, how many, coded rows, runs, instants), with sizes that can be."""
    table, rows_b, entity_b, coded, pooled = packed
    starts, times = runs[pooled]
    rows = np.frombuffer(rows_b, np.int32)
    m = int(np.frombuffer(starts[-4:], np.int32)[0])
    entity = None
    if entity_b is not None:
        steps = np.frombuffer(entity_b, np.int32)
        entity = np.cumsum(steps, dtype=np.int32)
        if len(steps) != m:
            raise StorageError(f"{len(steps)} entities for {m} instants")
        if steps[0] < 0 or steps[1:].min(initial=1) < 1 or int(steps.sum(dtype=np.int64)) >= MAX_ENTITIES:
            raise StorageError("entities do not ascend, or are too many")
    if (
        not isinstance(table, str)
        or not 0 < m <= MAX_ENTITIES
        or len(coded) != len(rows)
        or not 0 < len(rows) <= MAX_ROWS
        or len(rows) * m > MAX_CELLS
    ):
        raise StorageError(f"{len(rows)} rows of {m} entities are no update")
    first = coded[0] if isinstance(coded[0][0], str) else coded[0][0]
    if len(first[1]) < m:  # before memory is taken for what is not there
        raise StorageError(f"a row of {len(first[1])} bytes; expected {m} values")
    if rows.min() < 0 or rows.max() >= MAX_ROWS:
        raise StorageError(f"row {rows.max()} is no row of a table")
    return table, rows, entity, m, coded, starts, times


def _head_of_bytes(size: int) -> bytes:
    """Head of `size` bytes in msgpack."""
    for kind, width in ((b"\xc4", 1), (b"\xc5", 2)):
        if size < 256**width:
            return kind + size.to_bytes(width, "big")
    return b"\xc6" + size.to_bytes(4, "big")


def _narrow(values: I32 | I64) -> list[Any]:
    """[type, bytes] of the narrowest type, or [type, bytes, outlier positions, outlier values]."""
    if len(values) == 0:
        return ["i1", b""]
    low, high = int(values.min()), int(values.max())
    for kind, bound in (("i1", 127), ("i2", 32767)):
        if -bound <= low and high <= bound:
            return [kind, values.astype(kind).tobytes()]
        outlier = (values > bound) | (values < -bound)
        count = int(np.count_nonzero(outlier))
        if count <= _EXCEPTIONS * len(values):
            at = np.flatnonzero(outlier).astype(np.int32)
            calm = np.where(outlier, 0, values).astype(kind)
            return [kind, calm.tobytes(), at.tobytes(), values[at].tobytes()]
    wide = "i4" if values.dtype == np.int32 or (low >= -(2**31) and high < 2**31) else "i8"
    return [wide, values.astype(wide).tobytes()]


def _widen(coded: list[Any], m: int, kind: Any) -> Any:
    if coded[0] not in _KINDS:
        raise StorageError(f"a row of type {coded[0]!r}; expected one of {', '.join(_KINDS)}")
    values = np.frombuffer(coded[1], "<" + coded[0]).astype(kind)
    if len(values) != m:
        raise StorageError(f"a row has {len(values)} values; expected {m}")
    if len(coded) == 4:
        values[np.frombuffer(coded[2], np.int32)] = np.frombuffer(coded[3], kind)
    return values


def _ascending(entity: I32 | None) -> bytes | None:
    return None if entity is None else np.diff(entity, prepend=np.int32(0)).astype(np.int32).tobytes()


def _runs(t_ns: I64, now_ns: int) -> tuple[bytes, bytes]:
    """Runs of equal instants: (first of each run and the length, instants relative to the tick)."""
    first = np.concatenate([[0], np.flatnonzero(np.diff(t_ns)) + 1]).astype(np.int32)
    return np.append(first, np.int32(len(t_ns))).tobytes(), (t_ns[first] - now_ns).tobytes()


def _pooled(runs: dict[tuple[bytes, bytes], int], t_ns: I64, now_ns: int) -> int:
    """The place of these instants among those of the frame."""
    return runs.setdefault(_runs(t_ns, now_ns), len(runs))


def _unrun(starts: bytes, times: bytes, m: int, now_ns: int) -> I64:
    first = np.frombuffer(starts, np.int32)
    out = np.repeat(np.frombuffer(times, np.int64) + now_ns, np.diff(first))
    if len(out) != m:
        raise StorageError(f"instants for {len(out)} entities; expected {m}")
    return out


def record(payload: bytes) -> bytes:
    """A payload framed by its length and CRC-32."""
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def payloads(data: bytes | memoryview, position: int = 0) -> Iterator[tuple[int, bytes | str]]:
    """(position, payload) of each whole record from `position`; last, (position, reason) of a broken one."""
    if position == 0:
        if bytes(data[: len(MAGIC)]) != MAGIC:
            yield 0, f"begins with {bytes(data[: len(MAGIC)])!r}; expected a trace segment ({MAGIC!r})"
            return
        position = len(MAGIC)
    while position < len(data):
        head = bytes(data[position : position + 8])
        size = int.from_bytes(head[:4], "little")
        if len(head) < 8 or position + 8 + size > len(data):
            yield position, "torn: the record goes on past the end of the file"
            return
        if size == 0:  # of which the CRC-32 is 0 too: zeros as a loss of power leaves them
            yield position, "damaged: a record without content"
            return
        payload = bytes(data[position + 8 : position + 8 + size])
        if zlib.crc32(payload) != int.from_bytes(head[4:], "little"):
            yield position, "damaged: CRC-32 does not match"
            return
        yield position, payload
        position += 8 + size
