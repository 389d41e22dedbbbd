"""Attribution of lowered GPU clocks: to the GPU itself, the facility, the power limit, or unknown.

A GPU that heat slows while its loop, its rack or its neighbours are hot too has no fault of its own: a reset
cures nothing there. One that is slowed alone, beside neighbours that report and run free, is itself the
cause.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, I32, I64, NS, U8, Bool
from twin.contracts import BY_FACILITY, BY_ITSELF, BY_POWER, BY_WHOM_IS_UNKNOWN, NOT_LOWERED
from twin.diagnosis import FAULT_KINDS
from twin.health.rules import RuleContext
from twin.site import Site
from twin.telemetry import EntityState, column

# Bits of clock events. source: NVML, nvmlClocksEventReasons; DCGM field 112
POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
HEAT = SW_THERMAL | HW_THERMAL
SLOWING = HW_SLOWDOWN | HW_THERMAL  # by hardware; a brake is power's
ANY = POWER_CAP | HW_SLOWDOWN | HEAT | POWER_BRAKE
BITS, POWER_NS, HEAT_NS = "gpu.clock_event_bits", "gpu.throttle_power_ns", "gpu.throttle_thermal_ns"
HOLD_S = 60.0  # an answer stands so long after the clock was last lowered; source: estimate
WINDOW_S = 600.0  # over which slowdowns of the hardware are counted; source: domain.md C, ten minutes
MOST_S, ONE_LOOK_S = 300.0, 10.0  # that one look adds at most; source: estimate
# Neighbours slowed by heat at the same time that are no chance: so many, and so large a share of those of the
# rack or of the CDU that report; source: estimate
LEAST_NEIGHBOURS, NEIGHBOURS_PU = 3, 0.25
LEAST_REPORTING = 2  # neighbours that must run free before a GPU is blamed; source: estimate
FEEDS = ("feed_lost", "breaker_tripped", "grid_event")
# The loss of a feed explains heat so long: pumps and fans have fallen back on the other feed by then, or what
# they fail to cool is a fault of its own; source: estimate
FEED_S = 1800.0
# A supply or inlet above these: no GPU below is to blame. Judged by the guard of the profile, if it has one.
WARM = (("rack.supply_temp_c", "rack"), ("rack.inlet_temp_c", "rack"), ("node.inlet_temp_c", "node"),
        ("node.water_inlet_temp_c", "node"))  # fmt: skip


class Attribution(EntityState):
    """Of each GPU [n]: the cause of a lowered clock, its last instant, and the share of hardware slowdown."""

    lowered: U8 = column("gpu", "u1", NOT_LOWERED)
    at_ns: I64 = column("gpu", "i8")
    slowed_pu: F32 = column("gpu", "f4")  # share of the window in which hardware slowed it

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self._some = False  # anything but zeros

    def update(self, context: RuleContext) -> None:
        """Update the attribution of all GPUs; stores the values that rules need in the look."""
        context.facility = below_facility(context)
        bits_at, bits = self._bits(context)
        moved = [context.rates.moved(key) for key in (POWER_NS, HEAT_NS)]
        if len(bits_at) or len(moved[0]) or len(moved[1]) or self._some:
            self._judge(context, bits_at, bits, moved)
        context.lowered, context.slowed_pu = self.lowered, self.slowed_pu

    @staticmethod
    def _bits(context: RuleContext) -> tuple[I32, I32]:
        """Return (GPUs with a relevant bit, ascending; their bits), of those that report now."""
        none = np.zeros(0, np.int32)
        if not context.known(BITS):
            return none, none
        value = context.value(BITS)
        index = context.those(BITS, value >= POWER_CAP)
        bits = value[index].astype(np.int32) & ANY
        return index[bits > 0], bits[bits > 0]

    def _judge(self, context: RuleContext, bits_at: I32, bits: I32, moved: list[I32]) -> None:
        n = context.site.sizes["gpu"]
        by_power, by_heat = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        by_power[bits_at[bits & (POWER_CAP | POWER_BRAKE) != 0]] = True
        by_heat[bits_at[bits & HEAT != 0]] = True
        # A slowdown of the hardware without a word of heat is the brake's, where that is on
        slowed = bits_at[(bits & SLOWING != 0) & (bits & (POWER_BRAKE | SW_THERMAL) != POWER_BRAKE)]
        by_heat[slowed] = True
        by_power[moved[0]] = True
        by_heat[moved[1]] = True
        index = np.flatnonzero(by_power | by_heat).astype(np.int32)
        hot = by_heat[index]
        answer = np.where(hot, BY_WHOM_IS_UNKNOWN, BY_POWER).astype(np.uint8)
        if hot.any():
            answer[hot] = self._of_heat(context, index[hot], by_heat)
        before_ns = context.now_ns - round(context.dt_s * NS)
        lasting = (
            self.at_ns[slowed] >= before_ns if before_ns < context.now_ns else np.zeros(len(slowed), np.bool_)
        )
        self.lowered[index] = answer
        self.at_ns[index] = context.now_ns
        over = (self.lowered != NOT_LOWERED) & (context.now_ns - self.at_ns > HOLD_S * NS)
        self.lowered[over] = NOT_LOWERED
        self._count(context, slowed, lasting)
        self._some = bool(self.lowered.any() or self.slowed_pu.any())

    def _count(self, context: RuleContext, slowed: I32, lasting: Bool) -> None:
        """Update the share of time in which hardware slowed a GPU, unless the facility's cooling did.

        A new slowdown counts for one look, however long ago the last look was.
        """
        own = self.lowered[slowed] != BY_FACILITY
        slowed, lasting = slowed[own], lasting[own]
        if not len(slowed) and not self.slowed_pu.any():
            return
        for_s = np.where(lasting, min(context.dt_s, MOST_S), min(context.dt_s, ONE_LOOK_S))
        grown = self.slowed_pu[slowed] - np.expm1(-for_s / WINDOW_S) * (1.0 - self.slowed_pu[slowed])
        self.slowed_pu *= np.float32(np.exp(-context.dt_s / WINDOW_S))
        self.slowed_pu[self.slowed_pu < 1e-3] = 0.0
        self.slowed_pu[slowed] = grown.astype(np.float32)

    @staticmethod
    def _of_heat(context: RuleContext, index: I32, by_heat: Bool) -> U8:
        """Attribute the heat slowdown of these GPUs."""
        site = context.site
        rack_of = site.rack_of_gpu
        free, reporting = _running_free(context, by_heat)
        rack = rack_of[index]
        racks = site.sizes["rack"]
        hot_in = np.bincount(rack, minlength=racks)
        reporting_in = np.bincount(rack_of, weights=reporting, minlength=racks)
        many = _many(hot_in, reporting_in)
        crowd = many[rack]
        cdu_of_rack = site.cdu_of_rack
        if site.sizes["cdu"]:
            joined = cdu_of_rack >= 0
            n_cdu = site.sizes["cdu"]
            hot_at = np.bincount(cdu_of_rack[joined], weights=hot_in[joined], minlength=n_cdu)
            reporting_at = np.bincount(cdu_of_rack[joined], weights=reporting_in[joined], minlength=n_cdu)
            crowd = crowd | (_many(hot_at, reporting_at)[np.maximum(cdu_of_rack[rack], 0)] & joined[rack])
        if context.facility is not None:
            crowd = crowd | context.facility[index]
        if (warm := warm_gpus(context)) is not None:
            crowd = crowd | warm[index]
        alone = np.bincount(rack_of, weights=free, minlength=racks)[rack] >= LEAST_REPORTING
        return np.where(crowd, BY_FACILITY, np.where(alone, BY_ITSELF, BY_WHOM_IS_UNKNOWN)).astype(np.uint8)

    def derive(self) -> None:
        """Recompute the flag that some GPU is or was slowed."""
        self._some = bool(self.lowered.any() or self.slowed_pu.any())


def _many(hot: np.ndarray, reporting: np.ndarray) -> Bool:
    """Return the groups in which more GPUs are slowed at once than by chance."""
    return np.asarray((hot >= LEAST_NEIGHBOURS) & (hot >= NEIGHBOURS_PU * np.maximum(reporting, 1)), np.bool_)


def _running_free(context: RuleContext, by_heat: Bool) -> tuple[Bool, Bool]:
    """Return masks [n]: GPUs known to run without heat slowdown, and GPUs that report this."""
    reporting = context.now.fresh(BITS) | context.now.fresh(HEAT_NS)
    return reporting & ~by_heat, reporting | by_heat


def warm_gpus(context: RuleContext) -> Bool | None:
    """Return the GPUs with a supply or inlet above its guard [n_gpu]; None if none is, or no guard is
    known."""
    site, out = context.site, None
    for key, table in WARM:
        index = context.beyond(key)
        if len(index):
            warm = np.zeros(site.sizes[table], np.bool_)
            warm[index] = True
            of = warm[site.rack_of_gpu if table == "rack" else site.node_of_gpu]
            out = of if out is None else out | of
    return out


def below_facility(context: RuleContext) -> Bool | None:
    """GPUs below a diagnosed fault of cooling or supply [n_gpu]; None if there is no such fault."""
    site = context.site
    racks = nodes = None
    for fault in context.now.faults:
        kind = FAULT_KINDS.get(fault.kind)
        if kind is None or fault.signal or not (kind.cooling or fault.kind in FEEDS):
            continue
        if fault.kind in FEEDS and context.now.now_ns - fault.since_ns > FEED_S * NS:
            continue
        if racks is None or nodes is None:
            racks = np.zeros(site.sizes["rack"], np.bool_)
            nodes = np.zeros(site.sizes["node"], np.bool_)
        if fault.table == "site":
            racks[:] = True
        elif fault.table == "loop":
            cdus = site.loop_of_cdu == fault.entity
            racks |= (site.cdu_of_rack >= 0) & cdus[np.maximum(site.cdu_of_rack, 0)]
        elif fault.table == "cdu":
            racks |= site.cdu_of_rack == fault.entity
        elif fault.table == "rack":
            racks[fault.entity] = True
        elif fault.table == "feeder":
            racks[site.racks_below(fault.entity)] = True
        elif fault.table == "node":
            nodes[fault.entity] = True
    if racks is None or nodes is None:
        return None
    out: Bool = racks[site.rack_of_gpu] | nodes[site.node_of_gpu]
    return out if out.any() else None
