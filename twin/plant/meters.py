"""Meters: how a true quantity becomes a reading: late, with an error, noisy, in steps, or not at all.

A panel is a set of meters that report together, for all entities of a table. Rows are written in place, in
float32, since a plant is observed thousands of times per second. May import NumPy, the catalogue, and what a
report is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from twin.frame import F32, F64, I64, Bool
from twin.plant.disturbance import SensorFault
from twin.plant.observation import Report
from twin.signals import TABLES

POOL_SIZE = 2**18  # numbers, at least; source: estimate, many times what a round of the largest site needs
REFRESH = 1024  # of them are drawn anew at each round: all within 256 rounds
SPIKES_PU = 0.2  # share of the readings of a spiking sensor that are spikes; source: estimate
RING = 8  # samples that a delayed panel remembers: 3 s, at a step of half a second
Column = np.ndarray  # [n] of any number


class Noise:
    """Standard normal numbers, float32, as slices of a pool that is slowly drawn anew.

    Slices begin anywhere, so the same number meets the same entity again in one of `POOL_SIZE` readings only;
    a draw of its own for each would cost more than all the rest of a plant.
    """

    def __init__(self, rng: np.random.Generator, longest: int) -> None:
        self.rng = rng
        size = max(POOL_SIZE, 4 * longest)
        self.pool = rng.standard_normal(size, dtype=np.float32)
        self._room = size - longest
        self._at, self._walk = 0, int(rng.integers(2**31))

    def refresh(self) -> None:
        """Draw a part of the pool anew."""
        self.rng.standard_normal(out=self.pool[self._at : self._at + REFRESH], dtype=np.float32)
        self._at = (self._at + REFRESH) % (len(self.pool) - REFRESH)

    def take(self, n: int) -> F32:
        """[n], read only."""
        at = self.lot(self._room)
        return self.pool[at : at + n]

    def lot(self, many: int) -> int:
        """One of 0 .. many - 1; far cheaper than the generator's own, good enough for where and whether."""
        # A linear congruential walk (Numerical Recipes, ranqd1); its high bits, the good ones, decide.
        self._walk = (self._walk * 1664525 + 1013904223) & 0xFFFFFFFF
        return self._walk * many >> 32


class Meter(NamedTuple):
    """One signal's meter. Errors are 1 sigma: `absolute` in its unit, `relative` and `gain` as shares.

    `gain` is fixed per meter, the others change with each reading. `step` is the resolution, 0 = none; `top`
    is where the scale ends.
    """

    signal: str
    absolute: float = 0.0
    relative: float = 0.0
    gain: float = 0.0
    step: float = 0.0
    top: float = np.inf


