"""Maintenance windows: where people work, nothing is alarmed, commanded or learned until they are done.

A window covers the entities that it names and all below them: a hall its racks and CDUs, a rack or supernode
its nodes, a node its GPUs and links. A CDU or a feeder covers only itself: the racks that it serves are fed
and cooled by others too, and go on being guarded. Nodes that are off on purpose (`standby`) are silent like
those in a window, and what is below them; only people's windows keep commands from their scheduler. Masks are
None where neither is, so that a site without them pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from twin.catalogue import F64, I32, I64, NS, TABLES, Bool, Signal
from twin.contracts.journal import (
    JournalRecord,
    KeptBackRecord,
    MaintenanceDroppedRecord,
    MaintenanceExpiredRecord,
)
from twin.contracts.standby import BY_AGENT, Standby
from twin.site import Site
from twin.telemetry import State, TableState, events as ev

MAX_WINDOWS = 1000
MAX_NAMES = 100_000  # of all windows together
MAX_LENGTH_S = 30 * 86_400.0
# That a window ended here is forgotten after this long: whatever fell silent since has drifted to its end.
ENDED_S = 86_400.0


@dataclass(slots=True)
class Window:
    """One window, its entities by full name, and where they are on the present site."""

    event: ev.MaintenanceBegun
    inside: dict[str, I32]  # table -> entities, ascending
    is_noted: bool = False  # that a protective move was kept back because of it


class Windows:
    """The windows of a site and what they cover, and its nodes that are off on purpose."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.windows: dict[str, Window] = {}
        self.standby = Standby(site.sizes)
        self.worked: dict[str, Bool] = {}  # where people work
        self.masks: dict[str, Bool] = {}  # there, and off on purpose
        self.ended_ns: dict[str, I64] = {}  # table -> when the last window over each entity ended
        self._left: dict[str, Bool] = {}  # who came out of a window, since it was last asked
        self._racks: Bool | None = None

    def mask(self, table: str, asleep: bool = True) -> Bool | None:
        """Entities in maintenance or, with `asleep`, off on purpose [n]; None if there are none."""
        return (self.masks if asleep else self.worked).get(table)

    def mask_of_control(self, control: str) -> Bool | None:
        """Entities to which nothing is sent on this control [n]; None if there are none."""
        table = control.partition(".")[0]
        asleep = table == "gpu" or control in BY_AGENT
        return (self.masks if asleep else self.worked).get(table)

    def update_standby(self, state: State) -> None:
        """Take in which nodes are off on purpose now."""
        if self.standby.update(state, self.site.node_of_gpu):
            self._cover(state.now_ns)

    def events(self) -> tuple[ev.MaintenanceBegun, ...]:
        """The events that would open the present windows on another daemon of this site."""
        return tuple(w.event for w in self.windows.values())

    def racks_touched(self) -> Bool | None:
        """Racks that are in a window, or have a node or GPU in one [n_rack]; None if there are none."""
        return self._racks

    def begin(self, event: ev.MaintenanceBegun, now_ns: int) -> str | None:
        """Open a window; the reason why not, if it cannot be."""
        if not event.id:
            return "a maintenance window needs an id, by which it can be ended"
        if event.table not in TABLES or event.table == "job":
            known = ", ".join(t for t in TABLES if t != "job")
            return f"no table {event.table}; expected one of {known}"
        if not event.names:
            return f"names no {event.table}"
        if not now_ns < event.until_ns:
            return f"over already, {(now_ns - event.until_ns) / NS:.0f} s ago; expected an instant to come"
        if event.until_ns - now_ns > MAX_LENGTH_S * NS:
            return f"longer than {MAX_LENGTH_S / 86_400:.0f} days; expected a shorter window, to be renewed"
        if event.id not in self.windows and len(self.windows) >= MAX_WINDOWS:
            return f"more than {MAX_WINDOWS} maintenance windows"
        others = sum(len(w.event.names) for key, w in self.windows.items() if key != event.id)
        if others + len(event.names) > MAX_NAMES:
            return f"the windows name more than {MAX_NAMES} entities; expected whole racks or halls"
        found = [self.site.entity(event.table, name) for name in event.names]
        if None in found:
            return f"{event.names[found.index(None)]}: this site has no such {event.table}"
        index = np.unique(np.array(found, np.int32))
        # By full name: what is unique today may be ambiguous on the site of tomorrow.
        names = tuple(self.site.name(event.table, i) for i in index.tolist())
        kept = msgspec.structs.replace(event, names=names)
        self.windows[event.id] = Window(kept, below(self.site, event.table, index))
        self._cover(now_ns)
        return None

    def end(self, event: ev.MaintenanceEnded, now_ns: int) -> str | None:
        """Close a window before its time; the reason why not, if there is none."""
        if self.windows.pop(event.window, None) is None:
            return f"no maintenance window {event.window}"
        self._cover(now_ns)
        return None

    def expire(self, now_ns: int) -> list[JournalRecord]:
        """Close the windows whose time is over; returns journal records."""
        if not self.windows and not self.ended_ns:
            return []
        over = [key for key, w in self.windows.items() if w.event.until_ns <= now_ns]
        for key in over:
            del self.windows[key]
        if over:
            self._cover(now_ns)
        for table in [t for t, at in self.ended_ns.items() if now_ns - int(at.max()) > ENDED_S * NS]:
            del self.ended_ns[table]
        return [MaintenanceExpiredRecord(id=key) for key in over]

    def _cover(self, now_ns: int | None) -> None:
        """The masks of the present windows; where one has gone, silence counts from `now_ns`."""
        before, worked, self.worked, self._racks = self.masks, self.worked, {}, None
        for window in self.windows.values():
            for table, index in window.inside.items():
                self.worked.setdefault(table, np.zeros(self.site.sizes[table], np.bool_))[index] = True
        self.masks = self.worked
        if self.standby.off.any():
            self.masks = {table: mask.copy() for table, mask in self.worked.items()}
            asleep = np.flatnonzero(self.standby.off).astype(np.int32)
            for table, index in below(self.site, "node", asleep).items():
                self.masks.setdefault(table, np.zeros(self.site.sizes[table], np.bool_))[index] = True
        if now_ns is not None:
            for table, left in _gone(before, self.masks).items():
                at = self.ended_ns.setdefault(table, np.zeros(self.site.sizes[table], np.int64))
                at[left] = now_ns
            for table, left in _gone(worked, self.worked).items():
                self._left[table] = self._left.get(table, np.bool_(False)) | left
        if self.masks.keys() & {"rack", "node", "gpu"}:
            racks = np.zeros(self.site.sizes["rack"], np.bool_)
            for table, rack_of in (("node", self.site.rack_of_node), ("gpu", self.site.rack_of_gpu)):
                if table in self.masks:
                    racks[rack_of[self.masks[table]]] = True
            self._racks = racks | self.masks.get("rack", np.bool_(False))

    def take_left(self) -> dict[str, I32]:
        """Entities that came out of a window since this was last asked, by table."""
        left, self._left = self._left, {}
        return {
            table: np.flatnonzero(was & ~self.worked.get(table, np.bool_(False))).astype(np.int32)
            for table, was in left.items()
        }

    def kept_back(self, key: str, protective: Bool) -> list[JournalRecord]:
        """Journal records, one per window: a protective move was not sent, as people's hands are on it."""
        table = key.partition(".")[0]
        records: list[JournalRecord] = []
        for name, window in self.windows.items():
            index = window.inside.get(table)
            if window.is_noted or index is None:
                continue
            count = int(np.count_nonzero(protective[index]))
            if count:
                window.is_noted = True
                why = "a protective move is not sent where people work"
                records.append(KeptBackRecord(window=name, control=key, count=count, why=why))
        return records

    def excused(self, table: str, now_ns: int, stale_ns: I64) -> Bool | None:
        """Entities whose silence is expected [n]: in a window, off on purpose, or in the first `stale_ns` [n]
        after that."""
        mask, ended_ns = self.masks.get(table), self.ended_ns.get(table)
        if ended_ns is None:
            return mask
        resting = now_ns - ended_ns <= stale_ns
        return resting if mask is None else resting | mask

    def gentler(self, table: TableState, signal: Signal, now_ns: int, slew_per_s: F64 | None) -> F64 | None:
        """`slew_per_s` [n] such that silence before the end of a window adds nothing to a worst case.

        The state counts the drift of all of a table from one instant; here it is scaled per entity to what it
        would be, had it begun at the end of the window.
        """
        ended_ns = self.ended_ns.get(table.table)
        if ended_ns is None or signal.danger == "none":
            return slew_per_s
        # Only for those who came out of a window, and if one has not spoken since: this runs in each tick.
        row, index = signal.row, np.flatnonzero(ended_ns)
        received_ns = table.last_good_ns(signal, index)
        if (received_ns >= ended_ns[index]).all():
            return slew_per_s
        free_s = table.limits(row).drift_s[index]
        age_s = table.silence_s((now_ns - received_ns) / NS, now_ns)
        late_s = np.maximum(age_s - free_s, 0.0)
        since_s = np.maximum(np.minimum(age_s, (now_ns - ended_ns[index]) / NS) - free_s, 0.0)
        out = np.full(table.n, table.slew_per_s[row]) if slew_per_s is None else slew_per_s.copy()
        out[index] *= np.where(late_s > 0, since_s / np.where(late_s > 0, late_s, 1.0), 1.0)
        return out

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> tuple[Windows, list[JournalRecord]]:
        """(these windows on a changed site, journal records of those of which nothing is left)."""
        out = Windows(site)
        out.standby.adopt(self.standby, old_of_new)
        records: list[JournalRecord] = []
        for key, window in self.windows.items():
            found = [site.entity(window.event.table, name) for name in window.event.names]
            index = np.unique(np.array([i for i in found if i is not None], np.int32))
            if len(index) == 0:
                records.append(MaintenanceDroppedRecord(id=key, why="the site has none of it"))
                continue
            out.windows[key] = Window(window.event, below(site, window.event.table, index), window.is_noted)
        for table, at in self.ended_ns.items():
            kept = np.flatnonzero(old_of_new[table] >= 0)
            moved = np.zeros(site.sizes[table], np.int64)
            moved[kept] = at[old_of_new[table][kept]]
            if moved.any():
                out.ended_ns[table] = moved
        for table, was in self._left.items():
            kept = np.flatnonzero(old_of_new[table] >= 0)
            left = np.zeros(site.sizes[table], np.bool_)
            left[kept] = was[old_of_new[table][kept]]
            out._left[table] = left
        out._cover(None)
        return out, records

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        windows = [[msgspec.to_builtins(w.event), w.is_noted] for w in self.windows.values()]
        return {"windows": windows, "ended_ns": self.ended_ns, "standby": self.standby.dump()}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave, on the same site."""
        self.windows = {}
        for plain, announced in data["windows"]:
            event = msgspec.convert(plain, ev.MaintenanceBegun)
            index = np.array([self.site.entity(event.table, name) for name in event.names], np.int32)
            self.windows[event.id] = Window(event, below(self.site, event.table, index), bool(announced))
        self.ended_ns = {table: np.array(at) for table, at in data["ended_ns"].items()}
        if "standby" in data:
            self.standby.restore(data["standby"])
        self._cover(None)


def _gone(before: dict[str, Bool], now: dict[str, Bool]) -> dict[str, Bool]:
    """Entities that were covered and are no longer, by table."""
    left = {table: was & ~now.get(table, np.bool_(False)) for table, was in before.items()}
    return {table: mask for table, mask in left.items() if mask.any()}


def below(site: Site, table: str, index: I32) -> dict[str, I32]:
    """Entities by table: these and all that is inside them."""
    if table == "site":
        return {t: np.arange(n, dtype=np.int32) for t, n in site.sizes.items() if n and t != "job"}
    inside = {t: np.zeros(n, np.bool_) for t, n in site.sizes.items()}
    inside[table][index] = True
    for parent, child, parent_of in (
        ("hall", "rack", site.hall_of_rack),
        ("hall", "cdu", site.hall_of_cdu),
        ("rack", "node", site.rack_of_node),
        ("supernode", "node", site.supernode_of_node),
        ("node", "gpu", site.node_of_gpu),
        ("node", "link", site.node_of_link),
    ):
        if inside[parent].any():
            inside[child] |= (parent_of >= 0) & inside[parent][parent_of]
    return {t: cast(I32, np.flatnonzero(m).astype(np.int32)) for t, m in inside.items() if m.any()}
