"""Finders that rules of several parts share: fault codes, states, counters, gaps of telemetry, wear, faults
of the diagnosis; and the sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F32, F64, I32, Bool
from twin.contracts import DEGRADED, FAILED, WATCH, action
from twin.health import fault_codes
from twin.health.rules import NOTHING, Rule, RuleContext, RuleMatches
from twin.site import Site

CATALOG = "NVIDIA XID catalogue (docs.nvidia.com/deploy/xid-errors)"
FACTS = "domain.md C, rules of thumb of gpud"
DCGM = "DCGM, limits of its health checks (dcgm_gpu_hardware_limits.h)"
# Kinds of fault (`twin.diagnosis.FAULT_KINDS`) of which silence is a sign
SILENT = ("gpu_off_bus", "node_silent", "node_down")
ESTIMATE = "estimate"
UNUSUAL = 10.0  # times the usual, and the others'; source: estimate, as in the diagnosis
# Shares of the last hour without a word that are gaps, from three minutes on; more than the most is silence,
# of which nothing is known; source: estimate
GAP_PU, SILENT_PU = 0.05, 0.9
WEAR_S = 14 * 86_400.0  # what lasts no longer is planned for; source: estimate
MAX_WORN = 200  # named parts of one trend
# That the device itself is to blame for a code: of those that speak of it, of those that an application or
# the facility brings about as a rule, and of those that nobody explains; source: estimate
OF_CODE_PU, OF_OTHERS_PU, OF_UNKNOWN_PU = 0.8, 0.2, 0.5
_RESET, _APP, _FACILITY = action("reset_gpu"), fault_codes.CLASSES.index("app"), action("check_facility")
REBOOTS = 1.5  # two restarts in a day, as what is left of them (fading); source: domain.md C, 2 reboots


def open_codes(table: str) -> Callable[[RuleContext], RuleMatches]:
    """Find devices with an open action of a fault code. `a`: the code."""

    def find(context: RuleContext) -> RuleMatches:
        asked = context.book.open_action(table)
        index = np.flatnonzero(asked).astype(np.int32)
        if not len(index):
            return NOTHING
        codes = context.book.open_code(table)[index]
        index, codes = _of_device(context, table, index, codes)
        acts, row = asked[index], fault_codes.CATALOGUE.rows(codes.astype(np.int64), table)
        known = row > 0
        others = fault_codes.CATALOGUE.app[row] | (acts == _FACILITY)
        sure = np.where(others, OF_OTHERS_PU, np.where(known, OF_CODE_PU, OF_UNKNOWN_PU))
        level = np.where(known & (acts >= _RESET), DEGRADED, WATCH).astype(np.uint8)
        level[context.book.open_grave(table)[index]] = (
            FAILED  # the words may say more of it than the catalogue
        )

        def say(k: int) -> str:
            entry = fault_codes.find(int(codes[k]), table)
            return f"{entry.label} ({entry.name})"

        return RuleMatches(index, codes, level=level, action=acts, sure_pu=sure, say=say)

    return find


def repeated_codes(table: str) -> Callable[[RuleContext], RuleMatches]:
    """Finds devices with the same code again and again. `a`: the code; `b`: how often."""

    def find(context: RuleContext) -> RuleMatches:
        entity, code, count = context.book.repeated(table)
        if not len(entity):
            return NOTHING
        kept = np.arange(len(entity), dtype=np.int32)[_not_software(context, table, entity, code)]
        entity, code, count = entity[kept], code[kept], count[kept]
        order = np.lexsort((code, -count, entity))
        entity, code, count = entity[order], code[order], count[order]
        index, first = np.unique(entity, return_index=True)
        code = code[first]
        return RuleMatches(index.astype(np.int32), code, count[first],
                     say=lambda k: fault_codes.find(int(code[k]), table).label)  # fmt: skip

    return find


def _of_device(context: RuleContext, table: str, index: I32, codes: I32) -> tuple[I32, I32]:
    """Return those of these devices and codes that software did not cause."""
    kept = _not_software(context, table, index, codes)
    return index[kept], codes[kept]


def _not_software(context: RuleContext, table: str, index: I32, codes: I32) -> Bool:
    """Return the mask of codes [k] that a job's software does not cause on several nodes."""
    kept: Bool = np.ones(len(index), np.bool_)
    if table == "gpu" and (software := context.book.of_software).any():
        row = fault_codes.CATALOGUE.rows(codes.astype(np.int64), table)
        kept = ~(software[index] & (fault_codes.CATALOGUE.kind[row] == _APP))
    return kept


