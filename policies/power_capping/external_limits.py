"""External limits of the site's power: load targets, the contract of the quarter hour, ramps, prices.

A running target binds at once. A future target is approached along the utility's ramp, so that its limit is
met when it begins; after its end the limit rises along the other ramp. The mean of each quarter hour stays
within the contract: the remaining energy is spread over the remaining time. While grid power is expensive or
carbon-intensive, usual classes give up a share of their power. If a target or the contract cannot be kept
along the ramp, it takes precedence over the ramp, and the reason says so. Pure: its memory goes in and comes
out as LimitMemory.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields, replace

import numpy as np

from twin.catalogue import F64, NS, Bool, ContractError
from twin.contracts import LoadTarget, Memory, View

PRICE, CARBON = "site.grid_price_usd_per_kwh", "site.grid_carbon_g_per_kwh"
CONTROL = "gpu.power_cap_w"
QUARTER_S = 900
# Caps need a call of the policy and a cap loop of 2.5 s (domain.md G) to arrive. source: estimate
ARRIVE_S = 15.0
# Of the contract that is kept back. source: meters of class 0.5 (IEC 62053-22) err by as much
RESERVE_PU = 0.005
SLACK_PU = 0.05  # by which what was saved early in a quarter may be drawn on top later. source: estimate
SLACK_S = 60.0  # before the end of a quarter in which that is given up again. source: estimate
# Of the contract: cut deeper, a quarter is no longer rescued, it crashes. source: estimate
LEAST_PU = 0.5
GAP_S = 120.0  # between two calls: longer, and what went on meanwhile is not known. source: estimate
SMOOTH_S = 30.0  # time constant of the load that a descent begins from. source: estimate
SHAVE_S = 300.0  # from nothing to the full range, where no ramp is stated. source: estimate
BACK_PU = 0.05  # of a threshold, below which the grid is no longer dear or dirty. source: estimate
_SMALL_W = 1e-6


@dataclass(frozen=True, slots=True)
class Settings:
    """Contract terms between the site and its utility; NaN = no such term.

    `contract_w`: the mean of each quarter hour of the clock (UTC). The ramps are of the site, for planned
    changes. From `dear_usd_per_kwh` or `dirty_g_per_kwh` on, the usual classes give up `shave_pu` of their
    range. `lead_s`: how long before its begin a target is approached at the earliest.
    """

    contract_w: float = float("nan")
    ramp_up_w_per_s: float = float("nan")
    ramp_down_w_per_s: float = float("nan")
    dear_usd_per_kwh: float = float("nan")
    dirty_g_per_kwh: float = float("nan")
    shave_pu: float = 0.0
    lead_s: float = 900.0

    def checked(self) -> Settings:
        """Return the settings as floats. Raises ContractError with setting, value and expectation."""
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ContractError(f"{name}: expected a number, got {value!r}")
        for name in ("contract_w", "ramp_up_w_per_s", "ramp_down_w_per_s"):
            value = float(getattr(self, name))
            if not np.isnan(value) and not 0.0 < value < np.inf:
                raise ContractError(f"{name}: expected more than 0, or nothing at all, got {value!r}")
        for name in ("dear_usd_per_kwh", "dirty_g_per_kwh"):
            if np.isinf(float(getattr(self, name))):
                raise ContractError(f"{name}: expected a finite number, or nothing at all")
        if not 0.0 <= self.shave_pu <= 1.0:
            raise ContractError(f"shave_pu: expected 0 to 1, got {self.shave_pu!r}")
        if not 0.0 <= self.lead_s <= 86_400.0:
            raise ContractError(f"lead_s: expected 0 to 86400, got {self.lead_s!r}")
        return Settings(*(float(value) for value in astuple(self)))


@dataclass(frozen=True, slots=True)
class LimitMemory:
    """Memory between calls; all zero is empty. `held_w`: limit of the site, negative without one.

    `quarter_ns`: begin of the quarter that `quarter_ws` were drawn in, `unseen_s` of it unseen. `load_w`: the
    smoothed load. `dear`, `dirty`: 1 while the grid is. `feeders_w`, `n_feeders`: sum and number of the
    limits of feeders.
    """

    quarter_ns: int = 0
    quarter_ws: float = 0.0
    unseen_s: float = 0.0
    seen_ns: int = 0
    held_w: float = -1.0
    load_w: float = 0.0
    shave_pu: float = 0.0
    dear: float = 0.0
    dirty: float = 0.0
    feeders_w: float = 0.0
    n_feeders: int = 0


_KINDS = {
    f.name: "i8" if f.name.endswith("_ns") or f.name == "n_feeders" else "f8" for f in fields(LimitMemory)
}
COURSE_COLUMNS = {f"course_{name}": kind for name, kind in _KINDS.items()}  # scalars of a policy's memory


def course_of(memory: Memory) -> LimitMemory:
    """The course of limits that a policy with these scalars remembers."""
    return LimitMemory(*(memory[f"course_{name}"].item() for name in _KINDS))


def columns_of(course: LimitMemory) -> Memory:
    """Return this memory as scalars of a policy."""
    return {f"course_{name}": np.array(value, _KINDS[name]) for name, value in asdict(course).items()}


@dataclass(frozen=True, slots=True)
class ExternalLimits:
    """Limits from outside (inf: none) of the site and its feeders [n_feeder], what the usual classes and
    those below give up of their range, and why ("" = no limit, no shaving); whether it is the ramp up that
    limits the site."""

    site_w: float
    feeder_w: F64
    shave_pu: float
    site_why: str
    feeder_why: tuple[str, ...]
    shave_why: str
    let_up: bool = False


def targets_now(view: View) -> tuple[float, F64]:
    """Return the running load targets' limits of the site and its feeders [n_feeder], W; inf = no limit."""
    site_w, feeder_w = np.inf, np.full(view.site.sizes["feeder"], np.inf)
    for target in view.load_targets():
        if not target.runs(view.now_ns):
            continue
        if target.feeders is None:
            site_w = min(site_w, target.limit_w)
        else:
            feeder_w[target.feeders] = np.minimum(feeder_w[target.feeders], target.limit_w)
    return float(site_w), feeder_w


