"""The verb `top`: asks the daemon once, which refuses a wrong address or token, then opens the screen.

Textual is imported here alone, when the screen opens: the other commands start without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

from twin.catalogue import ConnectorError
from twin.cli.arguments import client_of
from twin.cli.grammar import Verb, WrongCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console


def run(args: argparse.Namespace, *_: Console) -> int:
    """Show the site until the reader leaves. Raises WrongCall where there is no terminal, KeyboardInterrupt
    for a signal.
    """
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # it draws on the last
        raise WrongCall("standard output is not a terminal; `racktwin status` prints the same once")
    client = client_of(args)
    client.get("/whoami")
    from twin.cli.top.app import TopApp

    app = TopApp(client, signs_only=not speaks_utf8(os.environ))
    app.run()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    if app.interrupted:
        raise KeyboardInterrupt
    if app.why_ended:
        raise ConnectorError(app.why_ended)
    return 0


def speaks_utf8(env: Mapping[str, str]) -> bool:
    """True where the locale says that the terminal takes UTF-8.

    Python itself sets LC_CTYPE to C.UTF-8 where no locale is set, so that alone says nothing of the terminal.
    """
    chosen = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
    if not env.get("LC_ALL") and chosen == "C.UTF-8":
        chosen = env.get("LANG", "")
    return "utf8" in chosen.lower().replace("-", "")


VERBS = {
    "top": Verb(
        run,
        "",
        ("", "--url https://twin:8077 --token-file viewer.token", "--config build/demo/live/racktwin.yaml"),
        answers=False,
        live=True,
    )
}
