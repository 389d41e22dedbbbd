"""Trees of plain data and arrays: their content hash and their encoding.

Snapshots, fitted parameters and checksums use it. No pickle: only mappings, lists, scalars, bytes and NumPy
arrays of plain numbers. Imports only the errors of racktwin.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from twin.catalogue.errors import StorageError

_ARRAY = 7  # msgpack extension code
_SCALARS = (type(None), bool, int, float, str, bytes, bytearray, memoryview)
_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}


def _write(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = value.dtype.str[1:]
        if kind not in _TYPES:
            raise TypeError(f"an array of {value.dtype} is not plain data")
        head = msgspec.msgpack.encode((kind, value.shape))
        data = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False)).tobytes()
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "little") + head + data)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data")


def _read(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise StorageError(f"unknown extension {code}; expected {_ARRAY}")
    size = int.from_bytes(data[:2], "little")
    kind, shape = msgspec.msgpack.decode(data[2 : 2 + size])
    if kind not in _TYPES:
        raise StorageError(f"unknown array type {kind!r}; expected one of {', '.join(sorted(_TYPES))}")
    return np.frombuffer(data[2 + size :], "<" + kind).reshape(shape).copy()


def pack(tree: Any) -> bytes:
    """The tree as msgpack; equal trees give equal bytes. Raises TypeError for anything but plain data."""
    _check(tree)
    return msgspec.msgpack.encode(tree, enc_hook=_write, order="deterministic")


def unpack(data: bytes) -> Any:
    """The tree that `pack` wrote. Raises StorageError if these bytes are not one."""
    try:
        return msgspec.msgpack.Decoder(ext_hook=_read).decode(data)
    except (
        msgspec.DecodeError,
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        raise StorageError(f"not a packed tree: {error}") from error


def _check(tree: Any) -> None:
    """msgspec writes dates, sets and objects too, and gives back something else: refused here."""
    kind = type(tree)
    if kind is dict:
        for key, value in tree.items():
            if type(key) not in (str, int):
                raise TypeError(f"a key of type {type(key).__name__} is not plain data")
            _check(value)
    elif kind is list or kind is tuple:
        for item in tree:
            _check(item)
    elif kind not in _SCALARS and not isinstance(tree, np.ndarray | np.generic):
        raise TypeError(f"{kind.__name__} is not plain data")


def digest(tree: Any) -> str:
    """The content's name: blake2b over names, types, shapes and bytes. Raises TypeError as `pack` does."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher, tree)
    return hasher.hexdigest()


def _feed(hasher: Any, tree: Any) -> None:
    # Every piece says how long it is or where it ends, so that no two trees give one stream.
    if isinstance(tree, dict):
        hasher.update(b"{%d;" % len(tree))
        for key in sorted(tree, key=str):
            hasher.update(repr(key).encode() + b"\0")
            _feed(hasher, tree[key])
    elif isinstance(tree, list | tuple):
        hasher.update(b"[%d;" % len(tree))
        for item in tree:
            _feed(hasher, item)
    elif isinstance(tree, bytes | bytearray | memoryview):
        hasher.update(b"b%d;" % len(tree))
        hasher.update(tree)
    elif isinstance(tree, np.ndarray):
        if tree.dtype.str[1:] not in _TYPES:
            raise TypeError(f"an array of {tree.dtype} is not plain data")
        if tree.dtype.kind == "f" and (nothing := np.isnan(tree)).any():
            # Of two operands that are NaN a processor gives either, with its sign: all count as one
            tree = np.where(nothing, tree.dtype.type(np.nan), tree)
        hasher.update(f"a{tree.dtype.str}{tree.shape}".encode())
        hasher.update(np.ascontiguousarray(tree).data)
    else:
        plain = tree.item() if isinstance(tree, np.generic) else tree
        if type(plain) not in _SCALARS:
            raise TypeError(f"{type(plain).__name__} is not plain data")
        hasher.update(repr(plain).encode(errors="surrogatepass") + b"\0")
