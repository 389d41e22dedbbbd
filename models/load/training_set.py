"""Training sets of learned forecasters: past cases; the later ones validate the fit.

A horizon's cases are even in time. The last part of them judges what was learned from the rest, never a
part by chance: cases that are close in time are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.load.features import (
    OriginFeatures,
    TrainingCases,
    all_cases,
    columns_at,
    known_names,
    names,
    present_features,
    sample,
    targets,
)
from models.load.forecaster import DAY_S, WEEK_S, ForecastGrid
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64, ContractError

# source: estimate for all of these
LEAST_CASES = 150  # below, nothing is learned
LEAST_PASTS = 4  # rows of past for each row of horizon
LATER_SHARE = 0.25  # of the cases judge what the others taught
LEAST_JUDGES = 40
SHRINKS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEAD_SHARES = (0.0, 0.5, 0.75, 0.9, 0.97)
LEAST_GAIN = 0.002  # of the error of "no change", to forecast a change at all
WIDEN = 0.5  # of the range seen, by which a forecast may leave it
BLOCK_CASES = 16_384


@dataclass(frozen=True)
class TrainingSet:
    """Cases of one horizon: x [n_case, n_column], y the change over the scale [n_case], and their weight.

    Weights make an error count in a series' own unit over its mean scale. `early` cases end a horizon before
    the first `later` one begins.
    """

    horizon: int
    x: F64
    y: F64
    weight: F64
    row: I64
    early: NDArray[np.bool_]
    later: NDArray[np.bool_]
    n_apart: float  # how many of the cases do not overlap in time


def training_sets(past: SeriesPanel, grid: ForecastGrid, most: int) -> Iterator[TrainingSet]:
    """A lesson for each horizon of which the past knows enough."""
    n_origin = past.n_time - grid.horizons[0]
    if n_origin < 1 or past.n < 1:
        return
    cases = sample(n_origin, past.n, most)
    seen = present_features(past, cases)
    weight = _weights(cases, seen.scale, past.n)
    for horizon in grid.horizons:
        if horizon * LEAST_PASTS > past.n_time:
            continue
        y = targets(past, cases, seen, horizon)
        use = np.isfinite(y)
        if np.count_nonzero(use) < LEAST_CASES:
            continue
        some = TrainingCases(cases.row[use], cases.series[use])
        x = columns_at(
            past, some, OriginFeatures(seen.last[use], seen.scale[use], seen.columns[:, use]), grid, horizon
        )
        x = _without_unseen_clock(x, past, grid)
        row = some.row
        split = row[int((1 - LATER_SHARE) * len(row))]
        overlap = max(1.0, horizon * len(row) / past.n / (row[-1] - row[0] + 1))
        yield TrainingSet(
            horizon,
            x.T,
            y[use],
            weight[use],
            row,
            row <= split - horizon,
            row > split,
            len(row) / overlap,
        )


def _weights(cases: TrainingCases, scale: F64, n: int) -> F64:
    known = np.where(np.isfinite(scale), scale, 0.0)
    total = np.bincount(cases.series, known, n)
    count = np.bincount(cases.series, known > 0, n)
    usual = (total / np.maximum(count, 1))[cases.series]
    weight: F64 = np.clip(known / np.where(usual > 0, usual, 1.0), 0.1, 10.0)
    return weight


def _without_unseen_clock(x: F64, past: SeriesPanel, grid: ForecastGrid) -> F64:
    """Hours of which one day was seen, and days of less than a week, would only be names of instants."""
    names_of = names(grid, known_names(past))
    span_s = past.n_time * past.step_s
    if span_s < 2 * DAY_S or grid.step_s > DAY_S / 4:
        for name in ("hour", "hour_sin", "hour_cos"):
            x[names_of.index(name)] = 0.0
    if span_s < WEEK_S + DAY_S or grid.step_s > DAY_S:
        x[names_of.index("weekday")] = 0.0
    if span_s < 12 * 3600 or grid.step_s > 900:
        x[names_of.index("minute")] = 0.0
    return x


def error(change: F64, lesson: TrainingSet, where: NDArray[np.bool_]) -> float:
    """The mean absolute error of these changes over the scale."""
    return float(np.mean(np.abs(change - lesson.y[where]) * lesson.weight[where]))


def fit_belief(change: F64, lesson: TrainingSet) -> F64:
    """(how much of a change is believed, the smallest that is) by the later cases. [2]; 0, 0: none."""
    best, chosen = error(np.zeros(len(change)), lesson, lesson.later) * (1 - LEAST_GAIN), np.zeros(2)
    for share in DEAD_SHARES:
        dead = float(np.quantile(np.abs(change), share)) if share else 0.0
        for shrink in SHRINKS[1:]:
            tried = np.array([shrink, dead])
            found = error(believed_change(change, tried), lesson, lesson.later)
            if found < best:
                best, chosen = found, tried
    return chosen


def believed_change(change: F64, belief: F64) -> F64:
    kept: F64 = np.where(np.abs(change) >= belief[1], belief[0] * change, 0.0)
    return kept


def known_bytes(past: SeriesPanel) -> NDArray[np.uint8]:
    """Return the names of the outlooks known at the fit, kept among parameters; `known_signals` reads
    them."""
    return np.frombuffer("\n".join(known_names(past)).encode(), np.uint8)


def known_signals(parameters: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Raises ContractError."""
    known = parameters.get("known")
    if known is None or known.dtype != np.uint8 or known.ndim != 1:
        raise ContractError("known: expected uint8 [n]")
    try:
        text = known.tobytes().decode()
    except UnicodeDecodeError as fault:
        raise ContractError("known: expected text") from fault
    return tuple(text.split("\n")) if text else ()