class Panel:
    """Meters of a table that report together every `period_s`; `counters` are read without error.

    `ahead_ns` [n] is by how much each entity's instant lies before the end of its round.
    """

    def __init__(
        self,
        table: str,
        meters: Sequence[Meter],
        counters: Sequence[str],
        ahead_ns: I64,
        period_s: float,
        noise: Noise,
        scale: float,
    ) -> None:
        n = len(ahead_ns)
        self.table, self.n, self.period_s = table, n, period_s
        self.meters, self.noise, self.scale = tuple(meters), noise, scale
        self.signals = tuple(m.signal for m in meters)
        self.counters = tuple(counters)
        self.values = np.full((len(self.meters), n), np.nan, np.float32)
        self.counts = np.full((len(self.counters), n), -1, np.int64)
        self.true_gain = [self._gain(m) for m in self.meters]
        self.t_ns = np.zeros(n, np.int64)
        self._ahead_ns, self._scratch = ahead_ns, np.empty(n, np.float32)
        self._latest_ns = int(ahead_ns.min()) if n else 0
        self.last_ns: int | None = None
        self._held: dict[tuple[int, str], float] = {}

    def _gain(self, meter: Meter) -> F32 | None:
        if not meter.gain * self.scale:
            return None
        drawn = self.noise.rng.standard_normal(self.n, dtype=np.float32)
        return np.float32(1.0) + np.float32(meter.gain * self.scale) * drawn

    def due(self, now_ns: int) -> bool:
        """Whether a round is due; half a millisecond early is in time."""
        return self.last_ns is None or now_ns - self.last_ns >= self.period_s * 1e9 - 5e5

    def read(self, truth: Sequence[Column], counts: Sequence[Column], now_ns: int) -> None:
        """A round: each signal from its truth [n], each counter from its own."""
        for k, column in enumerate(truth):
            np.copyto(self.values[k], column, casting="unsafe")
        for k, column in enumerate(counts):
            np.copyto(self.counts[k], column, casting="unsafe")
        self._distort(now_ns)

    def _distort(self, now_ns: int) -> None:
        self.last_ns = now_ns
        np.subtract(now_ns, self._ahead_ns, out=self.t_ns)
        scratch = self._scratch
        for meter, row, gain in zip(self.meters, self.values, self.true_gain, strict=True):
            if meter.relative and self.scale:
                np.multiply(self.noise.take(self.n), np.float32(meter.relative * self.scale), out=scratch)
                np.add(scratch, np.float32(1.0) if gain is None else gain, out=scratch)
                np.multiply(row, scratch, out=row)
            elif gain is not None:
                np.multiply(row, gain, out=row)
            if meter.absolute and self.scale:
                np.multiply(self.noise.take(self.n), np.float32(meter.absolute * self.scale), out=scratch)
                np.add(row, scratch, out=row)
            if meter.step == 1.0:
                np.rint(row, out=row)
            elif meter.step:
                np.multiply(row, np.float32(1.0 / meter.step), out=row)
                np.rint(row, out=row)
                np.multiply(row, np.float32(meter.step), out=row)
            if meter.top < np.inf:
                np.minimum(row, np.float32(meter.top), out=row)

    def drop_out(self, share_pu: float) -> None:
        """Cells at random become "no reading", this share of all on average.

        A query fails for one signal at a time: some of its entities have nothing to say in that round.
        """
        if self.n == 0 or share_pu <= 0:
            return
        noise, expected = self.noise, share_pu * self.values.size
        many = int(expected)
        many += noise.lot(1_000_000) < (expected - many) * 1e6
        if many == 0:
            return
        row = self.values[noise.lot(len(self.values))]
        if many == 1:
            row[noise.lot(self.n)] = np.nan
        else:
            row[noise.rng.integers(self.n, size=many)] = np.nan

    def spoil(self, faults: Sequence[SensorFault]) -> None:
        """What sensors that lie make of their readings. A fault of the signal "" is one of all signals."""
        if not faults and not self._held:
            return
        held: dict[tuple[int, str], float] = {}
        for fault in faults:
            if not 0 <= fault.entity < self.n:
                continue
            for signal in (fault.signal,) if fault.signal else self.signals + self.counters:
                if signal in self.signals:
                    k = self.signals.index(signal)
                    self._spoil_gauge(fault, self.values[k], self.meters[k], held)
                elif signal in self.counters:
                    self._spoil_counter(fault, self.counts[self.counters.index(signal)], signal, held)
        self._held = held

    def _spoil_gauge(
        self, fault: SensorFault, row: F32, meter: Meter, held: dict[tuple[int, str], float]
    ) -> None:
        at, key = fault.entity, (fault.entity, meter.signal)
        value = float(row[at])
        if fault.trouble == "frozen":
            if key not in self._held and np.isnan(value):
                return  # it freezes with the first reading that there is
            value = held[key] = self._held.get(key, value)
        elif fault.trouble == "biased":
            value += fault.amount
        elif fault.trouble == "spiking":
            lot = self.noise.lot(1_000_000) / 1e6
            if lot < SPIKES_PU:
                value += fault.amount if lot < SPIKES_PU / 2 else -fault.amount
        else:
            value = np.nan
        if meter.step:
            value = float(np.rint(value / meter.step) * meter.step)
        spec = TABLES[self.table].by_name[meter.signal]
        if spec.kind == "state":
            value = min(max(value, spec.low), spec.high)
        row[at] = min(value, meter.top) if value == value else value

    def _spoil_counter(
        self, fault: SensorFault, row: I64, name: str, held: dict[tuple[int, str], float]
    ) -> None:
        at, key = fault.entity, (fault.entity, name)
        if fault.trouble == "silent":
            row[at] = -1
        elif fault.trouble == "frozen" and (key in self._held or row[at] >= 0):
            held[key] = self._held.get(key, int(row[at]))
            row[at] = int(held[key])

    def blank(self, dead: Bool) -> None:
        """These entities [n] read nothing: not a gauge, not a counter."""
        self.values[:, dead] = np.nan
        self.counts[:, dead] = -1

    def report(self, present: Bool | None = None) -> Report:
        """The round as it stands. `present` [n]: who spoke; None = all."""
        assert self.last_ns is not None
        return Report(self.table, self.signals, self.values, self.counters, self.counts, self.t_ns,
                      self.last_ns - self._latest_ns, present)  # fmt: skip


