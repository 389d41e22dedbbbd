"""Verdicts: the rules of health put together: a level, an action and the evidence for each part.

A part is as bad as the worst evidence against it; where no signal of its own shows its life and nothing
speaks against it, it is unknown, never healthy. A node is no better than its GPUs, nor healthy for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from twin.catalogue import F32, I32, I64, NS, U8, Bool
from twin.contracts import DEGRADED, FAILED, HEALTHY, LEVELS, PAIRED, PARTS, UNKNOWN, WATCH, Evidence, Health
from twin.health.attribution import Attribution
from twin.health.context import HealthContext
from twin.health.rates import mute
from twin.health.rules import ActiveMatches, DeviceRecords, Rule, RuleContext, RuleMatches
from twin.health.verdict_specs import SPECS, Bits, Spec, lacks_reports, look_at, share_of
from twin.site import Site
from twin.telemetry import EntityState, OldOfNew, column, keyed, part as kept_part, scalar

TABLES = ("gpu", "node")
DAY_S = 86_400.0


class IncidentHistory(EntityState):
    """By table [n]: first report of a device (0: never), number of replacements, and the last one.

    The age of a device is unknown: no source says when it was made, only its first report here.
    """

    first_ns: dict[str, I64] = keyed("i8", keys=TABLES)
    replaced: dict[str, I64] = keyed("i8", keys=TABLES)
    replaced_ns: dict[str, I64] = keyed("i8", keys=TABLES)
    now_ns: int = scalar(0)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self._whole = dict.fromkeys(TABLES, False)  # whether all have reported

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
        """Return repairs and age of a device, as information."""
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
            out.append(f"reporting for {_span((self.now_ns - first) / NS)}; its age is not known")
        else:
            out.append("it has never reported; its age is not known")
        return (
            Evidence("history", HEALTHY, "; ".join(out), first, 0.0, "racktwin since it monitors the device"),
        )

    def derive(self) -> None:
        """Recompute by table the flag that all devices have reported."""
        self._whole = {table: bool((self.first_ns[table] > 0).all()) for table in TABLES}

    def forget(self, table: str, entity: int) -> None:
        """Count a replacement of the device in this slot."""
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


KEPT_S = 60.0  # a level is kept at least so long before it becomes better; source: estimate
MAX_PARTS = 8  # GPUs, supplies and DPUs whose evidence is stated with their node's, each by its gravest
# Parts of a node in pairs, and the worst that they make of it: it runs on one supply
MOST_OF_NODE = {"psu": DEGRADED, "dpu": FAILED}
_OF_PARTS = {part: part for part in PARTS}


class Verdicts(EntityState):
    """Levels of all parts at the last look. Parts of pairs have tables of their own."""

    level: dict[str, U8] = keyed("u1", UNKNOWN, _OF_PARTS)
    since_ns: dict[str, I64] = keyed("i8", 0, _OF_PARTS)
    action: dict[str, U8] = keyed("u1", 0, _OF_PARTS)
    sure_pu: dict[str, F32] = keyed("f4", np.nan, _OF_PARTS)
    lowered: dict[str, U8] = keyed("u1", 0, _OF_PARTS)
    _held: dict[str, dict[str, ActiveMatches]] = kept_part()
    _bits: dict[str, Bits] = scalar({})  # what is reported
    _work: dict[str, Bool] = scalar({})  # where people worked at the last look; none: nowhere
    _plain: dict[str, float] = scalar({})  # share of what is reported, where all was healthy
    attribution: Attribution = kept_part()
    past: IncidentHistory = kept_part()
    fewest_down: F32 = column("switch", "f4", np.inf)  # ports of each switch

    def __init__(self, site: Site) -> None:
        super().__init__({**site.sizes, **{part: size_of(part, site) for part in PARTS}})
        self.site = site
        self._held = {
            part: {rule.id: ActiveMatches(self.sizes, part) for rule in spec.rules}
            for part, spec in SPECS.items()
        }
        self._guards: dict[str, float] = {}
        self.attribution, self.past = Attribution(site), IncidentHistory(site)

    def update(self, now: HealthContext, records: DeviceRecords) -> None:
        """Update the verdicts on all parts."""
        context = RuleContext(now, records, self._guards)
        self.past.update(records.rates.spoke, now.now_ns)
        if self.site.sizes["gpu"]:
            self.attribution.update(context)
        self._ports(context)
        for part, spec in SPECS.items():
            if size_of(part, self.site):
                self._judge(context, part, spec)

    def _ports(self, context: RuleContext) -> None:
        """Update the fewest ports that were down at each switch: these are unused."""
        if len(self.fewest_down) and context.known("switch.port_down_count"):
            np.fmin(self.fewest_down, context.now.good("switch.port_down_count"), out=self.fewest_down)
        context.fewest_down = self.fewest_down

    def _judge(self, context: RuleContext, part: str, spec: Spec) -> None:
        held, now, table = self._held[part], context.now, PARTS[part]
        n, work = size_of(part, self.site), now.under_work(table)
        if work is not None and part in PAIRED:
            work = np.repeat(work, 2)
        silent = mute(now.state.tables[table]) and (part != "node" or self._no_gpus(context))
        for rule in spec.rules:
            found = rule.find(context)
            if work is not None and len(found.index):
                found = _without(found, work[found.index])
            held[rule.id].take(rule, found, context)
        if silent and not any(len(h.index) for h in held.values()) and self._untouched(part, context):
            return
        bits, dark = look_at(context, part, n, spec.kinds, spec.vital)
        if (never := lacks_reports(context, spec.condition)) is not None:
            dark = never if dark is None else dark | never
        self._bits[part] = bits
        share = share_of(bits, len(spec.kinds))
        some = any(len(h.index) for h in held.values())
        below = part == "node" and self._below()
        healthy = not some and not below and dark is None and work is None
        plain = share if healthy and isinstance(share, float) else None
        still = plain is not None and self._plain.get(part) == plain
        if still and not (part == "gpu" and self._lowered_moved()):
            return
        level = np.full(n, HEALTHY, np.uint8)
        if part == "node" and self.site.sizes["gpu"]:
            share = self._with_gpus(share)
        if dark is not None:
            level[dark] = UNKNOWN
        act, sure = np.zeros(n, np.uint8), np.zeros(n, np.float32)
        for rule in spec.rules:
            _weigh(rule, held[rule.id], level, act, sure)
        if part == "node":
            self._of_members(level, act, sure)
        sure = np.where(level == HEALTHY, share, sure).astype(np.float32)
        sure[level == UNKNOWN] = np.nan
        self._settle(part, level, act, sure, work, context.now_ns)
        self._plain.pop(part, None)
        if plain is not None and not self.level[part].any():  # while an old level is kept, nothing is plain
            self._plain[part] = plain

    def _no_gpus(self, context: RuleContext) -> bool:
        """Return True if no GPU, supply or DPU has evidence for its node."""
        alone = mute(context.now.state.tables["gpu"]) and not self.since_ns["gpu"].any()
        return alone and not self._any_pair_ill()

    def _untouched(self, part: str, context: RuleContext) -> bool:
        """Return True if a part that never reported stands as it began: all unknown."""
        return not self.since_ns[part].any() and context.now.under_work(PARTS[part]) is None

    def _below(self) -> bool:
        """Return True if any GPU, supply or DPU is other than healthy."""
        return "gpu" not in self._plain or self._any_pair_ill()

    def _any_pair_ill(self) -> bool:
        return any(bool((self.level[part] >= WATCH).any()) for part in MOST_OF_NODE)

    def _lowered_moved(self) -> bool:
        return not np.array_equal(self.lowered["gpu"], self.attribution.lowered)

    def _with_gpus(self, share: float | F32) -> float | F32:
        """Return the known share of a node: half its own signals, half those of its GPUs."""
        of, n = self.site.node_of_gpu, self.site.sizes["node"]
        theirs = share_of(self._bits.get("gpu", 0), len(SPECS["gpu"].kinds))
        if isinstance(theirs, float):
            return 0.5 * (share + theirs)
        many = np.maximum(np.bincount(of, minlength=n), 1)
        mean = np.bincount(of, weights=theirs, minlength=n) / many
        return (0.5 * (share + mean)).astype(np.float32)

    def _of_members(self, level: U8, act: U8, sure: F32) -> None:
        """Limit the level of a node to that of its GPUs and DPUs; on one supply it is degraded at most."""
        pairs = ((part, None, most) for part, most in MOST_OF_NODE.items())
        for part, of, most in (("gpu", self.site.node_of_gpu, 255), *pairs):
            health = self.health(part)
            bad = (health.level >= UNKNOWN) | (health.action > 0) if part == "gpu" else health.level >= WATCH
            index = np.flatnonzero(bad)
            if not len(index):
                continue
            node = index // 2 if of is None else of[index]
            theirs = np.minimum(health.level[index], most)
            before = level.copy()
            np.maximum.at(level, node, theirs)
            np.maximum.at(act, node, health.action[index])
            sure[level > before] = 0.0
            same = theirs == level[node]
            np.fmax.at(sure, node[same], health.sure_pu[index[same]])

    def _settle(self, part: str, level: U8, act: U8, sure: F32, work: Bool | None, now_ns: int) -> None:
        """Apply the verdicts; an improvement waits until its level has lasted for a while."""
        old = self.health(part)
        early = (level < old.level) & (now_ns - old.since_ns < KEPT_S * NS)
        if early.any():
            level[early], act[early], sure[early] = old.level[early], old.action[early], old.sure_pu[early]
        if work is not None:
            level[work], act[work], sure[work] = UNKNOWN, 0, np.nan
            self._work[part] = work.copy()
        else:
            self._work.pop(part, None)
        changed = (level != old.level) | (old.since_ns == 0)
        if changed.any():
            self.since_ns[part] = np.where(changed, now_ns, old.since_ns)
        if part == "gpu":
            self.lowered[part] = self.attribution.lowered.copy()
        self.level[part], self.action[part], self.sure_pu[part] = level, act, sure

    def health(self, part: str) -> Health:
        """Return the verdicts on a kind of part."""
        return Health(
            part, self.level[part], self.since_ns[part], self.action[part], self.sure_pu[part],
            self.lowered[part],
        )  # fmt: skip

    def evidence(self, part: str, index: int) -> tuple[Evidence, ...]:
        """Return the evidence for a verdict, the gravest first, with the missing evidence."""
        out = self._own(part, index)
        if part == "node":
            out += self._members(index)
        if self._work_at(part, index):
            since_ns = int(self.since_ns[part][index])
            text = "under maintenance: no new verdicts"
            out.append(Evidence("maintenance", UNKNOWN, text, since_ns, 1.0, "maintenance window"))
        out.sort(key=lambda e: (-e.level, -e.sure_pu, e.rule))
        if PARTS[part] == part:
            out += self.past.evidence(part, index)
        return tuple(out)

    def reasons(self, part: str, index: I32, least: int) -> dict[int, list[Evidence]]:
        """Return the rules' evidence on many parts (ascending), from this level on, the gravest first; for
        alarms.

        The evidence on a node leaves out that of its GPUs, supplies and DPUs.
        """
        out: dict[int, list[Evidence]] = {}
        for rule in SPECS[part].rules:
            held = self._held[part][rule.id]
            for k in held.positions(rule, index, least):
                out.setdefault(int(held.index[k]), []).append(held.evidence(rule, k))
        for found in out.values():
            found.sort(key=lambda e: (-e.level, -e.sure_pu, e.rule))
        return out

    def rules_of(self, part: str, index: I32, least: int) -> dict[int, list[tuple[int, float, str]]]:
        """Return (level, confidence, rule) of `reasons` for parts (ascending), in the order of the rules."""
        out: dict[int, list[tuple[int, float, str]]] = {}
        for rule in SPECS[part].rules:
            held = self._held[part][rule.id]
            for k in held.positions(rule, index, least):
                said = int(held.level[k]), round(float(held.sure_pu[k]), 4), rule.id
                out.setdefault(int(held.index[k]), []).append(said)
        return out

    def _own(self, part: str, index: int) -> list[Evidence]:
        spec, out = SPECS[part], []
        for rule in spec.rules:
            held = self._held[part][rule.id]
            k = int(np.searchsorted(held.index, index))
            if k == len(held.index) or held.index[k] != index or not held.counts(rule, slice(k, k + 1)):
                continue
            out.append(held.evidence(rule, k))
        reported = self._bits.get(part, 0)
        bits = reported if isinstance(reported, int) else int(reported[index])
        if self.level[part][index] == UNKNOWN and not bits:
            kinds = ", ".join(what for what, _ in _shown(spec, 0))
            text = f"it does not report now; not reported: {kinds}"
            out.append(Evidence("missing:everything", UNKNOWN, text, 0, 1.0, "what is reported"))
            return out
        unexplained = not out and not self._work_at(part, index)
        if self.level[part][index] == UNKNOWN and unexplained and not self._by_its_gpus(part, index, bits):
            text, since_ns = _not_shown(spec, bits), int(self.since_ns[part][index])
            out.append(Evidence("life", UNKNOWN, text, since_ns, 1.0, "what is reported"))
        for k, (what, _) in enumerate(spec.kinds):
            if not bits >> k & 1:
                out.append(Evidence(f"missing:{what}", UNKNOWN, f"{what}: not reported now", 0, 1.0,
                                    "what is reported"))  # fmt: skip
        return out

    def _work_at(self, part: str, index: int) -> bool:
        """Return True if people worked at a part at the last look."""
        return part in self._work and bool(self._work[part][index])

    def _by_its_gpus(self, part: str, index: int, bits: int) -> bool:
        """Return True if a reporting node is unknown because of one of its GPUs, whose evidence explains
        it."""
        if part != "node" or not any(shown for _, shown in _shown(SPECS[part], bits)):
            return False
        first, last = self.site.gpu_start_of_node[index : index + 2].tolist()
        return bool((self.level["gpu"][first:last] == UNKNOWN).any())

    def _asks(self, part: str, index: int) -> str:
        """Return the rule with the strongest action at a part; "" if none requires one."""
        at, held = np.array([index], np.int32), self._held[part]
        asked = [(int(held[rule.id].action[k]), rule.id) for rule in SPECS[part].rules
                 for k in held[rule.id].positions(rule, at, HEALTHY)]  # fmt: skip
        return max([(0, ""), *asked], key=lambda a: a[0])[1]

    def _members(self, node: int) -> list[Evidence]:
        """Return the gravest reason of each unhealthy GPU, supply and DPU of a node."""
        first, last = self.site.gpu_start_of_node[node : node + 2].tolist()
        mine = [("gpu", i, f"gpu{i - first}") for i in range(first, last)]
        mine += [("psu", 2 * node + side, f"supply {side + 1}") for side in (0, 1)]
        mine += [("dpu", 2 * node + side, f"DPU {side + 1}") for side in (0, 1)]
        out: list[Evidence] = []
        for part, i, name in mine:
            level = int(self.level[part][i])
            # The action it asks for is stated too, be it less grave or none of its fault
            asks = self._asks(part, i)
            well = level < (UNKNOWN if part == "gpu" else WATCH)
            if len(out) >= MAX_PARTS or (well and asks in ("", *(e.rule.partition(":")[2] for e in out))):
                continue
            evidence = [
                e for e in self._own(part, i) if level == UNKNOWN or not e.rule.startswith("missing:")
            ]
            evidence.sort(key=lambda e: (-e.level, -e.sure_pu))
            grave = evidence[0] if evidence else None
            words = "; ".join(e.text for e in evidence if e is grave or e.rule == asks)
            text = f"{name} is {LEVELS[level]}" + (f": {words}" if words else "")
            most = min(level, MOST_OF_NODE.get(part, level))
            out.append(Evidence(f"{part}:{grave.rule}" if grave else part, most, text,
                                int(self.since_ns[part][i]),
                                0.0 if grave is None else grave.sure_pu,
                                "" if grave is None else grave.source))  # fmt: skip
        return out

    def forget(self, table: str, entity: int) -> None:
        """Drop the evidence of this slot for a new device."""
        super().forget(table, entity)
        for name in (name for name in PARTS if PARTS[name] == table):
            if name in PAIRED:
                super().forget(name, 2 * entity)
                super().forget(name, 2 * entity + 1)
            self._plain.pop(name, None)

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the verdicts on parts that stay; what rests on one look is found again at the next."""
        sides = np.array([0, 1], np.int32)
        pairs = {name: old_of_new[PARTS[name]][:, None] for name in PAIRED}
        both = {name: np.where(i < 0, -1, 2 * i + sides).reshape(-1) for name, i in pairs.items()}
        super().adopt(old, {**old_of_new, **both})
        self._bits, self._work, self._plain = {}, {}, {}


