"""Wire of a fleet: the subjects and messages between the halls and their hub. Pure.

    cpc.HALL.v1.summary   from a hall, every few seconds
    cpc.HALL.v1.budget    to a hall, while a grant runs

HALL is the local name of the hall in the site file of the hub. Subjects begin with `cpc.`, as those of the
DSX event bus do, so that one permission for each hall covers both.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar

import msgspec

from twin.catalogue import BadMessage, clean
from twin.site import HALL_BUDGET, Site

T = TypeVar("T")
MAX_HASH = 128  # characters of what names a journal; source: estimate
MAX_BYTES = 64 * 1024  # of a message; a summary has about 600
MAX_W = 1e9  # the bound of the catalogue
EPOCH_AHEAD_S = 86_400.0  # of our clock: epochs begin at the seconds since 1970. source: estimate
MAX_LAPSE_S = 3600.0  # the bound of the catalogue
_TOKEN = re.compile(r"[A-Za-z0-9_\-]{1,64}")  # of a subject: no dot, no wildcard


class HallSummary(msgspec.Struct, frozen=True, kw_only=True):
    """State of a hall at `t_ns`, as its daemon reports it. None: unknown.

    `sequence` counts from 1 in each `epoch`. `granted_ns`: when the newest grant that it took was issued, by
    the hub's clock (0: it took none). `lapse_s`: from the end of a grant until it draws its share at most,
    stated by one that is a hub itself, where it takes longer. `run`, `lines` and `head`: its journal, as far
    as that is on the disk.
    """

    hall: str
    epoch: int
    sequence: int
    t_ns: int
    power_w: float | None = None
    demand_w: float | None = None
    floor_w: float | None = None
    budget_w: float | None = None
    guaranteed_w: float | None = None
    granted_ns: int = 0
    lapse_s: float | None = None
    heard_pu: float | None = None
    gpus: int = 0
    gpus_out: int = 0
    alarms: dict[str, int] = {}
    run: str = ""
    lines: int = 0
    head: str = ""


class HallGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that the hub lends to a hall until `expires_ns`, by the hub's clock."""

    hall: str
    epoch: int
    command: int
    budget_w: float
    issued_ns: int
    expires_ns: int


_SUMMARY, _GRANT = msgspec.json.Decoder(HallSummary), msgspec.json.Decoder(HallGrant)
encode = msgspec.json.encode


def summary_subject(hall: str) -> str:
    """Return the subject on which a hall reports its state."""
    return f"cpc.{hall}.v1.summary"


def budget_subject(hall: str) -> str:
    """Return the subject on which a hall receives its budget."""
    return f"cpc.{hall}.v1.budget"


def hall_problem(name: str) -> str | None:
    """Return the reason that a name cannot be part of a subject; None if it can."""
    if _TOKEN.fullmatch(name):
        return None
    return (
        f"{clean(name, 80)!r} is not a valid part of a subject; expected letters, digits, - and _, at most 64"
    )


def halls_of(site: Site) -> dict[str, int]:
    """Return the rack of each hall of a fleet, by its name in subjects."""
    safe_w = site.envelopes[HALL_BUDGET].safe
    racks = enumerate(site.names["rack"])
    return {path.rpartition("/")[2]: rack for rack, path in racks if math.isfinite(safe_w[rack])}


def parse_summary(payload: bytes) -> HallSummary:
    """Return a summary with valid values. Raises BadMessage."""
    found = _parsed(_SUMMARY, payload)
    _counting(
        found.epoch, found.sequence, found.t_ns, found.granted_ns, found.gpus, found.gpus_out, found.lines
    )
    _counting(*found.alarms.values())
    for name in ("power_w", "demand_w", "floor_w", "budget_w", "guaranteed_w"):
        _power(name, getattr(found, name))
    if found.lapse_s is not None and not 0.0 <= found.lapse_s <= MAX_LAPSE_S:
        raise BadMessage(f"lapse_s: expected 0 to {MAX_LAPSE_S:g}, got {found.lapse_s:g}")
    if found.heard_pu is not None and not 0.0 <= found.heard_pu <= 1.0:
        raise BadMessage(f"heard_pu: expected 0 to 1, got {found.heard_pu:g}")
    for name in ("run", "head"):
        if len(text := getattr(found, name)) > MAX_HASH or not text.isascii() or not text.isprintable():
            raise BadMessage(
                f"{name}: expected at most {MAX_HASH} printable ASCII characters, got {len(text)}"
            )
    if found.gpus_out > found.gpus:
        raise BadMessage(f"gpus_out: expected at most the {found.gpus} of gpus, got {found.gpus_out}")
    return found


def parse_grant(payload: bytes) -> HallGrant:
    """Return a grant with valid values. Raises BadMessage."""
    found = _parsed(_GRANT, payload)
    _counting(found.epoch, found.command, found.issued_ns, found.expires_ns)
    _power("budget_w", found.budget_w)
    return found


def _parsed(decoder: msgspec.json.Decoder[T], payload: bytes) -> T:
    if len(payload) > MAX_BYTES:
        raise BadMessage(f"{len(payload):,} bytes; expected at most {MAX_BYTES:,}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(clean(str(error), 200)) from error


def _counting(*numbers: int) -> None:
    for number in numbers:
        if not 0 <= number < 2**63:
            raise BadMessage(f"expected numbers from 0 to 2^63, got {number}")


def _power(name: str, value: float | None) -> None:
    if value is not None and not 0.0 <= value <= MAX_W:
        raise BadMessage(f"{name}: expected 0 to {MAX_W:g} W, got {value:g}")
