"""Index maps of random sites against slow traversals of the same. May import `twin` and hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from tests.support.builders import site_of
from twin.estimation.estimator import balances_of
from twin.site import Site
from twin.site.site import Relation

VALUES = st.one_of(st.floats(-1e6, 1e6, width=32), st.just(float("nan")))


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Sites of one to three halls with uneven racks (empty ones too) and a random power tree."""
    halls = []
    for h in range(draw(st.integers(1, 3))):
        groups = [
            {"name": f"g{i}[01-0{draw(st.integers(1, 3))}]", "nodes": draw(st.integers(0, 3)),
             "gpus_per_node": draw(st.integers(0, 3))}
            for i in range(draw(st.integers(0, 3)))
        ]  # fmt: skip
        racks = [g["name"] for g in groups]
        n = draw(st.integers(0, 6))
        feeders: list[dict[str, Any]] = [{"name": f"f{i}", "serves": []} for i in range(n)]
        order = draw(st.permutations(range(n)))
        for k in range(1, n):  # a parent comes earlier in the order, so that it is a forest
            if draw(st.booleans()):
                parent = order[draw(st.integers(0, k - 1))]
                feeders[parent]["serves"].append(f"f{order[k]}")
        for feeder in feeders:
            feeder["serves"] += (
                draw(st.lists(st.sampled_from(racks), max_size=2, unique=True)) if racks else []
            )
        planes = [
            {"name": "p1", "links_per_node": 2},
            {"name": "p2", "links_per_node": draw(st.integers(1, 12))},
        ]
        halls.append({"name": f"h{h}", "racks": groups, "feeders": feeders, "planes": planes})
    return {"site": "s", "max_jobs": 3, "halls": halls}


@given(trees())
@settings(max_examples=60)
def test_every_name_leads_back_to_its_entity(tree: dict[str, Any]) -> None:
    site = site_of(tree)
    for table, n in site.sizes.items():
        names = [site.name(table, i) for i in range(n)]
        assert len(set(names)) == n, table
        assert [site.entity(table, name) for name in names] == list(range(n)), table


@given(trees())
@settings(max_examples=60)
def test_nodes_and_gpus_are_contiguous(tree: dict[str, Any]) -> None:
    site = site_of(tree)
    for start, of, n in (
        (site.node_start_of_rack, site.rack_of_node, site.sizes["rack"]),
        (site.gpu_start_of_node, site.node_of_gpu, site.sizes["node"]),
    ):
        assert start[0] == 0
        assert start[-1] == len(of)
        for i in range(n):
            assert (of[start[i] : start[i + 1]] == i).all()
    for rack in range(site.sizes["rack"]):
        inside = np.flatnonzero(site.rack_of_gpu == rack)
        found = np.arange(site.sizes["gpu"])[site.gpus_of_rack(rack)]
        assert np.array_equal(inside, found)


@given(trees(), st.data())
@settings(max_examples=60)
def test_rolled_up_sums_are_naive_sums(tree: dict[str, Any], data: st.DataObject) -> None:
    site = site_of(tree)
    for table, rack_of in (("node", site.rack_of_node), ("gpu", site.rack_of_gpu)):
        n = site.sizes[table]
        values = np.array(data.draw(st.lists(VALUES, min_size=n, max_size=n)), np.float32)
        naive = [sum((float(v) for v, r in zip(values, rack_of, strict=True) if r == k), 0.0)
                 for k in range(site.sizes["rack"])]  # fmt: skip
        assert np.allclose(site.sum_by_rack(table, values), naive, rtol=1e-6, atol=1e-3, equal_nan=True)


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=5), max_size=6), st.lists(VALUES, min_size=6, max_size=6)
)
def test_sums_of_a_relation_are_naive_sums(lists: list[list[int]], values: list[float]) -> None:
    relation = Relation.of(lists)
    naive = [sum((float(np.float32(values[i])) for i in set(row)), 0.0) for row in lists]
    assert np.allclose(
        relation.sums(np.array(values, np.float32)), naive, rtol=1e-6, atol=1e-3, equal_nan=True
    )
    assert [relation.of_row(i).tolist() for i in range(len(lists))] == [sorted(set(row)) for row in lists]


def below(site: Site, feeder: int) -> set[int]:
    """The feeders under this one, by walking down."""
    children = [i for i, p in enumerate(site.parent_of_feeder.tolist()) if p == feeder]
    return {feeder}.union(*(below(site, c) for c in children))


@given(trees())
@settings(max_examples=60)
def test_what_a_feeder_reaches_is_what_a_walk_finds(tree: dict[str, Any]) -> None:
    site = site_of(tree)
    root = site.root_of_feeder()
    for feeder in range(site.sizes["feeder"]):
        inside = below(site, feeder)
        assert site.subtree(feeder) == sorted(inside)
        racks = [
            r for r in range(site.sizes["rack"]) if inside & set(site.feeders_of_rack.of_row(r).tolist())
        ]
        assert site.racks_below(feeder).tolist() == racks
        parent = int(site.parent_of_feeder[feeder])
        assert root[feeder] == (feeder if parent < 0 else root[parent])


def naive_sums(site: Site) -> list[tuple[list[int], list[int], list[int], bool]]:
    """(meters, feeders, racks, guessed) of every balance: roots joined one by one, everything walked."""
    parent = site.parent_of_feeder.tolist()
    groups: list[tuple[set[int], set[int]]] = []
    for root in (i for i, p in enumerate(parent) if p < 0):
        reach, members = set(site.racks_below(root).tolist()), {root}
        for group in [g for g in groups if g[1] & reach]:
            groups.remove(group)
            members |= group[0]
            reach |= group[1]
        groups.append((members, reach))
    guessed = site.inferred_feeder
    out: list[tuple[list[int], list[int], list[int], bool]] = []
    out += [(m, [], r, bool(guessed[sorted(set().union(*(below(site, f) for f in m)))].any()))
           for m, r in sorted((sorted(m), sorted(r)) for m, r in groups) if r]  # fmt: skip
    children = [[i for i, p in enumerate(parent) if p == f] for f in range(len(parent))]
    out += [([f], c, [], False) for f, c in enumerate(children) if c]
    for rack in range(site.sizes["rack"]):
        direct = site.feeders_of_rack.of_row(rack).tolist()
        if direct and all(parent[f] >= 0 for f in direct):
            out.append((direct, [], [rack], bool(guessed[direct].any())))
    return out


@given(trees(), st.integers(0, 2**12))
@settings(max_examples=100)
def test_balances_are_those_of_a_naive_search(tree: dict[str, Any], guessed: int) -> None:
    for i, feeder in enumerate(f for hall in tree["halls"] for f in hall["feeders"]):
        feeder["inferred"] = bool(guessed >> i & 1)
    site = site_of(tree)
    found = [(b.meters.tolist(), b.feeders.tolist(), b.racks.tolist(), b.inferred) for b in balances_of(site)]
    assert found == naive_sums(site)


@given(st.integers(1, 40), st.integers(1, 12))
def test_groups_share_what_they_serve_in_equal_blocks(racks: int, cdus: int) -> None:
    tree = {
        "site": "s",
        "halls": [
            {
                "name": "h",
                "racks": [{"name": f"r[1-{racks}]"}],
                "cdus": [{"name": f"c[1-{cdus}]", "serves": [f"r[1-{racks}]"]}],
            }
        ],
    }
    site = site_of(tree)
    shares = np.bincount(site.cdu_of_rack, minlength=cdus)
    assert shares.sum() == racks
    assert shares.max() - shares.min() <= 1
    assert (np.diff(site.cdu_of_rack) >= 0).all()
