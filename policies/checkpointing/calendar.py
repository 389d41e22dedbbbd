"""Save calendar: times of the next hour at which durable saves collide neither on storage nor on feeders.

A save stops a job's GPUs: the draw of its feeders falls as it begins and rises as it ends. Within RAMP_S the
falls of one feeder may add up to its ramp limit, and so may the rises. On a file system saves share the
bandwidth, so that two at once take twice as long (processor sharing); one after the other, the first is done
in half the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64

BIN_S = 5.0  # a job saves between two steps of training, which take seconds. source: estimate
RAMP_S = 10.0  # what rises and falls within it counts together. source: estimate
EARLY_S, LATE_S = 5.0, 10.0  # a save begins so much before or after its time. source: estimate
SPAN = round((RAMP_S + EARLY_S + LATE_S) / BIN_S)  # bins whose changes may fall together
MOST_LOSS_PU = 0.001  # of a job's time that a shifted round may lose where it gains none. source: estimate
PLANNED_PU = 0.75  # of a ramp limit is given away: saves end sooner or later than foreseen. source: estimate
FOLLOWING = 3  # saves of a job that count on its storage: the next one, and those after it
SURE = 1e9  # a second of lost training weighs nothing beside a ramp beyond its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """A future save: seconds from now. `feeders` lose `watts` from its begin for `block_s`.

    Its storage (-1: none that is known) is busy for `busy_s`. `early_s`, `late_s`: how far it may be moved.
    """

    due_s: float
    early_s: float
    late_s: float
    interval_s: float
    block_s: float
    busy_s: float
    storage: int
    feeders: I64
    watts: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSaves:
    """Scheduled saves: columns of PlannedSave [k], with watts as entries of (save, feeder)."""

    at_s: F64
    interval_s: F64
    block_s: F64
    busy_s: F64
    storage: I64
    entry: I64  # place of its save among k
    feeder: I64
    watts: F64


class SaveCalendar:
    """Schedule of saves. `limit_w`: ramp limit of each feeder."""

    def __init__(self, limit_w: F64, n_storage: int, horizon_s: float) -> None:
        self.n_bin = int(horizon_s / BIN_S) + 1
        self._limit_w = limit_w
        self._falls = np.zeros((len(limit_w), self.n_bin + SPAN))
        self._rises = np.zeros((len(limit_w), self.n_bin + SPAN))
        self._busy = np.zeros((n_storage, self.n_bin))

    def add(self, saves: GivenSaves) -> None:
        """Add saves; those beyond the calendar do not count."""
        for table, at_s in ((self._falls, saves.at_s), (self._rises, saves.at_s + saves.block_s)):
            place = np.floor(at_s / BIN_S).astype(np.int64)[saves.entry]
            inside = (place >= 0) & (place < self.n_bin)
            np.add.at(table, (saves.feeder[inside], place[inside]), saves.watts[inside])
        # The saves after it come too, at times that are not given yet: without them a later time always looks
        # emptier, and all intervals would grow
        known = saves.storage >= 0
        storage, n = saves.storage[known], _bins_of(saves.busy_s[known])
        share = saves.busy_s[known] / (n * BIN_S)
        period_s = np.maximum(saves.interval_s + saves.block_s, BIN_S)[known]
        change = np.zeros((len(self._busy), self.n_bin + 1))
        for k in range(FOLLOWING):
            first = np.floor((saves.at_s[known] + k * period_s) / BIN_S).astype(np.int64)
            np.add.at(change, (storage, np.clip(first, 0, self.n_bin)), share)
            np.add.at(change, (storage, np.clip(first + n, 0, self.n_bin)), -share)
        self._busy += np.cumsum(change, axis=1)[:, :-1]

    def place(self, save: PlannedSave, least_s: float) -> float:
        """Schedule a save by `best_s`, and add it."""
        at_s = self.best_s(save, least_s)
        begin, interval, block, busy = np.array([[at_s], [save.interval_s], [save.block_s], [save.busy_s]])
        entry = np.zeros(len(save.feeders), np.int64)
        storage = np.array([save.storage])
        self.add(
            GivenSaves(
                at_s=begin,
                interval_s=interval,
                block_s=block,
                busy_s=busy,
                storage=storage,
                entry=entry,
                feeder=save.feeders,
                watts=save.watts,
            )
        )
        return at_s

    def best_s(self, save: PlannedSave, least_s: float) -> float:
        """Return the begin of least cost, at least `least_s` from now; `due_s` without a gain.

        What counts: falls and rises beyond the ramp limit above all, then training that is lost, as saves
        that share storage take longer, and a shifted save leaves an interval that is not the best one. No
        shift loses more than MOST_LOSS_PU, but where it gains more.
        """
        low = max(save.due_s - save.early_s, least_s)
        at_s = np.arange(np.ceil(low / BIN_S), np.floor((save.due_s + save.late_s) / BIN_S) + 1) * BIN_S
        at_s = at_s[at_s < (self.n_bin - 1) * BIN_S]
        if not len(at_s):
            return save.due_s
        at = (at_s / BIN_S).astype(np.int64)
        beyond = self._beyond(self._falls, save, at)
        beyond = np.maximum(beyond, self._beyond(self._rises, save, at + int(save.block_s / BIN_S)))
        shift_s = at_s - save.due_s
        # Young's loss a round is save (shift / interval)^2 about its best interval
        shifted_s = save.block_s * (shift_s / save.interval_s) ** 2
        met_s = self._met_s(save, at)
        met_at_due_s = met_s[np.argmin(np.abs(shift_s))]
        fair = shifted_s <= np.maximum(MOST_LOSS_PU * save.interval_s, met_at_due_s - met_s)
        if not fair.any():
            return save.due_s
        lost_s = np.where(fair, SURE * beyond + shifted_s + met_s + 1e-6 * np.abs(shift_s), np.inf)
        return float(at_s[np.argmin(lost_s)])

    def _met_s(self, save: PlannedSave, at: I64) -> F64:
        """Return the training lost because the save overlaps others on its storage, s [k]."""
        if save.storage < 0:
            return np.zeros(len(at))
        n = int(_bins_of(np.array([save.busy_s]))[0])
        busy = np.concatenate([[0.0], np.cumsum(self._busy[save.storage])])
        # Of what it takes, the share of its bins that others are busy in; only a blocking save loses by it
        out: F64 = save.block_s * (busy[np.minimum(at + n, self.n_bin)] - busy[at]) / n
        return out

    def _beyond(self, table: F64, save: PlannedSave, at: I64) -> F64:
        """Return the largest excess of a window with this bin over a feeder's limit, as a share [k]."""
        out = np.zeros(len(at))
        for feeder, watt in zip(save.feeders.tolist(), save.watts.tolist(), strict=True):
            # Nobody else may move a job that is beyond the limit by itself: it then stands alone
            limit_w = max(PLANNED_PU * float(self._limit_w[feeder]), watt)
            total = np.concatenate([[0.0], np.cumsum(table[feeder])])
            window = total[SPAN:] - total[:-SPAN]  # from each bin on, SPAN bins
            most = np.array(window)
            for back in range(1, SPAN):
                most[back:] = np.maximum(most[back:], window[:-back])
            there = most[np.minimum(at, len(most) - 1)]
            out = np.maximum(out, np.maximum(there + watt - limit_w, 0.0) / max(limit_w, 1.0))
        return out


def _bins_of(busy_s: F64) -> I64:
    """Return the bins in which saves may run, including late begins [k]."""
    return np.asarray((busy_s + LATE_S) // BIN_S, np.int64) + 1
