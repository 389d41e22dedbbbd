"""Files of text with a column of times (CSV and its kin, compressed or not) as a panel on one regular grid.

Whatever stands in a line is counted and noted, never fatal, unless most lines hold no data. The text itself
is read by `connectors.files`; the grid is made in `grid`. For commands that run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from connectors.files import (
    NO_TIME,
    RowLimit,
    TableColumns,
    TableRows,
    instant,
    localise,
    text_table,
    zone_of,
)
from models.load import SeriesPanel
from twin.catalogue import F64, I64, NS, ConfigError
from twin.tables.grid import AGGREGATES, Placed, SeriesColumn, blank, choose, gaps_said, once, place


@dataclass(frozen=True, kw_only=True)
class SeriesOptions:
    """Settings by which rows become a grid.

    `step_s`: of the grid; else the most common difference between rows. `aggregate`: how the rows of a bin
    become one (mean, sum, last, max, or count, which needs no value column); rows that share an instant count
    only once unless it is given. `known_columns` may go on after the last value. `zone`: of times without an
    offset. `total`: the sum of all columns is the only one, NaN where one is missing. `where`:
    (column, value) of the rows to read. `gap_ranges`: (from, to), to exclusive, in which nothing counts, such
    as an outage.
    """

    step_s: float | None = None
    aggregate: str | None = None
    known_columns: Sequence[str] = ()
    zone: str = "UTC"
    total: bool = False
    where: tuple[str, str] | None = None
    gap_ranges: Sequence[tuple[str, str]] = ()


DEFAULTS = SeriesOptions()


@dataclass(frozen=True)
class SeriesRead:
    """`panel`: a column per file and value column; `notes`: what was repaired, for people; `rows` of data."""

    panel: SeriesPanel
    notes: tuple[str, ...]
    step_given: bool
    rows: int


@dataclass
class _Rows:
    """One file's rows in order of time: t_ns [n], columns [n] by name; `gaps`: spans (ns) not known."""

    file: str
    t_ns: I64
    columns: dict[str, F64]
    gaps: list[tuple[int, int]]


def read_series(
    paths: Sequence[Path],
    time_column: str,
    value_columns: Sequence[str],
    options: SeriesOptions = DEFAULTS,
) -> SeriesRead:
    """Read files with the same columns as one panel, NaN where nothing is known.

    Raises ConfigError for what the operator can mend, StorageError for a file that cannot be read.
    """
    step_s, aggregate, zone, gap_ranges = options.step_s, options.aggregate, options.zone, options.gap_ranges
    asked = TableColumns(time_column, tuple(value_columns), tuple(options.known_columns), options.where)
    _check(paths, asked, step_s, aggregate)
    zone_of(zone)
    spans = [_span(a, b, zone) for a, b in gap_ranges]
    notes: list[str] = []
    files: list[_Rows] = []
    for path in paths:
        limit = RowLimit(text_table.MAX_ROWS, sum(len(f.t_ns) for f in files))
        files.append(_read_file(path, asked, zone, notes, limit))
    columns, known = _columns(files, asked, _names(paths), spans)
    grid, spaced = choose(columns, step_s, aggregate, zone, notes)
    if aggregate is None:
        columns = [once(c, grid.is_sampled, notes) for c in columns]
    how = aggregate or "mean"
    placed = [place(c, grid, s, how, zone) for c, s in zip(columns, spaced, strict=True)]
    first, n = _extent(placed, _list(paths))
    if how in ("sum", "count") and not grid.is_sampled:
        notes.append(
            f"{how}: a bin without rows is 0 between the first row and the last, incomplete bins are cut off"
        )
    values = np.column_stack([p.within(first, n) for p in placed])
    lost = [s for f in files for s in f.gaps]
    for (a, b), hit in zip(gap_ranges, blank(values, first, grid, [*spans, *lost]), strict=False):
        notes.append(f"gap asked for, {a} to {b}: {hit} rows of the grid")
    names = tuple(p.name for p in placed)
    if options.total:
        values, names = values.sum(axis=1, keepdims=True), ("total",)
    start_ns, step = grid.t_ns(first), grid.step_ns / NS
    notes += gaps_said(values, names, start_ns, step, zone)
    ahead = {}
    for name, parts in known.items():
        ahead[name] = _ahead([place(p, grid, spaced[0], "mean", zone) for p in parts], first, n)
    if not np.isfinite(values).any():
        raise ConfigError(f"{_list(paths)}: no value is left: expected numbers in {', '.join(names)}")
    panel = SeriesPanel(start_ns, step, values, names, zone, ahead)
    return SeriesRead(panel, tuple(notes), step_s is not None, sum(len(f.t_ns) for f in files))


