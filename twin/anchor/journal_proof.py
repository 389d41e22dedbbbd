"""Journal proof: verifies a journal against its signed heads, and states the last line that each one proves.

A signed head covers all lines before it. Somebody with write access to the run folder cannot change a head
that is kept outside, even with the signing key.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twin.anchor.anchor_file import ANCHORS, AnchorFile
from twin.anchor.signed_head import HeadVerifier, SignedHead
from twin.catalogue import StorageError, utc
from twin.run import OPEN, Entry, JournalVerdict, line_hash, verify_journal

FILE = "file"  # the anchor beside the journal


@dataclass
class JournalProof:
    """The walk along the chain, and what signed heads say of it.

    The journal is proven up to line `lines` at `now_ns` by the anchor `by`. `end` is the number of its last
    line. `faults` contradict, `notes` do not.
    """

    verdict: JournalVerdict
    end: int
    lines: int = 0
    now_ns: int = 0
    by: str = ""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """True if some of it is proven and nothing contradicts."""
        return not self.faults and self.verdict.fault is None and self.lines > 0


class _Walk:
    """Hashes at the ends of signed heads, the first line's, and sides that are not what lines say."""

    def __init__(self, folder: Path, wanted: Sequence[int]) -> None:
        self.folder, self._wanted = folder, set(wanted)
        self.head_of: dict[int, str] = {}
        self.run = ""
        self.faults: list[str] = []

    def see(self, entry: Entry) -> None:
        if entry.seq in self._wanted:
            self.head_of[entry.seq] = entry.prev
        if entry.seq == 1:
            self.run = entry.prev
        if entry.body.keys() == {"side", "bytes"}:
            name = str(entry.body["side"])
            try:
                path = self.folder / "sides" / f"{Path(name).name}.json"
                # Whoever made this folder may have put a pipe or a huge file there
                is_whole = path.is_file() and path.stat().st_size == entry.body["bytes"]
                body = path.read_bytes() if is_whole else b""
            except (OSError, ValueError):  # ValueError: the name holds a NUL byte
                body = b""
            if line_hash(body) != name and len(self.faults) < 10:
                self.faults.append(
                    f"line {entry.seq + 1:,}: its body, sides/{name[:40]}.json, is missing or was changed"
                )


def prove(
    folder: Path, verifier: HeadVerifier, outside: Mapping[str, Sequence[SignedHead]] | None = None
) -> JournalProof:
    """Compare a run's journal with the heads beside it and those of anchors outside.

    Raises StorageError if it cannot be read.
    """
    outside = outside or {}
    beside: list[SignedHead] = []
    faults: list[str] = []
    try:
        beside = AnchorFile(folder).heads()
    except StorageError as error:
        faults.append(str(error))
    named = [(FILE, head) for head in beside]
    named += [(name, head) for name, heads in outside.items() for head in heads]
    walk = _Walk(folder, [head.lines for _, head in named])
    verdict = verify_journal(folder / OPEN, walk.see)
    end = verdict.first_seq + verdict.lines
    walk.head_of[end] = verdict.head
    if end == 1:
        walk.run = verdict.head
    proof = JournalProof(verdict, end, faults=faults + walk.faults)
    run = walk.run or (beside[-1].run if beside else "")
    of_run = _of_run(proof, run, outside) if run else outside
    named = [(FILE, head) for head in beside]
    named += [(name, head) for name, heads in of_run.items() for head in heads]
    good = [(name, head) for name, head in named if _is_signed(proof, verifier, name, head)]
    _compare(proof, walk, good)
    _in_order(proof, [head for name, head in good if name == FILE])
    _put_back(proof, good)
    if not beside and not faults:
        proof.notes.append(f"{folder / ANCHORS}: no signed heads beside the journal")
    return proof


