"""Journal tail: lines of a journal on disk, oldest first, from a place that outlives the daemon.

The place is a small file. Without it the tail begins at the first line that the journal still has; so it does
where the journal is another one. Lines that were pruned before they were taken are counted as lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec

from twin.catalogue import StorageError
from twin.run import OPEN, atomic_write, closed_segments, line_hash, line_head

MAX_LINES, MAX_BYTES = 2000, 4 * 2**20  # of a batch
LONGEST_LINE = 16 * 2**20


class TailPlace(msgspec.Struct, frozen=True):
    """The line before the next one, and what stood then: whether the daemon led, and its site's hash."""

    seq: int = -1
    hash: str = ""
    leads: bool = False
    site_hash: str = ""


class TailBatch(msgspec.Struct, frozen=True):
    """Lines without their newlines, and where the tail is once they are taken."""

    lines: list[bytes]
    next_offset: int


class JournalTail:
    """Reads the journal of `folder`. `safe_lines`: how many of its lines are on the disk whatever comes."""

    def __init__(self, folder: Path, place_file: Path, safe_lines: Callable[[], int]) -> None:
        self.folder, self.place_file = folder, place_file
        self._safe_lines = safe_lines
        self.place = TailPlace()
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self.place = msgspec.json.decode(place_file.read_bytes(), type=TailPlace)
        self.lost_lines = 0
        self._file: BinaryIO | None = None
        self._offset = 0
        self._read_inode = 0  # of the segment that was read to its end

    def read(self) -> TailBatch | None:
        """The next lines; None if there are none yet. Raises StorageError."""
        try:
            for _ in range(2):
                if self._file is None and not self._open():
                    return None
                batch = self._lines()
                if batch is not None or not self._ended():
                    return batch
                self._leave()
        except OSError as error:
            self.close()
            raise StorageError(f"{self.folder}: the journal cannot be read: {error.strerror}") from error
        return None

    def taken(self, batch: TailBatch, place: TailPlace) -> None:
        """Go on behind these lines, from now on and after a restart. Raises StorageError."""
        self._offset, self.place = batch.next_offset, place
        try:
            self.place_file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.place_file, msgspec.json.encode(place), sync=False)
        except OSError as error:
            raise StorageError(f"{self.place_file}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the segment that is read."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _lines(self) -> TailBatch | None:
        assert self._file is not None
        data = os.pread(self._file.fileno(), MAX_BYTES, self._offset)
        if data and b"\n" not in data:
            data = os.pread(self._file.fileno(), LONGEST_LINE, self._offset)
        safe, lines, offset = self._safe_lines(), [], self._offset
        for line in data.split(b"\n")[:-1][:MAX_LINES]:
            seq = _seq_of(line)
            if seq is None:
                self.lost_lines += 1
            elif seq >= safe:
                break
            else:
                lines.append(line)
            offset += len(line) + 1
        return TailBatch(lines, offset) if offset > self._offset else None

    def _leave(self) -> None:
        """Close a segment that was read to its end."""
        if self._file is not None:
            self._read_inode = os.fstat(self._file.fileno()).st_ino
        self.close()

    def _ended(self) -> bool:
        """The segment has been read to its end, and another one is written."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        try:
            written = (self.folder / OPEN).stat()
        except FileNotFoundError:
            return False  # between the two steps of a rotation
        more = self._safe_lines() > self.place.seq + 1
        return more and mine.st_ino != written.st_ino and self._offset >= mine.st_size

    def _open(self) -> bool:
        """Open the segment with the next line and go to it."""
        with ExitStack() as stack:
            begun: list[tuple[int, BinaryIO]] = []
            for path in (*closed_segments(self.folder), self.folder / OPEN):
                with contextlib.suppress(FileNotFoundError):
                    file = stack.enter_context(path.open("rb"))
                    seq = _seq_of(file.readline(LONGEST_LINE).removesuffix(b"\n"))
                    if seq is not None:
                        begun.append((seq, file))
            if not begun:
                return False
            inodes = [os.fstat(file.fileno()).st_ino for _, file in begun]
            if self._read_inode in inodes[:-1]:
                at, offset = inodes.index(self._read_inode) + 1, 0
            else:
                at, offset = self._find_place(begun)
            self._offset, self._read_inode = offset, 0
            self._file = os.fdopen(os.dup(begun[at][1].fileno()), "rb")
        return True

    def _find_place(self, begun: list[tuple[int, BinaryIO]]) -> tuple[int, int]:
        """(segment, byte) of the next line; the first that is left where the place is in none of them."""
        fitting = sum(seq <= self.place.seq + 1 for seq, _ in begun)
        if not fitting:
            self.lost_lines += begun[0][0] - self.place.seq - 1 if self.place.seq >= 0 else 0
            return 0, 0
        offset = self._behind_place(*begun[fitting - 1])
        if offset is None:
            # Another journal, or one that was cut. Lines that are sent again are known there.
            self.place = TailPlace()
            return 0, 0
        return fitting - 1, offset

    def _behind_place(self, first_seq: int, file: BinaryIO) -> int | None:
        """The byte behind the line of the place in this segment; None if another line stands there."""
        file.seek(0)
        offset, place = 0, self.place
        if first_seq == place.seq + 1:
            line = file.readline(LONGEST_LINE).removesuffix(b"\n")
            return 0 if place.seq < 0 or line_head(line).prev == place.hash else None
        for line in file:
            offset += len(line)
            if _seq_of(line.removesuffix(b"\n")) == place.seq:
                return offset if line_hash(line.removesuffix(b"\n")) == place.hash else None
        return None


def _seq_of(line: bytes) -> int | None:
    """The number of a line; None where it cannot be read."""
    try:
        return line_head(line).seq
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
