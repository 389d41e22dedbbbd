"""Growth rates of error counters, recent and usual, and the telemetry gaps of each device.

Each counter has two sums of its growth that fade: over ten minutes and over a day. Growth that comes after a
silence is spread over that silence, so that neither a restart nor a gap looks like a burst. The sums are
kept in units of one instant (the epoch), so that nothing needs to be done where nothing grows.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, TABLES, Bool
from twin.health.context import HealthContext
from twin.site import Site
from twin.telemetry import OWN, EntityState, TableState, column, keyed, part, scalar

RECENT_S, DAILY_S, GAP_S = 600.0, 86_400.0, 3600.0
WATCHED: dict[str, tuple[str, ...]] = {
    "gpu": ("ecc_sbe_count", "ecc_dbe_count", "row_remap_count", "nvlink_error_count", "nvlink_replay_count",
            "nvlink_recovery_count", "pcie_replay_count", "throttle_power_ns", "throttle_thermal_ns"),
    "node": ("reboot_count", "dpu1_port_error_count", "dpu2_port_error_count"),
    "link": ("error_count", "flap_count", "symbol_error_count", "recovery_count", "discard_count"),
    "switch": ("error_count", "discard_count", "flap_count"),
}  # fmt: skip
# A device that says one of these lives; the first that all say ends the search
SPEAKING = {
    "gpu": ("temp_c", "power_w", "sm_clock_hz", "util_pu", "thermal_margin_k", "health_state"),
    "node": ("power_w", "psu1_power_w", "psu2_power_w", "inlet_temp_c", "cpu_temp_c", "power_on_state"),
}
# The epoch moves on after so many of the short times: e^20 is far below what float32 can hold, and what has
# faded by it is below any count.
REBASE = 20.0
NOTHING = 1e-3  # counts: less than this of a sum is no growth any more


class CounterGrowth(EntityState):
    """One counter of a table [n]: its last total, and its fading sums in units of the epoch."""

    last: I64 = column(OWN, "i8")
    recent: F32 = column(OWN, "f4")
    daily: F32 = column(OWN, "f4")
    heard: Bool = column(OWN, "?")

    def __init__(self, n: int, table: str) -> None:
        super().__init__({table: n}, table)
        self.lively = False  # whether any sum is more than nothing
        self.most: dict[bool, float] = {}  # the largest sum, recent or daily, once asked, until a change
        self.whole = False  # whether all report
        self.moved: I32 = np.zeros(0, np.int32)  # who grew at the last look
        self.moved_by: F64 = np.zeros(0)  # by how much each of them, and in how many seconds
        self.moved_in_s: F64 = np.zeros(0)

    def take(
        self, total: I64, t_ns: I64, known_ns: I64 | None, looked_ns: int, up: tuple[float, float]
    ) -> None:
        """Add the growth since the last evaluation, with the instants of these readings and the last."""
        self.moved = self.moved[:0]
        if np.array_equal(total, self.last):
            return
        index = np.flatnonzero(total != self.last)
        grown = (total[index] - self.last[index]).astype(np.float64)
        self.last[index] = total[index]
        more = grown > 0.0  # a total that fell belongs to another device
        index, grown = index[more], grown[more]
        self.most.clear()
        before_ns = np.full(len(index), looked_ns) if known_ns is None else known_ns[index]
        span_s = np.where(before_ns > 0, np.maximum((t_ns[index] - before_ns) / NS, 1e-3), 1.0)
        for sums, tau_s, scale in zip((self.recent, self.daily), (RECENT_S, DAILY_S), up, strict=True):
            x = span_s / tau_s
            sums[index] += (grown * (-np.expm1(-x) / x) * scale).astype(np.float32)
        self.moved, self.moved_by, self.moved_in_s = index.astype(np.int32), grown, span_s
        self.lively = self.lively or bool(len(index))

    def fade(self, keep: tuple[float, float], up: tuple[float, float]) -> None:
        """Convert to the units of another epoch; negligible sums end."""
        for sums, factor, scale in zip((self.recent, self.daily), keep, up, strict=True):
            sums *= np.float32(factor)
            sums[sums < NOTHING * scale] = 0.0
        self.derive()

    def derive(self) -> None:
        """Recompute which sums remain, and which devices do not report."""
        self.lively = bool(self.recent.any() or self.daily.any())
        self.whole = False
        self.most.clear()

    def forget(self, table: str, entity: int) -> None:
        """Clear the sums of this slot for a new device."""
        super().forget(table, entity)
        if table == self.table:
            self.moved = self.moved[self.moved != entity]


class Rates(EntityState):
    """Decayed growth per counter and device, by keys such as `gpu.ecc_sbe_count`; and gaps of telemetry."""

    counters: dict[str, CounterGrowth] = part(make="_counter")
    epoch_ns: int = scalar(0)
    looked_ns: int = scalar(0)
    seen_ns: dict[str, I64] = keyed("i8")  # by table and group of rows: instants of readings
    gap: dict[str, F32] = keyed("f4", keys=tuple(SPEAKING))
    spoke: dict[str, Bool] = keyed("?", keys=tuple(SPEAKING))
    hushed: dict[str, Bool] = keyed("?", keys=tuple(SPEAKING))  # who is silent though anybody listens

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.counters = {}
        self.fell: dict[str, I32] = {t: np.zeros(0, np.int32) for t in SPEAKING}  # silent since this look

    def _counter(self, key: str) -> CounterGrowth:
        table = key.partition(".")[0]
        return CounterGrowth(self.site.sizes[table], table)

    def update(self, now: HealthContext) -> None:
        """Update all counters."""
        up = self._age(now.now_ns)
        for table, names in WATCHED.items():
            column = now.state.tables[table]
            if column.n and not mute(column):
                self._counters(table, names, column, up)
        for table in SPEAKING:
            if self.site.sizes[table]:
                self._gaps(now, table)
        self.looked_ns = now.now_ns

    def _age(self, now_ns: int) -> tuple[float, float]:
        """Return the value of one count of now in units of the epoch, which moves on when those become too
        small.
        """
        if self.epoch_ns == 0:
            self.epoch_ns = now_ns
        age_s = (now_ns - self.epoch_ns) / NS
        if age_s > REBASE * RECENT_S:
            keep = (float(np.exp(-age_s / RECENT_S)), float(np.exp(-age_s / DAILY_S)))
            for counter in self.counters.values():
                if counter.lively:
                    counter.fade(keep, (1.0, 1.0))
            self.epoch_ns, age_s = now_ns, 0.0
        return float(np.exp(age_s / RECENT_S)), float(np.exp(age_s / DAILY_S))

    def _counters(
        self, table: str, names: tuple[str, ...], column: TableState, up: tuple[float, float]
    ) -> None:
        before: dict[str, I64 | None] = {}
        gauges = len(column.signals)
        for name in names:
            row = TABLES[table].by_name[name].row
            row_group = int(column.partition.group_of_row[row + gauges])
            t_ns, group = column.t_ns[row_group], f"{table}.{row_group}"
            if group not in before:
                known = before[group] = self.seen_ns.get(group)
                if known is None or not np.array_equal(t_ns, known):
                    self.seen_ns[group] = t_ns.copy()
            key = f"{table}.{name}"
            counter = self.counters.get(key)
            if counter is None:
                if not (column.raw[row] >= 0).any():
                    continue
                counter = self.counters[key] = self._counter(key)
                counter.last[:] = column.total[row]
            if not counter.whole:
                counter.heard |= column.raw[row] >= 0
                counter.whole = bool(counter.heard.all())
            known = before[group]
            if known is self.seen_ns[group]:  # no new reading at all
                counter.moved = counter.moved[:0]
                continue
            counter.take(column.total[row], t_ns, known, self.looked_ns, up)

    def _gaps(self, now: HealthContext, table: str) -> None:
        """Update the share of silence."""
        column, gap, spoke = now.state.tables[table], self.gap[table], self.spoke[table]
        silent, quiet_s = _silence(column, table, now.now_ns)
        self.fell[table] = np.zeros(0, np.int32)
        if silent is None:
            if self.hushed[table].any():
                self.hushed[table] = np.zeros_like(spoke)
            if not spoke.all():
                spoke[:] = True
            if gap.any():
                gap *= np.float32(np.exp(-now.dt_s / GAP_S))
                gap[gap < 1e-4] = 0.0
            return
        spoke |= ~silent
        counted = silent & spoke
        if (work := now.under_work(table)) is not None:
            counted &= ~work
        if (outage := now.without_data(table)) is not None:  # its source's silence, not its own
            counted &= ~outage
        hushed = counted & (quiet_s > 0.0)
        self.fell[table] = np.flatnonzero(hushed & ~self.hushed[table]).astype(np.int32)
        self.hushed[table] = hushed
        # Time without observation is not silence
        share = -np.expm1(-np.where(counted, np.minimum(now.dt_s, quiet_s), now.dt_s) / GAP_S)
        gap += (share * (counted.astype(np.float64) - gap)).astype(np.float32)
        gap[gap < 1e-4] = 0.0

    def _down(self, recent: bool) -> float:
        tau_s = RECENT_S if recent else DAILY_S
        return float(np.exp(-(self.looked_ns - self.epoch_ns) / NS / tau_s))

    def counted(self, key: str, recent: bool = True) -> F32:
        """Return the fading sum itself [n]: about the growth of the last ten minutes, or of the last day."""
        counter = self.counters.get(key)
        if counter is None:
            return np.zeros(self.site.sizes[key.partition(".")[0]], np.float32)
        return (counter.recent if recent else counter.daily) * np.float32(self._down(recent))

    def above(self, key: str, least: float, recent: bool = True) -> I32:
        """Return the entities that grew by `least` or more in about ten minutes, or a day; at no cost where
        nothing grows.
        """
        counter = self.counters.get(key)
        if counter is None or not counter.lively:
            return np.zeros(0, np.int32)
        sums, bound = counter.recent if recent else counter.daily, np.float32(least / self._down(recent))
        most = counter.most.get(recent)
        if most is None:
            most = counter.most[recent] = float(sums.max())
        if most < bound:
            return np.zeros(0, np.int32)
        return (sums >= bound).nonzero()[0].astype(np.int32)

    def moved(self, key: str) -> I32:
        """Return the entities that grew at the last evaluation, ascending."""
        counter = self.counters.get(key)
        return np.zeros(0, np.int32) if counter is None else counter.moved

    def usual_per_h(self, key: str, index: I32) -> F64:
        """Return the growth per hour over about the last day, without the last ten minutes [k]."""
        counter = self.counters.get(key)
        if counter is None:
            return np.zeros(len(index))
        recent = counter.recent[index].astype(np.float64) * self._down(True)
        daily = counter.daily[index].astype(np.float64) * self._down(False)
        return np.maximum(daily - recent, 0.0) * (3600.0 / DAILY_S)

    def recent_per_h(self, key: str) -> F32:
        """Return the growth per hour over about the last ten minutes [n]; NaN without a current reading."""
        return self._per_h(key, True)

    def daily_per_h(self, key: str) -> F32:
        """Return the growth per hour over about the last day [n]."""
        return self._per_h(key, False)

    def _per_h(self, key: str, recent: bool) -> F32:
        counter = self.counters.get(key)
        if counter is None:
            return np.full(self.site.sizes[key.partition(".")[0]], np.nan, np.float32)
        sums = counter.recent if recent else counter.daily
        scale = self._down(recent) * 3600.0 / (RECENT_S if recent else DAILY_S)
        return np.where(counter.heard, sums * np.float32(scale), np.float32(np.nan))

    def gap_pu(self, table: str) -> F32:
        """Return the share of the last hour in which a device was silent [n]; NaN for one that never
        reported."""
        if table not in self.gap:
            return np.full(self.site.sizes[table], np.nan, np.float32)
        return np.where(self.spoke[table], self.gap[table], np.float32(np.nan))

    def forget(self, table: str, entity: int) -> None:
        """Clear the rates of this slot for a new device."""
        super().forget(table, entity)
        if table in self.fell:
            self.fell[table] = self.fell[table][self.fell[table] != entity]


def mute(column: TableState) -> bool:
    """Return True if no entity of a table ever reported: it costs nothing then, however large."""
    return column.partition.n_groups == 1 and not column.t_ns[0].any()


def _silence(column: TableState, table: str, now_ns: int) -> tuple[Bool | None, F64 | float]:
    """Return (devices without usable readings now [n], None for none; seconds of silence [n])."""
    newest_ns = np.zeros(column.n, np.int64)
    silent: Bool = np.ones(column.n, np.bool_)
    for name in SPEAKING[table]:
        signal = TABLES[table].by_name[name]
        if column.bad_count[signal.row] == column.n:
            continue
        if column.all_current(signal, now_ns):
            return None, 0.0
        silent &= ~column.current(signal, now_ns)
        np.maximum(newest_ns, column.last_good_ns(signal), out=newest_ns)
        if not silent.any():
            return None, 0.0
    age_s = np.where(newest_ns > 0, (now_ns - newest_ns) / NS, 0.0)
    return silent, np.maximum(column.silence_s(age_s, now_ns), 0.0)
