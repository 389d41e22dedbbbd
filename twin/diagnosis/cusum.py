"""Board of cumulative sums: many comparisons side by side, so that a tick is a few calls for all of them.

But for the running means, a tick touches only the cells that count something: those that are off now, and
those whose sums have not faded. Two far readings are enough, small ones need many.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, I64, Bool
from twin.telemetry import OWN, EntityState, column

# Cumulative sum (Page 1954): a drift of up to ALLOWANCE sigmas is no deviation. CERTAIN is reached by two
# readings of 6.5 sigmas or sixteen of 3; a site's own bounds, about as large, follow from its `AlarmBudget`.
ALLOWANCE, CERTAIN = 2.5, 8.0
MOST = 5.0 + ALLOWANCE  # of one reading, lest one wild one be enough
LEAST_CERTAIN = 5.5  # nor is one for any bound
FARTHEST = 1000.0
OFF_SIGMAS = 2.0  # no more than ALLOWANCE: a cell that was at rest and is not off stays at rest
HUGE_SIGMAS = 25.0  # one such reading is a deviation; whether it stays, the next one tells
MEAN_PER_READING = np.float32(0.4)
WILD_SIGMAS, WILD_KEPT = 5.0, 0.96  # a far reading counts among about the last 25
MOST_STREAK = 999


class CusumBoard:
    """Comparisons side by side: arrays [r, n], of which a part of the columns is looked at in a tick."""

    def __init__(self, r: int, n: int) -> None:
        self.n = n
        self.sums = np.zeros((2, r, n), np.float32)
        self.above, self.below = self.sums
        self.on, self.since_ns = np.zeros((r, n), np.int8), np.zeros((r, n), np.int64)
        self.mean, self.last = np.zeros((r, n), np.float32), np.zeros((r, n), np.float32)
        self.wild, self.streak = np.zeros((r, n), np.float32), np.zeros((r, n), np.int16)
        self.certain: F32 = np.full((r, n), CERTAIN, np.float32)  # sums from which a cell is off
        self.live: Bool = np.zeros((r, n), np.bool_)  # where a sum, streak or wild one is not zero
        self.pieces: list[DeviationTrack] = []
        self.active = self.any_wild = False
        self._width, self._scratch = -1, (self.mean, self.mean, self.live)

    def refresh(self) -> None:
        """After its arrays were written from outside."""
        self.live[:] = (self.sums != 0.0).any(axis=0) | (self.streak != 0) | (self.wild != 0.0)
        self.any_wild = bool(self.wild.any())
        self.active = bool(self.on.any())

    def skip(self) -> None:
        """No new readings; a cell may be off no longer for another reason."""
        if self.active:
            self._tell()

    def update(self, z: F32, fresh: Bool | None, part: slice, now_ns: int) -> None:
        """Take in deviations in sigmas [r, w] of a part of the columns; a NaN lets sums fade away.

        `z` is overwritten, and contiguous.
        """
        w = z.shape[1]
        if w != self._width:
            self._width = w
            self._scratch = np.empty_like(z), np.empty_like(z), np.empty(z.shape, np.bool_)
        size, moved, odd = self._scratch
        largest = float(np.abs(z, out=size).max(initial=0.0))
        if not largest <= FARTHEST:  # or not a number
            np.copyto(z, 0.0, where=np.not_equal(z, z, out=odd))
            np.minimum(np.maximum(z, np.float32(-FARTHEST), out=z), np.float32(FARTHEST), out=z)
            largest = float(np.abs(z, out=size).max(initial=0.0))
        mean = self.mean[:, part]
        np.subtract(z, mean, out=moved)
        moved *= MEAN_PER_READING
        np.greater(size, OFF_SIGMAS, out=odd)
        odd |= self.live[:, part]
        if fresh is None:
            self.last[:, part] = z
        else:
            moved *= fresh
            odd &= fresh
            np.copyto(self.last[:, part], z, where=fresh)
        mean += moved
        at = odd.reshape(-1).nonzero()[0]
        if len(at):
            cells = at if w == self.n else at + (at // w) * (self.n - w) + part.start
            self._count(z.reshape(-1)[at], cells, largest, now_ns)
        elif self.active:
            self._tell()

    def _count(self, z: F32, cells: I64, largest: float, now_ns: int) -> None:
        """Count the readings of some cells, by their place on the whole board."""
        streak = self.streak.reshape(-1)
        row = streak[cells]
        row += 1
        np.minimum(row, MOST_STREAK, out=row)
        row *= z * np.sign(self.mean.reshape(-1)[cells]) > OFF_SIGMAS
        streak[cells] = row
        live = row > 0
        if largest > WILD_SIGMAS or self.any_wild:
            many = self.wild.reshape(-1)
            wild = many[cells]
            wild *= np.float32(WILD_KEPT)
            wild += np.abs(z) > WILD_SIGMAS
            wild[wild < 0.01] = 0.0
            many[cells] = wild
            live |= wild > 0.0
            self.any_wild = bool(many.any())
        step = np.minimum(np.maximum(z, np.float32(-MOST)), np.float32(MOST))
        certain = self.certain.reshape(-1)[cells]
        if largest > HUGE_SIGMAS:
            huge = np.abs(z) > HUGE_SIGMAS
            step[huge] = np.copysign(np.float32(ALLOWANCE) + certain[huge], z[huge])
        both = self.sums.reshape(2, -1)
        sums = both[:, cells]
        sums[0] += step
        sums[1] -= step
        sums -= np.float32(ALLOWANCE)
        np.maximum(sums, 0.0, out=sums)
        np.minimum(sums, np.float32(2.0) * certain, out=sums)
        both[:, cells] = sums
        live |= sums[0] > 0.0
        live |= sums[1] > 0.0
        self.live.reshape(-1)[cells] = live
        if self.active or (sums >= certain).any():
            self._decide(sums, certain, cells, now_ns)

    def _decide(self, sums: F32, certain: F32, cells: I64, now_ns: int) -> None:
        """Decide which of these cells are off; the others have not changed and keep their state."""
        was = self.on.reshape(-1)[cells]
        bound = np.where(was != 0, np.float32(0.5) * certain, certain)
        above, below = sums
        up, down = (above >= bound) & (above >= below), below >= bound
        now = np.where(up, 1, np.where(down, -1, 0)).astype(np.int8)
        since_ns = self.since_ns.reshape(-1)
        since_ns[cells[(now != 0) & (was == 0)]] = now_ns
        since_ns[cells[now == 0]] = 0
        self.on.reshape(-1)[cells] = now
        self._tell()

    def _tell(self) -> None:
        self.active = False
        for piece in self.pieces:
            piece.active = bool(piece.on.any())
            self.active |= piece.active


class DeviationTrack(EntityState):
    """One comparison; on a board, its columns are views of the board's arrays."""

    above: F32 = column(OWN, "f4")  # sums of the deviations to either side
    below: F32 = column(OWN, "f4")
    on: np.ndarray = column(OWN, "i1")  # -1, 0, 1: the side to which it is off
    since_ns: I64 = column(OWN, "i8")
    mean: F32 = column(OWN, "f4")  # of the last few deviations, in sigmas
    wild: F32 = column(OWN, "f4")  # far readings among the last ones
    last: F32 = column(OWN, "f4")  # the newest deviation, in sigmas
    streak: np.ndarray = column(OWN, "i2")  # readings in a row that were off to the side of the mean

    def __init__(self, n: int, table: str = OWN) -> None:
        super().__init__({table: n}, table)
        self.active = False

    def sit(self, board: CusumBoard, row: int, piece: slice) -> None:
        """Move to a piece of a row of this board, with what is known."""
        for name in self.declared:
            view = getattr(board, name)[row, piece]
            view[:] = getattr(self, name)
            setattr(self, name, view)
        board.pieces.append(self)

    def derive(self) -> None:
        """Any row may be off now."""
        self.active = bool(self.on.any())
