"""The command `trace quarantine`: input that a run left out, since the engine failed on it; and it again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from twin.catalogue import ConfigError, StorageError, clean, utc
from twin.cli.arguments import LEVELS, present
from twin.cli.grammar import Verb
from twin.cli.replay import recorded_engine
from twin.config import outside_plug_ins
from twin.report import grid, safe_text
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
    outside = _outside(path) if args.again else []
    if outside and not args.trust_plugins:
        raise ConfigError(
            f"{path}: its site loads code from outside racktwin ({', '.join(outside)}); --trust-plugins if "
            "you know where the run comes from"
        )
    authority = recorded_authority(path / OPEN) if journal_exists(path / OPEN) else {}
    rows: list[dict[str, Any]] = []
    for poison in Quarantine(path).poisons.values():
        row: dict[str, Any] = {
            "tick": poison.tick, "time": utc(poison.now_ns), "left_out": "all" if poison.whole else
            list(poison.names), "error": poison.error, "file": poison.file, "traceback": poison.traceback,
        }  # fmt: skip
        if args.again:
            row["again"] = fault = _repeated(path, poison, authority, args)
            failing += bool(fault)
        rows.append(row)
    present(args, {"left_out": rows}, lambda tree, out: _say_left_out(tree["left_out"], args.again, out), out)
    return 1 if failing else 0


def _outside(path: Path) -> list[str]:
    spec = msgspec.json.decode(TraceReader(path).first_header().spec, type=SiteSpec)
    return outside_plug_ins(build_site(spec).file)


def _repeated(path: Path, poison: Poison, authority: dict[str, str], args: argparse.Namespace) -> str:
    """The error of a tick with all of its input, in a copy; "" if it passes."""
    engine = engine_before(path, poison.tick, lambda s: recorded_engine(build_site(s), args, authority))
    reader = TraceReader(path / poison.file)
    frame = next(iter(reader), None)
    if frame is None:
        raise StorageError(f"{path / poison.file}: holds no frame: {'; '.join(reader.damage)}")
    return clean(tick_aside(engine, frame).strip().rpartition("\n")[2], 300)


def _say_left_out(rows: list[dict[str, Any]], again: bool, out: Console) -> None:
    cells = []
    for row in rows:
        parts = row["left_out"] if isinstance(row["left_out"], str) else ", ".join(row["left_out"])
        now = (safe_text(f"fails: {row['again']}" if row["again"] else "passes"),) if again else ()
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


VERBS = {
    "trace quarantine": Verb(
        run_quarantine,
        f"""
        FOLDER>path  of a run
        --again  repeat each tick with all of its input, in a copy of the engine as it was before
        {LEVELS}
        --trust-plugins  load plug-ins (module:Class) named by the trace's own site
        """,
        ("/var/lib/racktwin/run", "run/ --again"),
        rows="left_out",
    ),
}
