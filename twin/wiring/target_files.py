"""Target files: load targets, prices and carbon, read again when they change, as events.

A file is read once it has stood still between two looks. A half-written or wrong file changes nothing: the
former values hold, and `fault` reports it. A target that a file no longer names is withdrawn.
"""

from __future__ import annotations

import asyncio
import csv
import io
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, get_args

from twin.catalogue import NS, ConfigError, StorageError
from twin.config import read_yaml
from twin.contracts import MAX_LIMIT_W, MAX_NAME, MAX_TARGETS, Inlet, Item, ReadTargets
from twin.site import Site
from twin.tables import outlook_of
from twin.telemetry import LoadTargetSet, LoadTargetWithdrawn, OutlookTold, TargetKind

AUTHOR, OUTLOOKS = "targets_file", "outlooks_files"
STEM = "file/"  # before the names of a file's targets: they cannot meet those of others
MAX_BYTES, MAX_SERIES_BYTES = 2**20, 2**26
PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK")
COLUMNS = ("name", "limit", "feeders", "begin", "end", "kind", "best_effort")
KINDS: tuple[TargetKind, ...] = get_args(TargetKind)
UNITS = {"W": 1.0, "kW": 1e3, "MW": 1e6}
YES, NO = ("true", "yes", "1"), ("", "false", "no", "0")
REPEAT_S = 3600.0  # between two events of an unchanged file, as one event holds only so many values
_LIMIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(W|kW|MW)")

Mark = tuple[int, int, int]  # of a file: inode, size, ns of its change


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTarget:
    """A target of a file: `begin_ns`, `end_ns` 0 are none; `feeders` none: the site's racks together."""

    name: str
    limit_w: float
    feeders: tuple[str, ...]
    begin_ns: int
    end_ns: int
    kind: TargetKind
    best_effort: bool


class WatchedFile:
    """A file that is polled: it `changed` once it is another one and stood still since the last poll."""

    def __init__(self, path: Path) -> None:
        self.path, self.fault = path, ""
        self._seen: Mark | None = None
        self._taken: Mark | None = None

    def changed(self) -> bool:
        """True if the file is to be read now; a file that is gone is a fault, and changes nothing."""
        try:
            stat = self.path.stat()
        except OSError as error:
            self.fault = f"{self.path}: cannot be read: {error.strerror}; what it said before holds"
            self._seen = None
            return False
        if not S_ISREG(stat.st_mode):  # to open a pipe would wait for who writes to it, for ever
            self.fault = f"{self.path}: cannot be read: no plain file; what it said before holds"
            self._seen = None
            return False
        mark = stat.st_ino, stat.st_size, stat.st_mtime_ns
        stands, self._seen = mark == self._seen, mark
        if stands and mark == self._taken and self.fault.startswith(f"{self.path}: cannot be read"):
            self.fault = ""  # it is back as it was
        return stands and mark != self._taken

    def taken(self, fault: str = "") -> None:
        """Note that the file was read; it is read again when it changes."""
        self._taken = self._seen
        self.fault = f"{fault}; what it said before holds" if fault else ""


