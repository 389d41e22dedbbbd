"""Fleet wiring: what section and site file do not agree on, a hall's summary, and heads for the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.nats import HallSummary, SummaryDecoder
from tests.support.builders import START_NS, Twin, site_of, two_racks
from tests.support.fleets import fleet_tree
from tests.support.two_levels import hub_tree
from twin.config import Config, FleetLink, FleetSettings, Loaded
from twin.config.fleet import fleet_problems
from twin.report import sentence
from twin.wiring import FleetInterface, fleet_faults
from twin.wiring.fleet import summary_of


def loaded(**fleet: Any) -> Loaded:
    config = Config(site="site.yaml", broker="embedded", fleet=FleetSettings(**fleet))
    return Loaded(config, Path("racktwin.yaml"))


def hall_tree(**more: Any) -> dict[str, Any]:
    tree = two_racks()
    main = {"name": "main", "external": True, "guaranteed_w": 2e5, "serves": ["r[1-2]"]}
    tree["halls"][0]["feeders"] = [main | more]
    return tree


def beside_tree() -> dict[str, Any]:
    """A feeder that feeds the racks as well as the one that the grants are of, and not below it."""
    tree = hall_tree()
    tree["halls"][0]["feeders"].append({"name": "b", "side": "B", "serves": ["r[1-2]"]})
    return tree


@pytest.mark.parametrize(
    "tree, fleet, why",
    [
        (two_racks(), {}, "no rack with guaranteed_w"),
        (two_racks(), {"hall": "a", "feeder": "a"}, "is not external"),
        (two_racks(), {"hall": "a", "feeder": "x"}, "has no feeder 'x'"),
        (hall_tree(serves=["r1"]), {"hall": "a", "feeder": "main"}, "does not feed all racks"),
        (beside_tree(), {"hall": "a", "feeder": "main"}, "lab/h/b feeds racks beside main"),
    ],
)
def test_what_does_not_agree_is_refused(tree: dict[str, Any], fleet: dict[str, Any], why: str) -> None:
    assert why in " ".join(fleet_faults(loaded(**fleet), site_of(tree)))


def test_a_hall_and_a_hub_that_agree_have_no_faults() -> None:
    assert fleet_faults(loaded(hall="a", feeder="main"), site_of(hall_tree())) == []
    assert fleet_faults(loaded(), site_of(fleet_tree())) == []


UP = FleetLink(servers=["nats://127.0.0.1:4223"], hall="east", feeder="main")


def without_policy() -> dict[str, Any]:
    return {key: value for key, value in hub_tree("east").items() if key != "policies"}


@pytest.mark.parametrize(
    "tree, fleet, why",
    [
        (
            hub_tree("east"),
            {"hall": "east", "feeder": "main"},
            "expected `hall` and `feeder` in $.fleet.above",
        ),
        (without_policy(), {"above": UP}, "no policy of the site file shares it out"),
        (
            hub_tree("east"),
            {"above": FleetLink(hall="east", feeder="fa")},
            "$.fleet.above.feeder: the budget of fa",
        ),
        (two_racks(), {"above": UP}, "no rack with guaranteed_w"),
    ],
)
def test_a_hub_that_cannot_be_a_hall_of_another_is_refused(
    tree: dict[str, Any], fleet: dict[str, Any], why: str
) -> None:
    assert why in " ".join(fleet_faults(loaded(**fleet), site_of(tree)))


def test_the_section_above_is_of_a_hub_and_names_a_hall() -> None:
    assert fleet_faults(loaded(above=UP), site_of(hub_tree("east"))) == []
    assert fleet_problems(FleetSettings(above=UP)) == []
    assert "expected at a hub" in " ".join(fleet_problems(FleetSettings(hall="a", feeder="b", above=UP)))
    assert "there this hub is a hall" in " ".join(fleet_problems(FleetSettings(above=FleetLink())))
    wrong = FleetLink(servers=["http://x"], hall="a", feeder="b", every_s=0.0)
    assert [p.partition(":")[0] for p in fleet_problems(FleetSettings(above=wrong))] == [
        "$.fleet.above.servers[0]",
        "$.fleet.above.every_s",
    ]


def test_a_summary_tells_budget_and_share_and_nothing_that_nobody_heard() -> None:
    pod = Twin(hall_tree())
    pod.tick()
    told = summary_of(pod.engine, "main", HallSummary(hall="a", epoch=1, sequence=1, t_ns=START_NS))
    assert (told.budget_w, told.guaranteed_w, told.gpus, told.gpus_out) == (2e5, 2e5, 144, 144)
    assert told.power_w is None
    pod.run(3, {"rack.power_w": 9e4, "gpu.power_w": 900.0, "feeder.power_w": 1.8e5})
    told = summary_of(pod.engine, "main", told)
    assert told.power_w == pytest.approx(1.8e5, rel=0.01)
    assert (told.gpus_out, told.heard_pu) == (0, 1.0)


def test_heads_of_halls_become_a_line_of_the_journal() -> None:
    decoder = SummaryDecoder(site_of(fleet_tree()))
    assert FleetInterface(decoder=decoder).heads() is None
    decoder.newest["hall-a"] = HallSummary(
        hall="hall-a", epoch=1, sequence=2, t_ns=1, run="r", lines=1234, head="h"
    )
    record = FleetInterface(decoder=decoder).heads()
    assert record is not None
    assert sentence(record, None) == "journals of halls: hall-a at line 1,234"
