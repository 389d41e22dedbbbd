"""The command line: `racktwin check | discover | replay | run | status | approve | ...`; `--help` lists all.

Parses arguments and prints; the work is elsewhere. Exit codes: 0 done, 1 the answer is no (a bad file, a
broken chain, a replay that differs), 2 a wrong call.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from twin.catalogue import ConfigError, Divergence, TwinError
from twin.report import escape
from twin.run import stop_at_once

# Modules are imported when one of their commands is called: some bring much along. `live` has the rest.
_COMMANDS = {
    "init": ("twin.cli.init", "make a site file and a configuration from what is there"),
    "check": ("twin.cli.site", "check site files and report every error"),
    "discover": ("twin.cli.site", "make a site file from the metadata in a recording"),
    "record-info": ("twin.cli.site", "summarise a recorded run or a capture"),
    "replay": ("twin.cli.replay", "replay recorded telemetry through the twin"),
    "journal": ("twin.cli.journal", "verify or show the journal of a run"),
    "traces": ("twin.cli.traces", "list, fetch and verify the public recordings"),
    "run": ("twin.cli.run", "run the daemon: mirror a live site and act by its policies"),
    "record": ("twin.cli.record", "record live MQTT messages to files for replay"),
    "broker-acl": ("twin.cli.acl", "write Mosquitto's access list for a site"),
    "simulate": ("twin.cli.simulate", "simulate a site under a scenario, for hours or months"),
    "whatif": ("twin.cli.whatif", "run a scenario from the twin's state, with and without policies"),
    "backtest": ("twin.cli.backtest", "score forecasts, alarms and checkpoint intervals on recordings"),
    "checkpoint": ("twin.cli.checkpoint", "plan how often training jobs save checkpoints"),
    "replacement": ("twin.cli.replacement", "show which nodes are replaced before they fail, and why"),
    "power": ("twin.cli.power", "show headroom, caps and their cost; set load targets"),
    "sources": ("twin.cli.sources", "list who sends telemetry, and what of it is not used and why"),
    "explain": ("twin.cli.explain", "explain the proposals of a policy"),
    "plant": ("twin.cli.plant", "run a simulated site on a broker in real time, to try the daemon"),
    "demo": ("twin.cli.demo", "run a simulated pod under control of the daemon until Ctrl-C"),
}


def _parser(called: str | None = None) -> argparse.ArgumentParser:
    """All commands; the called one has its arguments and `handler`: (args, out, err) -> exit code."""
    from twin.cli import live

    top = argparse.ArgumentParser(
        prog="racktwin", description="Digital twin and operations daemon for racks of AI accelerators."
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    module = _COMMANDS[called][0] if called in _COMMANDS else None
    if module is not None:
        importlib.import_module(module).add_parser(commands)
    for name, (_, what) in _COMMANDS.items():
        if name not in commands.choices:
            commands.add_parser(name, help=what)
    live.add_parsers(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(next((word for word in words if not word.startswith("-")), None))
    args = parser.parse_args(argv)
    # No emoji codes: text from outside may hold `:fire:` and is to be shown as it is.
    out = Console(highlight=False, emoji=False)
    err = Console(stderr=True, highlight=False, emoji=False)
    if args.version:
        from twin import VERSION

        out.print(f"racktwin {VERSION}")
        return 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    # A service manager's stop ends a run as Ctrl-C does: files are closed, and it says so.
    stop_at_once()
    try:
        return int(args.handler(args, out, err))
    except ConfigError as error:
        for problem in error.problems:
            err.print(f"[red]error[/red] {escape(problem)}", soft_wrap=True)
        return 1
    except Divergence as error:
        err.print(f"[red]differs[/red] {escape(str(error))}", soft_wrap=True)
        return 1
    except TwinError as error:
        err.print(f"[red]error[/red] {escape(str(error))}", soft_wrap=True)
        return 1
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        err.print(f"[red]error[/red] {escape(where + (error.strerror or str(error)))}", soft_wrap=True)
        return 1
    except RecursionError:
        err.print("[red]error[/red] a file is nested too deeply; expected a hundred levels at most")
        return 1
    except KeyboardInterrupt:
        err.print("interrupted")
        return 130
    except Exception as error:
        if not _was_interrupted(error):
            raise
        err.print("interrupted")
        return 130


def _was_interrupted(error: BaseException) -> bool:
    """Return True if an error stands for Ctrl-C: one during a library's import may surface as another error.

    Python before 3.12 makes a RuntimeError of what is raised in `__set_name__`.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__
    return seen is not None


if __name__ == "__main__":
    sys.exit(main())
