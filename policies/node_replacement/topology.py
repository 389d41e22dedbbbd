"""Topology: the CDU and loop that serve each node, and the nodes below an entity."""

from __future__ import annotations

import numpy as np

from twin.catalogue import I32, Bool
from twin.site import Site


def cdu_of_node(site: Site) -> I32:
    """Return the CDU of each node [n_node]; -1 = none."""
    return site.cdu_of_rack[site.rack_of_node]


def loop_of_node(site: Site) -> I32:
    """Return the loop of each node [n_node]; -1 = none."""
    cdu = cdu_of_node(site)
    if not site.sizes["cdu"]:
        return cdu
    return np.where(cdu >= 0, site.loop_of_cdu[np.maximum(cdu, 0)], -1).astype(np.int32)


def below(site: Site, table: str, entity: int) -> Bool:
    """Return the nodes under an entity of the facility [n_node]; none for a table that serves none."""
    n = site.sizes["node"]
    if table == "site":
        return np.ones(n, np.bool_)
    racks: Bool = np.zeros(site.sizes["rack"], np.bool_)
    if table == "rack":
        racks[entity] = True
    elif table == "cdu":
        racks = site.cdu_of_rack == entity
    elif table == "loop":
        racks = np.isin(site.cdu_of_rack, np.flatnonzero(site.loop_of_cdu == entity))
    elif table == "hall":
        racks = site.hall_of_rack == entity
    elif table == "feeder":
        racks[site.racks_below(entity)] = True
    elif table == "supernode":
        return np.asarray(site.supernode_of_node == entity)
    return racks[site.rack_of_node]
