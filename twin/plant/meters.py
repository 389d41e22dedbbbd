"""Meter: turns a true quantity into a reading, with gain, noise, resolution, delay and gaps.

A panel is a set of meters that report together, for all entities of a table. Rows are written in place, in
float32, since a plant is observed thousands of times per second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import F32, F64, I64, TABLES, Bool
from twin.plant.disturbance import SensorFault
from twin.telemetry import Block, Event


@dataclass(slots=True)
class Report:
    """Columns of all of a table. Shapes: values [len(signals), n], counts [len(counters), n], t_ns [n].

    NaN and negative counts are "no reading", as in a Block. `present` [n]: entities of which nothing came at
    all are False; None = all spoke. It has arrived as a whole at `arrival_ns`, never before its last instant.
    """

    table: str
    signals: tuple[str, ...]
    values: F32
    counters: tuple[str, ...]
    counts: I64
    t_ns: I64
    arrival_ns: int
    present: Bool | None = None

    def runs(self) -> list[tuple[int, int]]:
        """Return (first, end) of each run of neighbours that reported; silent entities lie between."""
        if self.present is None:
            return [(0, len(self.t_ns))] if len(self.t_ns) else []
        edge = np.flatnonzero(np.diff(self.present, prepend=False, append=False))
        return list(zip(edge[::2].tolist(), edge[1::2].tolist(), strict=True))

    def blocks(self) -> list[Block]:
        """Yield runs of neighbours that reported at one instant. Their arrays are views of this report's."""
        out: list[Block] = []
        step = np.flatnonzero(np.diff(self.t_ns)) + 1
        for first, end in self.runs():
            cuts = [first, *step[(step > first) & (step < end)].tolist(), end]
            for a, b in pairwise(cuts):
                out.append(
                    Block(self.table, a, self.signals, self.values[:, a:b], self.counters,
                          self.counts[:, a:b], int(self.t_ns[a]))
                )  # fmt: skip
        return out

    def column(self, signal: str) -> F32:
        """Return the values [n] of one signal. Raises ValueError for a signal outside the report."""
        row: F32 = self.values[self.signals.index(signal)]
        return row

    def copy(self) -> Report:
        """Return a copy with arrays of its own."""
        present = None if self.present is None else self.present.copy()
        return Report(self.table, self.signals, self.values.copy(), self.counters, self.counts.copy(),
                      self.t_ns.copy(), self.arrival_ns, present)  # fmt: skip


@dataclass(slots=True)
class Observation:
    """All reports up to `now_ns`, in order of arrival.

    The arrays belong to the sensors, which write over them at the next observation: `copy` what is kept.
    """

    reports: list[Report]
    events: Sequence[Event]
    now_ns: int

    @property
    def blocks(self) -> list[Block]:
        """Yield the blocks of all reports, in order of arrival."""
        return [block for report in self.reports for block in report.blocks()]

    def find(self, table: str, signal: str) -> Report | None:
        """Return the report with this signal, or None if it was not due."""
        return next((r for r in self.reports if r.table == table and signal in r.signals), None)

    def copy(self) -> Observation:
        """Return a copy with arrays of its own."""
        return Observation([r.copy() for r in self.reports], tuple(self.events), self.now_ns)


POOL_SIZE = 2**18  # numbers, at least; source: estimate, many times what a round of the largest site needs
REFRESH = 256  # of them are drawn anew at each round: all within 1024 rounds
SPIKES_PU = 0.2  # share of the readings of a spiking sensor that are spikes; source: estimate
RING = 8  # samples that a delayed panel remembers: 3 s, at a step of half a second
Column = np.ndarray  # [n] of any number


