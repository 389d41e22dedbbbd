"""Doubts: what a request would come to, said at once to the person who asks, not found out an hour later.

A wish that no entity can fulfil is refused; one that changes nothing, or not everywhere, is taken with a
warning.
"""

from __future__ import annotations

import numpy as np

from twin.api.answers import Refused
from twin.api.runtime import Runtime
from twin.catalogue import Control


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
            out.append(f"none of these can be controlled: they have no envelope for {key}")
        else:
            out += _within(control, least[can], most[can], low, high, want)
            if not can.all():
                out.append(f"{int((~can).sum())} of {len(rows)} cannot be controlled")
    spared = live.engine.windows.mask(control.table)
    if spared is not None and len(rows) and (kept := int(np.count_nonzero(spared[rows]))):
        out.append(f"{kept} of {len(rows)} are under maintenance: nothing is commanded there until that ends")
    return out


def _within(
    control: Control, least: np.ndarray, most: np.ndarray, low: float, high: float, want: float | None
) -> list[str]:
    bounds = f"{least.min():g} to {most.max():g} {control.unit}"
    missed = (low > most) | (high < least)
    if want is not None:
        missed |= (want < least) | (want > most)
    if missed.all():
        raise Refused(400, f"lo, hi, want: outside what these may be, {bounds}; expected a value within")
    out = list[str]()
    if missed.any():
        out.append(f"{int(missed.sum())} of {len(least)} may not be that; these allow {bounds}")
    if want is None and ((low <= least) & (high >= most)).all():
        out.append(f"this changes nothing: these may only be {bounds} in any case")
    return out
