"""cooling_setpoint: moves the supply temperature and the pressure of CDUs to where GPUs and cooling together
draw the least.

All CDUs of a loop are one decision, as the loop follows the coldest. It goes warmer in small steps, a few
minutes apart, as far as every GPU keeps its margin with a stated probability under the load forecast, and
only for a saving beyond its doubt. What is unknown holds it where it is and after a while gives it back to
the BMS, what is wrong brings it back to the safe value, and heat lowers it at once. It writes down what it
expects to save, and counts what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from policies.cooling_setpoint import margins, pressure
from policies.cooling_setpoint.balance import PowerBalance
from policies.cooling_setpoint.explain import explanation
from policies.cooling_setpoint.groups import CODES, WHY, bounds_c, dew_points_c, groups_of, own_c, standing_c
from policies.cooling_setpoint.loop_model import loop_power_w
from policies.cooling_setpoint.loop_state import (
    COLUMNS,
    balance_of,
    begin_experiment,
    learn_leakage,
    observe,
    teach,
)
from policies.cooling_setpoint.margins import CONTROL, Ceilings, ceilings
from policies.cooling_setpoint.obstacles import Obstacle, obstacles_of
from policies.cooling_setpoint.plan import STEP_K, ahead_of
from policies.cooling_setpoint.sections import LOOK_S, CduSection, LoopCdus, section_of, turn_of
from twin.catalogue import F64, I32, NS, ContractError
from twin.contracts import (
    PAGE,
    Columns,
    ExplainRequest,
    Explanation,
    Memory,
    Proposal,
    Topic,
    View,
    finite,
    given_away,
)
from twin.telemetry import ColumnSpec

GUARD_K = 0.15  # of a set point below its ceiling, so that jitter of the ceiling does not move it
OWN_COLUMNS = (
    *("want_c", "base_c", "set_c", "stood_s", "code", "unknown_s", "wrong_ns", "seen_ns"),
    *("expected_w", "doubt_w", "expected_j", "doubt_j", "saved_j", "from_c"),
    *("decided_ns", "moved_ns", "begun_ns"),
    *pressure.CDU_COLUMNS,
    *pressure.LOOP_COLUMNS,
)  # that `propose` itself writes
REQUESTED, SAME_K = "cdu.supply_temp_request_c", 0.05
LEFT_K = 1.0  # by which a set point that was left is warmer than the safe value; source: estimate
# That a set point stands, within so much, before it counts as the BMS's own; source: estimate
STOOD_S, STILL_K = 120.0, 0.15
CALM_S = 1800.0  # after something was wrong: heat held down by caps looks like calm; source: estimate
UNKNOWN_S = 900.0  # that a set point stays where something is unknown; source: estimate
DOUBT_SIGMAS = 4.0  # by which a loop's meter contradicts what is expected of it; source: estimate


@dataclass(frozen=True, slots=True)
class GroupLook:
    """Findings of a look at a group; `ceiling_c` is inf if unknown."""

    group: LoopCdus
    ceiling_c: float
    obstacle: Obstacle
    low_c: float
    safe_c: float
    dt_s: float  # since the look before


class CoolingSetpoint:
    """Proposes supply set points of CDUs as an upper bound and wanted value."""

    name: ClassVar[str] = "cooling_setpoint"
    controls: ClassVar[tuple[str, ...]] = (CONTROL, pressure.PRESSURE)
    rank: ClassVar[int] = 70
    period_s: ClassVar[float] = 1.0  # a part of the site at a time, see `sections`
    urgent: ClassVar[bool] = False
    memory: ClassVar[Columns | None] = Columns(
        gpu=margins.GPU_COLUMNS,
        rack=margins.RACK_COLUMNS,
        cdu={
            "want_c": ColumnSpec("f8", np.nan, of_place=True),
            "base_c": ColumnSpec("f8", np.nan, of_place=True),  # the BMS's own set point
            "set_c": ColumnSpec("f8", np.nan, of_place=True),  # in force at the last look, and for how long
            "stood_s": ColumnSpec("f8", of_place=True),
            "code": ColumnSpec("i1", of_place=True),
            "unknown_s": ColumnSpec("f8", of_place=True),
            "wrong_ns": ColumnSpec("i8", of_place=True),  # when something was wrong last
            "seen_ns": ColumnSpec("i8", of_place=True),  # the last look
            **margins.CDU_COLUMNS,
            **pressure.CDU_COLUMNS,
        },
        loop=COLUMNS
        | pressure.LOOP_COLUMNS
        | {
            name: ColumnSpec("f8")
            for name in ("expected_w", "doubt_w", "expected_j", "doubt_j", "saved_j", "from_c")
        }
        | {name: ColumnSpec("i8") for name in ("decided_ns", "moved_ns", "begun_ns")},
        scalars={"looked_ns": "i8"},
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def __init__(
        self,
        probability: float = 1e-3,
        horizon_s: float = 3600.0,
        move_every_s: float = 600.0,
        step_k: float = 1.0,
        learn_s: float = 1800.0,
        least_saving_pu: float = 3e-4,
    ) -> None:
        """`probability`: that a GPU passes its guard within `horizon_s`. `step_k`: the most that a move goes
        beyond the supplies that were seen. `learn_s`: time that a loop is watched before its first move.
        `least_saving_pu`: of a loop's nominal heat, below which nothing moves.
        """
        bounds = {
            "probability": (probability, 1e-9, 0.1),
            "horizon_s": (horizon_s, 60.0, 86_400.0),
            "move_every_s": (move_every_s, 60.0, 86_400.0),
            "step_k": (step_k, 0.25, 5.0),
            "learn_s": (learn_s, 0.0, 864_000.0),
            "least_saving_pu": (least_saving_pu, 0.0, 0.1),
        }
        for name, (value, low, high) in bounds.items():
            if not isinstance(value, int | float) or not low <= value <= high:
                raise ContractError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")
        self.probability, self.horizon_s, self.move_every_s = probability, horizon_s, move_every_s
        self.step_k, self.learn_s, self.least_saving_pu = step_k, learn_s, least_saving_pu

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """The set points that stand. A part of the CDUs is looked at, and at most one loop is decided anew,
        lest a tick be long."""
        site, now_ns = view.site, view.now_ns
        if site.sizes["cdu"] == 0 or site.sizes["gpu"] == 0:
            return [], memory
        then_ns = int(memory["looked_ns"]) or now_ns - round(self.period_s * NS)
        groups = turn_of(groups_of(site), then_ns, now_ns)
        out = dict(memory) | {"looked_ns": np.array(now_ns, np.int64)}
        if not groups:
            return _proposals(view, out), out
        section = section_of(site, groups)
        out |= {name: memory[name].copy() for name in OWN_COLUMNS}
        seen_ns, dt_s = memory["seen_ns"], np.full(site.sizes["cdu"], LOOK_S)
        known = seen_ns > 0
        dt_s[known] = np.clip((now_ns - seen_ns[known]) / NS, 0.0, 600.0)
        out["seen_ns"][section.cdus] = now_ns
        out |= margins.learn(view, memory, section, dt_s[section.cdus])
        out |= observe(view, memory, groups, dt_s)
        self._note_base(view, out, section.cdus, dt_s[section.cdus])
        pressure.note_own(view, out)
        due = self._due(view, out, groups)
        for number, look in enumerate(self._looks(view, out, groups, section, dt_s)):
            hot = look.ceiling_c < standing_c(out, look.group)
            self._guard(view, out, look)
            pressure.guard(view, out, look.group, Obstacle("back") if hot else look.obstacle, look.dt_s)
            if number == due:
                self._decide(view, out, look)
        return _proposals(view, out), given_away(out)

    def _looks(
        self, view: View, out: Memory, groups: Sequence[LoopCdus], section: CduSection, dt_s: F64
    ) -> list[GroupLook]:
        found = ceilings(view, out, section, self.probability, self.horizon_s)
        dew_c, looks = dew_points_c(view), list[GroupLook]()
        for group, obstacle in zip(groups, obstacles_of(view, groups, found), strict=True):
            known = found.supply_c[group.cdus][np.isfinite(found.supply_c[group.cdus])]
            ceiling_c = float(known.min(initial=np.inf))
            low_c, safe_c = bounds_c(view, group, dew_c)
            looks.append(GroupLook(group, ceiling_c, obstacle, low_c, safe_c, float(dt_s[group.cdus[0]])))
        return looks

    def ceilings(self, view: View, memory: Mapping[str, np.ndarray]) -> Ceilings:
        """Return the present warmest supplies of all CDUs."""
        section = section_of(view.site, groups_of(view.site))
        return ceilings(view, memory, section, self.probability, self.horizon_s)

    @staticmethod
    def _note_base(view: View, out: Memory, cdus: I32, dt_s: F64) -> None:
        """Note the BMS's own set points: those in force without a request. Changes `out`.

        A BMS holds what a daemon asked for last for as long as it receives one, and moves back from there
        step by step. So its own is neither what was requested nor what moved between two looks, except where
        nothing else is known of it and it is no warmer than the safe value.
        """
        now_c, base_c, before_c = own_c(view)[cdus], out["base_c"][cdus], out["set_c"][cdus]
        stood_s = np.where(np.abs(now_c - before_c) <= STILL_K, out["stood_s"][cdus] + dt_s, 0.0)
        known, asked = np.isfinite(base_c), np.abs(now_c - view.value(REQUESTED)[cdus]) <= SAME_K
        safe_c = view.envelope(CONTROL).safe[cdus]
        left = np.where(known, asked | (stood_s < STOOD_S), asked & (now_c > safe_c + LEFT_K))
        free = np.isnan(out["want_c"][cdus]) & np.isfinite(now_c)
        own = np.where(left, np.where(known, base_c, safe_c), now_c)
        out["base_c"][cdus] = np.where(free, own, base_c)
        out["set_c"][cdus], out["stood_s"][cdus] = np.where(np.isfinite(now_c), now_c, before_c), stood_s

    def _due(self, view: View, out: Memory, groups: Sequence[LoopCdus]) -> int:
        """Return the place of the group whose decision is due for the longest; -1 for none."""
        late = [
            (int(out["decided_ns"][g.loop]), number)
            for number, g in enumerate(groups)
            if g.loop >= 0 and view.now_ns - int(out["decided_ns"][g.loop]) >= round(self.move_every_s * NS)
        ]
        return min(late)[1] if late else -1

    def _guard(self, view: View, out: Memory, look: GroupLook) -> None:
        """Lower set points at once for heat, a fault or lasting missing data. Changes `out`."""
        group, low_c, ceiling_c = look.group, look.low_c, look.ceiling_c
        cdus, envelope = group.cdus, view.envelope(CONTROL)
        if not np.isfinite(envelope.low[cdus]).all():
            out["want_c"][cdus] = np.nan
            return
        held = bool(np.isfinite(out["want_c"][cdus]).any())
        # Of CDUs that no loop is known of, and that nothing is asked of, no obstacle matters
        kind = look.obstacle.kind if held or group.loop >= 0 else ""
        stands_c = standing_c(out, group)
        out["unknown_s"][cdus] = np.where(kind == "hold", out["unknown_s"][cdus] + look.dt_s, 0.0)
        if kind == "back":
            out["wrong_ns"][cdus] = view.now_ns
        want_c, why = stands_c, CODES[int(out["code"][cdus[0]])]
        if held:
            if kind == "hold" and float(out["unknown_s"][cdus[0]]) >= UNKNOWN_S:
                # Nothing to go by any more: the arbiter gives back what was found
                stands_c = want_c = float(out["base_c"][cdus].min())
                out["want_c"][cdus], held = np.nan, False
            elif kind == "back":
                want_c, why = min(stands_c, look.safe_c), "back"
            elif kind == "hold":
                why = "hold"
            elif why in ("back", "hold"):
                why = "best"
            if held and want_c < low_c:
                want_c, why = low_c, "dew"
        colder_c = max(ceiling_c - GUARD_K, low_c)
        calm = view.now_ns - int(out["wrong_ns"][cdus].max()) >= round(CALM_S * NS)
        if ceiling_c < want_c < np.inf and colder_c < want_c:  # where nothing shows how warm it is now, no
            want_c, why, held = colder_c, "heat", True
            if group.loop < 0:
                out["wrong_ns"][cdus] = view.now_ns
        elif held and group.loop < 0 and calm:  # nothing is decided of it: it was only lowered for heat
            out["want_c"][cdus], held = np.nan, False
        if held:
            out["want_c"][cdus] = np.clip(want_c, envelope.low[cdus].max(), envelope.high[cdus].min())
            out["code"][cdus] = CODES.index(why)

    def _decide(self, view: View, out: Memory, look: GroupLook) -> None:
        """Settle the account of a loop since its last decision, and move its set points where that is worth
        it. Changes `out`."""
        group, now_ns = look.group, view.now_ns
        i, cdus = group.loop, group.cdus
        since_ns = int(out["decided_ns"][i])
        learn_leakage(out, i, (now_ns - since_ns) / NS if since_ns else 0.0)
        teach(view, out, group, now_ns)
        balance = balance_of(view, out, group)
        self._settle(out, group, balance, now_ns)
        pumps = pressure.pumps_of(view, out, group, balance) if balance is not None else None
        pressure.settle(out, group, pumps, min((now_ns - since_ns) / NS, 7200.0) if since_ns else 0.0)
        out["decided_ns"][i] = now_ns
        if balance is None or not np.isfinite(out["base_c"][cdus]).all():
            return
        balance = ahead_of(view, balance, group, 0.5 * self.move_every_s)
        stands_c = standing_c(out, group)
        best_c = stands_c
        calm = now_ns - int(out["wrong_ns"][cdus].max()) >= round(CALM_S * NS)
        # With slow pumps the ceiling is not known where the flow is not
        blind = pressure.is_lowered(out, group) and bool(pressure.unheld(view, out, group).kind)
        if calm and not blind and not look.obstacle.kind:
            best_c = self._best_c(view, out, look, balance, stands_c)
        if best_c != stands_c:
            begin_experiment(out, i)
            out["from_c"][i], out["moved_ns"][i] = stands_c, now_ns
            out["want_c"][cdus], out["code"][cdus] = best_c, CODES.index("best")
        elif pumps is not None and calm and not look.obstacle.kind:
            self._press(view, out, look, pumps)
        base_c = float(out["base_c"][cdus].min())
        if np.isfinite(out["want_c"][cdus]).all():
            want_c = float(out["want_c"][cdus].min())
            out["expected_w"][i] = balance.power_w(base_c) - balance.power_w(want_c)
            out["doubt_w"][i] = balance.sigma_w(base_c, want_c)

    def _press(self, view: View, out: Memory, look: GroupLook, pumps: pressure.PumpBalance) -> None:
        """Move the pressure of a loop's pumps if it pays. Changes `out`.

        Warm water comes first: slower pumps leave it the room that it would take. Where a limit binds that no
        flow moves, as that of the supply itself, they take nothing from it.
        """
        group, envelope = look.group, view.envelope(CONTROL)
        if out["watched_s"][group.loop] < self.learn_s or not pressure.is_calm(out, group, view.now_ns):
            return
        stands_c = standing_c(out, group)
        high_c = min(float(envelope.high[group.cdus].min()), stands_c + 2.0 * self.step_k)
        free_c = pumps.balance.best_c(stands_c, high_c, STEP_K) if high_c > stands_c else stands_c
        least_w = self.least_saving_pu * pumps.balance.at.heat_w
        now_pu = pumps.share_pu
        to_pu = pressure.next_pu(pumps, least_w, pressure.least_pu(view, out, group))
        ceiling_c = partial(self._ceiling_c, view, out, group, now_pu)
        faster_pu = min(now_pu / pressure.STEP_PU, 1.0)
        if look.ceiling_c < free_c + GUARD_K and ceiling_c(faster_pu) > look.ceiling_c + GUARD_K:
            to_pu = faster_pu
        elif to_pu < now_pu:
            room = ceiling_c(to_pu) >= free_c + 2.0 * GUARD_K
            room = room or ceiling_c(to_pu * pressure.STEP_PU) >= look.ceiling_c
            if not room or not pressure.has_flow(view, group, float(np.sqrt(to_pu / now_pu))):
                to_pu = now_pu
        moves = abs(to_pu - pumps.share_pu) >= pressure.SAME_PU
        if moves and not pressure.is_asked(out, group, to_pu):
            pressure.move(view, out, group, pumps, to_pu)
        else:
            pressure.expect(out, group, pumps)

    def _ceiling_c(self, view: View, out: Memory, group: LoopCdus, now_pu: float, to_pu: float) -> float:
        """Return the warmest supply of a group with its pumps at another share of their own pressure."""
        slower = float(np.sqrt(to_pu / now_pu))
        section = section_of(view.site, [group])
        found = ceilings(view, out, section, self.probability, self.horizon_s, slower)
        return float(found.supply_c[group.cdus].min())

    def _best_c(
        self, view: View, out: Memory, look: GroupLook, balance: PowerBalance, stands_c: float
    ) -> float:
        """Return the new set point; the present one if no better one is certain enough."""
        i, envelope, cdus = look.group.loop, view.envelope(CONTROL), look.group.cdus
        if out["watched_s"][i] < self.learn_s:
            return stands_c
        high_c = min(look.ceiling_c - GUARD_K, float(envelope.high[cdus].min()))
        # The observed state is as far away as the BMS follows by the next decision: heat that is over costs
        # little
        reach_k = self.move_every_s * float(envelope.slew_per_s[cdus].min())
        high_c = min(high_c, balance.high_c + self.step_k, stands_c + reach_k)
        low_c = max(look.low_c, balance.low_c - self.step_k, stands_c - reach_k)
        if not low_c < high_c:
            return stands_c
        best_c = balance.best_c(low_c, high_c, STEP_K)
        if abs(best_c - stands_c) < STEP_K:
            return stands_c
        if best_c > stands_c and abs(out["off_sigmas"][i]) > DOUBT_SIGMAS:
            return stands_c  # its meter, or the weather, contradicts what is known of the loop
        saving_w = balance.power_w(stands_c) - balance.power_w(best_c)
        least_w = max(balance.sigma_w(stands_c, best_c), self.least_saving_pu * balance.at.heat_w)
        return best_c if saving_w > least_w else stands_c

    @staticmethod
    def _settle(out: Memory, group: LoopCdus, balance: PowerBalance | None, now_ns: int) -> None:
        """Count the expected saving since the last decision, and the metered one. Changes `out`."""
        i, since_ns = group.loop, int(out["decided_ns"][group.loop])
        power_w, base_c = float(out["loop_power_w"][i]), float(out["base_c"][group.cdus].min())
        if balance is None or not since_ns or not np.isfinite(out["want_c"][group.cdus]).all():
            return
        gap_s = min((now_ns - since_ns) / NS, 7200.0)
        if not out["begun_ns"][i]:
            out["begun_ns"][i] = now_ns
        out["expected_j"][i] += gap_s * out["expected_w"][i]
        out["doubt_j"][i] += gap_s * out["doubt_w"][i]
        if np.isnan(power_w):  # no meter: as the model has it
            power_w = loop_power_w(balance.plate, balance.factors, balance.at)
        was_w = loop_power_w(balance.plate, balance.factors, balance.point(base_c))
        out["saved_j"][i] += gap_s * (was_w + balance.warmth_w(base_c) - power_w)

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """Return per loop: set points, binding limits, expected and measured savings, and reasons."""
        return explanation(view, memory, request, self.ceilings(view, memory), self.probability)

    def accounts(self, view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
        """Return a record for every moved loop, and for each at the first decision of an hour."""
        out: list[dict[str, Any]] = []
        for group in groups_of(view.site):
            i = group.loop
            if i < 0 or before["decided_ns"][i] == after["decided_ns"][i]:
                continue
            asked = [np.isfinite(after[name][group.cdus]).all() for name in ("want_c", "want_pa")]
            if not any(asked):
                continue
            moved = any(bool(before[name][i] != after[name][i]) for name in ("moved_ns", "pump_moved_ns"))
            hours = [int(m["decided_ns"][i]) // (3600 * NS) for m in (before, after)]
            if moved or hours[0] != hours[1]:
                out.append(account_of(view, after, group, moved))
        return out[:200]


def account_of(view: View, memory: Mapping[str, np.ndarray], group: LoopCdus, moved: bool) -> dict[str, Any]:
    """Return the account of a loop: its expected saving, and the expected and measured savings so far."""
    i = group.loop
    return {
        "loop": view.site.name("loop", i),
        "moved": moved,
        "from_c": round(float(memory["from_c"][i]), 2),
        "to_c": finite(memory["want_c"][group.cdus].min(), 2),
        "own_c": round(float(memory["base_c"][group.cdus].min()), 2),
        "expected_w": round(float(memory["expected_w"][i]), 1),
        "doubt_w": round(float(memory["doubt_w"][i]), 1),
        "expected_kwh": round(float(memory["expected_j"][i]) / 3.6e6, 3),
        "saved_kwh": round(float(memory["saved_j"][i]) / 3.6e6, 3),
        "pressure_pa": finite(memory["want_pa"][group.cdus].min(), 0),
        "own_pressure_pa": finite(memory["own_pa"][group.cdus].min(), 0),
        "pump_expected_w": round(float(memory["pump_expected_w"][i]), 1),
        "pump_doubt_w": round(float(memory["pump_doubt_w"][i]), 1),
        "pump_expected_kwh": round(float(memory["pump_expected_j"][i]) / 3.6e6, 3),
        "pump_saved_kwh": round(float(memory["pump_saved_j"][i]) / 3.6e6, 3),
        "measured": bool(np.isfinite(memory["loop_power_w"][i])),
    }


def _proposals(view: View, memory: Mapping[str, np.ndarray]) -> list[Proposal]:
    """Return a proposal for each reason."""
    envelope, out = view.envelope(CONTROL), list[Proposal]()
    wanted = np.isfinite(memory["want_c"]) & np.isfinite(envelope.low)
    for code, name in enumerate(CODES):
        index = np.flatnonzero(wanted & (memory["code"] == code)).astype(np.int32)
        if len(index):
            want_c = np.clip(memory["want_c"][index], envelope.low[index], envelope.high[index])
            out.append(Proposal(CONTROL, index, envelope.low[index].copy(), want_c, want_c.copy(), WHY[name]))
    return out + pressure.pressures(view, memory)
