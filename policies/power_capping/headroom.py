"""Headroom: the power left in every budget of the power and cooling trees, now and in the near future.

It covers racks, feeders (as they are, and with the other side lost), CDUs, loops and the site. Running load
targets count. The sums are those of the proposals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from policies.power_capping.budgets import Carried, carried_by, dead_feeders, gain_of, pairs_of, sums_w
from policies.power_capping.loads import loads_of, rack_power
from policies.power_capping.nodes import nodes_of
from policies.power_capping.unreported import learning_s, never_reported
from twin.catalogue import F64, I64, NS, Bool, clean
from twin.contracts import ExplainRequest, View, finite, measured
from twin.telemetry import GOOD

CAP, NODE_CAP = "gpu.power_cap_w", "node.power_cap_w"
KINDS = ("rack", "feeder", "cdu", "loop", "site")
MOST_HORIZONS = 6
MOST_ROWS = 1000  # of an answer, racks beside them
SHOWN_FEW = 8  # places on the overview
MOST_USE_PU = 10.0  # that is stated; ten times too much is all that matters
SLACK_W = 1.0  # a cap within this of the most that a device may have is none
POLICIES = ("power_cap", "power_guard")
ADD_IT = (
    "no policy caps power here: add `policies: {power_guard: {}, power_cap: {}}` to the site file, then "
    "`racktwin daemon reload`; they begin with authority `advise`, which shows and journals proposals and "
    "sends no commands"
)
NO_LIMITS = "no budget is set: give feeders a budget_w, or racks a profile with its maximum power"
NO_FORECAST = "no forecast of racks or feeders yet: `racktwin forecast list` says when the first one starts"


class PlaceLoads(NamedTuple):
    """The load of each place [n_place]: W now, W with the other side lost, racks below that never reported,
    the kind, and whether a meter of its own is read."""

    now_w: F64
    lost_w: F64
    unreported: F64
    kind: list[str]
    metered: Bool


@dataclass(frozen=True, slots=True)
class PowerState:
    """The loads and budgets of all places at one instant, with the view and the request they come from."""

    view: View
    request: ExplainRequest
    failover: bool  # each side is to carry all that both feed
    high_priority: int
    dead: Bool
    now: Carried
    lost: Carried
    rack_w: F64  # [n_rack] NaN where nothing was ever reported
    loads: PlaceLoads


def power_state(view: View, request: ExplainRequest, failover: bool, high_priority: int) -> PowerState:
    """Return the state of power from a view."""
    dead = dead_feeders(view)
    now = carried_by(view, pairs_of(view.site, dead, False))
    lost = carried_by(view, pairs_of(view.site, dead, True))
    rack_w = rack_power_w(view)
    loads = _loads(view, now, lost, rack_w)
    return PowerState(view, request, failover, high_priority, dead, now, lost, rack_w, loads)


def rack_power_w(view: View) -> F64:
    """Power of each rack [n_rack]: its meter, as bad as it may read by now where silent, else its GPUs' sum;
    NaN where nothing was ever reported."""
    rack = rack_power(view)
    read_w = np.where(rack.reporting, rack.read_w, rack.worst_w)
    gpus_w = view.site.sum_by_rack("gpu", np.nan_to_num(view.worst("gpu.power_w").astype(np.float64)))
    gpus_w = gpus_w * gain_of(view.site)
    return np.where(np.isfinite(read_w), read_w, np.where(gpus_w > 0, gpus_w, np.nan))


def kinds_of(carried: Carried, sizes: dict[str, int]) -> list[str]:
    """The kind of each place, by the order that `Carried` keeps."""
    out: list[str] = []
    for kind in KINDS:
        out += [kind] * (1 if kind == "site" else sizes[kind])
    return out[: len(carried.limit_w)]


def _loads(view: View, now: Carried, lost: Carried, rack_w: F64) -> PlaceLoads:
    """Feeders by their meters where those report; NaN for a place below which nothing reported."""
    known = np.nan_to_num(rack_w)
    some = sums_w(now, np.isfinite(rack_w).astype(np.float64)) > 0
    silent = (~np.isfinite(rack_w)).astype(np.float64)[now.pairs.rack]
    unreported = np.bincount(now.pairs.place, silent, len(now.limit_w)).astype(np.float64)
    now_w = np.where(some, sums_w(now, known), np.nan)
    first, n = now.feeder(0), now.n_feeder
    metered = np.zeros(len(now_w), np.bool_)
    if n:
        loads = loads_of(view, now)
        metered[first : first + n] = loads.metered & (view.quality("feeder.power_w") == GOOD)
        now_w[first : first + n] = np.where(np.isfinite(loads.load_w), loads.load_w, now_w[first : first + n])
    lost_w = np.fmax(np.where(some, lost_sums_w(lost, known, len(now_w)), np.nan), now_w)
    kind = kinds_of(now, view.site.sizes)
    cdu = np.array([k == "cdu" for k in kind], np.bool_)
    if cdu.any():  # a CDU that meters its own heat knows better
        own = measured(view, "cdu.heat_w")
        now_w[cdu] = lost_w[cdu] = np.where(np.isfinite(own) & (own > 0), own, now_w[cdu])
    return PlaceLoads(now_w, lost_w, unreported, kind, metered)


def cap_leases(state: PowerState, control: str = CAP) -> tuple[F64, I64]:
    """(value, NaN where none runs; index of the policy) of the leases of a cap [n]."""
    n = state.view.site.sizes[control.partition(".")[0]]
    leases = state.request.leases(control)
    if leases is None:
        return np.full(n, np.nan), np.full(n, -1, np.int64)
    return leases.value, leases.owner.astype(np.int64)


def capped_by(state: PowerState, control: str) -> Bool:
    """Return the devices that a lease of this cap holds below their maximum [n]."""
    capped: Bool = cap_leases(state, control)[0] < state.view.envelope(control).high - SLACK_W
    return capped


def capped_of(state: PowerState) -> Bool:
    """Return the GPUs that a lease of their own or of their node caps below their maximum [n_gpu]."""
    site, capped = state.view.site, capped_by(state, CAP)
    return capped | capped_by(state, NODE_CAP)[site.node_of_gpu] if site.sizes["gpu"] else capped


def lost_sums_w(lost: Carried, of_rack: F64, n_place: int) -> F64:
    """Sum these watts of racks by place with the other side lost [n_place]."""
    return sums_w(lost, of_rack)[:n_place]


class Limits(NamedTuple):
    """W of each place at an instant [n_place], inf = none: its budget, and what load targets let it draw now,
    with the name of the strictest."""

    budget_w: F64
    target_w: F64
    target: list[str]


def limits_at(state: PowerState, at_ns: int) -> Limits:
    """Return the budgets and load targets in force at an instant, as known now."""
    view, now = state.view, state.now
    limit_w, target_w = now.limit_w.copy(), np.full(len(now.limit_w), np.inf)
    first, n = now.feeder(0), now.n_feeder
    budget_at = state.request.budget_at
    budget_w = view.budget_w() if budget_at is None else budget_at(at_ns)
    limit_w[first : first + n] = np.where(np.isfinite(budget_w), budget_w, np.inf)
    names = [""] * len(limit_w)
    site_at = state.loads.kind.index("site") if "site" in state.loads.kind else None
    for target in view.load_targets():
        if not target.runs(at_ns):
            continue
        places = [site_at] if target.feeders is None else [now.feeder(int(f)) for f in target.feeders]
        for place in places:
            if place is not None and target.limit_w < target_w[place]:
                target_w[place], names[place] = target.limit_w, clean(target.name, 120)
    return Limits(limit_w, target_w, names)


def limit_from(state: PowerState, place: int, limits: Limits) -> str:
    """The source of a place's budget: the site file, a profile, a reading, or an outside daemon."""
    view, now, kind, budget_w = state.view, state.now, state.loads.kind[place], limits.budget_w[place]
    site, design = view.site, view.site.design
    if not np.isfinite(budget_w):
        return ""
    if kind == "feeder":
        feeder = place - now.feeder(0)
        if not site.external_budget[feeder] or budget_w == site.budget_w[feeder]:
            return "site file, budget_w"
        by_file = budget_w == site.guaranteed_w[feeder]
        return "site file, guaranteed_w" if by_file else "granted from outside for a limited time"
    if kind == "rack":
        stated = view.limit("rack.power_w")
        is_stated = stated is not None and stated.max[place] <= design.rack_max_w[place]
        of = "limit of rack.power_w" if is_stated else "its rack_max_w, or its parts where they draw less"
        return f"profile {site.profile_of_rack[place]}, {of}"
    first = now.n_rack + now.n_feeder
    nominal_w = np.concatenate([design.cdu_heat_w, design.loop_heat_w])[place - first]
    if budget_w < nominal_w:
        return f"measured flow, {100 * budget_w / nominal_w:.0f} % of the nominal"
    return "profiles of its racks, heat at nominal flow"


