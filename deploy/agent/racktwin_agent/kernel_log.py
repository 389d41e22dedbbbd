"""The kernel's log: XIDs of GPUs and SXIDs of NVSwitches as faults, with ids that a second reading repeats.

An id is made of the boot and of the record's number, so that an agent that starts anew and reads the same
lines again reports nothing twice. Imports the agent's clock and devices.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from racktwin_agent.devices import Devices

MAX_LINE = 8192
MAX_AGE_S = 3600.0  # older lines of the ring buffer are history, not news
MAX_PER_MINUTE = 600
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,20})\): (\d{1,6})(?:, ?(.*))?$")
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9a-fA-F:.]{5,20})\): (\d{1,6})(?:, ?(.*))?$")
_PRINTABLE = re.compile(r"[^\x20-\x7e]")


class Record(NamedTuple):
    """One line of the kernel: its number within the boot (or file), its age in seconds if known, its text."""

    number: str
    age_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as racktwin's events tell it; `name` within the node, "" for the node itself."""

    id: str
    table: str
    name: str
    code: int
    detail: str


def read_fault(record: Record, boot: str, devices: Devices) -> Fault | None:
    """The fault that a line speaks of, or None."""
    text = _PRINTABLE.sub("?", record.text[:MAX_LINE])
    found, kind = _XID.search(text), "Xid"
    if found is None:
        found, kind = _SXID.search(text), "SXid"
    if found is None or record.age_s > MAX_AGE_S:
        return None
    bus_id, code, rest = found[1], int(found[2]), (found[3] or "").strip()
    gpu = devices.gpu_at(bus_id) if kind == "Xid" else None
    detail = f"{kind} {code} at {bus_id}: {rest}"[:500]
    event_id = f"{boot}-{record.number}"
    if gpu is None:
        return Fault(event_id, "node", "", code, detail)
    return Fault(event_id, "gpu", f"gpu{gpu}", code, detail)


def parse_kmsg(line: str, boot_s: float) -> Record | None:
    """A record as /dev/kmsg gives it, if the kernel itself wrote it; `boot_s` is how long the boot lasts."""
    head, separator, text = line.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not all(f.isdigit() and f.isascii() for f in fields[:3]):
        return None
    if int(fields[0]) >> 3 != 0:
        return None  # a program wrote it: anyone may say "NVRM: Xid" there
    return Record(fields[1], boot_s - int(fields[2]) / 1e6, text)


class KernelLog:
    """A thread that reads a source and hands faults on. `source`: /dev/kmsg, another file, or `journal`."""

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

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join(timeout=3.0)

    def _run(self) -> None:
        told = ""
        while not self._stop.is_set():
            try:
                records = self._journal() if self.source == "journal" else self._file()
                for record in records:
                    self._pass_on(record)
            except (OSError, ValueError) as error:
                if (text := f"{self.source}: cannot be read: {error}") != told:
                    told = text
                    self.say(f"{text}; trying again")
            self._stop.wait(5.0)

    def _pass_on(self, record: Record) -> None:
        fault = read_fault(record, self.boot, self.devices)
        if fault is None:
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
        """Records of /dev/kmsg, or lines of a file that grows, in either form."""
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

    def _wait(self, fd: int, is_device: bool) -> None:
        if is_device:
            select.select([fd], [], [], 0.5)
        else:
            self._stop.wait(0.1)

    def _line(self, raw: bytes, at: int) -> Record | None:
        text = raw.decode("utf-8", "replace")
        if self.source == "/dev/kmsg" or re.match(r"\d+,\d+,\d+,", text):
            return parse_kmsg(text, time.clock_gettime(time.CLOCK_BOOTTIME))
        return Record(f"line{at}", 0.0, text)

    def _journal(self) -> Iterator[Record]:
        """Records of journald, where /dev/kmsg is not to be had."""
        command = ["journalctl", "-k", "-f", "-n", "1000", "-o", "json", "--no-pager"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            try:
                while not self._stop.is_set():
                    ready, _, _ = select.select([child.stdout], [], [], 0.5)
                    if not ready:
                        continue
                    raw = child.stdout.readline(65_536)
                    if not raw:
                        raise ValueError("journalctl ended")
                    record = _journal_record(raw)
                    if record is not None:
                        yield record
            finally:
                child.terminate()


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
