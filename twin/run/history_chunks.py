"""Codec of the embedded history: compact bytes for series of many entities at the same instants.

A chunk holds one signal of a run of entities, as changes since the previous instant. Gauges are whole quanta
if these reproduce the same float32, else the exclusive-or of their bits; counters are int64. Bytes of equal
significance are stored together, compressed, with a checksum. A coarse chunk holds mean, minimum and maximum
per time slot. Pure; may import NumPy and zstandard.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple, cast

import numpy as np
import zstandard

from twin.catalogue import F32, I64, NS, StorageError

VERSION = 1
LEVEL = 3
SLOT_S = 60.0  # of the coarse resolution
MAX_BYTES = 512 * 2**20  # of one chunk when unpacked
NO_COUNT = -1  # stands for "no reading" in a counter's series
MEAN_PARTS = 2  # a mean is kept to this part of its signal's quantum
_HEAD = struct.Struct("<BBHIIf")  # version, kind, planes, instants, entities, quantum
_BITS, _COUNTER, _QUANTA = 1, 2, 3
_WIDTH = {_BITS: 4, _COUNTER: 8, _QUANTA: 4}
_NAN = np.uint32(0x7FC00000)  # the quality of a gap is in the lowest bits
_GAP_Q = np.int32(-(2**31))  # a gap as quanta; its quality is added
_MAX_Q = float(2**31 - 2**10)


class Coarse(NamedTuple):
    """A series per slot of time: `t_ns` [slots] begins each, the others are [slots, n], NaN for no reading.

    For counters the three are the same: the last total.
    """

    t_ns: I64
    mean: Any
    low: Any
    high: Any


def missing(values: Any) -> Any:
    """Mask of the steps in which a series has no reading."""
    return np.isnan(values) if values.dtype.kind == "f" else values < 0


def pack_series(t_ns: I64, values: Any, quantum: float = 0.0) -> bytes:
    """A series [instants, n] of float32 gauges or int64 counters; `quantum` of a gauge, 0 for none."""
    return _pack(t_ns, values[np.newaxis], quantum)


def unpack_series(data: bytes, columns: Any = None) -> tuple[I64, Any]:
    """Unpack what `pack_series` was given, or these columns of it. Raises StorageError for other bytes."""
    t_ns, planes = _unpack(data, 1, columns)
    return t_ns, planes[0]


def pack_coarse(coarse: Coarse, quantum: float = 0.0) -> bytes:
    """Mean, lowest and highest; of a counter only one of them."""
    whole = coarse.mean.dtype.kind == "f"
    planes = [coarse.mean, coarse.low, coarse.high] if whole else [coarse.mean]
    return _pack(coarse.t_ns, np.stack(planes), quantum / MEAN_PARTS)


def unpack_coarse(data: bytes, columns: Any = None) -> Coarse:
    """Unpack what `pack_coarse` was given, or these columns of it. Raises StorageError for other bytes."""
    t_ns, planes = _unpack(data, 3, columns)
    return Coarse(t_ns, planes[0], planes[len(planes) // 2], planes[-1])


def coarsen(t_ns: I64, values: Any, slot_s: float, quantum: float = 0.0) -> Coarse:
    """A series [instants, n], ascending in time, per slot of `slot_s`; only slots with instants.

    Means are rounded to a half of the quantum, if there is one.
    """
    slot_ns = round(slot_s * NS)
    slots = t_ns // slot_ns
    starts = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 1))
    ends = [*starts[1:].tolist(), len(t_ns)][: len(starts)]
    shape = (len(starts), values.shape[1])
    mean, low, high = (np.empty(shape, values.dtype) for _ in range(3))
    for i, (first, last) in enumerate(zip(starts.tolist(), ends, strict=True)):
        part = values[first:last]
        if values.dtype.kind != "f":
            mean[i] = low[i] = high[i] = part.max(axis=0)
            continue
        gaps = np.isnan(part)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean[i] = np.where(gaps, 0.0, part).sum(axis=0, dtype=np.float64) / (~gaps).sum(axis=0)
            low[i], high[i] = np.fmin.reduce(part, axis=0), np.fmax.reduce(part, axis=0)
    if quantum and values.dtype.kind == "f":
        part_f32 = np.float32(quantum / MEAN_PARTS)
        mean = np.where(np.isnan(mean), mean, np.rint(mean / part_f32) * part_f32)
    return Coarse(slots[starts] * slot_ns, mean, low, high)


def merge(t_a: I64, a: Any, t_b: I64, b: Any) -> tuple[I64, Any]:
    """Two series of the same entities as one; where both have an instant, `b` holds."""
    fresh = ~np.isin(t_a, t_b)
    t_ns = np.concatenate([t_a[fresh], t_b])
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], np.concatenate([a[fresh], b])[order]


def _pack(t_ns: I64, planes: Any, quantum: float) -> bytes:
    """`planes` [k, instants, n]; each word is stored as its change since the instant before."""
    kind, words = _COUNTER, planes
    if planes.dtype.kind == "f":
        words = _quanta(planes, np.float32(quantum)) if quantum > 0 else None
        kind = _QUANTA
        if words is None:
            kind, words = _BITS, np.ascontiguousarray(planes, "<f4").view("<i4")
    words = np.ascontiguousarray(words, f"<i{_WIDTH[kind]}")
    k, instants, n = words.shape
    change = words.copy()
    if kind == _BITS:
        change[:, 1:] ^= words[:, :-1]
    else:
        whole = (
            kind == _QUANTA and k == 3
        )  # mean, low and high: the last two as how far they are from the mean
        change[: 1 if whole else k, 1:] -= words[: 1 if whole else k, :-1]
        if whole:
            change[1], change[2] = words[0] - words[1], words[2] - words[0]
        # Small changes of either sign have low bits only.
        change = (change << 1) ^ (change >> (8 * _WIDTH[kind] - 1))
    step = np.ascontiguousarray(t_ns, "<i8").copy()
    step[1:] -= step[:-1].copy()
    body = _shuffled(step) + _shuffled(change)
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(body)
    data = _HEAD.pack(VERSION, kind, k, instants, n, quantum) + packed
    return data + zlib.crc32(data).to_bytes(4, "little")


def _quanta(planes: Any, quantum: Any) -> Any:
    """Whole quanta as int32; None if that would not give back the same numbers."""
    gaps = np.isnan(planes)
    near = np.rint(np.where(gaps, 0.0, planes) / np.float64(quantum))
    if not np.abs(near).max(initial=0.0) < _MAX_Q:
        return None
    q = near.astype(np.int32)
    if not ((q.astype(np.float32) * quantum == planes) | gaps).all():
        return None
    if gaps.any():
        q[gaps] = _GAP_Q + (planes[gaps].view(np.uint32) & np.uint32(0xFF)).astype(np.int32)
    return q


def _from_quanta(q: Any, quantum: Any) -> Any:
    out = q.astype(np.float32) * quantum
    gaps = q < _GAP_Q + 256
    if gaps.any():
        out[gaps] = (_NAN | (q[gaps] - _GAP_Q).astype(np.uint32)).view(np.float32)
    return out


def _unpack(data: bytes, most_planes: int, columns: Any) -> tuple[I64, Any]:
    try:
        version, kind, k, instants, n, quantum = _HEAD.unpack_from(data)
    except struct.error as error:
        raise StorageError(f"a chunk of {len(data)} bytes; expected at least {_HEAD.size}") from error
    if version != VERSION or kind not in _WIDTH or not 1 <= k <= most_planes:
        raise StorageError(f"a chunk of version {version}, kind {kind}, {k} planes; expected {VERSION}")
    width = _WIDTH[kind]
    size = 8 * instants + k * instants * n * width
    packed = memoryview(data)[_HEAD.size : -4]
    if zlib.crc32(memoryview(data)[:-4]).to_bytes(4, "little") != data[-4:]:
        raise StorageError(f"a chunk of {len(data)} bytes is damaged: its checksum differs")
    try:
        if size > MAX_BYTES or zstandard.frame_content_size(packed) != size:
            raise StorageError(f"a chunk of {instants} instants of {n} entities is not {size} bytes")
        body = zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise StorageError(f"a chunk is damaged: {error}") from error
    t_ns = np.cumsum(_unshuffled(np.frombuffer(body, np.uint8, 8 * instants), 8), dtype=np.int64)
    planes = np.frombuffer(body, np.uint8, offset=8 * instants).reshape(width, k, instants, n)
    if columns is not None:
        if len(columns) and max(columns) >= n:
            raise StorageError(f"a chunk of {n} entities was asked for number {max(columns)}")
        planes = planes[..., columns]
    change = _unshuffled(planes, width).reshape(planes.shape[1:])
    if kind == _BITS:
        return t_ns, np.bitwise_xor.accumulate(change, axis=1).view("<f4")
    change = (change >> 1) & ((1 << (8 * width - 1)) - 1) ^ -(change & 1)
    if kind == _QUANTA and k == 3:
        mean = np.cumsum(change[0], axis=0, dtype=change.dtype)
        words = np.stack([mean, mean - change[1], mean + change[2]])
    else:
        words = np.cumsum(change, axis=1, dtype=change.dtype)
    return t_ns, words if kind == _COUNTER else _from_quanta(words, np.float32(quantum))


def _shuffled(words: Any) -> bytes:
    """Group bytes by significance, lowest first, so that similar bytes are adjacent."""
    width = words.dtype.itemsize
    return cast(bytes, words.reshape(-1).view(np.uint8).reshape(-1, width).T.tobytes())


def _unshuffled(planes: Any, width: int) -> Any:
    """Signed words of `width` bytes."""
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(f"<i{width}")


def quality_words(value: F32, quality: Any) -> None:
    """Overwrite bad cells in place with a NaN whose lowest bits hold the quality."""
    bad = quality != 0
    if bad.any():
        value[bad] = (_NAN | quality[bad].astype(np.uint32)).view(np.float32)


def quality_of(value: F32) -> Any:
    """Return the qualities that `quality_words` wrote; 0 for a value."""
    words = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return np.where(np.isnan(value), words & np.uint32(0xFF), 0).astype(np.uint8)
