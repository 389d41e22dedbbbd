"""Text table: a file of rows (CSV and its kin) below a header, compressed or not, read by column names.

Packing, encoding, header and separator are known from what is in the file, not from its name. pandas parses,
imported inside functions. `read_text` takes times and numbers, and counts lines that are no data with a
reason and an example; `read_cells` leaves every cell as text, for readers that judge each row by themselves.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import numpy as np
import zstandard

from connectors.files.times import NO_TIME, TimeFormat
from twin.catalogue import F64, I64, Bool, ConfigError, StorageError, TwinError, did_you_mean

# source: estimates; what two cores and 8 GB of memory read in minutes
MAX_ROWS = 50_000_000
MAX_BYTES = 2_000_000_000
CHUNK_ROWS = 500_000
_HEADER_WITHIN = 50  # lines; titles and comments may stand before the header
_MAX_LINE = 1 << 20
_SEPARATORS = ",;\t|"
_END = "\x1f"  # put behind each line, to show how many cells it has
_Result = TypeVar("_Result")
_NO_VALUE = frozenset(("", "-", "--", "?", "na", "nan", "n/a", "null", "none", "nil", "#n/a", "inf", "-inf"))
_PACKED: dict[bytes, Any] = {
    b"\xfd7zXZ\x00": lzma.open,
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\x28\xb5\x2f\xfd": lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}
_OTHER = {
    b"PK\x03\x04": "a ZIP file or workbook",
    b"PAR1": "a Parquet file",
    b"SQLite": "a database",
    b"%PDF": "a PDF file",
}


class TableColumns(NamedTuple):
    """The needed columns. `where`: only rows whose column has this value."""

    time: str
    values: tuple[str, ...]
    known: tuple[str, ...]
    where: tuple[str, str] | None

    def all(self) -> list[str]:
        more = [self.where[0]] if self.where else []
        return list(dict.fromkeys([self.time, *self.values, *self.known, *more]))


class RowLimit(NamedTuple):
    """Limit of rows of all files in one call; `used`: by the files before."""

    most: int
    used: int = 0


class TableHeader(NamedTuple):
    """The line with the column names, and its separator."""

    line: int
    separator: str
    cells: list[str]


class _Limited(io.RawIOBase):
    """Bytes of a stream, at most MAX_BYTES; a stream that unpacks to more is refused."""

    def __init__(self, stream: Any, file: str) -> None:
        self.stream, self.file, self.seen = stream, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        self.seen += len(data)
        if self.seen > MAX_BYTES:
            raise ConfigError(
                f"{self.file}: expected at most {MAX_BYTES:,} bytes unpacked, found more: cut it"
            )
        buffer[: len(data)] = data
        return len(data)


def _text(raw: IO[bytes], file: str) -> io.TextIOWrapper:
    """Return the text in an open file; its first bytes give packing and encoding."""
    begin = cast(io.BufferedReader, raw).peek(16)[:16]
    for magic, what in _OTHER.items():
        if begin.startswith(magic):
            raise ConfigError(f"{file}: expected a table of text (CSV), found {what}: export it as CSV")
    opened: Any = next((o(raw) for magic, o in _PACKED.items() if begin.startswith(magic)), raw)
    stream = io.BufferedReader(_Limited(opened, file), buffer_size=1 << 16)
    head = stream.peek(1 << 16)
    encoding = "utf-8-sig"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif b"\x00" in head[:4096].partition(b"\n")[0]:
        raise ConfigError(f"{file}: expected a table of text (CSV), found binary data")
    else:
        try:
            head[: max(len(head) - 3, 0)].decode()  # may end inside a character
        except UnicodeDecodeError as error:
            encoding = "utf-8-sig" if error.start >= len(head) - 6 else "cp1252"
    return io.TextIOWrapper(stream, encoding, errors="replace", newline="")


def _cells(line: str, separator: str) -> list[str]:
    try:
        cells = next(csv.reader([line.strip("\r\n")], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        cells = line.split(separator)
    return [c.strip() for c in cells]


def _find_header(
    text: io.TextIOWrapper, wanted: list[str], file: str, separators: str = _SEPARATORS
) -> TableHeader:
    """Return the first line with all wanted columns, and its separator; read up to its end."""
    widest = TableHeader(1, ",", [])
    for number in range(1, _HEADER_WITHIN + 1):
        line = text.readline(_MAX_LINE)
        if not line:
            break
        for separator in separators:
            cells = _cells(line, separator)
            if all(w in cells for w in wanted):
                if twice := [w for w in wanted if cells.count(w) > 1]:
                    raise ConfigError(f"{file}: line {number}: column {twice[0]!r} occurs more than once")
                return TableHeader(number, separator, cells)
            # of the lines that hold any of them the first, else the first line with several cells
            score = (sum(w in cells for w in wanted), min(len(cells), 2))
            if score > (sum(w in widest.cells for w in wanted), min(len(widest.cells), 2)) or (
                number == widest.line and score[0] == 0 and len(cells) > len(widest.cells)
            ):
                widest = TableHeader(number, separator, cells)
    if not any(widest.cells):
        raise ConfigError(f"{file}: the file is empty: expected a first line that names the columns")
    raise ConfigError([_missing(w, widest, file) for w in wanted if w not in widest.cells])


def _missing(wanted: str, header: TableHeader, file: str) -> str:
    names = [c for c in header.cells if c]
    meant = did_you_mean(wanted, names, 0.5)
    listed = ", ".join(repr(c[:60]) for c in names[:40]) + (", ..." if len(names) > 40 else "")
    no_names = sum(c[:1].isdigit() or c[:1] == "-" for c in names) * 2 > len(names)
    hint = "; that line looks like data: the first line must name the columns" if no_names else ""
    return f"{file}: line {header.line}: no column {wanted!r}, found {listed}{meant}{hint}"


class _Renamed:
    """Text behind a header of column numbers, which gives the parser the width of a line.

    `end`: put behind each line as one more cell.
    """

    def __init__(self, text: io.TextIOWrapper, header: TableHeader, end: str = "") -> None:
        self.text, self.end = text, f"{header.separator}{end}\n" if end else ""
        self.first = header.separator.join(str(i) for i in range(len(header.cells) + 1)) + "\n"
        self.is_open = False  # the last line has no end yet

    def read(self, size: int = -1) -> str:
        first, self.first = self.first, ""
        if first or not self.end:
            return first or self.text.read(size)
        data = self.text.read(size)
        last = self.is_open and not data
        self.is_open = bool(data) and not data.endswith("\n")
        return self.end if last else data.replace("\r", "").replace("\n", self.end)

    def __iter__(self) -> Iterator[str]:
        raise io.UnsupportedOperation("read it")


@dataclass
class TableRows:
    """One file during reading: kept rows, and dropped ones with reasons and a first example of each."""

    file: str
    asked: TableColumns
    header: TableHeader
    format: TimeFormat
    t_ns: list[I64] = field(default_factory=list)
    naive: list[Any] = field(default_factory=list)
    columns: dict[str, list[F64]] = field(default_factory=dict)
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    unreadable: dict[str, tuple[int, str]] = field(default_factory=dict)
    seen: int = 0
    points_at: dict[str, int] = field(
        default_factory=dict
    )  # column -> a line with a decimal point, as far as read

    def drop(self, why: str, lines: Any, chunk: Any) -> None:
        """Count rows `lines` (a mask) of a chunk as no data."""
        if lines.any():
            at = int(np.flatnonzero(lines)[0])
            time, first = chunk[str(self.header.cells.index(self.asked.time))], chunk["0"]
            text = str(time.iloc[at] if isinstance(time.iloc[at], str) else first.iloc[at])[:60]
            here = f"line {self.header.line + 1 + int(chunk.index[at])}: {text!r}"
            count, begun = self.dropped.get(why, (0, here))
            self.dropped[why] = count + int(lines.sum()), begun

    def take(self, chunk: Any) -> None:
        """Keep the rows of a chunk that are data: a DataFrame with the columns' numbers as names."""
        at = {name: str(self.header.cells.index(name)) for name in self.asked.all()}
        extra = str(len(self.header.cells))
        if self.asked.where:
            column, wanted = self.asked.where
            chunk = chunk[(chunk[at[column]].astype(str).str.strip() == wanted).to_numpy(bool)]
        chunk = chunk[~chunk.isna().to_numpy().all(axis=1)]  # blank lines
        self.seen += len(chunk)
        wide = chunk[extra].notna().to_numpy(bool)
        self.drop("more cells than the header", wide, chunk)
        chunk = chunk[~wide]
        if not len(chunk):
            return
        cells = chunk[at[self.asked.time]]
        t_ns, naive = self.format.instants(cells, self.header.line + 1)
        good = t_ns != NO_TIME
        self.drop("no time", ~good, chunk)
        self.t_ns.append(t_ns[good])
        self.naive.append(naive[good])
        for name in (*self.asked.values, *self.asked.known):
            self.columns.setdefault(name, []).append(self.numbers(name, chunk[at[name]][good]))

    def numbers(self, name: str, cells: Any) -> F64:
        """Return the numbers of a pandas Series, NaN elsewhere; a comma is a decimal mark unless it
        separates columns."""
        import pandas as pd

        commas = self.header.separator != ","
        if pd.api.types.is_numeric_dtype(cells.dtype):
            values = cells.to_numpy(np.float64)
            broken = values[np.isfinite(values)] % 1 != 0
            if commas and broken.any() and cells.dtype.kind == "f":
                first = int(cells.index[np.isfinite(values)][broken.argmax()])
                self.points_at.setdefault(name, self.header.line + 1 + first)
        else:
            text = cells.fillna("").astype(str).str.strip()
            if commas and text.str.contains(",", regex=False).any():
                if name in self.points_at:
                    raise ConfigError(
                        f"{self.file}: column {name!r}: a decimal point in line {self.points_at[name]}, "
                        "decimal commas further down: expected one of them"
                    )
                dots = text.str.fullmatch(r"[+-]?\d{1,3}(?:\.\d{3})+(?:,\d*)?")
                text = text.where(~dots, text.str.replace(".", "", regex=False)).str.replace(
                    ",", ".", regex=False
                )
            values = pd.to_numeric(text, errors="coerce").to_numpy(np.float64)
            wrong = np.isnan(values) & ~text.str.lower().isin(_NO_VALUE).to_numpy(bool)
            if wrong.any():
                where = int(np.flatnonzero(wrong)[0])
                line = (
                    f"line {self.header.line + 1 + int(cells.index[where])}: {str(cells.iloc[where])[:60]!r}"
                )
                count, first_line = self.unreadable.get(name, (0, line))
                self.unreadable[name] = count + int(wrong.sum()), first_line
        return np.where(np.isfinite(values), values, np.nan)


