"""Kernel log: XIDs of GPUs and SXIDs of NVSwitches as faults, with ids that a second reading repeats.

An id is made of the boot and of the record's number, or of a line's place and text where it comes from an
ordinary file, so that an agent that starts anew and reads the same lines again reports nothing twice. The
driver writes many lines for one event: those of one device, code and link within a second are one fault.
Imports the agent's clock and devices.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import stat
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from racktwin_agent.clock import NS, current_instant
from racktwin_agent.devices import Devices, short_bus_id

MAX_LINE = 8192
MAX_ENTRY = 65_536  # of the journal, in JSON
MAX_AGE_S = 3600.0  # older lines of the ring buffer are history, not news
MAX_PER_MINUTE = 600
SAME_S, MAX_SAME = 1.0, 256  # lines so close are one event; devices, codes and links remembered
OFF_BUS, OFF_BUS_S = 79, 60.0  # also logged in words, beside its XID
# `PCI:` and the function may be missing; a MIG instance may follow the address.
_AT = (
    r"\((?:PCI:)?([0-9a-fA-F:.]{5,20})(?: GPU-I:\d+)?\): "  # the address
    r"(\d{1,6})(?:[,;:\s]\s*(.*))?$"  # the code, and what is said of it
)
_XID = re.compile(r"NVRM: Xid " + _AT)
_SXID = re.compile(r"SXid " + _AT)
_LOST = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]{5,20}): (GPU has fallen off the bus.*)$")
_MORE = re.compile(r"Severity \d+ |Data \{")  # what an SXID's further lines begin with
_LINK = re.compile(r"\bLink (\d+)", re.IGNORECASE)
_PRINTABLE = re.compile(r"[^\x20-\x7e]")


class Record(NamedTuple):
    """One line of the kernel: its number within the boot (or file), its age in seconds, its text.

    The age is NaN where it is unknown. `of_file`: the number is of an ordinary file, whatever the boot.
    """

    number: str
    age_s: float
    text: str
    of_file: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as an event of racktwin; `name` is the device within the node, "" for the node itself.

    `at_ns` is when it happened by the wall clock, 0 if nobody knows. `same` is alike for lines of one event.
    """

    id: str
    table: str
    name: str
    code: int
    detail: str
    at_ns: int = 0
    same: str = ""


def read_fault(record: Record, boot: str, devices: Devices, wall_ns: int = 0) -> Fault | None:
    """Return the fault in a line, or None. `wall_ns` is the present, 0 if unknown."""
    text = _PRINTABLE.sub("?", record.text[:MAX_LINE].rstrip())
    kind, found = "Xid", _XID.search(text)
    if found is None:
        kind, found = "SXid", _SXID.search(text)
    if found is not None:
        bus_id, code, rest = found[1], int(found[2]), (found[3] or "").strip()
    else:
        kind, lost = "Xid", _LOST.search(text)
        if lost is None:
            return None
        bus_id, code, rest = lost[1], OFF_BUS, lost[2]
    if record.age_s > MAX_AGE_S or (kind == "SXid" and _MORE.match(rest)):
        return None
    at_ns = 0
    if wall_ns > 0 and math.isfinite(record.age_s):
        at_ns = max(wall_ns - round(max(record.age_s, 0.0) * NS), 0)
    gpu = devices.gpu_at(bus_id) if kind == "Xid" else None
    link = _LINK.search(rest)
    return Fault(
        record.number if record.of_file else f"{boot}-{record.number}",
        "node" if gpu is None else "gpu",
        "" if gpu is None else f"gpu{gpu}",
        code,
        f"{kind} {code} at {bus_id}: {rest}"[:500],
        at_ns,
        f"{kind} {short_bus_id(bus_id)} {code} {link[1] if link else ''}",
    )


class Repeats:
    """Recent events, so that further lines of one event are not reported again."""

    def __init__(self) -> None:
        self._sent_ns: dict[str, int] = {}

    def has(self, fault: Fault) -> bool:
        """Return True for a further line of an event, else remember it. Needs the time of the line."""
        if fault.at_ns == 0 or not fault.same:
            return False
        in_words = "fallen off" in fault.detail and fault.code == OFF_BUS
        last_ns = self._sent_ns.get(fault.same)
        span_ns = (OFF_BUS_S if in_words else SAME_S) * NS
        if last_ns is not None and abs(fault.at_ns - last_ns) < span_ns:
            return True
        if len(self._sent_ns) >= MAX_SAME:
            self._sent_ns.clear()
        self._sent_ns[fault.same] = fault.at_ns
        return False


def parse_kmsg(line: str, boot_s: float) -> Record | None:
    """Return a record of /dev/kmsg that the kernel itself wrote, else None; `boot_s` is the age of the
    boot."""
    head, separator, text = line.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not all(f.isdigit() and f.isascii() for f in fields[:3]):
        return None
    if int(fields[0]) >> 3 != 0:
        return None  # a program wrote it: anyone may say "NVRM: Xid" there
    return Record(fields[1], boot_s - int(fields[2]) / 1e6, text)


