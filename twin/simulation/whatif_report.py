"""Report of a what-if: medians over seeds as a table for the terminal, JSON, and a page with plots.

Every number stands beside the same one without policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from twin.catalogue import TimeAxis, clean, duration, number
from twin.report import (
    LEAST_SPAN,
    Line,
    PlotLayout,
    cards,
    figure,
    fill,
    grid,
    heading,
    page,
    paragraph,
    plot,
    responsive,
    section,
    stacked,
    table,
    write_whole,
)
from twin.simulation.whatif import ARMS, ArmResult, Result, difference

MAX_ROWS = 60
WIDE_COLUMNS = 130  # of a terminal that has room for what the figures mean


class Figure(NamedTuple):
    """Label, unit and meaning of a figure."""

    label: str
    unit: str
    meaning: str


FIGURES: dict[str, Figure] = {
    "first_throttle_s": Figure("First throttling", "s", "from the beginning until heat first lowers a clock"),
    "throttled_gpu_s": Figure("Throttled", "GPU s", "GPUs times the seconds that heat lowered their clock"),
    "throttled_gpus": Figure("GPUs throttled", "", "how many were throttled at all"),
    "shut_down_gpus": Figure("GPUs shut down", "", "by heat"),
    "breaker_trips": Figure("Breakers tripped", "", "feeders that opened"),
    "highest_gpu_temp_c": Figure("Hottest GPU", "°C", "the highest temperature of any"),
    "lowest_rack_flow_lpm": Figure("Lowest flow", "l/min", "of any rack that is not isolated"),
    "done_work_gpu_h": Figure("Work done", "GPU h", "at the highest clock, lost work included"),
    "lost_work_gpu_h": Figure("Work lost", "GPU h", "done since the last checkpoint when a member died"),
    "checkpoint_gpu_h": Figure("Saving", "GPU h", "spent on checkpoints, in which a job stands still"),
    "slowed_work_gpu_h": Figure("Work slowed", "GPU h", "not done, as clocks were low"),
    "interrupted_jobs": Figure("Jobs interrupted", "", "synchronous ones that lost a member"),
    "it_energy_kwh": Figure("IT energy", "kWh", "at the racks"),
    "total_energy_kwh": Figure("Total energy", "kWh", "from the utility"),
    "pue": Figure("PUE", "", "total over IT energy"),
    "cost_usd": Figure("Cost", "USD", "of the energy"),
    "carbon_kg": Figure("Carbon", "kg", "CO2 of the energy"),
    "water_l": Figure("Water", "l", "drawn"),
    "commands": Figure("Commands", "", "values sent to devices, renewals left out"),
    "faults_told": Figure("Faults reported", "", "by the diagnosis, new ones"),
}
SHORT = ("first_throttle_s", "throttled_gpu_s", "shut_down_gpus", "highest_gpu_temp_c", "lost_work_gpu_h",
         "slowed_work_gpu_h", "total_energy_kwh")  # fmt: skip
NARROW = ("throttled_gpu_s", "shut_down_gpus", "highest_gpu_temp_c")  # for a terminal of 80 columns
CURVE_TITLES = {
    "hottest_gpu_c": ("Hottest GPU", "The highest temperature of any GPU.", "°C"),
    "throttled_gpus": (
        "GPUs slowed by heat",
        "How many ran at a clock that heat had lowered; over time, the throttled GPU s.",
        "GPUs",
    ),
    "it_power_kw": ("IT power", "Of all racks.", "kW"),
    "lowest_flow_lpm": ("Lowest flow", "Of any rack that is not isolated.", "l/min"),
    "warmest_supply_c": ("Warmest supply", "Coolant that the CDUs send to the racks.", "°C"),
}


def groups_of(results: Sequence[Result]) -> list[tuple[dict[str, Any], list[Result]]]:
    """Results that differ in their seed alone, together, in the order of the cases."""
    out: list[tuple[dict[str, Any], list[Result]]] = []
    for result in results:
        varied = {k: v for k, v in result.case.varied.items() if k != "seed"}
        if out and out[-1][0] == varied:
            out[-1][1].append(result)
        else:
            out.append((varied, [result]))
    return out


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Median, lowest and highest of the known values."""
    known = np.array([v for v in values if v is not None], np.float64)
    if not len(known):
        return {"median": None, "lowest": None, "highest": None}
    return {"median": float(np.median(known)), "lowest": float(known.min()), "highest": float(known.max())}


