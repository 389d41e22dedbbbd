"""power_cap in a closed loop: budgets hold, by class, jobs as a whole, and nobody is capped without need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap
from policies.power_capping.power_cap import MARGIN_PU
from policies.power_capping.release import DWELL_S, SPREAD_S
from tests.support.builders import two_racks
from tests.support.powered_plant import CAP, Loop
from twin.catalogue import NS, ContractError
from twin.telemetry import JobStarted
from twin.telemetry.events import BudgetGranted


def site(a_w: float = 3e5, b_w: float = 3e5, rack_w: float = 132_000) -> dict[str, Any]:
    tree = two_racks()
    for feeder, budget_w in zip(tree["halls"][0]["feeders"], (a_w, b_w), strict=True):
        feeder["budget_w"] = budget_w
    return tree


ROUNDED_W = 800.0  # the deadband of all caps together: 5 W each


def loop_of(tree: dict[str, Any], **settings: Any) -> Loop:
    return Loop(tree, [PowerCap(**settings)])


def job(
    name: str, nodes: range, priority: int = 0, coupling: Any = "synchronous", kind: Any = "training"
) -> JobStarted:
    names = tuple(f"lab/h/r{1 + i // 18}/node{i % 18}" for i in nodes)
    return JobStarted(job=name, nodes=names, kind=kind, coupling=coupling, priority=priority)


def gpus(nodes: range) -> np.ndarray:
    return np.arange(4 * nodes.start, 4 * nodes.stop)


def test_nobody_is_capped_while_all_of_it_fits() -> None:
    loop = loop_of(site())
    loop.wants_w[:] = 1200.0
    loop.run(30, 5.0)
    assert np.isnan(loop.twin.lease(CAP)).all()
    assert (loop.gpu_w == 1200.0).all()


@pytest.mark.parametrize("failover", [True, False])
def test_budgets_hold_also_when_a_side_is_lost(failover: bool) -> None:
    """Either side alone carries both racks, or each its half, as it was asked to."""
    budget_w = 160_000 if failover else 80_000
    loop = loop_of(site(budget_w, budget_w), failover=failover)
    loop.wants_w[:] = 1200.0
    loop.run(150, 5.0)
    carried_w = loop.rack_w.sum() * (1.0 if failover else 0.5)
    assert carried_w <= (1 - MARGIN_PU) * budget_w + ROUNDED_W
    assert carried_w >= 0.9 * budget_w, "work that would have fitted was cut"


def test_the_smallest_of_several_budgets_counts() -> None:
    loop = loop_of(site(160_000, 130_000))
    loop.wants_w[:] = 1200.0
    loop.run(150, 5.0)
    assert 0.9 * 130_000 <= loop.rack_w.sum() <= 0.98 * 130_000 + ROUNDED_W


def test_what_is_marked_high_is_cut_last() -> None:
    loop = loop_of(site(150_000, 150_000), high_priority=5)
    loop.wants_w[:] = 1000.0
    loop.tick(job("low", range(0, 18)), job("high", range(18, 27), priority=9))
    loop.run(150, 5.0)
    assert (loop.gpu_w[gpus(range(18, 27))] == 1000.0).all()
    assert (loop.gpu_w[gpus(range(0, 18))] < 800.0).all()
    assert (loop.gpu_w[gpus(range(27, 36))] == 200.0).all()
    assert loop.rack_w.sum() <= 0.98 * 150_000 + ROUNDED_W


def test_what_people_wait_for_comes_before_all_else_and_what_has_no_job_after() -> None:
    loop = loop_of(site(130_000, 130_000), high_priority=5)
    loop.wants_w[:] = 1000.0
    loop.tick(job("train", range(0, 9), priority=9), job("serve", range(18, 27), kind="inference"))
    loop.run(150, 5.0)
    power_w = [loop.gpu_w[gpus(range(a, a + 9))].mean() for a in (18, 0, 9)]
    assert power_w[0] == 1000.0
    assert power_w[0] > power_w[1] > power_w[2] == 200.0


def test_a_job_that_hangs_together_is_capped_as_a_whole() -> None:
    """It holds GPUs of both racks, and other work presses on one of them only."""
    loop = loop_of(site(150_000, 150_000))
    loop.wants_w[:] = 1200.0
    loop.tick(job("wide", range(9, 27)), job("beside", range(0, 9)))
    loop.run(150, 5.0)
    caps_w = loop.cap_w[gpus(range(9, 27))]
    assert np.ptp(caps_w) < 1e-3
    assert caps_w[0] < 1200.0


def test_what_is_left_is_given_on_top() -> None:
    """One half wants little: the other half gets what that leaves, and the caps of the first do not bind."""
    loop = loop_of(site(130_000, 130_000))
    loop.wants_w[:72], loop.wants_w[72:] = 300.0, 1200.0
    loop.run(200, 5.0)
    assert (loop.gpu_w[:72] == 300.0).all()
    assert loop.rack_w.sum() >= 0.85 * 130_000


@pytest.mark.long
def test_cuts_go_at_once_and_raises_wait() -> None:
    loop = loop_of(site(150_000, 150_000))
    loop.wants_w[:] = 1200.0
    loop.run(60, 5.0)
    low_w = loop.cap_w.copy()
    loop.wants_w[:72] = 200.0  # one rack has little to do from now on
    loop.run(round(DWELL_S) - 6)
    assert (loop.cap_w[72:] <= low_w[72:] + 1e-6).all()
    # The peak of a quarter of an hour is remembered: its place is not given away at once
    loop.run(1800, 10.0)
    assert (loop.cap_w[72:] > low_w[72:] + 100.0).all()
    loop.wants_w[:] = 1200.0
    loop.run(round(DWELL_S + SPREAD_S) + 60)
    assert loop.rack_w.sum() <= 0.98 * 150_000 + ROUNDED_W


@pytest.mark.long
def test_what_is_high_and_wakes_up_is_raised_soon() -> None:
    """Other work has taken what it left; it is back at what it wants long before others would be raised."""
    loop = loop_of(site(150_000, 150_000), high_priority=5)
    loop.tick(job("low", range(0, 18)), job("high", range(18, 36), priority=9))
    loop.wants_w[:] = 1000.0
    loop.run(100, 5.0)
    loop.wants_w[:72], loop.wants_w[72:] = 1200.0, 250.0
    loop.run(900, 10.0)  # its peak is being forgotten: each call cuts it a little
    assert loop.cap_w[72:].max() < 600.0
    loop.wants_w[72:] = 1000.0
    loop.run(25)
    assert (loop.gpu_w[72:] == 1000.0).all()
    assert loop.worst_w.sum() <= 200_000
    assert loop.rack_w.sum() <= 0.98 * 150_000 + ROUNDED_W


def test_a_budget_that_is_cut_from_outside_is_kept_within_seconds() -> None:
    tree = site()
    for feeder in tree["halls"][0]["feeders"]:
        feeder |= {"external": True, "guaranteed_w": 250_000}
    loop = loop_of(tree)
    loop.wants_w[:] = 1000.0
    loop.run(20)
    assert loop.rack_w.sum() > 180_000
    until_ns = loop.twin.now_ns + 600 * NS
    loop.tick(
        BudgetGranted(id="g", author="utility", feeder="lab/h/a", budget_w=140_000.0, expires_ns=until_ns)
    )
    loop.run(6)
    assert loop.rack_w.sum() <= 140_000


def test_the_floor_of_a_device_is_never_undercut() -> None:
    loop = loop_of(site(50_000, 50_000))
    loop.wants_w[:] = 1200.0
    loop.run(60, 5.0)
    assert (loop.cap_w == 200.0).all()


def test_what_nobody_has_heard_of_is_left_alone_and_what_fell_silent_is_not_trusted() -> None:
    loop = loop_of(site(150_000, 150_000))
    loop.silent = {"gpu.power_w", "gpu.power_limit_w", "rack.power_w", "feeder.power_w"}
    loop.wants_w[:] = 1200.0
    loop.run(30, 5.0)
    assert np.isnan(loop.twin.lease(CAP)).all()
    loop.silent, loop.wants_w[:] = set(), 500.0
    loop.run(30, 5.0)
    loop.silent = {"gpu.power_w", "rack.power_w"}
    loop.run(300, 5.0)
    assert np.isfinite(loop.twin.lease(CAP)).all()
    loop.wants_w[:] = 1200.0
    assert loop.rack_w.sum() <= 150_000


def test_the_reason_names_the_place() -> None:
    loop = loop_of(site(130_000))
    loop.wants_w[:] = 1200.0
    loop.run(10)
    reasons = {p.reason for p in loop.twin.engine.in_force["power_cap"]}
    assert any("lab/h/a" in r for r in reasons)


@pytest.mark.parametrize(
    "settings", [{"failover": 1}, {"high_priority": True}, {"margin_pu": 0.7}, {"margin_pu": -1}]
)
def test_settings_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="expected"):
        PowerCap(**settings)