def forecasts(
    panel: SeriesPanel,
    origins: I64,
    grid: ForecastGrid,
    changes: Mapping[int, Callable[[F64], F64]],
    n_said: int,
) -> F64:
    """Values from what each horizon's rule says of columns [n_column, n_case]: changes [n_said, n_case].

    [n_said, n_horizon, n_origin, n]; NaN for a horizon without a rule. A case in which nothing moved for as
    long as one can see stays at its last value.
    """
    out = np.full((n_said, len(grid.horizons), len(origins), panel.n), np.nan)
    at = {name: k for k, name in enumerate(names(grid, known_names(panel)))}
    if not panel.n or not changes:
        return out
    each = max(1, BLOCK_CASES // max(1, panel.n))
    for first in range(0, len(origins), each):
        some = origins[first : first + each]
        view = _View(panel, some, grid)
        for place, horizon in enumerate(grid.horizons):
            if horizon in changes:
                columns, seen = view.columns(horizon), view.seen
                value = seen.last + clip_to_seen(changes[horizon](columns), columns, at) * seen.scale
                value = np.where(seen.scale == 0, seen.last, value)
                out[:, place, first : first + each] = value.reshape(n_said, len(some), panel.n)
    return out


_Held = tuple[object, Mapping[str, F64], dict[int, F64], OriginFeatures]


class _View:
    """Features from some origins of a panel, kept in its memo for the next forecaster."""

    def __init__(self, panel: SeriesPanel, origins: I64, grid: ForecastGrid) -> None:
        self.panel, self.cases, self.grid = panel, all_cases(origins, panel.n), grid
        # The start of a panel matters too; values known ahead may be published anew for the same rows.
        what = panel.start_ns, panel.n_time, grid, tuple(origins.tolist())
        held: _Held | None = panel.memo.get(_View)
        if held is None or held[0] != what or held[1] is not panel.known:
            held = what, panel.known, {}, present_features(panel, self.cases)
            panel.memo[_View] = held
        self._columns, self.seen = held[2:]

    def columns(self, horizon: int) -> F64:
        """As `columns_at`; not to be written to."""
        found = self._columns.get(horizon)
        if found is None:
            found = columns_at(self.panel, self.cases, self.seen, self.grid, horizon)
            found.flags.writeable = False
            self._columns[horizon] = found
        return found


def clip_to_seen(change: F64, columns: F64, at: dict[str, int]) -> F64:
    """No further than half the range seen beyond it, and not below zero where nothing was."""
    low = np.fmin(np.fmin(columns[at["lowest_240"]], columns[at["far_lowest"]]), 0.0)
    high = np.fmax(np.fmax(columns[at["highest_240"]], columns[at["far_highest"]]), 0.0)
    more = WIDEN * (high - low)
    zero = -columns[at["level"]]
    floor = np.where(low >= zero, np.maximum(low - more, zero), low - more)
    kept: F64 = np.clip(change, floor, high + more)
    return kept
