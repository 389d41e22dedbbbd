"""Screens above the overview: an alarm explained, an entity with what is inside it, the finder, the keys."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, Protocol, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from twin.api import path_of
from twin.catalogue import ConnectorError, clean
from twin.cli.top.cells import Cell, ColumnHead, ShortNames
from twin.cli.top.details import CHILD_HEADS, alarm_text, child_rows, entity_text
from twin.cli.top.feed import LiveFeed
from twin.cli.top.mirror import SiteMirror
from twin.cli.top.table import SteadyTable

ASK_S = 2.0  # between two questions about what is shown
TABLE_WORDS = {"gpu": "GPU", "cdu": "CDU"}
HOLDING = ("rack", "node", "hall")  # entities whose parts are commanded
MOST_LEASES = 1000  # of one answer
JUDGED = ("gpu", "node", "switch", "link")  # entities with a verdict of their own
KEYS_TEXT = """\
Tab, Shift+Tab   next, previous pane
Up, Down, PgUp, PgDn, Home, End   move
Enter   open what the cursor is on: a rack, a node, a GPU, an alarm, a decision
Esc   back
/   find a rack, node, GPU, CDU, feeder, loop or job by a part of its name
?   these keys
q   quit

▲ critical  ◆ warning  ● notice  ✓ well  ? unknown  # under maintenance

power, guard, used   power of a rack, its guard, and the share of it
margin   of its temperatures, the least distance to a guard
GPUs, capped, out   in service, held below their usual power, out of service
age   of the oldest reading that is late; what was never read is unknown

It only reads. To act: racktwin alarm, control, policy, device, or the page.
The alarm that the cursor is on shows its id: racktwin alarm ack ID.
"""


class LiveSite(Protocol):
    """The application, as its screens see it."""

    feed: LiveFeed
    mirror: SiteMirror
    names: ShortNames

    def open_entity(self, table: str, name: str) -> None:
        """Open an entity."""


class DetailScreen(Screen[None]):
    """A screen with a title, perhaps a table of what is inside, and text; Esc leads back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "back", "Back"),
        Binding("tab", "app.focus_next", show=False),
    ]
    KEYS = "Esc back  Tab pane  Enter open  / find  ? keys  q quit"

    def compose(self) -> ComposeResult:
        """A title, the table, the text."""
        yield Static("", classes="title", id="title")
        yield Static("", classes="banner", id="banner")
        yield SteadyTable(CHILD_HEADS, id="inside", show_header=False)
        with VerticalScroll(id="text"):
            yield Static("reading ...", id="body")
        yield Static(Text(self.KEYS), classes="keys")

    def on_mount(self) -> None:
        """Ask, and ask again."""
        self.query_one("#inside").display = False
        self.query_one("#text").focus()
        self.set_interval(ASK_S, self.ask)
        self.ask()

    @property
    def top(self) -> LiveSite:
        """The application."""
        return cast("LiveSite", self.app)

    @property
    def names(self) -> ShortNames:
        """The names of the site, shortened."""
        return self.top.names

    def ask(self) -> None:
        """Ask the daemon; what is shown stays while no answer comes."""
        self.run_worker(self._ask(), exclusive=True)

    async def _ask(self) -> None:
        try:
            await self.read()
        except ConnectorError as error:
            self.query_one("#title", Static).update(Text(clean(str(error), 300), "bold red"))

    async def read(self) -> None:
        """Read and show. Raises ConnectorError."""

    def show(self, title: Text, body: Any, inside: dict[str, list[Cell]]) -> None:
        """Show what was read."""
        self.query_one("#title", Static).update(title)
        self.query_one("#body", Static).update(body)
        table = self.query_one("#inside", SteadyTable)
        if inside and not table.display:
            table.display = True
            table.focus()
        table.show(inside)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open what is inside."""
        table, _, name = str(event.row_key.value).partition(" ")
        self.top.open_entity(table, name)

    def action_back(self) -> None:
        """Leave this screen."""
        self.app.pop_screen()


class EntityScreen(DetailScreen):
    """An entity: measured beside expected, verdict, commands, decisions, and what is inside it."""

    def __init__(self, table: str, name: str) -> None:
        super().__init__()
        self.table, self.entity = table, name

    async def read(self) -> None:
        """Read it, its health, and its children with theirs."""
        feed = self.top.feed
        tree = await feed.get(path_of("entities", self.table, self.entity))
        health: dict[str, Any] = {}
        if self.table in JUDGED:
            with contextlib.suppress(ConnectorError):
                health = await feed.get(path_of("health", self.entity))
        held: list[dict[str, Any]] = []
        if self.table in HOLDING:
            with contextlib.suppress(ConnectorError):
                held = (await feed.get("/leases", prefix=self.entity, limit=MOST_LEASES))["leases"]
        inside: dict[str, list[Cell]] = {}
        for table, found in tree["children"].items():
            if found["names"]:
                inside |= await self._children(table, found["names"])
        shown = (
            clean(tree["job"]["job"])
            if self.table == "job" and tree["job"]
            else self.names.short(tree["name"])
        )
        title = Text(f"{TABLE_WORDS.get(self.table, self.table)} {shown}", "bold")
        if tree.get("serial"):
            title.append(f"  serial {clean(tree['serial'])}", "dim")
        self.show(title, entity_text(tree, health, held, self.names), inside)

    async def _children(self, table: str, names: list[str]) -> dict[str, list[Cell]]:
        feed, state, health = self.top.feed, {}, {}
        with contextlib.suppress(ConnectorError):
            state = await feed.get(path_of("state", table), prefix=self.entity, limit=len(names))
        if table in JUDGED:
            with contextlib.suppress(ConnectorError):
                health = await feed.get("/health", part=table, prefix=self.entity, limit=len(names))
        return child_rows(table, names, state, health)


class AlarmScreen(DetailScreen):
    """An alarm explained, with the entities that it concerns."""

    def __init__(self, alarm_id: str) -> None:
        super().__init__()
        self.alarm_id = alarm_id
        self._tables: dict[str, str] = {}  # of the entities

    async def read(self) -> None:
        """Read what follows from it; the alarm itself came by the stream."""
        alarm = next((a for a in self.top.mirror.alarms if a.get("id") == self.alarm_id), None)
        if alarm is None:
            self.query_one("#title", Static).update(Text("This alarm is over.", "bold green"))
            return
        children: dict[str, Any] = {}
        with contextlib.suppress(ConnectorError):
            children = await self.top.feed.get(path_of("alarms", self.alarm_id, "children"), limit=50)
        inside: dict[str, list[Cell]] = {}
        for name in alarm.get("entities", [])[:8]:
            table = await self._table_of(name)
            if table:
                inside[f"{table} {name}"] = [
                    ("", ""),
                    (table, "dim"),
                    *[("", "")] * 2,
                    (self.names.short(name), ""),
                ]
        now_ns = self.top.mirror.state.get("now_ns", 0)
        self.show(Text("Alarm", "bold"), alarm_text(alarm, children, self.names, now_ns), inside)

    async def _table_of(self, name: str) -> str:
        if name not in self._tables:
            found = await self.top.feed.get("/find", text=name.partition("#")[0][-120:], limit=1)
            rows = [r for r in found["found"] if r["name"] == name.partition("#")[0]]
            self._tables[name] = rows[0]["table"] if rows else ""
        return self._tables[name]


class TextScreen(Screen[None]):
    """A text to read, such as the keys or a whole decision; any of the keys for going back leads back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,backspace,left,question_mark", "back", "Back")
    ]

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self._heading, self._text = title, text

    def compose(self) -> ComposeResult:
        """A title and the text."""
        yield Static(Text(self._heading, "bold"), classes="title")
        yield Static("", classes="banner", id="banner")
        with VerticalScroll():
            yield Static(self._text)
        yield Static(Text("Esc back  q quit"), classes="keys")

    def action_back(self) -> None:
        """Leave this screen."""
        self.app.pop_screen()