class TargetsSource:
    """Stages the targets of a file as events, and withdraws those that it no longer names.

    `targets`: those that the twin holds, so that a restart knows the targets of an earlier file.
    """

    name = "targets-file"

    def __init__(
        self,
        path: Path,
        site: Site,
        targets: ReadTargets,
        look_s: float,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.file, self.site, self.look_s = WatchedFile(path), site, look_s
        self._held, self._now_ns = targets, now_ns
        self._targets: dict[str, FileTarget] | None = None

    async def run(self, inlet: Inlet) -> None:
        """Check the file again and again until cancelled."""
        while True:
            await self.check(inlet)
            await asyncio.sleep(self.look_s)

    async def check(self, inlet: Inlet) -> None:
        """Stage the changes of the file, if it changed."""
        if not await asyncio.to_thread(self.file.changed):
            return
        try:
            given = await asyncio.to_thread(read_targets, self.file.path, self.site)
        except ConfigError as error:
            self.file.taken("; ".join(error.problems[:4]))
            inlet.reject(self.name, self.file.fault)
            return
        self.file.taken()
        now_ns = self._now_ns()
        events = self.events(given, now_ns)
        if events:
            inlet.stage(events, now_ns)

    def events(self, given: list[FileTarget], now_ns: int) -> list[Item]:
        """Events that turn what the twin holds into what the file says; the surplus is left out."""
        coming = {g.name: g for g in given if not 0 < g.end_ns <= now_ns}
        before = self._targets
        if before is None:  # of an earlier run: their form is not compared, they are set anew
            names = {t.name for t in self._held() if t.author == AUTHOR}
        else:
            names = {f"{STEM}{name}" for name, g in before.items() if not 0 < g.end_ns <= now_ns}
        events: list[Item] = [
            LoadTargetWithdrawn(author=AUTHOR, target=name)
            for name in sorted(names)
            if name.removeprefix(STEM) not in coming
        ]
        events += [
            LoadTargetSet(
                author=AUTHOR,
                target=f"{STEM}{g.name}",
                limit_w=g.limit_w,
                feeders=g.feeders,
                start_ns=g.begin_ns,
                end_ns=g.end_ns,
                kind=g.kind,
                best_effort=g.best_effort,
            )
            for g in coming.values()
            if before is None or before.get(g.name) != g
        ]
        self._targets = coming
        return events


class OutlookFileSource:
    """Stages a file of times and values as an outlook of a quantity of the site."""

    def __init__(
        self, quantity: str, path: Path, look_s: float, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.name = f"outlook-{quantity}"
        self.quantity, self.file, self.look_s, self._now_ns = quantity, WatchedFile(path), look_s, now_ns
        self._until_ns = 0  # when it is staged again, though it is the same
        self._read: Any = None

    async def run(self, inlet: Inlet) -> None:
        """Check the file again and again until cancelled."""
        while True:
            await self.check(inlet)
            await asyncio.sleep(self.look_s)

    async def check(self, inlet: Inlet) -> None:
        """Stage the values to come, if the file changed or time went on."""
        now_ns = self._now_ns()
        changed = await asyncio.to_thread(self.file.changed)
        if not changed and (self._read is None or now_ns < self._until_ns):
            return
        try:
            if changed:
                self._read = await asyncio.to_thread(_read_series, self.file.path)
            body, _ = outlook_of(self._read, now_ns, self.file.path.name)
        except ConfigError as error:
            self.file.taken("; ".join(error.problems[:4]))
            self._read = None
            inlet.reject(self.name, self.file.fault)
            return
        self.file.taken()
        self._until_ns = now_ns + round(REPEAT_S * NS)
        outlook = OutlookTold(
            author=OUTLOOKS,
            quantity=self.quantity,
            start_ns=body["start_ns"],
            step_s=body["step_s"],
            values=tuple(body["values"]),
        )
        inlet.stage([outlook], now_ns)


def _read_series(path: Path) -> Any:
    from twin.tables import read_series

    text = _check_end(path, MAX_SERIES_BYTES)
    # A file of something else is not quoted, and a packed one may be without end
    lines = io.BytesIO(text[:MAX_BYTES])
    if text.startswith(PACKED) or not any(b"time" in line and b"value" in line for line in lines):
        raise ConfigError(f"{path}: expected text (CSV) with a line that names the columns time and value")
    try:
        return read_series([path], "time", ["value"])
    except StorageError as error:
        raise ConfigError(str(error)) from None


def plain_bytes(path: Path, most: int) -> bytes:
    """The bytes of a plain file. Raises ConfigError for anything else, and for more than `most`."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            plain = S_ISREG(os.fstat(opened.fileno()).st_mode)
            text = opened.read(most + 1) if plain else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not plain:
        raise ConfigError(f"{path}: cannot be read: no plain file")
    if len(text) > most:
        raise ConfigError(f"{path}: more than {most} bytes; expected at most as many")
    return text


def _check_end(path: Path, most: int) -> bytes:
    """The bytes of a file that has an end: the last line of a half-written one has none."""
    text = plain_bytes(path, most)
    if not text.endswith(b"\n"):
        raise ConfigError(
            f"{path}: ends within a line, as if half written; expected an end of line at its end"
        )
    return text


def read_targets(path: Path, site: Site) -> list[FileTarget]:
    """The targets of a file, YAML or (`.csv`) CSV. Raises ConfigError with all that is wrong."""
    text = _check_end(path, MAX_BYTES)
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _yaml_rows(path)
    if len(rows) > MAX_TARGETS:
        raise ConfigError(f"{path}: {len(rows)} targets; expected at most {MAX_TARGETS}")
    problems: list[str] = []
    targets: dict[str, FileTarget] = {}
    for where, row in rows:
        try:
            target = _target(row, site)
            if target.name in targets:
                raise ValueError(f"name {target.name[:60]!r} is there twice")
            targets[target.name] = target
        except ValueError as error:
            problems.append(f"{path}: {where}: {error}")
    if problems:
        raise ConfigError(problems)
    return list(targets.values())


def _csv_rows(path: Path, text: bytes) -> list[tuple[str, dict[str, Any]]]:
    try:
        reader = csv.DictReader(io.StringIO(text.decode("utf-8-sig"), newline=""), strict=True)
        header = reader.fieldnames or []
        strange = [name for name in header if name not in COLUMNS]
        if strange or "name" not in header or "limit" not in header or len(set(header)) != len(header):
            raise ConfigError(
                f"{path}: line 1: expected columns among {', '.join(COLUMNS)}, name and limit "
                f"at least; got {len(header)}, {len(strange)} of them others"
            )
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"{path}: line {reader.line_num}: expected {len(header)} cells")
            cells: dict[str, Any] = dict(row)
            cells["feeders"] = cells.get("feeders", "").split()  # several: spaces between them
            rows.append((f"line {reader.line_num}", cells))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not readable as CSV: {str(error)[:200]}") from None
    return rows


def _yaml_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    tree = read_yaml(path, MAX_BYTES)
    rows = tree.get("targets") if isinstance(tree, dict) and set(tree) == {"targets"} else None
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected `targets:` with a list, `targets: []` for none")
    for n, row in enumerate(rows):
        if not isinstance(row, dict) or not set(row) <= set(COLUMNS):
            raise ConfigError(
                f"{path}: targets[{n}]: expected a mapping with keys among {', '.join(COLUMNS)}"
            )
    return [(f"targets[{n}]", row) for n, row in enumerate(rows)]


def _target(row: dict[str, Any], site: Site) -> FileTarget:
    """Raises ValueError with what is wrong."""
    name, kind, feeders = row.get("name"), row.get("kind") or "operator", row.get("feeders") or []
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME - len(STEM) or not name.isprintable():
        raise ValueError(
            f"name: expected 1 to {MAX_NAME - len(STEM)} printable characters, got {str(name)[:60]!r}"
        )
    if kind not in KINDS:
        raise ValueError(f"kind {str(kind)[:40]!r}; expected one of {', '.join(KINDS)}")
    if not isinstance(feeders, list) or not all(isinstance(f, str) for f in feeders):
        raise ValueError("feeders: expected a list of names, none for the site's racks together")
    full_names = []
    for feeder in feeders:
        index = site.entity("feeder", feeder)
        if index is None:
            raise ValueError(f"no feeder {feeder[:100]!r}; expected one of the site file")
        full_names.append(site.name("feeder", index))
    begin_ns, end_ns = _instant(row.get("begin"), "begin"), _instant(row.get("end"), "end")
    if 0 < end_ns <= begin_ns:
        raise ValueError("ends before it begins")
    effort = row.get("best_effort", False)
    if not isinstance(effort, bool):
        if str(effort).lower() not in (*YES, *NO):
            raise ValueError(f"best_effort {str(effort)[:20]!r}; expected true or false")
        effort = str(effort).lower() in YES
    return FileTarget(
        name=name,
        limit_w=_limit_w(row.get("limit")),
        feeders=tuple(dict.fromkeys(full_names)),
        begin_ns=begin_ns,
        end_ns=end_ns,
        kind=kind,
        best_effort=effort,
    )


def _limit_w(text: Any) -> float:
    match = _LIMIT.fullmatch(text.strip()) if isinstance(text, str) and len(text) < 60 else None
    limit_w = float(match[1]) * UNITS[match[2]] if match else math.nan
    if not 0 <= limit_w <= MAX_LIMIT_W:
        raise ValueError(f"limit {str(text)[:40]!r}; expected a number with its unit, such as 500 kW")
    return limit_w


def _instant(text: Any, what: str) -> int:
    """ISO 8601 with an offset as ns since 1970; 0 for none. YAML has made a time of some already."""
    if text is None or text == "":
        return 0
    instant = text if isinstance(text, datetime) else None
    if isinstance(text, str) and len(text) <= 40:
        try:
            instant = datetime.fromisoformat(text.strip())
        except ValueError:
            instant = None
    if instant is None or instant.tzinfo is None:
        raise ValueError(
            f"{what} {str(text)[:40]!r}; expected ISO 8601 with an offset: 2026-11-22T06:00:00+01:00"
        )
    if not 1971 <= instant.year <= 2200:
        raise ValueError(f"{what} {str(text)[:40]!r}; expected a year from 1971 to 2200")
    return int(instant.astimezone(UTC).timestamp()) * NS
