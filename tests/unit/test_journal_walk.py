"""Walks along a journal from its end: places, budgets, damage, segments that are gone, bodies beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from twin.catalogue import StorageError
from twin.contracts import OtherRecord
from twin.run import FOREVER_NS, OPEN, JournalQuery, JournalWalk, journal, journal_begin, journal_walk
from twin.run.journal import Chain

FRUGAL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, sizes: list[int], per_segment: int, kinds: str = "ab") -> list[tuple[int, str, int]]:
    """(number, kind, instant) of lines with bodies of these sizes; two lines to an instant."""
    chain, lines = Chain(), []
    for old in folder.glob("journal*.jsonl"):
        old.unlink()
    for seq, size in enumerate(sizes):
        kind, now_ns = kinds[seq % len(kinds)], 100 + seq // 2 * 10
        line = chain.line(OtherRecord(kind, {"text": "x" * size, "tale": '"kind":"c"'}), seq, now_ns)
        number = seq // per_segment
        last = number == (len(sizes) - 1) // per_segment
        path = folder / (OPEN if last else f"journal-{number:06d}.jsonl")
        with path.open("ab") as file:
            file.write(line + b"\n")
        lines.append((seq, kind, now_ns))
    return lines


def walk(folder: Path, query: JournalQuery, **budget: float) -> tuple[list[int], JournalWalk]:
    made = JournalWalk(folder, query, **budget)  # type: ignore[arg-type]
    return [found.entry.seq for found in made], made


@FRUGAL
@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=60), st.integers(1, 20), st.integers(60, 700),
    st.integers(80, 420), st.integers(0, 340), st.none() | st.integers(0, 70),
    st.sampled_from(["", "a", "ab", "c"]),
)  # fmt: skip
def test_pages_of_a_walk_are_the_lines_of_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], per_segment: int, block: int,
    since: int, span: int, before: int | None, kinds: str,
) -> None:  # fmt: skip
    """Whatever the sizes of lines, segments and blocks; with a budget of one block, page by page."""
    monkeypatch.setattr(journal_walk, "BLOCK_BYTES", block)
    lines = write(tmp_path, sizes, per_segment)
    until = since + span
    want = [s for s, kind, t in lines if since <= t <= until and (before is None or s < before)
            and (not kinds or kind in kinds)][::-1]  # fmt: skip
    got, last = list[int](), before
    for _ in range(3 * len(lines) + 9):
        query = JournalQuery(since, until, last, frozenset(kinds))
        page, made = walk(tmp_path, query, most_bytes=1)
        got += page
        if made.ended:
            break
        assert made.reached_seq is not None
        assert last is None or made.reached_seq < last, "each page gets somewhere"
        last = made.reached_seq
    assert got == want
    assert made.ended


def test_only_the_segments_and_blocks_of_a_place_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 lines of 1 kB in 10 segments, one in the middle is found by some heads and a few blocks."""
    monkeypatch.setattr(journal_walk, "BLOCK_BYTES", 2000)
    write(tmp_path, [1000] * 200, 20)
    made = JournalWalk(tmp_path, JournalQuery(before=95), most_bytes=10**6)
    assert next(iter(made)).entry.seq == 94
    assert 10**6 - made._room <= 2 * 2000
    made = JournalWalk(tmp_path, JournalQuery(since_ns=100 + 97 * 10), most_bytes=10**6)
    assert len([*made]) == 6
    assert made.ended
    assert 10**6 - made._room <= 5 * 2000, "it goes on to nothing that is older"


def test_a_line_that_cannot_be_read_costs_none_but_itself(tmp_path: Path) -> None:
    lines = write(tmp_path, [10] * 30, 10)
    path = tmp_path / "journal-000001.jsonl"
    text = path.read_bytes().splitlines(keepends=True)
    text[4] = b"\x00" * 40 + b"\n"
    text[6] = text[6].replace(b'"body"', b'"bode"')
    path.write_bytes(b"".join(text))
    with (tmp_path / OPEN).open("ab") as file:
        file.write(b'{"seq":30,"prev":"torn')
    got, made = walk(tmp_path, JournalQuery())
    assert got == [s for s, _, _ in lines if s not in (14, 16)][::-1]
    assert (made.bad, made.ended) == (2, True)


def test_what_was_pruned_ends_a_walk_and_the_begin_says_so(tmp_path: Path) -> None:
    write(tmp_path, [10] * 30, 10)
    (tmp_path / "journal-000000.jsonl").unlink()
    got, made = walk(tmp_path, JournalQuery())
    assert got == [*range(29, 9, -1)]
    assert (made.ended, made.begin_ns) == (True, 150)
    assert journal_begin(tmp_path) == (10, 150)
    for path in tmp_path.glob("journal*"):
        path.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        walk(tmp_path, JournalQuery())


def test_a_body_beside_the_journal_is_read_as_if_it_stood_in_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SIDE_BYTES", 100)
    chain = Chain()
    line = chain.line(OtherRecord("a", {"text": "y" * 500}), 0, 1)
    (tmp_path / OPEN).write_bytes(line + b"\n")
    (found,) = JournalWalk(tmp_path, JournalQuery(0, FOREVER_NS, kinds=frozenset("a"), needle=b"yyy"))
    assert "side" in found.entry.body, "its file is not there"
    (tmp_path / "sides").mkdir()
    for name, body in chain.sides.items():
        (tmp_path / "sides" / f"{name}.json").write_bytes(body)
    (found,) = JournalWalk(tmp_path, JournalQuery(0, FOREVER_NS, kinds=frozenset("a"), needle=b"yyy"))
    assert found.entry.body == {"text": "y" * 500}
