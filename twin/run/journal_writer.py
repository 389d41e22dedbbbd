"""Journal writer: syncs the lines of a tick to disk before it returns, and reserves space for a last line.

Closed segments are never written again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from twin.catalogue import StorageError
from twin.contracts import DaemonRecord, Decision
from twin.run.atomic_write import sync_folder
from twin.run.journal import Chain
from twin.run.journal_files import (
    FULL,
    OPEN,
    RESERVE,
    Head,
    closed_segments,
    journal_exists,
    line_head,
    newest_line,
    verify_open,
)


class JournalWriter:
    """Writer of `journal.jsonl`. With `durable`, the lines of a tick are on the disk before it returns.

    A start walks the open segment and its link to the one before; all of it is walked by
    `racktwin journal verify`. `segment_bytes` of 0 never closes a segment.
    """

    def __init__(
        self, folder: Path, durable: bool = True, segment_bytes: int = 0, reserve_bytes: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.durable, self.segment_bytes = folder / OPEN, durable, segment_bytes
        self.failed = ""  # why nothing more is written
        self.chain, self._last = Chain(), b""
        if journal_exists(self.path):
            verdict = verify_open(self.path)
            if verdict.fault:
                raise StorageError(
                    f"{folder / verdict.file} line {verdict.line_no}, byte {verdict.position}: "
                    f"{verdict.fault}; expected an intact journal: move it away, or cut it there with "
                    "`journal verify --cut`"
                )
            self.chain = Chain(verdict.first_seq + verdict.lines, verdict.head)
            self._last = newest_line(folder)
        self._reserve = _reserved(folder, reserve_bytes)
        self._file = self.path.open("ab", buffering=0)
        self._size = self.path.stat().st_size
        if durable:
            sync_folder(folder)
        self._safe()

    @property
    def last(self) -> Head | None:
        """The last line that was written."""
        return line_head(self._last) if self._last else None

    @property
    def safe(self) -> tuple[int, str]:
        """(how many lines are on the disk whatever comes, the hash of the last of them)."""
        _, lines, head, _ = self._kept
        return lines, head

    @property
    def full(self) -> bool:
        """True once the segment has its size: then `rotate` between two ticks."""
        return 0 < self.segment_bytes <= self._size

    def append(self, lines: list[bytes], sync: bool = True) -> None:
        """Write lines made by this journal's chain. Raises StorageError: then nothing may be commanded.

        Without `sync`, what is written is on the disk with the next lines that are.
        """
        if self.failed:
            raise StorageError(f"{self.path}: {self.failed}; nothing more is written to it")
        try:
            for name, body in self.chain.sides.items():
                self._put_side(name, body)
            self.chain.sides.clear()
            if lines:
                data = b"".join(line + b"\n" for line in lines)
                self._put(data)
                self._size += len(data)
                self._last, self._dirty = lines[-1], True
        except OSError as error:
            self._fail(error)
            raise StorageError(f"{self.path}: the journal cannot be written: {error}") from error
        if not self.durable:
            self._safe()
        elif sync:
            self.sync()

    def sync(self) -> None:
        """Force what was written to the disk. Raises StorageError."""
        if not (self.durable and self._dirty) or self.failed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._fail(error)
            raise StorageError(f"{self.path}: the journal cannot be written: {error}") from error
        self._safe()

    def _safe(self) -> None:
        """Mark everything written so far as durable."""
        self._kept = self._size, self.chain.seq, self.chain.head, self._last
        self._dirty = False

    def write(self, decision: Decision) -> None:
        """The lines of a tick."""
        self.append(self.chain.lines(decision))

    def rotate(self) -> None:
        """Close the segment, and continue the chain in a new one. Raises StorageError."""
        self.sync()
        number = max((int(p.stem[8:]) for p in closed_segments(self.path.parent)), default=-1) + 1
        try:
            self._file.close()
            self.path.rename(self.path.with_name(f"journal-{number:06d}.jsonl"))
            self._file = self.path.open("ab", buffering=0)  # after a cut, writes go to the new end
            self._size = 0
            self._safe()
            sync_folder(self.path.parent)
        except OSError as error:
            self.failed = f"the journal cannot begin a new segment: {error}"
            self._last_word(error)
            raise StorageError(f"{self.path}: {self.failed}") from error

    def close(self) -> None:
        """Finish; what was written is on the disk."""
        try:
            self.sync()
        finally:
            self._file.close()

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def _put_side(self, name: str, body: bytes) -> None:
        side = self.path.parent / "sides" / f"{name}.json"
        side.parent.mkdir(exist_ok=True)
        with side.open("wb") as file:
            file.write(body)
            if self.durable:
                file.flush()
                os.fsync(file.fileno())

    def _fail(self, error: OSError) -> None:
        """Remove half-written lines. On a full disk, write a last line into the reserved space."""
        self.failed = f"the journal cannot be written: {error}"
        self.chain.sides.clear()
        self._size, self.chain.seq, self.chain.head, self._last = self._kept
        with contextlib.suppress(OSError):
            os.truncate(self.path, self._size)
        self._last_word(error)

    def _last_word(self, error: OSError) -> None:
        if error.errno not in FULL or self._reserve is None:
            return
        with contextlib.suppress(OSError):
            released = self._reserve.stat().st_size
            self._reserve.unlink()
            self._reserve = None
            if self._file.closed:
                self._file = self.path.open("ab", buffering=0)
            record = DaemonRecord(
                journal="no space left", reserve_released_bytes=released, held="all commands"
            )
            tick, now_ns = (at.tick, at.now_ns) if (at := self.last) else (-1, 0)
            self._put(self.chain.line(record, tick, now_ns) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def _reserved(folder: Path, size: int) -> Path | None:
    """Reserve space for the journal's last line only. Raises StorageError if there is none."""
    path = folder / RESERVE
    if size <= 0:
        return None
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise StorageError(
            f"{path}: {size // 2**20} MB cannot be kept for the journal: {error}; free space on this file "
            "system, or lower quotas.journal_reserve_mb"
        ) from error
    return path
