"""Obstacles: what keeps a group of CDUs from warmer coolant, from what is not known to what is wrong.

What is not known holds the set points where they are; what is wrong brings them back to the safe value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.cooling_setpoint.groups import SET_POINT, LoopCdus
from policies.cooling_setpoint.loop_model import plates_of
from policies.cooling_setpoint.margins import HBM, MARGIN, RETURN, SUPPLY, TEMP, Ceilings, good
from twin.catalogue import I32
from twin.contracts import View
from twin.telemetry import GOOD, STALE

MEASURED = "cdu.supply_temp_c"
HEAT_KEYS = (TEMP, HBM, MARGIN, SUPPLY, RETURN, "rack.flow_lpm")  # that thermal_guard caps for
STOPPED_FLOW = ("leak", "branch_blocked", "tray_blocked")  # faults of racks and nodes
NO_METER = ("sensor_silent", "loop", "power_w")  # savings are estimates then, and nothing is unsafe
APART_K = 2.0  # between thermometers of a CDU and its racks, and from the set point; source: estimate
WET_K = 0.5  # by which a wet bulb may read above the dry one; source: estimate

Kind = Literal["", "hold", "back"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why a group may not go warmer; `kind` "back" asks for the safe value, "" is none."""

    kind: Kind = ""
    text: str = ""


def obstacle_of(view: View, group: LoopCdus, found: Ceilings) -> Obstacle:
    """The gravest obstacle of a group."""
    wrong = _wrong(view, group)
    if wrong:
        return Obstacle("back", wrong)
    unknown = _unknown(view, group, found)
    return Obstacle("hold", unknown) if unknown else Obstacle()


def _wrong(view: View, group: LoopCdus) -> str:
    site = view.site
    places = (("cdu", group.cdus), ("rack", group.racks), ("loop", _own(group)), ("node", group.nodes))
    for table, rows in places:
        under_work = view.maintenance(table) if table != "node" else None
        if under_work is not None and (some := rows[under_work[rows]]).size:
            return f"{site.name(table, int(some[0]))} is in maintenance"
        key = f"{table}.leak_state"
        wet = (view.value(key)[rows] == 1.0) & np.isin(view.quality(key)[rows], (GOOD, STALE))
        if wet.any():
            return f"{site.name(table, int(rows[wet][0]))} leaks"
    for fault in view.faults():
        if fault.signal or not _inside(view, group, fault.table, fault.entity):
            continue
        if fault.table in ("cdu", "loop") or fault.kind in STOPPED_FLOW:
            return f"{fault.kind} at {site.name(fault.table, fault.entity)}"
    for key in HEAT_KEYS:
        beyond = view.beyond(key)
        hot = beyond[np.isin(beyond, group.gpus if key.startswith("gpu.") else group.racks)]
        measured = hot[view.quality(key)[hot] == GOOD]
        if len(measured):
            return f"{key} of {site.name(key.partition('.')[0], int(measured[0]))} is beyond its guard"
    return ""


def _unknown(view: View, group: LoopCdus, found: Ceilings) -> str:
    site = view.site
    for fault in view.faults():
        # The diagnosis judges the weather's sensors by the loop's supply, which this policy moves: here they
        # are judged by the loop's meter, and by each other
        if fault.table == "site" or (fault.kind, fault.table, fault.signal) == NO_METER:
            continue
        if fault.signal and _inside(view, group, fault.table, fault.entity):
            return f"{fault.kind}: {fault.table}.{fault.signal} of {site.name(fault.table, fault.entity)}"
    doubted = group.gpus[found.doubted[group.gpus]]
    if len(doubted):
        first = site.name("gpu", int(doubted[0]))
        return f"{first} has no temperature to trust, nor have {len(doubted) - 1} other GPUs"
    if not np.isfinite(found.supply_c[group.cdus]).all():
        return "no limit is known of what these CDUs cool"
    supply_c, wanted_c = good(view, MEASURED)[group.cdus], good(view, SET_POINT)[group.cdus]
    if not np.isfinite(supply_c).all():
        return f"{site.name('cdu', int(group.cdus[np.isnan(supply_c)][0]))} was not heard"
    racks = group.racks[site.design.liquid[group.racks]]
    apart = np.abs(good(view, SUPPLY)[racks] - good(view, MEASURED)[site.cdu_of_rack[racks]])
    if (apart > APART_K).any():
        rack = site.name("rack", int(racks[apart > APART_K][0]))
        return f"{rack} and its CDU read different supply temperatures"
    off = np.abs(supply_c - wanted_c) > APART_K
    if off.any():
        return f"{site.name('cdu', int(group.cdus[off][0]))} does not hold its set point"
    return _outside(view, group) if group.loop >= 0 else ""


def _outside(view: View, group: LoopCdus) -> str:
    """Say what is not known of a group's loop and of the weather that it works against."""
    cold_c, lpm = (
        good(view, "loop.supply_temp_c")[group.loop],
        good(view, "cdu.facility_flow_lpm")[group.cdus],
    )
    if not np.isfinite(cold_c + lpm.sum()):
        return f"the water of {view.site.name('loop', group.loop)} was not heard"
    dry_c, wet_c = good(view, "site.outdoor_temp_c")[0], good(view, "site.outdoor_wet_bulb_c")[0]
    if not np.isfinite(wet_c if plates_of(view.site)[group.loop].wet else dry_c):
        return "the weather was not heard"
    return "the wet bulb reads above the dry one" if wet_c > dry_c + WET_K else ""


def _own(group: LoopCdus) -> I32:
    return np.array([group.loop] if group.loop >= 0 else [], np.int32)


def _inside(view: View, group: LoopCdus, table: str, entity: int) -> bool:
    """True for an entity whose reading or fault counts for a group."""
    site = view.site
    if entity < 0:
        return False
    if table == "gpu":
        return bool(site.rack_of_gpu[entity] in group.racks)
    if table == "node":
        return bool(site.rack_of_node[entity] in group.racks)
    own: dict[str, np.ndarray] = {"rack": group.racks, "cdu": group.cdus, "loop": _own(group)}
    return table in own and entity in own[table]
