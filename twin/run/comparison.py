"""Comparison: replays a run and compares each line with its journal.

Lines that the shell wrote between ticks are skipped: a replay repeats decisions, not the actions of people
and the state of disks. `journal_files` verifies the hash chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twin.catalogue import Divergence, StorageError
from twin.contracts import SHELL_KINDS, Decision, EndRecord, ManifestRecord
from twin.engine import Engine
from twin.run.journal import Chain, Entry, first_difference, line_hash
from twin.run.journal_files import Head, journal_exists, journal_lines, line_head
from twin.run.storage import is_restart
from twin.telemetry import Frame


@dataclass(frozen=True, slots=True)
class Since:
    """Starting point of a replay: a tick, the number of journal lines before it, and their head."""

    tick: int
    seq: int
    head: str


class Comparer:
    """Compares a replay with the recorded run. Raises Divergence at the first line that differs.

    `recorded` are the journal's lines that follow `chain`. A run that was interrupted and resumed has lines
    of its shell in between (`end`, `manifest`) and, where frames were lost, lines that nothing makes again.
    Where the journal begins later than the frames (it was pruned), what they decide before is let pass.
    """

    def __init__(self, engine: Engine, recorded: Iterator[bytes], chain: Chain) -> None:
        self.engine, self.recorded, self.chain = engine, recorded, chain
        self.compared = 0
        self.ended = False
        self.beyond: list[bytes] | None = None  # lines made after the journal's end, if somebody wants them
        self._next: tuple[bytes, Head] | None = None
        found = self._peek()
        self._early = found is not None and found[1].seq > chain.seq

    def before(self, frame: Frame) -> None:
        """Skip the lines that the shell wrote before this frame, and those that a restart left."""
        self._pass(frame.tick, is_restart(frame))
        if self._early and (found := self._peek()) is not None:
            head = found[1]
            if head.kind not in SHELL_KINDS and head.tick <= frame.tick:
                self._early, self.chain.seq, self.chain.head = False, head.seq, head.prev

    def after(self, engine: Engine, decision: Decision) -> None:
        """Compare the lines of a tick with the next ones of the journal."""
        self.put(self.chain.lines(decision))

    def finish(self, engine: Engine) -> None:
        """Compare the end; no line may be left over. A recording that was killed has no end."""
        self._pass(engine.state.tick + 1, False)
        if not self.ended and (rest := self._peek()) is not None:
            raise first_difference(rest[0], None)

    def close(self) -> None:
        """Do nothing, since nothing is open."""

    def put(self, lines: list[bytes]) -> None:
        """Compare replayed lines."""
        if self.beyond is None:
            self.chain.sides.clear()
        if not self._early:
            for line in lines:
                self._compare(line)

    def _pass(self, tick: int, lost: bool) -> None:
        """Skip the lines before `tick` that the shell wrote or, where frames were lost, all lines."""
        while not self.ended and (found := self._peek()) is not None and found[1].tick < tick:
            line, head = found
            if head.kind == "end" and head.tick == self.engine.state.tick and not self._early:
                end = EndRecord(state_checksum=self.engine.checksum())
                self._compare(self.chain.line(end, head.tick, self.engine.state.now_ns))
            elif head.kind in SHELL_KINDS or lost:
                self._next = None
                self.chain.seq, self.chain.head = head.seq + 1, line_hash(line)
            else:
                return

    def _peek(self) -> tuple[bytes, Head] | None:
        if self._next is None and (line := next(self.recorded, None)) is not None:
            self._next = line, line_head(line)
        return self._next

    def _compare(self, line: bytes) -> None:
        if not self.ended and (found := self._peek()) is not None:
            if found[0] != line:
                raise _difference(found[0], line)
            self._next = None
            self.compared += 1
            return
        self.ended = True  # the journal was cut; what lies before was compared
        if self.beyond is not None:
            self.beyond.append(line)


def recorded_run(
    engine: Engine,
    journal: Path,
    manifest: ManifestRecord,
    lines: int | None = None,
    since: Since | None = None,
) -> Comparer:
    """A comparer for a run from its beginning or from a snapshot, with the first `lines` that are left of it.

    Where the journal still has its first line, the manifest must agree as well.
    """
    kept = itertools.islice(journal_lines(journal), lines)
    if since is not None:
        later = (line for line in kept if line_head(line).seq >= since.seq)
        return Comparer(engine, later, Chain(since.seq, since.head))
    comparer = Comparer(engine, kept, Chain())
    comparer.put([comparer.chain.line(manifest, -1, 0)])
    return comparer


def said_simulated(run: Path) -> bool:
    """True if the first manifest of a recorded run says that its site was simulated.

    `run` is its folder or a file in it; False where nothing there can be read.
    """
    journal = (run if run.is_dir() else run.parent) / "journal.jsonl"
    try:
        first = next(journal_lines(journal), None) if journal_exists(journal) else None
        record = msgspec.json.decode(first, type=Entry).record if first is not None else None
        return isinstance(record, ManifestRecord) and record.simulated
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError, OSError):
        return False  # the comparison will say what is wrong with that line


def _difference(recorded: bytes, replayed: bytes) -> Divergence:
    """Return the first differing field, also where the bodies agree."""
    found = first_difference(recorded, replayed)
    if found.recorded == found.replayed:
        a, b = msgspec.json.decode(recorded), msgspec.json.decode(replayed)
        for name in ("now_ns", "seq", "prev"):
            if a[name] != b[name]:
                return Divergence(a["tick"], f"{a['kind']}:{name}", a[name], b[name])
    return found
