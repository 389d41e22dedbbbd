"""Readings as Influx line protocol: one line per entity and instant, built column by column.

`gpu,site=lab,hall=h1,rack=r1,node=node0,gpu=gpu3 power_w=880.5,energy_mj=12i 1700000000000000000`. Equal
values are spelled once.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from twin.catalogue import F32, I64

LEVELS = ("site", "hall", "rack", "node", "gpu")  # of a path, from the left
_MARK = b"\0"  # where the first field begins, which has no comma before it
_ESCAPES = str.maketrans({",": "\\,", "=": "\\=", " ": "\\ ", "\n": None, "\r": None, "\t": None, "\0": None})


class SiteNames(Protocol):
    """Interface of a site: the full paths of its entities; `hash` names the site."""

    @property
    def hash(self) -> str:
        """Return a hash of the names."""
        ...

    def names(self, table: str) -> list[str]:
        """Return full paths, in the order of the entities."""
        ...


class LineColumns(Protocol):
    """One table at one instant: gauges [k, n] with NaN for no reading, totals [c, n] with -1 for none."""

    @property
    def table(self) -> str: ...
    @property
    def gauges(self) -> tuple[str, ...]: ...
    @property
    def value(self) -> F32: ...
    @property
    def counters(self) -> tuple[str, ...]: ...
    @property
    def total(self) -> I64: ...


def escaped(name: str) -> str:
    """Return an escaped tag, field or measurement; a backslash at its end would hide the next character."""
    plain = name.translate(_ESCAPES)
    return plain.rstrip("\\") + "_" if plain.endswith("\\") else plain


def head_of(table: str, path: str) -> bytes:
    """Return measurement and tags of an entity: a tag per level of its path, the last one named by its
    table."""
    parts = path.split("/")
    levels = [*LEVELS[: len(parts) - 1], table] if len(parts) <= len(LEVELS) else _deep(parts, table)
    tags = (f"{level}={escaped(part)}" for level, part in zip(levels, parts, strict=True) if part)
    return ",".join((escaped(table), *tags)).encode()


def _deep(parts: list[str], table: str) -> list[str]:
    return [*LEVELS, *(f"level{i}" for i in range(len(LEVELS), len(parts) - 1)), table]


def heads_of(table: str, paths: Iterable[str]) -> list[bytes]:
    """Return `head_of` for many entities."""
    return [head_of(table, path) for path in paths]


def lines(heads: list[bytes], columns: LineColumns, first: int, last: int, t_ns: int) -> tuple[bytes, int]:
    """Return the lines of the entities `first` .. `last` - 1 with any reading, and their number."""
    value, total = columns.value[:, first:last], columns.total[:, first:last]
    texts = [_spelled(name, row, "") for name, row in zip(columns.gauges, value, strict=True)]
    texts += [_spelled(name, row, "i") for name, row in zip(columns.counters, total, strict=True)]
    known: Any = (~np.isnan(value)).any(axis=0) | (total >= 0).any(axis=0)
    marked = repeat(b" " + _MARK)
    joined = map(b"".join, zip(heads[first:last], marked, *texts, repeat(b" %d" % t_ns), strict=False))
    kept = list(joined) if known.all() else [x for x, k in zip(joined, known.tolist(), strict=False) if k]
    return b"\n".join(kept).replace(_MARK + b",", b""), len(kept)


def _spelled(name: str, row: Any, end: str) -> list[bytes]:
    """Return `,name=value` per entity, "" without a reading."""
    gaps = row < 0 if end else np.isnan(row)
    distinct, at = np.unique(np.where(gaps, row.dtype.type(0), row), return_inverse=True)
    head = f",{escaped(name)}="
    spelled = [f"{head}{number}{end}".encode() for number in distinct.astype(str).tolist()]
    if gaps.any():
        at = np.where(gaps, len(spelled), at)
        spelled.append(b"")
    return [spelled[i] for i in at.tolist()]
