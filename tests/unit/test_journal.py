"""The journal: the chain finds whatever was done to it, columns come back, a divergence is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.catalogue import StorageError
from twin.contracts import Decision, OtherRecord, column
from twin.run import JournalWriter, journal, journal_lines, verify_journal
from twin.run.journal import GENESIS, Chain, first_difference, line_hash, verify

LINES = 8


def lines_of(number: int = LINES) -> list[bytes]:
    chain = Chain()
    return [
        chain.line(OtherRecord("finding", {"n": i, "text": f"line {i}"}), i // 2, 10**18 + i)
        for i in range(number)
    ]


def starts_of(lines: list[bytes]) -> list[int]:
    return [sum(len(x) + 1 for x in lines[:i]) for i in range(len(lines))]


def test_an_intact_chain() -> None:
    lines = lines_of()
    verdict = verify(lines)
    assert (verdict.lines, verdict.head, verdict.fault, verdict.line_no, verdict.position) == (
        LINES, line_hash(lines[-1]), None, 0, -1)  # fmt: skip
    assert verify([]).head == GENESIS
    entry = msgspec.json.decode(lines[3])
    assert list(entry) == ["seq", "prev", "kind", "tick", "now_ns", "body"]
    assert entry["prev"] == line_hash(lines[2])


# Where the chain breaks, the line before the break may be the forged one: it is in doubt, and not kept.


@pytest.mark.parametrize("k", range(LINES))
def test_a_removed_a_doubled_an_inserted_line(k: int) -> None:
    lines = lines_of()
    starts = starts_of(lines)
    if k < LINES - 1:  # a chain cannot miss what was cut off its end
        verdict = verify(lines[:k] + lines[k + 1 :])
        doubt = max(k - 1, 0)
        assert (verdict.line_no, verdict.position, verdict.lines) == (doubt + 1, starts[doubt], doubt)
    verdict = verify([*lines[: k + 1], *lines[k:]])
    assert (verdict.line_no, verdict.lines) == (k + 1, k)
    assert "the chain breaks" in (verdict.fault or "")
    forged = Chain(k, line_hash(lines[k - 1]) if k else GENESIS).line(OtherRecord("finding", {"n": -1}), 0, 0)
    verdict = verify([*lines[:k], forged, *lines[k:]])  # it fits what is before, not what is behind
    assert (verdict.line_no, verdict.position) == (k + 1, starts[k])


@given(st.permutations(range(LINES)))
def test_another_order(order: list[int]) -> None:
    lines = lines_of()
    verdict = verify([lines[i] for i in order])
    broken = next((i for i, at in enumerate(order) if at != i), LINES)
    kept = LINES if broken == LINES else max(broken - 1, 0)
    assert verdict.lines == kept
    assert (verdict.fault is None) == (kept == LINES)
    if verdict.fault:
        assert (verdict.line_no, verdict.position) == (kept + 1, starts_of(lines)[kept])


def test_any_flipped_bit_but_in_the_last_line() -> None:
    lines = lines_of()
    starts = starts_of(lines)
    for k in range(LINES - 1):
        for place in range(len(lines[k])):
            for bit in range(8):
                bad = bytearray(lines[k])
                bad[place] ^= 1 << bit
                verdict = verify([*lines[:k], bytes(bad), *lines[k + 1 :]])
                assert verdict.fault
                assert verdict.lines in (max(k - 1, 0), k)  # the flipped line is never called good
                assert verdict.line_no == verdict.lines + 1
                assert verdict.position == starts[verdict.lines]


@pytest.mark.parametrize("line", [
    b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"seq":0}', b"[" * 100_000, b'{"a":' * 100_000, b"nonsense",
    b'{"seq":0,"prev":"\xff","kind":"x","tick":0,"now_ns":0,"body":{}}',
])  # fmt: skip
def test_what_is_no_line(line: bytes) -> None:
    good = lines_of(1)
    verdict = verify([*good, line])
    assert (verdict.lines, verdict.line_no, verdict.position) == (1, 2, len(good[0]) + 1)
    assert "not a journal line" in (verdict.fault or "")


def test_a_first_line_that_is_not_the_first() -> None:
    verdict = verify([Chain(7, GENESIS).line(OtherRecord("x", {}), 0, 0)])
    assert (verdict.fault, verdict.lines) == ("seq is 7, expected 0", 0)


def decision(tick: int, *bodies: dict[str, Any]) -> Decision:
    records: Any = tuple(OtherRecord(b["kind"], {k: v for k, v in b.items() if k != "kind"}) for b in bodies)
    return Decision(tick, tick * 10**9, (), (), (), (), records, {})


def test_a_journal_goes_on_where_it_ended(tmp_path: Path) -> None:
    heads = []
    for tick in range(3):
        writer = JournalWriter(tmp_path, durable=tick != 1)
        writer.write(decision(tick, {"kind": "a", "x": np.arange(100)}, {"kind": "b"}))
        writer.append([])
        heads.append(writer.chain.head)
        writer.close()
    verdict = verify_journal(tmp_path / "journal.jsonl")
    assert (verdict.fault, verdict.lines, verdict.head) == (None, 6, heads[-1])


def test_a_tick_is_in_the_file_before_append_returns(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    for tick in range(3):
        writer.write(decision(tick, {"kind": "a"}))
        assert len(list(journal_lines(writer.path))) == tick + 1
    writer.close()


@pytest.mark.parametrize("fault", ["torn", "changed", "half a line removed", "binary"])
def test_a_broken_journal_is_not_continued(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "journal.jsonl"
    data = b"".join(x + b"\n" for x in lines_of())
    at = starts_of(lines_of())
    broken, line_no, position = {
        "torn": (data[:-5], LINES, at[-1]),
        "changed": (data.replace(b"line 3", b"line 4"), 4, at[3]),
        "half a line removed": (data[: at[2] + 9] + data[at[3] :], 3, at[2]),
        "binary": (data[: at[5]] + b"\xff\x00" + data[at[5] :], 6, at[5]),
    }[fault]
    path.write_bytes(broken)
    with pytest.raises(
        StorageError, match=rf"journal\.jsonl line {line_no}, byte {position}: .*expected an intact"
    ):
        JournalWriter(tmp_path)
    assert path.read_bytes() == broken
    path.write_bytes(broken[:position])  # cut there, it goes on
    writer = JournalWriter(tmp_path)
    writer.write(decision(9, {"kind": "a"}))
    writer.close()
    assert verify_journal(path).lines == line_no


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_cut_anywhere_only_whole_lines_count(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    lines = lines_of()
    data = b"".join(x + b"\n" for x in lines)
    cut = random.Random(seed).randint(0, len(data))
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    verdict = verify_journal(path)
    assert verdict.lines == whole
    ends = cut == sum(len(x) + 1 for x in lines[:whole])
    assert verdict.fault == (None if ends else "the last line is torn")
    assert verdict.position == (-1 if ends else starts_of(lines)[whole])


def test_a_large_body_goes_beside(tmp_path: Path) -> None:
    big = np.arange(600_000, dtype=np.float32)
    writer = JournalWriter(tmp_path)
    writer.write(decision(1, {"kind": "proposals", "want": big}, {"kind": "small", "want": big[:10]}))
    writer.close()
    first, second = (msgspec.json.decode(x) for x in journal_lines(writer.path))
    side = (tmp_path / "sides" / f"{first['body']['side']}.json").read_bytes()
    assert line_hash(side) == first["body"]["side"]
    assert first["body"]["bytes"] == len(side) > journal.SIDE_BYTES
    assert np.array_equal(column(msgspec.json.decode(side)["want"]), big)
    assert second["body"] == {"want": list(range(10))}
    assert len(list((tmp_path / "sides").iterdir())) == 1
    assert writer.path.stat().st_size < 1000
    assert writer.chain.sides == {}


def test_a_full_disk_raises_and_nothing_is_taken_for_written(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.write(decision(1, {"kind": "a"}))
    writer._file.close()
    writer._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(StorageError, match="cannot be written"):
        writer.write(decision(2, {"kind": "b"}))
    assert verify_journal(writer.path).lines == 1
    with pytest.raises(OSError, match="No space left"):
        writer._file.close()


@pytest.mark.parametrize("n", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("kind", ["f4", "f8", "i4", "i8", "u1", "b1", ">f4", ">i8"])
def test_columns_come_back(n: int, kind: str) -> None:
    rng = np.random.default_rng(n)
    values = rng.integers(0, 2, n).astype(kind) if kind == "b1" else rng.integers(0, 200, n).astype(kind)
    if "f" in kind and n:
        values[::3] = np.nan
        values[n // 2] = 0.1
    body = msgspec.json.decode(Chain().line(OtherRecord("x", {"c": values}), 0, 0))["body"]
    assert isinstance(body["c"], dict if n > 64 else list)
    back = column(body["c"])
    assert np.array_equal(back, values, equal_nan="f" in kind)
    if n > 64:
        assert back.dtype == values.dtype.newbyteorder("<")


def test_no_bound_is_not_the_same_as_no_value() -> None:
    lo = np.array([-np.inf, np.nan, 1.0])
    body = msgspec.json.decode(Chain().line(OtherRecord("x", {"c": lo}), 0, 0))["body"]
    assert np.array_equal(column(body["c"]), lo, equal_nan=True)
    tick, field, was, now = difference({"c": lo}, {"c": np.array([-np.inf, np.inf, 1.0])})
    assert (tick, field, now) == (7, "command.c[1]", np.inf)
    assert was != was


def test_strided_columns_and_scalars() -> None:
    grid = np.arange(400, dtype=np.int32).reshape(100, 4)
    body = msgspec.json.decode(
        Chain().line(OtherRecord("x", {"c": grid[:, 1], "s": np.float32(0.5), "i": np.int64(7)}), 0, 0)
    )["body"]
    assert column(body["c"]).tolist() == grid[:, 1].tolist()
    assert (body["s"], body["i"]) == (0.5, 7)
    with pytest.raises(TypeError, match="cannot be journaled"):
        Chain().line(OtherRecord("x", {"c": object()}), 0, 0)


def difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[int, str, Any, Any]:
    d = first_difference(
        Chain().line(OtherRecord("command", a), 7, 0), Chain().line(OtherRecord("command", b), 7, 0)
    )
    return d.tick, d.field, d.recorded, d.replayed


def test_the_first_difference_is_named() -> None:
    assert difference({"x": 1, "y": [1, {"z": 2}]}, {"x": 1, "y": [1, {"z": 3}]}) == (
        7,
        "command.y[1].z",
        2,
        3,
    )
    assert difference({"x": [1, 2]}, {"x": [1, 2, 3]}) == (7, "command.x.length", 2, 3)
    assert difference({"x": 1}, {"x": 1, "y": 5}) == (7, "command.y", "absent", 5)
    assert difference({"x": None}, {}) == (7, "command.x", None, "absent")
    assert difference({"x": True}, {"x": 1}) == (7, "command.x", True, 1)
    assert difference({"x": [1]}, {"x": {"a": 1}}) == (7, "command.x", [1], {"a": 1})


@pytest.mark.parametrize("n", [60, 100])
def test_nan_in_both_is_no_difference(n: int) -> None:
    a = np.arange(n, dtype=np.float32)
    a[:50] = np.nan
    b = a.copy()
    b[57] = 0.5
    assert difference({"want": a}, {"want": b}) == (7, "command.want[57]", 57.0, 0.5)
    b = a.copy()
    b[3] = 1.0
    tick, field, was, now = difference({"want": a}, {"want": b})
    assert (tick, field, now) == (7, "command.want[3]", 1.0)
    assert was is None or was != was


def test_lines_that_differ_beside_the_body() -> None:
    line = Chain().line(OtherRecord("command", {"x": 1}), 7, 5)
    assert first_difference(line, None).replayed is None
    later = first_difference(line, Chain().line(OtherRecord("command", {"x": 1}), 9, 5))
    assert (later.tick, later.field) == (7, "kind")
    other = first_difference(line, Chain().line(OtherRecord("advice", {"x": 1}), 7, 5))
    assert (other.tick, other.field, other.replayed) == (7, "kind", "advice at tick 7")
    time = first_difference(line, Chain().line(OtherRecord("command", {"x": 1}), 7, 6))
    assert (time.field, time.recorded, time.replayed) == ("now_ns", 5, 6)
    prev = first_difference(line, Chain(0, "f" * 32).line(OtherRecord("command", {"x": 1}), 7, 5))
    assert (prev.field, prev.recorded) == ("prev", GENESIS)
