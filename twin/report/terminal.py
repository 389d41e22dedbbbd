"""Terminal tables: the one printer of all commands, and the texts of their cells.

Readable at a hundred columns. Text from outside is made safe: one line, no markup, no control characters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twin.catalogue import clean, utc

# Columns: of a terminal that holds less, of a name, and of a broken head
NARROW, NAME_WIDTH, HEAD_WIDTH = 96, 10, 9


def safe_text(value: Any, style: str = "", limit: int = 400) -> Text:
    """Foreign text for a cell: never markup."""
    return Text(clean("-" if value is None else value, limit), style)


def print_line(out: Console, text: str, style: str = "") -> None:
    """Print foreign text as one line, however long; no markup."""
    out.print(safe_text(text, style, 4000), soft_wrap=True)


def print_error(err: Console, text: str, tag: str = "error") -> None:
    """Print an error of a command as one line, as all commands do."""
    said = clean(text.replace("\n", " "), 4000)
    err.print(Text().append(tag, "red").append(f" {said}"), soft_wrap=True)


def grid(
    out: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    empty: str = "",
    right: Collection[int] = (),
    folds: Collection[int] | None = None,
) -> None:
    """Print a plain table, or a sentence where there is nothing; see `text_table`.

    A terminal that is too narrow breaks the heads of numbers into lines. What it is still too narrow for is
    left out by whole columns and named below: the last of the numbers first, then the last of the rest; no
    name is cut.
    """
    if not rows:
        if empty:
            out.print(Text(empty, "dim"))
        return
    gap = 1 if right and out.width < NARROW else 2
    whole = _unbroken(len(heads), right, folds)
    columns = [[row[i] for row in rows] for i in range(len(heads))]

    def widths_of(heads: Sequence[str]) -> list[int]:
        return [_least_width(h, cells, w) + gap for h, cells, w in zip(heads, columns, whole, strict=True)]

    widths = widths_of(heads)
    for least in (HEAD_WIDTH, 1):
        if sum(widths) - gap > out.width:
            heads = [_broken(head, columns[i], least) if i in right else head for i, head in enumerate(heads)]
            widths = widths_of(heads)
    kept = list(range(len(heads)))
    for i in sorted(kept[1:], key=lambda i: (i not in right, not whole[i], -i)):
        if sum(widths[k] for k in kept) - gap > out.width:
            kept.remove(i)

    def positions(columns: Collection[int]) -> list[int]:
        return [kept.index(i) for i in columns if i in kept]

    cells = [[row[i] for i in kept] for row in rows]
    shown = [heads[i] for i in kept]
    out.print(text_table(shown, cells, positions(right), None if folds is None else positions(folds), gap))
    if left := [" ".join(heads[i].split()) or f"column {i + 1}" for i in range(len(heads)) if i not in kept]:
        text = f"left out for {out.width} columns: {', '.join(left)}; --format json shows them"
        out.print(Text(text, "dim"))


def _least_width(head: str, cells: Sequence[Any], whole: bool) -> int:
    """The longest cell of a column, or its longest word if it may be broken."""
    texts = [str(head), *(str("-" if cell is None else cell) for cell in cells)]
    parts = [part for text in texts for part in (text.splitlines() if whole else text.split())]
    return max(map(cell_len, parts), default=0)


def _broken(head: str, cells: Sequence[Any], least: int) -> str:
    """A head in lines as wide as the cells, its longest word, or `least`."""
    width = max(_least_width("", cells, whole=True), _least_width(head, (), whole=False), least)
    return "\n".join(wrap(head, width))


def _unbroken(count: int, right: Collection[int], folds: Collection[int] | None) -> list[bool]:
    """True for columns that are never broken: numbers, and all that do not fold."""
    if folds is not None:
        return [i not in folds for i in range(count)]
    return [i in right or (i == 0 and count > 2) for i in range(count)]


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
    for i, (head, whole) in enumerate(zip(heads, _unbroken(len(heads), right, folds), strict=True)):
        width = NAME_WIDTH if folds and i == min(folds) else None
        made.add_column(
            head, overflow="fold", no_wrap=whole, justify="right" if i in right else "left", min_width=width
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else safe_text(cell) for cell in row))
    return made


def when(t_ns: float | None) -> str:
    """An instant, UTC, without the year; a dash for none."""
    return utc(int(t_ns), "%m-%d %H:%M:%S") if t_ns else "-"
