"""The history of withdrawn nodes from a run's journal: order, gaps, old versions, bounds, the kept score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from twin.catalogue import NS, StorageError
from twin.contracts import OtherRecord
from twin.report import JournalReader, replacement_journal as journal, rows_of, score_of
from twin.report.replacement_history import predicted, tail_of
from twin.run import OPEN, Entry
from twin.run.journal import Chain

T0 = 1_800_000_000 * NS
NODE, OTHER = "lab/h/r1/node3", "lab/h/r1/node4"
NASTY = "\x1b[31mevil\u202e"


def account(**more: Any) -> dict[str, Any]:
    return {"policy": "replacement", "account": {"node": NODE, **more}}


def gate(**more: Any) -> dict[str, Any]:
    return account(**{"what": "gate", "course": "at_once", "act_gpu_h": 10.0, "wait_gpu_h": 90.0,
                      "act_pu": 0.2,
                      "wait_pu": 0.6, "at_ns": T0, **more})  # fmt: skip


def command(index: list[int], first: str, last: str, **more: Any) -> dict[str, Any]:
    return {"control": "node.service_level", "policy": "replacement", "from": first, "to": last,
            "index": np.array(index, np.int32), "value": np.full(len(index), 3.0),
            "reason": "row remaps fail", "epoch": 1, "first_command": 1, "expires_ns": 1, "deadline_ns": 1,
            **more}  # fmt: skip


def told(kind: str, **event: Any) -> dict[str, Any]:
    return {"event": {"type": kind, "id": "x", **event}}


def write(
    folder: Path, *lines: tuple[str, int, dict[str, Any]], name: str = OPEN, chain: Chain | None = None
) -> Chain:
    """A journal of (kind, seconds after T0, body), appended to a file."""
    chain = chain or Chain()
    with (folder / name).open("ab") as file:
        for kind, at_s, body in lines:
            now_ns = 0 if kind == "manifest" else T0 + at_s * NS
            file.write(chain.line(OtherRecord(kind, body), at_s, now_ns) + b"\n")
    return chain


MANIFEST = ("manifest", -1, {"format": 1})
STORY = (
    MANIFEST,
    ("mark", 1, {"state": {}}),
    ("account", 2, account(what="phase", **{"from": "suspect", "to": "draining"}, why="a drain costs least")),
    ("account", 3, gate()),
    ("command", 4, command([3, 4], NODE, OTHER)),
    ("command", 4, {**command([0], "lab/gpu", "lab/gpu"), "control": "gpu.power_cap_w"}),
    ("account", 5, {"policy": "another", "account": {"what": "gate", "node": NODE}}),
    ("account", 6, account(what="outcome", course="at_once", failed=False, lost_gpu_h=12.0)),
    ("event", 7, told("NodeRepaired", author="ada", name=NODE, note="new HBM")),
    ("event", 8, told("NodeTested", name=NODE, began_ns=T0, ended_ns=T0 + 60 * NS, passed=False, test="burn",
                      detail="one\ntwo\nGPU 2 hangs")),
    ("event", 9, told("EntityReplaced", table="gpu", name=f"{NODE}/gpu1", serial="SN-9")),
    ("event", 10, told("NodeTested", name=OTHER, began_ns=T0, ended_ns=T0, passed=True)),
    ("event", 11, told("JobStarted", job="j", nodes=[NODE])),
    ("event", 12, told("AuthorityChanged", author="ada", policy="replacement", authority="act")),
    ("finding", 13, {"id": f"health/node/{NODE}", "severity": "warning", "title": "drain it",
                     "entities": [f"node:{NODE}"], "evidence": ["row remaps fail"],
                     "confidence_pu": 1.0, "action": "", "count": 1}),
)  # fmt: skip


def names(i: int) -> str | None:
    return f"lab/h/r1/node{i}" if 0 <= i < 18 else None


def read(folder: Path, since_ns: int = 0, node: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    found = JournalReader(folder).read(since_ns)
    return rows_of(found.entries, names, node, node is not None), found.notes


def test_what_concerns_nodes_in_order(tmp_path: Path) -> None:
    write(tmp_path, *STORY)
    rows, notes = read(tmp_path)
    assert notes == []
    assert [r["kind"] for r in rows] == ["phase", "gate", "command", "outcome", "repair", "test", "replaced",
                                         "test", "authority"]  # fmt: skip
    assert [r["at_ns"] for r in rows] == sorted(r["at_ns"] for r in rows)
    by = {r["kind"]: r for r in rows[:7]}
    assert by["phase"]["text"] == "suspect -> draining: a drain costs least"
    assert by["command"]["nodes"] == [NODE, OTHER]
    assert by["command"]["text"] == "drained: row remaps fail"
    assert by["repair"]["by"] == "ada"
    assert by["test"]["text"] == "test burn: failed after 60 s: GPU 2 hangs"
    assert by["test"]["data"]["detail"] == "one\ntwo\nGPU 2 hangs"
    assert (by["replaced"]["nodes"], by["replaced"]["data"]["serial"]) == ([NODE], "SN-9")
    mine, _ = read(tmp_path, node=NODE)
    assert [r["kind"] for r in mine][-2:] == ["authority", "finding"]
    assert [r["kind"] for r in mine].count("test") == 1
    assert mine[2]["nodes"] == [NODE]
    later, _ = read(tmp_path, T0 + 7 * NS)
    assert [r["kind"] for r in later] == ["repair", "test", "replaced", "test", "authority"]


def test_where_jobs_go_last_is_told(tmp_path: Path) -> None:
    placed = {**command([3], NODE, NODE), "control": "node.placement", "value": np.array([1.0]),
              "reason": "suspected"}  # fmt: skip
    write(tmp_path, MANIFEST, ("command", 4, placed))
    (row,), _ = read(tmp_path, node=NODE)
    assert (row["kind"], row["text"]) == ("command", "placed last: suspected")


def test_a_reader_goes_on_where_it_was_through_a_rotation(tmp_path: Path) -> None:
    chain = write(tmp_path, *STORY[:6])
    reader = JournalReader(tmp_path)
    assert len(reader.read(0).entries) == 3
    write(tmp_path, *STORY[6:9], chain=chain)
    assert [e.kind for e in reader.read(0).entries] == ["account", "account", "command", "account", "event"]
    (tmp_path / OPEN).rename(tmp_path / "journal-000000.jsonl")
    write(tmp_path, *STORY[9:], chain=chain)
    found = reader.read(0)
    assert (len(found.entries), found.notes) == (10, [])
    assert [e.seq for e in found.entries] == sorted({e.seq for e in found.entries})
    assert [e.seq for e in JournalReader(tmp_path).read(0).entries] == [e.seq for e in found.entries]
    assert reader.last_ns() == T0 + 13 * NS
    (tmp_path / "journal-000000.jsonl").unlink()  # pruned
    pruned = reader.read(0)
    assert pruned.entries[0].seq == 9
    assert "goes back no further" in pruned.notes[0]


def test_what_cannot_be_read_is_counted_and_hides_nothing_else(tmp_path: Path) -> None:
    chain = write(tmp_path, *STORY[:4])
    with (tmp_path / OPEN).open("ab") as file:
        file.write(b"no json\n" + b'{"seq":4,"prev":"00","kind":"account","policy":"replacement"\n')
        file.write(b'{"seq":5,"prev":"00","kind":"account","tick":1,"now_ns":1800000005000000000,'
                   b'"body":{"policy":"replacement","account":[]}}\n')  # fmt: skip
    chain.seq = 9
    write(tmp_path, *STORY[7:], chain=chain)
    with (tmp_path / OPEN).open("ab") as file:
        file.write(b'{"seq":17,"prev"')  # torn
    rows, notes = read(tmp_path)
    assert [r["kind"] for r in rows][:3] == ["phase", "gate", "outcome"]
    assert any("2 lines of the journal cannot be read" in n for n in notes)
    assert any("about 3 lines are missing" in n for n in notes)


def test_an_old_journal_without_accounts_and_one_of_a_later_format(tmp_path: Path) -> None:
    write(
        tmp_path,
        MANIFEST,
        ("command", 1, {k: v for k, v in command([3], NODE, NODE).items() if k != "policy"}),
    )
    rows, notes = read(tmp_path)
    assert ([r["kind"] for r in rows], notes) == (["command"], [])
    assert score_of(rows)["brier"] is None
    (tmp_path / OPEN).unlink()
    write(tmp_path, ("manifest", -1, {"format": 7}), ("account", 1, gate()))
    rows, notes = read(tmp_path)
    assert (len(rows), "format 7" in notes[0]) == (1, True)


def test_a_journal_that_was_cut_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, *STORY)
    reader = JournalReader(tmp_path)
    assert len(reader.read(0).entries) == 10
    lines = (tmp_path / OPEN).read_bytes().splitlines(keepends=True)
    (tmp_path / OPEN).write_bytes(b"".join(lines[:4]))
    assert [e.record.account["what"] for e in reader.read(0).entries] == ["phase", "gate"]


def test_no_journal_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no journal; expected the folder of a run"):
        JournalReader(tmp_path).read(0)


def test_everything_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_KEPT", 50)
    write(tmp_path, MANIFEST, *(("account", i, gate(why=f"g{i}")) for i in range(400)))
    found = JournalReader(tmp_path).read(0)
    assert len(found.entries) == 50
    assert found.entries[-1].record.account["why"] == "g399"
    assert "earlier lines on replacement were left out" in found.notes[0]
    (tmp_path / OPEN).rename(tmp_path / "journal-000000.jsonl")
    write(tmp_path, ("account", 500, gate()), chain=Chain(401, "a"))
    found = JournalReader(tmp_path).read(0, most_bytes=1000)
    assert [e.tick for e in found.entries] == [500], "the newest file is read first"
    assert "journal-000000.jsonl and what lies before it was not read" in found.notes[0]


def test_a_command_on_another_site_names_only_what_the_line_itself_names() -> None:
    entry = Entry(1, "", "command", 1, T0, json.loads(msgspec.json.encode(
        {**command([3, 4, 5], "old/a", "old/c"), "index": [3, 4, 5], "value": [3.0] * 3})))  # fmt: skip
    row = rows_of([entry], names)[0]
    assert (row["nodes"], row["count"]) == (["old/a", "old/c"], 3)
    assert rows_of([entry], names, NODE) == []
    many = command(list(range(18)), names(0) or "", names(17) or "")
    row = rows_of([Entry(1, "", "command", 1, T0, {**many, "index": {"first": 0, "n": 18}})], names)[0]
    assert (len(row["nodes"]), row["count"]) == (18, 18)


def test_text_from_outside_is_made_safe() -> None:
    entries = [
        Entry(0, "", "account", 1, T0, account(what=NASTY, why=NASTY)),
        Entry(1, "", "event", 1, T0, told("NodeTested", name=NODE, began_ns=1, ended_ns=2, passed=None,
                                          test=NASTY, detail=NASTY * 5000)),
        Entry(2, "", "event", 1, T0, told("NodeRepaired", name=NODE, author=NASTY, note=NASTY)),
    ]  # fmt: skip
    rows = rows_of(entries, names)
    assert len(rows) == 3
    said = json.dumps(rows, ensure_ascii=False)
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert len(said) < 12_000


def test_the_score_is_the_mean_square_of_what_was_predicted_of_the_course_taken() -> None:
    entries = [Entry(i, "", "account", i, T0 + i, body) for i, body in enumerate((
        gate(), account(what="outcome", course="at_once", failed=True, lost_gpu_h=20.0),
        gate(node=OTHER, course="watch"),
        account(what="outcome", node=OTHER, course="watch", failed=False, lost_gpu_h=0.0),
        gate(), account(what="outcome", failed=None, lost_gpu_h=1.0),
        gate(node="lab/open"),
    ))]  # fmt: skip
    score = score_of(rows_of(entries, names))
    assert (score["gates"], score["settled"], score["unknown"], score["scored"]) == (4, 3, 1, 2)
    assert score["brier"] == pytest.approx((0.8**2 + 0.6**2) / 2)
    assert score["predicted_pu"] == pytest.approx(0.4)
    assert score["failed_pu"] == pytest.approx(0.5)
    assert score["predicted_gpu_h"] == pytest.approx((10 + 90 + 10) / 3)
    assert score["lost_gpu_h"] == pytest.approx(7.0)
    assert predicted({"course": "watch", "wait_pu": float("nan"), "wait_gpu_h": True}) == (None, None)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20))
def test_a_brier_score_lies_between_nothing_and_one(pairs: list[tuple[float, bool]]) -> None:
    rows: list[dict[str, Any]] = []
    for chance, failed in pairs:
        rows.append({"kind": "gate", "data": {"node": NODE, "course": "at_once", "act_pu": chance}})
        rows.append({"kind": "outcome", "data": {"node": NODE, "failed": failed}})
    brier = score_of(rows)["brier"]
    assert brier == pytest.approx(np.mean([(c - f) ** 2 for c, f in pairs]))


plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
                     lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=8), s, max_size=3),
                     max_leaves=8)  # fmt: skip


@given(st.sampled_from(["account", "command", "event", "finding", "failed"]),
       st.dictionaries(st.sampled_from(["policy", "account", "control", "event", "index", "value", "reason",
                                        "entities", "id", "title", "from", "to", "severity"]),
                       plain | st.just("replacement") | st.just("node.service_level")))  # fmt: skip
def test_no_body_makes_it_fail(kind: str, body: dict[str, Any]) -> None:
    for node in (None, NODE):
        for row in rows_of([Entry(0, "", kind, 0, T0, body)], names, node, True):
            json.dumps(row)
            assert len(row["text"]) <= 400


def test_the_tail_of_an_output_is_whole_lines_from_its_end() -> None:
    text = "\n".join(f"line {i}" for i in range(3000))
    tail = tail_of(text)
    assert tail.endswith("line 2999")
    assert tail.splitlines()[0].startswith("line ")
    assert len(tail) <= 4000
    assert tail_of("") == ""