class Noise:
    """Standard normal numbers, float32, as slices of a pool that is slowly redrawn.

    Slices begin anywhere, so the same number meets the same entity again in one of `POOL_SIZE` readings only;
    a draw of its own for each would cost more than all the rest of a plant.
    """

    def __init__(self, rng: np.random.Generator, longest: int) -> None:
        self.rng = rng
        size = max(POOL_SIZE, 4 * longest)
        self.pool = rng.standard_normal(size, dtype=np.float32)
        self._scaled: dict[tuple[float, float], F32] = {}
        self._room = size - longest
        self._at, self._walk = 0, int(rng.integers(2**31))

    def refresh(self) -> None:
        """Draw a part of the pool again."""
        new = slice(self._at, self._at + REFRESH)
        self.rng.standard_normal(out=self.pool[new], dtype=np.float32)
        for (sigma, mean), pool in self._scaled.items():
            np.multiply(self.pool[new], np.float32(sigma), out=pool[new])
            pool[new] += np.float32(mean)
        self._at = (self._at + REFRESH) % (len(self.pool) - REFRESH)

    def take(self, n: int) -> F32:
        """Return n numbers [n], read only."""
        at = self.lot(self._room)
        return self.pool[at : at + n]

    def taken_as(self, n: int, sigma: float, mean: float = 0.0) -> F32:
        """Return numbers [n] with this spread and mean, read only. Scaled pools are cached: a site has few
        kinds of meter."""
        pool = self._scaled.get((sigma, mean))
        if pool is None:
            pool = self._scaled[sigma, mean] = np.float32(mean) + np.float32(sigma) * self.pool
        at = self.lot(self._room)
        return pool[at : at + n]

    def lot(self, many: int) -> int:
        """Return one of 0 .. many - 1, far cheaper than from the generator and good enough for choices."""
        # A linear congruential walk (Numerical Recipes, ranqd1); its high bits, the good ones, decide.
        self._walk = (self._walk * 1664525 + 1013904223) & 0xFFFFFFFF
        return self._walk * many >> 32


@dataclass(frozen=True, slots=True)
class Meter:
    """One signal's meter. Errors are 1 sigma: `absolute` in its unit, `relative` and `gain` as shares.

    `gain` is fixed per meter, the others change with each reading. `step` is the resolution, 0 = none; `top`
    is where the scale ends. It shows `factor` times the column that it is given. `seldom`: without errors, of
    something that changes seldom, and not read where the truth says that nothing of the kind has.
    """

    signal: str
    absolute: float = 0.0
    relative: float = 0.0
    gain: float = 0.0
    step: float = 0.0
    top: float = np.inf
    factor: float = 1.0
    seldom: bool = False


class Sampling(NamedTuple):
    """The reading of a panel: every `period_s`, with errors out of `noise`, all of them times `scale`."""

    period_s: float
    noise: Noise
    scale: float


