"""power_guard in a closed loop: an overload is cut in the tick that sees it, and given back slowly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.power_capping import PowerGuard
from policies.power_capping.power_guard import CALM_S, MOST_FEEDERS, RELEASE_S, SPREAD_S, WARM, _by_feeder
from tests.support.builders import Twin, explained
from tests.support.powered_plant import CAP, Loop
from tests.unit.test_power_cap import gpus, job, site
from twin.catalogue import NS, ContractError, text
from twin.telemetry import LoadTargetSet
from twin.telemetry.events import BudgetGranted


def loop_of(a_w: float = 80_000, b_w: float = 80_000, **settings: Any) -> Loop:
    loop = Loop(site(a_w, b_w), [PowerGuard(**settings)])
    loop.tick(job("low", range(0, 18)), job("high", range(18, 27), priority=9))
    loop.run(3)
    return loop


def test_nothing_is_cut_below_the_band() -> None:
    loop = loop_of()
    loop.wants_w[:] = 770.0  # 156.4 kW on two feeders of 80
    loop.run(60, 5.0)
    assert 0.97 < loop.feeder_w[0] / 80_000 < 0.99
    assert np.isnan(loop.twin.lease(CAP)).all()


def test_an_overload_is_cut_in_the_tick_that_sees_it() -> None:
    loop = loop_of()
    loop.wants_w[:] = 1200.0
    loop.tick()
    assert loop.feeder_w.max() <= 0.955 * 80_000
    loop.run(10)
    assert 0.90 * 80_000 < loop.feeder_w.max() <= 0.955 * 80_000


def test_its_reason_has_the_figures_of_the_cut_for_as_long_as_it_lasts() -> None:
    def reasons() -> list[str]:
        return sorted({p.reason for p in loop.twin.engine.in_force["power_guard"]})

    loop = loop_of(80_000, 200_000)
    loop.wants_w[:] = 1200.0
    load_w = loop.feeder_w[0]
    loop.tick()
    at = text.utc(loop.twin.now_ns, "%H:%M:%S")
    (first,) = reasons()
    assert first == (
        f"lab/h/a is or was beyond 99 % of its budget: {text.quantity(load_w, 'W')} measured at {at} UTC, "
        f"limit 80 kW; cut since {at} UTC"
    )
    loop.run(20)
    assert reasons() == [first], "though the load is another"
    loop.wants_w[:] = 1900.0
    loop.twin.tick({"feeder.power_w": [90_000.0, 90_000.0], "gpu.power_w": 640.0, "rack.power_w": 90_000.0})
    (deeper,) = reasons()
    assert "90 kW measured" in deeper
    assert deeper.endswith(f"cut since {at} UTC")


def test_gpus_by_the_feeder_that_cuts_them_and_those_of_unnamed_feeders_together() -> None:
    def groups(by: list[int]) -> list[tuple[int, list[int]]]:
        places = np.arange(len(by))
        return [(feeder, places[mine].tolist()) for feeder, mine in _by_feeder(np.array(by))]

    assert groups([7, 7, 7]) == [(7, [0, 1, 2])]
    assert groups([9, 2, 9, 5, 2]) == [(2, [1, 4]), (5, [3]), (9, [0, 2])]
    many = [3 * k for k in range(MOST_FEEDERS + 2)]
    found = groups([*many[::-1], many[0]])
    assert [feeder for feeder, _ in found] == [*many[:MOST_FEEDERS], -1]
    assert found[0] == (0, [len(many) - 1, len(many)])
    assert found[-1] == (-1, [0, 1])
    assert sorted(k for _, mine in found for k in mine) == list(range(len(many) + 1))


@pytest.mark.parametrize(("use_pu", "cut"), [(0.985, False), (0.995, True)])
def test_a_cut_begins_before_the_budget_is_reached(use_pu: float, cut: bool) -> None:
    budget_w = 78_216.0 / use_pu  # 770 W of each GPU, its losses, and what racks draw beside them, by two
    loop = loop_of(budget_w, budget_w)
    loop.wants_w[:] = 770.0
    assert loop.feeder_w[0] / budget_w == pytest.approx(use_pu, abs=0.001)
    loop.tick()
    assert np.isfinite(loop.twin.lease(CAP)).any() == cut


def test_a_feed_that_is_lost_right_after_a_cut_is_answered_in_its_own_tick() -> None:
    """No more flows then than what was cut a second ago, and no reading knows of that cut yet."""
    loop = loop_of(60_000, 60_000)
    loop.wants_w[:] = 1200.0
    loop.tick()
    assert loop.feeder_w[1] < 0.96 * 60_000
    loop.dead[0] = True
    assert loop.feeder_w[1] > 1.8 * 60_000
    loop.tick(urgent=True)
    assert (loop.cap_w <= 210.0).all()


@pytest.mark.parametrize(("theta", "low_pu", "high_pu"), [(0.0, 0.905, 0.955), (WARM + 0.1, 0.8, 0.905)])
def test_a_warm_breaker_is_relieved_further(theta: float, low_pu: float, high_pu: float) -> None:
    loop = loop_of()
    memory = loop.twin.engine.memory
    memory["power_guard"] = dict(memory["power_guard"]) | {"theta": np.full(2, theta)}
    loop.wants_w[:] = 1200.0
    loop.tick()
    assert low_pu * 80_000 < loop.feeder_w.max() <= high_pu * 80_000


def test_what_is_read_of_one_feeder_knows_of_the_cut_for_another_only_later() -> None:
    """Both feed the same racks; the second one's meter tells two seconds late what was so before the cut."""
    loop = loop_of(80_000, 95_000)
    loop.wants_w[:] = 850.0
    loop.tick()
    cut_w = loop.cap_w.copy()
    assert (cut_w < loop.most_w).any()
    loop.more = {"feeder.power_w": np.array([75_000.0, 100_000.0])}
    loop.run(2)
    np.testing.assert_array_equal(loop.cap_w, cut_w)
    loop.run(10)
    assert (loop.cap_w < cut_w - 1.0).any(), "by then it knows, and says the same"


