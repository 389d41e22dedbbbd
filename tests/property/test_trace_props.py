"""Traces: every frame comes back as it was; whatever happens to the file, what is read is right."""

from __future__ import annotations

import copy
import random
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from twin.catalogue import NS, StorageError
from twin.run import TraceReader, TraceWriter, trace
from twin.run.trace import FORMAT, KEYFRAME_EVERY, MAGIC, Header, TraceDecoder, TraceEncoder, payloads, record
from twin.telemetry import (
    CommandAcked,
    Counts,
    Event,
    FaultReported,
    Frame,
    JobStarted,
    ModelFitted,
    OperatorRequest,
    SiteChanged,
    TableUpdate,
)
from twin.telemetry.events import Approved
from twin.telemetry.frame import ABSURD_Q, MISSING_Q, UNTRUSTED_Q

T0 = 1_700_000_000 * NS
EVENTS: tuple[Event, ...] = (
    FaultReported(id="f1", table="gpu", name="s/h/r1/node0/gpu1", code=79, detail="\u00e9\n\x00"),
    JobStarted(id="j", job="j1", nodes=("n1", "n2"), floor_w=float("inf"), priority=-3),
    OperatorRequest(id="o", author="a", control="gpu.power_cap_w", names=(), lo=float("-inf"), hi=400.0),
    ModelFitted(fit="m@1", model="m", params_hash="ab", params=bytes(range(256))),
    Approved(author="a", policy="p", control="c", expires_ns=2**62),
)


def equal(a: Frame, b: Frame) -> None:
    """The same to the last bit, types included."""
    assert (a.tick, a.now_ns, a.dt_s, a.urgent, a.events) == (b.tick, b.now_ns, b.dt_s, b.urgent, b.events)
    for mine, theirs in ((a.updates, b.updates), (a.counts, b.counts)):
        assert len(mine) == len(theirs)
        for x, y in zip(mine, theirs, strict=True):
            assert type(x) is type(y)
            for name in x._fields:
                p, q = getattr(x, name), getattr(y, name)
                if isinstance(p, np.ndarray):
                    assert p.dtype == q.dtype, name
                    assert np.array_equal(p, q), name
                else:
                    assert p == q, name


def integers(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int) -> Any:
    """Mostly near zero, some far out, so that every width and the list of outliers is used."""
    out = rng.integers(-5, 6, shape)
    kind = rng.integers(0, 5)
    if kind >= 1:
        far = rng.random(shape) < (0.01, 0.05, 0.5, 1.0)[kind - 1]
        out = np.where(far, rng.integers(low, high, shape, endpoint=True), out)
    return np.clip(out, low, high)


def a_frame(rng: np.random.Generator, tick: int, n: dict[str, int]) -> Frame:
    now = T0 + tick * NS
    updates, counts = [], []
    for table, size in n.items():
        for rows_max in (6, 6):
            rows = np.sort(rng.permutation(rows_max)[: rng.integers(1, rows_max)]).astype(np.int32)
            m, entity = size, None
            if rng.random() < 0.5:
                entity = np.flatnonzero(rng.random(size) < rng.choice([0.05, 0.5, 1.0])).astype(np.int32)
                m = len(entity)
            if m == 0 or rng.random() < 0.2:
                continue
            t = (
                now
                - (rng.integers(0, 3, m) if rng.random() < 0.3 else rng.integers(0, 3)) * 10**8
                + np.zeros(m, np.int64)
            )
            if rng.random() < 0.6:
                q = integers(rng, (len(rows), m), -(2**31), 2**31 - 1).astype(np.int32)
                q[rng.random(q.shape) < 0.05] = rng.choice([MISSING_Q, UNTRUSTED_Q, ABSURD_Q])
                updates.append(TableUpdate(table, rows, entity, q, t))
            else:
                raw = integers(rng, (len(rows), m), -(2**63), 2**63 - 1).astype(np.int64)
                gain = integers(rng, (len(rows), m), -(2**63), 2**63 - 1).astype(np.int64)
                counts.append(Counts(table, rows, entity, raw, gain, t))
    events = EVENTS if rng.random() < 0.1 else ()
    return Frame(
        tick,
        now,
        float(rng.choice([1.0, 0.1])),
        tuple(updates),
        tuple(counts),
        events,
        bool(rng.random() < 0.2),
    )


def frames_of(seed: int, number: int, n_gpu: int = 130) -> list[Frame]:
    """A run; the site changes its sizes on the way."""
    rng = np.random.default_rng(seed)
    n, out = {"gpu": n_gpu, "rack": 3}, []
    change = number // 2
    for tick in range(number):
        frame = a_frame(rng, tick, n)
        if tick == change:
            n = {"gpu": int(rng.integers(1, 2 * n_gpu)), "rack": 5}
            frame = Frame(tick, frame.now_ns, 1.0, events=(SiteChanged(site_hash="x", spec=b"{}\xff"),))
        out.append(frame)
    return out


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([3, 20, KEYFRAME_EVERY + 5]))
def test_frames_come_back(seed: int, number: int) -> None:
    encoder, decoder = TraceEncoder(), TraceDecoder()
    for frame in frames_of(seed, number):
        equal(frame, decoder.decode(encoder.encode(frame)))


