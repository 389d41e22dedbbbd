"""Identity: maps the serial that a device reports to its slot, and detects replaced devices.

The first serial of a slot is remembered; another one means that the device was replaced. Not believed are: a
serial that is not a valid name, a serial that two reporting slots claim, and a slot whose serial keeps
changing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Literal

import numpy as np

from twin.catalogue import NS, TABLES, Bool
from twin.contracts import EventRecord, JournalRecord, brief_event
from twin.site import Site
from twin.telemetry import EntityReplaced, IdentityTold, State

# source: NVML API reference: a serial has at most 30 characters, a UUID 96; an agent may report both
MAX_SERIAL = 160
MIN_SERIAL = 4  # source: estimate
# A board is changed by hand, which takes a node out for a while; two agents under one name take turns.
MOST_CHANGES, WITHIN_S = 3, 3600.0  # source: estimate
# Several GPUs may share a board and its serial (NVML on nvmlDeviceGetHandleBySerial).
MOST_MOVES, MOVES_WITHIN_S = 3, 86_400.0  # source: estimate
MAX_MOVED = 10_000  # serials whose moves are remembered
MAX_IDS = 10_000  # ids of events, against a second delivery
MAX_REFUSALS = 64  # refusals of one tick that the journal lists; the rest is counted
# Placeholders of firmware where nobody wrote a serial. source: values seen in SMBIOS type 2 tables; estimate
_NOBODYS = frozenset((
    "none", "null", "n/a", "[n/a]", "unknown", "unknown error", "default string", "default", "not specified",
    "not available", "not applicable", "not supported", "[not supported]", "system serial number",
    "to be filled by o.e.m.", "base board serial number", "chassis serial number", "serial number", "serial",
    "o.e.m.", "empty", "invalid", "0123456789", "123456789", "1234567890", "12345678", "01234567", "1234",
))  # fmt: skip

News = Literal["none", "first", "same", "other"]


def check_serial(serial: str) -> str | None:
    """Return the reason why a serial does not identify a device, or None."""
    if not MIN_SERIAL <= len(serial) <= MAX_SERIAL:
        return f"a serial of {len(serial)} characters; expected {MIN_SERIAL} to {MAX_SERIAL}"
    if not (serial.isascii() and serial.isprintable()) or serial != serial.strip():
        return "a serial with characters that no serial has"
    if serial.lower() in _NOBODYS or len(set(serial) - set(" -./:_")) < 2:
        return f"{serial[:40]!r} is what firmware tells where nobody wrote a serial"
    return None


def slot_of(site: Site, table: str, name: str) -> str | None:
    """`table:path` of an entity by any of its names; None where the site has no such one."""
    entity = site.entity(table, name) if table in TABLES else None
    return None if entity is None else f"{table}:{site.name(table, entity)}"


def news(serials: dict[str, str], event: IdentityTold, site: Site) -> News:
    """Compare a serial with the known one of its slot; "none" is no serial. Not yet a verdict."""
    slot = slot_of(site, event.table, event.name)
    if slot is None or check_serial(event.serial) is not None:
        return "none"
    known = serials.get(slot)
    if known is None:
        return "first"
    return "same" if known == event.serial else "other"


def replaced_entity(serials: dict[str, str], event: EntityReplaced | IdentityTold, site: Site) -> int | None:
    """Return the entity whose counters start again, as another device took its slot; None if none did."""
    slot = slot_of(site, event.table, event.name)
    if slot is None or serials.get(slot) == event.serial:
        return None
    return site.entity(event.table, event.name)


class Identities:
    """Serials by slot (`table:name`), and when they changed. A slot whose device went elsewhere has ""."""

    def __init__(self) -> None:
        self.serials: dict[str, str] = {}
        self.counts = {"swaps": 0, "refused": 0, "again": 0}
        self._slot_of: dict[str, str] = {}  # table:serial -> slot; made from `serials`
        self._vacant: set[str] = set()  # slots whose device is elsewhere; made from `serials`
        self._changed_ns: dict[str, list[int]] = {}  # slot -> when another came, oldest first
        self._left_ns: dict[str, int] = {}  # slot -> when its device turned up elsewhere
        self._refused_ns: dict[str, int] = {}  # slot -> when the journal last recorded a refusal
        self._moved_ns: OrderedDict[str, list[int]] = OrderedDict()  # table:serial -> when it went elsewhere
        self._ids: OrderedDict[int, None] = OrderedDict()
        self._n_refused, self._counted_ns = 0, 0

    def place(self, slot: str, serial: str) -> None:
        """Assign a device to a slot, and remove it from any other slot."""
        table = slot.partition(":")[0]
        self._slot_of.pop(f"{table}:{self.serials.get(slot)}", None)
        if serial:
            other = self._slot_of.get(f"{table}:{serial}")
            if other is not None:
                self.serials[other] = ""
                self._vacant.add(other)
            self._slot_of[f"{table}:{serial}"] = slot
        self.serials[slot] = serial
        (self._vacant.discard if serial else self._vacant.add)(slot)

    def vacant(self, table: str, site: Site) -> Bool | None:
        """Slots of a table whose device was found elsewhere [n]; None where there are none."""
        slots = [slot.partition(":")[2] for slot in self._vacant if slot.startswith(f"{table}:")]
        found = [i for name in slots if (i := site.entity(table, name)) is not None]
        if not found:
            return None
        out: Bool = np.zeros(site.sizes[table], np.bool_)
        out[found] = True
        return out

    def changed_in(self, now_ns: int) -> list[tuple[str, str]]:
        """(table, name) of the slots that got or lost a device in the tick of this instant."""
        slots = [slot for slot, at in self._changed_ns.items() if now_ns in at]
        slots += [slot for slot, at_ns in self._left_ns.items() if at_ns == now_ns and slot not in slots]
        return sorted((table, name) for table, _, name in (slot.partition(":") for slot in slots))

    def receive(
        self, event: IdentityTold, site: Site, state: State
    ) -> tuple[list[EntityReplaced], list[JournalRecord]]:
        """Process a reported serial; return (changed slots: its new and its former one; journal records)."""
        now_ns = state.now_ns
        if event.id and not self._is_new(event.id):
            return [], []
        slot = slot_of(site, event.table, event.name)
        if slot is None:
            return [], self._refuse(event, "", f"no {event.table[:40]} {event.name[:200]}", now_ns)
        refused = check_serial(event.serial)
        if refused is not None:
            return [], self._refuse(event, slot, refused, now_ns)
        known = self.serials.get(slot)
        if known == event.serial:
            return [], []
        from_slot = self._slot_of.get(f"{event.table}:{event.serial}")
        refused = self._why_not(event, slot, from_slot, site, state)
        if refused is not None:
            return [], self._refuse(event, slot, refused, now_ns)
        if not known and from_slot is None:  # what left the slot was forgotten when it turned up elsewhere
            self.place(slot, event.serial)
            return [], []
        name = slot.partition(":")[2]
        left = "" if from_slot is None else from_slot.partition(":")[2]
        swaps = [EntityReplaced(table=event.table, name=name, serial=event.serial, moved_from=left)]
        if from_slot is not None:
            self._note_move(f"{event.table}:{event.serial}", now_ns)
            if site.entity(event.table, left) is not None:
                swaps.insert(0, EntityReplaced(table=event.table, name=left, serial=""))
                self._left_ns[from_slot] = now_ns
        self.counts["swaps"] += len(swaps)
        at = self._changed_ns.setdefault(slot, [])
        at.append(now_ns)
        del at[:-MOST_CHANGES]
        return swaps, [EventRecord(event=brief_event(event), was=known or "", moved_from=left or None)]

    def _why_not(
        self, event: IdentityTold, slot: str, from_slot: str | None, site: Site, state: State
    ) -> str | None:
        """Return the reason why a slot does not take this serial now, or None."""
        now_ns = state.now_ns
        changes = self._changed_ns.get(slot, [])
        if len(changes) >= MOST_CHANGES and now_ns - changes[-MOST_CHANGES] < WITHIN_S * NS:
            return (
                f"changed {MOST_CHANGES} times within {WITHIN_S / 60:g} min: keeps {self.serials[slot]!r}; "
                "do two agents speak under one name?"
            )
        if from_slot is None:
            return None
        moves = self._moved_ns.get(f"{event.table}:{event.serial}", [])
        if len(moves) >= MOST_MOVES and now_ns - moves[-MOST_MOVES] < MOVES_WITHIN_S * NS:
            return f"went elsewhere {MOST_MOVES} times within a day, last from {from_slot.partition(':')[2]}"
        left = from_slot.partition(":")[2]
        # The same node speaks for all its GPUs: it knows in which order they are now. Nobody else may take
        # a device away from a place that reports.
        name = slot.partition(":")[2]
        if event.table == "gpu" and left.rpartition("/")[0] == name.rpartition("/")[0]:
            return None
        entity = site.entity(event.table, left)
        if entity is not None and state.tables[event.table].reports(entity, state.now_ns):
            return f"{left} has this serial and is heard: a device is in one place"
        return None

    def _is_new(self, event_id: str) -> bool:
        key = int.from_bytes(
            hashlib.blake2b(event_id.encode(errors="surrogatepass"), digest_size=8).digest(), "little"
        )
        if key in self._ids:
            self.counts["again"] += 1
            return False
        self._ids[key] = None
        while len(self._ids) > MAX_IDS:
            self._ids.popitem(last=False)
        return True

    def _note_move(self, key: str, now_ns: int) -> None:
        at = self._moved_ns.setdefault(key, [])
        at.append(now_ns)
        del at[:-MOST_MOVES]
        self._moved_ns.move_to_end(key)
        while len(self._moved_ns) > MAX_MOVED:
            self._moved_ns.popitem(last=False)

    def _refuse(self, event: IdentityTold, slot: str, why: str, now_ns: int) -> list[JournalRecord]:
        """Return journal records of refused serials: once an hour per slot, and a bounded number per tick."""
        self.counts["refused"] += 1
        if self._counted_ns != now_ns:
            self._n_refused, self._counted_ns = 0, now_ns
        last_ns = self._refused_ns.get(slot) if slot else None
        if self._n_refused >= MAX_REFUSALS or (last_ns is not None and now_ns - last_ns < WITHIN_S * NS):
            return []
        self._n_refused += 1
        if slot:
            self._refused_ns[slot] = now_ns
        return [EventRecord(event=brief_event(event), refused=why)]

    def dump(self) -> dict[str, Any]:
        """Return the state, without `serials`, on which later decisions depend."""
        return {
            "counts": self.counts, "changed_ns": self._changed_ns, "left_ns": self._left_ns,
            "refused_ns": self._refused_ns,
            "moved_ns": [list(item) for item in self._moved_ns.items()],
            "heard": np.fromiter(self._ids, np.uint64, len(self._ids)),
        }  # fmt: skip

    def restore(self, serials: dict[str, str], data: dict[str, Any] | None) -> None:
        """Restore the result of `dump` and the serials. Older snapshots have only the serials."""
        self.serials = dict(serials)
        self._slot_of = {
            f"{slot.partition(':')[0]}:{self.serials[slot]}": slot
            for slot in sorted(self.serials)
            if self.serials[slot]
        }
        self._vacant = {slot for slot, serial in serials.items() if not serial}
        if data is None:
            return
        self.counts = dict(data["counts"])
        self._changed_ns = {slot: list(at) for slot, at in data["changed_ns"].items()}
        self._left_ns, self._refused_ns = dict(data["left_ns"]), dict(data["refused_ns"])
        self._moved_ns = OrderedDict((key, list(at)) for key, at in data["moved_ns"])
        self._ids = OrderedDict.fromkeys(data["heard"].tolist())
