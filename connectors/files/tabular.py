"""Series from tables of text: time-ordered readings, by a mapping of columns to signals.

Reads the files it is given and nothing else. Every row is counted with a reason and none raises: rows total =
decoded + ignored + bad. It knows a site only through `Names`.

Of an hour that occurs twice, the rows of each entity decide which pass they are of (see `times`). A local
time that does not exist (the hour skipped in spring) makes the row bad.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from connectors.files.ipmi import MappingPart, RowTally, conversion, read_tree
from connectors.files.text_table import RowLimit, TableCells, read_cells
from connectors.files.times import NO_TIME, TimeFormat, localise
from twin.catalogue import I64, TABLES, Bool, ConfigError
from twin.site import convert
from twin.telemetry import Names, Reading

MAX_ROWS = 5_000_000  # per call: all rows are held until they are in order of time


class TimeColumn(MappingPart, frozen=True):
    """`format`: iso, epoch_s, epoch_ms or a strptime pattern; `zone` (UTC or IANA) for times without one."""

    column: str
    format: str = "iso"
    zone: str = "UTC"


class EntityOf(MappingPart, frozen=True):
    """Owner of the readings: the literal `name`, or `column`'s text in `template`."""

    table: str
    name: str | None = None
    column: str | None = None
    template: str = "{name}"


class SignalOf(MappingPart, frozen=True):
    """A column's signal; `unit` as in the file; `scale` multiplies first (units that only prices have)."""

    signal: str
    unit: str
    scale: float = 1.0


class Gap(MappingPart, frozen=True):
    """At least `min_run` rows on end in which all these columns (with `combine: sum`: their sums) are zero
    hold no readings. Judged for `min_files` files or more: one idle part is no outage."""

    all_zero: list[str] = msgspec.field(default_factory=list)
    min_run: int = 1
    min_files: int = 1


class Mapping(MappingPart, frozen=True):
    """Meaning of the columns of a table. `interval_s`: step of the series; missing steps are counted."""

    time: TimeColumn
    entity: EntityOf
    columns: dict[str, SignalOf]
    delimiter: str = ","
    combine: Literal["none", "sum"] = "none"
    gap: Gap = msgspec.field(default_factory=Gap)
    interval_s: float | None = None


@dataclass
class RowCounts(RowTally):
    """The tally of rows, and the problems of cells, times and sums; gaps and incomplete sums are decoded."""

    bad_cells: int = 0
    empty_cells: int = 0
    gap_samples: int = 0  # after the sum, if there is one
    repeated_hours: int = 0
    missing_steps: int = 0
    incomplete_sums: int = 0


_Values = tuple[float | None, ...]


class _Row(NamedTuple):
    t_ns: int
    name: str
    values: _Values  # of the mapped columns, then the gap's; None empty, NaN unreadable


def _faults(m: Mapping) -> Iterator[str]:
    """Return the faults that the types cannot express."""
    table = TABLES.get(m.entity.table)
    if table is None:
        yield f"$.entity.table: expected one of {', '.join(TABLES)}, got {m.entity.table!r}"
    if (m.entity.name is None) == (m.entity.column is None):
        yield "$.entity: expected either `name` or `column`"
    if m.entity.template.count("{name}") != 1:
        yield f"$.entity.template: expected {{name}} exactly once, got {m.entity.template!r}"
    if len(m.delimiter) != 1 or m.delimiter in '"\r\n':
        yield f"$.delimiter: expected one character, got {m.delimiter!r}"
    if m.time.format not in ("iso", "epoch_s", "epoch_ms") and "%" not in m.time.format:
        yield f"$.time.format: expected iso, epoch_s, epoch_ms or %-codes, got {m.time.format!r}"
    try:
        ZoneInfo(m.time.zone)
    except (OSError, ValueError, KeyError):
        yield f"$.time.zone: expected UTC or an IANA name such as Europe/Berlin, got {m.time.zone!r}"
    if m.interval_s is not None and not 0 < m.interval_s < math.inf:
        yield f"$.interval_s: expected a number > 0, got {m.interval_s}"
    if m.gap.min_run < 1 or m.gap.min_files < 1:
        yield "$.gap: expected min_run and min_files >= 1"
    if not m.columns:
        yield "$.columns: expected at least one"
    fed = [to.signal for to in m.columns.values()]
    for column, to in m.columns.items():
        signal = table.by_name.get(to.signal) if table else None
        if fed.count(to.signal) > 1:
            yield f"$.columns.{column}.signal: {to.signal} already has a column"
        elif table and signal is None:
            yield f"$.columns.{column}.signal: {m.entity.table} has no signal {to.signal!r}"
        elif signal and conversion(to.unit, signal.unit) is None:
            yield f"$.columns.{column}.unit: cannot turn {to.unit!r} into {signal.unit!r} of {to.signal}"
        if not math.isfinite(to.scale):
            yield f"$.columns.{column}.scale: expected a finite number, got {to.scale}"


