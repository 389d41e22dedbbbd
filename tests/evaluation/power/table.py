"""Tables of the arms on the power test sites, and the goals in words."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console

from tests.evaluation.power.scores import AGREE_ENERGY_PU, AGREE_WORK_PU, FIGURES
from twin.backtest import print_table
from twin.catalogue import clean

SHARES = ("worst_over_pu", "lost_high_pu", "lost_low_pu", "lost_pu", "binds_pu", "needed_pu")
WORST = ("worst_over_pu", "after_loss_s")  # the worst run is told, and not the mean


def figure(key: str, value: float) -> str:
    """A figure in its own form."""
    if math.isnan(value):
        return "-"
    if key in SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:.1f}" if key in ("energy_mwh", "dark_h") else f"{value:,.0f}"


def say_week(told: dict[str, Any], out: Console) -> None:
    """Every site, then the goals."""

    def say(words: str, style: str | None = None) -> None:
        out.print(clean(words, 400), style=style, markup=False, soft_wrap=True, highlight=False)

    for part in told["sites"]:
        scaled = "" if part["scale"] == 1.0 else f", demand times {part['scale']:g}"
        head = f"simulated: site {part['site']}, {part['nodes']} nodes in {part['racks']} racks, "
        say(f"{head}{part['days']:g} days, {len(part['seeds'])} seeds{scaled}", "bold")
        rows = []
        for key, title in FIGURES:
            at = f"{key}_most" if key in WORST else key
            rows.append([title, *(figure(key, arm[at]) for arm in part["arms"])])
        print_table(out, ["mean of a run", *(arm["arm"] for arm in part["arms"])], rows)
        ran, shown = part["arms"][0]["runs"], part["arms"][0]["runs_that_count"]
        if "troubles" in part:
            kinds = [f"{n} {kind.replace('_', ' ')}" for kind, n in part["troubles"].items()]
            say(f"troubles beside the loss of a feed, all seeds: {', '.join(kinds)}")
        say(f"{shown} of {ran} runs count: their demand was beyond a limit for 5 % of the time or more")
        for arm in part["arms"]:
            for key, what in (("lost_high_pu", "of high"), ("lost_low_pu", "of low")):
                more = arm.get(f"{key}_more_than_ours")
                if more is not None:
                    say(f"{arm['arm']}: {_points(more)} of the work {what} priority lost than by racktwin")
        if "agreement" in part:
            both = part["agreement"]
            say(f"the worst hour of the first seed, asked each second: work lost differs by "
                f"{100 * both['work_pu']:.2f} points (allowed {100 * AGREE_WORK_PU:g}), energy by "
                f"{100 * both['energy_pu']:.2f} % (allowed {100 * AGREE_ENERGY_PU:g})")  # fmt: skip
        say("")
    for goal in told["goals"]:
        met = {True: "met", False: "MISSED", None: "not shown (no run counts)"}[goal["met"]]
        say(f"{met}: {goal['goal']}: {goal['value']:,.4g}, goal {goal['bound']}")


def _points(more: dict[str, float]) -> str:
    low, high = 100 * more["low"], 100 * more["high"]
    between = "" if math.isnan(low) else f" ({low:+.2f} to {high:+.2f})"
    return f"{100 * more['mean']:+.2f} points{between} more"