class ComingLoads(NamedTuple):
    """Loads [n_place] at the upper ends of 90 % bands at one horizon: W as fed now, and with the other side
    lost.

    `basis` names whose bands. `summed`: bands of several racks were added up, which is a bound and no
    forecast; sums with the other side lost always are.
    """

    horizon_s: float
    upper_w: F64
    lost_w: F64
    basis: str
    summed: Bool


def ahead_of(state: PowerState) -> list[ComingLoads]:
    """Return the forecast loads of all places by horizon, for horizons with a band."""
    view, now, out = state.view, state.now, []
    several = np.bincount(now.pairs.place, minlength=len(now.limit_w)) > 1
    first, n = now.feeder(0), now.n_feeder
    quantities = ("rack.power_w", "feeder.power_w", "site.power_w")
    horizons = sorted({h for key, h in view.forecasts if key in quantities})
    for horizon_s in horizons[:MOST_HORIZONS]:
        by_rack = view.forecasts.get(("rack.power_w", horizon_s))
        by_feeder = view.forecasts.get(("feeder.power_w", horizon_s))
        by_site = view.forecasts.get(("site.power_w", horizon_s))
        upper_w = np.full(len(now.limit_w), np.nan)
        lost_w, basis, summed = upper_w.copy(), "", several.copy()
        if by_rack is not None:
            high_w = np.where(np.isfinite(by_rack.hi), by_rack.hi, np.nan).astype(np.float64)
            gap = np.isnan(high_w).astype(np.float64)
            upper_w = np.where(sums_w(now, gap) > 0, np.nan, sums_w(now, np.nan_to_num(high_w)))
            both_w = lost_sums_w(state.lost, np.nan_to_num(high_w), len(upper_w))
            lost_w = np.where(lost_sums_w(state.lost, gap, len(upper_w)) > 0, np.nan, both_w)
            basis = "racks"
        if by_feeder is not None:
            own = np.where(np.isfinite(by_feeder.hi), by_feeder.hi, np.nan).astype(np.float64)
            part = slice(first, first + n)
            upper_w[part] = np.where(np.isfinite(own), own, upper_w[part])
            summed[part] &= ~np.isfinite(own)
            basis = f"{basis} and feeders" if basis else "feeders"
        if by_site is not None and "site" in state.loads.kind and np.isfinite(by_site.hi[0]):
            at = state.loads.kind.index("site")
            upper_w[at] = lost_w[at] = float(by_site.hi[0])
            summed[at] = False
        if np.isfinite(upper_w).any():
            out.append(ComingLoads(horizon_s, upper_w, np.fmax(lost_w, upper_w), basis, summed))
    return out


