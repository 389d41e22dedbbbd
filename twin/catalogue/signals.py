"""The catalogue: every signal and control that racktwin knows, one class per kind of entity, one line each.

A *signal* is read (gauge, counter or state), a *control* is commanded. To add one, add a line; the suffix of
its name is its unit (`twin/catalogue/units.py`).
Numbers beside a signal are physical bounds (outside: OUT_OF_RANGE), not alarm limits; limits and envelopes
come from the profile and the site.
"""

from __future__ import annotations

from twin.catalogue.schema import Control, Signal, Table, counter, state
from twin.catalogue.tree import digest

__all__ = ["TABLES", "Control", "Signal", "Table", "find_control", "find_signal"]


class Demand:
    """Lines that site, queues, tenants and classes of priority share: GPUs and jobs granted, and waiting.

    *Pending* jobs want GPUs now; *held* ones wait for something else: a hold, a dependency, a time, a limit.
    """

    gpu_running_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    gpu_pending_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    gpu_held_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    job_running_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    job_pending_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    job_held_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    # GPUs of pending jobs times the time that each may run
    pending_gpu_s = Signal("s", 0, 1e12, quantum=1000, period_s=60)
    oldest_wait_s = Signal("s", 0, 1e9, quantum=1, period_s=60)
    # By the scheduler's own estimate, until the next pending job starts
    next_start_s = Signal("s", 0, 1e9, quantum=1, period_s=60)


class SiteSignals(Demand, Table):
    outdoor_temp_c = Signal("degC", -60, 60, quantum=0.1, period_s=300)
    outdoor_wet_bulb_c = Signal("degC", -60, 50, quantum=0.1, period_s=300)
    grid_price_usd_per_kwh = Signal("USD/kWh", -5, 20, quantum=0.0001, period_s=3600)
    grid_carbon_g_per_kwh = Signal("g/kWh", 0, 3000, quantum=0.1, period_s=3600)
    requests_per_s = Signal("1/s", 0, 1e6, quantum=0.01, period_s=60)
    gpu_idle_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    gpu_spare_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    gpu_out_count = Signal("count", 0, 1e7, quantum=1, period_s=60)


class HallSignals(Table):
    cold_aisle_temp_c = Signal(
        "degC", -20, 80, quantum=0.001, reduce="max", period_s=100, slew_per_s=0.05, danger="high"
    )
    hot_aisle_temp_c = Signal("degC", -20, 100, quantum=0.001, reduce="max", period_s=100)
    cold_aisle_rh_pu = Signal("1", 0, 1, quantum=1e-5, period_s=100)
    hot_aisle_rh_pu = Signal("1", 0, 1, quantum=1e-5, period_s=100)
    aisle_diff_pa = Signal("Pa", -500, 500, quantum=1e-4, period_s=100)
    leak_state = state("no_leak", "leak", reduce="latch", period_s=100, urgent_at=1)


class SupernodeSignals(Table):
    service_level_state = state("in_service", "cordoned", "drained", "replace", reduce="max", period_s=60)


