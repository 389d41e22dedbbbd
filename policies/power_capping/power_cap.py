"""power_cap: shares power among GPUs by expected demand and priority, before a budget is reached.

Every few seconds the demand of the next minutes is compared with all budgets at once: racks, feeders (with
the other side lost, unless configured otherwise), CDUs, loops, and external limits of the site and its
feeders. If the demand fits, no GPU is capped. Otherwise priority classes are served in turn. A synchronous
job is served as a whole, since its slowest GPU sets the pace. The rest is distributed on top, so that no cap
is lower than necessary. Cuts apply at once. A raise waits for its own delay, and until the cuts that make
room for it are read back. An overload that still occurs is left to power_guard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from policies.power_capping.budgets import (
    Carried,
    carried_by,
    dead_feeders,
    gain_of,
    other_w,
    pairs_of,
    sums_w,
)
from policies.power_capping.curves import Curve, energy_minimum_w, static_w
from policies.power_capping.demand import (
    AT_CAP_PU,
    CONTROL,
    RESERVE_PU,
    USUAL,
    Wants,
    classes,
    guaranteed_pu,
    kept_pu,
    learned_least_w,
    learned_pu,
    tenants_of,
    together,
    wants,
)
from policies.power_capping.explain import TOPICS, PowerExplainer, fit_series
from policies.power_capping.external_limits import (
    COURSE_COLUMNS,
    ExternalLimits,
    Settings,
    columns_of,
    course_of,
    outside,
)
from policies.power_capping.headroom import power_state
from policies.power_capping.nodes import (
    NODE_CONTROL,
    CappedNodes,
    cap_age_s,
    nodes_of,
    readback_w,
    standing_in,
)
from policies.power_capping.reasons import FIGURES, OTHERS, LimitReasons, kept_figures, place_figures
from policies.power_capping.release import DWELL_S, SPREAD_S, STEP_PU, Raises, steadied
from policies.power_capping.savings import CapAccount
from policies.power_capping.shares import Claims, gpus_w, shared_out, whole_jobs_w
from policies.power_capping.unreported import (
    UnreportedGpus,
    never_reported,
    unreported_gpus,
    waiting_places,
    with_unreported,
)
from twin.catalogue import F64, I8, I32, NS, Bool, ContractError
from twin.contracts import (
    Columns,
    ExplainRequest,
    Explanation,
    Memory,
    PolicyAccount,
    Proposal,
    SeriesWanted,
    Topic,
    View,
    given_away,
    mask_index,
)
from twin.site import Site
from twin.telemetry import GOOD

MARGIN_PU = 0.02  # of a budget that is not planned with: meters and models err. source: estimate
# By which what a rack draws beside its GPUs is taken to change in a second of itself, and for a watt by which
# they left their mean of a quarter minute: CPUs work while they do; and for one by which they were cut: their
# losses are not known that well. source: estimate
OTHER_PU_PER_S, OTHER_LEAST_W, OTHER_OF_GPUS_PU, MEAN_S, OTHER_OF_CUT_PU = 0.005, 1000.0, 0.15, 15.0, 0.08
SETTLED_W = 5.0  # a cap is read back to within this
DEAF_S = 10.0  # after a cut, until whoever obeys has reported it. source: estimate, as of leases
TO_BE_RAISED = (
    f"no budget above is full any more: the cap is raised once {100 * STEP_PU:.0f} % of its range can be "
    f"given back, {DWELL_S:.0f} to {DWELL_S + SPREAD_S:.0f} s after the last cut"
)
RISK_PU = 0.02  # by which a sum may rise above what it was at most of late. source: estimate
# Time constant with which a sum is forgotten, slower than the peaks of GPUs: that all of many jobs draw at
# once is rare. source: estimate
TOGETHER_S = 3600.0
# Of a budget, by which caps may come to more than it. A breaker holds 1/0.8 of its continuous load for ever.
# source: US National Electrical Code, 80 % of the rating for continuous loads
MOST_PU = 0.25
_NAN = float("nan")


@dataclass(eq=False)
class PowerCap:
    """Proposes upper bounds on the power caps of GPUs, or of their nodes, from budgets and demand.

    `failover`: either side carries all that both feed; `high_priority`: from where a job is high;
    `coincidence_pu`: of a budget, by which caps may come to more where peaks never came at once; `tenants`:
    as `tenants_of` reads them; the rest as in `external_limits.Settings`.
    """

    name: ClassVar[str] = "power_cap"
    controls: ClassVar[tuple[str, ...]] = (CONTROL, NODE_CONTROL)
    rank: ClassVar[int] = 60
    period_s: ClassVar[float] = 5.0
    urgent: ClassVar[bool] = False  # what cannot wait for five seconds is power_guard's
    topics: ClassVar[tuple[Topic, ...]] = TOPICS
    # `sum_w`, `layout`: of the coincidence of peaks; `why_*`: the figures of reasons
    memory: ClassVar[Columns | None] = Columns(
        gpu={
            "peak_w": "f8",
            "cap_w": "f8",
            "cut_ns": "i8",
            "sum_w": "f8",
            "layout": "i8",
            "unheard_ns": "i8",
        },
        rack={"other_w": "f8", "gpus_w": "f8", "held_w": "f8", "unread_ns": "i8"} | FIGURES,
        scalars={"peak_ns": "i8"} | COURSE_COLUMNS,
    )

    failover: bool = True
    high_priority: float = 1.0
    margin_pu: float = MARGIN_PU
    coincidence_pu: float = MOST_PU
    tenants: str = ""
    contract_w: float = _NAN
    ramp_up_w_per_s: float = _NAN
    ramp_down_w_per_s: float = _NAN
    dear_usd_per_kwh: float = _NAN
    dirty_g_per_kwh: float = _NAN
    shave_pu: float = 0.0
    lead_s: float = 900.0

    def __post_init__(self) -> None:
        """Check the settings. Raises ContractError with the setting, its value and the expected one."""
        if not isinstance(self.failover, bool):
            raise ContractError(f"failover: expected true or false, got {self.failover!r}")
        if not _is_number(self.high_priority) or not -(2**31) <= self.high_priority < 2**31:
            raise ContractError(f"high_priority: expected a number of 32 bits, got {self.high_priority!r}")
        if not _is_number(self.margin_pu) or not 0.0 <= self.margin_pu < 0.5:
            raise ContractError(f"margin_pu: expected 0 to 0.5, got {self.margin_pu!r}")
        if not _is_number(self.coincidence_pu) or not 0.0 <= self.coincidence_pu <= MOST_PU:
            raise ContractError(f"coincidence_pu: expected 0 to {MOST_PU}, got {self.coincidence_pu!r}")
        if not isinstance(self.tenants, str):
            raise ContractError(f"tenants: expected text such as acme=10:0.3, got {self.tenants!r}")
        self.least_high = int(self.high_priority)
        self.tenant_shares = tenants_of(self.tenants)
        terms = {field.name: getattr(self, field.name) for field in fields(Settings)}
        self.outside = Settings(**terms).checked()

    def explain(
        self, view: View, memory: Memory, request: ExplainRequest
    ) -> Explanation | Callable[[], Explanation]:
        """Headroom, held caps, their price or room for more racks, as the request asks."""
        del memory  # the leases and the proposals in force say what is held
        return PowerExplainer(self.name, self.failover, self.least_high, self.tenant_shares).explain(
            view, request
        )

    def account(self, previous: PolicyAccount | None = None) -> CapAccount:
        """The account of the work that caps cost and the energy they save; continues the previous one."""
        account = previous if isinstance(previous, CapAccount) else CapAccount()
        account.failover, account.high_priority = self.failover, self.least_high
        return account

    def series_wanted(self, view: View, request: ExplainRequest) -> SeriesWanted | None:
        """The recorded power of racks, where the request asks how many more fit."""
        if request.topic != "fit":
            return None
        return fit_series(power_state(view, request, self.failover, self.least_high))

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Propose caps where a budget binds, or did so recently."""
        site, now_ns = view.site, view.now_ns
        if not site.sizes["gpu"]:
            return [], dict(memory)
        last_ns = int(memory["peak_ns"])
        since_s = max(now_ns - last_ns, 0) / NS if last_ns else 0.0
        nodes = nodes_of(site)
        want, other, carried, unreported, known = self._loads(view, memory, nodes, since_s)
        limits, course = self._outside(view, carried, want, other, memory)
        carried = carried.within(limits.site_w, limits.feeder_w)
        kept = dict(memory) | {"peak_w": want.peak_w, "peak_ns": np.array(now_ns)} | course | known
        left_w = self._left_w(view, carried, want, other, memory, nodes)
        spared, sums = self._spared_w(site, carried, want, left_w, memory, since_s)
        left_w, kept = left_w + spared, kept | sums
        left_w = np.where(waiting_places(site, carried, want, left_w, unreported), np.inf, left_w)
        job = np.where(want.capped, together(view), -1)
        class_of = _of_jobs(classes(view, self.least_high, self.tenant_shares), job)
        compute_pu = learned_pu(view)
        lower = _shaved(view, want, class_of, compute_pu, limits.shave_pu)
        granted = None
        if any(tenant.share_pu > 0 for tenant in self.tenant_shares.values()):
            site_w = gpus_w(site, carried, left_w, lower)
            granted = guaranteed_pu(view, lower, self.tenant_shares, site_w)
        claims = Claims(class_of, job, kept_pu(view, lower), granted, compute_pu)
        shared = shared_out(site, carried, left_w, lower, claims)
        held_by, short = np.full(len(job), -1), np.zeros(len(left_w), np.bool_)
        cap_w = np.where(want.capped, lower.most_w, np.inf)
        if shared is not None:
            cap_w, held_by, short = shared
        limit_w = left_w + self.margin_pu * np.where(np.isfinite(left_w), carried.limit_w, 0.0)
        along = np.flatnonzero(held_by == carried.whole) if limits.let_up else None
        cap_w, cut_ns = steadied(view, want, cap_w, memory, claims, Raises(carried, limit_w, along))
        capped = want.capped & (cap_w < want.most_w)
        kept["cap_w"] = np.where(capped, cap_w, 0.0)
        kept["cut_ns"] = np.where(capped, cut_ns, 0)
        why = LimitReasons(
            view, carried, limits, unreported, held_by, short, lower.most_w < want.most_w, self.margin_pu
        )
        figures: Memory = {name: np.zeros_like(memory[name]) for name in FIGURES}
        named, n_other = why.binding_places(capped)
        if len(named):
            asked = lower._replace(demand_w=whole_jobs_w(lower, job))
            found = place_figures(site, carried, asked, left_w, short, self.margin_pu)
            same = bool((memory["layout"] == sums["layout"]).any())  # the row of a new device is empty
            figures = kept_figures(memory, found, named, now_ns, same)
        sentences = why.sentences(named, n_other, figures)
        return _proposals(want, cap_w, capped, nodes, why, sentences), given_away(kept | figures)

    def _loads(
        self, view: View, memory: Memory, nodes: CappedNodes, since_s: float
    ) -> tuple[Wants, F64, Carried, UnreportedGpus, Memory]:
        """(demand of GPUs, what racks draw beside them [n_rack], places, unreported GPUs, columns to be
        remembered).
        """
        site = view.site
        # The peak of who just spoke first was estimated
        spoke = (memory["unheard_ns"] > 0) & ~never_reported(view, nodes)
        peak_w = np.where(spoke, 0.0, memory["peak_w"])
        want, reporting = wants(view, peak_w, since_s), None
        if len(nodes.node):
            want, reporting = standing_in(view, want, nodes, peak_w, since_s)
        other = other_w(view, want.power_w, gain_of(site), reporting)
        carried = carried_by(view, pairs_of(site, dead_feeders(view), self.failover))
        unreported = unreported_gpus(view, carried, want, other, nodes, memory)
        want = with_unreported(view, want, unreported, nodes, peak_w, since_s)
        other, known = _slewed(site, unreported.other_w, want, readback_w(view, nodes), memory, since_s)
        # An assumed value is not held on to: the first reading counts as it is
        measured = np.isfinite(view.worst("rack.power_w")) & ~unreported.learning_rack
        known["other_w"] = np.where(measured, known["other_w"], 0.0)
        return want, other, carried, unreported, known | unreported.since

    def _outside(
        self, view: View, carried: Carried, want: Wants, other: F64, memory: Memory
    ) -> tuple[ExternalLimits, Memory]:
        """Return (external limits, scalars of the memory)."""
        site, first = view.site, carried.pairs.drawn
        rack_w = np.nan_to_num(other) + site.sum_by_rack("gpu", want.power_w) * gain_of(site)
        drawn_w = sums_w(carried, rack_w)[first : first + carried.n_feeder]
        metered = view.quality("feeder.power_w") == GOOD
        drawn_w = np.where(metered, view.believed("feeder.power_w"), drawn_w).astype(np.float64)
        unreported = not (
            np.isfinite(view.believed("rack.power_w")).any() or (view.quality("gpu.power_w") == GOOD).any()
        )
        load_w = _NAN if unreported else float(rack_w.sum())
        limits, course = outside(view, self.outside, course_of(memory), load_w, drawn_w)
        return limits, columns_of(course)

    def _left_w(
        self, view: View, carried: Carried, want: Wants, other: F64, memory: Memory, nodes: CappedNodes
    ) -> F64:
        """Return the power of each place for GPUs [n_place]; inf without a limit or any report."""
        site, gain = view.site, gain_of(view.site)
        reported = np.isfinite(view.believed("rack.power_w")) | (
            site.sum_by_rack("gpu", np.isfinite(view.believed("gpu.power_w")).astype(np.float64)) > 0
        )
        # A read-back long after the last cut stays: a device that does not obey by then never will
        known = cap_age_s(view, nodes) < (view.now_ns - memory["cut_ns"]) / NS - DEAF_S
        # A device that was cut and is not read back yet may draw as before
        cap_w, readback = memory["cap_w"], np.nan_to_num(readback_w(view, nodes))
        late_w = np.where((cap_w > 0) & (readback > cap_w + SETTLED_W), readback - cap_w, 0.0)
        late_w, fixed_w, held_w = (
            sums_w(carried, site.sum_by_rack("gpu", of_gpu) * gain)
            for of_gpu in (
                want.of_capped(np.where(known, 0.0, late_w)),
                want.of_capped(np.where(known, late_w, 0.0), want.power_w),
                want.of_capped(np.where(cap_w > 0, cap_w, want.demand_w)),
            )
        )
        left_w = (1.0 - self.margin_pu) * carried.limit_w - sums_w(carried, np.nan_to_num(other)) - fixed_w
        # Cuts on their way are a reason to raise nothing, and no reason to cut the same again
        left_w = np.maximum(left_w - late_w, np.minimum(left_w, held_w))
        return np.where(sums_w(carried, reported.astype(np.float64)) > 0, np.maximum(left_w, 0.0), np.inf)

    def _spared_w(
        self, site: Site, carried: Carried, want: Wants, left_w: F64, memory: Memory, since_s: float
    ) -> tuple[F64, Memory]:
        """Return (power that each place may add for its GPUs [n_place], the memory of it).

        Jobs that take turns never draw their peaks at once. The peak of each place's sum is remembered beside
        the peaks of its GPUs. The difference, and what GPUs that are not held have above their peaks, goes to
        those who want more, less a risk that the sum rises, and at most what a breaker bears for ever. Who
        wants more is taken to want it with all others at once, so that no raise leads over a budget by
        itself. Where a place carried more than was planned, what was learned of it is forgotten, and its caps
        add up to its budget again.

        Sums are kept in the first rows of the columns of GPUs, and begin anew with every other layout of
        places. A place beyond the last row is given nothing.
        """
        n, gain = min(len(left_w), site.sizes["gpu"]), gain_of(site)

        def of_places(gpu_w: F64) -> F64:
            return sums_w(carried, site.sum_by_rack("gpu", want.of_capped(gpu_w)) * gain)

        now_w = of_places(want.power_w)
        # A device that was cut cannot peak as it did, and its peak is no coincidence
        bound_w = np.where(memory["cap_w"] > 0, memory["cap_w"], np.inf)
        peaks_w = of_places(np.maximum(np.minimum(want.peak_w, bound_w), want.power_w))
        # The room above peaks is for the few devices that will need it
        may_w = np.minimum(want.demand_w, (1.0 + RESERVE_PU) * want.peak_w)
        apart_w = of_places(np.maximum(np.minimum(may_w, bound_w), want.power_w))
        layout = _layout(site, carried)
        known = (memory["layout"] == layout).all()
        sum_w = apart_w.copy()
        if known:
            before_w = memory["sum_w"][:n] * np.exp(-since_s / TOGETHER_S)
            sum_w[:n] = np.where((now_w > left_w)[:n], apart_w[:n], np.clip(before_w, now_w[:n], peaks_w[:n]))
        most_w = self.coincidence_pu * np.where(np.isfinite(carried.limit_w), carried.limit_w, 0.0)
        spared = np.clip(apart_w - (1.0 + RISK_PU) * sum_w, 0.0, most_w)
        kept = np.zeros(site.sizes["gpu"])
        kept[:n] = sum_w[:n]
        return spared, {"sum_w": kept, "layout": np.full(site.sizes["gpu"], layout, np.int64)}


