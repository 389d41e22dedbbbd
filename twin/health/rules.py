"""Health rule: a condition on parts, the parts that meet it now, and the hold time of a match.

A rule is a line of a table: its condition, level, action, and the source of the figures. It
evaluates all parts of a kind at once and gives those that match, with two figures each; the sentence is made
of these on request, so that it is the same after a restart. A match counts once it has lasted
and is kept for a while after it has gone, and as long as no newer reading contradicts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, U8, Bool, signal_of
from twin.contracts import PAIRED, PARTS, Evidence, Fault, action
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.lemons import Lemons
from twin.health.nvlinks import Nvlinks
from twin.health.rates import Rates
from twin.health.recurring import Recurring
from twin.health.thermal_history import ThermalHistory
from twin.health.wear import Wear
from twin.site import Site
from twin.telemetry import OWN, SparseState, cell, entries

DIAGNOSIS = "diagnosis of racktwin"
CLEAR_S = 120.0  # for which most of what was found is held after it has gone; source: estimate
KEEP_S = 86_400.0  # and at most so long where no report shows whether it has; source: estimate
APART_S = 600.0  # two sights so far apart do not show that something lasted in between; source: estimate
MAX_NOTES = 256  # words of their own that a rule keeps, each at most so long
MAX_NOTE = 400
MANY = 1000  # from which on a mask is faster than a search
NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DeviceRecords:
    """Records of devices that rules read."""

    book: FaultBook
    rates: Rates
    lemons: Lemons
    wear: Wear
    recurring: Recurring | None = None
    nvlinks: Nvlinks | None = None
    thermal: ThermalHistory | None = None


class RuleContext:
    """Inputs of rules at an instant; shared values are computed once."""

    def __init__(
        self,
        now: HealthContext,
        records: DeviceRecords,
        guards: dict[str, float] | None = None,
    ) -> None:
        self.now, self.book, self.rates = now, records.book, records.rates
        self.guards = {} if guards is None else guards  # by signal: what only looks of one site share
        self.lemons, self.wear, self.recurring = records.lemons, records.wear, records.recurring
        self.nvlinks = records.nvlinks
        self.site: Site = now.site
        self.now_ns, self.dt_s = now.now_ns, now.dt_s
        # Set by the attribution before the rules are asked [n_gpu]; None: of no GPU
        self.facility: Bool | None = None  # below a fault of the facility
        self.lowered: U8 | None = None  # whose doing a lowered clock is
        self.slowed_pu: F32 | None = None  # share of about ten minutes in which hardware slowed it
        self.fewest_down: F32 | None = None  # ports of each switch that always were down
        self._faults: dict[str, list[Fault]] | None = None

    def value(self, key: str) -> F32:
        """Return the last good values [n], of any age. Read only."""
        signal = signal_of(key)
        row: F32 = self.now.state.tables[signal.table].value[signal.row]
        return row

    def known(self, key: str) -> bool:
        """Return True if any cell holds a good reading, however old."""
        signal = signal_of(key)
        column = self.now.state.tables[signal.table]
        if column.n == 0:
            return False
        if signal.kind == "counter":
            return bool((column.raw[signal.row] >= 0).any())
        return bool(column.bad_count[signal.row] < column.n)

    def current(self, key: str, index: I32) -> Bool:
        """Return the mask of these entities of which a signal or counter is good and not stale [k]."""
        signal = signal_of(key)
        return self.now.state.tables[signal.table].current(signal, self.now_ns, index)

    def state_is(self, key: str, code: int) -> I32:
        """Return the entities whose state is `code` now, ascending."""
        return self.those(key, self.value(key) == code) if self.known(key) else NONE

    def beyond(self, key: str, low: bool = False) -> I32:
        """Return the entities whose current reading is beyond its guard, ascending; none without a limit."""
        limit = self.site.limits.get(key)
        if limit is None or not self.known(key):
            return NONE
        if key not in self.guards:  # the first that anything could be beyond: one number is compared soon
            bound = np.nanmax(limit.guard) if low else np.nanmin(limit.guard)
            self.guards[key] = float(bound) if np.isfinite(limit.guard).any() else float("nan")
        value, first = self.value(key), np.float32(self.guards[key])
        index = self.those(key, value < first if low else value > first)
        guard = limit.guard[index]
        return index[value[index] < guard if low else value[index] > guard]

    def those(self, key: str, mask: Bool) -> I32:
        """Return the entities of a mask with a current reading of a signal, ascending."""
        index = mask.nonzero()[0].astype(np.int32)
        return index[self.current(key, index)] if len(index) else index

    def faults(self, kind: str) -> list[Fault]:
        """Return the faults of one kind that the diagnosis reports."""
        if self._faults is None:
            self._faults = {}
            for fault in self.now.faults:
                self._faults.setdefault(fault.kind, []).append(fault)
        return self._faults.get(kind, [])


@dataclass(frozen=True, slots=True)
class RuleMatches:
    """Matches of a rule: entities [k], unique and ascending, with what differs from the rule's own line."""

    index: I32
    a: F64 | F32 | I32 | None = None  # figures for the words
    b: F64 | F32 | I32 | None = None
    level: U8 | None = None
    action: U8 | None = None
    sure_pu: F64 | F32 | None = None
    notes: dict[int, str] | None = None  # words of its own, by entity
    say: Callable[[int], str] | None = None  # the same for the entity at a place, made for those kept


