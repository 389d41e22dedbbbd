"""Pressure: the differential pressure at which pumps of CDUs and their load draw the least power together.

Slower pumps save the cube of their speed and cost warmer GPUs, which leak, and warmer coolant behind them.
The CDUs of a loop go down together from what the BMS holds by itself, a step at a time, in a decision that
moves nothing else. Whatever is wrong or unknown gives the pressure back to the BMS at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from policies.cooling_setpoint.balance import (
    AIR_SPREAD_PU,
    AIR_W_PER_W,
    HALL_W_PER_W,
    HOSE_W_PER_K,
    PowerBalance,
)
from policies.cooling_setpoint.loop_model import SHAFT_PU
from policies.cooling_setpoint.margins import FLOW, FLOW_DOUBT_PU, film_of
from policies.cooling_setpoint.obstacles import Obstacle
from policies.cooling_setpoint.sections import LoopCdus, Rows, good
from twin.catalogue import F64, NS, Bool
from twin.contracts import Memory, Proposal, View
from twin.site import CDU_INNER_DROP_PA, PUMP_EFFICIENCY_PU
from twin.telemetry import ColumnSpec

PRESSURE, PRESSURE_SET, ACROSS = (
    "cdu.diff_pressure_target_pa",
    "cdu.diff_pressure_setpoint_pa",
    "cdu.diff_pressure_pa",
)
REQUESTED = "cdu.diff_pressure_request_pa"  # last, by us or the leader before
WHY_PRESSURE = "pumps and what they cool draw the least at this pressure"
STEP_PU = 0.85  # of a pressure to the next one: 8 % of the flow
LEAST_PU = 0.35  # of the BMS's own pressure: 60 % of its flow; source: estimate
# Of flows above their guards, and of nominal flow, below which no pressure goes; source: estimate
FLOW_ROOM_PU, FLOW_LEAST_PU = 1.3, 0.5
SAME_PU = 0.02  # of the BMS's own pressure: a smaller move is none
HELD_PU = 0.1  # by which pressure, set point and command may differ, of the BMS's own; source: estimate
CALM_S = 1800.0  # after something was wrong
LATE_S = 900.0  # after which nobody waits to read the BMS's own pressure again
SILENT_S, FIRST_S = 120.0, 1.0  # longer than a reading is lost, and of its first look; source: estimate
EFFICIENCY_SPREAD_PU = 0.15  # of pumps and drives: nothing measures them; source: estimate
LOOP_SPREAD_PU = 0.3  # of the loop's power that a flow of the racks changes; source: estimate
CHURN_PU = 0.1  # what impellers churn, over what they move; source: estimate
LITERS_PER_M3_MIN = 60_000.0

CDU_COLUMNS = {
    "want_pa": ColumnSpec("f8", np.nan, of_place=True),
    "own_pa": ColumnSpec("f8", np.nan, of_place=True),  # the BMS's own set point
}
LOOP_COLUMNS = {
    **{
        name: ColumnSpec("f8")
        for name in ("pump_expected_w", "pump_doubt_w", "pump_expected_j", "pump_saved_j", "pump_unheard_s")
    },
    "pump_wrong_ns": ColumnSpec("i8"),  # when something was wrong last
    "pump_moved_ns": ColumnSpec("i8"),
}


@dataclass(frozen=True, slots=True)
class PumpBalance:
    """Readings of the pumps of a loop's CDUs and their load, by the share of the BMS's own pressure.

    `share_pu` is that of now, `pump_w` the power of all pumps, `flow_pu` the flow of each rack over its
    nominal one, `rise_k` that of GPUs above their coolant, `return_k` of coolant in the racks.
    """

    balance: PowerBalance
    share_pu: float
    pump_w: float
    flow_pu: F64
    rise_k: float
    return_k: float

    def more_w(self, from_pu: float, to_pu: float) -> tuple[float, float]:
        """Return (additional power of a pressure over another one, 1 sigma of it), W."""
        ends = [self._parts_w(x) for x in (from_pu, to_pu)]
        pump_w, leak_w, air_w, loop_w = (after - before for before, after in zip(*ends, strict=True))
        leak = self.balance.leak
        parts = (
            EFFICIENCY_SPREAD_PU * pump_w,
            leak.sigma_w_per_k * leak_w / max(leak.w_per_k, 1e-9),
            FLOW_DOUBT_PU * leak_w,
            AIR_SPREAD_PU * air_w,
            LOOP_SPREAD_PU * loop_w,
        )
        return pump_w + leak_w + air_w + loop_w, float(np.sqrt(sum(x * x for x in parts)))

    def _parts_w(self, to_pu: float) -> tuple[float, float, float, float]:
        """Return the power of pumps, the additional one of leakage and for air, and that of the loop, W.

        What pumps and GPUs draw warms the coolant, and what hoses give to the hall does not.
        """
        slower = float(np.sqrt(to_pu / self.share_pu))
        pump_w = self.pump_w * slower**3
        film = float(film_of(self.flow_pu * slower).mean() / film_of(self.flow_pu).mean())
        leak_w = self.balance.leak.w_per_k * self.rise_k * (film - 1.0)
        hose_w = self.balance.racks * HOSE_W_PER_K * self.return_k * (1.0 / slower - 1.0)
        air_w = AIR_W_PER_W * hose_w + HALL_W_PER_W * (1.0 - SHAFT_PU) * (pump_w - self.pump_w)
        heat_w = SHAFT_PU * (pump_w - self.pump_w) + leak_w - hose_w
        return pump_w, leak_w, air_w, self.balance.slowed(slower, heat_w).loop_w(self.balance.now_c)


def note_own(view: View, out: Memory) -> None:
    """Note the BMS's own pressures: those in force while none is asked for. Changes `out`.

    A BMS holds what it was asked for last, by whichever daemon: that is its own only where it is no less than
    what is known of it.
    """
    set_pa = good(view, PRESSURE_SET)
    free = np.isnan(out["want_pa"]) & np.isnan(view.commanded(PRESSURE)) & np.isfinite(set_pa)
    free &= ~is_requested(view, slice(None)) | (set_pa >= out["own_pa"])
    out["own_pa"][free] = set_pa[free]


def is_requested(view: View, cdus: Rows) -> Bool:
    """Return True for CDUs whose set point is the last one requested of the BMS [k]."""
    set_pa = good(view, PRESSURE_SET, cdus)
    found: Bool = np.abs(set_pa - view.value(REQUESTED)[cdus]) <= SAME_PU * set_pa
    return found


def is_left(view: View, memory: Mapping[str, np.ndarray], group: LoopCdus) -> bool:
    """Return True if a BMS still holds a lower pressure without a request."""
    cdus, own_pa = group.cdus, memory["own_pa"][group.cdus]
    low = good(view, PRESSURE_SET, cdus) < (1.0 - SAME_PU) * own_pa
    low &= is_requested(view, cdus) & np.isnan(view.commanded(PRESSURE)[cdus])
    return bool(low.any() and np.isnan(memory["want_pa"][cdus]).all() and np.isfinite(own_pa).all())


def unheld(view: View, memory: Mapping[str, np.ndarray], group: LoopCdus) -> Obstacle:
    """Return the reason that the pressure of a group is uncertain, or is not the requested one."""
    site, cdus = view.site, group.cdus
    racks = group.racks[site.design.liquid[group.racks]]
    lpm = good(view, FLOW, racks)
    if not np.isfinite(lpm).all():
        return Obstacle("hold", f"no data on the flow of {site.name('rack', int(racks[np.isnan(lpm)][0]))}")
    set_pa, across_pa, lpm = (good(view, key, cdus) for key in (PRESSURE_SET, ACROSS, "cdu.flow_lpm"))
    unknown = ~np.isfinite(set_pa + across_pa + lpm)
    if unknown.any():
        name = site.name("cdu", int(cdus[unknown][0]))
        return Obstacle("hold", f"no data on pressure or flow of {name}")
    own_pa, asked_pa = memory["own_pa"][cdus], view.commanded(PRESSURE)[cdus]
    if (unknown := np.isnan(own_pa)).any():
        name = site.name("cdu", int(cdus[unknown][0]))
        return Obstacle("hold", f"{name} holds the pressure requested earlier: its own set point is unknown")
    off = np.abs(np.where(np.isnan(asked_pa), set_pa, asked_pa) - set_pa) > HELD_PU * own_pa
    # More than is asked for starves nobody, and is what there is while nobody follows the advice
    off |= set_pa - across_pa > HELD_PU * own_pa
    if off.any():
        return Obstacle("back", f"{site.name('cdu', int(cdus[off][0]))} does not hold its pressure")
    return Obstacle()


def is_lowered(memory: Mapping[str, np.ndarray], group: LoopCdus) -> bool:
    """Return True if a pressure below the BMS's own is requested."""
    least_pa = (1.0 - SAME_PU) * memory["own_pa"][group.cdus]
    return bool((memory["want_pa"][group.cdus] < least_pa).any())


