"""Text dumps of `ipmitool sdr` (an archive, one file per node) as readings, by a table of sensor names.

Reads the archive as a stream and writes nothing to disk. Every sensor line is counted: total = decoded +
ignored + bad, with the reason. Also derives a site file from the hosts found.

For a discrete sensor `ipmitool sdr` prints the raw reading byte, not the asserted states (lib/ipmi_sdr.c).
So `0x00 | ok` is no proof of "no leak": see ipmi-sdr.yaml beside this file.
"""

from __future__ import annotations

import gzip
import io
import itertools
import lzma
import re
import statistics
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, cast

import msgspec
import yaml

from twin.catalogue import TABLES, ConfigError, Signal, StorageError, to_core
from twin.site import convert, ranges
from twin.telemetry import Names, Reading

MAX_LINE_BYTES = 1 << 16
MAX_CONTENT_BYTES = 1 << 30  # decompressed, per file or archive
MAX_MEMBER_BYTES = 64 << 20  # a day of one-minute reads of one node is 20 MB
MAX_MEMBERS = 200_000
MAX_SAMPLES = 3_000_000  # all are held until they are in order of time
_MAX_REASONS = 1000
_MEMBER = re.compile(r"^(?P<host>[A-Za-z0-9_.+-]+?)(-\d{4}-\d{2}-\d{2})?\.txt$")
_ANALOG = re.compile(r"^([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?) (.+)$")
_NO_READING = frozenset({"no reading", "Not Readable", "disabled", "na", "ns"})
_STATUS = frozenset({"ok", "ns", "nc", "cr", "nr", "lnc", "lcr", "lnr", "unc", "ucr", "unr"})
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, ArithmeticError,
           LookupError, struct.error)  # fmt: skip

_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "max": max, "min": min, "latch": max, "mean": statistics.fmean, "sum": sum, "last": lambda v: v[-1]
}  # fmt: skip
Values = list[tuple[str, float | None]]  # (signal of a node, value in core units or "no reading")


RowOutcome = Literal["ignored", "bad", "other"]


@dataclass
class RowTally:
    """Counts of rows or lines by outcome and reason: `total` = `decoded` + `ignored` + `bad`."""

    total: int = 0
    decoded: int = 0
    ignored: int = 0
    bad: int = 0
    reasons: dict[tuple[RowOutcome, str, str], tuple[int, str]] = field(default_factory=dict)

    def count(self, outcome: RowOutcome, what: str, why: str, sample: str, number: int = 1) -> None:
        """Note `number` more of this kind; the first sample is kept. `other` is no unit of its own."""
        if outcome == "ignored":
            self.ignored += number
        elif outcome == "bad":
            self.bad += number
        key: tuple[RowOutcome, str, str] = (outcome, what[:80], why[:160])
        if key not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            key = (outcome, "other", "too many reasons to list")
        before, first = self.reasons.get(key, (0, sample[:80]))
        self.reasons[key] = (before + number, first)


def lines_of(stream: IO[bytes], what: str) -> Iterator[str | None]:
    """Yield the lines as text, None for one beyond MAX_LINE_BYTES; StorageError beyond MAX_CONTENT_BYTES."""
    read, skipping = 0, False
    while line := stream.readline(MAX_LINE_BYTES):
        read += len(line)
        if read > MAX_CONTENT_BYTES:
            raise StorageError(f"{what}: more than {MAX_CONTENT_BYTES} bytes of content")
        whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        if skipping:
            skipping = not whole
        elif not whole:
            skipping = True
            yield None
        else:
            yield line.rstrip(b"\r\n").decode("utf-8", "replace")


def read_tree(path: Path) -> Any:
    """Return the YAML of a file as plain values; ConfigError if it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"{path.name}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def conversion(wire: str, core: str) -> tuple[float, float] | None:
    """Return (factor, offset) into the core unit, or None; the core unit itself needs no entry."""
    return (1.0, 0.0) if wire == core else to_core(wire, core)


class MappingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a mapping file; unknown keys are refused."""


class SensorRule(MappingPart, frozen=True):
    """Sensors whose whole name matches: a `unit` if analogue, else bytes and values (null: no reading)."""

    pattern: str
    signal: str
    unit: str | None = None
    states: dict[str, float | None] = {}


class SensorMap(MappingPart, frozen=True):
    """Mapping of sensors. `ignore` (pattern: reason) applies first, then the first match; `units` are
    ipmitool's words."""

    units: dict[str, str]
    sensors: list[SensorRule]
    ignore: dict[str, str] = {}


