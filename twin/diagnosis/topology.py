"""Topology: the ancestors of each entity, for sums over descendants and causes that reach down.

Index maps along gpu - node - rack - cdu - loop, made once per site.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I32, Bool
from twin.site import Site

LADDER = ("gpu", "node", "rack", "cdu", "loop", "site")


class Topology:
    """Ancestors [n] of each table's entities; -1 for none."""

    def __init__(self, site: Site) -> None:
        self.site, self.sizes = site, site.sizes
        up = {
            "gpu": site.node_of_gpu,
            "node": site.rack_of_node,
            "rack": site.cdu_of_rack,
            "cdu": site.loop_of_cdu,
            "loop": np.zeros(site.sizes["loop"], np.int32),
        }
        self._map: dict[tuple[str, str], I32] = {}
        for i, table in enumerate(LADDER[:-1]):
            at = up[table]
            self._map[table, LADDER[i + 1]] = at
            for j in range(i + 1, len(LADDER) - 1):
                above = up[LADDER[j]]
                if len(above):
                    at = np.where(at >= 0, above[np.maximum(at, 0)], -1).astype(np.int32)
                else:
                    at = np.full(len(at), -1, np.int32)
                self._map[table, LADDER[j + 1]] = at
        self._map["rack", "hall"] = site.hall_of_rack
        self._map["cdu", "hall"] = site.hall_of_cdu
        for table in ("gpu", "node"):
            self._map[table, "hall"] = site.hall_of_rack[self._map[table, "rack"]]

    def knows(self, table: str, ancestor: str) -> bool:
        """Return True if entities of this table have such an ancestor."""
        return (table, ancestor) in self._map

    def above(self, table: str, ancestor: str) -> I32:
        """Return the ancestor of each entity [n of table]."""
        if ancestor == "site":
            return np.zeros(self.sizes[table], np.int32)
        return self._map[table, ancestor]

    def below(self, table: str, entity: int, child: str) -> I32:
        """Return the entities of `child` under this one, ascending."""
        if table == child:
            return np.array([entity], np.int32)
        if table == "rack" and child == "gpu":
            inside = self.site.gpus_of_rack(entity)
            return np.arange(inside.start, inside.stop, dtype=np.int32)
        if table == "rack" and child == "node":
            start = self.site.node_start_of_rack
            return np.arange(start[entity], start[entity + 1], dtype=np.int32)
        if table == "node" and child == "gpu":
            start = self.site.gpu_start_of_node
            return np.arange(start[entity], start[entity + 1], dtype=np.int32)
        return np.flatnonzero(self.above(child, table) == entity).astype(np.int32)

    def count(self, child: str, table: str, mask: Bool) -> F64:
        """Return the number of each entity's descendants in the mask [n of table]."""
        at = self.above(child, table)[mask]
        return np.bincount(at[at >= 0], minlength=self.sizes[table]).astype(np.float64)
