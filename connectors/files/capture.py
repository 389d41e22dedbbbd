"""Capture files: each recorded line becomes a `Message` or a `BadRow`, and never raises an exception.

Two forms are read: CSV `offset,topic,payload`, whose offsets are Go durations (`1m39.3675441s`), and JSON
lines `{"offset_s", "topic", "payload" | "payload_base64"}`, with the instant of arrival as `t_ns` where
it is known. `encode_row` writes the latter. Files may be plain, .gz or .xz.

A line is a row: neither form needs a line break inside a payload, and so a broken quote costs one row and not
the rest of the file.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from twin.catalogue import START_NS
from twin.telemetry import Message

MAX_LINE_BYTES = 8 << 20  # a longer line is one BadRow; MQTT itself would allow 256 MiB
MAX_OFFSET_NS = 10 * 366 * 86_400 * 10**9  # ten years: beyond it an offset is a slip of the pen
HEADER = b"offset,topic,payload"
PLACEHOLDER = b"{{timestamp_ms}}"

_UNIT_NS = {"h": 3_600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "ns": 1,
            "us": 10**3, "µs": 10**3, "μs": 10**3}  # fmt: skip
_TERM = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?(ms|us|µs|μs|ns|h|m|s)")
_DURATION = re.compile(rf"(?:{_TERM.pattern})+")
_FIELD = re.compile(rb'(?:"([^"]*(?:""[^"]*)*)"|([^",]*))(,|$)')


class BadRow(NamedTuple):
    """An invalid row: its line number, counted from 1, and the problem."""

    line: int
    reason: str


class _JsonRow(msgspec.Struct):
    offset_s: float
    topic: str
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    payload_base64: str | msgspec.UnsetType = msgspec.UNSET
    t_ns: int | msgspec.UnsetType = msgspec.UNSET  # of the arrival; stands above the offset


_json_row = msgspec.json.Decoder(_JsonRow)


def duration_ns(text: str) -> int:
    """Return a Go duration in nanoseconds, exactly. Raises ValueError with the expectation."""
    if text == "0":
        return 0
    if len(text) > 100 or _DURATION.fullmatch(text) is None:
        raise ValueError(f"offset {text[:40]!r}: expected a duration such as 0s, 3.4731ms or 1m39.3s")
    total = 0
    for whole, fraction, unit in _TERM.findall(text):
        scale = _UNIT_NS[unit]
        total += int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if total > MAX_OFFSET_NS:
        raise ValueError(f"offset {text[:40]!r}: expected at most ten years")
    return total


def _message(start_ns: int, offset_ns: int, topic: str, payload: bytes, at_ns: int | None = None) -> Message:
    if not topic:
        raise ValueError("the topic is empty")
    if at_ns is not None:  # as it was received: nothing in it stands for something else
        return Message(at_ns, topic, payload)
    t_ns = start_ns + offset_ns
    return Message(t_ns, topic, payload.replace(PLACEHOLDER, b"%d" % (t_ns // 1_000_000)))


def _csv_row(line: bytes, complete: bool, start_ns: int) -> Message:
    fields: list[bytes] = []
    at, quoted, more = 0, False, True
    while more:
        match = _FIELD.match(line, at)
        if match is None:
            raise ValueError("an unclosed quote, or a quote inside an unquoted field")
        quoted = match[1] is not None
        fields.append(match[1].replace(b'""', b'"') if quoted else match[2])
        at, more = match.end(), match[3] == b","
        if len(fields) > 3:
            break
    if len(fields) != 3:
        count = "more" if len(fields) > 3 else str(len(fields))
        raise ValueError(f"expected 3 fields (offset, topic, payload), found {count}")
    if not complete and not quoted:
        # Without its line break an unquoted payload may be the first half of a longer one: 12 of 125.
        raise ValueError("half-written last line: neither a line break nor a closing quote")
    return _message(start_ns, duration_ns(fields[0].decode()), fields[1].decode(), fields[2])


def _json_line(line: bytes, complete: bool, start_ns: int) -> Message:
    try:
        row = _json_row.decode(line)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        half = "" if complete else "half-written last line: "
        raise ValueError(f"{half}{str(error)[:120]}") from None
    if not math.isfinite(row.offset_s) or not 0 <= row.offset_s * 1e9 <= MAX_OFFSET_NS:
        raise ValueError(f"offset_s {row.offset_s}: expected seconds between 0 and ten years")
    offset_ns = round(row.offset_s * 1e9)
    at_ns = None if isinstance(row.t_ns, msgspec.UnsetType) else row.t_ns
    if at_ns is not None and not 0 < at_ns < 2**62:
        raise ValueError(f"t_ns {str(at_ns)[:40]}: expected UTC nanoseconds")
    if not isinstance(row.payload_base64, msgspec.UnsetType):
        try:
            binary = base64.b64decode(row.payload_base64, validate=True)
            return _message(start_ns, offset_ns, row.topic, binary, at_ns)
        except binascii.Error as error:
            raise ValueError(f"payload_base64: {error}") from None
    if isinstance(row.payload, msgspec.UnsetType):
        raise ValueError("expected a payload or a payload_base64")
    raw = bytes(row.payload)
    if raw == b"null":  # what MQTT sends to clear a retained message
        raw = b""
    elif raw[:1] == b'"':
        raw = msgspec.json.decode(raw, type=str).encode()
    return _message(start_ns, offset_ns, row.topic, raw, at_ns)


def encode_row(message: Message, start_ns: int) -> bytes:
    """Return a message as a line of a JSON-lines capture, which reads back as the same message."""
    row: dict[str, Any] = {
        "offset_s": max(0, message.t_ns - start_ns) / 1e9,
        "t_ns": message.t_ns,
        "topic": message.topic,
    }
    payload = message.payload
    if payload[:1] == b"{" and payload[-1:] == b"}" and b"\n" not in payload and _is_json(payload):
        row["payload"] = msgspec.Raw(payload)
    else:
        try:
            row["payload"] = payload.decode()
        except UnicodeDecodeError:
            row["payload_base64"] = base64.b64encode(payload).decode()
    return msgspec.json.encode(row) + b"\n"


def _is_json(payload: bytes) -> bool:
    try:
        payload.decode()
        msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _lines(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yield (line number, line without its break or None if too long, True if the break was there)."""
    readline = getattr(stream, "readline", None)
    if readline is None:
        for number, line in enumerate(stream, 1):
            whole = line.rstrip(b"\r\n")
            yield number, whole if len(whole) <= MAX_LINE_BYTES else None, True
        return
    number = 0
    while line := cast(bytes, readline(MAX_LINE_BYTES + 2)):
        number += 1
        if line.endswith(b"\n") or len(line) <= MAX_LINE_BYTES:
            yield number, line.rstrip(b"\r\n"), line.endswith(b"\n")
            continue
        while line and not line.endswith(b"\n"):  # read on in pieces: the tail is no row of its own
            line = readline(MAX_LINE_BYTES)
        yield number, None, True


