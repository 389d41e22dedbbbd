"""power_cap and what somebody outside asks for: limits of the site and of feeders, dear hours, their end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap
from policies.power_capping.budgets import VALVE
from policies.power_capping.power_cap import MARGIN_PU
from policies.power_capping.release import drawn_pu
from tests.support.builders import two_racks
from tests.support.powered_plant import CAP, Loop
from tests.unit.test_power_budgets import looped
from tests.unit.test_power_cap import ROUNDED_W, gpus, job, loop_of, site
from twin.catalogue import NS, ContractError
from twin.telemetry import Event, LoadTargetSet, LoadTargetWithdrawn, OutlookTold


def target(limit_w: float, *feeders: str, name: str = "dr", **more: Any) -> LoadTargetSet:
    return LoadTargetSet(id=f"{name}-{limit_w}", author="utility", target=name, limit_w=float(limit_w),
                         feeders=feeders, kind="demand_response", **more)  # fmt: skip


def price(loop: Loop, usd_per_kwh: float) -> OutlookTold:
    return OutlookTold(id=f"p{usd_per_kwh}", author="grid", quantity="site.grid_price_usd_per_kwh",
                       start_ns=loop.twin.now_ns, step_s=36_000.0, values=(usd_per_kwh,))  # fmt: skip


def busy(loop: Loop, *events: Event, wants_w: float = 1000.0) -> None:
    loop.wants_w[:] = wants_w
    loop.tick(*events)
    loop.run(30, 5.0)


def three_jobs() -> tuple[Event, ...]:
    low, high = job("low", range(0, 24)), job("high", range(24, 30), 9)
    return low, high, job("serve", range(30, 36), kind="inference")


@pytest.mark.long
def test_demand_response_is_met_in_ten_seconds_and_what_matters_most_is_spared() -> None:
    loop = loop_of(site(), high_priority=5)
    busy(
        loop,
        *three_jobs(),
    )
    full_w = loop.rack_w.sum()
    assert np.isnan(loop.twin.lease(CAP)).all()
    loop.tick(target(0.7 * full_w))
    loop.run(9)
    for _ in range(3):
        assert loop.rack_w.sum() <= (1 - MARGIN_PU) * 0.7 * full_w + ROUNDED_W
        assert (loop.gpu_w[gpus(range(24, 36))] == 1000.0).all()
        loop.run(3600, 60.0)
    assert loop.rack_w.sum() >= 0.93 * 0.7 * full_w
    reasons = {p.reason for p in loop.twin.engine.in_force["power_cap"]}
    assert any("demand_response target dr" in reason for reason in reasons), reasons


def test_what_people_wait_for_is_shed_last_of_all() -> None:
    loop = loop_of(site(), high_priority=5)
    busy(
        loop,
        *three_jobs(),
    )
    loop.tick(target(95_000))
    loop.run(10)
    low, high, serve = (loop.gpu_w[gpus(range(*k))].mean() for k in ((0, 24), (24, 30), (30, 36)))
    assert low == 200.0 < high < serve == 1000.0


def test_a_target_of_a_feeder_counts_what_flows_there_and_not_what_would_without_the_other() -> None:
    loop = loop_of(site(1e6, 1e6))
    busy(loop, target(70_000, "lab/h/a"))
    assert 0.95 * 70_000 <= loop.feeder_w[0] <= (1 - MARGIN_PU) * 70_000 + ROUNDED_W


def test_what_was_found_comes_back_when_nothing_binds_any_more() -> None:
    """The device stood at 900 W before anybody capped it."""
    loop = loop_of(site())
    loop.cap_w[:] = 900.0
    busy(loop, wants_w=800.0)
    loop.tick(target(120_000))
    loop.run(20)
    assert (loop.cap_w < 700.0).all()
    loop.tick(LoadTargetWithdrawn(id="w", author="utility", target="dr"))
    finals = 0
    for _ in range(60):
        loop.tick(dt_s=5.0)
        finals += sum(len(c.index) for c in loop.twin.commands(CAP) if c.final)
    assert finals == len(loop.cap_w)
    assert (loop.cap_w == 900.0).all()
    assert np.isnan(loop.twin.lease(CAP)).all()
    assert not loop.twin.engine.in_force["power_cap"]


def test_a_restart_remembers_how_far_it_was_let_up() -> None:
    settings = {"ramp_up_w_per_s": 50.0}
    loop = loop_of(site(), **settings)
    busy(loop, target(110_000))
    loop.tick(LoadTargetWithdrawn(id="w", author="utility", target="dr"))
    loop.run(60, 5.0)
    held_w = float(loop.twin.engine.memory["power_cap"]["course_held_w"])
    assert 110_000 < held_w < 140_000
    again = loop.twin.restarted(site(), [PowerCap(**settings)])
    assert again.engine.memory["power_cap"]["course_held_w"] == held_w
    assert loop.rack_w.sum() <= held_w


def test_ramps_up_are_kept() -> None:
    loop = loop_of(site(), ramp_up_w_per_s=100.0)
    busy(loop, target(110_000))
    begin_w, begin_ns = loop.rack_w.sum(), loop.twin.now_ns
    loop.tick(LoadTargetWithdrawn(id="w", author="utility", target="dr"))
    for _ in range(60):
        loop.tick(dt_s=5.0)
        assert loop.rack_w.sum() - begin_w <= 100.0 * (loop.twin.now_ns - begin_ns) / NS + 2500.0
    assert loop.rack_w.sum() > begin_w + 0.7 * 60 * 5 * 100.0


def test_no_minute_of_the_way_back_is_steeper_than_the_ramp() -> None:
    loop = loop_of(site(), ramp_up_w_per_s=100.0)
    busy(loop, target(110_000))
    loop.tick(LoadTargetWithdrawn(id="w", author="utility", target="dr"))
    course_w = []
    for _ in range(60):
        loop.tick(dt_s=5.0)
        course_w.append(loop.rack_w.sum())
    rises_w = np.array(course_w)[12:] - np.array(course_w)[:-12]
    assert rises_w.max() <= 1.1 * 60 * 100.0
    assert rises_w.min() >= 0.8 * 60 * 100.0, "and nothing waits on the way"


def test_waits_for_a_raise_are_spread_and_the_same_in_each_replay() -> None:
    device, epoch_ns = np.arange(10_000), np.full(10_000, 1_767_225_600 * 10**9)
    found = drawn_pu(device, epoch_ns)
    assert (found >= 0).all()
    assert (found < 1).all()
    assert np.histogram(found, 10, (0.0, 1.0))[0] == pytest.approx(1000, abs=120)
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.04, "neighbours have nothing in common"
    assert abs(np.corrcoef(found, drawn_pu(device, epoch_ns + 5 * NS))[0, 1]) < 0.04, "nor two cuts"
    assert drawn_pu(np.array([0, 7]), np.array([0, 42])).tolist() == [0.8833108082136426, 0.8006318767135033]


@pytest.mark.long
def test_while_power_is_dear_only_the_usual_gives_way() -> None:
    loop = loop_of(site(), high_priority=5, dear_usd_per_kwh=0.2, shave_pu=0.5)
    busy(
        loop,
        *three_jobs(),
    )
    loop.tick(price(loop, 0.3))
    loop.run(300, 5.0)
    most_w = loop.most_w[0]
    assert loop.gpu_w[gpus(range(0, 24))] == pytest.approx(200.0 + 0.5 * (most_w - 200.0), abs=6)
    assert (loop.gpu_w[gpus(range(24, 36))] == 1000.0).all()
    reasons = {p.reason for p in loop.twin.engine.in_force["power_cap"]}
    assert len(reasons) == 1
    assert "0.300 USD/kWh" in reasons.pop()
    loop.tick(price(loop, 0.1))
    loop.run(600, 5.0)
    assert (loop.gpu_w == 1000.0).all()
    assert np.isnan(loop.twin.lease(CAP)).all()


def test_a_rack_that_is_full_while_power_is_dear_is_named_and_the_price_where_it_alone_holds_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.powered_plant.OTHER_W", np.array([70_000.0, 20_000.0]))
    loop = loop_of(site(), dear_usd_per_kwh=0.2, shave_pu=0.2)
    busy(loop, price(loop, 0.3), wants_w=1200.0)
    reason_of: dict[int, str] = {}
    for p in loop.twin.engine.in_force["power_cap"]:
        reason_of |= dict.fromkeys(loop.site.rack_of_gpu[p.index].tolist(), p.reason)
    assert "below lab/h/r1 is more than its budget" in reason_of[0]
    assert "0.300 USD/kWh" in reason_of[1]


def test_a_loop_with_less_flow_is_a_budget() -> None:
    loop = loop_of(looped(two_racks()))
    loop.wants_w[:] = 1200.0
    design = loop.site.design
    lpm = 0.5 * design.loop_flow_lpm[0]
    for _ in range(30):
        heard = {"gpu.power_w": loop.gpu_w, "gpu.power_limit_w": loop.cap_w, "rack.power_w": loop.rack_w}
        loop.twin.tick(heard | {"loop.flow_lpm": lpm, VALVE: 1.0}, dt_s=5.0)
        lease = loop.twin.lease(CAP)
        loop.cap_w = np.where(np.isfinite(lease), lease, loop.cap_w)
    heat_w = (design.capture_pu * loop.rack_w).sum()
    assert 0.9 * 0.5 * design.loop_heat_w[0] <= heat_w <= 0.5 * design.loop_heat_w[0]
    assert any("lab/l1" in p.reason for p in loop.twin.engine.in_force["power_cap"])


@pytest.mark.parametrize(
    "settings",
    [{"contract_w": -1.0}, {"shave_pu": 2.0}, {"ramp_up_w_per_s": True}, {"lead_s": -1.0}, {"tenants": 3},
     {"tenants": "acme"}, {"tenants": "acme=1:2"}, {"tenants": "a=1:0.6, b=0:0.6"},
     {"tenants": "a=1:0, a=1:0"}, {"coincidence_pu": 0.5}, {"coincidence_pu": "much"}],
)  # fmt: skip
def test_settings_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=next(iter(settings))):
        PowerCap(**settings)
