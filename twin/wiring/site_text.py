"""Site text: the YAML of a site file with additions, its comments and its form left as they are.

PyYAML shows where each part of a text stands. Scalars and what is in brackets end where they say; a block
ends where the next part begins, so its end is the last line of its last part.
"""

from __future__ import annotations

from typing import Any

import yaml


class SiteText:
    """The text of a site file, and what is to be put into it. Positions are those of the text as read."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._ends = "\r\n" if "\r\n" in text else "\n"
        self._puts: list[tuple[int, int, int, str]] = []  # from, to, -indent, what stands there instead
        root = yaml.compose(self._text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("expected a mapping")
        self.root = root

    def text(self) -> str:
        """The text with all additions."""
        out, at = [], 0
        for start, end, _, put in sorted(self._puts, key=lambda p: p[:3]):  # what is within goes before
            out += [self._text[at:start], put]
            at = max(at, end)
        whole = "".join(out) + self._text[at:]
        return whole.replace("\n", self._ends)

    def append(self, owner: yaml.MappingNode, key: str, items: list[Any]) -> None:
        """Put items at the end of the list `key` of a mapping, which may not have it yet."""
        if not items:
            return
        rows = [_flow(item) for item in items]
        value = entry(owner, key)
        if value is None:
            self._new_list(owner, key, rows)
        elif not isinstance(value, yaml.SequenceNode):
            self._put(*self._span(value), f" [{', '.join(rows)}]")  # `racks:` with nothing behind it
        elif value.flow_style:
            before = ", " if value.value else ""
            at = value.value[-1].end_mark.index if value.value else value.start_mark.index + 1
            self._put(at, at, before + ", ".join(rows))
        else:
            indent = " " * value.start_mark.column
            self._lines(value, [f"{indent}- {row}" for row in rows])

    def fill(self, owner: yaml.MappingNode, key: str, item: Any) -> None:
        """Give a mapping a value that it lacks, or has empty."""
        value = entry(owner, key)
        if value is not None:
            start, end = self._span(value)
            self._put(start, end, ("" if self._text[start - 1 : start] == " " else " ") + _flow(item))
            return
        first_key, first_value = owner.value[0]
        if owner.flow_style:
            at = first_value.end_mark.index
            self._put(at, at, f", {key}: {_flow(item)}")
        else:
            self._lines(first_value, [f"{' ' * first_key.start_mark.column}{key}: {_flow(item)}"])

    def _new_list(self, owner: yaml.MappingNode, key: str, rows: list[str]) -> None:
        if owner.flow_style:
            last = owner.value[-1][1]
            self._put(last.end_mark.index, last.end_mark.index, f", {key}: [{', '.join(rows)}]")
        else:
            indent = " " * owner.value[0][0].start_mark.column
            self._lines(owner, [f"{indent}{key}:", *(f"{indent}  - {row}" for row in rows)])

    def _lines(self, after: yaml.Node, lines: list[str]) -> None:
        """New lines below the last line of a part."""
        end, indent = self._text.find("\n", _end(after)), len(lines[0]) - len(lines[0].lstrip())
        if end < 0:
            self._put(len(self._text), len(self._text), "\n" + "\n".join(lines), indent)
        else:
            self._put(end + 1, end + 1, "".join(f"{line}\n" for line in lines), indent)

    def _span(self, value: yaml.Node) -> tuple[int, int]:
        return value.start_mark.index, value.end_mark.index

    def _put(self, start: int, end: int, text: str, indent: int = 0) -> None:
        self._puts.append((start, end, -indent, text))


def entry(owner: yaml.MappingNode, key: str) -> yaml.Node | None:
    """The value of a key; None where the mapping lacks it."""
    return next((value for name, value in owner.value if name.value == key), None)


def items(owner: yaml.MappingNode, key: str) -> list[yaml.MappingNode]:
    """The mappings in the list `key`."""
    value = entry(owner, key)
    if not isinstance(value, yaml.SequenceNode):
        return []
    return [item for item in value.value if isinstance(item, yaml.MappingNode)]


def _end(node: yaml.Node) -> int:
    """The end of the last part of a block, without the blank lines and comments behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return max(map(_end, last)) if isinstance(last, tuple) else _end(last)
    return int(node.end_mark.index)


def _flow(item: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(
        item, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9
    )
    return text.split("\n", 1)[0]
