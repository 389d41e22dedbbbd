"""The commands `node repaired | tested`: what people say of a node that was out of service."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from twin.cli.arguments import add_command, client_of, instant_ns, write_json

if TYPE_CHECKING:
    from rich.console import Console


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin node`."""
    what = "tell that a node was repaired, or how a test of it ended"
    parser = commands.add_parser("node", help=what, description=what)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    repaired = _action(actions, "repaired", "it was repaired: what it waits for now is a test")
    tested = _action(actions, "tested", "a test of yours ended: evidence like that of the site's burn-in")
    passed = tested.add_mutually_exclusive_group(required=True)
    passed.add_argument("--passed", action="store_true")
    passed.add_argument("--failed", action="store_true")
    tested.add_argument("--test", default="", help="its name")
    tested.add_argument("--began", help="when, such as 2026-11-21T02:00 (UTC); default: when it ended")
    tested.add_argument("--ended", help="when; default: now")
    for one in (repaired, tested):
        one.add_argument("--note", default="", help="for who looks at its record later: the ticket, the part")


def _action(actions: Any, name: str, what: str) -> argparse.ArgumentParser:
    made = add_command(actions, name, what)
    made.add_argument("node", metavar="NODE", help="such as hall1/r07/node3")
    return made


def run_node(args: argparse.Namespace, out: Console) -> int:
    """Tell the daemon, and print what it says. Raises ConfigError, ConnectorError."""
    from twin.api import path_of
    from twin.cli.show import show_done

    body: dict[str, Any] = {"note": args.note}
    if args.action == "tested":
        body |= {"passed": args.passed, "test": args.test}
        for option in ("began", "ended"):
            if (text := getattr(args, option)) is not None:
                body[f"{option}_ns"] = instant_ns(f"--{option}", text)
    tree = client_of(args).post(path_of("nodes", args.node, args.action), body)
    if args.json:
        write_json(tree, out)
    else:
        show_done(tree, out)
    return 0
