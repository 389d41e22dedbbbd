"""Paths such as `faults[0].severity` into a tree whose form a strict struct describes.

Imports msgspec only.
"""

from __future__ import annotations

from typing import Any

import msgspec


def put(kind: type[msgspec.Struct], tree: dict[str, Any], path: str, value: Any) -> None:
    """Set what stands at a path of a tree of this kind; sections that the tree leaves out are made.

    Raises KeyError, IndexError, TypeError or ValueError where the kind has no such place, or a list of the
    tree is too short.
    """
    steps = _steps(path)
    inner: Any = kind
    at: Any = tree
    for step in steps[:-1]:
        inner = _inside(inner, step)
        at = at[step] if isinstance(step, int) else at.setdefault(step, {})
    _inside(inner, steps[-1])
    at[steps[-1]] = value


def _steps(path: str) -> list[str | int]:
    """`faults[0].severity` -> ["faults", 0, "severity"]."""
    out: list[str | int] = []
    for part in path.split("."):
        head, *indices = part.split("[")
        out.append(head)
        for index in indices:
            digits = index.removesuffix("]")
            if not (index.endswith("]") and digits.isascii() and digits.isdigit() and len(digits) < 6):
                raise ValueError(path)
            out.append(int(digits))
    return out


def _inside(kind: Any, step: str | int) -> Any:
    """The kind of what stands one step below this kind."""
    origin = getattr(kind, "__origin__", None)
    if origin is list and isinstance(step, int):
        return kind.__args__[0]
    if origin is dict and isinstance(step, str):
        return kind.__args__[1]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise KeyError(step)
    return {f.name: f.type for f in msgspec.structs.fields(kind)}[str(step)]
