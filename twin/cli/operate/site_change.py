"""The commands `site diff` and `site apply`: what reports but is missing in a site's file, and its approval.

`site apply` runs on the daemon's host and writes the file with the rights of whoever calls it: a daemon that
systemd guards may not write its own configuration.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, ConnectorError, StorageError, clean
from twin.cli.arguments import client_of, live, present
from twin.cli.grammar import Verb
from twin.report import print_line

PROFILE = "--profile NAME  profile of new racks, or `none`; default: the profile that all other racks have"
COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def _show(tree: dict[str, Any], out: Console) -> None:
    for row in tree["diff"].splitlines():
        print_line(out, clean(row, 2000), COLOURS.get(row[:1], ""))
    for note in tree["notes"]:
        print_line(out, f"- {note}")
    for problem in tree["problems"]:
        print_line(out, f"cannot be applied: {problem}", "red")
    if not tree["diff"]:
        print_line(out, f"{tree['file']}: nothing to add; {tree['points']} points of the BMS reported")
    elif not tree["problems"]:
        profile = "" if tree["profile"] == "none" else f" --profile {tree['profile']}"
        print_line(out, f"on the daemon's host: racktwin site apply {tree['digest']}{profile} --reason TEXT")


def run_apply(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Approve, write, reload; the file is as it was where the daemon refuses it."""
    from twin.api import ApiRefused
    from twin.run import atomic_write

    client = client_of(args)
    named = Path(client.get("/site/change", profile=args.profile)["file"])
    if not named.is_file():
        raise ConfigError(f"{named}: not found on this host; run the command on the host of the daemon")
    path = named.resolve()
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise StorageError(
            f"{path}: no permission to write; run the command as a user who may write it, such as root"
        )
    body = {"digest": args.digest, "profile": args.profile, "reason": args.reason, "writer": "terminal"}
    said = client.post("/site/change", body)
    if path.read_bytes().decode("utf-8") != said["before"]:
        raise ConfigError(
            f"{path}: differs from the site file of the daemon; run the command on the host of the daemon"
        )
    owner = path.stat()

    def write(text: str) -> None:
        atomic_write(path, text, owner.st_mode & 0o777, owner=owner)

    write(said["after"])
    try:
        client.post("/reload", {"reason": args.reason})
    except ConnectorError as error:
        if isinstance(error, ApiRefused) and error.status < 500:
            write(said["before"])
            raise
        raise ConnectorError(
            f"{error}\n{path}: holds the approved lines, and the daemon may have taken them over: see its "
            "alarms, then run `racktwin daemon reload`"
        ) from None
    result = {key: said[key] for key in ("done", "file", "lines")}
    return present(
        args, result, lambda t, o: print_line(o, f"{t['file']}: {t['lines']} lines more, in force"), out
    )


VERBS = {
    "site diff": live(
        lambda client, args: client.get("/site/change", profile=args.profile),
        _show,
        PROFILE,
        "",
        "--profile gb200-nvl72",
    ),
    "site apply": Verb(
        run_apply,
        f"""
        DIGEST  digest of the change, as `racktwin site diff` shows it
        {PROFILE}
        --reason TEXT!  reason; the journal records it
        """,
        ("3f2a9c0d11b24e5f --reason 'racks 9 and 10 were delivered'",),
        live=True,
    ),
}
