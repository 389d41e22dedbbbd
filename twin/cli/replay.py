"""The command `replay`: its arguments become a run, a bar, a summary and a report."""

from __future__ import annotations

import argparse
import lzma
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from connectors.files import open_bytes, read_mapping
from twin.catalogue import ConfigError, StorageError, clean
from twin.cli.arguments import authority_levels, write_json
from twin.config import load_site, make_engine, outside_plug_ins
from twin.contracts import Decision, ManifestRecord
from twin.engine import Engine
from twin.report import Collector, render_terminal, write_report
from twin.run import (
    Entry,
    MessageSource,
    Outcome,
    Pace,
    TraceReader,
    closed_segments,
    form_of,
    journal_exists,
    journal_lines,
    open_recorded,
    open_source,
    replay_arrivals,
    replay_frames,
    said_simulated,
    summary,
)
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Authority, Frame

MIN_TICK_S, MAX_TICK_S = 0.1, 3600.0


class Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, total: float, position: Callable[[], float], what: str) -> None:
        self._position, self._last = position, 0.0
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%  tick {task.fields[tick]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task(what, total=total, tick=0)
            self._progress.start()

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Move on, at most ten times a second."""
        if self._progress is not None and time.monotonic() - self._last > 0.1:
            self._last = time.monotonic()
            self._progress.update(self._task, completed=self._position(), tick=frame.tick)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin replay`."""
    replay = commands.add_parser("replay", help="replay recorded telemetry through the twin")
    replay.add_argument("--site", type=Path, help="site file; a recorded run contains its own")
    replay.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="capture, table, IPMI archive or recorded run"
    )
    replay.add_argument("--map", type=Path, help="mapping of a table's columns to signals (YAML)")
    replay.add_argument("--speed", default="max", help="multiple of real time, or max (default)")
    replay.add_argument(
        "--tick", type=float, default=None, help="seconds per tick (default 1, or a table's interval)"
    )
    replay.add_argument("--out", type=Path, help="record the run in this folder: trace, journal, snapshots")
    replay.add_argument("--report", type=Path, help="write report.html into this folder")
    replay.add_argument(
        "--authority",
        action="append",
        default=[],
        metavar="POLICY=LEVEL",
        help="off, advise, approve or act; overrides the site file",
    )
    replay.add_argument(
        "--no-compare", action="store_true", help="do not compare a recorded run with its journal"
    )
    replay.add_argument(
        "--trust-plugins",
        action="store_true",
        help="load plug-ins (module:Class) named by the trace's own site",
    )
    replay.add_argument("--json", action="store_true", help="one JSON object on stdout")
    replay.set_defaults(handler=run_replay)


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise ConfigError(f"--speed {text}: expected a number > 0, or max")
    return speed


def _tick_s(args: argparse.Namespace) -> float:
    seconds = args.tick
    if seconds is None:
        interval_s = read_mapping(args.map).interval_s if args.map else None
        seconds = min(max(interval_s or 1.0, MIN_TICK_S), MAX_TICK_S)
    if not MIN_TICK_S <= seconds <= MAX_TICK_S:
        raise ConfigError(f"--tick {seconds}: expected {MIN_TICK_S} to {MAX_TICK_S} seconds")
    return float(seconds)


def _site(args: argparse.Namespace) -> tuple[SiteSpec, Site]:
    if args.site is None:
        raise ConfigError("--site: missing; `racktwin discover` makes a site file from a capture's metadata")
    return load_site(args.site)


def _recorded_authority(journal: Path | None) -> dict[str, str]:
    """Under what authority a run was made: it is made again under the same, whatever the site file said."""
    first = next(journal_lines(journal), None) if journal is not None else None
    try:
        record = msgspec.json.decode(first, type=Entry).record if first is not None else None
        given = record.authority if isinstance(record, ManifestRecord) else None
        return {**msgspec.convert(given or {}, dict[str, Authority])}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}  # the comparison will say what is wrong with that line


def _engine(site: Site, args: argparse.Namespace, recorded: dict[str, str] | None = None) -> Engine:
    wanted = {**(recorded or {}), **authority_levels(args.authority)}
    engine = make_engine(site, wanted)
    unknown = sorted(set(wanted) - {p.name for p in engine.policies})
    if unknown:
        raise ConfigError(
            f"--authority {unknown[0]}: expected one of {', '.join(p.name for p in engine.policies)}"
        )
    return engine


