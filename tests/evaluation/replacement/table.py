"""Tables of the arms on the simulated fleet, and of the worth of withdrawals on a recorded log."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tests.evaluation.replacement.scores import FIGURES
from twin.backtest import print_table
from twin.catalogue import clean

SHARES = ("goodput_pu", "large_failed_pu")


def figure(key: str, value: float) -> str:
    """A figure in its own form."""
    if key in SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if key == "false_drains" else f"{value:,.0f}"


def say_suite(told: dict[str, Any], out: Console) -> None:
    """Every fleet, then the goals."""
    for part in told["fleets"]:
        head = (
            f"simulated: {part['nodes']:,} nodes, {part['days']:g} days, {len(part['seeds'])} seeds; "
            f"{part['about']}; {100 * part['warned_pu']:.0f} % of failures are warned of"
        )
        out.print(clean(head, 300), style="bold", markup=False, soft_wrap=True, highlight=False)
        rows = []
        for key, title in FIGURES:
            row = [title]
            for arm in part["arms"]:
                row.append(figure(key, arm[key]))
            rows.append(row)
        print_table(out, ["mean of a quarter", *(a["arm"].replace("_", " ") for a in part["arms"])], rows)
        for arm in part["arms"]:
            _say_saved(arm, out)
        out.print("")
    for goal in told["goals"]:
        met = "met" if goal["met"] else "MISSED"
        line = f"{met}: {goal['goal']}: {goal['value']:,.4g}, goal {goal['bound']}"
        out.print(line, markup=False, soft_wrap=True, highlight=False)


def _say_saved(arm: dict[str, Any], out: Console) -> None:
    less = arm.get("lost_gpu_h_less")
    if less is None:
        return
    words = f"{arm['arm'].replace('_', ' ')}: saves {less['mean']:,.0f} GPU-h"
    words += f" ({less['low']:,.0f} to {less['high']:,.0f})"
    share = arm.get("lost_gpu_h_of_oracle")
    if share is not None:
        words += f", {share['pu']:.2f} ({share['low']:.2f} to {share['high']:.2f}) of what the oracle does"
    out.print(
        f"{words}; least on any seed {less['worst']:,.0f}", markup=False, soft_wrap=True, highlight=False
    )


def say_replay(told: dict[str, Any], out: Console) -> None:
    """Print the withdrawals of each rule on a recorded log."""
    head = (
        f"{told['events']}: {told['faults_scored']:,} recorded faults of {told['nodes']:,} nodes from day "
        f"{told['from_day']:g} to {told['until_day']:.4g}; what was known each day alone"
    )
    out.print(clean(head, 300), style="bold", markup=False, soft_wrap=True, highlight=False)
    rows = [
        [row["rule"].replace("_", " "), f"{row['withdrawn']:,}", _share(row["precision"]),
         _share(row["base_precision"]),
         _share(row["recall"]), f"{row['avoided']:,}", f"{row['node_days_out']:,.0f}"]
        for row in told["rules"]
    ]  # fmt: skip
    print_table(
        out,
        ["rule", "out", "right", "any node", "foreseen", "met", "days out"],
        rows,
    )

    note = (
        "right: its next fault came within a week, beside any node that was up; foreseen: faults of "
        "nodes withdrawn in the week before; met: faults that began while their node was out"
    )
    out.print(note, markup=False, soft_wrap=True, highlight=False)


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %"
