"""Node rules: the rules that judge nodes by themselves; the verdicts pass on those of their GPUs, supplies
and DPUs.
"""

from __future__ import annotations

import numpy as np

from twin.contracts import DEGRADED, FAILED, HEALTHY, UNKNOWN, WATCH
from twin.health.rules import DIAGNOSIS, NOTHING, Rule, RuleContext, RuleMatches
from twin.health.rules_parts import DPU_VITAL
from twin.health.rules_shared import (
    CATALOG,
    FACTS,
    REBOOTS,
    SILENT,
    by_diagnosis,
    gaps,
    open_codes,
    repeated_codes,
    state_is,
    wearing,
)

LEMONS = "Meta RSC, arXiv 2410.21680: seven signals over 28 days"
MAX_LEMONS = 64  # of which the words are kept
# Recurrent trouble is seldom harmless: most nodes that have it fail within days. source: estimate; in
# simulated fleets nine of ten do
RECURS = "recurs"
DPU_GONE_S = 7 * 86_400.0  # a DPU that is silent for longer is taken out. source: estimate
SERVICE = ("", "cordoned", "being drained", "drained", "marked to be replaced")


def _hot_cpu(context: RuleContext) -> RuleMatches:
    """Find nodes whose CPU is above its guard, if a profile has one. `a`: degC; `b`: K left to the limit."""
    index = context.beyond("node.cpu_temp_c")
    if not len(index):
        return NOTHING
    value = context.value("node.cpu_temp_c")[index]
    return RuleMatches(index, value, context.site.limits["node.cpu_temp_c"].max[index] - value)


def _warm_air(context: RuleContext) -> RuleMatches:
    """Find nodes whose inlet is above its guard. `a`: degC."""
    index = context.beyond("node.inlet_temp_c")
    return RuleMatches(index, context.value("node.inlet_temp_c")[index]) if len(index) else NOTHING


def _silent_dpu(context: RuleContext) -> RuleMatches:
    """Find nodes with a DPU that reported within a week and is silent now."""
    notes: dict[int, str] = {}
    for side in "12":
        keys = [key for each in DPU_VITAL if context.known(key := each.replace("{side}", side))]
        if not keys:
            continue
        reported = np.any([context.now.age_s(key) < DPU_GONE_S for key in keys], axis=0)
        silent = np.flatnonzero(reported).astype(np.int32)
        for key in keys:
            silent = silent[~context.current(key, silent)]
        for node in silent.tolist():
            notes[node] = f"{notes[node]}, DPU {side}" if node in notes else f"DPU {side}"
    return RuleMatches(np.array(sorted(notes), np.int32), notes=notes) if notes else NOTHING


def _restarted(context: RuleContext) -> RuleMatches:
    """Find nodes that restarted twice or more in about a day. `a`: restarts."""
    index = context.rates.above("node.reboot_count", REBOOTS, recent=False)
    if not len(index):
        return NOTHING
    return RuleMatches(index, np.round(context.rates.counted("node.reboot_count", recent=False)[index]))


def _lemons(context: RuleContext) -> RuleMatches:
    """Find nodes that fail more often than others."""
    index = np.flatnonzero(context.lemons.is_lemon()).astype(np.int32)
    notes = {i: "; ".join(context.lemons.evidence(i)[:3]) for i in index[:MAX_LEMONS].tolist()}
    return RuleMatches(index, notes=notes)


def _recurring(context: RuleContext) -> RuleMatches:
    """Find nodes on which a harmless event keeps recurring. `a`: evidence, nats."""
    recurring = context.recurring
    if recurring is None or not recurring.standing.any():
        return NOTHING
    index = np.flatnonzero(recurring.standing).astype(np.int32)
    return RuleMatches(index, recurring.score()[index], say=lambda k: recurring.text(int(index[k])))


def _taken_out(context: RuleContext) -> RuleMatches:
    """Find nodes that others took out of service. `a`: the state."""
    key = "node.service_level_state"
    if not context.known(key):
        return NOTHING
    value = context.value(key)
    with np.errstate(invalid="ignore"):
        index = context.those(key, value >= 1.0)
    said = value[index].astype(np.int32)
    notes = {i: SERVICE[min(s, len(SERVICE) - 1)] for i, s in zip(index.tolist(), said.tolist(), strict=True)}
    return RuleMatches(index, said, notes=notes)


