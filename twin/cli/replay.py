"""The command `trace replay`: its arguments become a run, a bar, a summary and a report."""

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
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from connectors.files import open_bytes, read_mapping
from twin.catalogue import ConfigError, StorageError, clean, duration
from twin.cli.arguments import LEVELS, REPORT, authority_levels, present, refuse_existing
from twin.cli.grammar import Verb
from twin.cli.operate import unused_line
from twin.config import load_site, make_engine, make_policies, outside_plug_ins
from twin.contracts import Decision
from twin.engine import Engine
from twin.report import PAGE, Collector, print_line, render_terminal, write_report
from twin.run import (
    MessageSource,
    Outcome,
    Pace,
    TraceReader,
    closed_segments,
    form_of,
    journal_exists,
    open_recorded,
    open_source,
    recorded_authority,
    replay_arrivals,
    replay_frames,
    said_simulated,
    summary,
)
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Frame

MIN_TICK_S, MAX_TICK_S = 0.1, 3600.0
SHOWN_REASONS = 8  # of what was not used
LOOKED_AT = 20_000  # messages of a capture, to find whether they are about the site


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
                TimeRemainingColumn(),
                TextColumn("left"),
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
    seconds = args.tick_s
    if seconds is None:
        interval_s = read_mapping(args.map).interval_s if args.map else None
        seconds = min(max(interval_s or 1.0, MIN_TICK_S), MAX_TICK_S)
    if not MIN_TICK_S <= seconds <= MAX_TICK_S:
        raise ConfigError(f"--tick {duration(seconds)}: expected {MIN_TICK_S:g} s to {duration(MAX_TICK_S)}")
    return float(seconds)


def _site(args: argparse.Namespace) -> tuple[SiteSpec, Site]:
    if args.site is None:
        raise ConfigError(
            "--site: missing; `racktwin site discover` creates a site file from a capture's metadata"
        )
    return load_site(args.site)


def recorded_engine(site: Site, args: argparse.Namespace, recorded: dict[str, str] | None = None) -> Engine:
    known = [p.name for p in make_policies(site.file)[0]]
    return make_engine(site, {**(recorded or {}), **authority_levels(args.authority, known)})


def refuse_plug_ins(site: Site, where: Path, trusted: str = "") -> Site:
    """The site, where it loads no code from outside or has the hash `trusted`. Raises ConfigError.

    Each site that a run folder describes is asked: a folder from elsewhere may describe several.
    """
    outside = outside_plug_ins(site.file)
    if outside and site.spec_hash != trusted:
        raise ConfigError(
            f"{where}: its site loads code from outside racktwin ({', '.join(outside)}); --trust-plugins "
            "if you trust the origin of the trace, or --site with your own copy of the site"
        )
    return site


