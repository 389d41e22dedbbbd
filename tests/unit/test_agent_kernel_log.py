"""XIDs out of the kernel's log: the lines that drivers write, the ids that stay, and what is not believed."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from racktwin_agent.kernel_log import (
    MAX_PER_MINUTE,
    MAX_SAME,
    Fault,
    KernelLog,
    Record,
    Repeats,
    _journal_record,
    line_age_s,
    parse_kmsg,
    read_fault,
)
from racktwin_agent.publish import fault_of
from racktwin_agent.simulated import SimulatedDevices

from connectors.agents import ItDecoder
from tests.support.builders import eight_nodes, site_of
from twin.telemetry import FaultReported, Message

DEVICES = SimulatedDevices(4)  # gpu0 at bus 01 ... gpu3 at bus 04
LINE = "NVRM: Xid (PCI:0000:03:00): 79, gone\n"


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
        ("nvidia-nvswitch0: SXid (PCI:0000:02:00.0): 20034, Fatal, Link 30 Fault Up", "node", "", 20034),
        ("NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has gone", "gpu", "gpu1", 79),
        ("[171167.62] NVRM: Xid (0000:03:00): 14, Channel 00000001", "gpu", "gpu2", 14),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:02): 94, pid=7194, name=python, Contained", "gpu", "gpu0", 94),
        ("NVRM: Xid (PCI:0000:01:00): 31, pid=9, name=a), Xid (b): 13, Ch 00000008", "gpu", "gpu0", 31),
        ("NVRM: Xid (PCI:0000:04:00): 45, pid=1, Ch 0000000e \r\n", "gpu", "gpu3", 45),
        ("NVRM: Xid (PCI:0000:04:00): 48\r", "gpu", "gpu3", 48),
        ("NVRM: Xid (PCI:0000:04:00): 154, GPU recovery action changed from 0x0 (None)", "gpu", "gpu3", 154),
        ("NVRM: Xid (PCI:00000000:04:00.0): 62, 0a1b(0c2d) 00000000", "gpu", "gpu3", 62),
        ("NVRM: Xid (PCI:0000:99:00): 79, a board that is not of this node any more", "node", "", 79),
        ("NVRM: GPU 0000:03:00.0: GPU has fallen off the bus.", "gpu", "gpu2", 79),
        ("NVRM: Xid (PCI:0000:03:00): 999999, nobody knows it", "gpu", "gpu2", 999_999),
    ],
)  # fmt: skip
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
        "NVRM: Xid (PCI:0000:03:00): 1000000, more than any code",
        "NVRM: Xid (PCI:0000:03:00): -79, gone",
        "NVRM: Xid (PCI:0000:03:00): 0x4f, gone",
        "NVRM: Xid (PCI:0000:03:00): 79gone",
        "NVRM: Xid (PCI:0000:03:00): \u0667\u0669, gone",
        "NVRM: Xid (PCI:0000:03:0",
        "NVRM: Xid (PCI:0000:03:00)",
        "NVRM: Xi",
        "NVRM: Xid error: xyz",
        "NVRM: Xid (" + "0" * 21 + "): 79",
        "NVRM: GPU 0000:03:00.0: GPU serial number is 1653723052734.",
        "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 Sub-engine 00",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Data {0x10000000, 0x10000000, 0x00000000}",
        "\x00" * 100,
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


WALL = 1_767_225_600 * 10**9


def at(text: str, age_s: float = 1.0) -> Fault:
    fault = read_fault(Record("77", age_s, text), "boot", DEVICES, WALL)
    assert fault is not None
    return fault


@pytest.mark.parametrize(
    "age_s, at_ns",
    [(0.0, WALL), (90.5, WALL - 90_500_000_000), (-5.0, WALL), (math.nan, 0), (3599.0, WALL - 3599 * 10**9)],
)
def test_a_fault_says_when_it_happened_if_anybody_knows(age_s: float, at_ns: int) -> None:
    line = "NVRM: Xid (PCI:0000:03:00): 79, gone"
    assert at(line, age_s).at_ns == at_ns
    assert read_fault(Record("77", age_s, line), "boot", DEVICES) is not None


@pytest.mark.parametrize(
    "text, age_s",
    [
        ("2026-01-01T00:00:00+00:00 n0 kernel: NVRM: x", 0.0),
        ("2025-12-31T23:59:00.500000Z n0 kernel: [1.0] NVRM: x", 59.5),
        ("2026-01-01T02:00:00+02:00 n0 kernel: x", 0.0),
        ("2026-01-01T00:00:00 n0 kernel: whose time is this?", None),
        ("Jan  1 00:00:00 n0 kernel: NVRM: x", None),
        ("9999-99-99T00:00:00+00:00 x", None),
        ("0000-01-01T00:00:00+00:00 x", None),
        ("NVRM: x", None),
        ("", None),
    ],
)
def test_how_old_a_line_of_a_file_is(text: str, age_s: float | None) -> None:
    found = line_age_s(text, WALL)
    assert math.isnan(found) if age_s is None else found == pytest.approx(age_s)


def test_the_lines_of_one_event_are_one_fault() -> None:
    head = "NVRM: Xid (PCI:0000:03:00): "
    lines = [
        (10.0, head + "13, Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address"),
        (9.99, head + "13, Graphics Exception: ESR 0x504730=0x107000e"),
        (9.98, head + "31, another code"),
        (9.97, "NVRM: Xid (PCI:0000:04:00): 13, another GPU"),
        (9.5, head + "13, Graphics Exception: ChID 0008"),
        (8.9, head + "13, a second one"),
        (8.0, head + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 00"),
        (8.0, head + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 01"),
        (8.0, "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 62 LTSSM Fault Up"),
        (8.0, "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up"),
        (7.0, head + "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        (6.9, "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus."),
        (2.0, "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus."),
        (1.0, "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus."),
    ]
    repeats = Repeats()
    told = [i for i, (age_s, line) in enumerate(lines) if not repeats.has(at(line, age_s))]
    assert told == [0, 2, 3, 5, 6, 7, 8, 9, 10, 13]
    again = Repeats()
    assert told == [i for i, (age_s, line) in enumerate(lines) if not again.has(at(line, age_s))]
    undated = at(lines[0][1], math.nan)
    assert [repeats.has(undated) for _ in range(3)] == [False] * 3, "no time tells them apart"
    for number in range(10_000):
        repeats.has(at(head + f"{number}, x"))
    assert len(repeats._sent_ns) <= MAX_SAME


def test_a_board_that_moved_is_known_by_its_address_alone() -> None:
    """After a swap the new board sits at another address; what is left of the old one is the node's."""
    line = "NVRM: Xid (PCI:0000:04:00): 79, gone"
    assert read_fault(Record("1", 1.0, line), "boot", SimulatedDevices(4)).name == "gpu3"  # type: ignore[union-attr]
    swapped = SimulatedDevices(3)  # nothing is at 04 now
    fault = read_fault(Record("1", 1.0, line), "boot", swapped)
    assert fault is not None
    assert (fault.table, fault.name) == ("node", "")
    assert "0000:04:00" in fault.detail


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.text(max_size=120), st.floats(allow_nan=True), st.integers(-1, 2**62))
def test_garbage_is_read_without_complaint(text: str, age_s: float, wall_ns: int) -> None:
    for line in (text, f"NVRM: Xid (PCI:0000:03:00): {text}", f"SXid ({text}): 20034, Fatal", text + LINE):
        fault = read_fault(Record("1", age_s, line), "boot", DEVICES, wall_ns)
        if fault is not None:
            assert 0 <= fault.code <= 999_999
            assert 0 <= fault.at_ns <= max(wall_ns, 0)
            assert fault.detail.isascii()
            body = json.loads(fault_of("s/h/r/n", *told_of(fault)).payload)
            assert body["code"] == fault.code
    parse_kmsg(text, 5.0)
    line_age_s(text, WALL)


