"""Tables of text (CSV, TSV; plain, .gz, .xz) as time-ordered readings, by a mapping of columns to signals.

Reads the files it is given and nothing else. Whatever stands in a row is counted with a reason, never raised:
rows total = decoded + ignored + bad. May import `twin`; knows a site only through `Names`.

Time: a local time that occurs twice (the hour repeated when summer time ends) is taken as the earlier one;
if an entity has two rows with it, the later row is the later instant. A local time that does not exist (the
hour skipped in spring) makes the row bad. A quoted cell cannot span lines.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import lzma
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from connectors.ipmi import MAX_LINE_BYTES, Strict, Tally, conversion, lines_of, read_tree
from twin.errors import ConfigError, StorageError
from twin.reading import Names, Reading
from twin.signals import TABLES
from twin.sitefile import convert

MAX_ROWS = 5_000_000  # per call: all rows are held until they are in order of time
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TimeColumn(Strict, frozen=True):
    """`format`: iso, epoch_s, epoch_ms or a strptime pattern; `zone` (UTC or IANA) for times without one."""

    column: str
    format: str = "iso"
    zone: str = "UTC"


class EntityOf(Strict, frozen=True):
    """Whose readings these are: the literal `name`, or `column`'s text put into `template`."""

    table: str
    name: str | None = None
    column: str | None = None
    template: str = "{name}"


class SignalOf(Strict, frozen=True):
    """A column's signal; `unit` as in the file; `scale` multiplies first (units that only prices have)."""

    signal: str
    unit: str
    scale: float = 1.0


class Gap(Strict, frozen=True):
    """At least `min_run` rows on end in which all these columns (with `combine: sum`: their sums) are zero
    hold no readings. Judged for `min_files` files or more: one idle part is no outage."""

    all_zero: list[str] = msgspec.field(default_factory=list)
    min_run: int = 1
    min_files: int = 1


class Mapping(Strict, frozen=True):
    """What the columns of a table mean. `interval_s` is the step of the series: missing steps are counted."""

    time: TimeColumn
    entity: EntityOf
    columns: dict[str, SignalOf]
    delimiter: str = ","
    combine: Literal["none", "sum"] = "none"
    gap: Gap = msgspec.field(default_factory=Gap)
    interval_s: float | None = None


@dataclass
class Counts(Tally):
    """The tally of rows, and what befell cells, times and sums; gaps and incomplete sums are decoded."""

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
    local: datetime | None  # set if the local time is ambiguous


def _faults(m: Mapping) -> Iterator[str]:
    """What the types cannot say."""
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
            yield f"$.columns.{column}.signal: {to.signal} is fed by another column already"
        elif table and signal is None:
            yield f"$.columns.{column}.signal: {m.entity.table} has no signal {to.signal!r}"
        elif signal and conversion(to.unit, signal.unit) is None:
            yield f"$.columns.{column}.unit: cannot turn {to.unit!r} into {signal.unit!r} of {to.signal}"
        if not math.isfinite(to.scale):
            yield f"$.columns.{column}.scale: expected a finite number, got {to.scale}"


def mapping_of(tree: Any, file: str) -> Mapping:
    """A parsed YAML tree as a mapping; ConfigError with every fault of it."""
    mapping = convert(Mapping, tree, file)
    if faults := list(_faults(mapping)):
        raise ConfigError([f"{file}: {fault}" for fault in faults])
    return mapping


def read_mapping(path: Path) -> Mapping:
    """The mapping in a YAML file."""
    return mapping_of(read_tree(path), path.name)


def _to_ns(moment: datetime) -> int:
    t_ns = (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    if not 0 <= t_ns < 2**63:
        raise ValueError("a time before 1970 or after 2262")
    return t_ns


@lru_cache(maxsize=1 << 16)  # the files of a series mostly share their times
def parse_time(text: str, time: TimeColumn, zone: tzinfo) -> tuple[int, datetime | None]:
    """(instant in ns, the local time if it is ambiguous). Raises ValueError with what is wrong."""
    if len(text) > 64 or not (text := text.strip()):
        raise ValueError("no time")
    if time.format in ("epoch_s", "epoch_ms"):
        try:
            number = Decimal(text)
        except InvalidOperation:
            raise ValueError("not a number of seconds") from None
        scale = 10**9 if time.format == "epoch_s" else 10**6
        if not number.is_finite() or not 0 <= number < 2**63 // scale:
            raise ValueError("a time before 1970 or after 2262")
        return int(number * scale), None
    try:
        iso = time.format == "iso"
        moment = datetime.fromisoformat(text) if iso else datetime.strptime(text, time.format)
    except (ValueError, OverflowError, re.error):
        raise ValueError(f"not a time as {time.format}") from None
    try:
        if moment.tzinfo is not None:
            return _to_ns(moment), None
        early, late = moment.replace(tzinfo=zone, fold=0), moment.replace(tzinfo=zone, fold=1)
        if early.utcoffset() == late.utcoffset():
            return _to_ns(early.astimezone(UTC)), None
        # the folds differ at a change of offset only; a time that exists survives the way there and back
        if early.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != moment:
            raise ValueError("a local time that does not exist: summer time skips it")
        return _to_ns(early.astimezone(UTC)), early
    except OverflowError:
        raise ValueError("a time before 1970 or after 2262") from None


@lru_cache(maxsize=1 << 14)
def _cell(text: str) -> float | None:
    """The number in a cell, None if it is empty. Raises ValueError for anything else, NaN included."""
    if "_" in text or len(text) > 64:  # before the cache could keep it
        raise ValueError("not a number")
    if not (text := text.strip()):
        return None
    value = float(text)
    if not abs(value) <= 1e18:  # NaN fails, too; nothing that we measure comes near
        raise ValueError("not finite")
    return value


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), []) if '"' in line else line.split(delimiter)
    except csv.Error:
        return line.split(delimiter)


