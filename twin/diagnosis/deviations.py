"""Deviations that last: for each comparison of the estimator, the entities that are off, their sign and their
start.

A two-sided cumulative sum over the residuals in sigmas counts readings, not ticks: a value that stands for
ten ticks is one reading. Comparisons lie side by side on boards: the cost is the number of calls, not of
cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, TABLES, Bool
from twin.contracts import Residual
from twin.diagnosis.cusum import CERTAIN, KEPT, CusumBoard
from twin.telemetry import State

__all__ = ["CERTAIN", "SLICE", "DeviationTrack", "NewReadings", "Tracks", "age_s", "measured_signal"]

# Tables with more rows are looked at a part per tick: the cost of a tick stays the same.
SLICE = 8_192
NONE, SOME, ALL = 0, 1, 2  # of the cells
FAR_NS = 2**62  # later than any reading


class NewReadings:
    """New readings of this tick by cell, and the reporting rate of each group of signals."""

    def __init__(self) -> None:
        self.seen_ns: dict[tuple[str, int], I64] = {}
        self._fresh: dict[tuple[str, int], tuple[Bool | None, int]] = {}
        self._oldest_ns: dict[tuple[str, int], int] = {}

    def begin(self) -> None:
        """A new tick."""
        self._fresh.clear()

    def fresh(self, state: State, table: str, row: int) -> Bool | None:
        """Cells [n] of a signal's row with a new reading; None: all of them."""
        return self.look(state, table, row)[0]

    def look(self, state: State, table: str, row: int) -> tuple[Bool | None, int]:
        """Cells [n] of a signal's row with a new reading, None where that is all; and how many are."""
        column = state.tables[table]
        group = int(column.partition.group_of_row[row])
        key = (table, group)
        found = self._fresh.get(key)
        if found is None:
            t_ns, before = column.t_ns[group], self.seen_ns.get(key)
            if before is None or len(before) != len(t_ns):
                new = t_ns > 0
                self.seen_ns[key] = t_ns.copy()
            else:
                new = t_ns != before
                np.copyto(before, t_ns)
            count = int(np.count_nonzero(new))
            if count or key not in self._oldest_ns:
                self._oldest_ns[key] = int(t_ns.min(initial=FAR_NS))
            found = self._fresh[key] = (None if count == len(new) else new, count)
        return found

    def oldest_ns(self, table: str, group: int) -> int:
        """When the cell of a group that was read longest ago was read, as last looked at."""
        return self._oldest_ns[table, group]

    def dump(self) -> list[Any]:
        return [[table, group, seen] for (table, group), seen in sorted(self.seen_ns.items())]

    def restore(self, data: list[Any]) -> None:
        self.seen_ns = {(str(t), int(g)): np.array(seen) for t, g, seen in data}
        self._oldest_ns.clear()


