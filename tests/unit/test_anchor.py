"""Signed heads: a journal that was edited, cut or written anew is told from one that was not."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from twin.anchor import AnchorFile, HeadSigner, JournalProof, SignedHead, make_keys, parse_head, prove
from twin.catalogue import ConfigError, ConnectorError, StorageError
from twin.cli.main import main
from twin.config import Broker, Config, Journal, Loaded, journal_notes
from twin.config.schema import Leader
from twin.contracts import AlarmRecord, PrunedSegment, UpkeepRecord
from twin.daemon import fetch_heads, journal_anchor
from twin.run import OPEN, JournalWriter, closed_segments, line_hash
from twin.run.journal_files import edges
from twin.wiring import external_file_faults

LINES, EVERY, NS = 240, 20, 10**9
PRIVATE, PUBLIC = make_keys()
SIGNER = HeadSigner.of_pem(PRIVATE, "key")
STRANGER = HeadSigner.of_pem(make_keys()[0], "key")


class SignedJournal:
    """A journal in several segments with a signed head every few lines, the last one at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heads: list[SignedHead] = []

    def write(self, signer: HeadSigner = SIGNER, text: Callable[[int], str] = str) -> None:
        """Write it, whole."""
        writer, file = JournalWriter(self.folder, durable=False, segment_bytes=9000), AnchorFile(self.folder)
        run = ""
        for number in range(LINES):
            record = AlarmRecord(what="acknowledged", id=text(number), author="ada")
            writer.append([writer.chain.line(record, number, number * NS)])
            run = run or writer.chain.head
            if (number + 1) % EVERY == 0:
                known = {"mqtt": self.heads[-1].lines} if self.heads else {}
                lines, head = writer.safe
                self.heads.append(
                    signer.sign(
                        SignedHead(run=run, lines=lines, head=head, now_ns=number * NS + 1, outside=known)
                    )
                )
                file.append(self.heads[-1])
            if writer.full:
                writer.rotate()
        writer.close()

    def prove(self, outside: SignedHead | None = None) -> JournalProof:
        """By the file beside it, and one head from outside."""
        return prove(self.folder, SIGNER.verifier, {"mqtt": [outside]} if outside else {})

    def files(self) -> list[Path]:
        return [*closed_segments(self.folder), self.folder / OPEN]

    def lines(self) -> list[bytes]:
        return [line for path in self.files() for line in path.read_bytes().splitlines()]

    def put_lines(self, lines: list[bytes]) -> None:
        """The same lines per file as now, as far as they go."""
        for path in self.files():
            count = len(path.read_bytes().splitlines())
            mine, lines = lines[:count], lines[count:]
            path.write_bytes(b"".join(line + b"\n" for line in mine))

    def chain(self, lines: list[bytes]) -> list[bytes]:
        """The lines with the chain made anew through all of them."""
        out, head = [], "0" * 32
        for seq, line in enumerate(lines):
            tree = json.loads(line) | {"seq": seq, "prev": head}
            out.append(msgspec.json.encode(tree))
            head = line_hash(out[-1])
        return out

    def sign_anew(self, signer: HeadSigner) -> None:
        """All heads beside it, for what the journal is now."""
        lines, file = self.lines(), self.folder / "anchors.jsonl"
        heads = []
        for old in self.heads:
            if old.lines <= len(lines):
                fresh = msgspec.structs.replace(
                    old, head=line_hash(lines[old.lines - 1]), run=line_hash(lines[0])
                )
                heads.append(signer.sign(fresh).line)
        file.write_bytes(b"".join(head + b"\n" for head in heads))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> SignedJournal:
    journal = SignedJournal(tmp_path_factory.mktemp("signed") / "run")
    journal.write()
    assert len(journal.files()) >= 4
    return journal


@pytest.fixture
def journal(written: SignedJournal, tmp_path: Path) -> SignedJournal:
    """A copy to tamper with."""
    out = SignedJournal(tmp_path / "run")
    shutil.copytree(written.folder, out.folder)
    out.heads = list(written.heads)
    return out


def test_a_whole_journal_is_proven_to_its_last_head(journal: SignedJournal) -> None:
    proof = journal.prove(journal.heads[-1])
    assert (proof.is_ok, proof.lines, proof.end, proof.by) == (True, LINES, LINES, "file")
    assert proof.notes == []
    # Lines behind the last head are chained, and no more.
    writer = JournalWriter(journal.folder, durable=False)
    for _ in range(7):
        record = AlarmRecord(what="acknowledged", id="x", author="ada")
        writer.append([writer.chain.line(record, LINES, LINES * NS)])
    writer.close()
    proof = journal.prove(journal.heads[-2])
    assert (proof.is_ok, proof.lines, proof.end) == (True, LINES, LINES + 7)
    assert f"{EVERY} lines are signed after it" in proof.notes[0]


