"""Run report: one HTML file for readers who have never seen the project, and a short table for the terminal.

The file is written beside its place and renamed, so that there is never half a page.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from twin.catalogue import ConfigError, StorageError, clean, duration, is_synthetic, utc
from twin.report.collector import Collector
from twin.report.figures import Summary, key_figures, power_series, whole
from twin.report.page import cards, fill, page
from twin.report.plots import Gallery
from twin.report.record import decisions, findings, footnotes, messages, quality, spark
from twin.report.sections import balances, cooling, demand, power
from twin.report.terminal import grid
from twin.run import atomic_write

PAGE = "report.html"
Part = tuple[str, str, Callable[[], Markup]]


def write_report(collector: Collector, summary: Summary, path: Path) -> None:
    """Write the page to `path`. Raises StorageError if it cannot be written."""
    write_whole(path, render(collector, summary))


def write_whole(path: Path, text: str) -> None:
    """Write a page in one piece, or leave nothing. Raises StorageError if it cannot be written."""
    try:
        atomic_write(path, text, mode=0o644, sync=False)
    except OSError as error:
        raise StorageError(f"{path}: the report cannot be written: {error}") from error


def open_folder(folder: Path) -> None:
    """Make a report's folder and try it, before hours are spent. Raises ConfigError if nothing can be
    written there.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--report {folder}: is a file; expected a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PAGE).is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{PAGE} in it is a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"--report {folder}: cannot be written: {why}; expected a folder") from error


def render(collector: Collector, summary: Summary) -> str:
    """The page as text."""
    collector.finish()
    gallery = Gallery(collector)
    parts: list[Part] = []
    if collector.ticks:
        parts = [
            ("power", "Power", lambda: power(collector, gallery)),
            ("cooling", "Cooling", lambda: cooling(collector, gallery)),
            ("demand", "Demand", lambda: demand(gallery)),
            ("balances", "Balances", lambda: balances(collector, gallery)),
            ("decisions", "Decisions", lambda: decisions(collector, gallery)),
            ("findings", "Findings", lambda: findings(collector, gallery)),
            ("quality", "Data quality", lambda: quality(collector, gallery)),
        ]
    parts.append(("messages", "Messages", lambda: messages(summary)))
    made = [(name, label, drawn) for name, label, make in parts if (drawn := make())]
    body = fill(
        "run.html",
        head=_head(collector, summary),
        cards=cards((f.label, f.value, f.meaning) for f in key_figures(collector, summary)),
        links=[(name, label) for name, label, _ in made] if len(made) > 1 else [],
        note=_no_plots(collector),
        sections=[drawn for _, _, drawn in made],
        footnotes=footnotes(collector, summary),
    )
    times = [int(t) for t in gallery.axis.times_ns]
    title = f"racktwin: {clean(summary.get('site', 'a site'))}"
    return page(title, body, [gallery.axis.label(t) for t in times], [gallery.axis.place(t) for t in times])


def _head(collector: Collector, summary: Summary) -> dict[str, Any]:
    """Title, sources, and sizes of the site."""
    sizes = collector.sizes()
    if halls := collector.hall_count():
        sizes |= {"rack": sizes["rack"] - halls, "hall": halls}
    names = {
        "rack": "racks",
        "node": "nodes",
        "gpu": "GPUs",
        "cdu": "cooling units",
        "feeder": "meters",
        "hall": "halls",
    }
    site = ", ".join(
        f"{sizes[t]:,} {w if sizes[t] != 1 else w.removesuffix('s')}"
        for t, w in names.items()
        if sizes.get(t, 0)
    )
    when = ""
    if collector.first_ns is not None:
        dates = (
            "Times count from the start, for the source has no real date"
            if is_synthetic(collector.first_ns)
            else f"{utc(collector.first_ns)} to {utc(collector.last_ns)} UTC"
        )
        ticks = f"{collector.ticks:,} tick{'s' * (collector.ticks != 1)}"
        when = f"{dates}: {duration(collector.span_s)} in {ticks}."
    return {
        "name": summary.get("site", "A site"),
        "simulated": bool(summary.get("simulated", False)),
        "sources": _sources(summary),
        "site": site,
        "when": when,
    }


def _sources(summary: Summary) -> list[str]:
    given = summary.get("source", [])
    files = (
        [given] if isinstance(given, str | Path) else list(given) if isinstance(given, list | tuple) else []
    )
    return [clean(Path(clean(f, 400)).name) for f in files]


def _no_plots(collector: Collector) -> str:
    """Reason for a page without plots."""
    if collector.ticks == 0:
        return (
            "The twin ran no tick: the source held no message with a time, so there is nothing to plot. The "
            "counts of messages below, if any, say what was in it."
        )
    if not [t for t in collector.time.tracks if t not in ("decisions", "quality")]:
        return (
            "The twin ran, but no reading that it plots ever arrived: see the messages below for what was "
            "left aside, and why."
        )
    return ""


def render_terminal(collector: Collector, summary: Summary, console: Console) -> None:
    """The key figures as a compact table, with one line of the site's power."""
    collector.finish()
    label = "simulated" if summary.get("simulated") else "recording"
    length = f"{duration(collector.span_s)} in {collector.ticks:,} ticks"
    title = f"{clean(summary.get('site', 'a site'), 40)} · {label} · {length}"
    rows: list[list[Any]] = [
        [Text(f.label, "bold"), f.value, Text(f.meaning, "dim")] for f in key_figures(collector, summary)
    ]
    series = power_series(collector)
    if series is not None:
        rows.append([Text("IT power", "bold"), "", Text(spark(series.mean))])
    console.print(title, style="italic", markup=False, soft_wrap=True)
    grid(console, ("", "", ""), rows, right=(1,), folds=(2,))
    for condition in [c for c in collector.episodes.conditions.values() if c.cleared_ns is None][:5]:
        console.print(
            Text(
                f"{clean(condition.severity, 10)}: {clean(condition.title)} "
                f"({', '.join(clean(e, 40) for e in condition.entities[:3])})"
            )
        )
    if whole(summary.get("ticks", collector.ticks)) == 0:
        console.print(Text("No tick was run: the source held no message with a time."))
