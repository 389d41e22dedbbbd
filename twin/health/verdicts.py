"""Verdicts: the rules of health put together: a level, an action and the evidence for each part.

A part is as bad as the worst evidence against it; where no signal shows its life and nothing speaks against
it, it is unknown, never healthy. A node is no better than its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from twin.catalogue import F32, I32, I64, NS, U8, Bool
from twin.contracts import DEGRADED, HEALTHY, LEVELS, PAIRED, PARTS, UNKNOWN, WATCH, Evidence, Health
from twin.health.attribution import Attribution
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.incidents import IncidentHistory
from twin.health.lemons import Lemons
from twin.health.rates import Rates, mute
from twin.health.recurring import Recurring
from twin.health.reported import Reported, look_at, never_told
from twin.health.rules import ActiveMatches, Look, Rule, RuleMatches
from twin.health.verdict_specs import SPECS, Spec
from twin.health.wear import Wear
from twin.site import Site

KEPT_S = 60.0  # a level is kept at least so long before it becomes better; source: estimate
FORMAT = 1
MAX_TOLD = 8  # GPUs and supplies whose evidence is told with their node's, each by its gravest


_COLUMNS = {"level": np.uint8, "since_ns": np.int64, "action": np.uint8, "sure_pu": np.float32,
            "lowered": np.uint8}  # fmt: skip


class Verdicts:
    """Levels of all parts as last judged."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._held = {part: {rule.id: ActiveMatches() for rule in spec.rules} for part, spec in SPECS.items()}
        self._health = {part: _unknown(part, site) for part in PARTS}
        self._reported = {part: Reported(size_of(part, site)) for part in PARTS}
        self._work: dict[str, Bool | None] = dict.fromkeys(PARTS)  # where people worked at the last look
        self._plain: dict[str, float | None] = dict.fromkeys(PARTS)  # share, where all was healthy
        self._guards: dict[str, float] = {}
        self.attribution, self.past = Attribution(site), IncidentHistory(site)
        self.fewest_down: F32 = np.full(site.sizes["switch"], np.inf, np.float32)  # ports of each switch

    def update(
        self,
        now: HealthContext,
        book: FaultBook,
        rates: Rates,
        lemons: Lemons,
        wear: Wear,
        recurring: Recurring | None = None,
    ) -> None:
        """Judge all parts."""
        look = Look(now, book, rates, lemons, wear, self._guards, recurring)
        self.past.update(rates.spoke, now.now_ns)
        if self.site.sizes["gpu"]:
            self.attribution.update(look)
        self._ports(look)
        for part, spec in SPECS.items():
            if size_of(part, self.site):
                self._judge(look, part, spec)

    def _ports(self, look: Look) -> None:
        """The fewest ports that were down at each switch: those were never used."""
        if len(self.fewest_down) and look.known("switch.port_down_count"):
            np.fmin(self.fewest_down, look.now.good("switch.port_down_count"), out=self.fewest_down)
        look.fewest_down = self.fewest_down

    def _judge(self, look: Look, part: str, spec: Spec) -> None:
        held, now, table = self._held[part], look.now, PARTS[part]
        n, work = size_of(part, self.site), now.under_work(table)
        if work is not None and part in PAIRED:
            work = np.repeat(work, 2)
        silent = mute(now.state.tables[table]) and (part != "node" or self._no_gpus(look))
        for rule in spec.rules:
            found = rule.find(look)
            if work is not None and len(found.index):
                found = _without(found, work[found.index])
            held[rule.id].take(rule, found, look)
        if silent and not any(len(h.index) for h in held.values()) and self._untouched(part, look):
            return
        reported, dark = look_at(look, part, n, spec.kinds, spec.vital)
        if (never := never_told(look, spec.condition)) is not None:
            dark = never if dark is None else dark | never
        self._reported[part] = reported
        share = reported.share(len(spec.kinds))
        some = any(len(h.index) for h in held.values())
        below = part == "node" and self._below()
        if not some and not below and dark is None and work is None and isinstance(share, float):
            if self._plain[part] == share and not (part == "gpu" and self._lowered_moved()):
                return
            plain: float | None = share
        else:
            plain = None
        level = np.full(n, HEALTHY, np.uint8)
        if part == "node" and self.site.sizes["gpu"]:
            dark, share = self._with_gpus(dark, share)
        if dark is not None:
            level[dark] = UNKNOWN
        act, sure = np.zeros(n, np.uint8), np.zeros(n, np.float32)
        for rule in spec.rules:
            _weigh(rule, held[rule.id], level, act, sure)
        if part == "node":
            self._of_members(level, act, sure)
        sure = np.where(level == HEALTHY, share, sure).astype(np.float32)
        sure[level == UNKNOWN] = np.nan
        self._settle(part, level, act, sure, work, look.now_ns)
        # While an old level is kept, nothing is plain
        self._plain[part] = plain if plain is not None and not self._health[part].level.any() else None

    def _no_gpus(self, look: Look) -> bool:
        """Return True if no GPU or supply has evidence for its node."""
        alone = mute(look.now.state.tables["gpu"]) and not self._health["gpu"].since_ns.any()
        return alone and not (self._health["psu"].level >= WATCH).any()

    def _untouched(self, part: str, look: Look) -> bool:
        """Return True if a part that never reported stands as it began: all unknown."""
        return not self._health[part].since_ns.any() and look.now.under_work(PARTS[part]) is None

    def _below(self) -> bool:
        """Return True if any GPU or supply is other than healthy."""
        return self._plain["gpu"] is None or bool((self._health["psu"].level >= WATCH).any())

    def _lowered_moved(self) -> bool:
        return not np.array_equal(self._health["gpu"].lowered, self.attribution.lowered)

    def _with_gpus(self, dark: Bool | None, share: float | F32) -> tuple[Bool | None, float | F32]:
        """A node of which a GPU is heard is not unknown; half of what is to be known of it is its GPUs'."""
        of, n = self.site.node_of_gpu, self.site.sizes["node"]
        if dark is not None:
            lives = np.bincount(of[self._health["gpu"].level != UNKNOWN], minlength=n) > 0
            dark = dark & ~lives
        theirs = self._reported["gpu"].share(len(SPECS["gpu"].kinds))
        if isinstance(theirs, float):
            return dark, 0.5 * (share + theirs)
        many = np.maximum(np.bincount(of, minlength=n), 1)
        mean = np.bincount(of, weights=theirs, minlength=n) / many
        return dark, (0.5 * (share + mean)).astype(np.float32)

    def _of_members(self, level: U8, act: U8, sure: F32) -> None:
        """A node is no better than its GPUs; on one supply it is degraded at most."""
        for part, of, most in (("gpu", self.site.node_of_gpu, 255), ("psu", None, DEGRADED)):
            health = self._health[part]
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
        """Take over what was judged; what becomes better waits until its level has stood for a while."""
        old = self._health[part]
        early = (level < old.level) & (now_ns - old.since_ns < KEPT_S * NS)
        if early.any():
            level[early], act[early], sure[early] = old.level[early], old.action[early], old.sure_pu[early]
        if work is not None:
            level[work], act[work], sure[work] = UNKNOWN, 0, np.nan
        self._work[part] = None if work is None else work.copy()
        changed = (level != old.level) | (old.since_ns == 0)
        since: I64 = np.where(changed, now_ns, old.since_ns) if changed.any() else old.since_ns
        lowered = self.attribution.lowered.copy() if part == "gpu" else old.lowered
        self._health[part] = Health(part, level, since, act, sure, lowered)

    def health(self, part: str) -> Health:
        """The verdicts on a kind of part."""
        return self._health[part]

    def evidence(self, part: str, index: int) -> tuple[Evidence, ...]:
        """Return the evidence for a verdict, the gravest first, with the missing evidence."""
        out = self._own(part, index)
        if part == "node":
            out += self._members(index)
        work = self._work[part]
        if work is not None and work[index]:
            since_ns = int(self._health[part].since_ns[index])
            text = "people work here: nothing new is judged"
            out.append(Evidence("maintenance", UNKNOWN, text, since_ns, 1.0, "maintenance window"))
        out.sort(key=lambda e: (-e.level, -e.sure_pu, e.rule))
        if PARTS[part] == part:
            out += self.past.evidence(part, index)
        return tuple(out)

    def reasons(self, part: str, index: I32, least: int) -> dict[int, list[Evidence]]:
        """Return the rules' evidence on many parts (ascending), from this level on, the gravest first; for
        alarms.

        The evidence on a node leaves out that of its GPUs and supplies.
        """
        out: dict[int, list[Evidence]] = {}
        for rule in SPECS[part].rules:
            held = self._held[part][rule.id]
            for k in held.places(rule, index, least):
                out.setdefault(int(held.index[k]), []).append(held.evidence(rule, k))
        for found in out.values():
            found.sort(key=lambda e: (-e.level, -e.sure_pu, e.rule))
        return out

    def rules_of(self, part: str, index: I32, least: int) -> dict[int, list[tuple[int, float, str]]]:
        """(level, how sure, rule) of what `reasons` tells of parts (ascending), in the order of the rules."""
        out: dict[int, list[tuple[int, float, str]]] = {}
        for rule in SPECS[part].rules:
            held = self._held[part][rule.id]
            for k in held.places(rule, index, least):
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
        bits = self._reported[part].of(index)
        if self._health[part].level[index] == UNKNOWN and not bits:
            out.append(Evidence("missing:everything", UNKNOWN, "nothing of it is heard now", 0, 1.0,
                                "what is reported"))  # fmt: skip
            return out
        work = self._work[part]
        if self._health[part].level[index] == UNKNOWN and not out and (work is None or not work[index]):
            text = "nothing shows that it is well, or not for a minute yet"
            since_ns = int(self._health[part].since_ns[index])
            out.append(Evidence("life", UNKNOWN, text, since_ns, 1.0, "what is reported"))
        for k, (what, _) in enumerate(spec.kinds):
            if not bits >> k & 1:
                out.append(Evidence(f"missing:{what}", UNKNOWN, f"{what}: not reported now", 0, 1.0,
                                    "what is reported"))  # fmt: skip
        return out

    def _asks(self, part: str, index: int) -> str:
        """The rule that asks for the most at a part; "" where none asks for anything."""
        at, held = np.array([index], np.int32), self._held[part]
        asked = [(int(held[rule.id].action[k]), rule.id) for rule in SPECS[part].rules
                 for k in held[rule.id].places(rule, at, HEALTHY)]  # fmt: skip
        return max([(0, ""), *asked], key=lambda a: a[0])[1]

    def _members(self, node: int) -> list[Evidence]:
        """The gravest of each GPU and supply of a node that is not well."""
        first, last = self.site.gpu_start_of_node[node : node + 2].tolist()
        mine = [("gpu", i, f"gpu{i - first}") for i in range(first, last)]
        mine += [("psu", 2 * node + side, f"supply {side + 1}") for side in (0, 1)]
        out: list[Evidence] = []
        for part, i, name in mine:
            level = int(self._health[part].level[i])
            asks = self._asks(part, i)  # what it asks for is told too, be it less grave or none of its fault
            well = level < (UNKNOWN if part == "gpu" else WATCH)
            if len(out) >= MAX_TOLD or (well and asks in ("", *(e.rule.partition(":")[2] for e in out))):
                continue
            told = [e for e in self._own(part, i) if level == UNKNOWN or not e.rule.startswith("missing:")]
            told.sort(key=lambda e: (-e.level, -e.sure_pu))
            grave = told[0] if told else None
            words = "; ".join(e.text for e in told if e is grave or e.rule == asks)
            text = f"{name} is {LEVELS[level]}" + (f": {words}" if words else "")
            most = level if part == "gpu" else min(level, DEGRADED)
            out.append(Evidence(f"{part}:{grave.rule}" if grave else part, most, text,
                                int(self._health[part].since_ns[i]),
                                0.0 if grave is None else grave.sure_pu,
                                "" if grave is None else grave.source))  # fmt: skip
        return out

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: what spoke against the old one says nothing of it."""
        for part, of in PARTS.items():
            if of != table:
                continue
            places = [2 * entity, 2 * entity + 1] if part in PAIRED else [entity]
            for held in self._held[part].values():
                if np.isin(held.index, places).any():
                    held.keep(~np.isin(held.index, places))
            old = self._health[part]
            columns = {name: getattr(old, name).copy() for name in _COLUMNS}
            columns["level"][places], columns["since_ns"][places] = UNKNOWN, 0
            columns["action"][places], columns["sure_pu"][places] = 0, np.nan
            columns["lowered"][places] = 0
            self._health[part], self._plain[part] = Health(part, **columns), None
        self.attribution.forget(table, entity)
        if table == "switch":
            self.fewest_down[entity] = np.inf
        self.past.forget(table, entity)

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Verdicts:
        """Return the verdicts for a changed site: entity i was `old_of_new[table][i]`, -1 if new."""
        out = Verdicts(site)
        for part, table in PARTS.items():
            source = old_of_new[table]
            if part in PAIRED:
                pairs = np.where(source[:, None] < 0, -1, 2 * source[:, None] + np.array([0, 1]))
                source = pairs.reshape(-1).astype(np.int32)
            kept = np.flatnonzero(source >= 0)
            new_of_old = np.full(size_of(part, self.site), -1, np.int32)
            new_of_old[source[kept]] = kept
            out._held[part] = {name: held.moved(new_of_old) for name, held in self._held[part].items()}
            for name in _COLUMNS:
                getattr(out._health[part], name)[kept] = getattr(self._health[part], name)[source[kept]]
        out.attribution.adopt(self.attribution, old_of_new)
        out.past.adopt(self.past, old_of_new)
        kept = np.flatnonzero(old_of_new["switch"] >= 0)
        out.fewest_down[kept] = self.fewest_down[old_of_new["switch"][kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum; with it what evidence says survives a restart."""
        return {
            "format": FORMAT,
            "held": {part: {name: h.dump() for name, h in held.items() if len(h.index)}
                     for part, held in self._held.items()},
            "health": {part: [getattr(h, name) for name in _COLUMNS] for part, h in self._health.items()
                       if h.since_ns.any()},
            "reported": {part: r.dump() for part, r in self._reported.items()},
            "work": {part: mask for part, mask in self._work.items() if mask is not None},
            "plain": {part: share for part, share in self._plain.items() if share is not None},
            "attribution": self.attribution.dump(), "past": self.past.dump(),
            "fewest_down": self.fewest_down,
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; what another format kept is judged anew."""
        if data.get("format") != FORMAT:
            return
        for part, held in data["held"].items():
            for name, kept in held.items():
                if name in self._held.get(part, {}):
                    self._held[part][name].restore(kept)
        for part, columns in data["health"].items():
            kinds = zip(_COLUMNS.items(), columns, strict=True)
            self._health[part] = Health(part, **{name: np.array(c, kind) for (name, kind), c in kinds})
        self._reported |= {part: Reported.restored(r) for part, r in data["reported"].items()}
        self._work |= {part: np.array(mask, np.bool_) for part, mask in data["work"].items()}
        self._plain |= {part: float(share) for part, share in data["plain"].items()}
        self.attribution.restore(data["attribution"])
        self.past.restore(data["past"])
        self.fewest_down = np.array(data["fewest_down"], np.float32)


def size_of(part: str, site: Site) -> int:
    """Parts of a kind."""
    return site.sizes[PARTS[part]] * (2 if part in PAIRED else 1)


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


def _unknown(part: str, site: Site) -> Health:
    n = size_of(part, site)
    return Health(
        part, np.full(n, UNKNOWN, np.uint8), np.zeros(n, np.int64), np.zeros(n, np.uint8),
        np.full(n, np.nan, np.float32), np.zeros(n, np.uint8),
    )  # fmt: skip
