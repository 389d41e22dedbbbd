"""Capture files: every row is a message or a reason, whatever stands in it."""

from __future__ import annotations

import base64
import gzip
import io
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

import pytest

from connectors.files import BadRow, encode_row, open_bytes, read_capture
from connectors.files.capture import MAX_LINE_BYTES, _json_line, _read, duration_ns, read_csv
from twin.catalogue import START_NS
from twin.telemetry import Message

HEADER = b"offset,topic,payload\n"


def read_jsonl(lines: Iterable[bytes]) -> list[Message | BadRow]:
    return list(_read(lines, START_NS, _json_line))


def csv_rows(text: bytes) -> list[Message | BadRow]:
    return list(read_csv(io.BytesIO(HEADER + text)))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0", 0),
        ("0s", 0),
        ("3.4731ms", 3_473_100),
        ("1.0705111s", 1_070_511_100),
        ("1m39.3675441s", 99_367_544_100),
        ("1h2m3s", 3_723 * 10**9),
        ("1h0m0.5s", 3_600_500_000_000),
        ("7us", 7_000),
        ("1.5µs", 1_500),
        ("2μs", 2_000),
        ("9ns", 9),
        ("0.1234567891234s", 123_456_789),
    ],
)
def test_go_durations_are_read_exactly(text: str, expected: int) -> None:
    assert duration_ns(text) == expected


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-1s", "1 s", "1d", "1.s", "nan", "1e3s", "99999999h", "1s" * 60]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="offset"):
        duration_ns(text)


def test_a_row_becomes_a_message_with_its_timestamp() -> None:
    rows = csv_rows(b'1.5s,a/b,"{""value"":1,""timestamp"":{{timestamp_ms}}}"\n')
    t_ns = START_NS + 1_500_000_000
    assert rows == [Message(t_ns, "a/b", b'{"value":1,"timestamp":%d}' % (t_ns // 10**6))]
    late = list(read_csv([b"0s,t,{{timestamp_ms}}\n"], start_ns=7_000_000_000))
    assert late == [Message(7_000_000_000, "t", b"7000")]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"0s,topic", "expected 3 fields"),
        (b"0s,a,b,c", "found more"),
        (b"soon,a,b", "expected a duration"),
        (b"0s,,b", "topic is empty"),
        (b'0s,a,"half', "unclosed quote"),
        (b'0s,a,"x"y', "unclosed quote"),
        (b"0s,\xff\xfe,b", "not UTF-8"),
        (b"\xff,a,b", "not UTF-8"),
        (b"\0,a,b", "expected a duration"),
    ],
)
def test_a_faulty_row_is_reported_and_the_next_is_read(line: bytes, reason: str) -> None:
    bad, good = csv_rows(line + b'\n0s,t,"{}"\n')
    assert isinstance(bad, BadRow)
    assert bad.line == 2
    assert reason in bad.reason
    assert good == Message(START_NS, "t", b"{}")


def test_a_payload_may_hold_any_bytes_and_quotes() -> None:
    assert csv_rows(b'0s,t,"\xff""\0,"\r\n') == [Message(START_NS, "t", b'\xff"\0,')]


@pytest.mark.parametrize("cut", [b'0s,t,"{""value"":12', b"0s,t,12", b"0s,t", b"0"])
def test_a_half_written_last_line_is_reported(cut: bytes) -> None:
    first, last = csv_rows(b'0s,t,"{}"\n' + cut)
    assert isinstance(first, Message)
    assert isinstance(last, BadRow)
    assert last.line == 3


def test_a_last_line_with_a_closing_quote_is_whole() -> None:
    assert csv_rows(b'0s,t,"12"') == [Message(START_NS, "t", b"12")]


@pytest.mark.parametrize("extra", [1, 5 * MAX_LINE_BYTES])
def test_an_overlong_line_costs_one_row(extra: int) -> None:
    rows = csv_rows(b"0s,t," + b"x" * (MAX_LINE_BYTES + extra) + b'\n0s,t,"{}"\n')
    assert [type(r) for r in rows] == [BadRow, Message]
    assert rows[0].line == 2  # type: ignore[union-attr]
    longest = csv_rows(b"0s,t," + b"x" * (MAX_LINE_BYTES - 5) + b"\n")
    assert isinstance(longest[0], Message)
    assert [type(r) for r in read_csv(iter([b"0s,t," + b"x" * (MAX_LINE_BYTES + extra)]))] == [BadRow]


