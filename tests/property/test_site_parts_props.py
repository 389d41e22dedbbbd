"""Parts of random sites: together they are the site, and a daemon starts with each. May import `twin` and
hypothesis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings, strategies as st

from tests.support.builders import site_of, spec_of
from twin.catalogue import ConfigError
from twin.config import Config, FleetSettings, Loaded
from twin.site import Site, SplitSite, expand, lapse_faults, parse_profile, share_faults, split_site
from twin.site.file import within
from twin.wiring import fleet_faults

TABLES = ("rack", "cdu", "feeder", "loop", "switch", "hall", "supernode")
PROFILES = {"air-8gpu": 1, "hgx-h100": 1, "gb200-nvl72": 1, "trainium2-ultraserver": 2}


def dealt(draw: st.DrawFn, names: list[str], givers: list[str]) -> list[dict[str, Any]]:
    """Runs of names at the givers, some of which have nothing to serve; names that are left are at none."""
    cuts = [0, *sorted(draw(st.integers(0, len(names))) for _ in givers)]
    if draw(st.integers(0, 2)):
        cuts[-1] = len(names)
    return [{"name": g, "serves": names[i:j]} for g, i, j in zip(givers, cuts, cuts[1:], strict=False)]


@st.composite
def halls(draw: st.DrawFn, name: str, own: str) -> dict[str, Any]:
    """A hall of up to a dozen racks. `own` is in the names of its feeders, which others can then serve."""
    groups, patterns = [], []
    for i in range(draw(st.sampled_from([0, 1, 1, 2, 2, 3]))):
        profile = draw(st.sampled_from(sorted(PROFILES)))
        first = draw(st.sampled_from(["08", "8", "1"]))
        last = int(first) + PROFILES[profile] * draw(st.integers(1, 4)) - 1
        head, tail = draw(st.sampled_from([".", ":", "+", ""])), draw(st.sampled_from(["", "x"]))
        pattern = f"r{i}{head}[{first}-{last}]{tail}"
        more: dict[str, Any] = draw(
            st.sampled_from([{}, {}, {"priority": 3}, {"spare": True}, {"nodes": 2, "gpus_per_node": 2}])
        )
        groups.append({"name": pattern, "profile": profile, **more})
        patterns.append(pattern)
    racks = [n for p in patterns for n in expand(p)]
    hall: dict[str, Any] = {"name": name, "racks": groups}
    hall["cdus"] = [
        row | draw(st.sampled_from([{}, {"loop": "w1"}, {"loop": "w2"}]))
        for row in dealt(draw, racks, ["c1", "c2", "c3", "c4", "c5"][: draw(st.integers(1, 5))])
    ]
    sides = [dealt(draw, racks, [f"{own}a{i}" for i in range(4)])]
    again = [row | {"name": row["name"].replace("fa", "fb")} for row in sides[0]]
    sides += draw(
        st.sampled_from([[], [again], [again], [dealt(draw, racks, [f"{own}b{i}" for i in range(3)])]])
    )
    tops = [dealt(draw, [row["name"] for row in rows], [f"{own}{side}-main"])
            for side, rows in zip("ab", sides, strict=False)]  # fmt: skip
    hall["feeders"] = [
        row | draw(st.sampled_from([{}, {"budget_w": 9e6}, {"budget_w": 4e5}]))
        for rows in (*sides, *tops)
        for row in rows
    ]
    if racks:
        hall["leaves"] = [{"name": f"l{i}", "serves": [p]} for i, p in enumerate(patterns)]
        some = draw(st.lists(st.sampled_from(racks), max_size=3, unique=True))
        hall["planes"] = [
            {"name": "ib", "links_per_node": 1, "racks": some},
            {"name": "rail", "links_per_node": 2},
        ]
        served = [draw(st.lists(st.sampled_from(racks), max_size=3, unique=True)) for _ in range(2)]
        carried = draw(st.sampled_from([[], ["ib"], ["ib", "rail"]]))
        rows: list[dict[str, Any]] = [
            {"name": "sw[1-2]", "serves": served[0], "planes": carried},
            {"name": "spine", "serves": ["sw[1-2]", "sw3"]},
            {"name": "sw3", "serves": served[1]},
            {"name": "core", "serves": ["spine"]},
        ]  # fmt: skip
        hall["switches"] = draw(st.permutations(rows))
    return hall


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """One entry for two halls, or up to three with names of their own, below feeders of the site."""
    if draw(st.integers(0, 4)) == 0:
        return {"site": "s", "halls": [draw(halls("h[1-2]", "f"))], "loops": [{"name": "w[1-2]"}]}
    names = draw(st.permutations(["h", "h1", "hh"]))[: draw(st.integers(1, 3))]
    rooms = [draw(halls(name, f"{name}.f")) for name in names]
    mains = [row["name"] for room in rooms for row in room["feeders"] if row["name"].endswith("main")]
    top = [
        row | draw(st.sampled_from([{}, {"budget_w": 9e6, "external": True, "guaranteed_w": 5e6}]))
        for row in dealt(draw, mains, ["grid-1", "grid-2"])
    ]
    if draw(st.booleans()):  # a feeder in one hall may feed others
        rooms[0]["feeders"] += [row for row in top if "external" not in row]
        top = [row for row in top if "external" in row]
    more = draw(st.sampled_from([{}, {"storage": [{"name": "fs"}], "queues": [{"name": "q"}]}]))
    return {"site": "s", "halls": rooms, "feeders": top, "loops": [{"name": "w[1-2]"}], **more}


def is_fleet(site: Site, **fleet: Any) -> bool:
    config = Config(site="site.yaml", broker="embedded", fleet=FleetSettings(**fleet))
    return fleet_faults(Loaded(config, None), site) == []  # type: ignore[arg-type]


def racks_of(site: Site, feeder: int) -> set[str]:
    return {site.names["rack"][r] for r in site.racks_below(feeder)}


def described(site: Site, rack: int) -> dict[str, Any]:
    """A rack, all names written out."""
    nodes = np.arange(site.node_start_of_rack[rack], site.node_start_of_rack[rack + 1])
    links = np.isin(site.node_of_link, nodes)
    cdu = int(site.cdu_of_rack[rack])
    beside = np.flatnonzero(site.leaf_of_rack == site.leaf_of_rack[rack])
    return {
        "gpus": np.diff(site.gpu_start_of_node)[nodes].tolist(),
        "profile": site.profile_of_rack[rack],
        "priority": int(site.priority_of_rack[rack]),
        "spare": site.spare_node[nodes].tolist(),
        "supernode": [site.names["supernode"][s] for s in site.supernode_of_node[nodes]],
        "cdu": site.names["cdu"][cdu] if cdu >= 0 else None,
        "beside": {site.names["rack"][r] for r in beside},
        "planes": sorted(site.planes[p] for p in site.plane_of_link[links].tolist()),
        "switches": {
            site.names["switch"][s] for s in range(site.sizes["switch"])
            if rack in site.racks_of_switch.of_row(s) and (
                not len(site.planes_of_switch.of_row(s))
                or set(site.planes_of_switch.of_row(s).tolist()) & set(site.plane_of_link[links].tolist())
            )
        },
        "max_w": float(site.design.rack_max_w[rack]),
    }  # fmt: skip


def check_racks(site: Site, parts: dict[str, Site]) -> None:
    seen = [path for part in parts.values() for path in part.names["rack"]]
    assert sorted(seen) == sorted(site.names["rack"])
    for part in parts.values():
        for rack, path in enumerate(part.names["rack"]):
            at = site.entity("rack", path)
            assert at is not None
            here, whole = described(part, rack), described(site, at)
            whole["beside"] &= set(part.names["rack"])
            assert here == whole


def lower(site: Site, switch: int) -> set[str]:
    return {site.names["switch"][s] for s in site.switches_of_switch.of_row(switch)}


def check_switches(site: Site, part: Site) -> None:
    """Above a switch that is here stand those that stand above it in the whole site."""
    here = set(part.names["switch"])
    for switch, path in enumerate(part.names["switch"]):
        at = site.entity("switch", path)
        assert at is not None
        assert lower(part, switch) == lower(site, at) & here
    for at, path in enumerate(site.names["switch"]):
        assert path in here or not lower(site, at) & here


def check_feeders(site: Site, split: SplitSite, parts: dict[str, Site], hub: Site) -> None:
    inside = {name: set(part.names["rack"]) for name, part in parts.items()}
    found: list[str] = []
    for part in parts.values():
        for feeder, path in enumerate(part.names["feeder"]):
            if not path.rpartition("/")[2].startswith("grant"):
                at = site.entity("feeder", path)
                assert at is not None
                found.append(path)
                assert racks_of(part, feeder) == racks_of(site, at)
                assert part.side_of_feeder[feeder] == site.side_of_feeder[at]
                np.testing.assert_equal(part.budget_w[feeder], site.budget_w[at])
    for feeder, path in enumerate(hub.names["feeder"]):
        at = site.entity("feeder", path)
        assert at is not None
        found.append(path)
        carried = {p.rpartition("/")[2] for p in racks_of(hub, feeder)}
        below = racks_of(site, at)
        assert carried == {name for name, racks in inside.items() if racks & below}
        assert all(racks <= below for name, racks in inside.items() if name in carried)
    assert sorted(found) == sorted(site.names["feeder"])


def check_names(site: Site, part: Site) -> None:
    """Whatever has a name is here or elsewhere; a name means the same as in the whole site, or nothing."""
    everything = {path for table in TABLES[:-1] for path in site.names[table]}
    here = {path for table in TABLES[:-1] for path in part.names[table]} | part.elsewhere
    assert here >= everything
    for table in TABLES:
        for path in {*site.names[table], *part.names[table]}:
            local = (path.partition("/")[2], path.rpartition("/")[2]) if table != "supernode" else ()
            for name in (path, *local):
                found, whole = part.entity(table, name), site.entity(table, name)
                if found is not None and "part-" not in name and "grant" not in name:
                    assert whole is not None
                    assert part.name(table, found) == site.name(table, whole)
                if found is None and path in part.names[table]:
                    assert name != path
                if path not in part.names[table] and table != "supernode":
                    assert part.is_elsewhere(path) or path in here


@pytest.mark.long
@given(trees(), st.integers(2, 5))
@settings(max_examples=100)
def test_the_parts_of_a_site_are_the_site(tree: dict[str, Any], count: int) -> None:
    site, spec = site_of(tree), spec_of(tree)
    profiles = {name: parse_profile(body, name) for name, body in spec.profiles.items()}
    try:
        split = split_site(site, profiles, count)
    except ConfigError as error:
        if not any(
            word in str(error) for word in ("a split needs", "--parts: expected", "after all leases lapse")
        ):
            raise
        event("refused: " + str(error)[:30])
        return
    event("split")
    parts, hub = {name: site_of(part) for name, part in split.parts.items()}, site_of(split.hub)
    check_racks(site, parts)
    check_feeders(site, split, parts, hub)
    for part in (*parts.values(), hub):
        check_names(site, part)
    for part in parts.values():
        check_switches(site, part)
    assert set(site.names["loop"]) == {path for part in (*parts.values(), hub) for path in part.names["loop"]}
    assert {*site.names["cdu"], *site.names["hall"]} == {
        path for part in (*parts.values(), hub) for table in ("cdu", "hall") for path in part.names[table]
    }
    assert share_faults(hub) == []
    assert is_fleet(hub)
    for name, part in parts.items():
        assert is_fleet(part, hall=name, feeder="grant")
        own = [f for f in lapse_faults(part, profiles) if "/grant" in f]
        assert own == []


@given(st.sampled_from(["r[8-12]", "a[008-011]b", "r1"]), st.data())
def test_what_is_within_a_pattern_keeps_its_order(pattern: str, data: st.DataObject) -> None:
    names = expand(pattern)
    kept = data.draw(st.sets(st.sampled_from(names)))
    assert [n for p in within(pattern, kept) for n in expand(p)] == [n for n in names if n in kept]