def told_of(fault: Fault) -> tuple[str, str, str, int, str, int]:
    return fault.id, fault.table, fault.name, fault.code, fault.detail, fault.at_ns


@pytest.mark.parametrize("at_ns, sent", [(WALL, WALL), (0, None), (5_000_000_000, None), (-1, None)])
def test_the_daemon_reads_what_the_agent_writes(at_ns: int, sent: int | None) -> None:
    site = site_of(eight_nodes())
    out = fault_of("lab/h/r1/node0", "boot-77", "gpu", "gpu0", 79, "gone", at_ns)
    body = json.loads(out.payload)
    assert body.get("at_ns") == sent, "a clock that was never set says nothing"
    (event,) = ItDecoder(site).decode(Message(WALL, out.topic, out.payload))  # type: ignore[misc]
    assert isinstance(event, FaultReported)
    assert (event.at_ns, event.count, event.code) == (sent or 0, 1, 79)
    assert site.entity("gpu", event.name) == 0


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

    def wants(self, count: int) -> None:
        self.wanted = count
        self.enough.clear()

    def say(self, text: str) -> None:
        self.said.append(text)
        self.spoke.set()


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
    assert first.faults[0].id.startswith("line6-"), "a line of a file is the same after a reboot"


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


def test_a_log_that_is_rotated_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(LINE)
    reading = Reading(file, 1)
    reading.log.start()
    assert reading.enough.wait(10)
    reading.wants(3)
    file.rename(tmp_path / "log.1")
    with open(tmp_path / "log.1", "a") as late:
        late.write("noise\n" + LINE)
    file.write_text("noise and more\n" + LINE)
    assert reading.enough.wait(10)
    reading.wants(4)
    file.write_text("cut\n" + LINE)
    assert reading.enough.wait(10)
    reading.log.stop()
    assert len({f.id for f in reading.faults}) == 4


def test_every_line_that_the_journal_writes_at_once_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    lines = [json.dumps({"MESSAGE": f"NVRM: Xid (PCI:0000:0{i}:00): 79, gone",
                         "__MONOTONIC_TIMESTAMP": str(2**60 + i)}) for i in (1, 2, 3)]  # fmt: skip
    program.write_text("#!/bin/sh\ncat <<'X'\n" + "\n".join(lines) + "\nX\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reading = Reading(Path("journal"), 3)
    reading.log.start()
    told = reading.enough.wait(3)
    reading.log.stop()
    assert told
    assert [f.name for f in reading.faults] == ["gpu0", "gpu1", "gpu2"]