def edit(journal: SignedJournal, rng: random.Random) -> None:
    """One byte of one line."""
    lines = journal.lines()
    at = rng.randrange(len(lines))
    line = bytearray(lines[at])
    place = rng.randrange(len(line))
    line[place] = rng.choice([b for b in b"0123456789abcxyz" if b != line[place]])
    journal.put_lines([*lines[:at], bytes(line), *lines[at + 1 :]])


def rewrite(journal: SignedJournal, rng: random.Random) -> None:
    """A line says something else, and all behind it are chained anew."""
    lines = journal.lines()
    at = rng.randrange(len(lines))
    tree = json.loads(lines[at])
    tree["body"]["author"] = "eve"
    journal.put_lines(journal.chain([*lines[:at], json.dumps(tree).encode(), *lines[at + 1 :]]))


def drop(journal: SignedJournal, rng: random.Random) -> None:
    """Some lines are gone from the middle, and the rest is numbered and chained anew."""
    lines = journal.lines()
    at = rng.randrange(len(lines) - 10)
    journal.put_lines(journal.chain(lines[:at] + lines[at + rng.randrange(1, 10) :]))


def cut_tail(journal: SignedJournal, rng: random.Random) -> None:
    """The last lines are gone."""
    lines = journal.lines()
    journal.put_lines(lines[: len(lines) - rng.randrange(1, len(lines))])


def cut_segment(journal: SignedJournal, rng: random.Random) -> None:
    """A whole file is gone: the first, one between, or the last."""
    rng.choice(journal.files()).unlink()


def cut_all_behind(journal: SignedJournal, rng: random.Random) -> None:
    """The end is gone, from the journal and from the heads beside it."""
    keep = rng.randrange(1, len(journal.heads))
    journal.put_lines(journal.lines()[: journal.heads[keep - 1].lines])
    kept = b"".join(head.line + b"\n" for head in journal.heads[:keep])
    (journal.folder / "anchors.jsonl").write_bytes(kept)


def forge(journal: SignedJournal, rng: random.Random) -> None:
    """Rewritten, with heads that fit, signed with another key."""
    rewrite(journal, rng)
    journal.sign_anew(STRANGER)


def unsign(journal: SignedJournal, rng: random.Random) -> None:
    """Rewritten, and the heads beside it taken away."""
    rewrite(journal, rng)
    (journal.folder / "anchors.jsonl").unlink()


def replace_run(journal: SignedJournal, rng: random.Random) -> None:
    """Another journal in its place, which was never this one."""
    shutil.rmtree(journal.folder)
    journal.heads = []
    journal.write(STRANGER, lambda number: f"{number + rng.randrange(1, 9)}")


WITHOUT_KEY = (
    edit, rewrite, drop, cut_tail, cut_segment, cut_all_behind, forge, unsign, replace_run,
)  # fmt: skip
# By the file alone a cut of both is whole as far as it goes.
OUTSIDE_ONLY = (cut_all_behind,)


@pytest.mark.parametrize("seed", range(100))
def test_each_of_a_hundred_changes_is_found(journal: SignedJournal, seed: int) -> None:
    rng = random.Random(seed)
    outside, change = journal.heads[-1], WITHOUT_KEY[seed % len(WITHOUT_KEY)]
    change(journal, rng)
    proof = journal.prove(outside)
    assert not proof.is_ok, change.__name__
    assert proof.faults or proof.verdict.fault
    if change not in OUTSIDE_ONLY:
        assert not journal.prove().is_ok, change.__name__


def rewrite_signed(journal: SignedJournal, rng: random.Random) -> None:
    rewrite(journal, rng)
    journal.sign_anew(SIGNER)


def drop_signed(journal: SignedJournal, rng: random.Random) -> None:
    drop(journal, rng)
    journal.sign_anew(SIGNER)


def cut_signed(journal: SignedJournal, rng: random.Random) -> None:
    cut_tail(journal, rng)
    journal.sign_anew(SIGNER)


@pytest.mark.parametrize("seed", range(30))
def test_with_a_stolen_key_the_head_outside_tells_of_all_before_it(journal: SignedJournal, seed: int) -> None:
    change = (rewrite_signed, drop_signed, cut_signed)[seed % 3]
    outside = journal.heads[-1]
    change(journal, random.Random(seed))
    beside = journal.prove()  # all fits: the key signs anything
    assert beside.is_ok or beside.end < EVERY
    assert not journal.prove(outside).is_ok


