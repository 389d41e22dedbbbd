"""How a plant carries out what its devices have been told: caps, set points, isolation, checkpoints.

May import the plant's parts, `twin.physics` and NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from twin.frame import F64, NS
from twin.physics.electrical import output_of_input_w

if TYPE_CHECKING:
    from twin.plant.plant import Plant


def obey(plant: Plant, controls: Sequence[str]) -> None:
    """Carry out what is in force on these controls."""
    t, p = plant.truth, plant.parameters
    for control in controls:
        value = plant.actuators.value[control]
        known = np.isfinite(value)
        if control in ("gpu.power_cap_w", "node.power_cap_w"):
            set_caps(plant)
        elif control == "cdu.supply_temp_target_c":
            plant.cooling.target_c = np.where(known, value, p.cdu_supply_c)
            set_points(plant)
        elif control == "rack.liquid_isolation":
            t.rack_isolated[:] = known & (value >= 0.5)
            plant.hydraulics.read_disturbance(p, plant.present, t.rack_isolated)
        elif control == "rack.electrical_isolation":
            plant.power.isolated[:] = known & (value >= 0.5)
            plant.power.stale = True
        elif control == "node.service_level":
            t.node_service_level[known] = value[known].astype(np.int64)
        else:
            _tell_jobs(plant, control, value)


def set_caps(plant: Plant) -> None:
    """The limit of every GPU: its own, and its part of what its node may draw beside CPUs and fans at most.

    A node holds its limit also while one supply carries all and loses more.
    """
    p, site, t = plant.parameters, plant.site, plant.truth
    cap = p.gpu_cap_max_w.copy()
    own, node = plant.actuators.get("gpu.power_cap_w"), plant.actuators.get("node.power_cap_w")
    if own is not None:
        cap = np.minimum(cap, np.where(np.isfinite(own), own * p.lump, np.inf))
    t.node_cap_w[:] = p.node_cap_max_w
    if node is not None:
        t.node_cap_w[:] = np.fmin(node, p.node_cap_max_w)
        gpus = np.maximum(np.diff(site.gpu_start_of_node), 1)
        fans = (p.rack_fan_w * plant.compute.per_node)[site.rack_of_node]
        rest = (
            p.node_other_w + fans + p.node_cpu_idle_w + p.node_cpu_dynamic_w
        )  # its GPUs get what these leave
        out = output_of_input_w(node, p.node_loss0_w, p.node_loss1, 2.0 * p.node_loss2_per_w)
        each = np.where(np.isfinite(node), (out - rest) / gpus, np.inf)
        cap = np.minimum(cap, np.maximum(each, 0.0)[site.node_of_gpu])
    t.gpu_cap_w[:] = cap
    plant.compute.cap_least_w = float(cap.min(initial=np.inf))


def _tell_jobs(plant: Plant, control: str, value: F64) -> None:
    if plant.workload is None:
        return
    for slot, name in sorted(plant.job_names.items()):
        wanted = float(value[slot])
        if np.isfinite(wanted) and control == "job.checkpoint_since_s":
            plant.workload.checkpoint(name, wanted - plant.start_ns / NS)
        elif np.isfinite(wanted) and control == "job.checkpoint_interval_s":
            plant.workload.checkpoint_interval(name, wanted)
    value[:] = np.nan  # said once: the next job in a slot was told nothing


def set_points(plant: Plant) -> None:
    """Supply set points of the CDUs, and of the loops behind them."""
    plant.cooling.set_points(plant.truth, plant.parameters)
    plant.facility.aim_c = plant.cooling.facility_aim_c(plant.truth, plant.parameters)