def summary_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per group: for each arm and their difference, the spread of each figure over the seeds."""
    out = []
    for varied, members in groups_of(results):
        whole = [r for r in members if len(r.courses) == len(ARMS)]
        summary: dict[str, Any] = {
            "varied": varied,
            "cases": len(members),
            "failed": len(members) - len(whole),
        }
        for arm in (*ARMS, "difference"):
            rows = [_row(r, arm) for r in whole]
            summary[arm] = {name: spread([row[name] for row in rows]) for name in FIGURES} if rows else {}
        out.append(summary)
    return out


def _row(result: Result, arm: str) -> dict[str, float | None]:
    if arm == "difference":
        return difference(result.courses["policies"].figures, result.courses["nothing"].figures)
    return result.courses[arm].figures  # type: ignore[index]


def case_json(result: Result) -> dict[str, Any]:
    """One case as plain data."""
    out: dict[str, Any] = {"varied": result.case.varied, "seed": result.case.scenario.seed,
                           "error": result.error or None}  # fmt: skip
    for arm, course in result.courses.items():
        out[arm] = course.figures | {"faults": course.faults, "limits": course.limits}
    if len(result.courses) == len(ARMS):
        out["difference"] = _row(result, "difference")
    return out


def figure_text(value: float | None) -> str:
    """A figure as people read it."""
    return "–" if value is None else number(value, 4)


def _cell(held: dict[str, float | None], many: bool) -> str:
    if not many or held["median"] is None or held["lowest"] == held["highest"]:
        return figure_text(held["median"])
    return f"{figure_text(held['median'])} ({figure_text(held['lowest'])} … {figure_text(held['highest'])})"


def varied_words(varied: dict[str, Any]) -> str:
    """The settings that a group varies, in a line."""
    return ", ".join(f"{k} = {v}" for k, v in varied.items()) or "as in the file"


def print_whatif(result: dict[str, Any], out: Console) -> None:
    """The table: figures by arm for one group, groups by figure for several."""
    groups, wide = result["summary"], out.width >= WIDE_COLUMNS
    for group in groups[:1] if len(groups) == 1 and groups[0]["policies"] else []:
        many = group["cases"] - group["failed"] > 1
        spoken = " · median over seeds (lowest … highest)" if many else ""
        rows = []
        for name, figure_ in FIGURES.items():
            cells = [_cell(group[arm][name], many) for arm in (*ARMS, "difference")]
            if cells[0] == cells[1] == "–" and name != "first_throttle_s":
                continue
            meaning = [Text(figure_.meaning, "dim")] if wide else []
            rows.append([Text(_short_label(name), "bold"), *cells, *meaning])
        title = f"{result['scenario']} · {duration(result['horizon_s'])}{spoken}"
        _print(out, title, ("", "policies", "nothing", "difference", *([""] if wide else [])), rows)
    if len(groups) > 1:
        names = SHORT if wide else NARROW
        rows = []
        for group in groups[:MAX_ROWS]:
            medians = ([figure_text(group[arm][n]["median"]) for arm in ARMS] for n in names)
            cells = [" / ".join(pair) for pair in medians] if group["policies"] else ["failed"] * len(names)
            rows.append([Text(clean(varied_words(group["varied"]), 60), "bold"), *cells])
        title = f"{result['scenario']} · policies / nothing, medians over seeds"
        _print(out, title, ("varied", *(_short_label(n) for n in names)), rows)
        if len(groups) > MAX_ROWS:
            out.print(f"{len(groups) - MAX_ROWS} more in the JSON and the report")


def _short_label(name: str) -> str:
    figure_ = FIGURES[name]
    return f"{figure_.label}, {figure_.unit}" if figure_.unit else figure_.label


def _print(out: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    out.print(clean(title, 200), style="italic", markup=False, soft_wrap=True)
    right = [i for i, head in enumerate(heads) if i and head]
    grid(out, heads, rows, right=right, folds=[i for i in range(1, len(heads)) if i not in right])


def write_page(result: dict[str, Any], first: Result, path: Path) -> None:
    """Write the page. Raises StorageError if it cannot be written."""
    write_whole(path, render(result, first))


def render(result: dict[str, Any], first: Result) -> str:
    """The page as text; the plots are those of the first case."""
    axis, plots = None, Markup("")
    began, armed = result["from"], armed_words(result)
    if len(first.courses) == len(ARMS):
        axis, plots = _plots(first)
    body = fill(
        "whatif.html",
        site=clean(result["site"]),
        scenario=clean(result["scenario"]),
        length=duration(result["horizon_s"]),
        start=None if began is None else (clean(began["time"]), clean(Path(began["snapshot"]).name)),
        cases=len(result["cases"]),
        policies=", ".join(f"{clean(n)} ({clean(v)})" for n, v in sorted(result["authority"].items()))
        or "none",
        notes=[clean(note, 1000) for note in [*([armed] if armed else []), *result["warnings"][:MAX_ROWS]]],
        cards=_cards(result["summary"]),
        sections=[plots, _tables(result), _faults(first)],
        not_carried=", ".join(clean(x) for x in result["not_carried"][:20]),
    )
    times = [] if axis is None else [int(t) for t in axis.times_ns]
    labels = [] if axis is None else [axis.label(t) for t in times]
    places = [] if axis is None else [axis.place(t) for t in times]
    return page(f"racktwin: what if {clean(result['scenario'])}", body, labels, places)


def armed_words(result: dict[str, Any]) -> str:
    """Differences between the site file's authority and this what-if; empty if none."""
    own, used = result["site_authority"], result["authority"]
    other = [n for n, level in sorted(used.items()) if own.get(n, level) != level]
    if not other:
        return ""
    verb = "armed" if all(used[n] == "act" for n in other) else "set"
    machines = ", ".join(f"{n} {own[n]}" for n in other)
    return f"{verb} for this question; the site file says: {machines}"


