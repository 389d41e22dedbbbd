"""Spares: nodes that are kept free, and the choice of the spare that replaces a leaving node.

A spare must be free, in service, known to be healthy, with no grave fault of power or cooling above it, and
in the scale-up domain of a job that lives within one. No rack, feeder or CDU may exceed its limit by it, also
with one feed lost. Of the others the best by distance, hazard, failed neighbours, thermal margin and load is
chosen, for the most important node first. The number of spares wanted is in `spare_count`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.node_replacement.evidence import DAY_S, failure_chance as chance_of, reporting_by_gpus_alone
from policies.node_replacement.headroom import LoadLimits, limits_after_shift, load_limits, load_w, shift_load
from policies.node_replacement.topology import below, cdu_of_node
from twin.catalogue import F64, I32, Bool
from twin.contracts import DEGRADED, FAILED, UNKNOWN, View
from twin.diagnosis import FAULT_KINDS
from twin.health import EXPLAINS
from twin.site import Site
from twin.telemetry import JobSlots

SERVICE = "node.service_level"
SURE_PU = 0.5  # below which a diagnosis counts for nothing. source: estimate
MOST_PU = 0.2  # chance that a spare fails within a day: beyond, it is none. source: estimate
MARGIN_K = 10.0  # below the guard of the rack's supply: so much is plenty. source: estimate
# Weights of the reasons against a spare, of 1 in all. source: estimate
WEIGHT_DISTANCE, WEIGHT_HAZARD, WEIGHT_NEIGHBOURS, WEIGHT_HEAT, WEIGHT_LOAD = 0.35, 0.25, 0.2, 0.1, 0.1
# Distance from the node that leaves, by what both are in; beyond is another hall. source: estimate
DOMAIN_PU, RACK_PU, LEAF_PU, CDU_PU, HALL_PU = 0.0, 0.1, 0.2, 0.3, 0.6
MOST_PAIRS = 2_000_000  # leaving nodes times spares that are looked at in one call
# Reasons against a spare, in the order in which they are tested
WHY = (
    "promised to another node",
    "busy",
    "of unknown use",
    "out of service",
    "under work",
    "of unknown health",
    "likely to fail itself",
    "affected by a fault of power or cooling",
    "too warm",
)


class _Candidates(NamedTuple):
    """Spares that can take over now, the penalty of each [s], and the reasons against the others."""

    node: I32
    against: F64
    why: str


def free_spares(site: Site, jobs: JobSlots, service_level: F64) -> Bool:
    """Return the nodes that are kept free and are so now [n_node]: of spare racks, and the last
    `spare_nodes` of racks.

    `service_level` [n_node]; NaN = not reported, taken as in service.
    """
    with np.errstate(invalid="ignore"):
        gone = service_level >= 1.0
    out: Bool = site.spare_node & (jobs.job_of_node < 0) & ~gone
    return out


def assign_spares(view: View, leaving: I32, spare: Bool, taken: Bool) -> tuple[I32, F64, list[str]]:
    """Return (the spare of each leaving node, -1 = none; its score, 1 = best, NaN = none; the reason for
    none).

    `leaving` [k]: the most important first; `spare`, `taken` [n_node]: kept free, and promised already. Each
    node is promised once; loads that move count for those that come after. `why_not` is "" beside a spare.
    """
    k, site = len(leaving), view.site
    chosen, score = np.full(k, -1, np.int32), np.full(k, np.nan)
    why_not = ["more nodes leave than are checked at once"] * k
    held, (busy_w, idle_w) = load_limits(view), load_w(view)
    free = _candidates(view, spare, taken, leaving)
    open_: Bool = np.ones(len(free.node), np.bool_)
    slot = view.jobs.job_of_node[leaving]
    ill = _ill_pu(view, leaving)
    needs = _needs_domain(view, leaving, slot)
    domain = np.where(needs, site.supernode_of_node[leaving], -1)
    refused: dict[tuple[int, int], tuple[float, str]] = {}  # rack and domain -> least load, why
    for i in range(min(k, MOST_PAIRS // max(len(free.node), 1))):
        node = int(leaving[i])
        if slot[i] < 0:
            why_not[i] = "no job runs on it" if view.jobs.known else "the jobs on it are unknown"
            continue
        if not open_.any():
            why_not[i] = free.why or "all spares are promised to nodes of higher priority"
            continue
        rows = np.flatnonzero(open_)
        if needs[i]:
            rows = rows[site.supernode_of_node[free.node[rows]] == domain[i]]
            if not len(rows):
                why_not[i] = "no spare is free in its scale-up domain, within which its job lives"
                continue
        here = int(site.rack_of_node[node]), int(domain[i])
        if here in refused and busy_w[node] >= refused[here][0]:  # from there, what is more fits no better
            why_not[i] = refused[here][1]
            continue
        there = free.node[rows]
        load = shift_load(view, held, np.full(len(there), node, np.int32), there, busy_w, idle_w)
        if not load.fits.any():
            at = int(np.argmin(load.use_pu))
            why_not[i] = _limit_text(view, held, int(load.place[at]), float(load.use_pu[at]))
            refused[here] = float(busy_w[node]), why_not[i]
            continue
        against = (
            free.against[rows] + WEIGHT_DISTANCE * _far_pu(view, node, there) + WEIGHT_NEIGHBOURS * ill[there]
        )
        against = against + WEIGHT_LOAD * np.clip(load.use_pu, 0.0, 1.0) ** 2
        at = int(np.argmin(np.where(load.fits, against, np.inf)))
        chosen[i], score[i], why_not[i] = there[at], max(1.0 - against[at], 0.0), ""
        open_[rows[at]] = False
        held = limits_after_shift(view, held, node, int(there[at]), busy_w, idle_w)
        refused.clear()
    return chosen, score, why_not


def _limit_text(view: View, held: LoadLimits, place: int, use: float) -> str:
    if not np.isfinite(use):
        return f"what {held.name(view, place)} carries is not known, so no spare is known to fit"
    return f"every spare would break a limit: the best takes {held.name(view, place)} to {use:.0%} of its own"


def _candidates(view: View, spare: Bool, taken: Bool, leaving: I32) -> _Candidates:
    """Return the spares that can take over, the penalty of each, and the reasons against the others."""
    kept = spare.copy()
    kept[leaving] = False
    node = np.flatnonzero(kept).astype(np.int32)
    chance = chance_of(view, DAY_S)
    margin_k = _margin_k(view)
    level = np.fmax(view.commanded(SERVICE), view.readback(SERVICE))
    for request in view.requests:
        if request.control == SERVICE and max(request.lo, request.want or 0.0) >= 1.0:
            level = level.copy()
            level[view.targets(request)] = 1.0
    with np.errstate(invalid="ignore"):
        gone, likely, hot = level >= 1.0, chance > MOST_PU, margin_k < 0.0
    work = view.maintenance("node")
    grave, slight = _facility_faults(view)
    refusals = (
        taken,
        view.jobs.job_of_node >= 0,
        view.protected_nodes(),
        gone,
        np.zeros(len(kept), np.bool_) if work is None else work,
        unwell(view),
        likely,
        grave,
        hot,
    )
    rest, reasons = np.ones(len(node), np.bool_), []
    for why, none in zip(WHY, refusals, strict=True):
        count = int(np.count_nonzero(rest & none[node]))
        rest &= ~none[node]
        if count:
            reasons.append(f"{count} {why}")
    why = (
        ""
        if rest.any()
        else f"no spare is free: {', '.join(reasons)}"
        if reasons
        else "no node is kept as a spare"
    )
    node = node[rest]
    usual = float(np.nanmedian(chance)) if np.isfinite(chance).any() else 0.0
    pu = chance[node]
    risk = np.where(np.isnan(pu), 1.0, pu / np.maximum(pu + usual, 1e-12))
    warm = 1.0 - np.clip(np.nan_to_num(margin_k[node], nan=MARGIN_K) / MARGIN_K, 0.0, 1.0)
    return _Candidates(
        node, WEIGHT_HAZARD * risk + WEIGHT_HEAT * warm + WEIGHT_NEIGHBOURS * slight[node], why
    )


def unwell(view: View) -> Bool:
    """Return the nodes that are degraded, failed or unknown, themselves or by one of their GPUs [n_node].

    A node that never reported by itself, for want of a BMC, serves as long as all its GPUs are known.
    """
    level, of_gpu, of = view.health("node").level, view.health("gpu").level, view.site.node_of_gpu
    serves = reporting_by_gpus_alone(view, len(level))
    serves[of[of_gpu == UNKNOWN]] = False
    out: Bool = ((level == UNKNOWN) & ~serves) | (level >= DEGRADED)
    out[of[of_gpu >= DEGRADED]] = True
    return out


def _margin_k(view: View) -> F64:
    """Return the worst margin of each rack's coolant below its guard [n_node]; NaN = no guard."""
    site, limit = view.site, view.limit("rack.supply_temp_c")
    if limit is None:
        return np.full(site.sizes["node"], np.nan)
    return (limit.guard - view.worst("rack.supply_temp_c").astype(np.float64))[site.rack_of_node]


