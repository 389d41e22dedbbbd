"""Metrics: the state of the site and the health of the daemon as Prometheus text.

The module formats the many series of the site itself, since a library takes fifteen times as long; their
number is bounded. Series without a current reading are left out, so that they end in Prometheus too.
prometheus-client formats the few series of the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from twin.api.comparisons import COMPARED, calibration_series
from twin.api.health import CHANCE, DAY_S, failed_since, failures, forecast_of, judged_at, parts_of
from twin.api.load_targets import target_series
from twin.api.runtime import Runtime
from twin.api.scopes import masks_of
from twin.api.state import alarms_of
from twin.api.summary import Pulse, quantile, severities
from twin.catalogue import NS, TABLES, Bool, Signal, TwinError, signal_of
from twin.contracts import Z90, Explainer, Explanation, KeyFigure
from twin.engine import Inquiry, explain, topics_of
from twin.report import health_texts as words
from twin.run import expected_columns
from twin.site import Site
from twin.telemetry import GOOD, QUALITY_NAMES

log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 100_000
# Of expected values beside them, by default; small tables first, so that GPUs of large sites are left out and
# stand in the figures of their racks
MAX_EXPECTED_SERIES = 50_000
MAX_FORECAST_SERIES = 2000
MAX_EXPLAINED_SERIES = 5000
LIKELIEST = 20  # nodes with a series of their own: thousands would be more than anybody charts
MAX_COUNTS = 100
SUMMED = ("node", "gpu")  # tables of which racks have sums
Masks = dict[str, Bool]
HOTTEST = replace(TABLES["gpu"].by_name["temp_c"], table="rack", name="gpu_temp_c_max")
# So that rates have a beginning
ALWAYS = ("heard", "unknown_codes", "unknown_entities", "unknown_tables")
ALWAYS_COUNTED = ("ticks_not_traced", "notes_dropped", "after_failed")


@dataclass(frozen=True)
class Column:
    """Copy of a signal's current values, with the labels of its entities."""

    signal: Signal
    value: np.ndarray
    good: np.ndarray
    labels: list[str]


