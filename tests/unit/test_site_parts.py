"""Parts of a site: each rack is in one, with all that serves it alone; the rest is at the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from connectors.agents import encode_json
from connectors.mqtt import Router, matcher, subscriptions
from connectors.nats import HallSummary
from policies.leak_guard import LeakGuard
from tests.support.builders import START_NS, Twin, site_of, spec_of, two_racks
from twin.catalogue import ConfigError
from twin.cli.main import main
from twin.config import Config, FleetSettings, Loaded, load_site, packaged_profiles
from twin.simulation.plant_wire import PlantWire
from twin.site import (
    Profile,
    Site,
    SiteSpec,
    SplitSite,
    build_site,
    expand,
    lapse_faults,
    parse_profile,
    ranges,
    share_faults,
    split_site,
)
from twin.telemetry import Ignored, Message
from twin.wiring import SelfDescription, fleet_faults, propose
from twin.wiring.fleet import summary_of

SITES = Path(__file__).parents[2] / "deploy" / "sites"


def loaded(**fleet: Any) -> Loaded:
    config = Config(site="site.yaml", broker="embedded", fleet=FleetSettings(**fleet))
    return Loaded(config, Path("racktwin.yaml"))


Divided = tuple[SplitSite, dict[str, Site], Site]


def divided(site: Site, profiles: dict[str, Any], count: int) -> Divided:
    parsed = {name: parse_profile(tree, name) for name, tree in profiles.items()}
    split = split_site(site, parsed, count)
    return split, {name: site_of(tree) for name, tree in split.parts.items()}, site_of(split.hub)


def row_tree(racks: int = 12, **more: Any) -> dict[str, Any]:
    """A room of racks, three to a CDU and six to a row, below two mains; one loop cools all."""
    served = [f"r[01-{racks:02d}]"]
    rows = racks // 6
    hall = {
        "name": "h",
        "racks": [{"name": served[0], "profile": "gb200-nvl72"}],
        "cdus": [{"name": f"c[1-{racks // 3}]", "loop": "w", "serves": served}],
        "feeders": [
            {"name": f"{name}-{s}{below}", "side": s.upper(), "budget_w": budget_w, "serves": serves}
            for s in "ab"
            for name, below, budget_w, serves in (
                ("main", "", 130e3 * racks, [f"row-{s}[1-{rows}]"]),
                ("row", f"[1-{rows}]", 130e3 * 6, served),
            )
        ],
        "leaves": [{"name": "l[1-2]", "serves": served}],
    }  # fmt: skip
    return {"site": "s", "loops": [{"name": "w", "cooling": "tower"}], "halls": [hall], **more}


@pytest.mark.parametrize("count", [4, 8, 12])
def test_each_rack_is_in_one_part_with_its_cdu_and_its_own_feeders(count: int) -> None:
    spec, site = load_site(SITES / "atlas-100k.yaml")
    _, parts, hub = divided(site, spec.profiles, count)
    assert len(parts) == count
    seen = [rack for part in parts.values() for rack in part.names["rack"]]
    assert sorted(seen) == sorted(site.names["rack"])
    assert sum(part.sizes["gpu"] for part in parts.values()) == site.sizes["gpu"]
    for part in parts.values():
        for rack, path in enumerate(part.names["rack"]):
            at = site.entity("rack", path)
            assert at is not None
            cdu = site.names["cdu"][site.cdu_of_rack[at]]
            assert part.names["cdu"][part.cdu_of_rack[rack]] == cdu
            assert part.profile_of_rack[rack] == site.profile_of_rack[at]
            assert part.spare_rack[rack] == site.spare_rack[at]
        for feeder, path in enumerate(part.names["feeder"]):
            if path.rpartition("/")[2] != "grant":
                whole = site.entity("feeder", path)
                assert whole is not None
                assert {part.names["rack"][r] for r in part.racks_below(feeder)} == {
                    site.names["rack"][r] for r in site.racks_below(whole)
                }
    at_hub = set(hub.names["feeder"])
    in_parts = {f for part in parts.values() for f in part.names["feeder"]}
    assert at_hub | in_parts >= set(site.names["feeder"])
    assert not at_hub & in_parts


def test_shares_fit_every_shared_feeder_and_what_a_part_draws_after_a_lapse() -> None:
    spec, site = load_site(SITES / "atlas-100k.yaml")
    profiles: dict[str, Profile] = {n: parse_profile(t, n) for n, t in spec.profiles.items()}
    split, parts, hub = divided(site, spec.profiles, 8)
    assert share_faults(hub) == []
    assert fleet_faults(loaded(), hub) == []
    assert len(hub.names["feeder"]) == 8
    for part in parts.values():
        assert lapse_faults(part, profiles) == []
        assert fleet_faults(loaded(hall="part-1", feeder="grant"), part) == []
    assert any("shared feeders (8)" in note for note in split.notes)
    assert any("atlas/fws1, atlas/fws2" in note for note in split.notes)


def test_a_loop_of_several_parts_is_of_the_hub_and_one_of_a_part_stays() -> None:
    tree = row_tree()
    _, parts, hub = divided(site_of(tree), spec_of(tree).profiles, 2)
    assert hub.names["loop"] == ["s/w"]
    assert all(part.sizes["loop"] == 0 and part.sizes["cdu"] == 2 for part in parts.values())
    tree = row_tree()
    tree["halls"][0]["cdus"] = [{"name": f"c{i}", "loop": f"w{i}", "serves": [s]}
                               for i, s in ((1, "r[01-06]"), (2, "r[07-12]"))]  # fmt: skip
    tree["loops"] = [{"name": "w[1-2]", "cooling": "tower"}]
    _, parts, hub = divided(site_of(tree), spec_of(tree).profiles, 2)
    assert [part.names["loop"] for part in parts.values()] == [["s/w1"], ["s/w2"]]
    assert hub.sizes["loop"] == 0


def test_a_supernode_of_several_racks_stays_whole() -> None:
    tree = {
        "site": "s",
        "halls": [{"name": "h", "racks": [{"name": "r[01-32]", "profile": "cloudmatrix384"}]}],
    }
    site = site_of(tree)
    _, parts, _ = divided(site, spec_of(tree).profiles, 2)
    assert [part.sizes["supernode"] for part in parts.values()] == [1, 1]
    with pytest.raises(ConfigError, match="expected at most 2: racks with a CDU, a supernode"):
        divided(site, spec_of(tree).profiles, 3)


@pytest.mark.parametrize(
    "tree, count, why",
    [
        (row_tree(), 1, "expected 2 to 12"),
        (row_tree(), 13, "expected 2 to 12"),
        (row_tree(), 5, "expected at most 4"),
        (row_tree(feeders=[{"name": "part-1", "serves": []}]), 2, "has a 'part-1' already"),
        (two_racks(), 2, "expected at most 1"),
    ],
)
def test_a_site_that_its_couplings_hold_together_is_refused(
    tree: dict[str, Any], count: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        divided(site_of(tree), spec_of(tree).profiles, count)


def test_feeders_that_cross_need_a_part_for_each_pair() -> None:
    rows = {"a": ("r[01-08]", "r[09-16]"), "b": ("r[05-12]", "r[01-04]")}
    feeders = [
        {"name": f"{side}{i}", "side": side.upper(), "budget_w": 3e6, "serves": [racks]}
        for side, both in rows.items()
        for i, racks in enumerate(both)
    ]
    feeders[-1]["serves"] = ["r[01-04]", "r[13-16]"]
    hall = {"name": "h", "racks": [{"name": "r[01-16]", "profile": "gb200-nvl72"}], "feeders": feeders}
    tree = {"site": "s", "halls": [hall]}
    with pytest.raises(ConfigError, match="expected at least 4"):
        divided(site_of(tree), spec_of(tree).profiles, 3)
    _, parts, hub = divided(site_of(tree), spec_of(tree).profiles, 4)
    assert [part.sizes["rack"] for part in parts.values()] == [4, 4, 4, 4]
    assert [len(hub.racks_below(f)) for f in range(4)] == [2, 2, 2, 2]


def test_halls_that_fit_into_parts_have_one_each() -> None:
    one = row_tree()["halls"][0]
    tree = row_tree(halls=[one | {"name": f"h{i}"} for i in range(3)])
    _, parts, hub = divided(site_of(tree), spec_of(tree).profiles, 3)
    assert [part.names["hall"] for part in parts.values()] == [["s/h0"], ["s/h1"], ["s/h2"]]
    assert hub.sizes["feeder"] == 0


def test_a_part_hears_its_own_racks_and_takes_no_name_of_another_part_for_its_own() -> None:
    one = row_tree()["halls"][0]
    tree = row_tree(halls=[one | {"name": f"h{i}"} for i in range(2)])
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    part = parts["part-1"]
    router = Router(part)
    frame = encode_json(START_NS, {"power_w": [1.0] * 4})
    (block,) = router.decode(Message(START_NS, "IT/v1/PUB/Frame/s/h0/r01/node0", frame))
    assert block.start == 0  # type: ignore[union-attr]
    other = router.decode(Message(START_NS, "IT/v1/PUB/Frame/s/h1/r01/node0", frame))
    assert isinstance(other, Ignored)
    assert (other.remedy, "another part" in other.why) == ("", True)
    stranger = router.decode(Message(START_NS, "IT/v1/PUB/Frame/s/h1/r99/node0", frame))
    assert isinstance(stranger, Ignored)
    assert router.unplaced() == {}  # all of h1 is elsewhere
    assert part.entity("rack", "r01") is None, "ambiguous in the whole site, so in a part as well"
    topics = [topic for topic, _ in subscriptions("racktwin", (), router.own_racks)]
    assert "IT/v1/PUB/Frame/s/h0/r01/#" in topics
    assert not any("/h1/" in topic or topic == "IT/v1/PUB/#" for topic in topics)


def test_the_bms_of_the_whole_site_is_no_error_in_a_part() -> None:
    tree = row_tree()
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    router = Router(parts["part-1"])
    for rack, remedy in (("r01", None), ("r07", ""), ("r77", "name it in the site file")):
        meta = {"objectType": "Rack", "pointType": "RackPower", "rackLocationId": rack, "engUnit": "W"}
        router.decode(
            Message(START_NS, f"BMS/v1/PUB/Metadata/Rack/RackPower/{rack}", msgspec.json.encode(meta))
        )
        body = msgspec.json.encode({"value": 5.0, "timestamp": START_NS // 10**6, "quality": 1})
        found = router.decode(Message(START_NS, f"BMS/v1/PUB/Value/Rack/RackPower/{rack}", body))
        if remedy is None:
            assert not isinstance(found, Ignored)
        else:
            assert isinstance(found, Ignored)
            assert bool(found.remedy) == bool(remedy)


def test_the_summary_of_a_part_has_its_power_though_the_feeder_of_its_grant_has_no_meter() -> None:
    tree = row_tree()
    split, _, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    part = Twin(split.parts["part-2"])
    part.run(3, {"rack.power_w": 9e4, "gpu.power_w": 900.0})
    found = summary_of(part.engine, "grant", HallSummary(hall="part-2", epoch=1, sequence=1, t_ns=START_NS))
    assert found.power_w == pytest.approx(6 * 9e4, rel=0.01)
    assert found.guaranteed_w == split.hub["halls"][0]["racks"][1]["guaranteed_w"]


def test_the_hub_hears_neither_the_agents_nor_the_racks_of_its_parts() -> None:
    tree = row_tree(periods_s={"feeder": 60})
    _, _, hub = divided(site_of(tree), spec_of(tree).profiles, 2)
    router = Router(hub)
    assert not [t for t, _ in subscriptions("hub", (), router.own_racks) if t == "IT/v1/PUB/#"]
    frame = encode_json(START_NS, {"power_w": [1.0] * 4})
    heard = router.decode(Message(START_NS, "IT/v1/PUB/Frame/s/h/r01/node0", frame))
    assert isinstance(heard, Ignored)
    assert (heard.remedy, router.unplaced()) == ("", {})
    assert hub.file.periods_s == {"feeder": 60}, "its meters report as rarely as before"


def test_what_is_of_another_part_is_no_mistake_of_anybody() -> None:
    """States and answers of agents, and job events though a hall elsewhere is called as their topic is."""
    one = row_tree()["halls"][0]
    tree = row_tree(halls=[one, one | {"name": "jobs"}])
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    router = Router(parts["part-1"])
    for topic in ("PUB/Agent/s/jobs/r01/node0", "racktwin/Result/gpu.power_cap_w/s/jobs/r01/node0"):
        found = router.decode(Message(START_NS, f"IT/v1/{topic}", b"{}"))
        assert isinstance(found, Ignored)
        assert "another part" in found.why
    body = b'{"type": "JobEnded", "id": "1", "job": "j"}'
    assert not isinstance(router.decode(Message(START_NS, "IT/v1/PUB/Event/jobs/slurm", body)), Ignored)


def test_a_rack_whose_name_is_no_topic_is_not_subscribed_to() -> None:
    """Discovery writes "rack 1" as rack+20+1; a broker hangs up on a filter with such a level."""
    racks = [{"name": n, "profile": "gb200-nvl72"} for n in ("r1", "r1+7", "r+20+2")]
    tree = {"site": "s", "halls": [{"name": "h", "racks": racks}]}
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 3)
    filters = [t for part in parts.values() for t, _ in subscriptions("x", (), Router(part).own_racks)]
    assert "IT/v1/PUB/Frame/s/h/r1/#" in filters
    for topic_filter in filters:
        matcher(topic_filter)


def test_series_of_other_parts_are_routine_and_ambiguous_names_are_not() -> None:
    one = row_tree()["halls"][0]
    tree = row_tree(halls=[one | {"name": f"h{i}"} for i in range(2)])
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    part = parts["part-1"]
    assert all(part.is_elsewhere(name) for name in ("h1/r01", "s/h1/r01/node0"))
    assert not any(part.is_elsewhere(name) for name in ("r01", "r01/node0", "r99", "s/h0/r01", "s", ""))
    router = Router(part)
    for host, is_strange in (("s/h1/r01/node0", False), ("r01/node0", True)):
        line = f"nvidia_smi,host={host},index=0 power_draw=5".encode()
        heard = router.decode(Message(START_NS, "telegraf/x", line))
        assert isinstance(heard, Ignored)
        assert bool(heard.remedy) is is_strange


@pytest.mark.parametrize("halls, found", [(1, True), (2, False)])
def test_a_sensor_that_names_no_hall_is_of_the_only_one(halls: int, found: bool) -> None:
    one = row_tree()["halls"][0] | {"name": "room"}
    tree = row_tree(halls=[one, one | {"name": "x"}][:halls])
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    router = Router(parts["part-1"])
    place = "Sensor/LeakDetect/t"
    meta = {"objectType": "Sensor", "pointType": "LeakDetect", "objectId": "t1",
            "stateText": [{"value": 0, "text": "NoLeak"}, {"value": 1, "text": "Leak"}]}  # fmt: skip
    router.decode(Message(START_NS, f"BMS/v1/PUB/Metadata/{place}", msgspec.json.encode(meta)))
    body = msgspec.json.encode({"value": 0, "timestamp": START_NS // 10**6, "quality": 1})
    assert isinstance(router.decode(Message(START_NS, f"BMS/v1/PUB/Value/{place}", body)), list) is found
    other = msgspec.json.encode(meta | {"processArea": ["x"]})
    router.decode(Message(START_NS, f"BMS/v1/PUB/Metadata/{place}", other))
    heard = router.decode(Message(START_NS, f"BMS/v1/PUB/Value/{place}", body))
    assert (isinstance(heard, Ignored) and "another part" in heard.why) is (halls == 2)


def test_names_that_two_tables_share_and_planes_of_others_leave_each_part_a_site() -> None:
    tree = row_tree()
    hall = tree["halls"][0]
    hall["cdus"][0]["name"] = "main-[1-4]"
    hall["feeders"][0]["name"] = "main-1"
    hall["planes"] = [
        {"name": "ib", "links_per_node": 1, "racks": ["r01"]},
        {"name": "rail", "links_per_node": 1},
    ]
    hall["switches"] = [{"name": "l[1-2]", "serves": ["r[01-12]"], "planes": ["ib", "rail"]},
                        {"name": "ib-leaf", "serves": ["r[01-12]"], "planes": ["ib"]}]  # fmt: skip
    _, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    assert [part.planes for part in parts.values()] == [["ib", "rail"], ["rail"]]
    assert [part.sizes["switch"] for part in parts.values()] == [3, 2]
    assert "s/h/main-1" in parts["part-1"].names["cdu"]


def test_feeders_without_racks_hang_where_they_hung() -> None:
    """A feeder of pumps below a row stays with the row; one below a main goes to the hub with it."""
    tree = row_tree()
    feeders = tree["halls"][0]["feeders"]
    feeders[0]["serves"].append("plant")
    feeders[1] = feeders[1] | {"name": "row-a1", "serves": ["r[01-06]", "pumps"]}
    feeders += [
        feeders[1] | {"name": "row-a2", "serves": ["r[07-12]"]},
        *({"name": n} for n in ("plant", "pumps")),
    ]
    _, parts, hub = divided(site_of(tree), spec_of(tree).profiles, 2)
    assert "s/h/pumps" in parts["part-1"].names["feeder"]
    assert "s/h/plant" in hub.names["feeder"]
    assert hub.parent_of_feeder[hub.names["feeder"].index("s/h/plant")] >= 0


def test_a_share_is_never_less_than_what_a_part_draws_after_a_lapse() -> None:
    """Also where that is no whole number of watts, and all that it can draw."""
    tree = row_tree()
    spec = spec_of(tree)
    profile = spec.profiles["gb200-nvl72"]
    profile["power"]["rack_overhead_w"] = profile["power"]["rack_overhead_w"] | {"value": 1000.4}
    profile["power"]["rack_max_w"] = profile["power"]["rack_max_w"] | {"value": 50e3}
    parsed = {"gb200-nvl72": parse_profile(profile, "p")}
    split = split_site(build_site(spec, "s"), parsed, 2)
    for part in split.parts.values():
        assert lapse_faults(build_site(SiteSpec(part, spec.profiles), "s"), parsed) == []


def test_profiles_beside_the_site_file_are_beside_its_parts(tmp_path: Path) -> None:
    """Also one that has the name of a packaged profile: a part without it would take the packaged one."""
    spec = spec_of(row_tree())
    own = spec.profiles["gb200-nvl72"] | {"title": "Ours"}
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "gb200-nvl72.yaml").write_text(yaml.safe_dump(own))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(row_tree()))
    where = tmp_path / "parts"
    assert main(["site", "split", str(tmp_path / "site.yaml"), "--parts", "2", "--out", str(where)]) == 0
    for name in ("part-1", "part-2"):
        assert load_site(where / f"{name}.yaml")[0].profiles["gb200-nvl72"]["title"] == "Ours"


def test_another_split_in_the_same_folder_is_forced_and_names_what_it_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(row_tree()))
    split = ["site", "split", str(tmp_path / "site.yaml"), "--out", str(tmp_path / "parts"), "--parts"]
    assert main([*split, "4"]) == 0
    assert main([*split, "2"]) != 0
    assert "earlier" not in capsys.readouterr().out
    assert main([*split, "2", "--force"]) == 0
    assert "part-3.yaml, part-4.yaml are of an earlier split" in " ".join(capsys.readouterr().out.split())


def test_what_other_parts_have_is_not_proposed_to_one(tmp_path: Path) -> None:
    tree = row_tree()
    split, parts, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    router = Router(parts["part-1"])
    for message in PlantWire(site_of(tree)).metadata(1):
        router.decode(message)
    path = tmp_path / "part-1.yaml"
    path.write_text(yaml.safe_dump(split.parts["part-1"], sort_keys=False))
    change = propose(path, SelfDescription(router.described(), router.unplaced()))
    assert (change.diff(), change.problems) == ("", [])
    hall = tree["halls"][0]
    hall["racks"].append({"name": "r13", "profile": "gb200-nvl72"})
    hall["cdus"].append({"name": "c9", "loop": "w", "serves": ["r13"]})
    for message in PlantWire(site_of(tree)).metadata(1):
        router.decode(message)
    change = propose(path, SelfDescription(router.described(), router.unplaced()))
    assert change.problems == []
    assert [word for word in ("r13", "c9", "loop") if word in "".join(change.added())] == ["r13", "c9"]


@pytest.mark.parametrize("racks", [0, 1])
def test_a_site_of_less_than_two_racks_is_refused(racks: int) -> None:
    tree: dict[str, Any] = {"site": "s", "halls": [{"name": "h", "racks": [{"name": "r"}][:racks]}]}
    with pytest.raises(ConfigError, match="a split needs at least 2"):
        divided(site_of(tree), {}, 2)


@pytest.mark.parametrize("entry", ["h", "h/r01", "a/b/c", "h/r[2-1]", ""])
def test_what_is_elsewhere_is_named_right_and_not_here(entry: str) -> None:
    tree = row_tree(elsewhere=[entry])
    with pytest.raises(ConfigError, match="elsewhere"):
        site_of(tree)


def test_ranges_undo_expand() -> None:
    names = [*expand("r[008-011]"), *expand("r[5-6]"), "a", "r012x"]
    assert sorted(n for pattern in ranges(names) for n in expand(pattern)) == sorted(names)
    assert packaged_profiles()


LEASED = ("rack.liquid_isolation", "gpu.power_cap_w", "node.service_level", "node.power_state")
Leases = dict[tuple[str, str], float]


def leak_leases(tree: dict[str, Any]) -> tuple[Leases, list[str]]:
    """Leases of `leak_guard` once two trays of r02 and the loop are wet for a while, and what leaks."""
    twin = Twin(tree, [LeakGuard()], act=True)
    site, sizes = twin.site, twin.site.sizes
    rack, trays = site.entity("rack", "s/h/r02"), np.zeros(sizes["node"])
    if rack is not None:
        trays[site.node_start_of_rack[rack] :][:2] = 1.0
    told: dict[str, Any] = {"node.service_level_state": 0.0, "node.leak_state": 0.0, "rack.leak_state": 0.0}
    told |= {
        "gpu.power_limit_w": 1200.0,
        "rack.liquid_isolation_state": 0.0,
        "rack.electrical_isolation_state": 0.0,
    }
    for second in range(60):
        told |= {"node.leak_state": trays, "loop.leak_state": 1.0} if second > 1 else {}
        here = {key: value for key, value in told.items() if sizes[key.partition(".")[0]]}
        twin.tick(here, dt_s=3.0)
    leases: Leases = {}
    for control in LEASED:
        table = control.partition(".")[0]
        for entity, value in enumerate(twin.lease(control).tolist()):
            if np.isfinite(value):
                leases[control, site.name(table, entity)] = value
    return leases, [f.title for f in twin.decision.findings if f.title.endswith(" leaks")]


@pytest.mark.long
def test_a_leak_below_a_loop_of_several_parts_is_isolated_in_its_part() -> None:
    tree = row_tree(racks=6)
    split, _, _ = divided(site_of(tree), spec_of(tree).profiles, 2)
    whole, found = leak_leases(tree)
    one, other, hub = (leak_leases(part) for part in (*split.parts.values(), split.hub))
    assert ("rack.liquid_isolation", "s/h/r02") in whole
    assert found == ["s/h/r02 leaks"], "the loop's wetness is explained by it"
    assert one == (whole, found)
    assert other == ({}, [])
    assert hub == ({}, ["s/w leaks"])
