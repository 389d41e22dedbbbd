"""The simulated suite of checkpoint intervals: drift, bursts, wrong save times, Weibull times, predictions.

Nothing here is a recording: every result is labelled simulated. Fleets go through the same replay as a
recorded log; the rest are long lives of one job whose strikes are drawn, all rules struck alike. Seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gamma
from typing import Any

import numpy as np
from rich.console import Console

from policies.checkpointing import best_ahead, best_interval, best_weibull, ettr, young_s
from tests.evaluation.checkpoint.fleets import FLEETS, FROM_D
from twin.backtest import (
    FIXED,
    GOAL_MTTF_S,
    Predictions,
    ReplayResult,
    SaveCosts,
    SaveOutcome,
    place_jobs,
    print_goals,
    print_scores,
    print_table,
    replay,
    scores,
    simulate_saves,
)
from twin.catalogue import F64, duration, number

SIZES, PER_SIZE, SEEDS = (256, 1024, 2048), 3, (9, 10, 11)
MTTF_S = GOAL_MTTF_S
STRIKES = 10_000  # of a long life
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of a save time that is told, over the true one
CORRECTED_AFTER = 3  # saves that were measured. source: estimate
SHORT_S, SHORT_LIVES = 86_400.0, 200  # lives in which a wrong start still shows
STEP_S = 300.0  # in such a life, a correction comes at the end of one of these
SHAPES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RECALL, PRECISION, LEAD_S = 0.6, 0.95, 600.0
MOST_TURNS = 40  # saves that follow one alarm
MARGIN_S = 30.0  # by which a save is durable before a failure that is foretold. source: estimate
GRID_S = np.geomspace(60.0, 8.0 * MTTF_S, 120)


def suite(costs: SaveCosts, seed: int, progress: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
    """All of it; `simulated` is true in each part."""
    fleets = {}
    for i, (name, (make, about)) in enumerate(FLEETS.items()):
        found: list[tuple[ReplayResult, ...]] = []
        for j, each in enumerate(SEEDS):
            log = make(seed + each)
            found.append(replay(log, place_jobs(log, FROM_D, SIZES, PER_SIZE, seed + each), costs))
            progress((i + (j + 1) / len(SEEDS)) / (len(FLEETS) + 1))
        fleets[name] = {"simulated": True, "about": about, **scores(together(found), costs.save_s)}
    told = {
        "simulated": True, "fleets": fleets, "wrong_save": wrong_saves(costs, seed),
        "weibull": weibull(costs, seed), "prediction": prediction(costs, seed),
    }  # fmt: skip
    progress(1.0)
    return told


def together(found: Sequence[Sequence[ReplayResult]]) -> list[ReplayResult]:
    """Several fleets as one that is watched for longer: their days follow one another, size by size."""
    out = []
    for parts in zip(*found, strict=True):
        joined = ReplayResult(
            size=parts[0].size,
            jobs=sum(p.jobs for p in parts),
            days=np.concatenate([p.days for p in parts]),
            wall_s=np.concatenate([p.wall_s for p in parts]),
            useful_s=np.concatenate([p.useful_s for p in parts]),
            saves=np.concatenate([p.saves for p in parts]),
            strikes=sum(p.strikes for p in parts),
            changes=(sum(p.changes[0] for p in parts), sum(p.changes[1] for p in parts)),
            best_s=float(np.median([p.best_s for p in parts])),
            interval_s=np.median([p.interval_s for p in parts], axis=0),
        )
        out.append(joined)
    return out


def _life(gaps_s: F64, interval_s: F64, costs: SaveCosts) -> SaveOutcome:
    """A life of one job struck after each of these gaps, under constant intervals [n_rule]."""
    edge_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    return simulate_saves(edge_s, np.ones(len(gaps_s), bool), np.tile(interval_s, (len(gaps_s), 1)), costs)


def _share(course: SaveOutcome) -> F64:
    out: F64 = course.useful_s.sum(axis=0) / course.length_s.sum()
    return out


def wrong_saves(costs: SaveCosts, seed: int) -> dict[str, Any]:
    """A job that tells a wrong save time: for its first three saves, and for ever. In lives of a day."""
    factors = np.array([1.0, *FACTORS])
    told_s, _ = best_interval(factors * costs.save_s, costs.restart_s, MTTF_S, costs.flush_s)
    rng = np.random.default_rng([seed, 42])
    useful, right_s = np.zeros((2, len(factors))), told_s[0]
    for _ in range(SHORT_LIVES):
        strike_s = np.cumsum(rng.exponential(MTTF_S, 60))
        strike_s = strike_s[strike_s < SHORT_S]
        edge_s = np.unique(np.concatenate([np.arange(0.0, SHORT_S, STEP_S), strike_s, [SHORT_S]]))
        struck = np.isin(edge_s[1:], strike_s)
        interval_s = np.tile(told_s, (len(struck), 1))
        never = simulate_saves(edge_s, struck, interval_s, costs)
        # Up to the third save both lives are the same; from the next step on the true time is known.
        known = np.cumsum(never.saves, axis=0) >= CORRECTED_AFTER
        known = np.vstack([np.zeros_like(known[:1]), known[:-1]])
        soon = simulate_saves(edge_s, struck, np.where(known, right_s, interval_s), costs)
        useful += np.stack([soon.useful_s.sum(axis=0), never.useful_s.sum(axis=0)])
    share = useful / (SHORT_LIVES * SHORT_S)
    exact = ettr(told_s, costs.save_s, costs.restart_s, MTTF_S, costs.flush_s)
    rows = [
        {"factor": float(factors[i]), "interval_s": float(told_s[i]), "corrected_ettr": float(share[0, i]),
         "corrected_behind_pp": 100.0 * float(share[0, 0] - share[0, i]),
         "never_behind_pp": 100.0 * float(share[1, 0] - share[1, i]),
         "never_behind_exact_pp": 100.0 * float(exact[0] - exact[i])}
        for i in range(len(factors))
    ]  # fmt: skip
    return {"simulated": True, "mttf_s": MTTF_S, "lives": SHORT_LIVES, "life_s": SHORT_S,
            "corrected_after_saves": CORRECTED_AFTER, "rows": rows}  # fmt: skip


def weibull(costs: SaveCosts, seed: int) -> dict[str, Any]:
    """Times between failures of Weibull's law from the failure on; the plan knows their mean alone."""
    rows = []
    planned_s = float(best_interval(costs.save_s, costs.restart_s, MTTF_S, costs.flush_s)[0])
    intervals = np.maximum(np.array([planned_s, *FIXED.values(), *GRID_S]), costs.flush_s)
    for k in SHAPES:
        rng = np.random.default_rng([seed, 43, round(100 * k)])
        gaps_s = MTTF_S / gamma(1.0 + 1.0 / k) * rng.weibull(k, STRIKES)
        share = _share(_life(gaps_s, intervals, costs))
        at = len(FIXED) + 1 + int(np.argmax(share[len(FIXED) + 1 :]))
        exact_s, exact = best_weibull(costs.save_s, costs.restart_s, MTTF_S, k, costs.flush_s)
        rows.append({
            "shape": k, "live": float(share[0]), "live_interval_s": planned_s,
            "best_constant": float(share[at]), "best_constant_s": float(intervals[at]),
            "best_constant_exact": float(exact[0]), "best_constant_exact_s": float(exact_s[0]),
            "live_behind_pp": 100.0 * float(share[at] - share[0]),
            **{name: float(share[i]) for i, name in enumerate(FIXED, 1)},
        })  # fmt: skip
    return {"simulated": True, "mttf_s": MTTF_S, "strikes": STRIKES, "rows": rows}


