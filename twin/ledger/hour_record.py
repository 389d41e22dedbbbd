"""Hour record: an hour of the ledger that is over, as it is kept."""

from __future__ import annotations

import msgspec

from twin.catalogue import StorageError

PARTS = ("job", "idle", "unplaced", "rest", "cooling", "losses")


class LedgerRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One holder of energy and GPU time in a hall. `part`: see PARTS; names are empty but for a job.

    `sigma_j` adds up over hours, as a meter's gain does; `var_j2` is of what is independent. `unpriced_j` had
    no known price, `uncounted_j` no known carbon intensity, `ungauged_j` is of nodes with GPUs of whose share
    it was not reported. The fields from `energy_j` on are amounts, which add up: see AMOUNTS.
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
    ungauged_j: float = 0.0


AMOUNTS: tuple[str, ...] = LedgerRow.__struct_fields__[LedgerRow.__struct_fields__.index("energy_j") :]
AMOUNT_AT = {name: i for i, name in enumerate(AMOUNTS)}


class MeteredSum(msgspec.Struct, frozen=True, omit_defaults=True):
    """Energy of a rack, hall or site with its error, as in `LedgerRow`."""

    energy_j: float = 0.0
    sigma_j: float = 0.0
    var_j2: float = 0.0


class RatioSum(msgspec.Struct, frozen=True, omit_defaults=True):
    """Both sides of a ratio, over the time in which both are known: energies in J, water in l."""

    over: float = 0.0
    under: float = 0.0
    known_ns: float = 0.0


FIGURES = ("pue", "tue", "wue")


class HourRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """One hour. `begin_ns`: its begin; `watched_ns`: the part that this daemon observed.

    `unmetered_s`: node-seconds whose power was not reported; `refused`: counters that did not fit their
    meters; `figures` of FIGURES: all energy over that of racks; all energy over that of GPUs and CPUs; water
    over the energy of racks.
    """

    begin_ns: int
    watched_ns: int
    site: MeteredSum
    halls: dict[str, MeteredSum]
    racks: dict[str, MeteredSum]
    rows: tuple[LedgerRow, ...]
    unmetered_s: float = 0.0
    refused: int = 0
    figures: dict[str, RatioSum] = {}


def encode_hour(hour: HourRecord) -> bytes:
    """Return the record as JSON."""
    return msgspec.json.encode(hour)


def decode_hour(raw: bytes) -> HourRecord:
    """Return the record of such JSON. Raises StorageError."""
    try:
        return msgspec.json.decode(raw, type=HourRecord)
    except msgspec.MsgspecError as error:
        raise StorageError(f"not an hour of the ledger: {error}") from error
