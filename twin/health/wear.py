"""Wear: the time left of parts whose learned parameter drifts, with an interval.

A point of each trend is taken every few hours; of GPUs only of those that drift beyond noise and beyond what
their rack drifts. A trend is a least-squares line, of the logarithm where the law of a wear asks for it, and
allows for what its scatter owes to slow swings. The interval also allows for wear that gets faster or slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from twin.catalogue import F32, F64, I64, NS, Bool, signal_of, utc
from twin.estimation import Parameter
from twin.health.context import HealthContext
from twin.site import Site
from twin.telemetry import EntityState, SparseState, cell, column, part, scalar

Z = 1.645  # of a 90 % interval
LEAST_POINTS, LEAST_SPAN_S = 12, 1.5 * 86_400.0  # source: estimate
SURE_T = 4.0  # slope over its standard error from which there is a drift; source: estimate
LONGEST_S = 10 * 365.25 * 86_400.0  # what lasts longer is not stated


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through each series [k]: its end value, and its slope per second.

    NaN where there are too few points, or over too short a time.
    """

    level: F64
    slope: F64
    level_sigma: F64
    slope_sigma: F64
    free: F64  # degrees of freedom, fewer where the scatter swings slowly
    first: F64  # value of the line at its first point
    span_s: F64


class Left(NamedTuple):
    """Seconds until a limit [k]: middle, and 90 % interval; NaN: unknown."""

    mid_s: F64
    lo_s: F64
    hi_s: F64


