"""Device reports: faults that devices report themselves (leak detectors, breakers, supplies, power states,
links).

A report is believed at once; the reports above or beside it decide which entity is the source. A leak runs
down: one wet tray is the source, also of those below that are wet later, where the site file states which way
is down; others, or one and the rack's own rope, are a leak of their rack; a CDU's tray that agrees is one
more detector, not a second leak.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I32, I64, NS, TABLES, Bool, signal_of
from twin.diagnosis.cause import Cause
from twin.diagnosis.topology import Topology
from twin.telemetry import GOOD, EntityState, State, column, keyed, scalar

LEAK_CLEAR_S = 120.0
SAG_PU = 0.95  # of its usual voltage; a healthy grid stays within 5 % (EN 50160 allows 10 %)
# Below, it is a dip (EN 50160), which may be over within the second; less has to last
DIP_PU, SAG_HOLD_S = 0.9, 2.0
# Feeds that are lost within this time are lost together, and so long one waits for a word of the others;
# source: estimate, meters of a building are read every second to every ten
LEAST_FEEDS, TOGETHER_S = 2, 10.0
SUPPLIES = [TABLES["node"].by_name[k] for k in ("psu1_power_w", "psu2_power_w")]
WORDS = ("energised_state", "voltage_v")
REFERENCE_PER_READING = 0.002  # of a feeder's usual voltage
MOST_LINKS = 100  # that are reported each; the others are counted
MOST_NAMED = 4  # wet detectors of a leak that are named each
TRAYS_WET, HALL_WET = "rack.tray_leak_state", "hall.leak_state"  # as the building's system reports
WET = "node.leak_state"  # what a leak at a rack or a tray covers: one supersedes the other
NEVER_NS = 2**62
DEAD_PU = 0.1  # of its usual voltage: no voltage
PSU_EMPTY_PU, PSU_EMPTY_W = 0.03, 300.0  # share of a node's power; no node draws more than 10 kW


def good(state: State, key: str) -> F64:
    """The good values of a signal [n], NaN elsewhere."""
    signal = signal_of(key)
    column = state.tables[signal.table]
    value: F64 = column.value[signal.row].astype(np.float64)
    if column.bad_count[signal.row]:
        value[column.quality[signal.row] != GOOD] = np.nan
    return value


def reads(state: State, key: str, value: float) -> Bool:
    """Return the entities [n] whose good state has this value."""
    signal = signal_of(key)
    column = state.tables[signal.table]
    out: Bool = column.value[signal.row] == value
    if column.bad_count[signal.row]:
        out &= column.quality[signal.row] == GOOD
    return out


def reported(state: State, key: str) -> bool:
    """Return True if any entity ever reported this signal."""
    signal = signal_of(key)
    column = state.tables[signal.table]
    return column.n > 0 and bool(column.bad_count[signal.row] < column.n)


class DeviceReports(EntityState):
    """The usual voltage of feeders, and the first wet detector."""

    usual_v: F64 = column("feeder", "f8", np.nan)
    wet_ns: dict[str, I64] = keyed("i8", keys=("node", "rack", "cdu", "loop"))
    wet: Bool = column("node", "?")  # of the last tick with a wet detector
    source: I32 = column("rack", "i4", -1)  # tray where the leak of a rack began; -1 = the rack itself
    fill_s: F64 = column("cdu", "f8")
    tripped: Bool = column("feeder", "?")  # as their breakers said last
    dark_ns: I64 = column("feeder", "i8")  # reading that said first that it carries nothing; 0 = it does
    lost_ns: I64 = column("feeder", "i8")  # when it last was without voltage
    grid_from_ns: int = scalar(0)  # first and last instant of the last loss of all feeds
    grid_ns: int = scalar(0)

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.sizes)
        self.topology, n = topology, topology.sizes
        self.lost: Bool = np.zeros(n["feeder"], np.bool_)
        self.doubly_fed: Bool = np.array([_second_feed(topology, i) for i in range(n["rack"])], np.bool_)

    def causes(
        self, state: State, in_maintenance: dict[str, Bool], worked: dict[str, Bool], dt_s: float
    ) -> list[Cause]:
        """Return all reported causes. `worked`: entities under maintenance, but not asleep."""
        return [
            *self._leaks(state, worked, dt_s),
            *self._feeders(state, in_maintenance),
            *self._supplies(state, in_maintenance),
            *self._links(state, in_maintenance),
        ]

    def _wet(self, state: State, table: str, in_maintenance: dict[str, Bool]) -> Bool:
        """Return the wet detectors of a table [n]; keeps the instant of their first report."""
        wet, since = reads(state, f"{table}.leak_state", 1.0), self.wet_ns[table]
        if (mask := in_maintenance.get(table)) is not None:
            wet &= ~mask
        if not wet.any():
            since[:] = 0
            return wet
        since[wet & (since == 0)] = state.now_ns
        since[~wet] = 0
        return wet

    def _leaks(self, state: State, in_maintenance: dict[str, Bool], dt_s: float) -> list[Cause]:
        topology, site = self.topology, self.topology.site
        wet = {t: self._wet(state, t, in_maintenance) for t in ("node", "rack", "cdu", "loop")}
        filling = np.zeros(topology.sizes["cdu"], np.bool_)
        if reported(state, "cdu.fill_pump_state"):
            filling = good(state, "cdu.fill_pump_state") == 1.0
            if (mask := in_maintenance.get("cdu")) is not None:
                filling &= ~mask
        self.fill_s = np.clip(np.where(filling, self.fill_s + dt_s, self.fill_s - 0.1 * dt_s), 0.0, 600.0)
        sums, halls = (
            reads(state, key, 1.0) & ~in_maintenance.get(key.partition(".")[0], np.False_)
            for key in (TRAYS_WET, HALL_WET)
        )
        if not any(mask.any() for mask in (*wet.values(), sums, halls)):
            self.wet[:] = False
            return []
        out, explained = [], {t: np.zeros(topology.sizes[t], np.bool_) for t in wet}
        if wet["node"].any():
            rack_of = site.rack_of_node
            for rack in np.unique(rack_of[wet["node"]]).tolist():
                trays = np.flatnonzero(wet["node"] & (rack_of == rack)).astype(np.int32)
                # A drip wets the pan of the rack after the tray; a leak that wets the pan first is the rack's
                first_ns = int(self.wet_ns["node"][trays].min())
                if not self.wet[trays].all():  # what only dries began where it began
                    self.source[rack] = self._source(trays)
                source = int(self.source[rack])
                if source < 0 or (wet["rack"][rack] and int(self.wet_ns["rack"][rack]) < first_ns):
                    explained["rack"][rack] = True
                    out.append(self._leak(state, "rack", rack, trays, wet, explained))
                else:
                    out.append(self._leak(state, "node", source, trays, wet, explained))
        self.wet = wet["node"]
        for table in ("rack", "cdu", "loop"):
            for entity in np.flatnonzero(wet[table] & ~explained[table]).tolist():
                out.append(self._leak(state, table, entity, np.zeros(0, np.int32), wet, explained))
        own = {cause.entity for cause in out if cause.table == "rack"}
        own |= {int(site.rack_of_node[cause.entity]) for cause in out if cause.table == "node"}
        out += [self._trays_wet(state, rack) for rack in np.flatnonzero(sums).tolist() if rack not in own]
        return out + self._halls_wet(halls, out)

    def _trays_wet(self, state: State, rack: int) -> Cause:
        """Return the leak of a rack that the building's system alone reports, for its trays as a whole.

        Where each tray reports that it is dry, the two ways disagree: that has to last, and is a warning.
        """
        trays = self.topology.below("rack", rack, "node")
        dry = bool(len(trays)) and bool(reads(state, WET, 0.0)[trays].all())
        evidence = [f"the building's system reports a wet tray of {self.topology.site.name('rack', rack)}"]
        if dry:
            evidence.append(f"its {len(trays)} trays report that they are dry")
        return Cause(
            "leak", "rack", rack, "", 0.5 if dry else 0.95, tuple(evidence), 1, TOGETHER_S if dry else 0.0,
            LEAK_CLEAR_S, {WET: trays}, severity="warning" if dry else "",
        )  # fmt: skip

    def _halls_wet(self, halls: Bool, leaks: list[Cause]) -> list[Cause]:
        """Return the halls with a wet detector and no known leak, which would wet it, too."""
        known = np.zeros(len(halls), np.bool_)
        for leak in leaks:
            if leak.table == "loop":  # its plant stands elsewhere
                continue
            at = int(self.topology.above(leak.table, "hall")[leak.entity])
            if at >= 0 and halls[at]:
                known[at] = True
                leak.covers[HALL_WET] = np.array([at], np.int32)
                agrees = f"the detector of {self.topology.site.name('hall', at)} agrees"
                leak.evidence, leak.count = (*leak.evidence, agrees), leak.count + 1
        return [
            Cause("water_detected", "hall", hall, "", 0.95, ("its leak detector is wet",), 1, 0.0,
                  LEAK_CLEAR_S, {HALL_WET: np.array([hall], np.int32)})
            for hall in np.flatnonzero(halls & ~known).tolist()
        ]  # fmt: skip

    def _source(self, trays: I32) -> int:
        """Return the tray of a rack where the leak began: the first wet one, above all others; -1 for
        none.

        Where the site file does not state which way is down, the others are the next ones in a row.
        """
        first = int(trays[np.argmin(self.wet_ns["node"][trays])])
        site, others = self.topology.site, trays[trays != first]
        if not len(others):
            return first
        if site.upward_of_rack[site.rack_of_node[first]] != 0:
            below = bool(np.isin(others, site.nodes_below(first)).all())
        else:
            row = int(trays.max()) - int(trays.min()) == len(others)
            below = row and first in (int(trays.min()), int(trays.max()))
        later = (self.wet_ns["node"][others] > self.wet_ns["node"][first]).all()
        return first if below and later else -1

    def _leak(
        self,
        state: State,
        table: str,
        entity: int,
        trays: I32,
        wet: dict[str, Bool],
        agreeing: dict[str, Bool],
    ) -> Cause:
        """Return one leak, with the detectors above it that confirm it."""
        topology, site = self.topology, self.topology.site
        order = trays[np.lexsort((trays, self.wet_ns["node"][trays]))] if table == "rack" else trays[:0]
        own = [(table, entity)] if wet[table][entity] else []
        own += [("node", int(tray)) for tray in order]
        if table == "node":
            own += [("node", int(tray)) for tray in trays if tray != entity]
        evidence = [f"the detector of {site.name(*at)} is wet" for at in own[:MOST_NAMED]]
        if len(own) > MOST_NAMED:
            evidence.append(f"{len(own) - MOST_NAMED} more trays of its rack are wet")
        detectors = len(own)
        ladder = ("node", "rack", "cdu", "loop")
        for higher in ladder[ladder.index(table) + 1 :]:
            at = int(topology.above(table, higher)[entity])
            if at >= 0 and wet[higher][at]:
                agreeing[higher][at] = True
                detectors += 1
                evidence.append(f"the detector of {site.name(higher, at)} agrees")
        cdu = (
            entity if table == "cdu" else int(topology.above(table, "cdu")[entity]) if table != "loop" else -1
        )
        if cdu >= 0 and self.fill_s[cdu] > 0:
            evidence.append(f"the fill pump of {site.name('cdu', cdu)} ran {self.fill_s[cdu]:.0f} s")
            detectors += 1
        sure = 0.999 if detectors > 1 else 0.95
        return Cause(
            "leak", table, entity, "", sure, tuple(evidence), detectors, 0.0, LEAK_CLEAR_S, {WET: trays}
        )

    def _feeders(self, state: State, in_maintenance: dict[str, Bool]) -> list[Cause]:
        """Find lost feeds, tripped breakers, and a sag of all feeds."""
        n = self.topology.sizes["feeder"]
        self.lost = np.zeros(n, np.bool_)
        if n == 0:
            return []
        none = np.zeros(n, np.bool_)
        mask = in_maintenance.get("feeder", none)
        breaker = good(state, "feeder.breaker_state")
        lost = (good(state, "feeder.energised_state") == 1.0) & ~mask
        pu = self._voltage_pu(state)
        lost |= (pu < DEAD_PU) & ~mask
        # One that is not read for once has not been closed
        self.tripped = np.where(np.isnan(breaker), self.tripped & lost, breaker == 1.0) & ~mask
        self.lost = lost | self.tripped
        self.lost_ns[self.lost] = state.now_ns
        out = self._dark(state)
        if (grid := self._grid_lost(mask, state.now_ns)) is not None:
            return [grid]
        sag = (pu < SAG_PU) & ~self.lost
        known = np.isfinite(pu) & ~self.lost & ~mask
        if known.any() and sag[known].all() and np.count_nonzero(known) >= min(2, n):
            worst = float(pu[known].min())
            text = f"voltage of {int(known.sum())} feeders at {worst:.0%} of its usual"
            hold_s = 0.0 if worst < DIP_PU else SAG_HOLD_S
            out.append(Cause("grid_event", "site", 0, "", 0.99, (text,), int(known.sum()), hold_s, 30.0))
        return out

    def _grid_lost(self, in_maintenance: Bool, now_ns: int) -> Cause | None:
        """Find the loss of all feeds of the site together: no feed is at fault."""
        feeds = np.flatnonzero((self.topology.site.parent_of_feeder < 0) & ~in_maintenance)
        if len(feeds) < LEAST_FEEDS or not self.lost[feeds].all() or self.tripped[feeds].any():
            return None
        since_ns = self.dark_ns[feeds]
        if int(since_ns.max() - since_ns.min()) > TOGETHER_S * NS:
            return None
        self.grid_from_ns, self.grid_ns = int(since_ns.min()), now_ns
        dark = np.flatnonzero(self.lost).astype(np.int32)
        names = [self.topology.site.name("feeder", int(f)) for f in feeds]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        evidence = [f"{', '.join(names[:MOST_NAMED])}{more} report no voltage: all feeds of the site"]
        if len(dark) > len(feeds):
            evidence.append(f"{len(dark) - len(feeds)} feeders below them are dark")
        covers = {"feeder": dark}
        return Cause("grid_event", "site", 0, "", 0.999, tuple(evidence), len(dark), 0.0, 30.0, covers)

    def unfed_from_ns(self, now_ns: int) -> int:
        """Return the instant from which lack of voltage explains a standstill; in the far future if it
        does not."""
        unfed = now_ns - self.grid_ns < TOGETHER_S * NS
        return self.grid_from_ns - round(TOGETHER_S * NS) if unfed else NEVER_NS

    def _dark(self, state: State) -> list[Cause]:
        """Feeders that carry nothing, the highest of each branch. A feed waits for a word of the others that
        is no older than its own, as they may be lost with it; and to come back, if they were.
        """
        site, dark = self.topology.site, self.lost
        root = site.parent_of_feeder < 0
        column = state.tables["feeder"]
        received_ns = np.maximum(*(column.last_good_ns(TABLES["feeder"].by_name[k]) for k in WORDS))
        self.dark_ns = np.where(dark, np.where(self.dark_ns > 0, self.dark_ns, received_ns), 0)
        out: list[Cause] = []
        for feeder in np.flatnonzero(dark & (root | ~dark[np.maximum(site.parent_of_feeder, 0)])).tolist():
            under = [f for f in site.subtree(feeder) if dark[f]]
            kind, report = "feed_lost", "reports no voltage"
            late = root & ~dark & (received_ns < self.dark_ns[feeder])
            waits = late.any() or self.unfed_from_ns(state.now_ns) < NEVER_NS
            hold_s = TOGETHER_S if root[feeder] and waits else 0.0
            if self.tripped[feeder]:
                kind, report, hold_s = "breaker_tripped", "reports a trip", 0.0
            evidence = [f"{site.name('feeder', feeder)} {report}"]
            if len(under) > 1:
                evidence.append(f"{len(under) - 1} feeders below it are dark")
            covers = {"feeder": np.array(under, np.int32)}
            out.append(
                Cause(kind, "feeder", feeder, "", 0.999, tuple(evidence), len(under), hold_s, 30.0, covers)
            )
        return out

    def _voltage_pu(self, state: State) -> F64:
        """Return voltage over its usual value [n_feeder]; NaN if unknown. The usual value does not follow
        a sag."""
        volts = good(state, "feeder.voltage_v")
        with np.errstate(invalid="ignore", divide="ignore"):
            first = np.isnan(self.usual_v) & (volts > 1.0)
            self.usual_v = np.where(first, volts, self.usual_v)
            pu: F64 = volts / self.usual_v
            calm = np.abs(pu - 1.0) < 1.0 - SAG_PU
        self.usual_v = np.where(
            calm, self.usual_v + REFERENCE_PER_READING * (volts - self.usual_v), self.usual_v
        )
        return pu

    def _supplies(self, state: State, in_maintenance: dict[str, Bool]) -> list[Cause]:
        """Find nodes on one supply although both feeds have voltage."""
        if not (reported(state, "node.psu1_power_w") and reported(state, "node.psu2_power_w")):
            return []
        least = np.minimum(*(state.tables["node"].value[s.row] for s in SUPPLIES))
        if not least.min(initial=np.inf) < PSU_EMPTY_W:
            return []  # quickly, in nearly every tick
        read_ns = state.tables["node"].last_good_ns
        psu = np.stack([good(state, "node.psu1_power_w"), good(state, "node.psu2_power_w")], axis=1)
        total = psu.sum(axis=1)
        with np.errstate(invalid="ignore"):
            alone = (psu < PSU_EMPTY_PU * total[:, None]) & (total[:, None] > 50.0)
        if not alone.any():
            return []
        if (mask := in_maintenance.get("node")) is not None:
            alone[mask] = False
        out = []
        rack_of = self.topology.site.rack_of_node
        alone &= self.doubly_fed[rack_of][:, None]
        share = np.bincount(rack_of[alone.any(axis=1)], minlength=self.topology.sizes["rack"])
        nodes = np.bincount(rack_of, minlength=self.topology.sizes["rack"])
        for node, side in zip(*np.nonzero(alone), strict=True):
            rack = int(rack_of[node])
            most = share[rack] > 1 and share[rack] >= 0.5 * nodes[rack]
            lost_ns = int(self.lost_ns[_feeders_of(self.topology, rack)].max(initial=0))
            if most or int(read_ns(SUPPLIES[side], np.array([node]))[0]) <= lost_ns:
                continue  # the feed of the whole rack, not this node's supply, or a reading from that time
            text = f"supply {int(side) + 1} gives {psu[node, side]:.0f} W, the other {psu[node].max():.0f} W"
            out.append(
                Cause(
                    "psu_lost",
                    "node",
                    int(node),
                    "",
                    0.99,
                    (text,),
                    1,
                    3.0,
                    30.0,
                    {"node": np.array([node], np.int32)},
                )
            )
        return out

    def _links(self, state: State, in_maintenance: dict[str, Bool]) -> list[Cause]:
        if self.topology.sizes["link"] == 0 or not reported(state, "link.up_state"):
            return []
        down = good(state, "link.up_state") == 1.0
        if (mask := in_maintenance.get("link")) is not None:
            down &= ~mask
        at = np.flatnonzero(down).tolist()
        out = [
            Cause("link_down", "link", i, "", 0.999, ("the port reports no link",), 1, 0.0, 30.0)
            for i in at[:MOST_LINKS]
        ]
        if out:
            out[0].more = len(at) - len(out)
        return out


def _feeders_of(topology: Topology, rack: int) -> I32:
    """Return the feeders that serve a rack directly; none if unknown."""
    served = topology.site.feeders_of_rack
    if len(served.start) - 1 != topology.sizes["rack"]:
        return np.zeros(0, np.int32)
    return served.member[served.start[rack] : served.start[rack + 1]]


def _second_feed(topology: Topology, rack: int) -> bool:
    """Return True if a rack has feeders on both sides or, where no side is named, more than one; True if
    unknown.
    """
    fed = _feeders_of(topology, rack)
    sides = topology.site.side_of_feeder[fed]
    if (sides > 0).any():
        return bool((sides == 1).any() and (sides == 2).any())
    return len(fed) != 1
