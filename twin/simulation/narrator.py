"""Narrator: shows a story's chapters on terminal and page, and looks for their signs in the daemon's answers.

It knows what any operator's program can know: it asks the interface, and sees nothing of the plant.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from twin.catalogue import NS, ConnectorError, clean, duration, quantity
from twin.simulation.story import Chapter, Sign, Story

FORECAST, HORIZON_S, ROW_S = "site.power_w", 300.0, 60.0
FORECASTS = f"/forecasts?signal={FORECAST}"
MAX_TEXT = 200
UNITS = {"_w": "W", "_c": "degC"}


class Asks(Protocol):
    """An interface for queries: `twin.api.Client`."""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make one request."""
        ...


class StoryStep(NamedTuple):
    """A step of a story: chapter (0: none), seconds since its cause, and the event."""

    chapter: int
    after_s: float | None
    text: str


class Band(NamedTuple):
    """A forecast as it was given: for the mean over the row that ends at `due_ns`."""

    due_ns: int
    low_w: float
    mean_w: float
    high_w: float


@dataclass
class OpenChapter:
    """An open chapter. `seen` has the row of each sign that appeared."""

    number: int
    chapter: Chapter
    begun_ns: int
    before: dict[int, dict[str, Any]] = field(default_factory=dict)
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_over: bool = False  # that it is over