def _facility_faults(view: View) -> tuple[Bool, F64]:
    """Return (nodes below a fault that takes nodes down; confidence of lesser faults of power and cooling)
    [n]."""
    n = view.site.sizes["node"]
    grave, slight = np.zeros(n, np.bool_), np.zeros(n)
    for fault in view.faults():
        kind = FAULT_KINDS.get(fault.kind)
        if fault.signal or fault.confidence_pu < SURE_PU or kind is None:
            continue
        if fault.kind in EXPLAINS and fault.kind != "heat_wave":
            grave |= below(view.site, fault.table, fault.entity)
        elif kind.cooling:
            here = below(view.site, fault.table, fault.entity)
            slight[here] = np.maximum(slight[here], fault.confidence_pu)
    return grave, slight


def _ill_pu(view: View, leaving: I32) -> F64:
    """Return the share of the nodes around each that failed or leave: the greater of its rack and its CDU
    [n_node]."""
    site = view.site
    ill = (view.health("node").level == FAILED).astype(np.float64)
    ill[leaving] = 1.0
    out = np.zeros(len(ill))
    cdu = cdu_of_node(site)
    for above, n in ((site.rack_of_node, site.sizes["rack"]), (cdu, site.sizes["cdu"])):
        there = above >= 0
        count = np.maximum(np.bincount(above[there], minlength=n), 1)
        # One of a place is by itself: what is shared shows with the second
        many = np.maximum(np.bincount(above[there], ill[there], n) - 1.0, 0.0) / count
        out[there] = np.maximum(out[there], many[above[there]])
    return np.minimum(4.0 * out, 1.0)  # a quarter of a place is all. source: estimate


