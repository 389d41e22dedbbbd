"""Growth: counters that grow and errors that recur: memory, NVLinks, ports, XIDs.

Growth is judged over about a minute, against a least number and against what is usual for that entity. May
import events, the state and causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Bool
from twin.diagnosis.alarm_budget import AlarmBudget, run_log, surprise
from twin.diagnosis.cause import MAX_REPORTED, Cause
from twin.diagnosis.xids import Xids, codes_of
from twin.site import Site
from twin.telemetry import EntityState, FaultColumns, FaultReported, State, keyed, part, scalar

MOST_EACH = 100  # devices of a counter that are reported each; the others are counted
EVERY_S = 2.0  # between readings of counters
RECENT_S, USUAL_S = 60.0, 3600.0
UNUSUAL = 10.0  # times the usual growth, whatever the chance: counts come in bursts; source: estimate
CLEAR_S = 180.0
# Growth that ends sooner is a burst, which asks for nothing; after so long without any, it begins anew;
# source: estimate
BURST_S, ANEW_S = 4.0, 120.0
RECOVERY_XID = 154  # shows what would cure an error, or that nothing is needed any more


@dataclass(frozen=True, slots=True)
class Counted:
    """A counter, what its growth means, and the least growth within about a minute that means it."""

    table: str
    counter: str
    kind: str
    least: float
    words: str
    usual: bool = True  # healthy devices count it too, now and then, and bursts of it


COUNTED = (
    Counted("gpu", "ecc_dbe_count", "ecc_growth", 1.0, "double-bit errors", usual=False),
    Counted("gpu", "ecc_sbe_count", "ecc_growth", 10.0, "single-bit errors"),
    Counted("gpu", "nvlink_error_count", "nvlink_flaps", 10.0, "NVLink errors"),
    Counted("link", "discard_count", "link_congested", 100.0, "discarded packets"),
    Counted("link", "error_count", "link_congested", 100.0, "errors"),
)


class Growth(EntityState):
    """Recent and usual growth per counter and entity, and the instants of XIDs."""

    last: dict[str, I64] = keyed("i8")
    recent: dict[str, F64] = keyed("f8")
    usual: dict[str, F64] = keyed("f8")
    began_ns: dict[str, I64] = keyed("i8")  # first and last instant of the growth that goes on, or was last
    grew_ns: dict[str, I64] = keyed("i8")
    looked_ns: int = scalar(0)
    watched_s: float = scalar(0.0)
    xids: Xids = part()

    def __init__(self, site: Site, budget: AlarmBudget) -> None:
        super().__init__(site.sizes)
        self.site = site
        tests = sum(site.sizes.get(c.table, 0) for c in COUNTED if c.usual)
        self._chance_log = run_log(budget.chance("counters", tests * EVERY_S, EVERY_S))
        self.xids = Xids(site.sizes["gpu"])
        self._burst: dict[int, Cause] = {}  # as last reported, so that a storm makes few anew

    def causes(
        self, state: State, faults: Sequence[FaultReported], in_maintenance: dict[str, Bool]
    ) -> list[Cause]:
        """Return the causes that grow now."""
        self._take_faults(faults, state.now_ns)
        if self.looked_ns == 0 or state.now_ns - self.looked_ns >= EVERY_S * NS:
            self._count(state)
        out: dict[tuple[str, int], Cause] = {}
        for counted in COUNTED:
            key = f"{counted.table}.{counted.counter}"
            recent = self.recent.get(key)
            if recent is None or recent.max(initial=0.0) < counted.least:
                continue
            usual = self.usual[key] * RECENT_S
            many = (recent >= counted.least) & (recent > UNUSUAL * usual)
            if counted.usual:  # of what was seen for so long, once more may have been missed by chance
                mean = usual + RECENT_S / max(self.watched_s, EVERY_S)
                many &= surprise(recent, mean) >= self._chance_log
            if (mask := in_maintenance.get(counted.table)) is not None:
                many &= ~mask
            at = np.flatnonzero(many).tolist()
            for entity in at[:MOST_EACH]:
                text = f"about {recent[entity]:.0f} {counted.words} in the last minute"
                known = out.get((counted.kind, entity))
                if known is not None:
                    known.evidence += (text,)
                    if not (counted.usual and self._in_a_burst(key, entity)):
                        known.severity = ""
                    continue
                cause = Cause(counted.kind, counted.table, entity, "", 0.99, (text,), 1, 0.0, CLEAR_S)
                out[counted.kind, entity] = cause
                if counted.usual and self._in_a_burst(key, entity):
                    cause.severity, cause.evidence = "info", (f"{text}, in one burst",)
            if len(at) > MOST_EACH:  # other counters may show the same devices: none of them counts twice
                known = out[counted.kind, at[0]]
                known.more = max(known.more, len(at) - MOST_EACH)
        return [*out.values(), *self._bursts(state.now_ns, in_maintenance.get("gpu"))]

    def _count(self, state: State) -> None:
        step_s = (state.now_ns - self.looked_ns) / NS if self.looked_ns else EVERY_S
        self.looked_ns = state.now_ns
        self.watched_s += step_s
        fade = float(np.exp(-step_s / RECENT_S))
        slow = min(1.0, max(step_s / USUAL_S, step_s / self.watched_s))
        for counted in COUNTED:
            column = state.tables.get(counted.table)
            if column is None or column.n == 0:
                continue
            row = TABLES[counted.table].by_name[counted.counter].row
            key, total = f"{counted.table}.{counted.counter}", column.total[row]
            last = self.last.get(key)
            if last is None or len(last) != len(total):
                self.last[key], self.recent[key] = total.copy(), np.zeros(len(total))
                self.usual[key] = np.zeros(len(total))
                continue
            recent, usual = self.recent[key], self.usual[key]
            if np.array_equal(total, last) and not recent.any():
                continue
            grown = np.maximum(total - last, 0).astype(np.float64)
            recent *= fade
            recent += grown
            recent[recent < 0.05] = 0.0
            calm = recent < counted.least
            usual += np.where(calm, slow * (grown / step_s - usual), 0.0)
            self.last[key] = total.copy()
            if key not in self.grew_ns or len(self.grew_ns[key]) != len(total):
                self.began_ns[key], self.grew_ns[key] = np.zeros((2, len(total)), np.int64)
            began_ns, grew_ns = self.began_ns[key], self.grew_ns[key]
            at = np.flatnonzero(grown)
            began_ns[at] = np.where(state.now_ns - grew_ns[at] > ANEW_S * NS, state.now_ns, began_ns[at])
            grew_ns[at] = state.now_ns

    def _in_a_burst(self, key: str, entity: int) -> bool:
        """Return True if all that a counter grew by of late came within BURST_S."""
        return (
            key in self.grew_ns and int(self.grew_ns[key][entity] - self.began_ns[key][entity]) < BURST_S * NS
        )

    def _take_faults(self, faults: Sequence[FaultReported], now_ns: int) -> None:
        mine, gpus = FaultColumns.of(faults).of_table("gpu", self.site)
        if mine:
            code = codes_of(mine.code)
            wanted = (gpus >= 0) & (code != RECOVERY_XID)
            self.xids.add(gpus[wanted], code[wanted], now_ns)
        self.xids.advance(now_ns)

    def _bursts(self, now_ns: int, in_maintenance: Bool | None) -> list[Cause]:
        """In a storm no more than can be reported; those that lasted longest, so that they stay."""
        gpus = self.xids.bursts(in_maintenance, MAX_REPORTED)
        if not len(gpus):
            return []
        before, self._burst = self._burst, {}
        for gpu, text in zip(gpus.tolist(), self.xids.texts(gpus, now_ns), strict=True):
            cause = before.get(gpu)
            if cause is None or cause.evidence != (text,):
                cause = Cause("xid_burst", "gpu", gpu, "", 0.99, (text,), 1, 0.0, CLEAR_S)
            self._burst[gpu] = cause
        return list(self._burst.values())

    def xid_of(self, gpu: int) -> list[int]:
        """Codes that a GPU reported within the last minutes."""
        return self.xids.of(gpu)
