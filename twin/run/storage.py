"""Storage: the files of a run (trace segments, journal, snapshots), and the handling of damage in them.

A run is a folder: `trace-NNNNNN.rt`, `journal.jsonl` and its closed segments (bodies too large for a line in
`sides/`), `snapshot-TICK.rts`, `poison-INSTANT`: input on which the engine failed, and `pruned.jsonl`: ticks
whose segments are gone. Data before a fault is used; data after it is reported with its position.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from twin.catalogue import NS, StorageError
from twin.engine import snapshot
from twin.run.atomic_write import atomic_write
from twin.run.quarantine import Quarantine, without
from twin.run.run_files import by_number
from twin.run.trace import FORMAT, MAGIC, Header, TraceDecoder, TraceEncoder, payloads, record
from twin.telemetry import Frame, TicksSkipped

SEGMENT_BYTES = 64 * 2**20
KEEP_SNAPSHOTS = 2
HOLES = "pruned.jsonl"


class TraceWriter:
    """Frames into rotating segments. Written before the tick; `sync` once a second is the daemon's duty.

    A segment ends at `segment_bytes`, and after `segment_s` where that is not 0: what is pinned is whole
    segments.
    """

    def __init__(
        self,
        folder: Path,
        site_hash: str,
        spec: bytes,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float = 0.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.segment_bytes, self.segment_s = folder, segment_bytes, segment_s
        self.site_hash, self.spec = site_hash, spec
        # behind the last, also where the oldest were deleted
        last = max(
            (p.stem[6:] for p in folder.glob("trace-*.rt") if p.stem[6:].isdecimal()), key=int, default="-1"
        )
        self.number = int(last) + 1
        self.bytes_written = 0
        self._encoder = TraceEncoder()
        self._file: IO[bytes] | None = None
        self._path = folder
        self._size, self._frames, self._begun_ns = 0, 0, 0

    def change_site(self, site_hash: str, spec: bytes) -> None:
        """Later segments name the new site."""
        self.site_hash, self.spec = site_hash, spec
        self.close()

    def write(self, frame: Frame) -> None:
        """Append a frame. Raises StorageError if the disk refuses; what comes next begins a new segment.

        Behind a frame that was lost, the differences of the next ones would add up to something else.
        """
        try:
            old = self.segment_s > 0 and frame.now_ns - self._begun_ns >= self.segment_s * NS
            if self._file is None or self._size >= self.segment_bytes or old:
                self._rotate(frame)
            self._put(self._encoder.encode(frame))
            self._frames += 1
        except OSError as error:
            self._give_up()
            raise StorageError(f"{self.folder}: the trace cannot be written: {error}") from error

    def _rotate(self, frame: Frame) -> None:
        self.close()
        path = self.folder / f"trace-{self.number:06d}.rt"
        self._file = path.open("xb", buffering=0)
        self._path, self._size, self._frames, self._begun_ns = path, 0, 0, frame.now_ns
        self.number += 1
        self._size = self._whole(MAGIC)
        self._put(self._encoder.header(Header(FORMAT, self.site_hash, self.spec, frame.tick)))

    def _put(self, payload: bytes) -> None:
        size = self._whole(record(payload))
        self._size += size
        self.bytes_written += size

    def _whole(self, data: bytes) -> int:
        assert self._file is not None
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        return len(data)

    def _give_up(self) -> None:
        """End the segment behind its last whole record; one without a frame is no segment."""
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            if self._frames:
                os.truncate(self._path, self._size)
            else:
                self._path.unlink()
                self.number -= 1

    def sync(self) -> None:
        """Force what was written to the disk. Raises StorageError."""
        job = self.sync_job()
        if job is not None:
            job()

    def sync_job(self) -> Callable[[], None] | None:
        """`sync` for a thread: what to call there, while frames are written here; None with nothing open."""
        file, folder = self._file, self.folder
        if file is None:
            return None
        try:
            fd = os.dup(file.fileno())
        except (OSError, ValueError):  # another thread has just closed it, which forced it to the disk
            return None

        def job() -> None:
            try:
                os.fsync(fd)
            except OSError as error:
                raise StorageError(f"{folder}: the trace cannot be written: {error}") from error
            finally:
                os.close(fd)

        return job

    def close(self) -> None:
        """Finish the segment."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
            file.close()