def software_codes(context: RuleContext) -> RuleMatches:
    """Finds GPUs whose exceptions and page faults are most likely those of a job's software."""
    software = context.book.of_software
    return RuleMatches(np.flatnonzero(software).astype(np.int32)) if software.any() else NOTHING


def state_is(key: str, code: int) -> Callable[[RuleContext], RuleMatches]:
    """Finds entities that report this state."""
    return lambda context: RuleMatches(context.state_is(key, code))


def of_sides(
    make: Callable[[str], Callable[[RuleContext], RuleMatches]], key: str
) -> Callable[[RuleContext], RuleMatches]:
    """Finds parts of pairs, each by the signal of its side: `{side}` in the key is 1 or 2."""
    sides = [make(key.replace("{side}", side)) for side in "12"]

    def find(context: RuleContext) -> RuleMatches:
        found = [side(context) for side in sides]
        index = np.concatenate([2 * one.index + side for side, one in enumerate(found)]).astype(np.int32)
        if not len(index):
            return NOTHING
        order = np.argsort(index)
        a, b = (
            np.concatenate(
                [_figures(values, len(one.index)) for one, values in zip(found, pair, strict=True)]
            )
            for pair in ([one.a for one in found], [one.b for one in found])
        )
        return RuleMatches(index[order], a[order], b[order])

    return find


def _figures(values: F64 | F32 | I32 | None, n: int) -> F64:
    return np.full(n, np.nan) if values is None else np.asarray(values, np.float64)


def gaps(table: str) -> Callable[[RuleContext], RuleMatches]:
    """Finds devices that were often silent within the last hour, alone. `a`: share of it, %.

    A node whose GPUs all fell silent has a silent agent, and a rack a silent source: none of theirs.
    """

    def find(context: RuleContext) -> RuleMatches:
        gap = context.rates.gap[table]
        if not gap.any():
            return NOTHING
        mask = (gap >= GAP_PU) & (gap <= SILENT_PU) & context.rates.spoke[table]
        site = context.site
        for of in (site.node_of_gpu, site.rack_of_gpu) if table == "gpu" else (site.rack_of_node,):
            n = int(of.max(initial=-1)) + 1
            every = np.bincount(of, minlength=n)
            whole = (np.bincount(of[mask], minlength=n) == every) & (every > 1)
            mask &= ~whole[of]
        index = np.flatnonzero(mask).astype(np.int32)
        return RuleMatches(index, 100.0 * gap[index])

    return find


def wearing(table: str, only: str = "") -> Callable[[RuleContext], RuleMatches]:
    """Find entities with a learned parameter that will soon reach its limit. `a`: days left."""

    def find(context: RuleContext) -> RuleMatches:
        soonest = np.full(context.site.sizes[table], np.inf)
        for left in context.wear.remaining():
            if left.table == table and (not only or left.what == only):
                soonest = np.fmin(soonest, left.mid_s)
        index = np.flatnonzero(soonest < WEAR_S).astype(np.int32)
        if not len(index):
            return NOTHING
        days = soonest[index] / 86_400.0
        notes = {}
        for i, d in zip(index[:MAX_WORN].tolist(), days.tolist(), strict=False):
            notes[i] = (
                "; ".join(context.wear.evidence(table, i)[:2]) or f"it wears: about {d:.0f} days are left"
            )
        return RuleMatches(index, days, notes=notes)

    return find


