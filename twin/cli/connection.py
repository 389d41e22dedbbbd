"""Connection options: where the daemon is and who asks, for every command that talks to a running daemon."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twin.api import Client


def add_connection(parser: argparse._ActionsContainer) -> None:
    """The options that name the daemon and the token."""
    parser.add_argument("--url", help="of the daemon; default $RACKTWIN_URL or http://127.0.0.1:8077")
    parser.add_argument("--config", type=Path, help="the daemon's configuration, on its own host")
    parser.add_argument("--token-file", metavar="FILE", help="holds the token; - is standard input")
    parser.add_argument("--ca-file", metavar="FILE", help="certificate to trust, PEM")
    parser.add_argument("--cert-file", metavar="FILE", help="our own certificate, where the daemon wants one")
    parser.add_argument("--key-file", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def client_of(args: argparse.Namespace) -> Client:
    """The client that the options describe. Raises ConfigError."""
    from twin.api import connect

    return connect(args.url, args.config, args.token_file, args.ca_file, args.cert_file, args.key_file)