def guard(view: View, out: Memory, group: LoopCdus, found: Obstacle, dt_s: float) -> None:
    """Give the pressure back to the BMS where something is wrong, at once, and where something is unknown for
    longer than a lost reading. `dt_s`: since the look before. Changes `out`."""
    cdus, i = group.cdus, group.loop
    if i < 0 or not np.isfinite(view.envelope(PRESSURE).low[cdus]).all():
        out["want_pa"][cdus] = np.nan
        return
    if is_left(view, out, group):
        out["want_pa"][cdus], out["pump_moved_ns"][i] = out["own_pa"][cdus], view.now_ns
    kinds = (found.kind, unheld(view, out, group).kind)
    # The clock begins at the first look: where readings are rare, one alone may be lost as well
    silent_s = float(out["pump_unheard_s"][i])
    out["pump_unheard_s"][i] = (silent_s + dt_s if silent_s else FIRST_S) if "hold" in kinds else 0.0
    if "back" in kinds or out["pump_unheard_s"][i] > SILENT_S:
        out["pump_wrong_ns"][i] = view.now_ns
        if is_lowered(out, group):
            out["want_pa"][cdus], out["pump_moved_ns"][i] = out["own_pa"][cdus], view.now_ns
    if np.isfinite(out["want_pa"][cdus]).all() and not is_lowered(out, group):
        # Asked for, as only a command is as fast as it has to be; then there is nothing to ask for any more
        asked_pa = np.minimum(out["own_pa"][cdus], view.envelope(PRESSURE).high[cdus])
        off_pa = np.abs(good(view, PRESSURE_SET, cdus) - asked_pa)
        late = view.now_ns - int(out["pump_moved_ns"][i]) >= round(LATE_S * NS)
        if late or bool((off_pa <= SAME_PU * out["own_pa"][cdus]).all()):
            out["want_pa"][cdus] = np.nan