def mapping_of(tree: Any, file: str) -> Mapping:
    """Return a parsed YAML tree as a mapping; ConfigError with every fault."""
    mapping = convert(Mapping, tree, file)
    if faults := list(_faults(mapping)):
        raise ConfigError([f"{file}: {fault}" for fault in faults])
    return mapping


def read_mapping(path: Path) -> Mapping:
    """Return the mapping in a YAML file."""
    return mapping_of(read_tree(path), path.name)


@lru_cache(maxsize=1 << 14)
def _number(text: str) -> float | None:
    """Return the number in a cell, None if it is empty, NaN if it holds anything else."""
    if "_" in text or len(text) > 64:
        return math.nan
    if not (text := text.strip()):
        return None
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if abs(value) <= 1e18 else math.nan  # nothing that we measure comes near


def _wanted(m: Mapping) -> list[str]:
    return [*m.columns, *(c for c in m.gap.all_zero if c not in m.columns)]


def _read_rows(path: Path, m: Mapping, counts: RowCounts) -> list[_Row]:
    """Yield the rows of a file in order of time. A bad row is ignored behind the last good one."""
    columns = [m.time.column, *([m.entity.column] if m.entity.column else []), *_wanted(m)]
    table = read_cells(path, list(dict.fromkeys(columns)), m.delimiter, RowLimit(MAX_ROWS, counts.total))
    counts.total += len(table.lines)
    names = table.cells[m.entity.column].str.strip().to_numpy() if m.entity.column else None
    why = np.where(table.is_whole, "", "a row whose number of cells differs from the header").astype(object)
    t_ns = _instants(table, m, names, why, counts)
    why[table.is_blank] = ""
    good = (why == "") & ~table.is_blank
    _count_lost(table, why, good, counts)
    at = np.flatnonzero(good)
    if len(at) and t_ns[at[0]] > t_ns[at[-1]]:
        at = at[::-1]
    at = at[np.argsort(t_ns[at], kind="stable")]
    values = [_numbers(name, table.cells[name].iloc[at], counts) for name in _wanted(m)]
    of = [m.entity.name or ""] * len(at) if names is None else names[at].tolist()
    return [_Row(*row) for row in zip(t_ns[at].tolist(), of, zip(*values, strict=True), strict=True)]


def _instants(table: TableCells, m: Mapping, names: Any, why: Any, counts: RowCounts) -> I64:
    """Return the instant of each row [n]; `why` gets the reason where there is none."""
    cells, form = table.cells[m.time.column], m.time.format
    t_ns, naive = TimeFormat.named(form, m.time.column).instants(cells, 0)
    why[(why == "") & (t_ns == NO_TIME)] = f"no time as {form}, from 1970 to 2116"
    naive &= why == ""
    whose = np.zeros(len(t_ns), np.int64) if names is None else np.unique(names, return_inverse=True)[1]
    for one in np.unique(whose[naive]).tolist():
        at = np.flatnonzero(naive & (whose == one))
        local = localise(t_ns[at], m.time.zone)
        t_ns[at] = local.t_ns
        counts.repeated_hours += int(local.twice.sum())
        lost = local.t_ns == NO_TIME
        why[at[lost & ~local.twice]] = "a local time that does not exist: summer time skips it"
        why[at[lost & local.twice]] = "a local time that occurs twice, in rows in no order"
    return t_ns


def _count_lost(table: TableCells, why: Any, good: Bool, counts: RowCounts) -> None:
    """Count blank lines and rows that are none; behind the last good row, they are no fault."""
    last = int(np.flatnonzero(good)[-1]) if good.any() else len(good)
    number = np.arange(len(good))
    bad = (why != "") & ~table.is_blank
    for reason in dict.fromkeys(why[bad & (number < last)].tolist()):
        at = np.flatnonzero(bad & (number < last) & (why == reason))
        counts.count("bad", "row", reason, table.first.iloc[at[0]], len(at))
    for what, at in (
        ("blank line", np.flatnonzero(table.is_blank)),
        ("after the last row of data", np.flatnonzero(bad & (number > last))),
    ):
        if len(at):
            counts.count("ignored", "row", what, table.first.iloc[at[0]], len(at))


def _numbers(name: str, cells: Any, counts: RowCounts) -> list[float | None]:
    """Return the numbers in these cells; None empty, NaN unreadable."""
    texts = cells.tolist()
    out = [_number(text) for text in texts]
    counts.empty_cells += out.count(None)
    bad = [text for text, value in zip(texts, out, strict=True) if value is not None and math.isnan(value)]
    counts.bad_cells += len(bad)
    if bad:
        counts.count("other", name, "not a finite number", bad[0], len(bad))
    return out


