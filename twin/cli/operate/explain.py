"""The command `policy explain`: why a policy proposes what it proposes, as it explains itself.

Renders any explanation: sentences, figures, tables and curves. Knows no policy by name.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import ConfigError, clean, duration, text
from twin.cli.arguments import live
from twin.report import grid, print_line, safe_text, when

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client
    from twin.contracts import DataCurve, DataTable, Explanation, KeyFigure, TableColumn, Value

TONES = {"summary": "bold", "note": "dim", "warning": "yellow"}
CONDITION = re.compile("1 (?:while|where|if) ")
MOST_PU = 9.99
MOST_POINTS = 24  # of a curve
UNITS = {"ns": "", "s": "", "1": "", "count": "", "": ""}  # shown in the cell, or not at all


def _ask(client: Client, args: argparse.Namespace) -> Any:
    """Ask for an explanation, or for all that can be explained. Raises ConfigError for a wrong option."""
    from twin.api import path_of

    if args.policy is None:
        return client.get("/explain")
    options: dict[str, Any] = {}
    for given in args.options:
        name, found, value = given.partition("=")
        if not found or not name:
            raise ConfigError(f"--set {clean(given, 60)!r}: expected NAME=VALUE")
        options[name] = value
    parts = ("explain", args.policy, *([args.entity] if args.entity else ()))
    return client.get(path_of(*parts), topic=args.topic, **options)


def show_answer(tree: dict[str, Any], out: Console) -> None:
    """An explanation as it came over HTTP, or the list of what can be explained."""
    import msgspec

    from twin.contracts import Explanation

    if "policies" in tree:
        _list(tree, out)
    else:
        show_explanation(msgspec.convert(tree, Explanation), out)


def _list(tree: dict[str, Any], out: Console) -> None:
    rows = []
    for policy in tree["policies"]:
        rows.append([policy["policy"], policy["authority"], "", ""])
        for topic in policy["topics"]:
            options = "".join(f" [--set {o['name']}=...]" for o in topic["options"])
            rows.append(["", "", f"--topic {topic['name']}{options}", topic["text"]])
    print_line(out, "racktwin policy explain POLICY [--topic TOPIC] explains what a policy proposes.")
    grid(out, ("policy", "authority", "topic", "explains"), rows, "no policies")


def show_explanation(found: Explanation, out: Console) -> None:
    """Sentences first, then figures, tables and curves, and what is missing or assumed at the end."""
    head = Text(clean(found.policy, 60), "bold")
    if found.topic:
        head.append(f" {clean(found.topic, 60)}")
    state = "suspended" if found.suspended else found.authority
    where = f"  {clean(found.entity, 120)}" if found.entity else ""
    head.append(f"{where}  authority {state}  {when(found.now_ns)} UTC", "dim")
    out.print(head)
    for sentence in found.sentences:
        if sentence.kind != "note":
            out.print(safe_text(sentence.text, TONES[sentence.kind], 1000), soft_wrap=True)
    shown = [
        f for f in found.figures if f.text and f.value is not None and not (f.metric and f.metric.labels)
    ]
    if shown:
        out.print()
        grid(out, ("figure", "value"), [_figure(f) for f in shown], "")
    for table in found.tables:
        _table(table, out)
    for curve in found.curves:
        _curve(curve, out)
    notes = [s for s in found.sentences if s.kind == "note"]
    if notes:
        out.print()
    for note in notes:
        out.print(safe_text(note.text, TONES["note"], 1000), soft_wrap=True)


def _figure(figure: KeyFigure) -> list[Any]:
    """The meaning of a figure beside its value; its key is for programs.

    A figure that is 1 while a condition holds is shown as yes or no.
    """
    holds = CONDITION.match(figure.text)
    if holds and figure.value in (0, 1):
        return [safe_text(figure.text[holds.end() :]), "yes" if figure.value else "no"]
    return [safe_text(figure.text), value_text(figure.value, figure.unit)]


def _table(table: DataTable, out: Console) -> None:
    # A column that says nothing in any row takes room from the others.
    shown = [i for i, column in enumerate(table.columns) if not column.detail]
    columns = [i for i in shown if any(row[i] not in (None, "") for row in table.rows)]
    if not columns:
        return
    out.print()
    out.print(safe_text(table.text or table.name.replace("_", " "), "bold"))
    values = {i: [row[i] for row in table.rows] for i in columns}
    factors = {i: _unit(table.columns[i], values[i]) for i in columns}
    right = [k for k, i in enumerate(columns) if _numeric(values[i])]
    heads = [
        f"{_heading(table.columns[i])}{f' {factors[i].name}' if factors[i].name else ''}" for i in columns
    ]
    rows = [[_cell(row[i], table.columns[i].unit, factors[i].factor) for i in columns] for row in table.rows]
    folds = [k for k in range(len(columns)) if k not in right]
    grid(out, heads, rows, "", right, folds)
    if table.total is not None and table.total > len(table.rows):
        out.print(Text(f"the first {len(table.rows)} of {table.total:,}", "dim"))


def _heading(column: TableColumn) -> str:
    name = column.text or column.name
    for tail in ("_w", "_s", "_ns", "_pu", "_c", "_kwh"):
        name = name.removesuffix(tail)
    return clean(name.replace("_", " "), 40)


def _numeric(values: list[Value]) -> bool:
    return all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in values)


def _unit(column: TableColumn, values: list[Value]) -> text.Unit:
    """One unit for a whole column, by its greatest value; none where each cell says its own."""
    if column.unit in UNITS or not _numeric(values):
        return text.Unit("", 1.0)
    greatest = max((abs(float(v)) for v in values if isinstance(v, int | float)), default=0.0)
    return text.unit_for(column.unit, greatest)


def _cell(value: Value, unit: str, factor: float) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and unit not in UNITS:
        return text.number(float(value) * factor)
    return value_text(value, unit)


def value_text(value: Value, unit: str) -> str:
    """A value with its unit; a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return clean(value, 400)
    if unit == "ns":
        return when(value)
    if unit == "s":
        return duration(value)
    if unit == "count" or (unit == "" and isinstance(value, int)):
        return f"{value:,}"
    if unit == "1":
        return text.percent(float(value)) if value < MOST_PU else "> 999 %"
    return text.quantity(float(value), unit) if math.isfinite(value) else "-"


def _curve(curve: DataCurve, out: Console) -> None:
    out.print()
    out.print(safe_text(curve.text or curve.name.replace("_", " "), "bold"))
    step = max(1, math.ceil(len(curve.x) / MOST_POINTS))
    rows = [[value_text(x, curve.x_unit), value_text(y, curve.y_unit)]
            for x, y in zip(curve.x[::step], curve.y[::step], strict=True)]  # fmt: skip
    grid(out, ("", clean(curve.name, 40)), rows, "", (0, 1))


VERBS = {
    "policy explain": live(
        _ask,
        show_answer,
        """
        [POLICY]  policy to explain; default: list all policies and their topics
        [ENTITY]  entity or job, such as hall1/r07
        --topic TOPIC  topic, as `racktwin policy explain` lists it
        --set NAME:VALUE*>options  option of the topic; repeatable
        """,
        "",
        "thermal_guard hall1/r07",
        "power_guard --topic what --set limit=5",
        watched=True,
    )
}
