"""Rates: how fast error counters grow, recently and usually, and how the telemetry of a device gaps.

Each counter has two sums of its growth that fade: over ten minutes and over a day. Growth that comes after a
silence is spread over that silence, so that neither a restart nor a gap looks like a burst. The sums are
kept in units of one instant (the epoch), so that nothing needs to be done where nothing grows. May import the
moment, the site, the catalogue and frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import F32, F64, I32, I64, NS, Bool
from twin.health.now import Now
from twin.signals import TABLES
from twin.site import Site
from twin.state import GOOD, STALE_PERIODS, TableState

RECENT_S, DAILY_S, GAP_S = 600.0, 86_400.0, 3600.0
WATCHED: dict[str, tuple[str, ...]] = {
    "gpu": ("ecc_sbe_count", "ecc_dbe_count", "row_remap_count", "nvlink_error_count", "nvlink_replay_count",
            "nvlink_recovery_count", "pcie_replay_count", "throttle_power_ns", "throttle_thermal_ns"),
    "node": ("reboot_count",),
    "link": ("error_count", "flap_count", "symbol_error_count", "recovery_count", "discard_count"),
    "switch": ("error_count", "discard_count"),
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


class Counter:
    """One counter of a table [n]: its total as last seen, and its fading sums in units of the epoch."""

    __slots__ = ("daily", "heard", "last", "lively", "most", "moved", "recent", "whole")

    def __init__(self, total: I64) -> None:
        n = len(total)
        self.last = total.copy()
        self.recent, self.daily = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.heard: Bool = np.zeros(n, np.bool_)
        self.lively = False  # whether any sum is more than nothing
        self.most: dict[
            bool, float
        ] = {}  # the largest sum, recent or daily, once asked; empty after a change
        self.whole = False  # whether all are heard
        self.moved: I32 = np.zeros(0, np.int32)  # who grew at the last look

    def take(
        self, total: I64, t_ns: I64, known_ns: I64 | None, looked_ns: int, up: tuple[float, float]
    ) -> None:
        """What has grown since the last look, with the instants of these readings and of those before."""
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
        self.moved = index.astype(np.int32)
        self.lively = self.lively or bool(len(index))

    def fade(self, keep: tuple[float, float], up: tuple[float, float]) -> None:
        """Into the units of another epoch; what is next to nothing ends."""
        for sums, factor, scale in zip((self.recent, self.daily), keep, up, strict=True):
            sums *= np.float32(factor)
            sums[sums < NOTHING * scale] = 0.0
        self.look()

    def look(self) -> None:
        """Find out whether anything is left."""
        self.lively = bool(self.recent.any() or self.daily.any())
        self.most.clear()

    def forget(self, entity: int) -> None:
        self.last[entity], self.recent[entity], self.daily[entity] = 0, 0.0, 0.0
        self.heard[entity] = self.whole = False
        self.most.clear()
        self.moved = self.moved[self.moved != entity]


class Rates:
    """Decayed growth per counter and device, by keys such as `gpu.ecc_sbe_count`; and gaps of telemetry."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.counters: dict[str, Counter] = {}
        self.epoch_ns = self.looked_ns = 0
        self.seen_ns: dict[tuple[str, int], I64] = {}  # (table, group of rows) -> instants of readings [n]
        self.gap: dict[str, F32] = {t: np.zeros(site.sizes[t], np.float32) for t in SPEAKING}
        self.spoke: dict[str, Bool] = {t: np.zeros(site.sizes[t], np.bool_) for t in SPEAKING}
        # Who is silent though anybody listens, and who fell silent at the last look
        self.hushed: dict[str, Bool] = {t: np.zeros(site.sizes[t], np.bool_) for t in SPEAKING}
        self.fell: dict[str, I32] = {t: np.zeros(0, np.int32) for t in SPEAKING}

    def update(self, now: Now) -> None:
        """Look at all counters."""
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
        """What one count of now is in units of the epoch, which moves on when those become too small."""
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
        before: dict[int, I64 | None] = {}
        gauges = len(column.signals)
        for name in names:
            row = TABLES[table].by_name[name].row
            group = int(column.partition.group_of_row[row + gauges])
            t_ns = column.t_ns[group]
            if group not in before:
                known = self.seen_ns.get((table, group))
                if known is not None and np.array_equal(t_ns, known):
                    before[group] = known
                else:
                    before[group] = known
                    self.seen_ns[table, group] = t_ns.copy()
            key = f"{table}.{name}"
            counter = self.counters.get(key)
            if counter is None:
                if not (column.raw[row] >= 0).any():
                    continue
                counter = self.counters[key] = Counter(column.total[row])
            if not counter.whole:
                counter.heard |= column.raw[row] >= 0
                counter.whole = bool(counter.heard.all())
            known = before[group]
            if known is self.seen_ns[table, group]:  # no new reading at all
                counter.moved = counter.moved[:0]
                continue
            counter.take(column.total[row], t_ns, known, self.looked_ns, up)

    def _gaps(self, now: Now, table: str) -> None:
        """Move on the share of silence."""
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
        hushed = counted & (quiet_s > 0.0)
        self.fell[table] = np.flatnonzero(hushed & ~self.hushed[table]).astype(np.int32)
        self.hushed[table] = hushed
        # While nobody listened, nobody was silent
        share = -np.expm1(-np.where(counted, np.minimum(now.dt_s, quiet_s), now.dt_s) / GAP_S)
        gap += (share * (counted.astype(np.float64) - gap)).astype(np.float32)
        gap[gap < 1e-4] = 0.0

    def _down(self, recent: bool) -> float:
        tau_s = RECENT_S if recent else DAILY_S
        return float(np.exp(-(self.looked_ns - self.epoch_ns) / NS / tau_s))

    def counted(self, key: str, recent: bool = True) -> F32:
        """The fading sum itself [n]: about what came in the last ten minutes, or the last day."""
        counter = self.counters.get(key)
        if counter is None:
            return np.zeros(self.site.sizes[key.partition(".")[0]], np.float32)
        return (counter.recent if recent else counter.daily) * np.float32(self._down(recent))

    def above(self, key: str, least: float, recent: bool = True) -> I32:
        """Who grew by `least` or more in about ten minutes, or a day; at no cost where nothing grows."""
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
        """Who grew at the last look, ascending."""
        counter = self.counters.get(key)
        return np.zeros(0, np.int32) if counter is None else counter.moved

    def usual_per_h(self, key: str, index: I32) -> F64:
        """Growth per hour over about the last day, but for the last ten minutes [k]."""
        counter = self.counters.get(key)
        if counter is None:
            return np.zeros(len(index))
        recent = counter.recent[index].astype(np.float64) * self._down(True)
        daily = counter.daily[index].astype(np.float64) * self._down(False)
        return np.maximum(daily - recent, 0.0) * (3600.0 / DAILY_S)

    def recent_per_h(self, key: str) -> F32:
        """Growth per hour over about the last ten minutes [n]; NaN where the counter is not heard."""
        return self._per_h(key, True)

    def daily_per_h(self, key: str) -> F32:
        """The same over about the last day [n]."""
        return self._per_h(key, False)

    def _per_h(self, key: str, recent: bool) -> F32:
        counter = self.counters.get(key)
        if counter is None:
            return np.full(self.site.sizes[key.partition(".")[0]], np.nan, np.float32)
        sums = counter.recent if recent else counter.daily
        scale = self._down(recent) * 3600.0 / (RECENT_S if recent else DAILY_S)
        return np.where(counter.heard, sums * np.float32(scale), np.float32(np.nan))

    def gap_pu(self, table: str) -> F32:
        """Share of the last hour in which a device that had spoken was silent [n]; NaN: it never spoke."""
        if table not in self.gap:
            return np.full(self.site.sizes[table], np.nan, np.float32)
        return np.where(self.spoke[table], self.gap[table], np.float32(np.nan))

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""
        for key, counter in self.counters.items():
            if key.partition(".")[0] == table:
                counter.forget(entity)
        for (of, _), seen in self.seen_ns.items():
            if of == table:
                seen[entity] = 0
        if table in self.gap:
            self.gap[table][entity], self.spoke[table][entity] = 0.0, False
            self.hushed[table][entity] = False
            self.fell[table] = self.fell[table][self.fell[table] != entity]

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Rates:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        out = Rates(site)
        out.epoch_ns, out.looked_ns = self.epoch_ns, self.looked_ns
        at = {t: np.flatnonzero(source >= 0) for t, source in old_of_new.items()}
        for key, old in self.counters.items():
            table = key.partition(".")[0]
            kept = at[table]
            source = old_of_new[table][kept]
            new = out.counters[key] = Counter(np.zeros(site.sizes[table], np.int64))
            for name in ("last", "recent", "daily", "heard"):
                getattr(new, name)[kept] = getattr(old, name)[source]
            new.look()
        for (table, group), seen in self.seen_ns.items():
            moved = np.zeros(site.sizes[table], np.int64)
            moved[at[table]] = seen[old_of_new[table][at[table]]]
            out.seen_ns[table, group] = moved
        for table in SPEAKING:
            source = old_of_new[table][at[table]]
            out.gap[table][at[table]] = self.gap[table][source]
            out.spoke[table][at[table]] = self.spoke[table][source]
            out.hushed[table][at[table]] = self.hushed[table][source]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "counters": {k: [c.last, c.recent, c.daily, c.heard] for k, c in self.counters.items()},
            "epoch_ns": self.epoch_ns, "looked_ns": self.looked_ns,
            "seen_ns": [[table, group, seen] for (table, group), seen in sorted(self.seen_ns.items())],
            "gap": self.gap, "spoke": self.spoke, "hushed": self.hushed,
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        if "counters" not in data:
            return
        self.counters = {}
        for key, (last, recent, daily, heard) in data["counters"].items():
            counter = self.counters[key] = Counter(np.array(last, np.int64))
            counter.recent, counter.daily = np.array(recent, np.float32), np.array(daily, np.float32)
            counter.heard = np.array(heard, np.bool_)
            counter.look()
        self.epoch_ns, self.looked_ns = int(data["epoch_ns"]), int(data["looked_ns"])
        self.seen_ns = {(str(t), int(g)): np.array(seen, np.int64) for t, g, seen in data["seen_ns"]}
        self.gap = {t: np.array(gap, np.float32) for t, gap in data["gap"].items()}
        self.spoke = {t: np.array(spoke, np.bool_) for t, spoke in data["spoke"].items()}
        if "hushed" in data:
            self.hushed = {t: np.array(hushed, np.bool_) for t, hushed in data["hushed"].items()}