def test_who_waits_least_is_cut_first() -> None:
    loop = loop_of(high_priority=5)
    loop.wants_w[:] = 850.0
    loop.run(5)
    low_w, high_w, idle_w = (loop.gpu_w[gpus(r)].mean() for r in (range(0, 18), range(18, 27), range(27, 36)))
    assert idle_w < 850.0
    assert low_w == high_w == 850.0
    loop.wants_w[:] = 1200.0
    loop.run(5)
    low_w, high_w, idle_w = (loop.gpu_w[gpus(r)].mean() for r in (range(0, 18), range(18, 27), range(27, 36)))
    assert idle_w == 200.0
    assert low_w < high_w == 1200.0


@pytest.mark.long
def test_it_is_held_and_then_given_back_bit_by_bit() -> None:
    loop = loop_of()
    loop.wants_w[:] = 1200.0
    loop.run(5)
    cut_w = loop.cap_w.copy()
    loop.wants_w[:] = 300.0  # the load is gone: nothing else stands in the way
    loop.run(round(CALM_S) - 5)
    assert (loop.cap_w == cut_w).all()
    loop.run(round(SPREAD_S + RELEASE_S / 2))
    between_w = loop.cap_w.copy()
    assert (between_w > cut_w).any()
    assert (between_w - cut_w).max() <= 1000.0 * (RELEASE_S / 2 + SPREAD_S) / RELEASE_S + 5.0
    for _ in range(30):
        before_w = loop.cap_w.copy()
        loop.tick()
        assert (loop.cap_w - before_w).max() <= 1000.0 / RELEASE_S + 5.5
    loop.run(round(4 * RELEASE_S), 5.0)
    assert (loop.cap_w >= 1199.0).all()


@pytest.mark.long
def test_a_load_that_stays_is_not_let_up_into_the_budget_again_and_again() -> None:
    loop = loop_of()
    loop.wants_w[:] = 1200.0
    loop.run(5)
    loop.worst_w[:] = 0.0
    loop.run(900, 5.0)
    assert loop.worst_w.max() <= 0.99 * 80_000 + 1.0


def test_the_loss_of_a_feed_is_answered_in_its_own_tick() -> None:
    loop = loop_of(a_w=100_000, b_w=100_000)
    loop.wants_w[:] = 850.0
    loop.run(20)
    assert np.isnan(loop.twin.lease(CAP)).all()
    loop.dead[0] = True
    assert loop.feeder_w[1] > 150_000
    loop.tick(urgent=True)
    assert loop.feeder_w[1] <= 0.955 * 100_000


def test_the_loss_of_a_feed_is_seen_by_the_racks_before_the_meter_tells() -> None:
    loop = loop_of(a_w=100_000, b_w=100_000)
    loop.wants_w[:] = 850.0
    loop.run(20)
    loop.dead[0] = True
    loop.silent = {"feeder.power_w"}
    loop.tick(urgent=True)
    assert loop.feeder_w[1] <= 0.955 * 100_000


