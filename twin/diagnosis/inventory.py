"""Inventory of CDUs: detects coolant that is missing from a circuit, by the CDU's own instruments.

Two of them can. The pressure at rest falls as coolant leaves: it counts where supply and return have fallen
alike below what is usual at the coolant's temperature, as coolant that cools shrinks, a pump that changes its
speed moves them apart, and one meter alone may lie. And the fill pump, which tops up rarely, begins again
within a day, or does not end. Nothing is concluded from an instrument that is not read.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, NS, Bool
from twin.diagnosis.cause import Cause
from twin.diagnosis.device_reports import good, reported
from twin.diagnosis.topology import Topology
from twin.telemetry import EntityState, State, column

FILLING, SUPPLY, RETURN = "cdu.fill_pump_state", "cdu.supply_pressure_pa", "cdu.return_pressure_pa"
SUPPLY_TEMP, RETURN_TEMP = "cdu.supply_temp_c", "cdu.return_temp_c"
FALL_PU = 0.10  # of the usual pressure at rest, beyond what the temperature explains; source: estimate
# Of that pressure, the most that it falls per kelvin: coolant shrinks by 4e-4/K (water at 40 degC,
# IAPWS-IF97), and the gas of a vessel, 0.11 l or more per litre of coolant, takes its place; source: estimate
SHRINKS_PU_PER_K = 0.006
USUAL_S = 6 * 3600.0  # in which what is usual follows, as closed circuits lose little; source: estimate
# A top-up is rare (weeks) and short (minutes): a pump that begins again within a day, or runs for longer, has
# more to replace than usual losses. Starts closer together are one, as switches chatter; source: estimate
DAY_S, TOP_UP_S, APART_S = 86_400.0, 1800.0, 300.0
HOLD_S, CLEAR_S = 10.0, 900.0
MOST_NAMED = 3  # racks whose detectors are silent


class Inventory(EntityState):
    """Usual pressures, and when the fill pump ran."""

    supply_pa: F64 = column("cdu", "f8", np.nan)  # as usual
    return_pa: F64 = column("cdu", "f8", np.nan)
    coolant_c: F64 = column("cdu", "f8", np.nan)  # mean of supply and return, as usual
    began_ns: I64 = column("cdu", "i8")  # of the run of the fill pump that goes on, or the last one; 0 = none
    ended_ns: I64 = column("cdu", "i8")  # of the run before that one; 0 = none
    ran_ns: I64 = column("cdu", "i8")  # when it last ran
    first_ns: I64 = column("cdu", "i8")  # since when coolant is missing; 0 = it is not, or nobody knows
    last_ns: I64 = column("cdu", "i8")  # when an instrument said so last

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.sizes)
        self.topology = topology

    @property
    def missing_since_ns(self) -> I64:
        """Return the instant since which coolant is missing in the circuit of each CDU [n]; 0: none
        missing, or unknown."""
        sure = self.last_ns - self.first_ns >= round(HOLD_S * NS)
        return np.where(sure, self.first_ns, 0)

    def causes(
        self, state: State, in_maintenance: dict[str, Bool], dt_s: float, others: list[Cause]
    ) -> list[Cause]:
        """Coolant that is missing now, but where one of the `others` is a leak of the circuit. A circuit on
        which people work is bled and filled: it says nothing."""
        n = self.topology.sizes["cdu"]
        if not n or not (reported(state, FILLING) or reported(state, RETURN)):
            return []
        worked = in_maintenance.get("cdu", np.zeros(n, np.bool_)).copy()
        if (racks := in_maintenance.get("rack")) is not None:
            cdu_of = self.topology.site.cdu_of_rack[racks]
            worked[cdu_of[cdu_of >= 0]] = True
        cooled_k = self._cooled_k(state, worked, dt_s)
        fallen_pa = self._fallen_pa(state, worked, dt_s)
        again = self._refilled(state, worked)
        with np.errstate(invalid="ignore"):
            low = fallen_pa >= (FALL_PU + SHRINKS_PU_PER_K * np.maximum(cooled_k, 0.0)) * self.return_pa
        low &= ~worked
        now_ns, missing = state.now_ns, low | again
        lasts = missing | ((now_ns - self.last_ns < round(CLEAR_S * NS)) & ~worked)
        self.first_ns = np.where(lasts, np.where(self.first_ns > 0, self.first_ns, now_ns), 0)
        self.last_ns = np.where(missing, now_ns, np.where(lasts, self.last_ns, 0))
        known = {c.entity if c.table == "cdu" else int(self.topology.above(c.table, "cdu")[c.entity])
                 for c in others if c.kind == "leak" and c.table != "loop"}  # fmt: skip
        return [
            self._cause(state, cdu, float(fallen_pa[cdu]) if low[cdu] else 0.0, bool(again[cdu]))
            for cdu in np.flatnonzero(missing & (self.missing_since_ns > 0)).tolist()
            if cdu not in known
        ]

    def _cooled_k(self, state: State, worked: Bool, dt_s: float) -> F64:
        """Return the kelvins by which the coolant is colder than usual [n_cdu]; 0 without readings."""
        coolant_c = 0.5 * (good(state, SUPPLY_TEMP) + good(state, RETURN_TEMP))
        return np.nan_to_num(self._below_usual("coolant_c", coolant_c, worked, dt_s))

    def _fallen_pa(self, state: State, worked: Bool, dt_s: float) -> F64:
        """Return the common fall of supply and return, Pa [n_cdu]; NaN if either is unknown."""
        return np.minimum(
            self._below_usual("supply_pa", good(state, SUPPLY), worked, dt_s),
            self._below_usual("return_pa", good(state, RETURN), worked, dt_s),
        )

    def _below_usual(self, name: str, now: F64, worked: Bool, dt_s: float) -> F64:
        """Return the usual value minus the present one [n_cdu]; NaN if either is unknown. Updates the
        usual value."""
        usual = getattr(self, name)
        usual = np.where((np.isnan(usual) | worked) & np.isfinite(now), now, usual)
        gap: F64 = usual - now
        setattr(self, name, usual - np.nan_to_num(gap) * min(dt_s / USUAL_S, 1.0))
        return gap

    def _refilled(self, state: State, worked: Bool) -> Bool:
        """Return the fill pumps [n_cdu] that restarted within a day, or do not stop."""
        now_ns = state.now_ns
        runs = (good(state, FILLING) == 1.0) & ~worked
        self.began_ns[worked], self.ended_ns[worked], self.ran_ns[worked] = 0, 0, 0
        idle_ns = now_ns - self.ran_ns
        new = runs & ((self.ran_ns == 0) | (idle_ns > round(APART_S * NS)))
        self.ended_ns = np.where(new, self.ran_ns, self.ended_ns)
        self.began_ns = np.where(new, now_ns, self.began_ns)
        self.ran_ns = np.where(runs, now_ns, self.ran_ns)
        soon = (self.ended_ns > 0) & (self.began_ns - self.ended_ns < round(DAY_S * NS))
        again: Bool = runs & (soon | (now_ns - self.began_ns > round(TOP_UP_S * NS)))
        return again

    def _cause(self, state: State, cdu: int, fallen_pa: float, again: bool) -> Cause:
        site = self.topology.site
        evidence = []
        if fallen_pa > 0.0:
            usual_kpa, fallen_kpa = float(self.return_pa[cdu]) / 1e3, fallen_pa / 1e3
            evidence.append(f"pressures of supply and return fell by {fallen_kpa:.0f} of {usual_kpa:.0f} kPa")
        if again:
            ran_s = (state.now_ns - int(self.began_ns[cdu])) / NS
            evidence.append(f"its fill pump runs for {ran_s:.0f} s, longer than a usual top-up")
        count = max(len(evidence), 1)  # what reports no more, or again, makes it no graver
        blind = [site.name("rack", r) for r in self._unwatched(state, cdu)]
        if blind:
            more = f" and {len(blind) - MOST_NAMED} more" if len(blind) > MOST_NAMED else ""
            evidence.append(f"no detector reports from {', '.join(blind[:MOST_NAMED])}{more}")
        sure = 0.99 if fallen_pa > 0.0 and again else 0.9
        return Cause("coolant_loss", "cdu", cdu, "", sure, tuple(evidence), count, 0.0, CLEAR_S)

    def _unwatched(self, state: State, cdu: int) -> list[int]:
        """Return the racks of a CDU whose rope or trays do not all report: unknown is never dry."""
        site = self.topology.site
        rope = np.isfinite(good(state, "rack.leak_state"))
        deaf = ~np.isfinite(good(state, "node.leak_state"))
        missing = np.bincount(site.rack_of_node[deaf], minlength=self.topology.sizes["rack"])
        return np.flatnonzero((site.cdu_of_rack == cdu) & (~rope | (missing > 0))).tolist()
