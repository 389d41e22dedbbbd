"""Budgets of halls: the split by priority and demand, decreases before increases, silence, lost feeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import BY_NAME
from tests.support.builders import Twin, explained, site_of
from tests.support.fleets import GUARANTEED_W, MOST_W, fleet_tree
from twin.catalogue import NS, ConfigError, ContractError
from twin.config import arming_faults
from twin.site import HALL_BUDGET, share_faults
from twin.telemetry import Reading

LEAST_W = np.array(GUARANTEED_W)


class Campus:
    """The hub's engine with two halls that obey, unless told otherwise."""

    def __init__(self, tree: dict[str, Any] | None = None, **settings: Any) -> None:
        self.twin = Twin(tree or fleet_tree(), [BY_NAME["hall_budgets"](**settings)], act=True)
        self.budget_w, self.issued_ns, self.until_ns = LEAST_W.copy(), np.zeros(2), np.zeros(2)
        self.demand_w = np.array([900e3, 500e3])
        self.deaf = self.silent = self.unmetered = np.zeros(2, bool)

    def run(self, seconds: int, **values: Any) -> np.ndarray:
        """So many seconds; the budgets that are then lent."""
        for _ in range(seconds):
            self.budget_w = np.where(self.until_ns > self.twin.now_ns, self.budget_w, LEAST_W)
            told = {
                "rack.hall_power_w": np.minimum(self.budget_w, self.demand_w),
                "rack.hall_demand_w": self.demand_w,
                "rack.hall_budget_readback_w": self.budget_w,
                "rack.hall_grant_age_s": (self.twin.now_ns + NS - self.issued_ns) / NS,
            }
            told = {k: np.where(self.silent | ((k[-5:] == "age_s") & (self.issued_ns == 0)), np.nan, v)
                    for k, v in told.items()}  # fmt: skip
            told |= {k.replace("__", "."): v for k, v in values.items()}
            if self.unmetered.any():  # which report no power rather than none that can be read
                power_w, at_ns = told.pop("rack.hall_power_w"), self.twin.now_ns + NS
                for hall in np.flatnonzero(~self.unmetered).tolist():
                    self.twin.inbox.put(Reading("rack", hall, "hall_power_w", power_w[hall], at_ns), at_ns)
            for batch in self.twin.tick(told).commands:
                hears = ~self.deaf[batch.index]
                self.budget_w[batch.index[hears]] = batch.value[hears]
                self.issued_ns[batch.index[hears]] = batch.issued_ns
                self.until_ns[batch.index[hears]] = batch.expires_ns
        return self.twin.lease(HALL_BUDGET)


def test_demand_comes_first_by_priority_and_no_hall_has_less_than_it_is_guaranteed() -> None:
    campus = Campus()
    assert campus.run(20).tolist() == [900e3, 300e3], "failover: 1.2 MW for both"
    campus.demand_w = np.array([450e3, 500e3])
    # Both have what they want, and the rest goes to the higher priority
    assert campus.run(30).tolist() == [700e3, 500e3]


def test_without_failover_both_feeds_are_lent_and_the_loss_of_one_is_answered_in_its_tick() -> None:
    campus = Campus(failover=False)
    assert campus.run(30).tolist() == [MOST_W, MOST_W], "each feed carries half of 2 MW"
    campus.twin.tick({"feeder.energised_state": [1.0, 0.0]})
    assert campus.twin.lease(HALL_BUDGET).tolist() == [900e3, 300e3]


def test_halls_whose_feeds_are_all_without_power_keep_to_their_shares() -> None:
    """No feeder limits them then; one of them may be there by now, and both will return."""
    for failover in (True, False):
        campus = Campus(failover=failover)
        campus.run(20)
        assert campus.run(3, feeder__energised_state=[1.0, 1.0]).tolist() == LEAST_W.tolist()


def test_a_raise_waits_until_the_other_hall_tells_that_it_has_taken_less() -> None:
    campus = Campus()
    campus.run(20)
    campus.demand_w, campus.deaf = np.array([400e3, 900e3]), np.array([True, False])
    lent_w = campus.run(9)
    assert lent_w.tolist() == [400e3, 300e3], "hall-a may still draw its 900 kW"
    assert campus.run(45).tolist() == [400e3, 800e3], "its grant has run out, and so have all caps under it"


