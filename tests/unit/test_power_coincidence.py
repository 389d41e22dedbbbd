"""Coincidence: jobs that take turns share what they never drew at once, and lose it when they do."""

from __future__ import annotations

import pytest

from policies.power_capping import PowerCap
from policies.power_capping.power_cap import MARGIN_PU
from tests.support.powered_plant import Loop
from tests.unit.test_power_cap import ROUNDED_W, gpus, job, loop_of, site

BUDGET_W = 150_000
TURN_S, STEP_S = 120, 10
HALVES = gpus(range(0, 18)), gpus(range(18, 36))


def in_turns(loop: Loop, turns: int, high_w: float = 1000.0) -> tuple[float, float]:
    """(worst power of both racks after the first turns, share of the wanted watts that was given)."""
    worst_w, wanted, given = 0.0, 0.0, 0.0
    for turn in range(turns):
        loop.wants_w[HALVES[turn % 2]], loop.wants_w[HALVES[1 - turn % 2]] = high_w, 200.0
        for _ in range(TURN_S // STEP_S):
            loop.tick(dt_s=STEP_S)
            if turn >= turns // 2:
                worst_w = max(worst_w, loop.rack_w.sum())
                wanted, given = wanted + loop.wants_w.sum(), given + loop.gpu_w.sum()
    return worst_w, given / wanted


def begun(**settings: float) -> Loop:
    loop = loop_of(site(BUDGET_W, BUDGET_W), **settings)
    loop.tick(job("one", range(0, 18)), job("two", range(18, 36)))
    return loop


@pytest.mark.long
def test_jobs_that_take_turns_are_hardly_held() -> None:
    """130 kW at once, and 191 kW if all came together, of 150."""
    worst_w, given = in_turns(begun(), 16)
    assert given > 0.91
    assert worst_w <= (1 - MARGIN_PU) * BUDGET_W + ROUNDED_W
    _, strictly = in_turns(begun(coincidence_pu=0.0), 8)
    assert strictly < 0.8


@pytest.mark.long
def test_those_who_come_together_after_all_are_held_within_seconds() -> None:
    loop = begun()
    in_turns(loop, 12)
    loop.wants_w[:] = 1000.0
    over_s = 0
    for _ in range(120):
        loop.tick()
        over_s += loop.rack_w.sum() > BUDGET_W
    assert loop.worst_w.max() > 0.5 * BUDGET_W, "it was tried"
    assert over_s <= 7
    assert loop.rack_w.sum() <= (1 - MARGIN_PU) * BUDGET_W + ROUNDED_W
    assert loop.rack_w.sum() >= 0.93 * BUDGET_W


@pytest.mark.long
def test_where_more_was_carried_than_planned_nothing_learned_is_believed() -> None:
    """Two of three come together: what idles, and would be cut first, has nothing to give."""
    loop = loop_of(site(BUDGET_W, BUDGET_W), high_priority=5)
    thirds = [range(0, 12), range(12, 24), range(24, 36)]
    loop.tick(*(job(f"j{k}", nodes, 0 if k == 2 else 9) for k, nodes in enumerate(thirds)))
    for turn in range(12):
        loop.wants_w[:], loop.wants_w[gpus(thirds[turn % 3])] = 200.0, 1000.0
        loop.run(TURN_S, STEP_S)
    loop.wants_w[: 4 * 24] = 1000.0
    loop.tick()
    assert loop.rack_w.sum() > BUDGET_W, "the test tells something"
    loop.run(60)
    assert loop.rack_w.sum() <= (1 - MARGIN_PU) * BUDGET_W + ROUNDED_W


@pytest.mark.long
def test_caps_come_to_no_more_than_a_breaker_holds_for_ever() -> None:
    loop = begun()
    in_turns(loop, 12)
    most_w = loop.site.sum_by_rack("gpu", loop.cap_w).sum() * 1.05 + 40_000
    assert BUDGET_W < most_w <= 1.25 * BUDGET_W


@pytest.mark.long
def test_what_our_own_caps_hold_down_is_no_coincidence() -> None:
    """All want all: their old peaks from before the caps are nothing to be shared out."""
    loop = begun()
    loop.wants_w[:] = 1000.0
    for _ in range(150):
        loop.tick(dt_s=5.0)
        assert loop.rack_w.sum() <= BUDGET_W + (5e4 if loop.twin.number < 5 else 0.0)
        held_w = loop.cap_w.sum() * 1.05 + 40_000
    assert held_w <= (1 - MARGIN_PU) * BUDGET_W + ROUNDED_W


@pytest.mark.long
@pytest.mark.parametrize("silent", ["gpu.power_w", "rack.power_w"])
def test_silence_is_no_coincidence(silent: str) -> None:
    loop = begun()
    in_turns(loop, 6)
    loop.silent = {silent}
    loop.wants_w[:] = 200.0
    loop.run(300, 10.0)
    loop.wants_w[:] = 1000.0
    assert loop.rack_w.sum() <= (1.0 if silent == "gpu.power_w" else 1.25) * BUDGET_W


@pytest.mark.long
def test_what_was_learned_outlives_a_restart_and_no_change_of_the_site() -> None:
    loop = begun()
    in_turns(loop, 6)
    kept = loop.twin.engine.memory["power_cap"]
    assert (kept["layout"] > 0).all()
    assert kept["sum_w"][2] < 120_000
    again = loop.twin.restarted(site(BUDGET_W, BUDGET_W), [PowerCap()])
    assert (again.engine.memory["power_cap"]["sum_w"] == kept["sum_w"]).all()
    loop.dead[0] = True  # feeder B carries other shares than A did, and nothing is known of them
    loop.run(10)
    assert (loop.twin.engine.memory["power_cap"]["layout"] != kept["layout"]).all()
    assert loop.cap_w.sum() * 1.05 + 40_000 <= BUDGET_W
