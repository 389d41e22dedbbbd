"""XIDs out of the kernel's log: the lines that drivers write, the ids that stay, and what is not believed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from racktwin_agent.kernel_log import (
    MAX_PER_MINUTE,
    Fault,
    KernelLog,
    Record,
    _journal_record,
    parse_kmsg,
    read_fault,
)
from racktwin_agent.simulated import SimulatedDevices

DEVICES = SimulatedDevices(4)  # gpu0 at bus 01 ... gpu3 at bus 04


def read(text: str, age_s: float = 1.0) -> Fault | None:
    return read_fault(Record("77", age_s, text), "boot", DEVICES)


@pytest.mark.parametrize(
    "text,table,name,code",
    [
        ("NVRM: Xid (PCI:0000:03:00): 79, pid=7, name=x, GPU has fallen off the bus.", "gpu", "gpu2", 79),
        ("NVRM: Xid (0000:01:00): 31, Ch 00000008, engmask 00000101", "gpu", "gpu0", 31),
        ("NVRM: Xid (PCI:0000:04:00.0): 48", "gpu", "gpu3", 48),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08", "node", "", 149),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46", "node", "", 28006),
    ],
)
def test_lines_that_are_faults(text: str, table: str, name: str, code: int) -> None:
    fault = read(text)
    assert fault is not None
    assert (fault.id, fault.table, fault.name, fault.code) == ("boot-77", table, name, code)
    assert str(code) in fault.detail


@pytest.mark.parametrize(
    "text",
    [
        "",
        "usb 1-1: new device",
        "NVRM: Xid (PCI:0000:03:00): ",
        "NVRM: Xid (PCI:0000:03:00): 79999999999",
        "NVRM: Xid (PCI:'; drop): 79",
        "NVRM: GPU at PCI:0000:03:00: GPU-0a1b",
    ],
)
def test_lines_that_are_none(text: str) -> None:
    assert read(text) is None


def test_old_lines_are_history_and_odd_characters_are_not_passed_on() -> None:
    line = "NVRM: Xid (PCI:0000:03:00): 13, \x1b[31m\u2028" + "x" * 9000
    assert read(line, age_s=4000) is None
    fault = read(line)
    assert fault is not None
    assert len(fault.detail) <= 500
    assert fault.detail.isascii()
    assert fault.detail.isprintable()


def test_a_record_of_kmsg() -> None:
    assert parse_kmsg("3,1234,5000000,-;NVRM: hello", 7.0) == Record("1234", 2.0, "NVRM: hello")
    for line in ("", "3,1234;x", "3,a,5,-;x", " SUBSYSTEM=pci", "no kmsg at all"):
        assert parse_kmsg(line, 7.0) is None
    # facility 1: a program wrote this to /dev/kmsg
    assert parse_kmsg("11,1235,5000000,-;NVRM: Xid (PCI:0000:03:00): 79", 7.0) is None


def test_a_record_of_the_journal() -> None:
    raw = b'{"MESSAGE":"NVRM: x","__MONOTONIC_TIMESTAMP":"1000","_SOURCE_MONOTONIC_TIMESTAMP":"900"}'
    record = _journal_record(raw)
    assert record is not None
    assert (record.number, record.text) == ("j900", "NVRM: x")
    for bad in (b"", b"[]", b"{}", b'{"MESSAGE":[1],"__MONOTONIC_TIMESTAMP":"1"}', b'{"MESSAGE":"x"}'):
        assert _journal_record(bad) is None


class Reading:
    """A log that is read from a file."""

    def __init__(self, path: Path, wanted: int) -> None:
        self.faults: list[Fault] = []
        self.said: list[str] = []
        self.enough, self.spoke = threading.Event(), threading.Event()
        self.wanted = wanted
        self.log = KernelLog(str(path), "boot", DEVICES, self.give, self.say)

    def give(self, fault: Fault) -> None:
        self.faults.append(fault)
        if len(self.faults) >= self.wanted:
            self.enough.set()

    def say(self, text: str) -> None:
        self.said.append(text)
        self.spoke.set()


LINE = "NVRM: Xid (PCI:0000:03:00): 79, gone\n"


def test_a_file_is_followed_and_a_second_reading_gives_the_same_ids(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("noise\n" + LINE + "3,5,99000000000000,-;" + LINE)
    first = Reading(file, 3)
    first.log.start()
    with open(file, "a") as more:
        more.write(LINE)
    assert first.enough.wait(10)
    first.log.stop()
    second = Reading(file, 3)
    second.log.start()
    assert second.enough.wait(10)
    second.log.stop()
    assert [f.id for f in first.faults] == [f.id for f in second.faults]
    assert len({f.id for f in first.faults}) == 3
    assert first.faults[1].id == "boot-5"


def test_a_storm_of_faults_is_cut_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(LINE * (MAX_PER_MINUTE * 3))
    reading = Reading(file, MAX_PER_MINUTE)
    reading.log.start()
    assert reading.spoke.wait(10)
    reading.log.stop()
    assert MAX_PER_MINUTE <= len(reading.faults) <= 2 * MAX_PER_MINUTE  # a minute may turn meanwhile
    assert reading.log.dropped > 0


def test_a_log_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    reading = Reading(tmp_path / "none", 1)
    reading.log.start()
    assert reading.spoke.wait(10)
    reading.log.stop()
    assert len(reading.said) == 1
    assert "cannot be read" in reading.said[0]
