"""The command `fleet history`: values, alarms, commands and decisions of all halls; their tables.

It asks the daemon of the hub, or any whose configuration names the server; `--schema` asks nobody.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from twin.catalogue import clean, number, utc
from twin.cli.arguments import client_of, instant_ns, present
from twin.cli.grammar import Verb, WrongCall
from twin.report import grid

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 200  # rows of a table


def run_history(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Ask for values of an entity, or for a list. Raises ConfigError."""
    if args.schema:
        return _print_schema(args, out)
    if args.what == "values":
        if args.entity is None or args.signal is None:
            raise WrongCall(
                "fleet history: expected ENTITY and SIGNAL, such as h1/r07 rack.power_w, or --list "
                "alarms, commands or decisions"
            )
        asked = {"signal": args.signal, "step": args.step_s}
        path, show = "/fleet/history", show_values
    else:
        if args.signal is not None:
            raise WrongCall(
                f"--list {args.what} {clean(args.signal)}: a list takes no SIGNAL; expected at most ENTITY"
            )
        asked = {"what": args.what, "limit": args.limit}
        path, show = "/fleet/lists", show_lines
    now_ns = time.time_ns()
    for name in ("since", "until"):
        text = getattr(args, name)
        asked[name] = None if text is None else instant_ns(f"--{name}", text, now_ns, -1)
    tree = client_of(args).get(path, entity=args.entity, hall=args.hall, **asked)
    return present(args, tree, show, out)


def _print_schema(args: argparse.Namespace, out: Console) -> int:
    """SQL for whoever may create tables there: `... --schema | clickhouse-client`."""
    from connectors.clickhouse import Retention, grants_sql, schema_sql
    from twin.archive import retention_of
    from twin.catalogue import ConfigError
    from twin.config import find_config, load_config

    loaded = load_config(find_config(args.config))
    settings = loaded.config.history.clickhouse
    if settings is None:
        raise ConfigError(
            f"{loaded.path}: $.history.clickhouse: missing; expected the server of the fleet's history"
        )
    keep: Retention = retention_of(settings)
    for statement in schema_sql(settings.database, keep):
        out.file.write(f"{statement};\n\n")
    out.file.write("-- The least rights of who writes and of who reads; the names of the users are yours.\n")
    for statement in grants_sql(settings.database):
        out.file.write(f"-- {statement};\n")
    out.file.flush()
    return 0


def show_values(tree: dict[str, Any], out: Console) -> None:
    """A line per hall, entity and step."""
    rows = [
        [utc(row["t_ns"], "%Y-%m-%d %H:%M:%S"), clean(row["hall"]), clean(row["entity"])]
        + [_figure(row[name]) for name in ("mean", "min", "max", "last")]
        for row in tree["rows"][-MOST_SHOWN:]
    ]
    heads = ("UTC", "hall", "entity", f"mean {tree['unit']}".rstrip(), "min", "max", "last")
    grid(out, heads, rows, "no hall wrote such values in this time", right=range(3, 7))
    _note_more(tree, len(rows), out)


def show_lines(tree: dict[str, Any], out: Console) -> None:
    """A line per line of a journal, the newest first."""
    rows = [
        [
            utc(row["t_ns"], "%Y-%m-%d %H:%M:%S"),
            clean(row["hall"]),
            row["kind"],
            _entities(row),
            clean(row["text"]),
        ]
        for row in tree["rows"][:MOST_SHOWN]
    ]
    grid(out, ("UTC", "hall", "kind", "entity", "text"), rows, f"no {tree['what']} of any hall in this time")
    _note_more(tree, len(rows), out)


def _note_more(tree: dict[str, Any], count: int, out: Console) -> None:
    if tree["more"] or len(tree["rows"]) > count:
        out.print(
            f"{count} lines shown of more; ask for less time, a longer --step, or --format json",
            style="yellow",
        )


def _entities(row: dict[str, Any]) -> str:
    names = row["entities"]
    more = f" and {row['count'] - 1} more" if row["count"] > 1 else ""
    return clean(names[0]) + more if names else ""


def _figure(value: float | None) -> str:
    return "" if value is None else number(value, 5)


VERBS = {
    "fleet history": Verb(
        run_history,
        """
        [ENTITY]  full path or its end, such as h1/r07; with --list, includes everything below it
        [SIGNAL]  name of the signal, such as rack.power_w
        --hall NAME  only this hall; default: all
        --since TIME  begin, such as 2026-03-14T02:00 (UTC), 02:00, or 3h for three hours ago; default: 24h
        --until TIME  end, such as 06:00; default: now
        --step DURATION  time step of the rows; default: a step that gives 500 rows
        --list values|alarms|commands|decisions=values>what  kind of result
        --limit COUNT=200  maximum number of lines of a list; the latest are kept
        --schema  print the SQL that creates tables and grants, without a query
        """,
        (
            "h1/r07 rack.power_w --since 7d --step 1h",
            "--list commands --hall hall-a --since 02:00",
            "--schema --config racktwin.yaml | clickhouse-client",
        ),
        rows="rows",
        live=True,
    ),
}