def read_text(path: Path, columns: TableColumns, limit: RowLimit, notes: list[str]) -> TableRows:
    """Return the rows of a file in its own order, within `limit`. An unterminated quote makes all quotes
    plain.

    Raises StorageError if the file cannot be read, ConfigError if it is no table, lacks a column, is too big.
    """
    rows, is_plain = _parsed(path, lambda quoting: _rows_of(path, columns, limit, quoting))
    if is_plain:
        notes.append(f"{path.name}: a quote without an end; quotes are read as plain characters")
    return rows


class TableCells(NamedTuple):
    """All lines of a file below its header, as text.

    `lines` [n]: their numbers; `cells`: by column, each [n]; `first` [n]: the first cell; `is_blank` [n];
    `is_whole` [n]: as many cells as the header.
    """

    lines: I64
    cells: dict[str, Any]
    first: Any
    is_blank: Bool
    is_whole: Bool


def read_cells(path: Path, columns: Sequence[str], separator: str, limit: RowLimit) -> TableCells:
    """Return the cells of these columns in the order of the file, within `limit`. Raises as `read_text`."""
    return _parsed(path, lambda quoting: _cells_of(path, list(columns), separator, limit, quoting))[0]


def _parsed(path: Path, parse: Callable[[int], _Result]) -> tuple[_Result, bool]:
    """(what `parse` makes of a file with this kind of quoting, True if quotes are plain characters)."""
    try:
        from pandas.errors import ParserError
    except ImportError as error:
        raise ConfigError("reading a table needs pandas, which is missing; install racktwin again") from error
    try:
        try:
            return parse(csv.QUOTE_MINIMAL), False
        except ParserError as error:
            if "inside string" not in str(error):
                raise
            return parse(csv.QUOTE_NONE), True
    except TwinError:
        raise
    except (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise StorageError(
            f"{path}: cannot be read: {error}; expected a whole compressed file: copy it again"
        ) from error
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(f"{path}: cannot be read: {why}; expected a file of text (CSV)") from error
    except (ParserError, csv.Error) as error:
        raise ConfigError(f"{path.name}: expected a table of text (CSV): {error}") from error


def _rows_of(path: Path, columns: TableColumns, limit: RowLimit, quoting: int) -> TableRows:
    with path.open("rb") as raw:
        text = _text(raw, path.name)
        header = _find_header(text, columns.all(), path.name)
        rows = TableRows(path.name, columns, header, TimeFormat(f"{path.name}: column {columns.time!r}"))
        # the first column distinguishes a blank line from a footer, the one behind the last a line that is
        # too long
        index = {0, len(header.cells), *(header.cells.index(name) for name in columns.all())}
        texts = [header.cells.index(columns.time)] + (
            [header.cells.index(columns.where[0])] if columns.where else []
        )
        options = {
            "usecols": [str(i) for i in sorted(index)],
            "dtype": dict.fromkeys(map(str, texts), str),
        }
        for chunk in _chunks(_Renamed(text, header), path.name, header, limit, quoting, options):
            rows.take(chunk)
    return rows


def _cells_of(path: Path, columns: list[str], separator: str, limit: RowLimit, quoting: int) -> TableCells:
    import pandas as pd

    with path.open("rb") as raw:
        text = _text(raw, path.name)
        header = _find_header(text, columns, path.name, separator)
        at = {name: str(header.cells.index(name)) for name in columns}
        width = len(header.cells)
        index = {0, min(1, width), width, *map(int, at.values())}
        options = {"usecols": [str(i) for i in sorted(index)], "dtype": str, "na_filter": False}
        source = _Renamed(text, header, _END)
        parts = list(_chunks(source, path.name, header, limit, quoting, options))
    if not parts:
        none: Any = pd.Series([], dtype=str)
        empty = np.zeros(0, bool)
        return TableCells(np.zeros(0, np.int64), dict.fromkeys(columns, none), none, empty, empty)
    whole: Any = pd.concat(parts)
    first = whole["0"]
    blank = (first.str.strip() == "") & (whole["1"] == _END)
    return TableCells(
        whole.index.to_numpy(np.int64) + header.line + 1,
        {name: whole[column] for name, column in at.items()},
        first,
        blank.to_numpy(bool),
        (whole[str(width)] == _END).to_numpy(bool),
    )


def _chunks(
    source: _Renamed, file: str, header: TableHeader, limit: RowLimit, quoting: int, options: dict[str, Any]
) -> Iterator[Any]:
    """Yield DataFrames of a source, with the columns' numbers as names. ConfigError beyond `limit`."""
    import pandas as pd

    rows = limit.used
    for chunk in cast(Any, pd).read_csv(
        source,
        sep=header.separator,
        index_col=False,
        skip_blank_lines=False,
        low_memory=False,
        skipinitialspace=header.separator != "\t",
        quoting=quoting,
        chunksize=CHUNK_ROWS,
        **options,
    ):
        rows += len(chunk)
        if rows > limit.most:
            raise ConfigError(
                f"{file}: expected at most {limit.most:,} rows in all files, found more: cut it"
            )
        if quoting == csv.QUOTE_NONE:
            texts = chunk.select_dtypes(exclude="number")
            chunk[texts.columns] = texts.apply(lambda column: column.str.strip('"'))
        yield chunk
