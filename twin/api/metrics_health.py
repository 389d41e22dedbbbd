"""Metrics of health: parts per level, lemons, failures, and the nodes likeliest to fail. All are bounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twin.api.health import CHANCE, DAY_S, counted, failures, forecast_of, levels_of, looked
from twin.api.runtime import Runtime
from twin.contracts import PARTS
from twin.report import health_texts as words

LIKELIEST = 20  # nodes with a series of their own: thousands would be more than anybody charts
MAX_COUNTS = 100
ALWAYS = ("heard", "unknown_codes", "unknown_entities", "unknown_tables")  # so that rates have a beginning


def health_series(live: Runtime) -> Iterator[Metric]:
    """One metric after the other."""
    engine = live.engine
    parts = GaugeMetricFamily("racktwin_health_parts", "parts of a kind at a level", labels=["part", "level"])
    for part, table in PARTS.items():
        if engine.site.sizes[table]:
            for level, count in counted(levels_of(live, part)).items():
                parts.add_metric([part, level], count)
    yield parts
    age_s = looked(live)["judged_s"]
    if age_s is not None:
        yield GaugeMetricFamily("racktwin_health_age_seconds", "since all was judged, in site time", age_s)
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
    """Chances of the nodes that are likeliest to fail within a day; which they are changes with time."""
    metric = GaugeMetricFamily("racktwin_node_failure_probability",
                               f"of the {LIKELIEST} nodes likeliest to fail within a day",
                               labels=["name", "horizon_s"])  # fmt: skip
    day = forecast_of(live, CHANCE, DAY_S)
    if day is None:
        return metric
    chance = np.nan_to_num(day.mean.astype(np.float64), nan=-1.0)
    likeliest = np.argsort(-chance, kind="stable")[:LIKELIEST]
    for horizon_s in words.HORIZONS_S:
        forecast = forecast_of(live, CHANCE, horizon_s)
        if forecast is None:
            continue
        for i in likeliest.tolist():
            if np.isfinite(forecast.mean[i]):
                metric.add_metric([live.engine.site.name("node", i), f"{horizon_s:g}"],
                                  float(forecast.mean[i]))  # fmt: skip
    return metric
