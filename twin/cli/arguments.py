"""Parts that several commands share: options, instants, levels of authority, and output formats."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.catalogue import NS, ConfigError, clean, did_you_mean, seconds_of
from twin.cli.grammar import Handler, Verb

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

AUTHORITY = ("off", "advise", "approve", "act")
DAY_S = 86_400
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # as a spreadsheet reads the beginning of a cell
_HOUR = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")

SITE = "--site FILE!  site file (YAML)"
REPORT = "--report FOLDER  write the report as a web page into this folder"
LEVELS = "--authority POLICY:LEVEL*  off, advise, approve or act; overrides the files; repeatable"
BROKER_USER = """
    --ca-file FILE  TLS: CA certificate of the broker (PEM)
    --cert-file FILE  TLS: client certificate (PEM)
    --key-file FILE  TLS: private key of the client certificate (PEM)
    --username NAME  user name at the broker
    --password-file FILE  file with the password of this user
"""


def instant_ns(option: str, text: str, base_ns: int, toward: int = 1) -> int:
    """Parse an instant: a date and time, an hour, or a duration from a base. UTC without an offset.

    `toward` 1 looks ahead: 18:00 is the next one after the base, 2h is two hours after it. -1 looks back.
    Raises ConfigError.
    """
    text = text.strip()
    if (span_s := seconds_of(text.removeprefix("+"))) is not None:
        return base_ns + toward * round(span_s * NS)
    if hour := _HOUR.fullmatch(text):
        of_day_s = int(hour[1]) * 3600 + int(hour[2]) * 60
        ahead_s = (of_day_s - base_ns // NS - 1) % DAY_S + 1
        return (base_ns // NS + (ahead_s if toward > 0 else ahead_s - DAY_S)) * NS
    try:
        when = datetime.fromisoformat(text)
        return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()) * NS
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option} {text[:60]!r}: expected a time such as 06:00 or 2026-11-21T02:00 (UTC), or a duration "
            "such as 90min or 3h"
        ) from None


def client_of(args: argparse.Namespace) -> Client:
    """Return a client for the daemon that the options name. Raises ConfigError."""
    from twin.api import connect

    return connect(args.url, args.config, args.token_file, args.ca_file, args.cert_file, args.key_file)


def authority_levels(pairs: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Parse POLICY=LEVEL pairs. Raises ConfigError for an unknown level, or a policy that is not `known`."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, _, level = pair.partition("=")
        if level not in AUTHORITY or name not in known:
            names = ", ".join(known) or "it has none"
            near = did_you_mean(name, known) if name not in known else did_you_mean(level, AUTHORITY)
            text = (
                f"--authority {clean(pair)}: expected POLICY={'|'.join(AUTHORITY)} with a policy of the site"
            )
            raise ConfigError(f"{text}: {names}{near}")
        out[name] = level
    return out


def refuse_existing(path: Path | None, force: bool | None = None) -> None:
    """Raise ConfigError if the path of --out exists as a file or as a folder with content.

    `force` allows it; None means that the command never overwrites.
    """
    if path is not None and not force and path.exists() and (not path.is_dir() or any(path.iterdir())):
        remedy = "; --force overwrites it" if force is not None else ""
        raise ConfigError(f"--out {path}: exists; expected a new file, or a new or empty folder{remedy}")


def is_name(text: str) -> bool:
    """Return True for a valid name of a site."""
    from twin.site import expand

    try:
        return expand(text) == [text]
    except ValueError:
        return False


def present(args: argparse.Namespace, tree: Any, show: Callable[[Any, Console], object], out: Console) -> int:
    """Print a tree in the requested format and return exit code 0."""
    if args.format == "json":
        write_json(tree, out)
    elif args.format == "csv":
        write_csv(tree[args.verb.rows], out)
    else:
        show(tree, out)
    return 0


def asking(
    ask: Callable[[Client, argparse.Namespace], Any], show: Callable[[Any, Console], object]
) -> Handler:
    """Return the function of a verb that sends a request to a daemon and prints the response."""

    def run(args: argparse.Namespace, out: Console, *_: Console) -> int:
        return present(args, ask(client_of(args), args), show, out)

    return run


def live(
    ask: Callable[[Client, argparse.Namespace], Any],
    show: Callable[[Any, Console], object],
    arguments: str,
    *examples: str,
    **kinds: Any,
) -> Verb:
    """Return a verb that sends a request to a daemon and prints the response; `kinds`: see `Verb`."""
    return Verb(asking(ask, show), arguments, examples, live=True, **kinds)


def write_json(value: Any, out: Console) -> None:
    """Write one object as one line of ASCII JSON; NaN and infinity become null.

    The flush makes a closed pipe fail here, where `main` handles it.
    """
    import msgspec

    tree = msgspec.json.decode(msgspec.json.encode(value))
    out.file.write(json.dumps(tree, ensure_ascii=True, separators=(",", ":")) + "\n")
    out.file.flush()


def write_csv(rows: Sequence[dict[str, Any]], out: Console) -> None:
    """Write rows as CSV with a header line, for a spreadsheet.

    A mapping becomes columns (`carries.gpu.entities`), a list becomes its values joined by `; `. An instant
    (`last_ns`) becomes text in UTC (`last_utc`), since a spreadsheet rounds numbers of 19 digits. Text that
    a spreadsheet would read as a formula gets ' in front, since topics and labels come from outside.
    """
    import csv

    import msgspec

    table = csv.writer(out.file, lineterminator="\n")
    flat = [dict(_cells("", row)) for row in msgspec.json.decode(msgspec.json.encode(rows))]
    names = list(dict.fromkeys(name for row in flat for name in row))
    table.writerow(names)
    table.writerows([row.get(name) for name in names] for row in flat)
    out.file.flush()


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, text) of a value, or of each part of a mapping."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _cells(f"{name}.{key}" if name else key, part)
    elif name.endswith("_ns") and isinstance(value, int):
        when = datetime.fromtimestamp(value / NS, UTC).isoformat(timespec="milliseconds") if value else None
        yield f"{name[:-3]}_utc", when
    elif isinstance(value, list):
        yield name, _quoted("; ".join(x if isinstance(x, str) else json.dumps(x) for x in value))
    elif isinstance(value, bool):
        yield name, "true" if value else "false"
    else:
        yield name, _quoted(value) if isinstance(value, str) else None if value == {} else value


def _quoted(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) else text