def size_of(part: str, site: Site) -> int:
    """Return the number of parts of a kind."""
    return site.sizes[PARTS[part]] * (2 if part in PAIRED else 1)


def _shown(spec: Spec, bits: int) -> list[tuple[str, bool]]:
    """Return (kind of evidence, mask of current reports) of the signs that a part is healthy."""
    keys = {*spec.vital, *spec.condition}
    return [(what, bool(bits >> k & 1)) for k, (what, of) in enumerate(spec.kinds) if not keys.isdisjoint(of)]


def _not_shown(spec: Spec, bits: int) -> str:
    """Return the reason that a part is unknown: the missing evidence of its health."""
    lacking = ", ".join(what for what, shown in _shown(spec, bits) if not shown)
    return "nothing shows that it is well" + (
        f"; not reported: {lacking}" if lacking else ", or not for a minute yet"
    )


def _weigh(rule: Rule, held: ActiveMatches, level: U8, act: U8, sure: F32) -> None:
    """Add what one rule holds to levels, actions and how sure it is."""
    if not len(held.index):
        return
    counts = held.counts(rule)
    index, theirs = held.index[counts], held.level[counts]
    worse, same = theirs > level[index], theirs == level[index]
    level[index[worse]] = theirs[worse]
    sure[index[worse]] = held.sure_pu[counts][worse]
    sure[index[same]] = np.fmax(sure[index[same]], held.sure_pu[counts][same])
    act[index] = np.maximum(act[index], held.action[counts])


def _without(found: RuleMatches, mask: Bool) -> RuleMatches:
    """Return the matches without those under maintenance."""
    kept = ~mask
    columns: Any = {name: None if (c := getattr(found, name)) is None else np.asarray(c)[kept]
               for name in ("index", "a", "b", "level", "action", "sure_pu")}  # fmt: skip
    left = frozenset(columns["index"].tolist())
    notes = {i: note for i, note in (found.notes or {}).items() if i in left}
    say, place = found.say, np.flatnonzero(kept).tolist()
    return replace(found, **columns, notes=notes, say=None if say is None else lambda k: say(place[k]))