class DelayedPanel(Panel):
    """Meters of a building: what an entity reports is as it was `delay_s` [n] before, or next to that.

    The building's own gateway dates it at the round: nobody outside learns how late it is. A meter without a
    step reads whole numbers.
    """

    def __init__(
        self,
        table: str,
        meters: Sequence[Meter],
        counters: Sequence[str],
        ahead_ns: I64,
        period_s: float,
        noise: Noise,
        scale: float,
        delay_s: F64,
    ) -> None:
        super().__init__(table, meters, counters, ahead_ns, period_s, noise, scale)
        self._delay_ns = np.rint(delay_s * 1e9).astype(np.int64)
        self._delays = np.unique(self._delay_ns).tolist()
        self._of_delay = [self._delay_ns == d for d in self._delays]
        self._ring = np.full((RING, len(self.meters), self.n), np.nan, np.float32)
        self._ring_ns: list[int] = []  # of the rounds in the ring, oldest first
        self._next = 0
        # All rows at once: such tables are small, and calls cost more than cells.
        many = len(self.meters)
        self._relative = np.array([[m.relative * scale] for m in self.meters], np.float32)
        self._absolute = np.array([[m.absolute * scale] for m in self.meters], np.float32)
        gains = [np.ones(self.n, np.float32) if g is None else g for g in self.true_gain]
        self._gains = np.array(gains, np.float32).reshape(many, self.n)
        self._step = np.array([[m.step or 1.0] for m in self.meters], np.float32)
        self._top = np.array([[m.top] for m in self.meters], np.float32)
        self._matrix = np.empty((many, self.n), np.float32)

    def sample(self, truth: Sequence[Column], now_ns: int) -> None:
        """Remember the truth of now; called more often than `read_late`."""
        rows = self._ring[self._next]
        for k, column in enumerate(truth):
            np.copyto(rows[k], column, casting="unsafe")
        self._next = (self._next + 1) % RING
        self._ring_ns = [*self._ring_ns[-RING + 1 :], now_ns]

    def read_late(self, counts: Sequence[Column], now_ns: int) -> None:
        """A round from what was sampled."""
        kept = self._ring_ns
        for delay_ns, mine in zip(self._delays, self._of_delay, strict=True):
            off_ns = [abs(now_ns - delay_ns - t) for t in kept]
            place = (self._next - len(kept) + off_ns.index(min(off_ns))) % RING
            np.copyto(self.values, self._ring[place], where=mine)
        for k, column in enumerate(counts):
            np.copyto(self.counts[k], column, casting="unsafe")
        self._distort(now_ns)

    def _distort(self, now_ns: int) -> None:
        self.last_ns = now_ns
        np.subtract(now_ns, self._ahead_ns, out=self.t_ns)
        values, scratch = self.values, self._matrix
        if self.scale:
            np.multiply(self.noise.take(values.size).reshape(values.shape), self._relative, out=scratch)
            np.add(scratch, self._gains, out=scratch)
            np.multiply(values, scratch, out=values)
            np.multiply(self.noise.take(values.size).reshape(values.shape), self._absolute, out=scratch)
            np.add(values, scratch, out=values)
        np.divide(values, self._step, out=values)
        np.rint(values, out=values)
        np.multiply(values, self._step, out=values)
        np.minimum(values, self._top, out=values)
