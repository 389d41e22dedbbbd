"""One horizon's forecast, online: experts' points become one median with bands that hold, series by series.

The daemon and the backtest both use exactly this. An outcome teaches once its row has come, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.half_widths import LEAST_SPANS
from models.load.bands import N_KIND, N_LEVEL, Bands, marginal_quantiles
from models.load.combination import Combination, independent_share, middle_half
from models.load.conformal import Conformal
from models.load.forecaster import MEDIAN
from models.load.quantisation import snap
from models.load.schedule import EXPERTS as OUTSIDE
from twin.catalogue import F32, F64, I32, I64, ContractError

KEEP = 0.5 ** (1 / 2000)  # of a loss after one more. source: tuned on synthetic series; flat from 500 up
# Power of the independent share that counts for experts' regrets: they correlate less from one forecast to
# the next than the errors do, of which most is common to all. source: tuned on synthetic series and weather;
# flat down to 0.5
REGRET_POWER = 0.75
LAST = (
    3.0  # how much more the last value is trusted at first than any other. source: tuned on synthetic series
)
# A change of one row beyond so many usual ones is unusual: the bands of what comes next then have a width of
# their own on top of that of all other rows, that finds its place in so many outcomes. source: chosen on
# synthetic series (ramps, spikes, bursts, jobs); 3 instead of 4, or 25 instead of 50, cost pinball loss there
UNUSUAL, AFTER_MEMORY = 4.0, 50.0
MARGINAL = 8  # forecasts between two looks at the recent past. source: estimate; it moves slowly
STILL = 8  # outcomes without any change after which a band has no width. source: estimate
LEAST = 1e-30  # a size of changes below this counts as none: single precision ends at 1e-38
SHARED = ("row", "tally", "band_age")  # what is not one for each series
WRITTEN = (
    "row",
    "tally",
    "last",
    "range",
    "band_age",
    "log_width",
    "after_width",
)  # arrays that are written to in place


def stride(horizon: int) -> int:
    """Rows between two forecasts that are judged: at most 31 wait for their outcome at a time."""
    return max(1, horizon // 16)


@dataclass(frozen=True)
class Issue:
    """Data known at the row of issue, for n series.

    points [n_expert, n]: what the experts say, NaN sleeps. last [n]: the last known value. scale [n]: local
    size of changes over this horizon, > 0 or NaN. quantum [n]: step of the series' lattice, 0 if continuous.
    low, high [n]: 5 and 95 % quantiles of boosting. recent [n_recent, n]: a sample of the recent past; or
    marginal [n_level, n], its quantiles, where who issues has them already. extremes [2, n]: lowest and
    highest value since the forecast before, where not every row is forecast from. move [n]: change from the
    row before, NaN where one of both is a gap.
    """

    points: F64
    last: F64
    scale: F64
    quantum: F64
    low: F64 | None = None
    high: F64 | None = None
    recent: F64 | None = None
    marginal: F64 | None = None
    extremes: F64 | None = None
    move: F64 | None = None


def with_expert(memory: Mapping[str, np.ndarray], place: int) -> dict[str, np.ndarray]:
    """Return `memory` of aggregations as if one more expert at this place had slept until now.

    Keys may have prefixes of their own.
    """
    out = dict(memory)
    for key, array in memory.items():
        name = key.rpartition("/")[2]
        if name in ("weights", "point_regret", "point_square", "point_peak"):
            out[key] = np.insert(array, place, 0.0, axis=0)
        elif name.isdigit() and "said" in key.split("/"):
            out[key] = np.insert(array, place, np.nan, axis=0)
    return out


class ExpertAggregation:
    """Combines, bands and calibrates the forecasts `horizon` rows ahead of n series.

    Forecasts that lie at least `stride` rows apart are remembered and judged; those between only answer.
    Raises ContractError for a horizon or stride below 1 row, or no experts.
    """

    def __init__(self, horizon: int, n: int, experts: tuple[str, ...], stride: int = 1) -> None:
        if horizon < 1 or stride < 1 or not experts:
            raise ContractError(
                f"expected a horizon, a stride >= 1 and experts, got {horizon}, {stride}, {experts}"
            )
        self.horizon, self.experts, self.stride = horizon, experts, stride
        self._begin(n)

    def _begin(self, n: int) -> None:
        """Nothing is known of any series."""
        self.n, k = n, len(self.experts)
        self._overlap = overlap = -(-self.horizon // self.stride)
        share = independent_share(overlap)
        prior = np.array([LAST if name == "last" else 1.0 for name in self.experts])
        # Those that are given from outside count beside the others: without them, the same comes out
        read = np.array([name not in OUTSIDE for name in self.experts])
        prior /= prior[read].sum() if read.any() else prior.sum()
        self._combination = Combination(n, prior, share**REGRET_POWER, KEEP)
        self._bands = Bands(n, share, KEEP)
        self._conformal = Conformal(n, share)
        self._after_move = Conformal(n, 1.0, AFTER_MEMORY)  # beside it; unusual moves lie apart
        self._row: I64 = np.full(overlap + 1, -1, np.int64)  # rows of what waits for its outcome, -1 free
        self._tally = np.array([0, -self.stride])  # forecasts that were remembered, and the row of the newest
        # Waiting forecasts: the last value, and all else as differences from it: single precision suffices.
        self._last = np.full((len(self._row), n), np.nan)
        nothing: F32 = np.full((k + 6 + (N_KIND + 2) * N_LEVEL, n), np.nan, np.float32)
        self._said = [nothing] * len(self._row)  # replaced, never written to
        self._weights = np.zeros((k, n))
        self._heard = np.zeros(n, np.int64)  # outcomes
        self.largest = np.zeros((2, n))  # way of an outcome below and above its median yet
        self._range = np.full((2, n), np.nan)  # lowest and highest value yet
        self._marginal = np.full((N_LEVEL, n), np.nan)

    def learn(self, row: int, actual: F64) -> None:
        """Learn the value at `row`: judges the forecasts issued `horizon` rows before.

        actual [n]; NaN is a gap, of which nothing is learned.
        """
        waiting = np.flatnonzero(self._row == row - self.horizon)
        if row < self.horizon or not len(waiting):
            return
        slot, k = waiting[0], len(self.experts)
        self._row[slot] = -1
        # Rounded like what was said, so that an outcome that is exactly as said is seen to be.
        change = (actual - self._last[slot]).astype(np.float32).astype(np.float64)
        held = self._said[slot].astype(np.float64)
        points, said, raw, spreads = held[:k], held[k], held[k + 1], held[k + 2 : k + 5]
        curves = held[k + 5 : -1].reshape(N_KIND + 2, N_LEVEL, self.n)
        moved = held[-1] > 0.0
        # Slope of the absolute loss times the way to the expert's point: what moving there would have won.
        regret = np.sign(raw - change) * (raw - points)
        regret[~np.isfinite(regret)] = 0.0
        self._combination.judge(regret, np.isfinite(change))
        self._bands.learn(change, said, spreads, curves[:N_KIND], curves[N_KIND])
        self._conformal.learn(np.where(moved, np.nan, change), curves[N_KIND + 1])
        if moved.any():
            self._after_move.learn(np.where(moved, change, np.nan), curves[N_KIND + 1])
        self._heard = self._heard + np.isfinite(change)
        error = change - curves[N_KIND + 1][MEDIAN]
        self.largest = np.fmax(self.largest, [-error, error])

    @property
    def spans(self) -> I64:
        """Return the number of whole spans of the horizon's length, side by side, with a known outcome
        [n]."""
        return 1 + (self._heard - 1) // self._overlap

    @property
    def lowest(self) -> F64:
        """The lowest value yet [n]."""
        lowest: F64 = self._range[0]
        return lowest

    def awaits_row(self, series: int, row: int) -> int | None:
        """Return the row that completes LEAST_SPANS of a series that reports from `row` on; None: they are
        complete."""
        missing = (LEAST_SPANS - 1) * self._overlap + 1 - int(self._heard[series])
        if missing <= 0:
            return None
        waiting = self._row[(self._row >= 0) & np.isfinite(self._last[:, series])]
        return int(waiting.min(initial=row)) + self.horizon + (missing - 1) * self.stride

    @property
    def looks(self) -> bool:
        """True if the next forecast looks at the recent past."""
        return bool(self._tally[0] < MARGINAL or self._tally[0] % MARGINAL == 0)

    def issue(self, row: int, issue: Issue) -> F64:
        """Quantiles [n, n_level] at LEVELS of the value `horizon` rows after `row`.

        NaN where no expert or no last value is; bands are NaN until a change was seen, or STILL outcomes
        without one.
        """
        if issue.points.shape != (len(self.experts), self.n):
            raise ContractError(f"points: expected {(len(self.experts), self.n)}, got {issue.points.shape}")
        last = issue.last
        given = issue.marginal
        if given is None and issue.recent is not None and self.looks:
            given = marginal_quantiles(issue.recent)
        if given is not None and self.looks:
            self._marginal = given
            self._range[0] = np.fmin(self._range[0], self._marginal[0])
            self._range[1] = np.fmax(self._range[1], self._marginal[-1])
        if issue.extremes is not None:
            self._range[0] = np.fmin(self._range[0], issue.extremes[0])
            self._range[1] = np.fmax(self._range[1], issue.extremes[1])
        lowest, highest = np.fmin(self._range[0], last), np.fmax(self._range[1], last)
        self._range[0], self._range[1] = lowest, highest
        # An expert that leaves what was ever seen by more than its width is out of its depth.
        reach = highest - lowest
        floor, ceiling = lowest - reach - last, highest + reach - last
        points = np.minimum(np.maximum(issue.points - last, floor), ceiling)
        self._weights = self._combination.weights(np.isfinite(points))
        raw = middle_half(points, self._weights)
        zero = 0.0 * last
        said = snap(raw, zero, issue.quantum)
        low = None if issue.low is None else np.maximum(issue.low - last, floor)
        high = None if issue.high is None else np.minimum(issue.high - last, ceiling)
        local = np.where(issue.scale > LEAST, issue.scale, np.nan)
        unit = np.where(np.isnan(self._bands.unit), local, self._bands.unit)
        spreads = self._bands.spreads(said, local, low, high)
        curves = self._bands.curves(said, unit, spreads, self._marginal - last)
        mixed = self._bands.mixed(curves)
        moved = np.zeros(self.n, np.bool_)
        if issue.move is not None:
            moved = np.abs(issue.move) > UNUSUAL * local
        wider = self._after_move.log_width * moved if moved.any() else 0.0
        out = snap(self._conformal.moved(said, mixed, issue.quantum, wider), zero, issue.quantum)
        # A series that was at zero and never below it will not go below it.
        out = np.where(lowest == 0.0, np.maximum(out, -last), out)
        out[MEDIAN] = np.where(lowest == 0.0, np.maximum(said, -last), said)
        if row - self._tally[1] >= self.stride:
            self._bands.unit = unit  # by what is judged alone: those between only answer
            self._remember(
                row, last, (points, said, raw, spreads, curves, mixed, out, moved.astype(np.float64))
            )
        # A series that stood still in every outcome so far is expected to stand still.
        still = np.isnan(out) & (self._heard >= STILL)
        return (np.where(still, said, out) + last).T

    def _remember(self, row: int, last: F64, parts: tuple[F64, ...]) -> None:
        """Keep a forecast until its outcome arrives, in place of the oldest."""
        slot = int(np.argmin(self._row))
        self._row[slot], self._last[slot] = row, last
        self._tally[:] = self._tally[0] + 1, row
        rows = [part.reshape(-1, self.n) for part in parts]
        self._said[slot] = np.concatenate(rows, dtype=np.float32, casting="same_kind")

    def weights(self) -> F64:
        """Weights [n, n_expert] in the last forecast; they sum to 1; all are 0 where no expert has one."""
        return self._weights.T

    def memory(self) -> dict[str, np.ndarray]:
        """All that is remembered, as arrays of fixed size whose last axis is mostly the series; exact.

        No array is written to later: large ones are not copied, but replaced when they change.
        """
        out: dict[str, np.ndarray] = {}
        for name, part, field in self._state():
            out[name] = np.array(getattr(part, field)) if name in WRITTEN else getattr(part, field)
        out["band_counts"] = self._bands.lend()
        return out | {f"said/{slot}": said for slot, said in enumerate(self._said)}

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave. Raises ContractError if it is of another shape."""
        memory = self._completed(memory)
        for name, mine in self.memory().items():
            given = memory.get(name)
            if given is None or given.shape != mine.shape or given.dtype != mine.dtype:
                raise ContractError(f"{name}: expected {mine.dtype} {mine.shape}")
        for name, part, field in self._state():
            setattr(part, field, np.array(memory[name]))
        self._said = [np.array(memory[f"said/{slot}"]) for slot in range(len(self._said))]

    def _completed(self, memory: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Complete what `memory` gave before unusual moves had a width of their own, as if none had been."""
        out = dict(memory)
        if "after_width" not in out:
            out["after_width"] = np.zeros_like(self._after_move.log_width)
            for slot, mine in enumerate(self._said):
                said = out.get(f"said/{slot}", mine)
                if said.shape == (len(mine) - 1, self.n):
                    out[f"said/{slot}"] = np.vstack([said, np.zeros((1, self.n), np.float32)])
        return out

    def remap(self, old_of_new: I32) -> None:
        """Move the learned state to new places [n_new]; -1 starts from the initial state."""
        old = self.memory()
        self._begin(len(old_of_new))
        kept = np.flatnonzero(old_of_new >= 0)
        for slot, said in enumerate(self._said):
            moved = said.copy()
            moved[:, kept] = old[f"said/{slot}"][:, old_of_new[kept]]
            self._said[slot] = moved
        for name, part, field in self._state():
            if name in SHARED:
                setattr(part, field, old[name])
            else:
                getattr(part, field)[..., kept] = old[name][..., old_of_new[kept]]

    def _state(self) -> list[tuple[str, object, str]]:
        """(name in memory, part, attribute) of all that is remembered."""
        own = ("row", "tally", "last", "weights", "range", "marginal", "heard")
        return [
            *((name, self, f"_{name}") for name in own),
            *((f"point_{name}", self._combination, name) for name in ("regret", "square", "peak")),
            *((f"mix_{name}", self._bands.mix, name) for name in ("regret", "square", "peak")),
            *((f"band_{name}", self._bands, name) for name in ("counts", "table", "unit", "weights", "age")),
            ("log_width", self._conformal, "log_width"),
            ("after_width", self._after_move, "log_width"),
            ("largest", self, "largest"),
        ]
