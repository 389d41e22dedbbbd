"""Grammar of the command line: nouns, verbs, the declaration of arguments, and the check of a call.

`commands.py` is the table of all nouns. A verb is declared beside the function that runs it. Each line of
its declaration is one argument: name, kind of value, two spaces, help text:

    NODE                     an argument; `[NODE]` is optional, `NAME+` and `NAME*` take several values
    --note TEXT              an option; `TEXT=x` has a default, `TEXT!` is required, `TEXT*` is repeatable
    --force                  a flag
    --role viewer|admin      a choice
    --from TIME>start        an option with another attribute name
    ~--days DAYS>back_s      a deprecated option: hidden from the help, kept for one more version

`KINDS` maps each kind of value to its parser and to the unit suffix of the attribute.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from twin.catalogue import clean, did_you_mean, seconds_of

if TYPE_CHECKING:
    from rich.console import Console

Handler = Callable[[argparse.Namespace, "Console", "Console"], int]  # the consoles: output, errors


class WrongCall(Exception):
    """Wrong usage of a command: a missing or contradictory argument. Exit code 2."""


def seconds(text: str) -> float:
    """Parse a duration such as 15s, 2h or 1d12h, in seconds."""
    found = seconds_of(text)
    if found is None or not 0 < found < 1e10:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: expected a duration with its unit, such as 90s, 15min, 2h or 1d12h"
        )
    return found


def _scaled(unit_s: float) -> Callable[[str], float]:
    """Return a parser of a bare number in a unit, for deprecated options."""

    def read(text: str) -> float:
        found = seconds_of(f"{text}s")
        if not found:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a number > 0")
        return found * unit_s

    return read


def watts(text: str) -> float:
    """Parse a power such as 500kW, 1.2MW or 800W, in watts.

    A number without a unit is refused: 500 instead of 500kW would cap the site at its floor.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKmMgG]?)[wW]?", text.strip())
    value = float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()] if found else math.nan
    if not 0 <= value < 1e12 or text.strip()[-1].isdigit():
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: expected a power with its unit, such as 500kW, 1.2MW or 800W"
        )
    return value


def whole(text: str, least: int = 1, below: int = 10**9) -> int:
    """Parse a whole number from `least` up to, and without, `below`."""
    if not (text.isascii() and text.isdigit() and least <= int(text[:25]) < below):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: expected a whole number from {least} to {below - 1}"
        )
    return int(text)


def bound(text: str) -> float | str:
    """Parse the bound of a request: a number, or the name of a state."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number; omit the option for no bound")
    return value


def host_port(text: str) -> tuple[str, int]:
    """Parse HOST or HOST:PORT, with or without mqtt:// in front; the default port is 1883."""
    bare = text.removeprefix("mqtt://").removesuffix("/")
    host, _, port = bare.rpartition(":") if ":" in bare else (bare, "", "1883")
    if "//" in host:
        raise argparse.ArgumentTypeError(
            f"{clean(text)!r}: expected HOST or HOST:PORT; `broker.tls` of the configuration sets TLS"
        )
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise argparse.ArgumentTypeError(f"{clean(text)!r}: expected HOST or HOST:PORT")
    return host.strip("[]"), int(port)


# Kind of a value -> (parser, unit suffix of the attribute). Any other kind is plain text.
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "COUNT": (whole, ""),
    "DAY": (float, ""),
    "DAYS": (_scaled(86_400.0), ""),
    "DURATION": (seconds, "_s"),
    "DURATION|0s": (lambda text: 0.0 if text == "0s" else seconds(text), "_s"),
    "FILE": (Path, ""),
    "FOLDER": (Path, ""),
    "FRACTION": (float, ""),
    "HOST[:PORT]": (host_port, ""),
    "HOURS": (_scaled(3600.0), ""),
    "NUMBER": (float, ""),
    "PORT": (lambda text: whole(text, 1, 65_536), ""),
    "POWER": (watts, "_w"),
    "SECONDS": (_scaled(1.0), ""),
    "SECONDS|0": (lambda text: 0.0 if text == "0" else _scaled(1.0)(text), ""),
    "SEED": (lambda text: whole(text, 0, 2**63), ""),
    "TICK": (whole, ""),
    "VALUE": (bound, ""),
}
_VALUE = re.compile(r"(?P<kind>[^=!+*>]+)(?:=(?P<default>[^!+*>]*))?(?P<many>[!+*]*)(?:>(?P<name>\w+))?")
CONFIG = (
    "--config FILE  configuration of the daemon; default: $RACKTWIN_CONFIG, else racktwin.yaml in this "
    "folder, in ~/.config/racktwin or in /etc/racktwin"
)
_CONNECTION = f"""
    --url URL  URL of the daemon; default: $RACKTWIN_URL, else that of its configuration, else this host
    {CONFIG}
    --token-file PATH  file with the access token; - reads standard input
    --ca-file PATH  CA certificate to trust (PEM)
    --cert-file PATH  client certificate (PEM), if the daemon requires one
    --key-file PATH  private key of the client certificate (PEM)
"""


