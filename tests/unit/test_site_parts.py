"""Parts of a site: each rack is in one, with all that serves it alone; the rest is at the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors.agents import encode_json
from connectors.mqtt import Router, subscriptions
from connectors.nats import HallSummary
from tests.support.builders import START_NS, Twin, site_of, spec_of, two_racks
from twin.catalogue import ConfigError
from twin.config import Config, FleetSettings, Loaded, load_site, packaged_profiles
from twin.site import (
    Profile,
    Site,
    SplitSite,
    expand,
    lapse_faults,
    parse_profile,
    ranges,
    share_faults,
    split_site,
)
from twin.telemetry import Ignored, Message
from twin.wiring import fleet_faults
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


@pytest.mark.parametrize("entry", ["h", "h/r01", "a/b/c", "h/r[2-1]", ""])
def test_what_is_elsewhere_is_named_right_and_not_here(entry: str) -> None:
    tree = row_tree(elsewhere=[entry])
    with pytest.raises(ConfigError, match="elsewhere"):
        site_of(tree)


def test_ranges_undo_expand() -> None:
    names = [*expand("r[008-011]"), *expand("r[5-6]"), "a", "r012x"]
    assert sorted(n for pattern in ranges(names) for n in expand(pattern)) == sorted(names)
    assert packaged_profiles()
