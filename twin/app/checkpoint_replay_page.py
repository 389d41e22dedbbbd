"""The page of a replay: how each rule did, size by size, with intervals, and the time kept day by day.

Made of the report's own plots. Part of the shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twin.app.checkpoint_page import DRAWING, PAGE, write_drawing, write_page
from twin.app.checkpoint_replay import LIVE, ORACLES, Replayed
from twin.app.checkpoint_scores import NAMES, OF_ALL
from twin.app.report_plots import figure
from twin.app.report_sections import section, table
from twin.app.report_svg import Line, plot
from twin.app.report_text import TimeAxis, duration, number, safe
from twin.frame import F64, NS

SMOOTH_D = 7  # days of a point's mean
DRAWN = (LIVE, ORACLES[0], "fixed_60_min")
DAY_NS = 86_400 * NS


def write_replay(told: Mapping[str, Any], found: Sequence[Replayed], folder: Path) -> list[Path]:
    """The page, and the plot of the largest jobs. Raises StorageError if they cannot be written."""
    largest = found[-1]
    smooth = _smooth(largest.useful_s / np.maximum(largest.wall_s, 1e-9)[:, None])
    days_ns = ((largest.days - largest.days[0]) * DAY_NS).astype(np.int64)
    axis = TimeAxis(days_ns, 0, int(days_ns[-1]))
    lines = [
        Line(name.replace("_", " "), 100.0 * smooth[:, NAMES.index(name)], i)
        for i, name in enumerate(DRAWN, 1)
    ]
    title = f"Effective time of jobs of {largest.size} servers"
    wide, small = (plot(lines, axis, "%", title, width=w, height=270) for w in (1080, 520))
    both = f'<div class="wide">{wide}</div><div class="narrow">{small}</div>'
    body = (
        f"<header><h1>Checkpoint intervals over recorded failures</h1><p>{told['faults_scored']:,} faults of "
        f"{told['nodes']:,} nodes, from day {number(told['from_day'])} to {number(told['until_day'])}; jobs "
        f"are synthetic. Save {duration(told['save_s'])}, restart {duration(told['restart_s'])}.</p></header>"
        + figure(title, f"Means of {SMOOTH_D} days.", both, "lead")
        + _compared(told) + _rules(told)
    )  # fmt: skip
    write_page(folder / PAGE, "racktwin: checkpoint intervals over recorded failures", body, axis)
    write_drawing(folder / DRAWING, wide)
    return [folder / PAGE, folder / DRAWING]


def _smooth(daily: F64) -> F64:
    """Means over SMOOTH_D days around each [n_day, n_rule]."""
    total = np.cumsum(np.vstack([np.zeros_like(daily[:1]), daily]), axis=0)
    at = np.arange(len(daily))
    low, high = np.maximum(at - SMOOTH_D // 2, 0), np.minimum(at + SMOOTH_D // 2 + 1, len(daily))
    out: F64 = (total[high] - total[low]) / (high - low)[:, None]
    return out


def _units(told: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    every = [(OF_ALL, told[OF_ALL])] if OF_ALL in told else []
    return [*((f"{size} servers", unit) for size, unit in told["sizes"].items()), *every]


def _compared(told: Mapping[str, Any]) -> str:
    """How far the live rule is ahead of each other, with intervals."""
    units = _units(told)
    rows = []
    for name in told["rules"][1:]:
        cells = []
        for _, unit in units:
            one = unit["live_ahead"][name]
            half = 0.5 * (one["high_pp"] - one["low_pp"])
            cells.append(f"{one['pp']:+.2f}" + (f" ± {half:.2f}" if np.isfinite(half) else ""))
        rows.append([safe(name.replace("_", " ")), *cells])
    head = ["live ahead of", *(safe(name) for name, _ in units)]
    intro = "Points of effective time, all struck by the same failures; 90 % interval by blocks of days."
    return section("compared", "Compared", intro,
                   table(head, rows, tuple(range(1, len(head)))))  # fmt: skip


def _rules(told: Mapping[str, Any]) -> str:
    units = _units(told)
    rows = [
        [safe(name.replace("_", " ")), *(f"{100 * unit['ettr'][name]:.2f}" for _, unit in units)]
        for name in told["rules"]
    ]
    goals = "".join(
        f"<li>{'met' if goal['met'] else '<b>missed</b>'}: {safe(goal['goal'], 200)}: "
        f"{goal['value_pp']:+.2f} pp</li>"
        for goal in told["goals"]
    )
    head = ["rule", *(safe(name) for name, _ in units)]
    return section("rules", "Rules side by side", "Effective time in per cent.",
                   table(head, rows, tuple(range(1, len(head)))), f"<ul>{goals}</ul>")  # fmt: skip
