"""The application of `racktwin top`: racks, alarms and decisions of a site, live by the stream of events.

It reads and never acts. Colours are those of the terminal; NO_COLOR takes them away, signs stay. Where the
locale is not UTF-8, each sign becomes a character of ASCII.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Container
from textual.css.query import NoMatches
from textual.filter import LineFilter
from textual.widgets import DataTable, Static

from twin.api import ApiRefused
from twin.catalogue import ConnectorError, clean
from twin.cli.top import cells
from twin.cli.top.cells import Cell, ShortNames
from twin.cli.top.feed import LiveFeed
from twin.cli.top.mirror import SiteMirror
from twin.cli.top.screens import KEYS_TEXT, AlarmScreen, EntityScreen, FindScreen, TextScreen
from twin.cli.top.table import SteadyTable

if TYPE_CHECKING:
    from twin.api import Client

WATCH_S = 0.5  # between two looks at whether the daemon is silent
FIRST_S, LONGEST_S = 0.4, 8.0  # between two tries to connect
ASCII = {"▲": "!", "◆": "*", "●": "-", "✓": "+", "–": "-", "−": "-", "…": "~", "·": "-", "±": "~", "°": "'",
         "→": ">", "×": "x", "σ": "s"}  # fmt: skip


class AsciiFilter(LineFilter):
    """Draws what a terminal without UTF-8 cannot draw as a character of ASCII that is as wide."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The segments of a line, of ASCII alone."""
        return [Segment(ascii_text(text), style, control) for text, style, control in segments]


def ascii_text(text: str) -> str:
    """The same text in ASCII, column by column."""
    return text if text.isascii() else "".join(map(_ascii, text))


def _ascii(char: str) -> str:
    if char.isascii():
        return char
    plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
    return ASCII.get(char, plain[:1] or "?").ljust(cell_len(char))[: cell_len(char)]


