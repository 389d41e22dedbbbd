"""A demand response on a power test site: the grid asks for less, from this moment on, for three hours.

The engine gets the wish as a load target at the second at which it begins; rivals get it as a budget. The
plant goes by seconds; the arms are asked each second around both ends, each five seconds in between, and each
minute before. Simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from policies.power_capping import PowerCap, PowerGuard
from tests.evaluation.power.arms import HIGH_PRIORITY, START_NS, Arm, Ours, jobs_told
from tests.evaluation.power.demand import Demand, draw
from tests.evaluation.power.plant import MINUTE_S, Plant
from tests.evaluation.power.rivals import Proportional, Thresholds, Uncapped
from tests.evaluation.power.site import PowerSite, power_site
from twin.catalogue import F64, NS
from twin.run import Pool, Report, no_report
from twin.telemetry import Event, LoadTargetSet

LESS_PU = 0.30  # of the load of the minute before
HOLD_S = 3 * 3600
WITHIN_S = 10
BEFORE_S, AFTER_S = 3600, 3600
CLOSE_S = 120  # asked each second for so long from either end on
STEP_S = 5
# Of the utility; 225 kW come back in a quarter of an hour. source: estimate
RAMP_W_PER_S = 250.0
MOST_STEEP = 1.1  # of the ramp
LAG_S = 10  # for which the ramp is taken to be ahead: one call of the policy, and its caps. source: estimate
ARMS = ("none", "proportional", "polca", "racktwin")
MOST_LOST_HIGH_PU = 0.01


class ResponseRun(NamedTuple):
    """One arm on one seed of a site."""

    site: str
    seed: int
    arm: str
    running_pu: F64
    less_pu: float = LESS_PU


def response(
    running_pu: F64,
    seeds: Sequence[int],
    site: str = "a",
    arms: Sequence[str] = ARMS,
    jobs: int = 1,
    move: Report = no_report,
) -> dict[str, Any]:
    """All arms on all seeds; means, the worst of any seed, and the goals. `simulated` is true.

    `running_pu` [hour]: the recorded demand (`power_demand.recorded`).
    """
    tasks = [ResponseRun(site, seed, arm, running_pu) for seed in seeds for arm in arms]
    rows = Pool(_respond, jobs, move).results(tasks)
    told = [_of_arm(arm, [row for row in rows if row["arm"] == arm]) for arm in arms]
    return {
        "suite": "response", "simulated": True, "site": site, "seeds": list(seeds), "less_pu": LESS_PU,
        "hold_h": HOLD_S / 3600, "ramp_w_per_s": RAMP_W_PER_S, "arms": told, "runs": rows,
        "goals": _goals(next((t for t in told if t["arm"] == "racktwin"), None)),
    }  # fmt: skip


def respond(task: ResponseRun) -> dict[str, Any]:
    """One run."""
    site = power_site(task.site)
    minutes = (BEFORE_S + HOLD_S + AFTER_S) // MINUTE_S
    demand = draw(site, task.running_pu, task.seed, -(-minutes // 60))
    run = _Run(site, demand, arm_of(task.arm, site))
    run.until(BEFORE_S - CLOSE_S, MINUTE_S)
    run.until(BEFORE_S, 1)
    present_w = float(np.mean(run.load_w[-MINUTE_S:]))
    limit_w = (1.0 - task.less_pu) * present_w
    begin, end = run.plant.time_s, run.plant.time_s + HOLD_S
    run.ask_for(limit_w, end)
    work, free = run.plant.work.copy(), run.plant.free_work.copy()
    run.until(begin + CLOSE_S, 1)
    run.until(end - CLOSE_S, STEP_S)
    run.until(end, 1)
    lost = 1.0 - (run.plant.work - work) / np.maximum(run.plant.free_work - free, 1e-9)
    part = run.plant.free_work - free
    run.withdraw()
    run.until(end + CLOSE_S, 1)
    run.until(begin + HOLD_S + AFTER_S, STEP_S)
    load_w = np.array(run.load_w)

    def lost_of(nodes: Any) -> float:
        return float((lost * part)[nodes].sum() / max(float(part[nodes].sum()), 1e-9))

    return {
        "arm": task.arm, "seed": task.seed, "present_kw": present_w / 1e3, "limit_kw": limit_w / 1e3,
        **_held(load_w, limit_w, begin, end), **_back(load_w, limit_w, begin, end),
        "lost_high_pu": lost_of(site.high), "lost_low_pu": lost_of(~site.high), "trips": run.plant.trips,
    }  # fmt: skip


def _respond(task: ResponseRun, _: Report) -> dict[str, Any]:
    return respond(task)


def arm_of(name: str, site: PowerSite) -> Arm:
    """A fresh arm. Raises KeyError for an unknown name."""
    if name == "racktwin":
        cap = PowerCap(
            high_priority=HIGH_PRIORITY, ramp_up_w_per_s=RAMP_W_PER_S, ramp_down_w_per_s=RAMP_W_PER_S
        )
        return Ours(site, (PowerGuard(high_priority=HIGH_PRIORITY), cap))
    if name == "none":
        return Uncapped()
    return Proportional(site) if name == "proportional" else Thresholds(site)


class _Run:
    """An arm in a loop with the plant; `load_w` of each second."""

    def __init__(self, site: PowerSite, demand: Demand, arm: Arm) -> None:
        self.site, self.demand, self.arm = site, demand, arm
        self.plant, self.load_w, self.told = Plant(site, demand), list[float](), -1
        self.events: list[Event] = []

    def until(self, second: int, dt_s: int) -> None:
        """Go on by steps of so many seconds."""
        while self.plant.time_s < second:
            minute = self.plant.time_s // MINUTE_S
            if minute > self.told:
                self.events += jobs_told(self.site, self.demand, minute)
                self.told = minute
            n = min(dt_s, second - self.plant.time_s)
            self.plant.step(n)
            self.load_w += self.plant.rack_series[:, -n:].sum(axis=0).tolist()
            read = self.plant.read(at_peak=n >= MINUTE_S)
            cap_w = self.arm.decide(read, self.plant.time_s, n, self.events)
            self.events = []
            if cap_w is not None:
                self.plant.command(cap_w)

    def ask_for(self, limit_w: float, end: int) -> None:
        """From now on no more than this, until then."""
        if isinstance(self.arm, Ours):
            now_ns = START_NS + (self.plant.time_s + 1) * NS
            self.events.append(LoadTargetSet(
                author="grid", target="response", limit_w=limit_w, kind="demand_response", start_ns=now_ns,
                end_ns=START_NS + (end + 1) * NS,
            ))  # fmt: skip
        elif isinstance(self.arm, Proportional | Thresholds):
            root = self.site.site.parent_of_feeder < 0
            budget_w = np.where(root, np.minimum(self.site.budget_w, limit_w), self.site.budget_w)
            self.arm.site = self.site._replace(budget_w=budget_w)

    def withdraw(self) -> None:
        """Rivals have their own budgets back; a load target ends by itself."""
        if isinstance(self.arm, Proportional | Thresholds):
            self.arm.site = self.site


def _held(load_w: F64, limit_w: float, begin: int, end: int) -> dict[str, Any]:
    """Score a target while it holds: the time to reach it, and excess over it."""
    over = np.flatnonzero(load_w[begin : begin + CLOSE_S] > limit_w)
    below_s = int(over[-1]) + 1 if len(over) else 0
    held_w = load_w[begin + WITHIN_S : end]
    return {
        "below_s": below_s if below_s < CLOSE_S else None,
        "late_s": int((held_w > limit_w).sum()),
        "worst_over_pu": max(float(held_w.max() / limit_w - 1.0), 0.0),
        "used_pu": float(held_w.mean() / limit_w),
    }


def _back(load_w: F64, limit_w: float, begin: int, end: int) -> dict[str, Any]:
    """Score the rise afterwards: the lead on the ramp, and the steepest rise in any minute and any five.

    `swing_w_per_s`: the same, at most in 99 of 100 minutes, while the target held and nothing was let up:
    what the demand does of itself. `on_ramp_s`: how long the ramp alone takes.
    """
    after_w = load_w[end : end + AFTER_S]
    ramp_w = limit_w + RAMP_W_PER_S * (np.arange(len(after_w)) + LAG_S)
    free_w = load_w[begin - CLOSE_S : begin].mean()
    under = after_w[after_w < 0.98 * free_w]
    rise_w = np.convolve(after_w, np.ones(30) / 30, "valid")
    held_w = np.convolve(load_w[begin + CLOSE_S : end], np.ones(30) / 30, "valid")
    return {
        "ahead_of_ramp_pu": max(float((after_w / ramp_w).max() - 1.0), 0.0),
        "steepest_w_per_s": float((rise_w[60:] - rise_w[:-60]).max() / 60.0),
        "steepest_5min_w_per_s": float((rise_w[300:] - rise_w[:-300]).max() / 300.0),
        "swing_w_per_s": float(np.quantile(held_w[60:] - held_w[:-60], 0.99) / 60.0),
        "on_ramp_s": float(0.98 * free_w - held_w[-1]) / RAMP_W_PER_S,
        "back_s": int(np.argmax(after_w >= 0.98 * free_w)) if len(under) < len(after_w) else None,
    }


def _of_arm(arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"arm": arm}
    for key in ("used_pu", "lost_high_pu", "lost_low_pu", "steepest_w_per_s", "back_s", "on_ramp_s",
                "swing_w_per_s"):  # fmt: skip
        some = [row[key] for row in rows if row[key] is not None]
        out[key] = float(np.mean(some)) if some else None
    out["missed"] = sum(row["below_s"] is None for row in rows)
    for key in ("below_s", "late_s", "worst_over_pu", "lost_high_pu", "ahead_of_ramp_pu", "steepest_w_per_s",
                "steepest_5min_w_per_s"):  # fmt: skip
        some = [row[key] for row in rows if row[key] is not None]
        out[f"{key}_worst"] = float(np.max(some)) if some else None
    out["trips"] = sum(row["trips"] for row in rows)
    return out


def _goals(ours: dict[str, Any] | None) -> list[dict[str, Any]]:
    if ours is None:
        return []
    below = np.inf if ours["missed"] else ours["below_s_worst"]
    rows = [
        ("below the target for good within s, worst seed", below, WITHIN_S),
        ("seconds above it in three hours, after the first ten, worst seed", ours["late_s_worst"], 0),
        ("work of high priority lost, worst seed", ours["lost_high_pu_worst"], MOST_LOST_HIGH_PU),
        ("ahead of the ramp on the way back, worst seed", ours["ahead_of_ramp_pu_worst"], 0.0),
        ("steepest minute on the way back over the ramp, worst seed",
         ours["steepest_w_per_s_worst"] / RAMP_W_PER_S, MOST_STEEP),
        ("steepest five minutes on the way back over the ramp, worst seed",
         ours["steepest_5min_w_per_s_worst"] / RAMP_W_PER_S, MOST_STEEP),
    ]  # fmt: skip
    return [{"goal": g, "value": v, "bound": b, "met": bool(v <= b)} for g, v, b in rows]
