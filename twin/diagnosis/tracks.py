"""Deviations that last: for each comparison of the estimator, which entities are off, which way, since when.

A two-sided cumulative sum over the residuals in sigmas counts readings, not ticks: a value that stands for
ten ticks is one reading. Two far ones are enough, small ones need many. May import frames and the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.contracts import Residual
from twin.frame import F32, F64, I32, I64, NS, Bool
from twin.signals import TABLES
from twin.state import State

# Cumulative sum (Page 1954): a drift of up to ALLOWANCE sigmas is no deviation; CERTAIN is reached by two
# readings of 6.5 sigmas or sixteen of 3. Gaussian noise reaches it once in e^(2 * 2.5 * 8) readings.
ALLOWANCE, CERTAIN = 2.5, 8.0
MOST = 5.0 + ALLOWANCE  # of one reading, lest one wild one be enough
FARTHEST = 1000.0
OFF_SIGMAS = 2.0
HUGE_SIGMAS = 25.0  # one such reading is a deviation; whether it stays, the next one tells
MEAN_PER_READING = np.float32(0.4)
WILD_SIGMAS, WILD_KEPT = 5.0, 0.96  # a far reading counts among about the last 25
KEPT = ("above", "below", "on", "since_ns", "mean", "wild", "last", "streak")
# Tables with more rows are looked at a part per tick: the cost of a tick stays the same.
SLICE = 16_384


class Readings:
    """Which cells brought a new reading in this tick, and how often each group of signals does."""

    def __init__(self) -> None:
        self.seen_ns: dict[tuple[str, int], I64] = {}
        self._fresh: dict[tuple[str, int], Bool | None] = {}

    def begin(self) -> None:
        """A new tick."""
        self._fresh.clear()

    def fresh(self, state: State, table: str, row: int) -> Bool | None:
        """Cells [n] of a signal's row with a new reading; None: all of them."""
        column = state.tables[table]
        group = int(column.partition.group_of_row[row])
        key = (table, group)
        if key not in self._fresh:
            t_ns, before = column.t_ns[group], self.seen_ns.get(key)
            new = t_ns > 0 if before is None or len(before) != len(t_ns) else t_ns != before
            self._fresh[key] = None if new.all() else new
            self.seen_ns[key] = t_ns.copy()
        return self._fresh[key]

    def dump(self) -> list[Any]:
        return [[table, group, seen] for (table, group), seen in sorted(self.seen_ns.items())]

    def restore(self, data: list[Any]) -> None:
        self.seen_ns = {(str(t), int(g)): np.array(seen) for t, g, seen in data}


@dataclass(slots=True)
class Track:
    """One comparison: sums [n] above and below, what is on (-1, 0, 1), and since when."""

    above: F32
    below: F32
    on: np.ndarray  # int8
    since_ns: I64
    mean: F32  # of the last few deviations, in sigmas
    wild: F32  # far readings among the last ones
    last: F32  # the newest deviation, in sigmas
    streak: np.ndarray  # int16: readings in a row that were off to the side of the mean
    active: bool = False

    @classmethod
    def of(cls, n: int) -> Track:
        zero = np.zeros(n, np.float32)
        on, since_ns = np.zeros(n, np.int8), np.zeros(n, np.int64)
        streak = np.zeros(n, np.int16)
        return cls(zero, zero.copy(), on, since_ns, zero.copy(), zero.copy(), zero.copy(), streak)

    def update(self, z: F64, fresh: Bool | None, part: slice, now_ns: int) -> None:
        """Take in deviations in sigmas of a part of the rows; where nothing is known, sums fade away."""
        z = np.minimum(np.maximum(np.nan_to_num(z), -FARTHEST), FARTHEST).astype(np.float32)
        above, below, mean = self.above[part], self.below[part], self.mean[part]
        moved = MEAN_PER_READING * (z - mean)
        far = np.abs(z) > WILD_SIGMAS
        step = np.minimum(np.maximum(z, np.float32(-MOST)), np.float32(MOST))
        if (huge := np.abs(z) > HUGE_SIGMAS).any():
            step[huge] = np.copysign(np.float32(ALLOWANCE + CERTAIN), z[huge])
        allowance: Any = np.float32(ALLOWANCE)
        if fresh is not None:
            moved *= fresh
            far &= fresh
            step *= fresh
            allowance = fresh * np.float32(ALLOWANCE)
        mean += moved
        np.copyto(self.last[part], z, where=True if fresh is None else fresh)
        out = z * np.sign(mean) > OFF_SIGMAS
        if out.any() or self.streak.any():
            streak = self.streak[part]
            again = np.where(out, np.minimum(streak + 1, 999), 0).astype(np.int16)
            np.copyto(streak, again, where=True if fresh is None else fresh)
        if far.any() or self.wild.any():
            wild = self.wild[part]
            wild *= np.float32(WILD_KEPT) if fresh is None else np.where(fresh, WILD_KEPT, 1.0)
            wild += far
            wild[wild < 0.01] = 0.0
        above += step
        above -= allowance
        below -= step
        below -= allowance
        np.maximum(above, 0.0, out=above)
        np.maximum(below, 0.0, out=below)
        np.minimum(above, np.float32(2 * CERTAIN), out=above)
        np.minimum(below, np.float32(2 * CERTAIN), out=below)
        high = max(above.max(initial=0.0), below.max(initial=0.0))
        if high < CERTAIN and not self.active:
            return
        on, since_ns = self.on[part], self.since_ns[part]
        bound = np.where(on != 0, np.float32(CERTAIN / 2), np.float32(CERTAIN))
        up, down = (above >= bound) & (above >= below), below >= bound
        now = np.where(up, 1, np.where(down, -1, 0)).astype(np.int8)
        since_ns[(now != 0) & (on == 0)] = now_ns
        since_ns[now == 0] = 0
        on[:] = now
        self.active = bool(self.on.any())

    def forget(self, entity: int) -> None:
        for name in KEPT:
            getattr(self, name)[entity] = 0