class RackSignals(Table):
    power_w = Signal("W", 0, 1e6, quantum=0.1, reduce="mean", period_s=100, slew_per_s=5e3, danger="high")
    power_w_max = Signal("W", 0, 1e6, quantum=0.1, reduce="max", period_s=100, slew_per_s=5e3, danger="high")
    supply_temp_c = Signal(
        "degC", -10, 100, quantum=0.01, reduce="max", period_s=100, slew_per_s=0.2, danger="high"
    )
    return_temp_c = Signal(
        "degC", -10, 110, quantum=0.01, reduce="max", period_s=100, slew_per_s=0.2, danger="high"
    )
    flow_lpm = Signal(
        "l/min",
        0,
        1000,
        quantum=0.001,
        reduce="min",
        period_s=100,
        slew_per_s=1.0,
        danger="low",
        urgent_drop_pu=0.5,
    )
    diff_pressure_pa = Signal("Pa", -1e6, 2e6, quantum=1.0, period_s=100)
    diff_pressure_setpoint_pa = Signal("Pa", 0, 2e6, quantum=1.0, period_s=100)
    valve_pu = Signal("1", 0, 1, quantum=1e-4, period_s=100)
    supply_valve_state = state("closed", "open", reduce="min", period_s=100)
    return_valve_state = state("closed", "open", reduce="min", period_s=100)
    leak_state = state("no_leak", "leak", reduce="latch", period_s=100, urgent_at=1)
    tray_leak_state = state("no_leak", "leak", reduce="latch", period_s=100, urgent_at=1)
    leak_sensor_fault_state = state("ok", "fault", reduce="max", period_s=100)
    liquid_isolation_state = state("not_isolated", "isolated", period_s=100)
    electrical_isolation_state = state("not_isolated", "isolated", period_s=100)
    liquid_isolation_request_state = state("none", "isolate", period_s=100)
    electrical_isolation_request_state = state("none", "isolate", period_s=100)
    inlet_temp_c = Signal(
        "degC", -20, 80, quantum=0.1, reduce="max", period_s=100, slew_per_s=0.05, danger="high"
    )
    liquid_isolation = Control(
        "state",
        0,
        1,
        on_expiry="keep",
        protective="high",
        readback="liquid_isolation_state",
        lease_s=300,
        deadline_s=60,
        disruptive=True,
        states=("not_isolated", "isolated"),
    )
    electrical_isolation = Control(
        "state",
        0,
        1,
        on_expiry="keep",
        protective="high",
        readback="electrical_isolation_state",
        lease_s=300,
        deadline_s=60,
        disruptive=True,
        states=("not_isolated", "isolated"),
    )
    # Of a rack of a fleet, which is a hall with a daemon of its own, as that daemon reports
    hall_power_w = Signal("W", 0, 1e9, quantum=1.0, period_s=100)
    hall_demand_w = Signal("W", 0, 1e9, quantum=1.0, period_s=100)
    hall_floor_w = Signal("W", 0, 1e9, quantum=1.0, period_s=100)
    hall_budget_readback_w = Signal("W", 0, 1e9, quantum=1.0, period_s=100)
    hall_guaranteed_w = Signal("W", 0, 1e9, quantum=1.0, period_s=100)
    hall_grant_age_s = Signal("s", -1e4, 1e6, quantum=0.001, period_s=100)
    hall_lapse_s = Signal("s", 0, 3600, quantum=0.1, period_s=100)  # from the end of a grant to its share
    hall_heard_pu = Signal("1", 0, 1, quantum=0.001, period_s=100)
    hall_gpu_count = Signal("count", 0, 4e6, quantum=1, period_s=100)
    hall_gpu_out_count = Signal("count", 0, 4e6, quantum=1, period_s=100)
    hall_alarm_critical_count = Signal("count", 0, 1e6, quantum=1, period_s=100)
    hall_alarm_warning_count = Signal("count", 0, 1e6, quantum=1, period_s=100)
    hall_alarm_info_count = Signal("count", 0, 1e6, quantum=1, period_s=100)
    hall_budget_w = Control(
        "W",
        0,
        1e9,
        on_expiry="safe",
        protective="low",
        readback="hall_budget_readback_w",
        deadband=1000,  # source: estimate
        lease_s=10,
        deadline_s=3,
    )


