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
# Names, keys, shares of the time in which they are known, and units
FIGURES = (("PUE", "pue", "pue_known_pu", ""), ("TUE", "tue", "tue_known_pu", ""),
           ("WUE", "wue_l_per_kwh", "wue_known_pu", " L/kWh"))  # fmt: skip
WHOLE_PU = 0.9995  # of the time, from which on it is all of it
PART_WORDS = {
    "idle": "idle nodes",
    "unplaced": "nodes, jobs not reported",
    "rest": "racks, other than nodes",
    "cooling": "cooling",
    "losses": "losses",
}


def _ask(client: Client, args: argparse.Namespace) -> Any:
    tree = client.get("/ledger", month=args.month, by=args.by)
    if args.format == "csv":
        for row in tree["rows"]:
            row.pop("granted_ns")  # the sum of the columns of `gpu_ns`; a span in a table of instants
            for key in ("gpu_ns", "gpu_h"):  # the same columns for rows of which nothing is known
                row[key] = row[key] or dict.fromkeys(tree["total"][key])
    return tree


def show(tree: dict[str, Any], out: Console) -> None:
    """Lines with energy, its interval, GPU-hours by class, cost and carbon; what is not known is said."""
    rows = [_row(row) for row in tree["rows"]] + [_row(tree["total"] | {"name": "sum"})]
    heads = (tree["by"], "kWh", "±", "GPU-h", "busy", "idle", "lost", "USD", "kg CO2")
    grid(out, heads, rows, "the ledger has no records of this month", right=range(1, 9))
    figures = [_figure(tree, *which) for which in FIGURES if tree[which[1]] is not None]
    out.print(Text(f"{tree['hours']} hours with records; {tree['watched_ns'] / (3600 * NS):.2f} h watched"
                   + "".join(f"; {text}" for text in figures), "dim"))  # fmt: skip
    row = tree["total"]
    missing = (
        ("unpriced_kwh", "price (site.grid_price_usd_per_kwh)", "cost"),
        ("uncounted_kwh", "carbon intensity (site.grid_carbon_g_per_kwh)", "carbon"),
        ("ungauged_kwh", "share of GPUs", "energy of GPUs"),
    )
    for key, of, left_out in missing:
        if row[key] > 0:
            text = f"{number(row[key], 4)} kWh had no known {of}: not in the {left_out}"
            out.print(safe_text(text, "yellow"))
    if tree["unmetered_node_h"] > 0:
        text = f"{number(tree['unmetered_node_h'], 3)} node-hours have no power reading: not in the energy"
        out.print(safe_text(text, "yellow"))


def _figure(tree: dict[str, Any], name: str, key: str, share: str, unit: str) -> str:
    """A figure, with the share of the time in which it is known where that is not all."""
    part = "" if tree[share] >= WHOLE_PU else f" (known for {100.0 * tree[share]:.1f} % of the time)"
    return f"{name} {number(tree[key], 3)}{unit}{part}"


def _row(row: dict[str, Any]) -> list[Any]:
    """Cells of a line; a dash for what is not known."""
    hours = row["gpu_h"] or {}

    def spent(*names: str) -> str:
        return number(sum(hours[name] for name in names) if hours else None, 5)

    name = clean(row["name"]) or PART_WORDS.get(row["part"], row["part"])
    return [
        safe_text(name, ""), number(row["energy_kwh"], 5), number(row["energy_pm_kwh"], 2),
        spent(*hours), spent("busy"), spent("idle", "free"), spent(*LOST), number(row["cost_usd"], 5),
        number(row["carbon_kg"], 5),
    ]  # fmt: skip


VERBS = {
    "ledger": live(
        _ask,
        show,
        """
        --month MONTH=  month in UTC, such as 2026-11; default: the current month
        --by site|hall|rack|queue|tenant|job=tenant  grouping of the lines
        """,
        "",
        "--month 2026-11 --by tenant --format csv",
        "--by job --format json",
        rows="rows",
    )
}
