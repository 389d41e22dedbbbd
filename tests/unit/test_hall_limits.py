"""Contracts and cooling loops above the halls of a fleet: shared out as feeders are, named, and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.hall_limits import BACK_S
from tests.support.builders import explained, site_of
from tests.support.fleets import GUARANTEED_W, MOST_W, fleet_tree
from tests.unit.test_hall_budgets import Campus
from twin.catalogue import NS, ConfigError, ContractError
from twin.contracts.quantities import MACHINES_S, RETURN_S
from twin.site import HALL_BUDGET, share_faults, share_notes
from twin.telemetry import LoadTargetSet, TicksSkipped

WIDE: dict[str, Any] = {"failover": False}  # both feeds carry 2.4 MW, so that they are not what limits


def cooled(**more: Any) -> dict[str, Any]:
    """A loop of 1.6 MW that takes all heat of both halls, by four machines."""
    loop = {"name": "tower", "serves": ["hall-a", "hall-b"], "heat_w": 1.6e6, "machines": 4}
    return fleet_tree(loops=[loop | {"flow_lpm": 2300.0} | more])


class CooledCampus(Campus):
    """Halls below a loop of which the BMS reports each second how many machines are lost: none, at first."""

    def __init__(self, **loop: Any) -> None:
        super().__init__(cooled(**loop), **WIDE)
        self.lost: list[float] = [0.0]

    def run(self, seconds: int, **values: Any) -> Any:
        self.lost = values.pop("loop__machine_out_count", self.lost)
        return super().run(seconds, loop__machine_out_count=self.lost, **values)


def quarter_ws(campus: Campus) -> float:
    return float(campus.twin.engine.memory["hall_budgets"]["course_quarter_ws"])


def target(campus: Campus, limit_w: float, in_s: float = 0.0, feeders: tuple[str, ...] = ()) -> None:
    event = LoadTargetSet(
        id=f"t{limit_w}", author="grid", target="peak", limit_w=limit_w, kind="utility", feeders=feeders,
        start_ns=campus.twin.now_ns + round(in_s * NS), end_ns=campus.twin.now_ns + 3600 * NS,
    )  # fmt: skip
    campus.twin.inbox.put_event(event)


def why(campus: Campus) -> list[str]:
    return [str(row["why"]) for row in explained(campus.twin, "hall_budgets").table("halls")]


def row(campus: Campus, kind: str) -> dict[str, Any]:
    rows = explained(campus.twin, "hall_budgets").table("feeders")
    return next(dict(r) for r in rows if r["kind"] == kind)


def alarms(campus: Campus) -> list[str]:
    return [f.title for f in campus.twin.engine.findings.active.values()]


def test_a_load_target_is_split_by_priority_and_named_as_what_limits() -> None:
    campus = Campus(**WIDE)
    campus.run(30)
    target(campus, 1.1e6)
    assert campus.run(2).tolist() == [800e3, 300e3]
    campus.run(2)
    assert why(campus) == [
        f"the load is limited by the utility target peak of 1100 kW: by priority {p} and demand"
        for p in (2, 0)
    ]
    shown = row(campus, "contract")
    assert (shown["feeder"], shown["budget_w"], shown["held_w"]) == ("site", 1.1e6, 1.1e6)
    assert shown["why"] == "the utility target peak of 1100 kW"
    assert not [title for title in alarms(campus) if "guaranteed" in title]


def test_a_target_below_the_guaranteed_shares_cuts_to_them_and_rings() -> None:
    campus = Campus(**WIDE)
    campus.run(30)
    target(campus, 500e3)
    assert campus.run(3).tolist() == list(GUARANTEED_W)
    assert "Halls are guaranteed more power than a load target allows" in alarms(campus)
    said = [s.text for s in explained(campus.twin, "hall_budgets").sentences]
    assert "site: the utility target peak of 500 kW; its halls are guaranteed 700.0 kW, and keep that" in said


def test_a_target_to_come_is_approached_along_the_ramp() -> None:
    campus = Campus(**WIDE, ramp_down_w_per_s=1e4)
    campus.demand_w[:] = MOST_W
    campus.run(30)
    target(campus, 1.2e6, in_s=100.0)
    sums_w = [float(campus.run(20).sum()) for _ in range(5)]
    assert sums_w[0] == pytest.approx(1.2e6 + 1e4 * (100 - 20 - 15), rel=0.01)
    assert sums_w[2] == pytest.approx(1.2e6 + 1e4 * (100 - 60 - 15), rel=0.01)
    assert sums_w[-1] == pytest.approx(1.2e6)


def test_a_target_of_a_feeder_counts_what_flows_there_now() -> None:
    campus = Campus(**WIDE)
    campus.demand_w[:] = MOST_W
    campus.run(30)
    target(campus, 600e3, feeders=("fleet/campus/fa",))
    assert campus.run(2).tolist() == [900e3, 300e3], "half of each hall flows there"


def test_a_load_that_no_hall_tells_of_counts_against_the_contract() -> None:
    campus = Campus(**WIDE)
    target(campus, 1.5e6)
    campus.run(30)
    seen_w = campus.run(20, feeder__power_w=[800e3, 800e3])
    assert seen_w.sum() < 1.5e6 - 50e3


def test_a_loop_is_split_as_a_feeder_is_and_a_lost_machine_lowers_it() -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    assert campus.run(30).tolist() == [1e6, 600e3]
    assert why(campus)[1] == "fleet/tower is full: by priority 0 and demand"
    assert campus.run(2, loop__machine_out_count=[1.0]).tolist() == [900e3, 300e3]
    assert why(campus)[0].startswith(
        "fleet/tower is full, as it can take 75 % of its nominal heat now: by priority 2"
    )
    nan = float("nan")
    assert campus.run(5, loop__machine_out_count=[nan]).tolist() == [900e3, 300e3], "the last number stands"
    assert campus.run(5, loop__machine_out_count=[0.0]).sum() == 1.6e6


def test_a_loop_whose_machines_cool_less_than_the_shares_rings_until_they_are_back() -> None:
    campus = CooledCampus(heat_w=900e3)
    title = "Halls are guaranteed more power than the machines of their loop cool"
    campus.run(12)
    assert title not in alarms(campus)
    assert campus.run(12, loop__machine_out_count=[1.0]).tolist() == list(GUARANTEED_W)
    assert title in alarms(campus)
    campus.run(12, loop__machine_out_count=[0.0])
    assert title not in alarms(campus)


UNKNOWN = "The number of lost machines of a loop that halls share is unknown: one of several counts as lost"


def test_a_loop_of_which_nobody_reports_lost_machines_counts_one_as_lost_and_rings() -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    never = [float("nan")]
    assert campus.run(30, loop__machine_out_count=never).tolist() == [900e3, 300e3]
    assert UNKNOWN in alarms(campus)
    (found,) = [f for f in campus.twin.engine.findings.active.values() if f.title == UNKNOWN]
    assert found.evidence == (
        "fleet/tower: loop.machine_out_count was never reported; its 4 machines count as 75 % in service, "
        "which take 1,200 kW",
    )
    assert "unknown: one of several counts as lost" in why(campus)[0]
    assert campus.run(12, loop__machine_out_count=[0.0]).sum() == 1.6e6
    assert UNKNOWN not in alarms(campus)
    assert "machine" not in why(campus)[0]


def test_a_single_machine_of_which_nobody_reports_is_not_lost_but_rings() -> None:
    campus = CooledCampus(machines=1)
    campus.demand_w[:] = MOST_W
    assert campus.run(30, loop__machine_out_count=[float("nan")]).sum() == 1.6e6
    assert UNKNOWN in alarms(campus)


@pytest.mark.long
def test_a_number_of_lost_machines_that_is_hours_old_is_unknown_and_more_lost_ones_stand() -> None:
    for lost, then_w in ((0.0, 1.2e6), (2.0, 0.8e6)):
        campus = CooledCampus()
        campus.demand_w[:] = MOST_W
        campus.run(30, loop__machine_out_count=[lost])
        campus.lost = [float("nan")]
        campus.run(30)
        assert UNKNOWN not in alarms(campus)
        campus.twin.now_ns += round(MACHINES_S * NS)
        assert campus.run(60).sum() == then_w
        assert UNKNOWN in alarms(campus)


def away(campus: CooledCampus, seconds: float) -> None:
    """The hub was away for so long, and is back with the next tick."""
    campus.twin.tick(None, TicksSkipped(count=round(seconds)), dt_s=seconds)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0.0, 2.0])
def test_after_a_hub_was_away_halls_keep_their_shares_until_lost_machines_are_heard(lost: float) -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    campus.run(30, loop__machine_out_count=[lost])
    campus.lost = [float("nan")]
    away(campus, 2 * MACHINES_S)
    for _ in range(4):
        assert campus.run(60).tolist() == list(GUARANTEED_W)
        assert UNKNOWN not in alarms(campus)
    assert "has not been reported since this hub was away" in why(campus)[0]
    campus.run(60, loop__machine_out_count=[lost])
    assert campus.run(2).sum() == (1.6e6 if lost == 0.0 else 0.8e6)
    assert "away" not in why(campus)[0]
    assert UNKNOWN not in alarms(campus)


@pytest.mark.long
def test_lost_machines_that_are_not_heard_after_the_hub_was_away_are_unknown() -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    campus.run(30)
    campus.lost = [float("nan")]
    away(campus, 2 * MACHINES_S)
    campus.run(round(RETURN_S))
    assert campus.run(70).sum() == 1.2e6
    assert UNKNOWN in alarms(campus)
    campus.twin.now_ns += round(MACHINES_S * NS)  # unknown for so long, it is not awaited the next time
    away(campus, 2 * MACHINES_S)
    assert campus.run(60).sum() == 1.2e6


def test_lost_machines_that_nobody_ever_reported_are_not_awaited() -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    campus.run(30, loop__machine_out_count=[float("nan")])
    away(campus, 2 * MACHINES_S)
    assert campus.run(60).sum() == 1.2e6
    assert UNKNOWN in alarms(campus)


def test_shares_beyond_a_loop_with_an_unknown_number_of_machines_ring_as_unknown_only() -> None:
    campus = CooledCampus(heat_w=900e3)
    campus.run(12, loop__machine_out_count=[float("nan")])
    titles = alarms(campus)
    assert UNKNOWN in titles
    assert "Halls are guaranteed more power than the machines of their loop cool" not in titles


def test_a_loop_without_stated_machines_is_never_unknown() -> None:
    plain = Campus(fleet_tree(loops=[{"name": "tower"}]), **WIDE)
    plain.run(12)
    assert UNKNOWN not in alarms(plain)


@pytest.mark.long
def test_a_hall_that_fell_silent_counts_against_the_contract_with_its_grant_until_that_has_lapsed() -> None:
    """Its share alone would be counted while it may still draw its grant."""
    campus = Campus(**WIDE, contract_w=3e6)  # which limits nothing
    campus.demand_w[:] = MOST_W
    campus.run(110)  # into the next quarter of an hour
    campus.silent = np.array([True, False])

    def counted_w() -> float:
        """The power with which hall-a counts in the next second."""
        before_ws, b_w = quarter_ws(campus), campus.budget_w[1]
        campus.run(1)
        return quarter_ws(campus) - before_ws - float(b_w)

    seen_w = [counted_w() for _ in range(90)]
    assert seen_w[:60] == pytest.approx([MOST_W] * 60), "its caps stand for 48 s after it is silent for 15 s"
    assert seen_w[-20:] == pytest.approx([GUARANTEED_W[0]] * 20)


@pytest.mark.parametrize(("told", "lent_w"), [(40.0, list(GUARANTEED_W)), (-1.0, None), (float("nan"), None)])
def test_a_count_of_machines_that_cannot_be_frees_no_heat(told: float, lent_w: list[float] | None) -> None:
    """Ten times too many leave the shares; what no count can be changes nothing of what was told before."""
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    campus.run(30)
    assert campus.run(3, loop__machine_out_count=[1.0]).tolist() == [900e3, 300e3]
    assert campus.run(3, loop__machine_out_count=[told]).tolist() == (lent_w or [900e3, 300e3])


def test_heat_that_was_lost_is_not_given_back_for_hours_in_which_the_hub_was_away() -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    campus.run(30)
    part = {"loop__supply_temp_c": [30.0], "loop__flow_lpm": [1400.0]}
    low_w = campus.run(3, **part, loop__return_temp_c=[46.0]).sum()
    campus.twin.now_ns += 7200 * NS
    limit_w = [campus.run(1, **part, loop__return_temp_c=[38.0]), row(campus, "loop")["budget_w"]][1]
    assert limit_w <= low_w + 1.6e6 * 125 / BACK_S


def test_only_the_heat_that_a_loop_takes_of_a_hall_counts() -> None:
    campus = CooledCampus(heat_pu=0.8)
    campus.demand_w[:] = MOST_W
    assert campus.run(30).tolist() == [1e6, 1e6]


def test_a_flow_that_is_too_low_for_the_heat_lowers_a_loop_until_it_is_back() -> None:
    campus = CooledCampus()
    campus.demand_w[:] = MOST_W
    campus.run(30)
    part = {"loop__supply_temp_c": [30.0], "loop__flow_lpm": [1400.0]}
    assert campus.run(3, **part, loop__return_temp_c=[38.0]).sum() == 1.6e6, "little flow for little heat"
    low_w = campus.run(3, **part, loop__return_temp_c=[46.0]).sum()
    assert low_w == pytest.approx(1.6e6 * 1400 / 2300, rel=0.01)
    assert row(campus, "loop")["power_w"] == pytest.approx(1.55e6, rel=0.05), "its heat, by flow and rise"
    assert campus.run(3).sum() == pytest.approx(low_w, rel=0.01)
    back_w = campus.run(60, **part, loop__return_temp_c=[38.0]).sum()
    assert back_w - low_w == pytest.approx(1.6e6 * 60 / BACK_S, rel=0.2), "it is given back slowly"
    assert campus.run(3, **part, loop__return_temp_c=[46.0]).sum() == pytest.approx(low_w, rel=0.01)


def test_shares_beyond_a_loop_are_refused_and_those_beyond_it_with_a_machine_lost_are_told() -> None:
    assert share_faults(site_of(cooled())) == [] == share_notes(site_of(cooled()))
    tight = site_of(cooled(heat_w=800e3))
    assert share_faults(tight) == []
    assert (
        "fleet/tower: its halls are guaranteed 700.0 kW of heat; with one of its 4" in share_notes(tight)[0]
    )
    faults = share_faults(site_of(cooled(heat_w=600e3)))
    assert ["fleet/tower" in fault and "heat_w of 600.0 kW" in fault for fault in faults] == [True]


def test_a_contract_below_the_guaranteed_shares_is_refused() -> None:
    def entry(contract_w: float) -> dict[str, Any]:
        return {"hall_budgets": {"authority": "act", "settings": {"contract_w": contract_w}}}

    assert share_faults(site_of(fleet_tree(policies=entry(700e3)))) == []
    (fault,) = share_faults(site_of(fleet_tree(policies=entry(699e3))))
    assert "contract_w is 699.0 kW and its halls are guaranteed 700.0 kW" in fault


@pytest.mark.parametrize(
    "wrong",
    [
        {"machines": None},
        {"serves": []},
        {"heat_pu": 0.0},
        {"serves": ["x"]},
        {"machines": 0},
        {"heat_w": -1},
    ],
)
def test_a_loop_of_halls_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"loops\[0\]"):
        site_of(cooled(**wrong))


@pytest.mark.parametrize("wrong", [{"contract_w": 0.0}, {"ramp_up_w_per_s": -1.0}, {"lead_s": 1e9}])
def test_terms_of_contracts_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        Campus(**wrong)


def test_the_mean_of_a_quarter_hour_is_a_contract_too() -> None:
    campus = Campus(**WIDE, contract_w=1.2e6)
    campus.demand_w[:] = MOST_W
    campus.run(30)
    assert campus.twin.lease(HALL_BUDGET).sum() <= 1.2e6 * 1.05
    assert "mean of a quarter hour" in why(campus)[0]
