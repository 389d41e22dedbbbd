"""The command `ledger`: the statement of a month, by site, hall, rack, queue, tenant or job."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import NS, clean, number
from twin.cli.arguments import live
from twin.report import grid, safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

LOST = ("throttled", "capped", "checkpoint", "restart", "failed", "repair", "unknown")
PART_WORDS = {
    "idle": "idle nodes",
    "unplaced": "nodes, jobs not told",
    "rest": "racks beside their nodes",
    "cooling": "cooling",
    "losses": "losses",
}


def _ask(client: Client, args: argparse.Namespace) -> Any:
    tree = client.get("/ledger", month=args.month, by=args.by)
    if args.format == "csv":
        for row in tree["rows"]:  # the sum of the columns of `gpu_ns`; a span in a table of instants
            row.pop("granted_ns")
    return tree


def show(tree: dict[str, Any], out: Console) -> None:
    """Lines with energy, its interval, GPU-hours by class, cost and carbon; what is not known is said."""
    rows = [_row(row) for row in tree["rows"]] + [_row(tree["total"] | {"name": "sum"})]
    heads = (tree["by"], "kWh", "±", "GPU-h", "busy", "idle", "lost", "USD", "kg CO2")
    grid(out, heads, rows, "the ledger has nothing of this month", right=range(1, 9))
    figures = [f"{name} {number(tree[key], 3)}" for name, key in (("PUE", "pue"), ("TUE", "tue"))
               if tree[key] is not None]  # fmt: skip
    out.print(Text(f"{tree['hours']} hours with records; {tree['watched_ns'] / (3600 * NS):.2f} h watched"
                   + "".join(f"; {text}" for text in figures), "dim"))  # fmt: skip
    row = tree["total"]
    missing = (("unpriced_kwh", "price", "cost"), ("uncounted_kwh", "carbon intensity", "carbon"))
    for key, of, left_out in missing:
        if row[key] > 0:
            text = f"{number(row[key], 4)} kWh had no known {of}: not in the {left_out}"
            out.print(safe_text(text, "yellow"))
    if tree["unmetered_node_h"] > 0:
        text = (
            f"of {number(tree['unmetered_node_h'], 3)} node-hours nothing told the power: not in the energy"
        )
        out.print(safe_text(text, "yellow"))


def _known(row: dict[str, Any], key: str, without: str) -> str:
    """A sum of what was known; "" where that is nothing."""
    return "" if row["energy_kwh"] > 0 and row[without] >= row["energy_kwh"] else number(row[key], 5)


def _row(row: dict[str, Any]) -> list[Any]:
    hours = row["gpu_h"]
    name = clean(row["name"]) or PART_WORDS.get(row["part"], row["part"])
    return [
        safe_text(name, ""), number(row["energy_kwh"], 5), number(row["energy_pm_kwh"], 2),
        number(sum(hours.values()), 5), number(hours["busy"], 5), number(hours["idle"] + hours["free"], 5),
        number(sum(hours[name] for name in LOST), 4), _known(row, "cost_usd", "unpriced_kwh"),
        _known(row, "carbon_kg", "uncounted_kwh"),
    ]  # fmt: skip


VERBS = {
    "ledger": live(
        _ask,
        show,
        """
        --month MONTH=  such as 2026-11, in UTC; default: the present one
        --by site|hall|rack|queue|tenant|job=tenant  what a line is of
        """,
        "",
        "--month 2026-11 --by tenant --format csv",
        "--by job --format json",
        rows="rows",
    )
}