def _cards(groups: Sequence[dict[str, Any]]) -> Markup:
    group = groups[0] if groups else None
    if group is None or not group["policies"]:
        return paragraph("No case was run to its end.", "note")
    shown = []
    for name in SHORT[1:6]:
        held, other = (group[arm][name]["median"] for arm in ARMS)
        unit = f" {FIGURES[name].unit}" if FIGURES[name].unit else ""
        below = f"with policies; {figure_text(other)}{unit} doing nothing"
        shown.append((FIGURES[name].label, f"{figure_text(held)}{unit}", below))
    of = f"Of {clean(varied_words(group['varied']))}:" if len(groups) > 1 else ""
    return paragraph(of, "soft") + cards(shown)


def _plots(first: Result) -> tuple[TimeAxis, Markup]:
    arms: dict[str, ArmResult] = {arm: first.courses[arm] for arm in ARMS}
    one = arms["policies"]
    time_s = np.array(one.trail["time_s"])
    times_ns = one.begun_ns + np.rint(time_s * 1e9).astype(np.int64)
    end_ns = int(times_ns[-1]) if len(times_ns) else one.begun_ns
    axis = TimeAxis(times_ns, one.begun_ns, end_ns)
    drawn = []
    for key, (title, sentence, unit) in CURVE_TITLES.items():
        values = {arm: np.array(course.trail[key], np.float64) for arm, course in arms.items()}
        if not any(np.isfinite(v).any() for v in values.values()):
            continue
        lines = [Line("nothing", values["nothing"], 2, dashed=True), Line("policies", values["policies"], 1)]
        wide, narrow = (
            plot(
                lines,
                axis,
                unit,
                title,
                PlotLayout(width=w, height=210, least_span=LEAST_SPAN.get(unit, 1.0)),
            )
            for w in (1080, 520)
        )
        drawn.append(figure(title, sentence, responsive(wide, narrow), "lead"))
    seed = first.case.scenario.seed
    case = clean(varied_words(first.case.varied))
    intro = f"Case {case}, seed {seed}: with policies, and dashed doing nothing."
    return axis, section("course", "The course", intro, *drawn)


def _tables(result: dict[str, Any]) -> Markup:
    parts: list[Markup] = []
    for group in result["summary"][:MAX_ROWS]:
        if not group["policies"]:
            continue
        many = group["cases"] - group["failed"] > 1
        rows = []
        for name, figure_ in FIGURES.items():
            cells = [_cell(group[arm][name], many) for arm in (*ARMS, "difference")]
            rows.append([stacked(figure_.label, figure_.meaning), figure_.unit, *cells])
        seeds = f", {group['cases']} seeds: median (lowest … highest)" if many else ""
        parts.append(heading(f"{clean(varied_words(group['varied']), 200)}{seeds}"))
        parts.append(table(["figure", "unit", "policies", "nothing", "difference"], rows, (2, 3, 4)))
    left = len(result["summary"]) - MAX_ROWS
    if left > 0:
        parts.append(paragraph(f"{left} further variations are in the JSON.", "soft"))
    failed = [c for c in result["cases"] if c["error"]]
    if failed:
        rows = [[clean(varied_words(c["varied"])), clean(c["error"], 300)] for c in failed[:MAX_ROWS]]
        parts.append(heading("Cases that failed") + table(["case", "why"], rows))
    return section("figures", "Figures", "Both courses beside each other.", *parts)


def _faults(first: Result) -> Markup:
    rows = []
    for arm, course in first.courses.items():
        for fault in course.faults[:MAX_ROWS]:
            delay = "–" if fault["delay_s"] is None else f"{number(fault['delay_s'])} s"
            rows.append(
                [arm, f"{number(fault['told_s'])} s", clean(fault["kind"]), clean(fault["entity"]), delay]
            )
    if not rows:
        return Markup("")
    intro = "Faults that the diagnosis reported; the delay counts from the beginning of the scenario's fault."
    return section(
        "faults",
        "Faults reported",
        intro,
        table(["course", "reported after", "kind", "where", "delay"], rows, (1, 4)),
    )
