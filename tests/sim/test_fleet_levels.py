"""Halls of halls: a top hub, site hubs that are its halls, and their halls, whatever happens between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors.nats import HallSummary
from policies import BY_NAME
from tests.support.builders import START_NS, Twin, explained, site_of
from tests.support.fleet_storm import Network
from tests.support.two_levels import (
    HALL_MOST_W,
    LOOP_W,
    SHARES_W,
    SITE_SHARE_W,
    SITES,
    CalmNetwork,
    Region,
    hub_tree,
    top_tree,
)
from twin.config import arming_faults
from twin.site import share_faults
from twin.wiring.fleet import summary_of

HELD_S = 61  # a grant, its skew and the lease of caps, at two levels: 13 s + 13 s + 35 s
SILENT_S = 15  # for which a site that says nothing is granted what it has


Begun = Callable[..., Region]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    """Regions by seed and network, ended behind the test."""
    regions: list[Region] = []

    def begin(seed: int, network: type[Network] = Network) -> Region:
        regions.append(Region(seed, tmp_path, network))
        return regions[-1]

    yield begin
    for region in regions:
        region.close()


@pytest.fixture
def region(begun: Begun) -> Region:
    """Both levels after 30 s with all halls heard, each wanting the most."""
    region = begun(1, CalmNetwork)
    for site in region.sites:
        for hall in site.halls:
            hall.demand_w = HALL_MOST_W
    return later(region, 0, 30)


def later(region: Region, begin: int, end: int) -> Region:
    """So many seconds later."""
    for second in range(begin, end):
        region.step(second)
    return region


@pytest.mark.long
def test_a_top_hub_splits_what_it_has_over_sites_and_these_over_their_halls(region: Region) -> None:
    east, west = region.sites
    assert region.over == []
    assert (east.budget_w, west.budget_w) == (1.4e6, SITE_SHARE_W), "by priority, and the loop is what limits"
    assert [hall.cap_w for hall in east.halls] == [1e6, 400e3]
    told = east.summary()
    assert (told.power_w, told.demand_w, told.budget_w) == (1.4e6, 2e6, 1.4e6)
    assert (told.gpus, told.lapse_s, told.guaranteed_w) == (0, 48.0, SITE_SHARE_W)
    assert told.floor_w is None, "no hall tells its own"
    rows = explained(region.top.twin, "hall_budgets").table("halls")
    assert str(rows[1]["why"]) == "region/river is full: by priority 0 and demand"
    rows = explained(east.twin, "hall_budgets").table("halls")
    assert str(rows[1]["why"]) == "east/campus/main is full: by priority 0 and demand"


@pytest.mark.long
def test_without_the_top_hub_the_sites_fall_to_their_shares_and_split_these(region: Region) -> None:
    region.top.away_until_s = np.inf
    later(region, 30, 50)
    for site in region.sites:
        assert site.budget_w == SITE_SHARE_W
        assert [hall.cap_w for hall in site.halls] == [500e3, 300e3], "what is left of the share is lent"


@pytest.mark.long
def test_without_both_hubs_each_hall_has_its_share(region: Region) -> None:
    region.top.away_until_s = np.inf
    for site in region.sites:
        site.away_until_s = np.inf
    later(region, 30, 50)
    caps = [[hall.cap_w for hall in site.halls] for site in region.sites]
    assert caps == [list(SHARES_W)] * len(SITES)


@pytest.mark.long
def test_a_site_has_given_way_only_when_its_halls_have(region: Region) -> None:
    """The daemon of a hall dies with 1 MW while the hall draws little: it may draw that later."""
    east, west = region.sites
    for hall in east.halls:
        hall.demand_w = 200e3
    later(region, 30, 32)
    east.halls[0].dead_since_s = 32.0
    later(region, 32, 42)
    assert east.budget_w == SITE_SHARE_W
    assert east.summary().budget_w >= 1.2e6, "it tells what its halls may hold still"
    east.halls[0].demand_w = HALL_MOST_W
    later(region, 42, 32 + HELD_S + 10)
    assert region.over == []
    assert west.budget_w > 1.3e6, "in the end the other site has what this one does not want"


@pytest.mark.long
def test_a_site_whose_hub_died_holds_others_back_as_long_as_its_halls_may_draw(region: Region) -> None:
    east, west = region.sites
    east.away_until_s = np.inf
    later(region, 30, 30 + HELD_S)
    assert west.budget_w == SITE_SHARE_W, "the last grants may have gone out with the last breath"
    later(region, 30 + HELD_S, 30 + SILENT_S + HELD_S + 5)
    assert west.budget_w > SITE_SHARE_W
    assert region.over == []


def test_a_site_whose_hub_may_only_advise_holds_what_its_halls_say() -> None:
    hub = Twin(hub_tree("east"), [BY_NAME["hall_budgets"]()])
    hub.run(3, {"rack.hall_power_w": 250e3, "rack.hall_budget_readback_w": [400e3, 300e3]})
    told = summary_of(hub.engine, "main", HallSummary(hall="east", epoch=1, sequence=1, t_ns=START_NS))
    assert (told.power_w, told.budget_w) == (500e3, SITE_SHARE_W)


@pytest.mark.long
def test_a_silent_hall_does_not_silence_its_site(region: Region) -> None:
    east = region.sites[0]
    east.halls[1].dead_since_s = 30.0
    later(region, 30, 55)
    assert east.budget_w >= SITE_SHARE_W + 500e3
    told = east.summary()
    assert told.power_w is not None
    assert told.power_w >= east.draw_w, "a silent hall counts with what it may hold"


@pytest.mark.long
def test_a_lost_machine_and_a_contract_reach_the_halls(region: Region) -> None:
    region.machines_out = 1.0
    later(region, 30, 40)
    assert region.drawn_w[-1] == pytest.approx(0.75 * LOOP_W)
    region.machines_out = 0.0
    region.contract(40, 1.61e6)
    later(region, 40, 50)
    assert region.drawn_w[-1] == pytest.approx(1.61e6)
    why = str(explained(region.top.twin, "hall_budgets").table("halls")[0]["why"])
    assert why == "the load is limited by the utility target peak of 1610 kW: by priority 1 and demand"


def test_halls_guaranteed_more_than_their_hub_are_refused() -> None:
    tree = hub_tree("east")
    assert share_faults(site_of(tree)) == []
    assert share_faults(site_of(top_tree())) == []
    tree["halls"][0]["racks"][0]["guaranteed_w"] = 600e3
    faults = arming_faults(None, site_of(tree))  # type: ignore[arg-type]  # no profile is asked for
    assert len(faults) == 1
    assert "east/campus/main: its halls are guaranteed 900.0 kW" in faults[0]
    assert "at most the guaranteed share of 800.0 kW" in faults[0]


def stormy(region: Region, seconds: int, contract_s: int) -> Region:
    for second in range(seconds):
        region.strike(second)
        if second == contract_s:
            region.contract(second, 1.7e6)
        region.step(second)
    return region


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_no_limit_of_any_level_is_ever_exceeded(seed: int, begun: Begun) -> None:
    region = stormy(begun(seed), 300, contract_s=100)
    assert region.over == []
    assert max(region.drawn_w[100 + 60 + HELD_S + 10 :]) <= 1.7e6 + 1.0, (
        "the contract is kept, whoever was away"
    )
    assert region.top.lent_w > 2 * SITE_SHARE_W, "more than the guaranteed shares, or little is tested"