class Tracks:
    """The tracks of all comparisons, and the deviations of this tick where any is on."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.balance_ns: I64 = np.zeros(0, np.int64)

    def update(
        self, residuals: dict[str, Residual], state: State, readings: Readings, spared: dict[str, Bool]
    ) -> None:
        """Compare; `spared` [n] per table: where people work, nothing is counted."""
        for name, residual in residuals.items():
            n = len(residual.expected)
            if n == 0:
                continue
            track = self.tracks.get(name)
            if track is None or len(track.above) != n:
                track = self.tracks[name] = Track.of(n)
            parts = -(-n // SLICE)
            at = state.tick % parts
            part = slice(at * n // parts, (at + 1) * n // parts)
            fresh = self._fresh(name, state, readings, n)
            with np.errstate(divide="ignore", invalid="ignore"):
                z = (residual.measured[part] - residual.expected[part]) / residual.sigma[part]
            mask = spared.get(name.partition(".")[0])
            if mask is not None and len(mask) == n:
                z[mask[part]] = np.nan
            track.update(z, None if fresh is None else fresh[part], part, state.now_ns)

    @staticmethod
    def _fresh(name: str, state: State, readings: Readings, n: int) -> Bool | None:
        table, _, rest = name.partition(".")
        signal = measured_signal(name)
        column = state.tables.get(table)
        if column is None or column.n != n or rest == "balance":
            return None
        row = _ROWS.get((table, signal))
        return None if row is None else readings.fresh(state, table, row)

    def on(self, name: str) -> np.ndarray | None:
        """Which rows are off [n] (-1, 0, 1); None if none is."""
        track = self.tracks.get(name)
        return track.on if track is not None and track.active else None

    def active(self) -> list[str]:
        """Comparisons of which some row is off, by name."""
        return sorted(name for name, t in self.tracks.items() if t.active)

    def forget(self, table: str, entity: int) -> None:
        for name, track in self.tracks.items():
            if name.partition(".")[0] == table and entity < len(track.on):
                track.forget(entity)

    def remapped(self, old_of_new: dict[str, I32], sizes: dict[str, int]) -> Tracks:
        out = Tracks()
        for name, track in self.tracks.items():
            table = name.partition(".")[0]
            kept_of = old_of_new.get(table)
            if kept_of is None or len(track.on) <= int(kept_of.max(initial=-1)) or name == "feeder.balance":
                continue
            new, kept = Track.of(sizes[table]), np.flatnonzero(kept_of >= 0)
            for field in KEPT:
                getattr(new, field)[kept] = getattr(track, field)[kept_of[kept]]
            new.active = bool(new.on.any())
            out.tracks[name] = new
        return out

    def dump(self) -> dict[str, Any]:
        return {k: {name: getattr(t, name) for name in KEPT} for k, t in sorted(self.tracks.items())}

    def restore(self, data: dict[str, Any]) -> None:
        self.tracks = {}
        for name, held in data.items():
            track = Track.of(len(held["on"]))
            for key in KEPT:
                setattr(track, key, np.array(held[key]))
            track.active = bool(track.on.any())
            self.tracks[name] = track


def measured_signal(name: str) -> str:
    """The signal whose reading a comparison judges: `rack.flow_lpm/heat` judges `flow_lpm`."""
    signal = name.partition(".")[2].partition("/")[0]
    return "return_temp_c" if signal == "heat" else signal


def age_s(since_ns: int, now_ns: int) -> float:
    return (now_ns - since_ns) / NS


_ROWS = {(s.table, s.name): s.row for spec in TABLES.values() for s in spec.gauges}
