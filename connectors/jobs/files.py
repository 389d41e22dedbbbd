"""Jobs that share a folder with the daemon: they append reports to files and read advice from files.

A job appends its reports, a JSON object a line, to `{job}.reports.jsonl`; its advice is `{job}.json`,
replaced whole. Only names of jobs that run are ever opened, links are not followed, what is no plain file is
not read: whoever else writes in the folder gets nothing from us but a line of complaint. A line counts when
its end is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from connectors.jobs.sink import CONTROLS, JobBook
from connectors.jobs.wire import (
    MAX_ADVICE,
    MAX_REPORT,
    Advice,
    JobDecoder,
    decode_advice,
    encode_advice,
    level_of,
)
from twin.catalogue import ActuationError, BadMessage, ConnectorError
from twin.contracts import CommandBatch, Inlet
from twin.telemetry import CheckpointTold

log = logging.getLogger(__name__)
LOOK_S, SHARE = 5.0, 0.1  # between looks, and the greatest share of the time that looking takes
MAX_LOOK = 2**16  # bytes of one job's reports that are read in a look
MAX_BEHIND = 2**20  # bytes that may wait; of more than that the last ones are read
MAX_LOOK_ALL = 2**24  # bytes of all jobs; those that were not looked at come first next time
MAX_EVENTS = 1000  # reports of one look; the rest waits in the files
MAX_FAULTS = 200  # complaints of one look; the rest is counted
MAX_JOBS = 100_000
AT_ONCE = 256  # files that are written between two chances to stop
KEEP_S, SWEEP_S = 86_400.0, 3600.0  # advice of a job that is gone is kept for so long
MAX_SWEPT = 10_000  # names that one sweep looks at
REPORTS, ADVICE, DRAFT = ".reports.jsonl", ".json", ".racktwin"
# Of these errors every other file would have as well.
_OF_ALL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)


class Mark(NamedTuple):
    """Read position in a file of reports: the identity of the file, and the byte."""

    file: int
    offset: int


class _Seen(NamedTuple):
    """New content of one file."""

    mark: Mark
    lines: list[bytes]
    faults: list[str]
    lost: int = 0  # bytes


class ReportFolder:
    """Read positions of all files, kept beyond the life of a process: `path` is rewritten now and then.

    What is written there is older than `lag_s`, so that what was read since and not yet recorded is read
    again; a report that comes twice counts once.
    """

    def __init__(self, path: Path | None, lag_s: float) -> None:
        self.path, self.lag_s = path, lag_s
        self.marks: dict[str, Mark] = {}
        self._aging: dict[str, Mark] = {}
        self._aged_s = time.monotonic()
        self._written: dict[str, Mark] = {}
        self._loaded = False
        self.fault = ""

    def load(self) -> None:
        """Take up where a former process was, once; without a file that can be read, from the beginning."""
        if self.path is None or self._loaded:
            return
        self._loaded = True
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            tree = json.loads(self.path.read_bytes())
            self.marks = {
                str(job): Mark(int(file), max(0, int(offset)))
                for job, (file, offset) in list(tree["files"].items())[:MAX_JOBS]
            }
            self._aging = dict(self.marks)

    def keep(self, running: Mapping[str, object]) -> None:
        """Drop the files of ended jobs; write down old enough state."""
        self.marks = {job: mark for job, mark in self.marks.items() if job in running}
        if self.path is None or time.monotonic() - self._aged_s < self.lag_s:
            return
        old, self._aging, self._aged_s = self._aging, dict(self.marks), time.monotonic()
        if old == self._written:
            return
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps({"files": old}), encoding="utf-8")
            fresh.replace(self.path)
        except OSError as error:
            self.fault = f"{self.path}: cannot be written: {error.strerror}"
            fresh.unlink(missing_ok=True)
            return
        self._written, self.fault = old, ""


class FolderSource:
    """Reads reports from a folder. `slot_of` gives the running jobs by name."""

    name = "job-reports"

    def __init__(
        self,
        folder: Path,
        slot_of: Callable[[], Mapping[str, int]],
        places: ReportFolder,
        look_s: float = LOOK_S,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder, self.look_s = folder, look_s
        self._slot_of, self._places, self._now_ns = slot_of, places, now_ns
        self.decoder = JobDecoder(lambda job: slot_of().get(job))
        self.counts = self.decoder.counts
        self._turn = 0

    async def run(self, inlet: Inlet) -> None:
        """Look repeatedly until cancelled. Raises ConnectorError while the folder is missing."""
        await asyncio.to_thread(self._places.load)
        while True:
            begun = time.monotonic()
            await self.read_new(inlet)
            await asyncio.sleep(max(self.look_s, (time.monotonic() - begun) * (1 / SHARE - 1)))

    async def read_new(self, inlet: Inlet) -> None:
        """Stage all new complete lines. Lines that are read and not staged are read again."""
        running = self._slot_of()
        jobs, marks = list(running)[:MAX_JOBS], dict(self._places.marks)
        turn = self._turn % max(len(jobs), 1)
        jobs = jobs[turn:] + jobs[:turn]
        news = await asyncio.to_thread(lambda: dict(self._read_all(jobs, marks)))
        if sum(map(_size, news.values())) >= MAX_LOOK_ALL:
            self._turn = turn + jobs.index(next(reversed(news))) + 1
        faults: list[tuple[str, str]] = []
        room = MAX_EVENTS
        for job, part in news.items():
            room -= self._take(inlet, job, part, room, faults)
        for where, why in faults[:MAX_FAULTS]:
            inlet.reject(where, why)
        if len(faults) > MAX_FAULTS:
            inlet.reject("job reports", f"{len(faults) - MAX_FAULTS} more faults in this look")
        before = self._places.fault
        await asyncio.to_thread(self._places.keep, dict.fromkeys(jobs))
        if self._places.fault and not before:
            inlet.reject("job reports", self._places.fault)

    def _take(self, inlet: Inlet, job: str, part: _Seen, room: int, faults: list[tuple[str, str]]) -> int:
        """Stage the reports of a file, at most `room`. Return their number."""
        where, now_ns = f"job report file of {job[:100]}", self._now_ns()
        offset, events = part.mark.offset, list[CheckpointTold]()
        faults += [(where, fault) for fault in part.faults]
        if part.lost:
            inlet.drop(where, f"{part.lost} bytes were too far behind; the last {MAX_BEHIND} are read")
        for number, line in enumerate(part.lines):
            text = line.strip()
            if not text:
                continue
            try:
                if len(text) <= MAX_REPORT and len(events) < room:
                    self.decoder.spend(job, len(text), now_ns)
            except BadMessage as error:  # more than its due
                faults.append((where, f"{error}; the rest waits"))
                room = len(events)
            if len(events) >= room:  # the rest waits in the file
                offset -= sum(map(len, part.lines[number:]))
                break
            try:
                events.append(self.decoder.read(job, text, now_ns))
            except BadMessage as error:
                faults.append((where, str(error)))
        if events:
            inlet.stage(events, now_ns)
        self._places.marks[job] = Mark(part.mark.file, offset)
        return len(events)

    def _read_all(self, jobs: list[str], marks: Mapping[str, Mark]) -> Iterator[tuple[str, _Seen]]:
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConnectorError(
                f"{self.folder}: cannot be read: {error.strerror}; expected the folder that jobs report in "
                "(jobs.folder)"
            ) from None
        try:
            left = MAX_LOOK_ALL
            for job in jobs:
                if left <= 0:
                    return
                try:
                    name = level_of(job) + REPORTS
                except BadMessage:
                    continue  # such a job has no file
                part = _read(folder, name, marks.get(job, Mark(-1, 0)))
                if part is not None:
                    left -= _size(part)
                    yield job, part
        finally:
            os.close(folder)


def _size(part: _Seen) -> int:
    return sum(map(len, part.lines))


def _read(folder: int, name: str, mark: Mark) -> _Seen | None:
    """Return the complete lines after a mark; None without a file or new lines."""
    try:
        # A queue or a device that poses as a file must not hold us up.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else str(error.strerror)
        return _Seen(mark, [], [f"{name}: {why}; expected a file that its job appends to"])
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            return _Seen(mark, [], [f"{name}: is no plain file, or has other names; it is not read"])
        start = mark.offset if mark.file == info.st_ino and mark.offset <= info.st_size else 0
        behind = info.st_size - start
        if behind == 0:
            return None
        lost = max(0, behind - MAX_BEHIND)
        raw = os.pread(file, MAX_LOOK, start + lost)
    except OSError as error:
        return _Seen(mark, [], [f"{name}: cannot be read: {error.strerror}"])
    finally:
        os.close(file)
    return _lines(name, Mark(info.st_ino, start), raw, lost)


def _lines(name: str, mark: Mark, raw: bytes, lost: int) -> _Seen | None:
    """Split the input into lines; an incomplete line is left for the next look."""
    faults: list[str] = []
    at = mark.offset + lost
    if lost:  # begins somewhere within a line
        skipped = raw.find(b"\n") + 1 or len(raw)
        raw, at, lost = raw[skipped:], at + skipped, lost + skipped
    end = raw.rfind(b"\n") + 1
    if end == 0 and len(raw) > MAX_REPORT:
        faults.append(f"{name}: a line of more than {MAX_REPORT} bytes; what there is of it is left out")
        return _Seen(Mark(mark.file, at + len(raw)), [], faults, lost)
    if end == 0 and not lost:
        return None if at == mark.offset else _Seen(Mark(mark.file, at), [], [])
    lines = [line + b"\n" for line in raw[:end].split(b"\n")[:-1]]
    return _Seen(Mark(mark.file, at + end), lines, faults, lost)


class FolderSink:
    """Writes advice into a folder: `{job}.json`, atomically, readable by everybody."""

    name = "job-advice"
    controls: tuple[str, ...] = CONTROLS
    enforces_safe = False

    def __init__(self, folder: Path, book: JobBook, now_s: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._book, self._now_s = book, now_s
        self._swept_s = 0.0
        self._known: set[str] = set()
        self.counts = {"advice": 0, "failed": 0, "unfit_names": 0, "swept": 0}

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Write the advice of each job concerned. Raises ActuationError for what would hold for every job."""
        advice = self._book.take(commands)
        for first in range(0, len(advice), AT_ONCE):
            await asyncio.to_thread(self._write_all, advice[first : first + AT_ONCE])
        if self._now_s() - self._swept_s >= SWEEP_S:
            self._swept_s = self._now_s()
            await asyncio.to_thread(self._sweep)

    def _write_all(self, advice: list[Advice]) -> None:
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self.counts["failed"] += len(advice)
            raise ActuationError(
                f"{self.folder}: {error.strerror}; expected the folder that jobs look in (jobs.folder)"
            ) from None
        try:
            for done, one in enumerate(advice):
                try:
                    name = level_of(one.job) + ADVICE
                except BadMessage:
                    self.counts["unfit_names"] += 1
                    continue
                try:
                    _replace(folder, name, encode_advice(one) + b"\n")
                    self.counts["advice"] += 1
                except OSError as error:
                    self._fail(name, error, len(advice) - done)
        finally:
            os.close(folder)

    def _fail(self, name: str, error: OSError, left: int) -> None:
        """Note a failed file: one file must not stop the others; a full disk stops all."""
        if error.errno in _OF_ALL:
            self.counts["failed"] += left
            raise ActuationError(
                f"{self.folder}: advice cannot be written: {error.strerror}; jobs keep their own intervals"
            ) from None
        self.counts["failed"] += 1
        if name not in self._known and len(self._known) < MAX_JOBS:
            self._known.add(name)
            log.warning(
                "%s/%s: advice cannot be written: %s; expected a file of ours, or none, and a folder that we "
                "may write in",
                self.folder,
                name,
                error.strerror,
            )

    def _sweep(self) -> None:
        """Remove advice that was not renewed for a day, and files left by an interrupted write."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for number, entry in enumerate(entries):
                if number >= MAX_SWEPT:
                    return
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False) and self._is_over(entry):
                        os.unlink(entry.path)
                        self.counts["swept"] += 1

    def _is_over(self, entry: os.DirEntry[str]) -> bool:
        """Return True if a file is old and contains only racktwin's output: the folder may hold other
        files."""
        found = entry.stat(follow_symlinks=False)
        if found.st_uid != os.geteuid() or found.st_mtime > self._now_s() - KEEP_S:
            return False
        if entry.name.startswith(".") and entry.name.endswith(DRAFT):
            return True
        if not entry.name.endswith(ADVICE) or found.st_size > MAX_ADVICE:
            return False
        try:
            return level_of(decode_advice(Path(entry.path).read_bytes()).job) + ADVICE == entry.name
        except BadMessage:
            return False


def _replace(folder: int, name: str, text: bytes) -> None:
    """Replace a file by a new one; a link in its place is replaced, not followed. Raises OSError.

    It is not forced to the disk: what a crash tears is no advice, and the next renewal brings it again.
    """
    draft = f".{secrets.token_hex(8)}{DRAFT}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(draft, flags, 0o600, dir_fd=folder)
    try:
        try:
            if os.write(file, text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fchmod(file, 0o644)  # jobs run as other users
        finally:
            os.close(file)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise
