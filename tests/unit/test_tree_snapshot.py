"""Trees of plain data: there and back, named by content, no pickles; snapshots: whole or StorageError."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import pickle
import random
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from twin.catalogue import StorageError, digest, pack, unpack
from twin.engine import snapshot

KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
arrays = st.sampled_from(KINDS).flatmap(
    lambda k: hnp.arrays(np.dtype(k), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
trees = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    """The same types, shapes and bits; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b or (a != a and b != b))


@given(trees)
def test_there_and_back(tree: Any) -> None:
    back = unpack(pack(tree))
    assert equal(tree, back)
    assert digest(tree) == digest(back)
    assert pack(back) == pack(tree)


@given(trees, trees)
def test_two_trees_have_one_name_only_if_equal(a: Any, b: Any) -> None:
    same = equal(a, b)
    if same or not _zeros(a, b):
        assert (digest(a) == digest(b)) == same


def _zeros(a: Any, b: Any) -> bool:
    """0.0 and -0.0 compare equal and are told apart by name; that is no fault."""
    return isinstance(a, float) and isinstance(b, float) and a == b


@given(st.dictionaries(st.text(max_size=5), scalars, min_size=2, max_size=8), st.randoms())
def test_the_order_of_keys_does_not_matter(tree: dict[str, Any], rng: random.Random) -> None:
    keys = list(tree)
    rng.shuffle(keys)
    other = {k: tree[k] for k in keys}
    assert digest(other) == digest(tree)
    assert pack(other) == pack(tree)


NEAR = [
    1,
    1.0,
    True,
    "1",
    b"1",
    np.float64(1.5),
    [1],
    [[1]],
    {"1": 1},
    {1: 1},
    {"1": "1"},
    [],
    {},
    "",
    b"",
    None,
    "None",
    0,
    False,
    0.0,
    -0.0,
    float("nan"),
    "nan",
    ["a", "b"],
    ["ab"],
    ["a'", "b"],
    {"a": "b"},
    {"a\0'b'": 1},
    [b"1", b"2"],
    [b"12"],
    [b"1b1;2"],
    [2],
    [[2]],
    np.zeros(2),
    np.zeros((2, 1)),
    np.zeros((1, 2)),
    np.zeros(2, np.float32),
    np.zeros(4, np.float32),
    np.zeros(2, np.int64),
    np.zeros(16, np.uint8),
    np.zeros(0),
    np.zeros((0, 3)),
    np.array(0.0),
    np.array([np.nan, 1]),
    np.array([1, np.nan]),
    [np.zeros(2)],
    [0.0, 0.0],
    np.zeros(2, np.bool_),
]


def test_near_misses_have_names_of_their_own() -> None:
    names = [digest(t) for t in NEAR]
    doubles = [(NEAR[i], NEAR[j]) for i in range(len(NEAR)) for j in range(i) if names[i] == names[j]]
    assert doubles == []


@given(arrays, st.data())
def test_any_changed_bit_changes_the_name(array: Any, data: st.DataObject) -> None:
    raw = bytearray(array.tobytes())
    if not raw or array.dtype.kind == "b":
        return
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    other = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
    assert digest({"a": array}) != digest({"a": other})


def test_views_byte_orders_and_scalars_are_their_values() -> None:
    grid = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (grid[:, ::2], grid.T, grid[::-1]):
        assert equal(unpack(pack(view)), view.copy())
        assert digest(view) == digest(view.copy())
    assert equal(unpack(pack(grid.astype(">i4"))), grid)
    assert equal(
        unpack(pack({"x": np.float32(0.1), "t": (1, 2)})), {"x": float(np.float32(0.1)), "t": [1, 2]}
    )
    assert digest((1, np.int64(2))) == digest([1, 2])
    back = unpack(pack(grid))
    back[0, 0] = 9  # its own memory, writable


class Colour(enum.Enum):
    RED = 1


class Thing(msgspec.Struct):
    x: int = 1