def test_a_silent_meter_is_no_overload_while_its_racks_are_heard() -> None:
    loop = loop_of()
    loop.wants_w[:] = 700.0
    loop.run(5)
    loop.silent = {"feeder.power_w"}
    loop.run(300, 5.0)
    assert np.isnan(loop.twin.lease(CAP)).all()


@pytest.mark.long
def test_what_nobody_hears_any_more_is_cut_when_it_may_be_too_much() -> None:
    loop = loop_of()
    loop.wants_w[:] = 700.0
    loop.run(5)
    loop.silent = {"feeder.power_w", "rack.power_w", "gpu.power_w"}
    loop.run(450, 5.0)
    assert np.isfinite(loop.twin.lease(CAP)).any()


def test_devices_are_never_sent_below_their_floor() -> None:
    loop = loop_of(a_w=30_000, b_w=30_000)
    loop.wants_w[:] = 1200.0
    loop.run(10)
    assert loop.cap_w.min() == 200.0


def test_settings_that_are_none() -> None:
    with pytest.raises(ContractError, match="expected"):
        PowerGuard(high_priority=True)


def test_a_budget_of_nothing_is_exceeded_by_any_load() -> None:
    tree = site(80_000, 80_000)
    tree["halls"][0]["feeders"][0] |= {"external": True, "guaranteed_w": 70_000}
    loop = Loop(tree, [PowerGuard()])
    loop.run(2)
    until_ns = loop.twin.now_ns + 600 * NS
    loop.tick(BudgetGranted(id="g", author="u", feeder="lab/h/a", budget_w=0.0, expires_ns=until_ns))
    loop.run(5)
    assert (loop.cap_w == 200.0).all()


def test_gpus_that_follow_no_cap_are_made_up_for_by_the_others() -> None:
    loop = loop_of()
    loop.deaf[gpus(range(27, 34))] = True  # they have no job, and would be cut first
    loop.wants_w[:] = 900.0
    loop.run(8)
    assert loop.feeder_w.max() <= 0.99 * 80_000
    assert (loop.gpu_w[gpus(range(27, 34))] == 900.0).all()
    assert (loop.gpu_w[gpus(range(0, 18))] < 900.0).all()


def test_one_reading_justifies_one_cut() -> None:
    """Meters that speak every minute: what is cut is what they asked for, and not all of it by the next."""
    loop = loop_of()
    loop.wants_w[:] = 900.0
    loop.tick()
    cut_w = loop.cap_w.copy()
    loop.silent = {"feeder.power_w", "rack.power_w"}
    loop.run(40)
    np.testing.assert_array_equal(loop.cap_w, cut_w)


def test_a_load_that_rises_further_is_cut_again_at_once() -> None:
    loop = loop_of()
    loop.wants_w[:] = 850.0
    loop.tick()
    first_w = loop.cap_w.copy()
    loop.wants_w[gpus(range(0, 18))] = 1200.0
    loop.tick()
    loop.tick()
    assert (loop.cap_w < first_w - 10.0).any()


def test_gpus_that_cannot_be_capped_are_no_saving() -> None:
    """Of two racks one has no caps: the other one has to give all of it."""
    tree = site(80_000, 80_000)
    tree["halls"][0]["racks"] = [
        {"name": "r1", "profile": "gb200-nvl72"},
        {"name": "r2", "nodes": 18, "gpus_per_node": 4},
    ]
    loop = Loop(tree, [PowerGuard()])
    assert np.isnan(loop.most_w[72:]).all()
    loop.wants_w[:] = 850.0
    loop.run(5)
    assert loop.feeder_w.max() <= 0.96 * 80_000
    assert (loop.gpu_w[72:] == 850.0).all()


def test_all_of_many_overloaded_feeders_are_relieved() -> None:
    racks = [f"r{k}" for k in range(80)]
    tree: dict[str, Any] = {
        "site": "lab",
        "halls": [
            {
                "name": "h",
                "racks": [
                    {"name": "r[0-79]", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 8},
                ],
                "feeders": [{"name": f"p{k}", "budget_w": 3000, "serves": [r]} for k, r in enumerate(racks)],
            }
        ],
    }
    twin = Twin(tree, [PowerGuard()], act=True)
    twin.tick({"gpu.power_w": 350.0, "rack.power_w": 4000.0, "feeder.power_w": 4000.0})
    assert np.isfinite(twin.lease(CAP)).all()


