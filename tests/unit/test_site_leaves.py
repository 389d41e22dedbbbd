"""Leaves: which racks are one network hop from each other, as the site file says it, and spares by it."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.node_replacement.spares import CDU_PU, HALL_PU, LEAF_PU, RACK_PU, _far_pu
from tests.support.builders import Twin, site_of, spec_of
from tests.unit.test_replacement_spares import Pod, hall
from twin.catalogue import TABLES, ConfigError
from twin.site import SiteSpec, build_site, expand
from twin.telemetry import SiteChanged


def leafed(*groups: Any, racks: str = "r[1-4]", halls: str = "h", **more: Any) -> dict[str, Any]:
    """Racks of two nodes, and what `leaves` of their hall says."""
    rack = {"name": racks, "profile": "air-8gpu", "nodes": 2, "gpus_per_node": 1}
    told = {"leaves": list(groups)} if groups else {}
    return {"site": "lab", "halls": [{"name": halls, "racks": [rack], **told}], **more}


def problems_of(tree: dict[str, Any]) -> list[str]:
    """Return the problems for which a site is refused."""
    with pytest.raises(ConfigError) as caught:
        site_of(tree)
    return [p.removeprefix("test.yaml: ") for p in caught.value.problems]


# ---------------------------------------------------------------- the site's file
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((), [-1, -1, -1, -1]),
        (({"name": "leaf1", "serves": ["r[1-4]"]},), [0, 0, 0, 0]),
        (({"name": "leaf[1-2]", "serves": ["r[1-4]"]},), [0, 0, 1, 1]),
        (({"name": "leaf[1-2]", "serves": ["r[3-4]", "r1"]},), [1, -1, 0, 0]),
        (({"name": "b", "serves": ["r3"]}, {"name": "a", "serves": ["r1", "r1"]}), [1, -1, 0, -1]),
    ],
)
def test_racks_are_on_the_leaf_that_serves_them(groups: tuple[Any, ...], expected: list[int]) -> None:
    site = site_of(leafed(*groups))
    assert site.leaf_of_rack.tolist() == expected
    assert site.leaf_of_rack.dtype == np.int32
    assert not site.leaf_of_rack.flags.writeable


def test_halls_have_leaves_of_their_own() -> None:
    site = site_of(leafed({"name": "leaf[1-2]", "serves": ["r[1-4]"]}, halls="h[1-2]"))
    assert site.leaf_of_rack.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_leaf_is_no_table_and_may_be_called_like_a_switch() -> None:
    tree = leafed({"name": "leaf1", "serves": ["r1"]})
    tree["halls"][0]["switches"] = [{"name": "leaf1"}]
    site = site_of(tree)
    assert "leaf" not in TABLES
    assert set(site.sizes) == set(TABLES)
    assert site.entity("switch", "leaf1") == 0
    assert not any(
        "leaf" in name for table, names in site.names.items() if table != "switch" for name in names
    )


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"name": "a", "serves": ["r[4-5]"]}], "leaves[0].serves: 'lab/h/r5' is not a rack of this hall"),
        (
            [{"name": "a", "serves": ["r1"]}, {"name": "b", "serves": ["r[1-2]"]}],
            "leaves[1].serves: 'lab/h/r1' is already served by lab/h/a",
        ),
        ([{"name": "a[1-2]", "serves": ["r1", "r1"]}], "'lab/h/r1' is already served by lab/h/a1"),
        ([{"name": "a"}], "leaves[0].serves: 0 racks for 1 leaves; expected at least one for each"),
        ([{"name": "a", "serves": []}], "leaves[0].serves: 0 racks for 1 leaves; expected at least one"),
        ([{"name": "a[1-5]", "serves": ["r[1-4]"]}], "leaves[0].serves: 4 racks for 5 leaves; expected"),
        (
            [{"name": "a", "serves": ["r1"]}, {"name": "a", "serves": ["r2"]}],
            "$: the leaf lab/h/a is described twice; expected unique names",
        ),
        ([{"name": "a b", "serves": ["r1"]}], "leaves[0].name: expected a name or a name with one range"),
        ([{"name": "a", "serves": ["r[2-1]"]}], "leaves[0].serves: expected an ascending range"),
        ([{"name": "a", "serves": [12]}], "leaves[0].serves[0]: expected text, got 12; YAML reads this"),
        ([{"name": "a", "serves": "r1"}], "leaves[0].serves: expected a list, got 'r1'"),
        ([{"name": "a", "racks": ["r1"]}], "leaves[0].racks: unknown key; expected one of name, serves"),
        ([{"serves": ["r1"]}], "leaves[0].name: missing; expected text"),
        (["r1"], "leaves[0]: expected a mapping, got 'r1'"),
        ([{"name": "a[1-200000]", "serves": ["r1"]}], "leaves[0].name: more than 200000 names with this one"),
        ([{"name": "a", "serves": ["r[1-150000]"] * 7}], "leaves[0].serves: more than 1000000 names"),
    ],
)  # fmt: skip
def test_leaves_that_cannot_be_are_refused(groups: list[Any], expected: str) -> None:
    found = problems_of(leafed(*groups))
    if "racks" in str(groups[0]):  # what it serves was said under a key that is none
        assert found.pop().endswith("0 racks for 1 leaves; expected at least one for each")
    assert len(found) == 1, found
    assert expected in found[0]
    assert found[0].startswith("$")


def test_leaves_of_all_halls_count_towards_the_names_of_one_site() -> None:
    """Neither of two halls has too many: both have."""
    tree = leafed({"name": "a", "serves": ["r1"]})
    many = {"name": "a[1-120000]", "serves": [f"r[1-{60_000}]", f"s[1-{60_000}]"]}
    tree["halls"] = [{"name": f"h{i}", "leaves": [many]} for i in (1, 2)]
    found = problems_of(tree)
    assert any(p.startswith("$.halls[1].leaves[0].name: more than 200000 names") for p in found), found


def test_a_site_without_leaves_keeps_its_hash_and_one_with_leaves_opens_again() -> None:
    """Traces and snapshots carry the hash: those that were written before there were leaves must open."""
    tree = {"site": "lab", "halls": [{"name": "h", "racks": [{"name": "r[1-2]", "nodes": 2}]}]}
    assert build_site(SiteSpec(tree, {})).spec_hash == "a15a8fd57bb7008d54252cfe7b0acdde"
    spec = spec_of(leafed({"name": "leaf1", "serves": ["r[1-3]"]}))
    assert spec.digest() != spec_of(leafed()).digest()
    again = build_site(msgspec.json.decode(spec.packed(), type=SiteSpec))
    assert again.spec_hash == spec.digest()
    assert again.leaf_of_rack.tolist() == [0, 0, 0, -1]


def test_leaves_come_and_go_with_a_changed_site() -> None:
    twin = Twin(leafed())
    twin.tick({"node.power_w": 1000.0})
    for groups, racks, expected in (
        ([{"name": "leaf1", "serves": ["r3"]}], "r[2-4]", [-1, 0, -1]),
        ([], "r[1-4]", [-1, -1, -1, -1]),
    ):
        spec = spec_of(leafed(*groups, racks=racks))
        twin.tick(None, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
        assert twin.engine.site.spec_hash == spec.digest()
        assert twin.engine.site.leaf_of_rack.tolist() == expected
        row = TABLES["node"].by_name["power_w"].row
        kept = twin.engine.state.tables["node"].value[row].tolist()
        assert kept[-6:] == [1000.0] * 6, "what was heard moves along"


# ---------------------------------------------------------------- the choice of a spare
def pod_of(x: Any, y: Any = None) -> Pod:
    """Two halls of four racks, a spare in each; CDU 1 serves the first two racks, CDU 2 the others."""
    tree = copy.deepcopy(hall())
    for part, groups in zip(tree["halls"], (x, y), strict=True):
        if groups:
            part["leaves"] = groups
    return Pod(tree, a=["x1/node0", "x2/node0", "y3/node1"])


def order(pod: Pod, leaving: str) -> list[str]:
    """The racks of hall x from which spares are taken for one node, the best first."""
    taken: list[str] = []
    for _ in range(4):
        taken += pod.pick(leaving, taken=tuple(taken))[0]
    return [name.split("/")[1] for name in taken]


def test_a_spare_on_the_same_leaf_comes_before_one_on_the_same_cdu() -> None:
    bare = pod_of(None)
    assert order(bare, "x1/node0")[:2] == ["x1", "x2"]
    pod = pod_of([{"name": "l1", "serves": ["x1", "x4"]}, {"name": "l2", "serves": ["x2", "x3"]}])
    assert order(pod, "x1/node0") == ["x1", "x4", "x2", "x3"]
    assert order(pod, "x2/node0") == ["x2", "x3", "x1", "x4"]


def test_racks_whose_leaf_is_not_told_are_as_far_as_ever() -> None:
    pod = pod_of([{"name": "l1", "serves": ["x3", "x4"]}])
    assert order(pod, "x1/node0")[:2] == ["x1", "x2"]
    view = pod.view()
    at = [pod.node(f"x{r}/node0") for r in (1, 2, 3, 4)]
    told = _far_pu(view, at[0], np.array(at, np.int32))
    bare = _far_pu(pod_of(None).view(), at[0], np.array(at, np.int32))
    assert told.tolist() == bare.tolist()
    assert bare[1:].tolist() == [CDU_PU, HALL_PU, HALL_PU]
    assert _far_pu(view, at[2], np.array(at[3:], np.int32)).tolist() == [LEAF_PU]


def test_a_scale_up_domain_is_one_place_whatever_its_leaves() -> None:
    tree = {"site": "lab", "halls": [{
        "name": "h", "racks": [{"name": "r[01-32]", "profile": "cloudmatrix384"}],
        "leaves": [{"name": "l[1-4]", "serves": ["r[01-32]"]}]}]}  # fmt: skip
    view = Twin(tree).engine.view(1.0)
    near, far = view.site.entity("node", "r09/node0"), view.site.entity("node", "r17/node0")
    assert _far_pu(view, 0, np.array([near, far], np.int32)).tolist() == [0.0, HALL_PU]


def test_the_distances_are_in_order() -> None:
    assert 0.0 < RACK_PU < LEAF_PU < CDU_PU < HALL_PU < 1.0


LEVELS = ("supernode", "rack", "leaf", "cdu", "hall")


def shared(site: Any, a: int, b: int) -> set[str]:
    """Return the levels that two nodes share, as far as the site knows."""
    ra, rb = int(site.rack_of_node[a]), int(site.rack_of_node[b])
    pairs = (
        (site.supernode_of_node[a], site.supernode_of_node[b]),
        (ra, rb),
        (site.leaf_of_rack[ra], site.leaf_of_rack[rb]),
        (site.cdu_of_rack[ra], site.cdu_of_rack[rb]),
        (site.hall_of_rack[ra], site.hall_of_rack[rb]),
    )
    return {level for level, (x, y) in zip(LEVELS, pairs, strict=True) if x == y >= 0}


@st.composite
def sites(draw: st.DrawFn) -> dict[str, Any]:
    """One or two halls of racks, each rack on a CDU and a leaf of its hall or on none."""
    halls = []
    for name in ("x", "y")[: draw(st.integers(1, 2))]:
        racks = [f"{name}{i}" for i in range(draw(st.integers(1, 6)))]
        entry: dict[str, Any] = {
            "name": name,
            "racks": [{"name": r, "profile": "air-8gpu", "nodes": 2, "gpus_per_node": 1} for r in racks],
        }
        for key in ("cdus", "leaves"):
            of = [draw(st.integers(-1, 2)) for _ in racks]
            entry[key] = [
                {"name": f"{key}{k}", "serves": [r for r, at in zip(racks, of, strict=True) if at == k]}
                for k in sorted(set(of) - {-1})
            ]
        halls.append(entry)
    return {"site": "lab", "halls": halls}


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(tree=sites())
def test_who_shares_more_is_never_further(tree: dict[str, Any]) -> None:
    view = Twin(tree).engine.view(1.0)
    site, everyone = view.site, np.arange(view.site.sizes["node"], dtype=np.int32)
    far = np.stack([_far_pu(view, i, everyone) for i in everyone.tolist()])
    bare = copy.deepcopy(tree)
    for part in bare["halls"]:
        del part["leaves"]
    before_view = Twin(bare).engine.view(1.0)
    before = np.stack([_far_pu(before_view, i, everyone) for i in everyone.tolist()])
    assert ((far >= 0.0) & (far <= 1.0)).all()
    assert (far == far.T).all()
    assert (np.diag(far) == 0.0).all()
    assert (far <= before).all(), "a leaf that is told takes nothing further away"
    leaf = site.leaf_of_rack[site.rack_of_node]
    other = (leaf[:, None] >= 0) & (leaf[None, :] >= 0) & (leaf[:, None] != leaf[None, :])
    assert (far[other] == before[other]).all()
    assert (far[other] >= LEAF_PU).all()
    for i in everyone.tolist():
        have = [shared(site, i, j) for j in everyone.tolist()]
        for j in everyone.tolist():
            for k in everyone.tolist():
                assert not (have[j] >= have[k]) or far[i, j] <= far[i, k], (have[j], have[k])


@settings(max_examples=60, deadline=None)
@given(tree=sites(), seed=st.integers(0, 2**32 - 1))
def test_every_rack_is_on_the_leaf_that_names_it(tree: dict[str, Any], seed: int) -> None:
    """Whatever the order in which racks and leaves are written."""
    rng = np.random.default_rng(seed)
    for part in tree["halls"]:
        for key in ("racks", "leaves"):
            part[key] = [part[key][i] for i in rng.permutation(len(part[key])).tolist()]
    site = site_of(tree)
    told = [f"lab/{part['name']}/{leaf['name']}" for part in tree["halls"] for leaf in part["leaves"]]
    by_rack = {
        f"lab/{part['name']}/{rack}": f"lab/{part['name']}/{leaf['name']}"
        for part in tree["halls"] for leaf in part["leaves"] for p in leaf["serves"] for rack in expand(p)
    }  # fmt: skip
    for name, leaf in zip(site.names["rack"], site.leaf_of_rack.tolist(), strict=True):
        assert (told[leaf] if leaf >= 0 else None) == by_rack.get(name)