def test_json_lines() -> None:
    rows = [
        {"offset_s": 0.25, "topic": "a", "payload": '{"timestamp":{{timestamp_ms}}}'},
        {"offset_s": 1, "topic": "b", "payload": {"value": 1}},
        {"offset_s": 2, "topic": "c", "payload": None},
        {"offset_s": 3, "topic": "d", "payload_base64": base64.b64encode(b"\x00\xff").decode()},
    ]
    found = list(read_jsonl([json.dumps(r).encode() + b"\n" for r in rows]))
    assert [m.payload for m in found if isinstance(m, Message)] == [
        b'{"timestamp":%d}' % (START_NS // 10**6 + 250),
        b'{"value": 1}',
        b"",
        b"\x00\xff",
    ]
    assert found[0].t_ns == START_NS + 250_000_000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"offset_s":-1,"topic":"a","payload":""}',
        b'{"offset_s":1e300,"topic":"a","payload":""}',
        b'{"offset_s":NaN,"topic":"a","payload":""}',
        b'{"offset_s":1,"topic":"","payload":""}',
        b'{"offset_s":1,"topic":"a"}',
        b'{"offset_s":1,"topic":"a","payload_base64":"*"}',
        b'{"offset_s":1,"topic":"a","payload":' + b"[" * 100_000,
        b'{"offset_s":1,"topic":"a","payload":"\\ud800"}',
        b"\xff\xfe",
    ],
)
def test_a_faulty_json_line_is_reported(line: bytes) -> None:
    assert [type(r) for r in read_jsonl([line, b'{"offset_s":1,"topic":"a","payload":"x"}'])] == [
        BadRow,
        Message,
    ]


def test_packed_files_and_torn_ones(tmp_path: Path) -> None:
    text = HEADER + b'0s,t,"{}"\n' * 5000
    for name, data in (("a.csv", text), ("a.csv.gz", gzip.compress(text)), ("a.csv.xz", lzma.compress(text))):
        (tmp_path / name).write_bytes(data)
        assert len(list(read_capture(tmp_path / name))) == 5000
    for name, data in (("b.csv.gz", gzip.compress(text)), ("b.csv.xz", lzma.compress(text))):
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        rows = list(read_capture(tmp_path / name))
        assert isinstance(rows[-1], BadRow)
        assert "the rest of the file cannot be read" in rows[-1].reason
    (tmp_path / "c.csv.gz").write_bytes(b"not gzip at all")
    assert [type(r) for r in read_capture(tmp_path / "c.csv.gz")] == [BadRow]
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"offset_s":0,"topic":"t","payload":"x"}\n'))
    assert [type(r) for r in read_capture(tmp_path / "d.jsonl.gz")] == [Message]
    with open_bytes(tmp_path / "a.csv") as stream:
        assert stream.readline() == HEADER


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"12",
        b"null",
        b'"text"',
        b'{"value":1, "timestamp": {{timestamp_ms}}}',
        b'{"value": 1.50,\t"a":[1,{"b":null}]}',
        b'{"a":\n1}',
        b'{"a":1}\n',
        b"{no json}",
        b"{" * 2000 + b"}" * 2000,
        "Kühlung °C\r\n".encode(),
        bytes(range(256)),
        b"\x82\xa4t_ns\x01",
        b'{"a":"\xff"}',
        b"{{timestamp_ms}}",
    ],
)
def test_a_written_row_is_read_back_as_it_was(payload: bytes) -> None:
    message = Message(1_790_000_000_123_456_789, "a/ü/{{timestamp_ms}}", payload)
    line = encode_row(message, message.t_ns - 1_500_000_000)
    assert line.count(b"\n") == 1
    assert json.loads(line)["offset_s"] == 1.5
    assert list(read_jsonl(io.BytesIO(line))) == [message]


def test_an_absurd_instant_is_a_bad_row() -> None:
    (row,) = read_jsonl([b'{"offset_s":0,"t_ns":-1,"topic":"a","payload":"x"}\n'])
    assert isinstance(row, BadRow)
    assert "t_ns" in row.reason
