"""Deviations that last: for each comparison of the estimator, the entities that are off, their sign and their
start.

A two-sided cumulative sum over the residuals in sigmas counts readings, not ticks: a value that stands for
ten ticks is one reading. Comparisons lie side by side on boards: the cost is the number of calls, not of
cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twin.catalogue import F32, F64, I64, TABLES, Bool
from twin.contracts import Residual
from twin.diagnosis.alarm_budget import AlarmBudget
from twin.diagnosis.cusum import ALLOWANCE, LEAST_CERTAIN, CusumBoard, DeviationTrack
from twin.diagnosis.signature import measured_signal
from twin.telemetry import EntityState, Sizes, State, keyed, part

# Tables with more rows are looked at a part per tick: the cost of a tick stays the same.
SLICE = 8_192
NONE, SOME, ALL = 0, 1, 2  # of the cells


class NewReadings(EntityState):
    """New readings of this tick by cell."""

    seen_ns: dict[str, I64] = keyed("i8")  # by table and group, such as "gpu.0"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._fresh: dict[tuple[str, int], tuple[Bool | None, int]] = {}

    def begin(self) -> None:
        """Begin a new tick."""
        self._fresh.clear()

    def fresh(self, state: State, table: str, row: int) -> tuple[Bool | None, int]:
        """Return the cells [n] of a signal's row with a new reading, None for all, and their number."""
        column = state.tables[table]
        group = int(column.partition.group_of_row[row])
        key = (table, group)
        fresh = self._fresh.get(key)
        if fresh is None:
            name = f"{table}.{group}"
            t_ns, before = column.t_ns[group], self.seen_ns.get(name)
            if before is None or len(before) != len(t_ns):
                new = t_ns > 0
                self.seen_ns[name] = t_ns.copy()
            else:
                new = t_ns != before
                np.copyto(before, t_ns)
            count = int(np.count_nonzero(new))
            fresh = self._fresh[key] = (None if count == len(new) else new, count)
        return fresh


class Seat:
    """Position of a comparison on its board, and the signal of its new readings."""

    __slots__ = ("fill", "n", "name", "nothing", "piece", "row", "signal_row", "table", "track")

    def __init__(self, name: str, nothing: F64, state: State, track: DeviationTrack) -> None:
        n = len(nothing)
        self.name, self.n, self.track, self.nothing = name, n, track, nothing
        self.table, _, rest = name.partition(".")
        column = state.tables.get(self.table)
        known = column is not None and column.n == n and rest != "balance"
        # None: each tick is a reading
        self.signal_row = _ROWS.get((self.table, measured_signal(name))) if known else None
        self.row, self.piece, self.fill = 0, slice(0, n), NONE


def _fresh(
    state: State, readings: NewReadings, source: tuple[str, int | None], part: slice | None
) -> tuple[int, Bool | None]:
    """Return how many cells of a part (None: all) have a new reading, and their mask where some have."""
    table, row = source
    if row is None:
        return ALL, None
    fresh, count = readings.fresh(state, table, row)
    if fresh is None:
        return ALL, None
    if count and part is not None:
        fresh = fresh[part]
        count = int(np.count_nonzero(fresh))
    return (SOME, fresh) if count else (NONE, None)


