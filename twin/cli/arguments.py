"""Shared arguments: where the daemon is, spans, instants, levels of authority; and JSON output."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.catalogue import NS, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

AUTHORITY = ("off", "advise", "approve", "act")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_UNITS_S = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def add_command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A command that asks a running daemon."""
    # No abbreviations: --token must not become --token-file with a token for a name.
    made: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
    add_connection(made)
    return made


def add_connection(parser: argparse._ActionsContainer) -> None:
    """The options that name the daemon and the token."""
    parser.add_argument("--url", help="of the daemon; default $RACKTWIN_URL or http://127.0.0.1:8077")
    parser.add_argument("--config", type=Path, help="the daemon's configuration, on its own host")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token; - is standard input")
    parser.add_argument("--ca-file", metavar="FILE", help="certificate to trust, PEM")
    parser.add_argument("--cert-file", metavar="FILE", help="client certificate, if the daemon asks for one")
    parser.add_argument("--key-file", metavar="FILE", help="key of the client certificate")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def client_of(args: argparse.Namespace) -> Client:
    """The client that the options describe. Raises ConfigError."""
    from twin.api import connect

    return connect(args.url, args.config, args.token_file, args.ca_file, args.cert_file, args.key_file)


def span_s(text: str) -> float | None:
    """Seconds of `90`, `90s`, `15min`, `2h`, `1d`; None for anything else."""
    found = _SPAN.fullmatch(text.strip())
    return float(found[1]) * _UNITS_S[found[2] or "s"] if found else None


def instant_ns(option: str, text: str, expected: str = "2026-11-21T02:00") -> int:
    """An instant as a person writes it, UTC unless it says so. Raises ConfigError."""
    try:
        when = datetime.fromisoformat(text)
        return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()) * NS
    except (ValueError, OverflowError):
        raise ConfigError(f"{option} {text[:60]!r}: expected a time such as {expected}") from None


def authority_levels(pairs: Sequence[str], known: Collection[str] | None = None) -> dict[str, str]:
    """POLICY=LEVEL pairs. Raises ConfigError for an unknown level, or a policy that is not `known`."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, _, level = pair.partition("=")
        if level not in AUTHORITY or (known is not None and name not in known):
            names = ", ".join(known or ()) or "it has none"
            among = "" if known is None else f" with a policy of the site: {names}"
            raise ConfigError(f"--authority {pair}: expected POLICY={'|'.join(AUTHORITY)}{among}")
        out[name] = level
    return out


def write_json(value: Any, out: Console) -> None:
    """One object on one line of ASCII; what is no number is null.

    Flushed, so that a reader who left is noticed while that can be dealt with.
    """
    import msgspec

    tree = msgspec.json.decode(msgspec.json.encode(value))
    out.file.write(json.dumps(tree, ensure_ascii=True, separators=(",", ":")) + "\n")
    out.file.flush()
