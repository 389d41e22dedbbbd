"""Rates of false alarms per rack-hour with their intervals, by cooling, load, size, detector and cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from tests.evaluation.health.intervals import rate_interval
from tests.evaluation.quiet.healthy_run import FalseAlarm
from tests.evaluation.quiet.healthy_sites import HealthyRun
from twin.backtest import print_table
from twin.catalogue import number

Z95 = 1.959964  # 95 %, both sides; source: normal distribution
PER = 1000.0  # rack-hours
HEADS = ["rack-hours", "alarms", "critical", f"per {PER:,.0f} rack-hours", "95 % interval"]
Figures = dict[str, Any]


def rates(runs: Sequence[HealthyRun], alarms: Sequence[FalseAlarm]) -> Figures:
    """All figures of a lab, as plain data."""
    groups: dict[str, tuple[Callable[[HealthyRun], str], Callable[[FalseAlarm], str]]] = {
        "cooling": (lambda r: r.profile.cooling, lambda a: a.cooling),
        "load": (lambda r: f"{r.profile.cooling} {r.load}", lambda a: f"{a.cooling} {a.load}"),
        "size": (lambda r: f"{r.profile.name} {r.racks}", lambda a: f"{a.profile} {a.racks}"),
    }
    out: Figures = {}
    for name, (of_run, of_alarm) in groups.items():
        keys = dict.fromkeys(map(of_run, runs))
        out[name] = [
            _row(key, [r for r in runs if of_run(r) == key], [a for a in alarms if of_alarm(a) == key])
            for key in keys
        ]
    hours = {c: sum(r.rack_hours for r in runs if r.profile.cooling == c) for c in ("liquid", "air")}
    causes: dict[tuple[str, ...], list[FalseAlarm]] = {}
    for a in alarms:
        causes.setdefault((a.cooling, a.detector, a.relations, a.circumstance), []).append(a)
    out["causes"] = [
        {
            "cooling": key[0], "detector": key[1], "relations": key[2], "circumstance": key[3],
            "alarms": len(some), "plants": len({a.seed for a in some}),
            "per_1000_rack_hours": PER * len(some) / hours[key[0]],
        }
        for key, some in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]  # fmt: skip
    return out


def _row(key: str, runs: Sequence[HealthyRun], alarms: Sequence[FalseAlarm]) -> Figures:
    hours = sum(r.rack_hours for r in runs)
    low, high = rate_interval(len(alarms), hours, Z95)
    return {
        "of": key, "rack_hours": hours, "alarms": len(alarms),
        "critical": sum(a.severity == "critical" for a in alarms),
        "per_1000_rack_hours": PER * len(alarms) / hours if hours else None,
        "low": PER * low, "high": PER * high,
    }  # fmt: skip


def say(told: Figures, out: Console) -> None:
    """The tables."""
    line = (
        f"simulated: {told['plants']} healthy plants of the draw {told['draw']}, {told['seconds']:,} s each"
    )
    out.print(line, style="bold", markup=False, soft_wrap=True)
    for name, head in (("cooling", "all"), ("load", "by load"), ("size", "by profile and racks")):
        rows = [
            [row["of"], f"{row['rack_hours']:,.1f}", str(row["alarms"]), str(row["critical"]),
             number(row["per_1000_rack_hours"]), f"{number(row['low'])} to {number(row['high'])}"]
            for row in told["rates"][name]
        ]  # fmt: skip
        print_table(out, [head, *HEADS], rows)
    rows = [
        [f"{c['cooling']}: {c['detector']}", c["relations"], c["circumstance"], str(c["plants"]),
         str(c["alarms"]), number(c["per_1000_rack_hours"])]
        for c in told["rates"]["causes"]
    ]  # fmt: skip
    if rows:
        heads = ["detector", "comparisons", "when", "plants", "alarms", HEADS[3]]
        print_table(out, heads, rows)