@dataclass
class TraceReader:
    """Frames of a segment, or of all of a folder, in order. `damage` shows where reading had to stop.

    `gaps` lists ticks between frames that are not there although nothing is damaged: pruned, or never
    traced. What an engine makes of the frames behind a gap is not what it made of them then. Input in the
    folder's quarantine is left out, as `left_out` states; `last_left_out` is (tick, instant) of the newest
    tick that was left out as a whole.
    """

    path: Path
    damage: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    last_left_out: tuple[int, int] = (-1, 0)
    bytes_read: int = 0

    def segments(self) -> list[Path]:
        """The files to read. Raises StorageError if there are none."""
        found = by_number(self.path, "trace-*.rt") if self.path.is_dir() else [self.path]
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
                return TraceDecoder().header(payload)
            except StorageError as error:
                raise StorageError(f"{path} at byte {position}: {error}") from error
        raise StorageError(f"{path}: holds no record")

    def __iter__(self) -> Iterator[Frame]:
        self.damage, self.gaps, self.headers, self.left_out, self.bytes_read = [], [], [], [], 0
        self.last_left_out = (-1, 0)
        quarantine = Quarantine(self.path if self.path.is_dir() else self.path.parent)
        last_tick, before = -1, 0
        holes = read_holes(self.path) if self.path.is_dir() else []
        for path in self.segments():
            decoder, header_seen, skipped = TraceDecoder(), False, 0
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
                if last_tick >= 0 and is_gap(last_tick, frame):
                    self.gaps.append(_gap(last_tick + 1, frame.tick - 1, holes))
                last_tick = frame.tick
                poison = None if path.stem.startswith("poison-") else quarantine.of(frame)
                if poison is not None:
                    self.left_out.append(poison.text)
                    if poison.whole:
                        self.last_left_out = (frame.tick, frame.now_ns)
                        continue
                    frame = without(frame, poison.parts)
                yield frame
            before += len(data)
            self.bytes_read = before


def is_restart(frame: Frame) -> bool:
    """True for the first frame after a restart. Ticks that were skipped for another reason have no number."""
    return any(isinstance(e, TicksSkipped) and e.why == "restart" for e in frame.events)


def is_gap(last_tick: int, frame: Frame) -> bool:
    """True if ticks between are missing; a frame after a restart explains its number itself."""
    return frame.tick > last_tick + 1 and not is_restart(frame)


def _gap(first: int, last: int, holes: list[tuple[int, int]]) -> str:
    pruned = any(a <= first and last <= b for a, b in holes)
    return f"gap: ticks {first}..{last} " + (
        "were pruned" if pruned else "are missing: never traced, or deleted"
    )


def read_holes(folder: Path) -> list[tuple[int, int]]:
    """(first, last) tick of each run of ticks whose segments were pruned, ascending and joined."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in (folder / HOLES).read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found.append(msgspec.json.decode(line, type=tuple[int, int]))
    out: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if out and first <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(last, out[-1][1])
        else:
            out.append((first, last))
    return out


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error


def write_snapshot(folder: Path, tick: int, data: dict[str, object], keep: int | None = None) -> Path:
    """A snapshot, complete or not at all; older ones beyond `keep` go (0: none). Raises StorageError."""
    path = folder / f"snapshot-{tick:012d}.rts"
    encoded = snapshot.encode(data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".snapshot-*"):  # of a process that was killed while it wrote
            stale.unlink()
        atomic_write(path, encoded)
        keep = KEEP_SNAPSHOTS if keep is None else keep
        for old in by_number(folder, "snapshot-*.rts")[:-keep] if keep else []:
            old.unlink()
    except OSError as error:
        raise StorageError(f"{path}: the snapshot cannot be written: {error}") from error
    return path