class Panel:
    """Meters of a table that report together; `counters` are read without error.

    `ahead_ns` [n] is by how much each entity's instant lies before the end of its round.
    """

    def __init__(
        self, table: str, meters: Sequence[Meter], counters: Sequence[str], ahead_ns: I64, sampling: Sampling
    ) -> None:
        n = len(ahead_ns)
        self.table, self.n = table, n
        self.period_s, self.noise, self.scale = sampling
        self.meters = tuple(meters)
        self.signals = tuple(m.signal for m in meters)
        self.counters = tuple(counters)
        self.values = np.full((len(self.meters), n), np.nan, np.float32)
        self.counts = np.full((len(self.counters), n), -1, np.int64)
        self.true_gain = [self._gain(m) for m in self.meters]
        self.factors = [m.factor for m in self.meters]
        self.often = len(self.counters)  # so many counters are read in each round, those behind them seldom
        self.t_ns = np.zeros(n, np.int64)
        self._ahead_ns, self._ones = ahead_ns, np.ones(n, np.float32)
        self._gap: tuple[int, int | np.ndarray, Any] | None = (
            None  # cells of a seldom signal that dropped out
        )
        self.marred = False  # by a fault: all is read again
        self._latest_ns = int(ahead_ns.min()) if n else 0
        self.last_ns: int | None = None
        self._held: dict[tuple[int, str], float] = {}

    def _gain(self, meter: Meter) -> F32 | None:
        if not meter.gain * self.scale:
            return None
        drawn = self.noise.rng.standard_normal(self.n, dtype=np.float32)
        return np.float32(1.0) + np.float32(meter.gain * self.scale) * drawn

    def due(self, now_ns: int) -> bool:
        """Return True if a round is due; half a millisecond early is in time."""
        return self.last_ns is None or now_ns - self.last_ns >= self.period_s * 1e9 - 5e5

    def read(
        self, truth: Sequence[Column], counts: Sequence[Column], now_ns: int, seldom: bool = True
    ) -> None:
        """Read a round: each signal from its truth [n], each counter from its own; `seldom`: also the
        rarely read ones."""
        self._stamp(now_ns)
        seldom = seldom or self.marred
        self.marred = False
        if self._gap is not None:
            k, at, old = self._gap
            self.values[k, at], self._gap = old, None
        for k, column in enumerate(truth):
            if seldom or not self.meters[k].seldom:
                self._read_row(k, column)
        for k, column in enumerate(counts if seldom else counts[: self.often]):
            np.copyto(self.counts[k], column, casting="unsafe")

    def _stamp(self, now_ns: int) -> None:
        self.last_ns = now_ns
        np.subtract(now_ns, self._ahead_ns, out=self.t_ns)

    def _read_row(self, k: int, column: Column) -> None:
        row, meter, gain, noise = self.values[k], self.meters[k], self.true_gain[k], self.noise
        np.copyto(row, column, casting="unsafe")
        if self.factors[k] != 1.0:
            row *= np.float32(self.factors[k])
        if gain is not None:
            row *= gain
        if meter.relative and self.scale:
            row *= noise.taken_as(self.n, meter.relative * self.scale, 1.0)
        if meter.absolute and self.scale:
            row += noise.taken_as(self.n, meter.absolute * self.scale)
        if meter.step == 1.0:
            np.rint(row, out=row)
        elif meter.step:
            row *= np.float32(1.0 / meter.step)
            np.rint(row, out=row)
            row *= np.float32(meter.step)
        if meter.top == 1.0:
            np.minimum(row, self._ones, out=row)  # against an array: far quicker than against a number
        elif meter.top < np.inf:
            np.minimum(row, np.float32(meter.top), out=row)

    def drop_out(self, share_pu: float) -> None:
        """Replace random cells by "no reading", this share on average.

        A query fails for one signal at a time: some of its entities have nothing to say in that round.
        """
        if self.n == 0 or share_pu <= 0:
            return
        noise, expected = self.noise, share_pu * self.values.size
        many = int(expected)
        many += noise.lot(1_000_000) < (expected - many) * 1e6
        if many == 0:
            return
        k = noise.lot(len(self.values))
        row = self.values[k]
        at = noise.lot(self.n) if many == 1 else noise.rng.integers(self.n, size=many)
        if self.meters[k].seldom:
            self._gap = (k, at, row[at])  # it may not be read again for long
        row[at] = np.nan

    def spoil(self, faults: Sequence[SensorFault]) -> None:
        """Apply sensor faults to the readings. A fault of the signal "" applies to all signals."""
        if not faults and not self._held:
            return
        self.marred = True
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
        """Blank all gauges and counters of these entities [n]."""
        self.marred = True
        self.values[:, dead] = np.nan
        self.counts[:, dead] = -1

    def report(self, present: Bool | None = None) -> Report:
        """Return the present round as a report. `present` [n]: entities that report; None = all."""
        assert self.last_ns is not None
        return Report(self.table, self.signals, self.values, self.counters, self.counts, self.t_ns,
                      self.last_ns - self._latest_ns, present)  # fmt: skip


class DelayedPanel(Panel):
    """Meters of a building: an entity reports its state of `delay_s` [n] before, or next to that.

    The building's own gateway dates it at the round: nobody outside learns how late it is. A meter without a
    step reads whole numbers. It is read by the gateway that it hangs on.
    """

    def __init__(
        self, table: str, meters: Sequence[Meter], counters: Sequence[str], ahead_ns: I64,
        sampling: Sampling, delay_s: F64,
    ) -> None:  # fmt: skip
        super().__init__(table, meters, counters, ahead_ns, sampling)
        self.delay_ns = np.rint(delay_s * 1e9).astype(np.int64)
        gains = [np.ones(self.n, np.float32) if g is None else g for g in self.true_gain]
        self._gains = np.array(gains, np.float32).reshape(len(self.meters), self.n)