def fullest(state: PowerState, most: int) -> list[int]:
    """All places but racks, and the `most` racks that are or will be fullest; no more than MOST_ROWS.

    A limit of 0 is full whatever flows. A place of unknown load or limit comes behind those that are known to
    carry something, and before those that are known to be empty.
    """
    limits = limits_at(state, state.view.now_ns)
    load_w = np.fmax.reduce([state.loads.lost_w, *(coming.lost_w for coming in ahead_of(state))])
    limit_w = np.fmin(limits.budget_w, limits.target_w)
    use = np.divide(load_w, limit_w, out=np.full(len(load_w), np.inf), where=~(limit_w <= 0))
    known = np.isfinite(limit_w) & ~np.isnan(use)
    order = np.argsort(-np.where(known, np.where(use > 0.0, use, -1.0), 0.0), kind="stable")
    rack = np.array(state.loads.kind) == "rack"
    kept = [*order[rack[order]][:most].tolist(), *order[~rack[order]].tolist()[:MOST_ROWS]]
    return sorted(kept)


def place_rows(state: PowerState, places: list[int]) -> list[dict[str, Any]]:
    """A row for each of these places that carries anything: limit, load, coming load, what is left of it."""
    site, loads, failover = state.view.site, state.loads, state.failover
    now_ns, account = state.view.now_ns, state.request.account
    limits, ahead = limits_at(state, now_ns), ahead_of(state)
    later = [limits_at(state, now_ns + round(coming.horizon_s * NS)) for coming in ahead]
    peaks = account.peaks(site) if account is not None else None
    n_place, pairs = len(loads.now_w), state.now.pairs
    below = np.bincount(pairs.place, minlength=n_place)
    capped_gpus = site.sum_by_rack("gpu", capped_of(state).astype(np.float64))
    capped = np.bincount(pairs.place, capped_gpus[pairs.rack], n_place)
    out = []
    for place in places:
        kind = loads.kind[place]
        feeder = kind == "feeder"
        dead = feeder and bool(state.dead[place - state.now.feeder(0)])
        if not below[place] and not dead:
            continue
        looked = _look(limits, place, loads.now_w, loads.lost_w, failover and feeder)
        if dead:  # a feeder without voltage lends nothing
            looked |= {"left_w": None, "use_pu": None}
        steps = [{"horizon_s": c.horizon_s, "from": c.basis, "bound": bool(c.summed[place]),
                  "limit_from": limit_from(state, place, limit), "target": limit.target[place],
                  **_look(limit, place, c.upper_w, c.lost_w, failover and feeder)}
                 for c, limit in zip(ahead, later, strict=True) if np.isfinite(c.upper_w[place])]  # fmt: skip
        row: dict[str, Any] = {
            "place": state.now.name(site, place), "kind": kind, "dead": dead, **looked,
            "limit_from": limit_from(state, place, limits),
            "target": limits.target[place], "metered": bool(loads.metered[place]),
            "unheard_racks": int(loads.unreported[place]), "capped_gpus": int(capped[place]),
            "ahead": steps, "peak_w": None, "peak_lost_w": None, "peak_s": None,
        }  # fmt: skip
        if peaks is not None:
            row |= {"peak_w": _w(peaks.now_w[place]), "peak_s": peaks.span_s,
                    "peak_lost_w": _w(peaks.lost_w[place]) if feeder else None}  # fmt: skip
        out.append(row)
    return out