def pumps_of(
    view: View, memory: Mapping[str, np.ndarray], group: LoopCdus, balance: PowerBalance
) -> PumpBalance | None:
    """Return the present readings of the pumps of a group; None if too little is known."""
    cdus, i, design = group.cdus, group.loop, view.site.design
    racks = group.racks[design.liquid[group.racks]]
    across_pa, lpm = (good(view, key, cdus) for key in (ACROSS, "cdu.flow_lpm"))
    flow_pu = good(view, FLOW, racks) / design.rack_flow_lpm[racks]
    rise_k = float(memory["loop_temp_c"][i] - memory["loop_coldest_c"][i])
    return_k = float(np.mean(memory["rack_rise_k"][racks])) if len(racks) else np.nan
    inner_pa = CDU_INNER_DROP_PA * (lpm / design.cdu_flow_lpm[cdus]) ** 2
    moved_w = float(((across_pa + inner_pa) * lpm).sum()) / LITERS_PER_M3_MIN
    pump_w = (1.0 + CHURN_PU) * moved_w / PUMP_EFFICIENCY_PU
    # As it is and not as it is set, so that advice that nobody follows goes no further than its first step
    share_pu = float(np.mean(across_pa / memory["own_pa"][cdus]))
    if not np.isfinite(pump_w + share_pu + rise_k + return_k + flow_pu.sum()) or not share_pu > 0.0:
        return None
    return PumpBalance(balance, share_pu, pump_w, flow_pu, rise_k, return_k)


def settle(out: Memory, group: LoopCdus, pumps: PumpBalance | None, gap_s: float) -> None:
    """Count the expected saving of slower pumps, and the measured one. Changes `out`."""
    i = group.loop
    if pumps is None or not is_lowered(out, group):
        return
    out["pump_expected_j"][i] += gap_s * out["pump_expected_w"][i]
    out["pump_saved_j"][i] += gap_s * pumps.more_w(pumps.share_pu, 1.0)[0]


