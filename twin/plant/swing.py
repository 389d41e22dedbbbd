"""How jobs move the activity of GPUs: all members of a synchronous job dip together; services follow users.

Activities are means over a step, exact for any step, and only what changed is written. May import drawn jobs.
"""

from __future__ import annotations

from itertools import pairwise
from math import cos, exp, pi, sqrt

import numpy as np

from twin.frame import F64
from twin.plant.jobs_drawn import ACTIVITY_MAX, Job, Mix

Columns = tuple[F64, F64, F64]  # sm, tensor and dram activity of the truth, [rows] each
BLOCKS = 3  # of the rows of a service; those of all services have a new load in turn
BLOCK_S = 1.0  # from one block to the next
# Load of a service's members about its mean, on a logarithmic scale, and how much of it stays from one turn
# to the next; bursts are shared by all members; source: estimate
LOAD_SIGMA, LOAD_KEPT, BURST_SIGMA, BURST_KEPT = 0.25, 0.7, 0.20, 0.9
LOAD_MEAN_PU, LOAD_MIN_PU = 0.55, 0.03
PEAK_HOUR = 15.0  # of users; source: estimate
DAY_S = 86_400.0


def whole_of(columns: Columns) -> F64 | None:
    """The array [3, rows] that the columns are the rows of; None where each lies alone, as in a copy."""
    whole = columns[0].base
    same = whole is not None and whole is columns[1].base and whole is columns[2].base
    return whole if same and whole.shape == (3, len(columns[0])) else None  # type: ignore[union-attr]


class Swing:
    """Slots [n], each with the rows of a job or none."""

    def __init__(self, n: int) -> None:
        self._base = np.zeros((3, 0))  # [3, rows] activity of compute phases
        self._rows = [(0, 0)] * n
        self._period_s, self._phase_s, self._dip_s = np.ones(n), np.zeros(n), np.zeros(n)
        self._depth = np.zeros((3, n))  # how much of the activity a dip takes
        self._gate = np.zeros(n)  # scales all of it
        self._dipped_s, self._share = np.zeros(n), np.zeros(n)
        self._dirty = np.zeros(n, np.bool_)
        self._until_s = np.nan  # end of the last step

    def shape(self, rows: int) -> None:
        """From now on there are so many rows, all at rest."""
        self._base = np.zeros((3, rows))

    def seat(self, slot: int, job: Job, rows: tuple[int, int], spread: F64) -> None:
        """A job takes these rows; `spread` [rows] scales its activity on each."""
        self._rows[slot] = rows
        for k in range(3):
            self._base[k, rows[0] : rows[1]] = np.minimum(job.activity[k] * spread, ACTIVITY_MAX)
            self._depth[k, slot] = 1.0 - job.dip[k]
        self._period_s[slot], self._phase_s[slot], self._dip_s[slot] = job.period_s, job.phase_s, job.dip_s
        self.gate(slot, 1.0)
        self._until_s = np.nan

    def gate(self, slot: int, level: float) -> None:
        """Scale the activity of a job; 0 = at rest."""
        self._gate[slot], self._dirty[slot] = level, True

    def step(self, columns: Columns, time_s: float, dt_s: float) -> None:
        """Write the mean activities from `time_s` to `time_s + dt_s`."""
        if time_s != self._until_s:
            self._dipped_s = self._dips_s(time_s)
        self._until_s = time_s + dt_s
        dipped_s = self._dips_s(self._until_s)
        share = (dipped_s - self._dipped_s) / dt_s
        self._dipped_s = dipped_s
        self._dirty |= share != self._share
        self._share = share
        moved = np.flatnonzero(self._dirty)
        if not len(moved):
            return
        level = (1.0 - self._depth[:, moved] * share[moved]) * self._gate[moved]
        base, whole = self._base, whole_of(columns)
        if whole is not None:
            for k, slot in enumerate(moved.tolist()):
                a, b = self._rows[slot]
                np.multiply(base[:, a:b], level[:, k : k + 1], out=whole[:, a:b])
        else:
            for slot, levels in zip(moved.tolist(), level.T.tolist(), strict=True):
                a, b = self._rows[slot]
                for k in range(3):
                    np.multiply(base[k, a:b], levels[k], out=columns[k][a:b])
        self._dirty[:] = False

    def _dips_s(self, time_s: float) -> F64:
        """[n] time spent in dips since long ago; a dip is the end of each period."""
        at = time_s + self._phase_s
        cycles = np.floor(at / self._period_s)
        into = at - cycles * self._period_s
        return cycles * self._dip_s + np.maximum(into - (self._period_s - self._dip_s), 0.0)


class Service:
    """Inference: the members of a service have their own load, about one that follows the day and bursts."""

    def __init__(self, mix: Mix, rng: np.random.Generator) -> None:
        self._mix, self._rng = mix, rng
        self._blocks: list[tuple[int, int, int]] = []  # first row, last row, rows per member; of all services
        self._activity: list[tuple[float, float, float]] = []
        self._weight: list[F64] = []
        self._z: list[F64] = []  # [members] of each block
        self._burst = 0.0
        self._next, self._next_s = 0, -np.inf

    def seat(self, job: Job, rows: tuple[int, int], members: int, spread: F64) -> None:
        """A service takes these rows; `spread` [rows] scales the activity of each."""
        width = (rows[1] - rows[0]) // members
        even = width * members == rows[1] - rows[0]
        width, members = (width, members) if even else (1, rows[1] - rows[0])
        cuts = np.unique(np.linspace(0, members, min(BLOCKS, members) + 1).astype(int)).tolist()
        for first, last in pairwise(cuts):
            a, b = rows[0] + first * width, rows[0] + last * width
            self._blocks.append((a, b, width))
            self._activity.append(job.activity)
            self._weight.append(spread[a - rows[0] : b - rows[0]].copy())
            self._z.append(self._rng.standard_normal(last - first))
        self._next_s = -np.inf

    def step(self, columns: Columns, time_s: float, dt_s: float) -> None:
        """Write new loads where their turn has come; all of them at once at the beginning."""
        n = len(self._blocks)
        if not n or time_s + dt_s <= self._next_s:
            return
        first = self._next_s == -np.inf
        due = n if first else int((time_s + dt_s - self._next_s) / BLOCK_S + 1.0)
        turns = min(n, due)
        self._next_s = time_s + dt_s if first else self._next_s + due * BLOCK_S
        self._burst = BURST_KEPT * self._burst + sqrt(1.0 - BURST_KEPT**2) * self._rng.standard_normal()
        hour = self._mix.hour_at_start + time_s / 3600.0
        day = 1.0 + self._mix.diurnal_pu * cos(2.0 * pi * (hour - PEAK_HOUR) / 24.0)
        mean = LOAD_MEAN_PU * day * exp(BURST_SIGMA * self._burst)
        for _ in range(turns):
            self._load(columns, self._next % n, mean)
            self._next = (self._next + 1) % n

    def _load(self, columns: Columns, block: int, mean: float) -> None:
        a, b, width = self._blocks[block]
        z = self._z[block]
        z *= LOAD_KEPT
        z += self._rng.normal(0.0, sqrt(1.0 - LOAD_KEPT**2), len(z))
        load = np.exp(LOAD_SIGMA * z)
        load *= mean
        np.minimum(np.maximum(load, LOAD_MIN_PU, out=load), 1.0, out=load)
        each = np.repeat(load, width) if width > 1 else load
        each = np.minimum(each * self._weight[block], ACTIVITY_MAX)
        for column, part in zip(columns, self._activity[block], strict=True):
            np.multiply(each, part, out=column[a:b])
