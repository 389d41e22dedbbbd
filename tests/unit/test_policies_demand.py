"""Policies by the forecast of demand: spares are given to jobs that will wait, inference gets its reserve."""

from __future__ import annotations

import numpy as np
import pytest

from policies.node_replacement.spare_count import demand_ahead, spare_pool_of, wanted_band
from policies.power_capping import PowerCap
from policies.power_capping.demand import REQUESTS, requests_growth, wants
from tests.support.builders import Twin, two_racks
from twin.contracts import ExplainRequest, Explanation, Forecast, View
from twin.telemetry.events import JobStarted

DEMAND, FAILURE = "site.gpu_demand_count", "node.failure_pu"


def forecast(twin: Twin, key: str, horizon_s: float, mean: float, high: float | None = None) -> None:
    """A forecast in force, as a model would have left it."""
    n = twin.site.sizes[key.partition(".")[0]]
    centre = np.full(n, mean, np.float32)
    wide = np.full(n, mean if high is None else high, np.float32)
    twin.engine.forecasts[key, horizon_s] = Forecast(key, horizon_s, centre, centre, wide, "m", "b")


def view_of(twin: Twin) -> View:
    return twin.engine.view(1.0)


@pytest.fixture
def spared() -> Twin:
    """Two racks with four spares each: 112 GPUs beside 32 of spares."""
    tree = two_racks()
    for rack in tree["halls"][0]["racks"]:
        rack["spare_nodes"] = 4
    twin = Twin(tree)
    twin.tick({"node.service_level_state": 0.0})
    forecast(twin, FAILURE, 86_400.0, 0.007)
    return twin


def test_no_more_spares_than_needed_where_jobs_will_wait(spared: Twin) -> None:
    alone = wanted_band(view_of(spared))
    assert alone is not None
    low, high = alone
    assert low < high
    forecast(spared, DEMAND, 3600.0, 100.0)
    assert wanted_band(view_of(spared)) == (low, high)
    forecast(spared, DEMAND, 21_600.0, 130.0)
    assert wanted_band(view_of(spared)) == (low, low)
    found = demand_ahead(view_of(spared))
    assert found is not None
    assert (found.gpus, found.horizon_s, found.there, found.short) == (130.0, 21_600.0, 112, True)
    pool = spare_pool_of(view_of(spared))
    assert pool is not None
    assert (
        "130 GPUs are expected to be in demand within 6 h, 112 are there beside the spares" in pool.sentence
    )


def test_an_unknown_demand_changes_nothing(spared: Twin) -> None:
    alone = wanted_band(view_of(spared))
    forecast(spared, DEMAND, 21_600.0, np.nan)
    forecast(spared, DEMAND, 86_400.0, 140.0)  # too far ahead
    assert wanted_band(view_of(spared)) == alone
    assert demand_ahead(view_of(spared)) is None


def serving(rate: float) -> Twin:
    """Inference on the first nine nodes of a rack, training on the others; all draw 500 W a GPU."""
    twin = Twin(two_racks(), [PowerCap()])
    jobs = [
        JobStarted(job="chat", nodes=tuple(f"lab/h/r1/node{i}" for i in range(9)), kind="inference"),
        JobStarted(job="llm", nodes=tuple(f"lab/h/r1/node{i}" for i in range(9, 18)), kind="training"),
    ]
    twin.tick({"gpu.power_w": 500.0, "gpu.power_limit_w": 1200.0, REQUESTS: rate}, *jobs)
    return twin


def test_inference_is_planned_with_the_requests_that_may_come() -> None:
    twin = serving(100.0)
    n = twin.site.sizes["gpu"]
    before = wants(view_of(twin), np.zeros(n), 0.0).demand_w
    forecast(twin, REQUESTS, 900.0, 110.0, 150.0)
    assert requests_growth(view_of(twin)) == pytest.approx(1.5)
    after = wants(view_of(twin), np.zeros(n), 0.0).demand_w
    idle_w = twin.site.design.gpu_idle_w[0]
    np.testing.assert_allclose(after[:36], before[:36] + 0.5 * (before[:36] - idle_w))
    np.testing.assert_array_equal(after[36:], before[36:])
    said = PowerCap().explain(view_of(twin), {}, ExplainRequest())
    assert isinstance(said, Explanation)
    assert any("1.5 times the present rate" in s.text for s in said.sentences)


@pytest.mark.parametrize("now, high", [(100.0, 90.0), (0.0, 50.0), (np.nan, 50.0), (100.0, np.nan)])
def test_requests_that_do_not_rise_or_are_not_known_reserve_nothing(now: float, high: float) -> None:
    twin = serving(now)
    forecast(twin, REQUESTS, 900.0, 50.0, high)
    assert requests_growth(view_of(twin)) == 1.0
