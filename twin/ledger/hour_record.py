"""Hour record: an hour of the ledger that is over, as it is kept."""

from __future__ import annotations

import msgspec

from twin.catalogue import StorageError

PARTS = ("job", "idle", "unplaced", "rest", "cooling", "losses")


class LedgerRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One holder of energy and GPU time in a hall. `part`: see PARTS; names are empty but for a job.

    `sigma_j` adds up over hours, as a meter's gain does; `var_j2` is of what is independent. `unpriced_j` had
    no known price, `uncounted_j` no known carbon intensity.
    """

    hall: str
    part: str
    queue: str = ""
    tenant: str = ""
    account: str = ""
    job: str = ""
    gpu_ns: tuple[int, ...] = ()
    energy_j: float = 0.0
    sigma_j: float = 0.0
    var_j2: float = 0.0
    gpu_j: float = 0.0
    cost_usd: float = 0.0
    carbon_g: float = 0.0
    unpriced_j: float = 0.0
    uncounted_j: float = 0.0


class MeteredSum(msgspec.Struct, frozen=True, omit_defaults=True):
    """Energy of a rack, hall or site with its error, as in `LedgerRow`."""

    energy_j: float = 0.0
    sigma_j: float = 0.0
    var_j2: float = 0.0


class HourRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """`begin_ns`: of the hour; `watched_ns`: how much of it this daemon accounts for.

    `it_j`: racks; `compute_j`: GPUs and CPUs, 0 = not known; `unmetered_s`: node-seconds whose power nothing
    told; `refused`: counters that did not fit their meters; `cooling_known`: all loops have a meter.
    """

    begin_ns: int
    watched_ns: int
    site: MeteredSum
    halls: dict[str, MeteredSum]
    racks: dict[str, MeteredSum]
    rows: tuple[LedgerRow, ...]
    it_j: float = 0.0
    compute_j: float = 0.0
    unmetered_s: float = 0.0
    refused: int = 0
    cooling_known: bool = False


def encode_hour(hour: HourRecord) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(hour)


def decode_hour(raw: bytes) -> HourRecord:
    """The record of such JSON. Raises StorageError."""
    try:
        return msgspec.json.decode(raw, type=HourRecord)
    except msgspec.MsgspecError as error:
        raise StorageError(f"not an hour of the ledger: {error}") from error