class SiteSeries:
    """The series of the site. Labels are built once for each site."""

    def __init__(self) -> None:
        self._site = ""
        self._labels: dict[str, list[str]] = {}

    def take(
        self, live: Runtime, tables: Iterable[str], most: int = MAX_SERIES, inside: Masks | None = None
    ) -> tuple[list[Column], dict[str, int]]:
        """Return (copies of the series, series left out per table). Small tables come first.

        `inside`: only these entities, by table.
        """
        site, state = live.engine.site, live.engine.state
        self._keep_labels(site)
        columns: list[Column] = []
        left_out: dict[str, int] = {}
        room = most
        for name in sorted(tables, key=lambda t: site.sizes[t]):
            for signal in TABLES[name].by_name.values():
                good = state.tables[name].quality_of(signal, state.now_ns) == GOOD
                if inside is not None:
                    good &= inside[name]
                count = int(good.sum())
                if count > room:
                    left_out[name] = left_out.get(name, 0) + count
                    continue
                if count:
                    room -= count
                    current = state.tables[name]
                    rows = current.total if signal.kind == "counter" else current.value
                    columns.append(Column(signal, rows[signal.row].copy(), good, self._named(site, name)))
        if "rack" in tables and site.sizes["rack"] <= room:
            hottest = self._hottest(live)
            if inside is not None:
                hottest = replace(hottest, good=hottest.good & inside["rack"])
            columns.append(hottest)
        return columns, left_out

    def _keep_labels(self, site: Site) -> None:
        """Build the labels of this site."""
        if site.spec_hash != self._site:
            self._site, self._labels = site.spec_hash, {}

    def take_expected(
        self, live: Runtime, tables: Iterable[str], most: int, inside: Masks | None = None
    ) -> tuple[list[Column], dict[str, int]]:
        """The same of expected values, residuals and half bands. With racks come the mean residual of their
        nodes and GPUs, and how many of those readings are beyond their band."""
        self._keep_labels(live.engine.site)
        beside = {t: self._beside(live, t) for t in sorted(tables, key=lambda t: live.engine.site.sizes[t])}
        summed = {t: beside.get(t) or self._beside(live, t) for t in SUMMED if "rack" in beside}
        groups = [[c] for t, made in summed.items() for c in self._by_rack(live, t, made)]
        single, many = ([made[i : i + 3] for t, made in beside.items() if (t in SUMMED) == sums
                         for i in range(0, len(made), 3)] for sums in (False, True))  # fmt: skip
        columns: list[Column] = []
        left_out: dict[str, int] = {}
        room = most
        for group in [*single, *groups, *many]:  # sums of racks before what they sum
            if inside is not None:
                group = [replace(c, good=c.good & inside[c.signal.table]) for c in group]
            count = sum(int(c.good.sum()) for c in group)
            if count > room:
                key = f"{group[0].signal.table}/expected"
                left_out[key] = left_out.get(key, 0) + count
            elif count:
                room -= count
                named = self._named(live.engine.site, group[0].signal.table)
                columns += [replace(c, labels=named) for c in group]
        return columns, left_out

    def _beside(self, live: Runtime, table: str) -> list[Column]:
        """Three columns of each signal of a table that is compared: expected, residual, band; without labels,
        which take long for GPUs and are often not wanted."""
        out: list[Column] = []
        current = live.engine.state.tables[table]
        for name, (expected, sigma) in expected_columns(live.engine, table).items():
            signal = TABLES[table].by_name[name]
            good = current.quality_of(signal, live.engine.state.now_ns) == GOOD
            residual = np.where(good, current.value[signal.row] - expected, np.nan)
            for what, value in (("expected", expected), ("residual", residual), ("band", Z90 * sigma)):
                unit = "K" if signal.unit == "degC" and what != "expected" else signal.unit
                made = replace(signal, name=f"{name}_{what}", unit=unit)
                out.append(Column(made, value.copy(), np.isfinite(value), []))
        return out

    def _by_rack(self, live: Runtime, table: str, beside: list[Column]) -> list[Column]:
        """Return two columns of racks for each compared signal of their contents."""
        site = live.engine.site
        rack = site.rack_of_gpu if table == "gpu" else site.rack_of_node
        n, out = site.sizes["rack"], list[Column]()
        for residual, band in zip(beside[1::3], beside[2::3], strict=True):
            judged = residual.good & band.good
            count = np.bincount(rack[judged], minlength=n)
            total = np.bincount(rack[judged], residual.value[judged], n)
            beyond = judged & (np.abs(residual.value) > band.value)
            name = f"{table}_{residual.signal.name}".removesuffix("_residual")
            for what, value in (
                ("residual_mean", total / np.maximum(count, 1)),
                ("beyond_band", np.bincount(rack[beyond], minlength=n).astype(np.float64)),
            ):
                unit = "count" if what == "beyond_band" else residual.signal.unit
                made = replace(residual.signal, table="rack", name=f"{name}_{what}", unit=unit)
                out.append(Column(made, value, count > 0, []))
        return out

    def _hottest(self, live: Runtime) -> Column:
        """Return the hottest GPU of each rack, for charts of sites with too many GPUs to scrape."""
        site, gpus = live.engine.site, live.engine.state.tables["gpu"]
        signal = TABLES["gpu"].by_name["temp_c"]
        good = gpus.quality_of(signal, live.engine.state.now_ns) == GOOD
        value, start = np.full(site.sizes["rack"], np.nan), site.gpu_start_of_node[site.node_start_of_rack]
        filled = np.flatnonzero(np.diff(start))  # reduceat would give a rack without GPUs its neighbour's
        if len(filled):
            value[filled] = np.maximum.reduceat(
                np.where(good, gpus.value[signal.row], -np.inf), start[filled]
            )
        return Column(HOTTEST, value, np.isfinite(value), self._named(site, "rack"))

    def _named(self, site: Site, table: str) -> list[str]:
        if table not in self._labels:
            self._labels[table] = [labels_of(site, table, i) for i in range(site.sizes[table])]
        return self._labels[table]


PLACE_OF: dict[str, tuple[str, Callable[[Site], np.ndarray]]] = {
    "gpu": ("rack", lambda site: site.rack_of_gpu),
    "node": ("rack", lambda site: site.rack_of_node),
    "rack": ("hall", lambda site: site.hall_of_rack),
    "cdu": ("hall", lambda site: site.hall_of_cdu),
}


def labels_of(site: Site, table: str, entity: int) -> str:
    """Return the labels of an entity: its name, and its rack or hall for sums."""
    name, more = site.name(table, entity), ""
    if table in PLACE_OF:
        place, index = PLACE_OF[table]
        row = int(index(site)[entity])
        more = f',{place}="{escaped(site.names[place][row])}"' if row >= 0 else ""
    return f'{{name="{escaped(name)}"{more}}}'


