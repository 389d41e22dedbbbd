"""Steady table: rows by key, of which only the cells that changed are written; the cursor stays on its row.

Cells are made and drawn of the rows that are seen, so a thousand racks cost about as much as twenty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable

from twin.cli.top.cells import Cell, ColumnHead

Source = Callable[[str], list[Cell]]  # key -> the cells of its row
LEAST_WIDTH = 20  # of a column that takes what the others leave


def rendered(cell: Cell) -> Text:
    """A cell as text, never as markup; what is too long ends in an ellipsis."""
    return Text(cell[0], cell[1], no_wrap=True, overflow="ellipsis")


def _aligned(head: ColumnHead, text: str) -> str:
    return " " * (head.width - cell_len(text)) + text if head.right else text


def _height(cells: Sequence[Cell]) -> int:
    return max((text.count("\n") for text, _ in cells), default=0) + 1


class SteadyTable(DataTable[Text]):
    """A table of rows by key, whose cells are asked of a source when their row is seen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self, heads: Sequence[ColumnHead], **more: Any) -> None:
        super().__init__(cursor_type="row", cursor_foreground_priority="renderable", cell_padding=0, **more)
        self.heads = heads
        self.keys: list[str] = []  # of the rows, in their order
        self._source: Source = dict[str, list[Cell]]().__getitem__
        self._heights: dict[str, int] = {}
        self._written: dict[str, list[Cell]] = {}
        self._stale: set[str] = set()

    def on_mount(self) -> None:
        """Make the columns."""
        self._lay_out()

    def on_resize(self, _: Resize) -> None:
        """Give the last column what is there now."""
        if any(not head.width for head in self.heads):
            self._rebuild(self.keys, self._heights, columns=True)
        self._catch_up()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Write the rows that come into view."""
        super().watch_scroll_y(old_value, new_value)
        self._catch_up()

    def _lay_out(self) -> None:
        fixed = sum(head.width + 1 for head in self.heads if head.width)
        for head in self.heads:
            # Beside a bar to scroll; the gap to the next column is part of this one: the cursor has no holes.
            wide = head.width or max(LEAST_WIDTH, self.size.width - fixed - 2)
            self.add_column(rendered((_aligned(head, head.name), "")), width=wide + 1, key=head.name)

    def show(self, rows: dict[str, list[Cell]]) -> None:
        """These rows, in this order."""
        self.set_rows(
            list(rows), rows.__getitem__, {k: n for k, cells in rows.items() if (n := _height(cells)) > 1}
        )
        self.touch(rows)

    def set_rows(self, keys: list[str], source: Source, heights: dict[str, int] | None = None) -> None:
        """Rows in this order, of which `source` gives the cells; one line high unless `heights` says more."""
        self._source, heights = source, heights or {}
        if keys == self.keys and heights == self._heights:
            return
        if heights == self._heights and len(keys) == len(self.keys) and set(keys) == set(self.keys):
            self._reorder(keys)
        else:
            self._rebuild(keys, heights)
        self._catch_up()

    def touch(self, keys: Iterable[str]) -> None:
        """The cells of these rows may have changed."""
        self._stale.update(keys)
        self._catch_up()

    def _catch_up(self) -> None:
        """Write what changed of the rows that are seen."""
        first = int(self.scroll_y)
        # A row is at least a line high, so no more than the lines of the table are seen.
        seen = self.keys if self._heights else self.keys[first : first + self.size.height + 1]
        for key in seen:
            if key in self._stale:
                self._stale.discard(key)
                cells, before = self._source(key), self._written[key]
                for head, was, now in zip(self.heads, before, cells, strict=True):
                    if was != now:
                        self.update_cell(key, head.name, rendered((_aligned(head, now[0]), now[1])))
                self._written[key] = cells

    def _reorder(self, keys: list[str]) -> None:
        chosen, at = self.chosen, self.cursor_row
        first = self.heads[0].name
        place = {id(self.get_cell(key, first)): i for i, key in enumerate(keys)}
        self.sort(first, key=lambda text: place[id(text)])
        self.keys = keys
        self._keep(chosen, at)

    def _rebuild(self, keys: list[str], heights: dict[str, int], columns: bool = False) -> None:
        chosen, offset, at = self.chosen, self.scroll_offset, self.cursor_row
        self.clear(columns)
        if columns:
            self._lay_out()
        empty = [("", "")] * len(self.heads)
        for key in keys:
            self.add_row(*map(rendered, empty), key=key, height=heights.get(key, 1))
        self.keys, self._heights = keys, heights
        self._written, self._stale = dict.fromkeys(keys, empty), set(keys)
        if keys:
            self._keep(chosen, at)
            self.call_after_refresh(self.scroll_to, y=offset.y, animate=False)

    def _keep(self, chosen: str, at: int) -> None:
        """Put the cursor on the row it was on; at the first one, on the gravest, whichever that is."""
        row = self.keys.index(chosen) if at and chosen in self.keys else min(at, len(self.keys) - 1)
        self.move_cursor(row=row, scroll=False)

    @property
    def chosen(self) -> str:
        """The key of the row under the cursor; empty where there is none."""
        return self.keys[self.cursor_row] if 0 <= self.cursor_row < len(self.keys) else ""
