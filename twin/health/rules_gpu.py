"""GPU rules: reported states, growing counters, deviations, and faults of the GPU itself.

Data with a finder per line. No rule blames a GPU for an effect of the facility or a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from twin.catalogue import F64, I32, Bool
from twin.contracts import (
    BY_FACILITY,
    BY_ITSELF,
    BY_POWER,
    BY_WHOM_IS_UNKNOWN,
    DEGRADED,
    FAILED,
    HEALTHY,
    WATCH,
    action,
)
from twin.health.recurring import LIFETIME, RECOVERIES, lifetime_nats
from twin.health.rules import DIAGNOSIS, NONE, NOTHING, Rule, RuleContext, RuleMatches
from twin.health.rules_shared import (
    CATALOG,
    DCGM,
    ESTIMATE,
    FACTS,
    REBOOTS,
    SILENT,
    UNUSUAL,
    GrowthRule,
    by_diagnosis,
    gaps,
    growing,
    open_codes,
    repeated_codes,
    software_codes,
    state_is,
    wearing,
)
from twin.site import scale_up_blast

# In about ten minutes. DCGM: 8 PCIe replays a minute are the most that is fine; 10 single-bit errors.
PCIE_REPLAYS, SBES = 80.0, 10.0
# DCGM asks for 100 CRC errors a second, and for one replay or recovery. Links of today retry now and then, so
# that a few a minute are watched, if others have fewer; source: DCGM, and estimate.
NVLINK_ERRORS, NVLINK_ERRORS_GRAVE, NVLINK_REPLAYS, NVLINK_RECOVERIES = 60.0, 60_000.0, 60.0, 2.0
OUTLIER_NATS = 3.0  # of counts of lives: one GPU in twenty has as many; source: estimate
SBES_A_DAY = 200.0  # a GPU with so many is looked at even if it always had them; source: estimate
ONE_LEFT = 0.35  # of a count of one: ten minutes, or a day, after it came (e^-1)
SLOWED_PU = 0.6  # source: domain.md C, slowdown in 0.6 of the minutes of the last ten
LEAST_K, LEAST_SIGMAS = 4.0, 4.0  # hotter than its power and coolant account for; source: estimate
LEAST_CLOCK_PU = 0.05  # of clock that is missing at equal power; source: estimate
CROWD, CROWD_PU = 3, 0.25  # GPUs of a rack that deviate alike: no GPU's fault; source: estimate
# A GPU that leaves the bus says so (XID 79); one that is only silent for less comes back by itself, as a node
# that restarts does. source: estimate
LOST_S = 1800.0
# Twice the time constant of a GPU in air: the peak of a load that begins is over by then; source: estimate
BEYOND_S = 60.0
MARGIN, TEMP = "gpu.thermal_margin_k", "gpu.temp_c"
# Kinds of fault (`twin.diagnosis.FAULT_KINDS`) that several rules are signs of
MEMORY = ("ecc_growth",)
HEAT = ("plate_degraded", "tray_blocked")
NVLINK = ("nvlink_flaps",)
NVLINK_RULES = ("nvlink_recovering", "nvlink_recovered")  # that speak of one link
XID = ("gpu_off_bus", "xid_burst")


def _blameless(context: RuleContext, index: I32) -> Bool:
    """Return the mask of these GPUs [k] that deviate below a fault of the facility, or with many of their
    rack.
    """
    rack_of = context.site.rack_of_gpu
    rack = rack_of[index]
    racks = context.site.sizes["rack"]
    many = np.bincount(rack, minlength=racks)
    of = np.bincount(rack_of, minlength=racks)
    crowd = (many >= CROWD) & (many >= CROWD_PU * of)
    out: Bool = crowd[rack]
    return out if context.facility is None else out | context.facility[index]


def _left_k(context: RuleContext, limit: Callable[[str, I32], F64]) -> tuple[I32, F64]:
    """Return (GPUs beyond a guard, K left to their `limit` of a signal), by margin if they report it."""
    parts: list[tuple[I32, F64]] = []
    for key in (MARGIN, TEMP):
        index = context.beyond(key, low=key == MARGIN)
        if not len(index):
            continue
        if key == TEMP:  # a GPU that reports its margin is judged by it
            index = index[~context.current(MARGIN, index)]
        left = context.value(key)[index] - limit(key, index)
        parts.append((index, left if key == MARGIN else -left))
    if not any(len(index) for index, _ in parts):
        return NONE, np.zeros(0)
    index, left = np.concatenate([i for i, _ in parts]), np.concatenate([x for _, x in parts])
    order = np.argsort(index, kind="stable")
    return index[order], left[order]


def _spared(context: RuleContext, index: I32) -> Bool:
    """Return the mask of these hot GPUs [k] whose heat comes from their facility or their rack."""
    spared = _blameless(context, index)
    return spared if context.lowered is None else spared | (context.lowered[index] == BY_FACILITY)


def _near_limit(context: RuleContext) -> RuleMatches:
    """GPUs near or beyond the highest temperature that is allowed. `a`: K left to it. Where no profile states
    a limit, nothing is judged."""
    index, left = _left_k(context, lambda key, index: context.site.limits[key].max[index])
    if not len(index):
        return NOTHING
    spared = _spared(context, index)
    acts = np.where(spared, action("check_facility"), action("run_diagnostics")).astype(np.uint8)
    whose = {True: "with its facility or its rack", False: "alone"}
    notes = {
        i: f"{abs(k):.1f} K {'below' if k >= 0 else 'beyond'} it, {whose[s]}"
        for i, k, s in zip(index.tolist(), left.tolist(), spared.tolist(), strict=True)
    }
    return RuleMatches(index, left, None, None, acts, np.where(spared, 0.1, 0.7), notes)


def _beyond_slowdown(context: RuleContext) -> RuleMatches:
    """Find GPUs beyond their slowdown temperature, alone in their rack. `a`: excess, K.

    Load takes healthy GPUs beyond the highest temperature that is allowed for operation; their clock keeps
    them below the slowdown.
    """

    def slowdown(key: str, index: I32) -> F64:
        bound: F64 = context.site.limits[key].max[index]
        if key == TEMP:
            site = context.site
            bound = np.fmax(bound, site.design.gpu_slowdown_c[site.rack_of_gpu[index]])
        return bound

    index, left = _left_k(context, slowdown)
    index, left = index[left < 0.0], left[left < 0.0]
    if not len(index):
        return NOTHING
    alone = ~_spared(context, index)
    return RuleMatches(index[alone], -left[alone])


def _hotter(context: RuleContext) -> RuleMatches:
    """Find GPUs that are hotter than their power and coolant explain, alone in their rack. `a`: excess, K;
    `b`: reading, degC."""
    residual = context.now.residual(TEMP)
    if residual is None or not context.known(TEMP):
        return NOTHING
    with np.errstate(invalid="ignore"):
        off = residual.measured - residual.expected
        index = np.flatnonzero(off > LEAST_K).astype(np.int32)
        index = index[off[index] > LEAST_SIGMAS * residual.sigma[index]]
    if not len(index):
        return NOTHING
    index = index[~_blameless(context, index)]
    return RuleMatches(index, off[index], residual.measured[index])


def _slower(context: RuleContext) -> RuleMatches:
    """Find GPUs whose clock is too low for their power and cap, alone in their rack. `a`: missing share,
    %; `b`: reading, MHz."""
    residual = context.now.residual("gpu.sm_clock_hz")
    if residual is None or not context.known("gpu.sm_clock_hz"):
        return NOTHING
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = residual.measured / residual.expected
        index = np.flatnonzero(ratio < 1.0 - LEAST_CLOCK_PU).astype(np.int32)
        off = residual.expected[index] - residual.measured[index]
        index = index[off > LEAST_SIGMAS * residual.sigma[index]]
    if not len(index):
        return NOTHING
    index = index[~_blameless(context, index)]
    if context.lowered is not None:
        whose = context.lowered[index]
        index = index[(whose != BY_FACILITY) & (whose != BY_POWER)]
    return RuleMatches(index, 100.0 * (1.0 - ratio[index]), residual.measured[index] / 1e6)


def _slowed(context: RuleContext) -> RuleMatches:
    """Find GPUs that their hardware slows most of the time. `a`: share of about ten minutes, %."""
    if context.slowed_pu is None or context.lowered is None or not context.slowed_pu.any():
        return NOTHING
    index = np.flatnonzero((context.slowed_pu >= SLOWED_PU) & (context.lowered != BY_FACILITY)).astype(
        np.int32
    )
    return RuleMatches(index, 100.0 * context.slowed_pu[index])


def _lowered(whose: int) -> Callable[[RuleContext], RuleMatches]:
    def find(context: RuleContext) -> RuleMatches:
        if context.lowered is None or not context.lowered.any():
            return NOTHING
        return RuleMatches(np.flatnonzero(context.lowered == whose).astype(np.int32))

    return find


def _not_cured(context: RuleContext) -> RuleMatches:
    """Find GPUs whose faults remain after two restarts of their node. `a`: restarts in about a day."""
    restarted = context.rates.above("node.reboot_count", REBOOTS, recent=False)
    if not len(restarted):
        return NOTHING
    asked = context.book.open_action("gpu")
    index = np.flatnonzero(asked >= action("reset_gpu")).astype(np.int32)
    times = context.rates.counted("node.reboot_count", recent=False)[context.site.node_of_gpu[index]]
    again = times >= REBOOTS
    return RuleMatches(index[again], np.round(times[again]))


def _recovery(context: RuleContext) -> RuleMatches:
    """Find GPUs that report the recovery they need. `a`: the state of the signal."""
    key = "gpu.recovery_action_state"
    if not context.known(key):
        return NOTHING
    value = context.value(key)
    with np.errstate(invalid="ignore"):
        index = context.those(key, value >= 1.0)
    said = value[index].astype(np.int32)
    acts = np.array([0, action("reset_gpu"), action("reboot_node"), action("drain"), action("reset_gpu")])
    level = np.where(said == 2, FAILED, DEGRADED).astype(np.uint8)
    words = ("", "a reset", "a restart of its node", "a drain of its peers", "a drain and a reset")
    notes = {i: words[min(s, 4)] for i, s in zip(index.tolist(), said.tolist(), strict=True)}
    return RuleMatches(
        index, said, level=level, action=acts[np.minimum(said, 4)].astype(np.uint8), notes=notes
    )


def _mild(key: str, least: float, grave: float) -> Callable[[RuleContext], RuleMatches]:
    """Return a rule for growth: watch, and degraded from `grave` on."""
    grows = growing(key, least, UNUSUAL)

    def find(context: RuleContext) -> RuleMatches:
        found = grows(context)
        if found.a is None or not len(found.index):
            return NOTHING
        many = np.asarray(found.a, np.float64) >= grave
        level = np.where(many, DEGRADED, WATCH).astype(np.uint8)
        acts = np.where(many, action("run_diagnostics"), action("watch")).astype(np.uint8)
        return replace(found, level=level, action=acts)

    return find


def _came(key: str) -> Callable[[RuleContext], RuleMatches]:
    """Find any growth of this counter within about a day. `a`: its decayed value."""

    def find(context: RuleContext) -> RuleMatches:
        index = context.rates.above(key, ONE_LEFT, recent=False)
        if not len(index):
            return NOTHING
        return RuleMatches(index, np.maximum(np.round(context.rates.counted(key, recent=False)[index]), 1.0))

    return find


def _xid_before(context: RuleContext) -> RuleMatches:
    """Find GPUs whose gauge held a grave XID at the first observation. `a`: the code."""
    codes = context.book.xid_before()
    index = np.flatnonzero(codes).astype(np.int32)
    return RuleMatches(index, codes[index]) if len(index) else NOTHING


def _double_bits(context: RuleContext) -> RuleMatches:
    """Find double-bit errors within about a day without a later reset. `a`: their number."""
    key = "gpu.ecc_dbe_count"
    found = _came(key)(context)
    if found.a is None or not len(found.index):
        return NOTHING
    left = context.now.total(key)[found.index] > context.book.dbe_undone()[found.index]
    return RuleMatches(found.index[left], found.a[left])


def _nvlink_text(context: RuleContext, gpu: int) -> str:
    """Sentence about the recovering NVLink of a GPU, or about all its links if no source names one."""
    text = "" if context.nvlinks is None else context.nvlinks.text(gpu)
    return text or f"{context.now.raw(RECOVERIES)[gpu]} recoveries of its NVLinks; the link is not reported"


def _recovering(context: RuleContext) -> RuleMatches:
    """Find GPUs on an NVLink that recovers more often than chance explains."""
    recurring = context.recurring
    if recurring is None or not recurring.failing.any():
        return NOTHING
    index = np.flatnonzero(recurring.failing).astype(np.int32)

    def say(k: int) -> str:
        gpu = int(index[k])
        return f"{_nvlink_text(context, gpu)}; {scale_up_blast(context.site, gpu).text}"

    return RuleMatches(index, say=say)


def _recovered(context: RuleContext) -> RuleMatches:
    """Find GPUs whose NVLinks recovered far more often in their lives than those of nearly all others."""
    if not context.known(RECOVERIES):
        return NOTHING
    count = context.now.raw(RECOVERIES)
    index = np.flatnonzero(count >= LIFETIME).astype(np.int32)
    if not len(index):
        return NOTHING
    index = index[lifetime_nats(count, index, np.zeros(len(index))) >= OUTLIER_NATS]
    return RuleMatches(
        index, count[index].astype(np.float64), say=lambda k: _nvlink_text(context, int(index[k]))
    )


_KEEPS = ("gpu.health_state", "gpu.temp_c", "gpu.power_w")  # any of them shows that the GPU reports


def _grown(
    id_: str, counter: str, least: float, what: str, sure: float = 0.6, faults: tuple[str, ...] = NVLINK
) -> GrowthRule:
    return GrowthRule(id_, f"gpu.{counter}", least, what, sure, DCGM, clear_s=1800.0, faults=faults)


RULES: tuple[Rule, ...] = (
    Rule("xid", "gpu", WATCH, "watch", 0.8, "{note}, not cured yet", CATALOG, open_codes("gpu"), clear_s=0.0,
         faults=XID),
    Rule("xid_repeated", "gpu", DEGRADED, "contact_support", 0.9, "{note} occurred {b:.0f} times within 24 h",
         FACTS, repeated_codes("gpu"), clear_s=3600.0, faults=("xid_burst",)),
    Rule("xid_before", "gpu", WATCH, "run_diagnostics", 0.5,
         "its last XID was {a:.0f}, before racktwin or DCGM started; unknown whether it is cured",
         "DCGM field 230, which holds the last one", _xid_before, clear_s=0.0, faults=XID),
    Rule("xid_of_job", "gpu", HEALTHY, "restart_app", 0.05,
         "exceptions or page faults on several nodes of its job: the software is to blame", FACTS,
         software_codes, clear_s=0.0, faults=XID),
    Rule("not_cured", "gpu", DEGRADED, "contact_support", 0.85,
         "its faults remain after {a:.0f} restarts of its node", FACTS, _not_cured),
    Rule("row_remap_failed", "gpu", FAILED, "replace", 0.97, "remapping a row of its memory failed", FACTS,
         state_is("gpu.row_remap_failed_state", 1), ("gpu.row_remap_failed_state",), faults=MEMORY),
    Rule("row_remap_pending", "gpu", DEGRADED, "reset_gpu", 0.95,
         "a row of its memory waits to be remapped, which needs a reset", FACTS,
         state_is("gpu.row_remap_pending_state", 1), ("gpu.row_remap_pending_state",), faults=MEMORY),
    Rule("row_remap_growth", "gpu", WATCH, "watch", 0.8,
         "{a:.0f} rows of its memory were remapped in about a day", ESTIMATE, _came("gpu.row_remap_count"),
         ("gpu.row_remap_count",), faults=MEMORY),
    Rule("ecc_dbe", "gpu", DEGRADED, "reset_gpu", 0.95, "double-bit errors of its memory in a day: {a:.0f}",
         CATALOG + ", 48", _double_bits, ("gpu.ecc_dbe_count",), faults=MEMORY),
    _grown("ecc_sbe", "ecc_sbe_count", SBES, "single-bit errors of its memory", 0.7, MEMORY).rule(),
    Rule("ecc_sbe_daily", "gpu", WATCH, "run_diagnostics", 0.7,
         "{a:.0f} single-bit errors of its memory in about a day, others {b:.1f}", ESTIMATE,
         growing("gpu.ecc_sbe_count", SBES_A_DAY, UNUSUAL, recent=False), ("gpu.ecc_sbe_count",),
         faults=MEMORY),
    Rule("health_fault", "gpu", FAILED, "run_diagnostics", 0.9, "it reports that it is faulty", "the device",
         state_is("gpu.health_state", 1), ("gpu.health_state",)),
    Rule("recovery_action", "gpu", DEGRADED, "reset_gpu", 0.95, "it asks for {note}",
         "DCGM field 1523, and XID 154", _recovery, ("gpu.recovery_action_state",), faults=("gpu_off_bus",)),
    replace(_grown("nvlink_errors", "nvlink_error_count", NVLINK_ERRORS, "errors of its NVLinks").rule(),
            find=_mild("gpu.nvlink_error_count", NVLINK_ERRORS, NVLINK_ERRORS_GRAVE)),
    _grown("nvlink_replays", "nvlink_replay_count", NVLINK_REPLAYS, "replays on its NVLinks").rule(),
    replace(_grown("nvlink_recoveries", "nvlink_recovery_count", NVLINK_RECOVERIES,
                   "recoveries of its NVLinks", 0.7), level=DEGRADED, action="run_diagnostics").rule(),
    Rule("nvlink_recovering", "gpu", DEGRADED, "contact_support", 0.9,
         "an NVLink keeps recovering, which may end in a fatal XID 149: {note}",
         "a sequential test (Wald 1945); marin-community/marin, issue 9086", _recovering, clear_s=0.0),
    Rule("nvlink_recovered", "gpu", WATCH, "watch", 0.7,
         "its NVLinks recovered far more often than others: {note}", ESTIMATE, _recovered, clear_s=0.0),
    _grown("pcie_replays", "pcie_replay_count", PCIE_REPLAYS, "replays on its PCIe link", 0.7, ()).rule(),
    Rule("thermal_margin", "gpu", WATCH, "run_diagnostics", 0.7, "near its temperature limit: {note}",
         "limits of the profile; domain.md C: by margin", _near_limit, (MARGIN, TEMP), after_s=10.0,
         faults=HEAT),
    Rule("thermal_limit", "gpu", DEGRADED, "run_diagnostics", 0.7,
         "{a:.1f} K above its slowdown temperature, alone in its rack", "limits of the profile",
         _beyond_slowdown, (MARGIN, TEMP), after_s=BEYOND_S, clear_s=600.0, faults=HEAT),
    Rule("temp_residual", "gpu", WATCH, "watch", 0.7,
         "{b:.0f} °C, {a:.1f} K more than its power and coolant explain", "estimator of racktwin",
         _hotter, (TEMP,), after_s=120.0, faults=HEAT),
    Rule("clock_residual", "gpu", WATCH, "run_diagnostics", 0.6,
         "{b:.0f} MHz, {a:.0f} % less than its power and cap explain", "estimator of racktwin", _slower,
         ("gpu.sm_clock_hz",), after_s=300.0, faults=HEAT),
    Rule("thermal_slowdown", "gpu", DEGRADED, "run_diagnostics", 0.85,
         "its hardware slowed it down for {a:.0f} % of about ten minutes, but not its neighbours",
         FACTS, _slowed, ("gpu.clock_event_bits",), clear_s=600.0, faults=HEAT),
    Rule("lowered_itself", "gpu", WATCH, "watch", 0.8,
         "heat lowers its clock, but not those of its neighbours", "attribution of racktwin",
         _lowered(BY_ITSELF), ("gpu.clock_event_bits",), after_s=30.0),
    Rule("lowered_facility", "gpu", HEALTHY, "check_facility", 0.05,
         "heat lowers its clock; the cause is the facility or the rack, not this GPU",
         "attribution of racktwin", _lowered(BY_FACILITY), ("gpu.clock_event_bits",)),
    Rule("lowered_unknown", "gpu", WATCH, "watch", 0.5,
         "heat lowers its clock; cause unknown, as its neighbours report nothing",
         "attribution of racktwin", _lowered(BY_WHOM_IS_UNKNOWN), ("gpu.clock_event_bits",), after_s=30.0),
    Rule("telemetry_gap", "gpu", WATCH, "watch", 0.6, "it was silent for {a:.0f} % of the last hour",
         "arXiv 2603.28781: gaps come before a GPU falls off the bus", gaps("gpu"), clear_s=600.0,
         faults=SILENT),
    Rule("plate_degraded", "gpu", DEGRADED, "watch", 0.9, "its cold plate conducts heat poorly: {note}",
         DIAGNOSIS, by_diagnosis("plate_degraded", "gpu")),
    Rule("gpu_off_bus", "gpu", FAILED, "reboot_node", 0.97, "it has fallen off the bus: {note}", DIAGNOSIS,
         by_diagnosis("gpu_off_bus", "gpu"), _KEEPS, after_s=LOST_S),
    Rule("ecc_growth", "gpu", DEGRADED, "reset_gpu", 0.9, "errors of its memory grow: {note}", DIAGNOSIS,
         by_diagnosis("ecc_growth", "gpu")),
    Rule("xid_burst", "gpu", DEGRADED, "run_diagnostics", 0.9, "it keeps reporting errors: {note}",
         DIAGNOSIS, by_diagnosis("xid_burst", "gpu"), faults=("gpu_off_bus",)),
    Rule("nvlink_flaps", "gpu", DEGRADED, "run_diagnostics", 0.8, "its NVLinks retrain: {note}", DIAGNOSIS,
         by_diagnosis("nvlink_flaps", "gpu")),
    *(Rule(kind, "gpu", WATCH, "watch", 0.9, "one of its sensors cannot be trusted: {note}", DIAGNOSIS,
           by_diagnosis(kind, "gpu")) for kind in ("sensor_frozen", "sensor_biased", "sensor_spiking")),
    Rule("wear", "gpu", WATCH, "watch", 0.6, "{note}", "trend of a learned parameter", wearing("gpu"),
         clear_s=3600.0),
)  # fmt: skip

# Kinds of signals of a GPU; the first shows that it lives. A kind counts where one of its signals is current
# now.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("heat", (TEMP, MARGIN)),
    ("power", ("gpu.power_w",)),
    ("clock", ("gpu.sm_clock_hz",)),
    ("work", ("gpu.util_pu", "gpu.sm_active_pu")),
    ("reasons of a lowered clock", ("gpu.clock_event_bits", "gpu.throttle_thermal_ns")),
    ("memory errors", ("gpu.ecc_sbe_count", "gpu.ecc_dbe_count")),
    ("remapped rows", ("gpu.row_remap_failed_state", "gpu.row_remap_pending_state")),
    ("NVLink errors", ("gpu.nvlink_error_count", "gpu.nvlink_replay_count", "gpu.nvlink_recovery_count")),
    ("PCIe replays", ("gpu.pcie_replay_count",)),
    ("faults (XID)", ("gpu.xid_code",)),
    ("its own health state", ("gpu.health_state", "gpu.recovery_action_state")),
)
VITAL = (TEMP, MARGIN, "gpu.power_w", "gpu.sm_clock_hz", "gpu.util_pu", "gpu.health_state")
# One of these must have been reported: that a GPU works or draws power does not say that it is well
CONDITION = (TEMP, MARGIN, "gpu.clock_event_bits", "gpu.xid_code", "gpu.health_state", "gpu.ecc_dbe_count",
             "gpu.ecc_sbe_count", "gpu.row_remap_failed_state", "gpu.recovery_action_state")  # fmt: skip