def outside(
    view: View, settings: Settings, course: LimitMemory, load_w: float, load_of_feeder_w: F64
) -> tuple[ExternalLimits, LimitMemory]:
    """Return all external limits, and the new memory.

    `load_w`: what the racks of the site draw together; `load_of_feeder_w` [n_feeder]; NaN = not known.
    """
    now_ns = view.now_ns
    past, gap_s = _trusted(course, now_ns)
    dt_s = min(gap_s, GAP_S) if past.seen_ns else 0.0
    load_w = float(load_w) if 0.0 <= load_w < np.inf else float("nan")
    smooth_w = _smoothed(past, load_w, dt_s)
    used_ws, unseen_s = _used_ws(settings, past, now_ns, gap_s, load_w)
    contract_w, contract_why = _contract(settings, now_ns, used_ws, unseen_s)
    feeder_w, feeder_why = _feeders(view, settings, load_of_feeder_w, dt_s)
    # Feeders that were let up make the site rise just as well
    some = np.isfinite(feeder_w)
    feeders_w, n_feeders = float(feeder_w[some].sum()), int(some.sum())
    eased = n_feeders < past.n_feeders or (
        n_feeders == past.n_feeders and feeders_w > past.feeders_w + _SMALL_W
    )
    held_w = past.held_w if past.held_w >= 0.0 else np.inf
    if eased and np.isfinite(settings.ramp_up_w_per_s):
        held_w = min(held_w, smooth_w)
    site_w, why = _site(view, settings, held_w, smooth_w, dt_s)
    if contract_w < site_w:
        site_w, why = contract_w, contract_why
    let_up = False
    if np.isfinite(settings.ramp_up_w_per_s) and np.isfinite(held_w):
        risen_w = held_w + settings.ramp_up_w_per_s * dt_s
        let_up = risen_w < min(site_w, _most_w(view, smooth_w))
        if let_up:
            site_w, why = risen_w, f"raised by {_kw(settings.ramp_up_w_per_s)} kW a second"
    shave_pu, dear, dirty, shave_why = _shaved(view, settings, past, dt_s)
    found = ExternalLimits(max(site_w, 0.0), feeder_w, shave_pu, why, feeder_why, shave_why, let_up)
    kept = LimitMemory(
        now_ns // (QUARTER_S * NS) * (QUARTER_S * NS), used_ws, unseen_s, now_ns,
        found.site_w if np.isfinite(found.site_w) else -1.0,
        smooth_w if np.isfinite(smooth_w) else 0.0, shave_pu, dear, dirty, feeders_w, n_feeders,
    )  # fmt: skip
    return found, kept