def _look(limits: Limits, place: int, now_w: F64, lost_w: F64, stands_in: bool) -> dict[str, Any]:
    """Limit, load and what is left at one instant; `stands_in`: a feeder that is to carry the other side too.

    A budget is held with the other side lost where that is asked for, a load target against what flows.
    """
    budget_w, target_w = float(limits.budget_w[place]), float(limits.target_w[place])
    load_w, most_w = float(now_w[place]), float(lost_w[place] if stands_in else now_w[place])
    looks = [(budget_w - most_w, budget_w, most_w), (target_w - load_w, target_w, load_w)]
    known = [x for x in looks if np.isfinite(x[0])]
    left_w, limit_w, against_w = min(known, default=(np.nan, np.nan, np.nan))
    return {"limit_w": _w(budget_w), "target_w": _w(target_w), "load_w": _w(load_w),
            "lost_w": _w(lost_w[place]) if stands_in else None, "left_w": _w(left_w),
            "use_pu": _pu(against_w, limit_w)}  # fmt: skip


def first_to_bind(rows: list[dict[str, Any]], bounds: bool = True) -> dict[str, Any] | None:
    """Return the place that reaches its limit first, now or at the upper band, else the nearest one.

    None where no place has both a limit and a load. Sums of bands, which are bounds and no forecasts, count
    with `bounds`.
    """
    best: tuple[tuple[float, float], dict[str, Any]] | None = None
    for row in rows:
        if row["dead"]:
            continue
        for case in [row | {"horizon_s": 0.0, "bound": False}, *row["ahead"]]:
            if case["use_pu"] is None:
                continue
            over = case["use_pu"] >= 1.0
            target_w, load_w = case["target_w"], case["load_w"]
            by_target = target_w is not None and case["left_w"] == _w(target_w - load_w)
            # Where the other side carries nothing, its loss changes nothing
            lost = case["lost_w"] not in (None, load_w) and not by_target
            bound = case["bound"] or (lost and case["horizon_s"] > 0)
            key = (case["horizon_s"] if over else np.inf, -case["use_pu"])
            if (bounds or not bound) and (best is None or key < best[0]):
                best = key, {"place": row["place"], "kind": row["kind"], "in_s": case["horizon_s"],
                             "use_pu": case["use_pu"], "left_w": case["left_w"], "over": over,
                             "limit_w": case["target_w"] if by_target else case["limit_w"],
                             "limit_from": case["limit_from"],
                             "target": case["target"] if by_target else "",
                             "lost": lost,
                             "bound": bound}  # fmt: skip
    return None if best is None else best[1]


