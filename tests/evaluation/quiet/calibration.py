"""Calibration: shares of healthy residuals beyond 2, 3, 4 and 5 sigma, beside those of a normal distribution.

Each new reading counts once, in the cell of its comparison, of the age of what the twin has learned of the
device, and of the event that this age counts from. Only counts are kept, so a run costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from tests.evaluation.quiet.healthy_sites import HealthyRun
from twin.backtest import print_table
from twin.catalogue import F64, TABLES, Bool
from twin.contracts import Residual
from twin.diagnosis import measured_signal
from twin.engine import Engine
from twin.telemetry import State

BEYOND = (2, 3, 4, 5)  # sigmas
NORMAL_PU = tuple(math.erfc(k / math.sqrt(2.0)) for k in BEYOND)  # both sides
AT = BEYOND.index(4)  # by which a comparison is judged
OUTSIDE_PU = 0.025  # on each side of an interval of 95 %
MOST_RATIO = 2.0  # of a share over the normal one: the goal
AGES = ((900, "to 15 min"), (3600, "to 1 h"), (1 << 62, "later"))
START = "start"
APART_S = 60  # readings of one row beyond 4 sigma that are no farther apart are one excursion
CLIPPED = 5.0  # sigmas, where correlation is estimated: a single wild reading does not make it
Figures = dict[str, Any]


@dataclass
class Tally:
    """Counts of the residuals of one cell."""

    readings: int = 0
    beyond: list[int] = field(default_factory=lambda: [0] * len(BEYOND))
    excursions: int = 0  # see APART_S
    worst: float = 0.0  # sigmas
    squares: float = 0.0  # sum of z^2
    lagged: float = 0.0  # sum of z times the z before it in its row
    pairs: float = 0.0  # sum of z^2 where there was one before
    plants: int = 1  # with an excursion, in a sum

    def add(self, other: Tally) -> None:
        """Take in the counts of another cell."""
        self.readings += other.readings
        self.beyond = [a + b for a, b in zip(self.beyond, other.beyond, strict=True)]
        self.excursions += other.excursions
        self.worst = max(self.worst, other.worst)
        self.squares += other.squares
        self.lagged += other.lagged
        self.pairs += other.pairs
        self.plants += other.plants if other.excursions else 0

    @property
    def effective(self) -> float:
        """Independent readings that tell as much of a mean, if each depends on the one before alone."""
        kept = min(max(self.lagged / self.pairs, 0.0), 0.9999) if self.pairs > 0.0 else 0.0
        return self.readings * (1.0 - kept) / (1.0 + kept)

    def interval(self) -> tuple[float, float]:
        """95 % limits of the share beyond 4 sigma, for excursions that come independently of each other.

        Without any, an excursion is taken to be as long as readings are alike.
        """
        length = self.beyond[AT] / self.excursions if self.excursions else self.readings / self.effective
        low, high = poisson_interval(self.excursions, self.readings / length)
        return low, min(high, 1.0)


@dataclass(frozen=True)
class CalibrationCell:
    """The tally of one comparison in one run at one age since an event."""

    cooling: str
    load: str
    racks: int
    sensors: str
    season: str
    seed: int
    since: str
    age: str
    relation: str
    tally: Tally


class _Rows:
    """The rows of a comparison: their last residual, and when they were last beyond 4 sigma."""

    def __init__(self, n: int) -> None:
        self.before, self.beyond_s = np.full(n, np.nan), np.full(n, -np.inf)
        self.t_ns = np.zeros(n, np.int64)


class ResidualCounts:
    """Looks at the residuals of a twin after each round."""

    def __init__(self, run: HealthyRun) -> None:
        self.run = run
        self._second = 0
        self._rows: dict[str, _Rows] = {}
        self._tallies: dict[tuple[str, str, str], Tally] = {}
        self._event, self._event_s = START, 0
        self._replaced: dict[str, tuple[str, int, Bool]] = {}  # by table: event, second, rows

    def begin(self, event: str, away_s: int = 0) -> None:
        """Start a new age of the twin's knowledge of all devices, `away_s` seconds later."""
        self._second += away_s
        self._event, self._event_s, self._replaced = event, self._second, {}
        self._rows = {}

    def replace(self, event: str, table: str, rows: Bool) -> None:
        """Start a new age of the twin's knowledge of these devices [n]."""
        known = self._replaced.get(table)
        self._replaced[table] = event, self._second, rows if known is None else rows | known[2]

    def look(self, engine: Engine) -> None:
        """After a round. Nothing is counted where announced work goes on: nobody is told of it."""
        self._second += 1
        with np.errstate(all="ignore"):
            for name, residual in engine.estimator.residuals.items():
                if len(residual.expected):
                    self._count(name, residual, engine)

    def cells(self) -> list[CalibrationCell]:
        """All that was counted."""
        run = self.run
        return [
            CalibrationCell(run.profile.cooling, run.load, run.racks, run.sensors, run.season, run.seed,
                            *key, tally)
            for key, tally in self._tallies.items()
        ]  # fmt: skip

    def _count(self, name: str, residual: Residual, engine: Engine) -> None:
        z = (residual.measured - residual.expected) / residual.sigma
        table = name.partition(".")[0]
        rows = self._rows.get(name)
        if rows is None or len(rows.before) != len(z):
            rows = self._rows[name] = _Rows(len(z))
        usable = np.isfinite(z)
        if not usable.any():
            return
        usable &= _fresh(name, engine.state, rows)
        mask = engine.windows.mask(table)
        if mask is not None and len(mask) == len(z):
            usable &= ~mask
        event, event_s, replaced = self._replaced.get(table, ("", 0, None))
        if replaced is not None and len(replaced) == len(z):
            self._tally(name, event, event_s, rows, z, usable & replaced)
            usable &= ~replaced
        self._tally(name, self._event, self._event_s, rows, z, usable)

    def _tally(self, name: str, event: str, event_s: int, rows: _Rows, z: F64, usable: Bool) -> None:
        at = np.flatnonzero(usable)
        if not len(at):
            return
        age = next(label for most_s, label in AGES if self._second - event_s <= most_s)
        tally = self._tallies.setdefault((event, age, name), Tally())
        size = np.abs(z[at])
        tally.readings += len(at)
        for k, sigmas in enumerate(BEYOND):
            if not (count := int(np.count_nonzero(size > sigmas))):
                break
            tally.beyond[k] += count
        if (worst := float(size.max())) > BEYOND[AT]:
            far = at[size > BEYOND[AT]]
            tally.excursions += int(np.count_nonzero(self._second - rows.beyond_s[far] > APART_S))
            rows.beyond_s[far] = self._second
        tally.worst = max(tally.worst, worst)
        clipped = np.clip(z[at], -CLIPPED, CLIPPED)
        before = rows.before[at]
        paired = np.isfinite(before)
        tally.squares += float(clipped @ clipped)
        tally.lagged += float(clipped[paired] @ before[paired])
        tally.pairs += float(clipped[paired] @ clipped[paired])
        rows.before[at] = clipped


