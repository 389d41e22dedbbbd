"""The commands `node repaired | tested`: what people say of a node that was out of service."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from twin.catalogue import ConfigError
from twin.cli.connection import add_connection, client_of

if TYPE_CHECKING:
    from rich.console import Console

NS = 1_000_000_000


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
    made: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
    made.add_argument("node", metavar="NODE", help="such as hall1/r07/node3")
    add_connection(made)
    return made


def run_node(args: argparse.Namespace, out: Console) -> int:
    """Tell the daemon, and print what it says. Raises ConfigError, ConnectorError."""
    from twin.api import path_of
    from twin.cli.show import show_done

    body: dict[str, Any] = {"note": args.note}
    if args.action == "tested":
        body |= {"passed": args.passed, "test": args.test, "began_ns": _instant("--began", args.began),
                 "ended_ns": _instant("--ended", args.ended)}  # fmt: skip
    tree = client_of(args).post(path_of("nodes", args.node, args.action), body)
    if args.json:
        import json

        out.file.write(json.dumps(tree, ensure_ascii=True) + "\n")
    else:
        show_done(tree, out)
    return 0


def _instant(option: str, text: str | None) -> int | None:
    """An instant as a person writes it, UTC unless it says so. Raises ConfigError."""
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
        return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()) * NS
    except (ValueError, OverflowError):
        raise ConfigError(f"{option} {text[:60]!r}: expected a time such as 2026-11-21T02:00") from None
