"""How what befalls a fleet reaches its plant: counters that grow, reports, new devices, nodes unfit for work.

May import the plant's parts, lives and events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twin.events import EntityReplaced, FaultReported
from twin.plant.fleet_life import FleetLife

if TYPE_CHECKING:
    from twin.plant.plant import Plant

# What a new device has not counted
COUNTERS_OF = {
    "gpu": ("gpu_xid_code", "gpu_sbe_count", "gpu_dbe_count", "gpu_nvlink_errors", "gpu_nvlink_replays",
            "gpu_nvlink_recoveries", "gpu_pcie_replays", "gpu_row_remaps"),
    "node": ("node_reboots",),
}  # fmt: skip


def befall(plant: Plant, life: FleetLife, dt_s: float) -> bool:
    """What a life does in the step that begins now; whether the disturbance is another one."""
    t, d = plant.truth, plant.present
    moved = life.apply(d, t.time_s, dt_s, plant.start_ns)
    for counter, entity, growth in d.counts:
        getattr(t, counter)[entity] += growth
    for event in d.told:
        if isinstance(event, FaultReported):
            t.gpu_xid_code[plant.site.entity(event.table, event.name)] = event.code
        elif isinstance(event, EntityReplaced):
            slot = plant.site.entity(event.table, event.name)
            for column in COUNTERS_OF.get(event.table, ()):
                getattr(t, column)[slot] = 0
    plant.happened(d.told)
    d.counts.clear()
    d.told.clear()
    np.copyto(t.node_unfit, d.node_unfit)
    t.health_count += 1
    plant.unsettle()
    return moved