class Series:
    """A series in memory: `(t_ns, readings)` in order of time; `counts` has the rest."""

    def __init__(self, mapping: Mapping, files: int) -> None:
        self.mapping, self.files, self.counts = mapping, files, RowCounts()
        self._rows: dict[int, dict[int, list[_Values]]] = {}  # per entity and instant, one from each file
        self._files_of: dict[int, int] = {}

    def add(self, rows: list[_Row], names: Names) -> None:
        """Take in the rows of one file; unknown entities are ignored, a second row of an instant is bad."""
        m, entities, here = self.mapping, dict[str, int | None](), set[tuple[int, int]]()
        for row in rows:
            if row.name not in entities:
                name = m.entity.template.replace("{name}", row.name)
                entities[row.name] = names.entity(m.entity.table, name)
            entity = entities[row.name]
            if entity is None:
                self.counts.count("ignored", m.entity.table, "no such entity in the site", row.name)
                continue
            kept = self._rows.setdefault(entity, {}).setdefault(row.t_ns, [])
            if (entity, row.t_ns) in here or (kept and m.combine == "none"):
                self.counts.count("bad", "row", "the same time twice", f"{row.name} at {row.t_ns} ns")
                continue
            here.add((entity, row.t_ns))
            kept.append(row.values)
            self.counts.decoded += 1
        for entity in {e for e, _ in here}:
            self._files_of[entity] = self._files_of.get(entity, 0) + 1

    def finish(self) -> None:
        """Sum, find the gaps and put everything in order, after the last file."""
        merged: dict[int, list[tuple[int, _Values]]] = {}
        for entity in sorted(self._rows):
            parts = self.files if self.mapping.entity.name is not None else self._files_of[entity]
            times = sorted(self._rows[entity])
            settled = [self._total(self._rows[entity].pop(t), parts) for t in times]
            for i in self._gap(settled):
                settled[i] = (None,) * len(settled[i])
                self.counts.gap_samples += 1
            if self.mapping.interval_s is not None:
                step = self.mapping.interval_s * 1e9
                gaps = (round((b - a) / step) - 1 for a, b in itertools.pairwise(times))
                self.counts.missing_steps += sum(g for g in gaps if g > 0)
            for t, values in zip(times, settled, strict=True):
                merged.setdefault(t, []).append((entity, values))
        self._merged = sorted(merged.items())

    def _total(self, rows: list[_Values], parts: int) -> _Values:
        """Return one row, or the sum of the rows of all files; an unknown part makes the sum unknown."""
        if self.mapping.combine == "none":
            return rows[0]
        sums: list[float | None] = []
        for column in zip(*rows, strict=True):
            known = [v for v in column if v is not None and not math.isnan(v)]
            sums.append(sum(known) if len(known) == parts else None)
        self.counts.incomplete_sums += None in sums
        return tuple(sums)

    def _gap(self, samples: list[_Values]) -> list[int]:
        """Return the samples at which zero means no reading, by the mapping."""
        gap, wanted = self.mapping.gap, _wanted(self.mapping)
        at, out, run = [wanted.index(c) for c in gap.all_zero], list[int](), list[int]()
        if not at or self.files < gap.min_files:
            return []
        for i, values in enumerate([*samples, ()]):
            if values and all(values[k] == 0.0 for k in at):
                run.append(i)
                continue
            out += run if len(run) >= gap.min_run else []
            run = []
        return out

    def __iter__(self) -> Iterator[tuple[int, list[Reading]]]:
        table, to = self.mapping.entity.table, list[tuple[str, float, float]]()
        for of in self.mapping.columns.values():
            factor, offset = conversion(of.unit, TABLES[table].by_name[of.signal].unit) or (1.0, 0.0)
            to.append((of.signal, of.scale * factor, offset))
        for t_ns, entities in self._merged:
            readings = [
                Reading(table, entity, signal, None if v is None else v * factor + offset, t_ns)
                for entity, values in entities
                for (signal, factor, offset), v in zip(to, values, strict=False)
                if v is None or not math.isnan(v)  # NaN: unreadable, which is not the same as empty
            ]
            yield t_ns, readings


def read_series(paths: Sequence[Path], mapping: Mapping, names: Names) -> Series:
    """Read the files of one series. ConfigError if a header does not fit, StorageError if unreadable."""
    series = Series(mapping, len(paths))
    for path in paths:
        series.add(_read_rows(path, mapping, series.counts), names)
    series.finish()
    return series
