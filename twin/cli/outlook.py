"""`racktwin outlook FILE --quantity KEY`: a file of coming values, told to a running daemon.

What is over by the daemon's clock is left out; what is beyond its limit is left out too, and told to be
missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twin.api import Client


def add_arguments(outlook: argparse.ArgumentParser) -> None:
    """The options of the command."""
    outlook.add_argument("file", type=Path, nargs="?", metavar="FILE", help="CSV with times to come")
    outlook.add_argument("--quantity", metavar="KEY", help="such as site.outdoor_temp_c or rack.power_w")
    outlook.add_argument("--name", default="", metavar="ENTITY", help="such as hall1/r07; default: the site")
    outlook.add_argument("--time-column", default="time", metavar="COLUMN", help="default: time")
    outlook.add_argument("--value-column", default="value", metavar="COLUMN", help="default: value")
    outlook.add_argument("--zone", default="UTC", help="of times without an offset, such as Europe/Berlin")


def call(args: argparse.Namespace) -> Callable[[Client], Any]:
    """The file as a question to the daemon. Both raise ConfigError if there are no values to come."""
    from twin.tables import read_series, to_tell

    read = read_series([args.file], args.time_column, [args.value_column], zone=args.zone)

    def tell(client: Client) -> Any:
        now_ns = client.get("/outlooks", limit=1)["now_ns"]
        body, warnings = to_tell(read, now_ns, args.file.name)
        tree = client.post("/outlooks", body | {"quantity": args.quantity, "name": args.name})
        return tree | {"warnings": warnings} if warnings else tree

    return tell
