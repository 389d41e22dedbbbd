"""Topology: the feeders, CDUs and loops that serve each rack, and the nodes below an entity."""

from __future__ import annotations

import numpy as np

from twin.catalogue import I32, I64, Bool
from twin.site import Site


def fed(site: Site) -> tuple[I64, I64]:
    """(feeder, rack) of all pairs, ascending by feeder, also of feeders further up the tree."""
    direct, n_rack = site.feeders_of_rack, max(site.sizes["rack"], 1)
    feeder, rack = direct.member.astype(np.int64), direct.row_of_member.astype(np.int64)
    pairs = np.zeros(0, np.int64)
    while len(feeder):
        pairs = np.union1d(pairs, feeder * n_rack + rack)
        above = site.parent_of_feeder[feeder]
        feeder, rack = above[above >= 0].astype(np.int64), rack[above >= 0]
    return pairs // n_rack, pairs % n_rack


def cdu_of_node(site: Site) -> I32:
    """[n_node]; -1 = none"""
    return site.cdu_of_rack[site.rack_of_node]


def loop_of_node(site: Site) -> I32:
    """[n_node]; -1 = none"""
    cdu = cdu_of_node(site)
    if not site.sizes["cdu"]:
        return cdu
    return np.where(cdu >= 0, site.loop_of_cdu[np.maximum(cdu, 0)], -1).astype(np.int32)


def below(site: Site, table: str, entity: int) -> Bool:
    """Nodes under an entity of the facility [n_node]; none for a table that serves none."""
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
