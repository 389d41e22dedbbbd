"""The plots of a checkpoint's backtest as a page and as drawings: what each interval is worth.

Made of the report's own plots, with intervals in place of times, on a logarithmic axis. Pure but for the
files that it is asked to write. Part of the shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twin.app.checkpoint_table import CURVE_WORDS, FIXED_S, curve, heads
from twin.app.checkpoint_terms import Asked
from twin.app.report import open_folder, write_whole
from twin.app.report_page import STYLE, page
from twin.app.report_plots import figure
from twin.app.report_sections import section, table
from twin.app.report_svg import Line, plot
from twin.app.report_text import TimeAxis, duration, safe
from twin.frame import F64

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


def drawn(told: Mapping[str, Any], width: int = 520) -> tuple[str, IntervalAxis]:
    """The curve, with upright marks where the best interval and the fixed ones lie."""
    x, y = curve(Asked(**told["terms"]), told["interval_s"])
    axis = IntervalAxis(x)
    marks = [(axis.at(told["alternatives"][name]["interval_s"]), "") for name in FIXED_S]
    marks.append((axis.at(told["interval_s"]), f"best: every {duration(told['interval_s'])}"))
    lines = [Line("", 100.0 * y, 1)]
    return plot(lines, axis, "%", CURVE_WORDS, width=width, height=250, marks=marks), axis


def write_curve(told: Mapping[str, Any], folder: Path) -> list[Path]:
    """The page and the drawing. Raises StorageError if they cannot be written."""
    small, axis = drawn(told)
    wide, _ = drawn(told, 1080)
    both = f'<div class="wide">{wide}</div><div class="narrow">{small}</div>'
    rows = [["best", duration(told["interval_s"]), f"{100 * told['ettr']:.2f} %", ""]]
    rows += [
        [safe(name.replace("_", " ")), duration(one["interval_s"]), f"{100 * one['ettr']:.2f} %",
         f"{one['behind_pp']:.2f} pp"]
        for name, one in told["alternatives"].items()
    ]  # fmt: skip
    sentence = (
        "The optimum is flat: half or twice the best interval costs little. Marks: the best, 30, 60 and "
        "120 min."
    )
    words = safe("; ".join(heads(Asked(**told["terms"]))), 400)
    notes = "".join(f"<p>{safe(note, 300)}</p>" for note in told["notes"])
    body = (
        f"<header><h1>Checkpoint interval</h1><p>{words}. Closed forms, no simulation.</p></header>"
        + figure(CURVE_WORDS.capitalize(), sentence, both, "lead")
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


def ready(folder: Path | None, names: Sequence[str] = (PAGE, DRAWING)) -> None:
    """Try the folder before anything is worked out. Raises ConfigError."""
    from twin.errors import ConfigError

    if folder is None:
        return
    open_folder(folder)
    for name in names:
        if (folder / name).is_dir():
            raise ConfigError(f"--report {folder}: {name} in it is a folder; expected a file, or none")
