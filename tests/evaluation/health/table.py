"""Tables of the scores of simulated fleets: goals, failures by class, alarms by reason, chances, lemons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twin.catalogue import clean, duration, number

BY = "announced by"
LABEL = "simulated"  # on every table: none of this is of a real fleet
MOST_REASONS = 20
CLASSES_NOTE = (
    "show: failures with precursors, how many of them were seen coming and how long before, and for how long "
    "they had shown; none: those without precursors, of which nothing can be known"
)
DEFINITION = (
    "An alarm begins when the twin would drain a node and lasts until the node fails, or until it would not "
    "for 24 h. It came true if the node's own failure began within 7 days and before that; else it is a "
    "false drain. Intervals: 90 %."
)


def say(told: Mapping[str, Any], out: Console) -> None:
    """Everything that a run found."""
    seeds = told["seeds"]
    out.print(
        f"{LABEL}: {len(seeds)} {'fleet' if len(seeds) == 1 else 'fleets'} of {told['nodes']:,} nodes, "
        f"{told['gpus']:,} GPUs, {number(told['days'])} days, scored from day {number(told['train_days'])}; "
        f"seeds {seeds[0]} to {seeds[-1]}, a tick each {number(told['dt_s'])} s",
        markup=False, soft_wrap=True, style="bold",
    )  # fmt: skip
    for result in told["results"]:
        strength = f"precursors at {number(100 * result['strength'])} % of their strength"
        if told["healthy"]:
            incidents_table(result, "nothing fails", out)
            continue
        goals_table(result, strength, out)
        classes_table(result, strength, out)
        reasons_table(result, strength, out)
        incidents_table(result, strength, out)
        chances_table(result, strength, out)
        for line in sentences(result):
            out.print(line, markup=False, soft_wrap=True)
    for name in told["suspended"]:
        out.print(f"{clean(name, 100)} broke its contract and was suspended", style="red", markup=False)
    out.print(cost_words(told), style="dim", markup=False, soft_wrap=True)
    out.print(DEFINITION, style="dim", markup=False, soft_wrap=True)


def _table(heads: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i > 0 and head != BY else "left", no_wrap=head != BY)
    return table


def _show(title: str, strength: str, table: Table, out: Console) -> None:
    """With a heading that says what it is of."""
    out.print(f"\n{title} ({LABEL}, {strength})", markup=False, soft_wrap=True, style="italic")
    out.print(table)


def goals_table(result: Mapping[str, Any], strength: str, out: Console) -> None:
    """The goals with met or MISSED."""
    table = _table(("", "measured", "90 % interval", "goal", ""))
    for g in result["goals"]:
        unit = f" {g['unit']}" if g["unit"] else ""
        verdict = "-" if g["met"] is None else "met" if g["met"] else "MISSED"
        table.add_row(g["words"], f"{number(g['value'])}{unit}", _ends(g["low"], g["high"]),
                      f"{'>=' if g['at_least'] else '<='} {number(g['bound'])}{unit}", verdict)  # fmt: skip
    _show("goals", strength, table, out)


def classes_table(result: Mapping[str, Any], strength: str, out: Console) -> None:
    """Print the announced failures of each class."""
    heads = ("class", "failed", "show", "seen", "recall", "lead", "shown", "none", "seen", BY)
    table = _table(heads)
    rows = {"all": {"failures": result["failures"] - result["failures_shared"],
                    "lead_time_min": result["lead_time_min"], "precursor_min": math.nan, "reasons": {},
                    "with_precursors": result["with_precursors"],
                    "without_precursors": result["without_precursors"]}}  # fmt: skip
    for kind, c in {**result["by_class"], **rows}.items():
        if not c["failures"]:
            continue
        yes, no, lead = c["with_precursors"], c["without_precursors"], c["lead_time_min"]
        by = ", ".join(f"{clean(k, 40)} {n}" for k, n in list(c["reasons"].items())[:3])
        table.add_row(kind, str(c["failures"]), str(yes["failures"]), str(yes["announced"]),
                      number(yes["recall"], 2), _minutes(lead["median"]), _minutes(c["precursor_min"]),
                      str(no["failures"]), str(no["announced"]), Text(by))  # fmt: skip
    _show("failures by class", strength, table, out)
    out.print(CLASSES_NOTE, style="dim", markup=False, soft_wrap=True)


def reasons_table(result: Mapping[str, Any], strength: str, out: Console) -> None:
    """Print the reasons of alarms, and their outcomes."""
    table = _table(("reason", "came true", "false", "pending"))
    reasons = list(result["by_reason"].items())
    for reason, n in reasons[:MOST_REASONS]:
        table.add_row(Text(clean(reason, 60)), str(n["true"]), str(n["false"]), str(n["pending"]))
    if len(reasons) > MOST_REASONS:
        table.add_row(f"and {len(reasons) - MOST_REASONS} more")
    d = result["drains"]
    table.add_row("all", str(d["true"]), str(d["false"]), str(d["pending"]))
    _show("alarms by reason", strength, table, out)


def incidents_table(result: Mapping[str, Any], strength: str, out: Console) -> None:
    """Incidents of health by kind, and the rate of those that nothing justifies."""
    table = _table(("kind", "alarms", "incidents", "unjustified", "per node-month", "90 % interval"))
    for row in result["incidents"]:
        counts = (str(row[name]) for name in ("alarms", "incidents", "unjustified"))
        table.add_row(Text(clean(row["kind"], 60)), *counts,
                      number(row["per_node_month"]), _ends(row["low"], row["high"]))  # fmt: skip
    _show(f"incidents of health in {number(result['node_months'])} node-months", strength, table, out)


def chances_table(result: Mapping[str, Any], strength: str, out: Console) -> None:
    """Print the scores of the chances and of the counts."""
    table = _table(("within", "pairs", "base rate", "Brier", "of base rate", "skill", "ECE", "resolution"))
    for p in result["chances"]:
        if p["pairs"]:
            table.add_row(duration(p["horizon_s"]), f"{p['pairs']:,}", number(p["base_rate"]),
                          number(p["brier"]), number(p["brier_base_rate"]), number(p["skill"], 2),
                          number(p["ece"], 2), number(p["resolution"], 2))  # fmt: skip
    _show("chances that a node fails", strength, table, out)
    table = _table(("within", "forecast", "came", "in 90 % interval", "width", "spans"))
    for c in result["counts"]:
        if c["origins"]:
            table.add_row(duration(c["horizon_s"]), number(c["mean_forecast"]), number(c["mean_actual"]),
                          f"{number(100 * c['coverage90'], 2)} %", number(c["interval_width"]),
                          number(c["independent_spans"], 2))  # fmt: skip
    _show("failures of the fleet", strength, table, out)


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Return further results, a line each."""
    lead, drains, lemon, seen = (result[k] for k in ("lead_time_min", "drains", "lemons", "noticed"))
    early = result["with_precursors"]["early"]
    return [
        f"lead time: median {_minutes(lead['median'])}, quartiles {_minutes(lead['q25'])} and "
        f"{_minutes(lead['q75'])}; {early} of {lead['count']} before anything could be measured",
        f"{drains['false']} false drains in {number(result['node_months'])} node-months, "
        f"{drains['false_though_down_with_others']} of nodes that went down with others meanwhile; "
        f"{result['failures_shared']} failures had a cause in common and count nowhere",
        f"lemons: {lemon['found']} of {lemon['seeded']} found, {lemon['called']} called so by day 28; on "
        f"that day {lemon['right_on_day_28']} of {lemon['called_on_day_28']} stood rightly",
        f"failures noticed: {seen['noticed']}, missed {seen['missed']}, invented {seen['invented']}; after "
        f"{number(seen['delay_p50_s'])} s (median), {number(seen['delay_p90_s'])} s (90 %)",
    ]


def cost_words(told: Mapping[str, Any]) -> str:
    """Return the time of a tick and of a fleet, as text."""
    cost = told["cost"]
    parts = ", ".join(f"{k} {number(ms, 2)}" for k, ms in cost["ms_per_tick"].items() if k != "whole")
    return (
        f"{number(cost['ms_per_tick']['whole'])} ms a tick ({parts}); {told['nodes']:,} nodes x "
        f"{number(told['days'])} days took {duration(round(cost['fleet_s']))}, {cost['processes']} at a time"
    )


def _ends(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}" if math.isfinite(low + high) else "-"


def _minutes(minutes: float) -> str:
    if not math.isfinite(minutes):
        return "-"
    return f"{number(minutes, 2)} min" if minutes < 120 else f"{number(minutes / 60.0, 2)} h"