def test_a_hall_that_is_a_hub_is_waited_for_as_long_as_its_own_halls_may_hold_on() -> None:
    campus = Campus()
    campus.run(20, rack__hall_lapse_s=[48.0, 35.0])
    campus.demand_w, campus.deaf = np.array([400e3, 900e3]), np.array([True, False])
    assert campus.run(58).tolist() == [400e3, 300e3], "10 s of the grant, 3 s of skew, and its 48 s"
    assert campus.run(8).tolist() == [400e3, 800e3]


def test_a_hall_that_acknowledges_is_believed_only_once_it_draws_less() -> None:
    campus = Campus()
    campus.run(20)
    campus.demand_w = np.array([400e3, 900e3])
    still = {"rack__hall_power_w": [900e3, 300e3]}
    assert campus.run(6, **still).tolist() == [400e3, 300e3]
    assert campus.run(3).tolist() == [400e3, 800e3]


def test_a_hall_whose_meter_is_gone_is_waited_for_though_it_acknowledges() -> None:
    """Nobody knows whether it draws less by now, until its caps have certainly fallen."""
    campus = Campus()
    campus.run(20)
    campus.demand_w, campus.unmetered = np.array([900e3, 900e3]), np.array([True, False])
    assert campus.run(40).tolist() == [400e3, 300e3], "its share, which it has acknowledged"
    assert campus.run(40).tolist() == [400e3, 800e3]


def test_a_power_from_before_does_not_show_that_a_hall_draws_less() -> None:
    campus = Campus()
    campus.demand_w = np.array([300e3, 900e3])
    assert campus.run(30).tolist() == [400e3, 800e3]
    # It draws little as its meter fails, then all that it has; the other one wants its part back
    campus.demand_w = np.array([900e3, 200e3])
    campus.run(1)
    campus.unmetered = np.array([False, True])
    assert campus.run(10).tolist() == [400e3, 300e3]
    assert campus.run(60).tolist() == [900e3, 300e3]


def test_a_silent_hall_keeps_its_guaranteed_share_and_others_get_the_rest() -> None:
    campus = Campus()
    campus.run(20)
    campus.silent, campus.demand_w = np.array([True, False]), np.array([900e3, 900e3])
    assert campus.run(30).tolist() == [400e3, 300e3], "its caps may still stand as they were"
    assert campus.run(60).tolist() == [400e3, 800e3]


def test_a_load_that_only_the_feeder_meters_see_is_taken_off() -> None:
    campus = Campus()
    campus.run(20)
    seen = campus.run(20, feeder__power_w=[700e3, 700e3])  # 600 kW each would be the halls'
    # The halls may draw 500 kW of each, and 200 kW are another's: as much with either feed lost
    assert seen.tolist() == [pytest.approx(700e3, rel=1e-5), 300e3]


def test_more_guaranteed_than_one_feed_carries_is_refused() -> None:
    tree = fleet_tree()
    assert share_faults(site_of(tree)) == []
    tree["halls"][0]["racks"][1]["guaranteed_w"] = 900e3
    site = site_of(tree)
    faults = arming_faults(None, site)  # type: ignore[arg-type]  # no profile is asked for
    assert [f.partition(":")[0] for f in faults] == ["fleet/campus/fa", "fleet/campus/fb"]
    assert "1,300.0 kW" in faults[0]


@pytest.mark.parametrize("wrong", [{"max_w": 1.0}, {"nodes": 2}, {"max_w": None}, {"guaranteed_w": -1.0}])
def test_a_hall_without_a_range_or_with_nodes_is_refused(wrong: dict[str, Any]) -> None:
    tree = fleet_tree()
    tree["halls"][0]["racks"][0] |= wrong
    with pytest.raises(ConfigError, match=r"halls\[0\]\.racks\[0\]"):
        site_of(tree)


@pytest.mark.parametrize("wrong", [{"failover": 1}, {"margin_pu": 0.6}, {"silent_s": -1.0}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        BY_NAME["hall_budgets"](**wrong)


def test_it_explains_who_has_what_and_which_feeder_is_full() -> None:
    campus = Campus()
    campus.run(20)
    rows = explained(campus.twin, "hall_budgets").table("halls")
    assert [(r["hall"], r["budget_w"], r["full"]) for r in rows] == [
        ("fleet/campus/hall-a", 900e3, "fleet/campus/fa"),
        ("fleet/campus/hall-b", 300e3, "fleet/campus/fa"),
    ]