class SensorTable:
    """A checked SensorMap: finds the rule of a sensor name and reads its value."""

    def __init__(self, rules: SensorMap, file: str = "mapping") -> None:
        self._units, self.signals = rules.units, dict[str, Signal]()
        self._rules: list[tuple[re.Pattern[str], str | SensorRule]] = []
        self._found: dict[str, str | SensorRule | None] = {}
        listed: list[tuple[str, str | SensorRule]] = [*rules.ignore.items()]
        faults: list[str] = []
        for pattern, rule in listed + [(r.pattern, r) for r in rules.sensors]:
            try:
                self._rules.append((re.compile(pattern), rule))
                if isinstance(rule, SensorRule):
                    self.signals[rule.signal] = self._checked(rule)
            except (re.error, ValueError) as error:
                faults.append(f"{file}: {pattern!r}: {error}")
        if faults:
            raise ConfigError(faults)

    def _checked(self, rule: SensorRule) -> Signal:
        signal = TABLES["node"].by_name.get(rule.signal)
        if signal is None:
            raise ValueError(f"node has no signal {rule.signal!r}")
        if (rule.unit is None) == (not rule.states):
            raise ValueError("expected either `unit` or `states`")
        if rule.unit is not None and conversion(rule.unit, signal.unit) is None:
            raise ValueError(f"cannot turn {rule.unit!r} into {signal.unit!r} of {rule.signal}")
        return signal

    def find(self, name: str) -> str | SensorRule | None:
        """Return the rule for a sensor name, or the reason that it is ignored."""
        if name not in self._found:
            self._found = self._found if len(self._found) < 100_000 else {}
            self._found[name] = next((rule for p, rule in self._rules if p.fullmatch(name)), None)
        return self._found[name]

    def value(self, rule: SensorRule, reading: str, status: str) -> float | None:
        """Return the value in core units, None for "no reading". Raises ValueError with the expectation."""
        if reading in _NO_READING or not reading:
            return None
        if rule.unit is None:
            if reading not in rule.states:
                raise ValueError(f"expected one of {', '.join(rule.states)}")
            return rule.states[reading]
        match = _ANALOG.match(reading)
        word = match[2] if match else ""
        if word not in self._units and len(reading) >= 15:  # ipmitool cuts off what is longer
            word = next((full for full in self._units if word and full.startswith(word)), "")
        if match is None or self._units.get(word) != rule.unit:
            raise ValueError(f"expected a number in {rule.unit}")
        factor, offset = conversion(rule.unit, self.signals[rule.signal].unit) or (1.0, 0.0)
        return None if status == "ns" else float(match[1]) * factor + offset


def read_sensor_table(path: Path) -> SensorTable:
    """Return the table in a YAML file; ConfigError with every fault."""
    return SensorTable(convert(SensorMap, read_tree(path), path.name), path.name)


@dataclass
class DumpTally(RowTally):
    """The tally of sensor lines, and of files and times. `no_reading` lines are decoded, to no value."""

    files: int = 0
    empty_files: int = 0
    refused_files: int = 0
    times: int = 0
    bad_times: int = 0
    no_reading: int = 0


def _kind(reading: str) -> str:
    if match := _ANALOG.match(reading):
        return match[2][:20] if match[2][:8] != "unspecif" else "unspecified"  # cut off at various places
    return "discrete" if reading.startswith("0x") else reading[:20] or "nothing"


def _decode_line(line: str, table: SensorTable, tally: DumpTally) -> tuple[str, float | None] | None:
    parts = [part.strip() for part in line.split("|")]
    if len(parts) != 3 or not parts[0] or parts[2] not in _STATUS:
        tally.count("bad", "line", "not `name | reading | status`", line)
        return None
    name, reading, status = parts
    rule = table.find(name)
    if not isinstance(rule, SensorRule):
        tally.count("ignored", _kind(reading), rule or "no signal in the catalogue", line)
        return None
    try:
        value = table.value(rule, reading, status)
    except ValueError as error:
        tally.count("bad", rule.signal, str(error), line)
        return None
    tally.decoded += 1
    tally.no_reading += value is None
    return rule.signal, value


def _reduced(readings: dict[str, list[float | None]], signals: dict[str, Signal]) -> Values:
    """Return one value per signal, reduced by the catalogue; None if no sensor of the signal has one."""
    out: Values = []
    for name, values in readings.items():
        given = [v for v in values if v is not None]
        out.append((name, _REDUCE[signals[name].reduce](given) if given else None))
    return out


