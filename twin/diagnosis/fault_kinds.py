"""Fault kinds: the one taxonomy of faults, with gravity, title and first action of each.

The diagnosis names faults by it, rules of health say which of its kinds they are signs of (`Rule.faults`),
and the fault scripts of the plant use the same names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultKind:
    """Fault kind: the tables whose entities can have it, its gravity, and the first thing to do."""

    name: str
    tables: tuple[str, ...]
    severity: str  # info, warning, critical
    title: str  # with {name} for the entity
    action: str
    cooling: bool = False  # of the facility: throttling that follows is no GPU's fault


FAULT_KINDS: dict[str, FaultKind] = {
    k.name: k
    for k in (
        FaultKind("pump_trip", ("cdu",), "critical", "A pump of {name} has stopped",
             "Restart it; if it stops again, have its motor and drive checked.", True),
        FaultKind("pump_worn", ("cdu",), "warning",
             "The pumps of {name} deliver less than their speed should give",
             "Plan an inspection of the pumps.", True),
        FaultKind("filter_blocked", ("cdu",), "critical", "The filter of {name} is blocked",
             "Change over to the other filter, then clean it.", True),
        FaultKind("exchanger_fouled", ("cdu",), "warning", "The heat exchanger of {name} is fouled",
             "Plan a cleaning; check the facility water's filter.", True),
        FaultKind("valve_stuck", ("cdu",), "critical", "The facility-water valve of {name} does not move",
             "Move it by hand; check its actuator.", True),
        FaultKind("branch_blocked", ("rack",), "critical", "The coolant of {name} is blocked",
             "Check valves, hoses and quick disconnects of this rack.", True),
        FaultKind("tray_blocked", ("node",), "warning", "The coolant of tray {name} is blocked",
             "Drain the node and check its quick disconnects.", True),
        FaultKind("plate_degraded", ("gpu",), "warning", "The cold plate of {name} conducts heat poorly",
             "Renew the thermal paste at the next maintenance.", False),
        FaultKind("leak", ("node", "rack", "cdu", "loop"), "critical", "{name} leaks",
             "Inspect it at once; isolate it when a second detector agrees.", True),
        FaultKind("water_detected", ("hall",), "critical", "A leak detector of {name} is wet",
             "Look for water at once; begin with racks and CDUs whose own detectors are silent."),
        FaultKind("coolant_loss", ("cdu",), "critical", "{name} loses coolant",
             "Look for water at its racks; begin with those whose detectors are silent."),
        FaultKind("cooler_failed", ("loop",), "critical",
             "{name} rejects less heat than it should",
             "Check fans, pumps and chillers of this loop.", True),
        FaultKind("heat_wave", ("site",), "warning",
             "The weather is hotter than the cooling was designed for",
             "Lower the load before the supply temperature passes its limit.", True),
        FaultKind("sensor_frozen", ("gpu", "node", "rack", "cdu", "loop", "feeder", "site"), "warning",
             "A sensor of {name} is stuck", "Replace or restart the sensor; do not trust it."),
        FaultKind("sensor_biased", ("gpu", "node", "rack", "cdu", "loop", "feeder", "site"), "warning",
             "A sensor of {name} reads wrong", "Calibrate the sensor; do not trust it."),
        FaultKind("sensor_spiking", ("gpu", "node", "rack", "cdu", "loop", "feeder", "site"), "warning",
             "A sensor of {name} jumps", "Check its wiring; do not trust it."),
        FaultKind("sensor_silent", ("gpu", "node", "rack", "cdu", "loop", "feeder", "site"), "warning",
             "A sensor of {name} no longer reports", "Check the sensor and its source."),
        FaultKind("psu_lost", ("node",), "warning", "{name} runs on one power supply",
             "Replace the supply; the other one carries the whole load."),
        FaultKind("feed_lost", ("feeder",), "critical", "{name} has no voltage",
             "Check the supply side; equipment with a second feed runs on that one."),
        FaultKind("breaker_tripped", ("feeder",), "critical", "The breaker of {name} has tripped",
             "Find the overload or fault before closing it."),
        FaultKind("grid_event", ("site",), "critical",
             "The grid's voltage sags or is lost over the whole site",
             "No feed is at fault: the UPS should carry the load; shed load if this lasts."),
        FaultKind("xid_burst", ("gpu",), "warning", "{name} keeps reporting errors (XID)",
             "Drain the node and run diagnostics."),
        FaultKind("ecc_growth", ("gpu",), "warning", "Memory errors of {name} grow",
             "Reset the GPU when its node is drained; replace it if remapping fails."),
        FaultKind("nvlink_flaps", ("gpu",), "warning", "The NVLinks of {name} retrain or count errors",
             "Reseat or replace tray or cable."),
        FaultKind("gpu_off_bus", ("gpu",), "critical", "{name} has fallen off the bus",
             "Drain the node, power it off and on; replace the GPU if it happens again."),
        FaultKind("node_silent", ("node",), "warning", "{name} or all of its GPUs no longer report",
             "Check its agent and its network."),
        FaultKind("node_down", ("node",), "critical", "{name} is off",
             "Check its supply, then start it."),
        FaultKind("link_congested", ("link",), "info", "{name} drops or delays traffic",
             "Check the other traffic on its path."),
        FaultKind("link_down", ("link",), "warning", "{name} is down",
             "Check cable and transceiver."),
    )
}  # fmt: skip
