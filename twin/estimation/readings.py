"""Readings: the current values of signals in one tick as float64, and lags that follow them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twin import kernels
from twin.catalogue import F64, I64, NS, TABLES
from twin.telemetry import GOOD, OWN, EntityState, Sizes, State, column

UNIFORM = 12.0**-0.5  # 1 sigma of an error that is anywhere within a step, over the step
MULTIPLE_TOLERANCE = 0.02  # of a step: float32 of the largest signals
LEAST_STEP_PU = 1e-4  # of a reading: below, a step drowns in any noise; source: estimate
LEAST_GAP = 0.5  # ticks without an aim, that a lag notices: instants are rounded
LEAST_UNKNOWN = 1e-3  # of a level: below, it is known


class Steps(EntityState):
    """Resolution of k signals of a table: the largest step of which all readings are multiples (Euclid's
    algorithm over their changes); 0 where there is none to speak of.
    """

    step: F64 = column(OWN, "f8", np.inf, lead=("k",))  # inf: nothing has changed yet
    last: F64 = column(OWN, "f8", np.nan, lead=("k",))

    def __init__(self, k: int, sizes: Sizes, table: str) -> None:
        super().__init__({"k": k, table: sizes[table]}, table)

    def follow(self, values: F64) -> None:
        """Take in the readings of a tick [k, n], NaN for none."""
        kernels.follow_steps(values, self.step, self.last, MULTIPLE_TOLERANCE, LEAST_STEP_PU)

    def sigma(self) -> F64:
        """Return 1 sigma of a reading from its resolution [k, n]."""
        return np.where(np.isfinite(self.step), UNIFORM * self.step, 0.0)


class Latest:
    """Readings of some signals of one table at one tick; `self[name]` [n], NaN where there is no good one."""

    def __init__(self, table: str, names: Sequence[str]) -> None:
        spec = TABLES[table]
        self.table = table
        self.at = {name: i for i, name in enumerate(names)}
        self._rows = np.array([spec.by_name[name].row for name in names], np.int32)
        self._each_row: list[int] = self._rows.tolist()
        self._values, self._received_ns = np.zeros((0, 0)), np.zeros((0, 0), np.int64)
        self._at_once = False
        self._step_sigma = np.zeros((0, 0))

    def take(self, state: State, steps: Steps | None = None) -> None:
        """Take the values of the state as it is now; `steps` follow their resolution."""
        column = state.tables[self.table]
        self._values = column.value[self._rows].astype(np.float64)
        groups = column.partition.group_of_row[self._rows]
        self._at_once = bool((groups == groups[0]).all())
        self._received_ns = column.t_ns[groups]
        bad = column.quality[self._rows] != GOOD
        for k, row in enumerate(self._each_row):
            if (timely := column.timely(row, state.now_ns)) is not None:
                bad[k] |= ~timely
        if bad.any():
            self._values[bad] = np.nan
        if steps is not None:
            steps.follow(self._values)
            self._step_sigma = steps.sigma()

    def step_sigma(self, name: str) -> F64:
        """Return 1 sigma of a signal's readings from their resolution [n]."""
        out: F64 = self._step_sigma[self.at[name]]
        return out

    def __getitem__(self, name: str) -> F64:
        values: F64 = self._values[self.at[name]]
        return values

    def received_ns(self, *names: str) -> I64:
        """Return the instant of the oldest of these readings [n]."""
        oldest: I64 = self._received_ns[self.at[names[0]]]
        if self._at_once:  # all came together
            return oldest
        for name in names[1:]:
            oldest = np.minimum(oldest, self._received_ns[self.at[name]])
        return oldest


class Readings:
    """A state as the estimator reads it in one tick; arrays that it gives are shared: do not write."""

    def __init__(self, state: State) -> None:
        self.state, self.now_ns = state, state.now_ns
        self._good: dict[tuple[str, str], tuple[F64, I64]] = {}

    def good(self, table: str, name: str) -> tuple[F64, I64]:
        """Return (current values [n], NaN elsewhere; instants of the readings [n])."""
        key = (table, name)
        if key not in self._good:
            column, signal = self.state.tables[table], TABLES[table].by_name[name]
            value = column.value[signal.row].astype(np.float64)
            if not column.all_current(signal, self.now_ns):
                np.copyto(value, np.nan, where=~column.current(signal, self.now_ns))
            self._good[key] = value, column.received_ns(signal)
        return self._good[key]

    def lately(self, table: str, name: str) -> F64:
        """Values [n] of a signal that moves slowly or stays as it is set, such as a cap: those of the last
        good readings until they are stale; NaN elsewhere.
        """
        now, _ = self.good(table, name)
        column, signal = self.state.tables[table], TABLES[table].by_name[name]
        if column.all_current(signal, self.now_ns):
            return now
        return np.where(column.lately_good(signal, self.now_ns), column.value[signal.row], now)

    def known(self, table: str, name: str) -> bool:
        """Return True if any entity has a reading that was not called bad, however old."""
        column = self.state.tables[table]
        return bool(column.bad_count[TABLES[table].by_name[name].row] < column.n)


class Lag(EntityState):
    """Free-running first-order models, k of them for each of n entities.

    Nobody knows the aim of a time that was not seen, as between an end and a restart: a level then rests in
    part on a guess, that the aim was what it is now. This part is `unknown`, and fades as fast as the lag.
    """

    level: F64 = column(OWN, "f8", np.nan, lead=("k",))
    known_ns: I64 = column(OWN, "i8", lead=("k",))
    unknown: F64 = column(OWN, "f8", 1.0, lead=("k",))

    def __init__(self, k: int, sizes: Sizes, table: str) -> None:
        super().__init__({"k": k, table: sizes[table]}, table)

    def toward(self, aim: F64, share: F64, now: tuple[int, float], unknown: F64 | float = 0.0) -> F64:
        """Move by `share` of the distance to `aim` (both [k, n]); NaN for an unknown aim.

        `now`: the instant and the seconds of this step; `unknown`: such a part of the aim.
        """
        now_ns, dt_s = now
        known = np.isfinite(aim)
        unseen = (now_ns - self.known_ns) / (dt_s * NS) - 1.0
        if (gap := known & (unseen > LEAST_GAP)).any():
            left = np.where(gap & np.isfinite(self.level), (1.0 - share) ** np.maximum(unseen, 0.0), 0.0)
            np.copyto(self.level, aim + filled(self.level - aim) * left, where=gap)
            np.copyto(self.unknown, 1.0 - (1.0 - self.unknown) * left, where=gap)
        moved, shares = np.empty_like(aim), np.ascontiguousarray(np.broadcast_to(share, aim.shape))
        guessed = np.ascontiguousarray(np.broadcast_to(unknown, aim.shape))
        columns = self.level, self.known_ns, self.unknown
        kernels.move_lags(aim, shares, guessed, *columns, now_ns, LEAST_UNKNOWN, moved)
        return moved


def share_of(dt_s: float, tau_s: F64) -> F64:
    """Return the progress of a first-order lag in a step: exact for a constant aim."""
    return np.asarray(-np.expm1(-dt_s / tau_s), np.float64)


def filled(values: F64) -> F64:
    """Return `values` with 0 in place of NaN."""
    kernels.fill_nan(values)
    return values


def joint(*sigmas: F64) -> F64:
    """Return 1 sigma of a sum of independent errors [n]; unknown errors count as 0."""
    total = np.empty(max(map(len, sigmas)))
    kernels.joint(total, *(np.full(len(total), s[0]) if len(s) == 1 else s for s in sigmas))
    return total