def test_the_fault_names_the_lines_between_two_heads(journal: SignedJournal) -> None:
    lines = journal.lines()
    tree = json.loads(lines[50])
    tree["body"]["author"] = "eve"
    journal.put_lines(journal.chain([*lines[:50], json.dumps(tree).encode(), *lines[51:]]))
    proof = journal.prove()
    assert proof.lines == 40
    assert proof.faults == [
        "line 41 or one behind it, up to line 60, is not as it was when the head of line 60 was signed at "
        "1970-01-01 00:00:59, in anchors.jsonl"
    ]


def test_an_old_head_that_was_put_back_outside_is_found(journal: SignedJournal) -> None:
    proof = journal.prove(journal.heads[3])
    assert "an old head was put back" in proof.faults[0]
    assert journal.prove(journal.heads[-2]).is_ok  # the last acknowledged one: away since then


def test_heads_of_other_runs_outside_accuse_nobody_unless_ours_is_not_there(journal: SignedJournal) -> None:
    other = SIGNER.sign(msgspec.structs.replace(journal.heads[-1], run="0" * 32, lines=9 * LINES))
    verifier = SIGNER.verifier
    assert prove(journal.folder, verifier, {"mqtt": [other, journal.heads[-1]]}).is_ok
    proof = prove(journal.folder, verifier, {"mqtt": [other]})
    assert "mqtt: holds no signed head of this journal" in proof.faults[0]
    assert f"it holds line {9 * LINES:,}" in proof.faults[0]


def test_what_was_pruned_by_the_journal_s_own_word_is_no_cut(journal: SignedJournal) -> None:
    """And only that: the next segment may not go with it."""
    first, second, *_ = closed_segments(journal.folder)
    begun, last, head = edges(first)
    writer = JournalWriter(journal.folder, durable=False)
    gone = PrunedSegment(first.name, begun, last, head, first.stat().st_size)
    writer.append([writer.chain.line(UpkeepRecord(pruned=(gone,)), LINES, LINES * NS)])
    writer.close()
    lines, newest = writer.safe
    old = journal.heads[-1]
    signed = SIGNER.sign(SignedHead(run=old.run, lines=lines, head=newest, now_ns=old.now_ns + NS))
    AnchorFile(journal.folder).append(signed)
    first.unlink()
    proof = journal.prove(signed)
    assert (proof.is_ok, proof.lines, proof.end) == (True, LINES + 1, LINES + 1)
    (journal.folder / "anchors.jsonl").unlink()  # the run cannot be told any more; its lines can
    assert journal.prove(signed).is_ok
    second.unlink()
    assert not journal.prove(signed).is_ok


def test_the_check_of_a_configuration_tells_of_a_key_that_is_none(tmp_path: Path) -> None:
    for text, fault in ((PRIVATE, ""), (PUBLIC, "Ed25519 private key"), (None, "is not there")):
        key = tmp_path / "key"
        key.unlink(missing_ok=True)
        if text is not None:
            key.write_text(text)
            key.chmod(0o600)
        config = Config(site="s", broker="embedded", api=None, journal=Journal(sign_key_file="key"))
        faults, _ = external_file_faults(Loaded(config, tmp_path / "racktwin.yaml"))
        assert bool(faults) == bool(fault)
        assert all(fault in text and "sign_key_file" in text for text in faults)


def test_places_outside_that_are_not_used_are_told(tmp_path: Path) -> None:
    config = Config(site="s", broker=Broker(host="b"), leader=Leader(endpoints=["http://e"]))
    assert journal_notes(config) == []
    signed = msgspec.structs.replace(config, journal=Journal(sign_key_file="k"))
    assert "mqtt and etcd" in journal_notes(signed)[0]
    signed = msgspec.structs.replace(config, journal=Journal(sign_key_file="k", anchor=["mqtt"]))
    assert "etcd" in journal_notes(signed)[0]
    assert "mqtt" not in journal_notes(signed)[0]


def test_heads_beside_the_journal_in_another_order_are_found(journal: SignedJournal) -> None:
    swapped = [*journal.heads[:4], journal.heads[2], *journal.heads[4:]]
    (journal.folder / "anchors.jsonl").write_bytes(b"".join(h.line + b"\n" for h in swapped))
    assert "expected them in order" in journal.prove().faults[0]