class TopApp(App[None]):
    """The screen with its three panes. `why_ended`: why it ended by itself, else empty."""

    CSS = """
    Screen, Screen > *, SteadyTable, VerticalScroll, Input { background: ansi_default; color: ansi_default; }
    Screen { layout: vertical; }
    #head, #figures, #story, .title, .keys, .banner {
        height: 1; width: 100%; text-wrap: nowrap; text-overflow: ellipsis;
    }
    #story, .banner { display: none; }
    Screen.-story #story, Screen.-old .banner { display: block; }
    .banner { text-style: bold reverse; color: ansi_red; }
    Screen.-old SteadyTable, Screen.-old #figures, Screen.-old #body { text-style: dim; }
    .keys { text-style: dim; }
    .title { text-style: bold; }
    #panes { height: 1fr; }
    #racks-pane { height: 11fr; } #right { height: 10fr; } #right > Container { height: 1fr; }
    Screen.-wide #panes { layout: horizontal; }
    Screen.-wide #racks-pane { width: 84; height: 100%; } Screen.-wide #right { width: 1fr; height: 100%; }
    .pane:focus-within > .title { text-style: bold reverse; }
    SteadyTable { height: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }
    SteadyTable > .datatable--header { background: ansi_default; color: ansi_default; text-style: dim; }
    SteadyTable > .datatable--cursor, SteadyTable > .datatable--hover, SteadyTable > .datatable--odd-row,
    SteadyTable > .datatable--even-row { background: ansi_default; color: ansi_default; text-style: none; }
    SteadyTable:focus > .datatable--cursor { text-style: reverse; }
    SteadyTable:focus { background-tint: ansi_default 0%; }
    #inside { height: auto; max-height: 40%; }
    #text { height: 1fr; }
    #sought { border: none; height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "quit", "quit", priority=False),
        Binding("slash", "find", "find"),
        Binding("question_mark", "keys", "keys"),
    ]
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012 as Textual declares it
    KEYS = "Tab pane  Enter open  / find  ? keys  q quit"

    def __init__(self, client: Client, signs_only: bool = False) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.feed, self.mirror, self.names = LiveFeed(client), SiteMirror(), ShortNames()
        self.why_ended = ""
        self.interrupted = False
        self._link_fault = ""  # why there is no stream now
        self._signs_only = signs_only

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Those of Textual, and ASCII where the terminal has no other."""
        more = [AsciiFilter()] if self._signs_only else []
        return [*super().get_line_filters(), *more]

    def compose(self) -> ComposeResult:
        """The head, and racks beside alarms and decisions; below each other where it is narrow."""
        yield Static(Text("reading ..."), id="head")
        yield Static("", id="figures")
        yield Static("", id="story")
        yield Static("", classes="banner", id="banner")
        with Container(id="panes"):
            with Container(id="racks-pane", classes="pane"):
                yield Static(Text("Racks"), classes="title", id="racks-title")
                yield SteadyTable(cells.RACK_HEADS, id="racks")
            with Container(id="right"):
                with Container(classes="pane"):
                    yield Static(Text("Alarms"), classes="title", id="alarms-title")
                    yield SteadyTable(cells.ALARM_HEADS, id="alarms", show_header=False)
                with Container(classes="pane"):
                    yield Static(Text("Decisions"), classes="title", id="lines-title")
                    yield SteadyTable(cells.LINE_HEADS, id="lines", show_header=False)
        yield Static(Text(self.KEYS), classes="keys")

    async def on_mount(self) -> None:
        """Begin to follow the daemon."""
        if not self.is_headless:
            self._heed_signals()
        await self.feed.open()
        self.query_one("#racks").focus()
        self.run_worker(self._follow())
        self.set_interval(WATCH_S, self.watch_silence)

    def _heed_signals(self) -> None:
        """Leave as asked on SIGINT and SIGTERM, and draw anew after Ctrl-Z alone.

        Textual draws anew on each SIGCONT, also without a stop before it and after the screen is closed.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.signal(signal.SIGTSTP, lambda *_: self._stand_still())

    def _interrupt(self) -> None:
        self.interrupted = True
        self.exit()

    def _stand_still(self) -> None:
        """Give the terminal back, stop, and take it again once the shell lets us go on."""
        if self._driver is not None:
            self._driver.suspend_application_mode()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._driver.resume_application_mode()

    async def on_unmount(self) -> None:
        """End what runs."""
        await self.feed.close()

    # -- the stream

    async def _follow(self) -> None:
        """Read the stream, and come back to it whenever it ends."""
        tries = 0
        while True:
            try:
                await self._begin()
                async for event in self.feed.events():
                    tries, self._link_fault = 0, ""
                    first = not self.mirror.state
                    change = self.mirror.take(event.kind, event.tree, time.monotonic())
                    if change.stale:
                        await self._read_layout()
                    for topic in ("state", "racks", "alarms", "decisions") if first else ():
                        self.draw(topic)
                    self.draw(change.topic, change.rows)
            except ApiRefused as error:
                if error.status in (401, 403):
                    self.why_ended = str(error)
                    self.exit()
                    return
                self._link_fault = str(error)
            except ConnectorError as error:
                self._link_fault = str(error)
            tries += 1
            # Screens that lost the same daemon do not all come back at once.
            await asyncio.sleep(min(LONGEST_S, FIRST_S * 2**tries) * random.uniform(0.5, 1.0))

    async def _begin(self) -> None:
        if not self.mirror.layout:
            await self._read_layout()
        if not self.feed.last_id:
            found = await self.feed.get("/decisions", limit=60)
            self.mirror.lines = []
            self.mirror.add_lines(found["decisions"])
            self.draw("decisions")

    async def _read_layout(self) -> None:
        self.mirror.set_layout(await self.feed.get("/racks"))
        self._shorten()
        self.draw("racks")

    def _shorten(self) -> None:
        self.names = ShortNames(self.mirror.state.get("site", ""), self.mirror.layout.get("halls", []))

    # -- drawing

    def draw(self, topic: str, rows: list[int] | None = None) -> None:
        """Draw what changed."""
        if not self.mirror.state or not self.mirror.layout or not self._overview_stands():
            return
        if topic == "state":
            self._shorten()
            self._draw_head()
            self._draw_alarms()
        elif topic == "racks":
            self._draw_racks(rows)
        elif topic == "alarms":
            self._draw_alarms()
        elif topic == "decisions":
            self._draw_lines()

    def _overview_stands(self) -> bool:
        """False while the application ends: its panes go before its timers and its stream."""
        return bool(self.screen_stack) and len(self.screen_stack[0].query("#head, #figures, #panes")) >= 3

    def _put(self, selector: str, parts: Sequence[Cell]) -> None:
        text = Text("  ", no_wrap=True, overflow="ellipsis").join(Text(t, s) for t, s in parts)
        self._overview.query_one(selector, Static).update(text)

    @property
    def _overview(self) -> Container:
        return self.screen_stack[0].query_one("#panes", Container).parent  # type: ignore[return-value]

    def _draw_head(self) -> None:
        self._put("#head", cells.head_cells(self.mirror, self.mirror.age_s(time.monotonic())))
        self._put("#figures", cells.figure_cells(self.mirror, self.names))
        story = self.mirror.state.get("story")
        self.screen_stack[0].set_class(bool(story), "-story")
        if story:
            head = f"{story['chapter']} of {story['of']}, {clean(story['title'])}:"
            self._put("#story", [(head, "cyan"), (clean(story["text"], 300), "")])

    def _draw_racks(self, rows: list[int] | None) -> None:
        mirror, table = self.mirror, self._overview.query_one("#racks", SteadyTable)
        layout = mirror.layout["names"]
        self._put(
            "#racks-title",
            [
                (f"{clean(mirror.layout.get('noun', 'racks')).capitalize()} {len(layout):,}", ""),
                *cells.state_cells(mirror),
            ],
        )
        self._put("#figures", cells.figure_cells(mirror, self.names))
        at = {name: i for i, name in enumerate(layout)}
        table.set_rows(self._order(), lambda name: cells.rack_cells(mirror, self.names, at[name]))
        table.touch(layout if rows is None else (layout[row] for row in rows))

    def _order(self) -> list[str]:
        """Names of the racks, the gravest first, then as the site has them."""
        rank = {state: i for i, state in enumerate(cells.GRAVEST)}
        mirror = self.mirror
        grades = [rank[cells.state_of(mirror, i)] for i in range(len(mirror.layout["names"]))]
        return [mirror.layout["names"][i] for i in sorted(range(len(grades)), key=grades.__getitem__)]

    def _draw_alarms(self) -> None:
        mirror, now_ns = self.mirror, self.mirror.state["now_ns"]
        more = mirror.alarms_total - len(mirror.alarms)
        tail: list[Cell] = [(f"and {more:,} more", "dim")] if more > 0 else []
        self._put("#alarms-title", [("Alarms", ""), *cells.severity_cells(mirror.counts), *tail])
        table = self._overview.query_one("#alarms", SteadyTable)
        whole = table.size.height >= 3 * len(mirror.alarms)
        table.show({str(a["id"]): cells.alarm_cells(a, self.names, now_ns, whole) for a in mirror.alarms})

    def _draw_lines(self) -> None:
        mirror, now_ns = self.mirror, self.mirror.state["now_ns"]
        missed: list[Cell] = [("some were missed", "yellow")] if mirror.missed else []
        self._put("#lines-title", [("Decisions", ""), *missed])
        groups = cells.folded(mirror.lines)
        rows = {cells.line_key(g): cells.line_cells(g, self.names, now_ns) for g in groups}
        self._overview.query_one("#lines", SteadyTable).show(rows)

    def watch_silence(self) -> None:
        """Say within three seconds that the daemon is silent, and mark what is old."""
        now_s = time.monotonic()
        if not self._overview_stands():
            return
        why = self.mirror.silence(now_s, self.feed.received_s)
        if why and self._link_fault:
            why += f" ({self._link_fault})"
        elif not self.mirror.state and self._link_fault:
            why = self._link_fault
        for screen in self.screen_stack:
            screen.set_class(bool(why), "-old")
            try:
                screen.query_one("#banner", Static).update(Text(f"◆ {clean(why, 300)}" if why else ""))
            except NoMatches:
                continue
        if self.mirror.state and self.mirror.layout:
            self._put("#head", cells.head_cells(self.mirror, self.mirror.age_s(now_s)))

    # -- keys

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open a rack, an alarm or a decision."""
        key = str(event.row_key.value)
        if event.data_table.id == "racks":
            self.open_entity("rack", key)
        elif event.data_table.id == "alarms":
            self.push_screen(AlarmScreen(key))
        elif event.data_table.id == "lines":
            group = next((g for g in cells.folded(self.mirror.lines) if cells.line_key(g) == key), [])
            texts = [
                f"{cells.clock(d['now_ns'])} UTC, tick {d['tick']}: {clean(d['text'], 2000)}" for d in group
            ]
            if group:
                self.push_screen(
                    TextScreen(clean(group[0]["kind"]).replace("_", " "), Text("\n\n".join(texts)))
                )

    def open_entity(self, table: str, name: str) -> None:
        """Open an entity."""
        self.push_screen(EntityScreen(table, name))

    def action_find(self) -> None:
        """Open the finder."""
        self.push_screen(FindScreen())

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(TextScreen("Keys", Text(KEYS_TEXT)))
