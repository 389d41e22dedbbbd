"""Wear: what is left of parts whose learned parameter drifts, with an interval.

A point of each trend is taken every few hours; of GPUs only of those that drift beyond noise. A drift is
taken to go on as it did. May import the moment, trends, parameters and the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.estimate.parameter import Parameter
from twin.frame import F64, I32, I64, NS, Bool
from twin.health.now import Now
from twin.health.wear_trend import Left, Trend, trend, until, until_counted
from twin.signals import find_signal
from twin.site import Site

POINT_S, POINTS = 4 * 3600.0, 128  # between points, and how many are kept: three weeks
MAX_TRACKS = 2000  # of GPUs, for each parameter
JUMP_PU = 0.05  # a change between two points that is no wear: cleaning, a repair, a fault; source: estimate
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Remaining:
    """Time until a limit [n]: middle and 90 % interval; NaN: no drift that can be told from noise."""

    what: str  # such as cdu.ua
    table: str
    mid_s: F64
    lo_s: F64
    hi_s: F64


@dataclass(frozen=True, slots=True)
class Worn:
    """What wears: the parameter, where its limit is over its early value, and a change that is but noise.

    `heard` is the signal without which nothing is learned of it. `sparse`: only those that drift are tracked.
    """

    what: str
    words: str
    limit_pu: float
    noise_pu: float
    heard: str
    sparse: bool = False

    @property
    def rising(self) -> bool:
        """Whether it grows as it wears."""
        return self.limit_pu > 1.0


# Limits: source: estimate; a plate exchanger is cleaned when a third or more of its conductance is lost, a
# filter is changed when its drop has doubled or more. Noise: source: estimate, as for the same drifts in the
# diagnosis.
WORN = (
    Worn("cdu.ua", "the conductance of the heat exchanger", 0.6, 0.04, "cdu.flow_lpm"),
    Worn("cdu.pump_head", "the head of the pumps", 0.7, 0.02, "cdu.flow_lpm"),
    Worn("cdu.filter", "the resistance of the filter", 2.5, 0.08, "cdu.flow_lpm"),
    Worn("gpu.resistance", "the thermal resistance of the cold plate", 2.0, 0.05, "gpu.temp_c", True),
)
# Rows of memory that can be remapped. source: NVIDIA, GPU Memory Error Management: at most 512 per GPU, and 8
# per bank, which no counter tells: a bank may be used up before
REMAPS, MOST_REMAPS, LEAST_GROWN = "gpu.row_remap_count", 512.0, 4.0


class Points:
    """Points [POINTS, k] of some entities, in a ring that all trends share."""

    def __init__(self, entity: I32) -> None:
        self.entity = entity
        self.value = np.full((POINTS, len(entity)), np.nan, np.float32)
        self.reference = np.full(len(entity), np.nan)

    def keep(self, mask: Bool) -> None:
        """Only these go on [k]."""
        self.entity, self.reference = self.entity[mask], self.reference[mask]
        self.value = self.value[:, mask]

    def add(self, entity: I32) -> None:
        """These too, ascending and none of them known."""
        if not len(entity):
            return
        every = np.concatenate([self.entity, entity])
        order = np.argsort(every, kind="stable")
        fresh = Points(entity)
        self.value = np.concatenate([self.value, fresh.value], axis=1)[:, order]
        self.reference = np.concatenate([self.reference, fresh.reference])[order]
        self.entity = every[order].astype(np.int32)


class Wear:
    """Trends of learned parameters."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.t_ns = np.zeros(POINTS, np.int64)  # 0 = no point yet
        self.count, self.point_ns = 0, 0
        self.points = {w.what: Points(_all(0 if w.sparse else _n(site, w.what))) for w in WORN}
        self.points[REMAPS] = Points(_all(0))
        self._found: dict[str, tuple[Trend, Left]] | None = None
        self._remaining: tuple[Remaining, ...] = ()

    def update(self, now: Now) -> None:
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

    def _take(self, worn: Worn, points: Points, parameter: Parameter, now: Now, row: int) -> None:
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.where(now.fresh(worn.heard) & (parameter.reference > 0.0), parameter.value, np.nan)
            if (work := now.under_work(parameter.table)) is not None:
                value = np.where(work, np.nan, value)
            if worn.sparse:
                drift = (value / parameter.reference - 1.0) * (1.0 if worn.rising else -1.0)
                noise = np.maximum(worn.noise_pu, 3.0 * parameter.sigma / parameter.reference)
                self._choose(points, drift, noise)
            at = points.entity
            if not len(at):
                return
            points.reference[:] = parameter.reference[at]
            was = points.value[(row - 1) % POINTS]
            jumped = np.abs(value[at] - was) > np.maximum(
                JUMP_PU * points.reference, 5.0 * np.nan_to_num(parameter.sigma[at])
            )
        points.value[:, jumped] = np.nan
        points.value[row] = value[at]

    def _choose(self, points: Points, drift: F64, noise: F64) -> None:
        """Which GPUs are tracked: those that drift the most; one goes on till it drifts half as much."""
        with np.errstate(invalid="ignore"):
            points.keep(~(drift[points.entity] < 0.5 * noise[points.entity]))
            wanted = drift > noise
        wanted[points.entity] = False
        new = np.flatnonzero(wanted)
        room = MAX_TRACKS - len(points.entity)
        if len(new) > room:
            new = np.sort(new[np.argsort(-drift[new], kind="stable")[: max(room, 0)]])
        points.add(new.astype(np.int32))

    def _take_remaps(self, now: Now, row: int) -> None:
        """The counts of GPUs that have used rows up since they are heard."""
        signal = find_signal(REMAPS)
        assert signal is not None
        points = self.points[REMAPS]
        raw: I64 = now.state.tables["gpu"].raw[signal.row]
        points.value[row] = np.nan
        grown = now.total(REMAPS).astype(np.float64)
        if not (grown > 0).any() and not len(points.entity):
            return
        self._choose(points, grown, np.full(len(grown), 0.5))
        points.value[row] = np.where(raw[points.entity] >= 0, raw[points.entity], np.nan)

    def _fitted(self) -> dict[str, tuple[Trend, Left]]:
        """(trend, what is left) of all that is tracked."""
        if self._found is None:
            kept = np.flatnonzero(self.t_ns > 0)
            order = kept[np.argsort(self.t_ns[kept], kind="stable")]
            t_s = (self.t_ns[order] - self.point_ns) / NS
            self._found = {}
            for worn in WORN:
                points = self.points[worn.what]
                line = trend(t_s, points.value[order].astype(np.float64))
                left = until(line, worn.limit_pu * points.reference, worn.rising,
                             0.5 * worn.noise_pu * points.reference)  # fmt: skip
                self._found[worn.what] = line, left
            self._found[REMAPS] = _counted(t_s, self.points[REMAPS].value[order].astype(np.float64))
            self._remaining = self._spread(self._found)
        return self._found

    def _spread(self, found: Mapping[str, tuple[Trend, Left]]) -> tuple[Remaining, ...]:
        out = []
        for what, (_, left) in found.items():
            if np.isfinite(left.mid_s).any():
                columns = []
                for values in left:
                    column = np.full(_n(self.site, what), np.nan)
                    column[self.points[what].entity] = values
                    column.flags.writeable = False
                    columns.append(column)
                out.append(Remaining(what, what.partition(".")[0], *columns))
        return tuple(out)

    def remaining(self) -> tuple[Remaining, ...]:
        """What is left, by parameter; of a parameter of which nothing drifts nothing is told."""
        self._fitted()
        return self._remaining

    def evidence(self, table: str, entity: int) -> tuple[str, ...]:
        """What drifts at an entity and how long it lasts, in sentences with figures."""
        out = []
        for worn in WORN:
            if worn.what.partition(".")[0] == table:
                out += self._told(worn, entity)
        if table == "gpu":
            out += self._told_remaps(entity)
        return tuple(out)

    def _told(self, worn: Worn, entity: int) -> list[str]:
        points = self.points[worn.what]
        at = int(np.searchsorted(points.entity, entity))
        if at >= len(points.entity) or points.entity[at] != entity:
            return []
        line, left = (
            [float(c[at]) for c in part] for part in self._fitted()[worn.what]
        )  # level, slope, ..., first, span
        reference = float(points.reference[at])
        name = worn.words[0].upper() + worn.words[1:]
        if np.isnan(left[0]):
            last = points.value[(self.count - 1) % POINTS, at]
            off = float(last) / reference - 1.0
            if not np.isfinite(off) or (off if worn.rising else -off) <= worn.noise_pu:
                return []
            way = "above" if worn.rising else "below"
            return [f"{name} is {abs(off):.0%} {way} its early value; how fast it changes is unknown"]
        goal = f"{worn.limit_pu:.0%} of its early value"
        if left[0] == 0.0:
            return [f"{name} has passed {goal}"]
        moved, days = abs(line[0] - line[5]) / reference, line[6] / DAY_S
        way = "rose" if worn.rising else "fell"
        return [f"{name} {way} by {moved:.0%} of its early value in {days:.0f} days; at this rate {goal} is "
                f"reached in {_days(left)}"]  # fmt: skip

    def _told_remaps(self, entity: int) -> list[str]:
        points = self.points[REMAPS]
        at = int(np.searchsorted(points.entity, entity))
        if at >= len(points.entity) or points.entity[at] != entity:
            return []
        line, left = ([float(c[at]) for c in part] for part in self._fitted()[REMAPS])
        if np.isnan(line[0]):
            return []
        used = f"{line[0]:.0f} of {MOST_REMAPS:.0f} rows of memory are remapped, {line[0] - line[5]:.0f} of "
        used += f"them in the last {line[6] / DAY_S:.0f} days"
        if np.isnan(left[0]):
            return [f"{used}; how long the rest lasts is unknown"]
        return [f"{used}; at this rate none is left in {_days(left)}"]

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""
        for what, points in self.points.items():
            if what.partition(".")[0] == table:
                if what == REMAPS or table == "gpu":
                    points.keep(points.entity != entity)
                else:
                    points.value[:, entity], points.reference[entity] = np.nan, np.nan
                self._found = None

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Wear:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        out = Wear(site)
        out.t_ns, out.count, out.point_ns = self.t_ns.copy(), self.count, self.point_ns
        for what, points in self.points.items():
            source = old_of_new[what.partition(".")[0]]
            place = np.searchsorted(points.entity, source)
            inside = np.minimum(place, max(len(points.entity) - 1, 0))
            known = np.zeros(len(source), np.bool_)
            if len(points.entity):
                known = (source >= 0) & (points.entity[inside] == source)
            to = np.flatnonzero(known)
            new = out.points[what]
            if not len(new.entity):
                new.add(to.astype(np.int32))
                columns = np.arange(len(to))
            else:
                columns = to
            new.value[:, columns] = points.value[:, inside[to]]
            new.reference[columns] = points.reference[inside[to]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        points = {k: [p.entity, p.value, p.reference] for k, p in self.points.items()}
        return {"t_ns": self.t_ns, "count": self.count, "point_ns": self.point_ns, "points": points}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.t_ns = np.array(data["t_ns"])
        self.count, self.point_ns = int(data["count"]), int(data["point_ns"])
        for what, (entity, value, reference) in data["points"].items():
            if what in self.points:
                points = self.points[what] = Points(np.array(entity, np.int32))
                points.value, points.reference = np.array(value, np.float32), np.array(reference, np.float64)
        self._found = None


def _all(n: int) -> I32:
    return np.arange(n, dtype=np.int32)


def _n(site: Site, what: str) -> int:
    return site.sizes[what.partition(".")[0]]


def _counted(t_s: F64, count: F64) -> tuple[Trend, Left]:
    """What is left of rows to remap, by the counts [m, k]; a count that falls was another GPU's."""
    line = trend(t_s, count)
    with np.errstate(invalid="ignore"):
        last = np.fmax.reduce(count, axis=0) if len(count) else np.zeros(count.shape[1])
        first = np.fmin.reduce(count, axis=0) if len(count) else np.zeros(count.shape[1])
        told = np.where(np.isfinite(line.level), 0.0, np.nan)
        line = line._replace(level=last + told, first=first + told)
        return line, until_counted(last - first + told, line.span_s, MOST_REMAPS - last, LEAST_GROWN)


def _days(left: list[float]) -> str:
    """Such as `31 days (24 to 45)`."""
    mid, lo, hi = (value / DAY_S for value in left)
    return f"{mid:.0f} days ({lo:.0f} to {hi:.0f})"