def _trusted(course: LimitMemory, now_ns: int) -> tuple[LimitMemory, float]:
    """Return (the memory that is still valid, its age in seconds; inf without one)."""
    sane = all(np.isfinite(value) for value in astuple(course)) and course.seen_ns > 0
    if not sane or course.quarter_ws < 0.0 or course.load_w < 0.0:
        return LimitMemory(), np.inf
    course = replace(course, shave_pu=float(np.clip(course.shave_pu, 0.0, 1.0)))
    if course.seen_ns > now_ns:  # the clock went back: limits stand, what was drawn since is not known
        return replace(course, quarter_ns=-1), 0.0
    return course, (now_ns - course.seen_ns) / NS


def _smoothed(past: LimitMemory, load_w: float, dt_s: float) -> float:
    """Return the load without short swings, at least the present one; NaN if it was never reported."""
    if np.isnan(load_w):
        return past.load_w if past.seen_ns and past.load_w > 0 else float("nan")
    if not past.seen_ns or past.load_w <= 0:
        return load_w
    part = float(np.exp(-dt_s / SMOOTH_S))
    return max(load_w, part * past.load_w + (1.0 - part) * load_w)


def _used_ws(
    settings: Settings, past: LimitMemory, now_ns: int, gap_s: float, load_w: float
) -> tuple[float, float]:
    """Return (energy of this quarter hour in W s, its unobserved seconds).

    What was not seen counts as what the contract allows, and no less than what was drawn before and after.
    """
    aim_w = np.nan_to_num((1.0 - RESERVE_PU) * settings.contract_w)
    quarter_ns = now_ns // (QUARTER_S * NS) * (QUARTER_S * NS)
    since_s = (now_ns - quarter_ns) / NS
    if past.quarter_ns < 0 or not np.isfinite(gap_s):
        return aim_w * since_s, since_s
    known = past.quarter_ns == quarter_ns
    rest_s = gap_s if known else since_s
    seen = gap_s <= GAP_S and not np.isnan(load_w)
    known_w = 0.0 if np.isnan(load_w) else load_w
    drawn_w = known_w if seen else max(aim_w, known_w, past.load_w)
    before_ws, before_s = (past.quarter_ws, past.unseen_s) if known else (0.0, 0.0)
    return before_ws + drawn_w * rest_s, before_s + (0.0 if seen else rest_s)


def _contract(settings: Settings, now_ns: int, used_ws: float, unseen_s: float) -> tuple[float, str]:
    """Return the power that the contract leaves for now, W, and the reason; inf without a contract."""
    if np.isnan(settings.contract_w):
        return np.inf, ""
    aim_w = (1.0 - RESERVE_PU) * settings.contract_w
    left_s = QUARTER_S - (now_ns % (QUARTER_S * NS)) / NS
    even_w = (aim_w * QUARTER_S - used_ws) / left_s
    # Energy saved early is drawn later only as far as it can be given up before the next quarter
    back_w_per_s = settings.ramp_down_w_per_s
    if np.isnan(back_w_per_s):
        back_w_per_s = SLACK_PU * aim_w / SLACK_S
    top_w = min(aim_w + min(SLACK_PU * aim_w, back_w_per_s * left_s), settings.contract_w * (1 + SLACK_PU))
    why = f"the contract of {_kw(settings.contract_w)} kW in the mean of a quarter hour"
    if unseen_s >= 1.0:
        why += f", {unseen_s:.0f} s of which are not measured"
    if even_w < LEAST_PU * aim_w:
        return LEAST_PU * aim_w, why + "; it can hardly be kept in this one"
    return min(even_w, top_w), why


def _site(view: View, settings: Settings, held_w: float, load_w: float, dt_s: float) -> tuple[float, str]:
    """Return the limit that site targets set now, those to come included, and the reason."""
    best_w, why = np.inf, ""
    from_w = np.array([np.fmin(held_w if np.isfinite(held_w) else np.nan, load_w)])
    for target in view.load_targets():
        if target.feeders is not None:
            continue
        limit_w, steep = _approach(view.now_ns, settings, target, from_w, dt_s)
        if limit_w[0] < best_w:
            best_w, why = float(limit_w[0]), _words(view.now_ns, settings, target, bool(steep[0]))
    return best_w, why


def _feeders(view: View, settings: Settings, load_w: F64, dt_s: float) -> tuple[F64, tuple[str, ...]]:
    """Return the limits that feeder targets set now, those to come included, and the reasons [n_feeder]."""
    n, targets = view.site.sizes["feeder"], view.load_targets()
    known_w = np.where(np.isfinite(load_w), load_w, np.nan)
    out, by, steep = np.full(n, np.inf), np.full(n, -1), np.zeros(n, np.bool_)
    for i, target in enumerate(targets):
        if target.feeders is None:
            continue
        at = target.feeders
        limit_w, straight = _approach(view.now_ns, settings, target, known_w[at], dt_s)
        less = limit_w < out[at]
        at = at[less]
        out[at], by[at], steep[at] = limit_w[less], i, straight[less]
    why = [""] * n
    for feeder in np.flatnonzero(by >= 0).tolist():
        why[feeder] = _words(view.now_ns, settings, targets[by[feeder]], bool(steep[feeder]))
    return out, tuple(why)