RULES: tuple[Rule, ...] = (
    Rule("code", "node", WATCH, "watch", 0.8, "{note}, not cured yet", CATALOG + ", and our agent",
         open_codes("node"), clear_s=0.0),
    Rule("code_repeated", "node", DEGRADED, "contact_support", 0.8,
         "{note} occurred {b:.0f} times within 24 h", FACTS, repeated_codes("node"), clear_s=3600.0),
    Rule("node_down", "node", FAILED, "reboot_node", 0.97, "it is off: {note}", DIAGNOSIS,
         by_diagnosis("node_down", "node"), ("node.power_on_state",)),
    Rule("node_off", "node", UNKNOWN, "none", 0.5, "it is switched off", "the device",
         state_is("node.power_on_state", 0), ("node.power_on_state",)),
    Rule("node_silent", "node", DEGRADED, "run_diagnostics", 0.6, "it no longer reports: {note}", DIAGNOSIS,
         by_diagnosis("node_silent", "node", 0.6)),
    Rule("leak", "node", FAILED, "drain", 0.9, "its leak detector is wet", "the device",
         state_is("node.leak_state", 1), ("node.leak_state",)),
    Rule("leak_told", "node", FAILED, "drain", 0.95, "it leaks: {note}", DIAGNOSIS,
         by_diagnosis("leak", "node"), faults=("leak",)),
    Rule("tray_blocked", "node", DEGRADED, "check_facility", 0.8, "its coolant is blocked: {note}", DIAGNOSIS,
         by_diagnosis("tray_blocked", "node", 0.8)),
    Rule("cpu_temp", "node", WATCH, "run_diagnostics", 0.6, "CPU at {a:.0f} °C, {b:.0f} K below its limit",
         "limits of the profile", _hot_cpu, ("node.cpu_temp_c",), after_s=30.0),
    Rule("inlet_temp", "node", HEALTHY, "check_facility", 0.05, "its inlet air is at {a:.0f} °C",
         "limits of the profile", _warm_air, ("node.inlet_temp_c",), after_s=30.0),
    Rule("dpu_silent", "node", UNKNOWN, "none", 0.5, "a DPU of it no longer reports: {note}",
         "what is reported",
         _silent_dpu, after_s=30.0, clear_s=0.0),
    Rule("agent_offline", "node", WATCH, "watch", 0.5, "its agent is offline", "the agent's last will",
         state_is("node.agent_state", 1), ("node.agent_state",)),
    Rule("reboots", "node", WATCH, "run_diagnostics", 0.7, "it restarted {a:.0f} times in about a day",
         FACTS + ": two restarts without a cure ask for an inspection", _restarted, ("node.reboot_count",)),
    Rule("lemon", "node", WATCH, "run_diagnostics", 0.85, "it fails more often than others: {note}", LEMONS,
         _lemons, clear_s=0.0),
    Rule(RECURS, "node", DEGRADED, "drain", 0.9, "trouble recurs: {note}",
         "a sequential test (Wald 1945) against what is usual there", _recurring,
         clear_s=0.0),
    Rule("service_level", "node", HEALTHY, "none", 0.0, "the scheduler has it {note}: this is not a fault",
         "the scheduler", _taken_out, ("node.service_level_state",), clear_s=0.0),
    Rule("telemetry_gap", "node", WATCH, "watch", 0.6, "it was silent for {a:.0f} % of the last hour",
         "arXiv 2603.28781: gaps come before failures", gaps("node"), clear_s=600.0, faults=SILENT),
    *(Rule(kind, "node", WATCH, "watch", 0.9, "one of its sensors cannot be trusted: {note}", DIAGNOSIS,
           by_diagnosis(kind, "node")) for kind in ("sensor_frozen", "sensor_biased", "sensor_spiking")),
    Rule("wear", "node", WATCH, "watch", 0.6, "{note}", "trend of a learned parameter", wearing("node"),
         clear_s=3600.0),
)  # fmt: skip

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("power", ("node.power_w", "node.psu1_power_w", "node.psu2_power_w")),
    ("state of its supply", ("node.power_on_state",)),
    ("air or water", ("node.inlet_temp_c", "node.water_inlet_temp_c", "node.outlet_temp_c")),
    ("temperature of its CPUs", ("node.cpu_temp_c",)),
    ("leak detector", ("node.leak_state",)),
    ("agent", ("node.agent_state",)),
    ("restarts", ("node.reboot_count",)),
    ("service level", ("node.service_level_state",)),
)
VITAL = ("node.power_w", "node.psu1_power_w", "node.psu2_power_w", "node.cpu_temp_c", "node.inlet_temp_c",
         "node.water_inlet_temp_c", "node.outlet_temp_c", "node.power_on_state")  # fmt: skip