def prediction(costs: SaveCosts, seed: int) -> dict[str, Any]:
    """Return the gain of acting ahead if so many failures are foretold, and so many alarms are true.

    Rules: at the alarm, and train on; repeated, where nobody knows when after LEAD_S a failure comes: at the
    alarm, and again until it came; timed, so that the save is durable just before the failure that
    is foretold; and drained: save at the alarm, then restart elsewhere, so that the failure strikes nobody.
    """
    rng = np.random.default_rng([seed, 44])
    strike_s = np.cumsum(rng.exponential(MTTF_S, STRIKES))
    told = rng.random(STRIKES) < RECALL
    wrong_s = rng.uniform(0.0, strike_s[-1], rng.poisson(RECALL * STRIKES * (1.0 - PRECISION) / PRECISION))
    foretold_s = np.sort(np.concatenate([strike_s[told], wrong_s]))
    durable_s = costs.save_s + costs.flush_s
    plain_s, plain_ettr = best_interval(costs.save_s, costs.restart_s, MTTF_S, costs.flush_s)
    longer_s, ahead = best_ahead(costs.save_s, costs.restart_s, MTTF_S, RECALL, PRECISION)
    short, long = float(plain_s), max(float(longer_s), costs.flush_s)
    at_alarm = foretold_s - LEAD_S
    timed = foretold_s - min(durable_s + MARGIN_S, LEAD_S)
    moved = np.concatenate([strike_s[~told], at_alarm + durable_s + 1.0])
    later_s = rng.exponential(LEAD_S, len(foretold_s))
    every_s = float(young_s(costs.save_s, LEAD_S))
    turns = np.arange(MOST_TURNS)[:, None] * (every_s + costs.save_s)
    again = (at_alarm - later_s + turns)[turns < LEAD_S + later_s]
    shares = {
        "plain": _share_ahead(strike_s, at_alarm, short, costs, heeds=False),
        "at_alarm": _share_ahead(strike_s, at_alarm, short, costs),
        "repeated": _share_ahead(strike_s, again, long, costs),
        "timed": _share_ahead(strike_s, timed, long, costs),
        "drained": _share_ahead(moved, at_alarm, long, costs),
    }
    rows = [
        {"rule": name, "interval_s": short if name in ("plain", "at_alarm") else long, "ettr": share,
         "gain_pp": 100.0 * (share - shares["plain"])}
        for name, share in shares.items()
    ]  # fmt: skip
    return {"simulated": True, "mttf_s": MTTF_S, "recall": RECALL, "precision": PRECISION, "lead_s": LEAD_S,
            "strikes": STRIKES, "plain_exact": float(plain_ettr), "timed_exact": float(ahead),
            "rows": rows}  # fmt: skip