def _read(
    stream: Iterable[bytes], start_ns: int, parse: Callable[[bytes, bool, int], Message]
) -> Iterator[Message | BadRow]:
    number = 0
    try:
        for number, line, complete in _lines(stream):
            if line is None:
                yield BadRow(number, f"longer than {MAX_LINE_BYTES} bytes")
                continue
            if not line or (number == 1 and line.removeprefix(b"\xef\xbb\xbf") == HEADER):
                continue
            try:
                row: Message | BadRow = parse(line, complete, start_ns)
            except UnicodeDecodeError as error:
                row = BadRow(number, f"offset or topic is not UTF-8: {error.reason}")
            except ValueError as error:
                row = BadRow(number, str(error))
            yield row
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        yield BadRow(number + 1, f"the rest of the file cannot be read: {error or type(error).__name__}")


def read_csv(stream: Iterable[bytes], start_ns: int = START_NS) -> Iterator[Message | BadRow]:
    """Yield the rows of a CSV capture; `{{timestamp_ms}}` in a payload becomes the milliseconds of its
    instant."""
    return _read(stream, start_ns, _csv_row)


def open_bytes(path: Path) -> BinaryIO:
    """Open a capture file, unpacked by its suffix (.gz, .xz)."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")


def read_capture(path: Path, start_ns: int = START_NS) -> Iterator[Message | BadRow]:
    """Yield the rows of a capture file, in the form of its name: *.jsonl[.gz|.xz], anything else CSV."""
    parse = _json_line if ".jsonl" in path.suffixes[-2:] else _csv_row
    with open_bytes(path) as stream:
        yield from _read(stream, start_ns, parse)