class Gateway:
    """The common row of cells of a building's panels, since calls cost more than cells."""

    def __init__(self, panels: Sequence[DelayedPanel], noise: Noise, scale: float) -> None:
        self.panels, self.noise, self.scale = tuple(panels), noise, scale
        starts = np.cumsum([0, *(p.values.size for p in panels)])
        self._starts = starts.tolist()
        n = int(starts[-1])

        def flat(of: Callable[[Meter], float]) -> F32:
            rows = [np.full(p.n, of(m), np.float32) for p in panels for m in p.meters]
            return np.concatenate(rows) if rows else np.zeros(0, np.float32)

        self._relative = flat(lambda m: m.relative * scale)
        self._absolute = flat(lambda m: m.absolute * scale)
        self._step, self._top = flat(lambda m: m.step or 1.0), flat(lambda m: m.top)
        self._gains = np.ones(n, np.float32)
        delay_ns = np.concatenate([p.delay_ns for p in panels for _ in p.meters] or [np.zeros(0, np.int64)])
        self._delays, self._class = np.unique(delay_ns, return_inverse=True)
        self._cells = np.arange(n)
        self._at = np.empty(n, np.intp)
        self._values, self._scratch = np.full(n, np.nan, np.float32), np.empty(n, np.float32)
        self._ring = np.full((RING, n), np.nan, np.float32)
        self._ring_ns: list[int] = []  # of the rounds in the ring, oldest first
        self._next = 0
        self._bind()

    def _bind(self) -> None:
        """Bind the panels' arrays as parts of the whole; again after a copy, which separates them."""
        for panel, a, b in zip(self.panels, self._starts[:-1], self._starts[1:], strict=True):
            shape = panel.values.shape
            for whole, name in ((self._values, "values"), (self._gains, "_gains")):
                part = whole[a:b].reshape(shape)
                part[:] = getattr(panel, name)
                setattr(panel, name, part)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gateway:
        out = copy.copy(self)
        memo[id(self)] = out  # tidy: allow id because the memo of deepcopy is keyed by it
        out.panels = tuple(copy.deepcopy(p, memo) for p in self.panels)
        out.noise = copy.deepcopy(self.noise, memo)
        for name in ("_gains", "_at", "_values", "_scratch", "_ring"):
            setattr(out, name, getattr(self, name).copy())
        out._ring_ns = list(self._ring_ns)
        out._bind()
        return out

    def sample(self, truth: Sequence[Column], now_ns: int) -> None:
        """Store the present truth: a column for each meter of each panel, in order."""
        np.concatenate(truth, out=self._ring[self._next], casting="unsafe")
        self._next = (self._next + 1) % RING
        self._ring_ns = [*self._ring_ns[-RING + 1 :], now_ns]

    def read_late(self, now_ns: int) -> None:
        """Read a round of all panels from the stored samples."""
        kept, places = self._ring_ns, []
        for delay_ns in self._delays.tolist():
            off_ns = [abs(now_ns - delay_ns - t) for t in kept]
            places.append((self._next - len(kept) + off_ns.index(min(off_ns))) % RING * len(self._cells))
        values, scratch = self._values, self._scratch
        np.take(np.array(places, np.intp), self._class, out=self._at, mode="clip")
        self._at += self._cells
        np.take(self._ring.reshape(-1), self._at, out=values, mode="clip")
        if self.scale:
            np.multiply(self.noise.take(len(values)), self._relative, out=scratch)
            scratch += self._gains
            values *= scratch
            np.multiply(self.noise.take(len(values)), self._absolute, out=scratch)
            values += scratch
        values /= self._step
        np.rint(values, out=values)
        values *= self._step
        np.minimum(values, self._top, out=values)
        for panel in self.panels:
            panel._stamp(now_ns)
