"""Reference: every key of the configuration and of the site file, as their schemas declare it.

As commented YAML beside the files that `racktwin init` makes, and as a page of the documentation:
`python -m twin.config.reference > docs/reference.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from twin.config.schema import Config
from twin.site import SiteFile, field_words

WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
FILES: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    (
        "The configuration",
        "`racktwin daemon run` reads it; file names are relative to its folder",
        Config,
    ),
    (
        "The site file",
        "it says what stands where; names may hold one range, as in r[001-139]; larger priorities count more",
        SiteFile,
    ),
)


class ReferenceKey(NamedTuple):
    """A key of a section. `parts` is the section below; `default` is YAML, empty where the key is needed."""

    name: str
    form: str
    default: str
    words: str
    parts: type[msgspec.Struct] | None
    many: str  # "list" or "mapping" of such sections, or empty


def keys_of(kind: type[msgspec.Struct]) -> Iterator[ReferenceKey]:
    """The keys of a section in the order of its schema."""
    hints, words = get_type_hints(kind), field_words(kind)
    for found in msgspec.structs.fields(kind):
        parts, many = _section(hints[found.name])
        value = found.default_factory() if callable(found.default_factory) else found.default
        default = "" if found.required else _yaml(value)
        yield ReferenceKey(
            found.encode_name, _form(hints[found.name]), default, words[found.name], parts, many
        )


def _section(kind: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """(the section that a value of this type is or holds, whether it is a list or mapping of them)."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind, ""
    many = {list: "list", dict: "mapping"}.get(get_origin(kind), "")
    for part in get_args(kind):
        found, inner = _section(part)
        if found is not None:
            return found, many or inner
    return None, ""


def _form(kind: Any) -> str:
    args = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "section"
    if get_origin(kind) is Literal:
        return " or ".join(str(word) for word in args)
    if get_origin(kind) is list:
        return f"list of {_form(args[0])}"
    if get_origin(kind) is dict:
        return f"mapping of names to {_form(args[1])}"
    if args:
        return " or ".join(_form(part) for part in args if part is not type(None))
    return WORDS.get(kind, str(getattr(kind, "__name__", kind)))


def _yaml(value: Any) -> str:
    """A default on one line, as a person writes it."""
    if isinstance(value, msgspec.Struct):
        return "{}"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return msgspec.json.encode(value).decode()


def reference_yaml() -> str:
    """Both files with every key behind a #: uncommented, they are YAML with the defaults."""
    lines: list[str] = []
    for title, what, kind in FILES:
        lines += [f"## {title}: {what}.", *(f"#{line}" for line in _lines(kind, "")), ""]
    return "\n".join(lines)


def _lines(kind: type[msgspec.Struct], indent: str) -> Iterator[str]:
    for key in keys_of(kind):
        value = key.default or ("" if key.parts else '"..."')
        needed = "" if key.default else "needed; "
        below = {"list": "- ", "mapping": "NAME: "}.get(key.many, "")
        shown = f"{indent}{key.name}:" + (f" {value}" if key.parts is None else "")
        yield f"{shown:<34} # {needed}{key.form}; {key.words}".rstrip("; ")
        if key.parts is None:
            continue
        inner = list(_lines(key.parts, indent + ("    " if below else "  ")))
        if key.many == "mapping":
            yield f"{indent}  NAME:"
        elif key.many == "list":
            inner[0] = f"{indent}  - {inner[0].lstrip()}"
        yield from inner


def reference_markdown() -> str:
    """The page of the documentation: a table for each section."""
    out = [
        "# Reference of the files",
        "",
        "Made from the schemas by `make docs`. Unknown keys are refused. `racktwin init` writes the same as",
        "commented YAML, `reference.yaml`.",
        "`credential:NAME` in place of a file is a `LoadCredential=` of the systemd unit.",
    ]
    for title, what, top in FILES:
        out += ["", f"## {title}", "", f"{what[:1].upper()}{what[1:]}."]
        for kind, paths in _places(top).items():
            if kind is not top:
                out += ["", "### " + ", ".join(f"`{path}`" for path in paths), "", _paragraph(kind)]
            out += ["", "| Key | Form | Default | Meaning |", "|---|---|---|---|"]
            for key in keys_of(kind):
                cells = (
                    f"`{key.name}`",
                    key.form,
                    f"`{key.default}`" if key.default else "needed",
                    key.words,
                )
                out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(out) + "\n"


def _places(top: type[msgspec.Struct]) -> dict[type[msgspec.Struct], list[str]]:
    """The paths of each kind of section in a file, the upper ones first."""
    places: dict[type[msgspec.Struct], list[str]] = {top: [""]}
    waiting: list[tuple[str, type[msgspec.Struct]]] = [("", top)]
    while waiting:
        path, kind = waiting.pop(0)
        for key in keys_of(kind):
            if key.parts is not None:
                below = {"list": "[]", "mapping": ".NAME"}.get(key.many, "")
                at = f"{path}.{key.name}{below}".lstrip(".")
                places.setdefault(key.parts, []).append(at)
                waiting.append((at, key.parts))
    return places


def _paragraph(kind: type[msgspec.Struct]) -> str:
    return " ".join(inspect.getdoc(kind).split()) if kind.__doc__ else ""  # type: ignore[union-attr]


if __name__ == "__main__":
    print(reference_markdown(), end="")
