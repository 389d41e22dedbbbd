"""Backtest of power curves: curves learned from few power limits of measured sweeps, scored on the others.

Which measurements are held out is fixed beforehand (TRIALS). What a curve takes from other jobs of its GPU
model comes from other networks alone. Beside it stand a straight line between the limits next to it, and the
plain mean of what was seen. Also: whether the least energy is where the curves have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.energy_minimum import STATIC_MOST_PU, bins_of, expected_energy
from policies.power_capping import STATIC_PU, Curve, energy_minimum_w, fit
from twin.backtest.power_sweeps import Sweep, Sweeps, model_ranges, predict, read_sweeps
from twin.catalogue import F64, I64
from twin.physics import EXPONENT, capped

GOAL_PU = 0.03  # of time and of energy, in the issue
CHOSEN_ON = ("p100", "v100")  # GPU models whose sweeps the form of the curve was chosen on
TOUCHED_PU = 0.75  # of the lowest limit: a job that draws less on average is hardly touched by any
NETWORK = 1  # place in a job's name
TRIALS = {
    "one limit out": "all limits but the one that is asked for, which lies between others or at the top",
    "from three": "the lowest, the middle and the highest limit; asked for all others",
    "lowest from all": "all but the lowest limit, which is asked for: outside of what was seen",
    "lowest from three": "three upper limits; asked for the lowest: far outside of what was seen",
}


def trials(n: int) -> dict[str, list[tuple[I64, I64]]]:
    """(limits seen, limits asked for) of each trial, of n limits in ascending order."""
    every, three = np.arange(n), np.array([0, n // 2, n - 1])
    return {
        "one limit out": [(np.delete(every, j), every[j : j + 1]) for j in range(1, n)],
        "from three": [(three, np.setdiff1d(every, three))],
        "lowest from all": [(every[1:], every[:1])],
        "lowest from three": [(np.array([1, n // 2, n - 1]), every[:1])],
    }


def touched(sweeps: Sweeps, sweep: Sweep) -> bool:
    """True if a limit makes a difference to a job."""
    return bool(sweep.power_w[-1] > TOUCHED_PU * sweeps.limit_w[0])


def _line(limit_w: F64, seen: F64, train: I64, asked: I64) -> F64:
    """Between the limits next to it; beyond the last two, on through them."""
    out = np.interp(limit_w[asked], limit_w[train], seen[train])
    (a, b), below = train[:2], limit_w[asked] < limit_w[train[0]]
    slope = (seen[b] - seen[a]) / (limit_w[b] - limit_w[a])
    out = np.where(below, seen[a] + slope * (limit_w[asked] - limit_w[a]), out)
    (a, b), above = train[-2:], limit_w[asked] > limit_w[train[-1]]
    slope = (seen[b] - seen[a]) / (limit_w[b] - limit_w[a])
    return np.asarray(np.where(above, seen[b] + slope * (limit_w[asked] - limit_w[b]), out))


def run_backtest(folder: Path, moved: Callable[[float, str], None] | None = None) -> dict[str, Any]:
    """Scores of every GPU model in the folder, as plain data. Raises ConfigError. `moved`: how far it is."""
    models, every = [], read_sweeps(folder)
    for place, sweeps in enumerate(every):
        if moved is not None:
            moved(place / len(every), sweeps.gpu)
        models.append(_of_model(sweeps))
    return {"goal_pu": GOAL_PU, "simulated": False, "trials": TRIALS, "gpus": models}


def _of_model(sweeps: Sweeps) -> dict[str, Any]:
    hit = [sweep for sweep in sweeps.jobs if touched(sweeps, sweep)]
    box_of = {
        network: model_ranges(sweeps, [s for s in hit if s.job[NETWORK] != network])
        for network in {s.job[NETWORK] for s in sweeps.jobs}
    }
    wrong: dict[tuple[str, str], list[tuple[bool, F64]]] = {}
    for sweep in sweeps.jobs:
        box, is_hit = box_of[sweep.job[NETWORK]], touched(sweeps, sweep)
        for trial, splits in trials(len(sweeps.limit_w)).items():
            for train, asked in splits:
                for method, said in _said(sweeps.limit_w, sweep, train, asked, box).items():
                    truth = np.stack([sweep.time_s[asked], sweep.energy_j[asked]])
                    wrong.setdefault((trial, method), []).append((is_hit, np.abs(said / truth - 1.0)))
    return {
        "gpu": sweeps.gpu,
        "chosen_on": sweeps.gpu in CHOSEN_ON,
        "limits_w": sweeps.limit_w.tolist(),
        "jobs": len(sweeps.jobs),
        "jobs_touched": len(hit),
        "left_out": sweeps.left_out,
        "scores": [_score(trial, method, found) for (trial, method), found in wrong.items()],
        "energy_minimum": _regrets(sweeps, box_of),
    }


def _said(limit_w: F64, sweep: Sweep, train: I64, asked: I64, box: Any) -> dict[str, F64]:
    """(time, energy) [2, n_asked] by every method."""
    seen = np.stack([sweep.time_s, sweep.energy_j])
    return {
        "curve": np.stack(predict(limit_w, sweep, train, box))[:, asked],
        "line": np.stack([_line(limit_w, row, train, asked) for row in seen]),
        "mean": np.repeat(seen[:, train].mean(axis=1, keepdims=True), len(asked), axis=1),
    }


def _score(trial: str, method: str, found: list[tuple[bool, F64]]) -> dict[str, Any]:
    out: dict[str, Any] = {"trial": trial, "method": method}
    for group in ("all", "touched"):
        errors = [error for is_hit, error in found if is_hit or group == "all"]
        both = np.concatenate(errors, axis=1) if errors else np.full((2, 0), np.nan)
        for what, row in zip(("time", "energy"), both, strict=True):
            out[f"{what}_{group}"] = {
                "predictions": len(row),
                "median_pu": float(np.median(row)) if len(row) else float("nan"),
                "p90_pu": float(np.quantile(row, 0.9)) if len(row) else float("nan"),
                "within_goal_pu": float((row <= GOAL_PU).mean()) if len(row) else float("nan"),
            }
    return out


def _regrets(sweeps: Sweeps, box_of: dict[str, Any]) -> dict[str, Any]:
    """Energy above the least that was measured, where caps are chosen by what three limits taught.

    `policy`: as `power_cap` chooses by what the model `power_curve` learned; `rule`: as it chooses before
    anything is learned but the share of computing. Touched jobs only.
    """
    three = trials(len(sweeps.limit_w))["from three"][0][0]
    chosen: dict[str, list[float]] = {
        "policy": [],
        "rule": [],
        "curve": [],
        "no limit": [],
        "lowest limit": [],
    }
    for sweep in (s for s in sweeps.jobs if touched(sweeps, s)):
        energy = sweep.energy_j
        said = predict(sweeps.limit_w, sweep, three, box_of[sweep.job[NETWORK]])[1]
        above = int(np.searchsorted(sweeps.limit_w, _rule_w(sweeps, sweep, three)))
        at = {
            "policy": int(_policy_energy(sweeps, sweep, three).argmin()),
            "rule": min(above, len(energy) - 1),
            "curve": int(said.argmin()),
            "no limit": len(energy) - 1,
            "lowest limit": 0,
        }
        for rule, place in at.items():
            chosen[rule].append(float(energy[place] / energy.min() - 1.0))
    return {
        rule: {"mean_pu": float(np.mean(x)), "p90_pu": float(np.quantile(x, 0.9)), "worst_pu": max(x)}
        for rule, x in chosen.items()
        if x
    }


def _policy_energy(sweeps: Sweeps, sweep: Sweep, train: I64) -> F64:
    """Energy at every limit as the model `power_curve` expects it after these limits [n_limit]."""
    limit_w, demand_w = sweeps.limit_w, sweep.power_w[train[-1]]
    # A limit below those that were seen is met as closely as the lowest of them
    below_w = limit_w * min(1.0, sweep.power_w[train[0]] / limit_w[train[0]])
    drawn_w = np.interp(limit_w, limit_w[train], sweep.power_w[train])
    drawn_w = np.where(limit_w < limit_w[train[0]], np.minimum(drawn_w, below_w), drawn_w)
    static_pu = min(STATIC_PU * limit_w[-1] / demand_w, STATIC_MOST_PU)
    bins = bins_of(np.minimum(sweep.power_w[train] / demand_w, 1.0), sweep.time_s[train], static_pu)
    asked = np.minimum(drawn_w / demand_w, 1.0)[None]
    return np.asarray(expected_energy(bins, np.array([static_pu]), asked, np.zeros(1))[0])


def _rule_w(sweeps: Sweeps, sweep: Sweep, train: I64) -> float:
    """The energy minimum of the policy's fixed shape, its share of computing learned from these limits."""
    idle = np.full(len(train), STATIC_PU * sweeps.limit_w[-1])
    demand = np.maximum(np.full(len(train), sweep.power_w[train[-1]]), idle + 1.0)
    clock = capped(idle, demand, np.minimum(sweep.power_w[train], demand), EXPONENT)[1]
    share = fit(clock, sweep.time_s[train[-1]] / sweep.time_s[train])
    least = energy_minimum_w(Curve(idle[0], demand[0], 1.0 if np.isnan(share) else share))[0]
    # The limit that holds it there: what is drawn lies below the limit
    drawn = np.interp(least, np.sort(sweep.power_w[train]), sweeps.limit_w[train])
    return float(drawn)
