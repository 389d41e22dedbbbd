"""Metrics of replacement: nodes by phase, spares, the circuit breaker, and how predictions before steps did.

Part of the shell.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from policies.replacement_gate import score
from twin.app.checkpoint_plans import view_of
from twin.app.live import Live
from twin.app.replacement_plan import memory_of, phase_counts
from twin.app.replacement_pool import breaker_of, pool_told


def replacement_series(live: Live) -> Iterator[Metric]:
    """One metric after the other; none where the policy does not run."""
    memory = memory_of(live)
    if memory is None:
        return
    phases = GaugeMetricFamily("racktwin_replacement_nodes", "nodes in a phase", labels=["phase"])
    for phase, count in phase_counts(memory).items():
        phases.add_metric([phase], count)
    yield phases
    view = view_of(live)
    pool = pool_told(view)
    spares = GaugeMetricFamily("racktwin_replacement_spares", "spare nodes", labels=["what"])
    for what in ("have", "free", "kept", "wanted"):
        if pool[what] is not None:
            spares.add_metric([what], pool[what])
    yield spares
    broken = breaker_of(live, view, memory)
    yield GaugeMetricFamily("racktwin_replacement_breaker_open", "1 while too many look bad at once",
                            float(broken["open"]))  # fmt: skip
    yield GaugeMetricFamily("racktwin_replacement_held", "nodes that the breaker holds back", broken["nodes"])
    told = score(memory)
    yield CounterMetricFamily("racktwin_replacement_predictions", "before steps, settled",
                              told.settled)  # fmt: skip
    if told.settled:
        yield GaugeMetricFamily("racktwin_replacement_brier", "mean square of (chance - what came) of these",
                                told.brier)  # fmt: skip
    sums = CounterMetricFamily("racktwin_replacement_interruptions", "of these: summed, and how many came",
                               labels=["what"])  # fmt: skip
    sums.add_metric(["predicted"], told.said_pu)
    sums.add_metric(["came"], told.failed)
    yield sums
    hours = CounterMetricFamily("racktwin_replacement_gpu_hours", "of these: predicted, and lost",
                                labels=["what"])  # fmt: skip
    hours.add_metric(["predicted"], max(0.0, told.said_gpu_h))
    hours.add_metric(["lost"], max(0.0, told.came_gpu_h))
    yield hours
    tests = CounterMetricFamily("racktwin_replacement_tests", "of nodes that were withdrawn", labels=["what"])
    tests.add_metric(["bad"], told.bad)
    tests.add_metric(["well"], max(0, told.tests - told.bad))
    yield tests
