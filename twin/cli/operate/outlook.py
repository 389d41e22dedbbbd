"""The commands `forecast send | outlooks`: future values that others know, such as prices and weather."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from twin.cli.arguments import live
from twin.cli.operate.show import show_done, show_outlooks

if TYPE_CHECKING:
    from twin.api import Client


def _send(client: Client, args: argparse.Namespace) -> Any:
    from twin.tables import SeriesOptions, outlook_of, read_series

    read = read_series([args.file], args.time_column, [args.value_column], SeriesOptions(zone=args.zone))
    now_ns = client.get("/outlooks", limit=1)["now_ns"]  # what is over by the daemon's clock is left out
    body, warnings = outlook_of(read, now_ns, args.file.name)
    tree = client.post("/outlooks", body | {"quantity": args.quantity, "name": args.name})
    return tree | {"warnings": warnings} if warnings else tree


def _held(client: Client, args: argparse.Namespace) -> Any:
    return client.get("/outlooks", quantity=args.quantity)


VERBS = {
    "forecast outlooks": live(
        _held,
        show_outlooks,
        "--quantity KEY  only this quantity, such as site.outdoor_temp_c",
        "",
        "--quantity site.outdoor_temp_c",
        rows="outlooks",
    ),
    "forecast send": live(
        _send,
        show_done,
        """
        FILE  CSV of future times and values
        --quantity KEY!  quantity of the values, such as site.outdoor_temp_c or rack.power_w
        --name ENTITY=  entity of the values, such as hall1/r07; default: the site
        --time-column COLUMN=time  name of the column of times
        --value-column COLUMN=value  name of the column of values
        --zone ZONE=UTC  time zone of times without an offset, such as Europe/Berlin
        """,
        "weather.csv --quantity site.outdoor_temp_c --zone Europe/Berlin",
    ),
}