def _fresh(name: str, state: State, rows: _Rows) -> Bool:
    """Rows [n] with a new reading of what the comparison judges; a sum has one in each round."""
    table, n = name.partition(".")[0], len(rows.before)
    if table not in state.tables or state.tables[table].n != n or name.endswith(".balance"):
        return np.ones(n, np.bool_)
    column = state.tables[table]
    t_ns = column.t_ns[column.partition.group_of_row[TABLES[table].by_name[measured_signal(name)].row]]
    fresh: Bool = t_ns != rows.t_ns
    np.copyto(rows.t_ns, t_ns)
    return fresh


def poisson_interval(count: int, exposure: float) -> tuple[float, float]:
    """Exact 95 % limits of a rate at which `count` events came. source: Garwood, Fiducial limits for the
    Poisson distribution (1936)"""
    low = stats.chi2.ppf(OUTSIDE_PU, 2 * count) / 2.0 if count else 0.0
    return float(low / exposure), float(stats.chi2.ppf(1.0 - OUTSIDE_PU, 2 * count + 2) / 2.0 / exposure)


def summed(cells: Iterable[CalibrationCell], key: Callable[[CalibrationCell], Any]) -> dict[Any, Tally]:
    """The tallies of cells that have a key in common."""
    out: dict[Any, Tally] = {}
    for cell in cells:
        if (of := key(cell)) not in out:
            out[of] = Tally(plants=0)
        out[of].add(cell.tally)
    return out


