"""Device history: the time of the first report of each device, and the number of replacements in its slot.

The age of a device is unknown: no source says when it was made, only the first report here.
"""

from __future__ import annotations

from collections.abc import Mapping

from twin.catalogue import I64, NS, Bool
from twin.contracts import HEALTHY, Evidence
from twin.site import Site
from twin.telemetry import EntityState, keyed, scalar

TABLES = ("gpu", "node")
DAY_S = 86_400.0


class IncidentHistory(EntityState):
    """By table [n]: when a device was first heard (0: never), how often and when last it was replaced."""

    first_ns: dict[str, I64] = keyed("i8", keys=TABLES)
    replaced: dict[str, I64] = keyed("i8", keys=TABLES)
    replaced_ns: dict[str, I64] = keyed("i8", keys=TABLES)
    now_ns: int = scalar(0)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self._whole = dict.fromkeys(TABLES, False)  # whether all have been heard

    def update(self, spoke: Mapping[str, Bool], now_ns: int) -> None:
        """Note who has spoken (by table [n]) for the first time."""
        self.now_ns = now_ns
        for table in TABLES:
            if self._whole[table]:
                continue
            first = self.first_ns[table]
            first[spoke[table] & (first == 0)] = now_ns
            self._whole[table] = bool((first > 0).all())

    def evidence(self, table: str, entity: int) -> tuple[Evidence, ...]:
        """Repairs and age of a device, for information."""
        if table not in TABLES:
            return ()
        first, times, last = (
            int(known[table][entity]) for known in (self.first_ns, self.replaced, self.replaced_ns)
        )
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

    def derive(self) -> None:
        """Recompute by table the flag that all devices have reported."""
        self._whole = {table: bool((self.first_ns[table] > 0).all()) for table in TABLES}

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: one replacement more."""
        if table in TABLES:
            self.first_ns[table][entity], self.replaced_ns[table][entity] = 0, self.now_ns
            self.replaced[table][entity] += 1
            self._whole[table] = False


def _span(seconds: float) -> str:
    if seconds < 5400.0:
        minutes = round(seconds / 60.0)
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    hours = round(seconds / 3600.0)
    if hours < 48:
        return f"{hours} hour{'' if hours == 1 else 's'}"
    return f"{seconds / DAY_S:.0f} days"