class Stand:
    """A board with its seats: consecutive in one row, or one per row for large tables."""

    def __init__(self, seats: Sequence[Seat], n: int) -> None:
        self.seats, self.parts = seats, -(-n // SLICE) if n else 1
        whole = sum(s.n for s in seats)
        self.board = CusumBoard(len(seats), n) if n else CusumBoard(1, whole)
        self.shape = (len(seats), n) if n else (1, whole)
        at = 0
        for k, seat in enumerate(seats):
            seat.row, seat.piece = (k, slice(0, n)) if n else (0, slice(at, at + seat.n))
            at += seat.n
            seat.track.sit(self.board, seat.row, seat.piece)
        self.board.refresh()
        size = -(-n // self.parts) * len(seats) if n else whole
        self._z, self._fresh = np.zeros(size, np.float32), np.zeros(size, np.bool_)
        self._off, self._measured, self._expected = (np.zeros(size) for _ in range(3))
        self._flat, self._width = not n, -1
        # Signals whose readings the seats count: many judge the same one
        sources = [(seat.table, seat.signal_row) for seat in seats]
        self._sources = list(dict.fromkeys(sources))
        self._source_of = [self._sources.index(source) for source in sources]

    def update(
        self,
        residuals: dict[str, Residual],
        state: State,
        readings: NewReadings,
        in_maintenance: dict[str, Bool],
    ) -> None:
        """Compare a part of each table."""
        n, at = self.shape[1], state.tick % self.parts
        part = slice(at * n // self.parts, (at + 1) * n // self.parts)
        w = part.stop - part.start
        size = self.shape[0] * w
        z, fresh = self._z[:size].reshape(-1, w), self._fresh[:size].reshape(-1, w)
        fills, piece = [], None if self.parts == 1 else part
        fresh_of = [_fresh(state, readings, source, piece) for source in self._sources]
        for seat, source in zip(self.seats, self._source_of, strict=True):
            fill, some = fresh_of[source] if seat.name in residuals else (NONE, None)
            fills.append(fill)
            if some is not None or fill != seat.fill or w != self._width:
                fresh[seat.row, seat.piece if self._flat else slice(None)] = (
                    fill == ALL if some is None else some
                )
                seat.fill = fill
        self._width = w
        if not any(fills):
            self.board.skip()
            return
        if self._flat:
            self._side_by_side(residuals, z[0])
        else:
            self._by_row(residuals, z, part, fills)
        for seat in self.seats if in_maintenance else ():
            mask = in_maintenance.get(seat.table)
            if mask is not None and len(mask) == seat.n:
                if self._flat:
                    z[0, seat.piece][mask] = 0.0
                else:
                    z[seat.row][mask[part]] = 0.0
        self.board.update(z, None if min(fills) == ALL else fresh, part, state.now_ns)

    def _side_by_side(self, residuals: dict[str, Residual], z: F32) -> None:
        pieces = [residuals.get(seat.name) for seat in self.seats]
        gone = [seat.nothing for seat in self.seats]
        off, expected, sigma = self._off, self._expected, self._measured
        some = list(zip(pieces, gone, strict=True))
        np.concatenate([g if r is None else r.measured for r, g in some], out=off)
        np.concatenate([g if r is None else r.expected for r, g in some], out=expected)
        off -= expected
        np.concatenate([g if r is None else r.sigma for r, g in some], out=sigma)
        np.divide(off, sigma, out=z, casting="same_kind")

    def _by_row(self, residuals: dict[str, Residual], z: F32, part: slice, fills: list[int]) -> None:
        off = self._off[: z.shape[1]]
        for seat, fill in zip(self.seats, fills, strict=True):
            if fill == NONE:
                z[seat.row] = 0.0
                continue
            r = residuals[seat.name]
            np.subtract(r.measured[part], r.expected[part], out=off)
            np.divide(off, r.sigma[part], out=z[seat.row], casting="same_kind")


class Tracks(EntityState):
    """The tracks of all comparisons, and the present deviations."""

    tracks: dict[str, DeviationTrack] = part(make="_track")

    def __init__(self, sizes: Sizes, budget: AlarmBudget | None = None) -> None:
        super().__init__(sizes)
        self.budget = budget
        self.tracks: dict[str, DeviationTrack] = {}
        self._seats: dict[str, int] = {}
        self._stands: list[Stand] = []
        self._judging: dict[str, dict[str, DeviationTrack]] = {}

    def judging(self, signal: str) -> dict[str, DeviationTrack]:
        """Return the comparisons of a signal such as `gpu.power_w`, by name."""
        if signal not in self._judging:
            named = sorted(name for name in self.tracks if name.partition("/")[0] == signal)
            self._judging[signal] = {name: self.tracks[name] for name in named}
        return self._judging[signal]

    def _track(self, name: str) -> DeviationTrack:
        # The rows of a balance are of no table: they are other sums on another site
        table = name.partition(".")[0] if not name.endswith(".balance") else "balance"
        return DeviationTrack(self.sizes.get(table, 0), table)

    def update(
        self,
        residuals: dict[str, Residual],
        state: State,
        readings: NewReadings,
        in_maintenance: dict[str, Bool],
    ) -> None:
        """Compare; nothing counts under maintenance (`in_maintenance` [n] per table)."""
        seats = self._seats
        for name, residual in residuals.items():
            if seats.get(name) != len(residual.expected):
                self._seat(residuals, state)
                break
        with np.errstate(all="ignore"):
            for stand in self._stands:
                stand.update(residuals, state, readings, in_maintenance)

    def _seat(self, residuals: dict[str, Residual], state: State) -> None:
        """Lay out all comparisons again, with the state of each."""
        sizes = {name: len(track.on) for name, track in self.tracks.items()}
        sizes |= {name: len(r.expected) for name, r in residuals.items()}
        flat, large = list[Seat](), dict[int, list[Seat]]()
        self._judging.clear()
        nothing = np.full(max(sizes.values(), default=0), np.nan)
        for name, n in sizes.items():
            if n:
                track = self.tracks.get(name)
                if track is None or len(track.on) != n:
                    track = self.tracks[name] = DeviationTrack(n, self._track(name).table)
                seat = Seat(name, nothing[:n], state, track)
                (flat if n <= SLICE else large.setdefault(n, [])).append(seat)
        self._seats = sizes
        self._stands = [Stand(flat, 0)] if flat else []
        self._stands += [Stand(some, n) for n, some in sorted(large.items())]
        if self.budget is not None:
            certain = self.budget.certain(sizes, ALLOWANCE, LEAST_CERTAIN)
            for stand in self._stands:
                for seat in stand.seats:
                    stand.board.certain[seat.row, seat.piece] = certain[seat.name]

    def on(self, name: str) -> np.ndarray | None:
        """Return the sign of each row that is off [n] (-1, 0, 1); None if none is."""
        track = self.tracks.get(name)
        return track.on if track is not None and track.active else None

    def active(self) -> list[str]:
        """Return the comparisons with a row that is off, by name."""
        return sorted(name for name, t in self.tracks.items() if t.active)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the state from `dump`; all comparisons are laid out again."""
        self._seats, self._stands = {}, []
        self._judging.clear()
        for name, known in data["tracks"].items():
            self.tracks[name] = DeviationTrack(len(known["on"]), self._track(name).table)
        super().restore(data)

    def __getstate__(self) -> tuple[Sizes, AlarmBudget | None, dict[str, Any]]:
        """Return the state for a copy: separately copied pieces of a board would no longer share its
        arrays."""
        return self.sizes, self.budget, self.dump()

    def __setstate__(self, known: tuple[Sizes, AlarmBudget | None, dict[str, Any]]) -> None:
        self.__init__(*known[:2])  # type: ignore[misc]
        self.restore(known[2])


_ROWS = {(s.table, s.name): s.row for spec in TABLES.values() for s in spec.gauges}
