"""Anchor file: the signed heads of a run, one a line, in `anchors.jsonl` of its folder.

It narrows down where a journal was changed. Who may write the journal may write this file too; what is
anchored outside is out of their reach.
"""

from __future__ import annotations

import os
from pathlib import Path

from twin.anchor.signed_head import SignedHead, parse_head
from twin.catalogue import StorageError
from twin.run import atomic_write

ANCHORS = "anchors.jsonl"
MAX_HEADS = 20_000  # two weeks at one a minute; a later head speaks for the lines of an earlier one


class AnchorFile:
    """The file of a run's folder."""

    def __init__(self, folder: Path, most: int = MAX_HEADS) -> None:
        self.path, self.most = folder / ANCHORS, most
        self._count = -1

    def append(self, head: SignedHead) -> None:
        """Write a head, on the disk when this returns. Raises StorageError."""
        try:
            if self._count < 0:
                self._tidy()
            with self.path.open("ab", buffering=0) as file:
                file.write(head.line + b"\n")
                os.fsync(file.fileno())
            self._count += 1
            if self._count > 2 * self.most:
                self._tidy()
        except OSError as error:
            raise StorageError(f"{self.path}: a signed head cannot be written: {error}") from error

    def _tidy(self) -> None:
        """Leave out a last line that was not written to its end, and the oldest heads beyond the bound."""
        data = self.path.read_bytes() if self.path.exists() else b""
        lines = data.split(b"\n")[:-1]
        kept = lines[-self.most :] if len(lines) > 2 * self.most else lines
        if len(kept) != len(lines) or not data.endswith(b"\n"):
            atomic_write(self.path, b"".join(line + b"\n" for line in kept))
        self._count = len(kept)

    def heads(self) -> list[SignedHead]:
        """The head of each line; none where there is no file. Raises StorageError."""
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error}") from error
        out = []
        for number, line in enumerate(lines, start=1):
            try:
                out.append(parse_head(line))
            except StorageError as error:
                raise StorageError(f"{self.path} line {number}: {error}") from error
        return out
