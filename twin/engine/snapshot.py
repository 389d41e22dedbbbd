"""Snapshot format: encodes the result of `Engine.dump` as bytes, and decodes it. Older formats are readable.

A snapshot holds state, memories, leases and parameters. It does not hold the history rings (a restart reads
that much trace before the snapshot) nor the site, which it names by hash.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from twin.catalogue import CATALOGUE_HASH, StorageError, digest, pack, unpack
from twin.telemetry import STATED_FIELDS

FORMAT = 5
# Formats that this version reads. The parts know their earlier layouts (4: estimator, diagnosis, findings);
# what an older one laid out otherwise (counters of health) begins as new.
READS = (2, 3, 4, 5)
MAX_BYTES = 8 * 2**30
_MAGIC = b"rtsnap01"


def encode(data: dict[str, Any]) -> bytes:
    """Return the snapshot as bytes with a checksum."""
    body = zstandard.ZstdCompressor(level=1).compress(
        pack({"format": FORMAT, "catalogue": CATALOGUE_HASH, "data": data})
    )
    return _MAGIC + digest(body).encode() + body


def decode(raw: bytes) -> dict[str, Any]:
    """Decode the result of `encode`. Raises StorageError for anything else."""
    if raw[:8] != _MAGIC:
        raise StorageError("not a racktwin snapshot")
    body = raw[40:]
    if digest(body).encode() != raw[8:40]:
        raise StorageError("snapshot is damaged: its check does not match")
    try:
        size = zstandard.frame_content_size(body)
        if not 0 <= size <= MAX_BYTES:
            raise StorageError(f"snapshot claims to hold {size} bytes; expected at most {MAX_BYTES}")
        tree = unpack(zstandard.ZstdDecompressor().decompress(body))
    except zstandard.ZstdError as error:
        raise StorageError(f"snapshot cannot be decompressed: {error}") from error
    found = tree.get("format") if isinstance(tree, dict) else None
    if found not in READS or not isinstance(tree.get("data"), dict):
        later = ", which a later version wrote" if isinstance(found, int) and found > FORMAT else ""
        raise StorageError(f"snapshot format {found}{later}; expected {' or '.join(map(str, READS))}")
    if tree.get("catalogue") != CATALOGUE_HASH:  # columns are rows of the catalogue
        raise StorageError(
            f"snapshot of the catalogue {tree.get('catalogue')}; this version has {CATALOGUE_HASH}"
        )
    data: dict[str, Any] = tree["data"]
    return _from_2(data) if found == 2 else data


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of format 2 as format 3: without windows and takeovers, and with fewer columns of jobs."""
    jobs, out = data.get("jobs"), {"windows": {"windows": [], "ended_ns": {}}, **data}
    if isinstance(jobs, dict):
        n = len(jobs["names"])
        out["jobs"] = {
            "accounts": [""] * n,
            "queues": [""] * n,
            "known": bool(np.any(jobs["generation"])),
            "unslotted": [],
            **{name: np.zeros(n) for name in STATED_FIELDS},
            **jobs,
        }
    if isinstance(data.get("arbiter"), dict):
        out["arbiter"] = {"settling": {}, **data["arbiter"]}
    return out