@pytest.mark.parametrize(
    "thing",
    [
        {1, 2},
        datetime.datetime(2026, 1, 1),
        decimal.Decimal(1),
        Colour.RED,
        Thing(),
        object(),
        len,
        1j,
        np.array(["a"]),
        np.array([object()]),
        np.array(["2026-01-01"], "M8[s]"),
        np.zeros(1, np.complex64),
        {(1, 2): 1},
        {None: 1},
        {1.5: 1},
        np.zeros(1, [("a", "i4")]),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_not_plain_is_refused(thing: Any) -> None:
    for tree in (thing, [thing], {"a": {"b": thing}}):
        with pytest.raises(TypeError):
            pack(tree)
    if not isinstance(thing, dict):
        with pytest.raises(TypeError):
            digest({"a": thing})


@settings(max_examples=200)
@given(
    st.binary(max_size=80)
    | trees.map(pack).flatmap(
        lambda b: st.tuples(st.integers(0, len(b)), st.binary(max_size=3), st.integers(0, 3)).map(
            lambda x: b[: x[0]] + x[1] + b[x[0] + x[2] :]
        )
    )
)
def test_garbage_raises_nothing_else(data: bytes) -> None:
    with contextlib.suppress(StorageError):
        unpack(data)


def ext(head: bytes, data: bytes = b"", code: int = 7) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, len(head).to_bytes(2, "little") + head + data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 200_000,
        pickle.dumps([1]),
        ext(b"\x92\xa2f4\x91\x05"),
        ext(b"\x92\xa2O8\x91\x01", bytes(8)),
        ext(b"\x92\xa1O\x91\x01", bytes(8)),
        ext(b"\xc0"),
        ext(b""),
        ext(b"\x92\xa2f4\x91\xa1x", bytes(4)),
        ext(b"\x92\x91\xa2f4\x91\x01", bytes(4)),
        ext(b"\x92\xa2f4\x91\x01", bytes(4), 8),
        ext(msgspec.msgpack.encode(("f4", (2**40, 2**40))), bytes(4)),
        ext(msgspec.msgpack.encode(("f4", (2**64 - 1,))), bytes(4)),
        msgspec.msgpack.Ext(7, b"").data,
    ],
)
def test_hostile_arrays(data: bytes) -> None:
    with pytest.raises(StorageError):
        unpack(data)


DATA = {
    "tick": 5,
    "now_ns": 10**18,
    "tables": {"gpu": {"value": np.array([[1.5, np.nan]], np.float32)}},
    "seen": ["a"],
}


def test_a_snapshot_comes_back() -> None:
    assert equal(snapshot.decode(snapshot.encode(DATA)), DATA)


def test_damaged_anywhere_it_is_refused() -> None:
    raw = snapshot.encode(DATA)
    for cut in range(len(raw)):
        with pytest.raises(StorageError):
            snapshot.decode(raw[:cut])
    for place in range(len(raw)):
        for bit in range(8):
            bad = bytearray(raw)
            bad[place] ^= 1 << bit
            with pytest.raises(StorageError):
                snapshot.decode(bytes(bad))
    with pytest.raises(StorageError, match="damaged"):
        snapshot.decode(raw + b"\0")


def sealed(body: bytes) -> bytes:
    """A body with a check that matches."""
    return b"rtsnap01" + digest(body).encode() + body


@pytest.mark.parametrize(
    "tree,reason",
    [
        ([1], "format None"),
        (5, "format None"),
        ({"data": {}}, "format None"),
        ({"format": 99, "data": {}}, "format 99"),
        ({"format": snapshot.FORMAT, "data": []}, "expected"),
        ({"format": snapshot.FORMAT}, "expected"),
    ],
)
def test_sealed_but_not_ours(tree: Any, reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        snapshot.decode(sealed(zstandard.ZstdCompressor().compress(pack(tree))))


def test_a_snapshot_of_another_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are rows of the catalogue: they would be read as other signals."""
    raw = snapshot.encode(DATA)
    monkeypatch.setattr(snapshot, "CATALOGUE_HASH", "another")
    with pytest.raises(StorageError, match="this version has another"):
        snapshot.decode(raw)


def test_sealed_garbage_and_a_bomb() -> None:
    for body in (
        b"",
        b"garbage",
        zstandard.ZstdCompressor().compress(b"\xc1"),
        zstandard.ZstdCompressor().compress(b""),
    ):
        with pytest.raises(StorageError):
            snapshot.decode(sealed(body))
    header = zstandard.ZstdCompressor().compressobj(size=2**50)
    bomb = header.compress(bytes(2**20)) + header.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match="claims to hold"):
            snapshot.decode(sealed(bomb))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
