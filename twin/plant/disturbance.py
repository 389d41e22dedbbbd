"""Disturbance: the factors and switches of a simulated site that fault scripts set and the plant reads.

Neutral values change nothing. Several scripts may act at once: their factors multiply, and all fields are
rebuilt from neutral in each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from twin.catalogue import F64, I64, Bool
from twin.site import Site
from twin.telemetry import Event

# At the input of supplies and drives, below which they let go. A server's supply with a wide input of
# 90-264 V works down to 0.39 of 230 V, one for 200-277 V down to 0.78; source: estimate
VOLTAGE_LEAST_PU = 0.5

SensorTrouble = Literal["frozen", "biased", "spiking", "silent"]


@dataclass(frozen=True, slots=True)
class SensorFault:
    """A faulty sensor: `amount` is the bias in the signal's unit, or the height of its spikes."""

    table: str
    entity: int
    signal: str
    trouble: SensorTrouble
    amount: float = 0.0


@dataclass(slots=True)
class Disturbance:
    """Faults of a site. Neutral values: factors 1, switches True, additions 0."""

    gpu_plate_factor: F64  # [n_gpu] on the resistance: dried paste
    gpu_alive: Bool  # [n_gpu] on the bus
    gpu_xid: np.ndarray  # [n_gpu] int64: code raised in this step, 0 = none
    gpu_sbe_per_s: F64
    gpu_dbe_per_s: F64
    gpu_nvlink_errors_per_s: F64
    gpu_silent: Bool  # its telemetry is missing; the GPU works
    gpu_slowed: Bool  # its hardware shows that it lowers the clock
    gpu_remap_pending: Bool  # a row of its memory is remapped at the next reset
    gpu_remap_failed: Bool  # no row is left
    gpu_recovery_action: I64  # state of gpu.recovery_action_state
    node_silent: Bool  # [n_node] its agent; the board's controller speaks on
    node_unfit: Bool  # on, but no work runs on it
    node_plate_factor: F64  # [n_node] on the resistance of all plates of a tray: blocked
    node_psu_ok: Bool  # [n_node, 2]
    node_leak_lpm: F64
    rack_branch_factor: F64  # [n_rack] on the hydraulic resistance
    rack_leak_lpm: F64
    rack_fan_factor: F64  # on the air flow of an air-cooled rack
    cdu_pump_ok: Bool  # [n_cdu, 2]
    cdu_pump_head_factor: F64  # [n_cdu, 2] worn
    cdu_filter_factor: F64  # on the filter's hydraulic resistance
    cdu_ua_factor: F64  # fouling: below 1
    cdu_valve_stuck_pu: F64  # NaN = free
    cdu_leak_lpm: F64
    cdu_unseen_lpm: F64  # leaves its circuit where no detector is
    loop_fan_factor: F64  # on the heat rejection's air flow
    loop_leak_lpm: F64
    hall_wet: Bool  # the floor of a hall, from elsewhere than its racks
    feeder_ok: Bool  # [n_feeder] energised from above
    feeder_trip: Bool  # the breaker opens
    link_down: Bool
    link_rate_factor: F64
    link_errors_per_s: F64
    link_discards_per_s: F64
    outdoor_add_k: float = 0.0
    grid_voltage_pu: float = 1.0
    utility_ok: bool = True  # before UPSs and generator
    # Consumers that UPSs and generator feed while the utility is lost, set by the plant
    it_fed: bool = True
    pumps_fed: bool = True
    cooling_fed: bool = True
    sensors: list[SensorFault] = field(default_factory=list)
    # The plant takes and clears these in each step: (counter of the truth, entity, growth); reports
    counts: list[tuple[str, int, int]] = field(default_factory=list)
    reports: list[Event] = field(default_factory=list)

    @property
    def it_ok(self) -> bool:
        """True while the supplies of racks work at the remaining voltage."""
        return self.grid_voltage_pu > VOLTAGE_LEAST_PU and self.it_fed

    @property
    def pumps_ok(self) -> bool:
        """True while the pumps of CDUs work at the remaining voltage."""
        return self.grid_voltage_pu > VOLTAGE_LEAST_PU and self.pumps_fed

    @property
    def cooling_ok(self) -> bool:
        """True while facility pumps, fans, chillers and air handlers work at the remaining voltage."""
        return self.grid_voltage_pu > VOLTAGE_LEAST_PU and self.cooling_fed


def neutral(site: Site) -> Disturbance:
    """Return a disturbance without any fault."""
    n = site.sizes
    gpu, node, rack, cdu = n["gpu"], n["node"], n["rack"], n["cdu"]
    loop, feeder, link = n["loop"], n["feeder"], n["link"]
    one, none = np.ones, np.zeros

    def yes(*shape: int) -> Bool:
        return np.ones(shape, np.bool_)

    return Disturbance(
        gpu_plate_factor=one(gpu), gpu_alive=yes(gpu), gpu_xid=none(gpu, np.int64), gpu_sbe_per_s=none(gpu),
        gpu_dbe_per_s=none(gpu), gpu_nvlink_errors_per_s=none(gpu), gpu_silent=none(gpu, np.bool_),
        gpu_slowed=none(gpu, np.bool_), gpu_remap_pending=none(gpu, np.bool_),
        gpu_remap_failed=none(gpu, np.bool_),
        gpu_recovery_action=none(gpu, np.int64), node_silent=none(node, np.bool_),
        node_unfit=none(node, np.bool_), node_plate_factor=one(node),
        node_psu_ok=yes(node, 2), node_leak_lpm=none(node), rack_branch_factor=one(rack),
        rack_leak_lpm=none(rack), rack_fan_factor=one(rack), cdu_pump_ok=yes(cdu, 2),
        cdu_pump_head_factor=one((cdu, 2)), cdu_filter_factor=one(cdu), cdu_ua_factor=one(cdu),
        cdu_valve_stuck_pu=np.full(cdu, np.nan), cdu_leak_lpm=none(cdu), cdu_unseen_lpm=none(cdu),
        loop_fan_factor=one(loop), loop_leak_lpm=none(loop), hall_wet=none(n["hall"], np.bool_),
        feeder_ok=yes(feeder), feeder_trip=none(feeder, np.bool_), link_down=none(link, np.bool_),
        link_rate_factor=one(link), link_errors_per_s=none(link), link_discards_per_s=none(link),
    )  # fmt: skip
