"""Leak detectors: the detectors that were wet, since when, and whether each counts as evidence.

Detectors flap. A detector counts while it is wet. After two wet readings in a row, or repeated ones, it
counts until people clear it; a single wet reading is forgotten. A detector that falls silent while wet stays
wet. One with bad quality or in maintenance is no evidence. One that never reported is neither wet nor dry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64, NS, U8, Bool
from twin.contracts import Memory, View
from twin.telemetry import GOOD, STALE

# Between two wet readings of a detector that flaps, as drops come and go; those around the racks count for so
# long; source: estimate
HOLD_S = 300.0
# Wet readings, each within HOLD_S of the last, or seconds on end, after which a detector is remembered until
# people clear it, as it is after two readings in a row; a meter that sends changes alone says it once
KEPT_READINGS, KEPT_S = 3, 10.0
TRAY, ROPE, SUM, CDU, HALL = "tray", "rope", "sum", "cdu", "hall"
KEYS = {
    TRAY: "node.leak_state",
    ROPE: "rack.leak_state",
    SUM: "rack.tray_leak_state",  # what the building's system says of all trays of a rack
    CDU: "cdu.leak_state",
    HALL: "hall.leak_state",
}
FAULTY = "rack.leak_sensor_fault_state"  # of the rope
COLUMNS = ("first_ns", "last_ns", "run_ns", "read_ns", "wets")  # of each kind


@dataclass(frozen=True, slots=True)
class Detectors:
    """The detectors of one kind [n]: wet now, counted, dry for certain, and their memory.

    `first_ns`, `last_ns`: since when, and when last, one that is remembered was wet; 0 = it is not.
    """

    wet: Bool
    counts: Bool
    dry: Bool
    first_ns: I64
    last_ns: I64
    run_ns: I64  # since when it has been wet on end
    read_ns: I64
    wets: U8

    def memory(self, kind: str) -> Memory:
        """The columns that the next assessment begins with."""
        return {f"{kind}_{name}": getattr(self, name) for name in COLUMNS}

    def cleared(self, mask: Bool) -> Detectors:
        """Return a copy without the memory of these [n]."""
        keep = ~mask
        return Detectors(
            self.wet,
            self.counts & keep,
            self.dry,
            np.where(keep, self.first_ns, 0),
            np.where(keep, self.last_ns, 0),
            np.where(keep, self.run_ns, 0),
            self.read_ns,
            np.where(keep, self.wets, 0).astype(np.uint8),
        )


def columns(kind: str) -> dict[str, str]:
    """The declaration of the memory of a kind."""
    return {f"{kind}_{name}": "u1" if name == "wets" else "i8" for name in COLUMNS}


def detectors(view: View, memory: Memory, kind: str) -> Detectors:
    """The detectors of a kind now; those around the racks are not remembered beyond HOLD_S."""
    key, now_ns = KEYS[kind], view.now_ns
    table = key.partition(".")[0]
    value, quality = view.value(key), view.quality(key)
    believed = (quality == GOOD) | (quality == STALE)
    works = _in_maintenance(view, table)
    wet = (value == 1.0) & believed & ~works
    if kind == ROPE:
        wet &= ~((view.value(FAULTY) == 1.0) & np.isin(view.quality(FAULTY), (GOOD, STALE)))
    first_ns, last_ns, run_ns, read_ns, wets = (memory[f"{kind}_{name}"] for name in COLUMNS)
    if not wet.any() and not last_ns.any():
        dry = works | ((value == 0.0) & (quality == GOOD))
        return Detectors(wet, wet, dry, first_ns, last_ns, run_ns, read_ns, wets)
    at_ns = now_ns - np.rint(np.minimum(view.age_s(key) * NS, float(now_ns))).astype(np.int64)
    fresh = wet & (at_ns > read_ns)
    wets = np.minimum(wets + fresh, 100).astype(np.uint8)
    last_ns = np.where(wet, now_ns, last_ns)
    in_a_row = fresh & (run_ns > 0)
    run_ns = np.where(wet, np.where(run_ns > 0, run_ns, now_ns), 0)
    in_a_row |= wet & (now_ns - run_ns >= round(KEPT_S * NS))
    wets = np.where(in_a_row, np.maximum(wets, KEPT_READINGS), wets)
    of_rack = kind not in (CDU, HALL)
    kept = (wets >= KEPT_READINGS) & of_rack
    lasts = wet | ((last_ns > 0) & (now_ns - last_ns < round(HOLD_S * NS))) | kept
    first_ns = np.where(lasts, np.where(first_ns > 0, first_ns, now_ns), 0)
    counts = wet | kept if of_rack else lasts
    return Detectors(
        wet,
        counts & ~works,
        works | ((value == 0.0) & (quality == GOOD)),
        first_ns,
        np.where(lasts, last_ns, 0),
        run_ns,
        np.where(fresh, at_ns, read_ns),
        np.where(lasts, wets, 0).astype(np.uint8),
    )


def _in_maintenance(view: View, table: str) -> Bool:
    mask = view.maintenance(table, asleep=False)  # a node that sleeps is silent; a wet detector is not
    return np.zeros(view.site.sizes[table], np.bool_) if mask is None else mask


def age_s(now_ns: int, since_ns: int) -> float | None:
    """Return the seconds since an instant; None if it is 0."""
    return (now_ns - since_ns) / NS if since_ns else None


def spread(values: F64 | I64 | Bool, of: np.ndarray) -> np.ndarray:
    """Return the value of each entity's parent; 0 without a parent (-1)."""
    if not len(values):
        return np.zeros(len(of), values.dtype)
    return np.where(of >= 0, values[np.maximum(of, 0)], values.dtype.type(0))
