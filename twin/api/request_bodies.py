"""Request bodies: their schemas, and the conversion into events.

Names of racks and halls become those of the devices below, names of states become numbers, and a duration
becomes an instant.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from twin.api.answers import Refused
from twin.api.runtime import Runtime
from twin.catalogue import NS, TABLES, Control, clean, did_you_mean, find_control

MAX_REASON = 500
MAX_FOR_S = 366 * 86_400.0


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class NewRequest(_Body, frozen=True):
    """Keep a control of some entities within [lo, hi]; a missing bound is none. States go by their names.

    A name may be a node, rack or hall as well: it stands for all entities of the control's table below it.
    """

    control: str
    names: list[str]
    reason: str
    lo: float | str | None = None
    hi: float | str | None = None
    want: float | str | None = None
    for_s: float | None = None
    expires_ns: int | None = None


class NewApproval(_Body, frozen=True):
    """Let a policy in `approve` act on a control, for a while; without names, wherever it wants to."""

    policy: str
    control: str
    names: list[str] = []
    for_s: float | None = None
    expires_ns: int | None = None
    reason: str = ""


class Reason(_Body, frozen=True):
    """Body that holds a reason."""

    reason: str


class NewStory(_Body, frozen=True):
    """A chapter of a simulated story: its number of how many, its title, what happens. 0: it is over."""

    chapter: int = 0
    of: int = 0
    title: str = ""
    text: str = ""


class NoBody(_Body, frozen=True):
    """A body without required fields; it may have a reason."""

    reason: str = ""


class NewAuthority(_Body, frozen=True):
    """Authority of a policy. To arm it (`act`), `acknowledge` says: `POLICY may act on SITE`."""

    policy: str
    authority: Literal["off", "advise", "approve", "act"]
    reason: str
    acknowledge: str = ""


class NewMaintenance(_Body, frozen=True):
    """People work on these entities of one table, and on all below them."""

    table: str
    names: list[str]
    reason: str
    for_s: float | None = None
    until_ns: int | None = None


class Shelving(_Body, frozen=True):
    """Put an alarm aside for a while."""

    reason: str
    for_s: float | None = None
    until_ns: int | None = None


class Note(_Body, frozen=True):
    """Note for the next person."""

    note: str = ""


def reason_text(text: str, needed: bool = True) -> str:
    """A reason: one line of bounded length. Raises Refused if it is needed and not there."""
    out = clean(text.strip(), MAX_REASON)
    if needed and not out:
        raise Refused(400, "reason: expected a few words for the journal")
    return out


def until(live: Runtime, for_s: float | None, instant_ns: int | None, needed: bool = True) -> int:
    """Return the end from a duration or an instant; 0 means no end. Raises Refused."""
    if for_s is not None and instant_ns is not None:
        raise Refused(400, "for_s and an instant were both given; expected one of them")
    if for_s is not None:
        if not 0 < for_s <= MAX_FOR_S:
            raise Refused(400, f"for_s: expected seconds from 0 to {MAX_FOR_S:g}, got {for_s:g}")
        return live.engine.state.now_ns + round(for_s * NS)
    if not instant_ns and needed:  # 0 would be no end
        raise Refused(400, "for_s: missing; expected a duration in seconds")
    if instant_ns is not None and not 0 <= instant_ns < 2**63:
        raise Refused(400, f"expected an instant in ns since 1970, got {instant_ns}")
    return instant_ns or 0


def control_of(key: str) -> Control:
    """A control of the catalogue. Raises Refused."""
    found = find_control(key)
    if found is None:
        known = [c.key for spec in TABLES.values() for c in spec.controls]
        text = f"{clean(key, 60)} is not a control; expected one of {', '.join(known)}"
        raise Refused(404, text + did_you_mean(key, known))
    return found


def level(control: Control, value: float | str | None, default: float, name: str) -> float:
    """A bound as a number; a state by its name."""
    if value is None:
        return default
    if isinstance(value, str):
        if value not in control.states:
            words = f" or one of {', '.join(control.states)}" if control.states else ""
            raise Refused(400, f"{name}: expected a number{words}, got {clean(value, 60)!r}")
        return float(control.states.index(value))
    if not math.isfinite(value):
        raise Refused(400, f"{name}: expected a number")
    return float(value)


def doubts(
    live: Runtime, control: Control, names: tuple[str, ...], low: float, high: float, want: float | None
) -> list[str]:
    """Warnings about a request for these entities. Raises Refused where it can have no sense."""
    site, key = live.engine.site, control.key
    rows = np.array([i for n in names if (i := site.entity(control.table, n)) is not None], np.int32)
    envelope, out = site.envelopes.get(key), list[str]()
    if envelope is not None and len(rows) and low <= high:  # the engine refuses what is upside down
        least, most = envelope.low[rows], envelope.high[rows]
        can = np.isfinite(least) & np.isfinite(most)
        if not can.any():
            out.append(f"none of these entities can be controlled: they have no envelope for {key}")
        else:
            out += _within(control, least[can], most[can], low, high, want)
            if not can.all():
                out.append(f"{int((~can).sum())} of {len(rows)} cannot be controlled")
    spared = live.engine.windows.mask_of_control(key)
    if spared is not None and len(rows) and (kept := int(np.count_nonzero(spared[rows]))):
        out.append(
            f"{kept} of {len(rows)} are under maintenance or asleep: nothing is commanded until that ends"
        )
    return out


def _within(
    control: Control, least: np.ndarray, most: np.ndarray, low: float, high: float, want: float | None
) -> list[str]:
    bounds = f"{least.min():g} to {most.max():g} {control.unit}"
    missed = (low > most) | (high < least)
    if want is not None:
        missed |= (want < least) | (want > most)
    if missed.all():
        raise Refused(400, f"lo, hi, want: outside the allowed range, {bounds}; expected a value within")
    out = list[str]()
    if missed.any():
        out.append(f"{int(missed.sum())} of {len(least)} may not be that; these allow {bounds}")
    if want is None and ((low <= least) & (high >= most)).all():
        out.append(f"the request changes nothing: the allowed range is {bounds} in any case")
    return out
