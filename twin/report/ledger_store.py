"""Ledger store: the hours of the ledger on the disk, a file for each day (UTC), written whole or not at all.

An hour is written once; one received again, after a restart, replaces nothing. A day of 20,000 rows an
hour takes some MB compressed; days beyond `KEPT_DAYS` go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import zstandard

from twin.catalogue import NS, StorageError
from twin.ledger import HourRecord, decode_hour
from twin.run import atomic_write

log = logging.getLogger(__name__)

KEPT_DAYS = 800  # two years and their last month; source: estimate
MAX_BYTES = 2**30  # of a day, unpacked
_SUFFIX = ".json.zst"


class LedgerStore:
    """Day files in a folder. `fault`: why the last write failed; "" after one that did not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fault = folder, ""
        self._written = 0  # begin of the last hour that is on the disk

    def write(self, closed: Sequence[bytes]) -> None:
        """Write the hours that the disk lacks. Never raises: what cannot be written is tried again."""
        try:
            hours = [hour for hour in map(decode_hour, closed) if hour.begin_ns > self._written]
            for hour in hours:
                self._add(hour)
                self._written = hour.begin_ns
            self.fault = ""
        except (OSError, StorageError) as error:
            if not self.fault:
                log.error("the ledger cannot be written: %s; retrying", error)
            self.fault = str(error)

    def _add(self, hour: HourRecord) -> None:
        day = _day(hour.begin_ns)
        path = self.folder / f"{day}{_SUFFIX}"
        known = list(self._read(path))
        if any(other.begin_ns == hour.begin_ns for other in known):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        hours = sorted([*known, hour], key=lambda one: one.begin_ns)
        atomic_write(path, zstandard.ZstdCompressor().compress(msgspec.json.encode(hours)))
        for old in sorted(self.folder.glob(f"*{_SUFFIX}"))[:-KEPT_DAYS]:
            old.unlink()

    def read(self, begin_ns: int, end_ns: int) -> Iterator[HourRecord]:
        """The hours that begin in [begin_ns, end_ns), oldest first. A damaged day is left out, and logged."""
        first, last = _day(begin_ns), _day(end_ns - 1)
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if first <= path.name.removesuffix(_SUFFIX) <= last:
                yield from (hour for hour in self._read(path) if begin_ns <= hour.begin_ns < end_ns)

    def _read(self, path: Path) -> list[HourRecord]:
        """The hours of a day; a file that cannot be read is moved aside, as evidence."""
        try:
            raw = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=MAX_BYTES)
            return msgspec.json.decode(raw, type=list[HourRecord])
        except FileNotFoundError:
            return []
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            aside = path.with_name(f"{path.name}.unread")
            log.error("%s: cannot be read (%s); kept as %s, its hours are missing", path, error, aside.name)
            path.replace(aside)
            return []


def _day(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // NS, UTC).strftime("%Y-%m-%d")