@pytest.mark.parametrize("segment_bytes", [1, 20_000, 10**9])
def test_frames_come_back_across_keyframes_and_segments(tmp_path: Path, segment_bytes: int) -> None:
    frames = frames_of(5, 3 * KEYFRAME_EVERY)
    writer = TraceWriter(tmp_path, "hash", b"spec", segment_bytes)
    for frame in frames:
        writer.write(frame)
    writer.close()
    reader = TraceReader(tmp_path)
    for a, b in zip(frames, reader, strict=True):
        equal(a, b)
    assert reader.damage == []
    assert len(reader.segments()) == {1: len(frames), 10**9: 1}.get(segment_bytes, len(reader.headers))
    assert {(h.site_hash, h.spec, h.format) for h in reader.headers} == {("hash", b"spec", FORMAT)}
    assert reader.bytes_read == sum(p.stat().st_size for p in reader.segments())


def test_reading_may_begin_at_each_keyframe_and_nowhere_else() -> None:
    frames = frames_of(6, 2 * KEYFRAME_EVERY + 10)
    encoder = TraceEncoder()
    coded = [encoder.encode(f) for f in frames]
    change = len(frames) // 2
    starts = {0, KEYFRAME_EVERY, change, change + KEYFRAME_EVERY}
    readable = set()
    for i in range(len(frames)):
        decoder = TraceDecoder()
        try:
            equal(frames[i], decoder.decode(coded[i]))
        except StorageError:
            continue
        readable.add(i)
        if i + 1 < len(frames):
            equal(frames[i + 1], decoder.decode(coded[i + 1]))
    assert readable == starts


def test_a_frame_behind_a_refused_one_is_refused_too() -> None:
    frames = frames_of(7, 8)
    encoder, decoder = TraceEncoder(), TraceDecoder()
    coded = [encoder.encode(f) for f in frames]
    decoder.decode(coded[0])
    with pytest.raises(StorageError):
        decoder.decode(coded[1][:-3])
    with pytest.raises(StorageError, match="no keyframe"):
        decoder.decode(coded[2])
    equal(frames[4], decoder.decode(coded[4]))  # the site changed here: a keyframe


def test_an_event_that_cannot_be_written_costs_its_frame_only() -> None:
    frames = frames_of(8, 3)
    encoder, decoder = TraceEncoder(), TraceDecoder()
    equal(frames[0], decoder.decode(encoder.encode(frames[0])))
    huge = FaultReported(table="gpu", name="g", code=10**30)
    for odd in (huge, FaultReported(table="gpu", name="\ud800", code=1)):
        with pytest.raises(StorageError, match="cannot be written"):
            encoder.encode(Frame(9, T0, 1.0, frames[0].updates, (), (odd,)))
        equal(frames[2], decoder.decode(encoder.encode(frames[2])))


@pytest.mark.parametrize(
    "times", [1, 2, 300, trace.MANY_EVENTS, trace.MANY_EVENTS + 1, 3 * trace.MANY_EVENTS]
)
def test_events_are_bytes_within_the_bytes_of_their_frame(times: int) -> None:
    """However many there are, and whatever frames came before."""
    encoder, plain = TraceEncoder(), trace._Packed
    for tick, number in enumerate([0, times, 3, times, 2 * times], 1):
        events = tuple(CommandAcked(control="c", name=f"gpu{k}", generation=k, command="1-2", state="done")
                       for k in range(number))  # fmt: skip
        payload = encoder.encode(Frame(tick, tick * NS, 1.0, events=events))
        packed = plain(tick, tick * NS, 1.0, False, tick == 1, [], [], [],
                       msgspec.msgpack.encode(events) if events else b"")  # fmt: skip
        assert zstandard.ZstdDecompressor().decompress(payload) == msgspec.msgpack.encode(packed)


def test_a_frame_that_cannot_be_written_is_followed_by_a_keyframe() -> None:
    """Half of it had already changed what the next differences are taken from."""
    frames = frames_of(8, 3)
    encoder, decoder = TraceEncoder(), TraceDecoder()
    equal(frames[0], decoder.decode(encoder.encode(frames[0])))
    rows, column = np.array([0, 1], np.int32), np.full((2, 3), 77, np.int32)
    good = TableUpdate("gpu", rows, None, column, np.full(3, T0))
    with pytest.raises(ValueError, match="broadcast"):
        encoder.encode(Frame(1, T0, 1.0, (good, good._replace(q=column[:, :2]))))
    later = Frame(2, T0, 1.0, (good,))
    equal(later, decoder.decode(encoder.encode(later)))


