"""What a job's interval between saves is worth by closed forms: the best, Young's, Daly's, fixed ones.

Numbers to a tree for JSON, and the same as a table for people. Part of the shell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from policies import checkpoint_time as single
from twin.app.checkpoint_terms import Asked
from twin.app.checkpoint_worth import best_of, worth
from twin.app.report_text import duration, number
from twin.frame import F64

FIXED_S = {"fixed_30_min": 1800.0, "fixed_60_min": 3600.0, "fixed_120_min": 7200.0}
NOISE_PP = 1e-7  # of a difference of two numbers that are the same
POINTS = 241  # of the curve
# The goal that is judged where it applies. source: issue Checkpoints
GOAL_MTTF_S, GOAL_SAVE_S, GOAL_PP, GOAL_RIVAL = 6480.0, 60.0, 10.0, "fixed_60_min"
CURVE_WORDS = "effective training time by interval"


def closed_forms(asked: Asked) -> dict[str, Any]:
    """The best interval, what it is worth, and what each alternative costs. ETTR 0 to 1, times in s."""
    found = best_of(asked)
    young = float(single.young_s(asked.save_s, asked.mttf_s))
    daly = float(single.daly_s(asked.save_s, asked.mttf_s))
    rivals = {**FIXED_S, "young": young, "daly": daly}
    alternatives = {
        name: _alternative(max(interval_s, asked.flush_s), asked, found.ettr)
        for name, interval_s in rivals.items()
    }
    told: dict[str, Any] = {
        "terms": asked._asdict(),
        "interval_s": found.interval_s, "ettr": found.ettr, "young_s": young, "daly_s": daly,
        "alternatives": alternatives, "notes": _notes(asked, found.interval_s),
    }  # fmt: skip
    if asked.two_levels:
        told["local_interval_s"] = found.local_interval_s
    if found.plain_ettr is not None:
        told["without_prediction"] = {"interval_s": found.plain_interval_s, "ettr": found.plain_ettr,
                                      "gain_pp": _points(found.ettr - found.plain_ettr)}  # fmt: skip
    told["goals"] = _goals(asked, told)
    return told


def _alternative(interval_s: float, asked: Asked, best: float) -> dict[str, float]:
    ettr = float(worth(asked, np.array([interval_s]))[0])
    return {"interval_s": interval_s, "ettr": ettr, "behind_pp": _points(best - ettr)}


def _points(ettr: float) -> float:
    """A difference in percentage points."""
    return 0.0 if abs(100.0 * ettr) < NOISE_PP else 100.0 * ettr


def _notes(asked: Asked, interval_s: float) -> list[str]:
    out = []
    if asked.flush_s > 0 and interval_s <= asked.flush_s * (1.0 + 1e-9):
        out.append(
            f"no interval is shorter than a flush of {duration(asked.flush_s)}: storage drains one save "
            "before the next"
        )
    if asked.save_s >= 2.0 * asked.mttf_s:
        out.append("a save takes longer than failures leave: hardly anything is kept, whatever the interval")
    if asked.restart_s >= 2.0 * asked.mttf_s:
        out.append(
            "a restart takes longer than failures leave: hardly anything is kept, whatever the interval"
        )
    if asked.two_levels:
        out.append("Young and Daly know one tier: theirs are for node losses and durable saves alone")
    elif asked.recall > 0 and asked.lead_s < asked.save_s:
        out.append(f"a save takes longer than {duration(asked.lead_s)}: what is foretold comes too late")
    return out


def _goals(asked: Asked, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    plain = asked.weibull == 1.0 and asked.recall == asked.flush_s == 0.0 and not asked.two_levels
    if not plain or (asked.mttf_s, asked.save_s) != (GOAL_MTTF_S, GOAL_SAVE_S):
        return []
    ahead = told["alternatives"][GOAL_RIVAL]["behind_pp"]
    return [{"goal": f"at least {GOAL_PP:g} pp above fixed 60 min at an MTTF of 1.8 h and a save of 60 s",
             "value_pp": ahead, "met": ahead >= GOAL_PP}]  # fmt: skip


def curve(asked: Asked, interval_s: float) -> tuple[F64, F64]:
    """(intervals, ETTR) over the range that is worth a look, from a tenth of the best to beyond 2 h."""
    middle = interval_s if math.isfinite(interval_s) and interval_s > 0 else asked.mttf_s
    low = max(0.1 * middle, asked.flush_s, 1e-3)
    high = max(10.0 * middle, 2.5 * 3600.0 if middle > 60.0 else 0.0)
    x = np.geomspace(low, max(high, 1.01 * low), POINTS)
    return x, worth(asked, x)


def say(told: Mapping[str, Any], out: Console) -> None:
    """The table."""
    asked = Asked(**told["terms"])
    for line in heads(asked):
        out.print(line, markup=False, soft_wrap=True, highlight=False)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(("rule", "interval", "effective time", "behind")):
        shown.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    shown.add_row("best", duration(told["interval_s"]), f"{100 * told['ettr']:.2f} %", "", style="bold")
    for name, one in told["alternatives"].items():
        shown.add_row(name.replace("_", " "), duration(one["interval_s"]), f"{100 * one['ettr']:.2f} %",
                      f"{one['behind_pp']:.2f} pp")  # fmt: skip
    out.print(shown)
    if "local_interval_s" in told:
        line = f"saves in memory every {duration(told['local_interval_s'])}"
        out.print(line, markup=False, highlight=False)
    if "without_prediction" in told:
        plain = told["without_prediction"]
        line = (f"without prediction: every {duration(plain['interval_s'])}, {100 * plain['ettr']:.2f} %; "
                f"saving ahead adds {plain['gain_pp']:.2f} pp")  # fmt: skip
        out.print(line, markup=False, soft_wrap=True, highlight=False)
    for note in told["notes"]:
        out.print(note, style="dim", markup=False, soft_wrap=True, highlight=False)
    say_goals(told["goals"], out)


def heads(asked: Asked) -> list[str]:
    """The terms in words."""
    words = [f"MTTF {duration(asked.mttf_s)}", f"save {duration(asked.save_s)}",
             f"restart {duration(asked.restart_s)}"]  # fmt: skip
    if asked.flush_s > 0:
        words.append(f"durable {duration(asked.flush_s)} later")
    if asked.weibull != 1.0:
        words.append(f"Weibull {number(asked.weibull)}")
    if asked.recall > 0:
        words.append(f"{number(100 * asked.recall)} % foretold {duration(asked.lead_s)} ahead")
        words.append(f"precision {number(100 * asked.precision)} %")
    lines = [", ".join(words)]
    if asked.two_levels:
        local = (asked.local_save_s, asked.local_restart_s, asked.soft_mttf_s)
        lines.append("in memory: save {}, restart {}, MTTF of processes {}".format(*map(duration, local)))
    return lines


def say_goals(goals: list[dict[str, Any]], out: Console) -> None:
    """Each goal: met or missed, by how much."""
    for goal in goals:
        met = "met" if goal["met"] else "MISSED"
        line = f"goal {met}: {goal['goal']}: {goal['value_pp']:+.2f} pp"
        out.print(line, style=None if goal["met"] else "red", markup=False, soft_wrap=True, highlight=False)
