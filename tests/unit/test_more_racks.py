"""More racks in a what-if: where they stand, what does not grow with them, which limits they reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import NS, ConfigError
from twin.config import make_engine, spec_of
from twin.engine import encode
from twin.plant import Mix, Plant, Scenario, Sensors, cases_of
from twin.simulation import Case, Question, Simulation
from twin.simulation.limits import LimitUse
from twin.simulation.whatif import begin, run_arm
from twin.site import Site, SiteSpec, grown_site, with_racks

BUSY = Scenario("steady", workload=Mix(training_pu=0, inference_pu=0, batch_pu=0, constant_pu=0.8))


def halls() -> dict[str, Any]:
    """Two halls of four racks each; CDUs and feeders in groups that share them, feeds above both."""
    hall = {"racks": [{"name": "r[1-4]", "profile": "gb200-nvl72", "priority": 3}],
            "cdus": [{"name": "cdu[1-2]", "serves": ["r[1-4]"], "loop": "fw"}],
            "feeders": [{"name": f"p{side}[1-2]", "serves": ["r[1-4]"], "side": side, "budget_w": 280_000}
                        for side in "AB"]}  # fmt: skip
    return {
        "site": "lab",
        "loops": [{"name": "fw"}],
        "halls": [{"name": "h1", **hall}, {"name": "h2", **hall}],
    }


def grown(
    tree: dict[str, Any], beside: str, count: int, profile: str | None = None
) -> tuple[Site, Site, SiteSpec]:
    before = site_of(tree)
    rack = before.entity("rack", beside)
    assert rack is not None
    spec = spec_of(with_racks(tree, before, rack, count, profile), None, "site")
    return before, grown_site(spec, before, "site"), spec


def test_they_stand_beside_the_rack_and_all_others_as_they_stood() -> None:
    before, now, _ = grown(halls(), "lab/h1/r3", 3)
    new = [i for i, name in enumerate(now.names["rack"]) if name not in before.names["rack"]]
    assert [now.names["rack"][i] for i in new] == ["lab/h1/new1", "lab/h1/new2", "lab/h1/new3"]
    for table in ("cdu", "feeder", "loop", "hall"):
        assert now.names[table] == before.names[table]
    beside = now.names["rack"].index("lab/h1/r3")
    for i in new:
        assert now.cdu_of_rack[i] == now.cdu_of_rack[beside]
        assert now.feeders_of_rack.of_row(i).tolist() == now.feeders_of_rack.of_row(beside).tolist()
        assert now.profile_of_rack[i] == "gb200-nvl72"
    for i, name in enumerate(before.names["rack"]):
        at = now.names["rack"].index(name)
        assert now.cdu_of_rack[at] == before.cdu_of_rack[i], name
        assert now.feeders_of_rack.of_row(at).tolist() == before.feeders_of_rack.of_row(i).tolist(), name
    assert now.design.cdu_flow_lpm.tolist() == before.design.cdu_flow_lpm.tolist()
    other = grown(halls(), "lab/h1/r3", 2, "gb300-nvl72")[1]
    assert [p for p in other.profile_of_rack if p == "gb300-nvl72"] == ["gb300-nvl72"] * 2


def test_a_feeder_above_all_halls_serves_them_by_their_hall() -> None:
    tree = two_racks()
    tree["feeders"] = [{"name": "ups", "serves": ["r[1-2]"]}]
    tree["halls"][0]["feeders"] = []
    _, now, _ = grown(tree, "lab/h/r1", 1)
    assert now.racks_below(0).tolist() == [0, 1, 2]


def test_what_serves_them_does_not_grow() -> None:
    before, now, _ = grown(halls(), "lab/h2/r1", 4)
    old, plant = Plant(before, 3, BUSY, spread=0.5), Plant(now, 3, BUSY, spread=0.5)
    assert plant.parameters.cdu_flow_lpm[2] > old.parameters.cdu_flow_lpm[2]
    plant.keep_equipment_of(before, 0.5)
    for name in ("cdu_head0_pa", "cdu_ua_w_per_k", "cdu_primary_lpm", "loop_heat_w", "feeder_rating_w"):
        assert np.array_equal(getattr(plant.parameters, name), getattr(old.parameters, name)), name
    for _ in range(120):
        plant.step()
        old.step()
    at = now.names["rack"].index("lab/h2/r1")
    assert (
        plant.truth.rack_flow_lpm[at] < 0.8 * old.truth.rack_flow_lpm[before.names["rack"].index("lab/h2/r1")]
    )
    assert max(plant.balances().values()) <= 1e-6


def question(tree: dict[str, Any]) -> tuple[Question, Simulation]:
    """A question from a twin that has watched a busy plant for two minutes."""
    spec = spec_of(tree, None, "site")
    site = site_of(tree)
    plant = Plant(site, 5, BUSY)
    simulation = Simulation(make_engine(site), plant, Sensors(site, 5), start_ns=1_767_261_600 * NS)
    plant.start_ns = 1_767_261_600 * NS
    simulation.run(120)
    return Question(spec, "site", encode(simulation.engine.dump()), "now", 120.0), simulation


@pytest.mark.long
def test_they_load_the_site_as_so_many_racks_do_and_the_limits_are_named() -> None:
    tree = two_racks(loops=[{"name": "fw"}])
    tree["halls"][0]["cdus"][0]["loop"] = "fw"
    asked, simulation = question(tree)
    before = simulation.engine.checksum()
    rack_w = simulation.plant.truth.rack_power_w.mean()
    trip = {"kind": "pump_trip", "entity": "cdu1", "begin_s": 60}
    scenario = {"name": "more", "duration_s": 120, "faults": [trip],
                "more_racks": {"count": 2, "beside": "r1"}}  # fmt: skip
    ((_, made),) = cases_of(scenario, simulation.site)
    _, _, spec = grown(tree, "lab/h/r1", 2)
    case = Case(0, {}, made, spec)
    started, _ = begin(asked, case, "nothing")
    assert started.site.sizes["rack"] == 4
    assert started.plant.truth.rack_power_w == pytest.approx(np.full(4, rack_w), rel=0.05)
    result = run_arm(asked, case, "nothing")
    assert simulation.engine.checksum() == before
    rows = {row["limit"]: row for row in result.limits}
    load = rows["the budget of a feeder, if the other side failed"]
    assert load["value"] == pytest.approx(4 * rack_w, rel=0.05)
    assert load["reached_s"] is not None  # 300 kW for four racks of about 100 kW
    assert [f["kind"] for f in result.faults] == ["pump_trip"]
    idle = cases_of(scenario | {"more_racks": {"count": 2, "beside": "r1", "load_pu": 0.0}}, simulation.site)
    started, _ = begin(asked, Case(0, {}, idle[0][1], spec), "nothing")
    assert started.plant.truth.rack_power_w[2:].max() < 0.5 * rack_w


def test_a_limit_is_reached_once_and_by_the_first() -> None:
    site = site_of(two_racks())
    use = LimitUse.of("the power of a rack", "rack", "W", np.array([100.0, 100.0]))
    assert use.tightest(site) is None
    for time_s, values in (
        (1.0, [50.0, 90.0]),
        (2.0, [101.0, 95.0]),
        (3.0, [90.0, 120.0]),
        (4.0, [np.nan, 99.0]),
    ):
        use.see(np.array(values), time_s)
    row = use.tightest(site)
    assert row is not None
    assert (row["entity"], row["value"], row["reached_s"], row["reached_by"]) == ("lab/h/r1", 101.0, 2.0, 2)
    assert row["text"] == "the power of a rack: lab/h/r1, 101 W of 100 W; reached after 2 s and by 1 more"
    low = LimitUse.of("the flow", "rack", "l/min", np.array([40.0, 40.0]), low=True)
    low.see(np.array([80.0, 50.0]), 1.0)
    row = low.tightest(site)
    assert row is not None
    assert (row["entity"], row["used_pu"], row["reached_s"]) == ("lab/h/r2", 0.8, None)


def test_wrong_wishes_are_refused() -> None:
    site = site_of(two_racks())
    base = {"name": "x", "duration_s": 60}
    wrong = ({"count": 0}, "more_racks.count"), ({"beside": "r7"}, "beside"), ({"load_pu": 1.5}, "load_pu")
    for other, words in wrong:
        more = {"count": 1, "beside": "r1"} | other
        with pytest.raises(ConfigError, match=words):
            cases_of(base | {"more_racks": more}, site)
    tree = two_racks()
    tree["halls"][0]["name"] = "h[1-2]"
    with pytest.raises(ValueError, match="several halls"):
        grown(tree, "lab/h1/r1", 1)


def test_the_terminal_tells_the_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from twin.cli.main import main

    (tmp_path / "site.yaml").write_text(json.dumps(two_racks()))
    (tmp_path / "more.yaml").write_text(json.dumps(
        {"name": "x", "duration_s": 20, "more_racks": {"count": 1, "beside": "r1"}}))  # fmt: skip
    words = [
        "simulation",
        "whatif",
        "--site",
        str(tmp_path / "site.yaml"),
        "--scenario",
        str(tmp_path / "more.yaml"),
    ]
    assert main([*words, "--jobs", "1"]) == 0
    said = capsys.readouterr()
    assert "limit: the budget of a feeder" in said.out
    assert "more racks change all flows" in said.err
    run = [
        "simulation",
        "run",
        "--site",
        str(tmp_path / "site.yaml"),
        "--scenario",
        str(tmp_path / "more.yaml"),
    ]
    assert main(run) == 1
    assert "only `racktwin simulation whatif` adds racks" in capsys.readouterr().err