def _wanted(m: Mapping) -> list[str]:
    return [*m.columns, *(c for c in m.gap.all_zero if c not in m.columns)]


class _Columns:
    """Where the columns that matter stand in one file."""

    def __init__(self, header: str | None, m: Mapping, file: str) -> None:
        names = [n.strip() for n in _cells((header or "").removeprefix("\ufeff"), m.delimiter)]
        self.wanted = _wanted(m)
        needed = [m.time.column, *([m.entity.column] if m.entity.column else []), *self.wanted]
        missing = [c for c in needed if names.count(c) != 1]
        if missing:
            raise ConfigError([f"{file}: expected one column {c!r}, found {names[:40]}" for c in missing])
        self.width, self.time = len(names), names.index(m.time.column)
        self.entity = names.index(m.entity.column) if m.entity.column else None
        self.values = [names.index(c) for c in self.wanted]

    def row(self, line: str | None, m: Mapping, zone: tzinfo, counts: Counts) -> _Row:
        """The row in this line. Raises ValueError with the reason why it is none."""
        if line is None:
            raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
        cells = _cells(line, m.delimiter)
        if len(cells) != self.width:
            raise ValueError("another number of cells than the header")
        t_ns, local = parse_time(cells[self.time], m.time, zone)
        values: list[float | None] = []
        for name, at in zip(self.wanted, self.values, strict=True):
            try:
                values.append(_cell(cells[at]))
                counts.empty_cells += values[-1] is None
            except ValueError:
                values.append(math.nan)
                counts.bad_cells += 1
                counts.count("other", name, "not a finite number", cells[at])
        entity = m.entity.name if self.entity is None else cells[self.entity].strip()
        return _Row(t_ns, entity or "", tuple(values), local)


def _read_rows(stream: IO[bytes], file: str, m: Mapping, counts: Counts) -> list[_Row]:
    """The rows of a file in its own order. What is no row is bad, but ignored behind the last row."""
    lines, zone = lines_of(stream, file), ZoneInfo(m.time.zone)
    columns, rows, since = _Columns(next(lines, None), m, file), list[_Row](), Tally()
    for line in lines:
        counts.total += 1
        if counts.total > MAX_ROWS:
            raise StorageError(f"{file}: more than {MAX_ROWS} rows in one series")
        if line is not None and not line.strip():
            counts.count("ignored", "row", "blank line", "")
            continue
        try:
            rows.append(columns.row(line, m, zone, counts))
        except ValueError as error:
            since.count("bad", "row", str(error), line or "")
            continue
        if since.bad:
            _merge(since, "bad", counts)
            since = Tally()
    _merge(since, "ignored" if rows else "bad", counts)
    return rows


def _merge(since: Tally, outcome: Literal["ignored", "bad"], counts: Counts) -> None:
    for (_, what, why), (number, sample) in since.reasons.items():
        said = why if outcome == "bad" else "behind the last row of data"
        counts.count(outcome, what, said, sample, number)


def _in_order(rows: list[_Row], counts: Counts) -> list[_Row]:
    """Rows by time; of an hour that occurs twice, an entity's second row is the later instant."""
    if rows and rows[0].t_ns > rows[-1].t_ns:
        rows = rows[::-1]
    seen: set[tuple[str, datetime]] = set()
    for i, row in enumerate(rows):
        if row.local is None:
            continue
        counts.repeated_hours += 1
        if (row.name, row.local) in seen:
            rows[i] = row._replace(t_ns=_to_ns(row.local.replace(fold=1).astimezone(UTC)))
        seen.add((row.name, row.local))
    return sorted(rows, key=lambda r: r.t_ns)


class Series:
    """A series that was read: `(t_ns, readings)` in order of time; `counts` says the rest."""

    def __init__(self, mapping: Mapping, files: int) -> None:
        self.mapping, self.files, self.counts = mapping, files, Counts()
        self._rows: dict[int, dict[int, list[_Values]]] = {}  # per entity and instant, one from each file
        self._files_of: dict[int, int] = {}

    def add(self, rows: list[_Row], names: Names) -> None:
        """Take in the rows of one file; unknown entities are ignored, a second row of an instant is bad."""
        m, found, here = self.mapping, dict[str, int | None](), set[tuple[int, int]]()
        for row in rows:
            if row.name not in found:
                found[row.name] = names.entity(m.entity.table, m.entity.template.replace("{name}", row.name))
            entity = found[row.name]
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
        """One row, or the sum of the rows of all files: where a part is unknown, so is the sum."""
        if self.mapping.combine == "none":
            return rows[0]
        sums: list[float | None] = []
        for column in zip(*rows, strict=True):
            known = [v for v in column if v is not None and not math.isnan(v)]
            sums.append(sum(known) if len(known) == parts else None)
        self.counts.incomplete_sums += None in sums
        return tuple(sums)

    def _gap(self, samples: list[_Values]) -> list[int]:
        """The samples at which the mapping says that zero is no reading."""
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
        opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
        try:
            with opened(path, "rb") as stream:
                rows = _read_rows(stream, path.name, mapping, series.counts)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise StorageError(f"{path}: cannot be read: {error}") from error
        series.add(_in_order(rows, series.counts), names)
    series.finish()
    return series