def _share_ahead(
    strike_s: F64, alarm_s: F64, interval_s: float, costs: SaveCosts, heeds: bool = True
) -> float:
    """Of a life with these strikes and alarms; a save ahead where the work it keeps is worth it."""
    alarm_s = alarm_s[(alarm_s > 0.0) & (alarm_s < strike_s.max())]
    edge_s = np.unique(np.concatenate([[0.0], strike_s[strike_s > 0.0], alarm_s]))
    pieces = len(edge_s) - 1
    alarms = Predictions(np.isin(edge_s[:-1], alarm_s), np.array([heeds]), costs.save_s / PRECISION)
    course = simulate_saves(
        edge_s, np.isin(edge_s[1:], strike_s), np.full((pieces, 1), interval_s), costs, alarms
    )
    return float(_share(course)[0])


def say_suite(told: Mapping[str, Any], out: Console) -> None:
    """Each part as a table, under a heading that says that it is simulated."""

    def line(text: str, style: str | None = None) -> None:
        out.print(text, style=style, markup=False, soft_wrap=True, highlight=False)

    for name, fleet in told["fleets"].items():
        line(f"simulated fleet, {name.replace('_', ' ')}: {fleet['about']}", "bold")
        print_scores(fleet, out)
        line("")
    part = told["wrong_save"]
    line(f"simulated: a job that tells a wrong save time, {part['lives']} lives of a day", "bold")
    rows = [[f"{row['factor']:g}", f"{row['corrected_behind_pp']:.2f} pp", f"{row['never_behind_pp']:.2f} pp"]
            for row in part["rows"][1:]]  # fmt: skip
    print_table(out, ["told / true", "behind if soon corrected", "behind if never"], rows)
    part = told["weibull"]
    line(f"simulated: Weibull times between failures of mean {duration(part['mttf_s'])}", "bold")
    rows = [
        [f"{row['shape']:g}", *(f"{100 * row[name]:.2f}" for name in ("live", "best_constant", *FIXED)),
         number(row["best_constant_s"] / 60.0)]
        for row in part["rows"]
    ]  # fmt: skip
    print_table(out, ["shape: %", "live", "best", "30 min", "60 min", "120 min", "best, min"], rows)
    part = told["prediction"]
    line(f"simulated: {100 * part['recall']:g} % foretold {duration(part['lead_s'])} ahead, precision "
         f"{100 * part['precision']:g} %", "bold")  # fmt: skip
    rows = [[row["rule"].replace("_", " "), duration(row["interval_s"]), _percent(row["ettr"]),
             f"{row['gain_pp']:+.2f} pp"] for row in part["rows"]]  # fmt: skip
    print_table(out, ["a save ahead", "interval", "effective time", "gain"], rows)
    print_goals(told.get("goals", []), out)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
