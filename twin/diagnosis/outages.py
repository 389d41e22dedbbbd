"""Outages: readings that stopped together are one condition, named after their common place.

Each silent entity bounds the instant at which its source stopped: not before its last reading, and not long
after the first reading that is missing. Entities whose bounds overlap fell silent together. One signal alone
is a sensor, and the diagnosis has kinds for a node and a GPU alone; all else is an outage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from twin.catalogue import I32, NS, TABLES, Bool, counted, signal_words, table_noun, utc
from twin.contracts import Finding
from twin.diagnosis.silent_signals import SLACK_NS, Silent
from twin.diagnosis.topology import LADDER, Topology
from twin.site import Site, noun_key
from twin.telemetry import MISSING, EntityState, State, TableState, records

BIN_NS = NS // 4  # instants are compared in these steps
WIDEST = 100_000  # steps of a bound, about seven hours
RECOUNT_S = 10.0
PREFIX = "silence/"  # of the ids of outages that are reported
SHOWN_ENTITIES = 8
MOST_TABLES = 2  # that are listed beside their place


@dataclass(slots=True)
class Outage:
    """Readings that stopped together: their lowest common place, and the instant of the stop.

    `first_ns`: when it was noticed. `signals` and `entities` count what is missing.
    """

    id: str
    table: str
    entity: int
    since_ns: int
    first_ns: int
    counted_ns: int = 0
    signals: int = 0
    entities: int = 0
    whole: bool = False
    parts: str = ""


class Outages(EntityState):
    """The outages of a site, by id. `members`: the silent entities of each, by table [m]."""

    known: dict[str, Outage] = records(Outage, "id")

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.sizes)
        self.topology = topology
        self.members: dict[str, dict[str, I32]] = {}
        self.masks: dict[str, Bool] = {}  # entities without data by an outage [n per table]

    def update(self, state: State, silent: Mapping[str, Silent]) -> list[tuple[str, int, int, float]]:
        """Take in what is silent now; return single signals that are silent alone: (table, entity, row, and
        for how many seconds others may join it).
        """
        self.masks = {}
        if not silent:
            self.known, self.members = {}, {}
            return []
        before, self.known, self.members = self.known, {}, {}
        alone: list[tuple[str, int, int, float]] = []
        for cluster in _together(silent):
            if sum(len(s.entity) for s in cluster.values()) == 1:
                ((table, one),) = cluster.items()
                if one.signals[0] == 1 and not one.whole[0]:
                    hold_s = float(one.hold_s()[0])
                    # Unless its device still reports, it may be the first of many silent signals
                    if state.now_ns - int(one.received_ns[0]) <= hold_s * NS:
                        alone.append((table, int(one.entity[0]), int(one.row[0]), hold_s))
                    continue
            self._take(state, cluster, before)
        return alone

    def _take(self, state: State, cluster: dict[str, Silent], before: dict[str, Outage]) -> None:
        since_ns = max(int(s.last_ns.max()) for s in cluster.values())
        first_ns = min(int(s.last_ns.min()) for s in cluster.values()) - SLACK_NS
        last_ns = min(int(s.missed_ns.min()) for s in cluster.values()) + SLACK_NS
        outage = next((o for o in before.values() if first_ns <= o.since_ns <= last_ns), None)
        members = {table: s.entity for table, s in cluster.items()}
        n = sum(map(len, members.values()))
        if outage is None:
            table, entity = self.place(members)
            outage = Outage("", table, entity, since_ns, state.now_ns)
        else:
            del before[outage.id]
        if n != outage.entities or state.now_ns - outage.counted_ns >= RECOUNT_S * NS:
            self._describe(state, outage, cluster, members)
        if not outage.id.startswith(PREFIX):
            hold_s = min(float(s.hold_s().min()) for s in cluster.values())
            lasts = state.now_ns - outage.first_ns >= hold_s * NS
            outage.id = self._identity(outage, members) if lasts else f"{since_ns}/{n}"
        self.known[outage.id], self.members[outage.id] = outage, members
        for table, index in members.items():
            mask = self.masks.setdefault(table, np.zeros(self.sizes[table], np.bool_))
            mask[index] = True

    def _describe(
        self, state: State, outage: Outage, cluster: dict[str, Silent], members: dict[str, I32]
    ) -> None:
        """Count the missing signals and describe their place: while more fall silent, the place may grow."""
        outage.counted_ns, outage.entities = state.now_ns, sum(map(len, members.values()))
        outage.table, outage.entity = self.place(members)
        # A reading received half the limit of silence after the last one was sent after the stop
        last_ns = max(int(s.last_ns.max()) for s in cluster.values())
        until_ns = last_ns + min(int((s.missed_ns - s.last_ns).min()) for s in cluster.values()) // 2
        outage.whole = all(s.whole.all() for s in cluster.values())
        outage.whole &= self._all_of(outage, state, members, until_ns)
        outage.signals = sum(
            missing(state.tables[table], s.entity, int(s.missed_ns.max())) for table, s in cluster.items()
        )
        outage.parts = self.parts(cluster)

    def place(self, members: Mapping[str, I32]) -> tuple[str, int]:
        """Return the lowest entity that contains all members: (table, index)."""
        if len(members) == 1:
            ((table, index),) = members.items()
            if len(index) == 1:
                return table, int(index[0])
        for table in ("node", "rack", "hall"):
            found = {int(i) for t, index in members.items() for i in self._inside(t, index, table)}
            if len(found) == 1 and (at := found.pop()) >= 0:
                return table, at
        return "site", 0

    def _inside(self, table: str, index: I32, higher: str) -> Iterable[int]:
        """Return the entity of a higher table that contains each of these; -1 for none."""
        site = self.topology.site
        if table == higher:
            return [int(i) for i in np.unique(index)]
        if table == "link":
            node = site.node_of_link[index]
            inside = node[node >= 0]
            found = set(self._inside("node", inside, higher)) if len(inside) else set()
            return found | ({-1} if len(inside) < len(index) else set())
        if self.topology.knows(table, higher):
            return [int(i) for i in np.unique(self.topology.above(table, higher)[index])]
        if higher == "hall" and table == "feeder":
            halls = {name: i for i, name in enumerate(site.names["hall"])}
            return {halls.get(site.name(table, i).rpartition("/")[0], -1) for i in index.tolist()}
        return (-1,)

    def _all_of(self, outage: Outage, state: State, members: Mapping[str, I32], until_ns: int) -> bool:
        """Return True if nothing else in this place reports after the stop."""
        if outage.table == "site":
            within = {t: np.arange(n, dtype=np.int32) for t, n in self.sizes.items() if t != "job"}
        else:
            within = {t: self._below(outage, t) for t in ("hall", "rack", "cdu", "feeder", "node", "gpu")}
        for table, index in within.items():
            others = np.setdiff1d(index, members.get(table, ()), assume_unique=True)
            if (state.tables[table].t_ns[:, others] > until_ns).any():
                return False
        return True

    def _below(self, outage: Outage, table: str) -> I32:
        none: I32 = np.zeros(0, np.int32)
        if table == outage.table:
            return np.array([outage.entity], np.int32)
        if table == "feeder":
            hall = self.topology.site.name("hall", outage.entity) + "/" if outage.table == "hall" else "?"
            names = self.topology.site.names["feeder"]
            return np.array([i for i, name in enumerate(names) if name.startswith(hall)], np.int32)
        if not self.topology.knows(table, outage.table):
            return none
        return self.topology.below(outage.table, outage.entity, table)

    def parts(self, cluster: Mapping[str, Silent]) -> str:
        """Return the members in words, the highest first: `rack lab/h/r1, 18 nodes and 72 GPUs`."""
        return self.listing(
            {table: s.entity for table, s in cluster.items()},
            {
                table: TABLES[table].gauges[int(s.row[0])].name
                for table, s in cluster.items()
                if (s.signals == 1).all() and not s.whole.any() and len(np.unique(s.row)) == 1
            },
        )

    def listing(self, members: Mapping[str, I32], signals: Mapping[str, str] | None = None) -> str:
        """Entities [m per table] in words, the highest first; `signals`: where one of each is meant alone."""
        words = []
        for table in sorted(members, key=_order):
            who, n = self.topology.site.name(table, int(members[table][0])), len(members[table])
            kind = noun_key(self.topology.site, table)
            who = f"{table_noun(kind, n)} {who}" if n == 1 else counted(kind, n)
            words.append(f"{signal_words(signals[table])} of {who}" if signals and table in signals else who)
        return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

    def _identity(self, outage: Outage, members: Mapping[str, I32]) -> str:
        """Return a name that stays while the outage lasts: its place, and the missing part if it is not
        all."""
        name = f"{PREFIX}{self.topology.site.name(outage.table, outage.entity)}"
        if not outage.whole:
            name += "/" + "+".join(sorted(members))
        same = sum(key == name or key.startswith(f"{name}#") for key in self.known)
        return f"{name}#{same + 1}" if same else name

    def blind(self, table: str) -> Bool | None:
        """Return the entities [n] without data at, directly above or directly below them; None for none.

        Comparisons relate an entity to its neighbours: of these none is conclusive.
        """
        if not self.masks:
            return None
        out = np.zeros(self.sizes[table], np.bool_) | self.masks.get(table, np.False_)
        place = LADDER.index(table) if table in LADDER else -1
        if 0 <= place < len(LADDER) - 2 and (mask := self.masks.get(LADDER[place + 1])) is not None:
            above = self.topology.above(table, LADDER[place + 1])
            out |= (above >= 0) & mask[np.maximum(above, 0)]
        if 0 < place < len(LADDER) - 1 and (mask := self.masks.get(LADDER[place - 1])) is not None:
            out |= self.topology.count(LADDER[place - 1], table, mask) > 0
        return out if out.any() else None

    def findings(self, site: Site) -> list[Finding]:
        """Return lasting outages as findings for operators. Silence alone is never more than a warning."""
        return [
            _finding(site, o, self.members.get(o.id, {}))
            for o in self.known.values()
            if o.id.startswith(PREFIX)
        ]


_TABLES = ("site", "hall", "loop", "cdu", "feeder", "rack", "node", "gpu")


def _order(table: str) -> int:
    return _TABLES.index(table) if table in _TABLES else len(_TABLES)


def where(site: Site, outage: Outage) -> str:
    """Return the place of an outage in words: `rack lab/h/r1`, `72 GPUs of rack lab/h/r1`."""
    place = site.name(outage.table, outage.entity)
    if outage.table == "site":
        return "any source" if outage.whole else outage.parts
    noun = table_noun(noun_key(site, outage.table))
    if outage.whole:
        return f"{noun} {place}"
    return outage.parts if place in outage.parts else f"{outage.parts} of {noun} {place}"


def place_of(outages: Outages, members: Mapping[str, I32]) -> str:
    """Entities [m per table] in words with the lowest place that holds them: `4 GPUs of node lab/h/r1/node0`;
    of many tables the place alone.
    """
    site, (table, entity) = outages.topology.site, outages.place(members)
    noun = table_noun(noun_key(site, table))
    place = "the site" if table == "site" else f"{noun} {site.name(table, entity)}"
    if len(members) > MOST_TABLES or table in members:
        return place
    listed = outages.listing(members)
    return listed if table == "site" else f"{listed} of {place}"


def _finding(site: Site, outage: Outage, members: Mapping[str, I32]) -> Finding:
    first = sorted(members, key=_order)
    names = [site.name(t, int(i)) for t in first for i in members[t][:SHOWN_ENTITIES].tolist()]
    since = utc(outage.since_ns, "%H:%M:%S")
    return Finding(
        outage.id,
        "warning",
        f"No data from {where(site, outage)} since {since} UTC: {outage.signals} signals",
        tuple(names[:SHOWN_ENTITIES]),
        (
            f"silent together: {outage.parts}",
            "conclusions from these signals wait; until then limits use the worst case",
        ),
        1.0,
        "Check what these have in common: broker, gateway, agent or exporter, and its network.",
        outage.entities,
    )


def missing(column: TableState, index: I32, until_ns: int) -> int:
    """Return the signals of these entities without a reading after an instant; companions do not count."""
    rows = np.array([s.row for s in column.signals if s.base not in TABLES[column.table].by_name], np.int32)
    cells = np.ix_(rows, index)
    last_ns = column.t_ns[np.ix_(column.partition.group_of_row[rows], index)]
    last_ns = np.where(column.quality[cells] == MISSING, column.good_ns[cells], last_ns)
    read = np.isfinite(column.value[cells])
    n = int(np.count_nonzero(read & (last_ns > 0) & (last_ns <= until_ns)))
    if len(column.counters):
        rows = np.arange(len(column.counters), dtype=np.int32)
        last_ns = column.t_ns[np.ix_(column.partition.group_of_row[rows + len(column.signals)], index)]
        n += int(np.count_nonzero((column.raw[:, index] >= 0) & (last_ns > 0) & (last_ns <= until_ns)))
    return n


def _together(silent: Mapping[str, Silent]) -> list[dict[str, Silent]]:
    """Split outages into groups with overlapping bounds, the earliest first."""
    tables = list(silent)
    begin = np.concatenate([silent[t].last_ns for t in tables]) // BIN_NS
    end = np.concatenate([silent[t].missed_ns for t in tables]) // BIN_NS
    key = begin * WIDEST + np.clip(end - begin, 0, WIDEST - 1)
    bounds, of = np.unique(key, return_inverse=True)
    number = np.zeros(len(bounds), np.int64)
    cluster, least_end = -1, -1
    for i, bound in enumerate(bounds.tolist()):
        first, width = divmod(bound, WIDEST)
        if cluster < 0 or first > least_end:
            cluster, least_end = cluster + 1, first + width
        least_end = min(least_end, first + width)
        number[i] = cluster
    number = number[of]
    out: list[dict[str, Silent]] = [{} for _ in range(cluster + 1)]
    at = 0
    for table in tables:
        mine = number[at : at + len(silent[table].entity)]
        at += len(mine)
        for c in np.unique(mine).tolist():
            out[c][table] = silent[table].where(mine == c)
    return out
