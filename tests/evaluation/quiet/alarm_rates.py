"""Rates of false alarms per rack-hour with their intervals, by cooling, load, size, detector and cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from tests.evaluation.quiet.calibration import poisson_interval
from tests.evaluation.quiet.healthy_run import FalseAlarm
from tests.evaluation.quiet.healthy_sites import HealthyRun
from twin.backtest import print_table
from twin.catalogue import duration, number

PER = 1000.0  # rack-hours
HEADS = ["rack-hours", "alarms", "again", "critical", "of health", f"per {PER:,.0f} rack-hours",
         "95 % interval"]  # fmt: skip
Figures = dict[str, Any]


def rates(runs: Sequence[HealthyRun], alarms: Sequence[FalseAlarm]) -> Figures:
    """All figures of a lab, as plain data."""
    groups: dict[str, tuple[Callable[[HealthyRun], str], Callable[[FalseAlarm], str]]] = {
        "cooling": (lambda r: r.profile.cooling, lambda a: a.cooling),
        "load": (lambda r: f"{r.profile.cooling} {r.load}", lambda a: f"{a.cooling} {a.load}"),
        "size": (lambda r: f"{r.profile.name} {r.racks}", lambda a: f"{a.profile} {a.racks}"),
        "sensors": (lambda r: f"{r.profile.cooling} {r.sensors}", lambda a: f"{a.cooling} {a.sensors}"),
        "season": (lambda r: f"{r.profile.cooling} {r.season}", lambda a: f"{a.cooling} {a.season}"),
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
    for a in (a for a in alarms if not a.again):
        causes.setdefault((a.cooling, a.detector, a.relations, a.circumstance), []).append(a)
    out["causes"] = [
        {
            "cooling": key[0], "detector": key[1], "relations": key[2], "circumstance": key[3],
            "loads": dict(Counter(a.load for a in some)),
            "alarms": len(some), "plants": len({a.seed for a in some}),
            "per_1000_rack_hours": PER * len(some) / hours[key[0]],
        }
        for key, some in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]  # fmt: skip
    return out


def _row(key: str, runs: Sequence[HealthyRun], begun: Sequence[FalseAlarm]) -> Figures:
    """`begun`: alarms that begin; those that go on with an incident are counted apart."""
    alarms = [a for a in begun if not a.again]
    hours = sum(r.rack_hours for r in runs)
    low, high = poisson_interval(len(alarms), hours)
    return {
        "of": key, "rack_hours": hours, "alarms": len(alarms), "again": len(begun) - len(alarms),
        "critical": sum(a.severity == "critical" for a in alarms),
        "health": sum(a.detector == "health" for a in alarms),
        "per_1000_rack_hours": PER * len(alarms) / hours,
        "low": PER * low, "high": PER * high,
    }  # fmt: skip


def say(told: Figures, out: Console) -> None:
    """The tables."""
    line = (
        f"simulated: {told['plants']} healthy plants of the draw {told['draw']}, {told['seconds']:,} s each"
    )
    out.print(line, style="bold", markup=False, soft_wrap=True)
    for name, groups in told["rates"].items():
        if name == "causes" or not groups:
            continue
        counts = ("alarms", "again", "critical", "health")
        rows = [
            [row["of"], f"{row['rack_hours']:,.1f}", *(str(row[k]) for k in counts),
             number(row["per_1000_rack_hours"]), f"{number(row['low'])} to {number(row['high'])}"]
            for row in groups
        ]  # fmt: skip
        print_table(out, [f"by {name}", *HEADS], rows)
    rows = [
        [f"{c['cooling']}: {c['detector']}", c["relations"], c["circumstance"],
         ", ".join(f"{load} {count}" for load, count in c["loads"].items()), str(c["plants"]),
         str(c["alarms"]), number(c["per_1000_rack_hours"])]
        for c in told["rates"]["causes"]
    ]  # fmt: skip
    if rows:
        heads = ["detector", "comparisons", "when", "loads", "plants", "alarms", HEADS[5]]
        print_table(out, heads, rows)
    for replayed in told["recordings"]:
        line = f"recorded: {replayed['name']}, {replayed['racks']:,} racks, {duration(replayed['span_s'])}: "
        out.print(f"{line}{len(replayed['alarms'])} alarms", markup=False, soft_wrap=True)
        kinds = Counter((alarm[0], alarm[2]) for alarm in replayed["alarms"])
        if kinds:
            rows = [[*kind, str(count)] for kind, count in kinds.most_common()]
            print_table(out, ["detector", "severity", "alarms"], rows)
