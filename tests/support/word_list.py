"""Word list: the sentences that people read, as the code has them; `python -m tests.support.word_list`.

Faults, rules of health, signals and controls come from their tables; events and journal records are rendered
with placeholders; titles of other alarms and reasons of policies are read off the source.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np

from tests.tidy import tree
from twin.catalogue import TABLES, control_words, signal_words, table_noun
from twin.contracts import ACTION_WORDS, LEVELS, EventRecord, JournalRecord
from twin.diagnosis import FAULT_KINDS
from twin.health import SPECS
from twin.report import sentence
from twin.telemetry import Event

FINDING = re.compile(r"\bFinding\(")
LEAST_WORDS = 3  # of a string that is a sentence or part of one
HEAD = """# Words

Titles of alarms and sentences that a person reads, as the code has them. `make docs` makes this page;
do not edit it. `{x}` stands for a value. Keys in a policy's reason are shown as words, by the last table.
"""


def words_markdown() -> str:
    """The whole page."""
    out = [HEAD]
    out += _table("Faults", ("Fault", "Severity", "Title", "What to do"), _faults())
    out += _table("Other alarms", ("Module", "Title", "What to do"), _alarms())
    out += _table("Health", ("Part", "Level", "Sentence", "What to do"), _health())
    out += _table("Events", ("Event", "Sentence"), _events())
    out += _table("Decisions", ("Record", "Sentence"), _records())
    out += _table("Reasons of policies", ("Module", "Text, or a part of it"), _reasons())
    out += _table("Signals and controls", ("Key", "In words"), _keys())
    return "\n".join(out).rstrip() + "\n"


def _table(title: str, heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return [*lines, ""]


def _faults() -> Iterator[tuple[str, ...]]:
    for kind in FAULT_KINDS.values():
        yield f"`{kind.name}`", kind.severity, kind.title, kind.action


def _health() -> Iterator[tuple[str, ...]]:
    for part, spec in SPECS.items():
        for rule in spec.rules:
            yield part, LEVELS[rule.level], rule.words, ACTION_WORDS[rule.action]


def _keys() -> Iterator[tuple[str, ...]]:
    for table, spec in TABLES.items():
        for name in spec.by_name:
            yield f"`{table}.{name}`", f"{table_noun(table)} {signal_words(name)}"
        for control in spec.controls:
            yield f"`{control.key}`", control_words(control.key)


def template(node: ast.expr) -> str | None:
    """A string or formatted string with `{x}` for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else "{" + _noun(v) + "}" for v in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.IfExp):
        both = [t for t in map(template, (node.body, node.orelse)) if t]
        return " / ".join(both) or None
    return None


def _noun(node: ast.expr) -> str:
    """A short name of a value."""
    names = re.findall(r"[a-z][a-z_]+", ast.unparse(node))
    known = [n for n in names if n not in ("site", "name", "int", "len", "str", "self", "if", "else", "utc")]
    return (known[0] if known else names[0] if names else "x").strip("_")


def _alarms() -> Iterator[tuple[str, ...]]:
    for path in (p for p in tree.code() if p.startswith("twin/")):
        text = tree.text(path) or ""
        if not FINDING.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "Finding"
                and len(node.args) > 6
            ):
                title = template(node.args[2])
                if title:
                    yield f"`{path}`", title, template(node.args[6]) or "{action}"


def _reasons() -> Iterator[tuple[str, ...]]:
    for path in (p for p in tree.code() if p.startswith("policies/") and not p.endswith("explain.py")):
        found: dict[str, None] = {}
        module = ast.parse(tree.text(path) or "")
        silent = {id(x) for n in ast.walk(module) if isinstance(n, ast.Raise | ast.Expr) for x in ast.walk(n)
                  if isinstance(n, ast.Raise) or isinstance(n.value, ast.Constant)}  # fmt: skip
        inner = {id(x) for n in ast.walk(module) if isinstance(n, ast.JoinedStr) for x in n.values}
        for node in ast.walk(module):
            if id(node) in silent or id(node) in inner or not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            text = template(node)
            if text and len(text.split()) >= LEAST_WORDS and not text.endswith(".py"):
                found[" ".join(text.split())] = None
        yield from ((f"`{path}`", text) for text in found)


def _events() -> Iterator[tuple[str, ...]]:
    for kind in get_args(Event):
        yield f"`{kind.__name__}`", sentence(EventRecord(event=example(kind)))


def _records() -> Iterator[tuple[str, ...]]:
    for kind in sorted(JournalRecord.__subclasses__(), key=lambda k: str(k.__struct_config__.tag)):
        if kind is not EventRecord and kind.__struct_config__.tag:
            yield f"`{kind.__struct_config__.tag}`", sentence(example(kind))


def example(kind: type) -> Any:
    """A struct of this kind, whose texts are the names of their fields."""
    hints = typing.get_type_hints(kind)
    given = {f.name: _value(f.name, hints[f.name]) for f in msgspec.structs.fields(kind)}
    return kind(**given)


def _value(name: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if name == "control":
        return "gpu.power_cap_w"
    if name == "table":
        return "gpu"
    if name == "quantity":
        return "rack.power_w"
    options = [k for k in get_args(kind) if k is not type(None)] if not isinstance(kind, type) else []
    for option in (kind, *options):
        if option in (int, float, bool, str):
            return {int: 3, float: 2.5, bool: True, str: "{" + name + "}"}[option]
        if option is np.ndarray or "ndarray" in str(option):
            return np.array([0], np.int32) if name in ("index", "gone") else np.array([500.0])
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return example(option)
        if get_origin(option) is tuple:
            return (_value(name, get_args(option)[0]),)
        if get_origin(option) in (dict, list):
            return get_origin(option)()
    return None


if __name__ == "__main__":
    print(words_markdown(), end="")