def test_a_place_inside_another_is_relieved_first_and_both_hold() -> None:
    tree = site(160_000, 160_000)
    feeders = tree["halls"][0]["feeders"]
    for feeder, side in zip(feeders, "ab", strict=True):
        feeder["serves"] = [f"p{side}1", f"p{side}2"]
        for k in (1, 2):
            row = {"name": f"p{side}{k}", "side": side.upper(), "budget_w": 41_000, "serves": [f"r{k}"]}
            feeders = [*feeders, row]
    tree["halls"][0]["feeders"] = feeders
    twin = Twin(tree, [PowerGuard()], act=True)
    power_w = np.repeat([950.0, 600.0], 72)
    rack_w = twin.site.sum_by_rack("gpu", power_w) + 20_000
    load_w = [rack_w.sum() / 2, rack_w.sum() / 2, *(rack_w / 2), *(rack_w / 2)]
    heard = {"gpu.power_w": power_w, "rack.power_w": rack_w, "feeder.power_w": load_w}
    twin.tick(heard | {"gpu.power_limit_w": 1200.0})
    cap_w = twin.lease(CAP)
    assert np.isnan(cap_w[72:]).all(), "only the rack below the full place"
    saved_w = np.maximum(power_w[:72] - cap_w[:72], 0.0).sum() / 2
    assert rack_w[0] / 2 - saved_w == pytest.approx(0.95 * 41_000, rel=2e-3)


def test_a_cut_that_was_too_deep_is_eased_to_where_it_belongs() -> None:
    """A watt of a GPU is 1.05 of a rack here, and the cut counted on one: what is left is given back."""
    loop = loop_of()
    loop.wants_w[:] = 1200.0
    loop.tick()
    first_w = loop.feeder_w.max()
    loop.worst_w[:] = 0.0
    loop.run(30)
    assert first_w < 0.935 * 80_000 < 0.944 * 80_000 < loop.feeder_w.max()
    assert loop.worst_w.max() <= 0.952 * 80_000


@pytest.mark.parametrize("late", [0, 3])
def test_a_loss_that_nobody_told_is_cut_and_eased_all_the_same(late: int) -> None:
    """The lost side is mute. Meters of a building that are late take their seconds, and no more."""
    loop = Loop(site(100_000, 100_000), [PowerGuard()], late=late)
    loop.wants_w[:] = 850.0
    loop.run(20)
    loop.dead[0] = True
    loop.silent = {"feeder.energised_state"}
    loop.run(late + 1)
    assert 0.85 * 100_000 < loop.feeder_w[1] <= 0.96 * 100_000
    for _ in range(40):
        loop.tick()
        assert loop.feeder_w[1] <= 0.97 * 100_000
    assert loop.feeder_w[1] >= 0.935 * 100_000


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=40, max_size=40))
def test_what_is_eased_leaves_room_for_all_that_may_come_back(seeds: list[int]) -> None:
    """GPUs that stood still when the cut was eased may draw up to their caps in any second after."""
    loop = loop_of()
    loop.wants_w[:] = 1200.0
    loop.tick()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        loop.wants_w[:] = rng.choice([100.0, 1200.0], len(loop.wants_w), p=rng.dirichlet([1.0, 1.0]))
        loop.tick()
        assert loop.feeder_w.max() <= 0.99 * 80_000


@pytest.mark.long
def test_supplies_tell_of_a_loss_before_the_building_does() -> None:
    loop = Loop(site(100_000, 100_000), [PowerGuard()], late=4, supplies=True)
    loop.wants_w[:] = 850.0
    loop.run(20)
    loop.dead[0] = True
    loop.tick()
    assert loop.feeder_w[1] <= 0.96 * 100_000
    loop.dead[0] = False
    loop.wants_w[:] = 300.0
    loop.run(600, 5.0)
    assert (loop.cap_w >= 1199.0).all()


def test_a_rack_draws_what_its_gpus_do_whatever_its_meters_say() -> None:
    loop = loop_of()
    loop.more = {"rack.power_w": 0.0, "feeder.power_w": 0.0}
    loop.wants_w[:] = 1200.0
    loop.run(3)
    assert (loop.site.sum_by_rack("gpu", loop.gpu_w).sum() / 2) <= 0.99 * 80_000


def target(limit_w: float, *feeders: str, end_ns: int = 0) -> LoadTargetSet:
    return LoadTargetSet(id="t", author="u", target="t", limit_w=limit_w, feeders=feeders, end_ns=end_ns)


