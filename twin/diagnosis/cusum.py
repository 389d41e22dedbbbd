"""CUSUM board: cumulative sums of many comparisons side by side, so that a tick needs few calls.

But for the running means, a tick touches only the cells that count something: those that are off now, and
those whose sums have not faded. Two far readings are enough, small ones need many.
"""

from __future__ import annotations

import numpy as np

from twin import kernels
from twin.catalogue import F32, I64, Bool
from twin.telemetry import OWN, EntityState, column

# Cumulative sum (Page 1954): a drift of up to ALLOWANCE sigmas is no deviation. CERTAIN is reached by two
# readings of 6.5 sigmas or sixteen of 3; a site's own bounds, about as large, follow from its `AlarmBudget`.
ALLOWANCE, CERTAIN = 2.5, 8.0
MOST = 5.0 + ALLOWANCE  # of one reading, lest one wild one be enough
LEAST_CERTAIN = 5.5  # nor is one for any bound
FARTHEST = 1000.0
OFF_SIGMAS = 2.0  # no more than ALLOWANCE: a cell that was at rest and is not off stays at rest
HUGE_SIGMAS = 25.0  # one such reading is a deviation; whether it stays, the next one shows
MEAN_PER_READING = 0.4
WILD_SIGMAS, WILD_KEPT = 5.0, 0.96  # a far reading counts among about the last 25


class CusumBoard:
    """Comparisons side by side: arrays [r, n]; a tick updates a part of the columns."""

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
        self._at = np.zeros(0, np.int64)

    def refresh(self) -> None:
        """Refresh the views after a write to the arrays from outside."""
        self.live[:] = (self.sums != 0.0).any(axis=0) | (self.streak != 0) | (self.wild != 0.0)
        self.any_wild = bool(self.wild.any())
        self.active = bool(self.on.any())

    def skip(self) -> None:
        """Skip a tick without new readings; a cell may still end for another reason."""
        if self.active:
            self._refresh()

    def update(self, z: F32, fresh: Bool | None, part: slice, now_ns: int) -> None:
        """Take in deviations in sigmas [r, w] of a part of the columns; a NaN lets sums fade away.

        `z` is overwritten, and contiguous.
        """
        w = z.shape[1]
        if len(self._at) < z.size:
            self._at = np.empty(z.size, np.int64)
        largest, sure, counted = kernels.add_deviations(
            z,
            fresh,
            self.mean[:, part],
            self.last[:, part],
            self.live[:, part],
            self.above[:, part],
            self.below[:, part],
            self.wild[:, part],
            self.streak[:, part],
            self.certain[:, part],
            FARTHEST,
            MEAN_PER_READING,
            OFF_SIGMAS,
            WILD_SIGMAS,
            WILD_KEPT,
            MOST,
            HUGE_SIGMAS,
            ALLOWANCE,
            self.any_wild,
            self._at,
        )
        if counted and (largest > WILD_SIGMAS or self.any_wild):
            self.any_wild = bool(self.wild.any())
        if counted and (self.active or sure):
            at = self._at[:counted]
            cells = at if w == self.n else at + (at // w) * (self.n - w) + part.start
            self._decide(self.sums.reshape(2, -1)[:, cells], self.certain.reshape(-1)[cells], cells, now_ns)
        elif not counted and self.active:
            self._refresh()

    def _decide(self, sums: F32, certain: F32, cells: I64, now_ns: int) -> None:
        """Decide which of these cells are off; unchanged cells keep their state."""
        was = self.on.reshape(-1)[cells]
        bound = np.where(was != 0, np.float32(0.5) * certain, certain)
        above, below = sums
        up, down = (above >= bound) & (above >= below), below >= bound
        now = np.where(up, 1, np.where(down, -1, 0)).astype(np.int8)
        since_ns = self.since_ns.reshape(-1)
        since_ns[cells[(now != 0) & (was == 0)]] = now_ns
        since_ns[cells[now == 0]] = 0
        self.on.reshape(-1)[cells] = now
        self._refresh()

    def _refresh(self) -> None:
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
        """Move to a piece of a row of this board, with the present state."""
        for name in self.declared:
            view = getattr(board, name)[row, piece]
            view[:] = getattr(self, name)
            setattr(self, name, view)
        board.pieces.append(self)

    def derive(self) -> None:
        """Allow any row to be off."""
        self.active = bool(self.on.any())
