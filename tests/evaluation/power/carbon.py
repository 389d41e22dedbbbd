"""A week in which usual work gives way while power is dear or dirty, on a recorded grid. Simulated.

Thresholds come from the four weeks before, prices of the day ahead are known, carbon is foreseen from the day
before; what is scored are the prices and the carbon that came. Beside it stand the same policy with budgets
alone, from which all savings and delays are counted, and one that gives up the same share all the time. Work
that was delayed has to be done later: what that costs again is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policies.power_capping import PowerCap, PowerGuard
from tests.evaluation.power.arms import HIGH_PRIORITY, START_NS, Arm, Ours, jobs_told
from tests.evaluation.power.demand import draw
from tests.evaluation.power.grid import DAY_H, LATE_H, MONTH_H, ZONES, Grid, grid_of, thresholds
from tests.evaluation.power.plant import MINUTE_S, Plant
from tests.evaluation.power.rivals import Uncapped
from tests.evaluation.power.site import NODE_IDLE_W, PowerSite, power_site
from twin.catalogue import F64, NS, Bool, ConfigError
from twin.run import Pool, Report, no_report
from twin.telemetry import Event, OutlookTold

WEEK_H = 7 * DAY_H
STEP_S = 300  # between two ticks: prices and carbon are of hours
HOUR_S = 3600
ABOVE_PU = 0.25  # of the hours of the month before were as dear, or as dirty. source: estimate
SHAVE_PU = 0.5  # of their range that usual classes give up then. source: estimate
NEVER = 1e9  # a threshold that nothing reaches
# Nobody acts; budgets alone; by price and carbon; by one of them; the same share all the time
ARMS = ("none", "budgets", "price_and_carbon", "price", "carbon", "static_share")
USUAL_ARMS = ("none", "budgets", "price_and_carbon", "static_share")
TITLES = {
    "none": "no policy", "budgets": "budgets alone", "price_and_carbon": "price and carbon",
    "price": "price", "carbon": "carbon", "static_share": "the same share all the time",
}  # fmt: skip


@dataclass(frozen=True)
class CarbonWeek:
    """One arm in one week of a zone: `hour` of the recording at which it begins."""

    zone: str
    hour: int
    seed: int
    arm: str
    running_pu: F64
    grid: Grid
    site: str = "a"
    hours: int = WEEK_H


def carbon(
    root: Path,
    running_pu: F64,
    seeds: Sequence[int],
    zones: Sequence[str] = tuple(ZONES),
    arms: Sequence[str] = USUAL_ARMS,
    site: str = "a",
    jobs: int = 1,
    move: Report = no_report,
    hours: int = WEEK_H,
) -> dict[str, Any]:
    """All arms in one week of each zone per seed, which draws the week; savings against `budgets`.

    `root`: folder of recordings; `running_pu` [hour]: the recorded demand. Raises ConfigError.
    """
    if "budgets" not in arms:
        raise ConfigError("arms: expected budgets among them, which all savings are counted from")
    grids = {zone: grid_of(root, zone) for zone in zones}
    tasks = [
        CarbonWeek(zone, week_of(grids[zone], seed, hours), seed, arm, running_pu, grids[zone], site, hours)
        for zone in zones for seed in seeds for arm in arms
    ]  # fmt: skip
    rows = Pool(_live, jobs, move).results(tasks)
    parts = []
    for zone in zones:
        some = [row for row in rows if row["zone"] == zone]
        parts.append({"zone": zone, "arms": [_of_arm(arm, some) for arm in arms], "runs": some})
    return {
        "suite": "carbon", "simulated": True, "site": site, "hours": hours, "seeds": list(seeds),
        "above_pu": ABOVE_PU, "shave_pu": SHAVE_PU, "zones": parts,
    }  # fmt: skip


def week_of(grid: Grid, seed: int, hours: int = WEEK_H) -> int:
    """The hour at which the week of a seed begins: a midnight with four weeks and more before it."""
    first, last = -(-(MONTH_H + LATE_H) // DAY_H) + 1, (grid.hours - hours) // DAY_H
    return DAY_H * int(np.random.default_rng([11, seed]).integers(first, last + 1))


def live(task: CarbonWeek) -> dict[str, Any]:
    """One run."""
    site = power_site(task.site)
    demand = draw(site, task.running_pu, task.seed, task.hours)
    arm, told = arm_of(task, site)
    plant, energy_j = Plant(site, demand), [0.0]
    for second in range(0, task.hours * HOUR_S, STEP_S):
        events: list[Event] = []
        for minute in range(second // MINUTE_S, (second + STEP_S) // MINUTE_S):
            events += jobs_told(site, demand, minute)
        if second == 0:
            _ask(arm, plant, events + (outlooks(task.grid, task.hour, 0) if told else []), 1)
            events = []
        plant.step(STEP_S)
        if told and plant.time_s % HOUR_S == 0 and plant.time_s < task.hours * HOUR_S:
            events += outlooks(task.grid, task.hour, plant.time_s // HOUR_S)
        _ask(arm, plant, events, STEP_S)
        if plant.time_s % HOUR_S == 0:
            energy_j.append(plant.energy_j)
    return _figures(task, site, plant, np.diff(energy_j) / 3.6e6)


def _live(task: CarbonWeek, _: Report) -> dict[str, Any]:
    return live(task)


def _ask(arm: Arm, plant: Plant, events: list[Event], dt_s: int) -> None:
    cap_w = arm.decide(plant.read(at_peak=dt_s > 1), plant.time_s, dt_s, events)
    if cap_w is not None:
        plant.command(cap_w)


def arm_of(task: CarbonWeek, site: PowerSite) -> tuple[Arm, bool]:
    """(a fresh arm, whether it is told of prices and carbon)."""
    if task.arm == "none":
        return Uncapped(), False
    dear, dirty = thresholds(task.grid, task.hour, ABOVE_PU)
    shave = SHAVE_PU
    if task.arm == "budgets":
        shave = 0.0
    elif task.arm == "static_share":
        shave *= float(shaved_hours(task, dear, dirty).mean())
        dear, dirty = NEVER, 0.0
    elif task.arm == "price":
        dirty = NEVER
    elif task.arm == "carbon":
        dear = NEVER
    elif task.arm != "price_and_carbon":
        raise KeyError(task.arm)
    cap = PowerCap(high_priority=HIGH_PRIORITY, shave_pu=shave, dear_usd_per_kwh=dear, dirty_g_per_kwh=dirty)
    return Ours(site, (PowerGuard(high_priority=HIGH_PRIORITY), cap)), task.arm != "budgets"


def shaved_hours(task: CarbonWeek, dear: float, dirty: float) -> Bool:
    """Hours of the week that are dear, or foreseen to be dirty [hour]."""
    span = slice(task.hour, task.hour + task.hours)
    found: Bool = (task.grid.price[span] >= dear) | (task.grid.foreseen[span] >= dirty)
    return found


def outlooks(grid: Grid, first: int, hour: int) -> list[Event]:
    """Return the outlooks at the begin of an hour: prices of the day at midnight, carbon each hour."""
    start_ns, at = START_NS + hour * HOUR_S * NS, first + hour
    out: list[Event] = []
    if hour % DAY_H == 0:
        day = tuple(_or_none(x) for x in grid.price[at : at + DAY_H])
        out.append(OutlookTold(
            author="market", quantity="site.grid_price_usd_per_kwh", start_ns=start_ns,
            step_s=float(HOUR_S), values=day,
        ))  # fmt: skip
    out.append(OutlookTold(
        author="grid", quantity="site.grid_carbon_g_per_kwh", start_ns=start_ns, step_s=float(HOUR_S),
        values=(_or_none(grid.foreseen[at]),),
    ))  # fmt: skip
    return out


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _figures(task: CarbonWeek, site: PowerSite, plant: Plant, energy_kwh: F64) -> dict[str, Any]:
    span = slice(task.hour, task.hour + task.hours)
    price, carbon_g = (np.nan_to_num(x[span]) for x in (task.grid.price, task.grid.carbon))
    work_h = plant.work / HOUR_S
    shaved = shaved_hours(task, *thresholds(task.grid, task.hour, ABOVE_PU))
    idle_kwh = site.nodes * NODE_IDLE_W / 1e3 * task.hours
    later = ~shaved if (~shaved).any() else np.ones(task.hours, np.bool_)
    return {
        "zone": task.zone, "seed": task.seed, "hour": task.hour, "arm": task.arm,
        "energy_mwh": float(energy_kwh.sum()) / 1e3, "tonnes": float(energy_kwh @ carbon_g) / 1e6,
        "usd": float(energy_kwh @ price), "work_high_gpu_h": float(work_h[site.high].sum()),
        "work_low_gpu_h": float(work_h[~site.high].sum()), "shaved_pu": float(shaved.mean()),
        # Cost of an hour of a GPU's work that is done later, when nothing is shaved
        "later_kwh_per_gpu_h": (float(energy_kwh.sum()) - idle_kwh) / max(float(work_h.sum()), 1e-9),
        "later_usd_per_kwh": float(price[later].mean()), "later_g_per_kwh": float(carbon_g[later].mean()),
        "trips": plant.trips,
    }  # fmt: skip


def _of_arm(arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of its weeks, and by how much it differs from `budgets` in the same week."""
    base = {row["seed"]: row for row in rows if row["arm"] == "budgets"}
    some = [row for row in rows if row["arm"] == arm]
    keys = ("energy_mwh", "tonnes", "usd", "work_high_gpu_h", "work_low_gpu_h")
    out: dict[str, Any] = {"arm": arm, "weeks": len(some)}
    out |= {key: float(np.mean([row[key] for row in some])) for key in keys}
    saved = [_saved(row, base[row["seed"]]) for row in some]
    return out | {key: float(np.mean([one[key] for one in saved])) for key in saved[0]} | {
        "weeks_that_save_usd": sum(one["net_usd_saved"] > 0 for one in saved),
        "weeks_that_save_tonnes": sum(one["net_tonnes_saved"] > 0 for one in saved),
    }  # fmt: skip


def _saved(row: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    high = base["work_high_gpu_h"] - row["work_high_gpu_h"]
    low = base["work_low_gpu_h"] - row["work_low_gpu_h"]
    again_kwh = (high + low) * base["later_kwh_per_gpu_h"]
    usd, tonnes = base["usd"] - row["usd"], base["tonnes"] - row["tonnes"]
    return {
        "mwh_saved": base["energy_mwh"] - row["energy_mwh"], "tonnes_saved": tonnes, "usd_saved": usd,
        "delayed_gpu_h": high + low,
        "delayed_high_pu": high / max(base["work_high_gpu_h"], 1e-9),
        "delayed_low_pu": low / max(base["work_low_gpu_h"], 1e-9),
        "net_tonnes_saved": tonnes - again_kwh * base["later_g_per_kwh"] / 1e6,
        "net_usd_saved": usd - again_kwh * base["later_usd_per_kwh"],
        "net_mwh_saved": base["energy_mwh"] - row["energy_mwh"] - again_kwh / 1e3,
    }  # fmt: skip
