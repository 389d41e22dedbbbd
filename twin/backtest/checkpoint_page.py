"""Pages of checkpoint backtests: the curve of the closed forms, and the rules of a replay by size and day.

Made of the report's plots, with intervals in place of times, on a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from policies.checkpointing import FIXED_S
from twin.backtest.checkpoint_formulas import CURVE_WORDS, JobTerms, curve, headings
from twin.backtest.checkpoint_replay import LIVE, ORACLES, ReplayResult
from twin.backtest.checkpoint_scores import NAMES, OF_ALL
from twin.catalogue import F64, NS, TimeAxis, clean, duration, number
from twin.report import (
    STYLE,
    Line,
    PlotLayout,
    bullets,
    figure,
    fill,
    joined,
    open_folder,
    page,
    paragraph,
    plot,
    responsive,
    section,
    table,
    write_whole,
)

PAGE, DRAWING = "checkpoint.html", "checkpoint.svg"
MARKS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21_600.0, 43_200.0,
           86_400.0, 172_800.0, 604_800.0, 2_592_000.0, 31_536_000.0)  # fmt: skip


class IntervalAxis(TimeAxis):
    """Intervals between saves in place of instants, on a logarithmic scale. Of points [n], ascending, > 0."""

    def __init__(self, interval_s: F64) -> None:
        self.log = np.log(interval_s)
        span = float(self.log[-1] - self.log[0])
        self.share = (self.log - self.log[0]) / span
        super().__init__((self.share * 1e9).round().astype(np.int64), 0, 1_000_000_000)

    def label(self, t_ns: int) -> str:
        """The interval at a place in 1e9 parts."""
        return "every " + duration(float(np.exp(np.interp(t_ns / 1e9, self.share, self.log))))

    def caption(self) -> str:
        return "training between two saves"

    def at(self, interval_s: float) -> float:
        """The place of an interval, 0 to 1; beyond, outside of it."""
        return float((np.log(interval_s) - self.log[0]) / (self.log[-1] - self.log[0]))

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """(place, label) of round intervals."""
        places = [(self.at(s), s) for s in MARKS_S]
        inside = [(place, duration(s)) for place, s in places if -1e-9 <= place <= 1.0 + 1e-9]
        step = max(1, -(-len(inside) // max(most, 1)))
        return inside[::step]


def curve_plot(report: Mapping[str, Any], width: int = 520) -> tuple[Markup, IntervalAxis]:
    """The curve, with upright marks where the best interval and the fixed ones lie."""
    x, y = curve(JobTerms(**report["terms"]), report["interval_s"])
    axis = IntervalAxis(x)
    marks = [(axis.at(report["alternatives"][name]["interval_s"]), "") for name in FIXED_S]
    marks.append((axis.at(report["interval_s"]), f"best: every {duration(report['interval_s'])}"))
    lines = [Line("", 100.0 * y, 1)]
    return plot(lines, axis, "%", CURVE_WORDS, PlotLayout(width=width, height=250, marks=marks)), axis


def write_curve(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """The page and the drawing. Raises StorageError if they cannot be written."""
    small, axis = curve_plot(report)
    wide, _ = curve_plot(report, 1080)
    rows = [["best", duration(report["interval_s"]), f"{100 * report['ettr']:.2f} %", ""]]
    rows += [
        [clean(name.replace("_", " ")), duration(one["interval_s"]), f"{100 * one['ettr']:.2f} %",
         f"{one['behind_pp']:.2f} pp"]
        for name, one in report["alternatives"].items()
    ]  # fmt: skip
    sentence = (
        "The optimum is flat: half or twice the best interval costs little. Marks: the best, 30, 60 and "
        "120 min."
    )
    words = clean("; ".join(headings(JobTerms(**report["terms"]))), 400)
    notes = joined(paragraph(clean(note, 300)) for note in report["notes"])
    body = (
        fill("header.html", title="Checkpoint interval", lines=[f"{words}. Closed forms, no simulation."])
        + figure(CURVE_WORDS.capitalize(), sentence, responsive(wide, small), "lead")
        + section("rules", "Rules side by side", "Share of time that ends as kept training.",
                  table(["rule", "interval", "effective time", "behind"], rows, (1, 2, 3)), notes)
    )  # fmt: skip
    write_page(folder / PAGE, "racktwin: checkpoint interval", body, axis)
    write_drawing(folder / DRAWING, wide)
    return [folder / PAGE, folder / DRAWING]


def write_page(path: Path, title: str, body: str, axis: TimeAxis) -> None:
    """A page whose plots all share one axis."""
    times = axis.times_ns.tolist()
    write_whole(path, page(title, body, [axis.label(t) for t in times], [axis.place(t) for t in times]))


def write_drawing(path: Path, svg: str) -> None:
    """One plot as a file of its own, with the page's colours."""
    head, _, rest = svg.partition(">")
    style = STYLE.replace("&", "&amp;").replace("<", "&lt;")
    write_whole(path, f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n')


def check_folder(folder: Path | None) -> None:
    """Try the folder before anything is worked out. Raises ConfigError."""
    from twin.catalogue import ConfigError

    if folder is None:
        return
    open_folder(folder)
    for name in (PAGE, DRAWING):
        if (folder / name).is_dir():
            raise ConfigError(f"--report {folder}: {name} in it is a folder; expected a file, or none")


SMOOTH_D = 7  # days of a point's mean
DRAWN = (LIVE, ORACLES[0], "fixed_60_min")
DAY_NS = 86_400 * NS


def write_replay(report: Mapping[str, Any], found: Sequence[ReplayResult], folder: Path) -> list[Path]:
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
    wide, small = (plot(lines, axis, "%", title, PlotLayout(width=w, height=270)) for w in (1080, 520))
    line = (
        f"{report['faults_scored']:,} faults of {report['nodes']:,} nodes, from day "
        f"{number(report['from_day'])} to {number(report['until_day'])}; jobs are "
        f"synthetic. Save {duration(report['save_s'])}, restart {duration(report['restart_s'])}."
    )
    body = (
        fill("header.html", title="Checkpoint intervals over recorded failures", lines=[line])
        + figure(title, f"Means of {SMOOTH_D} days.", responsive(wide, small), "lead")
        + _compared(report) + _rules(report)
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


def _units(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    every = [(OF_ALL, report[OF_ALL])] if OF_ALL in report else []
    return [*((f"{size} servers", unit) for size, unit in report["sizes"].items()), *every]


def _compared(report: Mapping[str, Any]) -> Markup:
    """The lead of the live rule over each other rule, with intervals."""
    units = _units(report)
    rows = []
    for name in report["rules"][1:]:
        cells = []
        for _, unit in units:
            one = unit["live_ahead"][name]
            half = 0.5 * (one["high_pp"] - one["low_pp"])
            cells.append(f"{one['pp']:+.2f}" + (f" ± {half:.2f}" if np.isfinite(half) else ""))
        rows.append([clean(name.replace("_", " ")), *cells])
    head = ["live ahead of", *(clean(name) for name, _ in units)]
    intro = "Points of effective time, all struck by the same failures; 90 % interval by blocks of days."
    return section("compared", "Compared", intro,
                   table(head, rows, tuple(range(1, len(head)))))  # fmt: skip


def _rules(report: Mapping[str, Any]) -> Markup:
    units = _units(report)
    rows = [
        [clean(name.replace("_", " ")), *(f"{100 * unit['ettr'][name]:.2f}" for _, unit in units)]
        for name in report["rules"]
    ]
    goals = [
        Markup("{}: {}: {:+.2f} pp").format(
            "met" if goal["met"] else Markup("<b>missed</b>"), clean(goal["goal"], 200), goal["value_pp"]
        )
        for goal in report["goals"]
    ]
    head = ["rule", *(clean(name) for name, _ in units)]
    return section("rules", "Rules side by side", "Effective time in per cent.",
                   table(head, rows, tuple(range(1, len(head)))), bullets(goals))  # fmt: skip