class Segment:
    """A small segment on disk, its frames, and the byte at which each record begins."""

    def __init__(self, folder: Path, number: int = 4) -> None:
        self.frames = frames_of(11, number, 12)
        writer = TraceWriter(folder, "hash", b"spec")
        for frame in self.frames:
            writer.write(frame)
        writer.close()
        self.path = folder / "trace-000000.rt"
        self.data = self.path.read_bytes()
        self.starts = [at for at, _ in payloads(self.data)]

    def read(self, data: bytes) -> tuple[list[Frame], list[str]]:
        self.path.write_bytes(data)
        reader = TraceReader(self.path)
        return list(reader), reader.damage

    def whole_before(self, byte: int) -> int:
        """Count the frames that lie wholly before this byte; the first record is the header."""
        ends = [*self.starts[1:], len(self.data)]
        return max(0, sum(end <= byte for end in ends) - 1)


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    return Segment(tmp_path_factory.mktemp("trace"))


@pytest.mark.slow
def test_truncated_at_every_byte(segment: Segment) -> None:
    ends = {*segment.starts[1:], len(segment.data)}
    for cut in range(len(segment.data)):
        frames, damage = segment.read(segment.data[:cut])
        assert len(frames) == segment.whole_before(cut)
        for a, b in zip(frames, segment.frames, strict=False):
            if a.tick == len(frames) - 1:
                equal(a, b)
        if cut in ends or cut == len(MAGIC):
            assert damage == []  # a whole number of records: nothing to see
        else:
            at = max([s for s in segment.starts if s <= cut], default=0) if cut > len(MAGIC) else 0
            assert len(damage) == 1
            assert damage[0].startswith(f"{segment.path.name} at byte {at}: "), (cut, damage)


@pytest.mark.slow
def test_flipped_bits_anywhere(segment: Segment) -> None:
    """CRC-32 finds every flip; what lies before is used, nothing behind is believed."""
    rng = random.Random(3)
    places = [*range(60), *(rng.randrange(len(segment.data)) for _ in range(600))]
    for place in places:
        data = bytearray(segment.data)
        data[place] ^= 1 << rng.randrange(8)
        frames, damage = segment.read(bytes(data))
        assert len(damage) == 1
        assert len(frames) == segment.whole_before(place)
        at = 0 if place < len(MAGIC) else max(s for s in segment.starts if s <= place)
        assert f" at byte {at}: " in damage[0]
        for a, b in zip(frames, segment.frames, strict=False):
            equal(a, b)


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_a_record_with_a_valid_crc_and_other_content(seed: int) -> None:
    """A hostile or a buggy writer: refused with StorageError, or read as a frame of sane form."""
    rng = random.Random(seed)
    frame = frames_of(seed % 7, 1 + seed % 4)[-1]
    tree = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(TraceEncoder().encode(frame)))
    odd = [
        None,
        -1,
        0,
        2**31,
        2**63,
        2**64 - 1,
        1.5,
        float("nan"),
        "",
        "i3",
        "O",
        b"",
        b"\xff" * 7,
        b"\xff" * 8,
        [],
        {},
        [[]],
        True,
        b"\x00\x00\x00\x7f",
        b"\xff\xff\xff\x7f" * 3,
    ]
    for _ in range(rng.randint(1, 3)):
        at: Any = tree
        while True:
            i = rng.randrange(len(at))
            if isinstance(at[i], list) and at[i] and rng.random() < 0.8:
                at = at[i]
                continue
            at[i] = copy.deepcopy(rng.choice(odd))
            break
    payload = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(tree))
    try:
        got = TraceDecoder().decode(payload)
    except StorageError:
        return
    for u in (*got.updates, *got.counts):
        assert u.entity is None or bool((np.diff(u.entity) > 0).all())


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(zstandard.ZstdCompressor().compress))
def test_any_bytes_are_refused(data: bytes) -> None:
    for read in (TraceDecoder().decode, TraceDecoder().header):
        with pytest.raises(StorageError):
            read(data)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stated", "unstated", "deep", "runs", "fewer runs", "entity"])
