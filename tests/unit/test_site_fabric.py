"""The fabric graph: scale-up domains of all profiles, leaves and spines, and what is lost with each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, site_of, two_racks
from twin.catalogue import ConfigError
from twin.site import far_end, scale_up_blast, scale_up_domain, switch_blast


@pytest.mark.parametrize(
    ("profile", "racks", "node", "name", "nodes", "end"),
    [
        ("gb200-nvl72", "r[1-2]", 20, "lab/h/r2", 18, "switch chip 3 of lab/h/r2"),
        ("dgx-superpod-gb200-su", "r[1-8]", 20, "lab/h/r2", 18, "switch chip 3 of lab/h/r2"),
        ("hgx-h100", "r1", 0, "lab/h/r1", 1, "one of the 4 switch chips of lab/h/r1"),
        ("dgx-superpod-h100-su", "r[1-8]", 5, "lab/h/r2/node1", 1,
         "one of the 4 switch chips of lab/h/r2/node1"),
        ("cloudmatrix384", "r[1-16]", 47, "lab/h/r1+15", 48, "one of the 448 switch chips of lab/h/r1+15"),
        ("trainium2-ultraserver", "r[1-2]", 1, "lab/h/r1+1", 4, ""),
        ("air-8gpu", "r1", 0, "lab/h/r1", 1, ""),
    ],
)  # fmt: skip
def test_a_node_is_in_the_scale_up_domain_that_its_profile_states(
    profile: str, racks: str, node: int, name: str, nodes: int, end: str
) -> None:
    site = site_of(two_racks(profile, racks))
    found, members = scale_up_domain(site, node)
    assert (found, len(members)) == (name, nodes)
    assert node in members
    for one in members.tolist():  # it is the domain of each of its members, and of no other
        assert np.array_equal(scale_up_domain(site, one)[1], members)
    assert far_end(site, int(site.gpu_start_of_node[node]), 3) == end


def test_domains_part_all_nodes() -> None:
    for profile, racks in (("dgx-superpod-gb200-su", "r[1-8]"), ("dgx-superpod-h100-su", "r[1-8]")):
        site = site_of(two_racks(profile, racks))
        firsts = {int(scale_up_domain(site, n)[1][0]): len(scale_up_domain(site, n)[1])
                  for n in range(site.sizes["node"])}  # fmt: skip
        assert sum(firsts.values()) == site.sizes["node"]


def test_a_scale_up_link_is_a_share_of_a_gpus_way_to_its_domain() -> None:
    blast = scale_up_blast(site_of(two_racks()), 80)
    assert (blast.links, blast.of_links, len(blast.nodes)) == (1, 18, 18)
    assert "loses 1 of its 18 links to the other 71 GPUs of lab/h/r2" in blast.text


def fabric(*switches: dict[str, Any], links: int = 4) -> dict[str, Any]:
    """Four racks of two nodes, with so many links of plane `rail` a node and one of `eth`, and switches."""
    rack = {"name": "r[1-4]", "profile": "air-8gpu", "nodes": 2, "gpus_per_node": 1}
    planes = [{"name": "rail", "links_per_node": links}, {"name": "eth", "links_per_node": 1}]
    return {"site": "lab", "halls": [
        {"name": "h", "racks": [rack], "planes": planes, "switches": list(switches)}]}  # fmt: skip


LEAF = {"name": "leaf[1-4]", "serves": ["r[1-4]"], "planes": ["rail"]}
TOP = {"name": "tor", "serves": ["r1"], "planes": ["eth"]}
SPINE = {"name": "spine[1-8]", "serves": ["leaf[1-4]"]}


def test_the_blast_radius_of_a_leaf_and_a_spine() -> None:
    site = site_of(fabric(LEAF, TOP, SPINE, {"name": "alone"}))
    at = {name: site.entity("switch", name) or 0 for name in ("leaf2", "tor", "spine8", "alone")}
    leaf, tor, spine, alone = (switch_blast(site, i) for i in at.values())
    assert (len(leaf.nodes), leaf.links, leaf.of_links) == (8, 8, 40)  # one of four rails of each node
    assert leaf.text == "8 nodes lose 8 of their 40 links with it"
    assert (tor.nodes.tolist(), tor.links, tor.of_links) == ([0, 1], 2, 10)
    assert (len(spine.nodes), spine.links) == (8, 0)
    assert spine.text == "8 nodes below 4 leaves lose 1 of 8 ways between them, and none of their links"
    assert (len(alone.nodes), alone.text) == (0, "the site file does not say what it serves")


def test_all_switches_of_a_leaf_line_carry_all_links_of_their_planes() -> None:
    site = site_of(fabric(LEAF))
    rails = int((site.plane_of_link == site.planes.index("rail")).sum())
    assert sum(switch_blast(site, i).links for i in range(4)) == rails


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ({"name": "a", "serves": ["r9"]}, "switches[0].serves: 'lab/h/r9' is neither a rack nor a switch"),
        ({"name": "a", "serves": ["a"]}, "switches[0].serves: 'lab/h/a' serves itself"),
        ({"name": "a", "serves": ["r1"], "planes": ["ib"]}, "switches[0].planes: 'ib' is not a plane"),
    ],
)
def test_a_switch_that_serves_nothing_known_is_refused(switch: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        site_of(fabric(switch))
    assert any(expected in problem for problem in caught.value.problems)


def test_switches_that_serve_each_other_end_all_the_same() -> None:
    site = site_of(fabric({"name": "a", "serves": ["b"]}, {"name": "b", "serves": ["a", "r1"]}))
    assert switch_blast(site, 0).nodes.tolist() == [0, 1]


def test_alarms_of_switches_and_ports_say_what_is_lost_with_them() -> None:
    twin = Twin(fabric(LEAF, {"name": "alone"}))
    down = np.zeros(twin.site.sizes["link"])
    down[0] = 1.0
    for _ in range(3):
        twin.tick({"switch.health_state": 2.0, "link.up_state": down}, dt_s=10.0)
    said = {
        f.id: f.evidence for f in twin.decision.findings if f.id.startswith(("health/switch", "health/link"))
    }
    assert said["health/switch/lab/h/leaf2"][1] == "8 nodes lose 8 of their 40 links with it"
    assert len(said["health/switch/lab/h/alone"]) == 1
    assert said["health/link/lab/h/r1/node0/rail0"][1] == (
        "lab/h/r1/node0 loses 1 of its 4 links of plane rail with it"
    )