class NodeSignals(Table):
    power_w = Signal("W", 0, 2e4, quantum=0.1, reduce="mean", period_s=60, slew_per_s=500, danger="high")
    power_w_max = Signal("W", 0, 2e4, quantum=0.1, reduce="max", period_s=60, slew_per_s=500, danger="high")
    cpu_power_w = Signal("W", 0, 5e3, quantum=0.1, reduce="mean", period_s=60)
    inlet_temp_c = Signal(
        "degC", -20, 80, quantum=0.1, reduce="max", period_s=60, slew_per_s=0.05, danger="high"
    )
    outlet_temp_c = Signal("degC", -20, 110, quantum=0.1, reduce="max", period_s=60)
    water_inlet_temp_c = Signal(
        "degC", -20, 100, quantum=0.1, reduce="max", period_s=60, slew_per_s=0.2, danger="high"
    )
    cpu_temp_c = Signal(
        "degC", -10, 130, quantum=0.1, reduce="max", period_s=60, slew_per_s=2.0, danger="high"
    )
    fan_hz = Signal("Hz", 0, 1000, quantum=0.01, reduce="min", period_s=60)
    psu1_power_w = Signal("W", 0, 2e4, quantum=0.1, reduce="mean", period_s=60)
    psu2_power_w = Signal("W", 0, 2e4, quantum=0.1, reduce="mean", period_s=60)
    leak_state = state("no_leak", "leak", reduce="latch", period_s=60, urgent_at=1)
    power_on_state = state("off", "on", period_s=60)
    service_level_state = state("in_service", "cordoned", "draining", "drained", "replace", period_s=60)
    # Owner of the mark that has it out: by it a daemon knows which nodes the leader before withdrew
    service_owner_state = state("nobody", "ours", "others", period_s=60)
    # Turn in which the scheduler gives it a job: as any other, after all others, or never, as it is a spare
    placement_state = state("usual", "last", "kept", period_s=60)
    # Sleep to save power, as its scheduler allows it; silent on purpose while it is not ready
    standby_state = state("ready", "waking", "asleep", period_s=60)
    agent_state = state("online", "offline", reduce="last", period_s=300)
    power_cap_readback_w = Signal("W", 0, 2e4, quantum=0.1, period_s=60)
    # As its board's controller has it: `shutdown` while its system stops
    power_readback_state = state("on", "shutdown", "off", period_s=60)
    reboot_count = counter("count", max_per_s=1.0, period_s=60)
    # Of its DPUs. Offload: whether the switch forwards in hardware, or packets pass its Arm cores
    dpu1_temp_c = Signal(
        "degC", -20, 150, quantum=0.1, reduce="max", period_s=60, slew_per_s=2.0, danger="high"
    )
    dpu2_temp_c = Signal(
        "degC", -20, 150, quantum=0.1, reduce="max", period_s=60, slew_per_s=2.0, danger="high"
    )
    dpu1_health_state = state("ok", "degraded", "failed", reduce="max", period_s=60)
    dpu2_health_state = state("ok", "degraded", "failed", reduce="max", period_s=60)
    dpu1_offload_state = state("active", "lost", reduce="max", period_s=60)
    dpu2_offload_state = state("active", "lost", reduce="max", period_s=60)
    dpu1_port_error_count = counter("count", max_per_s=1e9, period_s=60)  # the sum over its ports
    dpu2_port_error_count = counter("count", max_per_s=1e9, period_s=60)
    service_level = Control(
        "state",
        0,
        4,
        on_expiry="keep",
        protective="high",
        readback="service_level_state",
        lease_s=300,
        deadline_s=7200,
        disruptive=True,
        states=("in_service", "cordoned", "draining", "drained", "replace"),
    )
    # A level, as all controls are: the node shall have been tested at this instant or later
    burn_in_since_s = Control(
        "s", 0, 1e10, on_expiry="keep", protective="none", readback=None, lease_s=600, deadline_s=86_400
    )
    placement = Control(
        "state",
        0,
        2,
        on_expiry="keep",
        protective="none",
        readback="placement_state",
        lease_s=600,
        deadline_s=120,
        states=("usual", "last", "kept"),
    )
    # Only ready and asleep are asked for. Where nobody renews it, the scheduler wakes nodes on demand itself.
    standby = Control(
        "state",
        0,
        2,
        on_expiry="keep",
        protective="low",
        readback="standby_state",
        lease_s=3600,
        deadline_s=1800,
        states=("ready", "waking", "asleep"),
    )
    power_cap_w = Control(
        "W",
        0,
        2e4,
        on_expiry="safe",
        protective="low",
        readback="power_cap_readback_w",
        slew_per_s=200,
        deadband=10,
    )
    # Saves hardware when nothing milder does, so no hold and no blast radius delays it. It stays off when the
    # lease ends: only people, or a rule of theirs, bring a node back.
    power_state = Control(
        "state",
        0,
        2,
        on_expiry="keep",
        protective="high",
        readback="power_readback_state",
        lease_s=60,
        deadline_s=120,
        states=("on", "shutdown", "off"),
    )