def run_replay(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Replay, print the summary (or one JSON object), write the report."""
    speed = _speed(args.speed)
    refuse_existing(args.out)
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
    conclude(args, collector, result, out)
    for damage in outcome.damage:
        print_line(err, f"damaged: {clean(damage, 1000)}; what lies before was used", "yellow")
    if args.format != "json":
        for text in outcome.left_out:
            print_line(out, f"as it was then: {clean(text, 1000)}")
    if outcome.ticks == 0:
        what = ", ".join(str(p) for p in args.trace)
        raise StorageError(f"{what}: has nothing to replay; expected at least one message, row or frame")
    if native and args.format != "json":
        compared, of = outcome.compared_lines, result.get("journal_lines", outcome.compared_lines)
        text = f"equal to its journal: {compared} lines compared" if compared == of else (
            f"equal to its journal: {compared} of {of} lines; the rest is not compared")  # fmt: skip
        print_line(out, f"not compared: {why}" if (why := result.get("not_compared")) else text)
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


def conclude(args: argparse.Namespace, collector: Collector, result: dict[str, Any], out: Console) -> None:
    """Print the summary of a run and write its report."""
    if args.report is not None:
        args.report.mkdir(parents=True, exist_ok=True)
        write_report(collector, result, args.report / PAGE)

    def show(result: dict[str, Any], out: Console) -> None:
        render_terminal(collector, result, out)
        unused = [row for row in (result["messages"] or {}).get("reasons", ()) if row["remedy"]]
        for row in unused[:SHOWN_REASONS]:
            out.print(unused_line(row), soft_wrap=True)
        if args.report is not None:
            print_line(out, f"report: {args.report / PAGE}")

    present(args, result, show, out)


def _paced(speed: float | None) -> tuple[Pace, ...]:
    return () if speed is None else (Pace(speed),)


def _refuse_foreign(paths: list[Path], site: Site, file: Path, mapping: Path | None) -> None:
    """Raise ConfigError where the beginning of a capture is about another site than the file's.

    A capture bears no digest of its site. The IT tree names it in every topic; of BMS points those count that
    the site's names do not fit. A few strangers beside many of ours are a site that grew.
    """
    source = open_source(paths, site, mapping)
    if not isinstance(source, MessageSource):
        return
    for _ in source:
        if source.messages.counts["total"] >= LOOKED_AT:
            break
    counts = source.messages.counts
    strange = [row for row in source.messages.ledger.reasons() if "site file" in row["why"]]
    many = min(sum(row["count"] for row in strange), counts["ignored"])  # the rest are parts of messages
    if many > counts["decoded"]:
        why = clean(strange[0]["why"], 200)
        raise ConfigError(
            f"{file}: is site {site.file.site} ({site.spec_hash}), but {many} of the first {counts['total']} "
            f"messages of {paths[0]} are about another one, such as: {why}; give the site file of this "
            "recording (`racktwin site discover` creates one), or --foreign to replay it anyway"
        )


def _arrivals(
    args: argparse.Namespace, speed: float | None, err: Console
) -> tuple[Engine, Outcome, dict[str, Any] | None, Collector]:
    spec, site = _site(args)
    if not args.foreign:
        _refuse_foreign(args.trace, site, args.site, args.map)
    engine = recorded_engine(site, args)
    source = open_source(args.trace, site, args.map)
    collector = Collector()
    total = 0
    if err.is_terminal:
        capture = isinstance(source, MessageSource)
        total = sum(_lines(p) for p in args.trace) if capture else source.messages.counts["total"]
    bar = Bar(err, total, lambda: float(source.messages.counts["total"]), "replaying")
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
        raise StorageError(f"{path}: its header contains no site: {error}") from error
    if spec.digest() != header.site_hash:
        raise StorageError(
            f"{path}: the digest in its header does not match the site in it; do not trust this trace"
        )
    site = build_site(spec, f"{path} (its own site)")
    if args.site is not None:
        given, _ = load_site(args.site)
        if given.digest() != header.site_hash:
            raise ConfigError(
                f"{args.site}: is site {given.digest()}, the trace was recorded on {header.site_hash}; "
                "leave --site out to use the site in the trace, or give the site file of that time"
            )
    journal: Path | None = (path if path.is_dir() else path.parent) / "journal.jsonl"
    if not path.is_dir() and header.first_tick > 0:
        # The decisions of a later segment rest on a memory that the segment does not hold.
        err.print(f"{path}: begins at tick {header.first_tick}; not compared with the journal", markup=False)
        journal = None
    if journal is not None and not journal_exists(journal):
        journal = None

    def made(site: Site) -> Engine:
        if not args.trust_plugins:
            refuse_plug_ins(site, path, "" if args.site is None else header.site_hash)
        return recorded_engine(site, args, authority)

    authority, since = {} if journal is None else recorded_authority(journal), None
    if path.is_dir() and header.first_tick > 0:
        # Its beginning was pruned: it is taken up at the oldest snapshot that the trace follows.
        engine, spec, since = open_recorded(path, lambda s: made(build_site(s)))
    else:
        engine = made(site)
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
    """Count lines for the progress bar only; the replay itself reports unreadable parts."""
    try:
        with open_bytes(path) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return 0


VERBS = {
    "trace replay": Verb(
        run_replay,
        f"""
        --site FILE  site file (YAML); a recorded run contains its own
        --trace FILE!+  capture, table, IPMI archive or recorded run
        --map FILE  mapping of the columns of a table to signals (YAML)
        --speed FACTOR=max  multiple of real time, or max
        --tick DURATION  length of a tick; default: 1 s, or the interval of a table
        --out FOLDER  record the run in this folder: trace, journal, snapshots
        {REPORT}
        {LEVELS}
        --no-compare  do not compare a recorded run with its journal
        --foreign  replay a capture even if most of it is about another site
        --trust-plugins  load plug-ins (module:Class) that the site in the trace names
        """,
        (
            "--site site.yaml --trace capture.jsonl --report report/",
            "--trace /var/lib/racktwin/run",
            "--site site.yaml --trace metrics.csv --map columns.yaml --tick 10s",
        ),
    )
}
