"""Leak evidence: the number of independent witnesses of a leak in each rack.

All detectors that one system reads are one witness, since the system may be faulty. Each board is a system:
so trays count one by one, and a leak also wets the tray below. The building's system reads rope and pan,
unless the site file says otherwise. The detectors of the CDU and of the hall, and coolant that is missing in
the circuit, count together as one witness, if another system reads them and a detector of the rack is wet.
They show a leak, but not its rack. So they count against one rack at a time, and never against a rack whose
detector has been wet for more than a day.

Reports of many racks, or of most trays of one rack, at the same instant may come from a fault of their
source: they count once for each rack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.leak_guard.detectors import CDU, HALL, HOLD_S, ROPE, SUM, TRAY, Detectors, detectors, spread
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Memory, View

LIQUID = "rack.liquid_isolation"
WITNESSES = 2
# Between the order to save and the isolation: a checkpoint of a large job takes 10-60 s (domain.md D). Water
# that spreads does not wait, but for what else comes at the same instant.
GRACE_S, JOIN_S = 60.0, 2.0
# Witnesses at which there is no grace. A tray, the one below it and the pan are the way of one drip, within
# half a minute at 0.25 l/min; source: estimate
SPREADING = 4
AT_ONCE_RACKS, AT_ONCE_TRAYS, AT_ONCE_PU = 3, 4, 0.5
# A leak of 0.01 l/min wets its tray within minutes and takes hours to be missed; source: estimate
LINK_S = 86_400.0
SETTLE_S = 120.0  # after an isolation, until what is still missing or wet is news; source: estimate
# Systems: that of the building, the controllers of CDUs, each board by itself
BUILDING, CONTROLLERS, EACH = "building", "controllers", ""
ASKED, SPENT = 1, 2  # of a person's request to open a rack: waits until all is dry; was granted


class LeakSystems(NamedTuple):
    """The system that reads each kind of detector: a gateway, a panel, or each board by itself.

    `pans`: what it says of all trays of a rack. `circuits`: detectors of CDUs.
    `coolant`: the pressures and fill pumps that show missing coolant.
    """

    trays: str = EACH
    ropes: str = BUILDING
    pans: str = BUILDING
    circuits: str = BUILDING
    halls: str = BUILDING
    coolant: str = CONTROLLERS

    def bit(self, name: str) -> int:
        """A bit for each system; 0 for boards that are one each."""
        return 0 if name == EACH else 1 << self.index(name)


@dataclass(frozen=True, slots=True)
class LeakEvidence:
    """The witnesses of all racks [n_rack].

    `own`: detectors of its own; `witnesses`: systems that speak of it. `since_ns`: held as leaking since, 0 =
    not; `ripe`: to be isolated; `shut_ns`: isolated since. `asked`: what became of a person's request to open
    it. `new`: a detector of its own is wet for the first time. `missing_ns`: its circuit lacks coolant since,
    0 = it does not.
    """

    kinds: dict[str, Detectors]
    own: I64
    witnesses: I64
    since_ns: I64
    ripe: Bool
    shut_ns: I64
    asked: np.ndarray
    new: Bool
    missing_ns: I64

    def grace_s(self, now_ns: int) -> F64:
        """Seconds from now to the isolation of a rack that leaks [n_rack]; 0 = now."""
        wait_s = np.where(self.ripe, 0.0, _wait_s(self.witnesses))
        return np.maximum(wait_s - (now_ns - self.since_ns) / NS, 0.0)

    @property
    def memory(self) -> Memory:
        """The columns that the next assessment begins with."""
        out: Memory = {
            "since_ns": self.since_ns,
            "ripe": self.ripe,
            "shut_ns": self.shut_ns,
            "asked": self.asked,
        }
        for kind, found in self.kinds.items():
            out |= found.memory(kind)
        return out


def assess(view: View, memory: Memory, systems: LeakSystems) -> LeakEvidence:
    """The evidence of all racks; the memory that follows from it gives the same assessment again."""
    now_ns = view.now_ns
    kinds = {kind: detectors(view, memory, kind) for kind in (TRAY, ROPE, SUM, CDU, HALL)}
    cleared, asked = _clearances(view, memory, kinds)
    if cleared.any():
        kinds[TRAY] = kinds[TRAY].cleared(cleared[view.site.rack_of_node])
        kinds[ROPE], kinds[SUM] = kinds[ROPE].cleared(cleared), kinds[SUM].cleared(cleared)
    since_ns = np.where(cleared, 0, memory["since_ns"])
    shut = (view.readback(LIQUID) == 1.0) & (since_ns > 0)
    shut_ns = np.where(shut, np.where(memory["shut_ns"] > 0, memory["shut_ns"], now_ns), 0)
    own = _own(view, kinds, systems)
    missing_ns = spread(view.missing_coolant_ns(), view.site.cdu_of_rack)
    around = _around(view, kinds, missing_ns, _Held(own.detectors, own.latest_ns, since_ns, shut_ns), systems)
    witnesses = own.boards + np.bitwise_count(own.systems) + ((around & ~own.systems) > 0)
    witnesses = np.where(own.detectors > 0, witnesses, 0)
    ripe = (since_ns > 0) & (memory["ripe"] | ((now_ns - since_ns) / NS >= GRACE_S))
    # A report that proves, before any isolation, to have come with many others at one instant is no leak
    since_ns = np.where((witnesses < WITNESSES) & ~ripe, 0, since_ns)
    since_ns = np.where((witnesses >= WITNESSES) & (since_ns == 0), now_ns, since_ns)
    ripe |= (since_ns > 0) & ((now_ns - since_ns) / NS >= _wait_s(witnesses))
    new = (own.detectors > 0) & (own.latest_ns == now_ns)
    return LeakEvidence(kinds, own.detectors, witnesses, since_ns, ripe, shut_ns, asked, new, missing_ns)


def _wait_s(witnesses: I64) -> F64:
    return np.where(witnesses >= SPREADING, JOIN_S, GRACE_S)


def _clearances(view: View, memory: Memory, kinds: dict[str, Detectors]) -> tuple[Bool, np.ndarray]:
    """Racks that people clear now, and what became of each request [n_rack].

    A request for no isolation clears a rack once, when all of its detectors have been read as dry for as long
    as they hold. So one that stands for long does not clear what comes later.
    """
    n, rack_of = view.site.sizes["rack"], view.site.rack_of_node
    requested = np.zeros(n, np.bool_)
    for request in view.requests:
        if request.control == LIQUID and request.hi < 0.5:
            requested[view.targets(request)] = True
    if not requested.any():
        return requested, np.zeros(n, np.uint8)
    some, wet = memory["since_ns"] > 0, np.zeros(n, np.bool_)
    for kind in (TRAY, ROPE, SUM):
        found = kinds[kind]
        known = found.first_ns > 0
        not_dry = known & (~found.dry | (view.now_ns - found.last_ns < round(HOLD_S * NS)))
        if kind == TRAY:
            known = np.bincount(rack_of[known], minlength=n) > 0
            not_dry = np.bincount(rack_of[not_dry], minlength=n) > 0
        some |= known
        wet |= not_dry
    asked = np.where(requested, memory["asked"], 0)
    asked = np.where(requested & (asked == 0), np.where(some, ASKED, SPENT), asked)
    cleared = (asked == ASKED) & ~wet
    return cleared, np.where(cleared, SPENT, asked).astype(np.uint8)


class _Own(NamedTuple):
    """Of the racks [n_rack]: wet detectors of their own, when the latest became so; the witnesses among them:
    boards that are one each, and the bits of other systems."""

    detectors: I64
    latest_ns: I64
    boards: I64
    systems: I64


def _own(view: View, kinds: dict[str, Detectors], systems: LeakSystems) -> _Own:
    """Wet detectors and witnesses of each rack itself."""
    n = view.site.sizes["rack"]
    trays = np.flatnonzero(kinds[TRAY].counts)
    ropes, sums = np.flatnonzero(kinds[ROPE].counts), np.flatnonzero(kinds[SUM].counts)
    of_tray = view.site.rack_of_node[trays]
    # The sum of the trays is no detector of its own beside any of them
    sums = np.setdiff1d(sums, of_tray)
    rack = np.concatenate([of_tray, ropes, sums]).astype(np.int64)
    if not len(rack):
        return _Own(*np.zeros((4, n), np.int64))
    first_ns = np.concatenate(
        [kinds[TRAY].first_ns[trays], kinds[ROPE].first_ns[ropes], kinds[SUM].first_ns[sums]]
    )
    latest_ns = np.zeros(n, np.int64)
    np.maximum.at(latest_ns, rack, first_ns)
    order = np.argsort(first_ns, kind="stable")
    begins = np.diff(first_ns[order], prepend=first_ns[order[0]]) > round(JOIN_S * NS)
    event = np.empty(len(rack), np.int64)
    event[order] = np.cumsum(begins)
    is_tray = np.arange(len(rack)) < len(trays)
    pair, at = np.unique(event * n + rack, return_inverse=True)  # an instant and a rack
    detectors_at = np.bincount(at)
    trays_at = np.bincount(at, weights=is_tray)
    rack_at, racks_at = pair % n, np.bincount(pair // n)[pair // n]
    size = np.diff(view.site.node_start_of_rack)[rack_at]
    together = racks_at >= AT_ONCE_RACKS
    together |= trays_at >= np.maximum(AT_ONCE_TRAYS, AT_ONCE_PU * size)
    own = np.bincount(rack_at, weights=np.where(together, 1, detectors_at), minlength=n)
    kind = np.repeat(np.arange(3), [len(trays), len(ropes), len(sums)])
    bit = np.array([systems.bit(x) for x in (systems.trays, systems.ropes, systems.pans)], np.int64)[kind]
    boards_at = np.bincount(at, weights=bit == 0).astype(np.int64)
    bits_at = np.zeros(len(pair), np.int64)
    np.bitwise_or.at(bits_at, at, bit)
    # Reports that come together are one witness, whoever sends them: the boards, or one of the systems
    boards_at = np.where(together, np.minimum(boards_at, 1), boards_at)
    bits_at = np.where(together, np.where(boards_at > 0, 0, bits_at & -bits_at), bits_at)
    boards, bits = np.zeros(n, np.int64), np.zeros(n, np.int64)
    np.add.at(boards, rack_at, boards_at)
    np.bitwise_or.at(bits, rack_at, bits_at)
    return _Own(own.astype(np.int64), latest_ns, boards, bits)


@dataclass(frozen=True, slots=True)
class _Held:
    """Of the racks [n_rack]: detectors of their own, the latest wet one, held and isolated since."""

    own: I64
    latest_ns: I64
    since_ns: I64
    shut_ns: I64


def _around(
    view: View, kinds: dict[str, Detectors], missing_ns: I64, held: _Held, systems: LeakSystems
) -> I64:
    """The bits of the systems of what around the racks bears witness against them [n_rack]."""
    site = view.site
    out = np.zeros(len(held.own), np.int64)
    circuit, hall = systems.bit(systems.circuits), systems.bit(systems.halls)
    wet_ns = {kind: np.where(kinds[kind].counts, kinds[kind].first_ns, 0) for kind in (CDU, HALL)}
    for of, first_ns, bit in (
        (site.cdu_of_rack, missing_ns, systems.bit(systems.coolant)),
        (site.cdu_of_rack, spread(wet_ns[CDU], site.cdu_of_rack), circuit),
        (site.hall_of_rack, spread(wet_ns[HALL], site.hall_of_rack), hall),
    ):
        for place in np.unique(of[(first_ns > 0) & (held.own > 0)]).tolist():
            rack = _accused(np.flatnonzero((of == place) & (held.own > 0)), first_ns, held)
            if rack >= 0:
                out[rack] |= bit
    return out


def _accused(racks: np.ndarray, first_ns: I64, held: _Held) -> int:
    """Of racks with a wet detector, the one against which a witness around them speaks; -1 for none.

    A rack that is held as leaking explains it, until it is isolated and something new comes.
    """
    settle_ns = round(SETTLE_S * NS)
    since, shut = held.since_ns[racks] > 0, held.shut_ns[racks]
    explains = since & ((shut == 0) | (first_ns[racks] < shut + settle_ns))
    if explains.any():
        return int(racks[explains][np.argmin(held.since_ns[racks[explains]])])
    fits = ~since & (held.latest_ns[racks] > first_ns[racks] - round(LINK_S * NS))
    if not fits.any():
        return -1
    return int(racks[fits][np.argmax(held.latest_ns[racks[fits]])])