class GpuSignals(Table):
    power_w = Signal("W", 0, 3000, quantum=0.5, reduce="mean", slew_per_s=500, danger="high")
    power_w_max = Signal("W", 0, 3000, quantum=0.5, reduce="max", slew_per_s=500, danger="high")
    # 8 K/s is a stagnant cold plate, the fastest that domain.md B computes
    temp_c = Signal("degC", -10, 130, quantum=0.5, reduce="max", slew_per_s=8.0, danger="high")
    hbm_temp_c = Signal("degC", -10, 130, quantum=0.5, reduce="max", slew_per_s=4.0, danger="high")
    thermal_margin_k = Signal("K", -100, 200, quantum=0.5, reduce="min", slew_per_s=8.0, danger="low")
    util_pu = Signal("1", 0, 1, quantum=0.01, reduce="mean")
    mem_used_pu = Signal("1", 0, 1, quantum=0.001)
    sm_clock_hz = Signal("Hz", 0, 5e9, quantum=1e6, reduce="mean")
    mem_clock_hz = Signal("Hz", 0, 1e10, quantum=1e6)
    power_limit_w = Signal("W", 0, 3000, quantum=0.5)
    sm_active_pu = Signal("1", 0, 1, quantum=0.002, reduce="mean")
    tensor_active_pu = Signal("1", 0, 1, quantum=0.002, reduce="mean")
    dram_active_pu = Signal("1", 0, 1, quantum=0.002, reduce="mean")
    # about a thousandth of a link or less: counters step finer, but what they count jitters by more
    nvlink_tx_bytes_per_s = Signal("byte/s", 0, 4e12, quantum=3e8, reduce="mean")
    nvlink_rx_bytes_per_s = Signal("byte/s", 0, 4e12, quantum=3e8, reduce="mean")
    pcie_tx_bytes_per_s = Signal("byte/s", 0, 1e12, quantum=4e7, reduce="mean")
    pcie_rx_bytes_per_s = Signal("byte/s", 0, 1e12, quantum=4e7, reduce="mean")
    clock_event_bits = state(reduce="latch", high=0xFFFF)
    xid_code = state(high=9999)
    row_remap_pending_state = state("no", "yes", reduce="max")
    recovery_action_state = state(
        "none", "reset_gpu", "reboot_node", "drain_p2p", "drain_and_reset", reduce="max"
    )
    row_remap_failed_state = state("no", "yes", reduce="max")
    health_state = state("ok", "fault", reduce="max")
    # As its agent set it; NaN where none can lock clocks
    clock_lock_readback_mhz = Signal("MHz", 0, 5000, quantum=1.0, period_s=10)
    energy_mj = counter("mJ", max_per_s=3e6)
    throttle_power_ns = counter("ns", max_per_s=1.5e9)
    throttle_thermal_ns = counter("ns", max_per_s=1.5e9)
    pcie_replay_count = counter("count", wrap=2**32, max_per_s=1e6)
    ecc_sbe_count = counter("count", max_per_s=1e6)
    ecc_dbe_count = counter("count", max_per_s=1e3)
    row_remap_count = counter("count", max_per_s=1e2)
    nvlink_error_count = counter("count", max_per_s=1e7)  # CRC, of flits and of data
    nvlink_replay_count = counter("count", max_per_s=1e7)
    nvlink_recovery_count = counter("count", max_per_s=1e3)
    power_cap_w = Control(
        "W", 0, 3000, on_expiry="safe", protective="low", readback="power_limit_w", slew_per_s=50, deadband=5
    )
    # The highest clock of its SMs. The top of its range, which is also its safe value, is no lock at all.
    clock_lock_mhz = Control(
        "MHz",
        0,
        5000,
        on_expiry="safe",
        protective="low",
        readback="clock_lock_readback_mhz",
        deadband=15,
    )


