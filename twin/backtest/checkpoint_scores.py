"""Scores of a replay: effective time of each rule, differences by moving blocks of days, the goals.

Sizes are joined by servers: an hour of 128 servers counts sixteen times one of 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from models.moving_block import interval
from twin.backtest.checkpoint_formulas import GOAL_MTTF_S, GOAL_PP, GOAL_RIVAL, GOAL_SAVE_S, print_goals
from twin.backtest.checkpoint_replay import BEST, LIVE, ORACLES, RULES, YOUNGS, ReplayResult
from twin.catalogue import F64, duration, number
from twin.report import grid

BLOCK_D = 7  # days of a block: what strikes a fleet lasts as long. source: estimate
SEED = 0
# pp; source: issue Checkpoints
WITHIN_ORACLE_PP, BELOW_YOUNG_PP = 0.5, 0.5
NEAR = 1.1  # a size counts as one of MTTF 1.8 h within this factor. source: estimate
NAMES = (*RULES, BEST)
NAME_WIDTH, CELL_WIDTH = 22, 14  # characters of a table with intervals
OF_ALL = "all"


def scores(found: Sequence[ReplayResult], save_s: float) -> dict[str, Any]:
    """Per size and of all: ETTR by rule, how far `live` is ahead in pp with a 90 % interval; the goals."""
    sizes = {str(one.size): _of(one.wall_s, one.useful_s) | _what(one) for one in found}
    report: dict[str, Any] = {"rules": list(NAMES), "sizes": sizes}
    if len(found) > 1:
        # However many jobs of a size there were, they count as one.
        wall_s = np.sum([one.size / one.jobs * one.wall_s for one in found], axis=0)
        useful_s = np.sum([one.size / one.jobs * one.useful_s for one in found], axis=0)
        report[OF_ALL] = _of(wall_s, useful_s)
    report["goals"] = _goals(report, save_s)
    return report


def _of(wall_s: F64, useful_s: F64) -> dict[str, Any]:
    ettr = useful_s.sum(axis=0) / wall_s.sum()
    ahead = {}
    for i, name in enumerate(NAMES[1:], 1):
        daily = (useful_s[:, 0] - useful_s[:, i]) / wall_s.mean()
        low, high = interval(daily, BLOCK_D, SEED)
        ahead[name] = {"pp": 100.0 * float(ettr[0] - ettr[i]), "low_pp": 100.0 * low, "high_pp": 100.0 * high}
    low, high = interval(useful_s[:, 0] / wall_s.mean(), BLOCK_D, SEED)
    return {
        "ettr": {name: float(ettr[i]) for i, name in enumerate(NAMES)},
        "live_low": low,
        "live_high": high,
        "live_ahead": ahead,
    }


def _what(one: ReplayResult) -> dict[str, Any]:
    weeks = float(one.wall_s.sum()) / 604_800.0
    return {
        "jobs": one.jobs,
        "strikes": one.strikes,
        "mttf_s": float(one.wall_s.sum()) / one.strikes if one.strikes else np.inf,
        "interval_s": {name: float(one.interval_s[i]) for i, name in enumerate(NAMES)},
        "changes_per_job_week": one.changes[0] / weeks,
        "changes_per_job_week_no_hysteresis": one.changes[1] / weeks,
        "saves_per_job_day": {
            name: float(one.saves[:, i].sum()) / (7.0 * weeks) for i, name in enumerate(NAMES)
        },
    }


def _goals(report: Mapping[str, Any], save_s: float) -> list[dict[str, Any]]:
    """Each goal by the worst case: the size and rival at which `live` is furthest behind."""
    units = [*report["sizes"].items(), *([(OF_ALL, report[OF_ALL])] if OF_ALL in report else [])]
    out = []
    for words, rivals, most in (
        ("within {:g} pp of the oracle", ORACLES, WITHIN_ORACLE_PP),
        ("never more than {:g} pp below Young", YOUNGS, BELOW_YOUNG_PP),
    ):
        worst, size, rival = min(
            (unit["live_ahead"][name]["pp"], size, name) for size, unit in units for name in rivals
        )
        where = "all sizes" if size == OF_ALL else f"{size} servers"
        out.append(
            {
                "goal": words.format(most) + f" (worst: {rival}, {where})",
                "value_pp": worst,
                "met": worst >= -most,
            }
        )
    for size, unit in report["sizes"].items():
        if save_s == GOAL_SAVE_S and GOAL_MTTF_S / NEAR <= unit["mttf_s"] <= GOAL_MTTF_S * NEAR:
            ahead = unit["live_ahead"][GOAL_RIVAL]["pp"]
            words = f"at least {GOAL_PP:g} pp above fixed 60 min"
            where = f" ({size} servers, MTTF {duration(unit['mttf_s'])})"
            out.append({"goal": words + where, "value_pp": ahead, "met": ahead >= GOAL_PP})
    return out


def print_scores(report: Mapping[str, Any], out: Console) -> None:
    """Tables: effective time by size and rule, how far `live` is ahead of each, what it did; the goals."""
    units = [*report["sizes"].items(), *([(OF_ALL, report[OF_ALL])] if OF_ALL in report else [])]
    heads = [size for size, _ in units]
    print_table(
        out,
        ["effective time, %", *heads],
        [
            [_words(name), *(f"{100 * unit['ettr'][name]:.2f}" for _, unit in units)]
            for name in report["rules"]
        ],
    )
    wide = out.width >= NAME_WIDTH + CELL_WIDTH * len(units)
    print_table(
        out,
        ["live ahead, pp" + (" (90 %)" if wide else ""), *heads],
        [
            [_words(name), *(_ahead(unit["live_ahead"][name], wide) for _, unit in units)]
            for name in report["rules"][1:]
        ],
    )
    sizes = report["sizes"].values()
    print_table(
        out,
        ["by size", *report["sizes"]],
        [
            ["jobs", *(f"{u['jobs']}" for u in sizes)],
            ["strikes", *(f"{u['strikes']:,}" for u in sizes)],
            ["MTTF, h", *(number(u["mttf_s"] / 3600.0) for u in sizes)],
            ["live interval, min", *(number(u["interval_s"][LIVE] / 60.0) for u in sizes)],
            ["best constant, min", *(number(u["interval_s"][BEST] / 60.0) for u in sizes)],
            ["changes a week", *(number(u["changes_per_job_week"], 2) for u in sizes)],
            ["  no hysteresis", *(number(u["changes_per_job_week_no_hysteresis"], 2) for u in sizes)],
        ],
    )
    print_goals(report["goals"], out)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _ahead(one: Mapping[str, float], wide: bool) -> str:
    half = 0.5 * (one["high_pp"] - one["low_pp"])
    return f"{one['pp']:+.2f}" + (f" ±{half:.2f}" if wide and np.isfinite(half) else "")


def print_table(out: Console, heads: list[str], rows: list[list[str]]) -> None:
    """A table: names on the left, figures on the right."""
    grid(out, heads, rows, right=range(1, len(heads)), folds=())
    out.print()