def trend(t_s: F64, y: F64) -> Trend:
    """Return the lines through the points y [m, k], NaN where missing, at the instants t_s [m].

    Ordinary least squares. Points whose errors follow each other with the correlation r (a series of first
    order, from the residuals) count as (1 - r) / (1 + r) of their number. source: Bartlett, J. R. Stat. Soc.
    98 (1935) 536.
    """
    known = np.isfinite(y)
    n = known.sum(axis=0).astype(np.float64)
    t = np.where(known, t_s[:, None], np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        low = np.where(known, t_s[:, None], np.inf).min(axis=0, initial=np.inf)
        high = np.where(known, t_s[:, None], -np.inf).max(axis=0, initial=-np.inf)
        enough = (n >= LEAST_POINTS) & (high - low >= LEAST_SPAN_S)
        mean_t, mean_y = _sum(t) / n, _sum(np.where(known, y, np.nan)) / n
        dt, dy = t - mean_t, y - mean_y
        square = _sum(dt * dt)
        slope = _sum(dt * dy) / square
        off = dy - slope * dt
        pairs = off[1:] * off[:-1]
        linked = np.clip(_sum(pairs) / np.maximum(_sum(off * off), 1e-300), 0.0, 0.95)
        worth = (1.0 - linked) / (1.0 + linked)
        free = np.maximum(n * worth - 2.0, 1.0)
        # The sum of squares is over all points, what they are worth is less
        variance = _sum(off * off) / np.maximum(n - 2.0, 1.0)
        slope_sigma = np.sqrt(variance / (square * worth))
        level_sigma = np.sqrt(variance / (n * worth) + (high - mean_t) ** 2 * slope_sigma**2)
        level = mean_y + slope * (high - mean_t)
        first = mean_y + slope * (low - mean_t)
        none = np.where(enough, 0.0, np.nan)
    return Trend(level + none, slope + none, level_sigma + none, slope_sigma + none, free + none,
                 first + none, high - low + none)  # fmt: skip


def _sum(values: F64) -> F64:
    return np.asarray(np.nansum(values, axis=0), np.float64)


def sure(found: Trend, floor: F64 | float) -> Bool:
    """Return the mask of drifts that exceed the noise [k]: of more than `floor` over the points' time."""
    with np.errstate(invalid="ignore"):
        moved = np.abs(found.slope) * found.span_s > floor
        return np.asarray(moved & (np.abs(found.slope) >= SURE_T * found.slope_sigma))


def until(found: Trend, limit: F64, rising: bool, floor: F64 | float) -> Left:
    """Return the time until each line meets its limit at its present slope; 0 if it has.

    NaN where no drift towards it can be distinguished from noise, or it takes longer than `LONGEST_S`.
    """
    sign = 1.0 if rising else -1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        gap, speed = sign * (limit - found.level), sign * found.slope
        z = Z + (Z**3 + Z) / (4.0 * found.free)  # of Student's law. source: Abramowitz, Stegun 26.7.5
        mid = gap / speed
        lo = (gap - z * found.level_sigma) / (speed + z * found.slope_sigma)
        hi = (gap + z * found.level_sigma) / np.maximum(speed - z * found.slope_sigma, 1e-300)
        certain = sure(found, floor) & (speed > 0.0) & (mid <= LONGEST_S)
        over = gap <= 0.0
    out = [np.where(over, 0.0, np.where(certain, np.clip(v, 0.0, LONGEST_S), np.nan)) for v in (mid, lo, hi)]
    return Left(*out)


def straight(value: F64 | float, power: float) -> F64:
    """Return a power of a value, for 0 its logarithm, scaled so that at 1 it is 0 and rises as the value."""
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.where(np.asarray(value) > 0.0, value, np.nan)
        return np.asarray(np.log(value) if power == 0.0 else (value**power - 1.0) / power, np.float64)


# The wear goes with the power of the time between these, and a line is no more than the middle: of what
# has just begun nobody knows how it goes on. source: estimate
FASTER, SLOWER = 1.35, 0.75
LEAST_WAY = 0.02  # share of the way to the limit that was seen; source: estimate


def widened(left: Left, way: F64, moved: F64, doubt: F64 | float) -> Left:
    """Return an interval that covers the time left even if the wear is faster or slower than linear.

    `way` is the share of the way to the limit that is behind it, `moved` what of it the line shows, whose
    speed is that in its middle, `doubt` the share by which the limit may be off [k]. Independent doubts add
    up by the logarithm of the time.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        way = np.clip(way, LEAST_WAY, 1.0 - 1e-9)
        off, out = np.log1p(doubt / (1.0 - way)), []
        middle = np.log(1.0 - 0.5 * np.clip(moved / way, 0.0, 1.0))
        for power, edge_s in ((FASTER, left.lo_s), (SLOWER, left.hi_s)):
            law = np.log(power * (way ** (-1.0 / power) - 1.0) / (1.0 / way - 1.0))
            law += (power - 1.0) / power * middle
            far = np.sqrt(law**2 + off**2 + np.log(edge_s / left.mid_s) ** 2)
            out.append(left.mid_s * np.exp(np.copysign(np.minimum(far, 50.0), 1.0 - power)))
        low, high = (np.where(left.mid_s > 0.0, np.minimum(edge, LONGEST_S), left.mid_s) for edge in out)
    return Left(left.mid_s, low, high)


def until_counted(grown: F64, span_s: F64, left: F64, least: float) -> Left:
    """Return the time until `left` more events [k], after `grown` of them within `span_s`; 0 where none is
    left.

    Events are taken to come one by one by Poisson's law, so that a rate of k events is known to its root; NaN
    below `least` events.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        each_s = span_s / grown
        mid, spread = left * each_s, Z / np.sqrt(grown)
        lo, hi = mid / (1.0 + spread), mid / np.maximum(1.0 - spread, 1e-3)
        certain = (grown >= least) & (span_s >= LEAST_SPAN_S) & (mid <= LONGEST_S)
        over = left <= 0.0
    out = [np.where(over, 0.0, np.where(certain, np.clip(v, 0.0, LONGEST_S), np.nan)) for v in (mid, lo, hi)]
    return Left(*out)


POINT_S, POINTS = 4 * 3600.0, 128  # between points, and how many are kept: three weeks
MAX_TRACKS = 2000  # of GPUs, for each parameter
JUMP_PU = 0.05  # a change between two points that is no wear: cleaning, a repair, a fault; source: estimate
DAY_S = 86_400.0
# After its early value is known, in which a cold plate's resistance is still being found: the readings of 15
# minutes at one load show little of it; source: estimate
SETTLING_S = 86_400.0
LEAST_ALIKE = 4  # GPUs of a rack that show what all of them have alike; source: estimate


@dataclass(frozen=True, slots=True)
class Remaining:
    """Time until a limit [n]: median and 90 % interval; NaN if the drift is not distinct from noise."""

    what: str  # such as cdu.ua
    table: str
    mid_s: F64
    lo_s: F64
    hi_s: F64


@dataclass(frozen=True, slots=True)
class Worn:
    """Wearing parameter, with its limit over its early value, and the change that is only noise.

    `signal` is the signal without which nothing is learned of it. Its power `law`, for 0 its logarithm, goes
    straight with time. `sparse`: only those that drift are tracked.
    """

    what: str
    words: str
    limit_pu: float
    noise_pu: float
    signal: str
    law: float
    sparse: bool = False

    @property
    def rising(self) -> bool:
        """Return True if the parameter grows as the device wears."""
        return self.limit_pu > 1.0


# Limits: source: estimate; a plate exchanger is cleaned when a third or more of its conductance is lost, a
# filter is changed when its drop has doubled or more. Noise: source: estimate, as for the same drifts in the
# diagnosis. Law of the filter: exponential, the middle of the laws of blocking at a constant flow; source:
# Hermia, Trans. IChemE 60 (1982) 183. Others: source: estimate; fouling that grows ever more slowly (Kern,
# Seaton, Brit. Chem. Eng. 4 (1959) 258) is within what SLOWER allows for.
PUMP_HEAD = "cdu.pump_head"
WORN = (
    Worn("cdu.ua", "the conductance of the heat exchanger", 0.6, 0.04, "cdu.flow_lpm", 1.0),
    Worn(PUMP_HEAD, "the head of the pumps", 0.7, 0.02, "cdu.flow_lpm", 1.0),
    Worn("cdu.filter", "the resistance of the filter", 2.5, 0.08, "cdu.flow_lpm", 0.0),
    Worn("gpu.resistance", "the thermal resistance of the cold plate", 2.0, 0.05, "gpu.temp_c", 1.0, True),
)
# Rows of memory that can be remapped. source: NVIDIA, GPU Memory Error Management: at most 512 per GPU, and 8
# per bank, which no counter reports: a bank may be used up before
REMAPS, MOST_REMAPS, LEAST_GROWN = "gpu.row_remap_count", 512.0, 4.0


class Points(SparseState):
    """Points [POINTS, k] of some entities, in a ring that all trends share, and their early values [k]."""

    value: F32 = cell("f4", np.nan, lead=(POINTS,))
    reference: F64 = cell("f8", np.nan)


class Wear(EntityState):
    """Trends of learned parameters."""

    t_ns: I64 = scalar(np.zeros(POINTS, np.int64))  # 0 = no point yet
    count: int = scalar(0)
    point_ns: int = scalar(0)
    points: dict[str, Points] = part()
    known_ns: I64 = column("gpu", "i8")  # since when the early value of its resistance is known; 0: it is not

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.points = {what: Points(site.sizes, _table(what)) for what in (*(w.what for w in WORN), REMAPS)}
        self._found: dict[str, tuple[Trend, Left]] | None = None
        self._remaining: tuple[Remaining, ...] = ()

    def update(self, now: HealthContext) -> None:
        """Take a point of each trend once in a while."""
        if self.point_ns and now.now_ns - self.point_ns < POINT_S * NS:
            return
        self.point_ns = now.now_ns
        row = self.count % POINTS
        self.t_ns[row], self.count = now.now_ns, self.count + 1
        known = now.estimator.parameters
        for worn in WORN:
            points = self.points[worn.what]
            points.value[row] = np.nan
            parameter = known.get(worn.what)
            if parameter is not None and len(parameter.value):
                self._take(worn, points, parameter, now, row)
        self._take_remaps(now, row)
        self._found = None

    def _take(self, worn: Worn, points: Points, parameter: Parameter, now: HealthContext, row: int) -> None:
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.where(now.fresh(worn.signal) & (parameter.reference > 0.0), parameter.value, np.nan)
            if (work := now.under_work(parameter.table)) is not None:
                value = np.where(work, np.nan, value)
            if worn.what == PUMP_HEAD:  # a filter that clogs is no wear of the pumps
                value = value + np.nan_to_num(now.estimator.clogged_pu)
            if worn.sparse:
                value = self._settled(value, parameter.reference, now.now_ns)
                value = self._apart(value, parameter.reference)
                drift = (value / parameter.reference - 1.0) * (1.0 if worn.rising else -1.0)
                noise = np.maximum(worn.noise_pu, 3.0 * parameter.sigma / parameter.reference)
                self._choose(points, drift, noise)
            elif len(points) < len(value):
                points.insert(np.setdiff1d(np.arange(len(value)), points.index).astype(np.int32))
            at = points.index
            if not len(at):
                return
            points.reference[:] = parameter.reference[at]
            was = points.value[(row - 1) % POINTS]
            jumped = np.abs(value[at] - was) > np.maximum(
                JUMP_PU * points.reference, 5.0 * np.nan_to_num(parameter.sigma[at])
            )
        points.value[:, jumped] = np.nan
        points.value[row] = value[at]

    def _settled(self, value: F64, reference: F64, now_ns: int) -> F64:
        """Return the values of GPUs with an early value known for long enough; NaN for others."""
        known = reference > 0.0
        self.known_ns = np.where(known, np.where(self.known_ns > 0, self.known_ns, now_ns), 0)
        return np.where(known & (now_ns - self.known_ns >= SETTLING_S * NS), value, np.nan)

    def _apart(self, value: F64, reference: F64) -> F64:
        """Return the values of GPUs without the common part of their rack: less flow is no wear of a
        plate."""
        ratio = np.where(np.isfinite(value), value / reference, np.nan)
        known = np.flatnonzero(np.isfinite(ratio))
        rack, n_rack = self.site.rack_of_gpu[known], self.site.sizes["rack"]
        order = np.lexsort((ratio[known], rack))
        many = np.bincount(rack, minlength=n_rack)
        first = np.cumsum(many) - many
        middle = np.ones(n_rack)
        some = many >= LEAST_ALIKE
        middle[some] = ratio[known][order][(first + (many - 1) // 2)[some]]
        return np.asarray(value / middle[self.site.rack_of_gpu], np.float64)

    def _choose(self, points: Points, drift: F64, noise: F64) -> None:
        """Choose the GPUs with the largest drifts; a tracked one stays until its drift is half as large."""
        with np.errstate(invalid="ignore"):
            points.keep(~(drift[points.index] < 0.5 * noise[points.index]))
            wanted = drift > noise
        wanted[points.index] = False
        new = np.flatnonzero(wanted)
        room = MAX_TRACKS - len(points.index)
        if len(new) > room:
            new = np.sort(new[np.argsort(-drift[new], kind="stable")[: max(room, 0)]])
        points.insert(new.astype(np.int32))

    def _take_remaps(self, now: HealthContext, row: int) -> None:
        """Take the remap counts of GPUs that have used rows since their first report."""
        signal = signal_of(REMAPS)
        points = self.points[REMAPS]
        raw: I64 = now.state.tables["gpu"].raw[signal.row]
        points.value[row] = np.nan
        grown = now.total(REMAPS).astype(np.float64)
        if not (grown > 0).any() and not len(points.index):
            return
        self._choose(points, grown, np.full(len(grown), 0.5))
        points.value[row] = np.where(raw[points.index] >= 0, raw[points.index], np.nan)

    def _fitted(self) -> dict[str, tuple[Trend, Left]]:
        """Return (trend, time left) of all tracked entities."""
        if self._found is None:
            kept = np.flatnonzero(self.t_ns > 0)
            order = kept[np.argsort(self.t_ns[kept], kind="stable")]
            t_s = (self.t_ns[order] - self.point_ns) / NS
            self._found = {}
            for worn in WORN:
                self._found[worn.what] = self._trend_of(worn, t_s, order)
            self._found[REMAPS] = _counted(t_s, self.points[REMAPS].value[order].astype(np.float64))
            self._remaining = self._spread(self._found)
        return self._found

    def _trend_of(self, worn: Worn, t_s: F64, order: I64) -> tuple[Trend, Left]:
        """Return the line in the parameter's own unit, and the time left by the laws of its wear."""
        points = self.points[worn.what]
        value = points.value[order].astype(np.float64)
        line, by_law = trend(t_s, value), trend(t_s, straight(value / points.reference, worn.law))
        limit = float(straight(worn.limit_pu, worn.law))
        left = until(by_law, np.full(len(points), limit), worn.rising, 0.5 * worn.noise_pu)
        moved = (by_law.level - by_law.first) / limit
        return line, widened(left, by_law.level / limit, moved, worn.noise_pu / abs(limit))

    def _spread(self, found: Mapping[str, tuple[Trend, Left]]) -> tuple[Remaining, ...]:
        out = []
        for what, (_, left) in found.items():
            if np.isfinite(left.mid_s).any():
                columns = []
                for values in left:
                    column = np.full(self.site.sizes[_table(what)], np.nan)
                    column[self.points[what].index] = values
                    column.flags.writeable = False
                    columns.append(column)
                out.append(Remaining(what, _table(what), *columns))
        return tuple(out)

    def remaining(self) -> tuple[Remaining, ...]:
        """Return the remaining life, by parameter; a parameter without drift has none."""
        self._fitted()
        return self._remaining

    def evidence(self, table: str, entity: int) -> tuple[str, ...]:
        """Return the drifts of an entity and their remaining time, in sentences with figures."""
        out = []
        for worn in WORN:
            if _table(worn.what) == table:
                out += self._sentences(worn, entity)
        if table == "gpu":
            out += self._sentences_on_remaps(entity)
        return tuple(out)

    def _fit_of(self, what: str, entity: int) -> tuple[dict[str, float], Left, int] | None:
        """Return (trend by field, time left, place among the points) of an entity; None if it is not
        tracked."""
        points = self.points[what]
        at = int(np.searchsorted(points.index, entity))
        if at >= len(points) or points.index[at] != entity:
            return None
        line, left = self._fitted()[what]
        values = {f.name: float(getattr(line, f.name)[at]) for f in fields(line)}
        return values, Left(*(column[at] for column in left)), at

    def rate(self, what: str, entity: int) -> tuple[float, float] | None:
        """Return (change per second in the parameter's unit, seconds of its trend); None without a trend."""
        fit = self._fit_of(what, entity) if what in self.points else None
        if fit is None or np.isnan(fit[0]["slope"]):
            return None
        return fit[0]["slope"], fit[0]["span_s"]

    def _sentences(self, worn: Worn, entity: int) -> list[str]:
        if (fit := self._fit_of(worn.what, entity)) is None:
            return []
        line, left, at = fit
        points = self.points[worn.what]
        reference = float(points.reference[at])
        name = worn.words[0].upper() + worn.words[1:]
        if np.isnan(left.mid_s):
            last = points.value[(self.count - 1) % POINTS, at]
            off = float(last) / reference - 1.0
            if not np.isfinite(off) or (off if worn.rising else -off) <= worn.noise_pu:
                return []
            way = "above" if worn.rising else "below"
            return [f"{name} is {abs(off):.0%} {way} its early value; how fast it changes is unknown"]
        goal = f"{worn.limit_pu:.0%} of its early value"
        if left.mid_s == 0.0:
            return [f"{name} has passed {goal}"]
        moved, days = abs(line["level"] - line["first"]) / reference, line["span_s"] / DAY_S
        way = "rose" if worn.rising else "fell"
        trend_text = f"{name} {way} by {moved:.0%} of its early value in {days:.0f} days"
        return [f"{trend_text}; at this rate {goal} is reached {self._dates(left)}"]

    def _sentences_on_remaps(self, entity: int) -> list[str]:
        fit = self._fit_of(REMAPS, entity)
        if fit is None or np.isnan(fit[0]["level"]):
            return []
        line, left, _ = fit
        used = f"{line['level']:.0f} of {MOST_REMAPS:.0f} rows of memory are remapped, "
        used += f"{line['level'] - line['first']:.0f} of them in the last {line['span_s'] / DAY_S:.0f} days"
        if np.isnan(left.mid_s):
            return [f"{used}; how long the rest lasts is unknown"]
        return [f"{used}; at this rate none is left {self._dates(left, 'after ')}"]

    def _dates(self, left: Left, at: str = "on ") -> str:
        """Return dates such as `on 2026-04-02 (90 %: 2026-03-26 to 2026-04-16), in 31 days`."""
        mid, lo, hi = (utc(self.point_ns + round(float(s) * NS), "%Y-%m-%d") for s in left)
        return f"{at}{mid} (90 %: {lo} to {hi}), in {left.mid_s / DAY_S:.0f} days"

    def derive(self) -> None:
        """Drop the fitted trends; they are rebuilt on demand."""
        self._found = None


def _table(what: str) -> str:
    return what.partition(".")[0]


def _counted(t_s: F64, count: F64) -> tuple[Trend, Left]:
    """Return the rest of rows to remap, by the counts [m, k]; a count that falls was another GPU's."""
    line = trend(t_s, count)
    with np.errstate(invalid="ignore"):
        last = np.fmax.reduce(count, axis=0) if len(count) else np.zeros(count.shape[1])
        first = np.fmin.reduce(count, axis=0) if len(count) else np.zeros(count.shape[1])
        zero = np.where(np.isfinite(line.level), 0.0, np.nan)
        line = replace(line, level=last + zero, first=first + zero)
        return line, until_counted(last - first + zero, line.span_s, MOST_REMAPS - last, LEAST_GROWN)
