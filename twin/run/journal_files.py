"""Journal files: `journal.jsonl` is open, `journal-NNNNNN.jsonl` are closed. One hash chain runs through all
of them, and a line records what was pruned before the first.

The module writes the lines of `twin.run.journal` to disk and reads them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from twin.catalogue import StorageError
from twin.contracts import ManifestRecord, UpkeepRecord
from twin.run.journal import GENESIS, READS, Entry, Verdict, line_hash, verify
from twin.telemetry import Authority

OPEN, RESERVE = "journal.jsonl", "journal.reserve"
TAIL_BYTES = 2**16  # read at once when the last line is looked for
FULL = (errno.ENOSPC, errno.EDQUOT)


class Head(msgspec.Struct):
    """Envelope of a line: all but its body."""

    seq: int
    prev: str
    kind: str
    tick: int
    now_ns: int


def line_head(line: bytes) -> Head:
    """The head of a journal line that `verify` found good."""
    return msgspec.json.decode(line, type=Head)


@dataclass(frozen=True, slots=True)
class Pruned:
    """Note of a line that the oldest segments were deleted up to this one; `seq` is of that line."""

    file: str
    last_seq: int
    last_hash: str
    seq: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class JournalVerdict(Verdict):
    """A walk through segments. `line_no` and `position` are places in `file`.

    `first_seq` is the first line that is there. `unexplained`: no line shows what became of those before it;
    no cut can mend that.
    """

    file: str = OPEN
    first_seq: int = 0
    segments: int = 1
    pruned: Pruned | None = None
    unexplained: bool = False


def closed_segments(folder: Path) -> list[Path]:
    """The segments that are not written any more, oldest first."""
    found = [p for p in folder.glob("journal-*.jsonl") if p.stem[8:].isdecimal()]
    return sorted(found, key=lambda p: int(p.stem[8:]))


def journal_exists(path: Path) -> bool:
    """True if there is anything to read: between a rotation's two steps only closed segments are there."""
    return path.is_file() or (path.name == OPEN and bool(closed_segments(path.parent)))


def opened_segments(stack: ExitStack, path: Path) -> list[tuple[Path, BinaryIO]]:
    """Open all files of a journal in order, so that a concurrent rotation removes none of them.

    Raises StorageError.
    """
    try:
        if path.name != OPEN:
            return [(path, stack.enter_context(path.open("rb")))]
        last: list[tuple[Path, BinaryIO]] = []
        with contextlib.suppress(FileNotFoundError):
            last = [(path, stack.enter_context(path.open("rb")))]
        files = [(p, stack.enter_context(p.open("rb"))) for p in closed_segments(path.parent)]
        if last and files:  # closed since it was opened: then it is in both lists
            mine = os.fstat(last[0][1].fileno()).st_ino
            files = [f for f in files if os.fstat(f[1].fileno()).st_ino != mine]
        if not (files or last):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except OSError as error:
        raise StorageError(f"{path}: the journal cannot be read: {error}") from error
    return files + last


def _whole(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]
    except OSError as error:
        raise StorageError(f"{path}: the journal cannot be read: {error}") from error


def journal_lines(path: Path, since: int = 0) -> Iterator[bytes]:
    """Whole lines of a journal, through all its segments, without newlines; a torn last line is not yielded.

    With `since`, from the line of that seq on, and no segment before it is read.
    """
    with ExitStack() as stack:
        files = opened_segments(stack, path)
        while since and len(files) > 1:
            seq = _first_seq(*files[1])
            if seq is None or seq > since:
                break
            del files[0]
        for name, file in files:
            for line in _whole(name, file):
                if since:
                    try:
                        if line_head(line).seq < since:
                            continue
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        pass  # who reads on finds it
                yield line


def _first_seq(path: Path, file: BinaryIO) -> int | None:
    line = next(_whole(path, file), None)
    try:
        return None if line is None else line_head(line).seq
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def last_line(file: BinaryIO) -> tuple[bytes, int]:
    """(the last whole line without its newline, where it begins); (b"", 0) if there is none."""
    end = file.seek(0, os.SEEK_END)
    tail, at = b"", end
    while at > 0:
        step = min(max(TAIL_BYTES, len(tail)), at)
        at -= step
        file.seek(at)
        tail = file.read(step) + tail
        last = tail.rfind(b"\n")
        if last < 0:
            continue
        begin = tail.rfind(b"\n", 0, last)
        if begin >= 0 or at == 0:
            return tail[begin + 1 : last], at + begin + 1
    return b"", 0


