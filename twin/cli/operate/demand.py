"""The command `demand`: GPUs that jobs hold and wait for, by queue, tenant and priority, and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import clean, duration
from twin.cli.arguments import live
from twin.report import grid

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    "",
    "GPUs granted",
    "asked for",
    "held back",
    "jobs",
    "waiting",
    "held",
    "oldest wait",
    "next start",
)
SERVICES = ("service", "requests/s", "running", "waiting", "tokens/s", "KV cache", "first token", "latency")
UNKNOWN = "-"


def show_demand(tree: dict[str, Any], out: Console) -> None:
    """Print the site with its queues, tenants and priorities, then its services."""
    site = tree["rows"][0]
    line = Text("GPUs  ")
    for words, key in (("granted", "gpu_running_count"), ("idle", "gpu_idle_count"),
                       ("spare", "gpu_spare_count"), ("out of service", "gpu_out_count"),
                       ("busy by their activity", "gpu_busy_count")):  # fmt: skip
        line.append(f"{_whole(site[key])} {words}  ", "yellow" if site[key] is None else "")
    out.print(line)
    if site["gpu_pending_count"] is None:
        text = "no scheduler says what waits; expected `jobs.slurm` or `kubernetes` in the configuration"
        out.print(Text(text, "yellow"), soft_wrap=True)
    out.print()
    rows = [_row(row) for row in tree["rows"] if row["table"] != "service"]
    grid(out, COLUMNS, rows, "")
    services = [_service(row) for row in tree["rows"] if row["table"] == "service"]
    if services:
        out.print()
        grid(out, SERVICES, services, "")


def _row(row: dict[str, Any]) -> list[str]:
    counts = [
        row[f"{what}_{state}_count"] for what in ("gpu", "job") for state in ("running", "pending", "held")
    ]
    times = [row["oldest_wait_s"], row["next_start_s"]]
    spans = [UNKNOWN if value is None else duration(value) for value in times]
    return [f"{row['table']} {clean(row['name'])}", *map(_whole, counts), *spans]


def _service(row: dict[str, Any]) -> list[str]:
    share = row["kv_cache_used_pu"]
    times = [row["first_token_s"], row["latency_s"]]
    return [
        clean(row["name"]),
        _tenth(row["requests_per_s"]),
        _whole(row["running_request_count"]),
        _whole(row["waiting_request_count"]),
        _whole(row["generated_tokens_per_s"]),
        UNKNOWN if share is None else f"{share:.0%}",
        *(UNKNOWN if value is None else f"{value:.2f} s" for value in times),
    ]


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _tenth(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.1f}"


VERBS = {
    "demand": live(
        lambda client, _: client.get("/demand"), show_demand, "", "", "--watch 10s", rows="rows", watched=True
    ),
}