def escaped(text: str) -> str:
    """Return an escaped label value for the text format."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render(columns: list[Column], left_out: dict[str, int]) -> bytes:
    """Return the text. Works on copies, so it may run beside the ticks."""
    out: list[str] = []
    for column in columns:
        signal = column.signal
        counts = signal.kind == "counter"
        name = f"racktwin_{signal.table}_{signal.name}" + ("_total" if counts else "")
        values = ", ".join(f"{i} {s}" for i, s in enumerate(signal.states))
        what = f"{signal.table} {signal.name}, {signal.unit}" + (f": {values}" if values else "")
        out.append(f"# HELP {name} {what}\n# TYPE {name} {'counter' if counts else 'gauge'}\n")
        index = np.flatnonzero(column.good & np.isfinite(column.value))
        numbers = column.value[index].tolist()
        labels = column.labels
        if counts:
            out += [f"{name}{labels[i]} {v}\n" for i, v in zip(index.tolist(), numbers, strict=True)]
        else:
            out += [f"{name}{labels[i]} {v:.9g}\n" for i, v in zip(index.tolist(), numbers, strict=True)]
    out.append("# HELP racktwin_series_left_out series beyond the bound, by table\n"
               "# TYPE racktwin_series_left_out gauge\n")  # fmt: skip
    out += [f'racktwin_series_left_out{{table="{t}"}} {n}\n' for t, n in sorted(left_out.items())]
    return "".join(out).encode()


class DaemonSeries(Collector):
    """Collector of the daemon's own metrics and those of policies."""

    def __init__(self, live: Runtime, pulse: Pulse, refused: dict[str, int]) -> None:
        self.live, self.pulse, self.refused = live, pulse, refused

    def collect(self) -> Iterator[Metric]:
        """Return the daemon's own metrics, then those of policies without names already in use."""
        names = {f"racktwin_{t}_{s}" for t, table in TABLES.items() for s in table.by_name}
        names.add(f"racktwin_{HOTTEST.table}_{HOTTEST.name}")
        for metric in self._own():
            names.add(metric.name)
            yield metric
        yield from (metric for metric in explained_series(self.live) if metric.name not in names)

    def _own(self) -> Iterator[Metric]:
        live = self.live
        yield InfoMetricFamily("racktwin", "this daemon", {
            "version": live.version, "site": live.engine.site.file.site,
            "site_hash": live.engine.site.spec_hash})  # fmt: skip
        yield from self._ticks()
        yield from self._parts()
        yield from self._decided()
        yield from self._expected()
        yield margins(live)
        yield from health_series(live)
        yield from calibration_series(live)
        yield from target_series(live)
        for name, what, counts in (
            ("refused", "requests to the interface that were refused", self.refused),
            ("counted", "counts of the daemon", dict.fromkeys(ALWAYS_COUNTED, 0) | live.counts),
            ("messages", "messages by outcome", _flat(live.messages())),
            ("events", "events with an unusual outcome", live.engine.intake.counts),
        ):
            yield _counted(f"racktwin_{name}", what, "what", counts)

    def _ticks(self) -> Iterator[Metric]:
        live, stats = self.live, self.live.stats
        yield CounterMetricFamily("racktwin_ticks", "ticks made", stats.ticks)
        yield CounterMetricFamily(
            "racktwin_ticks_skipped", "nominal ticks that did not happen", stats.skipped
        )
        yield CounterMetricFamily("racktwin_ticks_urgent", "ticks out of turn", stats.urgent)
        yield GaugeMetricFamily("racktwin_tick_age_seconds", "since the last tick", self.pulse.age_s(live))
        every_s = live.loaded.config.tick_s
        yield GaugeMetricFamily("racktwin_tick_every_seconds", "nominal length of a tick", every_s)
        for name, what, values in (("took", "duration of a tick", stats.took_s),
                                   ("late", "how late a tick begins", stats.late_s)):  # fmt: skip
            metric = GaugeMetricFamily(f"racktwin_tick_{name}_seconds", f"{what}; the last few hundred",
                                       labels=["percentile"])  # fmt: skip
            for share in (0.5, 0.99):
                value = quantile(values, share)
                if value is not None:
                    metric.add_metric([f"{100 * share:g}"], value)
            yield metric
        yield GaugeMetricFamily("racktwin_ready", "1 after the first tick", float(live.ready))
        yield GaugeMetricFamily("racktwin_leads", "1 where commands may leave", float(live.role == "leader"))
        yield GaugeMetricFamily("racktwin_epoch", "the leader's term", live.epoch)
        yield GaugeMetricFamily("racktwin_start_time_seconds", "since 1970", live.started_ns / NS)

    def _parts(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("racktwin_part_running", "1 where it runs", labels=["part", "kind"])
        restarts = GaugeMetricFamily(
            "racktwin_part_restarts", "since its last success", labels=["part", "kind"]
        )
        for part in self.live.parts.values():
            running.add_metric([part.name, part.kind], float(part.state == "running"))
            restarts.add_metric([part.name, part.kind], part.restarts)
        yield running
        yield restarts

    def _alarm_load(self) -> Iterator[Metric]:
        """Return the alarm load metrics of ISA-18.2 / IEC 62682 for one operator."""
        if self.live.alarms is None:
            return
        figures, raised = (
            self.live.alarms.figures(),
            CounterMetricFamily(
                "racktwin_alarms_raised", "alarms announced to an operator", labels=["severity"]
            ),
        )
        for severity, count in self.live.alarms.load.raised.items():
            raised.add_metric([severity], count)
        yield raised
        for name, what in (
            ("last_hour", "alarms per operator-hour: raised in the last hour"),
            ("stale", "alarms active for more than 24 h"),
            ("chattering", "alarms that come and go, held as one"),
            ("suppressed", "alarms that follow from another one and do not ring"),
            ("flood", "1 while ten alarms and more came within ten minutes"),
        ):
            yield GaugeMetricFamily(f"racktwin_alarms_{name}", what, figures[name])
        yield CounterMetricFamily("racktwin_alarms_floods", "floods of alarms", figures["floods"])
        yield CounterMetricFamily("racktwin_alarms_flood_seconds", "time in floods", figures["flood_s"])

    def _decided(self) -> Iterator[Metric]:
        live, engine = self.live, self.live.engine
        alarms = GaugeMetricFamily("racktwin_alarms", "active alarms", labels=["severity"])
        for severity, count in severities(alarms_of(live)).items():
            alarms.add_metric([severity], count)
        yield alarms
        yield from self._alarm_load()
        leases = GaugeMetricFamily("racktwin_leases", "entities under command", labels=["control"])
        for key, lease in engine.arbiter.leases.items():
            if lease.n:
                leases.add_metric([key], int(lease.running().sum()))
        yield leases
        advised = GaugeMetricFamily(
            "racktwin_advised_leases", "entities under command if advice were obeyed", labels=["control"]
        )
        for key, shadow in engine.arbiter.shadow.items():
            advised.add_metric([key], int((shadow.running() & shadow.apart).sum()))
        yield advised
        armed = GaugeMetricFamily("racktwin_policy_authority", "1 for the level in force",
                                  labels=["policy", "authority"])  # fmt: skip
        suspended = GaugeMetricFamily("racktwin_policy_suspended", "1 where it is", labels=["policy"])
        for policy in engine.policies:
            armed.add_metric([policy.name, engine.intake.authority[policy.name]], 1)
            suspended.add_metric([policy.name], float(policy.name in engine.suspended))
        yield armed
        yield suspended
        mode = GaugeMetricFamily("racktwin_mode", "1 for the mode in force", labels=["mode"])
        mode.add_metric([engine.arbiter.mode], 1)
        yield mode
        cells = GaugeMetricFamily(
            "racktwin_readings", "cells of the image by quality", labels=["table", "quality"]
        )
        for name, spec in TABLES.items():
            if not engine.site.sizes[name]:
                continue
            counts = np.zeros(len(QUALITY_NAMES), np.int64)
            for signal in spec.gauges:
                quality = engine.state.tables[name].quality_of(signal, engine.state.now_ns)
                counts += np.bincount(quality, minlength=len(QUALITY_NAMES))
            for quality_name, count in zip(QUALITY_NAMES, counts.tolist(), strict=True):
                cells.add_metric([name, quality_name], count)
        yield cells

    def _expected(self) -> Iterator[Metric]:
        """Return forecasts of the site and its feeders with their 90 % bands; those of the site come
        first."""
        engine, room, left_out = self.live.engine, MAX_FORECAST_SERIES, 0
        metrics: dict[str, GaugeMetricFamily] = {}
        current = sorted(
            engine.forecasts.items(), key=lambda item: (not item[0][0].startswith("site."), item[0])
        )
        for (key, horizon_s), forecast in current:
            table = key.partition(".")[0]
            if table not in ("site", "feeder"):
                continue
            edges = {"lo": forecast.lo, "mean": forecast.mean, "hi": forecast.hi}
            known = np.flatnonzero(np.isfinite(forecast.mean))
            taken = known[: room // len(edges)]
            room -= len(edges) * len(taken)
            left_out += len(edges) * (len(known) - len(taken))
            name = f"racktwin_forecast_{key.replace('.', '_')}"
            what = f"{key} expected; lo and hi bound 90 %"
            labels = ["name", "horizon_s", "edge"]
            for i in taken.tolist():
                metric = metrics.setdefault(name, GaugeMetricFamily(name, what, labels=labels))
                entity = engine.site.name(table, i)
                for edge, values in edges.items():
                    if np.isfinite(values[i]):  # a mean may come without an interval
                        metric.add_metric([entity, f"{horizon_s:g}", edge], float(values[i]))
        yield from metrics.values()
        yield GaugeMetricFamily("racktwin_forecasts_left_out", "series beyond the bound", left_out)


def margins(live: Runtime) -> Metric:
    """Return the least distance of any current reading to its limits, by signal; a negative distance is
    beyond a limit."""
    engine = live.engine
    metric = GaugeMetricFamily("racktwin_limit_margin", "least distance of a reading from its limit, in unit",
                               labels=["signal", "unit", "limit"])  # fmt: skip
    for key, limit in engine.site.limits.items():
        signal = signal_of(key)
        if signal.danger not in ("high", "low"):
            continue
        table, sign = engine.state.tables[signal.table], 1.0 if signal.danger == "high" else -1.0
        good = table.quality_of(signal, engine.state.now_ns) == GOOD
        for name, bound in (("guard", limit.guard), ("max", limit.max)):
            left = sign * (bound - table.value[signal.row])
            left = left[good & np.isfinite(left)]
            if len(left):
                metric.add_metric([key, signal.unit, name], float(left.min()))
    return metric


def explained_series(live: Runtime) -> Iterator[Metric]:
    """Return the figures that policies mark as metrics in their explanations; the first of equal labels
    counts."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    shapes: dict[str, tuple[str, ...]] = {}  # kind and names of labels
    known: set[tuple[str, ...]] = set()
    left_out = 0
    for figure in marked_figures(live):
        metric, value = figure.metric, figure.value
        if metric is None or not isinstance(value, int | float):
            continue
        shape = (metric.kind, *metric.labels)
        labels = (metric.name, *metric.labels.values())
        if shapes.setdefault(metric.name, shape) != shape or len(known) >= MAX_EXPLAINED_SERIES:
            left_out += 1
        elif labels not in known:
            known.add(labels)
            if metric.name not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric.name] = kind(
                    f"racktwin_{metric.name}", figure.text, labels=list(metric.labels)
                )
            families[metric.name].add_metric(list(labels[1:]), float(value))
    yield from families.values()
    yield GaugeMetricFamily("racktwin_explained_left_out", "figures beyond the bound, or at odds", left_out)


def marked_figures(live: Runtime) -> Iterator[KeyFigure]:
    """Return the figures of all policies with explanations; a failed explanation is counted and left out."""
    for policy in live.engine.policies:
        if not isinstance(policy, Explainer):
            continue
        topic = "metrics" if any(t.name == "metrics" for t in topics_of(policy)) else ""
        inquiry = Inquiry(topic=topic, role=live.role, account=live.accounts.get(policy.name))
        try:
            found = explain(live.engine, policy, inquiry)
        except TwinError as error:
            live.counts["explanations_failed"] = live.counts.get("explanations_failed", 0) + 1
            log.debug("metrics: %s", error)
            continue
        if isinstance(found, Explanation):
            yield from found.figures


def _flat(tree: Any, head: str = "", most: int = 200) -> dict[str, int]:
    """Return the whole numbers of a nested mapping by path, bounded because messages name its entries."""
    out: dict[str, int] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        path = f"{head}.{key}" if head else str(key)
        if isinstance(value, dict):
            out |= _flat(value, path, most - len(out))
        elif isinstance(value, int) and not isinstance(value, bool):
            out[path] = value
        if len(out) >= most:
            break
    return out


def _counted(name: str, what: str, label: str, counts: dict[str, int]) -> Metric:
    metric = CounterMetricFamily(name, what, labels=[label])
    for key, value in list(counts.items())[:200]:
        metric.add_metric([str(key)[:200]], value)
    return metric


class Metrics:
    """Both kinds of series of one daemon."""

    def __init__(self, live: Runtime, pulse: Pulse, refused: dict[str, int]) -> None:
        self.live, self.site = live, SiteSeries()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(DaemonSeries(live, pulse, refused))

    def own(self) -> bytes:
        """Return the daemon's own series."""
        return generate_latest(self.registry)

    def of_site(
        self, tables: Iterable[str], expected: Iterable[str] | None = None, prefix: str = ""
    ) -> tuple[list[Column], dict[str, int]]:
        """Copies of the site's columns, to be rendered beside the ticks; with expected values of some tables,
        and only of what is at or inside a place.

        `expected` None: of the compared tables among `tables`, as far as there is room for them. GPUs and
        nodes without room do not count as left out, since their racks have figures of them.
        """
        inside = masks_of(self.live, TABLES, prefix) if prefix else None
        columns, left_out = self.site.take(self.live, tables, inside=inside)
        wanted = [t for t in COMPARED if t in tables] if expected is None else expected
        most = MAX_EXPECTED_SERIES if expected is None else MAX_SERIES
        more, unseen = self.site.take_expected(self.live, wanted, most, inside)
        if expected is None:
            unseen = {name: n for name, n in unseen.items() if name.partition("/")[0] not in SUMMED}
        return columns + more, left_out | unseen


def health_series(live: Runtime) -> Iterator[Metric]:
    """Yield the health metrics, one after the other."""
    engine = live.engine
    parts = GaugeMetricFamily("racktwin_health_parts", "parts of a kind at a level", labels=["part", "level"])
    for part, levels in parts_of(live).items():
        for level, count in levels.items():
            parts.add_metric([part, level], count)
    yield parts
    age_s = judged_at(live)["judged_s"]
    if age_s is not None:
        yield GaugeMetricFamily(
            "racktwin_health_age_seconds", "since the last full health check, in site time", age_s
        )
    lemons = int(engine.health.lemons.is_lemon().sum())
    yield GaugeMetricFamily("racktwin_health_lemons", "nodes that fail more often than others", lemons)
    seen = failures(live)
    by_class = GaugeMetricFamily("racktwin_node_failures", "failures remembered", labels=["class"])
    for name, count in seen["by_class"].items():
        by_class.add_metric([name], count)
    yield by_class
    yield GaugeMetricFamily("racktwin_nodes_down", "nodes whose failure is not over", seen["down"])
    yield GaugeMetricFamily("racktwin_nodes_down_together", "of them, by a cause in common",
                            seen["down_together"])  # fmt: skip
    faults = CounterMetricFamily("racktwin_health_faults", "faults that devices reported", labels=["what"])
    counts = dict.fromkeys(ALWAYS, 0) | engine.health.book.counts
    for what, count in list(counts.items())[:MAX_COUNTS]:
        faults.add_metric([what], count)
    yield faults
    yield _likeliest(live)


def _likeliest(live: Runtime) -> Metric:
    """Return the chances of the nodes that are likeliest to fail within a day; these nodes change with
    time, and none of them has failed."""
    metric = GaugeMetricFamily("racktwin_node_failure_probability",
                               f"of the {LIKELIEST} nodes likeliest to fail within a day",
                               labels=["name", "horizon_s"])  # fmt: skip
    day = forecast_of(live, CHANCE, DAY_S)
    if day is None:
        return metric
    up = failed_since(live) == 0
    chance = np.where(up, np.nan_to_num(day.mean.astype(np.float64), nan=-1.0), -1.0)
    likeliest = np.argsort(-chance, kind="stable")[:LIKELIEST]
    for horizon_s in words.HORIZONS_S:
        forecast = forecast_of(live, CHANCE, horizon_s)
        if forecast is None:
            continue
        for i in likeliest.tolist():
            if up[i] and np.isfinite(forecast.mean[i]):
                metric.add_metric([live.engine.site.name("node", i), f"{horizon_s:g}"],
                                  float(forecast.mean[i]))  # fmt: skip
    return metric