class DeviationTrack:
    """One comparison, a piece of a board: sums [n] above and below, what is on (-1, 0, 1), since when."""

    __slots__ = (*KEPT, "active", "live", "board")

    above: F32
    below: F32
    on: np.ndarray  # int8
    since_ns: I64
    mean: F32  # of the last few deviations, in sigmas
    wild: F32  # far readings among the last ones
    last: F32  # the newest deviation, in sigmas
    streak: np.ndarray  # int16: readings in a row that were off to the side of the mean
    live: Bool

    def __init__(self, board: CusumBoard, row: int, piece: slice) -> None:
        self.active = False
        self.sit(board, row, piece)

    @classmethod
    def of(cls, n: int) -> DeviationTrack:
        """One on a board of its own."""
        return cls(CusumBoard(1, n), 0, slice(0, n))

    def sit(self, board: CusumBoard, row: int, piece: slice) -> None:
        """Become a piece of a row of this board; what is known is not carried over."""
        for name in (*KEPT, "live"):
            setattr(self, name, getattr(board, name)[row, piece])
        self.board = board
        board.pieces.append(self)

    def take(self, known: dict[str, Any]) -> None:
        """Write what is known [n] by name, and look what is on."""
        for name in KEPT:
            getattr(self, name)[:] = known[name]
        self.board.wake()
        self.active = bool(self.on.any())

    def known(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    def update(self, z: F64, fresh: Bool | None, part: slice, now_ns: int) -> None:
        """Take in deviations in sigmas of a part of the rows, of a comparison that sits alone."""
        self.board.update(z.astype(np.float32)[None], None if fresh is None else fresh[None], part, now_ns)

    def forget(self, entity: int) -> None:
        for name in (*KEPT, "live"):
            getattr(self, name)[entity] = 0


class Seat:
    """Position of a comparison on its board, and the signal whose new readings it counts."""

    __slots__ = ("look", "n", "name", "nothing", "piece", "row", "signal_row", "table", "track")

    def __init__(self, name: str, n: int, state: State, track: DeviationTrack) -> None:
        self.name, self.n, self.track = name, n, track
        self.table, _, rest = name.partition(".")
        column = state.tables.get(self.table)
        known = column is not None and column.n == n and rest != "balance"
        # None: each tick is a reading
        self.signal_row = _ROWS.get((self.table, measured_signal(name))) if known else None
        self.row, self.piece, self.look = 0, slice(0, n), NONE
        self.nothing = np.full(n, np.nan)

    def fresh(self, state: State, readings: NewReadings, part: slice) -> tuple[int, Bool | None]:
        """Return the number of cells of a part with a new reading, and their mask where that is not all."""
        if self.signal_row is None:
            return ALL, None
        fresh, count = readings.look(state, self.table, self.signal_row)
        if fresh is None:
            return ALL, None
        if count and part.stop - part.start < self.n:
            fresh = fresh[part]
            count = int(np.count_nonzero(fresh))
        return (SOME, fresh) if count else (NONE, None)


class Stand:
    """A board with the seats on it: in one row, one after the other, or in large tables one per row."""

    def __init__(self, seats: Sequence[Seat], n: int) -> None:
        self.seats, self.parts = seats, -(-n // SLICE) if n else 1
        whole = sum(s.n for s in seats)
        self.board = CusumBoard(len(seats), n) if n else CusumBoard(1, whole)
        self.shape = (len(seats), n) if n else (1, whole)
        at = 0
        for k, seat in enumerate(seats):
            seat.row, seat.piece = (k, slice(0, n)) if n else (0, slice(at, at + seat.n))
            at += seat.n
            known = seat.track.known()
            seat.track.sit(self.board, seat.row, seat.piece)
            for name in KEPT:
                getattr(seat.track, name)[:] = known[name]
        self.board.wake()
        size = -(-n // self.parts) * len(seats) if n else whole
        self._z, self._fresh = np.zeros(size, np.float32), np.zeros(size, np.bool_)
        self._off, self._measured, self._expected = (np.zeros(size) for _ in range(3))
        self._flat, self._width = not n, -1

    def update(
        self, residuals: dict[str, Residual], state: State, readings: NewReadings, spared: dict[str, Bool]
    ) -> None:
        """Compare a part of each table."""
        n, at = self.shape[1], state.tick % self.parts
        part = slice(at * n // self.parts, (at + 1) * n // self.parts)
        w = part.stop - part.start
        size = self.shape[0] * w
        z, fresh = self._z[:size].reshape(-1, w), self._fresh[:size].reshape(-1, w)
        looks = []
        for seat in self.seats:
            look, some = NONE, None
            if seat.name in residuals:
                look, some = seat.fresh(state, readings, seat.piece if self._flat else part)
            looks.append(look)
            if some is not None or look != seat.look or w != self._width:
                fresh[seat.row, seat.piece if self._flat else slice(None)] = (
                    look == ALL if some is None else some
                )
                seat.look = look
        self._width = w
        if not any(looks):
            self.board.rested()
            return
        if self._flat:
            self._side_by_side(residuals, z[0])
        else:
            self._by_row(residuals, z, part, looks)
        for seat in self.seats if spared else ():
            mask = spared.get(seat.table)
            if mask is not None and len(mask) == seat.n:
                if self._flat:
                    z[0, seat.piece][mask] = 0.0
                else:
                    z[seat.row][mask[part]] = 0.0
        self.board.update(z, None if min(looks) == ALL else fresh, part, state.now_ns)

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

    def _by_row(self, residuals: dict[str, Residual], z: F32, part: slice, looks: list[int]) -> None:
        off = self._off[: z.shape[1]]
        for seat, look in zip(self.seats, looks, strict=True):
            if look == NONE:
                z[seat.row] = 0.0
                continue
            r = residuals[seat.name]
            np.subtract(r.measured[part], r.expected[part], out=off)
            np.divide(off, r.sigma[part], out=z[seat.row], casting="same_kind")


class Tracks:
    """The tracks of all comparisons, and the deviations of this tick where any is on."""

    def __init__(self) -> None:
        self.tracks: dict[str, DeviationTrack] = {}
        self._seats: dict[str, int] = {}
        self._stands: list[Stand] = []

    def update(
        self, residuals: dict[str, Residual], state: State, readings: NewReadings, spared: dict[str, Bool]
    ) -> None:
        """Compare; `spared` [n] per table: where people work, nothing is counted."""
        seats = self._seats
        for name, residual in residuals.items():
            if seats.get(name) != len(residual.expected):
                self._seat(residuals, state)
                break
        with np.errstate(all="ignore"):
            for stand in self._stands:
                stand.update(residuals, state, readings, spared)

    def _seat(self, residuals: dict[str, Residual], state: State) -> None:
        """Lay out all comparisons anew, with what is known of each."""
        sizes = {name: len(track.on) for name, track in self.tracks.items()}
        sizes |= {name: len(r.expected) for name, r in residuals.items()}
        flat, large = list[Seat](), dict[int, list[Seat]]()
        for name, n in sizes.items():
            if n:
                track = self.tracks.get(name)
                if track is None or len(track.on) != n:
                    track = self.tracks[name] = DeviationTrack.of(n)
                seat = Seat(name, n, state, track)
                (flat if n <= SLICE else large.setdefault(n, [])).append(seat)
        self._seats = sizes
        self._stands = [Stand(flat, 0)] if flat else []
        self._stands += [Stand(some, n) for n, some in sorted(large.items())]

    def on(self, name: str) -> np.ndarray | None:
        """Return the sign of each row that is off [n] (-1, 0, 1); None if none is."""
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
            new, kept = DeviationTrack.of(sizes[table]), np.flatnonzero(kept_of >= 0)
            for field in KEPT:
                getattr(new, field)[kept] = getattr(track, field)[kept_of[kept]]
            new.active = bool(new.on.any())
            out.tracks[name] = new
        return out

    def dump(self) -> dict[str, Any]:
        return {k: t.known() for k, t in sorted(self.tracks.items())}

    def restore(self, data: dict[str, Any]) -> None:
        self.tracks, self._seats, self._stands = {}, {}, []
        for name, held in data.items():
            track = self.tracks[name] = DeviationTrack.of(len(held["on"]))
            track.take(held)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: pieces of a board, copied one by one, would no longer be its pieces."""
        return {k: t.known() for k, t in self.tracks.items()}

    def __setstate__(self, data: dict[str, Any]) -> None:
        self.restore(data)


def measured_signal(name: str) -> str:
    """The signal whose reading a comparison judges: `rack.flow_lpm/heat` judges `flow_lpm`."""
    signal = name.partition(".")[2].partition("/")[0]
    return "return_temp_c" if signal == "heat" else signal


def age_s(since_ns: int, now_ns: int) -> float:
    return (now_ns - since_ns) / NS


_ROWS = {(s.table, s.name): s.row for spec in TABLES.values() for s in spec.gauges}