NOTHING = RuleMatches(NONE)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table of rules. `words` has {a} and {b} for the figures, {note} for words found."""

    id: str
    part: str
    level: int
    action: str
    sure_pu: float  # that it is the part itself
    words: str
    source: str
    find: Callable[[RuleContext], RuleMatches]
    # Signals that would say if it were over; none: the finding itself says. `{side}`: of a part of a pair
    keys: tuple[str, ...] = ()
    after_s: float = 0.0  # counts once it has lasted so long
    clear_s: float = CLEAR_S
    faults: tuple[str, ...] = ()  # kinds of `FAULT_KINDS`, beside that of its own name, that it is a sign of

    @property
    def echo(self) -> bool:
        """Return True if the rule repeats the diagnosis and reads no signal itself."""
        return self.source == DIAGNOSIS and not self.keys

    def sign_of(self, kind: str) -> bool:
        """Return True if a fault of this kind accounts for a match of the rule."""
        return kind == self.id or kind in self.faults

    def text(self, a: float, b: float, note: str) -> str:
        """Return the sentence for one entity."""
        if not note and "{note}" in self.words:  # more entities have it than words are kept of
            note = f"code {a:.0f}" if np.isfinite(a) else "as many others"
        return self.words.format(a=a, b=b, note=note)


class ActiveMatches(SparseState):
    """Matches that one rule has found and keeps, by part."""

    since_ns: I64 = cell("i8")
    seen_ns: I64 = cell("i8")
    level: U8 = cell("u1")
    action: U8 = cell("u1")
    sure_pu: F32 = cell("f4")
    a: F64 = cell("f8")
    b: F64 = cell("f8")
    notes: dict[int, str] = entries(OWN)

    def take(self, rule: Rule, found: RuleMatches, context: RuleContext) -> None:
        """Merge the present matches with the kept ones, and drop those that are over."""
        index, now_ns = found.index, context.now_ns
        if not len(index) and not len(self.index):
            return
        was = self.index
        if len(index) == len(was) and (index == was).all():
            hit = np.arange(len(index))
        else:
            union, at, hit = _united(was, index)
            if len(union) > len(was):
                for name, spec in self.cells.items():
                    column = np.zeros(len(union), spec.dtype)
                    column[at] = getattr(self, name)
                    setattr(self, name, column)
                self.index = union
        # A finding that was seen too long ago to have lasted begins anew
        young = self.seen_ns[hit] - self.since_ns[hit] < rule.after_s * NS
        anew = hit[(self.since_ns[hit] == 0) | (young & (now_ns - self.seen_ns[hit] > APART_S * NS))]
        self.since_ns[anew] = now_ns
        self.seen_ns[hit] = now_ns
        self._write(rule, found, hit)
        if len(hit) < len(self.index):
            self._let_go(rule, context)

    def _write(self, rule: Rule, found: RuleMatches, hit: Any) -> None:
        given = (
            ("level", found.level, rule.level), ("action", found.action, action(rule.action)),
            ("sure_pu", found.sure_pu, rule.sure_pu), ("a", found.a, np.nan), ("b", found.b, np.nan),
        )  # fmt: skip
        for name, values, otherwise in given:
            getattr(self, name)[hit] = otherwise if values is None else values
        for entity, words in (found.notes or {}).items():
            if entity in self.notes or len(self.notes) < MAX_NOTES:
                self.notes[entity] = words[:MAX_NOTE]
        if found.say is not None:
            noted = np.isin(found.index, np.fromiter(self.notes, np.int32, len(self.notes)))
            new = np.flatnonzero(~noted)[: MAX_NOTES - len(self.notes)]
            for k in (*np.flatnonzero(noted).tolist(), *new.tolist()):
                self.notes[int(found.index[k])] = found.say(k)[:MAX_NOTE]

    def _let_go(self, rule: Rule, context: RuleContext) -> None:
        """Drop evidence that was absent for long enough, unless its source is silent."""
        since, seen = self.since_ns, self.seen_ns
        gone = seen < context.now_ns
        lasted = seen - since >= rule.after_s * NS
        unseen_s = (context.now_ns - seen) / NS
        over = gone & (~lasted | (unseen_s > rule.clear_s))
        if rule.keys and over.any():
            doubt = np.flatnonzero(over & lasted & (unseen_s <= KEEP_S))
            owner = entity_of(rule.part, self.index[doubt])
            reported = np.zeros(len(doubt), np.bool_)
            for key in rule.keys:
                if key.partition(".")[0] != PARTS[rule.part]:
                    continue
                if "{side}" not in key:
                    reported |= context.current(key, owner)
                    continue
                for side in (0, 1):
                    mine = self.index[doubt] % 2 == side
                    reported |= mine & context.current(key.replace("{side}", str(side + 1)), owner)
            over[doubt[~reported]] = False
        if over.any():
            self.keep(~over)

    def keep(self, mask: Bool) -> None:
        """Keep these rows and drop the others."""
        super().keep(mask)
        if self.notes:
            left = self.index.tolist()
            self.notes = {i: self.notes[i] for i in left if i in self.notes}

    def counts(self, rule: Rule, at: slice | I64 = slice(None)) -> Bool:
        """Return the mask of entries, all or those at some places, that have lasted long enough [k]."""
        return np.asarray(self.seen_ns[at] - self.since_ns[at] >= rule.after_s * NS, np.bool_)

    def positions(self, rule: Rule, index: I32, least: int) -> list[int]:
        """Return the positions of the entries of these entities (ascending) that have lasted, of this level
        or more.
        """
        if not len(self.index):
            return []
        at = np.minimum(np.searchsorted(self.index, index), len(self.index) - 1)
        at = at[(self.index[at] == index) & (self.level[at] >= least)]
        found: list[int] = at[self.counts(rule, at)].tolist()
        return found

    def evidence(self, rule: Rule, k: int) -> Evidence:
        """Return the entry at a place, in words."""
        note = self.notes.get(int(self.index[k]), "")
        text, sure_pu = rule.text(float(self.a[k]), float(self.b[k]), note), float(self.sure_pu[k])
        return Evidence(
            rule.id, int(self.level[k]), text, int(self.since_ns[k]), round(sure_pu, 4), rule.source
        )


def _united(a: I32, b: I32) -> tuple[I32, I64, I64]:
    """Return (union of two ascending sets of entities, places of the first, places of the second)."""
    if len(a) + len(b) < MANY:
        both = np.union1d(a, b).astype(np.int32)
        return both, np.searchsorted(both, a), np.searchsorted(both, b)
    mask = np.zeros(max(int(x[-1]) if len(x) else 0 for x in (a, b)) + 1, np.bool_)
    mask[a] = mask[b] = True
    place = np.cumsum(mask) - 1
    return np.flatnonzero(mask).astype(np.int32), place[a], place[b]


def entity_of(part: str, index: I32) -> I32:
    """Return the entity in the part's table."""
    return (index // 2).astype(np.int32) if part in PAIRED else index
