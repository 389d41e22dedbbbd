"""power_cap where sites, jobs or telemetry are odd: mixed racks, GPUs without caps, silence, many reasons."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, classes
from policies.power_capping.demand import HIGH, USUAL, Wants, wants
from policies.power_capping.power_cap import MARGIN_PU
from policies.power_capping.reasons import MOST_REASONS, PlaceFigures, kept_figures
from policies.power_capping.shares import whole_jobs_w
from tests.support.builders import Twin, two_racks
from tests.support.powered_plant import CAP, Loop
from tests.unit.test_power_cap import ROUNDED_W, gpus, job, loop_of, site
from twin.telemetry import EntityReplaced

GB200 = {"name": "r1", "profile": "gb200-nvl72"}


def of_racks(racks: list[dict[str, Any]], budget_w: float = 150_000, **more: Any) -> dict[str, Any]:
    tree = site(budget_w, budget_w)
    tree["halls"][0]["racks"] = racks
    names = [r["name"] for r in racks]
    for part in (*tree["halls"][0]["feeders"], *tree["halls"][0]["cdus"]):
        part["serves"] = names
    return tree | more


def test_gpus_without_caps_count_with_all_that_they_draw_on_the_way() -> None:
    """One rack cannot be capped: the other one gets what that leaves."""
    loop = loop_of(
        of_racks(
            [{"name": "r1", "profile": "gb200-nvl72"}, {"name": "r2", "nodes": 18, "gpus_per_node": 4}],
            120_000,
        )
    )
    loop.wants_w[:] = 600.0
    loop.run(100, 5.0)
    assert np.isfinite(loop.twin.lease(CAP)[:72]).all()
    assert np.isnan(loop.twin.lease(CAP)[72:]).all()
    assert loop.rack_w.sum() <= (1 - MARGIN_PU) * 120_000 + ROUNDED_W


def test_gpus_without_caps_that_were_never_heard_may_draw_all_that_their_racks_profile_says() -> None:
    twin = Twin(two_racks(), [PowerCap()])
    twin.tick({"rack.power_w": 50e3})
    view = twin.engine.view(1.0)
    envelope = view.envelope(CAP)
    old = envelope.low, envelope.high
    nothing = np.full(len(old[0]), np.nan)
    twin.site.envelopes[CAP] = type(envelope)(**dict.fromkeys(envelope.__dataclass_fields__, nothing))
    assert (wants(view, np.zeros(len(nothing)), 0.0).power_w == 1200.0).all()


def test_a_job_of_different_racks_gets_the_same_share_of_what_each_can_do() -> None:
    """GB300 and GB200 racks: neither is planned with more than its own GPUs can draw."""
    loop = loop_of(
        of_racks(
            [{"name": "r1", "profile": "gb200-nvl72"}, {"name": "r2", "profile": "gb300-nvl72"}], 160_000
        )
    )
    loop.wants_w[:] = 1400.0
    loop.tick(job("wide", range(0, 36)))
    loop.run(150, 5.0)
    share = (loop.cap_w - 200.0) / (loop.most_w - 200.0)
    assert np.ptp(share) < 5e-3
    assert 0.95 * 160_000 <= loop.rack_w.sum() <= (1 - MARGIN_PU) * 160_000 + ROUNDED_W


@pytest.mark.long
def test_a_job_that_is_raised_is_raised_as_a_whole() -> None:
    loop = loop_of(site(150_000, 150_000))
    loop.tick(job("wide", range(9, 27)), job("beside", range(0, 9), coupling="independent"))
    loop.wants_w[:] = 1200.0
    loop.run(30, 5.0)
    loop.wants_w[gpus(range(0, 9))] = loop.wants_w[gpus(range(27, 36))] = 200.0
    raised = 0
    before_w = loop.cap_w.copy()
    for _ in range(400):
        loop.tick(dt_s=5.0)
        mine = loop.cap_w[gpus(range(9, 27))]
        raised += bool((mine > before_w[gpus(range(9, 27))]).any())
        assert np.ptp(mine) < 1e-3
        before_w = loop.cap_w.copy()
    assert raised >= 2


@pytest.mark.long
def test_devices_that_tell_no_cap_are_not_mistaken_for_content_ones() -> None:
    """The half that was capped low wants more, and nothing but the command tells that it is at its cap."""
    loop = loop_of(site(150_000, 150_000))
    loop.silent = {"gpu.power_limit_w"}
    loop.wants_w[:72], loop.wants_w[72:] = 1200.0, 300.0
    loop.run(300, 5.0)
    loop.wants_w[:] = 1200.0
    loop.run(300, 5.0)
    assert abs(loop.gpu_w[:72].mean() - loop.gpu_w[72:].mean()) < 60.0
    assert loop.rack_w.sum() >= 0.93 * 150_000


@pytest.mark.long
def test_a_raise_waits_for_the_cut_that_makes_its_place() -> None:
    """Half of the GPUs take caps only every minute: never do both together draw more than there is."""
    loop = loop_of(site(150_000, 150_000), high_priority=5)
    low, high = gpus(range(0, 18)), gpus(range(18, 36))
    loop.tick(job("low", range(0, 18)), job("high", range(18, 36), priority=9))
    loop.wants_w[low], loop.wants_w[high] = 1200.0, 250.0
    loop.run(2000, 5.0)
    assert loop.gpu_w[low].mean() > 600.0
    loop.wants_w[high] = 1200.0
    worst_w = 0.0
    for second in range(240):
        old_w = loop.cap_w.copy()
        loop.tick()
        if second % 60:  # cuts arrive late, raises at once
            loop.cap_w[low] = np.maximum(loop.cap_w[low], old_w[low])
        worst_w = max(worst_w, loop.rack_w.sum())
    assert worst_w <= 150_000
    assert loop.gpu_w[high].mean() > 900.0


@pytest.mark.long
def test_racks_that_were_never_heard_are_planned_with_what_they_may_draw() -> None:
    loop = loop_of(site(150_000, 150_000))
    loop.wants_w[:] = 1200.0
    heard = np.r_[np.ones(72), np.full(72, np.nan)]
    for _ in range(100):
        loop.twin.tick({"gpu.power_w": 600.0 * heard, "gpu.power_limit_w": 1200.0 * heard,
                        "rack.power_w": [65_000.0, np.nan]}, dt_s=5.0)  # fmt: skip
    cap_w = loop.twin.lease(CAP)
    design = loop.site.design
    other_w = 18 * (design.cpu_max_w[1] + design.node_other_w[1]) + design.rack_overhead_w[1]
    assert cap_w.sum() * 1.05 + 20_000 + other_w <= 150_000 * 1.03
    assert np.isfinite(cap_w).all()


@pytest.mark.parametrize("root_w", [200_000, 30 * 3000])
def test_the_widest_place_is_named_and_no_more_than_so_many(root_w: int) -> None:
    racks = [f"r{k}" for k in range(40)]
    feeders: list[dict[str, Any]] = [
        {"name": f"p{k}", "budget_w": 3500, "serves": [f"r{k}"]} for k in range(40)
    ]
    feeders += [{"name": "root", "budget_w": root_w, "serves": [f"p{k}" for k in range(30)]}]
    rows = [{"name": r, "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 8} for r in racks]
    tree = {"site": "lab", "halls": [{"name": "h", "racks": rows, "feeders": feeders}]}
    twin = Twin(tree, [PowerCap()], act=True)
    for _ in range(6):
        twin.tick({"gpu.power_w": 350.0, "rack.power_w": 4000.0, "gpu.power_limit_w": 350.0})
    given = twin.engine.in_force["power_cap"]
    reasons = [p.reason for p in given]
    assert sum(len(p.index) for p in given) == 320
    root = "the demand below lab/h/root is more than its budget"
    if root_w == 200_000:
        assert len(reasons) == MOST_REASONS + 1
        assert not [reason for reason in reasons if reason.startswith(root)]
    else:
        assert max(given, key=lambda p: len(p.index)).reason.startswith(f"{root}; ")


FIGURES = re.compile(
    "the demand below lab/h/b is more than its budget if the other side fails; "
    r"([\d.]+) kW expected, limit ([\d.]+) kW less 2 %, ([\d.]+) kW to cut \(at (\d\d:\d\d:\d\d) UTC\)"
)


def figures_of(loop: Loop) -> tuple[float, float, float, str]:
    """(kW expected, kW limit, kW to cut, instant) of the only reason."""
    (reason,) = {p.reason for p in loop.twin.engine.in_force["power_cap"]}
    found = FIGURES.fullmatch(reason)
    assert found is not None, reason
    return float(found[1]), float(found[2]), float(found[3]), found[4]


def busy(
    loop: Loop, seconds: int, watts: float, rng: np.random.Generator
) -> list[tuple[float, float, float, str]]:
    """Figures of each proposal while GPUs want so much, with noise."""
    out = []
    for _ in range(seconds // 5):
        loop.wants_w[:] = watts * (1 + 0.05 * rng.standard_normal(len(loop.wants_w)))
        loop.tick(dt_s=5.0)
        out.append(figures_of(loop))
    return out


def test_a_reason_keeps_its_figures_in_noise_and_when_a_device_is_replaced() -> None:
    """Each change of a reason writes all its caps to the journal again."""
    loop, rng = loop_of(site(150_000, 150_000)), np.random.default_rng(1)
    busy(loop, 30, 1000.0, rng)
    steady = busy(loop, 120, 1000.0, rng)
    expected, limit, give, _ = steady[-1]
    assert len(set(steady)) == 1
    assert limit == 150.0
    assert expected - 0.98 * limit == pytest.approx(give, abs=1.0)
    loop.twin.tick(None, EntityReplaced(table="gpu", name="h/r1/node0/gpu0", serial="another"), dt_s=0.1)
    assert busy(loop, 5, 1000.0, rng)[-1] == steady[-1], "a device is not a layout"


@pytest.mark.parametrize(
    ("want_w", "limit_w", "short", "same_layout", "renewed"),
    [
        (1040.0, 1000.0, True, True, False),
        (1060.0, 1000.0, True, True, True),
        (1000.0, 1005.0, True, True, False),
        (1000.0, 1020.0, True, True, True),
        (1000.0, 1000.0, False, True, True),
        (1000.0, 1000.0, True, False, True),
    ],
)
def test_figures_of_a_reason_are_renewed_when_one_is_off(
    want_w: float, limit_w: float, short: bool, same_layout: bool, renewed: bool
) -> None:
    def at(place: int, want_w: float, limit_w: float, short: bool) -> PlaceFigures:
        """Figures of eight places, of which the others are nothing."""
        mine = np.arange(8) == place
        return PlaceFigures(np.where(mine, want_w, 0.0), np.where(mine, limit_w, 0.0), mine & short)

    memory = PowerCap.memory.fresh({"gpu": 9, "rack": 2}) if PowerCap.memory else {}
    first = kept_figures(memory, at(5, 1000.0, 1000.0, True), np.array([5]), 7, True)
    kept = kept_figures(first, at(5, want_w, limit_w, short), np.array([3, 5, 6]), 9, same_layout)
    assert kept["why_place"].tolist() == [3, 5], "a place beyond the last slot has no figures"
    assert kept["why_ns"].tolist() == [9, 9 if renewed else 7]
    assert kept["why_want_w"][1] == (want_w if renewed else 1000.0)


def test_a_reason_counts_a_job_as_its_caps_do_by_the_gpu_that_wants_most() -> None:
    """All GPUs of a job wait for that one: what each wants by itself fits the budget."""
    want_w = np.array([400.0, 700.0, 1000.0, 300.0])
    want = Wants(want_w, np.full(4, 200.0), np.full(4, 1200.0), want_w, want_w, np.ones(4, np.bool_))
    assert whole_jobs_w(want, np.array([0, 0, 1, -1])).tolist() == pytest.approx(
        [700.0, 700.0, 1000.0, 300.0]
    )
    assert whole_jobs_w(want, np.full(4, -1)).tolist() == pytest.approx(want_w.tolist())
    loop = loop_of(site(172_000, 172_000))
    loop.tick(job("one", range(36)))
    loop.wants_w[:] = np.where(np.arange(len(loop.wants_w)) % 8 == 0, 1150.0, 500.0)
    for _ in range(8):
        loop.tick(dt_s=5.0)
    expected, limit, give, _ = figures_of(loop)
    assert expected > limit
    assert give > 1.0


def test_caps_that_only_could_bind_say_so() -> None:
    loop = loop_of(site(150_000, 150_000))
    loop.run(10)
    (reason,) = {p.reason for p in loop.twin.engine.in_force["power_cap"]}
    assert reason.startswith("the maximum power of GPUs below lab/h/b is more than its budget if the other ")
    assert " kW possible, " in reason


@pytest.mark.parametrize("feeders", [[], [{"name": "u", "serves": ["r1"]}]])
def test_sites_without_budgets_and_racks_without_gpus(feeders: list[dict[str, Any]]) -> None:
    racks = [{"name": "r1", "profile": "gb200-nvl72"}, {"name": "r2", "nodes": 0, "gpus_per_node": 0}]
    tree: dict[str, Any] = {"site": "lab", "halls": [{"name": "h", "racks": racks, "feeders": feeders}]}
    loop = Loop(tree, [PowerCap()])
    loop.wants_w[:] = 1200.0
    loop.run(10, 5.0)
    assert np.isnan(loop.twin.lease(CAP)).all()
    assert not loop.twin.engine.suspended


def test_huge_priorities() -> None:
    tree = site(150_000, 150_000)
    loop = loop_of(tree, high_priority=2**31 - 1)
    loop.tick(job("high", range(0, 18), priority=2**31 - 1), job("low", range(18, 36), priority=1 - 2**31))
    got = classes(loop.twin.engine.view(1.0), 2**31 - 1)
    assert (got[:72] == HIGH).all()
    assert (got[72:] == USUAL).all()


def test_a_cdu_with_less_flow_is_a_budget() -> None:
    loop = loop_of(site())
    loop.wants_w[:] = 1200.0
    design = loop.site.design
    flow_lpm = 0.5 * design.cdu_flow_lpm[0]
    for _ in range(30):
        rack_w = loop.rack_w
        loop.twin.tick({"gpu.power_w": loop.gpu_w, "gpu.power_limit_w": loop.cap_w, "rack.power_w": rack_w,
                        "cdu.flow_lpm": flow_lpm}, dt_s=5.0)  # fmt: skip
        lease = loop.twin.lease(CAP)
        loop.cap_w = np.where(np.isfinite(lease), lease, loop.cap_w)
    heat_w = (design.capture_pu * loop.rack_w).sum()
    assert 0.9 * 0.5 * design.cdu_heat_w[0] <= heat_w <= 0.5 * design.cdu_heat_w[0]


def test_the_loss_of_a_side_moves_nothing_while_the_other_was_planned_for() -> None:
    loop = loop_of(site(150_000, 150_000))
    loop.wants_w[:] = 1200.0
    loop.run(150, 5.0)
    before_w = loop.rack_w.sum()
    loop.dead[0] = True
    loop.run(10)
    assert abs(loop.rack_w.sum() - before_w) <= ROUNDED_W