@dataclass(frozen=True)
class Verb:
    """A verb: the function that runs it, its arguments, and examples without `racktwin NOUN VERB`.

    A verb that `answers` has `--format` and `--out`. `rows` is the key of the list in its JSON, and adds the
    format CSV. A `live` verb sends requests to a daemon; a `watched` one has `--watch`.
    """

    run: Handler
    arguments: str
    examples: tuple[str, ...]
    _: KW_ONLY
    answers: bool = True
    rows: str = ""
    live: bool = False
    watched: bool = False

    def every_argument(self) -> str:
        """Return the arguments of the verb and those that all verbs of its kind share."""
        made = self.arguments
        if self.answers:
            made += (
                f"\n--format {'table|json|csv' if self.rows else 'table|json'}  output format; default: table"
            )
            if "--out" not in made:
                made += "\n-o --out FILE>answer_file  write to this file; its suffix may select the format"
                made += "\n--force  overwrite the file of --out"
        return made + (_CONNECTION if self.live else "")


class Noun(NamedTuple):
    """A noun: its verbs as name to (module, summary), and the default verb.

    A command without verbs has one entry, with an empty name. A default verb that `starts` a daemon needs
    --config.
    """

    text: str
    verbs: dict[str, tuple[str, str]]
    default: str = ""
    starts: bool = False


def declare(parser: argparse.ArgumentParser, arguments: str) -> None:
    """Add the declared arguments, one per line, to a parser."""
    for line in filter(None, map(str.strip, arguments.splitlines())):
        _add(parser, line)


def _add(parser: argparse.ArgumentParser, line: str) -> None:
    spec, _, text = line.partition("  ")
    words = spec.removeprefix("~").split()
    flags = [word for word in words if word.startswith("-")]
    made: dict[str, Any] = {"help": text.strip().replace("%", "%%")}  # argparse formats it
    if spec.startswith("~"):
        made |= {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    if len(words) == len(flags):
        name, _, made["dest"] = flags[-1].partition(">")
        made["dest"] = made["dest"] or name.strip("-").replace("-", "_")
        parser.add_argument(*flags[:-1], name, action="store_true", **made)
        return
    optional = words[-1].startswith("[")
    found = _VALUE.fullmatch(words[-1].removeprefix("[").replace("]", "", 1) if optional else words[-1])
    assert found is not None, line
    kind, many = found["kind"], found["many"]
    read, unit = KINDS.get(kind, (str, ""))
    made |= {"type": read, "metavar": kind if "[" in kind else kind.replace(":", "=")}
    if kind.islower() and "|" in kind:
        made |= {"choices": tuple(kind.split("|")), "metavar": kind}
    if found["default"] is not None:
        made["default"] = found["default"]
    if len(words) - len(flags) == 2:
        made |= {"nargs": 2, "metavar": tuple(words[-2:]), "action": "append", "default": []}
    elif "*" in many and flags:
        made |= {"action": "append", "default": []}
    elif "+" in many or "*" in many or optional:
        made["nargs"] = "+" if "+" in many else "*" if "*" in many else "?"
        if flags and "!" not in many:
            made["default"] = []
    if not flags:
        parser.add_argument(found["name"] or kind.lower(), **made)
        return
    made |= {"required": "!" in many, "dest": found["name"] or flags[-1].strip("-").replace("-", "_") + unit}
    parser.add_argument(*flags, **made)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that adds the default of each option."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, False, "", argparse.SUPPRESS) or default == []:
            return text
        return f"{text}; default: {str(default).replace('%', '%%')}"


class Parser(argparse.ArgumentParser):
    """Parser of one verb. An error is one line with the expected value and a pointer to the help."""

    def __init__(self, command: str, text: str, verb: Verb) -> None:
        examples = "\n".join(f"  {command} {example}".rstrip() for example in verb.examples)
        # No abbreviations: --token must not become --token-file with a token for a name.
        super().__init__(
            prog=command,
            description=f"{text[:1].upper()}{text[1:]}.",
            epilog=f"examples:\n{examples}",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self._negative_number_matcher = re.compile(r"-[0-9]")  # `--for -2h` is a wrong value, not an option
        declare(self, verb.every_argument())
        if verb.answers:
            old = {"const": "json", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            self.add_argument("--json", action="store_const", dest="format", **old)  # type: ignore[arg-type]
        if verb.watched:
            text = "repeat the output every DURATION; default: 2s"
            self.add_argument("--watch", nargs="?", type=seconds, const=2.0, metavar="DURATION", help=text)

    def error(self, message: str) -> NoReturn:
        """Print the error on one line and exit with code 2."""
        refuse(f"{self.prog}: {message.removeprefix('argument ')}", self.prog)

    def parse_args(self, words: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. The error for an unknown option suggests the most similar one."""
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in self._option_string_actions:
                if name in ("--format", "--json"):
                    self.error(f"{name}: this command prints no table; leave the option out")
                near = did_you_mean(name, self.options()) or "; expected an option that the help lists"
                self.error(f"unknown option {name!r}{near}")
        args, left = self.parse_known_args(words, namespace)
        if left:
            self.error(f"unexpected argument {left[0]!r}; expected only the arguments that the help lists")
        return args

    def options(self) -> list[str]:
        """Return the options that the help shows."""
        shown = [a for a in self._actions if a.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            text = f"{value!r}: expected one of {', '.join(known)}{did_you_mean(str(value), known)}"
            raise argparse.ArgumentError(action, text)


def refuse(text: str, command: str) -> NoReturn:
    """Print one line on standard error and exit with code 2."""
    sys.stderr.write(f"error {clean(text, 1000)}; see `{command} --help`\n")
    raise SystemExit(2)