def _check(paths: Sequence[Path], asked: TableColumns, step_s: float | None, aggregate: str | None) -> None:
    problems = []
    if not paths:
        problems.append("series: expected at least one file")
    if aggregate is not None and aggregate not in AGGREGATES:
        problems.append(f"aggregate: expected one of {', '.join(AGGREGATES)}, got {aggregate!r}")
    if not asked.values and aggregate != "count":
        problems.append("value column: expected at least one (only --aggregate count needs none)")
    if step_s is not None and not 1e-6 <= step_s <= 366 * 86_400:
        problems.append(f"step: expected seconds from 0.000001 to a year, got {step_s}")
    wanted = [asked.time, *asked.values, *asked.known]
    problems += [f"column {c!r}: given {wanted.count(c)} times, expected once" for c in dict.fromkeys(wanted)
                 if wanted.count(c) > 1]  # fmt: skip
    if problems:
        raise ConfigError(problems)


def _span(from_text: str, to_text: str, zone: str) -> tuple[int, int]:
    span = instant(from_text, zone), instant(to_text, zone)
    if span[0] >= span[1]:
        raise ConfigError(f"gap: expected a time FROM before TO, got {from_text!r} and {to_text!r}")
    return span


def _list(paths: Sequence[Path]) -> str:
    return paths[0].name + (f" and {len(paths) - 1} more files" if len(paths) > 1 else "")


def _names(paths: Sequence[Path]) -> list[str]:
    """Name of each file: its name up to the first dot, or its folder if the files' names are alike."""
    stems = [p.name.split(".")[0] or p.name for p in paths]
    if len(set(stems)) == len(stems):
        return stems
    folders = [p.resolve().parent.name for p in paths]
    if len(set(folders)) == len(folders):
        return folders
    both = [f"{f}/{s}" for f, s in zip(folders, stems, strict=True)]
    return both if len(set(both)) == len(both) else [f"{i}:{b}" for i, b in enumerate(both, 1)]


def _read_file(path: Path, asked: TableColumns, zone: str, notes: list[str], limit: RowLimit) -> _Rows:
    """The rows of a file, in order of time, with what was dropped reported in `notes`."""
    reading = text_table.read_text(path, asked, limit, notes)
    file = reading.file
    if not reading.seen:
        of = " of " + "=".join(asked.where) if asked.where else ""
        raise ConfigError(f"{file}: no rows{of} below the header: expected times in {asked.time!r}")
    n_dropped = sum(count for count, _ in reading.dropped.values())
    dropped = [
        f"{count} rows with {why} dropped (first: {at})" for why, (count, at) in reading.dropped.items()
    ]
    if n_dropped * 2 > reading.seen or not reading.t_ns:
        raise ConfigError(
            f"{file}: expected a time in {asked.time!r}, found none in {n_dropped} of {reading.seen} rows: "
            + "; ".join(dropped)
        )
    notes += [f"{file}: {t}" for t in dropped]
    t_ns = np.concatenate(reading.t_ns)
    columns = {name: np.concatenate(parts) for name, parts in reading.columns.items()}
    for name, values in columns.items():
        _note_values(reading, name, values, notes)
    naive = np.concatenate(reading.naive)
    local = localise(t_ns[naive], zone)
    t_ns[naive] = local.t_ns
    notes += [f"{file}: {n}" for n in local.notes]
    order = np.argsort(t_ns, kind="stable")
    order = order[t_ns[order] != NO_TIME]
    if not len(order):
        raise ConfigError(f"{file}: no row with a time that exists in {zone}")
    return _Rows(file, t_ns[order], {n: v[order] for n, v in columns.items()}, local.gaps)


