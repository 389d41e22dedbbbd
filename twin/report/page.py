"""Page: the HTML file of a report, made of Jinja templates with everything from outside escaped.

A page is one file: it names no address, and its own policy forbids loading anything. The style covers light,
dark, narrow and print.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from twin.catalogue import clean, duration, number

TEMPLATES = Path(__file__).parent / "templates"
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"clean": clean, "duration": duration, "number": number}
_PARTS: Any = _ENVIRONMENT.get_template("parts.html").module

# Colours differ in lightness and for the common kinds of colour blindness; lines are also labelled.
STYLE = (TEMPLATES / "page.css").read_text(encoding="utf-8")
# A line and a box follow the pointer: the nearest point of every series of that plot, as text.
SCRIPT = (TEMPLATES / "page.js").read_text(encoding="utf-8")


def fill(template: str, **values: Any) -> Markup:
    """Return a template filled with values; text without markup is escaped."""
    return Markup(_ENVIRONMENT.get_template(template).render(parts=_PARTS, **values))


def page(title: str, body: str, times: Sequence[str], places: Sequence[float]) -> str:
    """The whole file; `times` and `places` [points] serve the read-outs of all plots."""
    axis = json.dumps({"at": [round(p, 5) for p in places], "say": list(times)}, separators=(",", ":"))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return fill(
        "page.html",
        title=title,
        body=Markup(body),
        style=Markup(STYLE),
        script=Markup(SCRIPT),
        axis=Markup(axis.replace("<", "\\u003c")),
        policy=Markup(f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"),
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: tuple[int, ...] = ()) -> Markup:
    """A table; columns in `numeric` are aligned right."""
    return Markup(_PARTS.table(head, rows, numeric))


def section(name: str, title: str, intro: str, *parts: str) -> Markup:
    """A titled section, if any of its parts has something to show."""
    return Markup(_PARTS.section(name, title, intro, parts)) if any(parts) else Markup("")


def figure(title: str, sentence: str, drawing: Markup, kind: str = "") -> Markup:
    """A drawing with its title and a sentence on it."""
    return Markup(_PARTS.figure(title, sentence, drawing, kind))


def pair(figures: Iterable[Markup]) -> Markup:
    """Figures side by side where there is room."""
    kept = [f for f in figures if f]
    return Markup(_PARTS.pair(kept)) if kept else Markup("")


def responsive(wide: Markup, narrow: Markup) -> Markup:
    """A drawing for wide screens and one for narrow ones."""
    return Markup(_PARTS.responsive(wide, narrow))


def cards(figures: Iterable[tuple[str, str, str]]) -> Markup:
    """Key figures as cards: label, value, meaning."""
    return Markup(_PARTS.cards(figures))


def stacked(main: str, below: str) -> Markup:
    """A line with a softer one below it."""
    return Markup(_PARTS.stacked(main, below))


def paragraph(text: str, kind: str = "") -> Markup:
    """A paragraph; `kind` is its class, such as note or soft."""
    return Markup(_PARTS.paragraph(text, kind)) if text else Markup("")


def heading(text: str) -> Markup:
    """A heading within a section."""
    return Markup(_PARTS.heading(text))


def marked(text: str, kind: str) -> Markup:
    """A span of a class, such as warning or soft."""
    return Markup(_PARTS.marked(text, kind))


def code(text: str) -> Markup:
    """A name as the program has it."""
    return Markup(_PARTS.code(text))


def details(summary: str, content: Markup) -> Markup:
    """Content that opens on a click."""
    return Markup(_PARTS.details(summary, content))


def bullets(lines: Sequence[str]) -> Markup:
    """A list."""
    return Markup(_PARTS.bullets(lines))


def terms(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Terms and their meaning."""
    return Markup(_PARTS.terms(pairs))


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Return the parts one after the other; text without markup is escaped."""
    return Markup(between).join(parts)
