"""Cause: one hypothesis for a fault with the symptoms that it explains, and the book of reported causes.

A cause is reported once it has been the best account for its `hold_s`, and stays until it has found no
support for `clear_s`: neither its kind nor its entity flaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from twin.catalogue import I32, NS, signal_words, table_noun
from twin.contracts import Fault, Finding
from twin.diagnosis.fault_kinds import FAULT_KINDS
from twin.diagnosis.topology import Topology
from twin.site import Site, noun_key
from twin.telemetry import EntityState, OldOfNew, records

HOLD_S, CLEAR_S = 5.0, 30.0
MAX_REPORTED = 1000  # faults at once; of more than that the gravest, and of those alike not all
MAX_EVIDENCE = 6
AGREED_LEAK = "Isolate it at once: more than one detector or sign shows the leak. Then inspect it."
MOST_ALIKE = 20  # of one kind and signal that are reported each by itself
PENDING_S = 5.0  # without support, until a pending cause starts again
Key = tuple[str, str, int, str]  # kind, table, entity, signal
Alike = tuple[str, str, str]  # kind, table, signal
_GRAVITY = {"critical": 0, "warning": 1, "info": 2}


@dataclass(slots=True)
class Cause:
    """A hypothesis that the present symptoms support. `covers`: symptom -> the entities that it explains.

    Once it is reported: since when, and when it last had support.
    """

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
    since_ns: int = 0
    supported_ns: int = 0
    severity: str = ""  # less than that of its kind, as long as it may be over by itself
    parts: tuple[int, ...] = ()  # of the entity, from 1
    more: int = 0  # alike beside it that are no causes of their own

    @property
    def key(self) -> Key:
        return self.kind, self.table, self.entity, self.signal

    @property
    def alike(self) -> Alike:
        return self.kind, self.table, self.signal


@dataclass(slots=True)
class Support:
    """The first and the last instant with symptoms that support a cause."""

    kind: str
    table: str
    entity: int
    signal: str
    first_ns: int
    last_ns: int

    @property
    def key(self) -> Key:
        return self.kind, self.table, self.entity, self.signal


class CauseBook(EntityState):
    """Causes under observation, and reported causes."""

    waiting: dict[Key, Support] = records(Support)
    reported: dict[Key, Cause] = records(Cause)

    def __init__(self, topology: Topology | None = None) -> None:
        super().__init__({})
        self.topology = topology
        # Keys of the reported causes of this tick, by gravity, once there is need
        self._by_gravity: tuple[dict[Key, None], ...] | None = None
        self._crowds: dict[Alike, list[Key]] = {}  # those of this tick with more than are reported each

    def update(
        self, causes: Iterable[Cause], now_ns: int, lacks_data: Callable[[Cause], bool] | None = None
    ) -> None:
        """Return the causes with support now, best first. A reported cause without data keeps its state."""
        self._by_gravity = None
        now: dict[Key, Cause] = {}
        for cause in causes:
            now.setdefault(cause.key, cause)
        for key, cause in now.items():
            known = self.reported.get(key)
            if known is not None:
                cause.count = max(cause.count, 1)
                cause.since_ns, cause.supported_ns = known.since_ns, now_ns
                if _GRAVITY[_severity(known)] < _GRAVITY[_severity(cause)]:
                    cause.severity = known.severity  # as long as it lasts it is as grave as it was
                self.reported[key] = cause
                continue
            support = self.waiting.setdefault(key, Support(*key, now_ns, now_ns))
            support.last_ns = now_ns
            if now_ns - support.first_ns >= cause.hold_s * NS and self._has_room(cause):
                self._report(cause, support.first_ns, now_ns, now)
        for key, support in list(self.waiting.items()):
            if key in self.reported or now_ns - support.last_ns > PENDING_S * NS:
                del self.waiting[key]
        for key, cause in list(self.reported.items()):
            if now_ns - cause.supported_ns > cause.clear_s * NS:
                if lacks_data is not None and lacks_data(cause):
                    continue
                del self.reported[key]

    def _has_room(self, cause: Cause) -> bool:
        """Return True if there is room for a cause; a full book drops a less grave one, or one as grave of a
        crowd, which counts one less."""
        if len(self.reported) < MAX_REPORTED:
            return True
        if self._by_gravity is None:
            self._by_gravity = tuple({} for _ in _GRAVITY)
            for key in self.reported:
                self._by_gravity[_gravity(key)][key] = None
            self._crowds = {a: [c.key for c in some] for a, some in self._alike().items()
                            if len(some) > MOST_ALIKE}  # fmt: skip
        for mild in reversed(self._by_gravity[_gravity(cause.key) + 1 :]):
            while mild:
                least = next(iter(mild))
                del mild[least]
                if self.reported.pop(least, None) is not None:
                    return True
        if cause.alike in self._crowds:
            return False
        for crowd in self._crowds.values():
            while len(crowd) > MOST_ALIKE + 1 and _gravity(crowd[0]) == _gravity(cause.key):
                if self.reported.pop(crowd.pop(), None) is not None:
                    return True
        return False

    def _alike(self) -> dict[Alike, list[Cause]]:
        """Return the reported causes by kind and signal."""
        out: dict[Alike, list[Cause]] = {}
        for cause in self.reported.values():
            out.setdefault(cause.alike, []).append(cause)
        return out

    def _report(self, cause: Cause, first_ns: int, now_ns: int, supported: dict[Key, Cause]) -> None:
        """Report a cause. A better explanation of the same symptoms replaces one that lost its support."""
        cause.since_ns, cause.supported_ns = first_ns, now_ns
        if any(map(len, cause.covers.values())):
            for key, old in list(self.reported.items()):
                if key not in supported and overlap(old.covers, cause.covers):
                    cause.since_ns = min(cause.since_ns, old.since_ns)
                    del self.reported[key]
        self.reported[cause.key] = cause
        if self._by_gravity is not None:
            self._by_gravity[_gravity(cause.key)][cause.key] = None

    def faults(self) -> tuple[Fault, ...]:
        """Return the reported faults, gravest first, then oldest."""
        return _in_order([_fault(c) for c in self.reported.values()])

    def alarms(self, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        """Return the alarms of the reported `faults`: many of one kind are one alarm of their ancestor."""
        if self.topology is None:
            return faults
        crowds = {a: some for a, some in self._alike().items() if _number(some) > MOST_ALIKE}
        if not crowds:
            return faults
        single = [f for f in faults if (f.kind, f.table, f.signal) not in crowds]
        return _in_order([*single, *(_crowd(some, self.topology) for some in crowds.values())])

    def covered(self, symptom: str, n: int) -> np.ndarray | None:
        """Return the entities [n] whose symptom a reported fault explains; None if none does."""
        out: np.ndarray | None = None
        for cause in self.reported.values():
            index = cause.covers.get(symptom)
            if index is not None and len(index):
                out = np.zeros(n, np.bool_) if out is None else out
                out[index] = True
        return out

    def adopt(self, old: CauseBook, old_of_new: OldOfNew) -> None:
        """Take over the reported causes; pending ones start again, and symptoms of others are new."""
        super().adopt(old, old_of_new)
        self.waiting = {}
        for cause in self.reported.values():
            cause.covers = {}


def _in_order(faults: list[Fault]) -> tuple[Fault, ...]:
    faults.sort(key=lambda f: (_GRAVITY[f.severity], f.since_ns, f.kind, f.table, f.entity, f.signal))
    return tuple(faults)


def _number(causes: list[Cause]) -> int:
    return len(causes) + sum(c.more for c in causes)


def _gravity(key: Key) -> int:
    return _GRAVITY[FAULT_KINDS[key[0]].severity]


def _severity(c: Cause) -> str:
    return c.severity or FAULT_KINDS[c.kind].severity


def _fault(c: Cause) -> Fault:
    evidence = c.evidence[:MAX_EVIDENCE]
    return Fault(
        c.kind,
        c.table,
        c.entity,
        c.signal,
        _severity(c),
        c.confidence_pu,
        c.since_ns,
        evidence,
        c.count,
        c.parts,
    )


def _crowd(causes: list[Cause], topology: Topology) -> Fault:
    """Combine many faults of one kind into one of their lowest common ancestor; shows the oldest."""
    cause = min(causes, key=lambda c: (c.since_ns, c.entity))
    table, entity = "site", 0
    ids = np.array([c.entity for c in causes])
    for higher in ("node", "rack", "cdu", "hall"):
        if not topology.knows(cause.table, higher):
            continue
        at = np.unique(topology.above(cause.table, higher)[ids])
        if len(at) == 1 and at[0] >= 0:
            table, entity = higher, int(at[0])
            break
    name = topology.site.name(cause.table, cause.entity)
    text = tuple(f"{name}: {e}" for e in cause.evidence)
    least_pu = min(c.confidence_pu for c in causes)
    return replace(
        _fault(cause),
        severity=min(map(_severity, causes), key=_GRAVITY.__getitem__),
        table=table,
        entity=entity,
        confidence_pu=least_pu,
        evidence=text[:MAX_EVIDENCE],
        count=_number(causes),
        parts=(),
        first=(cause.table, cause.entity),
    )


def overlap(a: dict[str, I32], b: dict[str, I32]) -> bool:
    """Return True if two causes account for a symptom of the same entity."""
    return any(name in b and len(np.intersect1d(index, b[name])) > 0 for name, index in a.items())


def _pumps(fault: Fault, title: str) -> str:
    """Return the title of stopped pumps with the number of the pump, where it is known."""
    if fault.kind != "pump_trip" or not fault.parts:
        return title
    if len(fault.parts) > 1:
        return title.replace("A pump of", "Both pumps of").replace("has", "have")
    return title.replace("A pump of", f"Pump {fault.parts[0]} of")


def finding_of(fault: Fault, site: Site) -> Finding:
    """Return a fault as a finding for operators; its id stays the same while it lasts."""
    kind = FAULT_KINDS[fault.kind]
    name = site.name(fault.table, fault.entity)
    named = (name,) if fault.first is None else (name, site.name(*fault.first))
    title = _pumps(fault, kind.title).format(name=named[-1])
    if fault.signal:
        title += f": {signal_words(fault.signal)}"
    if fault.first is not None:
        others = fault.count - 1
        title += f"; likewise {others:,} more {table_noun(noun_key(site, fault.first[0]), others)} of {name}"
    identity = f"fault/{fault.kind}/{name}" + (f"/{fault.signal}" if fault.signal else "")
    return Finding(
        identity,
        fault.severity,
        title,
        named,
        fault.evidence,
        fault.confidence_pu,
        AGREED_LEAK if fault.kind == "leak" and fault.count > 1 else kind.action,
        fault.count,
    )
