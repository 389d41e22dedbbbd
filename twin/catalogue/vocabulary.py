"""Vocabulary: display names of signals and controls, and texts with their keys replaced by these names.

The reason of a policy may contain a key, by which code matches it. Every display replaces the key by words.
"""

from __future__ import annotations

import re

from twin.catalogue.control_values import table_noun
from twin.catalogue.signals import TABLES

CONTROLS = {
    "gpu.power_cap_w": "power cap",
    "node.power_cap_w": "power cap",
    "job.power_cap_w": "power cap",
    "gpu.clock_lock_mhz": "GPU clock lock",
    "job.checkpoint_interval_s": "checkpoint interval",
    "job.checkpoint_local_interval_s": "interval of saves in memory",
    "job.checkpoint_since_s": "save",
    "node.service_level": "service level",
    "node.power_state": "power of a node",
    "node.burn_in_since_s": "burn-in test",
    "node.placement": "placement of new work",
    "node.standby": "standby of a node",
    "rack.hall_budget_w": "budget lent to a hall",
    "rack.liquid_isolation": "coolant isolation",
    "rack.electrical_isolation": "power isolation",
    "cdu.supply_temp_target_c": "supply temperature",
    "cdu.diff_pressure_target_pa": "pressure of a CDU's pumps",
}
_SIGNALS = {
    "energy_mj": "energy", "flow_lpm": "coolant flow", "util_pu": "utilisation", "used_pu": "fill level",
    "makeup_ml": "make-up water", "remaining_s": "remaining training",
    "clock_event_bits": "reasons for a lowered clock",
    "power_w_max": "peak power", "current_a_max": "peak current",
    "throttle_power_ns": "time slowed by power", "throttle_thermal_ns": "time slowed by heat",
    "xid_code": "XID", "up_state": "state", "dram_active_pu": "memory activity",
    "gpu_idle_count": "idle GPUs", "gpu_running_count": "GPUs in use",
    "gpu_pending_count": "pending GPUs", "gpu_held_count": "held GPUs", "job_held_count": "held jobs",
    "gpu_spare_count": "spare GPUs", "gpu_out_count": "GPUs out of service",
    "job_running_count": "running jobs", "job_pending_count": "pending jobs", "fan_hz": "fan speed",
    "requests_per_s": "requests per second", "valve_pu": "valve position", "recovery_count": "recoveries",
    "ecc_dbe_count": "double-bit memory errors", "ecc_sbe_count": "single-bit memory errors",
    "nvlink_recovery_count": "NVLink recoveries", "port_down_count": "ports that are down",
    "rx_optical_w": "received optical power", "tx_optical_w": "sent optical power",
    "laser_bias_a": "laser current", "pre_fec_ber_pu": "bit error rate before correction",
    "reboot_count": "restarts", "energised_state": "voltage state", "row_remap_count": "remapped rows",
}  # fmt: skip
_WORDS = {
    "temp": "temperature", "diff": "differential", "hbm": "memory", "mem": "memory", "sm": "SM", "cpu": "CPU",
    "dpu": "DPU", "gpu": "GPU", "nvlink": "NVLink", "pcie": "PCIe",
    "psu": "power supply", "rx": "received", "tx": "sent", "rh": "humidity", "setpoint": "set point",
    "readback": "read back", "pending": "waiting",
}  # fmt: skip
_UNITS = (
    "_usd_per_kwh", "_g_per_kwh", "_per_s", "_w", "_c", "_lpm", "_pa", "_pu", "_mhz", "_hz", "_rpm",
    "_k", "_mj", "_ml", "_va", "_v", "_a", "_s", "_ns", "_bits", "_code",
)  # fmt: skip
_COUNTED = {"count": "s", "state": " state", "bytes": " traffic"}
_KEY = re.compile(
    r"(?<![\w/.#-])(?:(?P<table>[a-z]+)\.)?(?P<name>[a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?![\w/=(]|\.\w)"
)


def control_words(key: str) -> str:
    """A control as people call it: `gpu.power_cap_w` is the power cap."""
    return CONTROLS.get(key) or signal_words(key.partition(".")[2] or key)


def signal_words(name: str) -> str:
    """A signal, without its table, as people call it: `supply_temp_c` is the supply temperature."""
    if name in _SIGNALS:
        return _SIGNALS[name]
    for unit in _UNITS:
        if name.endswith(unit):
            name = name.removesuffix(unit)
            break
    parts = re.sub(r"([a-z])(\d+)(?=_|$)", r"\1_\2", name).split("_")
    tail = _COUNTED.get(parts[-1], "") if len(parts) > 1 else ""
    text = " ".join(_WORDS.get(part, part) for part in (parts[:-1] if tail else parts))
    return text + tail


def plain_text(text: str) -> str:
    """A text in which keys of signals and controls, and names of units, stand as words."""
    return _KEY.sub(_plain, text).replace(" degC", " °C")


def _plain(found: re.Match[str]) -> str:
    table, name = found["table"], found["name"]
    if table is None:
        return signal_words(name) if name in _BARE else found[0]
    key = f"{table}.{name}"
    if table not in TABLES or not (key in _KEYS or name.endswith(_UNITS)):
        return found[0]
    return CONTROLS[key] if key in CONTROLS else f"{table_noun(table)} {signal_words(name)}"


_KEYS = frozenset(
    f"{table}.{name}"
    for table, spec in TABLES.items()
    for name in (*spec.by_name, *(control.name for control in spec.controls))
)
# A name alone is a key only with its unit: `service_level` may be what somebody wrote.
_BARE = frozenset(
    name
    for name in (key.partition(".")[2] for key in sorted(_KEYS))
    if name.endswith((*_UNITS, "_count", "_state", "_w_max", "_a_max"))
)