class KernelLog:
    """A thread that reads a source and reports faults. `source`: /dev/kmsg, another file, or `journal`."""

    def __init__(
        self,
        source: str,
        boot: str,
        devices: Devices,
        give: Callable[[Fault], None],
        say: Callable[[str], None],
    ) -> None:
        self.source, self.boot, self.devices, self.give, self.say = source, boot, devices, give, say
        self.dropped = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kernel-log", daemon=True)
        self._minute, self._count = 0, 0
        self._repeats = Repeats()

    def start(self) -> None:
        """Start to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join(timeout=3.0)

    def _run(self) -> None:
        logged = ""
        while not self._stop.is_set():
            try:
                records = self._journal() if self.source == "journal" else self._file()
                for record in records:
                    self._pass_on(record)
            except (OSError, ValueError) as error:
                if (text := f"{self.source}: cannot be read: {error}") != logged:
                    logged = text
                    self.say(f"{text}; trying again")
                self._stop.wait(5.0)

    def _pass_on(self, record: Record) -> None:
        fault = read_fault(record, self.boot, self.devices, current_instant().wall_ns)
        if fault is None or self._repeats.has(fault):
            return
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._count = minute, 0
        self._count += 1
        if self._count <= MAX_PER_MINUTE:
            self.give(fault)
        else:
            self.dropped += 1
            if self._count == MAX_PER_MINUTE + 1:
                self.say(
                    f"more than {MAX_PER_MINUTE} faults a minute in the kernel's log: the rest is left out"
                )

    def _file(self) -> Iterator[Record]:
        """Yield records of /dev/kmsg, or lines of a growing file, in either form."""
        is_device = self.source == "/dev/kmsg"
        fd = os.open(self.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            rest, at = b"", 0
            while not self._stop.is_set():
                try:
                    data = os.read(fd, MAX_LINE)
                except BlockingIOError:
                    data = b""
                except BrokenPipeError:
                    self.say("records of the kernel's log were overwritten before they were read")
                    continue
                if not data:
                    if not is_device and self._rotated(fd):
                        return
                    self._wait(fd, is_device)
                    continue
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-MAX_LINE:]
                for raw in lines:
                    record = self._line(raw, at)
                    at += len(raw) + 1
                    if record is not None:
                        yield record
        finally:
            os.close(fd)

    def _rotated(self, fd: int) -> bool:
        """Return True once lines are written to another file of this name, or the file was cut."""
        ours = os.fstat(fd)
        if not stat.S_ISREG(ours.st_mode):
            return False
        try:
            named = os.stat(self.source)
        except FileNotFoundError:
            return False  # renamed, and not created anew so far
        if os.path.samestat(ours, named):
            return ours.st_size < os.lseek(fd, 0, os.SEEK_CUR)
        return named.st_size > 0

    def _wait(self, fd: int, is_device: bool) -> None:
        if is_device:
            select.select([fd], [], [], 0.5)
        else:
            self._stop.wait(0.1)

    def _line(self, raw: bytes, at: int) -> Record | None:
        text = raw.decode("utf-8", "replace")
        if self.source == "/dev/kmsg" or re.match(r"\d+,\d+,\d+,", text):
            return parse_kmsg(text, time.clock_gettime(time.CLOCK_BOOTTIME))
        return Record(
            f"line{at}-{zlib.crc32(raw):08x}", line_age_s(text, current_instant().wall_ns), text, True
        )

    def _journal(self) -> Iterator[Record]:
        """Yield records of journald, for nodes without /dev/kmsg."""
        command = ["journalctl", "-k", "-f", "-n", "1000", "-o", "json", "--no-pager"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            rest = b""
            try:
                while not self._stop.is_set():
                    ready, _, _ = select.select([child.stdout], [], [], 0.5)
                    if not ready:
                        continue
                    # Not readline(): what it buffers is invisible to select(), so lines would wait for others
                    data = os.read(child.stdout.fileno(), MAX_ENTRY)
                    if not data:
                        raise ValueError("journalctl ended")
                    *lines, rest = (rest + data).split(b"\n")
                    rest = rest[-MAX_ENTRY:]
                    for raw in lines:
                        record = _journal_record(raw)
                        if record is not None:
                            yield record
            finally:
                child.terminate()


def line_age_s(text: str, wall_ns: int) -> float:
    """Return the age of a log line that begins with an RFC 3339 instant; NaN for others."""
    head = text.partition(" ")[0]
    if not 19 <= len(head) <= 40:
        return math.nan
    try:
        at = datetime.fromisoformat(head)
        return math.nan if at.tzinfo is None else wall_ns / NS - at.timestamp()
    except (ValueError, OverflowError):
        return math.nan


def _journal_record(raw: bytes) -> Record | None:
    try:
        entry = json.loads(raw)
        text = entry["MESSAGE"]
        since_us = int(entry.get("_SOURCE_MONOTONIC_TIMESTAMP", entry["__MONOTONIC_TIMESTAMP"]))
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(text, str):
        return None
    return Record(f"j{since_us}", time.clock_gettime(time.CLOCK_MONOTONIC) - since_us / 1e6, text)
