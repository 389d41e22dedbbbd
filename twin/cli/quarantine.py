"""The command `trace quarantine`: input that a run left out, since the engine failed on it; and it again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import StorageError, clean, utc
from twin.cli.arguments import LEVELS, present
from twin.cli.grammar import Verb
from twin.cli.replay import recorded_engine, refuse_plug_ins
from twin.engine import Engine
from twin.report import grid, print_line, safe_text
from twin.run import (
    OPEN,
    Poison,
    Quarantine,
    TraceReader,
    engine_before,
    journal_exists,
    recorded_authority,
    tick_aside,
)
from twin.site import SiteSpec, build_site


def run_quarantine(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Print the input that a run left out; with --again repeat it; 1 if the engine still fails on any."""
    path, failing = args.path, 0
    if not path.is_dir():
        raise StorageError(f"{path}: no such folder; expected the folder of a run")
    files = ("trace-*.rt", "poison-*")
    if not journal_exists(path / OPEN) and not any(any(path.glob(pattern)) for pattern in files):
        raise StorageError(
            f"{path}: holds no journal, trace or quarantined input; expected the folder of a run, such as "
            "state/run"
        )
    authority = recorded_authority(path / OPEN) if journal_exists(path / OPEN) else {}
    rows: list[dict[str, Any]] = []
    for poison in Quarantine(path).poisons.values():
        row: dict[str, Any] = {
            "tick": poison.tick, "time": utc(poison.now_ns), "left_out": "all" if poison.whole else
            list(poison.names), "error": poison.error, "file": poison.file, "traceback": poison.traceback,
        }  # fmt: skip
        if args.again:
            row["again"], row["not_repeated"] = _repeated(path, poison, authority, args)
            failing += bool(row["again"])
        rows.append(row)
    present(args, {"left_out": rows}, lambda tree, out: _say_left_out(tree["left_out"], args.again, out), out)
    return 1 if failing else 0


def _repeated(
    path: Path, poison: Poison, authority: dict[str, str], args: argparse.Namespace
) -> tuple[str, str]:
    """(error of a tick with all of its input, in a copy; "" if it passes, why it cannot be repeated).

    Raises ConfigError for a site that loads code from outside.
    """

    def made(spec: SiteSpec) -> Engine:
        site = build_site(spec)
        if not args.trust_plugins:
            refuse_plug_ins(site, path)
        return recorded_engine(site, args, authority)

    try:
        engine, reader = engine_before(path, poison.tick, made), TraceReader(path / poison.file)
        frame = next(iter(reader), None)
    except (StorageError, OSError) as error:
        return "", clean(str(error), 1000)
    if frame is None:
        return "", clean(f"{poison.file}: holds no frame: {'; '.join(reader.damage)}", 300)
    return clean(tick_aside(engine, frame).strip().rpartition("\n")[2], 300), ""


def _now(row: dict[str, Any]) -> str:
    """The result of a repetition, in words."""
    if row["not_repeated"]:
        return "unknown"
    return f"fails: {row['again']}" if row["again"] else "passes"


def _say_left_out(rows: list[dict[str, Any]], again: bool, out: Console) -> None:
    cells = []
    for row in rows:
        parts = row["left_out"] if isinstance(row["left_out"], str) else ", ".join(row["left_out"])
        now = (safe_text(_now(row)),) if again else ()
        cells.append(
            [
                row["time"],
                row["tick"],
                *now,
                safe_text(parts),
                safe_text(row["error"], limit=300),
                row["file"],
            ]
        )
    heads = ("time (UTC)", "tick", *(("now",) if again else ()), "left out", "error then", "file")
    grid(out, heads, cells, "nothing was left out")
    for row in rows if again else ():
        if row["not_repeated"]:
            print_line(out, f"tick {row['tick']}: cannot be repeated: {row['not_repeated']}", "yellow")


VERBS = {
    "trace quarantine": Verb(
        run_quarantine,
        f"""
        FOLDER>path  folder of a run
        --again  repeat each failed tick with all of its inputs, in a copy of the engine at that tick
        {LEVELS}
        --trust-plugins  load plug-ins (module:Class) that the site in the trace names
        """,
        ("/var/lib/racktwin/run", "run/ --again"),
        rows="left_out",
    ),
}
