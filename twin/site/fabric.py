"""Fabric graph: the ends of scale-up links, the switches of the network, and the loss with each.

The scale-up domain of a GPU is its supernode; its links and switch chips are those that the profile states.
The network's switches serve racks (a leaf) or other switches (a spine), as the site file says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import I32
from twin.site.site import Site


@dataclass(frozen=True, slots=True)
class BlastRadius:
    """Loss with a part of the fabric: its nodes and links, and `of_links`, the number of links of these
    nodes."""

    nodes: I32
    links: int
    of_links: int
    text: str


def far_end(site: Site, gpu: int, link: int) -> str:
    """Return the other end of a scale-up link by its profile; "" if the profile has none.

    Where a domain has as many switch chips as a GPU has links, link k is assumed to go to chip k: vendors
    publish that each link goes to another chip, and not which.
    """
    rack = int(site.rack_of_gpu[gpu])
    links, chips = site.design.scale_up_links[rack], site.design.scale_up_switches[rack]
    if not np.isfinite(chips) or chips < 1 or not np.isfinite(links):
        return ""
    domain, _ = scale_up_domain(site, int(site.node_of_gpu[gpu]))
    if links == chips and link < links:
        return f"switch chip {link} of {domain}"
    return f"one of the {int(chips)} switch chips of {domain}"


def port_far_end(site: Site, link: int) -> str:
    """The other end of a port by the site file: the leaf that carries its plane, or one of several; "" where
    that says nothing.
    """
    rack, plane = int(site.rack_of_node[site.node_of_link[link]]), int(site.plane_of_link[link])
    leaves = []
    for switch in range(site.sizes["switch"]):
        planes = site.planes_of_switch.of_row(switch)
        if rack in site.racks_of_switch.of_row(switch) and (not len(planes) or plane in planes):
            leaves.append(site.name("switch", switch))
    if len(leaves) <= 1:
        return "".join(leaves)
    return f"one of the {len(leaves)} switches from {leaves[0]} to {leaves[-1]}"


def scale_up_domain(site: Site, node: int) -> tuple[str, I32]:
    """Return (name, nodes) of a node's scale-up domain: its supernode, or a share of it by the profile."""
    whole = int(site.supernode_of_node[node])
    first, last = np.searchsorted(site.supernode_of_node, [whole, whole + 1]).tolist()
    size = site.design.scale_up_nodes[int(site.rack_of_node[node])]
    name = site.names["supernode"][whole]
    if not np.isfinite(size) or size >= last - first:
        return name, np.arange(first, last, dtype=np.int32)
    start = first + (node - first) // int(size) * int(size)
    nodes = np.arange(start, min(start + int(size), last), dtype=np.int32)
    if len(nodes) == 1:
        return site.name("node", node), nodes
    racks = np.unique(site.rack_of_node[nodes])
    if len(racks) == 1 and len(nodes) == int(np.diff(site.node_start_of_rack)[racks[0]]):
        return site.name("rack", int(racks[0])), nodes
    return f"{name}/domain{(start - first) // int(size)}", nodes


def scale_up_blast(site: Site, gpu: int) -> BlastRadius:
    """Return the loss with one scale-up link: a share of the GPU's bandwidth to all others of its domain."""
    domain, nodes = scale_up_domain(site, int(site.node_of_gpu[gpu]))
    gpus = int(np.diff(site.gpu_start_of_node)[nodes].sum())
    links = site.design.scale_up_links[int(site.rack_of_gpu[gpu])]
    many = int(links) if np.isfinite(links) else 0
    share = f"1 of its {many} links" if many else "one of its links"
    work = "work on its node" if len(nodes) == 1 else f"work on its {len(nodes)} nodes"
    text = f"with it the GPU loses {share} to the other {gpus - 1} GPUs of {domain}, and {work} may stop"
    return BlastRadius(nodes, 1, many, text)


def link_blast(site: Site, link: int) -> BlastRadius:
    """Return the loss with a port of a node: one of the links of its plane."""
    node, plane = int(site.node_of_link[link]), int(site.plane_of_link[link])
    first, last = np.searchsorted(site.node_of_link, [node, node + 1]).tolist()
    many = int(np.count_nonzero(site.plane_of_link[first:last] == plane))
    text = f"{site.name('node', node)} loses 1 of its {many} links of plane {site.planes[plane]} with it"
    return BlastRadius(np.array([node], np.int32), 1, last - first, text)


def lost_with(site: Site, part: str, index: int) -> str:
    """Return the loss with a part of the fabric in words; "" for other parts, or if the site file has
    none."""
    if part == "link":
        return link_blast(site, index).text
    if part == "switch":
        blast = switch_blast(site, index)
        return blast.text if len(blast.nodes) else ""
    return ""


def switch_blast(site: Site, switch: int) -> BlastRadius:
    """Return the loss with a network switch: of a leaf its links, of a spine one of several paths."""
    leaves, ways = _leaves_below(site, switch), int(site.ways_of_switch[switch])
    racks = [site.racks_of_switch.of_row(leaf) for leaf in leaves]
    inside = np.isin(site.rack_of_node, np.concatenate([*racks, np.zeros(0, np.int32)]))
    nodes: I32 = np.flatnonzero(inside).astype(np.int32)
    if not len(nodes):
        return BlastRadius(nodes, 0, 0, "the site file does not say what it serves")
    below = np.isin(site.node_of_link, nodes)
    of_links, lost = int(below.sum()), 0
    where = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"
    if leaves == [switch]:
        planes = site.planes_of_switch.of_row(switch)
        mine = below & np.isin(site.plane_of_link, planes) if len(planes) else below
        lost = int(mine.sum()) // ways
        return BlastRadius(
            nodes, lost, of_links, f"{where} lose {lost:,} of their {of_links:,} links with it"
        )
    text = f"{where} below {len(leaves)} leaves lose 1 of {ways} ways between them, and none of their links"
    return BlastRadius(nodes, lost, of_links, text)


def _leaves_below(site: Site, switch: int) -> list[int]:
    """Return the switches with racks that this one reaches downwards, itself included; ascending."""
    found, todo = {switch}, [switch]
    while todo:
        below = set(site.switches_of_switch.of_row(todo.pop()).tolist()) - found
        found |= below
        todo += below
    return sorted(s for s in found if len(site.racks_of_switch.of_row(s)))
