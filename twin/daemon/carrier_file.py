"""Carrier file: the source of each reading and the clock offset of each source, kept across restarts.

With it, an outage that began while the daemon was down is named after the silent source; without it, after
its place. Without the clock offset, the readings of a source count as old until the offset is learned again.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from twin.catalogue import NS
from twin.run import atomic_write
from twin.sources import SourceLedger

log = logging.getLogger(__name__)
FORMAT = 2  # rises where sources get other names
NAME = "carriers.msgpack"
KEPT_S = 86_400.0  # a source that does not report for so long has been taken out of service; source: estimate
MAX_CELLS = 2**27  # of a column that is unpacked


class _File(msgspec.Struct):
    """`sources`: name, whether it came from outside, when it last reported; `columns`: their numbers;
    `back_ns`: by how much the clocks of some are behind.
    """

    format: int
    site: str
    sources: list[tuple[str, bool, int]]
    columns: dict[str, bytes]
    back_ns: dict[str, int] = {}


def carrier_job(ledger: SourceLedger, state: Path, site: str) -> Callable[[], None]:
    """Return a function that a thread calls to write the ledger's present state. `site`: its hash."""
    (sources, columns), back_ns = ledger.carriers(), ledger.offsets_ns()

    def write() -> None:
        packed = {key: zlib.compress(column.astype("<i4").tobytes(), 1) for key, column in columns.items()}
        try:
            atomic_write(
                state / NAME,
                msgspec.msgpack.encode(_File(FORMAT, site, sources, packed, back_ns)),
                sync=False,
            )
        except OSError as error:
            log.warning("%s: cannot be written: %s", state / NAME, error)

    return write


def resume_carriers(ledger: SourceLedger, state: Path, site: str, now_ns: int) -> None:
    """Load the file into the ledger, if there is one and it is of this site."""
    try:
        file = msgspec.msgpack.decode((state / NAME).read_bytes(), type=_File)
        if (file.format, file.site) != (FORMAT, site):
            return
        columns = {
            key: np.frombuffer(zlib.decompressobj().decompress(packed, MAX_CELLS), "<i4").astype(np.int32)
            for key, packed in file.columns.items()
        }
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError, zlib.error, ValueError) as error:
        log.warning("%s: cannot be read: %s; sources are named once they report", state / NAME, error)
        return
    late_ns = now_ns - round(KEPT_S * NS)
    ledger.resume([source if source[2] >= late_ns else None for source in file.sources], columns)
    ledger.resume_offsets(file.back_ns)
