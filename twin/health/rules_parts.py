"""Part rules: the rules that judge switches, links, pumps, power supplies and DPUs.

Pumps, supplies and DPUs come in pairs: part 2 * entity + side.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twin.catalogue import F64, I32
from twin.contracts import DEGRADED, FAILED, HEALTHY, UNKNOWN, WATCH
from twin.health.rules import DIAGNOSIS, NOTHING, Rule, RuleContext, RuleMatches
from twin.health.rules_shared import (
    CATALOG,
    ESTIMATE,
    FACTS,
    GrowthRule,
    by_diagnosis,
    of_sides,
    open_codes,
    repeated_codes,
    state_is,
    wearing,
)

# In about ten minutes; source: estimate. A link that retrains has lost what was on its way each time.
FLAPS, FLAPS_GRAVE, ERRORS, SYMBOLS, RECOVERIES = 0.9, 3.0, 100.0, 100.0, 2.0
DISCARDS = 1000.0
# Of a switch's ports in about ten minutes; source: estimate. A node that restarts takes its ports down once
SWITCH_FLAPS = 8.0
# Bit error rate up to which Reed-Solomon (544, 514) corrects all, and a tenth of it. source: IEEE 802.3
# clause 91, 119; that a tenth is worth a look: estimate
BER_LIMIT, BER_WATCH = 2.4e-4, 2.4e-5
DARK_W = 1e-4  # -10 dBm a lane, below what receivers of 100 Gb/s a lane are built for. source: estimate
OPTICS = ("link.pre_fec_ber_pu",)
RUNNING_PU, STOPPED_PU = 0.2, 0.05  # of a pump's speed; as in the diagnosis
EMPTY_PU, LEAST_W = 0.03, 50.0  # share of a node's power that is none; as in the diagnosis
PUMP, PSU = ("cdu.pump1_speed_pu", "cdu.pump2_speed_pu"), ("node.psu1_power_w", "node.psu2_power_w")
# Of a BlueField: a warning from here on, and at the other its firmware shuts it down
DPU_WARM_C, DPU_OFF_C = 105.0, 115.0
DPU_LIMITS = "NVIDIA BlueField-2 DPU User Guide, thermal thresholds"
DPU_PORT_ERRORS = 100.0  # in about ten minutes; source: estimate, as of links
DPU_TEMP, DPU_HEALTH, DPU_OFFLOAD, DPU_ERRORS = (
    f"node.dpu{{side}}_{name}" for name in ("temp_c", "health_state", "offload_state", "port_error_count")
)
# Kinds of fault (`twin.diagnosis.FAULT_KINDS`) that several rules are signs of
LINK_LOST = ("link_down",)


def _flaps(context: RuleContext) -> RuleMatches:
    """Find links that flapped. `a`: flaps in about ten minutes."""
    key = "link.flap_count"
    index = context.rates.above(key, FLAPS)
    if not len(index):
        return NOTHING
    times = context.rates.counted(key)[index]
    return RuleMatches(
        index, np.round(times), level=np.where(times >= FLAPS_GRAVE, DEGRADED, WATCH).astype(np.uint8)
    )


def _noisy_optics(context: RuleContext) -> RuleMatches:
    """Find links with a high bit error rate before correction. `a`: the rate, times 1e-6."""
    if not context.known(OPTICS[0]):
        return NOTHING
    value = context.value(OPTICS[0])
    with np.errstate(invalid="ignore"):
        index = context.those(OPTICS[0], value >= BER_WATCH)
    rate = value[index].astype(np.float64)
    return RuleMatches(index, rate * 1e6, level=np.where(rate >= BER_LIMIT, DEGRADED, WATCH).astype(np.uint8))


def _dark(context: RuleContext) -> RuleMatches:
    """Find links that are up with hardly any light. `a`: received uW; `b`: sent uW."""
    key = "link.rx_optical_w"
    if not context.known(key):
        return NOTHING
    value, up = context.value(key), context.value("link.up_state")
    with np.errstate(invalid="ignore"):
        index = context.those(key, (value < DARK_W) & (up == 0))
    return RuleMatches(index, 1e6 * value[index], 1e6 * context.value("link.tx_optical_w")[index])


def _ports(context: RuleContext) -> RuleMatches:
    """Find switches with more ports down than the fewest ever. `a`: their number."""
    key = "switch.port_down_count"
    if context.fewest_down is None or not context.known(key):
        return NOTHING
    value = context.value(key)
    with np.errstate(invalid="ignore"):
        index = context.those(key, value > context.fewest_down)
    return RuleMatches(index, value[index] - context.fewest_down[index], context.fewest_down[index])


def _speeds(context: RuleContext) -> F64:
    """Return the speed of each pump [2 * n_cdu]; NaN without a current reading."""
    return _pairs(context, PUMP)


def _pairs(context: RuleContext, keys: tuple[str, str]) -> F64:
    """Return the current readings of both sides, side by side [2 * n]."""
    return np.stack([context.now.good(key).astype(np.float64) for key in keys], axis=1).reshape(-1)


def _by_cdu(kind: str, itself_pu: float = 1.0) -> Callable[[RuleContext], RuleMatches]:
    """Finds pumps of CDUs with this diagnosis: those that it names, else those that run."""
    rule = by_diagnosis(kind, "cdu", itself_pu)

    def find(context: RuleContext) -> RuleMatches:
        found = rule(context)
        if not len(found.index):
            return NOTHING
        speed, named = _speeds(context), {f.entity: f.parts for f in context.faults(kind)}
        index: list[int] = []
        for cdu in found.index.tolist():
            pair = np.array([2 * cdu, 2 * cdu + 1])
            with np.errstate(invalid="ignore"):
                runs = speed[pair] >= STOPPED_PU
            mine = [2 * cdu + part - 1 for part in named[cdu]] or pair[runs].tolist()
            index += mine or pair.tolist()
        assert found.notes is not None
        assert found.sure_pu is not None
        sure = dict(zip(found.index.tolist(), found.sure_pu.tolist(), strict=True))
        notes = {i: found.notes[i // 2] for i in index}
        return RuleMatches(
            np.array(index, np.int32), sure_pu=np.array([sure[i // 2] for i in index]), notes=notes
        )

    return find


def _standing(context: RuleContext) -> RuleMatches:
    """Find pumps that are stopped without a fault: the other one carries the flow."""
    if not (context.known(PUMP[0]) or context.known(PUMP[1])):
        return NOTHING
    with np.errstate(invalid="ignore"):
        stand = _speeds(context) < STOPPED_PU
    for fault in context.faults("pump_trip"):
        stand[2 * fault.entity : 2 * fault.entity + 2] = False
    return RuleMatches(np.flatnonzero(stand).astype(np.int32))


def _worn_pumps(context: RuleContext) -> RuleMatches:
    """Find both pumps of a CDU whose head drifts, because the data cannot distinguish them."""
    found = _WEAR(context)
    if not len(found.index) or found.a is None:
        return NOTHING
    index = np.stack([2 * found.index, 2 * found.index + 1], axis=1).reshape(-1).astype(np.int32)
    notes = {2 * i + side: note for i, note in (found.notes or {}).items() for side in (0, 1)}
    return RuleMatches(index, np.repeat(np.asarray(found.a), 2), notes=notes)


_WEAR = wearing("cdu", "cdu.pump_head")


def _lost_supplies(context: RuleContext) -> RuleMatches:
    """Find the weaker supply of nodes that run on one. `a`: its power, W; `b`: power of the other, W."""
    rule = by_diagnosis("psu_lost", "node")(context)
    if not len(rule.index):
        return NOTHING
    both = np.stack([context.value(key)[rule.index] for key in PSU], axis=1).astype(np.float64)
    side = np.argmin(np.where(np.isfinite(both), both, np.inf), axis=1)
    rows = np.arange(len(side))
    index = (2 * rule.index + side).astype(np.int32)
    return RuleMatches(index, both[rows, side], both[rows, 1 - side], sure_pu=rule.sure_pu)


def _empty_supplies(context: RuleContext) -> RuleMatches:
    """Find supplies without output and without a known fault: their feed is dark, or they are on standby.

    `a`: W that they give; `b`: the other one.
    """
    if not (context.known(PSU[0]) and context.known(PSU[1])):
        return NOTHING
    one, other = (context.value(key) for key in PSU)
    with np.errstate(invalid="ignore"):
        total = one + other
        least = EMPTY_PU * total
        index = np.flatnonzero(((one < least) | (other < least)) & (total > LEAST_W)).astype(np.int32)
    index = index[context.current(PSU[0], index) & context.current(PSU[1], index)] if len(index) else index
    lost = {f.entity for f in context.faults("psu_lost")}
    index = np.array([i for i in index.tolist() if i not in lost], np.int32)
    side = (other[index] < one[index]).astype(np.int32)
    low, high = np.minimum(one[index], other[index]), np.maximum(one[index], other[index])
    return RuleMatches((2 * index + side).astype(np.int32), low, high)


def _odd_supplies(kind: str) -> Callable[[RuleContext], RuleMatches]:
    """Find supplies with an untrusted meter."""

    def find(context: RuleContext) -> RuleMatches:
        found = {
            2 * f.entity + PSU.index(f"node.{f.signal}"): f
            for f in context.faults(kind)
            if f.table == "node" and f"node.{f.signal}" in PSU
        }
        index: I32 = np.array(sorted(found), np.int32)
        sure = np.array([found[i].confidence_pu for i in index.tolist()])
        return RuleMatches(
            index, sure_pu=sure, notes={i: "; ".join(f.evidence[:2]) for i, f in found.items()}
        )

    return find


def _hot_dpu(key: str) -> Callable[[RuleContext], RuleMatches]:
    """Finds nodes with a DPU beyond its warning. `a`: degC; `b`: K left until it shuts down."""

    def find(context: RuleContext) -> RuleMatches:
        if not context.known(key):
            return NOTHING
        value = context.value(key)
        index = context.those(key, value > DPU_WARM_C)
        return RuleMatches(index, value[index], DPU_OFF_C - value[index]) if len(index) else NOTHING

    return find


def _dpu_state(key: str, code: int) -> Callable[[RuleContext], RuleMatches]:
    """Finds DPUs that report this state."""
    return of_sides(lambda side: state_is(side, code), key)


SWITCH: tuple[Rule, ...] = (
    Rule("sxid", "switch", WATCH, "watch", 0.8, "{note}, not cured yet", CATALOG + ", SXIDs",
         open_codes("switch"), clear_s=0.0),
    Rule("sxid_repeated", "switch", DEGRADED, "contact_support", 0.8,
         "{note} occurred {b:.0f} times within 24 h", FACTS, repeated_codes("switch"), clear_s=3600.0),
    Rule("health_degraded", "switch", DEGRADED, "run_diagnostics", 0.9, "it reports that it is degraded",
         "the device", state_is("switch.health_state", 1), ("switch.health_state",)),
    Rule("health_down", "switch", FAILED, "contact_support", 0.95, "it reports that it is down",
         "the device", state_is("switch.health_state", 2), ("switch.health_state",)),
    Rule("ports_down", "switch", WATCH, "run_diagnostics", 0.6,
         "{a:.0f} more ports are down than the usual {b:.0f}", ESTIMATE, _ports,
         ("switch.port_down_count",), after_s=60.0),
    GrowthRule("errors", "switch.error_count", ERRORS, "errors").rule(),
    GrowthRule("switch_flaps", "switch.flap_count", SWITCH_FLAPS, "flaps of its ports").rule(),
    GrowthRule("discards", "switch.discard_count", DISCARDS, "packets discarded: congestion", 0.1,
               level=HEALTHY, action="none").rule(),
)  # fmt: skip

LINK: tuple[Rule, ...] = (
    Rule("link_down", "link", FAILED, "run_diagnostics", 0.9, "the port reports no link", "the device",
         state_is("link.up_state", 1), ("link.up_state",), clear_s=60.0),
    Rule("link_flaps", "link", WATCH, "run_diagnostics", 0.8,
         "it went down and up {a:.0f} times in about ten minutes", ESTIMATE, _flaps, ("link.flap_count",),
         clear_s=1800.0, faults=LINK_LOST),
    GrowthRule("link_errors", "link.error_count", ERRORS, "errors", faults=LINK_LOST).rule(),
    GrowthRule("link_symbols", "link.symbol_error_count", SYMBOLS, "symbol errors", faults=LINK_LOST).rule(),
    GrowthRule("link_recoveries", "link.recovery_count", RECOVERIES, "recoveries", faults=LINK_LOST).rule(),
    GrowthRule("link_discards", "link.discard_count", DISCARDS, "packets discarded: congestion", 0.1,
               level=HEALTHY, action="none", faults=LINK_LOST).rule(),
    Rule("link_ber", "link", WATCH, "run_diagnostics", 0.8,
         "{a:.0f} bits of a million are wrong before correction, which corrects 240 at most",
         "IEEE 802.3, limit of RS(544, 514)", _noisy_optics, OPTICS, after_s=60.0, clear_s=600.0,
         faults=LINK_LOST),
    Rule("link_dark", "link", WATCH, "run_diagnostics", 0.7,
         "its optics receive {a:.0f} uW on the weakest lane; they send {b:.0f} uW", ESTIMATE, _dark,
         ("link.rx_optical_w",), after_s=60.0, clear_s=600.0, faults=LINK_LOST),
    Rule("link_congested", "link", HEALTHY, "none", 0.1, "{note}: other traffic on its path is the cause",
         DIAGNOSIS, by_diagnosis("link_congested", "link", 0.1), faults=LINK_LOST),
)  # fmt: skip

PUMPS: tuple[Rule, ...] = (
    Rule("pump_trip", "pump", FAILED, "check_facility", 0.97, "it has stopped: {note}", DIAGNOSIS,
         _by_cdu("pump_trip"), PUMP),
    Rule("pump_worn", "pump", DEGRADED, "check_facility", 0.6,
         "it or the other pump delivers less than its speed should give: {note}", DIAGNOSIS,
         _by_cdu("pump_worn", 0.6), PUMP),
    Rule("filter_blocked", "pump", DEGRADED, "check_facility", 0.3,
         "the filter before it is blocked: {note}", DIAGNOSIS, _by_cdu("filter_blocked", 0.3), PUMP),
    Rule("stands_by", "pump", HEALTHY, "none", 0.0, "it is stopped; the other pump carries the flow",
         "the device", _standing, PUMP),
    Rule("wear", "pump", WATCH, "check_facility", 0.5, "{note}", "trend of a learned parameter", _worn_pumps,
         clear_s=3600.0),
)  # fmt: skip

PSUS: tuple[Rule, ...] = (
    Rule("psu_lost", "psu", FAILED, "replace", 0.95, "it gives {a:.0f} W, the other one {b:.0f} W", DIAGNOSIS,
         _lost_supplies, PSU),
    Rule("psu_empty", "psu", UNKNOWN, "check_facility", 0.1,
         "it gives {a:.0f} W, the other one {b:.0f} W: its feed may be lost, or it is on standby", ESTIMATE,
         _empty_supplies, PSU, after_s=10.0, clear_s=60.0, faults=("psu_lost",)),
    *(Rule(kind, "psu", WATCH, "watch", 0.9, "its meter cannot be trusted: {note}", DIAGNOSIS,
           _odd_supplies(kind)) for kind in ("sensor_frozen", "sensor_biased", "sensor_spiking")),
)  # fmt: skip

DPUS: tuple[Rule, ...] = (
    Rule("dpu_failed", "dpu", FAILED, "contact_support", 0.9, "it reports that it has failed", "the device",
         _dpu_state(DPU_HEALTH, 2), (DPU_HEALTH,)),
    Rule("dpu_degraded", "dpu", WATCH, "run_diagnostics", 0.7, "it reports that it is degraded", "the device",
         _dpu_state(DPU_HEALTH, 1), (DPU_HEALTH,), after_s=60.0),
    Rule("dpu_offload_lost", "dpu", DEGRADED, "run_diagnostics", 0.8,
         "it has lost its offload: packets pass its Arm cores, or none pass", "the device",
         _dpu_state(DPU_OFFLOAD, 1), (DPU_OFFLOAD,), after_s=30.0),
    Rule("dpu_temp", "dpu", DEGRADED, "check_facility", 0.5,
         "it is at {a:.0f} °C, {b:.0f} K below its shutdown", DPU_LIMITS, of_sides(_hot_dpu, DPU_TEMP),
         (DPU_TEMP,), after_s=30.0),
    GrowthRule("dpu_port_errors", DPU_ERRORS, DPU_PORT_ERRORS, "errors on its ports", part="dpu").rule(),
)  # fmt: skip

Kinds = tuple[tuple[str, tuple[str, ...]], ...]
SWITCH_KINDS: Kinds = (
    ("its own health state", ("switch.health_state",)), ("ports", ("switch.port_down_count",)),
    ("errors", ("switch.error_count",)), ("heat", ("switch.temp_c",)),
)  # fmt: skip
SWITCH_VITAL = ("switch.health_state", "switch.port_down_count", "switch.power_w", "switch.temp_c")
LINK_KINDS: Kinds = (
    ("whether it is up", ("link.up_state",)), ("errors", ("link.error_count", "link.symbol_error_count")),
    ("flaps", ("link.flap_count", "link.recovery_count")),
    ("optics", ("link.rx_optical_w", "link.pre_fec_ber_pu")),
)  # fmt: skip
LINK_VITAL = ("link.up_state", "link.error_count", "link.rx_bytes_per_s")
# `{side}` is 1 or 2
PUMP_KINDS: Kinds = (
    ("speed", ("cdu.pump{side}_speed_pu",)), ("flow", ("cdu.flow_lpm",)),
    ("pressure", ("cdu.diff_pressure_pa", "cdu.supply_pressure_pa")),
    ("filter", ("cdu.filter_diff_pressure_pa",)),
)  # fmt: skip
PUMP_VITAL = ("cdu.pump{side}_speed_pu",)
PSU_KINDS: Kinds = (
    ("power", ("node.psu{side}_power_w",)), ("power of the node", ("node.power_w",)),
    ("state of the node's supply", ("node.power_on_state",)),
)  # fmt: skip
PSU_VITAL = ("node.psu{side}_power_w",)
DPU_KINDS: Kinds = (
    ("its own word of its health", (DPU_HEALTH,)), ("heat", (DPU_TEMP,)), ("offload", (DPU_OFFLOAD,)),
    ("errors of its ports", (DPU_ERRORS,)),
)  # fmt: skip
DPU_VITAL = (DPU_TEMP, DPU_HEALTH, DPU_OFFLOAD)
