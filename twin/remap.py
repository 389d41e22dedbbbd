"""Remapping: which slot of the old site became which of the new, so that what was learned moves along.

Identity is the full path. May import the site and contracts.
"""

from __future__ import annotations

import numpy as np

from twin.contracts import Columns, Memory
from twin.frame import I32
from twin.site import Site


def slots_kept(old: Site, new: Site) -> dict[str, I32]:
    """For each table, per new entity the old index of the same path, or -1."""
    kept: dict[str, I32] = {}
    for table, n in new.sizes.items():
        if table == "job":
            slots = np.arange(n, dtype=np.int32)
            kept[table] = np.where(slots < old.sizes[table], slots, np.int32(-1))
            continue
        was = {old.name(table, i): i for i in range(old.sizes[table])}
        kept[table] = np.array([was.get(new.name(table, i), -1) for i in range(n)], np.int32)
    return kept


def remap_memory(memory: Memory, spec: Columns | None, kept: dict[str, I32], new: Site) -> Memory:
    """A policy's memory for the new site; new entities begin at zero."""
    if spec is None:
        return {}
    out: Memory = {}
    old_of_new = kept[spec.table]
    there = np.flatnonzero(old_of_new >= 0)
    for name, kind in spec.columns.items():
        column = np.zeros(new.sizes[spec.table], kind)
        column[there] = memory[name][old_of_new[there]]
        out[name] = column
    return out
