"""A backtest's scores as a table for the terminal, with a rival beside and the cases where it loses.

Prints scores that are plain data. Part of the shell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twin.app.backtest_goals import amount, ratio_words
from twin.app.report_text import clean, duration, number

WIDE_COLUMNS = 116  # of a terminal that has room for all
COLUMNS = ("ahead", "MAE", "last", "season", "EWMA", "MASE (90 %)", "pinball", "in 50 90 99 %", "at peaks",
           "ramps hit", "targets")  # fmt: skip
NARROW = ("ahead", "MAE", "MASE (90 %)", "pinball", "in 50 90 99 %")


def say(told: Mapping[str, Any], out: Console) -> None:
    """The table, and where it loses."""
    names = ", ".join(told["series"][:6]) + (" …" if len(told["series"]) > 6 else "")
    scored_from = f"scored after {100 * told['from']:.0f} %"
    title = f"{names} · {told['rows']:,} rows of {duration(told['step_s'])} · {scored_from}"
    shown = Table(title=Text(clean(title, 200)), title_justify="left", box=None, pad_edge=False,
                  padding=(0, 2, 0, 0))  # fmt: skip
    columns = [c for c in COLUMNS if out.width >= WIDE_COLUMNS or c in NARROW]
    for head in columns:
        shown.add_column(head, justify="left" if head == "ahead" else "right", no_wrap=True)
    for h in told["horizons"]:
        cells = _cells(h)
        shown.add_row(*(cells[head] for head in columns))
    out.print(shown)
    if "rival" in told:
        from twin.app.backtest_rival import rival_lines

        for line in rival_lines(told["rival"]):
            out.print(line, markup=False, soft_wrap=True)
    worse = told["losses"]
    for loss in worse[:20]:
        out.print(loss_words(loss), markup=False, soft_wrap=True)
    if len(worse) > 20:
        out.print(f"{len(worse) - 20} more are in the JSON")
    checked = (
        f"{told['lookahead_origins_checked']:,} origins were forecast again without later rows: the same"
    )
    out.print(checked, style="dim", markup=False, soft_wrap=True)


def _cells(h: Mapping[str, Any]) -> dict[str, str]:
    """A horizon's scores as people read them, by column."""
    ratio = h["pinball"] / h["pinball_persistence"] if h["pinball_persistence"] else math.nan
    values = (
        duration(h["horizon_s"]), *(amount(h[k]) for k in ("mae", "mae_naive", "mae_seasonal", "mae_ewma")),
        f"{ratio_words(h['mase'])} ({ratio_words(h['mase_low'])} to {ratio_words(h['mase_high'])})",
        ratio_words(ratio),
        " ".join(number(100 * h[f"coverage{band}"]) for band in ("50", "90", "99")),
        f"{number(100 * h['peak_error'], 2)} %", f"{number(100 * h['ramp_hit_rate'], 2)} %",
        f"{h['targets']:,}",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def loss_words(loss: Mapping[str, Any]) -> str:
    """A line on where a rival did better."""
    whose = "" if loss["series"] is None else f", {clean(loss['series'])}"
    rival = {"naive": "the last value", "seasonal": "the same time yesterday", "ewma": "EWMA",
             "persistence": "the last value with its past errors"}[loss["better"]]  # fmt: skip
    span = "" if math.isnan(loss["low"]) else f" ({ratio_words(loss['low'])} to {ratio_words(loss['high'])})"
    what = "MASE" if loss["score"] == "mase" else "pinball loss ×"
    ahead = duration(loss["horizon_s"])
    return f"loses {ahead} ahead{whose}: {what} {ratio_words(loss['value'])}{span}, to {rival}"
