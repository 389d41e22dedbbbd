"""Collector: watches an engine tick by tick and keeps the data of a report, in bounded memory.

Site-wide sums, extremes and a bounded number of single entities go into one `Timeline`; costly work (sorting
100,000 GPUs, the age of every cell) is spread over many ticks. It reads the engine and never changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, TABLES, Signal, signal_of
from twin.contracts import Decision, Residual
from twin.engine import Engine
from twin.estimation import Balance, worst_case
from twin.report.decimation import CAPACITY, Timeline, extremes, spread
from twin.report.episodes import Episodes
from twin.site import Site, hall_count
from twin.telemetry import QUALITY_NAMES, Frame, TableState

MAX_KEPT = 96  # entities of a table with a series of their own
MAX_SHOWN = 24  # of these, the largest are drawn
SMALL = 20_000  # values looked at in every tick; larger tables in every second, third, ...
SORT_EVERY = 2_500  # a sort of n values is due every n / SORT_EVERY ticks
QUALITY_BUDGET = 200.0  # microseconds per tick, by the estimate in `_quality`
SPREAD = ("least", "p10", "median", "p90", "greatest")

# Signals that are worth a series, wherever a site reports them. Site-wide gauges are all taken.
WATCHED = (
    "rack.power_w",
    "node.power_w",
    "gpu.power_w",
    "feeder.power_w",
    "rack.supply_temp_c",
    "rack.return_temp_c",
    "rack.flow_lpm",
    "rack.inlet_temp_c",
    "cdu.supply_temp_c",
    "cdu.return_temp_c",
    "cdu.flow_lpm",
    "loop.supply_temp_c",
    "loop.return_temp_c",
    "hall.cold_aisle_temp_c",
    "hall.hot_aisle_temp_c",
    "node.inlet_temp_c",
    "node.outlet_temp_c",
    "node.water_inlet_temp_c",
    "node.cpu_temp_c",
    "gpu.temp_c",
    "gpu.hbm_temp_c",
    "gpu.thermal_margin_k",
    "gpu.util_pu",
    *(s.key for s in TABLES["site"].gauges),
)


class SignalQuality(NamedTuple):
    """Of one signal: reported cells, and their share per quality [5], over the run and at its end."""

    key: str
    n_reporting: int
    share: F64
    share_at_end: F64


class HeatRow(NamedTuple):
    """Of one rack: the learned share of its power in the liquid, with the half width of its 90 % interval."""

    rack: str
    capture_pu: float
    half_width_pu: float
    looks: int
    sigma_k: float


@dataclass(slots=True)
class _Cells:
    """Counts of cells by quality of one signal, latest and summed over the run."""

    latest: I64 = field(default_factory=lambda: np.zeros(5, np.int64))
    total: I64 = field(default_factory=lambda: np.zeros(5, np.int64))


class _Watch:
    """One monitored signal on the present site: its entities with a series, and True if it ever reported."""

    def __init__(self, signal: Signal, site: Site, kept: I32 | None) -> None:
        self.signal, self.n = signal, site.sizes[signal.table]
        self.kept = kept
        self.names = [] if kept is None else [site.name(signal.table, int(i)) for i in kept]
        self.is_reporting = False
        self.peak = TABLES[signal.table].by_name.get(signal.name + "_max")
        self.every = -(-self.n // SMALL)
        self.sort_every = max(1, self.n // SORT_EVERY)


class Collector:
    """Collects the data of a report. Call `observe` after every tick; the report reads the rest."""

    def __init__(self, points: int = CAPACITY) -> None:
        self.time = Timeline(points)
        self.episodes = Episodes()
        self.ticks = 0
        self.first_ns: int | None = None
        self.last_ns = 0
        self.quality: dict[str, _Cells] = {}
        self.reporting: dict[str, int] = {}  # signal -> entities with a value
        self._engine: Engine | None = None
        self._site: Site | None = None
        self._watches: list[_Watch] = []
        self._rows: list[tuple[str, Signal]] = []
        self._next_row = 0
        self._outer: I32 = np.zeros(0, np.int32)
        self._balances_kept: I32 = np.zeros(0, np.int32)
        self._labels: dict[str, dict[str, int]] = {}  # track -> label -> its row, as first given

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Take in the state after a tick."""
        if engine.site is not self._site:
            self._bind(engine)
        self.first_ns = frame.now_ns if self.first_ns is None else self.first_ns
        self.last_ns = frame.now_ns
        self.time.advance(frame.now_ns)
        for watch in self._watches:
            column = engine.state.tables[watch.signal.table]
            if not watch.is_reporting:
                # no scan: a cell that is good now has reported
                watch.is_reporting = bool(column.bad_count[watch.signal.row] < watch.n)
            if watch.is_reporting and self.ticks % watch.every == 0:
                self._look(watch, column, engine.site)
        self._margin(engine)
        self._residuals(engine)
        concerned = [
            self.episodes.act("command", decision.commands, engine.site, engine.jobs),
            self.episodes.act("advice", decision.advice, engine.site, engine.jobs),
        ]
        if any(concerned) or "decisions" in self.time.tracks:
            self.time.add("decisions", ("command", "advice"), np.array(concerned, np.float64))
        for record in decision.records:
            self.episodes.record(record, frame.now_ns)
        self._quality(engine)
        self.ticks += 1

    def _bind(self, engine: Engine) -> None:
        """Bind the series to this site; again after a change, when indices move but names stay."""
        self._engine, self._site = engine, engine.site
        site = engine.site
        self._watches = []
        for key in WATCHED:
            signal = signal_of(key)
            if n := site.sizes[signal.table]:
                self._watches.append(
                    _Watch(signal, site, np.arange(n, dtype=np.int32) if n <= MAX_KEPT else None)
                )
        self._rows = [
            (table, s)
            for table, n in site.sizes.items()
            if n
            for s in (*TABLES[table].gauges, *TABLES[table].counters)
            if s.base is None
        ]
        self._next_row = 0
        self.quality = {k: c for k, c in self.quality.items() if k in {s.key for _, s in self._rows}}
        for cells in self.quality.values():
            cells.latest[:] = 0
        balances = engine.estimator.balances
        whole = [
            i for i, b in enumerate(balances) if len(b.racks) and (site.parent_of_feeder[b.meters] < 0).all()
        ]
        self._outer = np.array(whole, np.int32)
        # outermost sums first, then the others in the order of the tree
        order = [*whole, *(i for i in range(len(balances)) if i not in set(whole))]
        self._balances_kept = np.array(order[:MAX_SHOWN], np.int32)

    def _add(self, track: str, labels: list[str], values: F32 | F64, high: F32 | F64 | None = None) -> None:
        """Add values by label, so that a series goes on although its entity's index has moved."""
        known = self.time.tracks.get(track)
        if known is None or known.labels == labels:
            self.time.add(track, labels, values, high)
            return
        rows = self._labels.setdefault(track, {label: i for i, label in enumerate(known.labels)})
        moved = np.full((2, len(known.labels)), np.nan)
        for i, label in enumerate(labels):
            if label in rows:
                moved[:, rows[label]] = values[i], values[i] if high is None else high[i]
        self.time.add(track, known.labels, moved[0], moved[1])

    def _look(self, watch: _Watch, column: TableState, site: Site) -> None:
        signal, key = watch.signal, watch.signal.key
        values = column.value[signal.row]
        if watch.kept is None and signal.table in ("rack", "feeder", "cdu", "hall"):
            self._choose(watch, values, column, site)
        if watch.kept is not None:  # a line ends where its sensor fell silent
            current = column.current(signal, self.last_ns, watch.kept)
            shown = np.where(current, values[watch.kept], np.float32(np.nan))
            high = None if watch.peak is None else column.value[watch.peak.row][watch.kept]
            self._add(key, watch.names, shown, high)
        if signal.name == "power_w":
            total = float(values.sum(dtype=np.float64))
            n_reporting = watch.n
            if total != total:
                total = float(np.nansum(values, dtype=np.float64))
                n_reporting = int(np.count_nonzero(np.isfinite(values)))
            self.time.add("sum " + key, (key, "heard"), np.array([total, n_reporting]))
        if watch.n > MAX_SHOWN:
            seen = spread(values) if self.ticks % watch.sort_every == 0 else extremes(values)
            self.time.add("spread " + key, SPREAD, seen)

    def _choose(self, watch: _Watch, values: F32, column: TableState, site: Site) -> None:
        """Choose the entities with a series: the largest by power, once half of them have reported."""
        power = (
            column.value[TABLES[watch.signal.table].by_name["power_w"].row]
            if watch.signal.table in ("rack", "feeder")
            else values
        )
        known = np.isfinite(power)
        if np.count_nonzero(known) * 2 < watch.n:
            return
        largest = np.argsort(np.where(known, -power, np.inf), kind="stable")[:MAX_KEPT]
        watch.kept = np.sort(largest).astype(np.int32)
        watch.names = [site.name(watch.signal.table, int(i)) for i in watch.kept]

    def _margin(self, engine: Engine) -> None:
        """Return the kelvins between the hottest possible GPU and its limit; silence counts as heating up."""
        limit = engine.site.limits.get("gpu.temp_c")
        n = engine.site.sizes["gpu"]
        if limit is None or not n or self.ticks % max(1, n // SORT_EVERY):
            return
        signal = TABLES["gpu"].by_name["temp_c"]
        column = engine.state.tables["gpu"]
        if column.bad_count[signal.row] == n and "margin" not in self.time.tracks:
            return
        worst = worst_case(engine.site, engine.state, engine.estimator, engine.windows, signal)
        margin = limit.max - worst
        self.time.add("margin", ("worst case",), np.array([np.fmin.reduce(margin)]))

    def _residuals(self, engine: Engine) -> None:
        heat = engine.estimator.residuals.get("rack.heat")
        power = next((w for w in self._watches if w.signal.key == "rack.power_w"), None)
        if heat is not None and power is not None and power.kept is not None and power.is_reporting:
            expected = heat.expected[power.kept]
            if "heat.expected" in self.time.tracks or np.isfinite(expected).any():
                self._add("heat.expected", power.names, expected)
                self._add("heat.measured", power.names, heat.measured[power.kept])
                self._add("heat.difference", power.names, heat.difference[power.kept])
        tree = engine.estimator.residuals.get("feeder.balance")
        if tree is None or not len(self._balances_kept):
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            off_pu = np.where(tree.expected > 0, tree.difference / tree.expected, np.nan)
        if "balance" in self.time.tracks or np.isfinite(off_pu).any():
            self._add(
                "balance",
                [engine.estimator.balances[i].name for i in self._balances_kept],
                off_pu[self._balances_kept],
            )
            whole = self._outer[np.isfinite(off_pu[self._outer])]
            load = float(tree.expected[whole].sum())
            off = float(tree.difference[whole].sum())
            self.time.add("tree", ("all meters",), np.array([off / load if load > 0 else np.nan]))

    def _quality(self, engine: Engine) -> None:
        """Judge as many signals as the budget allows, each tick the next ones."""
        spent, begun = 0.0, self._next_row
        while self._rows and spent < QUALITY_BUDGET:
            table, signal = self._rows[self._next_row]
            column = engine.state.tables[table]
            n = column.n
            due = n <= SMALL or self.ticks % -(-n // SMALL) == 0
            spent += self._judge(column, signal) if due else QUALITY_BUDGET
            self._next_row = (self._next_row + due) % len(self._rows)
            if self._next_row == begun:
                break
        shares = np.zeros(5, np.int64)
        for cells in self.quality.values():
            shares += cells.latest
        if shares.sum():
            self.time.add("quality", QUALITY_NAMES, shares / shares.sum())

    def _judge(self, column: TableState, signal: Signal) -> float:
        """Count the cells of a signal by quality; returns the estimated time, in microseconds."""
        n, now_ns = column.n, self._engine.state.now_ns if self._engine else 0
        if signal.kind == "counter":
            reporting = column.raw[signal.row] >= 0
        elif column.bad_count[signal.row] == 0:
            reporting = np.ones(n, np.bool_)
        else:
            reporting = np.isfinite(column.value[signal.row])
        if not reporting.any():
            return 3.0 + n / 3000
        counts = np.bincount(column.quality_of(signal, now_ns)[reporting], minlength=5)[:5]
        cells = self.quality.setdefault(signal.key, _Cells())
        cells.latest[:] = counts
        cells.total += counts
        self.reporting[signal.key] = int(reporting.sum())
        return 25.0 + n / 80

    def finish(self) -> None:
        """Judge every signal once more, so that the shares at the end are those of the last tick."""
        if self._engine is not None:
            for table, signal in self._rows:
                self._judge(self._engine.state.tables[table], signal)

    def signal_qualities(self) -> list[SignalQuality]:
        """Return the quality of each signal that ever reported, the worst first."""
        found = [
            SignalQuality(
                k, int(c.latest.sum()), c.total / max(1, c.total.sum()), c.latest / max(1, c.latest.sum())
            )
            for k, c in self.quality.items()
        ]
        return sorted(found, key=lambda q: (q.share[0], q.key))

    def heat_rows(self, most: int = MAX_SHOWN) -> list[HeatRow]:
        """Return the racks with a known liquid share, the largest powers first, at most `most`."""
        if self._engine is None or self._site is None:
            return []
        estimator = self._engine.estimator
        capture, sigma = estimator.liquid_capture(), estimator.heat_noise.sigma()
        power = self._engine.state.tables["rack"].value[TABLES["rack"].by_name["power_w"].row]
        known = np.flatnonzero(np.isfinite(capture))
        order = known[np.argsort(-np.nan_to_num(power[known]), kind="stable")][:most]
        order = np.sort(order)
        half = 1.645 * np.sqrt(estimator.capture_var)
        return [
            HeatRow(
                self._site.name("rack", int(i)),
                float(capture[i]),
                float(half[i]),
                int(estimator.capture_count[i]),
                float(sigma[i]),
            )
            for i in order
        ]

    def balances(self) -> tuple[list[Balance], Residual | None, I32]:
        """Return (all balances, their last comparison, those with a series)."""
        if self._engine is None:
            return [], None, self._balances_kept
        estimator = self._engine.estimator
        return estimator.balances, estimator.residuals.get("feeder.balance"), self._balances_kept

    def sizes(self) -> dict[str, int]:
        """Return the number of entities of the site per table, without empty tables."""
        return {} if self._site is None else {t: n for t, n in self._site.sizes.items() if n and t != "job"}

    def hall_count(self) -> int:
        """Return the racks of the site that are halls of a fleet; 0 for any site except a hub's."""
        return 0 if self._site is None else hall_count(self._site)

    def budget_w(self) -> F64:
        """Return the budget per root feeder of the site file; NaN without one."""
        return np.zeros(0) if self._site is None else self._site.budget_w[self._site.parent_of_feeder < 0]

    def authority(self, policy: str) -> str:
        """Return the authority of a policy at the end."""
        return "" if self._engine is None else self._engine.intake.authority.get(policy, "")

    def policies(self) -> list[str]:
        """Return the names of the policies that took part."""
        return [] if self._engine is None else [p.name for p in self._engine.policies]

    @property
    def span_s(self) -> float:
        """Return the seconds from the first tick to the last."""
        return 0.0 if self.first_ns is None else (self.last_ns - self.first_ns) / NS