class CduSignals(Table):
    supply_temp_c = Signal(
        "degC", -10, 100, quantum=0.01, reduce="max", period_s=100, slew_per_s=0.2, danger="high"
    )
    return_temp_c = Signal("degC", -10, 110, quantum=0.01, reduce="max", period_s=100)
    flow_lpm = Signal(
        "l/min",
        0,
        1e4,
        quantum=0.001,
        reduce="min",
        period_s=100,
        slew_per_s=5.0,
        danger="low",
        urgent_drop_pu=0.5,
    )
    supply_pressure_pa = Signal("Pa", -1e5, 2e6, quantum=1.0, reduce="min", period_s=100)
    return_pressure_pa = Signal("Pa", -1e5, 2e6, quantum=1.0, period_s=100)
    diff_pressure_pa = Signal("Pa", -1e6, 2e6, quantum=1.0, period_s=100)
    diff_pressure_setpoint_pa = Signal("Pa", 0, 2e6, quantum=1.0, period_s=100)
    filter_diff_pressure_pa = Signal("Pa", -1e5, 1e6, quantum=1.0, reduce="max", period_s=100)
    facility_supply_temp_c = Signal("degC", -10, 100, quantum=0.01, reduce="max", period_s=100)
    facility_return_temp_c = Signal("degC", -10, 110, quantum=0.01, reduce="max", period_s=100)
    facility_flow_lpm = Signal("l/min", 0, 1e4, quantum=0.001, reduce="min", period_s=100)
    facility_supply_pressure_pa = Signal("Pa", -1e5, 2e6, quantum=1.0, period_s=100)
    facility_return_pressure_pa = Signal("Pa", -1e5, 2e6, quantum=1.0, period_s=100)
    facility_valve1_pu = Signal("1", 0, 1, quantum=1e-4, period_s=100)
    facility_valve2_pu = Signal("1", 0, 1, quantum=1e-4, period_s=100)
    pump1_speed_pu = Signal("1", 0, 1.2, quantum=1e-4, reduce="min", period_s=100)
    pump2_speed_pu = Signal("1", 0, 1.2, quantum=1e-4, reduce="min", period_s=100)
    fill_pump_state = state("off", "on", reduce="max", period_s=100)
    available_state = state("not_available", "available", reduce="min", period_s=100)
    running_state = state("off", "on", reduce="min", period_s=100)
    leak_state = state("no_leak", "leak", reduce="latch", period_s=100, urgent_at=1)
    supply_temp_setpoint_c = Signal("degC", -10, 100, quantum=0.01, period_s=100)
    supply_temp_setpoint_final_c = Signal("degC", -10, 100, quantum=0.01, period_s=100)
    supply_temp_request_c = Signal("degC", -10, 100, quantum=0.01, period_s=100)
    supply_temp_target_c = Control(
        "degC",
        10,
        60,
        on_expiry="safe",
        protective="low",
        readback="supply_temp_request_c",
        slew_per_s=0.02,
        deadband=0.1,
        lease_s=300,
        deadline_s=60,
    )
    diff_pressure_request_pa = Signal("Pa", 0, 2e6, quantum=1.0, period_s=100)
    diff_pressure_target_pa = Control(
        "Pa",
        10_000,
        1e6,
        on_expiry="restore",
        protective="high",
        readback="diff_pressure_setpoint_pa",
        slew_per_s=100,
        deadband=1000,
        lease_s=300,
        deadline_s=60,
    )


class LoopSignals(Table):
    supply_temp_c = Signal(
        "degC", -10, 100, quantum=0.01, reduce="max", period_s=100, slew_per_s=0.1, danger="high"
    )
    return_temp_c = Signal("degC", -10, 110, quantum=0.01, period_s=100)
    flow_lpm = Signal("l/min", 0, 1e6, quantum=0.01, reduce="min", period_s=100)
    power_w = Signal("W", 0, 1e8, quantum=1.0, reduce="mean", period_s=100)  # pumps, fans and chillers
    leak_state = state("no_leak", "leak", reduce="latch", period_s=100, urgent_at=1)
    machine_out_count = Signal("count", 0, 1000, quantum=1, reduce="max", period_s=100)  # chillers or pumps
    makeup_ml = counter("ml", max_per_s=1e7, period_s=100)  # water drawn for what evaporates and is drained


