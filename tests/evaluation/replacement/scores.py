"""Worth of each arm over the made-up fleet, beside nobody acting and beside an oracle. Simulated.

All arms live through the same faults; differences are paired by seed. The noise of a difference is its
standard error over seeds; of one seed, the standard deviation of the differences over the seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.evaluation.replacement.fleet import DAY_S, Scenario, Warnings, draw
from tests.evaluation.replacement.quarter import QUARTER_S, WARM_S, Arm, Outcome, Quarter
from tests.evaluation.replacement.rivals import AfterTest, Counted, Oracle, Ours
from tests.evaluation.replacement.view import quarter_site
from twin.catalogue import F64
from twin.run import Pool, Report, no_report
from twin.site import Site

ARMS = ("reactive", "reactive_tested", "decayed_count", "replacement_unplaced", "replacement", "oracle")
FIRST_SEED = 100  # 1 to 5 were for development
GOAL_OF_ORACLE, GOAL_LARGE = 1.0 / 3.0, 0.05
DRAWS = 4000  # of the bootstrap
# Of Student's t, two-sided 90 %, by degrees of freedom; beyond, the normal's
T90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
       1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725)  # fmt: skip
# (key, title); all but goodput are better when less
FIGURES = (
    ("lost_gpu_h", "GPU-hours that jobs lost"), ("out_gpu_h", "GPU-hours out of service"),
    ("total_gpu_h", "both"), ("interruptions", "interruptions by failures"), ("moves", "planned moves"),
    ("false_drains", "false drains a node-month"), ("withdrawals", "withdrawals"),
    ("spares", "nodes taken from the spares"), ("goodput_pu", "goodput"),
    ("large_failed_pu", "512+ GPU jobs that failed"),
)  # fmt: skip


def live(site: Site, scenario: Scenario, warnings: Warnings, seed: int, name: str,
         days: float = QUARTER_S / DAY_S, warm_days: float = WARM_S / DAY_S) -> dict[str, Any]:  # fmt: skip
    """One arm through one fleet; its figures, and what it took."""
    begun = time.process_time()
    truth = draw(scenario, warnings, seed, (warm_days + days) * DAY_S, site.sizes["node"])
    quarter = Quarter(site, truth, seed, scenario.rate, scenario.job_s, warnings.right_pu, warm_days * DAY_S)
    arms: dict[str, Callable[[], Arm | None]] = {
        "reactive": lambda: None, "reactive_tested": lambda: AfterTest(quarter.view),
        "decayed_count": lambda: Counted(quarter.view), "replacement": lambda: Ours(quarter.view),
        "replacement_unplaced": lambda: Ours(quarter.view, place_last=False),
        "oracle": lambda: Oracle(quarter.nodes),
    }  # fmt: skip
    found = quarter.run(arms[name]())
    return figures(found) | {"arm": name, "seed": seed, "cpu_s": time.process_time() - begun}


def figures(found: Outcome) -> dict[str, Any]:
    """Of one arm on one seed. Goodput: useful work over it and what jobs lost."""
    tally, counts = found.tally, found.counts
    lost = {f"lost_{what}_gpu_h": float(v) for what, v in tally.lost.items()}
    total = sum(lost.values())
    return lost | {
        "lost_gpu_h": total, "out_gpu_h": float(found.out_gpu_h),
        "total_gpu_h": total + float(found.out_gpu_h),
        "interruptions": tally.interruptions, "moves": tally.moves,
        "false_drains": counts["false"] / found.node_months, "withdrawals": counts["withdrawals"],
        "spares": tally.spares, "goodput_pu": tally.useful / max(tally.useful + total, 1e-9),
        "large": tally.large, "large_failed_pu": tally.large_failed / max(tally.large, 1),
        "failures": counts["failures"], "tests": counts["tests"], "exchanges": counts["exchanges"],
        "calls": counts["calls"],
    }  # fmt: skip


@dataclass(frozen=True)
class FleetQuarter:
    """One arm on one fleet. `racks` of each of four halls."""

    scenario: Scenario
    warnings: Warnings
    seed: int
    arm: str
    days: float = QUARTER_S / DAY_S
    warm_days: float = WARM_S / DAY_S
    racks: int = 32


def live_task(task: FleetQuarter) -> dict[str, Any]:
    """The same, in whatever process."""
    site = quarter_site(racks=task.racks)
    return live(site, task.scenario, task.warnings, task.seed, task.arm, task.days, task.warm_days)


def _live(task: FleetQuarter, _: Report) -> dict[str, Any]:
    return live_task(task)


def suite(
    scenarios: Sequence[Scenario], warnings: Sequence[Warnings], seeds: Sequence[int],
    arms: Sequence[str] = ARMS, days: float = QUARTER_S / DAY_S, jobs: int = 1,
    progress: Report = no_report, racks: int = 32, warm_days: float = WARM_S / DAY_S,
) -> dict[str, Any]:  # fmt: skip
    """Every arm on every fleet, the same whatever `jobs` is; `simulated` is true in each part."""
    tasks = [FleetQuarter(scenario, known, seed, arm, days, warm_days, racks)
             for scenario in scenarios for known in warnings for seed in seeds for arm in arms]  # fmt: skip
    rows = Pool(_live, jobs, progress).results(tasks)
    parts, each = [], len(seeds) * len(arms)
    for i, (scenario, known) in enumerate((s, w) for s in scenarios for w in warnings):
        some = rows[i * each : (i + 1) * each]
        parts.append({
            "simulated": True, "scenario": scenario.name, "about": scenario.about,
            "rate_per_1000_node_days": 1000.0 * scenario.rate, "warnings": known.name,
            "warned_pu": known.shows_pu * known.found_pu, "days": days, "nodes": racks * 4 * 8,
            "seeds": list(seeds), **compared(some), "rows": some,
        })  # fmt: skip
    return {"simulated": True, "fleets": parts, "goals": goals(parts)}


def compared(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means by arm, paired differences from nobody acting, and the share of what the oracle saves."""
    by = {name: sorted((r for r in rows if r["arm"] == name), key=lambda r: r["seed"]) for name in ARMS}
    by = {name: found for name, found in by.items() if found}
    arms, reactive = [], by.get("reactive", [])
    for name, found in by.items():
        told: dict[str, Any] = {"arm": name, "seeds": len(found)}
        for key, _ in FIGURES:
            value = np.array([r[key] for r in found], np.float64)
            told[key] = float(value.mean())
            if reactive and name != "reactive":
                told[f"{key}_less"] = paired(np.array([r[key] for r in reactive]) - value)
        if reactive and name not in ("reactive", "oracle") and "oracle" in by:
            for key in ("lost_gpu_h", "total_gpu_h"):
                told[f"{key}_of_oracle"] = _share(*(np.array([r[key] for r in by[arm]])
                                                  for arm in ("reactive", name, "oracle")))  # fmt: skip
        arms.append(told)
    return {"arms": arms}


