"""Common mode: wrong readings of many devices at once, because of one gateway or its scale.

Comparisons do not show them: they hold within what lies, or all are off alike. Three things no site does are
left. Water does not change its temperature by many kelvin between two readings, least of all everywhere. No
feeder carries more than all that its racks draw together, nor do all of their feeders carry next to nothing.
No CDU passes a fraction, or a multiple, of what its racks do, while these pass what they did. What is found
is a doubt of the reconciliation.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Bool
from twin.diagnosis.signature import TickValues
from twin.site import Site
from twin.telemetry import EntityState, column

Found = dict[tuple[str, int, str], tuple[float, float, float]]  # sensor: read, implied, 1 sigma
LEAP_K = 8.0  # of water between two readings; source: estimate
MANY, MANY_PU = 2, 0.5  # racks and CDUs that leap at once
LOST_PU = 0.5  # of the flow before: what is missing more would be acted on
WARMER_K = 4.0  # of the hottest GPU behind: then the flow is lost after all; source: estimate
# Readings before a gap of so long show no leap, nor does a leap that leaves flows as long; source: estimate
KEPT_S = 10.0
LOOK_TICKS = 5  # between two looks at the GPUs
# A feeder that carries so many times all that its racks draw, or as many times its usual part of it if that
# is more; and what is left of the racks' highest load in the next tick, as meters are read one by one
CARRIES_PU, FADES_PU = 1.3, 0.002
LACKS_PU, FOLLOWS = 0.5, 60.0  # of what its feeds read together; ticks; source: estimate
APART, APART_S, MOVED_PU = (
    2.0,
    6.0,
    0.3,
)  # a CDU's flow, in times its part of its racks'; these have not moved
LEARNS, LEARNED = 120, 600.0  # ticks until a part is known; over which it is learned
SIGMA_PU = 0.1
RACK_FLOW = TABLES["rack"].by_name["flow_lpm"]


class CommonMode(EntityState):
    """Usual supply temperatures, flows and shares of sums, from before any jump.

    `rack_ns`, `cdu_ns`: when they were last so, or a flow was lost beside a leap.
    """

    rack_c: F64 = column("rack", "f8", np.nan)
    rack_lpm: F64 = column("rack", "f8", np.nan)
    rack_ns: I64 = column("rack", "i8")
    hot_c: F64 = column("rack", "f8", np.nan)  # its hottest GPU
    gpus_heard: F64 = column("rack", "f8")
    cdu_c: F64 = column("cdu", "f8", np.nan)
    cdu_lpm: F64 = column("cdu", "f8", np.nan)
    cdu_ns: I64 = column("cdu", "i8")
    cdu_part: F64 = column("cdu", "f8", np.nan)
    cdu_of_racks_lpm: F64 = column("cdu", "f8", np.nan)
    cdu_ticks: F64 = column("cdu", "f8")
    apart_ns: I64 = column("cdu", "i8")  # since when; 0: it is not
    part: F64 = column("feeder", "f8", np.nan)
    ticks: F64 = column("feeder", "f8")
    load_w: F64 = column("feeder", "f8")
    usual_w: F64 = column("feeder", "f8", np.nan)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        start = site.gpu_start_of_node[site.node_start_of_rack]
        self._filled = np.flatnonzero(np.diff(start))
        self._first_gpu = start[self._filled]

    def find(self, now: TickValues) -> Found:
        """Return the findings of this tick."""
        found: Found = {}
        with np.errstate(all="ignore"):
            if self.sizes["feeder"]:
                self._feeders(now, found)
            if self.sizes["cdu"]:
                self._coolant(now, found)
                self._flows(now, found)
        return found

    def _coolant(self, now: TickValues, found: Found) -> None:
        """Find flows that vanish while the temperatures of the same source jump."""
        leapt = {t: self._leapt(t, now) for t in ("rack", "cdu")}
        at = self.site.cdu_of_rack
        fed = at >= 0
        astray = leapt["rack"] | (fed & leapt["cdu"][at])
        many = sum(int(mask.sum()) for mask in leapt.values())
        if many == 0 and now.state.tick % LOOK_TICKS:
            return
        hot_c, reporting = self._hottest(now["gpu.temp_c"])
        self.hot_c[~astray], self.gpus_heard[~astray] = hot_c[~astray], reporting[~astray]
        known = np.isfinite(self.rack_c).sum() + np.isfinite(self.cdu_c).sum()
        if many < max(MANY, MANY_PU * known):
            return
        warm = astray & ~((hot_c <= self.hot_c + WARMER_K) & (reporting >= self.gpus_heard))
        behind = np.bincount(at[fed], warm[fed], self.sizes["cdu"]) == 0
        for table, proven in (("rack", ~warm), ("cdu", behind)):
            flow, held = now[f"{table}.flow_lpm"], getattr(self, f"{table}_lpm")
            for k in np.flatnonzero(leapt[table] & proven & (flow < LOST_PU * held)).tolist():
                found[table, k, "flow_lpm"] = float(flow[k]), float(held[k]), SIGMA_PU * float(held[k])

    def _hottest(self, temp_c: F64) -> tuple[F64, F64]:
        """Hottest GPU of each rack, 0 where it has none and NaN where none is known, and how many are
        known [n_rack]."""
        out = np.zeros(self.sizes["rack"])
        if len(self._filled):
            out[self._filled] = np.fmax.reduceat(temp_c, self._first_gpu)
        return out, self.site.sum_by_rack("gpu", np.isfinite(temp_c).astype(np.float64))

    def _leapt(self, table: str, now: TickValues) -> Bool:
        """Return the entities of a table whose supply jumped; the others have their readings."""
        supply_c, flow_lpm, now_ns = now[f"{table}.supply_temp_c"], now[f"{table}.flow_lpm"], now.state.now_ns
        held_c, held_lpm, kept_ns = (getattr(self, f"{table}_{x}") for x in ("c", "lpm", "ns"))
        out: Bool = np.abs(supply_c - held_c) > LEAP_K
        out &= now_ns - kept_ns <= KEPT_S * NS
        calm = ~out & np.isfinite(supply_c)
        kept_ns[calm | (out & (flow_lpm < LOST_PU * held_lpm))] = now_ns
        held_c[calm] = supply_c[calm]
        calm &= np.isfinite(flow_lpm)
        held_lpm[calm] = flow_lpm[calm]
        return out

    def _feeders(self, now: TickValues, found: Found) -> None:
        """Find feeders that read more than all their racks draw."""
        feeder, rack = self.site.served_racks()
        nodes_w, racks_w = self.site.sum_by_rack("node", now["node.power_w"]), now["rack.power_w"]
        most_w, least_w = np.fmax(nodes_w, racks_w), np.fmin(nodes_w, racks_w)  # a rack's meter may lie, too
        below_w = np.bincount(feeder, most_w[rack], self.sizes["feeder"]).astype(np.float64)
        sure_w = np.bincount(feeder, least_w[rack], self.sizes["feeder"]).astype(np.float64)
        read = now["feeder.power_w"]
        known = np.isfinite(read) & np.isfinite(below_w) & (below_w > 0)
        np.maximum(self.load_w * (1.0 - FADES_PU), np.where(known, below_w, 0.0), out=self.load_w)
        # A feeder with much load beside its racks has no sum to compare with
        judged = (self.ticks >= LEARNS) & (self.part <= CARRIES_PU)
        usual = np.where(judged, np.fmax(self.part, 1.0), np.nan)
        far = known & (read > CARRIES_PU * usual * self.load_w)
        far |= known & self._lacking(read / sure_w, below_w)
        _learn(self.part, self.ticks, read / below_w, known & ~far)
        for k in np.flatnonzero(far).tolist():
            likely = float(self.part[k] * below_w[k])
            found["feeder", k, "power_w"] = float(read[k]), likely, SIGMA_PU * likely

    def _lacking(self, ratio: F64, below_w: F64) -> Bool:
        """Find feeders that read far less than usual, like all other feeds of their racks.

        What these draw comes from somewhere: one feed that is lost leaves another, which may be read later or
        be silent. Where it has just risen, their feeders may be read later.
        """
        direct, n = self.site.feeders_of_rack, self.sizes["rack"]
        lacks: Bool = (self.ticks >= LEARNS) & (ratio < LACKS_PU * self.part)
        fed = np.bincount(direct.row_of_member, ~lacks[direct.member], n) > 0
        feeder, rack = self.site.served_racks()
        every = np.bincount(feeder, fed[rack], self.sizes["feeder"]) == 0
        steady = below_w <= (1.0 + MOVED_PU) * self.usual_w
        new = np.where(np.isnan(self.usual_w), below_w, self.usual_w + (below_w - self.usual_w) / FOLLOWS)
        self.usual_w[:] = np.where(np.isfinite(below_w), new, self.usual_w)
        out: Bool = lacks & every & steady
        return out

    def _flows(self, now: TickValues, found: Found) -> None:
        """Find CDUs whose flow differs from the flows of their racks, which have not changed."""
        at = self.site.cdu_of_rack
        fed = at >= 0
        racks_lpm = np.bincount(at[fed], now["rack.flow_lpm"][fed], self.sizes["cdu"])
        read = now["cdu.flow_lpm"]
        ratio = read / racks_lpm
        known = np.isfinite(ratio) & (racks_lpm > 0)
        far = known & (self.cdu_ticks >= LEARNS)
        far &= (ratio < self.cdu_part / APART) | (ratio > self.cdu_part * APART)
        # Where the racks moved, theirs may be the readings that lie: nothing is learned of them
        apart = far & (np.abs(racks_lpm / self.cdu_of_racks_lpm - 1.0) <= MOVED_PU)
        calm = known & ~far
        _learn(self.cdu_part, self.cdu_ticks, ratio, calm)
        self.cdu_of_racks_lpm[calm] = racks_lpm[calm]
        now_ns = now.state.now_ns
        self.apart_ns[calm] = 0  # a reading that is missing ends nothing
        self.apart_ns[apart & (self.apart_ns == 0)] = now_ns
        read_ns = now.state.tables["rack"].last_good_ns(RACK_FLOW)
        for k in np.flatnonzero((self.apart_ns > 0) & (now_ns - self.apart_ns >= APART_S * NS)).tolist():
            if read_ns[at == k].min() <= self.apart_ns[k]:
                continue  # a rack that is read seldom has yet to say that its flow is lost
            likely = float(self.cdu_part[k] * (racks_lpm[k] if known[k] else self.cdu_of_racks_lpm[k]))
            found["cdu", k, "flow_lpm"] = float(read[k]), likely, SIGMA_PU * likely


def _learn(part: F64, ticks: F64, now: F64, where: Bool) -> None:
    """Move a usual share towards the present one."""
    ticks[where] += 1.0
    share = np.maximum(1.0 / np.maximum(ticks, 1.0), 1.0 / LEARNED)
    part[where] = np.where(np.isnan(part), now, part + share * (now - part))[where]