def mute(column: TableState) -> bool:
    """Whether nothing was ever reported of a table: it costs nothing then, however large."""
    return column.partition.n_groups == 1 and not column.t_ns[0].any()


def _silence(column: TableState, table: str, now_ns: int) -> tuple[Bool | None, F64 | float]:
    """(who says nothing usable now [n], None where nobody is silent; since how many seconds [n])."""
    newest_ns = np.zeros(column.n, np.int64)
    silent: Bool = np.ones(column.n, np.bool_)
    for name in SPEAKING[table]:
        row = TABLES[table].by_name[name].row
        if column.bad_count[row] == column.n:
            continue
        t_ns = column.t_ns[column.partition.group_of_row[row]]
        oldest_ns = now_ns - round(STALE_PERIODS * float(column.period_s[row]) * NS)
        if not column.bad_count[row] and int(t_ns.min()) >= max(oldest_ns, 1):
            return None, 0.0
        good = (column.quality[row] == GOOD) & (t_ns > 0)
        silent &= ~(good & (t_ns >= oldest_ns))
        np.maximum(newest_ns, np.where(good, t_ns, column.good_ns[row]), out=newest_ns)
        if not silent.any():
            return None, 0.0
    age_s = np.where(newest_ns > 0, (now_ns - newest_ns) / NS, 0.0)
    return silent, np.maximum(column.silence_s(age_s, now_ns), 0.0)
