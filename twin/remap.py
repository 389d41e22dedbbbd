"""Remapping: which slot of the old site became which of the new, so that what was learned moves along.

Identity is the full path. May import the core; `change_site` is called by the engine only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from twin import events as ev
from twin.contracts import Columns, Memory
from twin.errors import ConfigError
from twin.frame import I32
from twin.records import brief_event
from twin.site import Site, SiteSpec
from twin.sitebuild import build

if TYPE_CHECKING:
    from twin.engine import Engine


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


def change_site(engine: Engine, event: ev.SiteChanged) -> list[dict[str, Any]]:
    """Move everything that an engine holds to another site; returns journal bodies. A bad site is refused."""
    try:
        old, new = engine.site, build(msgspec.json.decode(event.spec, type=SiteSpec), "the changed site")
    except (msgspec.MsgspecError, ConfigError) as error:
        return [{"kind": "event", "event": brief_event(event), "refused": str(error)[:500]}]
    kept = slots_kept(old, new)
    state, intake = engine.state, engine.intake
    for table in state.tables:
        state.tables[table] = state.tables[table].remapped(new.sizes[table], kept[table])
    engine.jobs = engine.jobs.remapped(new.sizes["node"], kept["node"], new.sizes["job"])
    engine.arbiter = engine.arbiter.remapped(new, kept)
    engine.estimator = engine.estimator.remapped(new, kept)
    engine.diagnosis = engine.diagnosis.remapped(new, kept)
    engine.health = engine.health.remapped(new, kept)
    engine.book = engine.book.remapped(new, kept)
    engine.windows, dropped = engine.windows.remapped(new, kept)
    engine.memory = {
        p.name: remap_memory(engine.memory[p.name], p.memory, kept, new) for p in engine.policies
    }
    engine.in_force = {p.name: [] for p in engine.policies}  # indices moved; asked afresh in this very tick
    engine.ran_ns = {}
    intake.grant_w, grants = np.full(new.sizes["feeder"], np.nan), intake.grant_w
    intake.grant_ns, until = np.zeros(new.sizes["feeder"], np.int64), intake.grant_ns
    moved = np.flatnonzero(kept["feeder"] >= 0)
    intake.grant_w[moved] = grants[kept["feeder"][moved]]
    intake.grant_ns[moved] = until[kept["feeder"][moved]]
    engine.forecasts = {}
    records = dropped
    for name, model in engine.models.items():
        try:
            model.remap(kept)
        except Exception as error:
            records += engine.suspend(name, error, state.now_ns)
    engine.settle_into(new)
    engine.findings.remap(new, engine.estimator, kept)
    changed = {
        "kind": "site",
        "site_hash": new.spec_hash,
        "was": old.spec_hash,
        "sizes": {t: n for t, n in new.sizes.items() if n},
    }
    return [changed, *records]
