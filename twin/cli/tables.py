"""Terminal tables: the one printer of all commands, and the texts of numbers, spans and instants in them.

Readable at a hundred columns. Text from outside is made safe: one line, no markup, no control characters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape as no_markup
from rich.table import Table
from rich.text import Text

from twin.catalogue import clean

NS = 1_000_000_000
NARROW, NAME_WIDTH = 96, 10  # columns: of a terminal that holds less, and of a name


def escape(text: str) -> str:
    """Return text from outside as one line that is safe to print: no markup, no control characters."""
    return no_markup(clean(text.replace("\n", " "), 4000))


def safe(value: Any, style: str = "", limit: int = 400) -> Text:
    """Foreign text for a cell: never markup."""
    return Text(clean("-" if value is None else value, limit), style)


def grid(
    out: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    empty: str,
    right: Collection[int] = (),
    folds: Collection[int] | None = None,
) -> None:
    """A plain table, or a sentence where there is nothing.

    `right`: columns of numbers; they are never broken. `folds`: the columns that may break instead, by
    default all but the first.
    """
    if not rows:
        if empty:
            out.print(Text(empty, "dim"))
        return
    gap = 1 if right and out.width < NARROW else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=bool(any(heads)))
    for i, head in enumerate(heads):
        if folds is None:
            no_wrap = i in right or (i == 0 and len(heads) > 2)
        else:
            no_wrap = i not in folds
        width = NAME_WIDTH if folds and i == min(folds) else None
        table.add_column(
            head, overflow="fold", no_wrap=no_wrap, justify="right" if i in right else "left", min_width=width
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else safe(cell) for cell in row))
    out.print(table)


def when(now_ns: Any) -> str:
    """An instant, UTC."""
    try:
        return datetime.fromtimestamp(now_ns / NS, UTC).strftime("%m-%d %H:%M:%S") if now_ns else "-"
    except (ValueError, OverflowError, OSError, TypeError):
        return "?"


def span(seconds: Any) -> str:
    """A duration, roughly."""
    if not isinstance(seconds, int | float):
        return "-"
    for size, unit in ((172_800, "d"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / {'d': 86_400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def number(value: Any) -> str:
    """A number; a dash for none."""
    return f"{value:g}" if isinstance(value, int | float) else "-"