def by_diagnosis(kind: str, table: str, itself_pu: float = 1.0) -> Callable[[RuleContext], RuleMatches]:
    """Find the parts of a table with this kind of fault in the diagnosis.

    How sure the diagnosis is counts `itself_pu` times: so likely is it the part itself, if it is so.
    """

    def find(context: RuleContext) -> RuleMatches:
        mine = [f for f in context.faults(kind) if f.table == table]
        if not mine:
            return NOTHING
        best = {f.entity: f for f in sorted(mine, key=lambda f: f.confidence_pu)}
        index = np.array(sorted(best), np.int32)
        sure = itself_pu * np.array([best[i].confidence_pu for i in index.tolist()])
        notes = {i: "; ".join(f.evidence[:3]) for i, f in best.items()}
        return RuleMatches(index, sure_pu=sure, notes=notes)

    return find


def growing(
    key: str, least: float, unusual: float, recent: bool = True
) -> Callable[[RuleContext], RuleMatches]:
    """Find counters that grew by `least` or more, `unusual` times the usual growth of them and of others.

    `a`: growth in about ten minutes (or a day), `b`: what others had on average. Others are of the same kind:
    GPUs of the same profile, links of the same plane.
    """
    table = key.partition(".")[0]

    def find(context: RuleContext) -> RuleMatches:
        index = context.rates.above(key, least, recent)
        if not len(index):
            return NOTHING
        counted = context.rates.counted(key, recent)
        others = _of_others(context, table, counted, index)
        grown = counted[index].astype(np.float64)
        odd = grown > unusual * others
        if recent:
            odd &= grown * 6.0 > unusual * context.rates.usual_per_h(key, index)  # ten minutes are 1/6 h
        return RuleMatches(index[odd], grown[odd], others[odd])

    return find


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """A rule on a counter: it grew by `least` in about ten minutes, UNUSUAL times as fast as is usual.

    `part` is a kind of parts in pairs, whose side is `{side}` in the key; "": entities of the key's table.
    """

    id: str
    key: str
    least: float
    what: str  # such as "errors"
    sure_pu: float = 0.6
    source: str = ESTIMATE
    level: int = WATCH
    action: str = "watch"
    clear_s: float = 900.0
    faults: tuple[str, ...] = ()
    part: str = ""

    def rule(self) -> Rule:
        """Return the rule for the table of rules."""

        def grown(key: str) -> Callable[[RuleContext], RuleMatches]:
            return growing(key, self.least, UNUSUAL)

        words = "{a:.0f} " + self.what + " in about ten minutes, others {b:.1f}"
        return Rule(
            self.id, self.part or self.key.partition(".")[0], self.level, self.action, self.sure_pu, words,
            self.source, of_sides(grown, self.key) if self.part else grown(self.key), (self.key,),
            clear_s=self.clear_s, faults=self.faults,
        )  # fmt: skip


def _of_others(context: RuleContext, table: str, counted: F32, index: I32) -> F64:
    """Return the mean of the others of the same kind [k]; 0 without others."""
    group = kinds_of(context.site, table)
    n = int(group.max(initial=0)) + 1
    many, total = np.bincount(group, minlength=n), np.bincount(group, weights=counted, minlength=n)
    of = group[index]
    rest = np.maximum(total[of] - counted[index], 0.0) / np.maximum(many[of] - 1, 1)
    return np.where(many[of] > 1, rest, 0.0)


def kinds_of(site: Site, table: str) -> I32:
    """Return the kind of each entity [n]: equal entities have one number."""
    if table == "link":
        return site.plane_of_link
    if table in ("gpu", "node"):
        names = sorted({p or "" for p in site.profile_of_rack})
        of_rack = np.array([names.index(p or "") for p in site.profile_of_rack], np.int32)
        rack_of = site.rack_of_gpu if table == "gpu" else site.rack_of_node
        return np.asarray(of_rack[rack_of], np.int32)
    return np.zeros(site.sizes[table], np.int32)
