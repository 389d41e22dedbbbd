"""Obstacles: reasons that keep a group of CDUs from warmer coolant: unknown readings and faults.

What is not known holds the set points where they are; what is wrong brings them back to the safe value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.cooling_setpoint.groups import SET_POINT, numbers_of
from policies.cooling_setpoint.loop_model import plates_of
from policies.cooling_setpoint.margins import (
    HBM,
    JUMPING_RETURN,
    MARGIN,
    RETURN,
    SUPPLY,
    TEMP,
    WRONG_POWER,
    Ceilings,
)
from policies.cooling_setpoint.sections import LoopCdus, good
from twin.catalogue import I32, counted
from twin.contracts import View
from twin.telemetry import GOOD, STALE

MEASURED = "cdu.supply_temp_c"
HEAT_KEYS = (TEMP, HBM, MARGIN, SUPPLY, RETURN, "rack.flow_lpm")  # that thermal_guard caps for
LOW_KEYS = (MARGIN, "rack.flow_lpm")  # which guard against less
STOPPED_FLOW = ("leak", "branch_blocked", "tray_blocked")  # faults of racks and nodes
# Without a loop's meter savings are estimates; the margins do without the others
HARMLESS = (("sensor_silent", "loop", "power_w"), *JUMPING_RETURN, *WRONG_POWER)
APART_K = 2.0  # between thermometers of a CDU and its racks, and from the set point; source: estimate
WET_K = 0.5  # by which a wet bulb may read above the dry one; source: estimate

Kind = Literal["", "hold", "back"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason that a group may not go warmer; `kind` "back" requests the safe value, "" is none."""

    kind: Kind = ""
    text: str = ""


def obstacles_of(view: View, groups: Sequence[LoopCdus], found: Ceilings) -> list[Obstacle]:
    """Return the gravest obstacle of each group."""
    wrong, sensors = _wrong(view), _sensors(view)
    out: list[Obstacle] = []
    for group in groups:
        if text := wrong.get(group.number):
            out.append(Obstacle("back", text))
            continue
        unknown = sensors.get(group.number) or _unknown(view, group, found)
        out.append(Obstacle("hold", unknown) if unknown else Obstacle())
    return out


def _wrong(view: View) -> dict[int, str]:
    """Return the gravest fault, by the number of the group."""
    site, numbers, out = view.site, numbers_of(view.site), dict[int, str]()

    def note(table: str, rows: I32, text: str) -> None:
        of = numbers[table][rows]
        for number, first in zip(*(x.tolist() for x in np.unique(of, return_index=True)), strict=True):
            if number >= 0 and number not in out:
                out[number] = text.format(site.name(table, int(rows[first])))

    for table in ("cdu", "rack", "loop", "node"):
        under_work = view.maintenance(table) if table != "node" else None
        if under_work is not None:
            note(table, _rows(under_work), "{} is in maintenance")
        wet = _rows(view.value(f"{table}.leak_state") == 1.0)
        if len(wet):
            reported = np.isin(view.quality(f"{table}.leak_state")[wet], (GOOD, STALE))
            note(table, wet[reported], "{} leaks")
    for fault in view.faults():
        grave = fault.table in ("cdu", "loop") or fault.kind in STOPPED_FLOW
        if grave and not fault.signal and fault.table in numbers and fault.entity >= 0:
            note(fault.table, np.array([fault.entity], np.int32), f"{fault.kind.replace('_', ' ')} at {{}}")
    for key in HEAT_KEYS:
        if (limit := view.limit(key)) is None:
            continue
        value, low = view.value(key), key in LOW_KEYS
        hot = _rows(value < limit.guard if low else value > limit.guard)
        if len(hot):
            measured = hot[view.quality(key)[hot] == GOOD]
            note(key.partition(".")[0], measured, f"{key} of {{}} is beyond its guard")
    return out


def _sensors(view: View) -> dict[int, str]:
    """Return the first untrusted sensor, or fault that is not grave, by group."""
    numbers, out = numbers_of(view.site), dict[int, str]()
    for fault in view.faults():
        # The weather's sensors are judged by the loop's meter, and by each other
        known = fault.table in numbers and fault.entity >= 0 and fault.signal
        if not known or (fault.kind, fault.table, fault.signal) in HARMLESS:
            continue
        number = int(numbers[fault.table][fault.entity])
        name = view.site.name(fault.table, fault.entity)
        out.setdefault(number, f"{fault.kind.replace('_', ' ')}: {fault.table}.{fault.signal} of {name}")
    return out


def _unknown(view: View, group: LoopCdus, found: Ceilings) -> str:
    site = view.site
    doubted = group.gpus[found.doubted[group.gpus]]
    if len(doubted):
        text = f"the temperature of {site.name('gpu', int(doubted[0]))} is unknown or contradicts its power"
        others = counted("gpu", len(doubted) - 1).replace(" ", " other ")
        return f"{text}, as is that of {others}" if len(doubted) > 1 else text
    if not np.isfinite(found.supply_c[group.cdus]).all():
        return "no limit is known for the equipment that these CDUs cool"
    supply_c, wanted_c = good(view, MEASURED, group.cdus), good(view, SET_POINT, group.cdus)
    if not np.isfinite(supply_c).all():
        return f"{site.name('cdu', int(group.cdus[np.isnan(supply_c)][0]))} does not report"
    racks = group.racks[site.design.liquid[group.racks]]
    apart = np.abs(good(view, SUPPLY, racks) - good(view, MEASURED, site.cdu_of_rack[racks])) > APART_K
    if apart.any():
        return f"{site.name('rack', int(racks[apart][0]))} and its CDU read different supply temperatures"
    off = np.abs(supply_c - wanted_c) > APART_K
    if off.any():
        return f"{site.name('cdu', int(group.cdus[off][0]))} does not hold its set point"
    return _outside(view, group) if group.loop >= 0 else ""


def _outside(view: View, group: LoopCdus) -> str:
    """Return the unknown readings of a group's loop and its weather."""
    cold_c = good(view, "loop.supply_temp_c")[group.loop]
    lpm = good(view, "cdu.facility_flow_lpm", group.cdus)
    if not np.isfinite(cold_c + lpm.sum()):
        return f"no data on the water of {view.site.name('loop', group.loop)}"
    dry_c, wet_c = good(view, "site.outdoor_temp_c")[0], good(view, "site.outdoor_wet_bulb_c")[0]
    if not np.isfinite(wet_c if plates_of(view.site)[group.loop].wet else dry_c):
        return "no data on the weather"
    return "the wet bulb reads above the dry one" if wet_c > dry_c + WET_K else ""


def _rows(mask: np.ndarray) -> I32:
    return np.flatnonzero(mask).astype(np.int32)
