"""Node rules: the rules that judge nodes by themselves; the verdicts pass on those of their GPUs and
supplies.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import I32
from twin.contracts import DEGRADED, FAILED, HEALTHY, UNKNOWN, WATCH
from twin.health.rules import DIAGNOSIS, NOTHING, Rule, RuleContext, RuleMatches
from twin.health.rules_shared import (
    CATALOG,
    FACTS,
    REBOOTS,
    SILENT,
    GrowthRule,
    by_diagnosis,
    gaps,
    open_codes,
    repeated_codes,
    state_is,
    wearing,
)

LEMONS = "Meta RSC, arXiv 2410.21680: seven signals over 28 days"
MAX_LEMONS = 64  # of which the words are kept
# What recurs is seldom harmless: most nodes of which it is true fail within days. source: estimate; in
# simulated fleets nine of ten do
RECURS = "recurs"
# Of a BlueField: a warning from here on, and at the other its firmware shuts it down
DPU_WARM_C, DPU_OFF_C = 105.0, 115.0
DPU_LIMITS = "NVIDIA BlueField-2 DPU User Guide, thermal thresholds"
DPU_PORT_ERRORS = 100.0  # in about ten minutes; source: estimate, as of links
DPU_SIGNALS = ("node.dpu_temp_c", "node.dpu_health_state", "node.dpu_offload_state")
DPU_GONE_S = 7 * 86_400.0  # a DPU that is silent for longer is taken out. source: estimate
SERVICE = ("", "cordoned", "being drained", "drained", "marked to be replaced")


def _hot_cpu(context: RuleContext) -> RuleMatches:
    """Nodes whose CPU is above its guard, where a profile states one. `a`: degC; `b`: K left to the limit."""
    index = context.beyond("node.cpu_temp_c")
    if not len(index):
        return NOTHING
    value = context.value("node.cpu_temp_c")[index]
    return RuleMatches(index, value, context.site.limits["node.cpu_temp_c"].max[index] - value)


def _warm_air(context: RuleContext) -> RuleMatches:
    """Nodes whose inlet is above its guard. `a`: degC."""
    index = context.beyond("node.inlet_temp_c")
    return RuleMatches(index, context.value("node.inlet_temp_c")[index]) if len(index) else NOTHING


def _hot_dpu(context: RuleContext) -> RuleMatches:
    """Nodes with a DPU beyond its warning. `a`: degC; `b`: K left until it shuts down."""
    key = "node.dpu_temp_c"
    if not context.known(key):
        return NOTHING
    value = context.value(key)
    index = context.those(key, value > DPU_WARM_C)
    return RuleMatches(index, value[index], DPU_OFF_C - value[index]) if len(index) else NOTHING


def _silent_dpu(context: RuleContext) -> RuleMatches:
    """Nodes whose DPUs told of themselves within a week and are not heard now."""
    silent: I32 | None = None
    for key in DPU_SIGNALS:
        if not context.known(key):
            continue
        if silent is None:
            told = np.zeros(context.site.sizes["node"], np.bool_)
            for each in filter(context.known, DPU_SIGNALS):
                told |= context.now.age_s(each) < DPU_GONE_S
            silent = np.flatnonzero(told).astype(np.int32)
        silent = silent[~context.current(key, silent)]
        if not len(silent):
            return NOTHING
    return NOTHING if silent is None else RuleMatches(silent)


def _restarted(context: RuleContext) -> RuleMatches:
    """Nodes that restarted twice or more in about a day. `a`: how often."""
    index = context.rates.above("node.reboot_count", REBOOTS, recent=False)
    if not len(index):
        return NOTHING
    return RuleMatches(index, np.round(context.rates.counted("node.reboot_count", recent=False)[index]))


def _lemons(context: RuleContext) -> RuleMatches:
    """Nodes that fail more than others."""
    index = np.flatnonzero(context.lemons.is_lemon()).astype(np.int32)
    notes = {i: "; ".join(context.lemons.evidence(i)[:3]) for i in index[:MAX_LEMONS].tolist()}
    return RuleMatches(index, notes=notes)


def _recurring(context: RuleContext) -> RuleMatches:
    """Nodes on which something harmless comes again and again. `a`: how much speaks for it, in nats."""
    recurring = context.recurring
    if recurring is None or not recurring.standing.any():
        return NOTHING
    index = np.flatnonzero(recurring.standing).astype(np.int32)
    return RuleMatches(index, recurring.score()[index], say=lambda k: recurring.text(int(index[k])))


def _taken_out(context: RuleContext) -> RuleMatches:
    """Nodes that others took out of service. `a`: the state."""
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
    Rule("code_repeated", "node", DEGRADED, "contact_support", 0.8, "{note} came {b:.0f} times within 24 h",
         FACTS, repeated_codes("node"), clear_s=3600.0),
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
    Rule("inlet_temp", "node", HEALTHY, "check_facility", 0.05, "its air comes in at {a:.0f} °C",
         "limits of the profile", _warm_air, ("node.inlet_temp_c",), after_s=30.0),
    Rule("dpu_failed", "node", FAILED, "contact_support", 0.9, "a DPU of it reports that it has failed",
         "the device", state_is("node.dpu_health_state", 2), ("node.dpu_health_state",)),
    Rule("dpu_degraded", "node", WATCH, "run_diagnostics", 0.7, "a DPU of it reports that it is degraded",
         "the device", state_is("node.dpu_health_state", 1), ("node.dpu_health_state",), after_s=60.0),
    Rule("dpu_offload_lost", "node", DEGRADED, "run_diagnostics", 0.8,
         "a DPU of it has lost its offload: packets pass its Arm cores, or none pass", "the device",
         state_is("node.dpu_offload_state", 1), ("node.dpu_offload_state",), after_s=30.0),
    Rule("dpu_temp", "node", DEGRADED, "check_facility", 0.5,
         "a DPU of it is at {a:.0f} °C, {b:.0f} K below where it shuts down", DPU_LIMITS, _hot_dpu,
         ("node.dpu_temp_c",), after_s=30.0),
    Rule("dpu_silent", "node", UNKNOWN, "none", 0.5, "its DPUs are not heard any more", "what is reported",
         _silent_dpu, after_s=30.0, clear_s=0.0),
    GrowthRule("dpu_port_errors", "node.dpu_port_error_count", DPU_PORT_ERRORS,
               "errors on ports of its DPUs").rule(),
    Rule("agent_offline", "node", WATCH, "watch", 0.5, "its agent is offline", "the agent's last will",
         state_is("node.agent_state", 1), ("node.agent_state",)),
    Rule("reboots", "node", WATCH, "run_diagnostics", 0.7, "it restarted {a:.0f} times in about a day",
         FACTS + ": two restarts without a cure ask for an inspection", _restarted, ("node.reboot_count",)),
    Rule("lemon", "node", WATCH, "run_diagnostics", 0.85, "it fails more than others: {note}", LEMONS,
         _lemons, clear_s=0.0),
    Rule(RECURS, "node", DEGRADED, "drain", 0.9, "trouble comes again and again: {note}",
         "a sequential test (Wald 1945) against what is usual there", _recurring,
         clear_s=0.0),
    Rule("service_level", "node", HEALTHY, "none", 0.0, "others have it {note}: no fault by itself",
         "the scheduler", _taken_out, ("node.service_level_state",), clear_s=0.0),
    Rule("telemetry_gap", "node", WATCH, "watch", 0.6, "it was not heard in {a:.0f} % of the last hour",
         "arXiv 2603.28781: gaps come before failures", gaps("node"), clear_s=600.0, faults=SILENT),
    *(Rule(kind, "node", WATCH, "watch", 0.9, "a sensor of it is not to be trusted: {note}", DIAGNOSIS,
           by_diagnosis(kind, "node")) for kind in ("sensor_frozen", "sensor_biased", "sensor_spiking")),
    Rule("wear", "node", WATCH, "watch", 0.6, "{note}", "trend of a learned parameter", wearing("node"),
         clear_s=3600.0),
)  # fmt: skip

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("power", ("node.power_w", "node.psu1_power_w", "node.psu2_power_w")),
    ("state of its supply", ("node.power_on_state",)),
    ("air or water", ("node.inlet_temp_c", "node.water_inlet_temp_c", "node.outlet_temp_c")),
    ("heat of its CPUs", ("node.cpu_temp_c",)),
    ("leak detector", ("node.leak_state",)),
    ("agent", ("node.agent_state",)),
    ("restarts", ("node.reboot_count",)),
    ("service level", ("node.service_level_state",)),
)
VITAL = ("node.power_w", "node.psu1_power_w", "node.psu2_power_w", "node.cpu_temp_c", "node.inlet_temp_c",
         "node.water_inlet_temp_c", "node.outlet_temp_c", "node.power_on_state")  # fmt: skip