def _of_run(
    proof: JournalProof, run: str, outside: Mapping[str, Sequence[SignedHead]]
) -> dict[str, list[SignedHead]]:
    """The heads of this run; an anchor that holds none of them knows of another journal."""
    out = {name: [head for head in heads if head.run == run] for name, heads in outside.items()}
    for name, mine in out.items():
        others = [head for head in outside[name] if head.run != run]
        if not mine:
            more = "".join(
                f"; it holds line {head.lines:,} of {utc(head.now_ns)} of another run" for head in others[-3:]
            )
            proof.faults.append(f"{name}: holds no signed head of this journal, of the run {run}{more}")
    return out


def _is_signed(proof: JournalProof, verifier: HeadVerifier, name: str, head: SignedHead) -> bool:
    if verifier.fits(head):
        return True
    whose = f"by the key {head.key}" if head.key != verifier.name else "as it is"
    proof.faults.append(
        f"{_place(name)}: the head of line {head.lines:,} of {utc(head.now_ns)} is not signed {whose}; "
        f"expected the key {verifier.name}"
    )
    return False


def _compare(proof: JournalProof, walk: _Walk, heads: Sequence[tuple[str, SignedHead]]) -> None:
    """Heads from the first to the last; what fits moves the proof on, the first that does not is a fault."""
    verdict, wrong = proof.verdict, False
    for name, head in sorted(heads, key=lambda pair: (pair[1].lines, pair[0] == FILE)):
        when = f"signed at {utc(head.now_ns)}, {_place(name)}"
        if walk.run and head.run != walk.run and not wrong:
            proof.faults.append(f"line 1 is not that of the run {head.run} ({when}): another journal")
            wrong = True
        elif head.lines > proof.end:
            if verdict.fault is None and not wrong:
                proof.faults.append(
                    f"line {proof.end + 1:,} is missing: the journal ends at line {proof.end:,}, and the "
                    f"head of line {head.lines:,} was {when}: its end was cut"
                )
                wrong = True
        elif head.lines in walk.head_of and walk.head_of[head.lines] != head.head:
            if not wrong:
                first = max(proof.lines, verdict.first_seq) + 1
                proof.faults.append(
                    f"line {first:,} or one behind it, up to line {head.lines:,}, is not as it was when "
                    f"the head of line {head.lines:,} was {when}"
                )
                wrong = True
        elif head.lines in walk.head_of and not wrong:
            proof.lines, proof.now_ns, proof.by = head.lines, head.now_ns, name


def _in_order(proof: JournalProof, beside: Sequence[SignedHead]) -> None:
    """Heads beside the journal were written one after the other."""
    for before, head in itertools.pairwise(beside):
        if head.lines < before.lines or head.now_ns < before.now_ns:
            proof.faults.append(
                f"{ANCHORS}: the head of line {head.lines:,} of {utc(head.now_ns)} comes behind that of line "
                f"{before.lines:,} of {utc(before.now_ns)}: expected them in order"
            )
            return


def _put_back(proof: JournalProof, heads: Sequence[tuple[str, SignedHead]]) -> None:
    """An anchor holds no older head than it had acknowledged when a later one was signed."""
    for name in dict.fromkeys(name for name, _ in heads if name != FILE):
        newest = max((head for n, head in heads if n == name), key=lambda head: head.lines)
        claim = max((head for _, head in heads), key=lambda head: head.outside.get(name, 0))
        had = claim.outside.get(name, 0)
        if newest.lines < had:
            proof.faults.append(
                f"{name}: holds the head of line {newest.lines:,}, but had acknowledged that of line "
                f"{had:,} by {utc(claim.now_ns)}: an old head was put back"
            )
        elif (behind := max(h.lines for _, h in heads)) > newest.lines:
            proof.notes.append(
                f"{name}: its newest head is of line {newest.lines:,} at {utc(newest.now_ns)}; "
                f"{behind - newest.lines:,} lines are signed after it, in reach of who has the key"
            )


def _place(name: str) -> str:
    return f"in {ANCHORS}" if name == FILE else f"at the anchor {name}"