def _time_of(line: str) -> int | None:
    try:
        moment = datetime.strptime(line.removeprefix("Timestamp:").strip(), "%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return None
    t_ns = int(moment.replace(tzinfo=UTC).timestamp()) * 10**9
    return t_ns if 0 <= t_ns < 2**63 else None


def decode_text(
    lines: Iterable[str | None], table: SensorTable, tally: DumpTally
) -> Iterator[tuple[int, Values]]:
    """Return the samples in one node's text: each `Timestamp:` line begins one. Never raises."""
    t_ns, readings = None, dict[str, list[float | None]]()
    for line in lines:
        if line is not None and line.startswith("Timestamp:"):
            if t_ns is not None and readings:
                yield t_ns, _reduced(readings, table.signals)
            t_ns, readings = _time_of(line), {}
            tally.times += 1
            tally.bad_times += t_ns is None
        elif line is None or line.strip():
            tally.total += 1
            if line is None or t_ns is None:
                why = f"longer than {MAX_LINE_BYTES} bytes" if line is None else "no readable time above it"
                tally.count("bad", "line", why, line or "")
            elif decoded := _decode_line(line, table, tally):
                readings.setdefault(decoded[0], []).append(decoded[1])
    if t_ns is not None and readings:
        yield t_ns, _reduced(readings, table.signals)


class _Bounded:
    """A stream that ends in an error instead of filling the memory: archives may expand without limit."""

    def __init__(self, stream: IO[bytes], what: str) -> None:
        self._stream, self._left, self._what = stream, MAX_CONTENT_BYTES, what

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise StorageError(f"{self._what}: more than {MAX_CONTENT_BYTES} bytes of content")
        return data


def _members(path: Path, tally: DumpTally) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (host, content) of every file of a dump; others are refused and counted."""
    place = "its start"
    try:
        with path.open("rb") as plain:
            magic = plain.read(6)
        opened: Any = gzip.open if magic[:2] == b"\x1f\x8b" else lzma.open if magic == b"\xfd7zXZ\0" else open
        with opened(path, "rb") as stream:
            bounded = cast(Any, _Bounded(stream, path.name))
            with tarfile.open(fileobj=bounded, mode="r|") as tar:
                for number, member in enumerate(tar):
                    place = member.name[:200]
                    if number >= MAX_MEMBERS:
                        raise StorageError(f"{path}: more than {MAX_MEMBERS} files")
                    if member.isdir():
                        continue
                    parts, match = PurePosixPath(member.name).parts, _MEMBER.match(member.name.split("/")[-1])
                    faults = {
                        "its path leaves the archive": member.name.startswith("/") or ".." in parts,
                        "not a plain file": not member.isreg() or member.issparse(),
                        f"larger than {MAX_MEMBER_BYTES} bytes": member.size > MAX_MEMBER_BYTES,
                        "not named HOST-DATE.txt": match is None,
                    }
                    content = None if any(faults.values()) else tar.extractfile(member)
                    if content is None or match is None:
                        tally.refused_files += 1
                        tally.count("other", "file", next(w for w, f in faults.items() if f), member.name)
                        continue
                    tally.files += 1
                    yield match["host"], io.BytesIO(content.read())  # here, so that it fails in this `try`
    except _BROKEN as error:
        raise StorageError(f"{path}: broken at or behind {place}: {error!r}") from error


def samples(
    path: Path, table: SensorTable, tally: DumpTally, known: Callable[[str], bool] = bool
) -> Iterator[tuple[int, str, Values]]:
    """Yield `(t_ns, host, [(signal, value)])` in the archive's order; lines of unknown hosts are ignored."""
    for host, content in _members(path, tally):
        lines, before = lines_of(content, f"{path.name}: {host}"), tally.total
        if known(host):
            for t_ns, values in decode_text(lines, table, tally):
                yield t_ns, host, values
        else:
            number = sum(1 for line in lines if line is None or (line.strip() and line[:10] != "Timestamp:"))
            tally.total += number
            tally.count("ignored", "node", "no such host in the site", host, number)
        tally.empty_files += tally.total == before


class Dump:
    """A dump in memory: `(t_ns, readings)` in order of time; `tally` counts the outcomes."""

    def __init__(self, path: Path, table: SensorTable, names: Names) -> None:
        self.tally, self._samples = DumpTally(), list[tuple[int, int, Values]]()
        entity: dict[str, int | None] = {}

        def known(host: str) -> bool:
            if host not in entity:
                entity[host] = names.entity("node", f"{host}/node0")
            return entity[host] is not None

        for t_ns, host, values in samples(path, table, self.tally, known):
            if len(self._samples) >= MAX_SAMPLES:
                raise StorageError(f"{path}: more than {MAX_SAMPLES} samples; split the archive")
            self._samples.append((t_ns, cast(int, entity[host]), values))
        self._samples.sort(key=lambda s: s[:2])

    def __iter__(self) -> Iterator[tuple[int, list[Reading]]]:
        for t, group in itertools.groupby(self._samples, key=lambda s: s[0]):
            yield t, [Reading("node", node, name, v, t) for _, node, values in group for name, v in values]


def hosts_of(path: Path) -> list[str]:
    """Return the hosts with a file in the dump, with or without readings, sorted."""
    return sorted({host for host, _ in _members(path, DumpTally())})


def ipmi_site(hosts: Iterable[str], site_name: str) -> dict[str, Any]:
    """Return a site file's tree: each host a rack of one node, in halls by the name before its last
    digits.

    A dump says nothing of rooms or racks: the groups make the site legible, they claim no place.
    """
    halls: dict[str, list[str]] = {}
    for host in hosts:
        halls.setdefault(host.rstrip("0123456789").rstrip("-_.") or "hosts", []).append(host)
    return {
        "site": site_name,
        "halls": [
            {
                "name": hall,
                "racks": [{"name": r, "nodes": 1, "gpus_per_node": 0} for r in ranges(halls[hall])],
            }
            for hall in sorted(halls)
        ],
    }


def discover_ipmi(path: Path, site_name: str) -> dict[str, Any]:
    """Return a site file's tree for all hosts of a dump."""
    return ipmi_site(hosts_of(path), site_name)