def paired(difference: F64) -> dict[str, float]:
    """Of differences by seed: mean, 90 % interval (Student), spread, and the worst one."""
    n = len(difference)
    mean = float(difference.mean())
    if n < 2:
        return {"mean": mean, "low": math.nan, "high": math.nan, "spread": math.nan, "worst": mean}
    spread = float(difference.std(ddof=1))
    half = (T90[n - 2] if n - 2 < len(T90) else 1.645) * spread / math.sqrt(n)
    worst = float(difference.min())
    return {"mean": mean, "low": mean - half, "high": mean + half, "spread": spread, "worst": worst}


def _share(reactive: F64, ours: F64, oracle: F64) -> dict[str, float]:
    """Return the saved cost over that of the oracle, with a 90 % interval by drawing seeds."""
    saved, best = reactive - ours, reactive - oracle
    share = float(saved.sum() / best.sum()) if best.sum() > 0 else math.nan
    if len(saved) < 2:
        return {"pu": share, "low": math.nan, "high": math.nan}
    pick = np.random.default_rng(9).integers(0, len(saved), (DRAWS, len(saved)))
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = saved[pick].sum(axis=1) / best[pick].sum(axis=1)
    low, high = np.nanpercentile(drawn, [5.0, 95.0])
    return {"pu": share, "low": float(low), "high": float(high)}


def goals(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals of the project, as far as these fleets tell of them."""
    out: list[dict[str, Any]] = []
    for part in parts:
        ours = next((a for a in part["arms"] if a["arm"] == "replacement"), None)
        if ours is None:
            continue
        name = f"{part['scenario']}, warnings {part['warnings']}"
        if "lost_gpu_h_of_oracle" in ours:
            share = ours["lost_gpu_h_of_oracle"]["pu"]
            out.append({"goal": f"{name}: share of what the oracle saves", "value": share,
                        "bound": f">= {GOAL_OF_ORACLE:.3g}", "met": share >= GOAL_OF_ORACLE})  # fmt: skip
        less = ours.get("lost_gpu_h_less")
        if less is not None and math.isfinite(less["spread"]):
            out.append({"goal": f"{name}: least saved on any seed, GPU-h", "value": less["worst"],
                        "bound": f">= {-less['spread']:,.0f} (a seed's noise)",
                        "met": less["worst"] >= -less["spread"]})  # fmt: skip
        if part["scenario"] == "lemons":
            failed = ours["large_failed_pu"]
            out.append({"goal": f"{name}: 512+ GPU jobs that fail", "value": failed,
                        "bound": f"<= {GOAL_LARGE:g}", "met": failed <= GOAL_LARGE})  # fmt: skip
    return out
