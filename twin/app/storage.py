"""Storage: the files of a run, trace segments, journal, snapshots, and how damage in them is met.

A run is a folder: `trace-NNNNNN.rt`, `journal.jsonl` (bodies too large for a line in `sides/`) and
`snapshot-TICK.rts`. What lies before a fault is used, what lies behind is reported with its position. Part of
the shell: this is where bytes meet the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from twin import snapshot
from twin.contracts import Decision
from twin.errors import StorageError
from twin.frame import Frame
from twin.journal import Chain, Verdict, verify
from twin.trace import FORMAT, MAGIC, Decoder, Encoder, Header, payloads, record

SEGMENT_BYTES = 64 * 2**20
KEEP_SNAPSHOTS = 2


class TraceWriter:
    """Frames into rotating segments. Written before the tick; `sync` once a second is the daemon's duty."""

    def __init__(self, folder: Path, site_hash: str, spec: bytes, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.segment_bytes = folder, segment_bytes
        self.site_hash, self.spec = site_hash, spec
        # behind the last, also where the oldest were deleted
        last = max(
            (p.stem[6:] for p in folder.glob("trace-*.rt") if p.stem[6:].isdecimal()), key=int, default="-1"
        )
        self.number = int(last) + 1
        self.bytes_written = 0
        self._encoder = Encoder()
        self._file: IO[bytes] | None = None
        self._size = 0

    def change_site(self, site_hash: str, spec: bytes) -> None:
        """Later segments name the new site."""
        self.site_hash, self.spec = site_hash, spec
        self.close()

    def write(self, frame: Frame) -> None:
        """Append a frame. Raises StorageError if the disk refuses; what comes next begins a new segment.

        Behind a frame that was lost, the differences of the next ones would add up to something else.
        """
        try:
            if self._file is None or self._size >= self.segment_bytes:
                self._rotate(frame.tick)
            self._put(self._encoder.encode(frame))
        except OSError as error:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
            raise StorageError(f"{self.folder}: the trace cannot be written: {error}") from error

    def _rotate(self, tick: int) -> None:
        self.close()
        path = self.folder / f"trace-{self.number:06d}.rt"
        self._file = path.open("xb")
        self.number += 1
        self._size = self._file.write(MAGIC)
        self._put(self._encoder.header(Header(FORMAT, self.site_hash, self.spec, tick)))

    def _put(self, payload: bytes) -> None:
        assert self._file is not None
        size = self._file.write(record(payload))
        self._size += size
        self.bytes_written += size

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Finish the segment."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class TraceReader:
    """Frames of a segment, or of all of a folder, in order. `damage` tells where reading had to stop."""

    path: Path
    damage: list[str] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    bytes_read: int = 0

    def segments(self) -> list[Path]:
        """The files to read. Raises StorageError if there are none."""
        found = sorted(self.path.glob("trace-*.rt")) if self.path.is_dir() else [self.path]
        if not found:
            raise StorageError(f"{self.path}: no trace segments (trace-*.rt) here")
        return found

    def first_header(self) -> Header:
        """The header of the first segment."""
        path = self.segments()[0]
        for position, payload in payloads(_bytes(path)):
            if isinstance(payload, str):
                raise StorageError(f"{path} at byte {position}: {payload}")
            try:
                return Decoder().header(payload)
            except StorageError as error:
                raise StorageError(f"{path} at byte {position}: {error}") from error
        raise StorageError(f"{path}: holds no record")

    def __iter__(self) -> Iterator[Frame]:
        self.damage, self.headers, self.bytes_read = [], [], 0
        last_tick, before = -1, 0
        for path in self.segments():
            decoder, header_seen, skipped = Decoder(), False, 0
            data = _bytes(path)
            for position, payload in payloads(data):
                if isinstance(payload, str):
                    self.damage.append(f"{path.name} at byte {position}: {payload}")
                    break
                self.bytes_read = before + position
                try:
                    if not header_seen:
                        self.headers.append(decoder.header(payload))
                        header_seen = True
                        continue
                    frame = decoder.decode(payload)
                except StorageError as error:
                    self.damage.append(f"{path.name} at byte {position}: {error}")
                    break
                if frame.tick <= last_tick:
                    skipped += 1
                    if skipped == 1:  # one note per segment: a whole one may be in doubt
                        self.damage.append(
                            f"{path.name} at byte {position}: tick {frame.tick} after {last_tick}; skipped"
                        )
                    continue
                last_tick = frame.tick
                yield frame
            before += len(data)
            self.bytes_read = before


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error


class JournalWriter:
    """Decisions into `journal.jsonl`. With `durable`, a tick's lines are on the disk before it returns."""

    def __init__(self, folder: Path, durable: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.durable = folder / "journal.jsonl", durable
        verdict = verify_journal(self.path) if self.path.exists() else None
        if verdict is not None and verdict.fault:
            raise StorageError(
                f"{self.path} line {verdict.line_no}, byte {verdict.position}: {verdict.fault}; "
                "expected an intact journal: move it away, or cut it there with `journal verify --cut`"
            )
        self.chain = Chain(verdict.lines, verdict.head) if verdict else Chain()
        self._file = self.path.open("ab")

    def append(self, lines: list[bytes]) -> None:
        """Write lines made by this journal's chain. Raises StorageError: then nothing may be commanded."""
        try:
            for name, body in self.chain.sides.items():
                side = self.path.parent / "sides" / f"{name}.json"
                side.parent.mkdir(exist_ok=True)
                with side.open("wb") as file:
                    file.write(body)
                    if self.durable:
                        file.flush()
                        os.fsync(file.fileno())
            self.chain.sides.clear()
            if lines:
                self._file.write(b"".join(line + b"\n" for line in lines))
                if self.durable:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"{self.path}: the journal cannot be written: {error}") from error

    def write(self, decision: Decision) -> None:
        """The lines of a tick."""
        self.append(self.chain.lines(decision))

    def close(self) -> None:
        """Flush and close."""
        self._file.flush()
        self._file.close()


def journal_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a journal, without their newlines; a torn last line is not yielded."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]
    except OSError as error:
        raise StorageError(f"{path}: the journal cannot be read: {error}") from error


def cut_tail(path: Path, position: int) -> Path:
    """Cut a file at a byte and keep what lay behind in a new file beside it: it is evidence."""
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


def is_torn(path: Path) -> bool:
    """Whether the file ends within a line."""
    size = path.stat().st_size
    if size == 0:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"


def verify_journal(path: Path) -> Verdict:
    """Walk a journal's chain. Raises StorageError if it cannot be read."""
    return verify(journal_lines(path), path.exists() and is_torn(path))


def write_snapshot(folder: Path, tick: int, data: dict[str, object]) -> Path:
    """A snapshot, complete or not at all; older ones beyond `KEEP_SNAPSHOTS` go. Raises StorageError."""
    path = folder / f"snapshot-{tick:012d}.rts"
    draft = path.with_suffix(".tmp")
    encoded = snapshot.encode(data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        for old in sorted(folder.glob("snapshot-*.rts"))[:-KEEP_SNAPSHOTS]:
            old.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StorageError(f"{path}: the snapshot cannot be written: {error}") from error
    return path


def read_snapshot(folder: Path) -> tuple[dict[str, object] | None, list[str]]:
    """(the newest snapshot that is whole, or None; what was wrong with newer ones)."""
    faults: list[str] = []
    for path in sorted(folder.glob("snapshot-*.rts"), reverse=True):
        try:
            return snapshot.decode(path.read_bytes()), faults
        except (StorageError, OSError) as error:
            faults.append(f"{path.name}: {error}")
    return None, faults
