"""Logs of faults: both forms say the same, and whatever is wrong is told with its place."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from twin.catalogue import ConfigError, StorageError
from twin.tables import fault_log_file, read_faults
from twin.tables.fault_log_file import MOST_PROBLEMS

GPU = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "DBE"}


def event(node: Any, day: Any, what: Any, kind: Any = GPU) -> dict[str, Any]:
    return {"node_id": node, "event_time": day, "event_type": what, "fault_type": kind}


GOOD = [
    event("a", 1.5, "fault_start"), event("b", 2.0, "fault_start", {"Class": "NIC"}),
    event("b", 2.0, "fault_end", {"Class": "NIC"}), event("a", 4.0, "fault_end"),
    event("a", 6.0, "fault_start"), event("b", 9.0, "fault_start", "NIC"),
    event("b", 9.5, "fault_end", "NIC"),
]  # fmt: skip
CSV = "node,start,end,class\na,1.5,4.0,GPU\nb,2.0,2.0,NIC\na,6.0,,GPU\nb,9.0,9.5,NIC\n"


def written(folder: Path, what: Any) -> Path:
    path = folder / "log"
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    return path


def refused(folder: Path, what: Any, nodes: int = 10, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_faults(written(folder, what), nodes, **more)
    return caught.value.problems


@pytest.mark.parametrize("form", [GOOD, CSV, "\ufeff" + CSV.replace("\n", "\r\n")])
def test_both_forms_say_the_same(tmp_path: Path, form: Any) -> None:
    read = read_faults(written(tmp_path, form), 5)
    log = read.log
    assert read.names == ("a", "b")
    assert log.n == 5
    assert log.node.tolist() == [0, 1, 0, 1]
    assert log.start_d.tolist() == [1.5, 2.0, 6.0, 9.0]
    assert log.end_d.tolist() == [4.0, 2.0, np.inf, 9.5]
    assert [log.classes[k] for k in log.kind] == ["GPU", "NIC", "GPU", "NIC"]
    assert (log.begin_d, log.until_d) == (0.0, 9.5)


def test_until_leaves_out_what_came_later(tmp_path: Path) -> None:
    log = read_faults(written(tmp_path, GOOD), 5, until_d=3.0).log
    assert log.start_d.tolist() == [1.5, 2.0]
    assert log.end_d.tolist() == [np.inf, 2.0]
    assert log.until_d == 3.0
    assert "expected a day after" in refused(tmp_path, GOOD, until_d=1.0)[0]
    assert "expected a day after" in refused(tmp_path, GOOD, until_d=-1.0)[0]
    read = read_faults(written(tmp_path, GOOD), 5, until_d=20.0)
    assert any("without faults" in note for note in read.notes)


def test_times_with_dates_are_days_with_a_begin_of_their_own(tmp_path: Path) -> None:
    text = "class,end,start,node\nGPU,2024-03-30T18:00:00+06:00,2024-03-30T06:00:00Z,a\n,,2024-03-31,b\n"
    log = read_faults(written(tmp_path, text), 2).log
    assert log.start_d - log.begin_d == pytest.approx([0.25, 1.0])
    assert log.end_d[0] - log.begin_d == pytest.approx(0.5)
    assert log.classes == ("GPU", "unknown")
    assert (log.begin_d, log.start_d[0]) == (0.0, 0.25)


@pytest.mark.parametrize(
    "start, end, day",
    [
        ("2024-03-30T02:00:00+02:00", "2024-03-31T00:00:00Z", 1.0),
        ("2024-03-30", "2024-03-30T12:00", 0.5),  # without a zone: UTC
        ("2024-10-27T02:30:00+02:00", "2024-10-27T02:30:00+01:00", 1.0 / 24.0),  # the hour that comes twice
    ],
)
def test_time_zones_are_heeded(tmp_path: Path, start: str, end: str, day: float) -> None:
    read = read_faults(written(tmp_path, f"node,start,end,class\na,{start},{end},GPU\n"), 2)
    assert read.log.end_d[0] - read.log.start_d[0] == pytest.approx(day)
    assert any(f"day 0 is {start[:10]} (UTC)" in note for note in read.notes)


@pytest.mark.parametrize(
    "when", ["0024-03-30", "9999-12-31T23:59:59-14:00", "2024-02-30", "2024-03-30T25:00"]
)
def test_times_that_cannot_be_are_refused(tmp_path: Path, when: str) -> None:
    [problem] = refused(tmp_path, f"node,start,end,class\na,2024-03-01,,x\nb,{when},,x\n")
    assert "line 3: " in problem
    assert "expected a time such as" in problem


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_a_packed_log_is_read_and_a_torn_one_refused(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "log.packed"
    path.write_bytes(pack(CSV.encode()))
    assert read_faults(path, 5).log.k == 4
    path.write_bytes(pack(CSV.encode())[:-9])
    with pytest.raises(StorageError, match="expected a whole file"):
        read_faults(path, 5)


def test_a_last_line_that_was_being_written_is_told(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, CSV + "c,9.6,")
    assert "line 6: 3 values, expected 4" in problem
    assert "was the file still being written?" in problem
    notes = read_faults(written(tmp_path, CSV + "c,9.6,,GP"), 5).notes
    assert any("line 6, the last one, has no line end" in note for note in notes)
    assert not any("line end" in note for note in read_faults(written(tmp_path, CSV), 5).notes)


def test_columns_that_are_not_used_are_told(tmp_path: Path) -> None:
    notes = read_faults(written(tmp_path, "node,start,end,clas,rack\na,1.5,4.0,GPU,r1\n"), 5).notes
    assert any("not used: 'clas, rack'" in note for note in notes)


def test_too_many_faults_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_log_file, "MOST_FAULTS", 3)
    [problem] = refused(tmp_path, CSV)
    assert "line 5: more than 3 faults" in problem
    monkeypatch.setattr(fault_log_file, "MOST_BYTES", 30)
    assert "more than 30 bytes" in refused(tmp_path, CSV)[0]
    monkeypatch.setattr(fault_log_file, "MOST_BYTES", 10**6)
    monkeypatch.setattr(fault_log_file, "MOST_LINES", 30)
    assert refused(tmp_path, "node,start,end\n" + "x\n" * 50)[-1].endswith("11 more problems")


@pytest.mark.parametrize(
    "change, place, expected",
    [
        (lambda e: e.insert(1, 7), "event 2", "expected an object"),
        (lambda e: e[2].update(event_type="fault_over"), "event 3", "expected fault_start or fault_end"),
        (lambda e: e[0].update(event_time="soon"), "event 1", "expected days"),
        (lambda e: e[0].update(event_time=True), "event 1", "expected days"),
        (lambda e: e[0].update(event_time=-2), "event 1", "expected days"),
        (lambda e: e[0].pop("node_id"), "event 1", "expected a name"),
        (lambda e: e[0].update(fault_type=[1]), "event 1", "expected a string"),
        (lambda e: e.insert(1, e[0]), "event 2", "expected once"),
        (lambda e: e.insert(1, event("a", 1.7, "fault_start")), "event 2", "expected an end between"),
        (lambda e: e.insert(0, event("c", 1.0, "fault_end")), "event 1", "expected a start before"),
        (lambda e: e.append(event("c", 3.0, "fault_start")), "event 8", "expected events in order"),
        (lambda e: e.append(event("a", 5.0, "fault_end")), "event 8", "its start (event 5) or later"),
    ],
)  # fmt: skip
def test_wrong_events_are_told_with_their_place(
    tmp_path: Path, change: Any, place: str, expected: str
) -> None:
    events = json.loads(json.dumps(GOOD))
    change(events)
    problems = refused(tmp_path, events)
    assert any(f"{place}: " in problem and expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    "line, expected",
    [
        ("a,9.6,9.7", "3 values, expected 4"), ("a,soon,,x", "expected days"), ("a,nan,,x", "expected days"),
        ("a,inf,,x", "expected days"), ("a,9.8,9.7,x", "expected start 9.8 or later"),
        (",9.8,9.9,x", "expected a name"),
        ("b,9.0,9.5,NIC", "expected once"), ("a,9.6,9.7,x", "expected one fault at a time"),
        ("c,3.0,4.0,x", "expected lines in order"), ("c,2024-03-30,,x", "as in the first line"),
    ],
)  # fmt: skip
def test_wrong_lines_are_told_with_their_place(tmp_path: Path, line: str, expected: str) -> None:
    problems = refused(tmp_path, CSV + line + "\n")
    assert any("line 6: " in problem and expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    "text, expected",
    [("", "line 1"), ("[", "expected a list"), ('{"a": 1}', "expected a list"), ("[]", "at least one"),
     ("when,what\n1,2\n", "expected the columns"), ("node,start,end,class\n", "at least one"),
     ("node,node,start,end\n", "once each")],
)  # fmt: skip
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(tmp_path, text)[0]


def test_the_fleet_and_the_file_are_checked(tmp_path: Path) -> None:
    assert "names 2 nodes" in refused(tmp_path, GOOD, nodes=1)[0]
    assert "expected at least 1" in refused(tmp_path, GOOD, nodes=0)[0]
    with pytest.raises(StorageError):
        read_faults(tmp_path / "none", 3)
    many = refused(tmp_path, [7] * 100)
    assert len(many) == MOST_PROBLEMS + 1
    assert "80 more" in many[-1]
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_faults(tmp_path / "bytes", 3)


def test_mending_leaves_out_what_is_double_and_says_so(tmp_path: Path) -> None:
    events = [
        event("a", 1.5, "fault_start"), event("a", 1.5, "fault_start"), event("b", 1.0, "fault_start"),
        event("a", 1.7, "fault_start"), event("a", 4.0, "fault_end"), event("a", 4.5, "fault_end"),
    ]  # fmt: skip
    read = read_faults(written(tmp_path, events), 3, mend=True)
    assert read.log.start_d.tolist() == [1.0, 1.5]
    assert read.log.end_d.tolist() == [np.inf, 4.0]
    assert any("doubles left out" in note for note in read.notes)
    text = CSV + "b,9.2,9.4,NIC\nc,3.0,4.0,x\n"
    log = read_faults(written(tmp_path, text), 5, mend=True).log
    assert log.start_d.tolist() == [1.5, 2.0, 3.0, 6.0, 9.0]


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_is_refused_or_read_and_never_breaks(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(data)
    with pytest.raises((ConfigError, StorageError)):
        read_faults(path, 3)