def policies_of(request: ExplainRequest) -> list[dict[str, Any]]:
    """The power policies that run here, and their authority."""
    return [
        {"policy": p.name, "authority": p.authority, "suspended": p.suspended}
        for p in request.policies
        if p.name in POLICIES
    ]


@dataclass(frozen=True, slots=True)
class CappedCounts:
    """GPUs held below their maximum, in all and by policy, and how many would be if their policy acted."""

    gpus: int
    of: int
    by_policy: dict[str, int]
    advised_gpus: int


def capped_counts(state: PowerState) -> CappedCounts:
    """The GPUs that are capped, by policy: that of their own cap, else that of the cap of their node."""
    site, policies = state.view.site, state.request.policies
    capped, own, owner = capped_of(state), capped_by(state, CAP), cap_leases(state)[1]
    if site.sizes["gpu"]:
        owner = np.where(own, owner, cap_leases(state, NODE_CAP)[1][site.node_of_gpu])
    by: dict[str, int] = {}
    for at, count in zip(*np.unique(owner[capped], return_counts=True), strict=True):
        by[policies[at].name if 0 <= at < len(policies) else ""] = int(count)
    advised = np.zeros(len(capped), np.bool_)
    high = state.view.envelope(CAP).high
    for policy in policies:
        if policy.authority == "act":
            continue
        for p in policy.proposals:
            if p.control == CAP:
                advised[p.index[p.hi < high[p.index] - SLACK_W]] = True
    return CappedCounts(int(capped.sum()), len(capped), by, int((advised & ~capped).sum()))


def notes_of(state: PowerState, rows: list[dict[str, Any]]) -> list[str]:
    """Missing data and other limits of the answer, in sentences."""
    out, request = [], state.request
    policies = policies_of(request)
    if not policies:
        out.append(ADD_IT)
    for p in policies:
        if p["suspended"]:
            out.append(f"{p['policy']} failed and is suspended: racktwin alarm list says why")
    if policies and not any(p["authority"] == "act" for p in policies):
        out.append("no power policy may act: they only advise, and the preview shows their commands")
    site = state.view.site
    bare = np.flatnonzero(~np.isfinite(site.budget_w) & ~site.external_budget)
    if len(bare):
        names = ", ".join(site.name("feeder", i) for i in bare[:3].tolist())
        more = f" and {len(bare) - 3} more" if len(bare) > 3 else ""
        out.append(f"not guarded, as the site file gives no `budget_w`: {names}{more}")
    if not site.sizes["feeder"]:
        out.append("the site file names no feeders: only racks, CDUs and the site are checked")
    if rows and all(r["limit_w"] is None and r["target_w"] is None for r in rows):
        out.append(NO_LIMITS)
    if not any(r["ahead"] for r in rows):
        recent = "; the recent peaks stand in for it" if request.account is not None else ""
        out.append(NO_FORECAST + recent)
    rack = rack_power(state.view)
    if feared := int((~rack.reporting & np.isfinite(rack.worst_w)).sum()):
        out.append(
            f"{feared} of {len(state.rack_w)} racks report no power just now: they count with the most that "
            "they may draw, not with a reading"
        )
    silent = int((~np.isfinite(state.rack_w)).sum())
    if silent:
        out.append(
            f"{silent} of {len(state.rack_w)} racks have never reported: the load above them is higher"
        )
    unreported = int(never_reported(state.view, nodes_of(state.view.site)).sum())
    if unreported:
        out.append(
            f"{unreported:,} of {state.view.site.sizes['gpu']:,} GPUs have never reported: they count with "
            "the power that the meters above them leave; without such a meter, with nothing for "
            f"{learning_s(state.view.site):.0f} s and then with their maximum"
        )
    if request.role != "leader":
        out.append("this daemon is a standby; the leader decides")
    return out


def _w(value: Any) -> float | None:
    return finite(value, 1)


def _pu(load_w: Any, limit_w: Any) -> float | None:
    """Return load over limit, at most MOST_USE_PU. Any load exceeds a limit of 0."""
    if not (np.isfinite(load_w) and np.isfinite(limit_w)) or (limit_w <= 0 and load_w <= 0):
        return None
    return round(min(float(load_w / limit_w), MOST_USE_PU), 4) if limit_w > 0 else MOST_USE_PU