def _note_values(reading: TableRows, name: str, values: F64, notes: list[str]) -> None:
    """Note cells without a number. ConfigError if there are no numbers, or fewer than other words."""
    unreadable, at = reading.unreadable.get(name, (0, ""))
    known = int(np.isfinite(values).sum())
    if unreadable > known or not known:
        raise ConfigError(
            f"{reading.file}: column {name!r}: expected numbers, found {known} in {len(values)} rows"
            + (f"; {at} is none" if at else ", all others are empty")
        )
    if unreadable:
        notes.append(
            f"{reading.file}: {unreadable} cells of {name!r} that are no numbers: gaps (first: {at})"
        )
    if empty := len(values) - known - unreadable:
        notes.append(f"{reading.file}: {empty} rows without a value in {name!r}: gaps")


def _columns(
    files: Sequence[_Rows], asked: TableColumns, called: Sequence[str], spans: Sequence[tuple[int, int]]
) -> tuple[list[SeriesColumn], dict[str, list[SeriesColumn]]]:
    """(a column per file and value column, without rows in `spans`; the parts of each known column)."""
    columns: list[SeriesColumn] = []
    known: dict[str, list[SeriesColumn]] = {name: [] for name in asked.known}
    for rows, stem in zip(files, called, strict=True):
        kept = np.ones(len(rows.t_ns), bool)
        for from_ns, to_ns in spans:
            kept &= (rows.t_ns < from_ns) | (rows.t_ns >= to_ns)
        for name in asked.values or ("count",):
            of = name if len(files) == 1 else stem if len(asked.values) < 2 else f"{stem}:{name}"
            values = rows.columns[name] if asked.values else np.ones(len(rows.t_ns))
            here = _trim(SeriesColumn(of, rows.t_ns[kept], values[kept]))
            if not len(here.t_ns):
                raise ConfigError(f"{rows.file}: column {name!r}: no value outside of the gaps asked for")
            columns.append(here)
        for name, parts in known.items():
            parts.append(SeriesColumn(name, rows.t_ns, rows.columns[name]))
    return columns, known


def _trim(column: SeriesColumn) -> SeriesColumn:
    """From its first value to its last: before and behind, there is nothing to be known."""
    at = np.flatnonzero(np.isfinite(column.values))
    inside = slice(at[0], at[-1] + 1) if len(at) else slice(0)
    return SeriesColumn(column.name, column.t_ns[inside], column.values[inside])


def _extent(placed: Sequence[Placed], files: str) -> tuple[int, int]:
    """(first row of the grid, number of rows) that hold all columns. ConfigError for fewer than two."""
    some = [p for p in placed if len(p.values)]
    first = min((p.first for p in some), default=0)
    n = max((p.first + len(p.values) for p in some), default=0) - first
    if n < 2:
        raise ConfigError(
            f"{files}: {n} steps of the grid have values, expected 2 or more: give a shorter --step"
        )
    return first, n


def _ahead(parts: Sequence[Placed], first: int, n: int) -> F64:
    """A known column [n + n_ahead]: of several files that have a value, the first's."""
    end = max([first + n, *(p.first + len(p.values) for p in parts)])
    out = parts[0].within(first, end - first)
    for other in parts[1:]:
        out = np.where(np.isnan(out), other.within(first, end - first), out)
    return out