def newest_line(folder: Path) -> bytes:
    """The last whole line of the journal in `folder`, without its newline; b"" if it holds none."""
    for path in (folder / OPEN, *reversed(closed_segments(folder))):
        if path.is_file():
            with path.open("rb") as file:
                line, _ = last_line(file)
            if line:
                return line
    return b""


def edges(path: Path) -> tuple[int, int, str]:
    """(seq of the first line, of the last one, and that one's hash) of a closed segment."""
    try:
        with path.open("rb") as file:
            first = next(_whole(path, file), b"")
            line, _ = last_line(file)
        return line_head(first).seq, line_head(line).seq, line_hash(line)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: is no journal segment: {error}") from error


def last_tick(path: Path) -> int:
    """The tick that a closed segment ends with."""
    with path.open("rb") as file:
        return line_head(last_line(file)[0]).tick


def _torn(file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return False
    file.seek(size - 1)
    return file.read(1) != b"\n"


def is_torn(path: Path) -> bool:
    """True if the file ends within a line."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return _torn(file)


def _walk(
    files: list[tuple[Path, BinaryIO]],
    start: tuple[int, str],
    see: Callable[[Entry], None],
    before: tuple[Path, BinaryIO] | None = None,
) -> JournalVerdict:
    """The chain through these files; `before` is the one that the first of them follows."""
    (seq, head), count = start, 0
    for path, file in files:
        found = verify(_whole(path, file), _torn(file), (seq, head), see)
        count += found.lines
        if found.fault is not None:
            if before is not None and found.line_no == 1 and found.fault.startswith("the chain breaks"):
                # Either side may be the changed one: the last line of the file before is in doubt.
                line, at = last_line(before[1])
                number = sum(1 for _ in _whole(*before))
                fault = f"{found.fault}, in {path.name}"
                return JournalVerdict(
                    max(0, count - 1), line_head(line).prev, fault, number, at, before[0].name, start[0]
                )
            return JournalVerdict(
                count, found.head, found.fault, found.line_no, found.position, path.name, start[0]
            )
        seq, head, before = seq + found.lines, found.head, (path, file)
    return JournalVerdict(count, head, None, 0, -1, OPEN, start[0], len(files))


def verify_journal(path: Path, look: Callable[[Entry], None] | None = None) -> JournalVerdict:
    """Walk a journal's chain through all its segments. Raises StorageError if it cannot be read.

    Where it does not begin at its first line, a line of it must show what was pruned. One closed segment
    alone is walked by itself. `look` is shown every line that follows its predecessor.
    """
    notes: list[Pruned] = []

    def see(entry: Entry) -> None:
        if look is not None:
            look(entry)
        if entry.kind != "upkeep":
            return
        record = entry.record
        if isinstance(record, UpkeepRecord) and record.pruned:
            notes.extend(
                Pruned(g.file, g.last_seq, g.last_hash, entry.seq, entry.now_ns) for g in record.pruned
            )
            del notes[:-100_000]

    with ExitStack() as stack:
        files = opened_segments(stack, path)
        start = _claimed(*files[0])
        verdict = _walk(files, start, see)
    if start[0] == 0 or (path.name != OPEN and path.stem[8:].isdecimal()):
        return verdict
    known = next((p for p in reversed(notes) if (p.last_seq + 1, p.last_hash) == start), None)
    verdict = replace(verdict, pruned=known)
    if known is None and verdict.fault is None:
        fault = f"begins at line {start[0] + 1:,}, and no line shows that those before it were pruned"
        verdict = replace(
            verdict, fault=fault, line_no=1, position=0, file=files[0][0].name, unexplained=True
        )
    return verdict


def _claimed(path: Path, file: BinaryIO) -> tuple[int, str]:
    """Return (seq, prev) as the first line states them; those of a new journal if it states none."""
    line = next(_whole(path, file), None)
    try:
        head = line_head(line) if line is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        head = None
    return (head.seq, head.prev) if head is not None and head.seq > 0 else (0, GENESIS)


def verify_open(path: Path) -> JournalVerdict:
    """Verify the open segment and its link to the one before, which is fast enough for a start.

    Raises StorageError for lines of a format that this version does not go on with.
    """

    def check(entry: Entry) -> None:
        version = entry.body.get("format") if entry.kind == "manifest" else READS[0]
        if version not in READS:
            raise StorageError(
                f"{path}: journal format {version}; this version goes on with {', '.join(map(str, READS))}: "
                "start the version that wrote it, or move the folder away to begin a new run"
            )

    with ExitStack() as stack:
        files = opened_segments(stack, path)
        closed = [f for f in files if f[0].name != OPEN]
        rest = [f for f in files if f[0].name == OPEN]
        if not closed:
            return _walk(rest, _claimed(*rest[0]), check)
        if _torn(closed[-1][1]):
            return _walk(closed[-1:], _claimed(*closed[-1]), check)
        line, _ = last_line(closed[-1][1])
        try:
            link = (line_head(line).seq + 1, line_hash(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return _walk(closed[-1:], _claimed(*closed[-1]), check)
        return _walk(rest, link, check, closed[-1])


def verify_tail(folder: Path, most_bytes: int) -> tuple[JournalVerdict, Head | None]:
    """(the walk along the journal's last lines, the head of the first of them); through all its segments.

    Raises StorageError.
    """
    lines: list[bytes] = []
    with ExitStack() as stack:
        files = opened_segments(stack, folder / OPEN)
        for _, file in reversed(files):
            size = os.fstat(file.fileno()).st_size
            at = max(0, size - most_bytes)
            data = os.pread(file.fileno(), size - at, at)
            lines = data.split(b"\n")[1 if at else 0 : -1] + lines
            most_bytes -= len(data)
            if at or most_bytes <= 0:
                break
        try:
            first = line_head(lines[0]) if lines else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            first = None
        start = (first.seq, first.prev) if first is not None else (0, GENESIS)
        found = verify(lines, start=start)
        where = (found.lines, found.head, found.fault, found.line_no, found.position)
        return JournalVerdict(*where, first_seq=start[0], segments=len(files)), first


def cut_tail(path: Path, position: int) -> Path:
    """Cut a file at a byte, and keep the rest as evidence in a new file beside it."""
    number = 0
    while True:
        kept = path.with_name(f"{path.stem}.torn" + (f".{number}" if number else ""))
        try:
            # "x": neither an older piece nor a link that lies in wait is written to
            with kept.open("xb") as file:
                file.write(path.read_bytes()[position:])
                file.flush()
                os.fsync(file.fileno())
            break
        except FileExistsError:
            number += 1
    with path.open("r+b") as file:
        file.truncate(position)
    return kept


def cut_journal(path: Path, verdict: JournalVerdict) -> list[Path]:
    """Cut a journal at its fault; return the files that keep the rest. Empty if no cut repairs it."""
    if verdict.fault is None or verdict.unexplained:
        return []
    files = [path] if path.name != OPEN else [*closed_segments(path.parent), path]
    names = [f.name for f in files]
    at = names.index(verdict.file)
    kept = [cut_tail(files[at], verdict.position)]
    for later in files[at + 1 :]:
        if later.exists():
            kept.append(cut_tail(later, 0))
            later.unlink()
    if files[at].name != OPEN and files[at].stat().st_size == 0:
        files[at].unlink()
    return kept


def recorded_authority(journal: Path, first_tick: int = 0) -> dict[str, str]:
    """Return the authority that was in force at a tick, from the last manifest before it.

    Empty where no manifest says so. A run is made again under the same, whatever is configured by now.
    """
    found: dict[str, str] = {}
    try:
        for line in journal_lines(journal):
            entry = msgspec.json.decode(line, type=Entry)
            record = entry.record
            if isinstance(record, ManifestRecord):
                found = {**msgspec.convert(record.authority or {}, dict[str, Authority])}
            elif entry.tick >= first_tick:
                break
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass  # who compares with that line says what is wrong with it
    return found