def test_bombs_are_refused_in_bounded_memory(what: str) -> None:
    frame = next(f for f in frames_of(11, 20) if f.updates)
    tree = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(TraceEncoder().encode(frame)))
    zstd = zstandard.ZstdCompressor()
    if what in ("stated", "unstated"):
        maker = zstandard.ZstdCompressor(write_content_size=what == "stated").compressobj(
            size=2**30 if what == "stated" else -1
        )
        bomb = b"".join(maker.compress(bytes(2**20)) for _ in range(2**10)) + maker.flush()
    elif what == "deep":
        bomb = zstd.compress(b"\x91" * 10**6)
    else:
        update = tree[5][0]
        if "runs" in what:
            m = 2**31 - 1 if what == "runs" else trace.MAX_ENTITIES
            update[2], update[4] = None, np.array([0, m], np.int32).tobytes()
        else:
            update[2], update[4] = (
                np.array([2**31 - 1], np.int32).tobytes(),
                np.array([0, 1], np.int32).tobytes(),
            )
        bomb = zstd.compress(msgspec.msgpack.encode(tree))
    assert len(bomb) < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(StorageError):
            TraceDecoder().decode(bomb)
        with pytest.raises(StorageError):
            TraceDecoder().header(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000


@pytest.mark.parametrize(
    "data,reason",
    [
        (b"", "expected a trace segment"),
        (b"rttrace", "expected a trace segment"),
        (b"GARBAGE!" * 4, "expected a trace"),
        (MAGIC + bytes(64), "a record without content"),
        (MAGIC + record(b"no zstd"), "cannot be decompressed"),
        (MAGIC + b"\x01", "torn"),
        (MAGIC + record(zstandard.compress(b"\x01")), "not a header"),
    ],
)
def test_what_is_no_segment(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "trace-000000.rt"
    path.write_bytes(data)
    reader = TraceReader(tmp_path)
    assert list(reader) == []
    assert len(reader.damage) == 1
    assert reason in reader.damage[0]
    with pytest.raises(StorageError, match=r"trace-000000\.rt"):
        reader.first_header()


def test_a_header_without_frames_and_another_format(tmp_path: Path) -> None:
    encoder = TraceEncoder()
    good, later = (
        encoder.header(Header(FORMAT, "h", b"s", 0)),
        encoder.header(Header(FORMAT + 1, "h", b"s", 0)),
    )
    path = tmp_path / "trace-000000.rt"
    path.write_bytes(MAGIC + record(good))
    assert TraceReader(path).first_header() == Header(FORMAT, "h", b"s", 0)
    assert list(TraceReader(path)) == []
    path.write_bytes(MAGIC)
    with pytest.raises(StorageError, match="no record"):
        TraceReader(path).first_header()
    path.write_bytes(MAGIC + record(later))
    with pytest.raises(StorageError, match=f"format {FORMAT + 1}; expected {FORMAT}"):
        TraceReader(path).first_header()
    path.write_bytes(MAGIC + record(encoder.header(Header(FORMAT, "h", b"s", 0, catalogue="x"))))
    with pytest.raises(StorageError, match="recorded with the catalogue x; this version has"):
        TraceReader(path).first_header()
    with pytest.raises(StorageError, match="no trace segments"):
        list(TraceReader(tmp_path / "absent.d")) if (tmp_path / "absent.d").mkdir() is None else None


def test_ticks_that_go_back_are_skipped_and_named_once(tmp_path: Path) -> None:
    frames = frames_of(12, 6)
    for part in (frames[:4], frames[2:]):  # the second run began two ticks before the end of the first
        writer = TraceWriter(tmp_path, "hash", b"spec")
        for frame in part:
            writer.write(frame)
        writer.close()
    reader = TraceReader(tmp_path)
    for a, b in zip(frames, reader, strict=True):
        equal(a, b)
    assert len(reader.damage) == 1
    assert "trace-000001.rt at byte " in reader.damage[0]
    assert "tick 2 after 3; skipped" in reader.damage[0]


def test_damage_in_one_segment_leaves_the_next(tmp_path: Path) -> None:
    frames = frames_of(13, 9)
    for k in range(3):
        writer = TraceWriter(tmp_path, "hash", b"spec")
        for frame in frames[3 * k : 3 * k + 3]:
            writer.write(frame)
        writer.close()
    path = tmp_path / "trace-000001.rt"
    starts = [at for at, _ in payloads(path.read_bytes())]
    data = bytearray(path.read_bytes())
    data[starts[2] + 9] ^= 1
    path.write_bytes(bytes(data))
    reader = TraceReader(tmp_path)
    got = list(reader)
    assert [f.tick for f in got] == [0, 1, 2, 3, 6, 7, 8]
    for frame in got:
        equal(frame, frames[frame.tick])
    assert reader.damage == [f"trace-000001.rt at byte {starts[2]}: damaged: CRC-32 does not match"]
    assert next(payloads(path.read_bytes(), starts[1]))[0] == starts[1]


def test_a_record_is_its_length_its_crc_and_its_bytes() -> None:
    assert record(b"abc") == b"\x03\0\0\0" + zlib.crc32(b"abc").to_bytes(4, "little") + b"abc"
    assert trace.MAX_RECORD < 2**32
