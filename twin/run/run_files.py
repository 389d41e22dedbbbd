"""Files in the folder of a run: its trace segments, and the version that wrote them."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zstandard

from twin.catalogue import CATALOGUE_HASH, StorageError, unpack
from twin.engine import snapshot
from twin.run.atomic_write import sync_folder
from twin.run.journal_files import cut_tail
from twin.run.trace import Header, OtherFormat, TraceDecoder, payloads

REMEDY = "start the version that wrote it, or move the folder away to begin a new run"
BEGINNING_BYTES = 4 * 2**20


@dataclass
class Segment:
    """A trace file: what its header says and when its first frame was."""

    path: Path
    header: Header
    first_ns: int


def by_number(folder: Path, pattern: str) -> list[Path]:
    """The files with a number in their names, in its order, also where it has outgrown its digits."""
    return sorted(folder.glob(pattern), key=lambda p: (len(p.name), p.name))


def segments_of(folder: Path, faults: list[str]) -> list[Segment]:
    """The readable segments in order. Raises OtherFormat for one of another version; touches nothing."""
    out: list[Segment] = []
    for path in by_number(folder, "trace-*.rt"):
        header, first_ns = opening(path)
        if header is None:
            faults.append(f"{path.name}: has no readable header; not used")
        else:
            out.append(Segment(path, header, first_ns))
    return out


def mend_last(folder: Path, faults: list[str]) -> None:
    """Cut off the torn tail of the last segment; one without a header goes out of the writer's way.

    What is left is forced to the disk: a process that was killed may not have done so, and a loss of power
    must not take frames behind which others stand by then.
    """
    paths = by_number(folder, "trace-*.rt")
    if not paths:
        return
    path = paths[-1]
    cut_torn(path, faults)
    if opening(path)[0] is None:
        set_aside(path, ".torn")  # the writer takes this number again
        return
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path}: cannot be forced to the disk: {error}") from error
    sync_folder(folder)


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a file out of the way of readers and writers, without overwriting earlier evidence."""
    number = 0
    while (kept := path.with_suffix(suffix + (f".{number}" if number else ""))).exists():
        number += 1
    path.replace(kept)
    return kept


def cut_torn(path: Path, faults: list[str]) -> None:
    """Cut a segment at the first record that is not whole; what was behind is kept."""
    data = path.read_bytes()
    for position, payload in payloads(data):
        if isinstance(payload, str) and position:
            faults.append(f"{path.name} at byte {position}: {payload}; cut off there")
            cut_tail(path, position)


def opening(path: Path) -> tuple[Header | None, int]:
    """(header, instant of the first frame); (None, 0) for what is no segment, 0 for one without frames.

    Raises OtherFormat for a segment of another version.
    """
    decoder, header = TraceDecoder(), None
    try:
        for _, payload in itertools.islice(payloads(_beginning(path)), 2):
            if isinstance(payload, str):
                break
            if header is None:
                header = decoder.header(payload)
            else:
                return header, decoder.decode(payload).now_ns
    except OtherFormat as error:
        raise OtherFormat(f"{path}: {error}; {REMEDY}") from error
    except (StorageError, msgspec.MsgspecError):
        pass
    return header, 0


def _beginning(path: Path) -> bytes:
    """Enough of a segment for its header and first frame, unless these are very large; then all of it."""
    with path.open("rb") as file:
        data = file.read(BEGINNING_BYTES)
        ends = [at for at, payload in itertools.islice(payloads(data), 3) if isinstance(payload, bytes)]
        return data if len(ends) > 2 or len(data) < BEGINNING_BYTES else data + file.read()


def of_another_version(raw: bytes) -> str | None:
    """The format or catalogue of a snapshot that is whole but not ours to read."""
    try:
        tree = unpack(zstandard.ZstdDecompressor().decompress(raw[40:], max_output_size=snapshot.MAX_BYTES))
        version, catalogue = tree["format"], tree["catalogue"]
    except (StorageError, zstandard.ZstdError, KeyError, TypeError, MemoryError):
        return None
    if version not in snapshot.READS:
        return f"snapshot format {version}; expected {' or '.join(map(str, snapshot.READS))}"
    return (
        None
        if catalogue == CATALOGUE_HASH
        else f"snapshot of the catalogue {catalogue}; expected {CATALOGUE_HASH}"
    )
