"""Claims of jobs and tenants on a budget: floors, guaranteed shares, priorities, and learned curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.power_capping import Curve, classes, energy_minimum_w, tenants_of
from policies.power_capping.demand import HIGH, USUAL, WAITED_FOR
from tests.support.powered_plant import Loop
from tests.unit.test_power_cap import gpus, loop_of, site
from tests.unit.test_power_cap_outside import price
from twin.catalogue import NS
from twin.contracts import Forecast
from twin.telemetry import JobStarted


def held(name: str, nodes: range, **more: Any) -> JobStarted:
    names = tuple(f"lab/h/r{1 + i // 18}/node{i % 18}" for i in nodes)
    return JobStarted(job=name, nodes=names, **({"kind": "training"} | more))


def mean_w(loop: Loop, nodes: range) -> float:
    return float(loop.gpu_w[gpus(nodes)].mean())


@pytest.mark.parametrize("coupling", ["synchronous", "independent"])
def test_a_job_keeps_its_floor_before_others_of_its_class_rise(coupling: Any) -> None:
    """150 kW leave 107 kW for 144 GPUs, about 710 W each; 36 GPUs of a job shall keep 36 kW."""
    loop = loop_of(site(150_000, 150_000))
    loop.wants_w[:] = 1200.0
    loop.tick(held("kept", range(0, 9), floor_w=36_000.0, coupling=coupling), held("other", range(9, 36)))
    loop.run(200, 5.0)
    assert mean_w(loop, range(0, 9)) >= 1000.0 - 1.0
    assert mean_w(loop, range(9, 36)) < 650.0


def test_a_floor_gives_way_to_a_budget() -> None:
    loop = loop_of(site(80_000, 80_000))
    loop.wants_w[:] = 1200.0
    loop.tick(held("kept", range(0, 18), floor_w=72_000.0), held("other", range(18, 36)))
    loop.run(100, 5.0)
    assert loop.rack_w.sum() <= 80_000
    assert mean_w(loop, range(18, 36)) == 200.0
    assert mean_w(loop, range(0, 18)) > 200.0


def test_a_tenant_has_its_share_whatever_the_others_priority() -> None:
    loop = loop_of(site(150_000, 150_000), high_priority=5, tenants="acme=0:0.5, beta=0:0.1")
    loop.wants_w[:] = 1200.0
    loop.tick(held("a", range(0, 12), tenant="acme"), held("b", range(12, 36), tenant="beta", priority=9))
    loop.run(200, 5.0)
    acme_w, all_w = loop.gpu_w[gpus(range(0, 12))].sum(), loop.gpu_w.sum()
    assert acme_w / all_w == pytest.approx(0.5, abs=0.02)
    assert mean_w(loop, range(12, 36)) < 600.0


def test_tenants_raise_the_class_of_their_jobs_and_never_lower_it() -> None:
    loop = loop_of(site(), high_priority=5)
    loop.tick(held("a", range(0, 9), tenant="acme"), held("b", range(9, 18), tenant="beta", priority=9))
    loop.tick(held("c", range(18, 27), tenant="x"), held("d", range(27, 36), tenant="acme", kind="inference"))
    tenants = tenants_of("acme=7:0, beta=0:0.5")
    assert tenants == {"acme": (7, 0.0), "beta": (0, 0.5)}
    found = classes(loop.twin.engine.view(1.0), 5, tenants).reshape(4, -1)[:, 0]
    assert found.tolist() == [HIGH, HIGH, USUAL, WAITED_FOR]
    assert tenants_of("") == {}


def with_curves(loop: Loop, *compute_pu: float, least_w: tuple[float, ...] = ()) -> None:
    """As if a model had learned these of the jobs in the first slots."""
    policy = loop.twin.engine.policies[0]
    propose = policy.propose

    def asked(view: Any, memory: Any) -> Any:
        of_slot = np.full(view.jobs.n, np.nan, np.float32)
        of_slot[: len(compute_pu)] = compute_pu
        told = Forecast("job.compute_pu", 0.0, of_slot, of_slot, of_slot, "told@0")
        least = np.full(view.jobs.n, np.nan, np.float32)
        least[: len(least_w)] = least_w
        forecasts = dict(view.forecasts) | {("job.compute_pu", 0.0): told}
        forecasts["job.least_energy_w", 0.0] = Forecast("job.least_energy_w", 0.0, *[least] * 3, "told@0")
        return propose(replace(view, forecasts=forecasts), memory)

    policy.propose = asked  # type: ignore[method-assign]


@pytest.mark.parametrize("coupling", ["synchronous", "independent"])
def test_what_waits_for_memory_gives_way_to_what_computes(coupling: Any) -> None:
    loop = loop_of(site(150_000, 150_000))
    with_curves(loop, 0.2, 0.95)
    loop.wants_w[:] = 1200.0
    loop.tick(
        held("memory", range(0, 18), coupling=coupling), held("clock", range(18, 36), coupling=coupling)
    )
    loop.run(200, 5.0)
    assert mean_w(loop, range(18, 36)) > mean_w(loop, range(0, 18)) + 150.0
    assert 0.93 * 150_000 <= loop.rack_w.sum() <= 150_000


@pytest.mark.long
def test_the_least_energy_that_was_learned_goes_before_the_rule() -> None:
    loop = loop_of(site(), dear_usd_per_kwh=0.2, shave_pu=1.0)
    with_curves(loop, 0.95, 0.95, least_w=(620.0,))
    loop.wants_w[:] = 1000.0
    loop.tick(held("learned", range(0, 9)), held("ruled", range(9, 18)), price(loop, 0.5))
    loop.run(400, 5.0)
    assert mean_w(loop, range(0, 9)) == pytest.approx(620.0, abs=6.0)
    assert mean_w(loop, range(9, 18)) < 600.0


@pytest.mark.long
def test_dear_hours_bring_no_job_below_the_least_energy_of_its_work() -> None:
    loop = loop_of(site(), dear_usd_per_kwh=0.2, shave_pu=1.0)
    with_curves(loop, 0.95, 0.95)
    loop.wants_w[:] = 1000.0
    loop.tick(held("work", range(0, 18)), price(loop, 0.5))
    loop.run(900, 5.0)
    design = loop.site.design
    beside_w = (design.cpu_idle_w + design.node_other_w)[0] / 4
    least_w = energy_minimum_w(Curve(design.gpu_idle_w[0], 1000.0, 0.95), beside_w)[0]
    assert least_w > 250.0, "the test tells something"
    assert mean_w(loop, range(0, 18)) >= least_w - 6.0
    assert mean_w(loop, range(0, 18)) < 800.0
    assert mean_w(loop, range(18, 36)) == 200.0  # without a job: all of it
    assert loop.twin.now_ns > 900 * NS
