"""Cause: one hypothesis of what is wrong, with the symptoms it accounts for; and the book of reported causes.

A cause is reported once it has been the best account for its `hold_s`, and stays until it has found no
support for `clear_s`: neither its kind nor its entity flaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twin.catalogue import I32, NS
from twin.contracts import Fault, Finding
from twin.diagnosis.fault_kinds import FAULT_KINDS
from twin.diagnosis.topology import Places
from twin.site import Site

HOLD_S, CLEAR_S = 5.0, 30.0
MAX_TOLD = 1000  # faults at once; a site with more is told of the gravest
MAX_EVIDENCE = 6
MOST_ALIKE = 20  # of one kind and signal that are told each by itself
Key = tuple[str, str, int, str]  # kind, table, entity, signal
_GRAVITY = {"critical": 0, "warning": 1, "info": 2}


@dataclass(slots=True)
class Cause:
    """A hypothesis that the present symptoms support. `covers`: symptom -> the entities that it explains."""

    kind: str
    table: str
    entity: int
    signal: str = ""
    confidence_pu: float = 0.99
    evidence: tuple[str, ...] = ()
    count: int = 1
    hold_s: float = HOLD_S
    clear_s: float = CLEAR_S
    covers: dict[str, I32] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.kind, self.table, self.entity, self.signal


@dataclass(slots=True)
class Told:
    """A fault that is told: the cause as last supported, since when, and when it last had support."""

    cause: Cause
    since_ns: int
    supported_ns: int


class Book:
    """Causes waiting to be sure, and those that were told."""

    def __init__(self, places: Places | None = None) -> None:
        self.places = places
        self.waiting: dict[Key, tuple[int, int]] = {}  # key -> (first supported, last supported)
        self.told: dict[Key, Told] = {}
        self._by_gravity: tuple[dict[Key, None], ...] | None = (
            None  # the told of this tick, once there is need
        )

    def update(self, causes: Iterable[Cause], now_ns: int) -> None:
        """The causes that now have support, best first."""
        self._by_gravity = None
        now: dict[Key, Cause] = {}
        for cause in causes:
            now.setdefault(cause.key, cause)
        for key, cause in now.items():
            known = self.told.get(key)
            if known is not None:
                cause.count = max(cause.count, 1)
                known.cause, known.supported_ns = cause, now_ns
                continue
            first_ns, _ = self.waiting.get(key, (now_ns, now_ns))
            self.waiting[key] = (first_ns, now_ns)
            if now_ns - first_ns >= cause.hold_s * NS and self._has_room(cause):
                self._tell(cause, first_ns, now_ns, now)
        for key in [k for k, (_, last) in self.waiting.items() if k in self.told or now_ns - last > 5 * NS]:
            del self.waiting[key]
        for key in [k for k, t in self.told.items() if now_ns - t.supported_ns > t.cause.clear_s * NS]:
            del self.told[key]

    def _has_room(self, cause: Cause) -> bool:
        """Room for a cause; where all is taken, a less grave one gives way."""
        if len(self.told) < MAX_TOLD:
            return True
        if self._by_gravity is None:
            self._by_gravity = tuple({} for _ in _GRAVITY)
            for key in self.told:
                self._by_gravity[_gravity(key)][key] = None
        for mild in reversed(self._by_gravity[_gravity(cause.key) + 1 :]):
            while mild:
                least = next(iter(mild))
                del mild[least]
                if self.told.pop(least, None) is not None:
                    return True
        return False

    def _tell(self, cause: Cause, first_ns: int, now_ns: int, supported: dict[Key, Cause]) -> None:
        """A better account of the same symptoms takes the place of one that lost its support."""
        since_ns = first_ns
        if any(map(len, cause.covers.values())):
            for key, old in list(self.told.items()):
                if key not in supported and overlap(old.cause.covers, cause.covers):
                    since_ns = min(since_ns, old.since_ns)
                    del self.told[key]
        self.told[cause.key] = Told(cause, since_ns, now_ns)
        if self._by_gravity is not None:
            self._by_gravity[_gravity(cause.key)][cause.key] = None

    def faults(self) -> tuple[Fault, ...]:
        """Return the reported faults, gravest first, then oldest; many of one kind are merged into one of
        their ancestor.
        """
        alike: dict[tuple[str, str, str], list[Told]] = {}
        for t in self.told.values():
            alike.setdefault((t.cause.kind, t.cause.table, t.cause.signal), []).append(t)
        found: list[Fault] = []
        for some in alike.values():
            if len(some) > MOST_ALIKE and self.places is not None:
                found.append(_crowd(some, self.places))
            else:
                found += [_fault(t) for t in some]
        return tuple(sorted(found, key=lambda f: (_GRAVITY[f.severity], f.since_ns, f.kind, f.table,
                                                  f.entity, f.signal)))  # fmt: skip

    def covered(self, symptom: str, n: int) -> np.ndarray | None:
        """Entities [n] whose symptom a told fault explains; None if none does."""
        out: np.ndarray | None = None
        for told in self.told.values():
            index = told.cause.covers.get(symptom)
            if index is not None and len(index):
                out = np.zeros(n, np.bool_) if out is None else out
                out[index] = True
        return out

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""
        for book in (self.waiting, self.told):
            for key in [k for k in book if k[1] == table and k[2] == entity]:
                del book[key]

    def remapped(self, old_of_new: dict[str, I32], places: Places | None = None) -> Book:
        """Return the reported causes for a changed site; pending causes start again."""
        out = Book(places)
        for t in self.told.values():
            if t.cause.table != "site":
                new = np.flatnonzero(old_of_new[t.cause.table] == t.cause.entity)
                if len(new) == 0:
                    continue
                t = Told(_moved(t.cause, int(new[0])), t.since_ns, t.supported_ns)
            out.told[t.cause.key] = t
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        told = [
            [t.cause.kind, t.cause.table, t.cause.entity, t.cause.signal, t.cause.confidence_pu,
             list(t.cause.evidence), t.cause.count, t.cause.hold_s, t.cause.clear_s,
             [[k, v] for k, v in t.cause.covers.items()], t.since_ns, t.supported_ns]
            for t in self.told.values()
        ]  # fmt: skip
        return {"waiting": [[list(k), list(v)] for k, v in self.waiting.items()], "told": told}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.waiting = {_key(k): (int(v[0]), int(v[1])) for k, v in data["waiting"]}
        self.told = {}
        for row in data["told"]:
            covers = {k: np.array(v, np.int32) for k, v in row[9]}
            cause = Cause(row[0], row[1], int(row[2]), row[3], float(row[4]), tuple(row[5]), int(row[6]),
                          float(row[7]), float(row[8]), covers)  # fmt: skip
            self.told[cause.key] = Told(cause, int(row[10]), int(row[11]))


def _gravity(key: Key) -> int:
    return _GRAVITY[FAULT_KINDS[key[0]].severity]


def _fault(t: Told) -> Fault:
    c = t.cause
    severity = FAULT_KINDS[c.kind].severity
    return Fault(c.kind, c.table, c.entity, c.signal, severity, c.confidence_pu, t.since_ns,
                 c.evidence[:MAX_EVIDENCE], c.count)  # fmt: skip


def _crowd(some: list[Told], places: Places) -> Fault:
    """Very many of one kind as one fault of the lowest entity that all are under; the oldest is shown."""
    first = min(some, key=lambda t: (t.since_ns, t.cause.entity))
    cause, table, entity = first.cause, "site", 0
    ids = np.array([t.cause.entity for t in some])
    for higher in ("node", "rack", "cdu", "hall"):
        if not places.knows(cause.table, higher):
            continue
        at = np.unique(places.above(cause.table, higher)[ids])
        if len(at) == 1 and at[0] >= 0:
            table, entity = higher, int(at[0])
            break
    name = places.site.name(cause.table, cause.entity)
    text = (f"{len(some)} {cause.table} at once: {name} and {len(some) - 1} more",
            *(f"{name}: {e}" for e in cause.evidence))  # fmt: skip
    return Fault(cause.kind, table, entity, cause.signal, FAULT_KINDS[cause.kind].severity,
                 min(t.cause.confidence_pu for t in some), first.since_ns, text[:MAX_EVIDENCE],
                 len(some))  # fmt: skip


def overlap(a: dict[str, I32], b: dict[str, I32]) -> bool:
    """Return True if two causes account for a symptom of the same entity."""
    return any(name in b and len(np.intersect1d(index, b[name])) > 0 for name, index in a.items())


def finding_of(fault: Fault, site: Site) -> Finding:
    """A fault as people are told of it; the id is the same as long as it lasts."""
    kind = FAULT_KINDS[fault.kind]
    name = site.name(fault.table, fault.entity)
    title = kind.title.format(name=name)
    if fault.signal:
        title += f": {fault.signal}"
    identity = f"fault/{fault.kind}/{name}" + (f"/{fault.signal}" if fault.signal else "")
    return Finding(identity, fault.severity, title, (name,), fault.evidence, fault.confidence_pu,
                   kind.action, fault.count)  # fmt: skip


def _moved(cause: Cause, entity: int) -> Cause:
    return Cause(cause.kind, cause.table, entity, cause.signal, cause.confidence_pu, cause.evidence,
                 cause.count, cause.hold_s, cause.clear_s)  # fmt: skip


def _key(plain: list[Any]) -> Key:
    return str(plain[0]), str(plain[1]), int(plain[2]), str(plain[3])