def test_a_changed_body_beside_the_journal_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.run.journal.SIDE_BYTES", 30)
    journal = SignedJournal(tmp_path / "run")
    journal.write()
    assert journal.prove().is_ok
    side = next((journal.folder / "sides").iterdir())
    side.write_bytes(side.read_bytes().replace(b"ada", b"eve"))
    assert "was changed" in journal.prove().faults[0]


@pytest.mark.parametrize("name", ["\0", "..", "x" * 300, "pipe"])
def test_a_body_that_is_no_file_of_this_folder_is_a_fault_and_holds_up_nothing(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "sides").mkdir()
    os.mkfifo(tmp_path / "sides" / "pipe.json")
    line = {"seq": 0, "prev": "0" * 32, "kind": "manifest", "tick": 0, "now_ns": 1}
    (tmp_path / OPEN).write_text(json.dumps(line | {"body": {"side": name, "bytes": 5}}) + "\n")
    assert "is missing or was changed" in prove(tmp_path, SIGNER.verifier).faults[0]


def test_a_broker_that_does_not_answer_is_no_broker_without_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a start would replace the evidence outside by a head of what it finds."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(journal_anchor.MqttLink, "run", never)
    monkeypatch.setattr(journal_anchor, "ANSWER_S", 0.01)
    loaded = Loaded(Config(site="s", broker=Broker(host="b")), tmp_path / "racktwin.yaml")
    with pytest.raises(ConnectorError, match="no signed head came"):
        asyncio.run(fetch_heads(loaded, "lab", "mqtt"))


def test_a_torn_line_of_heads_is_cut_off_and_the_oldest_go(tmp_path: Path) -> None:
    file = AnchorFile(tmp_path, most=5)
    heads = [SIGNER.sign(SignedHead(run="r", lines=n, head="h", now_ns=n)) for n in range(1, 30)]
    for head in heads[:3]:
        file.append(head)
    with file.path.open("ab") as raw:
        raw.write(heads[3].line[:40])
    again = AnchorFile(tmp_path, most=5)
    for head in heads[4:]:
        again.append(head)
    found = AnchorFile(tmp_path).heads()
    assert found[-1] == heads[-1]
    assert 5 <= len(found) <= 11
    assert found == heads[-len(found) :]


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"run":"r","lines":0,"head":"h","now_ns":1}',
                                  b'{"run":"r","lines":-1,"head":"h","now_ns":1}', b"[" * 5000])  # fmt: skip
def test_what_is_no_head_is_refused(data: bytes) -> None:
    with pytest.raises(StorageError, match="not a signed head"):
        parse_head(data)


def test_a_key_that_is_none_is_refused() -> None:
    for text in ("", "x", PUBLIC):
        with pytest.raises(ConfigError, match="Ed25519 private key"):
            HeadSigner.of_pem(text, "key")


def test_the_commands_make_a_key_and_prove(
    journal: SignedJournal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["journal", "key", "--out", str(tmp_path / "journal.key")]) == 0
    assert (tmp_path / "journal.key").stat().st_mode & 0o777 == 0o600
    assert HeadSigner.of_pem((tmp_path / "journal.key").read_text(), "key")
    assert main(["journal", "key", "--out", str(tmp_path / "journal.key")]) != 0
    (tmp_path / "own.pub").write_text(PUBLIC)
    (tmp_path / "head").write_bytes(journal.heads[-1].line + b"\n")
    verify = ["journal", "verify", str(journal.folder), "--key", str(tmp_path / "own.pub")]
    capsys.readouterr()
    assert main([*verify, "--anchor", str(tmp_path / "head")]) == 0
    assert f"proven up to line {LINES}" in capsys.readouterr().out
    cut_all_behind(journal, random.Random(1))
    assert main([*verify, "--anchor", str(tmp_path / "head"), "--format", "json"]) == 1
    assert "its end was cut" in json.loads(capsys.readouterr().out)["faults"][0]
    assert main(["journal", "verify", str(journal.folder), "--key", str(tmp_path / "journal.key.pub")]) == 1


def test_garbage_beside_the_heads_hides_none_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head, payloads = SignedHead(run="r", lines=3, head="h", now_ns=1), [b"\xff{", b'{"run": 1}']

    async def held(*_: object) -> list[bytes]:
        return payloads

    monkeypatch.setattr(journal_anchor, "_from_etcd", held)
    loaded = Loaded(Config(site="s", broker=Broker(host="b")), tmp_path / "racktwin.yaml")
    with pytest.raises(ConnectorError, match="etcd: not a signed head"):
        asyncio.run(fetch_heads(loaded, "lab", "etcd"))
    payloads.insert(1, head.line)
    assert asyncio.run(fetch_heads(loaded, "lab", "etcd")) == [head]
