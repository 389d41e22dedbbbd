"""Journal lines: encodes records, chains them by hash so that tampering shows, verifies and compares them.

A line is {seq, prev, kind, tick, now_ns, body}; `prev` is the blake2b of the line before. Lines of kinds in
`SHELL_KINDS` are written by the daemon between ticks; all others record decisions of a tick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from twin.catalogue import Divergence
from twin.contracts import Decision, JournalRecord, OtherRecord, column, encode_body, read_record

FORMAT = 1
READS = (1,)  # formats of lines that this version goes on with; the manifest says which
GENESIS = "0" * 32
SIDE_BYTES = 2_000_000  # a larger body goes to a file of its own, named by its hash


def line_hash(line: bytes) -> str:
    """Hash of a line, which the next one has as `prev`."""
    return hashlib.blake2b(line, digest_size=16).hexdigest()


class Chain:
    """Chain of lines. `head` is the hash of the last line; runs with equal heads made equal decisions."""

    def __init__(self, seq: int = 0, head: str = GENESIS) -> None:
        self.seq, self.head = seq, head
        self.sides: dict[str, bytes] = {}  # bodies too large for a line; the shell writes and clears them

    def line(self, record: JournalRecord | OtherRecord, tick: int, now_ns: int) -> bytes:
        """The next line, without its newline."""
        packed = encode_body(record)
        if len(packed) > SIDE_BYTES:
            name = line_hash(packed)
            self.sides[name] = packed
            packed = msgspec.json.encode({"side": name, "bytes": len(packed)})
        line = msgspec.json.encode(
            {
                "seq": self.seq,
                "prev": self.head,
                "kind": record.kind,
                "tick": tick,
                "now_ns": now_ns,
                "body": msgspec.Raw(packed),
            }
        )
        self.seq += 1
        self.head = line_hash(line)
        return line

    def lines(self, decision: Decision) -> list[bytes]:
        """The lines of a tick."""
        return [self.line(record, decision.tick, decision.now_ns) for record in decision.records]


class Entry(msgspec.Struct, frozen=True):
    """A parsed line."""

    seq: int
    prev: str
    kind: str
    tick: int
    now_ns: int
    body: dict[str, Any]

    @property
    def record(self) -> JournalRecord | OtherRecord:
        """Return the record of the line."""
        return read_record(self.kind, self.body)


def parse_line(line: bytes) -> Entry | None:
    """Return a parsed line of a journal; None if it cannot be read."""
    try:
        return msgspec.json.decode(line, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """A record with its place in the journal."""

    seq: int
    tick: int
    now_ns: int
    record: JournalRecord | OtherRecord

    @property
    def kind(self) -> str:
        """Kind of the record."""
        return self.record.kind


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a walk along a journal. `position` is the byte where the first fault begins, -1 for none."""

    lines: int
    head: str
    fault: str | None
    line_no: int
    position: int


def verify(
    lines: Iterable[bytes],
    torn_tail: bool = False,
    start: tuple[int, str] = (0, GENESIS),
    see: Callable[[Entry], None] | None = None,
) -> Verdict:
    """Walk the chain. Up to the fault the journal is good; `torn_tail`: the last line lacks its end.

    Where the chain breaks, the line that no longer hashes to what its successor says is the first in doubt.
    `start` is (seq, prev) that the first line must have; `see` is shown every line that follows its
    predecessor.
    """
    first, head = start
    count, position = 0, 0
    before = (0, head, 0)
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            return Verdict(count, head, f"not a journal line: {error}", count + 1, position)
        if entry.prev != head:
            fault = f"the chain breaks: it hashes to {head}, the next line says {entry.prev}"
            return Verdict(before[0], before[1], fault, before[0] + 1, before[2])
        if entry.seq != first + count:
            fault = f"seq is {entry.seq}, expected {first + count}"
            return Verdict(count, head, fault, count + 1, position)
        if see is not None:
            see(entry)
        before = (count, head, position)
        head = line_hash(line)
        count += 1
        position += len(line) + 1
    if torn_tail:
        return Verdict(count, head, "the last line is torn", count + 1, position)
    return Verdict(count, head, None, 0, -1)


def first_difference(recorded: bytes, replayed: bytes | None) -> Divergence:
    """The Divergence between two lines that differ, down to the field."""
    a = msgspec.json.decode(recorded)
    if replayed is None:
        return Divergence(a["tick"], a["kind"], a["body"], None)
    b = msgspec.json.decode(replayed)
    if a["tick"] != b["tick"] or a["kind"] != b["kind"]:
        tick = min(a["tick"], b["tick"])
        return Divergence(
            tick, "kind", f"{a['kind']} at tick {a['tick']}", f"{b['kind']} at tick {b['tick']}"
        )
    found = _differ(a["body"], b["body"], a["kind"])
    if found is None:  # the bodies say the same: then the envelope differs
        name = next((k for k in ("now_ns", "seq", "prev") if a[k] != b[k]), "line")
        found = name, a.get(name), b.get(name)
    return Divergence(a["tick"], *found)


_ABSENT = "absent"


def _differ(a: Any, b: Any, path: str) -> tuple[str, Any, Any] | None:
    """Return (path, one, other) of the first difference, or None. NaN equals NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        if "base64" in a and "base64" in b and a.get("dtype") == b.get("dtype"):
            return _differ(column(a).tolist(), column(b).tolist(), path)
        for key in [*a, *(k for k in b if k not in a)]:
            found = _differ(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{path}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            found = _differ(x, y, f"{path}[{i}]")
            if found is not None:
                return found
        return None if len(a) == len(b) else (f"{path}.length", len(a), len(b))
    same = type(a) is type(b) and (a == b or (a != a and b != b))
    return None if same else (path, a, b)