def _approach(
    now_ns: int, settings: Settings, target: LoadTarget, from_w: F64, dt_s: float
) -> tuple[F64, Bool]:
    """(what a target allows now, where that is steeper than the ramp), for loads that stand at `from_w` [k].

    On the ramp that ends where it begins if there is time for that; else straight down to it.
    """
    k, none = len(from_w), np.zeros(len(from_w), np.bool_)
    if target.end_ns is not None and target.end_ns <= now_ns:
        return np.full(k, np.inf), none
    left_s = (target.start_ns - now_ns) / NS - ARRIVE_S
    if left_s <= 0.0:
        return np.full(k, target.limit_w), none
    ramp = settings.ramp_down_w_per_s
    if left_s > settings.lead_s or np.isnan(ramp):
        return np.full(k, np.inf), none
    on_ramp_w = target.limit_w + ramp * left_s
    steep: Bool = from_w - ramp * dt_s > on_ramp_w  # unknown loads are not: nobody knows where they begin
    straight_w = from_w - (from_w - target.limit_w) * dt_s / (left_s + dt_s)
    return np.where(steep, straight_w, on_ramp_w), steep


def _words(now_ns: int, settings: Settings, target: LoadTarget, steep: bool) -> str:
    """Return the reason of a limit: the target, its limit, and its ramp."""
    who = f"the {target.kind} target {target.name} of {_kw(target.limit_w)} kW"
    if target.start_ns > now_ns:
        who += f" in {(target.start_ns - now_ns) / NS / 60:.0f} min"
    if steep:
        who += f", faster than the ramp of {_kw(settings.ramp_down_w_per_s)} kW a second"
    return who


def _most_w(view: View, load_w: float) -> float:
    """Return the power above which a limit has no effect: the most that all racks may draw, if stated."""
    stated_w = float(view.site.design.rack_max_w.sum())
    return stated_w if np.isfinite(stated_w) else 2.0 * float(np.nan_to_num(load_w, nan=np.inf))


def _shaved(
    view: View, settings: Settings, past: LimitMemory, dt_s: float
) -> tuple[float, float, float, str]:
    """Return (share given up now, price above threshold, carbon above threshold, reason)."""
    price, carbon = float(view.outlook(PRICE, view.now_ns)[0]), float(view.outlook(CARBON, view.now_ns)[0])
    dear = _beyond(price, settings.dear_usd_per_kwh, past.dear)
    dirty = _beyond(carbon, settings.dirty_g_per_kwh, past.dirty)
    envelope = view.envelope(CONTROL)
    range_w = float(np.nansum(envelope.high - envelope.low))
    goal_pu = settings.shave_pu if dear or dirty else 0.0
    ramp = settings.ramp_down_w_per_s if goal_pu > past.shave_pu else settings.ramp_up_w_per_s
    most_pu = dt_s * (ramp / range_w if ramp > 0 and range_w > 0 else 1.0 / SHAVE_S)
    share = float(np.clip(goal_pu, past.shave_pu - most_pu, past.shave_pu + most_pu)) if past.seen_ns else 0.0
    why = []
    if dear:
        why.append(f"power costs {price:.3f} USD/kWh, high from {settings.dear_usd_per_kwh:g} on")
    if dirty:
        why.append(f"{carbon:.0f} g/kWh of carbon, high from {settings.dirty_g_per_kwh:g} on")
    if settings.shave_pu > 0:
        if np.isnan(price) and not np.isnan(settings.dear_usd_per_kwh):
            why.append("the price of power is unknown now: it does not count as high")
        if np.isnan(carbon) and not np.isnan(settings.dirty_g_per_kwh):
            why.append("the carbon of the grid is unknown now: it does not count as high")
    if share > 0 and not (dear or dirty):
        why.append("caps that were lowered for it rise step by step")
    return share, float(dear), float(dirty), "; ".join(why)


def _beyond(value: float, threshold: float, was: float) -> bool:
    """Return True while a threshold is reached, with hysteresis; False for an unknown value or threshold."""
    back = threshold - BACK_PU * abs(threshold) if was > 0 else threshold
    return bool(value >= back)


def _kw(watts: float) -> str:
    return f"{watts / 1e3:.4g}"
