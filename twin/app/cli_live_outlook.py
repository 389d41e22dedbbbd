"""`racktwin outlook FILE --quantity KEY`: a file of coming values, told to a running daemon.

What is over by the daemon's clock is left out; what is beyond its limit is left out too, and told to be
missing. Part of the shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.errors import ConfigError

if TYPE_CHECKING:
    from twin.app.client import Client
    from twin.app.series_file import SeriesRead

NS = 1_000_000_000
MAX_VALUES = 2000  # of one outlook; `twin.outlook` has the same, but takes long to load


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
    from twin.app.series_file import read_series

    read = read_series([args.file], args.time_column, [args.value_column], zone=args.zone)

    def tell(client: Client) -> Any:
        now_ns = client.get("/outlooks", limit=1)["now_ns"]
        body, warnings = to_tell(read, now_ns, args.file.name)
        tree = client.post("/outlooks", body | {"quantity": args.quantity, "name": args.name})
        return tree | {"warnings": warnings} if warnings else tree

    return tell


def to_tell(read: SeriesRead, now_ns: int, file: str) -> tuple[dict[str, Any], list[str]]:
    """(start, step and values from the one in force at `now_ns` on, what people should know of the file)."""
    panel, warnings = read.panel, list(read.notes)
    step_ns = round(panel.step_s * NS)
    first = max(0, (now_ns - panel.start_ns) // step_ns)
    if first >= panel.n_time:
        from twin.app.series_times import said

        end = said(panel.start_ns + panel.n_time * step_ns)
        raise ConfigError(f"{file}: the last value was over at {end}; expected values to come")
    values = [None if v != v else v for v in panel.values[first:, 0].tolist()]
    if not any(v is not None for v in values):
        raise ConfigError(f"{file}: no value to come is known")
    if len(values) > MAX_VALUES:
        warnings.append(f"{len(values)} values are to come; told are the first {MAX_VALUES}")
    start_ns = panel.start_ns + first * step_ns
    return {"start_ns": start_ns, "step_s": panel.step_s, "values": values[:MAX_VALUES]}, warnings