def calibration(cells: Sequence[CalibrationCell]) -> Figures:
    """All figures, as plain data; the worst first."""
    by_age = summed(cells, lambda c: (c.cooling, c.sensors, c.relation, c.since, c.age))
    by_load = summed(cells, lambda c: (c.cooling, c.sensors, c.relation, c.load, c.season))
    return {
        "beyond_sigmas": list(BEYOND),
        "normal_pu": list(NORMAL_PU),
        "age": _rows_of(by_age, ("cooling", "sensors", "relation", "since", "age")),
        "load": _rows_of(by_load, ("cooling", "sensors", "relation", "load", "season")),
    }


def _rows_of(tallies: dict[Any, Tally], names: Sequence[str]) -> list[Figures]:
    rows = [dict(zip(names, key, strict=True)) | _figures(tally) for key, tally in tallies.items()]
    return sorted(rows, key=lambda row: (-row["low"], -row["share_pu"][AT], *(row[name] for name in names)))


def _figures(tally: Tally) -> Figures:
    low, high = tally.interval()
    return {
        "readings": tally.readings, "effective": tally.effective, "beyond": list(tally.beyond),
        "share_pu": [count / tally.readings for count in tally.beyond],
        "rms": math.sqrt(tally.squares / tally.readings), "worst": tally.worst,
        "excursions": tally.excursions, "plants": tally.plants, "low": low, "high": high,
        "verdict": _verdict(low, high),
    }  # fmt: skip


def _verdict(low: float, high: float) -> str:
    """The share beyond 4 sigma against the goal: `above` and `within` are shown by the counts."""
    most = MOST_RATIO * NORMAL_PU[AT]
    return "above" if low > most else "within" if high <= most else "open"


def say_calibration(figures: Figures, out: Console) -> None:
    """The tables: what is above the goal or has readings beyond 4 sigma, and how many comparisons are not."""
    normal = ", ".join(f"{100 * pu:.2g} % beyond {k}" for k, pu in zip(BEYOND, NORMAL_PU, strict=True))
    out.print(f"calibration: a normal distribution has {normal} sigma", style="bold", markup=False,
              soft_wrap=True)  # fmt: skip
    for name in ("age", "load"):
        keys = (
            "relation",
            "cooling",
            "sensors",
            *(("since", "age") if name == "age" else ("load", "season")),
        )
        told = [row for row in figures[name] if row["beyond"][AT]]
        rows = [
            [row[keys[0]], " ".join(row[k] for k in keys[1:]), f"{row['readings']:,}",
             f"{row['effective']:,.0f}", f"{row['rms']:.2f}", *(f"{100 * x:.2g}" for x in row["share_pu"]),
             f"{row['beyond'][AT]:,} in {row['excursions']:,}", str(row["plants"]), f"{row['worst']:.0f}",
             f"{100 * row['low']:.2g} to {100 * row['high']:.2g}", row["verdict"]]
            for row in told
        ]  # fmt: skip
        heads = ["comparison", f"by {name}", "readings", "effective", "rms", *(f"% > {k}" for k in BEYOND),
                 "> 4 in excursions", "plants", "most", "% > 4, 95 %", "goal"]  # fmt: skip
        print_table(out, heads, rows)
        quiet = len(figures[name]) - len(told)
        shown = sum(row["verdict"] == "within" for row in figures[name])
        line = f"{quiet} cells have no reading beyond 4 sigma; {shown} have enough readings to show the goal"
        out.print(line, markup=False, soft_wrap=True)
