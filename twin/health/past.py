"""What is known of the past of devices: since when each was heard, and how often another took its slot.

Their age is not known: nobody says when a device was made, only since when it was heard here. May import the
site, words and frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import I32, I64, NS, Bool
from twin.health.levels import HEALTHY
from twin.health.records import Evidence
from twin.site import Site

TABLES = ("gpu", "node")
DAY_S = 86_400.0
_COLUMNS = ("first_ns", "replaced", "replaced_ns")


class Past:
    """By table, columns [n]: when first heard (0: never), replacements, when the last one was."""

    def __init__(self, site: Site) -> None:
        self.held = {t: {name: np.zeros(site.sizes[t], np.int64) for name in _COLUMNS} for t in TABLES}
        self._whole = dict.fromkeys(TABLES, False)  # whether all have been heard
        self.now_ns = 0

    def update(self, spoke: Mapping[str, Bool], now_ns: int) -> None:
        """Note who has spoken (by table [n]) for the first time."""
        self.now_ns = now_ns
        for table in TABLES:
            if self._whole[table]:
                continue
            first: I64 = self.held[table]["first_ns"]
            first[spoke[table] & (first == 0)] = now_ns
            self._whole[table] = bool((first > 0).all())

    def evidence(self, table: str, entity: int) -> tuple[Evidence, ...]:
        """Repairs and age of a device, for information."""
        if table not in self.held:
            return ()
        first, times, last = (int(self.held[table][name][entity]) for name in _COLUMNS)
        out = []
        if times:
            ago = (self.now_ns - last) / NS / DAY_S
            said = "once" if times == 1 else f"{times} times"
            out.append(f"it was replaced {said}, last {ago:.0f} days ago")
        if first:
            out.append(f"heard for {_span((self.now_ns - first) / NS)}; its age is not known")
        else:
            out.append("it was never heard; its age is not known")
        return (Evidence("history", HEALTHY, "; ".join(out), first, 0.0, "racktwin since it watches"),)

    def forget(self, table: str, entity: int, now_ns: int) -> None:
        """Another device sits in this slot."""
        if table in self.held:
            held = self.held[table]
            held["first_ns"][entity], held["replaced_ns"][entity] = 0, now_ns
            held["replaced"][entity] += 1
            self._whole[table] = False

    def remapped(self, site: Site, old_of_new: Mapping[str, I32]) -> Past:
        """The same for a changed site."""
        out = Past(site)
        out.now_ns = self.now_ns
        for table in TABLES:
            kept = np.flatnonzero(old_of_new[table] >= 0)
            for name in _COLUMNS:
                out.held[table][name][kept] = self.held[table][name][old_of_new[table][kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {"held": self.held, "now_ns": self.now_ns}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.now_ns = int(data["now_ns"])
        for table in TABLES:
            self.held[table] = {name: np.array(data["held"][table][name], np.int64) for name in _COLUMNS}
            self._whole[table] = bool((self.held[table]["first_ns"] > 0).all())


def _span(seconds: float) -> str:
    if seconds < 5400.0:
        minutes = round(seconds / 60.0)
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    hours = round(seconds / 3600.0)
    if hours < 48:
        return f"{hours} hour{'' if hours == 1 else 's'}"
    return f"{seconds / DAY_S:.0f} days"