class Narrator:
    """Shows one story, which began at `begun_ns`. `missing`: signs that did not appear in time."""

    def __init__(self, story: Story, client: Asks, begun_ns: int) -> None:
        self.story, self.client, self.begun_ns = story, client, begun_ns
        self.opened: list[OpenChapter] = []
        self.missing: list[str] = []
        self.band: Band | None = None
        self.summary: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}  # of this look
        self._power: deque[tuple[int, float]] = deque(maxlen=600)

    @property
    def is_over(self) -> bool:
        """True if every chapter was completed."""
        return len(self.opened) == len(self.story.chapters) and all(t.is_over for t in self.opened)

    def poll(self) -> Iterator[StoryStep]:
        """Poll the daemon once; returns the new steps."""
        self.answers = {}
        self.summary = summary = self._ask("/summary")
        now_ns = summary["now_ns"]
        self._power.append((now_ns, sum(rack["power_w"] or 0.0 for rack in summary["racks"])))
        if self.band is None:
            yield from self._foresee(now_ns)
        for number, chapter in enumerate(self.story.chapters, 1):
            due_ns = self.begun_ns + round(chapter.at_s * NS)
            if number > len(self.opened) and now_ns >= due_ns - 3 * NS:
                yield self._begin(number, chapter, due_ns)
        for opened in self.opened:
            if not opened.is_over:
                yield from self._watch(opened, now_ns)

    def _begin(self, number: int, chapter: Chapter, due_ns: int) -> StoryStep:
        opened = OpenChapter(number, chapter, due_ns)
        for k, sign in enumerate(chapter.signs):
            if sign.falls:
                with contextlib.suppress(ConnectorError):
                    opened.before[k] = next(sign.rows_in(self._ask(sign.path)), {})
        self.opened.append(opened)
        self._show(opened, chapter.cause)
        return StoryStep(number, None, f"{chapter.title}: {chapter.cause}")

    def _watch(self, opened: OpenChapter, now_ns: int) -> Iterator[StoryStep]:
        chapter, after_s = opened.chapter, (now_ns - opened.begun_ns) / NS
        if after_s < 0:
            return
        if chapter.keeps and self.band is not None:
            yield from self._compare(opened, now_ns)
            return
        for k, sign in enumerate(chapter.signs):
            if k in opened.seen:
                continue
            row = self._find(sign, opened, k)
            if row is None:
                continue
            opened.seen[k] = row
            text = words_of(sign.says, row)
            self._show(opened, text)
            yield StoryStep(opened.number, after_s, text)
        if len(opened.seen) == len(chapter.signs):
            opened.is_over = True
        elif after_s > chapter.within_s:
            opened.is_over = True
            for k, sign in enumerate(chapter.signs):
                if k not in opened.seen:
                    self.missing.append(f"{chapter.name}: {sign.path}: {sign.where}")
                    yield StoryStep(
                        opened.number, after_s, f"not seen within {duration(chapter.within_s)}: {sign.where}"
                    )

    def _find(self, sign: Sign, opened: OpenChapter, k: int) -> dict[str, Any] | None:
        try:
            return sign.find(self._ask(sign.path), opened.begun_ns, opened.before.get(k, {}))
        except ConnectorError:
            return None  # it knows nothing of that yet

    def _ask(self, path: str) -> Any:
        """Return the answer to a query, asked once in a look."""
        if path not in self.answers:
            self.answers[path] = self.client.call("GET", path)
        return self.answers[path]

    def _show(self, opened: OpenChapter, text: str) -> None:
        """Show the chapter on the page, unless a later one is there."""
        if opened.number < len(self.opened):
            return
        body = {"chapter": opened.number, "of": len(self.story.chapters), "title": opened.chapter.title,
                "text": text}  # fmt: skip
        self.client.call("POST", "/story", body)

    def close(self) -> None:
        """Take the story off the page."""
        with contextlib.suppress(ConnectorError):
            self.client.call("POST", "/story", {})

    # The forecast.

    def _foresee(self, now_ns: int) -> Iterator[StoryStep]:
        """Note the forecast that is there before anything happens."""
        for row in self._ask(FORECASTS)["forecasts"]:
            if row["horizon_s"] == HORIZON_S and row["lo"][0] is not None:
                made_ns = now_ns // round(ROW_S * NS) * round(ROW_S * NS)
                due_ns = made_ns + round(HORIZON_S * NS)
                self.band = Band(due_ns, row["lo"][0], row["mean"][0], row["hi"][0])
                now = quantity(self._power[-1][1], "W")
                yield StoryStep(
                    0, None, f"forecast: the site draws {now} now, and in 5 min {band_words(self.band)}"
                )

    def _compare(self, opened: OpenChapter, now_ns: int) -> Iterator[StoryStep]:
        assert self.band is not None
        due_ns, row_ns = self.band.due_ns, round(ROW_S * NS)
        if now_ns < due_ns:
            return
        opened.is_over = True
        drawn = [watts for at_ns, watts in self._power if due_ns - row_ns < at_ns <= due_ns]
        if not drawn:
            self.missing.append(f"{opened.chapter.name}: nothing was measured")
            return
        mean_w = sum(drawn) / len(drawn)
        within = self.band.low_w <= mean_w <= self.band.high_w
        where = "within" if within else "outside"
        words = band_words(self.band)
        text = f"{quantity(mean_w, 'W')} in the last minute, {where} what was forecast 5 min ago: {words}"
        if not within:
            self.missing.append(f"{opened.chapter.name}: {text}")
        opened.seen[0] = {"mean_w": mean_w}
        self._show(opened, text)
        yield StoryStep(opened.number, (now_ns - opened.begun_ns) / NS, text)


def band_words(band: Band) -> str:
    """Return a forecast in words."""
    return f"{quantity(band.mean_w, 'W')} ({quantity(band.low_w, 'W')} to {quantity(band.high_w, 'W')})"


def words_of(text: str, row: dict[str, Any]) -> str:
    """Return a sentence with fields of a row; `{power}` is `power_w` with its unit, `{age}` is `age_s` in
    words."""
    words: dict[str, Any] = {key.replace(".", "_"): value for key, value in row.items()}
    for key, value in list(words.items()):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        stem, unit = key[:-2], UNITS.get(key[-2:])
        if unit is not None:
            words.setdefault(stem, quantity(value, unit))
        elif key.endswith("_s"):
            words.setdefault(stem, duration(value))
    for key, value in words.items():
        if isinstance(value, list):
            words[key] = clean("; ".join(map(str, value)), MAX_TEXT)
        elif isinstance(value, str):
            words[key] = clean(value, MAX_TEXT)
    return text.format(**words)