@pytest.mark.long
def test_a_load_target_is_a_budget_while_it_runs() -> None:
    loop = loop_of(a_w=150_000, b_w=150_000)
    loop.wants_w[:] = 1200.0
    loop.run(60, 5.0)
    loop.tick(target(90_000, "lab/h/a", end_ns=loop.twin.now_ns + 300 * NS))
    assert loop.feeder_w[0] <= 0.955 * 90_000
    loop.run(120)
    assert 0.94 * 90_000 <= loop.feeder_w[0] <= 0.96 * 90_000
    loop.run(1200, 10.0)
    assert (loop.gpu_w == 1200.0).all()


def test_a_target_that_nobody_can_keep_heats_no_breaker() -> None:
    """The accumulator is of the feeder's rating: its load is a third of it, and ten times the target."""
    loop = loop_of(a_w=150_000, b_w=150_000)
    loop.tick(target(4_000, "lab/h/a"))
    loop.run(120)
    assert (loop.gpu_w == 200.0).all()
    assert float(loop.twin.engine.memory["power_guard"]["theta"].max()) < 0.1


def test_a_target_above_the_budget_lends_nothing() -> None:
    loop = loop_of()
    loop.tick(target(500_000, "lab/h/a", "lab/h/b"))
    loop.wants_w[:] = 1200.0
    loop.run(5)
    assert loop.feeder_w.max() <= 0.955 * 80_000


def test_an_explanation_has_the_numbers_of_the_proposals() -> None:
    loop = loop_of()
    assert explained(loop.twin, "power_guard").table("feeders") == []
    loop.wants_w[:] = 1200.0
    load_w = loop.feeder_w[0]
    loop.tick()
    found = explained(loop.twin, "power_guard")
    proposals = {p.reason.split()[0]: p for p in loop.twin.engine.in_force["power_guard"]}
    memory = loop.twin.engine.memory["power_guard"]
    rows = found.table("feeders")
    assert [r["feeder"] for r in rows] == ["lab/h/a", "lab/h/b"]
    for k, row in enumerate(rows):
        assert (row["load_w"], row["budget_w"], row["basis"]) == (pytest.approx(load_w), 80_000.0, "measured")
        assert row["use_pu"] == pytest.approx(load_w / 80_000.0)
        assert (row["depth"], row["breaker_pu"]) == (memory["depth"][k], memory["theta"][k])
        p = proposals.get(str(row["feeder"]))
        expected = (0, None, None) if p is None else (len(p.index), p.hi.min(), p.hi.max())
        assert (row["gpus"], row["cap_low_w"], row["cap_high_w"]) == expected
    assert found.figure("capped_gpus") == sum(len(p.index) for p in proposals.values()) > 0
    assert explained(loop.twin, "power_guard", "r1").figure("capped_gpus") == 72
    loop.silent = {"feeder.power_w", "rack.power_w", "gpu.power_w"}
    loop.run(450, 5.0)
    bounds = explained(loop.twin, "power_guard").table("bounds")
    silent = loop.twin.engine.in_force["power_guard"][-1]
    assert (bounds[-1]["reason"], bounds[-1]["gpus"]) == (silent.reason, len(silent.index))
    assert bounds[-1]["cap_high_w"] == silent.hi.max()


def test_bounds_that_no_binary_number_meets_do_not_stop_a_cut() -> None:
    """200.3 + (713.4 - 200.3) is less than 713.4, which is no cap for a rack without a cut feeder."""
    low_w, high_w = 200.3, 713.4
    assert low_w + (high_w - low_w) < high_w
    tree = site(100_000, 100_000) | {"controls": {CAP: {"min": low_w, "max": high_w, "safe": 500.0}}}
    feeders = tree["halls"][0]["feeders"]
    feeders[0]["serves"], feeders[1]["serves"] = ["r1"], ["r2"]
    twin = Twin(tree, [PowerGuard()], act=True)
    told = {"gpu.power_w": 700.0, "gpu.power_limit_w": high_w, "rack.power_w": 75_000.0}
    twin.run(3, told | {"feeder.power_w": 75_000.0})
    assert np.isnan(twin.lease(CAP)).all()
    twin.run(2, told | {"feeder.power_w": np.array([105_000.0, 75_000.0])})
    assert not twin.engine.suspended
    cut = np.isfinite(twin.lease(CAP))
    assert cut[:72].any()
    assert not cut[72:].any()
