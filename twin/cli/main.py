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
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, Divergence, TwinError
from twin.report import escape
from twin.run import stop_at_once

# Commands whose own modules bring much along: their arguments are added when one of them is called.
_LARGE = {
    "run": ("twin.cli.run", "run the daemon: mirror a live site and act by its policies"),
    "record": ("twin.cli.record", "record live MQTT messages to files for replay"),
    "broker-acl": ("twin.cli.acl", "write Mosquitto's access list for a site"),
    "simulate": ("twin.cli.simulate", "simulate a site under a scenario, for hours or months"),
    "whatif": ("twin.cli.whatif", "run a scenario from the twin's state, with and without policies"),
    "backtest": ("twin.cli.backtest", "score forecasts, alarms and checkpoint intervals on recordings"),
    "checkpoint": ("twin.cli.checkpoint", "plan how often training jobs save checkpoints"),
    "replacement": ("twin.cli.replacement", "show which nodes are replaced before they fail, and why"),
    "power": ("twin.cli.power", "show headroom, caps and their cost; set load targets"),
    "explain": ("twin.cli.explain", "explain the proposals of a policy"),
    "plant": ("twin.cli.plant", "run a simulated site on a broker in real time, to try the daemon"),
}


def _parser(called: str | None = None) -> argparse.ArgumentParser:
    from twin.cli import live, traces

    top = argparse.ArgumentParser(
        prog="racktwin", description="Digital twin and operations daemon for racks of AI accelerators."
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    check = commands.add_parser("check", help="check site files and report every error")
    check.add_argument("site", type=Path, nargs="+", help="site file (YAML)")
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")

    discover = commands.add_parser("discover", help="make a site file from the metadata in a recording")
    discover.add_argument("recording", type=Path, help="MQTT capture, or archive of IPMI dumps")
    discover.add_argument("-o", "--output", type=Path, help="site file to write (default: stdout)")
    discover.add_argument("--force", action="store_true", help="overwrite the output")
    discover.add_argument("--name", default="site", help="name of the site")

    info = commands.add_parser("record-info", help="summarise a recorded run or a capture")
    info.add_argument("path", type=Path, help="folder of a run, or capture file")
    info.add_argument("--json", action="store_true")

    replay = commands.add_parser("replay", help="replay recorded telemetry through the twin")
    replay.add_argument("--site", type=Path, help="site file; a recorded run contains its own")
    replay.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="capture, table, IPMI archive or recorded run"
    )
    replay.add_argument("--map", type=Path, help="mapping of a table's columns to signals (YAML)")
    replay.add_argument("--speed", default="max", help="multiple of real time, or max (default)")
    replay.add_argument(
        "--tick", type=float, default=None, help="seconds per tick (default 1, or a table's interval)"
    )
    replay.add_argument("--out", type=Path, help="record the run in this folder: trace, journal, snapshots")
    replay.add_argument("--report", type=Path, help="write report.html into this folder")
    replay.add_argument(
        "--authority",
        action="append",
        default=[],
        metavar="POLICY=LEVEL",
        help="off, advise, approve or act; overrides the site file",
    )
    replay.add_argument(
        "--no-compare", action="store_true", help="do not compare a recorded run with its journal"
    )
    replay.add_argument(
        "--trust-plugins",
        action="store_true",
        help="load plug-ins (module:Class) named by the trace's own site",
    )
    replay.add_argument("--json", action="store_true", help="one JSON object on stdout")

    _journal_parser(commands)
    traces.add_parser(commands)

    for name, (module, what) in _LARGE.items():
        if name == called:
            importlib.import_module(module).add_parser(commands)
        else:
            commands.add_parser(name, help=what)
    live.add_parsers(commands)

    _demo_parser(commands)
    return top


def _demo_parser(commands: Any) -> None:
    demo = commands.add_parser("demo", help="run a simulated pod under control of the daemon until Ctrl-C")
    demo.add_argument("--out", type=Path, default=Path("build/demo"))
    demo.add_argument("--seconds", type=float, help="stop after this many seconds")
    demo.add_argument(
        "--recorded",
        action="store_true",
        help="replay a real and a simulated recording instead, and write reports",
    )


def _journal_parser(commands: Any) -> None:
    journal = commands.add_parser("journal", help="verify or show the journal of a run")
    actions = journal.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("schema", help="print the JSON Schema of a line")
    verify = actions.add_parser("verify", help="verify the hash chain")
    verify.add_argument("path", type=Path, help="journal.jsonl, or the folder of a run")
    verify.add_argument("--cut", action="store_true", help="cut off a faulty tail (it is kept as .torn)")
    verify.add_argument("--json", action="store_true")
    show = actions.add_parser("show", help="print entries as sentences")
    show.add_argument("path", type=Path, help="journal.jsonl, or the folder of a run")
    show.add_argument("--kind", help="only entries of this kind: event, command, advice, finding, ...")
    show.add_argument("--limit", type=int, default=50, help="at most this many entries (default: 50)")
    show.add_argument("--last", action="store_true", help="the last entries instead of the first")
    show.add_argument("--since", help="entries from this time on, such as 2026-11-21T02:00 (UTC)")
    show.add_argument("--until", help="entries up to this time")
    show.add_argument("--json", action="store_true")


def _large(command: str) -> Any:
    """Return the function of a command that has a module of its own."""
    return getattr(importlib.import_module(_LARGE[command][0]), f"run_{command}")


def _run(args: argparse.Namespace, out: Console, err: Console) -> int:
    if args.command == "traces":
        from twin.cli.traces import run_traces

        return run_traces(args)
    if args.command == "run":
        from twin.cli.run import run_daemon

        return run_daemon(args, out)
    if args.command == "record":
        from twin.cli.record import run_record

        return run_record(args, out, err)
    if args.command == "broker-acl":
        from twin.cli.acl import run_broker_acl

        return run_broker_acl(args, out, err)
    if args.command in ("simulate", "whatif", "backtest", "plant"):
        return int(_large(args.command)(args, out, err))
    if args.command in ("checkpoint", "replacement", "power", "explain"):
        return int(_large(args.command)(args, out))
    from twin.cli.live import COMMANDS

    if args.command in COMMANDS:
        from twin.cli.live import run_live

        return run_live(args, out, err)
    if args.command == "journal":
        from twin.cli.journal import run_journal

        return run_journal(args, out, err)
    if args.command == "replay":
        from twin.cli.replay import run_replay

        return run_replay(args, out, err)
    if args.command == "demo":
        if args.recorded:
            from twin.cli.demo import run_demo

            return run_demo(args.out, out, err)
        from twin.cli.demo import run_live_demo

        return run_live_demo(args.out, args.seconds, out)
    from twin.cli import site

    actions: dict[str, Any] = {
        "check": site.run_check,
        "discover": site.run_discover,
        "record-info": site.run_info,
    }
    return int(actions[args.command](args, out, err))


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
        return _run(args, out, err)
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