class FeederSignals(Table):
    power_w = Signal("W", 0, 1e9, quantum=1.0, reduce="mean", period_s=100, slew_per_s=1e4, danger="high")
    power_w_max = Signal("W", 0, 1e9, quantum=1.0, reduce="max", period_s=100, slew_per_s=1e4, danger="high")
    apparent_power_va = Signal("VA", 0, 1e9, quantum=1.0, reduce="max", period_s=100)
    power_factor_pu = Signal("1", -1, 1, quantum=1e-3, period_s=100)
    voltage_v = Signal("V", 0, 1e6, quantum=0.01, reduce="min", period_s=100)
    current_a = Signal("A", 0, 1e5, quantum=0.001, reduce="mean", period_s=100)
    current_a_max = Signal("A", 0, 1e5, quantum=0.001, reduce="max", period_s=100)
    phase_a_current_a = Signal("A", 0, 1e5, quantum=0.001, reduce="max", period_s=100)
    phase_b_current_a = Signal("A", 0, 1e5, quantum=0.001, reduce="max", period_s=100)
    phase_c_current_a = Signal("A", 0, 1e5, quantum=0.001, reduce="max", period_s=100)
    current_limit_a = Signal("A", 0, 1e5, quantum=0.1, period_s=100)
    frequency_hz = Signal("Hz", 0, 500, quantum=0.001, period_s=100)
    energised_state = state("energised", "lost", reduce="max", period_s=100, urgent_at=1)
    breaker_state = state("closed", "tripped", reduce="max", period_s=100, urgent_at=1)
    shunt_trip_state = state("off", "on", reduce="max", period_s=100, urgent_at=1)
    energy_mj = counter("mJ", max_per_s=1e12, period_s=100)


class LinkSignals(Table):
    up_state = state("up", "down", reduce="max", period_s=10)
    rx_bytes_per_s = Signal("byte/s", 0, 1e13, quantum=1e6, reduce="mean", period_s=10)
    tx_bytes_per_s = Signal("byte/s", 0, 1e13, quantum=1e6, reduce="mean", period_s=10)
    temp_c = Signal("degC", -40, 130, quantum=0.5, reduce="max", period_s=10)
    # Of the optics, of its worst lane; before error correction
    rx_optical_w = Signal("W", 0, 1, quantum=1e-6, reduce="min", period_s=60)
    tx_optical_w = Signal("W", 0, 1, quantum=1e-6, reduce="min", period_s=60)
    laser_bias_a = Signal("A", 0, 1, quantum=1e-4, reduce="max", period_s=60)
    pre_fec_ber_pu = Signal("1", 0, 0.5, quantum=1e-9, reduce="max", period_s=60)
    error_count = counter("count", max_per_s=1e9, period_s=10)
    flap_count = counter("count", max_per_s=1e3, period_s=10)
    symbol_error_count = counter("count", max_per_s=1e9, period_s=10)
    recovery_count = counter("count", max_per_s=1e6, period_s=10)
    discard_count = counter("count", max_per_s=1e9, period_s=10)
    rx_bytes = counter("byte", max_per_s=1e13, period_s=10)
    tx_bytes = counter("byte", max_per_s=1e13, period_s=10)


class SwitchSignals(Table):
    temp_c = Signal("degC", -40, 130, quantum=0.5, reduce="max", period_s=60)
    power_w = Signal("W", 0, 1e5, quantum=0.1, reduce="mean", period_s=60)
    fan_hz = Signal("Hz", 0, 1000, quantum=0.01, reduce="min", period_s=60)
    health_state = state("ok", "degraded", "down", reduce="max", period_s=60)
    port_down_count = Signal("count", 0, 1e5, quantum=1, reduce="max", period_s=60)
    rx_bytes = counter("byte", max_per_s=1e15, period_s=60)
    tx_bytes = counter("byte", max_per_s=1e15, period_s=60)
    error_count = counter("count", max_per_s=1e10, period_s=60)
    discard_count = counter("count", max_per_s=1e10, period_s=60)
    flap_count = counter("count", max_per_s=1e4, period_s=60)  # of all its ports


class StorageSignals(Table):
    # Flush is towards the file system, restore from it, as checkpoints see them
    flush_bytes_per_s = Signal("byte/s", 0, 1e14, quantum=1e6, reduce="mean", period_s=15)
    restore_bytes_per_s = Signal("byte/s", 0, 1e14, quantum=1e6, reduce="mean", period_s=15)
    write_latency_s = Signal("s", 0, 1000, quantum=1e-5, reduce="max", period_s=15)
    read_latency_s = Signal("s", 0, 1000, quantum=1e-5, reduce="max", period_s=15)
    used_pu = Signal("1", 0, 1, quantum=1e-5, period_s=60)
    health_state = state("ok", "degraded", "down", reduce="max", period_s=60)
    written_bytes = counter("byte", max_per_s=1e14, period_s=15)
    read_bytes = counter("byte", max_per_s=1e14, period_s=15)
    error_count = counter("count", max_per_s=1e9, period_s=60)