class FindScreen(Screen[None]):
    """The finder: entities and jobs by a part of their name."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("down", "app.focus_next", show=False),
    ]

    def compose(self) -> ComposeResult:
        """A line to type into, and what was found."""
        yield Static(Text("Find: a part of a name, such as r07/node3", "bold"), classes="title")
        yield Static("", classes="banner", id="banner")
        yield Input(id="sought", compact=True, select_on_focus=False, max_length=120)
        yield SteadyTable((ColumnHead("kind", 8), ColumnHead("name")), id="found", show_header=False)
        yield Static(Text("Enter open  Down to the list  Esc back"), classes="keys")

    def on_mount(self) -> None:
        """Type at once."""
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Look for what is typed."""
        self.run_worker(self._find(event.value.strip()), exclusive=True)

    async def _find(self, text: str) -> None:
        found: list[dict[str, Any]] = []
        if text:
            with contextlib.suppress(ConnectorError):
                found = (await cast("LiveSite", self.app).feed.get("/find", text=text, limit=50))["found"]
        rows = {
            f"{r['table']} {r['name']}": [(clean(r["table"]), "dim"), (clean(r["shown"], 120), "")]
            for r in found
        }
        self.query_one(SteadyTable).show(rows)

    def on_input_submitted(self) -> None:
        """Open the first that was found."""
        self._open(self.query_one(SteadyTable).chosen)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open what was found."""
        self._open(str(event.row_key.value))

    def _open(self, key: str) -> None:
        if key:
            self.app.pop_screen()
            cast("LiveSite", self.app).open_entity(*key.split(" ", 1))

    def action_back(self) -> None:
        """Leave this screen."""
        self.app.pop_screen()
