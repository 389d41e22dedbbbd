"""Slot map: maps each slot of a changed site to its slot in the old site, so that its state is kept.

The full path identifies an entity.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import I32
from twin.site import Site


def slots_kept(old: Site, new: Site) -> dict[str, I32]:
    """For each table, per new entity the old index of the same path, or -1."""
    kept: dict[str, I32] = {}
    for table, names in new.names.items():
        was = {name: i for i, name in enumerate(old.names[table])}
        kept[table] = np.array([was.get(name, -1) for name in names], np.int32)
    slots = np.arange(new.sizes["job"], dtype=np.int32)
    kept["job"] = np.where(slots < old.sizes["job"], slots, np.int32(-1))
    # Nodes and GPUs are named by their place in the rack and the node: no need to spell 100,000 names.
    kept["node"] = _by_place(kept["rack"], old.node_start_of_rack, new.node_start_of_rack)
    kept["gpu"] = _by_place(kept["node"], old.gpu_start_of_node, new.gpu_start_of_node)
    was = {old.name("link", i): i for i in range(old.sizes["link"])} if new.sizes["link"] else {}
    kept["link"] = np.array([was.get(new.name("link", i), -1) for i in range(new.sizes["link"])], np.int32)
    return kept


def _by_place(kept: I32, old_start: I32, new_start: I32) -> I32:
    """Old index per new member: the same place within the same parent, where that parent was and had it."""
    parent = np.repeat(np.arange(len(kept), dtype=np.int32), np.diff(new_start))
    place = np.arange(len(parent), dtype=np.int32) - new_start[parent]
    was = kept[parent]
    room = np.diff(old_start)[was] if len(old_start) > 1 else np.zeros(len(parent), np.int32)
    there = (was >= 0) & (place < room)
    return np.where(there, old_start[was] + place, -1).astype(np.int32)