class QueueSignals(Demand, Table):
    pass


class TenantSignals(Demand, Table):
    pass


class PrioritySignals(Demand, Table):
    pass


class ServiceSignals(Table):
    # Of all its replicas together
    requests_per_s = Signal("1/s", 0, 1e6, quantum=0.001, period_s=60)
    prompt_tokens_per_s = Signal("1/s", 0, 1e9, quantum=1, period_s=60)
    generated_tokens_per_s = Signal("1/s", 0, 1e9, quantum=1, period_s=60)
    running_request_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    waiting_request_count = Signal("count", 0, 1e7, quantum=1, period_s=60)
    # Of the replica that has the least left
    kv_cache_used_pu = Signal("1", 0, 1, quantum=1e-4, reduce="max", period_s=60)
    # Means over the requests of a period, of the slowest replica
    first_token_s = Signal("s", 0, 1e5, quantum=1e-4, reduce="max", period_s=60)
    latency_s = Signal("s", 0, 1e5, quantum=1e-3, reduce="max", period_s=60)


class JobSignals(Table):
    progress_per_s = Signal("1/s", 0, 1e6, quantum=0.001, period_s=60)
    remaining_s = Signal("s", 0, 1e7, quantum=1.0, period_s=300)  # of training, at its speed of now
    # A job speaks when it has saved, and every five minutes all the same
    checkpoint_age_s = Signal("s", 0, 1e9, quantum=1.0, period_s=300)
    checkpoint_save_s = Signal("s", 0, 1e6, quantum=0.001, period_s=300)
    checkpoint_flush_s = Signal("s", 0, 1e6, quantum=0.001, period_s=300)
    power_cap_readback_w = Signal("W", 0, 1e9, quantum=1, period_s=60)
    checkpoint_interval_readback_s = Signal("s", 0, 1e7, quantum=0.1, period_s=300)
    checkpoint_local_interval_readback_s = Signal("s", 0, 1e7, quantum=0.1, period_s=300)
    power_cap_w = Control(
        "W", 0, 1e9, on_expiry="safe", protective="low", readback="power_cap_readback_w", deadband=10
    )
    checkpoint_interval_s = Control(
        "s",
        1,
        1e7,
        on_expiry="keep",
        protective="none",
        readback="checkpoint_interval_readback_s",
        lease_s=300,
        deadline_s=300,
    )
    # Its lease outlasts that of the durable interval, so that one advice ends with the latter
    checkpoint_local_interval_s = Control(
        "s",
        1,
        1e7,
        on_expiry="keep",
        protective="none",
        readback="checkpoint_local_interval_readback_s",
        lease_s=600,
        deadline_s=300,
    )
    checkpoint_since_s = Control(
        "s", 0, 1e10, on_expiry="keep", protective="high", readback=None, lease_s=600, deadline_s=1800
    )


TABLES: dict[str, type[Table]] = {
    t.table: t
    for t in (
        SiteSignals,
        HallSignals,
        SupernodeSignals,
        RackSignals,
        NodeSignals,
        GpuSignals,
        CduSignals,
        LoopSignals,
        FeederSignals,
        LinkSignals,
        SwitchSignals,
        StorageSignals,
        QueueSignals,
        TenantSignals,
        PrioritySignals,
        ServiceSignals,
        JobSignals,
    )
}


_SIGNALS = {s.key: s for spec in TABLES.values() for s in (*spec.gauges, *spec.counters)}
_CONTROLS = {c.key: c for spec in TABLES.values() for c in spec.controls}


def find_signal(key: str) -> Signal | None:
    """The signal named `table.name`, or None."""
    return _SIGNALS.get(key)


def signal_of(key: str) -> Signal:
    """The signal named `table.name`. Raises KeyError if the catalogue has none."""
    return _SIGNALS[key]


def find_control(key: str) -> Control | None:
    """The control named `table.name`, or None."""
    return _CONTROLS.get(key)


# Trace and snapshot name a signal by its row and count in quanta: under another catalogue they mean
# something else.
CATALOGUE_HASH = digest({t: [(s.name, s.kind, s.quantum) for s in (*spec.gauges, *spec.counters)]
                         for t, spec in TABLES.items()})  # fmt: skip
