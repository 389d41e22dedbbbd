"""Rivals of the power policies: static caps keep all budgets, cuts bite and rise again, stages in turn."""

from __future__ import annotations

import numpy as np
import pytest

from tests.evaluation.power.demand import BATCH, Demand
from tests.evaluation.power.plant import FeedLoss, Reading
from tests.evaluation.power.rivals import Proportional, Static, Thresholds, static_caps
from tests.evaluation.power.site import GPU_IDLE_W, GPU_MAX_W, PowerSite, power_site, shares_at_worst
from tests.evaluation.power.week import Week, arm_of

A, B = power_site("a"), power_site("b")


def flat(site: PowerSite, minutes: int, level: float) -> Demand:
    n = site.nodes
    one, zero = np.ones(n), np.zeros(n)
    return Demand(
        np.ones(1), np.tile(np.arange(n, dtype=np.int32), (minutes, 1)), np.full((minutes, n), level),
        np.full(n, BATCH, np.int32), site.high.astype(np.int32), 0.5 * one, 3.0 * one, 20.0 * one, zero, zero,
        one, np.ones(site.gpus),
    )  # fmt: skip


def reading(site: PowerSite, use: float) -> Reading:
    """All racks alike, so that the feed carries this share of its limit with the other side lost."""
    n_rack, n_feeder = site.site.sizes["rack"], len(site.budget_w)
    rack_w = np.full(n_rack, use * 750e3 / n_rack)
    none = np.zeros(n_feeder, np.bool_)
    gpu_w = np.full(site.gpus, 900.0)
    return Reading(gpu_w, np.full(site.gpus, GPU_MAX_W), rack_w, np.zeros(n_feeder), none, none)


@pytest.mark.parametrize("site", [A, B])
def test_static_caps_keep_every_budget_with_all_at_full_and_a_side_lost(site: PowerSite) -> None:
    loss = FeedLoss(0, 60, 240) if site is B else None
    figures = Week(site, flat(site, 5, 1.0), Static(site), loss).run()
    assert figures["over_s"] == figures["exposed_s"] == 0
    cap_w = static_caps(site)
    node_w = (4 * cap_w[::4] + 500.0) * (1.0 + site.site.design.node_loss_pu[0]) + 100.0
    load = shares_at_worst(site.site) @ np.bincount(site.site.rack_of_node, node_w)
    use = load / site.budget_w
    assert use.max() == pytest.approx(1.0)
    assert figures["binds_pu"] > 0.9


# use of the limit, seconds it lasts -> (clock of low priority, of high)
POLCA = [
    (0.79, 5, 1.0, 1.0), (0.85, 5, 1275 / 1410, 1.0), (0.92, 1, 1110 / 1410, 1.0),
    (0.92, 10, 1110 / 1410, 1305 / 1410), (0.86, 60, 1110 / 1410, 1305 / 1410),
    (0.83, 39, 1110 / 1410, 1305 / 1410),
    (0.83, 2, 1110 / 1410, 1.0), (0.83, 45, 1275 / 1410, 1.0), (0.76, 60, 1275 / 1410, 1.0),
    (0.74, 41, 1.0, 1.0), (1.01, 1, 288 / 1410, 288 / 1410), (0.5, 39, 288 / 1410, 288 / 1410),
    (0.5, 3, 1110 / 1410, 1305 / 1410),
]  # fmt: skip


def test_thresholds_come_and_go_in_turn() -> None:
    arm, second = Thresholds(A), 0
    high = A.high[A.site.node_of_gpu]
    for step, (use, seconds, low_clock, high_clock) in enumerate(POLCA):
        for _ in range(seconds):
            arm.decide(reading(A, use), second, 1, [])
            second += 1
        clock = ((arm.cap_w - GPU_IDLE_W) / (GPU_MAX_W - GPU_IDLE_W)) ** (1.0 / 2.75)
        assert clock[~high] == pytest.approx(low_clock), step
        assert clock[high] == pytest.approx(high_clock), step


def test_cuts_are_of_the_same_share_and_are_given_back_slowly() -> None:
    arm = Proportional(A)
    assert arm.decide(reading(A, 0.97), 0, 1, []) is None
    cap_w = arm.decide(reading(A, 1.05), 10, 1, [])
    assert cap_w is not None
    assert cap_w == pytest.approx(900.0 * 0.95 / 1.05)
    assert arm.decide(reading(A, 1.05), 12, 1, []) is None, "the meters do not know of it yet"
    assert arm.decide(reading(A, 0.95), 30, 15, []) is None
    for second in range(40, 99):
        assert arm.decide(reading(A, 0.85), second, 1, []) is None
    after_w = arm.decide(reading(A, 0.85), 100, 60, [])
    assert after_w is not None
    assert after_w - cap_w == pytest.approx(0.05 * 1000.0)


@pytest.mark.parametrize("name", ["proportional", "polca"])
def test_a_rival_brings_an_overload_down_and_keeps_it_there(name: str) -> None:
    figures = Week(A, flat(A, 10, 1.0), arm_of(name, A)).run()
    assert 1 <= figures["longest_over_s"] <= 15
    assert figures["over_s"] < 60
    assert figures["close_pu"] >= 0.1
    assert figures["trips"] == 0
    assert 0.005 < figures["lost_pu"] < 0.25
