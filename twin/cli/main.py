"""Entry point of the command line. `commands.py` lists its nouns and verbs, and `racktwin --help` shows them.

The package parses arguments and prints; other packages do the work. `EXIT_CODES` documents the exit codes.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twin.catalogue import ConfigError, ConnectorError, Divergence, TwinError
from twin.cli.commands import NOUNS, find, help_of, overview, parser_of, renamed
from twin.cli.grammar import WrongCall

if TYPE_CHECKING:
    from rich.console import Console

HELP = ("-h", "--help", "help")
WIDE = 400  # columns of output to a file or a pipe


def parse(words: list[str]) -> Any:
    """Parse the arguments of a call, with its `verb`. Wrong usage ends the program with exit code 2."""
    words, note = renamed(words)
    if note:
        sys.stderr.write(f"note {note}\n")
    noun, verb, rest = find(words)
    return parser_of(noun, verb).parse_args(rest)


def _help(words: list[str]) -> int | None:
    """Print the requested help and return the exit code; return None if the call runs a verb."""
    if not words:
        sys.stderr.write(overview() + "\n")
        return 2
    if words == ["--version"]:
        from twin import VERSION

        sys.stdout.write(f"racktwin {VERSION}\n")
        return 0
    if words[0] not in HELP and words[-1] not in HELP[:2]:
        return None
    asked = words[1:] if words[0] in HELP else words[:-1]
    if len(asked) > 1 or (asked and (asked[0] not in NOUNS or "" in NOUNS[asked[0]].verbs)):
        parse([*asked, "--help"])
    sys.stdout.write((help_of(asked[0]) if asked else overview()) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if (code := _help(words)) is not None:
        return code
    args = parse(words)
    # Before NumPy loads: products of vectors are small here, and more threads would only wait for each other
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from rich.console import Console

    from twin.run import stop_at_once

    # No emoji codes: text from outside may contain `:fire:`, and must be printed unchanged.
    out = Console(highlight=False, emoji=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = WIDE  # a pipe has no width
    err = Console(stderr=True, highlight=False, emoji=False)
    # SIGTERM of a service manager ends a run as Ctrl-C does: it closes files and prints "interrupted".
    stop_at_once()
    try:
        if getattr(args, "watch", None):
            return _watched(args, out, err)
        return _written(args, err) if getattr(args, "answer_file", None) else args.verb.run(args, out, err)
    except BrokenPipeError:
        # The reader of the pipe has gone; the interpreter must not fail when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        err.print("interrupted")
        return 130
    except Exception as error:
        return _reported(error, args.command, err)


def _reported(error: Exception, command: str, err: Console) -> int:
    """Print the error and return the exit code. An unexpected error is raised again."""
    from twin.report import print_error

    tag, code, texts = "error", 1, [str(error)]
    if isinstance(error, WrongCall):
        code, texts = 2, [f"{error}; see `racktwin {command} --help`"]
    elif isinstance(error, ConfigError):
        texts = list(error.problems)
    elif isinstance(error, Divergence):
        tag = "differs"
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        texts = [where + (error.strerror or str(error))]
    elif isinstance(error, RecursionError):
        texts = ["a file is nested too deeply; expected at most a hundred levels"]
    elif not isinstance(error, TwinError):
        if not _was_interrupted(error):
            raise error
        err.print("interrupted")
        return 130
    for text in texts:
        print_error(err, text, tag)
    return code


def _console(width: int, colour: bool) -> tuple[Console, io.StringIO]:
    from rich.console import Console

    text = io.StringIO()
    return Console(file=text, width=width, force_terminal=colour, highlight=False, emoji=False), text


def _written(args: Any, err: Console) -> int:
    """Write the output to a file atomically."""
    from twin.cli.arguments import refuse_existing
    from twin.run import atomic_write

    path = args.answer_file
    refuse_existing(path, args.force)
    if args.format is None and path.suffix in (".json", ".csv" if args.verb.rows else ".json"):
        args.format = path.suffix[1:]
    made, text = _console(WIDE, False)
    code = args.verb.run(args, made, err)
    atomic_write(path, text.getvalue(), sync=False)
    err.print(f"written: {path}", markup=False, soft_wrap=True)
    return int(code)


def _watched(args: Any, out: Console, err: Console) -> int:
    """Repeat the output until Ctrl-C. After the first output, retry while the daemon does not reply."""
    shown = False
    while True:
        made, text = _console(out.width, out.is_terminal)
        try:
            args.verb.run(args, made, err)
            shown = True
        except ConnectorError as error:
            if not shown:
                raise
            made.print(f"{error}; trying again", markup=False, soft_wrap=True)
        out.clear()
        out.file.write(text.getvalue())
        out.file.flush()
        time.sleep(args.watch)


def _was_interrupted(error: BaseException) -> bool:
    """Return True if Ctrl-C caused the error. Ctrl-C during an import may surface as another error.

    Python before 3.12 wraps an exception of `__set_name__` in a RuntimeError.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__
    return seen is not None


if __name__ == "__main__":
    sys.exit(main())