def _layout(site: Site, carried: Carried) -> int:
    """Return a hash of the places and their racks; never 0."""
    pairs, sum_of = carried.pairs, zlib.crc32(site.spec_hash.encode())
    for part in (pairs.place, pairs.rack, pairs.share):
        sum_of = zlib.crc32(np.ascontiguousarray(part).tobytes(), sum_of)
    return sum_of + 1


def _slewed(
    site: Site, other: F64, want: Wants, readback: F64, memory: Memory, since_s: float
) -> tuple[F64, Memory]:
    """Return (slew-limited power of racks beside their GPUs [n_rack], columns of the memory).

    Their meters report the past: where GPUs just fell, what they drew until then seems to be beside
    them, and would be taken from them once more; where they just rose, less. What is beside them rises and
    falls with them, and else slowly. With GPUs that are cut, and not those that pause, it may seem to rise.
    """
    before, mean_w, held_before_w = memory["other_w"], memory["gpus_w"], memory["held_w"]
    gpus_w = site.sum_by_rack("gpu", want.power_w)
    at_cap = want.power_w >= AT_CAP_PU * np.nan_to_num(readback, nan=np.inf)
    held_w = site.sum_by_rack("gpu", np.where(at_cap, want.peak_w - want.power_w, 0.0))
    known, step = before > 0, OTHER_PU_PER_S * since_s * (before + OTHER_LEAST_W)
    above_w = OTHER_OF_GPUS_PU * (gpus_w - mean_w)
    cut_w = OTHER_OF_CUT_PU * np.maximum(held_w - held_before_w, 0.0)
    low, high = before - step + np.minimum(above_w, 0.0), before + step + np.maximum(above_w, 0.0) + cut_w
    other = np.where(known, np.clip(other, low, high), other)
    mean_w = np.where(known, gpus_w + (mean_w - gpus_w) * np.exp(-since_s / MEAN_S), gpus_w)
    some = np.bincount(site.rack_of_gpu, minlength=len(other)) > 0  # nothing moves beside no GPU
    kept = {"other_w": np.nan_to_num(other), "gpus_w": mean_w, "held_w": held_w}
    return other, {name: np.where(some, of_rack, 0.0) for name, of_rack in kept.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_jobs(class_of: I8, job: I32) -> I8:
    """The highest class of any of its GPUs for all of a synchronous job [n_gpu]."""
    mine = job >= 0
    if not mine.any():
        return class_of
    of_job = np.zeros(int(job.max()) + 1, np.int8)
    np.maximum.at(of_job, job[mine], class_of[mine])
    return np.where(mine, of_job[job], class_of).astype(np.int8)


def _shaved(view: View, want: Wants, class_of: I8, compute_pu: F64 | None, shave_pu: float) -> Wants:
    """Lower the demand of the usual classes while the grid is dear or dirty; no job goes below the cap at
    which its work takes the least energy, as that would save nothing: the power that a model learned, else
    what follows from the job's share of computing and a fixed shape of power over clock."""
    if shave_pu <= 0.0:
        return want
    below = want.capped & (class_of <= USUAL)
    most_w = want.most_w - np.where(below, shave_pu * (want.most_w - want.floor_w), 0.0)
    least_w = learned_least_w(view)
    if compute_pu is not None:
        unknown = below & np.isfinite(compute_pu) & ~np.isfinite(least_w)
        at = np.flatnonzero(unknown)
        idle_w = static_w(view.site.design.gpu_idle_w[view.site.rack_of_gpu[at]], want.most_w[at])
        curve = Curve(idle_w, want.demand_w[at], compute_pu[at])
        least_w[at] = energy_minimum_w(curve, view.site.beside_gpu_w(at))
    kept = below & np.isfinite(least_w)
    most_w = np.where(kept, np.clip(least_w, most_w, want.most_w), most_w)
    return want._replace(most_w=most_w, demand_w=np.minimum(want.demand_w, most_w))


def _proposals(
    want: Wants, cap_w: F64, capped: Bool, nodes: CappedNodes, why: LimitReasons, sentences: dict[int, str]
) -> list[Proposal]:
    """Return one proposal per binding place, one for the voluntary reduction, and one for the rest."""
    if not capped.any():
        return []
    out: list[Proposal] = []
    held_by = why.held_by
    shown = np.full(len(why.short) + 1, OTHERS)
    named = [place for place in sentences if place >= 0]
    shown[named] = named
    shaved, raised = -2, -1
    place = np.where(held_by >= 0, shown[held_by], raised)
    place = np.where((held_by < 0) & why.shaved, shaved, place)
    reasons = sentences | {
        shaved: f"normal work is reduced for the grid: {why.limits.shave_why}",
        raised: TO_BE_RAISED,
    }
    for at, reason in reasons.items():
        mine = capped & (place == at)
        index, standing = mask_index(mine & ~nodes.inside), mine[nodes.gpu]
        rows = (
            (CONTROL, index, index),
            (NODE_CONTROL, nodes.node[standing].astype(np.int32), nodes.gpu[standing]),
        )
        for control, entity, row in rows:
            if len(entity):
                low_w, high_w = want.floor_w[row], np.clip(cap_w[row], want.floor_w[row], want.most_w[row])
                out.append(Proposal(control, entity, low_w, high_w, high_w, reason))
    return out
