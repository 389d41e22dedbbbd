"""The faults of a scenario file: their form, what makes one wrong, and the place on the site that one means.

May import the site, its file, and fault scripts.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Literal

import msgspec

from twin.diagnosis.kinds import KINDS
from twin.plant.faults import PUBLISHED
from twin.site import Site
from twin.sitefile import short

MAX_HOURS = 24.0 * 366.0
KINDS_IN_PARTS = ("pump_trip", "pump_worn", "psu_lost")
MAX_GUESSED = 20  # faults whose place is guessed at
MAX_NAMED, MAX_COMPARED = 50_000, 2000  # names looked through for one, and compared with it


class FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One fault. `entity` is a path of the site; no `end_s`: it lasts. `part` of a pair: 1, 2 or both."""

    kind: str
    begin_s: float
    entity: str = ""
    end_s: float | None = None
    severity: float = 1.0
    ramp_s: float = 0.0
    signal: str = ""
    amount: float = 0.0
    part: Literal["1", "2", "both"] = "1"


def judge_fault(path: str, f: FaultEntry, site: Site, guess: bool) -> list[str]:
    """What is wrong with one fault at this path of the file; `guess`: with the names that may be meant."""
    out: list[str] = []
    out += in_range(f"{path}.begin_s", f.begin_s, 0.0, MAX_HOURS * 3600.0)
    out += in_range(f"{path}.severity", f.severity, 0.0, 1.0)
    out += in_range(f"{path}.ramp_s", f.ramp_s, 0.0, MAX_HOURS * 3600.0)
    out += in_range(f"{path}.amount", f.amount, -1e12, 1e12)
    if f.end_s is not None and not f.begin_s < f.end_s <= MAX_HOURS * 3600.0:
        out.append(f"{path}.end_s: expected an instant after begin_s ({f.begin_s:g}), got {f.end_s:g}")
    if f.kind not in KINDS:
        return [*out, f"{path}.kind: expected one of {', '.join(KINDS)}, got {short(f.kind)}"]
    if f.part != "1" and f.kind not in KINDS_IN_PARTS:
        out.append(f"{path}.part: expected none, as a {f.kind} has no second part, got {short(f.part)}")
    found = place_of(f, site)
    tables = KINDS[f.kind].tables
    if found is None:
        at, hint = " or ".join(tables), _near(f.entity, tables, site) if guess else ""
        out.append(
            f"{path}.entity: expected the path of a {at} of {site.file.site}, got {short(f.entity)}{hint}"
        )
        return out
    if f.kind.startswith("sensor_"):
        signals = PUBLISHED[found[0]]
        if f.signal not in signals:
            out.append(f"{path}.signal: expected one of {', '.join(signals)}, got {short(f.signal)}")
        if f.amount == 0.0 and f.kind in ("sensor_biased", "sensor_spiking"):
            out.append(f"{path}.amount: expected how far it is off, in the unit of the signal, got 0")
    elif f.signal:
        out.append(f"{path}.signal: expected none, as a {f.kind} is of no sensor, got {short(f.signal)}")
    return out


def place_of(f: FaultEntry, site: Site) -> tuple[str, int] | None:
    """(table, index) that a fault's path means among the tables that its kind can befall."""
    for table in KINDS[f.kind].tables:
        if table == "site":
            if f.entity in ("", site.file.site):
                return "site", 0
        elif (entity := site.entity(table, f.entity)) is not None:
            return table, entity
    return None


def _near(wanted: str, tables: tuple[str, ...], site: Site) -> str:
    """What may have been meant: the names nearest to a wrong one, or that the site has none at all."""
    if "site" in tables:
        return f"; such as {site.file.site}"
    names = [site.name(t, i) for t in tables for i in range(min(site.sizes[t], MAX_NAMED))]
    if not names:
        return "; this site has none"
    above = wanted.rpartition("/")[0]
    nearby = [n for n in names if above and n.rpartition("/")[0].endswith(above)]
    some = (nearby or names)[:MAX_COMPARED]
    found = get_close_matches(wanted[:200], some, 3, 0.4) or some[:3]
    return f"; such as {', '.join(found)}"


def in_range(path: str, value: float | None, low: float, high: float, open_low: bool = False) -> list[str]:
    """A problem, if a value lies outside; None is no value."""
    if value is None or (low <= value <= high and not (open_low and value == low)):
        return []
    words = f"above {low:g} and at most {high:g}" if open_low else f"of {low:g} to {high:g}"
    return [f"{path}: expected a number {words}, got {short(value)}"]
