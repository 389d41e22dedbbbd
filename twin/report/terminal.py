"""Terminal tables: the one printer of all commands, and the texts of their cells.

Readable at a hundred columns. Text from outside is made safe: one line, no markup, no control characters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape as no_markup
from rich.table import Table
from rich.text import Text

from twin.catalogue import clean, utc

NARROW, NAME_WIDTH = 96, 10  # columns: of a terminal that holds less, and of a name


def escape(text: str) -> str:
    """Return text from outside as one line that is safe to print: no markup, no control characters."""
    return no_markup(clean(text.replace("\n", " "), 4000))


def safe_text(value: Any, style: str = "", limit: int = 400) -> Text:
    """Foreign text for a cell: never markup."""
    return Text(clean("-" if value is None else value, limit), style)


def grid(
    out: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    empty: str = "",
    right: Collection[int] = (),
    folds: Collection[int] | None = None,
) -> None:
    """Print a plain table, or a sentence where there is nothing; see `text_table`."""
    if rows:
        out.print(text_table(heads, rows, right, folds, gap=1 if right and out.width < NARROW else 2))
    elif empty:
        out.print(Text(empty, "dim"))


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right: Collection[int] = (),
    folds: Collection[int] | None = None,
    gap: int = 2,
) -> Table:
    """A plain table, `gap` columns between its own.

    `right`: columns of numbers; they are never broken. `folds`: the columns that may break instead, by
    default all but the first.
    """
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=bool(any(heads)))
    for i, head in enumerate(heads):
        if folds is None:
            no_wrap = i in right or (i == 0 and len(heads) > 2)
        else:
            no_wrap = i not in folds
        width = NAME_WIDTH if folds and i == min(folds) else None
        made.add_column(
            head, overflow="fold", no_wrap=no_wrap, justify="right" if i in right else "left", min_width=width
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else safe_text(cell) for cell in row))
    return made


def when(t_ns: float | None) -> str:
    """An instant, UTC, without the year; a dash for none."""
    return utc(int(t_ns), "%m-%d %H:%M:%S") if t_ns else "-"
