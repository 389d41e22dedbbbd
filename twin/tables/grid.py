"""Regular grid of rows at any instants: its step, its bins, and the meaning of an empty bin.

Rows that come once a step lie on the nearest point of the grid, so that a clock that jitters loses none. All
others are put into bins [t, t + step) that begin at local midnight of the first day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from connectors.files import instant_text, span_text, zone_of
from twin.catalogue import F64, I64, NS, ConfigError

AGGREGATES = ("mean", "sum", "last", "max", "count")
MAX_GRID_ROWS = 5_000_000  # source: estimate; a minute's step for nine years, 40 MB a column
# source: estimate; less than this share of the differences is no step but chance
_LEAST_SHARE = 0.2
_JITTER = 0.25  # source: estimate; a clock is this share of a step off at most
_ALONE = 0.95  # source: estimate; this share of rows has a point of the grid of its own
_REGULAR = 0.9  # source: estimate; this share of differences is whole steps
_MOST_GAPS = 3  # named one by one


@dataclass(frozen=True)
class SeriesColumn:
    """Rows of one series in order of time: `t_ns` [n], `values` [n], NaN where a row has no value."""

    name: str
    t_ns: I64
    values: F64


@dataclass(frozen=True)
class Spacing:
    """The most common difference between instants, 0 if there is none; `is_regular`: one is due each step."""

    step_ns: int
    is_regular: bool = False


def spacing(t_ns: I64) -> Spacing:
    """Of instants in order. Where clocks jitter: the middle difference, if half are close to it."""
    apart = np.diff(t_ns)
    positive = apart[apart > 0]
    if not len(positive):
        return Spacing(0)
    steps, counts = np.unique(positive, return_counts=True)
    step_ns, share = int(steps[counts.argmax()]), counts.max() / len(positive)
    fits = np.mean(positive % step_ns == 0) >= _REGULAR  # a gap is several steps
    if share >= 0.5 or (share >= _LEAST_SHARE and fits):
        return Spacing(step_ns, bool(fits and len(positive) >= _REGULAR * len(apart)))
    middle = float(np.median(positive))
    digit_ns = max(1, 10 ** (math.floor(math.log10(middle)) - 1))
    step_ns = round(middle / digit_ns) * digit_ns
    close = np.abs(positive - step_ns) <= _JITTER * step_ns
    return Spacing(step_ns if close.mean() >= 0.5 else 0)


@dataclass(frozen=True)
class SampleGrid:
    """Points `origin_ns + row * step_ns`. `is_sampled`: rows count for the nearest, else for their bin."""

    origin_ns: int
    step_ns: int
    is_sampled: bool

    def rows(self, t_ns: I64) -> I64:
        """The row of the grid that each instant counts for, int64 [n]; negative before the origin."""
        return (t_ns - self.origin_ns + (self.step_ns // 2 if self.is_sampled else 0)) // self.step_ns

    def t_ns(self, row: int) -> int:
        return self.origin_ns + row * self.step_ns


def choose(
    columns: Sequence[SeriesColumn], step_s: float | None, aggregate: str | None, zone: str, notes: list[str]
) -> tuple[SampleGrid, list[Spacing]]:
    """The grid for these columns and the spacing of each. ConfigError if it needs a step to be given."""
    found = [spacing(c.t_ns) for c in columns]
    natural = max(s.step_ns for s in found)
    if step_s is None and aggregate == "count":
        raise ConfigError(
            "step: counting needs the length of a bin: give --step, such as --step 60 for a minute"
        )
    if step_s is None and not all(s.step_ns for s in found):
        raise ConfigError(f"{columns[0].name}: {_irregular(columns)}: give --step (seconds)")
    step_ns = natural if step_s is None else round(step_s * NS)
    first_ns = min(int(c.t_ns[0]) for c in columns)
    sampled = SampleGrid(_phase(np.concatenate([c.t_ns for c in columns]), step_ns), step_ns, True)
    if aggregate != "count" and all(
        _once_a_step(c.t_ns, s, sampled) for c, s in zip(columns, found, strict=True)
    ):
        return sampled, found
    if natural and all(s.step_ns > step_ns for s in found):
        often = span_text(natural / NS)
        notes.append(f"rows come every {often}, the step is {span_text(step_ns / NS)}: most of it is gaps")
    how = aggregate or "mean"
    notes.append(f"put into bins of {span_text(step_ns / NS)}: the {how} of each, at the time when it begins")
    moment = datetime.fromtimestamp(first_ns // NS, zone_of(zone))
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    return SampleGrid(int((midnight - _epoch()) / timedelta(seconds=1)) * NS, step_ns, False), found


def _epoch() -> datetime:
    return datetime.fromtimestamp(0, zone_of("UTC"))


def _once_a_step(t_ns: I64, found: Spacing, grid: SampleGrid) -> bool:
    """True if instants (in order) come about once a step, hardly two at one point of the grid."""
    t_ns = np.unique(t_ns)
    alone = len(np.unique(grid.rows(t_ns))) >= _ALONE * len(t_ns)
    return alone and abs(found.step_ns - grid.step_ns) <= _JITTER * grid.step_ns


def _irregular(columns: Sequence[SeriesColumn]) -> str:
    apart_s = np.concatenate([np.diff(np.unique(c.t_ns)) for c in columns]) / NS
    if not len(apart_s):
        return "one instant only: no step to be found"
    low, high = span_text(float(apart_s.min())), span_text(float(apart_s.max()))
    return f"the times are irregular ({low} to {high} apart), so no step can be found"


def _phase(t_ns: I64, step_ns: int) -> int:
    """Offset of the instants within a step: the most common place, else the mean on a circle."""
    places, counts = np.unique(t_ns % step_ns, return_counts=True)
    if counts.max() * 2 >= len(t_ns):
        return int(places[counts.argmax()])
    turn = places * (2 * np.pi / step_ns)
    mean = math.atan2(float(np.sin(turn) @ counts), float(np.cos(turn) @ counts))
    return round(mean / (2 * np.pi) * step_ns) % step_ns


def once(column: SeriesColumn, is_sampled: bool, notes: list[str]) -> SeriesColumn:
    """Without what a logger wrote twice: the last row of an instant; in bins, one of several equal rows.

    ConfigError if most rows share their instant with others: then the file holds several series.
    """
    t_ns, values = column.t_ns, column.values
    known = ~np.isnan(values)
    t_ns, values = t_ns[known], values[known]
    if is_sampled:
        keep = np.append(t_ns[1:] != t_ns[:-1], True) if len(t_ns) else np.zeros(0, bool)
        said_so = "duplicate instants: last kept"
        differ = np.append(values[1:] != values[:-1], False) if len(t_ns) else keep
        if (~keep & differ).sum() * 2 > max(2, int(keep.sum())):
            raise ConfigError(
                f"{column.name}: expected one row per instant, found {len(keep)} rows for {keep.sum()}: "
                "choose one series with --where COLUMN VALUE, or say how to merge them with --aggregate"
            )
    else:
        order = np.lexsort((values, t_ns))
        t_ns, values = t_ns[order], values[order]
        keep = np.append((t_ns[1:] != t_ns[:-1]) | (values[1:] != values[:-1]), True)[: len(t_ns)]
        said_so = "rows that say the same as another: counted once"
    if not keep.all():
        notes.append(f"{column.name}: {(~keep).sum()} {said_so}")
    return SeriesColumn(column.name, t_ns[keep], values[keep])


@dataclass(frozen=True)
class Placed:
    """Values [n] of a column from row `first` of the grid on."""

    name: str
    first: int
    values: F64

    def within(self, first: int, n: int) -> F64:
        """Rows first..first + n of the grid, NaN outside of what is known. float64 [n]"""
        out = np.full(n, np.nan)
        begin, end = max(first, self.first), min(first + n, self.first + len(self.values))
        if begin < end:
            out[begin - first : end - first] = self.values[begin - self.first : end - self.first]
        return out


def place(column: SeriesColumn, grid: SampleGrid, spaced: Spacing, aggregate: str, zone: str) -> Placed:
    """Put a column on the grid. `aggregate`: one of AGGREGATES.

    Sum and count: bins at either end that the rows cover in part are dropped, empty bins between are 0. A sum
    is NaN where one of its rows has no value, and where a row is missing that is due, as they come regularly.
    """
    t_ns, values = column.t_ns, column.values
    if aggregate != "sum":
        known = ~np.isnan(values)
        t_ns, values = t_ns[known], values[known]
    if not len(t_ns):
        return Placed(column.name, 0, np.zeros(0))
    rows = grid.rows(t_ns)
    first = int(rows[0])
    n = check_size(column.name, grid, t_ns, zone)
    rows = rows - first
    counts, out = np.bincount(rows, minlength=n), np.full(n, np.nan)
    if aggregate == "count":
        out = counts.astype(np.float64)
    elif aggregate in ("sum", "mean"):
        out = np.bincount(rows, weights=values, minlength=n).astype(np.float64)
        if aggregate == "mean":
            out = np.divide(out, counts, out=np.full(n, np.nan), where=counts > 0)
    elif aggregate == "last":
        ends = np.append(np.flatnonzero(np.diff(rows)), len(rows) - 1)
        out[rows[ends]] = values[ends]
    else:
        begins = np.append(0, np.flatnonzero(np.diff(rows)) + 1)
        out[rows[begins]] = np.maximum.reduceat(values, begins)
    if aggregate == "sum" and grid.is_sampled:
        out[counts == 0] = np.nan
    elif aggregate == "sum" and spaced.is_regular:
        out[counts < grid.step_ns // spaced.step_ns] = np.nan
    out[~np.isfinite(out)] = np.nan
    if aggregate in ("sum", "count") and not grid.is_sampled:
        due_ns = spaced.step_ns if spaced.is_regular else 0  # a row stands for the time until the next
        whole_first = t_ns[0] - grid.t_ns(first) < max(due_ns, 1)
        whole_last = t_ns[-1] + due_ns >= grid.t_ns(first + n)
        cut = slice(0 if whole_first else 1, n if whole_last else n - 1)
        return Placed(column.name, first + cut.start, out[cut])
    return Placed(column.name, first, out)


def check_size(name: str, grid: SampleGrid, t_ns: I64, zone: str) -> int:
    """Rows of the grid from the first instant to the last. ConfigError if there are too many."""
    low, high = grid.rows(t_ns[[0, -1]])
    n = int(high - low) + 1
    if n > MAX_GRID_ROWS:
        raise ConfigError(
            f"{name}: {n:,} steps of {span_text(grid.step_ns / NS)} from "
            f"{instant_text(int(t_ns[0]), zone)} to {instant_text(int(t_ns[-1]), zone)}, "
            f"expected at most {MAX_GRID_ROWS:,}: give a longer --step, or mend the rows "
            "with a time far from the others"
        )
    return n


def blank(values: F64, first: int, grid: SampleGrid, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Make gaps of rows of `values` [n_time, n] that spans [from_ns, to_ns) touch. Count them per span."""
    touched = []
    begin = grid.t_ns(first) + np.arange(len(values)) * grid.step_ns
    end = begin + (1 if grid.is_sampled else grid.step_ns)
    for from_ns, to_ns in spans:
        hit = (begin < to_ns) & (end > from_ns)
        values[hit] = np.nan
        touched.append(int(hit.sum()))
    return touched


def gaps_said(values: F64, names: Sequence[str], start_ns: int, step_s: float, zone: str) -> list[str]:
    """The longest gaps one by one, then how many more there are; [] if there are none."""
    found: list[tuple[int, int, int]] = []  # (rows, first row, column)
    for j in range(values.shape[1]):
        edge = np.diff(np.concatenate(([0], np.isnan(values[:, j]).astype(np.int8), [0])))
        begins, ends = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
        found += [(int(e - b), int(b), j) for b, e in zip(begins, ends, strict=True)]
    found.sort(key=lambda g: (-g[0], g[1], g[2]))
    notes = []
    for rows, begin, j in found[:_MOST_GAPS]:
        of = f"{names[j]}: " if len(names) > 1 else ""
        at = instant_text(start_ns + round(begin * step_s * NS), zone)
        notes.append(f"{of}gap of {span_text(rows * step_s)} from {at} (NaN)")
    if rest := found[_MOST_GAPS:]:
        notes.append(f"{len(rest)} shorter gaps, {sum(g[0] for g in rest)} rows in all (NaN)")
    return notes