def least_pu(view: View, memory: Mapping[str, np.ndarray], group: LoopCdus) -> float:
    """Return the lowest share of the BMS's own pressure within the envelope."""
    low_pa = view.envelope(PRESSURE).low[group.cdus]
    return float(np.fmax(low_pa / memory["own_pa"][group.cdus], LEAST_PU).max())


def next_pu(pumps: PumpBalance, least_w: float, least_pu: float) -> float:
    """The share of the BMS's own pressure to go to: a step down or up, or that of now where neither is sure
    to save."""
    now_pu = pumps.share_pu
    for to_pu in (max(now_pu * STEP_PU, least_pu), min(now_pu / STEP_PU, 1.0)):
        if abs(to_pu - now_pu) < SAME_PU:
            continue
        more_w, sigma_w = pumps.more_w(now_pu, to_pu)
        if -more_w > max(sigma_w, least_w):
            return to_pu
    return now_pu


def has_flow(view: View, group: LoopCdus, slower: float) -> bool:
    """Return True if every rack keeps its flow well above its guard with all pumps at this share of their
    speed."""
    design = view.site.design
    racks = group.racks[design.liquid[group.racks]]
    lpm = slower * good(view, FLOW, racks)
    least_lpm = FLOW_LEAST_PU * design.rack_flow_lpm[racks]
    if (limit := view.limit(FLOW)) is not None:
        least_lpm = np.fmax(least_lpm, FLOW_ROOM_PU * limit.guard[racks])
    return bool((lpm >= least_lpm).all())


def move(view: View, out: Memory, group: LoopCdus, pumps: PumpBalance, to_pu: float) -> None:
    """Request this share of the BMS's own pressure; the full pressure needs no request. Changes `out`."""
    i, cdus, envelope = group.loop, group.cdus, view.envelope(PRESSURE)
    own_pa = out["own_pa"][cdus]
    low_pa, high_pa = envelope.low[cdus], np.minimum(envelope.high[cdus], own_pa)
    # The least that can be asked for below an own pressure above the envelope is less than what was weighed
    if to_pu >= 1.0 or (low_pa > high_pa).any() or (high_pa < own_pa).any():
        out["want_pa"][cdus] = np.nan
    else:
        out["want_pa"][cdus] = np.clip(to_pu * own_pa, low_pa, high_pa)
    out["pump_moved_ns"][i] = view.now_ns
    expect(out, group, pumps)


def expect(out: Memory, group: LoopCdus, pumps: PumpBalance) -> None:
    """Store the expected saving of the requested pressure. Changes `out`."""
    i, share_pu = group.loop, out["want_pa"][group.cdus] / out["own_pa"][group.cdus]
    if np.isfinite(share_pu).all():
        saving_w, doubt_w = pumps.more_w(float(share_pu.mean()), 1.0)
        out["pump_expected_w"][i], out["pump_doubt_w"][i] = saving_w, doubt_w


def is_asked(memory: Mapping[str, np.ndarray], group: LoopCdus, to_pu: float) -> bool:
    """Return True if this share of the BMS's own pressure is already requested."""
    own_pa = memory["own_pa"][group.cdus]
    return bool((np.abs(memory["want_pa"][group.cdus] - to_pu * own_pa) < SAME_PU * own_pa).all())


def is_calm(memory: Mapping[str, np.ndarray], group: LoopCdus, now_ns: int) -> bool:
    """Return True if the pressure of a group has had no trouble for a while."""
    return now_ns - int(memory["pump_wrong_ns"][group.loop]) >= round(CALM_S * NS)


def pressures(view: View, memory: Mapping[str, np.ndarray]) -> list[Proposal]:
    """Return the requested pressures: lower bounds and wanted values."""
    envelope = view.envelope(PRESSURE)
    index = np.flatnonzero(np.isfinite(memory["want_pa"]) & np.isfinite(envelope.low)).astype(np.int32)
    if not len(index):
        return []
    want_pa = np.clip(memory["want_pa"][index], envelope.low[index], envelope.high[index])
    return [Proposal(PRESSURE, index, want_pa, envelope.high[index].copy(), want_pa.copy(), WHY_PRESSURE)]
