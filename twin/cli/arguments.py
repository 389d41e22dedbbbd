"""Parts that several commands share: options, instants, levels of authority, and answers in each format."""

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
REPORT = "--report FOLDER  write its page into this folder"
LEVELS = "--authority POLICY:LEVEL*  off, advise, approve or act; overrides the files; may be given again"
BROKER_USER = """
    --ca-file FILE  TLS: authority of the broker (PEM)
    --cert-file FILE  TLS: certificate to show (PEM)
    --key-file FILE  TLS: its key (PEM)
    --username NAME  user at the broker
    --password-file FILE  file with the user's password
"""


def instant_ns(option: str, text: str, base_ns: int, toward: int = 1) -> int:
    """An instant as a person writes it, UTC unless it says so: a time, an hour, a span from a base.

    `toward`: 1 for what is to come (18:00 is the next one after the base, 2h is two hours after it), -1 for
    what was. Raises ConfigError.
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
    """The client that the options describe. Raises ConfigError."""
    from twin.api import connect

    return connect(args.url, args.config, args.token_file, args.ca_file, args.cert_file, args.key_file)


def authority_levels(pairs: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """POLICY=LEVEL pairs. Raises ConfigError for an unknown level, or a policy that is not `known`."""
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


def refuse_existing(option: str, path: Path | None, force: bool | None = None) -> None:
    """Raises ConfigError where something is already: a file, or a folder that is not empty.

    `force` lets it pass; None where nothing is ever overwritten.
    """
    if path is not None and not force and path.exists() and (not path.is_dir() or any(path.iterdir())):
        remedy = "; --force overwrites it" if force is not None else ""
        raise ConfigError(f"{option} {path}: exists; expected a new file, or a new or empty folder{remedy}")


def is_name(text: str) -> bool:
    """True for a name that a site may have."""
    from twin.site import expand

    try:
        return expand(text) == [text]
    except ValueError:
        return False


def present(args: argparse.Namespace, tree: Any, show: Callable[[Any, Console], object], out: Console) -> int:
    """An answer in the format that was asked for; 0, as exit code."""
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
    """The function of a verb that asks a daemon and shows the answer."""

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
    """A verb that asks a running daemon and shows the answer; `kinds`: see `Verb`."""
    return Verb(asking(ask, show), arguments, examples, live=True, **kinds)


def write_json(value: Any, out: Console) -> None:
    """One object on one line of ASCII; what is no number is null.

    Flushed, so that a reader who left is noticed while that can be dealt with.
    """
    import msgspec

    tree = msgspec.json.decode(msgspec.json.encode(value))
    out.file.write(json.dumps(tree, ensure_ascii=True, separators=(",", ":")) + "\n")
    out.file.flush()


def write_csv(rows: Sequence[dict[str, Any]], out: Console) -> None:
    """Rows of an answer with a line of their names, for a spreadsheet.

    A mapping is columns of its own (`carries.gpu.entities`), a list its values with `; ` between them, an
    instant (`last_ns`) text in UTC (`last_utc`): a spreadsheet rounds numbers of 19 digits. Text that a
    spreadsheet would take for a formula has ' in front: topics and labels come from outside.
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
    """(column, text) of a value, or of each part of a mapping."""
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