def run_replay(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Replay, print the summary (or one JSON object), write the report."""
    speed = _speed(args.speed)
    if args.out is not None and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(
            f"--out {args.out}: is no empty folder; expected a new one, so that no run is mixed with another"
        )
    if args.report is not None and args.report.exists() and not args.report.is_dir():
        raise ConfigError(f"--report {args.report}: is a file; expected a folder")
    native = {form_of(p, args.map) == "native" for p in args.trace} == {True}
    begun = time.monotonic()
    engine, outcome, messages, collector = (_native if native else _arrivals)(args, speed, err)
    result = summary(engine, outcome, messages, time.monotonic() - begun)
    result |= _compared(args, native, outcome)
    result |= {
        "source": [str(p) for p in args.trace],
        "simulated": any("simulated" in str(p) or (native and said_simulated(p)) for p in args.trace),
    }
    conclude(collector, result, args.report, args.json, out)
    for damage in outcome.damage:
        err.print(
            f"damaged: {clean(damage, 1000)}; what lies before was used",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    strangers = sum(
        entry["count"]
        for entry in (messages or {}).get("ignored_kinds", {}).values()
        if "site" in str(entry.get("why", ""))
    )
    if messages and strangers > messages["total"] / 2:
        err.print(
            f"warning: {strangers} of {messages['total']} messages are about things that the site file "
            "does not have; is --site the right one?",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    if outcome.ticks == 0:
        what = ", ".join(str(p) for p in args.trace)
        raise StorageError(f"{what}: holds nothing to replay; expected at least one message, row or frame")
    if native and not args.json:
        compared, of = outcome.compared_lines, result.get("journal_lines", outcome.compared_lines)
        text = f"equal to its journal: {compared} lines compared" if compared == of else (
            f"equal to its journal: {compared} of {of} lines; the rest is not compared")  # fmt: skip
        out.print(f"not compared: {why}" if (why := result.get("not_compared")) else text,
                  markup=False, soft_wrap=True)  # fmt: skip
    return 1 if outcome.damage else 0


def _compared(args: argparse.Namespace, native: bool, outcome: Outcome) -> dict[str, Any]:
    """Return how much of a recorded run's journal was compared, or why nothing was."""
    if not native:
        return {}
    path: Path = args.trace[0]
    journal = (path if path.is_dir() else path.parent) / "journal.jsonl"
    if args.no_compare or args.out is not None:
        return {"not_compared": "as asked" if args.no_compare else "--out makes a run of its own"}
    if not journal_exists(journal):
        return {"not_compared": f"no journal here ({journal}), so nothing shows that this run is as it was"}
    if not outcome.damage:
        return {}
    return {"journal_lines": sum(_lines(p) for p in (*closed_segments(journal.parent), journal))}


def conclude(
    collector: Collector, result: dict[str, Any], report: Path | None, as_json: bool, out: Console
) -> None:
    """Print the summary of a run and write its report."""
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        write_report(collector, result, report / "report.html")
    if as_json:
        write_json(result, out)
        return
    render_terminal(collector, result, out)
    if report is not None:
        out.print(f"report: {report / 'report.html'}", markup=False, soft_wrap=True)


def _paced(speed: float | None) -> tuple[Pace, ...]:
    return () if speed is None else (Pace(speed),)


def _arrivals(
    args: argparse.Namespace, speed: float | None, err: Console
) -> tuple[Engine, Outcome, dict[str, Any] | None, Collector]:
    spec, site = _site(args)
    engine = _engine(site, args)
    source = open_source(args.trace, site, args.map)
    collector = Collector()
    total = 0
    if err.is_terminal:
        capture = isinstance(source, MessageSource)
        total = sum(_lines(p) for p in args.trace) if capture else source.messages.total
    bar = Bar(err, total, lambda: float(source.messages.total), "replaying")
    try:
        outcome = replay_arrivals(
            engine, spec, source, _tick_s(args), args.out, (*_paced(speed), collector, bar)
        )
    finally:
        bar.close()
    return engine, outcome, source.messages.summary(), collector


def _native(
    args: argparse.Namespace, speed: float | None, err: Console
) -> tuple[Engine, Outcome, dict[str, Any] | None, Collector]:
    if len(args.trace) != 1:
        raise ConfigError("expected one recorded run at a time")
    path: Path = args.trace[0]
    reader = TraceReader(path)
    header = reader.first_header()
    try:
        spec = msgspec.json.decode(header.spec, type=SiteSpec)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path}: its header holds no site: {error}") from error
    if spec.digest() != header.site_hash:
        raise StorageError(f"{path}: its header holds another site than it names; do not trust this trace")
    site = build_site(spec, f"{path} (its own site)")
    if args.site is not None:
        given, _ = load_site(args.site)
        if given.digest() != header.site_hash:
            raise ConfigError(
                f"{args.site}: is site {given.digest()}, the trace was recorded on {header.site_hash}; "
                "leave --site out to use the trace's own"
            )
    journal: Path | None = (path if path.is_dir() else path.parent) / "journal.jsonl"
    if not path.is_dir() and header.first_tick > 0:
        # What a later segment shows was decided with a memory that it does not hold.
        err.print(f"{path}: begins at tick {header.first_tick}; not compared with the journal", markup=False)
        journal = None
    if journal is not None and not journal_exists(journal):
        journal = None
    outside = outside_plug_ins(site.file)
    if outside and args.site is None and not args.trust_plugins:
        raise ConfigError(
            f"{path}: its site loads code from outside racktwin ({', '.join(outside)}); give your own "
            "copy of the site with --site, or --trust-plugins if you know where the trace comes from"
        )
    authority, since = _recorded_authority(journal), None
    if path.is_dir() and header.first_tick > 0:
        # Its beginning was pruned: it is taken up at the oldest snapshot that the trace follows.
        engine, spec, since = open_recorded(path, lambda s: _engine(build_site(s), args, authority))
    else:
        engine = _engine(site, args, authority)
    compare = journal if not args.no_compare and args.out is None else None
    collector = Collector()
    bar = Bar(
        err, sum(p.stat().st_size for p in reader.segments()), lambda: float(reader.bytes_read), "replaying"
    )
    try:
        outcome = replay_frames(
            engine,
            reader,
            compare,
            (*_paced(speed), collector, bar),
            (spec, args.out) if args.out else None,
            since,
        )
    finally:
        bar.close()
    return engine, outcome, None, collector


def _lines(path: Path) -> int:
    """For the bar only: what cannot be read is told when it is reached."""
    try:
        with open_bytes(path) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return 0