def _needs_domain(view: View, leaving: I32, slot: I32) -> Bool:
    """Return the nodes whose job is synchronous and within one scale-up domain [k]."""
    jobs, domain = view.jobs, view.site.supernode_of_node
    out: Bool = np.zeros(len(leaving), np.bool_)
    for job in np.unique(slot[slot >= 0]).tolist():
        nodes = jobs.nodes[job]
        if jobs.synchronous[job] and len(nodes) > 1 and (domain[nodes] == domain[nodes[0]]).all():
            out[slot == job] = True
    return out


def _far_pu(view: View, node: int, spare: I32) -> F64:
    """Return the distance of each spare from a node [s]: 0 in its scale-up domain, 1 in another hall.

    On another or an unknown leaf, the CDU and the hall decide.
    """
    site = view.site
    rack, its = site.rack_of_node[node], site.rack_of_node[spare]
    cdu, leaf = site.cdu_of_rack, site.leaf_of_rack
    same: list[Bool] = [
        site.supernode_of_node[spare] == site.supernode_of_node[node],
        its == rack,
        # Before the CDU, as the job feels hops; being on what fails speaks against a spare as ILL
        (leaf[its] == leaf[rack]) & (leaf[rack] >= 0),
        (cdu[its] == cdu[rack]) & (cdu[rack] >= 0),
        site.hall_of_rack[its] == site.hall_of_rack[rack],
    ]
    by = [DOMAIN_PU, RACK_PU, LEAF_PU, CDU_PU, HALL_PU]
    return np.select(same, by, 1.0).astype(np.float64)
