"""Command `python -m tests.evaluation NAME ...`: benchmarks, score suites and rivals. None of it ships.

`--help` lists the names; `results` runs those whose recordings are here and writes RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rich.console import Console

from twin.catalogue import ConfigError, TwinError
from twin.run import on_cluster, stop_at_once

# Modules, each with `add_arguments(parser)` and `run(args, out, err) -> exit code`.
COMMANDS = {
    "bench": ("bench.bench", "ticks, replay, start and memory by size; writes JSON"),
    "forecasts": ("forecasts.suite", "load forecasts on public recordings, beside baselines and an LSTM"),
    "health": ("health.command", "alarms, failure forecasts and lemons on simulated fleets"),
    "power": ("power.command", "power capping on two simulated sites, beside static caps and thresholds"),
    "replacement": ("replacement.command", "node replacement on simulated quarters or recorded faults"),
    "checkpoint": ("checkpoint.command", "checkpoint intervals on simulated fleets"),
    "cooling": ("cooling.command", "GPUs that heat shuts down when coolant stops, at full load"),
    "quiet": ("quiet.command", "false alarms of healthy simulated sites, by detector and cause"),
    "results": ("results", "run the suites and write their tables into RESULTS.md"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one evaluation. Exit codes as those of `racktwin`: 0 done, 1 the answer is no, 2 a wrong call."""
    words = list(sys.argv[1:] if argv is None else argv)
    top = argparse.ArgumentParser(prog="python -m tests.evaluation", description=__doc__)
    names = top.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (module, about) in COMMANDS.items():
        parser = names.add_parser(name, help=about, description=about)
        if words[:1] == [name]:
            importlib.import_module(f"tests.evaluation.{module}").add_arguments(parser)
            if (
                "--cluster" not in parser.format_usage()
            ):  # `forecasts` has the options of `racktwin backtest load`
                parser.add_argument(
                    "--cluster", metavar="ADDRESS", help="on the workers of this Dask scheduler"
                )
            parser.set_defaults(refuse=parser.error)
    args = top.parse_args(words)
    out, err = Console(highlight=False, emoji=False), Console(stderr=True, highlight=False, emoji=False)
    stop_at_once()
    try:
        with on_cluster(args.cluster):
            return int(
                importlib.import_module(f"tests.evaluation.{COMMANDS[args.name][0]}").run(args, out, err)
            )
    except (TwinError, OSError) as error:
        for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
            err.print(f"error {line}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        err.print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
