"""The command `sources`: who sends telemetry, how often, by which clock, and what of it is not used."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import clean, duration, number
from twin.cli.arguments import client_of, present
from twin.cli.grammar import Verb
from twin.report import grid, safe_text

if TYPE_CHECKING:
    from rich.console import Console

CLOCK_S = 2.0  # from here on an offset is shown in colour
SHOWN_LINES = 3  # of a source
SLOW_S = 4.0  # from this period on a rate is shown by the period, not by the second
LATELY_S = 3600.0  # a failure that healed is shown for so long


def run_sources(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Ask, and print. Raises ConnectorError."""
    tree = client_of(args).get("/sources", name=args.name or None, limit=args.limit)
    return present(args, tree, lambda tree, out: show_sources(tree, out, every=bool(args.name)), out)


def show_sources(tree: dict[str, Any], out: Console, every: bool = False) -> None:
    """Print a row for each source, then what is not used, source by source."""
    rows = [_row(s) for s in tree["sources"]]
    heads = ("source", "readings", "last", "failed", "unused", "late by", "clock")
    none = "no source has reported, and none is configured"
    if every:
        none = "no source has this in its name: `racktwin sources` lists all"
    grid(out, heads, rows, none, right=range(1, 7))
    if tree["next_offset"] is not None:
        shown = len(tree["sources"])
        out.print(Text(f"and {tree['total'] - shown} more: racktwin sources --limit N, or NAME", "dim"))
    for source in tree["sources"]:
        _reasons(source, out, every)
    if every:
        for source in tree["sources"]:
            carried = ", ".join(f"{c['signals']} signals of {c['entities']} {t}"
                                for t, c in source["carries"].items())  # fmt: skip
            out.print(safe_text(f"{source['name']} reports {carried or 'no entity of the site'}"))


def _row(source: dict[str, Any]) -> list[Any]:
    age_s, offset_s, latency_s = source["age_s"], source["clock_offset_s"], source["latency_s"]
    unused = source["unused"]
    off = offset_s is not None and any(r["outcome"] == "clock" for r in source["reasons"])
    return [
        source["name"],
        rate(source),
        Text("never", "yellow") if age_s is None else f"{duration(age_s)} ago",
        _failed(source),
        Text(str(unused), "yellow") if any(r["remedy"] for r in source["reasons"]) else str(unused),
        duration(latency_s),
        Text(_offset(offset_s, source.get("clock_corrected_s", 0.0)), "yellow" if off else ""),
    ]


def rate(source: dict[str, Any]) -> str:
    """`210/s`, or `48 each 30 s` of a source that is slower; total of one that reported once."""
    every_s, readings_per_s = source["every_s"], source["readings_per_s"]
    if every_s is None:
        return number(source["readings"], 6) if source["readings"] else "–"
    if every_s < SLOW_S:
        return f"{number(readings_per_s, 3)}/s"
    return f"{number(readings_per_s * every_s, 3)} each {duration(every_s)}"


def _failed(source: dict[str, Any]) -> Text:
    """Requests that failed, of all of them where answers are counted; "–" of a source that is not asked."""
    asked = source["answers"] + source["failures"]
    if not asked:
        return Text("–")
    failing = any(r["outcome"] == "failed" for r in source["reasons"])
    is_counted = source["failures"] and (source["answers"] or not source["messages"])
    return Text(f"{source['failures']}{f' of {asked}' if is_counted else ''}", "yellow" if failing else "")


def _offset(seconds: float | None, corrected_s: float) -> str:
    """Write where a source's clock is, seen from here, and whether its stamps are corrected by it."""
    if seconds is None:
        return "–"
    side = "ahead" if seconds < 0 else "behind"
    if abs(seconds) < CLOCK_S:
        return "ok"
    return f"{duration(abs(seconds))} {side}{', corrected' if corrected_s else ''}"


def _reasons(source: dict[str, Any], out: Console, every: bool) -> None:
    lines = [r for r in source["reasons"] if every or r["remedy"]]
    for line in lines if every else lines[:SHOWN_LINES]:
        out.print(unused_line(line | {"source": source["name"]}))
    failure = source["last_failure"]
    if (
        failure
        and not any(r["outcome"] == "failed" for r in lines)
        and (every or failure["age_s"] < LATELY_S)
    ):
        text = f"{source['name']} answers again; its last failure was {duration(failure['age_s'])} ago: "
        out.print(safe_text(text + str(failure["why"]), "dim"))
    if source["also_by"]:
        key, other = next(iter(source["also_by"].items()))
        text = (
            f"{source['name']}: {len(source['also_by'])} of its signals come from {other} too, such as {key}"
        )
        out.print(safe_text(f"{text}; keep one of the two", "yellow"))


def unused_line(line: dict[str, Any]) -> Text:
    """One reason why something is not used: where, how often, why, an example, and what to do."""
    text = Text(f"{clean(line['source'])}", "bold")
    if line.get("sources", 1) > 1:
        text.append(f" and {line['sources'] - 1} more")
    text.append(f"  {line['count']}×  {clean(line['why'], 300)}", "yellow" if line["remedy"] else "dim")
    if line["example"] and line["example"] not in line["why"]:
        text.append(f", such as {clean(line['example'], 200)}")
    if line["remedy"]:
        text.append(f"\n    {clean(line['remedy'], 300)}", "cyan")
    return text


VERBS = {
    "sources": Verb(
        run_sources,
        """
        [NAME]  only sources whose name contains this text, with every reason
        --limit COUNT=100  maximum number of sources
        """,
        ("", "dcgm", "--watch 5s", "--format csv"),
        rows="sources",
        live=True,
        watched=True,
    )
}
